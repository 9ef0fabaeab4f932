"""`insum` over DTensors: each rank evaluates the statement over its own shards, and the result says how it is split.

The rule is registered for the two torch operators, below autograd: gradients are statements over DTensors in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.placement_types import Partial, Shard

from ..compiler import (
    OperandError,
    Statement,
    UnsupportedError,
    Var,
    bind,
    parse,
    run_plain,
    run_plain_with_winners,
    whole_along,
)
from ..formats.facts import Fact
from .agreement import check_equal
from .rules import Split, cheapest_split, spelled

__all__: list[str] = []

PLACEMENTS = (Shard, Replicate, Partial)
UNREACHED, REACHED, IS_NAN = 0, 1, 2  # what the ranks know of an element of a max; the largest counts


def _run(
    cls: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> DTensor | tuple[DTensor, DTensor]:
    """Evaluate `insum_ops::run` or `run_with_winners` over DTensors; plain tensors are whole on each rank."""
    expr, names, size, tensors, fact_text, facts = args
    wants_winners = func is torch.ops.insum_ops.run_with_winners.default
    statement, operands = parse(expr), dict(zip(names.split(","), tensors))
    mesh = _mesh_of(statement, operands)
    bound = bind(statement, operands, size)
    with torch.no_grad():
        splits = _chosen(expr, operands, mesh, wants_winners)
        local = {name: _local(name, operand, splits, mesh, statement) for name, operand in operands.items()}
        fact = Fact.from_text(fact_text, facts)
        if fact is not None and any(not split.inputs[name].is_replicate() for split in splits for name in fact.names):
            fact = None  # of a whole index tensor, of which a rank has a share
        values = list(local.values())
        call = expr, names, _local_size(statement, local, bound.size) if size is not None else None, values, fact
        placements, stride = [split.output for split in splits], torch.empty(bound.size, device="meta").stride()
        shared = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
        wrap = lambda result: DTensor.from_local(
            result, mesh, placements, run_check=False, shape=torch.Size(bound.size), stride=stride
        )
        if wants_winners:
            value, won = run_plain_with_winners(*call)
            return wrap(value), wrap(won)
        if statement.is_sum or not shared:
            return wrap(run_plain(*call))
        placements = [Replicate() if placement.is_partial() else placement for placement in placements]
        return wrap(_best_of_all(statement, *run_plain_with_winners(*call), mesh, shared))


def _mesh_of(statement: Statement, operands: Mapping[str, Tensor]) -> DeviceMesh:
    """Return the mesh of the DTensors; refuse two meshes, strange placements and plain tensors that differ."""
    first, mesh, plain = "", None, {}
    for name, operand in operands.items():
        if not isinstance(operand, DTensor):
            plain[name] = operand
            continue
        if mesh is None:
            first, mesh = name, operand.device_mesh
        if operand.device_mesh != mesh:
            raise OperandError(
                f"{first} and {name} are DTensors on two meshes, of the shapes {list(mesh.shape)} and "
                f"{list(operand.device_mesh.shape)}, says rank {dist.get_rank()}; distribute both on one mesh"
            )
        for placement in operand.placements:
            if type(placement) not in PLACEMENTS:
                raise UnsupportedError(
                    f"{name} is placed as {spelled(placement)} on rank {dist.get_rank()}, which a statement can't "
                    f"keep; redistribute it to Shard, Replicate or Partial first"
                )
    assert mesh is not None
    for name, operand in plain.items():
        if operand.requires_grad:
            raise OperandError(
                f"{name} asks for a gradient but is no DTensor, unlike {first}, so that rank {dist.get_rank()} would "
                f"have only its own part of that gradient; pass "
                f"torch.distributed.tensor.distribute_tensor({name}, {first}.device_mesh)"
            )
    check_equal(plain, mesh, "pass the same one on every rank, or a DTensor that says how it is split")
    return mesh


def _chosen(expr: str, operands: Mapping[str, Tensor], mesh: DeviceMesh, wants_winners: bool) -> list[Split]:
    """Return the split along each mesh dimension."""
    nbytes = {name: operand.numel() * operand.element_size() for name, operand in operands.items()}

    def placements(dim: int) -> dict[str, Placement]:
        return {
            name: operand.placements[dim] if isinstance(operand, DTensor) else Replicate()
            for name, operand in operands.items()
        }

    # the gradient of a max goes to one winner, which ranks would have to settle first
    return [
        cheapest_split(expr, placements(dim), nbytes, mesh.size(dim), partial=not wants_winners)
        for dim in range(mesh.ndim)
    ]


def _local(name: str, operand: Tensor, splits: Sequence[Split], mesh: DeviceMesh, statement: Statement) -> Tensor:
    """Return a rank's own share of a tensor, after what has to move has moved."""
    if not isinstance(operand, DTensor):
        operand = DTensor.from_local(operand, mesh, [Replicate()] * mesh.ndim, run_check=False)
    wanted = [split.inputs[name] for split in splits]
    entering = [dim for dim, target in enumerate(wanted) if target.is_partial() and operand.placements[dim] != target]
    # what enters a partial sum does so on the first rank alone; torch would give each rank an n-th, which rounds
    reachable = [Replicate() if dim in entering else target for dim, target in enumerate(wanted)]
    if tuple(reachable) != operand.placements:
        operand = operand.redistribute(placements=reachable)
    local = operand.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if any(mesh.get_local_rank(dim) != 0 for dim in entering):
        return torch.zeros_like(local)
    return local


def _local_size(statement: Statement, local: Mapping[str, Tensor], size: Sequence[int]) -> list[int]:
    """Return the output's size on this rank: an index that is split has there the extent of its shards."""
    extents = {
        index.name: extent
        for access in statement.reads
        for index, extent in zip(access.indices, local[access.name].shape)
        if isinstance(index, Var)
    }
    return [
        extents.get(index.name, extent) if isinstance(index, Var) else extent
        for index, extent in zip(statement.output.indices, size)
    ]


def _best_of_all(statement: Statement, value: Tensor, won: Tensor, mesh: DeviceMesh, shared: Sequence[int]) -> Tensor:
    """Return the max or min over ranks. It is settled here: that an element was not reached, or is NaN, can't wait."""
    worst = float("-inf") if statement.reduction == "max" else float("inf")
    state = torch.where(won < 0, UNREACHED, torch.where(value.isnan(), IS_NAN, REACHED)).to(torch.int32)
    value = torch.where(state == REACHED, value, worst)
    for dim in shared:
        value = all_reduce(value, statement.reduction, (mesh, dim))
        state = all_reduce(state, "max", (mesh, dim))
    return torch.where(state == IS_NAN, float("nan"), torch.where(state == UNREACHED, 0.0, value))


def _whole_along(tensor: Tensor, dim: int) -> Tensor:
    """Return a DTensor that is not split along one dimension."""
    assert isinstance(tensor, DTensor)
    wanted = [Replicate() if placement.is_shard(dim) else placement for placement in tensor.placements]
    return tensor.redistribute(placements=wanted)


whole_along[DTensor] = _whole_along
for _operator in ("insum_ops::run", "insum_ops::run_with_winners"):
    torch.library.register_torch_dispatch(_operator, DTensor, _run)
