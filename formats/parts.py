"""A format as text, sizes and tensors, which is how a torch operator takes it, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index, is_
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..identity_cache import ByIdentity
from ..lru_cache import LRUCache
from .guard import ChangeGuard, may_keep
from .pattern_cache import PatternCache

__all__ = [
    "STACKED",
    "FormatParts",
    "Kind",
    "from_parts",
    "in_own_groups",
    "keep",
    "keep_pattern",
    "memory_of",
    "parts_of",
    "register_format",
    "register_kind",
    "regrouped",
    "regrouped_before",
    "traced_from_parts",
]

Sizes = tuple[int, ...]

LOST = 16  # patterns that are kept for coordinates whose format is gone, as those of a compiled function
STACKED = "*"  # in the place of the stored dimensions: one tensor [ndim, P] holds the coordinates of all
GROUPS = "/"  # before the size of groups that a value is computed in, behind the rest of the text; none: the format's


@dataclass(frozen=True)
class Kind:
    """How an operator makes a format of one kind from its parts."""

    build: Callable[[FormatParts], Any]  # its pattern, over any values
    fill: Callable[[FormatParts, Any, Tensor], Any]  # that pattern over the parts' values
    trace: Callable[[FormatParts], Any]  # of a tracer's tensors, which can't be checked
    listed: Callable[[FormatParts, Any, Tensor], Tensor]  # a gradient of its values as one of the parts' values


@dataclass(frozen=True)
class FormatParts:
    """A format taken apart, which stands for it where a tracer follows the call.

    >>> import torch
    >>> from insum_ops.formats import BlockCOO
    >>> parts_of(BlockCOO.from_dense(torch.ones(4, 4), block_size=(2, 2))).text
    'BlockCOO;0;2,2;0,1'
    """

    text: str  # kind, group dimension, block size and stored dimensions; then maybe a size of groups
    shape: Sizes
    values: Tensor
    coords: list[Tensor]

    coord_axes: ClassVar[tuple[()]] = ()  # by which a statement knows formats
    group_dim: ClassVar[int] = 0  # no tracer asks how to group it

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def with_values(self, values: Tensor) -> FormatParts:
        # not `dataclasses.replace`, of which a tracer guards each field in every compiled call
        return FormatParts(self.text, self.shape, values, self.coords)

    def in_groups_of(self, size: int) -> FormatParts:
        """Return the parts of the format that is to be put in groups of a size where a value of it is computed."""
        return FormatParts(f"{in_own_groups(self.text)}{GROUPS}{size}", self.shape, self.values, self.coords)

    def parsed(self) -> tuple[str, tuple[Tensor | None, ...], int, Sizes | None]:
        """Return the kind, all coordinates, the group dimension and the block size."""
        kind, group_dim, blocks, stored = in_own_groups(self.text).split(";")
        if stored == STACKED:
            coords: tuple[Tensor | None, ...] = self.coords[0].unbind(0)
        else:
            by_dim = dict(zip(stored.split(","), self.coords))
            coords = tuple([by_dim.get(str(dim)) for dim in range(len(self.shape))])
        return kind, coords, int(group_dim), tuple(map(int, blocks.split(","))) if blocks else None


_kinds: dict[str, Kind] = {}
# What is cached about coordinates, as long as a format over them lives: an operator gets the coordinates alone.
_caches: WeakValueDictionary[tuple[Any, ...], PatternCache] = WeakValueDictionary()
_lost: LRUCache[PatternCache] = LRUCache(LOST)
_stacked: ByIdentity[dict[tuple[Any, ...], Any]] = ByIdentity()


class _Regrouped(NamedTuple):
    """A format in groups of another size, the pattern that it was made of, and whether the values have changed."""

    pattern: PatternCache
    guard: ChangeGuard
    form: Any


# by the values and the size
_regrouped: ByIdentity[dict[str, _Regrouped]] = ByIdentity()


def in_own_groups(text: str) -> str:
    """Return the text of a format's parts without the size of groups that it is to be put in."""
    return text.partition(GROUPS)[0]


def register_kind(name: str, kind: Kind) -> None:
    """Let operators take formats of this name."""
    _kinds[name] = kind


def register_format(kind: type[Any]) -> None:
    """Let operators take the formats of a class."""
    build = lambda parts: _stacked_format(kind, parts) if parts.text.endswith(STACKED) else _format(kind, parts)
    trace = lambda parts: _traced(kind, parts)
    register_kind(kind.__name__, Kind(build, _filled, trace, lambda parts, form, grad: grad))


def _filled(parts: FormatParts, form: Any, values: Tensor) -> Any:
    return form if form.values is values else form.with_values(values)


def parts_of(form: Any) -> FormatParts | None:
    """Return the parts of a format; None for a view of one."""
    if isinstance(form, FormatParts):
        return form
    name = type(form).__name__
    if name not in _kinds:
        return None
    blocks = "" if form.block_size is None else ",".join([str(index(length)) for length in form.block_size])
    stored = ",".join([str(dim) for dim, coord in enumerate(form.coords) if coord is not None])
    coords = [coord for coord in form.coords if coord is not None]
    return FormatParts(f"{name};{index(form.group_dim)};{blocks};{stored}", tuple(form.shape), form.values, coords)


