"""Why tensors do not fit a statement, in words: `bind` comes here once something is wrong, and never otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

import torch

from ...close_names import close_name
from ..language import Access, Const, IndexRangeError, OperandError, ShapeError, Statement, Var, walk

__all__ = ["INDEX_DTYPES", "VALUE_DTYPES", "TensorLike", "refuse"]

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


def refuse(statement: Statement, tensors: Mapping[str, TensorLike], size: Sequence[int] | None) -> NoReturn:
    """Raise for the first thing that keeps `tensors` from fitting `statement`."""
    _BindErrors(statement, tensors, size).tell()
    raise AssertionError(f"{statement} fits its tensors")


class _BindErrors:
    """The checks of `bind` one after the other; the first that fails raises, in the user's names."""

    def __init__(self, statement: Statement, tensors: Mapping[str, TensorLike], size: Sequence[int] | None) -> None:
        self.statement, self.tensors, self.size = statement, tensors, size
        self.extents: dict[str, int] = {}
        self.origin: dict[str, str] = {}  # how each extent became known, for messages
        self.first: dict[str, Access] = {}  # where each tensor stands first, for messages
        for root in (statement.output, *statement.accesses):
            for access in walk(root):
                self.first.setdefault(access.name, access)

    def tell(self) -> None:
        """Raise the first error; return if the tensors fit after all."""
        self.check_presence()
        self.check_layouts()
        self.check_kinds()
        self.check_devices()
        for access in self.statement.reads:
            self.check_access(access, tuple(self.tensors[access.name].shape))
        self.check_output()

    def check_presence(self) -> None:
        """Refuse a name without a tensor and a tensor without a name."""
        output = self.statement.output
        for access in self.statement.index_accesses:
            if access.name == output.name:
                self.fail_operand(f"{output.name} is both an index and the output; rename one of them", access.at)
        for name in self.statement.tensor_names:
            if name not in self.tensors:
                unused = [passed for passed in self.tensors if passed not in self.first]
                close = close_name(name, unused)
                if name == "size":
                    remedy = "size=... gives the output's size, so rename it"
                elif close is not None:
                    remedy = f"{close} was given, which the expression does not use; pass it as {name}=..."
                else:
                    remedy = f"pass it as {name}=..."
                self.fail_operand(f"no tensor was given for {name}; {remedy}", self.first[name].at)
        for name in self.tensors:
            if name not in self.first:
                names = ", ".join(sorted(self.first))
                remedy = f"pass the output as {output.name}=..." if name == "out" else f"it uses {names}"
                self.fail_operand(f"{name} was given but the expression does not use it; {remedy}", None)
        if not self.tensors:
            self.fail_operand(f"no tensor tells dtype and device; pass the output as {output.name}=...", output.at)

    def check_layouts(self) -> None:
        """Refuse tensors without plain values in memory: torch's sparse layouts, nested and quantized tensors."""
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
        """Refuse a dtype that can't stand where the tensor stands."""
        for access in self.statement.index_accesses:
            tensor = self.tensors[access.name]
            is_dense = isinstance(tensor, torch.Tensor)  # rewriting refuses a sparse index
            if is_dense and tensor.dtype not in INDEX_DTYPES:
                remedy = f"convert it with {access.name}.long()"
                if tensor.dtype is torch.bool:
                    remedy = f"pass the positions where it is True, as {access.name}.nonzero()"
                    remedy += ".squeeze(1)" * (len(tensor.shape) == 1)
                self.fail_operand(
                    f"{access.name} is an index, so it must be int32 or int64, not {_short(tensor.dtype)}; {remedy}",
                    access.at,
                )
        values = list(self.statement.accesses)
        if self.statement.output.name in self.tensors:
            values.append(self.statement.output)
        for access in values:
            tensor, dtype = self.tensors[access.name], self.tensors[access.name].dtype
            if dtype not in VALUE_DTYPES:
                convert = f"convert it with {access.name}.float()"
                if dtype in INDEX_DTYPES and len(tensor.shape) == 2 and tensor.shape[0] == 2:  # as an edge_index
                    convert += f", or if it lists coordinates, pass formats.COO.from_coo({access.name}, values, shape)"
                self.fail_operand(
                    f"{access.name} holds values, so it must be float16, bfloat16, float32 or float64, "
                    f"not {_short(dtype)}; {'view it as real' if dtype.is_complex else convert}",
                    access.at,
                )

    def check_devices(self) -> None:
        devices = {name: tensor.device for name, tensor in self.tensors.items()}
        first = next(iter(devices))
        for name, device in devices.items():
            if device != devices[first]:
                problem = f"{first} is on {devices[first]} but {name} is on {device}; move them to one device"
                self.fail_operand(problem, self.first[name].at)

    def check_access(self, access: Access, shape: tuple[int, ...], origin: str = "") -> None:
        """Refuse a shape that does not fit the access; `origin` names what has it, by default the access's tensor."""
        if len(access.indices) != len(shape):
            dimensions = f"{origin or access.name} has {_count(len(shape), 'dimension')} {list(shape)}"
            indices = f"{access.name} has " * bool(origin) + _count(len(access.indices), "index", "indices")
            self.fail_shape(f"{dimensions} but {indices} here; give one per dimension", access.at)
        for dim, index in enumerate(access.indices):
            if isinstance(index, Var):
                self.check_name(index, shape[dim], f"{origin or access.name} dimension {dim}")
            elif isinstance(index, Const) and index.value >= shape[dim]:
                where = f"{access.name} dimension {dim}, which has size {shape[dim]}"
                raise IndexRangeError(f"index {index.value} is outside {where}", self.statement.text or None, index.at)

    def check_name(self, index: Var, extent: int, origin: str) -> None:
        """Refuse an extent that differs from the one that the index name had first."""
        first_extent = self.extents.setdefault(index.name, extent)
        first_origin = self.origin.setdefault(index.name, origin)
        if first_extent != extent:
            self.fail_shape(
                f"index {index.name} is {first_extent} in {first_origin} but {extent} in {origin}; they must agree",
                index.at,
            )

    def check_output(self) -> None:
        """Refuse an output whose tensor, `size` and extents disagree, or determine no size."""
        output = self.statement.output
        tensor = self.tensors.get(output.name)
        size = None if self.size is None else tuple(self.size)
        if size is not None and any(not isinstance(n, (int, torch.SymInt)) or n < 0 for n in size):
            self.fail_shape(f"size must hold integers of 0 or more, but it is {list(size)}", None)
        if tensor is not None:
            if size is not None and size != tuple(tensor.shape):
                self.fail_shape(
                    f"{output.name} is {list(tensor.shape)} but size is {list(size)}; give one of them",
                    output.at,
                )
            self.check_access(output, tuple(tensor.shape))
            return
        if size is not None:
            self.check_access(output, size, "size")
            return
        for dim, index in enumerate(output.indices):
            if not isinstance(index, Var) or index.name not in self.extents:
                self.fail_shape(
                    f"the size of {output.name} dimension {dim} is unknown: index {index} does not tell it; "
                    f"pass {output.name}=... or size=(...)",
                    index.at,
                )

    def fail_shape(self, problem: str, at: int | None) -> NoReturn:
        raise ShapeError(problem, self.statement.text or None, at)

    def fail_operand(self, problem: str, at: int | None) -> NoReturn:
        raise OperandError(problem, self.statement.text or None, at)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(n: int, singular: str, plural: str | None = None) -> str:
    return f"{n} {singular if n == 1 else plural or singular + 's'}"
