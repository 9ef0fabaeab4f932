"""`Statement` + tensors -> `Bound`: every extent, dtype and size, checked against each other.

Works on anything that has `shape`, `dtype` and `device`, so a sparse format stands where a tensor would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NoReturn, Protocol

import torch

from .errors import OperandError, ShapeError
from .ir import Access, Const, Statement, Var, walk

__all__ = ["Bound", "Pointed", "TensorLike", "bind"]

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


class TensorLike(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class Pointed:
    """The values of index tensor `index` are positions in dimension `dim` of `into`, which has `extent` of them."""

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

    def bound(self) -> Bound:
        self.check_presence()
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
        first: dict[str, Access] = {}
        for root in (self.statement.output, *self.statement.accesses):
            for access in walk(root):
                first.setdefault(access.name, access)
        for name in self.statement.tensor_names:
            if name not in self.tensors:
                self.fail_operand(f"no tensor was given for {name}; pass it as {name}=...", first[name].at)
        for name in self.tensors:
            if name not in first:
                known = ", ".join(sorted(first))
                self.fail_operand(f"{name} was given but the expression does not use it; it uses {known}", None)

    def check_kinds(self) -> None:
        for access in self.statement.index_accesses:
            dtype = self.tensors[access.name].dtype
            if dtype not in INDEX_DTYPES:
                self.fail_operand(
                    f"{access.name} is an index here, so it must be int32 or int64, but it is {_short(dtype)}", access.at
                )
        values = list(self.statement.accesses)
        if self.statement.output.name in self.tensors:
            values.append(self.statement.output)
        for access in values:
            dtype = self.tensors[access.name].dtype
            if dtype not in VALUE_DTYPES:
                allowed = ", ".join(map(_short, VALUE_DTYPES))
                self.fail_operand(
                    f"{access.name} holds values here, so it must be one of {allowed}, but it is {_short(dtype)}", access.at
                )

    def check_devices(self) -> None:
        items = list(self.tensors.items())
        for name, tensor in items[1:]:
            if tensor.device != items[0][1].device:
                self.fail_operand(
                    f"{items[0][0]} is on {items[0][1].device} but {name} is on {tensor.device}; move them to one device", None
                )

    def bind_access(self, access: Access, shape: tuple[int, ...]) -> None:
        if len(access.indices) != len(shape):
            self.fail_shape(
                f"{access.name} has {_count(len(shape), 'dimension')} {list(shape)} "
                f"but {_count(len(access.indices), 'index', 'indices')} here",
                access.at,
            )
        for dim, index in enumerate(access.indices):
            if isinstance(index, Var):
                self.bind_name(index, shape[dim], f"{access.name} dimension {dim}")
            elif isinstance(index, Const) and index.value >= shape[dim]:
                self.fail_shape(f"index {index.value} is outside {access.name} dimension {dim}, which has size {shape[dim]}", index.at)

    def bind_name(self, index: Var, extent: int, origin: str) -> None:
        known = self.extents.setdefault(index.name, extent)
        first = self.origin.setdefault(index.name, origin)
        if known != extent:
            self.fail_shape(f"index {index.name} is {known} in {first} but {extent} in {origin}", index.at)

    def bind_output(self) -> tuple[int, ...]:
        output = self.statement.output
        given = self.tensors.get(output.name)
        size = None if self.given_size is None else tuple(self.given_size)
        if size is not None and any(not isinstance(n, (int, torch.SymInt)) or n < 0 for n in size):
            self.fail_shape(f"size must hold sizes of 0 or more, but it is {list(size)}", None)
        if given is not None:
            if size is not None and size != tuple(given.shape):
                self.fail_shape(f"{output.name} is {list(given.shape)} but size is {list(size)}; give one of them", output.at)
            self.bind_access(output, tuple(given.shape))
            return tuple(given.shape)
        if size is not None:
            self.bind_access(output, size)
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
