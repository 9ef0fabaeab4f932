"""A format-agnostic statement and its tensors -> the indirect statement and plain tensors, ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from .bind import Bound
from .ir import Access, Statement
from .rewrite import Rewritten, Shape, rewrite

__all__ = ["Facts", "Recipe", "SparseFormat", "is_sparse", "recipe"]


class Facts(Protocol):
    """What a format knows of its ascending group coordinate (one value per group)."""

    @property
    def pointers(self) -> Tensor: ...  # [D+1] the groups of row r are pointers[r] .. pointers[r+1]
    @property
    def is_shared(self) -> Tensor: ...  # [P] the group's row has several groups
    @property
    def rows_to_zero(self) -> Tensor: ...  # [R] rows with no group, or with several
    @property
    def max_groups(self) -> int: ...  # the most groups of any row


@runtime_checkable
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
    def facts(self) -> Facts | None: ...
    def regroup(self, group_dim: int) -> SparseFormat: ...
    def with_values(self, values: Tensor) -> SparseFormat: ...


def is_sparse(operand: object) -> TypeGuard[SparseFormat]:
    return not isinstance(operand, Tensor) and hasattr(operand, "coord_axes")


@dataclass(frozen=True)
class Recipe:
    """How a format-agnostic statement becomes an indirect one; depends on shapes and the kind of format, not data."""

    statement: Statement
    text: str  # of the statement
    rewritten: Rewritten
    size: tuple[int, ...]  # of the indirect statement's output
    final: tuple[int, ...]  # of the output as the user wrote it
    group_dim: int  # the format is grouped along this dimension first
    fact: str  # the index tensor that the format's facts are about, "" without any
    blocks: tuple[int, ...] | None

    @property
    def output_splits(self) -> dict[int, int]:
        return dict(self.rewritten.views[self.statement.output.name].splits)

    def split_output(self, output: Tensor) -> Tensor:
        """A tensor of the output's shape as the user wrote it, split into blocks like the indirect one."""
        return _split(output, self.output_splits, self.blocks)

    def finish(self, output: Tensor) -> Tensor:
        """The indirect statement's output in the shape the user wrote: blocks joined, padding cropped."""
        if self.size == self.final:
            return output
        for dim in range(len(self.final)):
            if dim in self.output_splits:
                output = output.flatten(dim, dim + 1)
                if output.shape[dim] != self.final[dim]:
                    output = output.narrow(dim, 0, self.final[dim])
        return output

    def tensors(self, operand: SparseFormat, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the indirect statement reads; `operand` is grouped as the recipe says."""
        found = {self.rewritten.values: operand.values}
        for name, view in self.rewritten.views.items():
            if view.of in dense:
                found[name] = _split(dense[view.of], dict(view.splits), self.blocks) if view.splits else dense[view.of]
        for coordinate, stored in zip(self.rewritten.coords, operand.coords):
            if coordinate is not None and stored is not None:
                found[coordinate] = stored
        for name, dim in self.rewritten.ones.items():
            ones = torch.ones((), dtype=operand.dtype, device=operand.device).expand(operand.shape[dim])
            found[name] = _split(ones, {0: dim}, self.blocks)
        return found


def recipe(bound: Bound, target: Access, operand: SparseFormat, regroup: bool = True) -> Recipe:
    """How to rewrite `target`, which is read from the format `operand`, away."""
    if regroup:
        operand = operand.regroup(_group_dim_for(bound.statement, target, operand))
    form = Shape(
        operand.value_axes,
        operand.coord_axes,
        tuple(coordinate is not None for coordinate in operand.coords),
        operand.block_size is not None,
        operand.has_padding,
        tuple(
            operand.block_size is not None and size % operand.block_size[dim] != 0
            for dim, size in enumerate(operand.shape)
        ),
    )
    rewritten = rewrite(bound.statement, target, form)
    statement = rewritten.statement
    size = _split_size(bound.size, dict(rewritten.views[statement.output.name].splits), operand.block_size)
    grouped = rewritten.coords[operand.group_dim]
    fact = grouped if grouped is not None and operand.facts is not None else ""
    return Recipe(statement, str(statement), rewritten, size, bound.size, operand.group_dim, fact, operand.block_size)


def _group_dim_for(statement: Statement, target: Access, operand: SparseFormat) -> int:
    """A matrix is grouped along the dimension that the output keeps, so that groups meet their output row together.

    With more dimensions the grouping is the user's choice: a convolution's map grouped by offset stays so.
    """
    names = set(map(str, statement.output.indices))
    kept = [dim for dim, index in enumerate(target.indices) if str(index) in names]
    if len(target.indices) != 2 or not kept or operand.group_dim in kept:
        return operand.group_dim
    return kept[0]


def _split_size(shape: tuple[int, ...], splits: Mapping[int, int], blocks: tuple[int, ...] | None) -> tuple[int, ...]:
    size: list[int] = []
    for dim, extent in enumerate(shape):
        if blocks is not None and dim in splits:
            block = blocks[splits[dim]]
            size += [-(-extent // block), block]
        else:
            size.append(extent)
    return tuple(size)


def _split(tensor: Tensor, splits: Mapping[int, int], blocks: tuple[int, ...] | None) -> Tensor:
    """`tensor` with dimensions split into blocks: a view, but for a last block that is not full."""
    if blocks is None or not splits:
        return tensor
    for dim in sorted(splits, reverse=True):
        block = blocks[splits[dim]]
        missing = -tensor.shape[dim] % block
        if missing:
            shape = [*tensor.shape]
            shape[dim] = missing
            tensor = torch.cat([tensor, _no_entry(tensor, shape)], dim)
        tensor = (
            tensor.unflatten(dim, (-1, block))
            if tensor.shape[dim]
            else tensor.reshape(*tensor.shape[:dim], 0, block, *tensor.shape[dim + 1 :])
        )
    return tensor


def _no_entry(tensor: Tensor, shape: list[int]) -> Tensor:
    """What fills a last block: zeros for values, -1 for an index tensor."""
    return tensor.new_full(shape, 0 if tensor.is_floating_point() else -1)
