"""Learning with a statement of three or more factors: what lies on the way is made once, and kept for the gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reduced_precision import reduced_precision
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.autograd import functions, in_steps, torch_gradients
from insum_ops.compiler.autograd import gradients as gradients_module
from insum_ops.compiler.planning.device import H200, described_as
from tests.tolerances import TOLERANCE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = replace(H200, vector_flops=1e6, tensor_flops=1e6)  # where the small tensors of a test are much work
CHAIN = "Y[i,l] += A[i,j] * B[j,k] * C[k,l]"
ADAPTERS = "Y[b,o] += X[b,i] * A[U[b],i,r] * B[U[b],r,o]"

# a statement, its tensors (an index tensor after the extent below which it stays), and the same in plain torch
STATEMENTS = {
    CHAIN: (dict(A="7 5", B="5 6", C="6 4"), lambda A, B, C: A @ B @ C),
    f"{CHAIN} * 3": (dict(A="7 5", B="5 6", C="6 4", Y="7 4"), lambda A, B, C, Y: 3 * A @ B @ C + Y),
    "Y[i,l] = A[i,j] * B[j,k] * C[k,l]": (dict(A="7 5", B="5 6", C="6 4", Y="7 4"), lambda A, B, C, Y: A @ B @ C),
    "Y[i,l] += A[i,j] * B[j,k] * B[l,k]": (dict(A="7 5", B="5 6"), lambda A, B: A @ B @ B.T),
    "Y[a,b] += A[b,i,j] * B[i,j,k] * C[k,l] * D[l,a]": (
        dict(A="6 3 4", B="3 4 5", C="5 3", D="3 7"),
        lambda A, B, C, D: torch.einsum("bij,ijk,kl,la->ab", A, B, C, D),
    ),
    "Y[a,b,c] += G[i,j,k] * A[a,i] * B[b,j] * C[c,k]": (
        dict(G="2 3 4", A="5 2", B="6 3", C="7 4"),
        lambda G, A, B, C: torch.einsum("ijk,ai,bj,ck->abc", G, A, B, C),
    ),
    "Y[b,n,d] += Q[b,n,k] * K[b,m,k] * V[b,m,d]": (
        dict(Q="2 7 3", K="2 6 3", V="2 6 4"),
        lambda Q, K, V: Q @ (K.mT @ V),
    ),
    "Y[()] += A[i] * B[i,j] * C[j] * D[k]": (
        dict(A="5", B="5 6", C="6", D="900"),
        lambda A, B, C, D: (A @ B @ C) * D.sum(),
    ),
    ADAPTERS: (
        dict(X="9 7", A="4 7 2", B="4 2 6", U="4: 9"),
        lambda X, A, B, U: torch.bmm(torch.bmm(X[:, None], A[U]), B[U])[:, 0],
    ),
    "Y[P[p],c] += X[I[p],a] * W[a,b] * V[b,c]": (
        dict(X="8 6", W="6 7", V="7 5", I="8: 30", P="8: 30", Y="8 5"),
        lambda X, W, V, I, P, Y: Y.index_add(0, P, X[I] @ W @ V),  # noqa: E741
    ),
}


def drawn(tensors: dict[str, str], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {}
    for name, text in tensors.items():
        below, _, shape = text.rpartition(":")
        sizes = [int(size) for size in shape.split()]
        found[name] = (
            torch.randint(0, int(below), sizes) if below else torch.randn(sizes, dtype=torch.float64).to(dtype)
        )
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


def learning(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same numbers, of which all that are no positions want gradients."""
    return {name: each.detach().clone().requires_grad_(each.is_floating_point()) for name, each in tensors.items()}


