"""Weights that all samples share: every order of contraction and its gradients, and which is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from statements import DEVICE, IS_INTERPRETED
from torch import Tensor

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import assert_same, dense_product, doubles, second_gradients  # noqa: E402
from tolerances import assert_matches, assert_within, bound  # noqa: E402

from insum_ops import explain  # noqa: E402
from insum_ops.compiler.planning.device import H200, described_as  # noqa: E402
from insum_ops.equivariant import species as kinds  # noqa: E402
from insum_ops.equivariant import table_terms  # noqa: E402
from insum_ops.equivariant.shared_weights import SharedTerm  # noqa: E402
from insum_ops.equivariant.species import SpeciesTerm  # noqa: E402
from insum_ops.formats import GroupCOO  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct  # noqa: E402

MATRICES = ("12x0e + 12x1o + 12x2e", "80x0e", "12x0e + 12x1o + 12x2e")
PRODUCTS = {
    "pairs": ("2x0e + 2x1o", "3x0e + 3x1o", "2x0e + 2x1o"),
    "pairs, unequal": ("1x0e + 2x1o", "2x0e + 1o", "2x0e + 1x1o + 2x1e"),
    "one channel": ("3x0e + 3x1o", "0e + 1o", "3x0e + 3x1o"),
    "kinds": ("3x0e + 3x1o", "2x0e", "3x0e + 3x1o"),
    "kinds, odd": ("2x0e + 3x1o", "3x0o", "2x0o + 4x1e"),
    "kinds, seeded": ("2x0e + 3x0e + 2x1o", "2x0e", "2x0e + 2x1o"),
    "kinds, one": ("2x0e + 2x1o", "0e", "2x0e + 2x1o"),
    "matrices": MATRICES,
}


def product(name: str) -> FullyConnectedTensorProduct:
    return FullyConnectedTensorProduct(*PRODUCTS[name], internal_weights=False)


def terms_of(ours: TensorProduct) -> tuple[object, ...]:
    return ours._product.decomposition.shared.terms  # type: ignore[union-attr, return-value]


def operands(ours: TensorProduct, rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (ours.weight_numel,)
    return [(torch.randn(shape, dtype=dtype) / 2).to(DEVICE).requires_grad_() for shape in shapes]


def assert_right(ours: TensorProduct, rows: int = 3) -> None:
    tensors = operands(ours, rows)
    wide = doubles(tensors)
    assert_same(ours(*tensors), tensors, dense_product(ours, *wide), wide)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients(name):
    assert_right(product(name), 2 if name == "matrices" else 3)


@pytest.mark.every_route
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients_on_this_device(name):
    assert_right(product(name), 2 if name == "matrices" else 3)


@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["pairs", "kinds", "matrices"])
def test_no_rows(name):
    assert_right(product(name), 0)


@pytest.mark.sampled
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["pairs", "kinds", "matrices"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_any_inputs_may_want_gradients(name, wanted):
    ours = product(name)
    tensors = operands(ours, 2)
    wide = doubles(tensors)
    upstream = torch.randn(2, ours.irreps_out.dim)
    for at, tensor in enumerate(tensors):
        tensor.requires_grad_(at in wanted)
    got = torch.autograd.grad(ours(*tensors), [tensors[at] for at in wanted], upstream.to(DEVICE))
    want = torch.autograd.grad(dense_product(ours, *wide), [wide[at] for at in wanted], upstream.double())
    for one, other in zip(got, want, strict=True):
        assert_matches(one, other)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["pairs", "kinds", "matrices"])
def test_gradients_of_gradients(name):
    """What forces are trained by, for every pair of operands."""
    ours = product(name)
    for got, reference in second_gradients(ours, operands(ours, 2)):
        assert_matches(got, reference)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.skipif(IS_INTERPRETED, reason="hundreds of calls")
@pytest.mark.parametrize(
    "irreps",
    [
        ("1x0e + 2x1o", "2x0e + 2x1o", "2x0e + 1x1o"),
        ("2x0e + 2x1o", "2x0e", "2x0e + 2x1o"),
        ("2x0e + 3x0e", "2x0e", "2x0e"),
    ],
    ids=["pairs", "kinds", "seeded"],
)
def test_gradcheck(irreps):
    ours = FullyConnectedTensorProduct(*irreps, internal_weights=False)
    tensors = operands(ours, 2, torch.float64)
    assert gradcheck(ours, tensors)
    assert gradgradcheck(ours, tensors)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.skipif(IS_INTERPRETED, reason="hundreds of calls")
def test_gradcheck_of_matrices():
    ours = product("matrices")
    x, y, weight = operands(ours, 1, torch.float64)
    few, rest = weight.detach()[:20].clone().requires_grad_(), weight.detach()[20:]
    some, others = y.detach()[:, :4].clone().requires_grad_(), y.detach()[:, 4:]

    def call(x, some, few):
        return ours(x, torch.cat([some, others], 1), torch.cat([few, rest]))[:, ::5]

    assert gradcheck(call, (x, some, few))
    assert gradgradcheck(call, (x, some, few))


@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["pairs", "one channel", "kinds", "matrices"])
def test_edges(name):
    ours = product(name)
    tensors = operands(ours, 3)
    src, dst = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0])
    actual = ours(*tensors, src=src.to(DEVICE), dst=dst.to(DEVICE))
    wide = doubles(tensors)
    messages = dense_product(ours, wide[0][src], *wide[1:])
    expected = messages.new_zeros(3, ours.irreps_out.dim).index_add(0, dst, messages)
    assert_same(actual, tensors, expected, wide)


@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("has_edges", [False, True])
def test_samples_are_taken_in_parts_where_their_matrices_would_fill_the_memory(has_edges, monkeypatch):
    ours = FullyConnectedTensorProduct("12x0e + 12x1o + 3x0e + 12x2e", *MATRICES[1:], internal_weights=False)
    calls = []
    one = table_terms.TableTerm.__call__
    monkeypatch.setattr(table_terms.TableTerm, "__call__", lambda *given: calls.append(len(given[2])) or one(*given))
    monkeypatch.setattr(kinds, "MOST_BYTES", 2 * 3 * 12 * 12 * 4)
    tensors = operands(ours, 5)
    wide = doubles(tensors)
    if has_edges:
        src, dst = torch.tensor([2, 0, 2, 4, 1]), torch.tensor([1, 1, 0, 3, 4])
        actual = ours(*tensors, src=src.to(DEVICE), dst=dst.to(DEVICE))
        messages = dense_product(ours, wide[0][src], *wide[1:])
        expected = messages.new_zeros(5, ours.irreps_out.dim).index_add(0, dst, messages)
    else:
        actual, expected = ours(*tensors), dense_product(ours, *wide)
    assert calls == [2, 2, 1]
    assert_same(actual, tensors, expected, wide)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no bfloat16 of its own")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces an autograd.Function
@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [("pairs", False), ("kinds", False), ("kinds, seeded", False), ("matrices", False), ("one channel", True)],
)
def test_autocast(name, is_compiled):
    torch._dynamo.reset()
    ours = product(name)
    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if is_compiled else ours
    tensors = operands(ours, 3)
    with torch.autocast(DEVICE, torch.bfloat16):
        z = call(*tensors)
    assert z.dtype == torch.bfloat16
    wide = [tensor.bfloat16().double() for tensor in doubles(tensors)]
    magnitude = dense_product(ours, *wide, is_magnitude=True)
    # the coefficient that is read was rounded from float64, and a result of the first of two statements is rounded too
    limit = bound(torch.bfloat16, magnitude, terms=ours.weight_numel * 9, factors=6).detach()
    assert_within(z, dense_product(ours, *wide).detach(), limit)
    for gradient, tensor in zip(torch.autograd.grad(z.float().sum(), tensors), tensors):
        assert gradient.dtype == tensor.dtype


@pytest.mark.usefixtures("everywhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces an autograd.Function
@pytest.mark.skipif(IS_INTERPRETED, reason="what is traced is the same")
@pytest.mark.parametrize("name", ["pairs", "kinds, seeded", "matrices"])
def test_traced(name):
    torch._dynamo.reset()
    ours = product(name)
    tensors = operands(ours, 3)
    expected = ours(*tensors)
    upstream = torch.randn_like(expected)
    references = torch.autograd.grad(expected, tensors, upstream)  # an ordinary call and its backward come first
    actual = torch.compile(ours, fullgraph=True, backend="aot_eager")(*tensors)
    assert_matches(actual, expected.double())
    for one, other in zip(torch.autograd.grad(actual, tensors, upstream), references, strict=True):
        assert_matches(one, other.double())


@pytest.mark.usefixtures("everywhere")
@pytest.mark.skipif(IS_INTERPRETED, reason="a batch of a statement is a statement, tested elsewhere")
@pytest.mark.parametrize("name", ["pairs", "kinds", "matrices"])
def test_transformed(name):
    ours = product(name)
    x, y, weight = (tensor.detach() for tensor in operands(ours, 3))
    actual = torch.func.vmap(ours, (0, 0, None))(x[:, None], y[:, None], weight)[:, 0]
    assert_matches(actual, ours(x, y, weight).double())
    wide = doubles([x, y, weight])
    expected = torch.autograd.grad(dense_product(ours, *wide).square().sum(), wide)
    found = torch.func.grad(lambda *given: ours(*given).square().sum(), (0, 1, 2))(x, y, weight)
    for one, other in zip(found, expected, strict=True):
        assert_matches(one, other)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["kinds", "matrices"])
def test_one_hot_rows_may_be_dense_positions_or_a_format(name):
    ours = product(name)
    x, _, weight = (tensor.detach() for tensor in operands(ours, 4))
    kinds = torch.tensor([1, 0, 1, 1])
    dense = torch.nn.functional.one_hot(kinds, ours.irreps_in2.dim).float()
    expected = dense_product(ours, x.double().cpu(), dense.double(), weight.double().cpu())
    dense = dense.to(DEVICE)
    for y in (dense, kinds.to(DEVICE), GroupCOO.from_dense(dense, group_dim=1)):
        assert_matches(ours(x, y, weight), expected)


NATURAL = "{0}x0e + {0}x1o + {0}x2e"


@pytest.mark.parametrize(
    ("irreps", "second", "comes_first"),
    [
        (NATURAL.format(128), "89x0e", True),
        (NATURAL.format(128), "10x0e", False),
        ("128x0e + 128x1o", "40x0e", False),
        ("128x0e + 128x1o", "89x0e", True),
        ("128x0e", "89x0e", False),
        (NATURAL.format(8), "89x0e", False),
        (" + ".join(f"32x{degree}{parity}" for degree in range(4) for parity in "eo"), "2x0e", False),
    ],
    ids=["skip_tp", "few kinds", "lmax 1, fewer kinds", "lmax 1", "scalars", "few channels", "NequIP"],
)
def test_matrices_come_first_where_that_saves_more_than_it_moves(irreps, second, comes_first):
    (term,) = terms_of(FullyConnectedTensorProduct(irreps, second, irreps, internal_weights=False))
    assert isinstance(term, SpeciesTerm)
    with described_as(H200):
        assert term.has_matrices(torch.device(DEVICE)) == comes_first


def test_where_memory_is_slow_nothing_is_moved():
    (term,) = terms_of(FullyConnectedTensorProduct(NATURAL.format(128), "89x0e", NATURAL.format(128)))
    with described_as(replace(H200, bandwidth=H200.bandwidth / 4)):
        assert not term.has_matrices(torch.device(DEVICE))


@pytest.mark.every_route
def test_gradients_of_long_sums_are_stored_or_dots():
    """e3nn's benchmark, as a GPU would run it: the parts that took longest when they scattered with atomics."""
    irreps = "8x0e + 8x1e + 8x2e + 8x3o"
    (term,) = terms_of(FullyConnectedTensorProduct(irreps, irreps, irreps, internal_weights=False))
    assert isinstance(term, SharedTerm)
    forms = term.mixed.on(torch.device("cpu"), torch.float32).forms
    rows, batch = forms["T"].shape[1], 10_000
    T, Z, W = torch.empty(batch, rows, 64), torch.empty(batch, 16, 8), torch.empty(24, 64, 8)
    A = "A[i,r,l]"
    own = explain(f"Z[b,i,w] += T[b,r,n] * W[l,n,w] * {A}", T=T, W=W, A=forms["Z"]).schedule
    assert (own.strategy, own.uses_dot) == ("store", True)
    own = explain(f"T[b,r,n] += Z[b,i,w] * W[l,n,w] * {A}", Z=Z, W=W, A=forms["T"]).schedule
    assert (own.strategy, own.uses_dot) == ("store", True)
    own = explain(f"W[l,n,w] += Z[b,i,w] * T[b,r,n] * {A}", Z=Z, T=T, A=forms["W"], size=W.shape).schedule
    assert own.uses_dot
    assert own.is_shared
    CG = term.pairs.on(torch.device("cpu"), torch.float32)
    X, Y = torch.empty(batch, 16, 64), torch.empty(batch, 16, 64)
    for expr, given in (
        ("T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k,n]", {"CG": CG, "X": X, "Y": Y}),
        ("X[b,j,n] += T[b,r,n] * CG[r,j,k] * Y[b,k,n]", {"CG": CG, "T": T, "Y": Y}),
        ("Y[b,k,n] += T[b,r,n] * CG[r,j,k] * X[b,j,n]", {"CG": CG, "T": T, "X": X}),
    ):
        assert explain(expr, **given).schedule.strategy == "store"
