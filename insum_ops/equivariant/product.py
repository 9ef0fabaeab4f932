"""`tensor_product`: an equivariant product of irreps on plain tensors, alone or along the edges of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..compiler import (
    INDEX_DTYPES,
    IndexRangeError,
    InsumError,
    OperandError,
    ShapeError,
    UnsupportedError,
    remembered_range,
    takes_composites,
)
from ..formats import GroupCOO
from ..formats.guard import may_keep
from ..formats.torch_state import asked_once, is_autocast_enabled, is_dynamo, is_watched
from ..not_scripted import not_scripted
from .clebsch_gordan import Irreps, read_irreps
from .decomposition import Decomposition, decompose, takes_one_hot
from .paths import Instruction, IrrepNormalization, PathNormalization, fully_connected, normalised
from .slots import LayoutName
from .traced_product import as_text, from_text, traced_product

__all__ = ["Product", "make_product", "tensor_product"]

Lead = tuple[int, ...]
PRODUCTS = 256  # kept before starting afresh


@not_scripted
def tensor_product(
    x: Tensor,
    y: Tensor | GroupCOO,
    weight: Tensor | None = None,
    *,
    irreps_in1: Irreps,
    irreps_in2: Irreps,
    irreps_out: Irreps,
    instructions: Sequence[Sequence[object]] | None = None,
    irrep_normalization: IrrepNormalization | None = None,
    path_normalization: PathNormalization | None = None,
    layout: LayoutName = "mul_ir",
    src: Tensor | None = None,
    dst: Tensor | None = None,
    num_nodes: int | None = None,
) -> Tensor:
    """`Z[b,w,k] += C[i,j,k] * W[u,v,w] * X[b,u,i] * Y[b,v,j]`, added up over the paths between irreps.

    An equivariant tensor product: each path multiplies a block of irreps of x with one of y by their Clebsch-Gordan
    coefficients C, mixes channels by weights W, and adds to a block of the output. Without `instructions` it takes
    every path that angular momentum and parity allow, as e3nn's `FullyConnectedTensorProduct`; with them those that
    e3nn's `TensorProduct` would. Irreps are e3nn's, which must be installed (`pip install 'insum_ops[e3nn]'`).
    Gradients reach x, y and weight, to any order.

    With `src` and `dst`, x holds nodes, y and weight edges: edge e multiplies node `src[e]` and adds its product to
    node `dst[e]`, as a layer of message passing does.

    Args:
        x: first input [..., irreps_in1.dim]; [nodes, irreps_in1.dim] with edges.
        y: second input [..., irreps_in2.dim]. Where it is one block of scalars and one-hot, it may be the positions of
            its ones, integers [...], or with shared weights a `GroupCOO` [rows, irreps_in2.dim] with `group_dim=1`:
            rows grouped by kind.
        weight: [weight_numel] for all samples or [..., weight_numel] for each, the paths' weights one after the other,
            e3nn's order; None where no path has weights.
        irreps_in1: irreps of x, a string such as "16x0e + 8x1o" or an `e3nn.o3.Irreps`.
        irreps_in2: irreps of y.
        irreps_out: irreps of the result.
        instructions: paths as e3nn writes them, `(i_in1, i_in2, i_out, mode, has_weight[, path_weight])`, with the
            modes uvw, uvu, uvv, uuw, uuu and uvuv; None for every allowed path, with weights and mode uvw.
        irrep_normalization: "component" (None means it), "norm" or "none", as in e3nn.
        path_normalization: "element" (None means it), "path" or "none", as in e3nn.
        layout: "mul_ir", e3nn's, each block [multiplicity, 2l+1], or "ir_mul", its transpose.
        src: the node of x that each edge multiplies, integers [edges]; a negative one is no edge.
        dst: the node that each edge adds to, integers [edges]; a negative one is no edge.
        num_nodes: rows of the result with edges; None for as many as x has.

    Returns:
        Z [..., irreps_out.dim], the leading dimensions of x, y and weight broadcast; [num_nodes, irreps_out.dim] with
        edges.

    Raises:
        OperandError: irreps that e3nn can't read, an instruction that is not allowed, a missing weight, or tensors of
            two dtypes or devices.
        ShapeError: a last dimension that is not that of its irreps, leading dimensions that do not broadcast,
            multiplicities that do not fit a mode, or edges of different numbers.
        IndexRangeError: `src`, `dst` or a position in y is out of range.
        UnsupportedError: another connection mode, or a `GroupCOO` where none can stand.
        ImportError: e3nn is not installed.

    Example:
        >>> import torch
        >>> from insum_ops import tensor_product
        >>> irreps = dict(irreps_in1="4x0e + 4x1o", irreps_in2="1x0e + 1x1o", irreps_out="8x0e + 8x1o")
        >>> nodes, edges, weight = torch.randn(10, 16), torch.randn(30, 4), torch.randn(128)
        >>> tensor_product(torch.randn(30, 16), edges, weight, **irreps).shape
        torch.Size([30, 32])
        >>> src, dst = torch.randint(10, (2, 30))
        >>> tensor_product(nodes, edges, weight, **irreps, src=src, dst=dst).shape
        torch.Size([10, 32])
    """
    paths = instructions
    if paths is not None:
        paths = tuple([tuple(path) if type(path) is list else path for path in paths])
    text = (irreps_in1, irreps_in2, irreps_out, paths, irrep_normalization, path_normalization, layout)
    return _find_product(text)(x, y, weight, src, dst, num_nodes)


def _find_product(text: tuple[Any, ...]) -> Product:
    """Return the product for the arguments that define it: irreps, paths, normalisations and layout.

    Where irreps are strings it is also kept in a dict, which a tracer can look into; it can't read irreps.
    """
    is_text = type(text[0]) is type(text[1]) is type(text[2]) is str
    problem = _made(text) if is_text and is_dynamo() else ""
    if problem:
        raise OperandError(problem)
    product = _products.get(text) if is_text else None
    if product is None:
        irreps = [read_irreps(*named_irreps) for named_irreps in zip(("irreps_in1", "irreps_in2", "irreps_out"), text)]
        with nullcontext() if is_dynamo() else _disable_current_modes():  # tables are constants to torch.export
            product = (_cached_product if may_keep() else _cached_product.__wrapped__)(*irreps, *text[3:])
        if is_text and may_keep():
            _keep(text, product)
    return product


def _keep(text: tuple[Any, ...], product: Product) -> None:
    if len(_products) >= PRODUCTS:
        _products.clear()
    _products[text] = product


@asked_once
def _made(text: tuple[Any, ...]) -> str:
    """Make the product of irreps that are strings, and keep it, for a tracer; return what is wrong with them, or ""."""
    try:
        if text not in _products:
            irreps = [read_irreps(f"irreps_{side}", each) for side, each in zip(("in1", "in2", "out"), text)]
            with _disable_current_modes():
                _keep(text, _cached_product(*irreps, *text[3:]))
    except InsumError as error:
        return str(error)
    return ""


@lru_cache(maxsize=PRODUCTS)
def _cached_product(
    in1: Irreps,
    in2: Irreps,
    out: Irreps,
    paths: tuple[tuple[object, ...], ...] | None,
    irrep_rule: IrrepNormalization | None,
    path_rule: PathNormalization | None,
    layout: str,
) -> Product:
    """Return a product, kept by what defines it; `paths` is None for every path that is allowed."""
    chosen = fully_connected(in1, in2, out) if paths is None else paths
    instructions = normalised(in1, in2, out, chosen, (None, None, None), irrep_rule, path_rule)
    return make_product(in1, in2, out, instructions, layout)


def make_product(in1: Irreps, in2: Irreps, out: Irreps, instructions: tuple[Instruction, ...], layout: str) -> Product:
    """Return a product for normalised instructions."""
    numel = sum(prod(path.path_shape) for path in instructions if path.has_weight)
    decomposition = (decompose if may_keep() else decompose.__wrapped__)(in1, in2, out, instructions, layout)
    text = as_text((in1, in2, out), instructions, layout)
    return Product(in1, in2, out, numel, takes_one_hot(in2, instructions), decomposition, text)


def _product_of_text(text: str) -> Product:
    """Return the product of which `as_text` returned the text."""
    irreps, instructions, layout = from_text(text)
    return make_product(*irreps, instructions, layout)


class Product:
    """A tensor product: its decomposition into terms, behind checks and broadcasting."""

    def __init__(
        self,
        in1: Irreps,
        in2: Irreps,
        out: Irreps,
        weight_numel: int,
        takes_one_hot: bool,
        decomposition: Decomposition | None,  # None: no path has any product in it
        text: str,  # by which `traced_product` knows the decomposition
    ) -> None:
        self.in1, self.in2, self.out, self.text = str(in1), str(in2), str(out), text  # no tracer prints irreps
        self.weight_numel, self.takes_one_hot, self.decomposition = weight_numel, takes_one_hot, decomposition
        self.dims: tuple[int, int, int] = (in1.dim, in2.dim, out.dim)
        self.last = ((in1.dim,), (in2.dim,))

    def __reduce__(self) -> Any:
        """A copy, or one from a pickle, shares the tables of all products like it, as `traced_product` does."""
        return _product_of_text, (self.text,)

    def __call__(
        self,
        x: Tensor,
        y: Tensor | GroupCOO,
        weight: Tensor | None = None,
        src: Tensor | None = None,
        dst: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        for name, tensor in (("x", x), ("weight", weight), ("src", src), ("dst", dst)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise OperandError(f"{name} is of type {type(tensor).__name__}; pass a torch.Tensor")
        if not isinstance(y, Tensor):
            return self.with_sparse(x, y, weight, src is not None or dst is not None)
        if x.is_nested or y.is_nested:  # before sizes are asked for, which those of an older kind do not have
            name = "x" if x.is_nested else "y"
            raise OperandError(f"{name} is a nested tensor; pass a padded one, as {name}.to_padded_tensor(0.0)")
        is_one_hot = not y.is_floating_point()
        if is_one_hot or not self.fits(x, y, weight):
            self.check(x, y, weight)
        w_lead = weight.shape[:-1] if weight is not None else ()
        if not self.weight_numel:
            weight = None
        if src is not None or dst is not None or num_nodes is not None:
            return self.along_edges(x, y, weight, src, dst, num_nodes)
        x_lead, y_lead = x.shape[:-1], y.shape if is_one_hot else y.shape[:-1]
        if len(x_lead) == 1 and x_lead == y_lead and (not w_lead or w_lead == x_lead):
            return self.run(x, y, weight)
        lead = self.broadcast(x_lead, y_lead, w_lead)
        x = _flat(x, lead, (self.dims[0],))
        y = _flat(y, lead, () if is_one_hot else (self.dims[1],))
        if weight is not None:
            is_one = weight.numel() == self.weight_numel
            weight = weight.reshape(-1) if is_one else _flat(weight, lead, (self.weight_numel,))
        return self.run(x, y, weight).view(*lead, self.dims[2])

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy all tables to a device: a compiled or exported call may be the first there, and can't make copies."""
        if self.decomposition is not None:
            for dims in (1, 2):  # weights for all samples, and of each
                self.decomposition.prepare(torch.empty([0] * dims, device="cpu"), device, dtype)

    def with_sparse(self, x: Tensor, y: GroupCOO, weight: Tensor | None, has_edges: bool) -> Tensor:
        """Return the product with a sparse y; refuse edges, weights for each sample, and irreps that are no scalars."""
        if not isinstance(y, GroupCOO):
            raise OperandError(f"y is of type {type(y).__name__}; pass a torch.Tensor or a GroupCOO")
        if not self.takes_one_hot or has_edges or (weight is not None and weight.dim() != 1):
            raise UnsupportedError(
                "y is a GroupCOO, but that is for one block of scalars in fully connected paths, without edges, "
                "with weights shared by all rows; pass y.to_dense()"
            )
        if tuple(y.shape) != (*x.shape[:-1], self.dims[1]) or x.dim() != 2:
            shapes = f"x is {list(x.shape)} and y {list(y.shape)}"
            raise ShapeError(f"{shapes}, but a sparse y is [rows of x, {self.dims[1]}] for irreps_in2 {self.in2}")
        self.check(x, y.values.new_empty(1, self.dims[1]), weight)
        if self.decomposition is None:
            return x.new_zeros(len(x), self.dims[2])
        return self.decomposition(x, y.regroup(1), weight)

    def run(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        src: Tensor | None = None,
        dst: Tensor | None = None,
        num_rows: int = 0,
    ) -> Tensor:
        """Return the product of tensors [b, ...] that were checked, [num_rows, ...] along edges."""
        if self.decomposition is None:
            return x.new_zeros(y.shape[0] if dst is None else num_rows, self.dims[2])
        if is_dynamo() and takes_composites():
            return traced_product(self.text, x, y, weight, src, dst, num_rows)  # type: ignore[no-any-return]
        return self.decomposition(x, y, weight, src, dst, num_rows)

    def along_edges(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        src: Tensor | None,
        dst: Tensor | None,
        num_nodes: int | None,
    ) -> Tensor:
        """Return the product along edges [num_nodes, irreps_out.dim]; refuse edges of different numbers."""
        if src is None or dst is None:
            missing = "src" if src is None else "dst"
            raise OperandError(f"{missing} is missing; edges need src and dst, a product of rows neither")
        num_edges = y.shape[0] if y.dim() else -1
        per_edge = [("src", src, 1), ("dst", dst, 1), ("y", y, 2 if y.is_floating_point() else 1)]
        if weight is not None and weight.dim() > 1:
            per_edge.append(("weight", weight, 2))
        for name, tensor, dims in per_edge:
            if tensor.dim() != dims or tensor.shape[0] != num_edges:
                shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor, _ in per_edge)
                raise ShapeError(
                    f"edges need as many rows of {', '.join(n for n, _, _ in per_edge)}, but they are {shapes}"
                )
        if x.dim() != 2:
            raise ShapeError(f"x is {list(x.shape)}; with src and dst it has one row for each node")
        rows = x.shape[0] if num_nodes is None else _whole_number(num_nodes)
        _check_positions("src", src, "x has {} nodes", x.shape[0])
        _check_positions("dst", dst, "there are {} nodes", rows)
        return self.run(x, y, weight, src, dst, rows)

    def broadcast(self, *leads: Lead) -> Lead:
        """Return the leading dimensions that x, y and weight broadcast to; refuse those that do not broadcast."""
        try:
            return tuple(torch.broadcast_shapes(*leads))
        except RuntimeError:
            x, y, weight = (list(lead) for lead in leads)
            shapes = f"x has {x}, y {y} and weight {weight}"
            raise ShapeError(f"leading dimensions must broadcast, but {shapes}; make them agree or 1") from None

    def fits(self, x: Tensor, y: Tensor, weight: Tensor | None) -> bool:
        """Whether `check` would refuse nothing, at a fraction of its cost."""
        dtype, device = x.dtype, x.device
        if weight is None:
            is_right = not self.weight_numel
        else:
            is_right = weight.shape[-1:] == (self.weight_numel,) and weight.dtype == dtype and weight.device == device
        sizes = (x.shape[-1:], y.shape[-1:])
        is_right = is_right and x.layout is torch.strided and y.layout is torch.strided
        return is_right and sizes == self.last and y.dtype == dtype and y.device == device

    def check(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Refuse wrong last dimensions, dtypes and devices in the caller's names; the statements check the rest."""
        dim1, dim2, _ = self.dims
        is_one_hot = not y.is_floating_point()
        for name, tensor in (("x", x), ("y", y), ("weight", weight)):
            if tensor is not None and tensor.layout is not torch.strided:
                raise OperandError(f"{name} is a {tensor.layout} tensor; pass a dense one, as {name}.to_dense()")
        if x.dim() == 0 or x.shape[-1] != dim1:
            raise ShapeError(_wrong_dim("x", x, "irreps_in1", self.in1, dim1))
        if not is_one_hot and (y.dim() == 0 or y.shape[-1] != dim2):
            raise ShapeError(_wrong_dim("y", y, "irreps_in2", self.in2, dim2))
        if is_one_hot:
            self.check_one_hot(x, y)
        if weight is None:
            if self.weight_numel:
                raise OperandError(f"no weight was given; pass one of {self.weight_numel} numbers")
        elif weight.dim() == 0 or weight.shape[-1] != self.weight_numel:
            raise ShapeError(
                f"weight is {list(weight.shape)}, but the paths have {self.weight_numel} weights; "
                f"its last dimension must be {self.weight_numel}"
            )
        self.check_kinds(x, y if not is_one_hot else x, weight if weight is not None else x)

    def check_one_hot(self, x: Tensor, y: Tensor) -> None:
        """Refuse integers y that are not the positions of the ones of a one-hot second input."""
        if y.dtype not in INDEX_DTYPES:
            kinds = "rows are floating point, positions of a one-hot second input int32 or int64"
            raise OperandError(f"y is {_short(y.dtype)}; {kinds}")
        if not self.takes_one_hot:
            raise OperandError(
                f"y is {_short(y.dtype)}, the positions of a one-hot second input, but irreps_in2 is {self.in2}; "
                "only one block of scalars in fully connected paths can be one-hot"
            )
        if x.dim() > 1 and y.shape == (*x.shape[:-1], self.dims[1]):  # torch's one_hot gives integers
            raise OperandError(
                f"y is {_short(y.dtype)} {list(y.shape)}, a row of {self.in2} for each row of x, but integers are the "
                "positions of its ones; pass y.to(x.dtype), or the positions y.argmax(-1)"
            )
        if y.device != x.device:
            raise OperandError(f"x is on {x.device} but y is on {y.device}; move them to one device")
        _check_positions("y", y, f"irreps_in2 {self.in2} has {{}} kinds", self.dims[1])

    def check_kinds(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Refuse tensors on two devices, or of two dtypes unless autocast casts them."""
        for name, other in (("y", y), ("weight", weight)):
            if other.device != x.device:
                raise OperandError(f"x is on {x.device} but {name} is on {other.device}; move them to one device")
            if other.dtype != x.dtype and not is_autocast_enabled(x.device.type):
                kinds = f"x is {_short(x.dtype)} but {name} is {_short(other.dtype)}"
                raise OperandError(f"{kinds}; convert them to one dtype")


def _whole_number(num_nodes: object) -> int:
    """Return `num_nodes` as a number of rows; refuse what is no whole number of at least 0."""
    try:
        rows = num_nodes if isinstance(num_nodes, torch.SymInt) else int(index(num_nodes))  # type: ignore[arg-type]
    except TypeError:
        rows = -1
    if rows < 0:
        raise ShapeError(f"num_nodes is {num_nodes}; give a whole number of at least 0")
    return rows  # type: ignore[return-value]


def _check_positions(name: str, positions: Tensor, extent: str, count: int) -> None:
    """Refuse positions of another dtype or out of range, in the caller's names.

    `extent` says how many there are, with {} for the `count`: a tracer can't write a size without fixing it. While
    torch traces the call no number can be read: then the statements refuse, in their own names.
    """
    if positions.dtype not in INDEX_DTYPES:
        raise OperandError(f"{name} is {_short(positions.dtype)}; positions are int32 or int64")
    if not is_watched() and remembered_range(positions)[1] >= count:
        place = (positions >= count).nonzero()[0].tolist()
        where = f"{name}[{','.join(map(str, place)) or '()'}]"
        raise IndexRangeError(
            f"{where} is {int(positions[tuple(place)])}, but {extent.format(count)}; they count from 0"
        )


def _flat(tensor: Tensor, lead: Lead, last: tuple[int, ...]) -> Tensor:
    return tensor.expand(*lead, *last).reshape(prod(lead), *last)


def _wrong_dim(name: str, tensor: Tensor, of: str, irreps: str, dim: int) -> str:
    mismatch = f"{name} is {list(tensor.shape)}, but {of} {irreps} has dimension {dim}"
    return f"{mismatch}; its last dimension must be {dim}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_products: dict[tuple[Any, ...], Product] = {}