def gradients(value: Tensor, tensors: dict[str, Tensor], upstream: Tensor) -> dict[str, Tensor]:
    leaves = {name: each for name, each in tensors.items() if each.requires_grad}
    grads = torch.autograd.grad(value, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads))


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Steps are worth it, also on a CPU, where torch differentiates what is dense; sums may be rounded on the way."""
    monkeypatch.setattr(torch_gradients, "INTERPRETED", True)
    # a GPU is described for one thread, in which gradients are computed too
    with described_as(SLOW), reduced_precision(True), torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.fixture
def derived(monkeypatch):
    """The statements that were differentiated, each with the tensor for which it was."""
    found = []
    own = gradients_module.gradient_of

    def gradient_of(evaluate, expr, name, *rest):
        found.append((expr, name))
        return own(evaluate, expr, name, *rest)

    monkeypatch.setattr(gradients_module, "gradient_of", gradient_of)
    monkeypatch.setattr(functions, "joint_gradients", lambda *_: {})
    return found


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=pytest.mark.every_route), torch.float32, torch.float16], ids=str
)
@pytest.mark.parametrize("expr", STATEMENTS)
def test_values_and_gradients_are_those_of_plain_torch(expr, dtype, derived):
    """The first call and those that replay it."""
    described, plain = STATEMENTS[expr]
    tensors = drawn(described, dtype)
    wide = learning({name: each.double() if each.is_floating_point() else each for name, each in tensors.items()})
    value = plain(**wide)
    upstream = torch.randn(value.shape, dtype=torch.float64, device=DEVICE).to(dtype)
    expected = gradients(value, wide, upstream.double())
    for _ in range(4):
        own = learning(tensors)
        result = insum(expr, **own)
        assert_near(result, value, dtype)
        grads = gradients(result, own, upstream)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert grad.dtype == dtype
            assert_near(grad, expected[name], dtype)
    assert derived
    assert all(text != expr for text, _ in derived)


def assert_near(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """By all elements together: a sum near zero is not exact to the last place."""
    assert result.shape == expected.shape
    result, expected = result.detach().double(), expected.detach()
    assert float((result - expected).norm()) <= TOLERANCE[dtype]["rtol"] * float(expected.norm())


@pytest.mark.every_route
def test_a_product_on_the_way_is_differentiated_once(derived):
    own = learning(drawn(STATEMENTS[CHAIN][0]))
    insum(CHAIN, **own).sum().backward()
    first, second = "T[j,l] += B[j,k] * C[k,l]", "Y[i,l] += A[i,j] * T[j,l]"
    assert derived == [(second, "A"), (second, "T"), (first, "B"), (first, "C")]


def test_only_what_leads_to_a_gradient_that_is_wanted_is_differentiated(derived):
    tensors = drawn(STATEMENTS[CHAIN][0])
    tensors["A"].requires_grad_()
    insum(CHAIN, **tensors).sum().backward()
    assert [name for _, name in derived] == ["A"]
    torch.testing.assert_close(tensors["A"].grad, (tensors["B"] @ tensors["C"]).sum(1).expand(7, 5))


@pytest.mark.parametrize("expr", [CHAIN, ADAPTERS])
def test_gradients_have_any_order(expr):
    own = learning(drawn(STATEMENTS[expr][0]))
    names = [name for name, each in own.items() if each.requires_grad]
    function = lambda *values: insum(expr, **{**own, **dict(zip(names, values))})
    leaves, how = [own[name] for name in names], dict(fast_mode=True, nondet_tol=1e-12)  # a GPU adds in any order
    assert torch.autograd.gradcheck(function, leaves, **how)
    assert torch.autograd.gradgradcheck(function, leaves, **how)


def test_transforms_and_batches_of_gradients_give_the_same():
    tensors = drawn(STATEMENTS[ADAPTERS][0])
    loss = lambda X: insum(ADAPTERS, **{**tensors, "X": X}).square().sum()
    X = tensors["X"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(X), X)
    torch.testing.assert_close(torch.func.grad(loss)(tensors["X"]), grad)
    whole = lambda X: insum(ADAPTERS, **{**tensors, "X": X})
    by_row = torch.autograd.functional.jacobian(whole, tensors["X"])
    torch.testing.assert_close(torch.autograd.functional.jacobian(whole, tensors["X"], vectorize=True), by_row)


@pytest.mark.every_route
def test_autocast_rounds_the_operands_and_gradients_come_back_in_float32(derived):
    own = learning(drawn(STATEMENTS[CHAIN][0], torch.float32))
    with torch.autocast(DEVICE, torch.bfloat16):
        result = insum(CHAIN, **own)
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    B, C = own["B"].detach().double(), own["C"].detach().double()
    assert_near(own["A"].grad, (B @ C).sum(1).expand(7, 5), torch.bfloat16)
    assert own["A"].grad.dtype == torch.float32
    assert len(derived) == 4


def test_settings_that_change_before_the_gradients_are_asked_for_do_no_harm():
    tensors = drawn(STATEMENTS[CHAIN][0], torch.float32)
    own, upstream = learning(tensors), torch.ones(7, 4, device=DEVICE)
    expected = gradients(own["A"] @ own["B"] @ own["C"], own, upstream)
    before = torch.get_float32_matmul_precision()
    for first, second in [("high", "highest"), ("highest", "high")] * 3:
        try:
            own = learning(tensors)
            torch.set_float32_matmul_precision(first)
            result = insum(CHAIN, **own)
            torch.set_float32_matmul_precision(second)
            for name, grad in gradients(result, own, upstream).items():
                torch.testing.assert_close(grad, expected[name], rtol=2e-2, atol=2e-2)
        finally:
            torch.set_float32_matmul_precision(before)


@pytest.mark.every_route
def test_a_row_that_is_absent_has_no_part_in_gradients(derived):
    """In steps the 0 of an absent row would meet a NaN."""
    tensors = drawn(STATEMENTS[ADAPTERS][0])
    tensors["U"][2] = -1
    tensors["X"][2] = torch.nan
    own = learning(tensors)
    insum(ADAPTERS, **own).sum().backward()
    assert all(text == ADAPTERS for text, _ in derived)
    assert own["X"].grad[2].tolist() == [0] * 7
    assert not own["A"].grad.isnan().any()
    assert not own["B"].grad.isnan().any()


def test_what_is_larger_than_all_that_is_read_and_written_is_not_kept(derived):
    """Torch's own F.bilinear keeps no such tensor either."""
    expr = "Y[b] += X[b,i] * W[i,j,k] * Z[b,j] * V[b,k]"
    tensors = drawn(dict(X="50 2", W="2 9 9", Z="50 9", V="50 9"))
    own = learning(tensors)
    insum(expr, **own).sum().backward()
    assert all(text == expr for text, _ in derived)
    other = learning(tensors)
    torch.einsum("bi,ijk,bj,bk->b", *other.values()).sum().backward()
    for name, each in own.items():
        torch.testing.assert_close(each.grad, other[name].grad)


