"""Sparse times dense, and dense times dense where a sparse pattern has entries: `spmm` and `sddmm`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..close_names import with_article
from ..compiler import (
    InsumError,
    OperandError,
    ShapeError,
    UnsupportedError,
    check_pattern,
    composite,
    direct_apply,
    evaluate,
    followed,
    gradients_of,
    keep_learning,
    outside_modes,
    outside_transforms,
    owned,
    pattern_of,
    planned,
    planned_backward,
    replayed,
    shortened,
    takes_composites,
    unbatch_gradients,
)
from ..formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO
from ..formats.convert import block_grid
from ..formats.errors import FormatError
from ..formats.guard import may_keep
from ..formats.parts import FormatParts, parts_of
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import (
    HALF,
    PLAIN,
    is_compiling,
    is_dynamo,
    is_grad_enabled,
    is_traced,
    is_transformed,
    may_autocast,
    records_gradient,
    uncompiled,
    wants_gradient,
)
from ..functional import insum
from ..not_scripted import not_scripted
from .edges import Edges, edges_of, traced_edges
from .listed import Listed
from .operands import as_format, trained_source
from .torch_sparse import SparseSource, remembered_format, remembered_source, sparse_source

__all__ = ["Reduce", "sddmm", "spmm"]

Format = TypeVar("Format", bound=SparseFormat)
Reduce = Literal["sum", "mean", "max", "min", "amax", "amin"]

SUM = ("C[m] += A[m,k] * B[k]", "C[m,n] += A[m,k] * B[k,n]", "C[b,m,n] += A[m,k] * B[b,k,n]")
MANY = "C[...,m,n] += A[m,k] * B[...,k,n]"
MEAN = tuple(statement.replace("A[m,k]", "R[m] * A[m,k]") for statement in SUM)
MAX = ("C[m] = max(A[m,k] * B[k])", "C[m,n] = max(A[m,k] * B[k,n])", "C[b,m,n] = max(A[m,k] * B[b,k,n])")
MIN = tuple(statement.replace("max", "min") for statement in MAX)
STATEMENTS = {"sum": SUM, "mean": MEAN, "max": MAX, "min": MIN, "amax": MAX, "amin": MIN}
FORMATS = frozenset((COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO))  # told apart in a third of the time of a base class
TRAINED = ("spmm", "sum", True)  # marks the plans of products with a torch sparse tensor that is trained


@not_scripted
def spmm(A: Any, B: Tensor, reduce: Reduce = "sum", *others: NoReturn) -> Tensor:
    """C[m,n] += A[m,k] * B[k,n]: a sparse matrix times a dense one.

    Rows without entries give 0. Each listed entry counts, explicit zeros and repeated edges too, but what an
    uncoalesced COO tensor or a scipy array lists twice is one entry.

    Gradients reach B and the values of A: the format's, edge_weight, or the sparse tensor, whose gradient is sparse, of
    its own pattern and layout (torch collects `.grad` for COO and CSR alone; `torch.autograd.grad` and values that a
    sparse tensor was made of get theirs for every layout).

    A torch tensor or a graph is converted once, and again when its pattern changes; on a GPU at the fifth product, as
    the first ones run over the entries as they are listed. An in-place change is noticed by
    the tensor's version counter, and other `.data` by its address, so not what is changed through other tensors in the
    same memory. A scipy array and a tensor made in inference mode are converted at every call: make a format of them.
    `torch.compile` traces formats and graphs, from the first call on; at a torch sparse tensor and at a scipy array its
    graph breaks.

    Args:
        A: the sparse matrix [M, K]: a format of `insum_ops.formats`, a torch sparse tensor (COO, CSR, CSC, BSR or BSC),
            a scipy sparse array, or a graph `(edge_index, edge_weight, size)`. edge_index [2, E] holds sources, then
            targets; edge_weight [E] may be None, for ones; size is (sources, targets), a number for both, or left out,
            for as many of both as B has rows. A graph is the matrix [targets, sources].
        B: the dense matrix [K, N]; also a vector [K] or a batch [..., K, N].
        reduce: what becomes of a row's products: "sum", "mean" over the row's entries, "max" or "min" ("amax" and
            "amin" too).
        *others: refused, since a graph is one argument.

    Returns:
        C [M, N], or [M] for a vector and [..., M, N] for a batch.

    Raises:
        OperandError: A is nothing of the kinds above, B no dense floating-point tensor, `reduce` none of those words,
            A and B are on two devices, or there are more arguments.
        ShapeError: A is no matrix, or B has another number of rows than A has columns.
        IndexRangeError: an edge names a node that is not there.
        UnsupportedError: `torch.export` meets an A that is neither a format nor a graph.

    Example:
        >>> import torch
        >>> from insum_ops import spmm
        >>> A = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0], [6.0, 0.0, 7.0]]).to_sparse()
        >>> B = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        >>> spmm(A, B)
        tensor([[ 10., 100.],
                [  0.,   0.],
                [ 27., 270.]])
        >>> edge_index = torch.tensor([[1, 0, 2], [0, 2, 2]])  # 1 -> 0, 0 -> 2, 2 -> 2
        >>> spmm((edge_index, None), B, reduce="mean")
        tensor([[ 2., 20.],
                [ 0.,  0.],
                [ 2., 20.]])
    """
    try:
        if others:
            raise OperandError(
                f"spmm takes A, B and reduce, not {3 + len(others)} arguments; what torch_sparse writes "
                "spmm(index, value, m, n, B) is spmm((index.flip(0), value, (n, m)), B)"
            )
        if is_dynamo():
            parts = parts_of(A) if isinstance(A, (SparseFormat, FormatParts)) and takes_composites() else None
            if parts is None or not isinstance(B, Tensor) or not isinstance(reduce, str) or reduce == "mean":
                return _spmm(A, B, reduce)
            return traced_spmm(parts.text, parts.shape, parts.values, parts.coords, B, reduce)  # type: ignore[no-any-return]
        if type(B) not in PLAIN or not isinstance(reduce, str):
            return _spmm(A, B, reduce)
        if type(A) is Tensor:
            source = remembered_source(A)
            form = None if source is None else source.filled
            if source is not None and form is not None:
                plans, marks, tensors = source.arranged.memory, ("spmm", reduce, A.requires_grad), (form.values, B)
                C = replayed(plans, marks, tensors, (), (A, source))
                if C is not None:
                    return C  # type: ignore[no-any-return]
                if not wants_gradient((A, B)):
                    return planned(plans, marks, lambda *_: _spmm(form, B, reduce), tensors, owned=form)
        elif type(A) in FORMATS and not wants_gradient((A.values, B)):
            tensors = (A.values, B)
            return planned(A.memory, ("spmm", reduce), lambda *_: _spmm(A, B, reduce), tensors, owned=A)
        return _spmm(A, B, reduce)
    except (InsumError, FormatError) as error:
        raise shortened(error) from error.__cause__


def _spmm(A: Any, B: Tensor, reduce: str) -> Tensor:
    """Check and convert the operands of a product, and evaluate its statement."""
    statements = STATEMENTS.get(reduce) if isinstance(reduce, str) else None
    if statements is None:
        _refuse_reduce(reduce)
    if not isinstance(B, Tensor) or B.is_nested or B.ndim == 0 or B.layout is not torch.strided:
        _refuse_dense(A, B)
    if type(A) is Tensor and reduce != "mean" and B.ndim <= 3 and not is_compiling():
        filled = remembered_format(A)
        if filled is not None:
            return insum(statements[B.ndim - 1], A=filled, B=B)
    if isinstance(A, (SparseFormat, FormatParts)):
        form: Any = A
    elif isinstance(A, tuple) and (is_dynamo() or is_traced([B])):
        form = traced_edges(A, "A", (B.shape[-2 if B.ndim > 1 else 0],) * 2, B.dtype)
    else:
        _leave_graph("A")
        if is_dynamo():
            return _eager_spmm(A, B, reduce)
        trained = None
        if reduce == "sum" and B.ndim <= 3 and is_grad_enabled() and not (may_autocast() or is_transformed()):
            trained = trained_source(A, B)
        if trained is None:
            form = as_format(A, B, reduce)
        elif trained[1].arranged.is_listed:
            listed, source = trained
            form = source.arranged.pattern.with_values(source.slots(listed))
        else:
            return _trained(*trained, B)
    if len(form.shape) != 2:
        raise ShapeError(f"A is {with_article(type(form).__name__)} of shape {list(form.shape)}; pass a matrix")
    if B.ndim > 3:
        if B.shape[-2] != form.shape[1]:
            raise ShapeError(
                f"index k is {form.shape[1]} in A dimension 1 but {B.shape[-2]} in B dimension {B.ndim - 2}; "
                "they must agree",
                *(MANY, MANY.rindex("k")),
            )
        C = _spmm(form, B.flatten(0, -3), reduce)
        return C.view(*B.shape[:-2], *C.shape[1:])
    statement = statements[B.ndim - 1]
    product = form.product if type(form) is Listed and form.fits(B) else partial(_product, form)
    if reduce != "mean":
        return product(statement, B)
    shares = _traced_shares(form, B) if isinstance(form, FormatParts) else _shares(form, B)
    return _as_promoted(product(statement, B, R=shares), form.dtype, B.dtype)


def _product(form: Any, statement: str, B: Tensor, **shares: Any) -> Tensor:
    """Return the value of a statement with a format A, a dense B and perhaps shares R."""
    return insum(statement, **shares, A=form, B=B)


def _spmm_of_parts(
    form: str, shape: Sequence[int], values: Tensor, coords: list[Tensor], B: Tensor, reduce: str
) -> Tensor:
    return _spmm(FormatParts(form, tuple(shape), values, coords), B, reduce)


traced_spmm = composite(
    "spmm(str form, SymInt[] shape, Tensor values, Tensor[] coords, Tensor B, str reduce) -> Tensor", _spmm_of_parts
)


def _as_promoted(mean: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Return a mean of halves, whose shares are float32, in the dtype that a product of two factors has."""
    is_half = mean.dtype == torch.float32 and all([dtype in HALF for dtype in dtypes])
    return mean.to(torch.promote_types(*dtypes)) if is_half else mean


