"""Rows of blocks as kernels take them, narrow ones in pairs: which are, what that saves, and that all stays right."""

from __future__ import annotations

import pytest
import torch
from linear_twin import MaskedLinear, dense_weight
from pretended_clock import pretended_clock
from statements import DEVICE
from tolerances import assert_matches, assert_within, bound
from torch import Tensor

from insum_ops import explain, insum
from insum_ops.compiler import row_order
from insum_ops.compiler.planning import block_rows
from insum_ops.compiler.tuning import problem, space
from insum_ops.formats import BlockCOO
from insum_ops.formats import row_order as format_row_order
from insum_ops.formats.row_matching import paired
from insum_ops.nn import BlockSparseLinear

EXPR = "C[m,n] += A[m,k] * B[k,n]"
NONE = {1: 0, 2: 0}
ALONE = "C[AM[AT[p]],bm,n] += AV[AS[p],bm,bk] * B[AK[p],bk,n]"
IN_PAIRS = "C[AM[AT[p],q],bm,n] += AV[AS[p,q],bm,bk] * B[AK[p],bk,n]"
with_kernels = pytest.mark.kernels


@pytest.fixture
def always(monkeypatch, smallest_gpu):
    """The small matrices of tests have their rows in pairs, as large ones do, and fill a GPU."""
    monkeypatch.setattr(block_rows, "LEAST_SHARED", 0)
    for name in ("LEAST_COLUMNS", "LEAST_PROGRAMS"):
        monkeypatch.setattr(block_rows, name, NONE)


@pytest.fixture
def in_turn(always, monkeypatch):
    """And a program has several of them, as where there are more than a GPU has multiprocessors."""

    def several(*given):
        found = space.configs(*given)
        return tuple(config for config in found if config.rows > 1) or found

    monkeypatch.setattr(problem, "configs", several)


def blocks(rows: int, columns: int, dtype: torch.dtype = torch.float16, density: float = 0.6) -> Tensor:
    """A matrix of 32 x 32 blocks, the last ones not full where it takes that."""
    keep = (torch.rand(-(-rows // 32), -(-columns // 32)) < density).double()
    whole = torch.randn(rows, columns, dtype=torch.float64)
    return (whole * keep.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]).to(dtype).to(DEVICE)


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(DEVICE)


@with_kernels
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 96, 40), (96, 64, 17), (70, 50, 5), (32, 64, 16)], ids=str)
def test_values_and_gradients(always, shape, dtype):
    rows, inner, columns = shape
    dense, B = blocks(rows, inner, dtype), drawn(inner, columns, dtype=dtype)
    A = BlockCOO.from_dense(dense, block_size=(32, 32))
    assert str(explain(EXPR, A=A, B=B).rewritten) == IN_PAIRS
    assert_matches(insum(EXPR, A=A, B=B), dense.double() @ B.double())
    own = BlockCOO(A.coords, A.values.clone().requires_grad_(), A.shape, block_size=(32, 32))
    B.requires_grad_()
    upstream = drawn(rows, columns, dtype=dtype)
    dvalues, dB = torch.autograd.grad(insum(EXPR, A=own, B=B), (own.values, B), upstream)
    assert_matches(dB, dense.double().T @ upstream.double())
    wanted = upstream.double() @ B.detach().double().T
    assert_matches(
        A.with_values(dvalues).to_dense(), wanted * (A.with_values(torch.ones_like(A.values)).to_dense() != 0)
    )


