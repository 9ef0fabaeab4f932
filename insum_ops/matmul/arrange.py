"""Layout of a matrix's listed entries as a format, and the gather that brings their values there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compiler import outside_modes, outside_transforms, unbatch_gradients
from ..formats import COO, BlockCOO, GroupCOO
from ..formats.convert import (
    Layout,
    block_grid,
    entry_keys,
    is_inside,
    lay_out_entries,
    lay_out_groups,
    lay_out_listed,
)
from ..formats.guard import may_keep
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import is_captured, is_grad_enabled, is_transformed
from .listed import YOUNG, Listed, list_entries, may_list

__all__ = ["Arranged", "Merged", "arrange", "arrange_edges", "arrange_listed"]

Sizes = tuple[int, ...]
Merged = tuple[Tensor, Tensor]  # the distinct coordinates [2, D], sorted, and which of them each entry has [E]


@dataclass(eq=False)
class Arranged:
    """A[rows[e], columns[e]] += values[e], in the order that a source lists them, laid out as a format.

    Every listed entry has a slot of its own, duplicates too, so values move by a gather alone.
    """

    pattern: SparseFormat
    source: Tensor | None  # [P*Q]  which entry each slot holds, any for padding; None: slot e holds entry e
    memory: dict[Any, Any] = field(init=False)  # the pattern's launch plans: nobody else can change its coordinates
    is_listed: bool = field(init=False)  # entries are in the order of their source, not yet sorted into a format
    uses: int = 1  # products with a pattern whose entries are as listed
    is_in_graph: bool = False  # a CUDA graph goes on reading these entries as they are listed
    listed_before: object = None  # what held them as listed, kept for such a graph

    def __post_init__(self) -> None:
        self.memory, self.is_listed = self.pattern.memory, type(self.pattern) is Listed

    def stays_listed(self) -> bool:
        """Count one more product with a pattern as listed; return whether it is one too, and not of a format.

        Nothing can be converted while a CUDA graph is captured.
        """
        if is_captured(self.pattern.device):
            self.is_in_graph = True
        else:
            self.uses += 1
        return self.uses <= YOUNG and may_list(self.pattern.device)

    def fill(self, values: Tensor) -> SparseFormat:
        """Return the format over `values` [E, *block_size], in the order of the source; differentiable."""
        if self.is_listed:
            return self.pattern.with_values(values)
        if values.requires_grad and is_grad_enabled() and not is_transformed():
            return self.pattern.with_values(_Slots.apply(values, self))
        return self.pattern.with_values(self.write(values))

    def write(self, values: Tensor) -> Tensor:
        """Return values [E, *block_size] over the format's slots; padding holds any value, which no statement reads."""
        if self.source is None:
            return values if values.shape == self.pattern.values.shape else values.view(self.pattern.values.shape)
        return values.index_select(0, self.source).view(self.pattern.values.shape)

    def read(self, values: Tensor) -> Tensor:
        """Return values over the format's slots in the order of the source, [E, *block_size]; differentiable."""
        axes, slots = len(self.pattern.value_axes), self.slots
        entries = values if axes == 1 else values.flatten(0, axes - 1)
        return entries if slots is None else entries.index_select(0, slots)

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """All tensors that it holds."""
        return *self.pattern.coords, self.pattern.values, self.source

    @property
    def slots(self) -> Tensor | None:
        """The slot of each entry among the flattened slots [E], or None if entry e lies in slot e."""
        if self.source is None:
            return None
        slots: Tensor | None = vars(self).get("_slots")  # no cached property: a traced call must not keep it
        if slots is None:
            with outside_transforms(), outside_modes(*self.parts):
                source, count = self.source, self.pattern.pattern_cache.num_entries
                if self.pattern.has_padding:  # whose slots go to one that is cut off: nobody waits for their number
                    source = torch.where(self.pattern.AK.flatten() >= 0, source, count)
                every = torch.arange(len(source), device=source.device)
                slots = source.new_empty(count + 1).scatter_(0, source, every)[:count]
            if may_keep(slots):
                vars(self)["_slots"] = slots
        return slots

    @property
    def coords(self) -> Tensor:
        """The row and column of each entry, in the order of the source: [2, E]."""
        coords, slots = self.pattern._entry_coords(), self.slots
        return coords if slots is None else coords.index_select(1, slots)


