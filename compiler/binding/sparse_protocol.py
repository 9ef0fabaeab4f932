"""A format-agnostic statement and its tensors -> the indirect statement and plain tensors, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ...formats.facts import OwnedRows, RowFacts
from ...formats.guard import may_keep
from ..language import Access, OperandError, Statement
from .bind import Bound
from .rewrite import Shape, rewrite

__all__ = [
    "Kind",
    "Recipe",
    "SparseFormat",
    "best_group_dim",
    "check_pattern",
    "is_sparse",
    "pattern_of",
    "recipe",
    "whole_along",
]

# How a tensor of a class that lies in pieces, as a DTensor does, is made whole along one dimension.
whole_along: dict[type, Callable[[Tensor, int], Tensor]] = {}


class SparseFormat(Protocol):
    """What a sparse format offers the compiler; `insum_ops.formats` implements it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def value_axes(self) -> tuple[str, ...]: ...
    @property
    def value_source(self) -> Tensor | None: ...  # over value_axes: where in `values` each value is; None: there
    @property
    def coords(self) -> tuple[Tensor | None, ...]: ...
    @property
    def coord_axes(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def block_size(self) -> tuple[int, ...] | None: ...
    @property
    def group_dim(self) -> int: ...
    @property
    def has_padding(self) -> bool: ...
    @property
    def sets(self) -> Tensor | None: ...  # [P] the set of rows that p is in, through which rows are read; None: there
    @property
    def facts(self) -> RowFacts | None: ...  # of the group coordinate, which ascends
    @property
    def memory(self) -> dict[Any, Any]: ...  # another one once coordinates have changed, whatever the values
    def unguarded(self) -> list[Tensor]: ...  # tensors of the pattern that launch plans in `memory` need not guard
    def regroup(self, group_dim: int) -> SparseFormat: ...
    def regrouped_view(self, group_dim: int) -> SparseFormat: ...  # `regroup` with a value_source instead of a copy
    def in_groups(self, group_size: int) -> SparseFormat: ...  # a view of COO in which entries of one row share a p
    def has_row_order(self, group_dim: int, width: int) -> bool: ...  # `row_ordered_view` finds its order cached
    def row_ordered_view(self, group_dim: int, width: int) -> Any: ...  # a view in sets of `width` rows: its row_order
    @property
    def flat_values(self) -> Tensor: ...  # what a value_source points into
    def with_values(self, values: Tensor) -> SparseFormat: ...


def is_sparse(operand: object) -> TypeGuard[SparseFormat]:
    if isinstance(operand, Tensor):
        return False
    # its class is asked first: a property would be worked out only to see that it is there
    return hasattr(type(operand), "coord_axes") or hasattr(operand, "coord_axes")


def pattern_of(form: SparseFormat) -> object:
    """Return what `check_pattern` identifies the pattern by; None if nothing is kept, as under a tracer."""
    return form.memory if may_keep() else None


def check_pattern(form: SparseFormat, before: object, name: str) -> dict[Any, Any] | None:
    """Return the pattern's plans; None if `before`, the `pattern_of` the forward pass, is.

    Raises OperandError if the pattern is not the one that the forward pass had.
    """
    if before is None:
        return None
    memory = form.memory
    if memory is not before:
        raise OperandError(
            f"the coordinates of {name} have changed since the call that is differentiated; "
            "change them after its backward, or change a copy"
        )
    return memory


Splits = tuple[tuple[int, int], ...]  # (a tensor's dimension, the format's dimension whose blocks it is split into)


@dataclass(frozen=True)
class Recipe:
    """How a format-agnostic statement becomes an indirect one; plain data, so that a tracer takes it for constants."""

    text: str  # of the indirect statement
    values: str  # the name of the format's values in it
    source: str  # the name of their positions, "" where they need none
    sets: str  # the name of the sets of rows, "" where there are none
    coords: tuple[str | None, ...]  # the names of its coordinates; None: not read
    ones: tuple[tuple[str, int], ...]  # (name, dimension of the format): ones as long as it
    views: tuple[tuple[str, str, Splits], ...]  # (name, the user's name, splits) of every other tensor
    output_splits: Splits
    size: tuple[int, ...]  # of the indirect statement's output
    final: tuple[int, ...]  # of the output as the user wrote it
    rows: str  # the name of the group coordinate, if the format has facts about it; "" without any
    blocks: tuple[int, ...] | None

    def split(self, tensor: Tensor, splits: Splits) -> Tensor:
        """Return one of the user's tensors as the indirect statement reads it."""
        return _split(tensor, splits, self.blocks)

    def split_output(self, output: Tensor) -> Tensor:
        """Return a tensor of the shape that the user wrote, split into blocks like the indirect statement's output."""
        return _split(output, self.output_splits, self.blocks)

    def finish(self, output: Tensor) -> Tensor:
        """Return the indirect statement's output in the shape that the user wrote: blocks joined, padding cropped."""
        for dim, _ in self.output_splits:
            output = output.flatten(dim, dim + 1)
            if output.shape[dim] != self.final[dim]:
                output = output.narrow(dim, 0, self.final[dim])
        return output

    def fact(self, operand: SparseFormat) -> OwnedRows | None:
        """Return what the format knows of the rows that the indirect statement scatters to."""
        facts = operand.facts if self.rows else None
        return None if facts is None else facts.owned(self.rows, self.sets)

    def tensors(self, operand: SparseFormat, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that the indirect statement reads, by name."""
        operands = {self.values: operand.values}
        if self.source and operand.value_source is not None:
            operands[self.source] = operand.value_source
        if self.sets and operand.sets is not None:
            operands[self.sets] = operand.sets
        for name, original, splits in self.views:
            if original in dense:
                operands[name] = _split(dense[original], splits, self.blocks)
        for coordinate, tensor in zip(self.coords, operand.coords):
            if coordinate is not None and tensor is not None:
                operands[coordinate] = tensor
        for name, dim in self.ones:
            ones = torch.ones((), dtype=operand.dtype, device=operand.device).expand(operand.shape[dim])
            operands[name] = _split(ones, ((0, dim),), self.blocks)
        return operands


@dataclass(frozen=True)
class Kind:
    """All of a format that a recipe depends on: everything but data. Stands for it when a statement is bound."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value_axes: tuple[str, ...]
    coord_axes: tuple[tuple[str, ...], ...]
    is_stored: tuple[bool, ...]
    block_size: tuple[int, ...] | None
    group_dim: int
    has_padding: bool
    has_facts: bool
    is_read_through: bool
    is_in_sets: bool

    @staticmethod
    def of(form: SparseFormat) -> tuple[Any, ...]:
        """Return the fields, as plain data that a tracer takes for constants."""
        return (
            tuple(form.shape),
            form.dtype,
            form.device,
            form.value_axes,
            form.coord_axes,
            tuple([coordinate is not None for coordinate in form.coords]),
            form.block_size,
            form.group_dim,
            form.has_padding,
            _has_facts(form),
            form.value_source is not None,
            form.sets is not None,
        )


def _has_facts(form: SparseFormat) -> bool:
    """Return whether a format has facts about its rows, which are worked out when a kernel needs them."""
    rows = form.coords[form.group_dim]
    return form.sets is not None or (rows is not None and (may_keep(rows) or form.facts is not None))


def recipe(bound: Bound, target: Access, kind: Kind) -> tuple[Any, ...]:
    """Return the fields of the `Recipe` that replaces `target`, a factor in a format of this kind."""
    blocks = kind.block_size
    is_partial = tuple(blocks is not None and size % blocks[dim] != 0 for dim, size in enumerate(kind.shape))
    axes = kind.value_axes, kind.coord_axes, kind.is_stored
    in_sets = kind.group_dim if kind.is_in_sets else None
    form = Shape(*axes, blocks is not None, kind.has_padding, is_partial, kind.is_read_through, in_sets)
    rewritten = rewrite(bound.statement, target, form)
    output_splits = rewritten.views[rewritten.statement.output.name].splits
    grouped = rewritten.coords[kind.group_dim]
    rows = "" if grouped is None or not kind.has_facts else grouped
    return (
        str(rewritten.statement),
        rewritten.values,
        rewritten.source,
        rewritten.sets,
        rewritten.coords,
        tuple(rewritten.ones.items()),
        tuple((name, view.of, view.splits) for name, view in rewritten.views.items()),
        output_splits,
        _split_size(bound.size, dict(output_splits), blocks),
        bound.size,
        rows,
        blocks,
    )


def best_group_dim(statement: Statement, target: Access, group_dim: int, has_groups: bool = True) -> int:
    """Return the dimension to group `target` along: for a matrix the one that the output keeps.

    Then a group adds to one output row. With more dimensions the grouping is the user's choice: a convolution's map
    grouped by offset stays so. Without groups, p being the row, rows that the output lacks would turn every entry into
    a scatter of its own. And a group that shares a matrix stays whole: tokens grouped by expert,
    `Y[t,m] += R[e,t] * X[t,c] * W[e,c,m]`, read W[e] once.
    """
    names = set(map(str, statement.output.indices))
    kept_dims = [dim for dim, index in enumerate(target.indices) if str(index) in names]
    if (len(target.indices) != 2 and has_groups) or not kept_dims or group_dim in kept_dims:
        return group_dim
    shared, target_names = str(target.indices[group_dim]), set(target.names)
    summed = {name for name in statement.summed if name not in target_names}
    others = (access for access in statement.accesses if access is not target and shared in access.names)
    return group_dim if any(summed & set(access.names) for access in others) else kept_dims[0]


def _split_size(shape: tuple[int, ...], splits: Mapping[int, int], blocks: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return `shape` with each split dimension as a number of blocks, the last one counted whole, and their length."""
    size: list[int] = []
    for dim, extent in enumerate(shape):
        if blocks is not None and dim in splits:
            block = blocks[splits[dim]]
            size += [-(-extent // block), block]
        else:
            size.append(extent)
    return tuple(size)


def _split(tensor: Tensor, splits: Splits, blocks: tuple[int, ...] | None) -> Tensor:
    """Return `tensor` with dimensions split into blocks: a view, or a padded copy if a last block is not full."""
    if blocks is None:
        return tensor
    for dim, of in reversed(splits):
        block = blocks[of]
        if type(tensor) in whole_along:  # positions point into the dimension, and blocks may straddle its pieces
            tensor = whole_along[type(tensor)](tensor, dim)
        missing = -tensor.shape[dim] % block
        if missing:
            shape = [*tensor.shape]
            shape[dim] = missing
            tensor = torch.cat([tensor, _no_entry(tensor, shape)], dim)
        tensor = tensor.reshape(*tensor.shape[:dim], tensor.shape[dim] // block, block, *tensor.shape[dim + 1 :])
    return tensor


def _no_entry(tensor: Tensor, shape: list[int]) -> Tensor:
    """Return what fills a last block: zeros for values, -1 for an index tensor."""
    return tensor.new_full(shape, 0 if tensor.is_floating_point() else -1)