def test_factors_of_several_dtypes_are_not_rounded_on_the_way(derived):
    tensors = drawn(STATEMENTS[CHAIN][0], torch.float32)
    own = learning({name: each.double() if name == "A" else each for name, each in tensors.items()})
    result = insum(CHAIN, **own)
    A, B, C = (each.detach().double() for each in own.values())
    torch.testing.assert_close(result, A @ B @ C)
    result.sum().backward()
    assert all(text == CHAIN for text, _ in derived)
    assert own["B"].grad.dtype == torch.float32


@pytest.mark.every_route
def test_half_precision_is_not_rounded_on_the_way_where_torch_may_not(derived):
    own = learning(drawn(STATEMENTS[CHAIN][0], torch.float16))
    with reduced_precision(False):
        insum(CHAIN, **own).sum().backward()
    assert [text for text, _ in derived] == [CHAIN] * 3


def test_other_lengths_and_other_indices_replay_the_same_plan():
    for batch in (300, 301, 450, 300, 999, 450):
        tensors = drawn(dict(X=f"{batch} 7", A="4 7 2", B="4 2 6", U=f"4: {batch}"), torch.float32)
        own, other = learning(tensors), learning(tensors)
        plain = STATEMENTS[ADAPTERS][1]
        upstream = torch.randn(batch, 6, device=DEVICE)
        expected = gradients(plain(**other), other, upstream)
        for name, grad in gradients(insum(ADAPTERS, **own), own, upstream).items():
            assert_near(grad, expected[name].double(), torch.float32)


def test_a_statement_of_two_factors_has_no_steps():
    assert not in_steps.may_have_steps("Y[i] += A[i,j] * B[j]")
    assert not in_steps.may_have_steps("Y[i] = max(A[i,j] * B[j] * C[j])")
    assert in_steps.may_have_steps("Y[i] += A[i,j] * B[j] * C[j]")


@pytest.mark.every_route
@pytest.mark.parametrize("choice", [in_steps.IN_STEPS, in_steps.WHOLE])
def test_the_clock_decides_where_an_estimate_does_not(choice, derived, monkeypatch):
    """Both ways are timed with the gradients that are wanted, and none of them is recorded as a part of the call."""
    operator = "+=" if choice == in_steps.WHOLE else "="  # no plan is there yet
    expr = f"M[i,r] {operator} X[i,j,k] * B[j,r] * C[k,r]"
    timed = dict[str, tuple[Tensor | None, ...]]()

    def fastest(key, ways, first, start):
        assert key.statement.startswith("gradients for X,C of ")
        timed.update({way: start(way)[0]() for way in ways})
        derived.clear()
        return choice

    monkeypatch.setattr(in_steps, "fastest", fastest)
    monkeypatch.setattr(in_steps, "has_kernels", lambda _: True)
    monkeypatch.setattr(in_steps, "may_be_timed", lambda _: True)
    tensors = drawn(dict(X="5 6 7", B="6 3", C="7 3"))
    X, B, C = (tensors[name].requires_grad_(name != "B") for name in "XBC")
    expected = torch.einsum("ijk,jr,kr->ir", X, B, C)
    wanted = torch.autograd.grad(expected, (X, C), expected.detach())
    with described_as(H200):  # which finds the two equal
        result = insum(expr, X=X, B=B, C=C)
        torch.testing.assert_close(torch.autograd.grad(result, (X, C), expected.detach()), wanted)
    assert {*timed} == {in_steps.IN_STEPS, in_steps.WHOLE}
    for grads in timed.values():
        torch.testing.assert_close((grads[0], grads[2]), wanted)
        assert grads[1] is None
    assert any(text == expr for text, _ in derived) == (choice == in_steps.WHOLE)
    again = insum(expr, X=X, B=B, C=C)  # by its plan
    torch.testing.assert_close(torch.autograd.grad(again, (X, C), expected.detach()), wanted)
