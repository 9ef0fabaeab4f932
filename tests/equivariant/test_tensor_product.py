"""The fully connected product: e3nn's numbers, weights and checkpoints; gradients of any order; laws."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product, irreps_strings, to_ir_mul  # noqa: E402
from statements import examples  # noqa: E402
from tolerances import DTYPES, TOLERANCE, assert_matches, assert_within, bound  # noqa: E402

from insum_ops import tensor_product  # noqa: E402
from insum_ops.compiler.language.errors import ShapeError  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct  # noqa: E402

EQUAL = ("4x0e + 4x1o + 4x2e", "0e + 1o + 2e", "4x0e + 4x1o + 4x2e")
UNEQUAL = ("2x0e + 3x1o + 0x1e + 3x1o + 5x0o", "2x0e + 1x1o", "2x1e + 3x1o + 4x0e + 2x2e + 7x3o")


pytestmark = pytest.mark.usefixtures("in_float64")


def both(*irreps: str, **options):
    """e3nn's product and ours with its weights."""
    theirs = o3.FullyConnectedTensorProduct(*irreps, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no path leads")
        ours = FullyConnectedTensorProduct(*irreps, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(tp, *lead: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*lead, tp.irreps_in1.dim), torch.randn(*lead, tp.irreps_in2.dim)


def assert_same_values_and_gradients(theirs, ours, *tensors: Tensor | None) -> None:
    tensors = tuple(t if t is None else t.detach().requires_grad_() for t in tensors)
    wanted = [t for t in tensors if t is not None]
    expected, actual = theirs(*tensors), ours(*tensors)
    torch.testing.assert_close(actual, expected, **TOLERANCE[torch.float64])
    if not expected.requires_grad:
        return
    upstream = torch.randn_like(expected)
    want = torch.autograd.grad(expected, wanted, upstream, allow_unused=True, materialize_grads=True)
    got = [torch.zeros_like(t) for t in wanted]
    if actual.requires_grad:
        got = torch.autograd.grad(actual, wanted, upstream, allow_unused=True, materialize_grads=True)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, **TOLERANCE[torch.float64])


@settings(max_examples=examples(60, 60))
@given(irreps_strings(), irreps_strings(max_mul=2), irreps_strings(), st.booleans(), st.integers(0, 3))
def test_random_irreps_give_e3nns_numbers(in1, in2, out, is_shared, batch):
    theirs, ours = both(in1, in2, out, shared_weights=is_shared)
    assert repr(ours) == repr(theirs)
    assert ours.instructions == theirs.instructions
    assert ours.weight_numel == theirs.weight_numel
    assert torch.equal(ours.output_mask, theirs.output_mask)
    weight = None if is_shared else torch.randn(batch, theirs.weight_numel)
    assert_same_values_and_gradients(theirs, ours, *inputs(theirs, batch), weight)


@pytest.mark.sampled
@pytest.mark.parametrize("irreps", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("irrep_normalization", [None, "component", "norm", "none"])
@pytest.mark.parametrize("path_normalization", [None, "element", "path", "none"])
def test_every_normalisation(irreps, irrep_normalization, path_normalization):
    theirs, ours = both(*irreps, irrep_normalization, path_normalization)
    assert ours.instructions == theirs.instructions
    assert_same_values_and_gradients(theirs, ours, *inputs(theirs, 3))


def test_variances():
    options = dict(in1_var=[0.5, 2.0, 1.0], in2_var=torch.tensor([1.0, 0.0, 3.0]), out_var=[1.0, 4.0, 0.0])
    theirs, ours = both(*EQUAL, **options)
    assert ours.instructions == theirs.instructions
    assert_same_values_and_gradients(theirs, ours, *inputs(theirs, 2))


@pytest.mark.parametrize(
    ("x", "y", "weight"),
    [
        ((), (), None),
        ((5,), (), None),
        ((2, 3), (3,), None),
        ((2, 1), (1, 3), None),
        ((0,), (1,), None),
        ((4,), (4,), (4,)),
        ((4,), (1,), (4,)),
        ((4,), (4,), (1,)),
        ((), (), (4,)),
        ((2, 1), (3,), (1, 3)),
        ((2, 3), (2, 3), (1, 1)),
        ((0,), (0,), (0,)),
    ],
)
@pytest.mark.sampled
@pytest.mark.parametrize("irreps", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_leading_dimensions_broadcast(irreps, x, y, weight):
    theirs, ours = both(*irreps, shared_weights=weight is None)
    X, Y = torch.randn(*x, theirs.irreps_in1.dim), torch.randn(*y, theirs.irreps_in2.dim)
    W = None if weight is None else torch.randn(*weight, theirs.weight_numel)
    assert_same_values_and_gradients(theirs, ours, X, Y, W)


@pytest.mark.parametrize("irreps", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_external_shared_weights_and_lists_of_paths(irreps):
    theirs, ours = both(*irreps, internal_weights=False)
    weight = torch.randn(theirs.weight_numel)
    x, y = inputs(theirs, 3)
    assert_same_values_and_gradients(theirs, ours, x, y, weight)
    for parts in paths_weights(ours, weight):
        torch.testing.assert_close(ours(x, y, parts), ours(x, y, weight))
    theirs, ours = both(*irreps, shared_weights=False)
    weight = torch.randn(3, theirs.weight_numel)
    for parts in paths_weights(ours, weight):
        torch.testing.assert_close(ours(x, y, parts), ours(x, y, weight))


def paths_weights(tp, weight: Tensor) -> list:
    """All that may be passed for weights by path: shaped as the paths' or flat, as a list or as a tuple."""
    views = list(tp.weight_views(weight))
    return [views, [view.reshape(*weight.shape[:-1], -1) for view in views], tuple(views)]


@pytest.mark.parametrize("lead", [(4,), (1, 1), (2, 1)])
def test_leading_dimensions_of_weights_count_where_no_path_has_any(lead):
    args = ("2x0e + 1o", "0e", "2x0e + 1o", [(0, 0, 0, "uvu", False), (1, 0, 1, "uvv", False)])
    theirs, ours = o3.TensorProduct(*args, shared_weights=False), TensorProduct(*args, shared_weights=False)
    x, y = inputs(theirs, 1)
    assert_same_values_and_gradients(theirs, ours, x, y, torch.zeros(*lead, 0))
    text = "leading dimensions must broadcast, but x has [3], y [3] and weight [2]; make them agree or 1"
    with pytest.raises(ShapeError, match=f"^{re.escape(text)}$"):
        ours(*inputs(theirs, 3), torch.zeros(2, 0))


def test_strided_and_transposed_inputs():
    theirs, ours = both(*UNEQUAL, shared_weights=False)
    x = torch.randn(theirs.irreps_in1.dim, 4).T
    y = torch.randn(4, 2 * theirs.irreps_in2.dim)[:, ::2]
    weight = torch.randn(theirs.weight_numel, 4).T
    assert_same_values_and_gradients(theirs, ours, x, y, weight)


@pytest.mark.parametrize("irreps", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_both_layouts(irreps, is_shared):
    _, ours = both(*irreps, shared_weights=is_shared)
    turned = FullyConnectedTensorProduct(*irreps, shared_weights=is_shared, layout="ir_mul")
    turned.load_state_dict(ours.state_dict())
    x, y = inputs(ours, 5)
    weight = None if is_shared else torch.randn(5, ours.weight_numel)
    actual = turned(to_ir_mul(ours.irreps_in1, x), to_ir_mul(ours.irreps_in2, y), weight)
    torch.testing.assert_close(actual, to_ir_mul(ours.irreps_out, ours(x, y, weight)), **TOLERANCE[torch.float64])


def test_equal_multiplicities_are_one_statement_without_a_copy():
    ours = FullyConnectedTensorProduct(*EQUAL, shared_weights=False, layout="ir_mul")
    plan = ours._product.decomposition
    assert len(plan.each.terms) == 1
    assert all(slots.order is None for slots in plan.slots)


def test_views_and_options_are_e3nns():
    options = dict(compile_left_right=False, compile_right=True, _specialized_code=True, _optimize_einsums=False)
    theirs, ours = both(*UNEQUAL, **options)
    for (i, path, view), (j, other, expected) in zip(
        ours.weight_views(yield_instruction=True), theirs.weight_views(yield_instruction=True), strict=True
    ):
        assert (i, path) == (j, other)
        assert torch.equal(view, expected)
        assert torch.equal(ours.weight_view_for_instruction(i), theirs.weight_view_for_instruction(i))
        assert view.data_ptr() == ours.weight_view_for_instruction(i).data_ptr()
    y = torch.randn(2, theirs.irreps_in2.dim)
    torch.testing.assert_close(ours.right(y), theirs.right(y), **TOLERANCE[torch.float64])
    theirs, ours = both(*UNEQUAL, shared_weights=False, compile_right=True)
    weight = torch.randn(2, ours.weight_numel)
    torch.testing.assert_close(ours.right(y, weight), theirs.right(y, weight), **TOLERANCE[torch.float64])


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(7)
    theirs = o3.FullyConnectedTensorProduct(*EQUAL)
    torch.manual_seed(7)
    assert torch.equal(FullyConnectedTensorProduct(*EQUAL).weight, theirs.weight)


@pytest.mark.cpu
@pytest.mark.parametrize("is_shared", [True, False])
def test_checkpoints_move_both_ways(is_shared):
    theirs = o3.FullyConnectedTensorProduct(*EQUAL, shared_weights=is_shared)
    ours = FullyConnectedTensorProduct(*EQUAL, shared_weights=is_shared)
    state = torch.nn.Sequential(theirs).state_dict()
    assert any("_w3j_" in key for key in state)  # what a plain module would stumble over
    torch.nn.Sequential(ours).load_state_dict(state)
    assert torch.equal(ours.weight, theirs.weight)
    assert set(ours.state_dict()) == {"weight", "output_mask"}
    back = o3.FullyConnectedTensorProduct(*EQUAL, shared_weights=is_shared)
    result = back.load_state_dict(ours.state_dict(), strict=False)
    assert torch.equal(back.weight, theirs.weight)
    assert result.unexpected_keys == []
    assert all("_w3j_" in key for key in result.missing_keys)
    old = {key: value for key, value in theirs.state_dict().items() if key != "output_mask"}
    ours.load_state_dict(old)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ours.load_state_dict({**old, "something": torch.zeros(1)})


def test_copies_and_pickles():
    _, ours = both(*EQUAL)
    x, y = inputs(ours, 2)
    expected = ours(x, y)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(x, y), expected)


@pytest.mark.parametrize("irreps", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("parity", [1, -1])
def test_equivariance(irreps, parity):
    ours = FullyConnectedTensorProduct(*irreps, shared_weights=False)
    x, y = inputs(ours, 4)
    weight = torch.randn(4, ours.weight_numel)
    rotation = parity * o3.rand_matrix()
    D1, D2, D3 = (own.D_from_matrix(rotation) for own in (ours.irreps_in1, ours.irreps_in2, ours.irreps_out))
    turned = ours(x @ D1.T, y @ D2.T, weight)
    torch.testing.assert_close(turned, ours(x, y, weight) @ D3.T, **TOLERANCE[torch.float64])


def test_linearity_in_every_input():
    ours = FullyConnectedTensorProduct(*UNEQUAL, shared_weights=False)
    tensors = [*inputs(ours, 3), torch.randn(3, ours.weight_numel)]
    for at, tensor in enumerate(tensors):
        other = torch.randn_like(tensor)
        one, two, sum_of = ([*tensors[:at], t, *tensors[at + 1 :]] for t in (tensor, other, 2 * tensor - other))
        torch.testing.assert_close(ours(*sum_of), 2 * ours(*one) - ours(*two), **TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("irreps", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_every_dtype(irreps, dtype):
    ours = FullyConnectedTensorProduct(*irreps, shared_weights=False)
    x, y = (tensor.to(dtype) for tensor in inputs(ours, 3))
    weight = (torch.randn(3, ours.weight_numel) / 4).to(dtype)
    actual = ours(x, y, weight)
    assert actual.dtype == dtype
    expected = dense_product(ours, x.double(), y.double(), weight.double())
    magnitude = dense_product(ours, x.double(), y.double(), weight.double(), is_magnitude=True)
    # five factors: the coefficient that is read was rounded from float64
    assert_within(actual, expected, bound(dtype, magnitude, terms=ours.weight_numel * 9, factors=5))


def test_a_module_made_half_and_double_again_loses_no_coefficient():
    ours = FullyConnectedTensorProduct(*EQUAL, shared_weights=False)
    x, y = inputs(ours, 2)
    weight = torch.randn(2, ours.weight_numel)
    expected = ours(x, y, weight)
    assert torch.equal(ours.half().double()(x, y, weight), expected)


@pytest.mark.cpu
def test_autocast_takes_its_dtype():
    ours = FullyConnectedTensorProduct(*EQUAL).float()
    x, y = (tensor.float().requires_grad_() for tensor in inputs(ours, 3))
    with torch.autocast("cpu", torch.bfloat16):
        z = ours(x, y)
        mixed = ours(x.bfloat16(), y)
    assert z.dtype == torch.bfloat16
    assert torch.equal(z, mixed)
    z.float().sum().backward()
    assert x.grad.dtype == ours.weight.grad.dtype == torch.float32
    rounded = [t.detach().bfloat16().double() for t in (x, y, ours.weight)]
    magnitude = dense_product(ours, *rounded, is_magnitude=True)
    limit = bound(torch.bfloat16, magnitude, terms=ours.weight_numel * 9, factors=5)
    assert_within(z, dense_product(ours, *rounded), limit)


def test_the_functional_form_is_the_module():
    _, ours = both(*EQUAL)
    x, y = inputs(ours, 2, 3)
    irreps = dict(zip(("irreps_in1", "irreps_in2", "irreps_out"), EQUAL))
    assert torch.equal(tensor_product(x, y, ours.weight, **irreps), ours(x, y))
    weight = torch.randn(2, 3, ours.weight_numel)
    expected = dense_product(ours, x.view(6, -1), y.view(6, -1), weight.view(6, -1)).view(2, 3, -1)
    assert_matches(tensor_product(x, y, weight, **irreps), expected)


def test_weights_of_each_sample_are_moved_only_where_that_saves_more():
    """tetris has 21 runs of paths into three slots and few weights, DiffDock many weights and few runs."""
    tetris = FullyConnectedTensorProduct(
        "0e + 1o + 2e + 3o", "0e + 1o + 2e + 3o", "64x0e + 24x1e + 24x1o + 16x2e + 16x2o", shared_weights=False
    )
    plan = tetris._product.decomposition
    assert [term.num_paths for term in plan.each.terms] == [11, 9, 4]
    assert plan.each.order is not None
    docking = "10x1o + 10x1e + 48x0e + 48x0o"
    plan = FullyConnectedTensorProduct(docking, "0e + 1o + 2e", docking, shared_weights=False)._product.decomposition
    assert len(plan.each.terms) == 9
    assert plan.each.order is None


def test_weights_that_were_moved_get_their_gradients():
    irreps = ("0e + 1o + 2e", "0e + 1o + 2e", "6x0e + 4x1e + 4x1o + 3x2e + 3x2o")
    theirs, ours = both(*irreps, shared_weights=False)
    assert ours._product.decomposition.each.order is not None
    x, y = torch.randn(5, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    weight = torch.randn(5, ours.weight_numel, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(5, ours.irreps_out.dim, dtype=torch.float64)
    (own,) = torch.autograd.grad(ours(x, y, weight), weight, upstream)
    (expected,) = torch.autograd.grad(theirs(x, y, weight), weight, upstream)
    assert_matches(own, expected)
