"""`Statement` + tensors -> `Bound`: every extent, dtype and size, checked against each other.

Works on anything that has `shape`, `dtype` and `device`, so a sparse format stands where a tensor would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch

from ...formats.torch_state import default_dtype, is_zero
from ..language import Access, Const, Statement, Var
from .bind_errors import INDEX_DTYPES, VALUE_DTYPES, TensorLike, refuse

__all__ = [
    "Bound",
    "Kinds",
    "Meta",
    "Pointed",
    "TensorLike",
    "bind",
    "kernel_strides",
    "kinds_of",
    "row_major",
    "sized",
]

INTEGERS = (int, torch.SymInt)


@dataclass(frozen=True)
class Meta:
    """A tensor without data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Pointed:
    """Index tensor `index` holds positions in dimension `dim` of `into`, which has `extent` of them."""

    index: str
    into: str
    dim: int
    extent: int
    at: int


@dataclass(frozen=True)
class Kinds:
    """What a statement's tensors are, apart from their sizes."""

    dtypes: Mapping[str, torch.dtype]
    dtype: torch.dtype  # of the result
    device: torch.device
    is_seeded: bool


@dataclass(frozen=True)
class Bound:
    """A statement whose extents, dtypes and output size are known; independent of the tensors' data."""

    statement: Statement
    extents: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_seeded: bool  # starts from the given output tensor
    dynamic: frozenset[str] = frozenset()  # index names of which nothing but an example's length is known

    @cached_property
    def pointed(self) -> tuple[Pointed, ...]:
        """What each index tensor points into, the output included."""
        size, shapes = self.size, self.shapes
        return tuple(
            Pointed(name, into, dim, (size if is_output else shapes[into])[dim], at)
            for name, into, dim, at, is_output in self.statement.pointings
        )

    @property
    def is_empty(self) -> bool:
        """True if no product is ever formed: some index runs over nothing, or points into nothing.

        A tracer's size that depends on data is taken for one that is not 0.
        """
        return any([is_zero(size) for shape in (self.size, *self.shapes.values()) for size in shape])

    @cached_property
    def winner_dtype(self) -> torch.dtype:
        """The dtype of winners' positions, which are counted over all reduced names together."""
        count = 1
        for name in self.statement.reduced:
            count *= self.extents[name]
        return torch.int32 if count < 2**31 else torch.int64

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the sums: float32 for half precision, which is rounded once, and otherwise the result's own."""
        return torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype


def bind(statement: Statement, tensors: Mapping[str, TensorLike], size: Sequence[int] | None = None) -> Bound:
    """Check `tensors` against `statement` and return every extent and the output's size and dtype.

    Raises InsumError, in the words of `bind_errors`, if they do not fit.
    """
    return sized(statement, kinds_of(statement, tensors, size), tensors, size)


def kinds_of(statement: Statement, tensors: Mapping[str, TensorLike], size: Sequence[int] | None) -> Kinds:
    """Return the part of `bind` that does not depend on sizes; `refuse` raises if the tensors may not stand there."""
    device, output = _device(tensors), statement.output.name
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if device is None or not _are_allowed(statement, tensors, dtypes):
        refuse(statement, tensors, size)
    is_seeded = output in dtypes and statement.op == "+="
    value_dtypes = [dtypes[access.name] for access in statement.accesses]
    if is_seeded or (not value_dtypes and output in dtypes):
        value_dtypes.append(dtypes[output])
    dtype = reduce(torch.promote_types, value_dtypes) if value_dtypes else default_dtype()
    return Kinds(dtypes, dtype, device, is_seeded)


def sized(statement: Statement, kinds: Kinds, tensors: Mapping[str, TensorLike], size: Sequence[int] | None) -> Bound:
    """Return the bound statement: the part of `bind` that depends on sizes, and so runs again for new ones.

    Raises InsumError if the shapes, or `size`, do not agree.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    extents: dict[str, int] = {}
    for access in statement.reads:
        if not _fits(extents, access, shapes[access.name]):
            refuse(statement, tensors, size)
    output_size = _output_size(statement.output, extents, shapes.get(statement.output.name), size)
    if output_size is None:
        refuse(statement, tensors, size)
    return Bound(statement, extents, shapes, kinds.dtypes, output_size, kinds.dtype, kinds.device, kinds.is_seeded)


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this size.

    >>> row_major((4, 0, 3)), row_major(())
    ((3, 3, 1), ())
    """
    strides, step = [1] * len(size), 1
    for dim in range(len(size) - 1, 0, -1):
        step *= max(size[dim], 1)
        strides[dim - 1] = step
    return tuple(strides)


def kernel_strides(bound: Bound, strides: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the strides that a kernel depends on: by the tensors' names, "" for the output, " seed" for its seed."""
    own = {**strides, "": row_major(bound.size)}
    return own | {" seed": strides[bound.statement.output.name]} if bound.is_seeded else own


def _device(tensors: Mapping[str, TensorLike]) -> torch.device | None:
    """Return the one device of all tensors; None if there are several, or if a tensor has no plain values in memory."""
    device = None
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor) and (
            tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
        ):
            return None
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            return None
    return device


def _are_allowed(statement: Statement, tensors: Mapping[str, TensorLike], dtypes: Mapping[str, torch.dtype]) -> bool:
    """Return True if names and tensors match one to one and each tensor has a dtype that is allowed where it stands."""
    names, output = statement.tensor_names, statement.output.name
    is_more = output in dtypes and output not in names  # a tensor that no factor reads
    if not all([name in dtypes for name in names]) or len(dtypes) != len(names) + is_more:
        return False
    for name in statement.index_names:
        if name == output or (dtypes[name] not in INDEX_DTYPES and isinstance(tensors[name], torch.Tensor)):
            return False
    if is_more and dtypes[output] not in VALUE_DTYPES:
        return False
    return all([dtypes[access.name] in VALUE_DTYPES for access in statement.accesses])


def _fits(extents: dict[str, int], access: Access, shape: tuple[int, ...]) -> bool:
    """Return True if `shape` agrees with `extents`; extents that are new are added to them."""
    if len(access.indices) != len(shape):
        return False
    for index, extent in zip(access.indices, shape):
        if isinstance(index, Var):
            first_extent = extents.setdefault(index.name, extent)
            if first_extent is not extent and first_extent != extent:
                return False
        elif isinstance(index, Const) and index.value >= extent:
            return False
    return True


def _output_size(
    output: Access, extents: dict[str, int], tensor_shape: tuple[int, ...] | None, size: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Return the output's size from its tensor, `size` or the extents; None if they disagree or do not determine it."""
    requested = None if size is None else tuple(size)
    if requested is not None and any([not isinstance(n, INTEGERS) or n < 0 for n in requested]):
        return None
    if tensor_shape is not None and requested is not None and requested != tensor_shape:
        return None
    output_size = requested if tensor_shape is None else tensor_shape
    if output_size is not None:
        return output_size if _fits(extents, output, output_size) else None
    names = [index.name for index in output.indices if isinstance(index, Var) and index.name in extents]
    return tuple([extents[name] for name in names]) if len(names) == len(output.indices) else None
