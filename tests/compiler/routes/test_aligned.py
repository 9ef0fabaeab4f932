"""Products over copies of their operands whose rows are aligned, beside plain torch in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import prod

import pytest
import torch

from insum_ops import insum
from insum_ops.compiler import pipeline
from insum_ops.compiler.autograd import functions
from insum_ops.compiler.planning.device import H200, described_as
from insum_ops.compiler.routes import choice
from insum_ops.compiler.routes.aligned import AlignedRunner, aligned_of
from insum_ops.compiler.routes.prepared import has_kernels, prepare
from insum_ops.nn import SparseConvTensor, SubMConv1d
from tests.short_clouds import expected_of
from tests.tolerances import TOLERANCE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = replace(H200, tensor_flops=1e3)  # where the small products of a test take longer than copies
PRODUCT = "C[m,n] += A[m,k] * B[k,n]"


def drawn(*size, dtype=torch.float16, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + prod(size))).to(dtype).to(DEVICE)


def positions(low, high, count):
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(count)).to(DEVICE)


CASES = {
    "all odd": (PRODUCT, lambda: dict(A=drawn(13, 21), B=drawn(21, 11)), None),
    "the sum odd": (PRODUCT, lambda: dict(A=drawn(16, 21), B=drawn(21, 16)), None),
    "columns odd, and a number": (f"{PRODUCT} * 3", lambda: dict(A=drawn(16, 32), B=drawn(32, 11)), None),
    "turned operands": ("C[m,n] += A[m,k] * B[n,k]", lambda: dict(A=drawn(21, 13).T, B=drawn(11, 21)), None),
    "batches": ("C[b,m,n] = A[b,m,k] * B[b,k,n]", lambda: dict(A=drawn(3, 13, 9), B=drawn(3, 9, 11)), None),
    "groups": (
        "C[e,n] += A[U[e],k] * B[R[e],k,n]",
        lambda: dict(A=drawn(13, 21), B=drawn(4, 21, 11), U=positions(0, 13, 30), R=positions(-1, 4, 30)),
        None,
    ),
    "a scatter": (
        "C[U[e],n] += A[e,k] * B[k,n]",
        lambda: dict(A=drawn(30, 21), B=drawn(21, 11), U=positions(-1, 7, 30)),
        (7, 11),
    ),
    "one operand twice": ("C[i,j] += A[i,k] * A[k,j]", lambda: dict(A=drawn(21, 21)), None),
    "bfloat16": (
        PRODUCT,
        lambda: dict(A=drawn(13, 21, dtype=torch.bfloat16), B=drawn(21, 11, dtype=torch.bfloat16)),
        None,
    ),
}


def reference(text, given, size=None):
    """Return the value by torch in float64, of the statement as torch operations."""
    tensors = [tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu() for tensor in given.values()]
    statement = prepare(text, ",".join(given), size, tensors, None)
    return statement.graph(statement.variant(tensors))(tensors, None)


def over_copies(statement, tensors):
    """Return the runner over aligned copies; None if there are none. Without kernels, torch makes the copies."""
    with described_as(SLOW):
        way = aligned_of(statement, tensors)
    kernel = pipeline._kernel if has_kernels(tensors[0].device) else lambda inner, variant, *_: inner.graph(variant)
    return None if way is None else AlignedRunner(statement, way, pipeline.run, kernel)


def evaluated(text, given, size=None):
    tensors = list(given.values())
    runner = over_copies(prepare(text, ",".join(given), size, tensors, None), tensors)
    return runner(tensors)


@pytest.mark.every_route
@pytest.mark.parametrize("name", list(CASES))
def test_a_product_over_aligned_copies_equals_that_of_its_operands(name):
    text, make, size = CASES[name]
    given = make()
    result = evaluated(text, given, size)
    expected = reference(text, given, size)
    assert result.is_contiguous()
    assert result.dtype == given["A"].dtype
    close = {key: 4 * value for key, value in TOLERANCE[result.dtype].items()}  # of sums of a few dozen products
    torch.testing.assert_close(result.cpu().double(), expected, **close)


@pytest.mark.every_route
def test_what_is_padded_makes_no_nan_of_infinite_numbers():
    A, B = drawn(13, 21), drawn(21, 11)
    A[2, 3], A[5, 20], B[4, 6], B[20, 10] = float("inf"), float("-inf"), float("nan"), float("inf")
    result = evaluated(PRODUCT, dict(A=A, B=B))
    expected = A.cpu().double() @ B.cpu().double()
    torch.testing.assert_close(result.isnan().cpu(), expected.isnan())
    torch.testing.assert_close(result.isinf().cpu(), expected.isinf())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_given_output_is_added_to_once(dtype):
    seed, A, B = (drawn(*size, dtype=dtype) for size in ((13, 11), (13, 21), (21, 11)))
    torch.set_float32_matmul_precision("high")
    try:
        given = dict(A=A, B=B, C=seed)
        statement = prepare(PRODUCT, "A,B,C", None, [A, B, seed], None)
        if dtype == torch.float16:  # which would be rounded before it is added
            assert over_copies(statement, [A, B, seed]) is None
            return
        result = evaluated(PRODUCT, given)
    finally:
        torch.set_float32_matmul_precision("highest")
    tf32 = dict(rtol=5e-3, atol=5e-3) if DEVICE == "cuda" else TOLERANCE[dtype]
    torch.testing.assert_close(result.double().cpu(), (seed.double() + A.double() @ B.double()).cpu(), **tf32)


@pytest.fixture
def always(monkeypatch):
    """Every product that can be is evaluated over aligned copies, in calls and in gradients; returns which were.

    A statement that a launch plan replays is not evaluated again.
    """
    monkeypatch.setenv("INSUM_TUNE", "off")  # what is timed is evaluated more often
    usual, taken = pipeline.fastest_program, []

    def program(statement, variant, tensors):
        runner = over_copies(statement, tensors)
        if runner is None:
            return usual(statement, variant, tensors)
        return lambda tensors, fact: taken.append(str(statement.bound.statement)) or runner(tensors)

    monkeypatch.setattr(pipeline, "fastest_program", program)
    monkeypatch.setattr(functions, "by_torch", lambda *_: False)  # gradients are statements, as on a GPU
    monkeypatch.setattr(functions, "joint_gradients", lambda *_: {})  # each by itself
    return taken


@pytest.mark.cpu
def test_a_launch_plan_copies_what_two_gradients_read_once(always, monkeypatch):
    """Of three products each copies two operands and cuts its result; the gradient of the output is copied once."""
    if has_kernels(torch.device("cpu")):
        pytest.skip("kernels run instead")
    moved, usual = [], AlignedRunner._moved
    monkeypatch.setattr(AlignedRunner, "_moved", lambda *args: moved.append(str(args[1])) or usual(*args))
    A, B = (drawn(*size).requires_grad_() for size in ((15, 21), (21, 11)))
    counts, grads = [], []
    for _ in range(3):
        grads.append(torch.autograd.grad(insum("Once[m,n] += A[m,k] * B[k,n]", A=A, B=B), (A, B), drawn(15, 11)))
        counts.append(len(moved))
        moved.clear()
    assert counts == [9, 8, 0]
    for first, later in zip(grads[0], grads[2]):
        torch.testing.assert_close(later, first, rtol=0, atol=0)


@pytest.mark.cpu
def test_gradients_go_through_the_statements_own_rule_and_calls_are_replayed(always):
    """The second call of a kind makes a launch plan, which the third and fourth replay with other numbers."""
    if has_kernels(torch.device("cpu")):
        pytest.skip("kernels run instead")
    for call in range(4):
        A, B = (drawn(*size, seed=call).requires_grad_() for size in ((13, 21), (21, 11)))
        grad = drawn(13, 11, seed=call)
        result = insum("Out[m,n] += A[m,k] * B[k,n]", A=A, B=B)
        grads = torch.autograd.grad(result, (A, B), grad)
        a, b, g = A.detach().double(), B.detach().double(), grad.double()
        for value, expected in zip((result, *grads), (a @ b, g @ b.T, a.T @ g)):
            close = {key: 4 * number for key, number in TOLERANCE[torch.float16].items()}
            torch.testing.assert_close(value.detach().double(), expected, **close)
    each = ["Out[m,n] += A[m,k] * B[k,n]", "dA[m,k] += dOut[m,n] * B[k,n]", "dB[k,n] += dOut[m,n] * A[m,k]"]
    assert always == 2 * each


@pytest.mark.cpu
def test_a_convolution_of_odd_channels_is_replayed_over_new_clouds(always):
    """The tables that copies are made by belong to no cloud, so that a plan for all clouds may hold them."""
    if has_kernels(torch.device("cpu")):
        pytest.skip("kernels run instead")
    layer = SubMConv1d(13, 11, 3, bias=False, indice_key="own").half()
    dense = copy.deepcopy(layer).double()
    counts = []
    for length in (70, 75, 71, 74, 73):
        place = torch.randperm(3 * length)[:length]
        indices = torch.stack([torch.zeros_like(place), place], 1).int()
        features = drawn(length, 13).requires_grad_()
        given = [SparseConvTensor(own, indices, [3 * length], 1) for own in (features, features.detach().double())]
        given[1].features.requires_grad_()
        upstream = drawn(length, 11)
        result = layer(given[0]).features
        grads = torch.autograd.grad(result, [features, layer.weight], upstream)
        expected = expected_of(dense, given[1], given[1])
        leaves = [given[1].features, dense.weight]
        close = {key: 4 * number for key, number in TOLERANCE[torch.float16].items()}
        for value, other in zip(
            (result, *grads), (expected, *torch.autograd.grad(expected, leaves, upstream.double()))
        ):
            torch.testing.assert_close(value.detach().double(), other.detach(), **close)
        counts.append(len(always))
    assert counts[0] > 0
    assert counts[2] == counts[-1]


REFUSED = {
    "aligned rows": (PRODUCT, (5, 16), (16, 8)),
    "no sum that both share": ("C[m,k,n] = A[m,k] * B[k,n]", (5, 7), (7, 9)),
    "rows and no matrix": ("C[m] += A[m,k] * B[k]", (5, 7), (7,)),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_nothing_is_copied_in_vain(name):
    text, left, right = REFUSED[name]
    tensors = [drawn(*left), drawn(*right)]
    assert over_copies(prepare(text, "A,B", None, tensors, None), tensors) is None


def test_copies_that_take_longer_than_they_gain_are_not_made():
    tensors = [drawn(13, 21), drawn(21, 11)]
    with described_as(H200):
        assert aligned_of(prepare(PRODUCT, "A,B", None, tensors, None), tensors) is None


def test_a_summed_name_that_a_factor_lacks_is_not_padded():
    """Else 0 would be multiplied by A, which may be infinite."""
    tensors = [drawn(5, 7, 9), drawn(7, 11), drawn(9, 11)]
    statement = prepare("Y[i,r] += X[i,j,k] * A[j,r] * B[k,r]", "X,A,B", None, tensors, None)
    assert list(over_copies(statement, tensors).way.tables.values()) == [(11, 16)]


@pytest.mark.parametrize("room", [True, False])
def test_copies_are_bounded_in_memory(monkeypatch, room):
    asked = []
    monkeypatch.setattr(choice, "_has_room", lambda device, held: asked.append(held) or room)
    tensors = [drawn(13, 21), drawn(21, 11)]
    statement = prepare(PRODUCT, "A,B", None, tensors, None)
    call = choice._Call(statement, statement.variant(tensors), tensors, None, pipeline.run, pipeline._kernel, None, ())
    with described_as(SLOW):
        assert (choice._aligned(call) is not None) == room
    assert asked == [2 * (13 * 32 + 32 * 16 + 13 * 16)]  # bytes of A, B and the product
