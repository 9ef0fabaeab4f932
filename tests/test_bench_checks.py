"""Cases whose result has several parts find a fault in each of them."""

from __future__ import annotations

import pytest
import torch

from bench.case import OURS, Call, Case, forget
from bench.harness import check

pytest.importorskip("pytest_benchmark")
from bench.cases import test_backward as backward
from bench.cases import test_block_sparse_linear as linear

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the cases themselves are larger"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant"),  # of torch 2.11, once
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    forget()


def checked(call: Call, case: Case) -> float:
    """As a row is checked before it is timed."""
    return check((call.result or call.run)(), case.expected, case.limit)


def falsified(monkeypatch, at: int, factor: float) -> None:
    """One of the gradients that torch returns, times a factor."""
    exact = torch.autograd.grad

    def wrong(*arguments, **options):
        found = exact(*arguments, **options)
        return tuple(factor * own if number == at else own for number, own in enumerate(found))

    monkeypatch.setattr(torch.autograd, "grad", wrong)


@pytest.mark.parametrize("factor", [1000.0, float("nan")])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("provider", [OURS, backward.SEPARATE])
def test_a_wrong_gradient_of_spmm_is_found(provider, at, factor, monkeypatch):
    given = backward.product(next(iter(backward.GRAPHS)))
    call = given.call(provider)
    assert checked(call, given.case) < 1e-6
    falsified(monkeypatch, at, factor)
    with pytest.raises(AssertionError, match=r"^relative error (9\.99e\+02|nan) is above 4e-05$"):
        checked(call, given.case)


@pytest.mark.parametrize("factor", [1000.0, float("nan")])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("provider", [OURS, linear.DENSE])
def test_a_wrong_gradient_of_a_linear_layer_is_found(provider, at, factor, monkeypatch):
    monkeypatch.setattr(linear, "SIZE", 128)
    kind = torch.float32, 32, 0.5
    call, case = linear.training(provider, linear.operands(*kind)), linear.training_case(*kind)
    assert checked(call, case) < 1e-6
    falsified(monkeypatch, at, factor)
    with pytest.raises(AssertionError, match=r"^relative error (9\.99e\+02|nan) is above 1e-05$"):
        checked(call, case)


@pytest.mark.parametrize("case", [linear.forward_case, linear.training_case])
def test_references_of_a_linear_layer_are_made_once_for_all_providers(case, monkeypatch):
    monkeypatch.setattr(linear, "SIZE", 64)
    assert case(torch.float32, 32, 0.5) is case(torch.float32, 32, 0.5)


def test_gradients_of_the_dense_layer_are_taken_at_the_stored_blocks(monkeypatch):
    monkeypatch.setattr(linear, "SIZE", 128)
    given = linear.operands(torch.float32, 32, 0.5)
    assert torch.equal(given.stored(given.twin.weight), given.layer.weight)
