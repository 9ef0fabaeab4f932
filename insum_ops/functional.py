"""`insum`: one line in, one tensor out; `explain` and `tune` say how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor

from .compiler import (
    Explanation,
    InsumError,
    OperandError,
    ShapeError,
    Tuning,
    UnsupportedError,
    bind,
    evaluate,
    explanation_of,
    is_sparse,
    parse,
    planned,
    run_plain,
    shortened,
    tuning_of,
    walk,
)
from .formats.errors import FormatError
from .formats.facts import Fact
from .formats.torch_state import (
    PLAIN,
    is_compiling,
    is_free,
    is_traced,
    refuse_script_tracer,
    transform_kinds,
    wants_gradient,
)
from .not_scripted import not_scripted

__all__ = ["Insum", "explain", "insum", "insum_pinned", "on_refusal", "tensor_without_rules", "tune"]

INTEGERS: Any = (int, torch.SymInt)
LARGEST = 2**63  # no dimension is that long
on_refusal: list[Callable[[InsumError | FormatError, Mapping[str, Any]], None]] = []  # called with what is raised


@not_scripted
def insum(expr: str, /, *unnamed: NoReturn, size: Sequence[int] | None = None, **tensors: Any) -> Tensor:
    """`C[AM[p],n] += AV[p,q] * B[AK[p,q],n]`: evaluate an indirect Einsum.

    Indices that the left side lacks are summed over; an access as an index reads positions from an integer tensor, on
    the right to gather, on the left to scatter and add. A negative position means "no entry" and contributes nothing. A
    sparse format of `insum_ops.formats` may stand for one factor.

    `C[m,n] = max(A[m,k] * B[k,n])` takes the largest (`min`: the smallest) of the products that meet in an element
    instead of their sum. An element that no product reaches is 0, and a NaN wins. The gradient goes to the winner; of
    equal products that is the first, by the values of the reduced indices in the order in which the text names them.

    With `+=` and the output given, the result starts from it; no tensor that is passed in is ever changed. The output's
    size comes from the output tensor, from `size`, or from the indices when none of them is an indirection. Gradients
    reach every tensor of values, to any order.

    Args:
        expr: the statement, one output and a product of factors; a factor is an access such as `A[i,k]` or a number.
        *unnamed: refused, since every tensor is passed by its name.
        size: the output's size, a number for each dimension; needed where the left side scatters and no output is
            given.
        **tensors: each tensor or format of the statement by its name there; values are float16, bfloat16, float32 or
            float64, positions int32 or int64, all on one device, each with a dimension for each of its indices.

    Returns:
        The output, a new tensor with a dimension for each index of the left side, of the type that torch promotes the
        values to.

    Raises:
        ParseError: `expr` is not a statement of this language; the message points at the first wrong character.
        OperandError: a tensor is missing, not named in the statement, or of a kind, dtype or device that does not fit.
        ShapeError: an index has two extents, a tensor another number of dimensions, or the output's size is not known.
        IndexRangeError: a position lies beyond the dimension that it points into.
        UnsupportedError: two factors are sparse formats, a format stands where none can, or no kernel could be built.
        SettingError: an environment variable of insum_ops, such as INSUM_TUNE, has a value that it can't have.

    Example:
        >>> import torch
        >>> from insum_ops import insum
        >>> A, B = torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([10., 20.])
        >>> insum("C[i] += A[i,k] * B[k]", A=A, B=B)
        tensor([ 50., 110.])
        >>> insum("C[I[p]] += A[p,k] * B[k]", A=A, B=B, I=torch.tensor([2, 2]), size=(3,))
        tensor([  0.,   0., 160.])
        >>> insum("C[()] += B[k] * B[k]", B=B)
        tensor(500.)
        >>> insum("C[i] = max(A[i,k] * B[k])", A=A, B=B)
        tensor([40., 80.])
    """
    try:
        if unnamed:
            _refuse_unnamed(expr, unnamed, tensors)
        return evaluate(expr, tensors, size, _checked)
    except (InsumError, FormatError) as error:
        for tell in on_refusal:
            tell(error, tensors)
        raise shortened(error) from error.__cause__
    except (RuntimeError, TypeError, ValueError) as error:  # some tensors have no strides; to ask first costs each call
        _refuse_unfit(expr, tensors, size, error)
        raise


Insum = insum


def insum_pinned(
    cache: dict[Any, Any],
    expr: str,
    fixed: Mapping[str, Tensor],
    size: Sequence[int] | None = None,
    fact: Fact | None = None,
    /,
    **tensors: Tensor,
) -> Tensor:
    """`insum` over tensors of which the `fixed` ones are always the same with this `cache`: its plans pin them.

    A change in place of an index tensor among them is still noticed. A fact tells a kernel more of them: which program
    owns which rows (`OwnedRows`), or all their numbers (`ConstantTables`). The statement means the same without it, and
    runs so where gradients are asked for or a transform is active.
    """
    operands = {**tensors, **fixed}
    is_followed = is_compiling() or is_traced([*operands.values()])  # torch 2.11 says the latter alone below Dynamo
    if wants_gradient(list(operands.values())) or not (is_followed or is_free()) or (is_followed and fact is None):
        return insum(expr, size=size, **operands)
    run = lambda *_: run_plain(expr, ",".join(operands), size, list(operands.values()), fact)
    if is_followed:
        return run()
    key = None if fact is None else fact.key
    marks = "pinned", expr, None if size is None else tuple(size), key, *tensors
    return planned(cache, marks, run, list(tensors.values()))


def explain(expr: str, /, *unnamed: NoReturn, size: Sequence[int] | None = None, **tensors: Any) -> Explanation:
    """Return what `insum` would do with the same arguments, from the statement to the Triton kernel; nothing runs.

    The result prints every stage. On CPU tensors, which `insum` evaluates by the torch program, the kernel shown is the
    one that a GPU would run.

    Args:
        expr: the statement, as `insum` takes it.
        *unnamed: refused, since every tensor is passed by its name.
        size: the output's size, as `insum` takes it.
        **tensors: each tensor or format of the statement by its name there; tensors on the meta device will do.

    Returns:
        An `Explanation` that prints all of it, with the attributes `statement`, `rewritten` (the statement without its
        sparse format), `extents`, `graph` (a torch.fx module), `schedule`, `config` and `source` (the Triton kernel).
        `schedule`, `config` and `source` are None where no kernel runs; `why_no_kernel` then says why. `route` is "one
        kernel", "several statements" or "torch operations", whichever a GPU would take; `split` holds the smaller
        statements that would be evaluated in turn, or None.

    Raises:
        ParseError, OperandError, ShapeError, IndexRangeError, UnsupportedError, SettingError: as `insum` does.

    Example:
        >>> import torch
        >>> from insum_ops import explain
        >>> explanation = explain("C[i] += A[i,k] * B[k]", A=torch.ones(3, 2), B=torch.ones(2))
        >>> explanation.extents
        {'i': 3, 'k': 2}
        >>> "@triton.jit" in explanation.source
        True
    """
    try:
        if unnamed:
            _refuse_unnamed(expr, unnamed, tensors)
        return explanation_of(expr, tensors, _checked(expr, tensors, size))
    except (InsumError, FormatError) as error:
        raise shortened(error) from error.__cause__


def tune(
    expr: str, /, *unnamed: NoReturn, size: Sequence[int] | None = None, full: bool = False, **tensors: Any
) -> Tuning:
    """Time the ways to run `insum` with the same arguments, on their GPU; later calls of this kind take the best.

    The times are kept on disk, so that other processes on the same machine start from them.

    Args:
        expr: the statement, as `insum` takes it.
        *unnamed: refused, since every tensor is passed by its name.
        size: the output's size, as `insum` takes it.
        full: whether to try a whole grid of configs, which takes minutes, instead of a short list.
        **tensors: each tensor or format of the statement by its name there, on a CUDA device.

    Returns:
        A `Tuning` that prints as a table. Its `timings` holds the rows, best first, and `best` is the first of them. A
        row is a kernel, or another route: "several statements" or "torch operations".

    Raises:
        UnsupportedError: the tensors are not on a GPU, or there is no kernel to choose.
        OperandError: `full` is not True or False; otherwise as `insum` does.
        ParseError, ShapeError, IndexRangeError, SettingError: as `insum` does.

    Example:
        >>> import torch
        >>> from insum_ops import tune
        >>> A, B = torch.ones(3, 2), torch.ones(2)
        >>> tune("C[i] += A[i,k] * B[k]", A=A.cuda(), B=B.cuda())  # doctest: +SKIP
        >>> tune("C[i] += A[i,k] * B[k]", A=A, B=B)
        Traceback (most recent call last):
            ...
        insum_ops.compiler.language.errors.UnsupportedError: tuning needs CUDA tensors, but these are on cpu; ...
    """
    try:
        if unnamed:
            _refuse_unnamed(expr, unnamed, tensors)
        if not isinstance(full, bool):
            raise OperandError(
                f"full is True or False here, but it is of type {type(full).__name__}; rename the tensor"
            )
        return tuning_of(expr, tensors, _checked(expr, tensors, size), full)
    except (InsumError, FormatError) as error:
        raise shortened(error) from error.__cause__


def _refuse_unnamed(expr: str, unnamed: Sequence[Any], tensors: Mapping[str, Any]) -> NoReturn:
    """Raise for tensors that are passed as einsum takes them: by their places."""
    statement = parse(expr)
    first = next((name for name in statement.tensor_names if name not in tensors), None)
    number = "a tensor was" if len(unnamed) == 1 else f"{len(unnamed)} tensors were"
    names = ", ".join(f"{name}=..." for name in statement.tensor_names)
    place = None if first is None else _place(expr, first)
    raise OperandError(f"{number} given without a name; pass each by its name, as in {names}", statement.text, place)


def _refuse_unfit(expr: str, tensors: Mapping[str, Any], size: Sequence[int] | None, error: Exception) -> None:
    """Raise in our words if torch failed because of what the tensors are, or of who transforms the call."""
    name, problem = tensor_without_rules(tensors, error)
    if name:
        raise OperandError(problem, expr.strip(), _place(expr, name)) from None
    if not isinstance(error, RuntimeError):
        return
    if "Functionalize" in transform_kinds():
        raise UnsupportedError(
            "torch.func.functionalize has no rule for autograd functions, which statements are inside of it; leave it "
            "out: torch.compile, torch.export and make_fx record a statement as one operator that changes nothing"
        ) from None
    try:
        bind(parse(expr), tensors, size)
    except InsumError as refusal:
        for tell in on_refusal:
            tell(refusal, tensors)
        raise shortened(refusal) from None


def tensor_without_rules(tensors: Mapping[str, Any], error: Exception | None = None) -> tuple[str, str]:
    """Return the name of a tensor whose class does not know our operators, and what is missing; two "" if none.

    Of a DTensor that is known beforehand, of other classes by the `error` that torch has raised.
    """
    name = next((name for name, operand in tensors.items() if type(operand).__name__ == "DTensor"), "")
    if name and "insum_ops.distributed" not in sys.modules:
        return name, f"{name} is a DTensor; write `import insum_ops.distributed`, which knows how statements are split"
    has_no_rule = isinstance(error, TypeError) and "NotImplemented" in str(error)
    for name, operand in tensors.items():
        if type(operand).__module__ == "torch.fx.proxy":
            remedy = "mark the function that calls insum by torch.fx.wrap, or use torch.export"
            return name, f"{name} is a {type(operand).__name__} of torch.fx, which follows no statement; {remedy}"
        if has_no_rule and isinstance(operand, Tensor) and type(operand) not in PLAIN:
            kind = type(operand).__name__
            remedy = f", as {name}.to_tensor(0.0)" if kind == "MaskedTensor" else ""
            return name, f"{name} is a {kind}, which has no rule for sparse operators; pass a plain tensor{remedy}"
    return "", ""


def _checked(expr: str, tensors: Mapping[str, Any], size: Sequence[int] | None) -> Sequence[int] | None:
    """Refuse what is no expression, tensor, format or name; the size comes back as integers."""
    if not tensors or not isinstance(expr, str):
        bind(parse(expr), {}, size)
    for name, operand in tensors.items():
        if not (isinstance(operand, Tensor) or _is_format(operand)):
            kind, remedy = _kind(name, operand)
            raise OperandError(f"{name} is {kind}; pass {remedy}", expr.strip(), _place(expr, name))
        if not name.isidentifier():
            raise OperandError(f"{name!r} is not a name; pass each tensor by its name in the expression")
    return None if size is None else _checked_size(size)


def _is_format(operand: Any) -> bool:
    return is_sparse(operand) and not isinstance(operand, type)


def _kind(name: str, operand: Any) -> tuple[str, str]:
    """What an operand is that is neither a tensor nor a format, and what to pass instead."""
    if isinstance(operand, type):
        return f"the class {operand.__name__}", "an instance of it"
    kind = f"of type {type(operand).__name__}"
    if type(operand).__module__.startswith("scipy.sparse"):
        return kind, f"insum_ops.formats.COO.from_scipy({name}), or another format"
    if type(operand).__name__ == "ndarray":
        return kind, f"torch.from_numpy({name})"
    if isinstance(operand, (int, float)):
        return kind, f"torch.tensor({name}), or write the number in the expression"
    if isinstance(operand, list):
        return kind, f"torch.tensor({name})"
    if isinstance(operand, tuple):
        return kind, f"a tensor; where only the shape counts, as in explain, torch.empty({name}, device='meta') will do"
    return kind, "a torch.Tensor or a format of insum_ops.formats"


def _place(expr: str, name: str) -> int | None:
    """Where a tensor stands first."""
    statement = parse(expr)
    accesses = (access for root in (statement.output, *statement.accesses) for access in walk(root))
    return next((access.at for access in accesses if access.name == name), None)


def _checked_size(size: Any) -> Sequence[int]:
    if isinstance(size, Tensor):
        raise OperandError("size gives the output's size as numbers, but it is a tensor; rename the tensor")
    if not isinstance(size, (list, tuple)):
        kind = type(size).__name__
        raise ShapeError(f"size is of type {kind}; pass a number per dimension, as in size=(3, 4)")
    try:
        numbers: list[int] = [n if isinstance(n, INTEGERS) else index(n) for n in size]
    except TypeError:
        refuse_script_tracer()
        raise ShapeError(f"size must hold integers of 0 or more, but it is {list(size)}") from None
    for n in numbers:
        if not is_compiling() and n >= LARGEST:  # of a symbol an export would take it for a bound
            raise ShapeError(f"size is {numbers}, larger than any tensor")
    return numbers
