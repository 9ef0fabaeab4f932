"""A tensor product as one node of autograd, whatever is done with its inputs, its result and torch's settings."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from statements import DEVICE, IS_INTERPRETED

pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import assert_same, dense_product, doubles
from joint_kernels import outputs, share_kernels
from tensor_cases import CASES, Case, composed, learning, operands
from tolerances import assert_matches

from insum_ops.compiler.routes import joint
from insum_ops.compiler.tuning import joint as tuning_jointly
from insum_ops.equivariant import in_place
from insum_ops.nn import FullyConnectedTensorProduct

pytestmark = pytest.mark.usefixtures("nothing_is_known")


@pytest.mark.parametrize("name", [name for name in ("each", "ir_mul") if name in CASES])
def test_the_result_may_be_changed_in_place(name):
    ours = CASES[name].built()
    leaves = learning(operands(CASES[name], ours)[0], (True, True, True))
    z = ours(*leaves)
    z += 1
    z.mul_(2).sum().backward()
    want = learning(leaves, (True, True, True))
    (composed(ours, *want) * 2).sum().backward()
    for one, reference in zip(leaves, want, strict=True):
        assert_matches(one.grad, reference.grad)


def test_an_input_that_was_changed_in_place_is_refused():
    ours = CASES["each"].built()
    x, y, weight = learning(operands(CASES["each"], ours)[0], (True, True, True))
    weight = weight * 1
    z = ours(x, y, weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_tensors_may_be_parts_of_one():
    """Their layouts are the same wherever they begin."""
    ours = CASES["each"].built()
    sizes = [ours.irreps_in1.dim, ours.irreps_in2.dim, ours.weight_numel]
    for start in (0, 3, 1):
        memory = torch.randn(3, 4 + sum(sizes), dtype=torch.float64, device=DEVICE).requires_grad_()
        x, y, weight = memory[:, start : start + sum(sizes)].split(sizes, 1)
        z, expected = ours(x, y, weight), composed(ours, x.clone(), y.clone(), weight.clone())
        assert_matches(z, expected)
        (one,) = torch.autograd.grad(z.square().sum(), memory)
        (reference,) = torch.autograd.grad(expected.square().sum(), memory)
        assert_matches(one, reference)


@pytest.mark.every_route
def test_another_number_of_rows():
    ours = CASES["each"].built()
    for rows in (3, 0, 2) if IS_INTERPRETED else (1, 3, 0, 2, 3):
        leaves = learning(operands(CASES["each"], ours, rows)[0], (True, True, True))
        z, expected = ours(*leaves), composed(ours, *leaves)
        assert_matches(z, expected)
        upstream = torch.randn_like(z)
        found = torch.autograd.grad(z, leaves, upstream)
        for one, reference in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
            assert_matches(one, reference)


@pytest.mark.every_route
@pytest.mark.parametrize("is_expanded", [True, False])
def test_upstream_gradients_of_any_layout(is_expanded):
    ours = CASES["each"].built()
    leaves = learning(operands(CASES["each"], ours)[0], (True, True, True))
    z, expected = ours(*leaves), composed(ours, *leaves)
    upstream = torch.ones((), dtype=z.dtype, device=DEVICE).expand_as(z)
    if not is_expanded:
        upstream = torch.randn(z.shape[::-1], dtype=z.dtype, device=DEVICE).T
    found = torch.autograd.grad(z, leaves, upstream)
    for one, reference in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert_matches(one, reference)


def test_edges_that_change_in_place_are_noticed():
    case = CASES["edges"]
    ours = case.built()
    given, edges = operands(case, ours)
    ours(*given, **edges)
    edges["src"].copy_(torch.tensor([1, 1, 2]))
    edges["dst"].copy_(torch.tensor([0, -1, 3]))
    assert_matches(ours(*given, **edges), composed(ours, *given, **edges))


@pytest.mark.every_route
def test_what_kernels_can_not_read_is_left_to_the_statements():
    """The negatives of values, as under the imaginary part of a conjugate."""
    ours = CASES["each"].built()
    (x, y, weight), _ = operands(CASES["each"], ours)
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    assert_matches(ours(negative, y, weight), composed(ours, x, y, weight))


@pytest.mark.skipif(IS_INTERPRETED, reason="transforms run as torch operations")
def test_transforms_of_a_warm_product():
    ours = CASES["each"].built()
    leaves = learning(operands(CASES["each"], ours)[0], (True, True, True))
    expected = torch.autograd.grad(ours(*leaves).square().sum(), leaves)
    torch.autograd.grad(ours(*leaves).square().sum(), leaves)
    loss = lambda *own: ours(*own).square().sum()
    plain = [leaf.detach() for leaf in leaves]
    for one, reference in zip(torch.func.grad(loss, (0, 1, 2))(*plain), expected, strict=True):
        assert_matches(one, reference)
    rows = torch.func.vmap(lambda x, y, w: ours(x[None], y[None], w[None])[0])(*plain)
    assert_matches(rows, composed(ours, *plain))


@pytest.mark.skipif(IS_INTERPRETED, reason="no autocast there")
def test_backward_under_autocast_is_not_cast():
    case = CASES["each"]
    ours = case.built()
    leaves = [own.float().detach().requires_grad_() for own in operands(case, ours)[0]]
    z = ours(*leaves)
    expected = torch.autograd.grad(z.sum(), leaves, retain_graph=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = torch.autograd.grad(z.sum(), leaves)
    for one, reference in zip(found, expected, strict=True):
        assert_matches(one, reference.double())


def test_settings_that_change_are_noticed():
    ours = CASES["each"].built()
    leaves = learning(operands(CASES["each"], ours)[0], (True, True, True))
    expected = torch.autograd.grad(ours(*leaves).square().sum(), leaves)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(ours(*leaves).square().sum(), leaves) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(before)
    for one, again, reference in zip(*found, expected, strict=True):
        assert torch.equal(one, again)
        assert_matches(one, reference)


def test_saved_tensors_may_be_kept_elsewhere():
    ours = CASES["each"].built()
    leaves = learning(operands(CASES["each"], ours)[0], (True, True, True))
    expected = torch.autograd.grad(ours(*leaves).square().sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        z = ours(*leaves)
    for one, reference in zip(torch.autograd.grad(z.square().sum(), leaves), expected, strict=True):
        assert_matches(one, reference)


@pytest.mark.parametrize("name", ["each", "shared"])
def test_saved_tensors_may_come_back_in_another_layout(name):
    """As a slice of rows does that was kept in another memory."""
    ours = CASES[name].built()
    given, _ = operands(CASES[name], ours)
    leaves = learning(given, (True, False, True))
    wide = torch.cat([leaves[1], leaves[1]], 1)
    leaves[1] = wide[:, : given[1].shape[1]]
    asked = [leaves[0], leaves[2]]
    want = torch.autograd.grad(ours(*leaves).sum(), asked)
    for moved in (torch.Tensor.contiguous, lambda tensor: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), moved):
            z = ours(*leaves)
        for one, other in zip(torch.autograd.grad(z.sum(), asked), want, strict=True):
            assert_matches(one, other)


def test_copies_and_pickles_share_what_is_known():
    ours = CASES["each"].built()
    given, _ = operands(CASES["each"], ours)
    expected = ours(*given)
    assert ours._product.decomposition.memory
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied._product.decomposition is ours._product.decomposition
        assert_matches(copied(*given), expected)


def test_layouts_that_come_once_are_not_kept_for_ever():
    ours = CASES["each"].built()
    for rows in range(1, 11):
        given, _ = operands(CASES["each"], ours, rows)
        assert_matches(ours(*given), composed(ours, *given))
    assert len(ours._product.decomposition.memory) < 10


def test_alike_paths_whose_weights_are_equally_far_apart_share_a_statement():
    plan = CASES["apart"].built()._product.decomposition
    is_in_place, slices = plan.each.weight_slices[True]
    assert is_in_place
    found = [(part.term.key[1], part.term.num_paths, part.start, part.step) for part in slices]
    assert found == [
        ((2, 1, 2), 2, 0, 0),
        ((2, 1, 3), 2, 8, 14),
        ((2, 1, 2), 2, 14, 0),
        ((3, 1, 3), 2, 28, 15),
        ((3, 1, 2), 2, 37, 15),
    ]
    _, apart = plan.each.weight_slices[False]
    assert [part.numel for part in apart] == [term.weight_numel for term in plan.each.terms]


def test_a_third_path_at_another_distance_has_its_own_statement():
    paths = [(0, 0, 0, "uvw", True), (1, 0, 1, "uvw", True), (0, 1, 0, "uvw", True), (0, 0, 0, "uvw", True)]
    case = Case(("2x0e + 3x0e", "0e + 0e", "2x0e + 1x0e"), paths=paths)
    ours = case.built()
    _, slices = ours._product.decomposition.each.weight_slices[True]
    assert [(part.term.num_paths, part.start, part.step) for part in slices] == [(1, 0, 0), (1, 4, 0), (2, 7, 0)]
    leaves = learning(operands(case, ours)[0], (True, True, True))
    z, expected = ours(*leaves), dense_product(ours, *[leaf.detach().cpu() for leaf in leaves])
    assert_matches(z, expected)


@pytest.mark.every_route
def test_gradients_too_large_to_be_written_in_parts_are_put_together(monkeypatch):
    monkeypatch.setattr(in_place, "LARGEST", 8)
    ours = CASES["apart"].built()
    leaves = learning(operands(CASES["apart"], ours)[0], (True, True, True))
    z, expected = ours(*leaves), composed(ours, *leaves)
    upstream = torch.randn_like(z)
    found = torch.autograd.grad(z, leaves, upstream)
    for one, reference in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert_matches(one, reference)


UNEVEN = ("6x0e + 3x1o + 2x2e", "0e + 1o + 2e", "3x0e + 5x1o + 4x2e")


@pytest.mark.kernels
@pytest.mark.parametrize("config", [0, -1])
@pytest.mark.parametrize("has_edges", [False, True])
def test_blocks_of_unequal_multiplicities_are_added_up_by_one_kernel(config, has_edges):
    """Each pair of multiplicities has a statement, and those of one output are summed where they meet."""
    torch.manual_seed(0)
    ours = FullyConnectedTensorProduct(*UNEVEN, shared_weights=False, internal_weights=False)
    with share_kernels(config) as contests:
        for rows in (3, 3, 5, 4):
            shapes = ((rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (rows, ours.weight_numel))
            leaves = [torch.randn(shape).to(DEVICE).requires_grad_() for shape in shapes]
            wide = doubles(leaves)
            if not has_edges:
                assert_same(ours(*leaves), leaves, dense_product(ours, *wide), wide)
                continue
            src, dst = torch.randint(0, rows, (2, rows))
            expected = torch.zeros(rows, ours.irreps_out.dim, dtype=torch.float64)
            expected = expected.index_add(0, dst, dense_product(ours, wide[0][src], *wide[1:]))
            found = ours(*leaves, src=src.to(DEVICE), dst=dst.to(DEVICE))
            assert_same(found, leaves, expected, wide)
        sums = [key.statement for key, ways in contests if joint.APART in ways]
    assert {text.split(": ")[1][:1] for text in sums} >= ({"Z"} if has_edges else {"Z", "X", "Y"})


class Named(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.every_route
@pytest.mark.parametrize("which", range(3))
def test_tensors_of_other_classes_give_the_same(which):
    """Where blocks have unequal multiplicities too, whose sums are written side by side."""
    torch.manual_seed(0)
    ours = FullyConnectedTensorProduct(*UNEVEN, shared_weights=False, internal_weights=False)
    shapes = ((3, ours.irreps_in1.dim), (3, ours.irreps_in2.dim), (3, ours.weight_numel))
    tensors = [torch.randn(shape).to(DEVICE) for shape in shapes]
    expected = dense_product(ours, *doubles(tensors))
    tensors[which] = tensors[which].as_subclass(Named)
    assert_matches(ours(*tensors).as_subclass(torch.Tensor), expected)
    leaves = learning(tensors, (True, True, True))
    wide = doubles([tensor.as_subclass(torch.Tensor) for tensor in tensors])
    upstream = torch.randn(expected.shape)
    want = torch.autograd.grad(dense_product(ours, *wide), wide, upstream.double())
    for found, reference in zip(torch.autograd.grad(ours(*leaves), leaves, upstream.to(DEVICE)), want, strict=True):
        assert_matches(found.as_subclass(torch.Tensor), reference)


@pytest.mark.kernels
@pytest.mark.parametrize("config", [0, -1])
@pytest.mark.parametrize("has_edges", [False, True])
@pytest.mark.parametrize(
    ("learns", "most", "channels"), [("xyw", 2048, 12), ("xw", 2048, 12), ("xyw", 24, 12), ("xyw", 2048, 65)]
)
def test_gradients_of_blocks_of_one_multiplicity_share_a_kernel(learns, most, channels, has_edges, config, monkeypatch):
    """That of y only where a thread has few products: else it has a kernel of its own.

    A tile of all weights that 65 channels have would be too large for one kernel of that gradient alone.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(tuning_jointly, "MOST_OF_A_THREAD", most)
    irreps = f"{channels}x0e + {channels}x1o"
    ours = FullyConnectedTensorProduct(irreps, "0e + 1o", irreps, shared_weights=False, internal_weights=False)
    with share_kernels(config) as contests:
        for rows in (3, 3, 5, 4):
            shapes = ((rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (rows, ours.weight_numel))
            leaves = [
                torch.randn(shape).to(DEVICE).requires_grad_(name in learns) for name, shape in zip("xyw", shapes)
            ]
            wide = doubles(leaves)
            if not has_edges:
                found, expected = ours(*leaves), dense_product(ours, *wide)
            else:
                src, dst = torch.randint(0, rows, (2, rows))
                expected = torch.zeros(rows, ours.irreps_out.dim, dtype=torch.float64)
                expected = expected.index_add(0, dst, dense_product(ours, wide[0][src], *wide[1:]))
                found = ours(*leaves, src=src.to(DEVICE), dst=dst.to(DEVICE))
            learning = [pair for pair in zip(leaves, wide) if pair[0].requires_grad]
            assert_same(found, [leaf for leaf, _ in learning], expected, [leaf for _, leaf in learning])
        shared = {written for written in outputs(contests) if len(written) > 1}
    assert shared == {("X", "W") if most < 2048 or learns == "xw" else ("X", "Y", "W")}
