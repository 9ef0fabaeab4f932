"""Checks that ranks agree, each of which ends alike on every rank: all go on, or all raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..compiler import OperandError
from ..formats.guard import may_keep
from ..identity_cache import ByIdentity

__all__ = ["check_equal", "gathered_numbers", "ranks_of"]

_compared: ByIdentity[set[tuple[int, ...]]] = ByIdentity()  # the ranks among which a tensor was found to be the same


def check_equal(tensors: Mapping[str, Tensor], mesh: DeviceMesh, remedy: str) -> None:
    """Raise OperandError on every rank of the mesh if a tensor is not the same on all of them.

    A tensor is compared when it is first met. It is not compared again, even if it is changed in place: ranks that
    find a change and ranks that find none would wait for each other.
    """
    if not tensors or not may_keep(*tensors.values()):
        return
    ranks = tuple(ranks_of(mesh))
    new = {name: tensor for name, tensor in tensors.items() if ranks not in (_compared.get(tensor) or ())}
    if not new:
        return
    prints = gathered_numbers([_fingerprint(tensor) for tensor in new.values()], mesh)
    for at, (name, tensor) in enumerate(new.items()):
        others = [rank for rank, own in zip(ranks, prints) if own[at] != prints[0][at]]
        if others:
            verb = "holds another" if len(others) == 1 else "hold others"
            raise OperandError(
                f"{name} is not the same on all ranks: rank {', '.join(map(str, others))} {verb} than rank "
                f"{ranks[0]}, and on this rank, {dist.get_rank()}, it is {list(tensor.shape)} {tensor.dtype}; {remedy}"
            )
        known = _compared.get(tensor)
        if known is None:
            _compared.keep(tensor, known := set())
        known.add(ranks)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh, row by row."""
    return mesh.mesh.flatten().tolist()


def gathered_numbers(numbers: Sequence[int], mesh: DeviceMesh) -> list[list[int]]:
    """Return the numbers of every rank of the mesh, in the order of `ranks_of`."""
    own = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)[None]
    for dim in reversed(range(mesh.ndim)):
        parts = [torch.empty_like(own) for _ in range(mesh.size(dim))]
        dist.all_gather(parts, own, group=mesh.get_group(dim))
        own = torch.cat(parts)
    return own.tolist()


def _fingerprint(tensor: Tensor) -> int:
    """Return a number that differs, as good as always, between tensors of other shapes, dtypes or numbers."""
    kind = crc32(f"{list(tensor.shape)} {tensor.dtype}".encode())
    bits = tensor.detach().reshape(-1)
    if bits.is_floating_point():
        bits = bits.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.dtype.itemsize])
    order = torch.arange(1, len(bits) + 1, device=bits.device)
    mixed = (bits.long() ^ (order * 0x9E3779B1)) * 0x2545F4914F6CDD1D  # overflow wraps around, alike everywhere
    return int((mixed ^ (mixed >> 29)).sum()) ^ kind
