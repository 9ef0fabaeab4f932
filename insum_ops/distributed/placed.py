"""The tensors of one call, DTensors among them: their mesh, what is refused of them, and each rank's own share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.placement_types import Partial, Shard

from ..compiler import InsumError, OperandError, UnsupportedError
from ..formats.errors import FormatError
from ..formats.torch_state import is_transformed, transform_kinds
from ..functional import on_refusal
from .agreement import Agreement, tell_all
from .rules import Split, cheapest, spelled

__all__ = [
    "arrived",
    "as_placed",
    "check_placed",
    "check_whole_numbers",
    "compare",
    "full",
    "local_part",
    "mesh_of",
    "own_share",
    "refuse_transforms",
    "splits_for",
]

PLACEMENTS = (Shard, Replicate, Partial)
WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SAME_TENSOR = "pass the same one on every rank, or a DTensor that says how it is split"
SAME_DTENSOR = "distribute the same tensor with the same placements on every rank"


def mesh_of(operands: Mapping[str, Any]) -> tuple[str, DeviceMesh]:
    """Return the first DTensor's name and mesh."""
    return next((name, operand.device_mesh) for name, operand in operands.items() if isinstance(operand, DTensor))


def check_placed(first: str, mesh: DeviceMesh, operands: Mapping[str, Tensor]) -> None:
    """Refuse two meshes, strange placements and plain tensors that would get a part of a gradient."""
    for name, operand in operands.items():
        if not isinstance(operand, DTensor):
            continue
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
    for name, operand in operands.items():
        if not isinstance(operand, DTensor) and operand.requires_grad:
            raise OperandError(
                f"{name} asks for a gradient but is no DTensor, unlike {first}, so that rank {dist.get_rank()} would "
                f"have only its own part of that gradient; pass "
                f"torch.distributed.tensor.distribute_tensor({name}, {first}.device_mesh)"
            )


def compare(ranks: Agreement, operands: Mapping[str, Tensor]) -> None:
    """Say that each operand is the same on all ranks: a DTensor in its kind and placements, another in its numbers."""
    for name, operand in operands.items():
        if isinstance(operand, DTensor):
            placed = ", ".join([spelled(placement) for placement in operand.placements])
            ranks.equal(name, f"{list(operand.shape)} {operand.dtype} in {placed}", SAME_DTENSOR)
        else:
            ranks.equal(name, operand, SAME_TENSOR)


def splits_for(splits: Sequence[Split], operands: Mapping[str, Tensor], mesh: DeviceMesh) -> list[Split]:
    """Return the one of `splits` along each mesh dimension that moves the fewest bytes of the operands."""
    nbytes = {name: operand.numel() * operand.element_size() for name, operand in operands.items()}

    def placements(dim: int) -> dict[str, Placement]:
        return {
            name: operand.placements[dim] if isinstance(operand, DTensor) else Replicate()
            for name, operand in operands.items()
        }

    return [cheapest(splits, placements(dim), nbytes, mesh.size(dim)) for dim in range(mesh.ndim)]


def refuse_transforms(name: str) -> None:
    """Refuse torch.func and forward mode: they follow none of torch's exchanges between ranks."""
    if is_transformed():
        raise UnsupportedError(
            f"{name} runs under {transform_kinds()} of torch.func on rank {dist.get_rank()}, which follows no exchange "
            "between ranks; call it outside of transforms, and differentiate it by torch.autograd"
        )


def check_whole_numbers(name: str, tensor: object) -> None:
    """Refuse what does not number ranks or blocks."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in WHOLE_NUMBERS:
        kind = tensor.dtype if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
        raise OperandError(f"{name} is of {kind} on rank {dist.get_rank()}; pass a tensor of whole numbers")


def local_part(operand: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, once it is there."""
    return arrived(operand.to_local() if isinstance(operand, DTensor) else operand)


def own_share(name: str, operand: Tensor, splits: Sequence[Split], mesh: DeviceMesh) -> Tensor:
    """Return a rank's own share of a tensor, after what has to move has moved."""
    operand = operand.detach()  # below autograd: torch 2.11 would detach in place what it moves, and can't
    if not isinstance(operand, DTensor):
        operand = DTensor.from_local(operand, mesh, [Replicate()] * mesh.ndim, run_check=False)
    wanted = [split.inputs[name] for split in splits]
    entering = [dim for dim, target in enumerate(wanted) if target.is_partial() and operand.placements[dim] != target]
    # what enters a partial sum does so on the first rank alone; torch would give each rank an n-th, which rounds
    reachable = [Replicate() if dim in entering else target for dim, target in enumerate(wanted)]
    if tuple(reachable) != operand.placements:
        operand = operand.redistribute(placements=reachable)
    local = local_part(operand)
    if any(mesh.get_local_rank(dim) != 0 for dim in entering):
        return torch.zeros_like(local)
    return local


def as_placed(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return the DTensor, contiguous and of this shape, of which each rank has `local`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def arrived(tensor: Tensor) -> Tensor:
    """Return what an exchange brings, once it is there."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def full(part: Any) -> Any:
    """Return all of a DTensor; anything else as it is."""
    return part.full_tensor() if isinstance(part, DTensor) else part


def _tell(error: InsumError | FormatError, operands: Mapping[str, Any]) -> None:
    """Let the other ranks know of a call that was refused before it got here."""
    if any(isinstance(operand, DTensor) for operand in operands.values()):
        tell_all(error, mesh_of(operands)[1])


on_refusal.append(_tell)