def from_parts(parts: FormatParts) -> tuple[Any, Kind]:
    """Return the format of these parts, be it without their values, and its kind, which fills it.

    Coordinates that no living format has are checked, once.

    Raises:
        FormatError: they make no format of this kind.
    """
    kind = _kinds[parts.text.split(";")[0]]
    return kind.build(parts), kind


def memory_of(text: str, shape: Sizes, dtype: torch.dtype, coords: list[Tensor]) -> dict[Any, Any] | None:
    """Return the launch plans of a format by all of its parts but the values, without making the format.

    None unless a format of these parts was made before and its coordinates have not changed since.
    """
    if text.endswith(STACKED):
        owner = coords[0]
        guard, form = (_stacked.get(owner) or {}).get((text, shape, dtype), (None, None))
        # not `form.memory`, which asks whether coordinates have changed that nobody else has
        return form._pattern_cache.memory if guard is not None and guard.holds_for(owner) else None
    cache = _cache((in_own_groups(text), shape, *map(id, coords)), coords)
    return None if cache is None or not cache.guard.hold() else cache.memory


def regrouped(parts: FormatParts, form: Any) -> Any:
    """Return the format of these parts in groups of the size that its text asks for, kept as long as its values."""
    size = parts.text.partition(GROUPS)[2]
    before = regrouped_before(parts.text, parts.shape, parts.values, parts.coords)
    if before is not None:
        return before
    guard, pattern = ChangeGuard.of(parts.values), form.pattern_cache  # before they are read
    own = form.regroup(form.group_dim, int(size))
    if guard is not None and own is not form and may_keep(own.values):
        kept = _regrouped.get(parts.values) or {}
        _regrouped.keep(parts.values, {**kept, size: _Regrouped(pattern, guard, own)})
    return own


def regrouped_before(text: str, shape: Sequence[int], values: Tensor, coords: list[Tensor]) -> Any:
    """Return what `regrouped` does, if that was made before and values and coordinates are unchanged; else None."""
    own, _, size = text.partition(GROUPS)
    kept = (_regrouped.get(values) or {}).get(size)
    if kept is None or not kept.guard.holds_for(values):
        return None
    pattern = _cache((own, tuple(shape), *map(id, coords)), coords)
    return kept.form if pattern is kept.pattern and pattern.guard.hold() else None


def traced_from_parts(parts: FormatParts) -> Any:
    """Return the format of a tracer's tensors, which can't be checked: where a kind can be padded, this one is."""
    return _kinds[parts.text.split(";")[0]].trace(parts)


def keep(form: Any) -> None:
    """Let `from_parts` find what is cached about the pattern of a format, as long as it lives."""
    parts = parts_of(form)
    if parts is not None:
        _caches[_key(parts)] = form._pattern_cache


def _key(parts: FormatParts) -> tuple[Any, ...]:
    return (in_own_groups(parts.text), parts.shape, *map(id, parts.coords))


def _cache(key: tuple[Any, ...], coords: list[Tensor]) -> PatternCache | None:
    """Return what is cached about coordinates by their addresses, which others may have by now: then None."""
    cache = _caches.get(key) or _lost.get(key)
    if cache is None:
        return None
    tensors = cache.guard.tensors
    return cache.latest() if len(tensors) == len(coords) and all(map(is_, tensors, coords)) else None


def _format(kind: Any, parts: FormatParts) -> Any:
    """Return a format with what is cached about its coordinates."""
    _, coords, group_dim, block_size = parts.parsed()
    key = _key(parts)
    cache = _cache(key, parts.coords)
    if cache is not None:
        return kind._of_parts(coords, parts.values, parts.shape, group_dim, block_size, cache)
    form = kind(coords, parts.values, parts.shape, group_dim, block_size)
    _lost[key] = form._pattern_cache
    return form


def _stacked_format(kind: Any, parts: FormatParts) -> Any:
    """Return a format over the rows of one tensor of coordinates, kept as long as that tensor and no other values."""
    owner, key = parts.coords[0], (parts.text, parts.shape, parts.values.dtype)
    kept = _stacked.get(owner) or {}
    guard, form = kept.get(key, (None, None))
    if guard is None or not guard.holds_for(owner):
        guard = ChangeGuard.of(owner)  # before it is read: another thread may write to it
        # a copy, and of values the shape alone: what is kept may keep neither alive
        _, coords, group_dim, block_size = replace(parts, coords=[owner.clone()]).parsed()
        values = torch.zeros((), dtype=parts.dtype, device=parts.device).expand(parts.values.shape)
        form = kind(coords, values, parts.shape, group_dim, block_size)
        keep_pattern(parts, guard, form)
    return form.with_values(parts.values)


def keep_pattern(parts: FormatParts, guard: ChangeGuard | None, form: Any) -> None:
    """Let `memory_of` find a pattern over the rows of one tensor, as long as that tensor, which the guard is of."""
    owner, key = parts.coords[0], (parts.text, tuple(parts.shape), parts.dtype)
    kept = _stacked.get(owner) or {}
    if guard is not None and kept.get(key, (None, None))[1] is not form:
        _stacked.keep(owner, {**kept, key: (guard, form)})


def _traced(kind: Any, parts: FormatParts) -> Any:
    _, coords, group_dim, block_size = parts.parsed()
    return kind._traced(coords, parts.values, parts.shape, group_dim, block_size)
