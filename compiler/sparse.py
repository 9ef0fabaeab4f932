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

__all__ = ["Facts", "Indirect", "SparseFormat", "indirect", "is_sparse"]


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
class Indirect:
    """An indirect statement with everything it reads."""

    statement: Statement
    tensors: dict[str, Tensor]
    size: tuple[int, ...]  # of the indirect statement's output
    final: tuple[int, ...]  # of the output as the user wrote it
    fact: str  # the index tensor that the facts are about, "" without any
    facts: Facts | None
    rewritten: Rewritten
    blocks: tuple[int, ...] | None

    @property
    def output_splits(self) -> dict[int, int]:
        return dict(self.rewritten.views[self.statement.output.name].splits)

    def split_output(self, output: Tensor) -> Tensor:
        """A tensor of the output's shape as the user wrote it, split into blocks like the indirect one."""
        return _split(output, self.output_splits, self.blocks)

    def finish(self, output: Tensor) -> Tensor:
        """The indirect statement's output in the shape the user wrote: blocks joined, padding cropped."""
        for dim in range(len(self.final)):
            if dim in self.output_splits:
                output = output.flatten(dim, dim + 1)
                if output.shape[dim] != self.final[dim]:
                    output = output.narrow(dim, 0, self.final[dim])
        return output


def indirect(
    bound: Bound, target: Access, operand: SparseFormat, tensors: Mapping[str, Tensor], regroup: bool = True
) -> Indirect:
    """Rewrite `target`, read from the format `operand`, away; `tensors` are the other, dense ones."""
    if regroup:
        operand = _grouped_for(bound.statement, target, operand)
    blocks = operand.block_size
    form = Shape(
        operand.value_axes,
        operand.coord_axes,
        tuple(coordinate is not None for coordinate in operand.coords),
        blocks is not None,
        operand.has_padding,
        operand.group_dim,
    )
    rewritten = rewrite(bound.statement, target, form)
    output = rewritten.statement.output.name
    plain = {rewritten.values: operand.values}
    for name, view in rewritten.views.items():
        if view.of in tensors:
            plain[name] = _split(tensors[view.of], dict(view.splits), blocks)
    for coordinate, stored in zip(rewritten.coords, operand.coords):
        if coordinate is not None and stored is not None:
            plain[coordinate] = stored
    for name, dim in rewritten.ones.items():
        extent = operand.shape[dim] if blocks is None else -(-operand.shape[dim] // blocks[dim])
        plain[name] = torch.ones((), dtype=operand.dtype, device=operand.device).expand(extent)
    size = _split_size(bound.size, dict(rewritten.views[output].splits), blocks)
    grouped = rewritten.coords[operand.group_dim]
    facts = operand.facts if grouped is not None else None
    fact = grouped if grouped is not None and facts is not None else ""
    return Indirect(rewritten.statement, plain, size, bound.size, fact, facts, rewritten, blocks)


def _grouped_for(statement: Statement, target: Access, operand: SparseFormat) -> SparseFormat:
    """Group along a dimension that the output keeps, so that groups meet their output row together."""
    kept = [dim for dim, index in enumerate(target.indices) if str(index) in map(str, statement.output.indices)]
    if not kept or operand.group_dim in kept:
        return operand
    return operand.regroup(kept[0])


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
        tensor = tensor.unflatten(dim, (-1, block)) if tensor.shape[dim] else tensor.reshape(
            *tensor.shape[:dim], 0, block, *tensor.shape[dim + 1 :]
        )
    return tensor


def _no_entry(tensor: Tensor, shape: list[int]) -> Tensor:
    """What fills a last block: zeros for values, -1 for an index tensor."""
    return tensor.new_full(shape, 0 if tensor.is_floating_point() else -1)