class _Slots(torch.autograd.Function):
    """`write`, with `read` for its gradient: a gather, where torch's own would scatter and add."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, arranged: Arranged) -> Tensor:
        ctx.arranged = arranged
        return arranged.write(values)

    @staticmethod
    @unbatch_gradients
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return ctx.arranged.read(upstream), None


def arrange(coords: Tensor, values: Tensor, shape: Sizes, order: Tensor | None) -> Arranged:
    """Lay entries at `coords` [2, E] out: as blocks if `values` are, else as a COO or a GroupCOO; `fill` adds values.

    `order` sorts the entries by rows; None if rows ascend already, as those of a compressed matrix do. The coordinates
    must lie in the shape, which is not checked. A CPU sums entries by row offsets: groups would only be padding to it.
    """
    blocks = tuple(values.shape[1:])
    grid = block_grid(shape, blocks or None)
    in_order = coords if order is None else coords.index_select(1, order)
    nothing = values.new_zeros(())  # the values of a pattern: expanded, they take no memory
    if blocks or coords.is_cpu:
        parts = lay_out_entries(in_order, grid), nothing.expand(values.shape), len(values), shape
        return Arranged((BlockCOO if blocks else COO)._laid_out(*parts, blocks=blocks or None), order)
    layout = lay_out_groups(in_order, grid, 0, None)
    assert layout.gather is not None
    if order is not None:
        layout = replace(layout, gather=layout.gather.after(order))
    return _in_groups(layout, nothing, len(values), shape, is_in_order=order is None)


def arrange_listed(
    coords: Tensor | tuple[Tensor, Tensor],
    values: Tensor,
    shape: Sizes,
    refuse: Callable[[], NoReturn],
    is_sorted: bool = False,
    adds: bool = False,
) -> tuple[Arranged, Merged | None]:
    """Lay entries at `coords` [2, E] out that are listed in any order, or by rows if it `is_sorted`.

    `coords` may be the rows and the columns, [E] each. `refuse` raises for an entry outside the shape. If it `adds`,
    entries that are listed twice are one: then the result has the distinct coordinates, and which of them each entry
    has.
    """
    grid = block_grid(shape, tuple(values.shape[1:]) or None)
    listed = None
    if values.ndim == 1:
        listed = lay_out_listed(coords[0], coords[1], (shape[0], shape[1]), refuse, is_sorted, adds)
    if listed is not None:
        num_entries = len(values) if listed.merged is None else listed.merged[0].shape[1]
        nothing = values.new_zeros(())
        return _in_groups(listed.layout, nothing, num_entries, shape, listed.is_in_order), listed.merged
    coords = torch.stack(coords) if isinstance(coords, tuple) else coords
    if is_sorted and is_inside(coords, grid):
        return arrange(coords, values, shape, None), None
    keys, are_inside, is_ascending = entry_keys(coords, grid, 0)
    if not are_inside:
        refuse()
    if is_ascending:
        return arrange(coords, values, shape, None), None
    keys, order = keys.sort(stable=True)
    merged = _merge_map(coords, keys, order) if adds else None
    if merged is None:
        return arrange(coords, values, shape, order), None
    return arrange(merged[0], values.new_zeros(()).expand(merged[0].shape[1]), shape, None), merged


def arrange_edges(
    edge_index: Tensor, sizes: tuple[int, int], refuse: Callable[[], NoReturn], is_young: bool = False
) -> Arranged:
    """Lay the edges of a graph out as a matrix [targets, sources]; `refuse` raises if one names an absent node.

    If the graph `is_young` its edges stay as they are listed.
    """
    nothing = torch.empty((), device=edge_index.device).expand(edge_index.shape[1])
    if is_young:
        columns, rows = edge_index.clone(memory_format=torch.contiguous_format).unbind(0)
        return Arranged(list_entries(rows, columns, nothing, (sizes[1], sizes[0]), refuse), None)
    return arrange_listed((edge_index[1], edge_index[0]), nothing, (sizes[1], sizes[0]), refuse)[0]


def _in_groups(layout: Layout, nothing: Tensor, num_entries: int, shape: Sizes, is_in_order: bool) -> Arranged:
    """Return entries laid out in groups, whose values are nothing yet.

    If they are listed in order and every group is full, each is in the slot of its number.
    """
    assert layout.gather is not None
    source = layout.gather.source
    pattern = GroupCOO._laid_out(layout, nothing.expand(source.shape), num_entries, shape)
    return Arranged(pattern, None if is_in_order and layout.gather.is_padding is None else source.flatten())


def _merge_map(coords: Tensor, keys: Tensor, order: Tensor) -> Merged | None:
    """Return the distinct coordinates [2, D], sorted, and which of them each entry has [E]; None if all differ.

    `keys` are what orders entries, in the order that sorts them.
    """
    is_new = keys[1:] != keys[:-1]
    if bool(is_new.all()):
        return None
    is_first = torch.cat([is_new.new_ones(1), is_new])
    into = torch.empty_like(order).scatter_(0, order, is_first.cumsum(0) - 1)
    return coords[:, order[is_first]], into
