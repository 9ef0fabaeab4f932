"""`insum` over DTensors: each rank evaluates the statement over its own shards, and the result says how it is split.

The rule is registered for the two torch operators, below autograd: gradients are statements over DTensors in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ..compiler import (
    Bound,
    IndexRangeError,
    Statement,
    Var,
    bind,
    check_ranges,
    parse,
    run_plain,
    run_plain_with_winners,
    separate_gradients,
    whole_along,
)
from ..formats.facts import Fact
from .agreement import after_agreement, may_exchange, on_all_ranks
from .placed import as_placed, check_placed, compare, local_part, mesh_of, own_share, splits_for
from .rules import splits_of

__all__: list[str] = []

UNREACHED, REACHED, IS_NAN = 0, 1, 2  # what the ranks know of an element of a max; the largest counts


def _run(
    cls: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> DTensor | tuple[DTensor, DTensor]:
    """Evaluate `insum_ops::run` or `run_with_winners` over DTensors; plain tensors are whole on each rank."""
    expr, names, size, tensors, fact_text, facts = args
    wants_winners = func is torch.ops.insum_ops.run_with_winners.default
    statement, operands = parse(expr), dict(zip(names.split(","), tensors))
    first, mesh = mesh_of(operands)
    with on_all_ranks(mesh, is_call=True) as ranks:
        check_placed(first, mesh, operands)
        bound = bind(statement, operands, size)
        _check_positions(bound, operands)
        ranks.equal("the statement", f"{expr!r} with size={size}", "call the same one on every rank")
        compare(ranks, operands)
    with torch.no_grad(), after_agreement():
        # the gradient of a max goes to one winner, which ranks would have to settle first
        possible = [split for split in splits_of(expr) if not (wants_winners and split.output.is_partial())]
        splits = splits_for(possible, operands, mesh)
        local = {name: own_share(name, operand, splits, mesh) for name, operand in operands.items()}
        fact = Fact.from_text(fact_text, facts)
        if fact is not None and any(not split.inputs[name].is_replicate() for split in splits for name in fact.names):
            fact = None  # of a whole index tensor, of which a rank has a share
        values = list(local.values())
        call = expr, names, _local_size(statement, local, bound.size) if size is not None else None, values, fact
        placements: list[Placement] = [split.output for split in splits]
        shared = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
        if wants_winners:
            value, won = run_plain_with_winners(*call)
            return as_placed(value, mesh, placements, bound.size), as_placed(won, mesh, placements, bound.size)
        if statement.is_sum or not shared:
            return as_placed(run_plain(*call), mesh, placements, bound.size)
        placements = [Replicate() if placement.is_partial() else placement for placement in placements]
        best = _best_of_all(statement, *run_plain_with_winners(*call), mesh, shared)
        return as_placed(best, mesh, placements, bound.size)


def _check_positions(bound: Bound, operands: Mapping[str, Tensor]) -> None:
    """Refuse a position that is out of range, before anything moves: only the rank that holds it would find it."""
    if not may_exchange():
        return
    local = {name: local_part(operand) for name, operand in operands.items()}
    for name, operand in operands.items():
        if isinstance(operand, DTensor) and any(placement.is_partial() for placement in operand.placements):
            local[name] = local[name].new_empty(0)  # parts of positions; their sum is looked at when it is there
    try:
        check_ranges(bound, local)
    except IndexRangeError as error:
        raise IndexRangeError(f"on rank {dist.get_rank()}, {error}") from None


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


def _run_gradients(
    cls: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """Evaluate `insum_ops::run_gradients` over DTensors: each gradient is a statement, split by its own rule."""
    return separate_gradients(*args)


whole_along[DTensor] = _whole_along
torch.library.register_torch_dispatch("insum_ops::run_gradients", DTensor, _run_gradients)
for _operator in ("insum_ops::run", "insum_ops::run_with_winners"):
    torch.library.register_torch_dispatch(_operator, DTensor, _run)