def _refuse_reduce(reduce: Any) -> NoReturn:
    """Raise for a reduction that there is not."""
    choices = ", ".join(map(repr, STATEMENTS))
    if isinstance(reduce, Tensor):
        raise OperandError(
            f"reduce is a tensor; choose from {choices}. A graph is one argument, (edge_index, edge_weight), and a "
            "layer holds its matrix, so that it is called with B alone"
        )
    raise OperandError(f"reduce is {reduce!r}; choose from {choices}")


def _refuse_dense(A: Any, B: Any) -> NoReturn:
    """Raise for a B that is no dense tensor with rows."""
    is_tensor = isinstance(B, Tensor)
    if is_tensor and B.is_nested:
        raise OperandError("B is a nested tensor; pass B.to_padded_tensor(0)")
    if isinstance(B, SparseFormat) or (is_tensor and B.layout is not torch.strided):
        kind = f"a {B.layout} tensor" if is_tensor else with_article(type(B).__name__)
        is_swapped = isinstance(A, Tensor) and A.layout is torch.strided
        remedy = "the sparse matrix comes first, so swap A and B" if is_swapped else "pass B.to_dense()"
        raise OperandError(f"B is {kind}; {remedy}")
    kind = "a number" if is_tensor else f"of type {type(B).__name__}"
    remedy = "torch.from_numpy(B)" if type(B).__name__ == "ndarray" else "a dense tensor [K], [K, N] or [..., K, N]"
    raise OperandError(f"B is {kind}; pass {remedy}")


