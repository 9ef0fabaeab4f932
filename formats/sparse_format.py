"""What all formats are: coordinates and values over the axes p and q, grouped along any dimension."""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from operator import is_
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .check import check_coords, check_dtype, check_group_size, check_parts, check_values, normal_dim, pattern_part
from .convert import Entries, Gather, Layout, block_grid, coord_dtype, key_dtype, scatter_dense, sort_order
from .errors import FormatError
from .facts import RowFacts
from .from_tensors import FromTensors
from .guard import ChangeGuards, is_real, may_keep
from .moves import Moves, Target, destination, pinned
from .not_tensors import NotTensor
from .parts import keep
from .pattern_cache import PatternCache, Regrouped
from .regrouped_view import RegroupedView, facts_of
from .row_order import RowOrderedView, order_rows
from .to_torch import torch_sparse
from .torch_state import is_compiling, undifferentiated, untransformed

__all__ = ["SparseFormat"]

Sizes = tuple[int, ...]
Format = TypeVar("Format", bound="SparseFormat")


@dataclass(frozen=True, eq=False, repr=False)
class SparseFormat(Moves, NotTensor, FromTensors):
    """A[coords] += values over the axes p (and q), with one tensor of coordinates per dimension.

    Where a coordinate is -1 there is no entry, whatever the value there (conversion puts a 0). A blocked
    format's coordinates count blocks, its values end in the axes of a block. Values take part in autograd.

    What is worked out of the coordinates is kept until they change: in place, or by `.data = ...`. They are checked
    again then, and must still make a format of this kind.
    """

    coords: tuple[Tensor | None, ...]
    values: Tensor
    shape: Sizes
    group_dim: int = 0
    block_size: Sizes | None = None
    _pattern_cache: PatternCache = field(init=False)

    value_axes: ClassVar[tuple[str, ...]]
    stores_rows: ClassVar[bool] = True  # False: p is the row itself

    def __post_init__(self) -> None:
        shape, group_dim, block_size = self._check_options(self.shape, self.group_dim, None, self.block_size)
        coords = tuple(
            [
                pattern_part(f"coords[{dim}]", coord) if isinstance(coord, Tensor) else coord
                for dim, coord in enumerate(self.coords)
            ]
        )
        if len(coords) != len(shape):
            raise FormatError(f"coords holds {len(coords)} but shape is {list(shape)}; give one for each dimension")
        vars(self).update(coords=coords, shape=shape, group_dim=group_dim, block_size=block_size)
        vars(self).update(_pattern_cache=self._checked())
        if may_keep(*coords):
            keep(self)

    def _checked(self) -> PatternCache:
        """Return a new pattern cache; raise FormatError if coordinates, values and shape do not fit each other."""
        grid = block_grid(self.shape, self.block_size)
        rows = None if self.stores_rows else grid[self.group_dim]
        parts = type(self).__name__, self.coords, self.values, rows, self.group_dim
        check_parts(*parts, self.block_size or (), self.value_axes)
        guard = ChangeGuards(self.coords)  # before they are read: another thread may write to them
        num_padding = check_coords(self.coords, grid, self.group_dim, can_pad=len(self.value_axes) > 1)
        num_slots = prod(self._extents)
        return PatternCache(num_slots - num_padding, num_slots, guard)

    def __deepcopy__(self: Format, memo: dict[int, Any]) -> Format:
        """Return a copy that shares no tensor, with copies of all that is cached about the pattern."""
        form = object.__new__(type(self))
        memo[id(self)] = form
        vars(form).update(deepcopy(vars(self), memo))
        if may_keep(*form.coords):
            keep(form)
        return form

    def __getstate__(self) -> dict[str, Any]:
        """Return tensors and numbers alone, which `torch.load(weights_only=True)` reads; a pattern is cached again.

        Where coordinates may not be overwritten, the values that they had are among them.
        """
        cache = self._pattern_cache.latest()
        parts = {name: part for name, part in vars(self).items() if name != "_pattern_cache"}
        return {**parts, "counts": (cache.num_entries, cache.num_slots), "fixed": (cache.refusal, cache.guard.values)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, whose coordinates are checked, now or, where they may not be overwritten, when used.

        Files of earlier versions hold the pattern cache, the oldest by the name `_known`.
        """
        parts = {"_pattern_cache" if name == "_known" else name: part for name, part in state.items()}
        counts, (refusal, kept) = parts.pop("counts", None), parts.pop("fixed", ("", None))
        vars(self).update(parts)
        if refusal:
            num_entries, num_slots = counts
            guard = ChangeGuards(self.coords, False, kept)
            cache = PatternCache(num_entries, num_slots, guard, refusal=refusal)
            vars(self).update(_pattern_cache=cache)
        elif counts is not None:
            self.__post_init__()

    @classmethod
    @abstractmethod
    def _lay_out(cls, coords: Tensor, grid: Sizes, group_dim: int, group_size: int | None) -> Layout:
        """Place entries [ndim, E], sorted with the group dimension first, over this format's axes."""

    @classmethod
    def _from_entries(
        cls: type[Format],
        entries: Entries,
        shape: Sizes,
        group_dim: int,
        group_size: int | None,
        blocks: Sizes | None,
    ) -> Format:
        coords = pattern_part("coords", entries.coords)
        with torch.inference_mode(False), untransformed():  # coordinates are to count their versions
            layout = cls._lay_out(coords, block_grid(shape, blocks), group_dim, group_size)
        values = entries.values if layout.gather is None else layout.gather(entries.values)
        return cls._laid_out(layout, values, len(entries.values), shape, group_dim, blocks)

    @classmethod
    def _laid_out(
        cls: type[Format],
        layout: Layout,
        values: Tensor,
        num_entries: int,
        shape: Sizes,
        group_dim: int = 0,
        blocks: Sizes | None = None,
    ) -> Format:
        """Return the format of what a layout has made of so many entries: its coordinates need no check."""
        # a vector has no coordinate that could say -1, so all its slots are entries
        num_slots = prod(values.shape[: len(cls.value_axes)])
        num_entries = num_entries if len(shape) > 1 else num_slots
        cache = PatternCache(num_entries, num_slots, ChangeGuards(layout.coords), facts=layout.facts)
        form = cls._unchecked(layout.coords, values, shape, group_dim, blocks, cache)
        if may_keep(*layout.coords):
            keep(form)
        return form

    @classmethod
    def _of_parts(
        cls: type[Format],
        coords: tuple[Any, ...],
        values: Any,
        shape: Sizes,
        group_dim: int,
        block_size: Sizes | None,
        like: PatternCache | None,
    ) -> Format:
        """Return a format of parts that need be no tensors, for torch's pytrees; coordinates are checked when used.

        `like` is the cache of the format that was taken apart, which holds for the same coordinates. Others have as
        many entries, for a tracer, which can't count them.
        """
        if not is_compiling():  # grad, vjp and jvp take all of their arguments apart
            coords = tuple([undifferentiated(coord) if isinstance(coord, Tensor) else coord for coord in coords])
        stored = tuple(coord for coord in coords if coord is not None)
        guarded = () if like is None else like.guard.tensors
        if like is not None and len(stored) == len(guarded) and all(map(is_, stored, guarded)):
            cache = like
        elif not all(isinstance(coord, Tensor) for coord in stored):
            cache = PatternCache(0, 0, ChangeGuards((), False))
        elif like is None:
            return cls(coords, values, shape, group_dim, block_size)
        else:
            cache = PatternCache(like.num_entries, like.num_slots, ChangeGuards(stored, False))
        return cls._unchecked(coords, values, shape, group_dim, block_size, cache)

    @classmethod
    def _traced(
        cls: type[Format],
        coords: tuple[Tensor | None, ...],
        values: Tensor,
        shape: Sizes,
        group_dim: int,
        block_size: Sizes | None,
    ) -> Format:
        """Return a format of a tracer's tensors, which has padding unless this kind never has any."""
        cache = PatternCache(0, len(cls.value_axes) - 1, ChangeGuards(()))
        return cls._unchecked(coords, values, shape, group_dim, block_size, cache)

    @classmethod
    def _unchecked(
        cls: type[Format],
        coords: tuple[Any, ...],
        values: Any,
        shape: Sizes,
        group_dim: int,
        block_size: Sizes | None,
        cache: PatternCache,
    ) -> Format:
        """Return a format of these parts, with the cache of its pattern."""
        form = object.__new__(cls)
        parts = {"coords": coords, "values": values, "shape": shape, "group_dim": group_dim, "block_size": block_size}
        for name, part in {**parts, "_pattern_cache": cache}.items():  # as older tracers follow it, not all at once
            object.__setattr__(form, name, part)
        return form

    def _with(self: Format, **parts: object) -> Format:
        """Return a copy with other parts, which are not checked."""
        form = object.__new__(type(self))
        for name in ("coords", "values", "shape", "group_dim", "block_size", "_pattern_cache"):
            object.__setattr__(form, name, parts[name] if name in parts else getattr(self, name))
        return form

    def to_dense(self) -> Tensor:
        """Return A[coords] += values as a dense tensor; differentiable.

        Returns:
            Dense tensor of the format's shape, dtype and device.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> A = COO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
            >>> A.to_dense()
            tensor([[0., 5.],
                    [0., 0.],
                    [6., 7.]])
        """
        return scatter_dense(self._entries(), self.shape, self.block_size)

    def to_torch(self, layout: torch.layout | None = None) -> Tensor:
        """Return the entries as one of torch's sparse tensors.

        Args:
            layout: None for CSR of a matrix grouped by rows, CSC of one grouped by columns, BSR or BSC where the values
                are blocks, and COO of a tensor of other dimensions; `torch.sparse_coo` for COO of a matrix too.

        Returns:
            Sparse tensor of the format's shape, dtype and device. Explicit zeros are entries, padding is not. Gradients
            reach the format's values.

        Raises:
            FormatError: torch has no such layout of these entries.

        Example:
            >>> import torch
            >>> from insum_ops.formats import GroupCOO
            >>> A = GroupCOO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]), group_size=2)
            >>> A.to_torch(torch.sparse_coo).indices().tolist()
            [[0, 2, 2], [1, 0, 1]]
        """
        entries = self._entries()
        return torch_sparse(self, layout, entries.coords, entries.values)

    def pin_memory(self: Format) -> Format:
        """Return the format in pinned memory, from which a GPU copies while the host goes on; a DataLoader calls it.

        Returns:
            Another format of the same pattern; tensors that are pinned already are taken as they are.

        Raises:
            RuntimeError: torch finds no accelerator to pin memory for.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> A = COO.from_dense(torch.eye(2))
            >>> pinned = A.pin_memory() if torch.cuda.is_available() else A
        """
        coords = tuple(coord if coord is None else pinned(coord) for coord in self.coords)
        return self._copied(coords, pinned(self.values))

    def share_memory_(self: Format) -> Format:
        """Move the tensors into memory that processes share, so that a format is sent to them without a copy.

        Returns:
            The format itself.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> COO.from_dense(torch.eye(2)).share_memory_().values.is_shared()
            True
        """
        for part in (self.values, *self.coords):
            if part is not None:
                part.share_memory_()
        return self

    def to(
        self: Format,
        device: Target = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Format:
        """Return the format on another device, or with values of another dtype, or both: `A.to("cuda", torch.float16)`.

        Args:
            device: where to, or a dtype or a tensor that has both in its place; None to stay.
            dtype: of what type the values are to be; None for the type they have.
            non_blocking: whether to copy without waiting, as `Tensor.to` does.

        Returns:
            The format itself where nothing changes, otherwise another one; coordinates keep their dtype.

        Raises:
            FormatError: `dtype` is no type that values can have.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> A = COO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
            >>> A.to(torch.float64).dtype
            torch.float64
        """
        device, dtype = destination(device, dtype)
        place = self.device if device is None else device
        values = self.values.to(device=place, dtype=dtype or self.dtype, non_blocking=non_blocking)
        check_dtype("values", values)
        if values.device == self.device:
            return self if values is self.values else self._with(values=values)
        with torch.inference_mode(False):
            coords = tuple(c if c is None else c.to(values.device, non_blocking=non_blocking) for c in self.coords)
        return self._copied(coords, values)

    def _copied(self: Format, coords: tuple[Tensor | None, ...], values: Tensor) -> Format:
        """Return the same format over copies of its tensors, elsewhere."""
        cache = self.pattern_cache
        num_values = self.nnz if values.is_meta else cache.num_values  # nothing can be counted there
        moved = PatternCache(cache.num_entries, cache.num_slots, ChangeGuards(coords), num_values)
        return self._with(coords=coords, values=values, _pattern_cache=moved)

    def with_values(self: Format, values: Tensor) -> Format:
        """Return the same pattern over other values; what is cached about the pattern is shared.

        Args:
            values: as many as the format's own, in the same places [P], [P, Q] or [..., *block_size].

        Returns:
            The format over `values`, not over a copy.

        Raises:
            FormatError: values of another shape or device, or of a type that a format does not have.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> A = COO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
            >>> A.with_values(2 * A.values).to_dense()
            tensor([[ 0., 10.],
                    [ 0.,  0.],
                    [12., 14.]])
        """
        check_values(values, self.values)
        return self._with(values=values)

    def transpose(self: Format, dim0: int = 0, dim1: int = 1) -> Format:
        """Return the format with two dimensions swapped; nothing is copied, so `group_dim` moves with its dimension.

        Args:
            dim0: one dimension.
            dim1: the other.

        Returns:
            The format over the same tensors.

        Raises:
            FormatError: there is no such dimension.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> A = COO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
            >>> A.transpose(), A.T.group_dim
            (COO(shape=[2, 3], nnz=3, groups=3, group_dim=1, group_size=1, padding=0.0%, bytes=36), 1)
        """
        first, second = normal_dim("dim0", dim0, self.shape), normal_dim("dim1", dim1, self.shape)
        if first == second:
            return self
        order = list(range(self.ndim))
        order[first], order[second] = second, first
        values, block_size, cache = self.values, self.block_size, self.pattern_cache
        if block_size is not None:
            values = values.transpose(first - self.ndim, second - self.ndim)
            block_size = tuple(block_size[dim] for dim in order)
        swapped = PatternCache(
            *(cache.num_entries, cache.num_slots, cache.guard, cache.num_values, cache.facts, cache.positions)
        )
        swapped.refusal = cache.refusal
        swap, caches = frozenset((first, second)), cache.transposed
        transposed = caches.setdefault(swap, swapped) if may_keep() else caches.get(swap, swapped)
        return self._with(
            coords=tuple(self.coords[dim] for dim in order),
            values=values,
            shape=tuple(self.shape[dim] for dim in order),
            group_dim=order[self.group_dim],
            block_size=block_size,
            _pattern_cache=transposed,
        )

    def regroup(self: Format, group_dim: int, group_size: int | None = None) -> Format:
        """Return the format grouped along another dimension, or in groups of another size.

        The new pattern is kept, so that only values move the next time.

        Args:
            group_dim: the dimension whose coordinate p is to have.
            group_size: entries of a group, for the grouped formats; None for the same along the same dimension, and for
                one chosen from the number of entries along another.

        Returns:
            The format itself if it is grouped so, otherwise another one with the same entries.

        Raises:
            FormatError: there is no such dimension, or a group_size that this format does not have.

        Example:
            >>> import torch
            >>> from insum_ops.formats import GroupCOO
            >>> A = GroupCOO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]), group_size=2)
            >>> A.regroup(1, group_size=1)
            GroupCOO(shape=[3, 2], nnz=3, groups=3, group_dim=1, group_size=1, padding=0.0%, bytes=36)
        """
        dim = normal_dim("group_dim", group_dim, self.shape)
        check_group_size(type(self).__name__, self.takes_group_size, group_size, self.shape)
        if dim == self.group_dim and group_size in (None, self.group_size):
            return self
        regrouped = self._pattern_along(dim, group_size)
        values = regrouped.gather(self.flat_values)
        return self._with(coords=regrouped.coords, values=values, group_dim=dim, _pattern_cache=regrouped.pattern_cache)

    def regrouped_view(self, group_dim: int) -> RegroupedView:
        """Return `regroup(group_dim)` with the values in place, for a statement that reads them through positions."""
        return RegroupedView(self, self._pattern_along(group_dim, None), group_dim)

    def has_row_order(self, group_dim: int, width: int) -> bool:
        """Return whether the order of rows that `row_ordered_view` needs is cached."""
        return (group_dim, width) in self.pattern_cache.row_orders

    def row_ordered_view(self, group_dim: int, width: int) -> RowOrderedView:
        """Return a view of a matrix with one or two rows in a set, its values in place; the order of rows is cached."""
        cache = self.pattern_cache
        row_order = cache.row_orders.get((group_dim, width))
        if row_order is None:
            rows, columns = self._entry_coords()[[group_dim, 1 - group_dim]]
            grid = block_grid(self.shape, self.block_size)
            row_order = order_rows(rows, columns, (grid[group_dim], grid[1 - group_dim]), width)
            if may_keep(row_order.rows, row_order.sets, row_order.columns, row_order.source):
                cache.row_orders[group_dim, width] = row_order
        return RowOrderedView(self, row_order, group_dim)

    @property
    def pattern_cache(self) -> PatternCache:
        """What is cached about the pattern; coordinates that have changed are checked again and get a new cache.

        A tracer sees no changes: what it uses has to be worked out by an ordinary call before.
        """
        cache = self._pattern_cache
        if is_compiling() or cache.guard.hold():
            return cache
        cache = cache.latest()
        if not cache.guard.hold():
            if not may_keep(*self.coords):
                return self._checked()
            renewed = cache.guard.renewed()
            if renewed is None:
                if cache.refusal and not cache.guard.have_kept_values():
                    raise FormatError(cache.refusal)
                cache = cache.renewed(self._checked())
            else:
                cache.guard = renewed
        vars(self).update(_pattern_cache=cache)
        return cache

    @property
    def facts(self) -> RowFacts | None:
        """The facts about the rows of the groups, worked out once; None if p is the row."""
        return facts_of(self.pattern_cache, self.coords, self.group_dim, self.shape, self.block_size)

    @property
    def value_source(self) -> Tensor | None:
        """None: value p, or p and q, is the entry's own."""
        return None

    @property
    def sets(self) -> Tensor | None:
        """None: rows are read by p."""
        return None

    @property
    def memory(self) -> dict[Any, Any]:
        """The cache of launch plans, which lives as long as the pattern, whatever the values; not for a tracer."""
        cache = self._pattern_cache
        guard = cache.guard  # it has no checks if nobody else has the coordinates: then it is not called
        return cache.memory if not guard.checks or guard.hold() else self.pattern_cache.memory

    def as_private(self: Format) -> Format:
        """Return the format as one whose coordinates nobody else has: no call asks whether they have changed."""
        cache = self.pattern_cache
        cache.guard = ChangeGuards(cache.guard.tensors, is_private=True)
        return self

    def as_shared(self: Format) -> Format:
        """Return the format over copies of its coordinates, for a caller, who may write to them."""
        if is_compiling():  # a tracer writes to nothing
            return self
        with torch.inference_mode(False):
            coords = tuple([coord if coord is None else coord.clone() for coord in self.coords])
        return self._copied(coords, self.values)

    def unguarded(self) -> list[Tensor]:
        """Return the tensors of the pattern that a launch plan need not guard.

        They are the coordinates, which `memory` guards, and what was worked out of them, which nobody else has.
        """
        coords = [coord for coord in self.coords if coord is not None]
        return [*coords, *self._pattern_cache.worked_out()]

    @property
    def coord_axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each dimension's coordinates: ("p",) for the group dimension, all for the others."""
        return tuple(("p",) if dim == self.group_dim else self.value_axes for dim in range(self.ndim))

    @property
    def has_padding(self) -> bool:
        """Whether some slots hold no entry."""
        cache = self.pattern_cache
        return cache.num_entries < cache.num_slots

    @property
    def nnz(self) -> int:
        """The number of stored values, zeros included, padding not; a block counts with all it holds of the tensor."""
        cache = self.pattern_cache
        if cache.num_values is not None:
            return cache.num_values
        counted = self._count_values(cache.num_entries)
        if may_keep(*self.coords):
            cache.num_values = counted
        return counted

    def _count_values(self, num_entries: int) -> int:
        """Return how many elements of the tensor `num_entries` entries hold: of a last block those within the shape."""
        if self.block_size is None:
            return num_entries
        if not any(size % block for size, block in zip(self.shape, self.block_size)):
            return num_entries * prod(self.block_size)
        coords, positions = self._entry_coords(), self._positions()
        if positions is not None:
            coords = coords[:, positions]
        block, shape = (coords.new_tensor(sizes)[:, None] for sizes in (self.block_size, self.shape))
        return int((shape - coords * block).minimum(block).prod(0).sum())

    @property
    def ndim(self) -> int:
        """How many dimensions the tensor has."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of coordinates and values."""
        return self.values.device

    @property
    def num_groups(self) -> int:
        """The extent of p, P."""
        return self.values.shape[0]

    @property
    def group_size(self) -> int:
        """The extent of q, Q, and 1 where there is none."""
        return prod(self._extents[1:])

    @property
    def padding_share(self) -> float:
        """The share of the values in memory that is padding: of groups, and of last blocks beyond the shape."""
        return 1 - self.nnz / self.values.numel() if self.values.numel() else 0.0

    @property
    def nbytes(self) -> int:
        """The bytes that coordinates and values take up."""
        return self.values.nbytes + sum(c.nbytes for c in self.coords if c is not None)

    @property
    def AM(self) -> Tensor:
        """The row of each group of a matrix grouped by rows: [P]."""
        return self._letter("AM", self.coords[0])

    @property
    def AK(self) -> Tensor:
        """The column of each entry of a matrix grouped by rows: [P] or [P, Q]."""
        return self._letter("AK", self.coords[-1])

    @property
    def AV(self) -> Tensor:
        """The values of a matrix grouped by rows: [P] or [P, Q], then the axes of a block."""
        return self._letter("AV", self.values)

    @property
    def T(self: Format) -> Format:
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise AttributeError(f"T is for matrices, but shape is {list(self.shape)}; use transpose(dim0, dim1)")
        return self.transpose(0, 1)

    def __repr__(self) -> str:
        blocks = "" if self.block_size is None else f", block_size={list(self.block_size)}"
        coords = [coord for coord in self.coords if coord is not None]
        has_numbers = all([isinstance(coord, Tensor) and is_real(coord) and not coord.is_meta for coord in coords])
        if not (has_numbers and isinstance(self.values, Tensor)):  # a pytree's leaves, or those of a tracer
            return f"{type(self).__name__}(shape={list(self.shape)}{blocks}, group_dim={self.group_dim})"
        return (
            f"{type(self).__name__}(shape={list(self.shape)}{blocks}, nnz={self.nnz}, "
            f"groups={self.num_groups}, group_dim={self.group_dim}, group_size={self.group_size}, "
            f"padding={self.padding_share:.1%}, bytes={self.nbytes})"
        )

    @property
    def _extents(self) -> Sizes:
        return tuple(self.values.shape[: len(self.value_axes)])

    @property
    def flat_values(self) -> Tensor:
        """The values with a single axis before those of a block: [P*Q, *block_size]."""
        return self.values.flatten(0, len(self.value_axes) - 1)

    def _entry_coords(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the coordinates of each of the flattened values: [ndim, P*Q]."""
        extents, spread = self._extents, [1] * (len(self.value_axes) - 1)
        full = []
        for dim, coord in enumerate(self.coords):
            coord = torch.arange(extents[0], dtype=dtype, device=self.device) if coord is None else coord.to(dtype)
            coord = coord.view(-1, *spread) if dim == self.group_dim else coord
            full.append(coord.expand(extents).reshape(-1))
        return torch.stack(full)

    def _entries(self) -> Entries:
        """Return the entries without padding, ordered by the group dimension first."""
        coords, values, positions = self._entry_coords(), self.flat_values, self._positions()
        if positions is not None:
            coords, values = coords[:, positions], values.index_select(0, positions)
        return Entries(coords, values)

    def _positions(self) -> Tensor | None:
        """Return which of the flattened values are no padding; None if none are padding."""
        cache = self.pattern_cache
        positions = cache.positions
        if positions is None and cache.num_entries < cache.num_slots:
            with torch.inference_mode(False):
                positions = (self._entry_coords() >= 0).all(0).nonzero().flatten()
            if may_keep(positions):
                cache.positions = positions
        return positions

    def _pattern_along(self, group_dim: int, group_size: int | None) -> Regrouped:
        """Return the pattern grouped along another dimension or in other sizes, cached with this pattern."""
        cache = self.pattern_cache
        regrouped = cache.regrouped.get((group_dim, group_size))
        is_tracing = is_compiling()
        # a format over the regrouped coordinates may have changed them
        if regrouped is None or not (is_tracing or regrouped.guard.hold()):
            regrouped = self._regrouped(cache, group_dim, group_size)
            if may_keep(*regrouped.coords, regrouped.gather.source, regrouped.gather.is_padding):
                cache.regrouped[group_dim, group_size] = regrouped
        return regrouped

    @torch.inference_mode(False)
    def _regrouped(self, cache: PatternCache, group_dim: int, group_size: int | None) -> Regrouped:
        """Return the pattern grouped along another dimension or in other sizes, worked out anew."""
        layout = self._lay_out_across(cache.num_entries, group_dim, group_size)
        if layout is None:
            layout = self._sorted_along(cache.num_slots - cache.num_entries, group_dim, group_size)
        assert layout.gather is not None
        guard = ChangeGuards(layout.coords, is_private=cache.guard.is_private)
        regrouped = PatternCache(cache.num_entries, layout.gather.source.numel(), guard, facts=layout.facts)
        return Regrouped(layout.coords, layout.gather, regrouped, guard)

    def _lay_out_across(self, num_entries: int, group_dim: int, group_size: int | None) -> Layout | None:
        """Return the layout of the slots along another dimension by kernels; None if they do not do it."""
        return None

    def _sorted_along(self, num_padding: int, group_dim: int, group_size: int | None) -> Layout:
        """Return the layout of the slots, without padding, sorted along a dimension; its gather reads slots."""
        grid = block_grid(self.shape, self.block_size)
        coords, positions = self._entry_coords(coord_dtype(max(grid))), None
        if num_padding and (group_dim == self.group_dim or prod(grid) >= 2**63):
            positions = self._positions()
            coords, num_padding = coords[:, positions], 0
        if self.ndim == 2 and group_dim != self.group_dim:  # entries ascend along the other dimension
            order = coords[group_dim].to(key_dtype(grid[group_dim])).argsort(stable=True)
        else:
            order = sort_order(coords, grid, group_dim)
        order = order[num_padding:]  # where -1 is sorted by, padding comes first
        layout = self._lay_out(coords.index_select(1, order), grid, group_dim, group_size)
        source = order if positions is None else positions[order]
        return replace(layout, gather=Gather(source, None) if layout.gather is None else layout.gather.after(source))

    def _letter(self, name: str, part: Tensor | None) -> Tensor:
        """Return a part of a matrix grouped by rows, which the paper calls `name`; else raise AttributeError."""
        if self.ndim != 2 or self.group_dim != 0 or part is None:
            raise AttributeError(
                f"{name} is a part of a matrix grouped by rows, not of {self!r}; see coords and values"
            )
        return part
