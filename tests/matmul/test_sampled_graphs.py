"""Products over graphs that are new at every step: right whatever earlier plans were for, and soon by those plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches
from torch import Tensor

from insum_ops import insum, sddmm, spmm
from insum_ops.compiler import IndexRangeError, pipeline
from insum_ops.formats import COO, GroupCOO

pytestmark = SPARSE_WARNINGS
ROWS, COLUMNS, WIDTH = (20, 30, 3) if IS_INTERPRETED else (400, 300, 3)
# of two that are alike one is a graph of as many other edges, which no plan may take for the first; then a length of
# another class, lengths that divide by 16, short ones, one edge and none
LENGTHS = [70, 70, 75] if IS_INTERPRETED else [300, 300, 305, 305, 301, 377, 376, 520, 520, 302, 40, 40, 1, 0, 303]


def sampled(length: int, is_sorted: bool, is_distinct: bool) -> tuple[Tensor, Tensor]:
    """Rows and columns of edges; some rows have none, others many."""
    place = torch.randint(ROWS * COLUMNS // 4, (length,)) * 4  # so that some are drawn twice
    if is_distinct:
        place = torch.randperm(ROWS * COLUMNS)[:length]
    place = place.sort().values if is_sorted else place
    return (place // COLUMNS).to(DEVICE), (place % COLUMNS).to(DEVICE)


def sparse_coo(rows: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), weight, (ROWS, COLUMNS))


def compressed(rows: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
    pointers = torch.searchsorted(rows, torch.arange(ROWS + 1, device=DEVICE))
    return torch.sparse_csr_tensor(pointers, columns, weight, (ROWS, COLUMNS))


# how a graph is given: by its rows, columns and weights, and whether it lists an edge twice, or in any order
KINDS: dict[str, Any] = {
    "edges": lambda rows, columns, weight: (torch.stack([columns, rows]), weight, (COLUMNS, ROWS)),
    "int32 edges": lambda rows, columns, weight: (torch.stack([columns, rows]).int(), weight, (COLUMNS, ROWS)),
    "uncoalesced": sparse_coo,
    "coalesced": lambda *parts: sparse_coo(*parts).coalesce(),
    "csr": compressed,
    "csc": lambda rows, columns, weight: torch.sparse_csc_tensor(
        torch.searchsorted(columns, torch.arange(COLUMNS + 1, device=DEVICE)), rows, weight, (ROWS, COLUMNS)
    ),
    "COO": lambda rows, columns, weight: COO.from_coo(torch.stack([rows, columns]), weight, (ROWS, COLUMNS)),
    "GroupCOO": lambda rows, columns, weight: GroupCOO.from_coo(torch.stack([rows, columns]), weight, (ROWS, COLUMNS)),
    "GroupCOO of csr": lambda *parts: GroupCOO.from_torch(compressed(*parts)),
}


every_kind = pytest.mark.parametrize("kind", KINDS)


def new_graph(kind: str, length: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A graph of this kind, its rows and columns, and its weights, which are trained."""
    is_compressed = kind.endswith(("csr", "csc"))
    rows, columns = sampled(length, is_compressed, is_distinct=is_compressed or kind == "coalesced")
    if kind == "csc":
        columns, order = columns.sort(stable=True)
        rows = rows[order]
    weight = torch.randn(length, dtype=torch.float64, device=DEVICE, requires_grad=True)
    return KINDS[kind](rows, columns, weight), rows, columns, weight


def expected_of(rows: Tensor, columns: Tensor, weight: Tensor, B: Tensor) -> Tensor:
    """The product by a dense matrix, in float64."""
    dense = torch.zeros(ROWS, COLUMNS, dtype=torch.float64, device=DEVICE)
    return dense.index_put((rows, columns), weight, accumulate=True) @ B


def product(A: Any, B: Tensor) -> Tensor:
    """A layer over a graph: of a format as a statement, else by `spmm`."""
    return insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B) if isinstance(A, (COO, GroupCOO)) else spmm(A, B)