def _trained(listed: Tensor, source: SparseSource | Edges, B: Tensor) -> Tensor:
    """Return the sum of products with a matrix whose values are `listed` by their source, with gradients for them."""
    arranged, statement = source.arranged, SUM[B.ndim - 1]
    plans, pattern = arranged.memory, arranged.pattern

    def product(entries: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product, and the values over the format's slots, which its gradients read again."""
        form = arranged.fill(entries)
        return insum(statement, A=form, B=B), form.values

    with torch.no_grad():
        if isinstance(source, SparseSource):
            form = source.filled or source.format(listed)
            slots, run = form.values, lambda slots, B: insum(statement, A=form, B=B)
            C = planned(plans, TRAINED, run, (slots, B), owned=pattern)
        else:  # weights of edges change at most calls, so that the plan gathers them
            operands = source.entries(listed), B
            C, slots = planned(plans, ("trained", statement), product, operands, owned=pattern)
    result = _Trained.apply((source, statement, slots, C), listed, B)
    if isinstance(source, SparseSource):
        keep_learning(plans, TRAINED, (slots, B), _learn)
    return result  # type: ignore[no-any-return]


def _plans(ctx: Any, saved: tuple[Tensor, Tensor, Tensor], _: Tensor) -> Any:
    (listed, slots, B), source = saved, ctx.source
    tensors = (source.slots(listed) if is_grad_enabled() else slots), B  # to be differentiated, of the values as listed
    arranged = source.arranged
    return arranged.memory, ("trained", ctx.statement), tensors, False, arranged.pattern


def _gradients(ctx: Any, wanted: tuple[bool, ...], upstream: Tensor, slots: Tensor, B: Tensor) -> Any:
    """Return None, d_entries, in the order in which they are listed, and d_B, those that are wanted."""
    arranged = ctx.source.arranged
    form = arranged.pattern.with_values(slots)
    d_slots, d_B = gradients_of(evaluate, ctx.statement, "A", form, {"B": B}, upstream, wanted[1:])
    return None, None if d_slots is None else arranged.read(d_slots), d_B


def _as_listed(ctx: Any, saved: tuple[Tensor, Tensor, Tensor], grads: tuple[Any, ...]) -> Any:
    """Return the gradients with that of the entries as one of the tensor that lists them."""
    _, d_entries, d_B = grads
    return None, None if d_entries is None else ctx.source.like(saved[0], d_entries), d_B


class _Trained(torch.autograd.Function):
    """A product with a matrix whose values its source lists in another order, in which gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, planned_product: tuple[SparseSource | Edges, str, Tensor, Tensor], listed: Tensor, B: Tensor
    ) -> Tensor:
        ctx.source, ctx.statement, slots, C = planned_product
        ctx.save_for_backward(listed, slots, B)
        return owned(C)

    backward = staticmethod(planned_backward(_plans, _gradients, _as_listed))


_apply = direct_apply(_Trained)


def _learn(C: Tensor, tensors: Sequence[Tensor], given: tuple[Tensor, SparseSource]) -> Any:
    """Return a planned product with a torch sparse tensor that is trained, with its gradients recorded."""
    (A, source), (slots, B) = given, tensors
    return _apply((source, SUM[B.ndim - 1], slots, C), A, B)


_eager_spmm = uncompiled(_spmm)


def _leave_graph(name: str) -> None:
    """Break the graph of `torch.compile` at a matrix that is neither a format nor a graph of edges.

    Its format is found by identity and version counter, which a tracer would take for constants. What follows is not
    compiled: of our functions after a break torch makes graphs one by one, and its statistics fail for sparse tensors.

    Raises:
        UnsupportedError: torch.export traces the call, which has no breaks.
    """
    if is_dynamo():
        torch._dynamo.graph_break(
            msg=f"{name} is no format; convert {name} beforehand, with nn.SpMM or insum_ops.formats"
        )
    elif is_compiling():
        raise UnsupportedError(
            f"{name} is no format, and torch.export can trace nothing else; "
            f"convert {name} beforehand, with insum_ops.nn.SpMM or insum_ops.formats"
        )


def _shares(form: SparseFormat, B: Tensor) -> Tensor:
    """Return R[m] = 1 / the number of entries of row m, 0 for an empty row; computed once per pattern.

    For half precision it is float32: 1/count would be rounded, and underflow in a row of many entries.
    """
    dtype = _type_of_shares(form.dtype, B)
    pattern_cache = form.pattern_cache
    shares = pattern_cache.shares.get(dtype)
    if shares is None:
        with outside_transforms():
            shares = _inverted(_entry_counts(form).to(dtype))
        if may_keep(shares):
            pattern_cache.shares[dtype] = shares
    return shares


def _traced_shares(edges: FormatParts, B: Tensor) -> Tensor:
    """Return what `_shares` does of a graph's edges, for a tracer: a statement, which refuses an edge out of range."""
    targets = edges.coords[0][1]
    ones = torch.ones(targets.shape[0], dtype=_type_of_shares(edges.dtype, B), device=targets.device)
    return _inverted(insum("N[targets[e]] += ones[e]", size=edges.shape[:1], targets=targets, ones=ones))


def _type_of_shares(dtype: torch.dtype, B: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (dtype, B.dtype) else torch.float32


def _inverted(counts: Tensor) -> Tensor:
    return torch.where(counts > 0, 1 / counts, 0)


def _entry_counts(form: SparseFormat) -> Tensor:
    """Return how many entries each row of a matrix holds [M]; of a block those count that lie in the matrix."""
    extents = form.values.shape[: len(form.value_axes)]
    places = []
    for coord, axes in zip(form.coords, form.coord_axes):
        coord = torch.arange(extents[0], device=form.device) if coord is None else coord.long()
        places.append((coord if len(axes) == len(extents) else coord.unsqueeze(-1)).expand(extents).flatten())
    rows, columns = places
    block_rows, block_columns = form.block_size or (1, 1)
    width = (form.shape[1] - columns * block_columns).clamp(max=block_columns)
    width = width.masked_fill((rows < 0) | (columns < 0), 0)
    counts = width.new_zeros(block_grid(form.shape, form.block_size)[0]).index_add_(0, rows.clamp(min=0), width)
    return counts.repeat_interleave(block_rows)[: form.shape[0]]


@overload
def sddmm(pattern: Format, X: Tensor, Y: Tensor) -> Format: ...
@overload
def sddmm(pattern: Tensor | tuple[Any, ...], X: Tensor, Y: Tensor) -> Tensor: ...
@not_scripted
def sddmm(pattern: Any, X: Tensor, Y: Tensor) -> Any:
    """V[m,k] = X[m,d] * Y[k,d], summed over d, only where the pattern has an entry: `X @ Y.T`, sampled.

    This is the sampled dense-dense matrix product, for example the scores of attention along the edges of a graph. The
    pattern's own values are not read. Gradients reach X and Y, to any order.

    Args:
        pattern: where to sample [M, K]: a format of `insum_ops.formats`, a torch sparse tensor, or a graph
            `(edge_index, edge_weight, size)` as `spmm` takes it; a scipy array could not hand on gradients, so it is to
            be converted first.
        X: dense matrix [M, D]; for a graph, a row for each target.
        Y: dense matrix [K, D]; for a graph, a row for each source.

    Returns:
        The values as the pattern came: in the same format, in a torch sparse tensor of the same layout, or for a graph
        as a tensor [E], one dot product of X[target] and Y[source] for each edge.

    Raises:
        OperandError: the pattern is nothing of the kinds above, or X or Y is no dense matrix.
        ShapeError: X or Y has other rows than the pattern, or the two have different D.
        IndexRangeError: an edge names a node that is not there.
        UnsupportedError: `torch.export` meets a pattern that is neither a format nor a graph.

    Example:
        >>> import torch
        >>> from insum_ops import sddmm
        >>> pattern = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to_sparse()
        >>> X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 1.0], [10.0, 10.0]])
        >>> sddmm(pattern, X, Y).to_dense()
        tensor([[ 0., 30.],
                [ 7.,  0.]])
        >>> sddmm((torch.tensor([[1, 0], [0, 1]]), None), X, Y)
        tensor([30.,  7.])
    """
    try:
        return _sddmm(pattern, X, Y)
    except (InsumError, FormatError) as error:
        raise shortened(error) from error.__cause__


def _sddmm(pattern: Any, X: Tensor, Y: Tensor) -> Any:
    """Check the operands of a sampled product, and evaluate its statement."""
    for name, operand in (("X", X), ("Y", Y)):
        if isinstance(operand, Tensor) and operand.is_nested:  # one of torch's older kind has no shape
            raise OperandError(f"{name} is a nested tensor; pass a dense one [rows, D]")
        if not isinstance(operand, Tensor) or operand.ndim != 2:
            kind = list(operand.shape) if isinstance(operand, Tensor) else f"of type {type(operand).__name__}"
            raise OperandError(f"{name} is {kind}; pass a dense tensor [rows, D]")
    if isinstance(pattern, SparseFormat):
        return pattern.with_values(_sampled(pattern, X, Y))
    if isinstance(pattern, tuple) and (is_dynamo() or is_traced([X, Y])):
        traced = traced_edges(pattern, "pattern", (Y.shape[0], X.shape[0]), X.dtype)
        sources, targets = traced.coords[0].unbind(0)  # each within its own range
        return insum("V[e] += X[targets[e],d] * Y[sources[e],d]", X=X, Y=Y, sources=sources, targets=targets)
    _leave_graph("pattern")
    if is_dynamo():
        return _eager_sddmm(pattern, X, Y)
    if isinstance(pattern, Tensor):
        if pattern.layout not in (torch.sparse_coo, torch.strided) and is_traced([X, Y]):
            raise UnsupportedError(
                f"pattern is a {pattern.layout} tensor, and torch makes none inside a graph; pass "
                "insum_ops.formats.GroupCOO.from_torch(pattern), whose result holds its values as a dense tensor"
            )
        source = sparse_source(pattern, "pattern", may_be_young=True)
        with outside_modes(pattern):
            alone = pattern.detach()
        return source.like(alone, source.arranged.read(_sampled(source.arranged.pattern, X, Y)))
    if isinstance(pattern, tuple):
        edges = edges_of(pattern, "pattern", (Y.shape[0], X.shape[0]), may_be_young=True)
        return edges.arranged.read(_sampled(edges.arranged.pattern, X, Y))
    remedy = "a format of insum_ops.formats, a torch sparse tensor or (edge_index, edge_weight, size)"
    if hasattr(pattern, "tocoo"):
        remedy = "insum_ops.formats.GroupCOO.from_scipy(pattern)"
    raise OperandError(f"pattern is of type {type(pattern).__name__}; pass {remedy}")


_eager_sddmm = uncompiled(_sddmm)


def _sampled(form: SparseFormat, X: Tensor, Y: Tensor) -> Tensor:
    """Return the sampled product over the slots of `form`, 0 for padding; refuse X and Y that do not fit."""
    wanted = (form.shape[0], X.shape[1]), (form.shape[-1], X.shape[1])
    if len(form.shape) != 2 or (X.shape, Y.shape) != wanted:
        raise ShapeError(
            f"X is {list(X.shape)} and Y is {list(Y.shape)} but pattern is {list(form.shape)}; "
            "for a pattern [M, K], X must be [M, D] and Y [K, D]"
        )
    for name, operand in (("X", X), ("Y", Y)):
        if operand.device != form.device:
            raise OperandError(
                f"pattern is on {form.device} but {name} is on {operand.device}; move them to one device"
            )
    if is_compiling():
        X, Y = followed(X), followed(Y)
    if records_gradient((X, Y)) and not is_transformed() and type(form) is not Listed:
        return _Sampled.apply(form, X, Y)  # type: ignore[no-any-return]
    return _sample(form, X, Y)


class _Sampled(torch.autograd.Function):
    """A sampled product. Its gradients are products with its pattern, grouped as is best for each."""

    @staticmethod
    def forward(ctx: Any, form: Any, X: Tensor, Y: Tensor) -> Tensor:
        ctx.form, ctx.pattern = form, pattern_of(form)
        ctx.save_for_backward(X, Y)
        return owned(_sample(form, X, Y))

    @staticmethod
    @unbatch_gradients
    def backward(ctx: Any, upstream: Tensor) -> Any:
        check_pattern(ctx.form, ctx.pattern, "pattern")
        X, Y = ctx.saved_tensors
        V, dX, dY = ctx.form.with_values(upstream), None, None
        if ctx.needs_input_grad[1]:
            dX = insum("dX[m,d] += V[m,k] * Y[k,d]", V=V, Y=Y).to(X.dtype)
        if ctx.needs_input_grad[2]:
            dY = insum("dY[k,d] += V[m,k] * X[m,d]", V=V, X=X).to(Y.dtype)
        return None, dX, dY


def _sample(form: SparseFormat, X: Tensor, Y: Tensor) -> Tensor:
    is_stored = tuple(coord is not None for coord in form.coords)
    statement = _sampling_statement(form.value_axes, form.coord_axes, is_stored, form.block_size is not None)
    coords: dict[str, Any] = {name: coord for name, coord in zip(("AM", "AK"), form.coords) if coord is not None}
    if form.block_size is not None:
        X, Y = (_in_blocks(operand, block) for operand, block in zip((X, Y), form.block_size))
    return insum(statement, **coords, X=X, Y=Y)


def _sampling_statement(
    value_axes: tuple[str, ...], coord_axes: tuple[tuple[str, ...], ...], is_stored: tuple[bool, ...], is_blocked: bool
) -> str:
    """Return the statement of a sampled product over the coordinates of a format.

    >>> _sampling_statement(("p", "q"), (("p",), ("p", "q")), (True, True), False)
    'V[p,q] += X[AM[p],d] * Y[AK[p,q],d]'
    """
    places = [
        f"{name}[{','.join(axes)}]" if stored else axes[0]
        for name, axes, stored in zip(("AM", "AK"), coord_axes, is_stored)
    ]
    i, j = (",i", ",j") if is_blocked else ("", "")
    return f"V[{','.join(value_axes)}{i}{j}] += X[{places[0]}{i},d] * Y[{places[1]}{j},d]"


def _in_blocks(operand: Tensor, block: int) -> Tensor:
    """Return an operand [rows, D] as [blocks, block, D], the last block padded with zeros."""
    missing = -operand.shape[0] % block
    if missing:
        operand = pad(operand, (0, 0, 0, missing))
    return operand.reshape(operand.shape[0] // block, block, operand.shape[1])
