"""Cases whose result has several parts find a fault in each of them."""

from __future__ import annotations

import pytest
import torch

from bench.case import OURS, Call, Case, forget
from bench.harness import check

pytest.importorskip("pytest_benchmark")
from bench.cases import test_backward as backward
from bench.cases import test_block_sparse_linear as linear
from bench.cases import test_one_liners as one_liners

pytestmark = [
    pytest.mark.cpu,
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


def one_by_one(X: torch.Tensor, W: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What torch._grouped_mm computes on a GPU."""
    starts = [0, *offs.tolist()]
    return torch.cat([X[start:stop] @ own for start, stop, own in zip(starts, starts[1:], W)])


def test_grouped_mm_adds_to_a_new_result_in_place(monkeypatch):
    monkeypatch.setattr(one_liners, "needs_gpu", lambda what: None)
    monkeypatch.setattr(torch, "_grouped_mm", one_by_one)
    monkeypatch.setattr(torch.Tensor, "index_add", None)  # it would copy the result
    given = one_liners.routed()
    call = one_liners.experts_by("torch grouped_mm", given)
    assert checked(call, given.case) < 1e-6
    assert checked(call, given.case) < 1e-6  # not added to what the first call left


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_every_provider_of_graph_attention_is_given_the_same_indices(monkeypatch):
    given, seen = one_liners.attended(), []
    for name in ("in_statements", "separately"):
        monkeypatch.setattr(one_liners, name, lambda src, dst, *operands: seen.append((src, dst)))
    for provider in (OURS, one_liners.SEPARATE):
        one_liners.attention_by(provider, given).run()
    assert all(src is given.src and dst is given.dst for src, dst in seen)
    assert len(seen) == 2
    assert (given.src.dtype, given.dst.dtype) == (torch.int64, torch.int64)
