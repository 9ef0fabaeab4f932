"""A pattern that is new is multiplied by as it is listed, and sorted into a format once it was used for a while."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE
from tolerances import assert_matches
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from insum_ops import sddmm, spmm
from insum_ops.compiler import IndexRangeError
from insum_ops.matmul import arrange
from insum_ops.matmul.edges import edges_of
from insum_ops.matmul.listed import YOUNG
from insum_ops.matmul.torch_sparse import sparse_source
from insum_ops.nn import SpMM

pytestmark = [SPARSE_WARNINGS, pytest.mark.kernels]
M, K, N, E = 7, 5, 3, 24


def entries(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and trained values of entries in any order, some of them listed twice."""
    torch.manual_seed(seed)
    rows, columns = torch.randint(M, (E,), device=DEVICE), torch.randint(K, (E,), device=DEVICE)
    return rows, columns, torch.randn(E, dtype=torch.float64, device=DEVICE, requires_grad=True)


def graph(rows: Tensor, columns: Tensor, values: Tensor) -> tuple[Any, ...]:
    return torch.stack([columns, rows]), values, (K, M)


def coo(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (M, K))


def csr(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    return coo(rows, columns, values).coalesce().to_sparse_csr()


def is_listed(A: Any) -> bool:
    """Whether the next product with a matrix would be over its entries as they are listed."""
    if isinstance(A, tuple):
        return edges_of(A, "A", None, may_be_young=True).arranged.is_listed
    return sparse_source(A, "A", may_be_young=True, may_repeat=True).arranged.is_listed


def dense_of(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    zeros = torch.zeros(M, K, dtype=torch.float64, device=DEVICE)
    return zeros.index_put((rows, columns), values, accumulate=True)


kinds = pytest.mark.parametrize("kind", [graph, coo, csr])


@kinds
@pytest.mark.parametrize("is_trained", [False, True])
def test_every_product_is_right_while_a_pattern_grows_old(kind: Callable[..., Any], is_trained: bool) -> None:
    rows, columns, values = entries()
    A = kind(rows, columns, values if is_trained else values.detach())
    B = torch.randn(K, N, dtype=torch.float64, device=DEVICE, requires_grad=True)
    expected, pending = dense_of(rows, columns, values) @ B, []
    wanted = [values, B] if is_trained else [B]
    for _ in range(YOUNG + 3):
        C = spmm(A, B)
        assert_matches(C, expected)
        pending.append(C)
    upstream = torch.randn_like(expected)
    right = torch.autograd.grad(expected, wanted, upstream, retain_graph=True)
    for C in pending:  # those of the first calls after the last one
        for one, other in zip(torch.autograd.grad(C, wanted, upstream, retain_graph=True), right):
            assert_matches(one, other)


@kinds
def test_a_pattern_is_sorted_once_it_was_used_for_a_while(kind: Callable[..., Any]) -> None:
    rows, columns, values = entries()
    A, B = kind(rows, columns, values.detach()), torch.randn(K, N, dtype=torch.float64, device=DEVICE)
    states = []
    for _ in range(YOUNG):
        spmm(A, B)
        states.append(is_listed(A))  # which counts as a use
    assert states[0]
    assert not states[-1]


@kinds
@pytest.mark.parametrize("is_in_graph", [False, True])
def test_entries_as_listed_are_held_for_a_captured_graph_alone(
    kind: Callable[..., Any], is_in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns, values = entries()
    A, B = kind(rows, columns, values.detach()), torch.randn(K, N, dtype=torch.float64, device=DEVICE)
    spmm(A, B)
    source = edges_of(A, "A", None, True) if isinstance(A, tuple) else sparse_source(A, "A", True, True)
    listed = [ref(coord) for coord in source.arranged.pattern.coords if coord is not None]
    with monkeypatch.context() as capture:
        capture.setattr(arrange, "is_captured", lambda device: is_in_graph)
        spmm(A, B)
    for _ in range(YOUNG):
        spmm(A, B)
    del source
    gc.collect()
    assert not is_listed(A)
    assert [coord() is not None for coord in listed] == [is_in_graph] * 2
    del A
    gc.collect()
    assert [coord() is not None for coord in listed] == [False] * 2


def test_what_is_not_told_apart_is_merged_where_it_matters() -> None:
    """Entries that an uncoalesced tensor lists twice are one for a maximum and for a sampled product."""
    rows, columns, values = entries()
    A, B = coo(rows, columns, values.detach()), torch.randn(K, N, dtype=torch.float64, device=DEVICE)
    dense = dense_of(rows, columns, values.detach())
    assert_matches(spmm(A, B), dense @ B)
    assert is_listed(A)
    has_entry = dense_of(rows, columns, torch.ones_like(values.detach())) > 0
    products = torch.where(has_entry[:, :, None], dense[:, :, None] * B, -torch.inf)
    best = torch.where(has_entry.any(1)[:, None], products.amax(1), 0)
    assert_matches(spmm(A, B, "max"), best)
    assert not is_listed(A)
    X, Y = (torch.randn(rows, 2, dtype=torch.float64, device=DEVICE) for rows in (M, K))
    assert_matches(sddmm(coo(rows, columns, values.detach()), X, Y).to_dense(), (X @ Y.T) * has_entry)


@kinds
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_other_reductions_of_young_patterns(kind: Callable[..., Any], reduce: str) -> None:
    rows, columns, values = entries()
    whole = coo(rows, columns, values.detach()).coalesce()
    (rows, columns), values = whole.indices(), whole.values()
    A, B = kind(rows, columns, values), torch.randn(K, N, dtype=torch.float64, device=DEVICE, requires_grad=True)
    how = {"mean": "mean", "max": "amax"}[reduce]
    products = values[:, None] * B[columns]
    zeros = torch.zeros(M, N, dtype=torch.float64, device=DEVICE)
    expected = zeros.scatter_reduce(0, rows[:, None].expand(-1, N), products, how, include_self=False)
    for _ in range(2):
        C = spmm(A, B, reduce)
        assert_matches(C, expected)
        upstream = torch.randn_like(expected)
        assert_matches(*[torch.autograd.grad(one, B, upstream, retain_graph=True)[0] for one in (C, expected)])


def test_deterministic_sums_are_over_sorted_entries() -> None:
    A, B = graph(*entries()), torch.randn(K, N, dtype=torch.float64, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        spmm(A, B)
        assert not is_listed(A)
    finally:
        torch.use_deterministic_algorithms(False)
    young = graph(*entries(1))
    assert is_listed(young)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_listed(young)
    finally:
        torch.use_deterministic_algorithms(False)


@kinds
@pytest.mark.parametrize("before", range(YOUNG + 1))
def test_a_checkpoint_saves_in_its_second_run_what_it_saved_in_its_first(kind: Callable[..., Any], before: int) -> None:
    rows, columns, values = entries()
    A, B = kind(rows, columns, values), torch.randn(K, N, dtype=torch.float64, device=DEVICE, requires_grad=True)
    for _ in range(before):
        spmm(A, B)
    upstream = torch.randn(M, N, dtype=torch.float64, device=DEVICE)
    found = torch.autograd.grad(checkpoint(spmm, A, B, use_reentrant=False), (values, B), upstream)
    for one, other in zip(found, torch.autograd.grad(dense_of(rows, columns, values) @ B, (values, B), upstream)):
        assert_matches(one, other)


def test_a_layer_converts_at_once() -> None:
    rows, columns, values = entries()
    A = coo(rows, columns, values.detach())
    spmm(A, torch.randn(K, N, dtype=torch.float64, device=DEVICE))
    assert SpMM(A)._form.facts is not None


def test_an_entry_outside_a_young_matrix_is_refused() -> None:
    rows, columns, values = entries()
    B = torch.randn(K, N, dtype=torch.float64, device=DEVICE)
    columns[4] = -1
    with pytest.raises(IndexRangeError, match=r"^edge_index\[0, 4\] is -1 but there are 5 sources; "):
        spmm(graph(rows, columns, values.detach()), B)
    columns[4], rows[6] = 0, M
    A = torch.sparse_coo_tensor(torch.stack([rows, columns]), values.detach(), (M, K), check_invariants=False)
    with pytest.raises(IndexRangeError, match=r"^A lists an entry at \[7, "):
        spmm(A, B)