@with_kernels
@pytest.mark.sampled("edge", "rewritten")
@pytest.mark.parametrize(("edge", "rewritten"), [(32, IN_PAIRS), (128, ALONE)])
@pytest.mark.parametrize("bad", [1.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_several_rows_to_a_program(in_turn, dtype, edge, rewritten, bad):
    dense, B = blocks(11 * edge, 288, dtype, density=0.2), drawn(288, 70, dtype=dtype)
    dense[3 * edge : 5 * edge] = 0
    A = BlockCOO.from_dense(dense, block_size=(edge, 32))
    how = explain(EXPR, A=A, B=B)
    assert str(how.rewritten) == rewritten
    assert "first_row" in how.source
    B[40, 7] = bad  # in the second column of blocks
    assert_matches_but_where_missing(insum(EXPR, A=A, B=B), dense, B, edge)
    B[40, 7] = 1
    B.requires_grad_()
    upstream = drawn(11 * edge, 70, dtype=dtype)
    (dB,) = torch.autograd.grad(insum(EXPR, A=A, B=B), B, upstream)
    assert_matches(dB, dense.double().T @ upstream.double())


def assert_matches_but_where_missing(found: Tensor, dense: Tensor, B: Tensor, edge: int) -> None:
    """NaN is where a block of `edge` rows has its column, and the rest is as if there were none."""
    expected = dense.double() @ torch.where(B.isnan(), 0, B).double()
    rows, columns = B.isnan().nonzero().T
    for row, column in zip(rows.tolist(), columns.tolist()):
        start = row // 32 * 32
        has = (dense[:, start : start + 32] != 0).any(1).view(-1, edge).any(1).repeat_interleave(edge)
        expected[has, column] = float("nan")
    assert torch.equal(found.isnan(), expected.isnan())
    assert_matches(torch.where(found.isnan(), 0, found), torch.where(expected.isnan(), 0, expected))


@with_kernels
def test_a_layer_with_several_rows_to_a_program(in_turn):
    layer = BlockSparseLinear(256, 1152, (128, 32), 0.3, dtype=torch.float16, device=DEVICE)
    x = drawn(140, 256)
    assert "first_row" in explain("Y[t,o] += X[t,i] * W[o,i]", X=x, W=layer.as_format()).source
    with torch.no_grad():
        assert_matches(layer(x).cpu(), MaskedLinear(layer)(x.cpu().double()))


@with_kernels
def test_a_layer_steps_as_its_masked_twin_and_so_after_a_new_pattern(always):
    layer = BlockSparseLinear(96, 128, 32, 0.5, dtype=torch.float16, device=DEVICE)
    x, upstream = drawn(48, 96), drawn(48, 128)
    for density in (0.5, 0.5, 0.4):
        layer.prune_(density)
        twin, own = MaskedLinear(layer), x.clone().requires_grad_()
        wide = x.cpu().double().requires_grad_()
        layer.zero_grad()
        for model, given, back in ((layer, own, upstream), (twin, wide, upstream.cpu().double())):
            model(given).backward(back)
        with torch.no_grad():
            assert_matches(layer(x).cpu(), twin(wide))
        assert_matches(own.grad.cpu(), wide.grad)
        weight = dense_weight(layer, layer.weight.grad)
        assert_matches(weight.half(), twin.weight.grad * twin.mask)
        assert_matches(layer.bias.grad.cpu(), twin.bias.grad)


@with_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_no_number_stays_in_the_rows_that_have_its_column(always, bad):
    dense = blocks(128, 128, density=0.4)
    dense[:32, :32], dense[32:, :32] = 1, 0  # row 0 alone has column 0
    A, B = BlockCOO.from_dense(dense, block_size=(32, 32)), drawn(128, 24)
    B[3, 5] = bad
    found = insum(EXPR, A=A, B=B)
    expected = dense.double() @ torch.where(B.isfinite(), B, 0).double()
    assert not found[:32, 5].isfinite().any()
    assert (found[:32, 5] == bad).all() or bad != bad
    assert_matches(found[32:], expected[32:])
    others = torch.arange(24, device=DEVICE) != 5
    assert_matches(found[:, others], expected[:, others])


STATEMENTS = {
    "C[m,n] += A[m,k] * B[k,n]": lambda A, B: A @ B,
    "C[n,m] += B[k,n] * A[m,k]": lambda A, B: (A @ B).T,
    "C[k,n] += A[m,k] * D[m,n]": lambda A, D: A.T @ D,
    "C[b,m,n] += A[m,k] * X[b,k,n]": lambda A, X: A @ X,
    "C[m,n] += 0.5 * A[m,k] * B[k,n] * s[m]": lambda A, B, s: 0.5 * (A @ B) * s[:, None],
    "C[m,n] += A[m,k] * B[k,n] * w[k]": lambda A, B, w: A @ (B * w[:, None]),
    "C[m,n] += A[m,k] * B[k,n] * u[n]": lambda A, B, u: (A @ B) * u,
    "C[m] += A[m,k] * w[k]": lambda A, w: A @ w,
    "c[()] += A[m,k] * w[k] * s[m]": lambda A, s, w: s @ A @ w,
}


@with_kernels
@pytest.mark.parametrize("expr", STATEMENTS, ids=lambda expr: expr.replace(" ", ""))
def test_whatever_the_statement(always, expr):
    """In pairs or not, as its schedule allows."""
    dense = blocks(96, 128)
    shapes = {"B": (128, 20), "D": (96, 20), "X": (3, 128, 20), "s": (96,), "w": (128,), "u": (20,)}
    given = {name: drawn(*shape) for name, shape in shapes.items() if f" {name}[" in expr.split("+=")[1]}
    found = insum(expr, A=BlockCOO.from_dense(dense, block_size=(32, 32)), **given)
    wide = [tensor.double() for tensor in given.values()]
    magnitude = STATEMENTS[expr](dense.double().abs(), *[tensor.abs() for tensor in wide])
    limit = bound(found.dtype, magnitude, terms=dense.numel(), factors=1 + len(wide))
    assert_within(found, STATEMENTS[expr](dense.double(), *wide).cpu(), limit.cpu())


@with_kernels
def test_wider_products_are_left_alone(always):
    A, B = BlockCOO.from_dense(blocks(128, 96), block_size=(32, 32)), drawn(96, 40, dtype=torch.float32)
    assert "AT" not in str(explain(EXPR, A=A, B=B).rewritten)


@with_kernels
@pytest.mark.parametrize(
    ("has", "columns", "is_paired"),
    [
        pytest.param(torch.ones(24, 24), 256, True, id="much in common"),
        pytest.param(torch.ones(24, 24), 8, False, id="few results"),
        pytest.param(torch.block_diag(*[torch.ones(2, 2)] * 12), 256, False, id="short rows"),
        pytest.param(torch.block_diag(*[torch.ones(1, 5)] * 24), 256, False, id="nothing in common"),
    ],
)
def test_rows_are_paired_where_that_saves_enough(smallest_gpu, has, columns, is_paired):
    dense = has.half().repeat_interleave(32, 0).repeat_interleave(32, 1).to(DEVICE)
    A, B = BlockCOO.from_dense(dense, block_size=(32, 32)), drawn(dense.shape[1], columns)
    assert ("AT" in str(explain(EXPR, A=A, B=B).rewritten)) == is_paired


@with_kernels
@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 32), (torch.float16, 16), (torch.float16, 64)], ids=str)
def test_other_blocks_are_left_alone(always, dtype, block):
    A, B = BlockCOO.from_dense(blocks(128, 64, dtype), block_size=(block, block)), drawn(64, 8, dtype=dtype)
    assert "AT" not in str(explain(EXPR, A=A, B=B).rewritten)


