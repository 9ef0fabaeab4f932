"""`insum` refuses what it can't run in its own words, computes nothing then, and changes nothing ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import scipy.sparse
import torch
from messages import messages
from sparse_inputs import SPARSE_WARNINGS

from insum_ops import explain, insum, sddmm, sparse_conv3d, spmm, tune
from insum_ops.compiler.language.errors import InsumError, OperandError, ParseError, ShapeError
from insum_ops.formats import COO, GroupCOO, kernel_map
from insum_ops.nn import BlockSparseLinear, SparseConvTensor, SubMConv1d

V, M = torch.rand(4), torch.rand(3, 4)
I = torch.tensor([0, 2, 1, 0])  # noqa: E741 - as in the statements below

MISTAKES: list[tuple[type[InsumError], dict[str, Any], str]] = [
    (
        OperandError,
        {"A": numpy.ones(4)},
        """
A is of type ndarray; pass torch.from_numpy(A)
    C[i] = A[i]
           ^
""",
    ),
    (
        OperandError,
        {"A": M, "B": [1.0, 2.0]},
        """
B is of type list; pass torch.tensor(B)
    C[i] = A[i,k] * B[k]
                    ^
""",
    ),
    (
        OperandError,
        {"A": V, "I": None},
        """
I is of type NoneType; pass a torch.Tensor or a format of insum_ops.formats
    C[I[i]] = A[i]
      ^
""",
    ),
    (
        OperandError,
        {"A": V, "B": 2.0},
        """
B is of type float; pass torch.tensor(B), or write the number in the expression
    C[i] = A[i] * B[()]
                  ^
""",
    ),
    (
        OperandError,
        {"A": COO, "B": M},
        """
A is the class COO; pass an instance of it
    C[m,n] = A[m,k] * B[k,n]
             ^
""",
    ),
    (
        OperandError,
        {"A": scipy.sparse.csr_array(numpy.eye(3)), "B": M},
        """
A is of type csr_array; pass insum_ops.formats.COO.from_scipy(A), or another format
    C[m,n] = A[m,k] * B[k,n]
             ^
""",
    ),
    (
        OperandError,
        {"A": M.to_sparse(), "B": M.T},
        """
A is a torch.sparse_coo tensor; pass insum_ops.formats.COO.from_torch(A), or another format
    C[m,n] = A[m,k] * B[k,n]
             ^
""",
    ),
    (
        OperandError,
        {"A": GroupCOO.from_dense(M), "B": M.T.to_sparse()},
        """
B is a torch.sparse_coo tensor; pass insum_ops.formats.COO.from_torch(B), or another format
    C[m,n] = A[m,k] * B[k,n]
                      ^
""",
    ),
    (
        OperandError,
        {"size": V},
        """
no tensor was given for size; size=... gives the output's size, so rename it
    C[i] = size[i]
           ^
""",
    ),
    (
        OperandError,
        {"size": (4,)},
        """
no tensor tells dtype and device; pass the output as C=...
    C[i] = 1
    ^
""",
    ),
    (
        OperandError,
        {"A": V, "B": torch.ones(4, device="meta")},
        """
A is on cpu but B is on meta; move them to one device
    C[i] += A[i] * B[i]
                   ^
