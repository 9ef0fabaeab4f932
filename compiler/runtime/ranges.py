"""Index values against the dimensions they point into, and whether they ascend; read once per tensor, remembered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats.fixed_kernel import FixedKernel, compiles_for
from ...formats.guard import KeptGuard, guard_expression, may_keep
from ...formats.torch_state import is_captured
from ..binding import Bound, Pointed, SparseFormat
from ..language import IndexRangeError
from .recording import paused

try:
    from . import range_kernel
except ImportError:  # no Triton, not on Linux: torch's operations read ranges
    range_kernel = None  # type: ignore[assignment]

__all__ = [
    "ascends",
    "check_ranges",
    "range_expression",
    "read_ranges",
    "remember_coordinates",
    "remember_range",
    "remembered_range",
    "remembered_ranges",
    "segment_lengths",
]

_SEGMENTS = "_insum_segments"
BLOCK, PROGRAMS = 1024, 1024  # positions that a program reads at once, and most programs; not measured
LEAST_WORDS = 32  # of the sums of a survey, which has three for each tensor and one more

_survey_memory: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}  # of surveys that have ended, for the next

if range_kernel is not None:
    FAR, SURVEY = range_kernel.FAR, FixedKernel(range_kernel.survey_index)


class _Range(KeptGuard):
    """The smallest and the largest value of one tensor, and whether its values ascend; None: nobody has asked."""

    __slots__ = ("ascends", "values")
    attribute = "_insum_value_range"
    values: tuple[int, int]
    ascends: bool | None


def read_ranges(indices: Sequence[Tensor], ordered: Collection[int] = ()) -> list[tuple[int, int]]:
    """Return the smallest and the largest value of each tensor, `(0, -1)` if it has none, and keep them with it.

    Of those at the places `ordered` it is kept too whether they ascend; on a GPU, of all. However many tensors there
    are, the host waits once for each device.
    """
    kept = _new_ranges(*indices)  # before they are read: another thread may write to them
    by_kind: dict[Any, list[int]] = {}  # of a CPU's tensors, and of those on each other device
    for at, index in enumerate(indices):
        if index.numel():
            by_kind.setdefault(index.is_cpu or index.device, []).append(at)
    values: list[tuple[int, int]] = [(0, -1)] * len(indices)
    orders: list[bool | None] = [None] * len(indices)
    with paused():
        for places in by_kind.values():
            read = _read([indices[at] for at in places], [at in ordered for at in places])
            for at, (low, high, is_ascending) in zip(places, read):
                values[at], orders[at] = (low, high), is_ascending
    for index, new_range, own_values, is_ascending in zip(indices, kept, values, orders):
        if new_range is not None:
            new_range.values, new_range.ascends = own_values, is_ascending
            new_range.keep(index)
    return values


def _read(indices: Sequence[Tensor], asked: Sequence[bool]) -> list[tuple[int, int, bool | None]]:
    """Return the smallest and the largest value of tensors on one device, and whether they ascend; None: not `asked`.

    The host waits once.
    """
    if indices[0].is_cpu:
        return _read_on_cpu(indices, asked)
    if range_kernel is not None and compiles_for(indices[0].device) and may_keep(*indices):
        return read_by_kernel(indices)
    return _read_together(indices, asked)


def _read_together(indices: Sequence[Tensor], asked: Sequence[bool]) -> list[tuple[int, int, bool | None]]:
    """Return what `_read` does of tensors of which those of one shape are first joined."""
    tables: dict[Any, list[int]] = {}
    for at, index in enumerate(indices):
        tables.setdefault((index.shape, index.dtype, asked[at]), []).append(at)
    kinds = [([indices[at] for at in places], is_asked) for (*_, is_asked), places in tables.items()]
    parts = [part for kind in kinds for part in _bounds(*kind)]
    numbers = iter(torch.cat(parts).tolist())
    found: dict[int, tuple[int, int, bool | None]] = {}
    for (*_, is_asked), places in tables.items():
        lowest, highest = [next(numbers) for _ in places], [next(numbers) for _ in places]
        answers = [bool(next(numbers)) for _ in places] if is_asked else [None] * len(places)
        found.update(zip(places, zip(lowest, highest, answers)))
    return [found[at] for at in range(len(indices))]


def _read_on_cpu(indices: Sequence[Tensor], asked: Sequence[bool]) -> list[tuple[int, int, bool | None]]:
    """Return what `_read` does where nothing is waited for: of each tensor by itself, in a third of the time."""
    read: list[tuple[int, int, bool | None]] = []
    for index, is_asked in zip(indices, asked):
        low, high = index.aminmax()
        read.append((int(low), int(high), bool((index[1:] >= index[:-1]).all()) if is_asked else None))
    return read


def read_by_kernel(indices: Sequence[Tensor]) -> list[tuple[int, int, bool | None]]:
    """Return what `_read` does by a short launch for each tensor; None for the order of one of several dimensions.

    The last program writes the answer into memory of the host, so that nothing is copied.
    """
    device, words = indices[0].device, max(LEAST_WORDS, 1 << (3 * len(indices)).bit_length())
    # gone while it is used: another thread makes its own, and so does the next call if this one fails half way
    kept = _survey_memory.pop((device, words), None)
    sums, answer = _new_survey_memory(device, words) if kept is None else kept
    flats = [index if index.ndim == 1 else index.reshape(-1) for index in indices]
    grids = [min(-(-len(flat) // BLOCK), PROGRAMS) for flat in flats]
    for place, (flat, grid) in enumerate(zip(flats, grids)):
        programs = sum(grids) if place == len(flats) - 1 else 0
        SURVEY((grid, 1), (sums, answer, flat), (len(flat), flat.stride(0), place, programs), (BLOCK, words))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    numbers = answer.tolist()
    _survey_memory[device, words] = sums, answer
    parts = zip(indices, *[iter(numbers)] * 3)
    return [
        (FAR - least, largest - FAR, descents == 0 if index.ndim == 1 else None)
        for index, least, largest, descents in parts
    ]


def _new_survey_memory(device: torch.device, words: int) -> tuple[Tensor, Tensor]:
    """Return zeroed memory where the programs of a survey meet, and memory of the host for its answer."""
    sums = torch.zeros(words, dtype=torch.int64, device=device)
    return sums, torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


def _bounds(indices: Sequence[Tensor], is_ordered: bool) -> list[Tensor]:
    """Return the smallest and the largest value of tensors of one shape, then, if asked, whether each ascends."""
    table = indices[0].reshape(1, -1) if len(indices) == 1 else torch.stack([*indices]).reshape(len(indices), -1)
    bounds = list(table.aminmax(dim=1))
    if is_ordered:
        bounds.append((table[:, 1:] >= table[:, :-1]).all(1))
    return bounds


def ascends(index: Tensor) -> bool:
    """Return whether an index tensor [P] ascends, read once per tensor and version.

    One that can't be read, while a CUDA graph is captured or on the meta device, counts as one that does not.
    """
    cached = _Range.kept_with(index)
    if cached is not None and cached.ascends is not None:
        return cached.ascends
    if is_captured(index.device) or index.is_meta:
        return False
    with paused():
        answer = bool((index[1:] >= index[:-1]).all())
    if cached is not None:
        cached.ascends = answer
    return answer


def remember_range(index: Tensor, low: int, high: int, ascends: bool = False) -> None:
    """Cache the range of a tensor whose values lie from `low` to `high`, as its maker knows; nothing is read.

    Nor is its order: whether it ascends is for its maker to say.
    """
    if _Range.kept_with(index) is None:
        (new_range,) = _new_ranges(index)
        if new_range is not None:
            new_range.values, new_range.ascends = (low, high), ascends
            new_range.keep(index)


def remember_coordinates(form: SparseFormat) -> None:
    """Cache the ranges of a format's coordinates, which its conversion or its checks have made sure of."""
    if form.sets is not None:
        return
    blocks, padded = form.block_size, -1 if form.has_padding else 0
    for dim, coord in enumerate(form.coords):
        if coord is not None:
            size = form.shape[dim] if blocks is None else -(-form.shape[dim] // blocks[dim])
            is_group = dim == form.group_dim
            remember_range(coord, 0 if is_group else padded, size - 1, ascends=is_group)
    if form.value_source is not None:
        remember_range(form.value_source, padded, len(form.values) - 1)


def _new_ranges(*indices: Tensor) -> list[_Range | None]:
    """Return an empty cache entry for each index tensor, wrapped by a transform too; None where nothing may be kept."""
    if not may_keep():
        return [None] * len(indices)
    return [None if index.is_inference() else _Range(index) for index in indices]


def range_expression(name: str, address: str, cached: str, layout: str, ascends: bool | None) -> str:
    """Return the text by which a launch plan asks whether an input has a range that holds, and gives it a name.

    After it, `{cached}.values` is what `remembered_ranges` would return of an input of this layout. Unless `ascends` is
    None, it is also what the function of that name would return.
    """
    is_cached = f"({cached} := getattr({name}, {_Range.attribute!r}, None)) and {cached}.owner() is {name}"
    is_in_order = "" if ascends is None else f" and {cached}.ascends is {ascends}"
    return f"{is_cached} and {guard_expression(cached, name, address, layout)}{is_in_order}"


def remembered_range(index: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value of a tensor, as `remembered_ranges` does of several."""
    return remembered_ranges(index)[0]


def remembered_ranges(*indices: Tensor, ordered: Collection[int] = ()) -> list[tuple[int, int]]:
    """Return the smallest and the largest value of each tensor, read once per tensor and version.

    Where tensors at the places `ordered` have to be read, the answer of `ascends` is read with them. A tensor without
    values has (0, -1), and one that can't be read (-1, -1): any entry may be -1 then. Nothing is read while a CUDA
    graph is captured, and there is nothing to read on the meta device.
    """
    values: list[Any] = []
    unread: dict[int, Tensor] = {}  # by their ids
    for index in indices:
        cached = _Range.kept_with(index)
        if cached is not None:
            values.append(cached.values)
        elif index.is_cpu or not (is_captured(index.device) or index.is_meta):
            values.append(None)
            unread[id(index)] = index
        else:
            values.append((-1, -1))
    if unread:
        asked = {id(indices[at]) for at in ordered} if ordered else ordered
        read = read_ranges((*unread.values(),), [at for at, each in enumerate(unread) if each in asked])
        if len(read) == len(values):
            return read
        by_id = dict(zip(unread, read))
        values = [by_id[id(index)] if known is None else known for index, known in zip(indices, values)]
    return values


def segment_lengths(pointers: Tensor) -> tuple[int, int]:
    """Return how many segments there are and the longest one's length, read once; 0 for it during a capture."""
    cached = getattr(pointers, _SEGMENTS, None)
    if cached is None:
        if is_captured(pointers.device):
            return len(pointers) - 1, 0
        with paused():
            longest = int(pointers.diff().max()) if len(pointers) > 1 else 0
        cached = (len(pointers) - 1, longest)
        if may_keep():
            setattr(pointers, _SEGMENTS, cached)
    return cached


def remember_segments(pointers: Tensor, longest: int) -> None:
    """Cache that no segment is longer than `longest`, so that nothing needs to be read."""
    if may_keep():
        setattr(pointers, _SEGMENTS, (len(pointers) - 1, longest))


def check_ranges(bound: Bound, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Raise `IndexRangeError` on a position past its dimension; return the index tensors that hold a -1."""
    padded = set()
    ranges = remembered_ranges(*[tensors[pointed.index] for pointed in bound.pointed])
    for pointed, (low, high) in zip(bound.pointed, ranges):
        if high >= pointed.extent:
            raise _out_of_range(bound, pointed, tensors[pointed.index])
        if low < 0:
            padded.add(pointed.index)
    return frozenset(padded)


def _out_of_range(bound: Bound, pointed: Pointed, index: Tensor) -> IndexRangeError:
    """Return the error that names the first position which is out of range."""
    position = (index >= pointed.extent).nonzero()[0].tolist()
    where = f"{pointed.index}[{','.join(map(str, position)) or '()'}]"
    return IndexRangeError(
        f"{where} is {int(index[tuple(position)])}, outside {pointed.into} dimension {pointed.dim}, "
        f"which has size {pointed.extent}; a negative position means no entry",
        bound.statement.text or None,
        pointed.at,
    )