def test_each_row_has_one_partner() -> None:
    for rows in (0, 2, 8, 50):
        common = torch.randint(0, 4, (rows, rows))
        pairs = paired(common + common.T)
        assert pairs.flatten().sort().values.tolist() == list(range(rows))


def test_partners_have_much_in_common() -> None:
    """Random rows share a quarter of all columns at half density; partners some 30 percent."""
    has = (torch.rand(128, 128, generator=torch.Generator().manual_seed(3)) < 0.5).float()
    common = (has @ has.T).long()
    first, second = paired(common).T
    assert common[first, second].double().mean() > 0.29 * 128


def test_more_rows_than_are_compared_are_paired_by_length(monkeypatch) -> None:
    monkeypatch.setattr(format_row_order, "MOST_PAIRS", 0)
    rows, columns = torch.tensor([0, 1, 1, 2, 3, 3]), torch.tensor([0, 0, 1, 2, 3, 4])
    assert format_row_order.order_rows(rows, columns, (4, 5), width=2).rows.tolist() == [[1, 3], [0, 2]]


def test_neighbouring_sets_have_as_many_columns() -> None:
    lengths = torch.randint(0, 100, (75,), generator=torch.Generator().manual_seed(2))
    order = format_row_order.balanced(lengths)
    assert order.sort().values.tolist() == list(range(75))
    for size, most in ((2, 0.5), (4, 0.15), (8, 0.05)):
        totals = lengths[order[:72]].view(-1, size).sum(1).double()
        assert (totals - totals.mean()).abs().max() < most * totals.mean()
    assert lengths[order[72:]].max() <= lengths[order[:72]].min()


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 9])
def test_rows_alone_are_all_listed(rows) -> None:
    has = (torch.rand(rows, 4) < 0.4).nonzero().T
    made = format_row_order.order_rows(has[0], has[1], (rows, 4), width=1)
    assert made.rows.sort().values.tolist() == list(range(rows))
    assert made.rows[made.sets.long()].tolist() == has[0][made.source.long()].tolist()
    assert made.columns.tolist() == has[1][made.source.long()].tolist()
    assert made.source.sort().values.tolist() == list(range(has.shape[1]))


def test_twins_find_each_other() -> None:
    twins = torch.rand(20, 64) < 0.3
    order = torch.randperm(40)
    has = torch.cat([twins, twins])[order].float()
    first, second = paired((has @ has.T).long()).T
    assert torch.equal(has[first], has[second])


@with_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("way", "rewritten"), [("as they are", None), ("listed", ALONE), ("in pairs", IN_PAIRS)])
def test_a_full_search_times_rows_in_every_order_whatever_rules_say(way, rewritten, dtype, monkeypatch):
    monkeypatch.setattr(row_order, "_may_be_timed", lambda form: True)
    dense, B = blocks(128, 96, dtype), drawn(96, 40, dtype=dtype)
    A = BlockCOO.from_dense(dense, block_size=(32, 32))
    with pretended_clock(row_order) as contests:
        contests.winner = way
        text = str(explain(EXPR, A=A, B=B).rewritten)
        assert text == rewritten if rewritten else "AT" not in text
        assert_matches(insum(EXPR, A=A, B=B), dense.double() @ B.double())
    assert contests[0][1] == ["as they are", "listed", "in pairs"]
