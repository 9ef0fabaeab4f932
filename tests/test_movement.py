"""Statements that move data, with every tile that tuning tries, against plain torch."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from memory_checker import checked_memory
from problems import problem, told_apart, values
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches

from insum_ops import insum
from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.tuning.problem import candidates
from insum_ops.formats.facts import OwnedRows
from insum_ops.formats.row_facts import row_facts

pytestmark = pytest.mark.kernels

SINGLE, HALF = torch.float32, torch.float16


def draw(*size, dtype=SINGLE):
    return torch.randn(*size).to(dtype).to(DEVICE)


def positions(high, *size, low=0):
    return torch.randint(low, high, size, dtype=torch.int32, device=DEVICE)


def gathered(X, G):
    return X[G.clamp(min=0)] * (G >= 0)[:, None]


def messages(A, X, T, U, rows):
    return X.new_zeros(rows, *X.shape[1:]).index_add_(0, T, A[:, :, None] * X[U])


CASES = {
    "transpose": ("Y[j,i] = X[i,j]", dict(X=draw(37, 71)), None, lambda X: X.T),
    "seeded": ("Y[j,i] += X[i,j]", dict(X=draw(37, 35), Y=draw(35, 37)), None, lambda X, Y: X.T + Y),
    "reversed": ("Y[k,j,i] = X[i,j,k]", dict(X=draw(33, 5, 35)), None, lambda X: X.permute(2, 1, 0)),
    "long last": ("Y[k,j,i] = X[i,j,k]", dict(X=draw(35, 5, 65)), None, lambda X: X.permute(2, 1, 0)),
    "heads": ("Y[b,n,h,d] = X[b,h,n,d]", dict(X=draw(2, 3, 5, 37, dtype=HALF)), None, lambda X: X.transpose(1, 2)),
    "strided": ("Y[p,c] = X[p,c]", dict(X=draw(35, 80)[:, ::2]), None, lambda X: X),
    "expanded": ("Y[p,c] = X[p,c]", dict(X=draw(1, 37).expand(35, 37)), None, lambda X: X),
    "padded rows": ("Y[p,c] = X[G[p],c]", dict(X=draw(9, 33), G=positions(9, 70, low=-1)), None, gathered),
    "even rows": (
        "Y[p,c] = X[G[p],c]",
        dict(X=draw(9, 40, dtype=HALF), G=positions(9, 70)),
        None,
        lambda X, G: X[G],
    ),
    "columns": ("Y[c,p] = X[G[p],c]", dict(X=draw(9, 33), G=positions(9, 70)), None, lambda X, G: X[G].T),
    "scattered": (
        "Y[G[p],c] += 2 * X[p,c]",
        dict(X=draw(70, 33), G=positions(9, 70)),
        (9, 33),
        lambda X, G: X.new_zeros(9, 33).index_add_(0, G, 2 * X),
    ),
    "outer": (
        "Y[b,i,j] = A[b,i] * B[b,j]",
        dict(A=draw(7, 5, dtype=HALF), B=draw(7, 35, dtype=HALF)),
        None,
        lambda A, B: A[:, :, None] * B[:, None],
    ),
    "scores": (
        "S[e,h] += Q[T[e],h,d] * K[U[e],h,d]",
        dict(Q=draw(9, 3, 5), K=draw(9, 3, 5), T=positions(9, 70), U=positions(9, 70)),
        None,
        lambda Q, K, T, U: (Q[T] * K[U]).sum(-1),
    ),
    "messages": (
        "Y[T[e],h,d] += A[e,h] * X[U[e],h,d]",
        dict(A=draw(70, 3), X=draw(9, 3, 11), T=positions(9, 70), U=positions(9, 70)),
        (9, 3, 11),
        lambda A, X, T, U: messages(A, X, T, U, 9),
    ),
    "odd rows": (
        "Y[p,c] = X[G[p],c]",
        dict(X=draw(9, 50, dtype=HALF), G=positions(9, 37).long()),
        None,
        lambda X, G: X[G],
    ),
    "rows of a block": ("Y[p,c] = X[G[p],c]", dict(X=draw(9, 100), G=positions(9, 19)), None, lambda X, G: X[G]),
    "rows of blocks": ("Y[p,c] = X[G[p],c]", dict(X=draw(5, 601), G=positions(5, 7)), None, lambda X, G: X[G]),
    "padded odd rows": (
        "Y[p,c] = W[c] * X[G[p],c]",
        dict(W=draw(37), X=draw(9, 37), G=positions(9, 70, low=-1)),
        None,
        lambda W, X, G: W * gathered(X, G),
    ),
    "seeded rows": (
        "Y[p,c] += X[G[p],c]",
        dict(X=draw(9, 37), G=positions(9, 19), Y=draw(19, 37)),
        None,
        lambda X, G, Y: X[G] + Y,
    ),
    "three names": ("Y[b,j,i,c] = X[i,j,b,c]", dict(X=draw(35, 3, 2, 17)), None, lambda X: X.permute(2, 1, 0, 3)),
    "corners": (
        "Y[p,f] += W[p,c] * T[H[p,c],f]",
        dict(W=draw(70, 8), T=draw(9, 3), H=positions(9, 70, 8, low=-1)),
        None,
        lambda W, T, H: (W[:, :, None] * T[H.clamp(min=0)] * (H >= 0)[:, :, None]).sum(1),
    ),
    "levels": (
        "Y[p,l,f] += W[p,l,c] * T[l,H[p,l,c],f]",
        dict(W=draw(35, 3, 5), T=draw(3, 9, 2), H=positions(9, 35, 3, 5).long()),
        None,
        lambda W, T, H: torch.einsum("plc,plcf->plf", W, T[torch.arange(3, device=DEVICE)[:, None], H]),
    ),
    "scattered corners": (
        "Y[G[p],f] += W[p,c] * T[c,f]",
        dict(W=draw(70, 8), T=draw(8, 3), G=positions(9, 70)),
        (9, 3),
        lambda W, T, G: T.new_zeros(9, 3).index_add_(0, G, W @ T),
    ),
    "long outer": ("Y[i,j] = A[i] * B[j]", dict(A=draw(19), B=draw(701)), None, lambda A, B: A[:, None] * B),
    "one of some": ("Y[a,b,c] = X[a,b,c]", dict(X=draw(5, 1, 33)), None, lambda X: X),
}


@pytest.mark.parametrize("name", CASES)
def test_every_tile_moves_the_same(name):
    expr, tensors, size, plain = CASES[name]
    padded = frozenset(
        name for name, tensor in tensors.items() if not tensor.is_floating_point() and (tensor < 0).any()
    )
    own = problem(expr, tensors, size, flags=Flags(padded=padded, interpreted=IS_INTERPRETED))
    want, tried = plain(**tensors), told_apart(candidates(own))
    assert any(way.schedule.form for way in tried)
    for way in tried:
        with checked_memory() if IS_INTERPRETED else nullcontext():
            got = own.launcher(way)(list(tensors.values()), None)
        torch.testing.assert_close(got, want, rtol=1e-3 if want.dtype == HALF else 1e-5, atol=1e-5, msg=str(way))


@pytest.mark.parametrize(
    ("name", "is_cut"),
    [("odd rows", True), ("heads", True), ("long outer", True), ("transpose", False), ("scores", False)],
)
def test_rows_that_begin_between_sectors_are_also_stored_by_whole_ones(name, is_cut):
    expr, tensors, size, _ = CASES[name]
    assert any(way.config.is_aligned for way in candidates(problem(expr, tensors, size))) == is_cut


def test_rows_that_begin_at_sectors_are_stored_as_they_lie():
    tensors = dict(X=draw(9, 64), G=positions(9, 70))
    assert not any(way.config.is_aligned for way in candidates(problem("Y[p,c] = X[G[p],c]", tensors)))


def gather(rows, columns):
    """Return the problem of a gather of rows, of shapes alone."""
    tensors = dict(X=values(40_000, columns), G=torch.empty(rows, dtype=torch.int64, device="meta"))
    return problem("Y[p,c] = X[G[p],c]", tensors, flags=Flags(padded=frozenset()))


@pytest.mark.parametrize(("rows", "is_beyond"), [(700_000, True), (9_000, False)])
def test_results_that_no_cache_holds_may_leave_it_first(rows, is_beyond):
    own = gather(rows, 50)
    ways = candidates(own)
    assert any(way.config.evicts for way in ways) == is_beyond
    assert not all(way.config.evicts for way in ways)
    for way in ways:
        assert ("evict_first" in own.launcher(way).kernel.source) == way.config.evicts


@pytest.mark.parametrize("name", ["odd rows", "transpose"])
def test_results_that_leave_the_cache_first_are_the_same(name):
    expr, tensors, size, plain = CASES[name]
    own = problem(expr, tensors, size, flags=Flags(padded=frozenset(), interpreted=IS_INTERPRETED))
    way = candidates(own)[0]
    got = own.launcher(replace(way, config=replace(way.config, evicts=True)))(list(tensors.values()), None)
    torch.testing.assert_close(got, plain(**tensors), rtol=0, atol=0)


def test_what_is_added_to_memory_stays_in_the_cache():
    tensors = dict(X=values(700_000, 50), G=torch.empty(700_000, dtype=torch.int64, device="meta"))
    assert not any(way.config.evicts for way in candidates(problem("Y[G[p],c] += X[p,c]", tensors, (600_000, 50))))


@pytest.mark.parametrize(("columns", "rows"), [(77, 32), (141, 16), (50, 64)])
def test_one_warp_has_as_many_rows_as_its_registers_hold(columns, rows):
    """The most promising config is the first of all."""
    way = candidates(gather(700_000, columns))[0]
    assert (way.config.block("p"), way.config.num_warps) == (rows, 1)


def test_of_two_factors_a_warp_holds_fewer_rows():
    tensors = dict(
        W=values(300_000, 221), X=values(40_000, 221), U=torch.empty(300_000, dtype=torch.int64, device="meta")
    )
    own = problem("Y[e,c] = W[e,c] * X[U[e],c]", tensors, flags=Flags(padded=frozenset()))
    assert candidates(own)[0].config.block("e") * 7 * 2 <= 128


def runs(expr, tensors, size, padded=(), **settings):
    """What every candidate computes that adds up neighbours before it adds them to memory."""
    own = problem(expr, tensors, size, flags=Flags(padded=frozenset(padded), interpreted=IS_INTERPRETED, **settings))
    tried = [way for way in candidates(own) if way.config.run > 1]
    assert len(tried) > 1
    for way in tried:
        with checked_memory() if IS_INTERPRETED else nullcontext():
            yield own.launcher(way)(list(tensors.values()), None)


def scattered(X, G, rows):
    """The sums by torch, in double precision; -1 is no place."""
    kept = G >= 0
    return torch.zeros(rows, *X.shape[1:], dtype=torch.double, device=DEVICE).index_add_(
        0, G[kept].long(), X[kept].double()
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "one", "padded", "absent"])
def test_sums_of_neighbours_are_those_of_all_entries(kind, dtype):
    G = {"one": positions(1, 147), "absent": positions(0, 147, low=-1)}.get(kind, positions(11, 147, low=-1))
    G = (G.sort().values if kind != "unsorted" else G).clamp(min=0 if kind in ("sorted", "unsorted") else -1).to(dtype)
    if kind == "padded":  # within a run too
        G[3::7] = -1
    X = draw(147, 21)
    X[G < 0] = torch.nan  # what has no place is not read
    X[50, 3] = torch.inf
    want = scattered(X, G, 11).float()
    for got in runs("Y[G[p],c] += X[p,c]", dict(X=X, G=G), (11, 21), ["G"] if (G < 0).any() else []):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_nan_of_a_run_stays_in_its_row():
    G, X = positions(11, 147).sort().values, draw(147, 21)
    X[70, 5] = torch.nan
    for got in runs("Y[G[p],c] += X[p,c]", dict(X=X, G=G), (11, 21)):
        assert got.isnan().nonzero().tolist() == [[int(G[70]), 5]]


@pytest.mark.parametrize(("columns", "dtype"), [(37, SINGLE), (38, HALF)])
def test_halves_are_added_in_pairs_or_as_float32(columns, dtype):
    tensors = dict(X=draw(70, columns, dtype=HALF), G=positions(9, 70))
    own = problem(
        "Y[G[p],c] += X[p,c]", tensors, (9, columns), flags=Flags(padded=frozenset(), interpreted=IS_INTERPRETED)
    )
    way = candidates(own)[0]
    assert way.schedule.sum_dtype(None) == dtype
    got = own.launcher(way)(list(tensors.values()), None)
    assert got.dtype == HALF
    torch.testing.assert_close(got.double(), scattered(tensors["X"], tensors["G"], 9), rtol=1e-2, atol=1e-2)


def test_a_result_in_the_place_of_another_has_rows_that_are_multiples_of_what_the_kernel_takes_them_for():
    tensors = dict(X=draw(9, 40), G=positions(9, 19))
    own = problem("Y[p,c] = X[G[p],c]", tensors, flags=Flags(padded=frozenset(), interpreted=IS_INTERPRETED))
    launcher = own.launcher(candidates(own)[0])
    assert launcher.placed((48, 1)) is not None
    assert launcher.placed((45, 1)) is None


def test_neighbours_are_summed_in_float32_before_they_are_rounded():
    G, X = torch.zeros(64, dtype=torch.int32, device=DEVICE), torch.full((64, 37), 2.0**-12, device=DEVICE)
    X[0] = 1.0
    want = 1.0 + 63 * 2.0**-12  # of which half precision would lose every step
    for got in runs("Y[G[p],c] += X[p,c]", dict(X=X.half(), G=G), (1, 37)):
        assert (got[0].double() - want).abs().max() < 2.0**-10


def test_runs_hold_products_of_gathered_rows_and_the_names_beside_them():
    T, U = positions(9, 147).sort().values, positions(9, 147, low=-1)
    A, X = draw(147, 3), draw(9, 3, 11)
    want = messages(A * (U >= 0)[:, None], X, T, U.clamp(min=0), 9)
    X[8] = torch.where((U == 8).any(), X[8], torch.nan)
    A[U < 0] = torch.nan
    for got in runs("Y[T[e],h,d] += 2 * A[e,h] * X[U[e],h,d]", dict(A=A, X=X, T=T, U=U), (9, 3, 11), ["U"]):
        torch.testing.assert_close(got, 2 * want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_gathered_rows_gradient_is_a_scatter(is_sorted):
    G, X = positions(9, 70), draw(9, 37).requires_grad_()
    G = G.sort().values if is_sorted else G
    upstream = draw(70, 37)
    insum("Y[p,c] = X[G[p],c]", X=X, G=G).backward(upstream)
    torch.testing.assert_close(X.grad, scattered(upstream, G, 9).float(), rtol=1e-5, atol=1e-5)


def test_owned_rows_hold_short_names_side_by_side():
    T = positions(9, 70).sort()[0].to(torch.int32)
    tensors = dict(A=draw(70, 3), X=draw(9, 3, 11), T=T, U=positions(9, 70))
    pointers = torch.searchsorted(T, torch.arange(10, dtype=torch.int32, device=DEVICE), out_int32=True)
    fact = OwnedRows("T", "", pointers)
    flags = Flags(padded=frozenset(), interpreted=IS_INTERPRETED)
    own = problem("Y[T[e],h,d] += A[e,h] * X[U[e],h,d]", tensors, (9, 3, 11), fact, flags)
    ways = [way for way in candidates(own) if way.schedule.strategy == "owner"]
    assert ways[0].schedule.names("tile") == ("r", "h_d")
    for way in ways[:2]:
        got = own.launcher(way)(list(tensors.values()), fact)
        torch.testing.assert_close(got, messages(*tensors.values(), 9), rtol=1e-5, atol=1e-5, msg=str(way))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("columns", "dtype", "padded"), [(130, SINGLE, False), (40, HALF, True), (65, torch.float64, True)]
)
def test_rows_of_any_length_are_walked_by_several_entries_at_once(columns, dtype, padded, packed):
    lengths = torch.tensor([0, 1, 3, 4, 5, 31, 0, 8, 9], device=DEVICE)
    T = torch.arange(9, device=DEVICE).repeat_interleave(lengths)
    U = positions(7, len(T), low=-1).clamp(min=-1 if padded else 0)
    W, X = draw(len(T), columns, dtype=dtype), draw(7, columns, dtype=dtype)
    kept = (U >= 0)[:, None]
    products = torch.where(kept, W.double() * X.double()[U.clamp(min=0)], 0.0)
    W = torch.where(kept, W, torch.nan)  # what has no place is not read
    tensors = dict(W=W, X=X, T=T, U=U)
    fact = row_facts(T, 9, cut=8, is_packed=packed).owned("T")  # up to four pieces of a row, or several rows to a piece
    flags = Flags(padded=frozenset(["U"] if padded else []), interpreted=IS_INTERPRETED)
    own = problem("Y[T[e],c] += W[e,c] * X[U[e],c]", tensors, (9, columns), fact, flags)
    walks = [way for way in candidates(own) if way.schedule.walks_rows]
    assert {way.schedule.strategy for way in walks} == {"owner", "store-or-atomic"}  # whole rows, and pieces of them
    if packed:
        walks = [way for way in walks if way.schedule.strategy == "store-or-atomic"]
    if columns > 64:  # a row fills a warp: several entries of one row, and not pieces side by side alone
        assert any("start + 3" in own.launcher(way).kernel.source for way in walks)
    assert any(way.schedule.names("step") == ("e",) for way in walks) is not packed  # side by side
    for way in told_apart(walks):
        with checked_memory() if IS_INTERPRETED else nullcontext():
            got = own.launcher(way)(list(tensors.values()), fact)
        assert_matches(got, scattered(products, T, 9))


def test_groups_of_one_entry_are_walked_as_entries():
    T = positions(9, 70).sort()[0].to(torch.int32)
    tensors = dict(A=draw(70, 1), X=draw(9, 33), T=T, U=positions(9, 70)[:, None])
    pointers = torch.searchsorted(T, torch.arange(10, dtype=torch.int32, device=DEVICE), out_int32=True)
    fact = OwnedRows("T", "", pointers)
    own = problem("Y[T[p],c] += A[p,q] * X[U[p,q],c]", tensors, (9, 33), fact, Flags(padded=frozenset()))
    walks = [way for way in candidates(own) if way.schedule.strategy == "owner"]
    assert all(way.schedule.walks_rows for way in walks)
    got = own.launcher(walks[-1])(list(tensors.values()), fact)
    products = tensors["A"].double() * tensors["X"].double()[tensors["U"][:, 0]]
    assert_matches(got, scattered(products, T.long(), 9))


def test_gathered_rows_are_taken_in_slices_too():
    lengths = torch.tensor([0, 1, 3, 0, 2], device=DEVICE)  # groups of eight
    T = torch.arange(5, device=DEVICE).repeat_interleave(lengths).int()
    U = positions(7, 6 * 8, low=-1).view(6, 8)
    A, X = draw(6, 8), draw(7, 80)
    products = torch.where((U >= 0)[..., None], A.double()[..., None] * X.double()[U.clamp(min=0)], 0.0).sum(1)
    tensors, fact = dict(A=A, X=X, T=T, U=U), row_facts(T, 5).owned("T")
    flags = Flags(padded=frozenset(["U"]), interpreted=IS_INTERPRETED)
    own = replace(problem("Y[T[p],c] += A[p,q] * X[U[p,q],c]", tensors, (5, 80), fact, flags), has_order=True)
    slices = [way for way in candidates(own) if way.config.block("c") == 64 and way.config.reverse]
    assert {way.config.longest_first for way in slices if way.schedule.strategy == "owner"} == {True}
    assert "store-or-atomic" in {way.schedule.strategy for way in slices}
    for way in slices:
        assert_matches(own.launcher(way)(list(tensors.values()), fact), scattered(products, T.long(), 5))


@pytest.mark.parametrize("channels", [8, 24])
def test_a_run_has_two_axes_where_a_factor_lacks_the_last(channels):
    T, U = positions(9, 147).sort().values, positions(9, 147, low=-1)
    A, X = draw(147, 5), draw(9, 5, channels)
    want = messages(A * (U >= 0)[:, None], X, T, U.clamp(min=0), 9)
    A[U < 0] = torch.nan
    expr, tensors = "Y[T[e],h,d] += A[e,h] * X[U[e],h,d]", dict(A=A, X=X, T=T, U=U)
    flags = Flags(padded=frozenset(["U"]), interpreted=IS_INTERPRETED)
    tried = [way for way in candidates(problem(expr, tensors, (9, 5, channels), flags=flags)) if way.config.run > 1]
    # 5 by 24 would be padded to 8 by 32, 120 to 128
    assert {way.schedule.axes for way in tried} == {("h", "d") if channels == 8 else ("h_d",)}
    for got in runs(expr, tensors, (9, 5, channels), ["U"]):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [8, 43])
def test_a_scatter_starts_with_runs_if_its_rows_fill_a_warp(columns):
    G = torch.empty(700_000, dtype=torch.int64, device="meta")
    own = problem("Y[G[p],c] += X[p,c]", dict(X=values(700_000, columns), G=G), (40_000, columns))
    assert (candidates(own)[0].schedule.form == "runs") == (columns > 32)
