"""Checks that end alike on every rank: all go on, or all raise, so that none waits for one that has stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..compiler import IndexRangeError, InsumError, OperandError, ShapeError, UnsupportedError
from ..formats.errors import FormatError
from ..formats.guard import ChangeGuard, may_keep
from ..formats.torch_state import is_capturing
from ..identity_cache import ByIdentity

__all__ = [
    "Agreement",
    "after_agreement",
    "gathered_numbers",
    "gathered_objects",
    "may_exchange",
    "on_all_ranks",
    "ranks_of",
    "tell_all",
    "unchecked_calls",
]

Thing = TypeVar("Thing")
Problem = TypeVar("Problem", bound=Exception)
KINDS = {kind.__name__: kind for kind in (IndexRangeError, OperandError, ShapeError, UnsupportedError)}

_prints: ByIdentity[tuple[ChangeGuard, int]] = ByIdentity()  # of tensors that were compared, until they change
_told: ByIdentity[bool] = ByIdentity()  # errors that all ranks know of
_are_calls_checked: ContextVar[bool] = ContextVar("are_calls_checked", default=True)


class Agreement:
    """What must be the same on all ranks, gathered while one rank checks what it alone can know."""

    def __init__(self) -> None:
        self.claims: list[tuple[str, Tensor | str, str]] = []

    def equal(self, name: str, value: Tensor | str, remedy: str) -> None:
        """Say that a tensor, or a text, is the same on all ranks; `remedy` is for those who find that it is not."""
        self.claims.append((name, value, remedy))


@contextmanager
def on_all_ranks(mesh: DeviceMesh, is_call: bool = False) -> Iterator[Agreement]:
    """Check something on every rank of a mesh. If one of them raises, or claims differ, all raise.

    A rank that finds nothing wrong itself raises what the first other one has found, in the same words. `is_call`: this
    is one of many calls, which `unchecked_calls` leaves out. Nothing is exchanged while torch traces.
    """
    if mesh.get_coordinate() is None:
        raise OperandError(
            f"rank {dist.get_rank()} is not in the mesh, which has the ranks {', '.join(map(str, ranks_of(mesh)))}; "
            "make the mesh over it too, or let the others call alone"
        )
    agreement = Agreement()
    problem: InsumError | FormatError | None = UnsupportedError(
        f"rank {dist.get_rank()} has raised another error, which it shows itself; see its output"
    )
    try:
        yield agreement
        problem = None
    except (InsumError, FormatError) as error:
        problem = _with_rank(error)
        raise problem from error.__cause__
    finally:
        if may_exchange() and (_are_calls_checked.get() or not is_call):
            _settle(agreement, problem, mesh)


def may_exchange() -> bool:
    """Return whether ranks may talk about a call: not while it is traced, nor while a CUDA graph is captured."""
    return may_keep() and not (torch.cuda.is_available() and is_capturing())


def tell_all(error: InsumError | FormatError, mesh: DeviceMesh) -> None:
    """Let the other ranks, which check the same call by `on_all_ranks`, raise what this one has found before that."""
    is_alone = mesh.get_coordinate() is None  # a rank outside of the mesh
    if not is_alone and _told.get(error) is None and may_exchange() and _are_calls_checked.get():
        _settle(Agreement(), _with_rank(error), mesh)


def _with_rank(error: Problem) -> Problem:
    """Return an error that says which rank has found it."""
    rank = f"rank {dist.get_rank()}"
    return error if rank in str(error) else type(error)(f"on {rank}, {error}")


@contextmanager
def after_agreement() -> Iterator[None]:
    """Keep errors from `tell_all`: the others have gone on by now and no longer ask."""
    try:
        yield
    except (InsumError, FormatError) as error:
        _told.keep(error, True)
        raise


@contextmanager
def unchecked_calls() -> Iterator[None]:
    """Leave out what ranks tell each other at every call: statements over DTensors, split layers, `SplitSpMM`.

    That exchange is a small all-gather, for which the host waits. It is what lets every rank raise if one of them
    passes something else than the others. Without it such a mistake ends in a hang or in wrong numbers, so leave it out
    once a training step has run through, and on all ranks.

    Returns:
        A context, of this thread alone.

    Example:
        >>> from insum_ops.distributed import unchecked_calls
        >>> with unchecked_calls():
        ...     pass  # training steps
    """
    token = _are_calls_checked.set(False)
    try:
        yield
    finally:
        _are_calls_checked.reset(token)


def _settle(agreement: Agreement, problem: InsumError | FormatError | None, mesh: DeviceMesh) -> None:
    """Tell all ranks what this one has found; raise if another has a problem, or claims something else."""
    claims = [(name, _print(value)) for name, value, _ in agreement.claims]
    digest = crc32(repr(claims).encode())
    heads = gathered_numbers([problem is not None, digest], mesh)
    if not any(failed for failed, _ in heads) and all(other == digest for _, other in heads):
        return
    text = None if problem is None else (type(problem).__name__, str(problem))
    shown = [_shown(value) for _, value, _ in agreement.claims]
    reports = gathered_objects((text, claims, shown), mesh)
    if problem is not None:
        _told.keep(problem, True)
        return
    error = next((_as_error(*text) for text, _, _ in reports if text is not None), None)
    error = _difference(agreement, reports, ranks_of(mesh)) if error is None else error
    _told.keep(error, True)
    raise error


def _as_error(kind: str, text: str) -> InsumError:
    return KINDS.get(kind, OperandError)(text)


def _difference(agreement: Agreement, reports: Sequence[Any], ranks: Sequence[int]) -> InsumError:
    """Return what is to be said about the first claim that ranks do not share."""
    rank = dist.get_rank()
    names = [[name for name, _ in claims] for _, claims, _ in reports]
    other = next((at for at, own in enumerate(names) if own != names[0]), None)
    if other is not None:
        listed = [", ".join(names[at]) or "nothing" for at in (0, other)]
        return OperandError(
            f"rank {ranks[0]} compares {listed[0]} with the others but rank {ranks[other]} {listed[1]}, says rank "
            f"{rank}; pass the same kinds of tensors on every rank"
        )
    columns = list(zip(*[claims for _, claims, _ in reports]))
    at = next(at for at, column in enumerate(columns) if len(set(column)) > 1)
    name, value, remedy = agreement.claims[at]
    others = [number for number, claim in enumerate(columns[at]) if claim != columns[at][0]]
    if isinstance(value, Tensor):
        verb = "holds another" if len(others) == 1 else "hold others"
        return OperandError(
            f"{name} is not the same on all ranks: rank {', '.join(str(ranks[at]) for at in others)} {verb} than rank "
            f"{ranks[0]}, and on this rank, {rank}, it is {_shown(value)}; {remedy}"
        )
    first, second = (reports[number][2][at] for number in (0, others[0]))
    return OperandError(f"{name} is {first} on rank {ranks[0]} but {second} on rank {ranks[others[0]]}; {remedy}")


def _shown(value: Tensor | str) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else value


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


def gathered_objects(thing: Thing, mesh: DeviceMesh) -> list[Thing]:
    """Return what every rank of the mesh passes, in the order of `ranks_of`; it is pickled on the way."""
    own = [thing]
    for dim in reversed(range(mesh.ndim)):
        parts: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(parts, own, group=mesh.get_group(dim))
        own = [one for part in parts for one in part]
    return own


def _print(value: Tensor | str) -> int:
    """Return a number by which ranks compare a value; of a tensor it is worked out again when that has changed."""
    if not isinstance(value, Tensor):
        return crc32(value.encode())
    kept = _prints.get(value)
    if kept is not None and kept[0].holds_for(value):
        return kept[1]
    guard = ChangeGuard.of(value)  # before it is read: another thread may write to it
    number = _fingerprint(value)
    if guard is not None:
        _prints.keep(value, (guard, number))
    return number


def _fingerprint(tensor: Tensor) -> int:
    """Return a number that differs, as good as always, between tensors of other shapes, dtypes or numbers."""
    kind = crc32(f"{list(tensor.shape)} {tensor.dtype}".encode())
    bits = tensor.detach().reshape(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits.resolve_conj()).reshape(-1)
    if bits.is_floating_point():
        of_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = bits.contiguous().view(of_size[bits.dtype.itemsize])
    order = torch.arange(1, len(bits) + 1, device=bits.device)
    mixed = (bits.long() ^ (order * 0x9E3779B1)) * 0x2545F4914F6CDD1D  # overflow wraps around, alike everywhere
    return int((mixed ^ (mixed >> 29)).sum()) ^ kind