@pytest.mark.every_route
@pytest.mark.parametrize(
    ("kind", "is_deterministic"),
    [("edges", False), ("csr", False), ("GroupCOO", False)]
    if IS_INTERPRETED
    else [*((kind, False) for kind in KINDS), ("edges", True), ("coalesced", True), ("GroupCOO", True)],
)
def test_values_and_gradients_over_ever_new_graphs(kind, is_deterministic):
    torch.manual_seed(len(kind))
    B = torch.randn(COLUMNS, WIDTH, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for length in LENGTHS:
            A, rows, columns, weight = new_graph(kind, length)
            expected = expected_of(rows, columns, weight, B)
            with torch.no_grad():
                assert_matches(product(A, B), expected.detach())
            for _ in range(2):  # as a model of two layers uses one graph twice
                upstream = torch.randn_like(expected)
                found = torch.autograd.grad(product(A, B), [weight, B], upstream, retain_graph=True)
                right = torch.autograd.grad(expected, [weight, B], upstream, retain_graph=True)
                for one, other in zip(found, right):
                    assert_matches(one, other)
            del A  # and its memory may be the next one's
    finally:
        torch.use_deterministic_algorithms(False)


@every_kind
def test_a_graph_of_a_known_kind_is_not_planned_again(kind, monkeypatch):
    """A step over a new graph asks nobody for its statement's kernel: that took longer than all of its work."""
    B = torch.randn(COLUMNS, WIDTH, device=DEVICE, dtype=torch.float64, requires_grad=True)

    def step(length: int) -> None:
        A, *_ = new_graph(kind, length)
        if kind == "uncoalesced":  # whose duplicates are to be found where it is trained
            A = A.detach()
        for _ in range(2):
            torch.autograd.grad(product(A, B).sum(), B)

    torch.manual_seed(0)
    for length in range(401, 441, 2):
        step(length)
    planned, runner_of = [], pipeline.runner_of

    def counting(*args):
        planned.append(args)
        return runner_of(*args)

    monkeypatch.setattr(pipeline, "runner_of", counting)
    for length in range(404, 424, 2):
        step(length)
    assert len(planned) <= 20  # of 80 statements; most kinds need none, or those of another power of two of groups


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "OO" not in kind])
@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_other_reductions_over_new_graphs(kind, reduce):
    B = torch.randn(COLUMNS, WIDTH, dtype=torch.float64, device=DEVICE, requires_grad=True)
    for length in (130, 130, 137, 1, 0):
        A, rows, columns, weight = new_graph(kind, length)
        if kind in ("uncoalesced", "coalesced"):  # what is listed twice is one entry
            whole = sparse_coo(rows, columns, weight).coalesce()
            (rows, columns), weight = whole.indices(), whole.values()
        products = weight[:, None] * B[columns]
        how = {"mean": "mean", "max": "amax", "min": "amin"}[reduce]
        expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64, device=DEVICE)
        expected = expected.scatter_reduce(0, rows[:, None].expand(-1, WIDTH), products, how, include_self=False)
        C = spmm(A, B, reduce)
        assert_matches(C, expected)
        upstream = torch.randn_like(expected)
        assert_matches(*[torch.autograd.grad(made, B, upstream, retain_graph=True)[0] for made in (C, expected)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "OO" not in kind])
def test_sampled_products_over_new_graphs(kind):
    X, Y = (
        torch.randn(rows, WIDTH, dtype=torch.float64, device=DEVICE, requires_grad=True) for rows in (ROWS, COLUMNS)
    )
    for length in (130, 130, 137, 1, 0):
        A, rows, columns, weight = new_graph(kind, length)
        V = sddmm(A, X, Y)
        if not isinstance(A, tuple):
            assert V.layout is A.layout
            merged = sparse_coo(rows, columns, weight.detach()).coalesce()
            (rows, columns), V = merged.indices(), V.to_dense()[tuple(merged.indices())]
        expected = (X[rows] * Y[columns]).sum(1)
        assert_matches(V, expected)
        upstream = torch.randn_like(expected)
        for found, right in zip(*(torch.autograd.grad(made, [X, Y], upstream) for made in (V, expected))):
            assert_matches(found, right)


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "OO" not in kind])
def test_a_graph_that_is_written_to_is_another(kind):
    B = torch.randn(COLUMNS, WIDTH, dtype=torch.float64, device=DEVICE)
    (A, *_), (other, *parts) = new_graph(kind, 130), new_graph(kind, 130)
    if kind == "coalesced" and A._nnz() != other._nnz():
        A = sparse_coo(*new_graph(kind, 130)[1:]).coalesce()
        other, parts = A.clone(), [*A.indices(), A.values().clone()]
    for _ in range(2):
        spmm(A, B)
        if isinstance(A, tuple):
            A[0].copy_(other[0])
            A[1].copy_(other[1])
        else:
            A.copy_(other)
        assert_matches(spmm(A, B), expected_of(*parts, B))


def test_gradients_are_of_the_graph_that_was_multiplied():
    (edge_index, weight, size), rows, columns, _ = new_graph("edges", 130)
    B = torch.randn(COLUMNS, WIDTH, dtype=torch.float64, device=DEVICE, requires_grad=True)
    C, expected = spmm((edge_index, weight.detach(), size), B), expected_of(rows, columns, weight.detach(), B)
    edge_index.zero_()
    (found,), (right,) = torch.autograd.grad(C.sum(), B), torch.autograd.grad(expected.sum(), B)
    assert_matches(found, right)


@pytest.mark.parametrize("position", [-1, COLUMNS])
def test_a_node_that_is_not_there_is_refused_in_every_new_graph(position):
    B = torch.randn(COLUMNS, WIDTH, device=DEVICE)
    for length in (130, 130, 137):
        (edge_index, weight, size), rows, columns, _ = new_graph("edges", length)
        spmm((edge_index, weight.detach(), size), B.double())
        edge_index = edge_index.clone()
        edge_index[0, 7] = position
        with pytest.raises(IndexRangeError, match=rf"edge_index\[0, 7\] is {position} but there are {COLUMNS} sources"):
            spmm((edge_index, None, size), B)
        columns = columns.clone()
        columns[7] = position
        A = torch.sparse_coo_tensor(
            torch.stack([rows, columns]), weight.detach(), (ROWS, COLUMNS), check_invariants=False
        )
        with pytest.raises(IndexRangeError, match="A lists an entry at"):
            spmm(A, B.double())


def test_broken_pointers_are_refused():
    A, *_ = new_graph("csr", 130)
    for change in (lambda p: p[:1].add_(1), lambda p: p[3:4].add_(200), lambda p: p[-1:].sub_(1)):
        pointers = A.crow_indices().clone()
        change(pointers)
        parts = pointers, A.col_indices(), A.values().detach(), A.shape
        broken = torch.sparse_csr_tensor(*parts, check_invariants=False)
        with pytest.raises(IndexRangeError, match=r"crow_indices\(\) must ascend from 0 to 130"):
            spmm(broken, torch.ones(COLUMNS, 2, dtype=torch.float64, device=DEVICE))
