"""A tensor product as one node of autograd: the numbers and gradients of its statements, one by one."""

from __future__ import annotations

from itertools import product as every

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from statements import IS_INTERPRETED, IS_THOROUGH

pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product
from tensor_cases import CASES, Case, composed, has_one_statement, is_one_node, learning, operands
from tolerances import assert_matches

# what each, shared, edges and tables have alone the others have together
COMBINED = [name for name in CASES if IS_THOROUGH or name not in ("each", "shared", "edges", "tables")]
SUBSETS = [own for own in every([False, True], repeat=3) if any(own)]


pytestmark = pytest.mark.usefixtures("nothing_is_known")


@pytest.mark.every_route
@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
def test_values_are_e3nns(name):
    case = CASES[name]
    ours = case.built()
    given, edges = operands(case, ours)
    if case.has_edges or case.layout != "mul_ir":
        expected = composed(ours, *given, **edges)
    else:
        expected = dense_product(ours, *[tensor.cpu() for tensor in given])
    for _ in range(2):  # made, then remembered
        assert_matches(ours(*given, **edges), expected)


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda own: "".join("xyw"[at] for at in range(3) if own[at]))
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_statements(name, wanted):
    case = CASES[name]
    ours = case.built()
    given, edges = operands(case, ours)
    want, got = learning(given, wanted), learning(given, wanted)
    expected = composed(ours, *want, **edges)
    upstream = torch.randn_like(expected)
    references = torch.autograd.grad(expected, [own for own in want if own.requires_grad], upstream)
    for _ in range(2):
        z = ours(*got, **edges)
        assert is_one_node(z) == (not (wanted[1] and has_one_statement(ours, given[2])))
        assert_matches(z, expected)
        found = torch.autograd.grad(z, [own for own in got if own.requires_grad], upstream)
        for one, reference in zip(found, references, strict=True):
            assert_matches(one, reference)


@pytest.mark.cpu
@pytest.mark.skipif(IS_INTERPRETED, reason="thousands of products")
@pytest.mark.parametrize("name", ["edges, small", "modes"])
def test_gradients_of_first_and_second_order(name):
    case = Case(("1x0e + 2x1o", "0e + 1o", "2x0e + 1x1o"), has_edges=True) if "small" in name else CASES[name]
    ours = case.built()
    given, edges = operands(case, ours)
    tensors = learning(given, (True, True, True))
    layer = lambda *own: ours(*own, **edges)
    assert gradcheck(layer, tensors)
    assert gradgradcheck(layer, tensors)


@pytest.mark.parametrize("name", ["each", "one weight"] if IS_INTERPRETED else COMBINED)
def test_second_order_after_first(name):
    case = CASES[name]
    ours = case.built()
    given, edges = operands(case, ours)
    leaves = learning(given, (True, True, True))
    layers = [lambda *own: ours(*own, **edges), lambda *own: composed(ours, *own, **edges)]
    found = []
    for layer in layers:
        z = layer(*leaves)
        first = torch.autograd.grad(z.square().sum(), leaves, retain_graph=True)
        slopes = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(own.square().sum() for own in slopes), leaves)
        found.append([*first, *slopes, *second])
    for one, reference in zip(*found, strict=True):
        assert_matches(one, reference)


@pytest.mark.every_route
def test_what_one_input_owes_to_another_counts_once():
    """Weights that are made of y: forces go through both."""
    ours = CASES["each"].built()
    (x, y, weight), _ = operands(CASES["each"], ours)
    y.requires_grad_()
    results = []
    for layer in (ours, lambda *own: composed(ours, *own)):
        energy = layer(x, y, weight * y.square().sum(1, keepdim=True)).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        (slope,) = torch.autograd.grad(force.square().sum(), y)
        results.append((force, slope))
    for one, reference in zip(*results, strict=True):
        assert_matches(one, reference)


@pytest.mark.parametrize("name", ["each"] if IS_INTERPRETED else COMBINED)
def test_vmap_over_gradients(name):
    """Rows of a Jacobian, and of a Hessian as potentials take it."""
    ours = CASES[name].built()
    given, edges = operands(CASES[name], ours)
    leaves = learning(given, (True, True, True))
    z = ours(*leaves, **edges)
    (slope,) = torch.autograd.grad(z.square().sum(), leaves[1], create_graph=True)
    for made in (z, slope):
        rows = lambda upstream: torch.autograd.grad(made, leaves, upstream, retain_graph=True)  # noqa: B023
        upstreams = torch.randn(3, *made.shape, dtype=made.dtype, device=made.device)
        together = torch.func.vmap(rows)(upstreams)
        for number, upstream in enumerate(upstreams):
            for one, other in zip(together, rows(upstream), strict=True):
                assert_matches(one[number], other)


def test_a_graph_that_is_retained_serves_twice():
    ours = CASES["each"].built()
    leaves = learning(operands(CASES["each"], ours)[0], (True, True, True))
    z = ours(*leaves)
    once = torch.autograd.grad(z.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(z.sum(), leaves)
    for one, other in zip(once, again, strict=True):
        assert_matches(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        z.sum().backward()


@pytest.mark.every_route
def test_sums_that_start_from_another_result_leave_it_alone():
    """Terms add to a slot in place, but never to what a caller holds."""
    ours = CASES["each"].built()
    given, _ = operands(CASES["each"], ours)
    before = [tensor.clone() for tensor in given]
    leaves = learning(given, (True, True, True))
    z = ours(*leaves)
    kept, upstream = z.detach().clone(), torch.ones_like(z)
    grads = torch.autograd.grad(z, leaves, upstream, retain_graph=True)
    copies = [own.clone() for own in grads]
    torch.autograd.grad(z, leaves, upstream)
    ours(*leaves)
    assert torch.equal(z, kept)
    assert torch.equal(upstream, torch.ones_like(upstream))
    for now, then in zip([*leaves, *grads], [*before, *copies], strict=True):
        assert torch.equal(now, then)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces an autograd.Function
@pytest.mark.skipif(IS_INTERPRETED, reason="what is traced is the same")
@pytest.mark.parametrize("name", ["shared", "apart", "edges", "modes"] if IS_THOROUGH else ["edges", "modes"])
def test_a_tracer_finds_all_that_the_statements_read(name):
    """After an ordinary call and its backward, which need not read it themselves."""
    torch._dynamo.reset()
    case = CASES[name]
    ours = case.built()
    given, edges = operands(case, ours)
    tensors = learning(given, (True, True, True))
    z = ours(*tensors, **edges)
    assert is_one_node(z)
    upstream = torch.randn_like(z)
    references = torch.autograd.grad(z, tensors, upstream)
    traced = torch.compile(lambda *own: ours(*own, **edges), fullgraph=True, backend="aot_eager")(*tensors)
    assert_matches(traced, z)
    for one, reference in zip(torch.autograd.grad(traced, tensors, upstream), references, strict=True):
        assert_matches(one, reference)
