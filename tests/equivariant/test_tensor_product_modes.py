"""Connection modes other than uvw, edges, one-hot second inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product, to_ir_mul  # noqa: E402
from statements import IS_INTERPRETED, examples  # noqa: E402
from tolerances import TOLERANCE, assert_matches  # noqa: E402

from insum_ops import explain  # noqa: E402
from insum_ops.equivariant.terms import channel_statement, path_statement  # noqa: E402
from insum_ops.formats import ELL, GroupCOO  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct  # noqa: E402

pytestmark = pytest.mark.usefixtures("in_float64")


def product(mode: str, muls: list[int], has_weight: bool, second: int = 1) -> tuple[str, str, list, list]:
    """Irreps and instructions of all paths of l = 0, 1, ... (multiplicities `muls`) times (scalar, vector)."""
    in1 = o3.Irreps([(mul, (degree, (-1) ** degree)) for degree, mul in enumerate(muls)])
    seconds = {"u": 0, "v": second}[mode[1]]
    in2 = o3.Irreps([(seconds or mul, ir) for mul in sorted(set(muls)) for ir in ((0, 1), (1, -1))])
    out, paths = [], []
    for i, (mul1, ir1) in enumerate(in1):
        for j, (mul2, ir2) in enumerate(in2):
            if mode[1] == "u" and mul1 != mul2:
                continue
            for ir in ir1 * ir2:
                mul = {
                    "uvw": 3,
                    "uuw": 3 if has_weight else 1,
                    "uvu": mul1,
                    "uvv": mul2,
                    "uuu": mul1,
                    "uvuv": mul1 * mul2,
                }[mode]
                paths.append((i, j, len(out), mode, has_weight, 1.0 + len(out)))
                out.append((mul, ir))
    return in1, in2, out, paths


def assert_is_e3nns(theirs, ours, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
    tensors = [t for t in (x.requires_grad_(), y.requires_grad_(), weight) if t is not None]
    expected, actual = theirs(x, y, weight), ours(x, y, weight)
    torch.testing.assert_close(actual, expected, **TOLERANCE[torch.float64])
    upstream = torch.randn_like(expected)
    for got, want in zip(
        torch.autograd.grad(actual, tensors, upstream), torch.autograd.grad(expected, tensors, upstream)
    ):
        torch.testing.assert_close(got, want, **TOLERANCE[torch.float64])


@pytest.mark.sampled("mode", "weights")
@pytest.mark.parametrize("muls", [[2, 2], [8, 4], [3, 2], [1, 1]], ids=str)
@pytest.mark.parametrize("weights", ["shared", "each", "none"])
@pytest.mark.parametrize("mode", ["uvw", "uvu", "uvv", "uuw", "uuu", "uvuv"])
def test_every_mode_is_e3nns(mode, weights, muls):
    if mode == "uvw" and weights == "none":
        return  # uvw always has weights
    parts = product(mode, muls, weights != "none", second=2)
    theirs = o3.TensorProduct(*parts, shared_weights=weights != "each", internal_weights=False)
    ours = TensorProduct(*parts, shared_weights=weights != "each", internal_weights=False)
    assert ours.instructions == theirs.instructions
    x, y = torch.randn(3, theirs.irreps_in1.dim), torch.randn(3, theirs.irreps_in2.dim)
    lead = (3,) if weights == "each" else ()
    weight = None if weights == "none" else torch.randn(*lead, theirs.weight_numel, requires_grad=True)
    assert_is_e3nns(theirs, ours, x, y, weight)


@pytest.mark.parametrize("muls", [[4, 4], [8, 4], [32, 16, 8], [3, 3], [3, 2]], ids=str)
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("mode", ["uvu", "uuu"])
def test_channels_that_never_mix_are_one_statement(mode, layout, muls):
    parts = product(mode, muls, True)
    ours = TensorProduct(*parts, shared_weights=False, layout=layout)
    assert (ours._product.decomposition.channels is None) == (muls == [3, 2])
    x, y = torch.randn(3, ours.irreps_in1.dim), torch.randn(3, ours.irreps_in2.dim)
    weight = torch.randn(3, ours.weight_numel)
    expected = dense_product(ours, x, y, weight)
    if layout == "ir_mul":
        x, y, expected = (
            to_ir_mul(*p) for p in ((ours.irreps_in1, x), (ours.irreps_in2, y), (ours.irreps_out, expected))
        )
    assert_matches(ours(x, y, weight), expected)


@settings(max_examples=examples(25, 25))
@given(st.data())
def test_random_instructions_are_e3nns(data):
    """Modes, weights and blocks mixed in one product."""
    in1, in2 = o3.Irreps("2x0e + 2x1o + 3x1o"), o3.Irreps("2x0e + 2x1o + 1x1e")
    out, paths = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        i, j = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        (mul1, ir1), (mul2, ir2) = in1[i], in2[j]
        modes = ["uvw", "uvu", "uvv", "uvuv"] + (["uuw", "uuu"] if mul1 == mul2 else [])
        mode = data.draw(st.sampled_from(modes))
        mul = {"uvw": 2, "uuw": 2, "uvu": mul1, "uvv": mul2, "uuu": mul1, "uvuv": mul1 * mul2}[mode]
        block = (mul, data.draw(st.sampled_from(list(ir1 * ir2))))
        if block not in out:
            out.append(block)
        paths.append((i, j, out.index(block), mode, mode in ("uvw", "uuw") or data.draw(st.booleans())))
    theirs = o3.TensorProduct(in1, in2, out, paths, shared_weights=False)
    ours = TensorProduct(in1, in2, out, paths, shared_weights=False)
    x, y = torch.randn(2, in1.dim, requires_grad=True), torch.randn(2, in2.dim, requires_grad=True)
    weight = torch.randn(2, theirs.weight_numel) if theirs.weight_numel else None
    torch.testing.assert_close(ours(x, y, weight), theirs(x, y, weight), **TOLERANCE[torch.float64])


def test_more_components_than_a_program_holds_are_cut_into_slots():
    out = "2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e + 2x2e"
    ours = FullyConnectedTensorProduct("2x2e", "0e + 1e", out)
    assert ours._product.decomposition.slots[2].counts == (60, 10)
    x, y = torch.randn(3, 10), torch.randn(3, 4)
    assert_matches(ours(x, y), dense_product(ours, x, y, ours.weight.detach()))


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("mode", ["uvw", "uvu", "uuu"])
@pytest.mark.parametrize("num_nodes", [None, 7])
def test_edges_gather_multiply_and_add(mode, is_shared, num_nodes):
    parts = product(mode, [4, 4], True)
    ours = TensorProduct(*parts, shared_weights=is_shared, internal_weights=False)
    src, dst = torch.tensor([0, 4, 2, 2, 1]), torch.tensor([3, 3, 0, 4, 3])
    x, y = torch.randn(5, ours.irreps_in1.dim), torch.randn(5, ours.irreps_in2.dim)
    weight = torch.randn(*(() if is_shared else (5,)), ours.weight_numel)
    messages = dense_product(ours, x[src], y, weight)
    expected = torch.zeros(num_nodes or 5, ours.irreps_out.dim).index_add(0, dst, messages)
    actual = ours(x, y, weight, src=src, dst=dst, num_nodes=num_nodes)
    assert_matches(actual, expected)
    dst[1] = -1  # an edge that is none
    expected = torch.zeros(num_nodes or 5, ours.irreps_out.dim).index_add(
        0, dst.clamp(0), messages * (dst >= 0)[:, None]
    )
    assert_matches(ours(x, y, weight, src=src, dst=dst, num_nodes=num_nodes), expected)


def test_no_edges():
    ours = TensorProduct(*product("uvu", [4, 4], True), shared_weights=False)
    none = torch.zeros(0, dtype=torch.long)
    z = ours(torch.randn(5, 16), torch.randn(0, 4), torch.randn(0, ours.weight_numel), src=none, dst=none)
    assert torch.equal(z, torch.zeros(5, ours.irreps_out.dim))


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("num_kinds", [1, 5])
@pytest.mark.parametrize("irreps", ["3x0e + 3x1o + 3x2e", "2x0e + 3x1o + 2x0e"])
def test_positions_stand_for_a_one_hot_input(irreps, num_kinds, is_shared):
    ours = FullyConnectedTensorProduct(irreps, f"{num_kinds}x0e", irreps, shared_weights=is_shared)
    x, kinds = torch.randn(2, 3, ours.irreps_in1.dim), torch.randint(num_kinds, (2, 3))
    weight = None if is_shared else torch.randn(2, 3, ours.weight_numel)
    one_hot = torch.nn.functional.one_hot(kinds, num_kinds).double()
    torch.testing.assert_close(ours(x, kinds, weight), ours(x, one_hot, weight), **TOLERANCE[torch.float64])
    flat = ours.weight.detach() if is_shared else weight.flatten(0, 1)
    expected = dense_product(ours, x.flatten(0, 1), one_hot.flatten(0, 1), flat).unflatten(0, (2, 3))
    assert_matches(ours(x, kinds, weight), expected)
    right = ours.right(one_hot, weight)
    torch.testing.assert_close(ours.right(kinds, weight), right, **TOLERANCE[torch.float64])


@pytest.mark.parametrize(("group_dim", "group_size"), [(1, None), (1, 1), (1, 4), (0, None)])
@pytest.mark.parametrize("irreps", ["3x0e + 3x1o + 3x2e", "2x0e + 3x1o + 2x0e"])
def test_a_format_stands_for_a_one_hot_input(irreps, group_dim, group_size):
    ours = FullyConnectedTensorProduct(irreps, "5x0e", irreps)
    x, kinds = torch.randn(7, ours.irreps_in1.dim, requires_grad=True), torch.tensor([0, 2, 2, 4, 0, 1, 2])
    one_hot = torch.nn.functional.one_hot(kinds, 5).double()
    form = GroupCOO.from_dense(one_hot, group_dim=group_dim, group_size=group_size)
    actual, expected = ours(x, form), dense_product(ours, x, one_hot, ours.weight)
    torch.testing.assert_close(actual, expected, **TOLERANCE[torch.float64])
    upstream = torch.randn_like(expected)
    want = torch.autograd.grad(expected, (x, ours.weight), upstream)
    got = torch.autograd.grad(actual, (x, ours.weight), upstream)
    torch.testing.assert_close(got, want, **TOLERANCE[torch.float64])


def test_the_statements_are_the_ones_that_are_shown():
    assert path_statement("uvw", False, True, True, False, False) == (
        "Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,p,u,w]"
    )
    assert path_statement("uvw", True, True, False, True, False) == (
        "Z[b,CGI[p,q],w] += CGV[p,q] * X[SRC[b],CGJ[p,q],u] * Y[b,CGK[p,q],v] * W[p,u,v,w]"
    )
    assert path_statement("uvw", True, True, False, False, True) == (
        "Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * W[p,u,Y[b],w]"
    )
    assert path_statement("uvuv", True, False, False, False, False) == (
        "Z[b,CGI[p,q],u,v] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q],v]"
    )
    assert channel_statement(True, False, False, False, False) == "Z[b,i,u] += CG[i,j,k] * X[b,j,u] * Y[b,k,u]"


def test_the_fully_connected_statement_scatters_on_chip():
    """And so does its gradient; read through a table, X[b,XP[CGJ[p,q],u]], x would get its gradient by atomics."""
    B, P, Q, C = 512, 11, 16, 16
    table = lambda: torch.randint(9, (P, Q))
    tensors = dict(CGI=table(), CGJ=table(), CGK=table(), CGV=torch.randn(P, Q), Y=torch.randn(B, 9))
    tensors |= dict(W=torch.randn(B, P, C, C))
    forward = path_statement("uvw", False, True, True, False, False)
    assert explain(forward, X=torch.randn(B, 9, C), size=(B, 9, C), **tensors).schedule.strategy == "on-chip"
    backward = "X[b,CGJ[p,q],u] += CGV[p,q] * Z[b,CGI[p,q],w] * Y[b,CGK[p,q]] * W[b,p,u,w]"
    assert explain(backward, Z=torch.randn(B, 9, C), size=(B, 9, C), **tensors).schedule.strategy == "on-chip"


@pytest.mark.cpu
def test_gradients_regroup_the_coefficients_along_what_they_keep():
    """By output component in the forward statement, by x's component in x's gradient: neither scatters."""
    CG = ELL.from_dense(torch.randn(4, 3, 2), group_dim=0)
    forward = explain("Z[b,i,u] += CG[i,j,k] * X[b,j,u] * Y[b,k]", CG=CG, X=torch.ones(5, 3, 2), Y=torch.ones(5, 2))
    assert str(forward.rewritten) == "Z[b,p,u] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]]"
    backward = explain("X[b,j,u] += CG[i,j,k] * Z[b,i,u] * Y[b,k]", CG=CG, Z=torch.ones(5, 4, 2), Y=torch.ones(5, 2))
    values = "CGV[CGS[p,q]]" if IS_INTERPRETED else "CGV[p,q]"  # a kernel reads them where they are
    assert str(backward.rewritten) == f"X[b,p,u] += {values} * Z[b,CGI[p,q],u] * Y[b,CGK[p,q]]"
    assert forward.schedule.strategy == backward.schedule.strategy == "store"
