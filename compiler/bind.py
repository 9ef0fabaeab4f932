"""`Statement` + tensors -> `Bound`: every extent, dtype and size, checked against each other.

Works on anything that has `shape`, `dtype` and `device`, so a sparse format stands where a tensor would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NoReturn, Protocol

import torch

from .errors import IndexRangeError, OperandError, ShapeError
from .ir import Access, Const, Statement, Var, walk

__all__ = ["Bound", "Meta", "Pointed", "TensorLike", "bind"]

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
FORMATS = {  # what takes torch's own sparse tensors
    torch.sparse_coo: "COO",
    torch.sparse_csr: "GroupCOO",
    torch.sparse_csc: "GroupCOO",
    torch.sparse_bsr: "BlockGroupCOO",
    torch.sparse_bsc: "BlockGroupCOO",
}


class TensorLike(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


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
        found = []
        for root in (self.statement.output, *self.statement.accesses):
            for access in walk(root):
                shape = self.size if access is self.statement.output else self.shapes[access.name]
                for dim, index in enumerate(access.indices):
                    if isinstance(index, Access):
                        found.append(Pointed(index.name, access.name, dim, shape[dim], index.at))
        return tuple(found)

    @cached_property
    def is_empty(self) -> bool:
        """No product is ever formed: some index runs over nothing, or points into nothing."""
        return 0 in self.extents.values() or any(pointed.extent == 0 for pointed in self.pointed)

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
    return _Binder(statement, tensors, size).bound()


class _Binder:
    def __init__(self, statement: Statement, tensors: Mapping[str, TensorLike], size: Sequence[int] | None) -> None:
        self.statement, self.tensors, self.given_size = statement, tensors, size
        self.extents: dict[str, int] = {}
        self.origin: dict[str, str] = {}  # how each extent became known, for messages
        self.first: dict[str, Access] = {}  # where each tensor stands first, for messages
        for root in (statement.output, *statement.accesses):
            for access in walk(root):
                self.first.setdefault(access.name, access)

    def bound(self) -> Bound:
        self.check_presence()
        self.check_layouts()
        self.check_kinds()
        self.check_devices()
        for root in (*self.statement.accesses, *self.statement.output.indirections):
            for access in walk(root):
                self.bind_access(access, tuple(self.tensors[access.name].shape))
        size = self.bind_output()
        factors = [self.tensors[access.name].dtype for access in self.statement.accesses]
        seed = self.tensors.get(self.statement.output.name)
        is_seeded = seed is not None and self.statement.op == "+="
        if seed is not None and (is_seeded or not factors):
            factors.append(seed.dtype)
        dtype = reduce(torch.promote_types, factors) if factors else torch.get_default_dtype()
        devices = [tensor.device for tensor in self.tensors.values()]
        return Bound(
            self.statement,
            self.extents,
            {name: tuple(tensor.shape) for name, tensor in self.tensors.items()},
            {name: tensor.dtype for name, tensor in self.tensors.items()},
            size,
            dtype,
            devices[0] if devices else torch.device("cpu"),
            is_seeded,
        )

    def check_presence(self) -> None:
        output = self.statement.output
        for access in self.statement.index_accesses:
            if access.name == output.name:
                self.fail_operand(f"{output.name} is both an index and the output; rename one of them", access.at)
        for name in self.statement.tensor_names:
            if name not in self.tensors:
                remedy = (
                    "size=... gives the output's size, so rename it" if name == "size" else f"pass it as {name}=..."
                )
                self.fail_operand(f"no tensor was given for {name}; {remedy}", self.first[name].at)
        for name in self.tensors:
            if name not in self.first:
                known = ", ".join(sorted(self.first))
                self.fail_operand(f"{name} was given but the expression does not use it; it uses {known}", None)
        if not self.tensors:
            self.fail_operand(f"no tensor tells dtype and device; pass the output as {output.name}=...", output.at)

    def check_layouts(self) -> None:
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.layout in FORMATS:
                kind = f"a {tensor.layout} tensor"
                remedy = f"insum_ops.formats.{FORMATS[tensor.layout]}.from_torch({name}), or another format"
            elif tensor.is_nested:
                kind, remedy = "a nested tensor", f"{name}.to_padded_tensor(0)"
            elif tensor.is_quantized:
                kind, remedy = "quantized", f"{name}.dequantize()"
            elif tensor.layout is not torch.strided:
                kind, remedy = f"a {tensor.layout} tensor", f"{name}.to_dense()"
            else:
                continue
            self.fail_operand(f"{name} is {kind}; pass {remedy}", self.first[name].at)

    def check_kinds(self) -> None:
        for access in self.statement.index_accesses:
            tensor = self.tensors[access.name]
            is_dense = isinstance(tensor, torch.Tensor)  # rewriting refuses a sparse index
            if is_dense and tensor.dtype not in INDEX_DTYPES:
                self.fail_operand(
                    f"{access.name} is an index, so it must be int32 or int64, not {_short(tensor.dtype)}; "
                    f"convert it with {access.name}.long()",
                    access.at,
                )
        values = list(self.statement.accesses)
        if self.statement.output.name in self.tensors:
            values.append(self.statement.output)
        for access in values:
            dtype = self.tensors[access.name].dtype
            if dtype not in VALUE_DTYPES:
                convert = f"convert it with {access.name}.float()"
                self.fail_operand(
                    f"{access.name} holds values, so it must be float16, bfloat16, float32 or float64, "
                    f"not {_short(dtype)}; {'view it as real' if dtype.is_complex else convert}",
                    access.at,
                )

    def check_devices(self) -> None:
        devices = {name: tensor.device for name, tensor in self.tensors.items()}
        one = next(iter(devices))
        for name, device in devices.items():
            if device != devices[one]:
                problem = f"{one} is on {devices[one]} but {name} is on {device}; move them to one device"
                self.fail_operand(problem, self.first[name].at)

    def bind_access(self, access: Access, shape: tuple[int, ...], origin: str = "") -> None:
        if len(access.indices) != len(shape):
            known = f"{origin or access.name} has {_count(len(shape), 'dimension')} {list(shape)}"
            indices = f"{access.name} has " * bool(origin) + _count(len(access.indices), "index", "indices")
            self.fail_shape(f"{known} but {indices} here; give one per dimension", access.at)
        for dim, index in enumerate(access.indices):
            if isinstance(index, Var):
                self.bind_name(index, shape[dim], f"{origin or access.name} dimension {dim}")
            elif isinstance(index, Const) and index.value >= shape[dim]:
                where = f"{access.name} dimension {dim}, which has size {shape[dim]}"
                raise IndexRangeError(f"index {index.value} is outside {where}", self.statement.text or None, index.at)

    def bind_name(self, index: Var, extent: int, origin: str) -> None:
        known = self.extents.setdefault(index.name, extent)
        first = self.origin.setdefault(index.name, origin)
        if known != extent:
            self.fail_shape(
                f"index {index.name} is {known} in {first} but {extent} in {origin}; they must agree",
                index.at,
            )

    def bind_output(self) -> tuple[int, ...]:
        output = self.statement.output
        given = self.tensors.get(output.name)
        size = None if self.given_size is None else tuple(self.given_size)
        if size is not None and any(not isinstance(n, (int, torch.SymInt)) or n < 0 for n in size):
            self.fail_shape(f"size must hold integers of 0 or more, but it is {list(size)}", None)
        if given is not None:
            if size is not None and size != tuple(given.shape):
                self.fail_shape(
                    f"{output.name} is {list(given.shape)} but size is {list(size)}; give one of them",
                    output.at,
                )
            self.bind_access(output, tuple(given.shape))
            return tuple(given.shape)
        if size is not None:
            self.bind_access(output, size, "size")
            return size
        derived = []
        for dim, index in enumerate(output.indices):
            if not isinstance(index, Var) or index.name not in self.extents:
                self.fail_shape(
                    f"the size of {output.name} dimension {dim} is unknown: index {index} does not tell it; "
                    f"pass {output.name}=... or size=(...)",
                    index.at,
                )
            derived.append(self.extents[index.name])
        return tuple(derived)

    def fail_shape(self, problem: str, at: int | None) -> NoReturn:
        raise ShapeError(problem, self.statement.text or None, at)

    def fail_operand(self, problem: str, at: int | None) -> NoReturn:
        raise OperandError(problem, self.statement.text or None, at)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
