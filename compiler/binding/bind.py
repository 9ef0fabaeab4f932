"""`Statement` + tensors -> `Bound`: every extent, dtype and size, checked against each other.

Works on anything that has `shape`, `dtype` and `device`, so a sparse format stands where a tensor would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch

from ...formats.torch_state import default_dtype
from ..language import Access, Const, Statement, Var
from .bind_errors import INDEX_DTYPES, VALUE_DTYPES, TensorLike, refuse

__all__ = ["Bound", "Kinds", "Meta", "Pointed", "TensorLike", "bind", "kinds_of", "row_major", "sized"]

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
    """What is known of a statement's tensors without their sizes."""

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
        """No product is ever formed: some index runs over nothing, or points into nothing."""
        return 0 in self.size or any([0 in shape for shape in self.shapes.values()])

    @cached_property
    def winner_dtype(self) -> torch.dtype:
        """Of the positions of winning products, counted over the names that are reduced."""
        count = 1
        for name in self.statement.reduced:
            count *= self.extents[name]
        return torch.int32 if count < 2**31 else torch.int64

    @property
    def compute_dtype(self) -> torch.dtype:
        """Half precision is summed in float32 and rounded once."""
        return torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype


def bind(statement: Statement, tensors: Mapping[str, TensorLike], size: Sequence[int] | None = None) -> Bound:
    """Check `tensors` against `statement` and work out every extent and the output's size and dtype."""
    return sized(statement, kinds_of(statement, tensors, size), tensors, size)


def kinds_of(statement: Statement, tensors: Mapping[str, TensorLike], size: Sequence[int] | None) -> Kinds:
    """The part of `bind` that holds whatever the sizes are; `refuse` looks again to say what is wrong."""
    device, output = _device(tensors), statement.output.name
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if device is None or not _are_known(statement, tensors, dtypes):
        refuse(statement, tensors, size)
    is_seeded = output in dtypes and statement.op == "+="
    found = [dtypes[access.name] for access in statement.accesses]
    if is_seeded or (not found and output in dtypes):
        found.append(dtypes[output])
    dtype = reduce(torch.promote_types, found) if found else default_dtype()
    return Kinds(dtypes, dtype, device, is_seeded)


def sized(statement: Statement, kinds: Kinds, tensors: Mapping[str, TensorLike], size: Sequence[int] | None) -> Bound:
    """The part of `bind` that is about sizes: a call over tensors of new ones waits for it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    extents: dict[str, int] = {}
    for access in statement.reads:
        if not _fits(extents, access, shapes[access.name]):
            refuse(statement, tensors, size)
    own = _output_size(statement.output, extents, shapes.get(statement.output.name), size)
    if own is None:
        refuse(statement, tensors, size)
    return Bound(statement, extents, shapes, kinds.dtypes, own, kinds.dtype, kinds.device, kinds.is_seeded)


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> row_major((4, 0, 3)), row_major(())
    ((3, 3, 1), ())
    """
    strides, step = [1] * len(size), 1
    for dim in range(len(size) - 1, 0, -1):
        step *= max(size[dim], 1)
        strides[dim - 1] = step
    return tuple(strides)


def _device(tensors: Mapping[str, TensorLike]) -> torch.device | None:
    """The one device of all tensors; None: there are several, or a tensor that has no plain values in memory."""
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


def _are_known(statement: Statement, tensors: Mapping[str, TensorLike], dtypes: Mapping[str, torch.dtype]) -> bool:
    """There is a tensor for every name and a name for every tensor, and each has a type that it may have there."""
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
    """The shape agrees with the extents that are known, and those that it tells are added."""
    if len(access.indices) != len(shape):
        return False
    for index, extent in zip(access.indices, shape):
        if isinstance(index, Var):
            known = extents.setdefault(index.name, extent)
            if known is not extent and known != extent:
                return False
        elif isinstance(index, Const) and index.value >= extent:
            return False
    return True


def _output_size(
    output: Access, extents: dict[str, int], given: tuple[int, ...] | None, size: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Of the output tensor, of `size`, or of the extents; None: they disagree, or tell too little."""
    wanted = None if size is None else tuple(size)
    if wanted is not None and any([not isinstance(n, INTEGERS) or n < 0 for n in wanted]):
        return None
    if given is not None and wanted is not None and wanted != given:
        return None
    own = wanted if given is None else given
    if own is not None:
        return own if _fits(extents, output, own) else None
    names = [index.name for index in output.indices if isinstance(index, Var) and index.name in extents]
    return tuple([extents[name] for name in names]) if len(names) == len(output.indices) else None
