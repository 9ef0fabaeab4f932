"""The constructors that all formats share: check the options, list the entries, lay them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..close_names import with_article
from .check import (
    check_block_size,
    check_dtype,
    check_entries,
    check_group_size,
    check_has_numbers,
    check_inside,
    check_shape,
    check_tensor,
    integer_sizes,
    normal_dim,
    pattern_part,
)
from .convert import Entries, block_grid, dense_entries, merge, merge_into_blocks
from .errors import FormatError
from .sources import ScipyArray, scipy_entries, spread_blocks, torch_entries

__all__ = ["FromTensors"]

Sizes = tuple[int, ...]
Format = TypeVar("Format", bound="FromTensors")


class FromTensors(ABC):
    """What can be made from dense tensors, lists of entries, and sparse tensors of torch and scipy.

    `group_dim` is the dimension whose coordinate p has; `group_size` None chooses from the row counts; `block_size`
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
        """Return the format of distinct entries, sorted with the group dimension first."""

    @classmethod
    def _from_listed(
        cls: type[Format], coords: Tensor, values: Tensor, shape: Sizes, group_dim: int, group_size: int | None
    ) -> Format | None:
        """Return the format of entries in any order, by kernels that sort and lay them out; None without any."""
        return None

    @classmethod
    def from_dense(
        cls: type[Format],
        A: Tensor,
        *,
        group_dim: int = 0,
        group_size: int | None = None,
        block_size: Sequence[int] | None = None,
    ) -> Format:
        """Return the nonzeros of a dense tensor, or its blocks that hold one; NaN is a nonzero.

        Gradients of the format's values reach A.

        Args:
            A: dense tensor [*shape] of any number of dimensions, float16, bfloat16, float32 or float64.
            group_dim: the dimension whose coordinate p has, 0 to group a matrix by rows, 1 by columns.
            group_size: entries of a group, for the grouped formats GroupCOO and BlockGroupCOO; None to choose from how
                many entries each row holds.
            block_size: the size of a block along each dimension, for the blocked formats BlockCOO and BlockGroupCOO; it
                need not divide the shape.

        Returns:
            The format, on the device of A.

        Raises:
            FormatError: A is no dense floating-point tensor, or a dimension, group_size, block_size or shape is given
                that this format does not have.

        Example:
            >>> import torch
            >>> from insum_ops.formats import GroupCOO
            >>> A = GroupCOO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]), group_size=2)
            >>> A.AM.tolist(), A.AK.tolist()
            ([0, 2], [[1, -1], [0, 1]])
        """
        if not isinstance(A, Tensor):
            raise _not_dense(A)
        check_tensor("A", A)
        if A.layout != torch.strided:
            raise FormatError(f"A has layout {A.layout}; from_dense takes a dense tensor, from_torch a sparse one")
        check_dtype("A", A)
        check_has_numbers("A", A)
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
        """Return the format of listed entries, A[coords[:,e]] += values[e], in any order; duplicates add.

        Explicit zeros are entries. Gradients of the format's values reach `values`.

        Args:
            coords: coordinates of each entry [ndim, nnz], integers.
            values: value of each entry [nnz].
            shape: the size of each dimension.
            group_dim: the dimension whose coordinate p has, 0 to group a matrix by rows, 1 by columns.
            group_size: entries of a group, for the grouped formats GroupCOO and BlockGroupCOO; None to choose from how
                many entries each row holds.
            block_size: the size of a block along each dimension, for the blocked formats BlockCOO and BlockGroupCOO; it
                need not divide the shape.

        Returns:
            The format, on the device of the values.

        Raises:
            FormatError: coords and values do not fit each other, a coordinate lies outside the shape, or a dimension,
                group_size, block_size or shape is given that this format does not have.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> A = COO.from_coo(torch.tensor([[2, 0, 2], [1, 1, 1]]), torch.tensor([1.0, 5.0, 2.0]), (3, 2))
            >>> A.AM.tolist(), A.AK.tolist(), A.AV.tolist()
            ([0, 2], [1, 1], [5.0, 3.0])
        """
        check_tensor("coords", coords)
        check_tensor("values", values)
        size, dim, blocks = cls._check_options(shape, group_dim, group_size, block_size)
        coords = pattern_part("coords", coords)
        check_entries(coords, values, size, ())
        if blocks is None:
            form = cls._from_listed(coords, values, size, dim, group_size)
            if form is not None:
                return form
            entries = merge(Entries(coords.long(), values), size, dim)
        else:
            check_inside(coords, size)
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
        """Return the blocked format of listed blocks, in any order; blocks at the same place add.

        Args:
            coords: coordinates of each block, counted in blocks [ndim, E], integers.
            values: the blocks [E, *block_size].
            shape: the size of each dimension, in elements.
            group_dim: the dimension whose coordinate p has, 0 to group a matrix by rows, 1 by columns.
            group_size: entries of a group, for the grouped formats GroupCOO and BlockGroupCOO; None to choose from how
                many entries each row holds.

        Returns:
            The format, on the device of the values.

        Raises:
            FormatError: the format has no blocks, coords and values do not fit each other, a coordinate lies outside
                the shape, or a dimension, group_size, block_size or shape is given that this format does not have.

        Example:
            >>> import torch
            >>> from insum_ops.formats import BlockCOO
            >>> A = BlockCOO.from_blocks(torch.tensor([[1, 0], [0, 1]]), torch.ones(2, 16, 16), (32, 32))
            >>> A.AM.tolist(), A.AK.tolist(), A.AV.shape
            ([0, 1], [1, 0], torch.Size([2, 16, 16]))
        """
        check_tensor("coords", coords)
        check_tensor("values", values)
        size, dim, blocks = cls._check_options(shape, group_dim, group_size, values.shape[1:])
        grid = block_grid(size, blocks)
        coords = pattern_part("coords", coords)
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
        """Return the format of a torch sparse tensor: COO, or a matrix in CSR, CSC, BSR or BSC.

        Explicit zeros are entries; what an uncoalesced COO tensor lists twice is added.

        Args:
            A: torch sparse tensor [*shape] without dense dimensions.
            group_dim: the dimension whose coordinate p has, 0 to group a matrix by rows, 1 by columns.
            group_size: entries of a group, for the grouped formats GroupCOO and BlockGroupCOO; None to choose from how
                many entries each row holds.
            block_size: the size of a block along each dimension, for the blocked formats BlockCOO and BlockGroupCOO; it
                need not divide the shape; blocks of a BSR or BSC tensor stay if this is theirs or None.

        Returns:
            The format, on the device of A.

        Raises:
            FormatError: A is of another layout or holds broken indices, or a dimension, group_size, block_size or shape
                is given that this format does not have.

        Example:
            >>> import torch
            >>> from insum_ops.formats import GroupCOO
            >>> GroupCOO.from_torch(torch.eye(4).to_sparse())
            GroupCOO(shape=[4, 4], nnz=4, groups=4, group_dim=0, group_size=1, padding=0.0%, bytes=48)
        """
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
        """Return the format of a scipy sparse array or matrix, on the CPU; nothing is shared with it.

        Args:
            A: scipy sparse array [*shape] of floating-point values.
            group_dim: the dimension whose coordinate p has, 0 to group a matrix by rows, 1 by columns.
            group_size: entries of a group, for the grouped formats GroupCOO and BlockGroupCOO; None to choose from how
                many entries each row holds.
            block_size: the size of a block along each dimension, for the blocked formats BlockCOO and BlockGroupCOO; it
                need not divide the shape; blocks of a BSR array stay if this is theirs or None.

        Returns:
            The format, on the CPU.

        Raises:
            FormatError: A is no scipy sparse array or holds values that a format does not, or a dimension, group_size,
                block_size or shape is given that this format does not have.

        Example:
            >>> from scipy.sparse import eye_array
            >>> from insum_ops.formats import COO
            >>> COO.from_scipy(eye_array(4))
            COO(shape=[4, 4], nnz=4, groups=4, group_dim=0, group_size=1, padding=0.0%, bytes=64)
        """
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
        """Return the format of listed entries, or of listed blocks, which a format without blocks takes apart."""
        if values.ndim > 1:
            if cls.is_blocked and (block_size is None or tuple(block_size) == values.shape[1:]):
                return cls.from_blocks(coords, values, shape, group_dim=group_dim, group_size=group_size)
            coords, values = spread_blocks(coords, values)
        return cls.from_coo(coords, values, shape, group_dim=group_dim, group_size=group_size, block_size=block_size)

    @classmethod
    def _check_options(
        cls, shape: Sequence[int], group_dim: int, group_size: int | None, block_size: Sequence[int] | None
    ) -> tuple[Sizes, int, Sizes | None]:
        """Return shape, group_dim and block_size as integers; raise FormatError for one that this format lacks."""
        size = integer_sizes("shape", shape)
        blocks = None if block_size is None else integer_sizes("block_size", block_size)
        check_shape(size)
        check_block_size(cls.__name__, cls.is_blocked, blocks, size)
        check_group_size(cls.__name__, cls.takes_group_size, group_size, size)
        return size, normal_dim("group_dim", group_dim, size), blocks


def _not_dense(value: object) -> FormatError:
    """Return the error for an argument of `from_dense` that is no tensor."""
    kind = type(value).__name__
    remedy = "; pass torch.from_numpy(A)" if kind == "ndarray" else ""
    return FormatError(f"A is {with_article(kind)}; from_dense takes a dense tensor{remedy}")
