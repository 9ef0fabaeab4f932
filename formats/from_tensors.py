"""The constructors that all formats share: check the options, list the entries, lay them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from .check import check_block_size, check_dtype, check_entries, check_group_size, check_shape, normal_dim, whole_sizes
from .convert import Entries, block_grid, dense_entries, merge, merge_into_blocks
from .errors import FormatError
from .sources import ScipyArray, scipy_entries, spread_blocks, torch_entries

__all__ = ["FromTensors"]

Sizes = tuple[int, ...]
Format = TypeVar("Format", bound="FromTensors")


class FromTensors(ABC):
    """What can be made from dense tensors, lists of entries, and sparse tensors of torch and scipy.

    `group_dim` is the dimension that p walks along; `group_size` None chooses from the row counts; `block_size`
    is for blocked formats and need not divide the shape. Explicit zeros are entries. Gradients reach values.
    """

    is_blocked: ClassVar[bool] = False
    takes_group_size: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def _from_entries(
        cls: type[Format],
        entries: Entries,
        shape: Sizes,
        group_dim: int,
        group_size: int | None,
        blocks: Sizes | None,
    ) -> Format:
        """The format of distinct entries, sorted with the group dimension first."""

    @classmethod
    def from_dense(
        cls: type[Format],
        A: Tensor,
        *,
        group_dim: int = 0,
        group_size: int | None = None,
        block_size: Sequence[int] | None = None,
    ) -> Format:
        """The nonzeros of A, or its blocks that hold one; NaN is a nonzero."""
        if not isinstance(A, Tensor):
            raise FormatError(f"A is a {type(A).__name__}; from_dense takes a dense tensor")
        if A.layout != torch.strided:
            raise FormatError(f"A has layout {A.layout}; from_dense takes a dense tensor, from_torch a sparse one")
        check_dtype("A", A)
        shape, dim, blocks = cls._check_options(A.shape, group_dim, group_size, block_size)
        return cls._from_entries(dense_entries(A, dim, blocks), shape, dim, group_size, blocks)

    @classmethod
    def from_coo(
        cls: type[Format],
        coords: Tensor,
        values: Tensor,
        shape: Sequence[int],
        *,
        group_dim: int = 0,
        group_size: int | None = None,
        block_size: Sequence[int] | None = None,
    ) -> Format:
        """A[coords[:,e]] += values[e] for coords [ndim, nnz], values [nnz], in any order; duplicates add."""
        size, dim, blocks = cls._check_options(shape, group_dim, group_size, block_size)
        check_entries(coords, values, size, ())
        if blocks is None:
            entries = merge(Entries(coords.long(), values), size, dim)
        else:
            entries = merge_into_blocks(Entries(coords.long(), values), block_grid(size, blocks), dim, blocks)
        return cls._from_entries(entries, size, dim, group_size, blocks)

    @classmethod
    def from_blocks(
        cls: type[Format],
        coords: Tensor,
        values: Tensor,
        shape: Sequence[int],
        *,
        group_dim: int = 0,
        group_size: int | None = None,
    ) -> Format:
        """Like `from_coo`, of blocks `values` [E, *block_size] at block coordinates `coords` [ndim, E]."""
        size, dim, blocks = cls._check_options(shape, group_dim, group_size, values.shape[1:])
        grid = block_grid(size, blocks)
        check_entries(coords, values, grid, tuple(values.shape[1:]))
        return cls._from_entries(merge(Entries(coords.long(), values), grid, dim), size, dim, group_size, blocks)

    @classmethod
    def from_torch(
        cls: type[Format],
        A: Tensor,
        *,
        group_dim: int = 0,
        group_size: int | None = None,
        block_size: Sequence[int] | None = None,
    ) -> Format:
        """A torch sparse COO, CSR, CSC, BSR or BSC tensor; blocks stay if `block_size` is theirs or None."""
        return cls._from_list(*torch_entries(A), A.shape, group_dim, group_size, block_size)

    @classmethod
    def from_scipy(
        cls: type[Format],
        A: ScipyArray,
        *,
        group_dim: int = 0,
        group_size: int | None = None,
        block_size: Sequence[int] | None = None,
    ) -> Format:
        """A copy of a scipy sparse array; BSR blocks stay if `block_size` is theirs or None."""
        return cls._from_list(*scipy_entries(A), A.shape, group_dim, group_size, block_size)

    @classmethod
    def _from_list(
        cls: type[Format],
        coords: Tensor,
        values: Tensor,
        shape: Sequence[int],
        group_dim: int,
        group_size: int | None,
        block_size: Sequence[int] | None,
    ) -> Format:
        if values.ndim > 1:
            if cls.is_blocked and (block_size is None or tuple(block_size) == values.shape[1:]):
                return cls.from_blocks(coords, values, shape, group_dim=group_dim, group_size=group_size)
            coords, values = spread_blocks(coords, values)
        return cls.from_coo(coords, values, shape, group_dim=group_dim, group_size=group_size, block_size=block_size)

    @classmethod
    def _check_options(
        cls, shape: Sequence[int], group_dim: int, group_size: int | None, block_size: Sequence[int] | None
    ) -> tuple[Sizes, int, Sizes | None]:
        size = whole_sizes("shape", shape)
        blocks = None if block_size is None else whole_sizes("block_size", block_size)
        check_shape(size)
        check_block_size(cls.__name__, cls.is_blocked, blocks, size)
        check_group_size(cls.__name__, cls.takes_group_size, group_size, size)
        return size, normal_dim("group_dim", group_dim, size), blocks