""",
    ),
]

every_mistake = pytest.mark.parametrize(
    ("kind", "tensors", "text"), MISTAKES, ids=[text.split("\n")[1] for *_, text in MISTAKES]
)


def refusal(function: Any, kind: type[InsumError], expr: Any, **tensors: Any) -> str:
    with pytest.raises(InsumError) as caught:
        function(expr, **tensors)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.cpu
@every_mistake
@pytest.mark.parametrize("function", [insum, explain, tune])
def test_message(function: Any, kind: type[InsumError], tensors: dict[str, Any], text: str) -> None:
    ((expr, expected),) = messages(text)
    assert refusal(function, kind, expr, **tensors) == expected


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_strides() -> None:
    csr = "pass insum_ops.formats.GroupCOO.from_torch(A), or another format"
    expected = f"A is a torch.sparse_csr tensor; {csr}\n    C[i,j] = A[i,j]\n             ^"
    assert refusal(insum, OperandError, "C[i,j] = A[i,j]", A=M.to_sparse_csr()) == expected
    expected = "A is a nested tensor; pass A.to_padded_tensor(0)\n    C[i] = A[i]\n           ^"
    assert refusal(insum, OperandError, "C[i] = A[i]", A=torch.nested.nested_tensor([V, V])) == expected


@pytest.mark.parametrize("function", [insum, explain, tune])
def test_messages_without_a_place(function: Any) -> None:
    language = "a statement reads C[i,...] += A[i,...] * B[...]"
    expected = f"the expression is of type int, not a string; {language}"
    assert refusal(function, ParseError, 3, A=V) == expected
    assert refusal(function, ParseError, 3) == expected
    assert refusal(function, ParseError, ["C[i] = A[i]"], A=V) == expected.replace("int", "list")
    assert refusal(function, ParseError, "") == f"the expression is empty; {language}"
    unused = "D was given but the expression does not use it; it uses A, C"
    assert refusal(function, OperandError, "C[i] = A[i]", A=V, D=V) == unused
    for name in ("A,B", "", "A B", "1"):
        expected = f"{name!r} is not a name; pass each tensor by its name in the expression"
        assert refusal(function, OperandError, "C[i] = A[i]", **{name: V}) == expected


@pytest.mark.parametrize(
    ("size", "kind", "expected"),
    [
        (4, ShapeError, "size is of type int; pass a number per dimension, as in size=(3, 4)"),
        ("4", ShapeError, "size is of type str; pass a number per dimension, as in size=(3, 4)"),
        ((4.0,), ShapeError, "size must hold integers of 0 or more, but it is [4.0]"),
        (("4",), ShapeError, "size must hold integers of 0 or more, but it is ['4']"),
        ([-4], ShapeError, "size must hold integers of 0 or more, but it is [-4]"),
        ((2**63,), ShapeError, "size is [9223372036854775808], larger than any tensor"),
        (V, OperandError, "size gives the output's size as numbers, but it is a tensor; rename the tensor"),
    ],
)
@pytest.mark.parametrize("function", [insum, explain, tune])
def test_a_size_is_a_number_per_dimension(function: Any, size: Any, kind: type[InsumError], expected: str) -> None:
    assert refusal(function, kind, "C[I[i]] = A[i]", A=V, I=I, size=size) == expected


@pytest.mark.parametrize("size", [(3,), [3], torch.Size([3]), (numpy.int64(3),), (torch.tensor(3),)])
def test_sizes_that_will_do(size: Any) -> None:
    expected = torch.zeros(3).index_add(0, I, V)
    assert torch.equal(insum("C[I[i]] = A[i]", A=V, I=I, size=size), expected)
    sparse = COO.from_dense(torch.eye(4))
    assert torch.equal(insum("C[I[i]] = A[j] * S[i,j]", A=V, I=I, S=sparse, size=size), expected)


def test_full_is_no_tensor_of_tune() -> None:
    expected = "full is True or False here, but it is of type Tensor; rename the tensor"
    assert refusal(tune, OperandError, "C[i] = full[i]", full=V) == expected
    assert torch.equal(insum("C[i] = full[i]", full=V), V)


@pytest.mark.parametrize("name", ["expr", "tensors", "full", "size_"])
def test_every_other_name_is_free(name: str) -> None:
    assert torch.equal(insum(f"C[i] = {name}[i]", **{name: V}), V)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "syntax": ("C[E[i]] += A[i+1]", {}),
    "missing": ("C[E[i]] += A[i] * B[i]", {}),
    "unused": ("C[E[i]] += A[i]", {"B": V}),
    "rank": ("C[E[i]] += A[i,j]", {}),
    "extent": ("C[E[i]] += A[i] * B[i]", {"B": torch.rand(3)}),
    "index dtype": ("C[E[i]] += A[i]", {"E": V}),
    "value dtype": ("C[E[i]] += A[i] * B[i]", {"B": I}),
    "out of range": ("C[E[i]] += A[i]", {"E": torch.tensor([0, 1, 2, 5])}),
    "device": ("C[E[i]] += A[i] * B[i]", {"B": V.to("meta")}),
    "two sparse": ("C[E[i]] += A[i] * B[i] * D[i]", {"B": COO.from_dense(V), "D": COO.from_dense(V)}),
    "a format's shape": ("C[E[i]] += A[i] * B[i,j]", {"B": COO.from_dense(V)}),
}


@pytest.mark.parametrize(("expr", "wrong"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("function", [insum, explain, tune])
def test_a_mistake_computes_nothing_and_changes_nothing(
    function: Any, expr: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: dict[str, Any] = {"A": V.clone().requires_grad_(), "C": torch.rand(5), "E": I.clone(), **wrong}
    plain = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    before = {name: tensor.detach().clone() for name, tensor in plain.items()}
    versions = {name: tensor._version for name, tensor in plain.items()}

    def no_graph(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(torch.fx.GraphModule, "__call__", no_graph)
    with pytest.raises(InsumError):
        function(expr, **tensors)
    for name, tensor in plain.items():
        assert tensor._version == versions[name]
        if tensor.device.type == "cpu":
            assert torch.equal(tensor, before[name])
        assert tensor.grad_fn is None
        assert tensor.grad is None


def test_no_name_is_ever_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr("builtins.eval", never)
    monkeypatch.setattr("builtins.exec", never)
    for expr in ("__import__('os').system('true')", "C[i] = A[__import__('os')]", "C[i] = A[i] if x else 0"):
        with pytest.raises(ParseError):
            insum(expr, A=V)


def test_numbers_alone_have_the_default_dtype_of_the_call():
    places = torch.tensor([2, 0])
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for _ in range(2):
                assert insum("C[I[i]] = 1", I=places, size=(3,)).dtype == dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("function", [insum, explain, tune])
def test_tensors_are_given_by_name(function: Any) -> None:
    expr = "C[i] = A[i,k] * B[k]"
    words = "given without a name; pass each by its name, as in A=..., B=..."
    expected = f"2 tensors were {words}\n    {expr}\n           ^"
    with pytest.raises(OperandError) as caught:
        function(expr, M, V)
    assert str(caught.value) == expected
    expected = f"a tensor was {words}\n    {expr}\n                    ^"
    with pytest.raises(OperandError) as caught:
        function(expr, V, A=M)
    assert str(caught.value) == expected
    with pytest.raises(OperandError) as caught:
        function(expr, V, A=M, B=V)
    assert str(caught.value) == f"a tensor was {words}"
    with pytest.raises(ParseError) as parsed:
        function("ik,k->i", M, V)
    einsums = "this is einsum's notation; write C[i] += A[i,k] * B[k] and pass each tensor by its name"
    assert str(parsed.value) == f"{einsums}\n    ik,k->i\n    ^"


def test_a_shape_is_no_tensor() -> None:
    remedy = "a tensor; where only the shape counts, as in explain, torch.empty(A, device='meta') will do"
    expected = f"A is of type tuple; pass {remedy}\n    C[i] = A[i]\n           ^"
    assert refusal(explain, OperandError, "C[i] = A[i]", A=(4,)) == expected
    assert explain("C[i] = A[i]", A=torch.empty((4,), device="meta")).extents == {"i": 4}


def test_a_layer_is_no_expression() -> None:
    class Layer:
        EXPR = "C[i] = A[i]"

    expected = "the expression is of type Layer, not a string; pass its EXPR, which is C[i] = A[i]"
    assert refusal(explain, ParseError, Layer(), A=V) == expected


MISTAKEN: list[Callable[[], Any]] = [
    lambda: insum("C[i] = A[i", A=V),
    lambda: insum("C[i] = A[i]", A=M),
    lambda: insum("C[I[i]] = A[i]", A=V, I=I, size=(1,)),
    lambda: insum("C[m] = A[m,k]", A=M.to_sparse_csr()),
    lambda: explain("C[i] = A[i]", A=M),
    lambda: tune("C[i] = A[i]", A=M),
    lambda: spmm(COO.from_dense(M), M),
    lambda: sddmm(COO.from_dense(M), M, M),
    lambda: BlockSparseLinear(32, 32, block_size=16)(M),
]


@SPARSE_WARNINGS
@pytest.mark.parametrize("call", MISTAKEN)
def test_a_traceback_ends_at_the_door_of_the_package(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def own_frames() -> list[str]:
        with pytest.raises(InsumError) as caught:
            call()
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None or caught.value.__suppress_context__
        return [frame.path.name for frame in caught.traceback if "insum_ops" in frame.frame.f_globals["__name__"]]

    assert len(own_frames()) in (1, 2)
    monkeypatch.setenv("INSUM_TRACEBACK", "full")
    assert len(own_frames()) > 2


def _over_masked(call: Callable[[Any], object], x: torch.Tensor) -> None:
    call(torch.masked.masked_tensor(x, x > 0))


def _functionalized(call: Callable[[Any], object], x: torch.Tensor) -> None:
    torch.func.functionalize(call)(x)


def _traced_by_fx(call: Callable[[Any], object], x: torch.Tensor) -> None:
    torch.fx.symbolic_trace(call)(x)


FUNCTIONALIZED = (
    "torch.func.functionalize has no rule for autograd functions, which statements are inside of it; leave it out: "
    "torch.compile, torch.export and make_fx record a statement as one operator that changes nothing"
)
MASKED = "{0} is a MaskedTensor, which has no rule for sparse operators; pass a plain tensor, as {0}.to_tensor(0.0)"
PROXY = (
    "{0} is a Proxy of torch.fx, which follows no statement; mark the function that calls insum by torch.fx.wrap, or "
    "use torch.export"
)


@pytest.mark.cpu
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of MaskedTensors", "ignore:.* in __torch_dispatch__ for MaskedTensor"
)
@pytest.mark.parametrize(
    ("follow", "problem"), [(_over_masked, MASKED), (_functionalized, FUNCTIONALIZED), (_traced_by_fx, PROXY)]
)
def test_who_has_no_rule_for_a_statement_is_told_so(
    follow: Callable[[Callable[[Any], object], torch.Tensor], None], problem: str
) -> None:
    statements: list[Callable[[Any], object]] = [
        lambda B: insum("C[i,n] += A[i,k] * B[k,n]", A=M, B=B),
        lambda B: insum("C[m,n] += A[m,k] * B[k,n]", A=GroupCOO.from_dense(M), B=B),
    ]
    for statement in statements:
        with pytest.raises(InsumError) as caught:
            follow(statement, M.T)
        assert str(caught.value).splitlines()[0] == problem.format("B")
    indices, weight = torch.tensor([[0, 4], [0, 5]]), torch.ones(1, 3, 1)
    line = kernel_map(indices, [6], batch_size=1, kernel_size=3)
    with pytest.raises(InsumError) as caught:
        follow(lambda features: sparse_conv3d(features, weight, line), torch.ones(2, 1))
    of_proxy = "features is of type Proxy; pass a tensor"
    assert str(caught.value) == (of_proxy if problem == PROXY else problem.format("features"))


@pytest.mark.cpu
def test_a_layer_without_its_weight_or_with_another_bias_says_so() -> None:
    layer = BlockSparseLinear(32, 48, block_size=16, density=0.5)
    layer.bias.data = torch.ones(2)
    with pytest.raises(ShapeError, match=r"^bias is \[2\] but out_features is 48; it has a number for each$"):
        layer(torch.ones(2, 32))
    layer.weight = None
    words = r"^weight is of type NoneType; it must be a tensor \[blocks, \*block_size\]$"
    with pytest.raises(OperandError, match=words):
        layer(torch.ones(2, 32))
    convolution = SubMConv1d(1, 1, 3)
    convolution.weight = None
    x = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1)
    with pytest.raises(OperandError, match=r"^weight is of type NoneType; pass a tensor$"):
        convolution(x)
