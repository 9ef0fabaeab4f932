"""Channelwise products over known coefficients: the same as over a format, for values, gradients, edges and tracers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from statements import DEVICE, IS_INTERPRETED
from torch.fx.experimental.proxy_tensor import make_fx

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import assert_same, dense_product, doubles, second_gradients  # noqa: E402
from joint_kernels import outputs, share_kernels  # noqa: E402
from pretended_clock import pretended_clock  # noqa: E402
from tolerances import assert_matches, assert_within, bound  # noqa: E402

from insum_ops.compiler.routes import choice  # noqa: E402
from insum_ops.compiler.routes.prepared import has_kernels  # noqa: E402
from insum_ops.equivariant import channels as channels_module  # noqa: E402
from insum_ops.equivariant import terms  # noqa: E402
from insum_ops.lru_cache import LRUCache  # noqa: E402
from insum_ops.nn import TensorProduct  # noqa: E402

pytestmark = [pytest.mark.every_route, pytest.mark.usefixtures("everywhere")]

UVU = ("4x0e + 4x1o", "0e + 1o", "4x0e + 4x1o + 4x1o", [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 0)])
UUU = ("4x0e + 4x1o", "4x0e + 4x1o", "4x1o + 4x0e", [(0, 1, 0), (1, 1, 1), (1, 0, 0)])


def product(irreps=UVU, has_weight=True, **options):
    *own, paths = irreps
    mode = "uuu" if irreps is UUU else "uvu"
    options = {"shared_weights": False, "internal_weights": False, **options}
    return TensorProduct(*own, [(*path, mode, has_weight) for path in paths], **options)


def operands(ours, rows, edges=None, dtype=torch.float32):
    shapes = (edges or rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (rows, ours.weight_numel)
    return [(torch.randn(shape, dtype=dtype) / 2).to(DEVICE).requires_grad_() for shape in shapes]


def allowed(ours, wide, dtype, cast=0):
    """Five factors: the coefficient that is read was rounded from float64; with `cast`, so were as many inputs."""
    magnitude = dense_product(ours, *wide, is_magnitude=True)
    return bound(dtype, magnitude, terms=ours.weight_numel * 9, factors=5 + cast).detach()


@pytest.fixture
def made(monkeypatch):
    """What was made of the others, in order."""
    found, original = [], channels_module.Channels.run
    run = lambda self, name, *given: (found.append(name), original(self, name, *given))[1]
    monkeypatch.setattr(channels_module.Channels, "run", run)
    several = channels_module.Channels.run_several
    together = lambda self, names, *given: (found.extend(names), several(self, names, *given))[1]
    monkeypatch.setattr(channels_module.Channels, "run_several", together)
    return found


@pytest.mark.parametrize("irreps", [UVU, UUU], ids=["uvu", "uuu"])
def test_values_and_gradients(made, irreps):
    ours = product(irreps)
    tensors = operands(ours, 3)
    for _ in range(2):
        made.clear()
        wide = doubles(tensors)
        assert_same(ours(*tensors), tensors, dense_product(ours, *wide), wide)
        assert made == ["Z", "X", "Y", "W"]


def test_only_what_is_wanted_is_made(made):
    ours = product()
    x, y, weight = operands(ours, 3)
    (dy,) = torch.autograd.grad(ours(x.detach(), y, weight.detach()).sum(), y)
    assert made == ["Z", "Y"]
    with torch.no_grad():
        ours(x, y, weight)
    assert made == ["Z", "Y", "Z"]
    assert dy.shape == y.shape


def test_forces_make_no_gradient_of_features_and_weights(made):
    """Of what is computed from positions alone is a gradient wanted; weights learn from the squares of the forces."""
    ours = product()
    x, y, weight = operands(ours, 3)
    wide = doubles([x, y, weight])
    forces, exact = [
        torch.autograd.grad(layer(2 * a, 2 * b, 2 * c).square().sum(), b, create_graph=True)[0]
        for layer, (a, b, c) in ((ours, (x, y, weight)), (lambda *given: dense_product(ours, *given), wide))
    ]
    assert made == ["Z", "Y"]
    assert_matches(forces, exact)
    grads = torch.autograd.grad(forces.square().sum(), (x, y, weight))
    assert made[2:] == ["Z", "X", "W", "X", "Y", "W"]
    for got, reference in zip(grads, torch.autograd.grad(exact.square().sum(), wide), strict=True):
        assert_matches(got, reference)


def test_edges(made):
    """Rows are added to as many nodes as the call says, of which the tensors alone do not tell."""
    ours = product()
    src, dst = torch.tensor([2, 0, 2, 1]), torch.tensor([1, 1, 0, 3])
    edges = {"src": src.to(DEVICE), "dst": dst.to(DEVICE)}
    for nodes in (4, 6, 4, 5):
        made.clear()
        tensors = operands(ours, 4, 3)
        wide = doubles(tensors)
        messages = dense_product(ours, wide[0][src], *wide[1:])
        expected = torch.zeros(nodes, messages.shape[1], dtype=torch.float64).index_add(0, dst, messages)
        assert_same(ours(*tensors, **edges, num_nodes=nodes), tensors, expected, wide)
        assert made == ["Z", "X", "Y", "W"]


@pytest.mark.sampled
@pytest.mark.parametrize("irreps", [UVU, UUU], ids=["uvu", "uuu"])
@pytest.mark.parametrize("config", [0, 2, -1])
@pytest.mark.skipif(not has_kernels(torch.device(DEVICE)), reason="no kernels here")
def test_gradients_in_one_kernel(config, irreps):
    """Of X, Y and W together, with edges that may be absent and without edges, replayed from the third call on."""
    with share_kernels(config) as contests:
        check_gradients_in_one_kernel(product(irreps))
    assert {("X", "Y", "W"), ("Y", "W")} <= {*outputs(contests)}


def check_gradients_in_one_kernel(ours):
    src, dst = torch.tensor([2, 0, 2, -1, 1]), torch.tensor([1, 1, 0, 2, -1])
    edges = {"src": src.to(DEVICE), "dst": dst.to(DEVICE)}
    is_there = ((src >= 0) & (dst >= 0))[:, None]
    for rows in (5, 5, 5, 5):
        tensors = operands(ours, rows, 3)
        wide = doubles(tensors)
        messages = torch.where(is_there, dense_product(ours, wide[0][src.clamp(min=0)], *wide[1:]), 0)
        expected = torch.zeros(4, messages.shape[1], dtype=torch.float64).index_add(0, dst.clamp(min=0), messages)
        assert_same(ours(*tensors, **edges, num_nodes=4), tensors, expected, wide)
    for rows in (1, 3):
        tensors = operands(ours, rows)
        wide = doubles(tensors)
        assert_same(ours(*tensors), tensors, dense_product(ours, *wide), wide)
    x, y, weight = operands(ours, 3)
    wide = doubles([x, y, weight])
    upstream = torch.randn(3, ours.irreps_out.dim)
    grads = torch.autograd.grad(ours(x.detach(), y, weight), (weight, y), upstream.to(DEVICE))
    wanted = torch.autograd.grad(dense_product(ours, *wide), (wide[2], wide[1]), upstream.double())
    for got, reference in zip(grads, wanted, strict=True):
        assert_matches(got, reference)
    for got, reference in second_gradients(ours, operands(ours, 2)):
        assert_matches(got, reference)


@pytest.mark.parametrize("config", [0, 1, -1])
@pytest.mark.skipif(not has_kernels(torch.device(DEVICE)), reason="no kernels here")
def test_gradients_of_forces_hold_sums_of_sorted_edges_in_one_kernel(config):
    """Programs take edges in turn; the gradients of Z, X and W share them, and edges may be absent."""
    with share_kernels(config) as contests:
        check_gradients_of_forces(product())
    assert outputs(contests)[:2] == [("Z", "X", "W"), ("X", "Y", "W")]


def check_gradients_of_forces(ours):
    for src, dst in (([2, 0, 2, 1, 0], [0, 0, 1, 1, 3]), ([2, -1, 2, 1, 0], [-1, -1, 0, 0, 3])):
        edges = {"src": torch.tensor(src, device=DEVICE), "dst": torch.tensor(dst, device=DEVICE)}
        is_there = ((torch.tensor(src) >= 0) & (torch.tensor(dst) >= 0))[:, None]
        tensors = operands(ours, 5, 3)
        wide = doubles(tensors)
        messages = dense_product(ours, wide[0][torch.tensor(src).clamp(min=0)], *wide[1:])
        places = torch.tensor(dst).clamp(min=0)
        exact = messages.new_zeros(4, messages.shape[1]).index_add(0, places, torch.where(is_there, messages, 0))
        found = []
        for z, leaves in ((ours(*[t / 2 for t in tensors], **edges, num_nodes=4), tensors), (exact / 8, wide)):
            (force,) = torch.autograd.grad(z.square().sum(), leaves[1], create_graph=True)
            found.append(torch.autograd.grad(force.square().sum(), leaves))
        for got, reference in zip(*found, strict=True):
            assert_matches(got, reference)


@pytest.mark.kernels
def test_edges_in_the_order_of_their_sources():
    """What tuning may choose: a gradient that adds to sources takes the edges sorted, of one graph after another."""
    ours = product()
    with pretended_clock(choice) as contests:
        contests.runs = 0
        contests.winner = lambda _, ways: choice.GROUPED if choice.GROUPED in ways else choice.KERNEL
        for turn in range(4):
            src, dst = torch.randint(3, (2, 7), generator=torch.Generator().manual_seed(turn // 2))
            src, dst = src.flip(0).to(DEVICE), dst.sort().values.to(DEVICE)
            tensors = operands(ours, 7, 3)
            wide = doubles(tensors)
            edges = dense_product(ours, wide[0][src.cpu()], *wide[1:])
            expected = edges.new_zeros(3, edges.shape[1]).index_add(0, dst.cpu(), edges)
            assert_same(ours(*tensors, src=src, dst=dst, num_nodes=3), tensors, expected, wide)
    grouped = [key.statement for key, names in contests if choice.GROUPED in names]
    assert grouped
    assert all(" X[SRC[b],j,u] += " in statement for statement in grouped)


def test_edges_that_change_before_backward_are_refused():
    ours = product()
    src, dst = (torch.tensor([1, 0, 1], device=DEVICE) for _ in range(2))
    tensors = operands(ours, 3, 2)
    z = ours(*tensors, src=src, dst=dst, num_nodes=2)
    src[0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z.sum(), tensors)


def test_gradients_of_gradients():
    """What forces are trained by, for every pair of operands."""
    ours = product()
    for got, reference in second_gradients(ours, operands(ours, 2)):
        assert_matches(got, reference)


@pytest.mark.skipif(IS_INTERPRETED, reason="hundreds of calls")
def test_gradcheck():
    ours = product().double()
    tensors = operands(ours, 2, dtype=torch.float64)
    assert gradcheck(ours, tensors)
    assert gradgradcheck(ours, tensors)


def test_other_batch_sizes_no_rows_and_strides(made):
    ours = product()
    for rows in (3, 5, 0, 1):
        tensors = operands(ours, rows)
        wide = doubles(tensors)
        assert_matches(ours(*tensors), dense_product(ours, *wide))
    x, y, weight = operands(ours, 6)
    wide = doubles([x[::2], y[::2], weight[::2]])
    assert_matches(ours(x[::2], y[::2], weight[::2]), dense_product(ours, *wide))
    assert {*made} == {"Z"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    ours = product()
    tensors = [tensor.detach().to(dtype) for tensor in operands(ours, 3)]
    wide = doubles(tensors)
    z = ours(*tensors)
    assert z.dtype == dtype
    assert_within(z, dense_product(ours, *wide).detach(), allowed(ours, wide, dtype))


def test_autocast_takes_its_dtype(made):
    ours = product()
    tensors = operands(ours, 3)
    wide = doubles(tensors)
    with torch.autocast(DEVICE.type if isinstance(DEVICE, torch.device) else str(DEVICE).split(":")[0], torch.bfloat16):
        z = ours(*tensors)
    assert z.dtype == torch.bfloat16
    assert_within(z, dense_product(ours, *wide).detach(), allowed(ours, wide, torch.bfloat16, cast=3))
    for got, tensor in zip(torch.autograd.grad(z.float().sum(), tensors), tensors):
        assert got.dtype == tensor.dtype
    assert made == ["Z", "X", "Y", "W"]


def test_backward_inside_autocast_casts_no_more_than_forward_did():
    ours = product()
    tensors = operands(ours, 3)
    wide = doubles(tensors)
    z, expected = ours(*tensors), dense_product(ours, *wide)
    upstream = torch.randn(z.shape)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        found = torch.autograd.grad(z, tensors, upstream.to(DEVICE))
    for got, reference in zip(found, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert_matches(got, reference)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does it
@pytest.mark.skipif(IS_INTERPRETED, reason="traces of torch operations")
def test_a_tracer_takes_tables_that_are_there(monkeypatch):
    ours = product()
    tensors = operands(ours, 3)
    wide = doubles(tensors)
    ours(*tensors)
    monkeypatch.setattr(terms.ChannelTerm, "plain", None)  # no other way
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*tensors), tensors, dense_product(ours, *wide), wide)


@pytest.mark.skipif(IS_INTERPRETED, reason="traces of torch operations")
def test_a_tracer_that_comes_first_takes_the_format(made):
    ours = product()
    tensors = [tensor.detach() for tensor in operands(ours, 3)]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_matches(compiled(*tensors), dense_product(ours, *doubles(tensors)))
    assert not made


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does it
@pytest.mark.skipif(IS_INTERPRETED, reason="traces of torch operations")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_tracer_under_autocast_takes_tables_of_its_dtype(monkeypatch, dtype):
    """An ordinary call in float32 has made them."""
    torch._dynamo.reset()
    ours = product()
    tensors = operands(ours, 3)
    wide = doubles(tensors)
    ours(*tensors)
    monkeypatch.setattr(terms.ChannelTerm, "plain", None)  # no other way
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.autocast(torch.device(DEVICE).type, dtype):
        z = compiled(*tensors)
    assert z.dtype == dtype
    assert_within(z, dense_product(ours, *wide).detach(), allowed(ours, wide, dtype, cast=3))
    for got, tensor in zip(torch.autograd.grad(z.float().sum(), tensors), tensors):
        assert got.dtype == tensor.dtype


@pytest.mark.skipif(IS_INTERPRETED, reason="traces of torch operations")
def test_a_mode_that_comes_first_takes_the_format(made):
    """Whose tensors may hold no numbers to put into a source."""
    ours = product()
    tensors = [tensor.detach() for tensor in operands(ours, 3)]
    traced = make_fx(lambda *given: ours(*given))(*tensors)
    assert_matches(traced(*tensors), dense_product(ours, *doubles(tensors)))
    assert not made
    ours(*tensors)
    assert made == ["Z"]


@pytest.mark.skipif(IS_INTERPRETED, reason="torch operations")
def test_transforms_take_the_statement_itself(made):
    ours = product()
    x, y, weight = (tensor.detach() for tensor in operands(ours, 3))
    expected = dense_product(ours, *doubles([x, y, weight]))
    found = torch.func.vmap(lambda x, y, weight: ours(x[None], y[None], weight[None])[0])(x, y, weight)
    assert_matches(found, expected)
    assert not made


def test_copies_and_pickles_make_their_own_tables(made):
    ours = product()
    tensors = operands(ours, 2)
    expected = dense_product(ours, *doubles(tensors))
    ours(*tensors)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_matches(other(*tensors), expected)
    assert made == ["Z"] * 3


def test_shared_weights_and_no_weights_have_none(made):
    x, y, weight = operands(product(), 3)
    product(shared_weights=True)(x, y, weight[0])
    product(has_weight=False)(x, y)
    assert not made


def test_many_entries_are_left_to_the_format(monkeypatch, made):
    monkeypatch.setattr(terms, "MOST_ENTRIES", 3)
    ours = product()
    tensors = operands(ours, 2)
    assert_matches(ours(*tensors), dense_product(ours, *doubles(tensors)))
    assert not made


def test_few_sizes_are_kept():
    side = channels_module.Side({}, "", LRUCache(8))
    first = side.memory(3)
    assert side.memory(3) is first
    for rows in range(100):
        side.memory(rows)
        assert len(side.memories) <= 8
