"""Paths with dense tables of coefficients, one for each: the same product as with a row for every coefficient."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from gradient_checks import gradcheck, gradgradcheck
from statements import DEVICE, IS_INTERPRETED
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import assert_same, dense_product, doubles, second_gradients  # noqa: E402
from tolerances import assert_matches, assert_within, bound  # noqa: E402

from insum_ops.compiler.planning import scatter  # noqa: E402
from insum_ops.compiler.planning.device import H200, described_as  # noqa: E402
from insum_ops.compiler.routes.prepared import has_kernels  # noqa: E402
from insum_ops.equivariant import path_tables  # noqa: E402
from insum_ops.equivariant.decomposition import decompose  # noqa: E402
from insum_ops.equivariant.path_tables import PathTables  # noqa: E402
from insum_ops.equivariant.slots import Slots  # noqa: E402
from insum_ops.equivariant.table_terms import TableTerm  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct  # noqa: E402

SHORT = ("12x0e + 12x1o", "0e + 1o", "12x1o + 16x0o + 12x0e")  # an output block that nothing leads to
NARROW = ("12x0e + 12x1o", "0e + 1o", "12x1o + 12x0e")  # its columns are found by tables where nothing learns
LONG = ("12x2e + 12x1o + 12x0e", "1o + 2e", "12x1o + 12x2o + 12x3o")


def product(irreps: tuple[str, str, str], **options: object) -> FullyConnectedTensorProduct:
    return FullyConnectedTensorProduct(*irreps, shared_weights=False, internal_weights=False, **options)


def terms_of(ours: TensorProduct) -> tuple[object, ...]:
    return ours._product.decomposition.each.terms  # type: ignore[union-attr, return-value]


def flat_of(ours: TensorProduct) -> object:
    """The plan that finds columns by tables, without a gather of its own."""
    return ours._product.decomposition.flat_on(torch.device(DEVICE))  # type: ignore[union-attr]


def operands(ours: TensorProduct, rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = (rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (rows, ours.weight_numel)
    return [(torch.randn(shape, dtype=dtype) / 2).to(DEVICE).requires_grad_() for shape in shapes]


def allowed(ours: TensorProduct, wide: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Five factors: the coefficient that is read was rounded from float64."""
    magnitude = dense_product(ours, *wide, is_magnitude=True)
    return bound(dtype, magnitude, terms=ours.weight_numel * 9, factors=5).detach()


@pytest.fixture(autouse=True, params=["held", "in memory"])
def are_held(request: pytest.FixtureRequest) -> bool:
    """Coefficients in the source of kernels, or in tables that these read."""
    decompose.cache_clear()  # nothing is known, nor which terms have run with tables
    if request.param != "held":
        request.getfixturevalue("in_memory")
    return bool(request.param == "held")


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("irreps", [SHORT, LONG, NARROW], ids=["short", "long", "narrow"])
def test_values_and_gradients(irreps, monkeypatch):
    monkeypatch.setattr(scatter, "ON_CHIP_PROGRAMS", 0)  # as for a batch of hundreds
    ours = product(irreps)
    assert any(isinstance(term, TableTerm) for term in terms_of(ours))
    tensors = operands(ours, 3)
    wide = doubles(tensors)
    actual, expected = ours(*tensors), dense_product(ours, *wide)
    assert_same(actual, tensors, expected, wide)


@pytest.mark.usefixtures("everywhere")
def test_gradients_of_gradients():
    """What forces are trained by, for every pair of operands."""
    ours = product(("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o"))
    for got, reference in second_gradients(ours, operands(ours, 2)):
        assert_matches(got, reference)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.skipif(IS_INTERPRETED, reason="hundreds of calls")
def test_gradcheck():
    ours = product(("12x1o", "0e + 1o", "12x0e + 12x1e"))
    x, y, weight = operands(ours, 1, torch.float64)
    assert any(isinstance(term, TableTerm) for term in terms_of(ours))
    few = weight.detach()[:, :20].clone().requires_grad_()
    rest = weight.detach()[:, 20:]

    def call(x, y, few):
        return ours(x, y, torch.cat([few, rest], 1))[:, ::5]

    assert gradcheck(call, (x, y, few))
    assert gradgradcheck(call, (x, y, few))


@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
def test_edges():
    ours = product(("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o"))
    tensors = operands(ours, 3)
    src, dst = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0])
    actual = ours(*tensors, src=src.to(DEVICE), dst=dst.to(DEVICE))
    wide = doubles(tensors)
    messages = dense_product(ours, wide[0][src], *wide[1:])
    expected = messages.new_zeros(3, ours.irreps_out.dim).index_add(0, dst, messages)
    assert_same(actual, tensors, expected, wide)


@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
def test_rows_that_no_path_reaches_are_zero():
    ours = product(("16x1o", "0e", "16x1o + 16x0e"))
    (term,) = terms_of(ours)
    assert isinstance(term, TableTerm)
    z = ours(*operands(ours, 2))
    assert not z[:, 48:].any()
    assert z[:, :48].all()


@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    ours = product(("16x0e + 16x1o", "0e + 1o", "16x0e + 16x1o"))
    tensors = [tensor.detach() for tensor in operands(ours, 3, dtype)]
    wide = doubles(tensors)
    assert_within(ours(*tensors), dense_product(ours, *wide).detach(), allowed(ours, wide, dtype))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no bfloat16 of its own")
def test_autocast():
    ours = product(("16x0e + 16x1o", "0e + 1o", "16x0e + 16x1o"))
    tensors = operands(ours, 3)
    with torch.autocast(DEVICE, torch.bfloat16):
        z = ours(*tensors)
    assert z.dtype == torch.bfloat16
    wide = [tensor.bfloat16().double() for tensor in doubles(tensors)]
    assert_within(z, dense_product(ours, *wide).detach(), allowed(ours, wide, torch.bfloat16))
    for gradient, tensor in zip(torch.autograd.grad(z.float().sum(), tensors), tensors):
        assert gradient.dtype == tensor.dtype


@pytest.mark.usefixtures("everywhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces an autograd.Function
@pytest.mark.skipif(IS_INTERPRETED, reason="what is traced is the same")
def test_traced():
    torch._dynamo.reset()
    ours = product(("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o"))
    tensors = operands(ours, 3)
    expected = ours(*tensors)
    actual = torch.compile(ours, fullgraph=True, backend="aot_eager")(*tensors)
    assert_matches(actual, expected.double())
    upstream = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(z, tensors, upstream) for z in (actual, expected))):
        assert_matches(one, other.double())


@pytest.mark.skipif(IS_INTERPRETED, reason="a batch of a statement is a statement, tested elsewhere")
@pytest.mark.usefixtures("everywhere")
def test_transformed():
    ours = product(("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o"))
    x, y, weight = (tensor.detach() for tensor in operands(ours, 3))
    actual = torch.func.vmap(ours)(x[:, None], y[:, None], weight[:, None])[:, 0]
    assert_matches(actual, ours(x, y, weight).double())
    gradient = torch.func.grad(lambda x: ours(x, y, weight).square().sum())(x)
    wide = doubles([x, y, weight])
    (expected,) = torch.autograd.grad(dense_product(ours, *wide).square().sum(), wide[:1])
    assert_matches(gradient, expected)


@pytest.mark.every_route
def test_tables_run_where_kernels_do(monkeypatch):
    calls = []
    prepare = PathTables.prepare
    monkeypatch.setattr(PathTables, "prepare", lambda *given: calls.append(1) or prepare(*given))
    ours = product(("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o"))
    ours(*operands(ours, 2))
    assert bool(calls) == has_kernels(torch.device(DEVICE))


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("has_edges", [False, True])
@pytest.mark.parametrize("columns", ["read", "written", "both"])
def test_without_gradients_columns_are_read_and_written_where_they_lie(monkeypatch, columns, has_edges, are_held):
    """On the node and statement by statement."""
    gathered = []
    original = Slots.ordered, Slots.unordered
    monkeypatch.setattr(
        Slots, "ordered", lambda slots, x: (slots.order and gathered.append("x"), original[0](slots, x))[1]
    )
    monkeypatch.setattr(
        Slots, "unordered", lambda slots, z: (slots.order and gathered.append("z"), original[1](slots, z))[1]
    )
    wide_x, wide_z = columns == "written", columns == "read"
    ours = product(
        (f"12x0e + 12x1o{' + 12x2e' if wide_x else ''}", "0e + 1o", f"12x1o + 12x0e{' + 12x2e' if wide_z else ''}")
    )
    tensors = operands(ours, 3)
    edges = dict(src=torch.tensor([2, 0, 2]), dst=torch.tensor([1, 1, 0])) if has_edges else {}
    given = {name: nodes.to(DEVICE) for name, nodes in edges.items()}
    wide = doubles(tensors)
    messages = dense_product(ours, wide[0][edges["src"]] if has_edges else wide[0], *wide[1:])
    expected = messages.new_zeros(messages.shape).index_add(0, edges["dst"], messages) if has_edges else messages
    still = [tensor.detach() for tensor in tensors]
    for _ in range(2):
        assert_matches(ours(*still, **given), expected)
    with torch.no_grad():
        assert_matches(ours(*tensors, **given), expected)
        x, y, weight = still
        flat, places = flat_of(ours), [given.get("src"), given.get("dst")]
        assert_matches(flat.composed(x, y, weight, *places, 3), expected)
    assert {*gathered} == ({"read": {"z"}, "written": {"x"}, "both": set()}[columns] if not are_held else set())
    gathered.clear()
    learns = [tensors[0], tensors[2]]
    assert_same(ours(tensors[0], still[1], tensors[2], **given), learns, expected, [wide[0], wide[2]])
    assert {*gathered} == {"x", "z"}  # what learns is put in order


@pytest.mark.usefixtures("everywhere")
def test_copies_and_pickles_after_calls():
    """What was made ready for a device stays behind."""
    ours = product(SHORT)
    tensors, pickled = operands(ours, 2), pickle.dumps(ours._product)
    z = ours(*tensors)
    z.sum().backward()
    assert pickle.dumps(ours._product) == pickled
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_matches(other(*tensors), z.double())


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    "irreps",
    [
        ("48x0e + 10x1o", "0e + 1o", "80x0e + 10x1o"),  # tiles are powers of two: 64 x 128
        ("70x0e + 3x1o", "0e", "58x0e + 3x1o"),
        ("300x0e + 3x1o", "0e", "13x0e + 3x1o"),
        ("3x0e + 5x1o", "0e", "1300x0e + 5x1o"),
        ("1x0e + 1x1o", "0e + 1o", "5x0e + 5x1o"),  # one channel in, which is no dimension of its own
    ],
    ids=" x ".join,
)
def test_odd_multiplicities(irreps):
    check_with_and_without_gradients(irreps)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.sampled
@pytest.mark.parametrize(
    "irreps",
    [
        ("12x4e + 12x0e", "0e + 4e", "12x4e + 12x0e"),  # more components than a table has
        ("16x0e", "0e", "16x0e"),  # scalars alone
        ("12x0e + 12x1o", "2x0e + 2x1o", "12x0e + 12x1o"),  # channels in the second input
        ("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o + 16x0o"),  # channels of two widths
    ],
    ids=" x ".join,
)
def test_products_for_which_tables_gain_nothing(irreps):
    check_with_and_without_gradients(irreps)


def check_with_and_without_gradients(irreps):
    ours = product(irreps)
    tensors = operands(ours, 2)
    wide = doubles(tensors)
    expected = dense_product(ours, *wide)
    assert_same(ours(*tensors), tensors, expected, wide)
    with torch.no_grad():
        assert_matches(ours(*tensors), expected)
        assert_matches(ours(*[tensor.detach() for tensor in tensors]), expected)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("irreps", [NARROW, ("1x0e + 1x1o", "0e + 1o", "5x0e + 5x1o")], ids=["narrow", "one channel"])
def test_a_tracer_that_comes_first(irreps):
    ours = product(irreps)
    still = [tensor.detach() for tensor in operands(ours, 2)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert ours(*still).shape == (2, ours.irreps_out.dim)
    assert_matches(ours(*still), dense_product(ours, *doubles(still)))


@pytest.mark.usefixtures("everywhere")
def test_compiled_without_gradients_after_a_call_that_learns():
    ours = product(NARROW)
    tensors = operands(ours, 2)
    ours(*tensors)
    expected = dense_product(ours, *doubles(tensors))
    with torch.no_grad():
        assert_matches(torch.compile(ours, fullgraph=True, backend="aot_eager")(*tensors), expected)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does it
def test_a_compiled_product_tells_its_kernels_the_coefficients(are_held):
    """In both passes: on torch 2.11 no kernel of a compiled product had held them, and each took over twice as long."""
    if not are_held:
        pytest.skip("no kernel holds coefficients")
    ours, facts = product(NARROW), dict[str, str]()
    tensors = operands(ours, 2)
    ours._product.prepare(tensors[0].device, torch.float32)  # as layers do where kernels run

    def recorded(graph, _):
        calls = [node for node in graph.graph.nodes if node.target is torch.ops.insum_ops.run.default]
        facts.update({node.args[0]: node.args[4] for node in calls})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=recorded, bw_compiler=recorded)
    torch.compile(ours, fullgraph=True, backend=backend)(*tensors).sum().backward()
    held = {text: fact for text, fact in facts.items() if "CGV" in text}
    assert len(held) > 1
    assert all(fact.startswith("known {") for fact in held.values())


@pytest.mark.usefixtures("everywhere")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does it
def test_compiled_under_autocast_after_a_call_without():
    ours = product(NARROW)
    tensors = operands(ours, 2)
    ours(*tensors)
    wide = doubles([tensor.detach().bfloat16() for tensor in tensors])
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        z = torch.compile(ours, backend="aot_eager")(*tensors)
    assert_within(z, dense_product(ours, *wide).detach(), allowed(ours, wide, torch.bfloat16))


@pytest.mark.parametrize("row", path_tables.MEASURED_HELD, ids=lambda row: f"lmax {row.lmax}, {row.channels} channels")
def test_coefficients_are_held_where_that_was_measured_to_take_less(row, are_held):
    """Or about as long: within a sixth of the faster way, wherever it was measured."""
    if not are_held:
        pytest.skip("the rule is switched off")
    degrees = [f"{degree}{'eo'[degree % 2]}" for degree in range(row.lmax + 1)]
    irreps = " + ".join(f"{row.channels}x{degree}" for degree in degrees)
    (term,) = terms_of(product((irreps, " + ".join(degrees), irreps)))
    for name in "ZXYW":
        held, by_tables = getattr(row, name)
        with described_as(H200):
            is_held = term.tables.is_held(name, torch.float32, torch.device("cpu"))
        assert (held if is_held else by_tables) < 7 / 6 * min(held, by_tables)


def test_a_gpu_with_more_registers_holds_more(are_held, monkeypatch):
    """Columns of such paths are found by the kernel that a device would take."""
    if not are_held:
        pytest.skip("the rule is switched off")
    monkeypatch.setattr(path_tables, "HELD_ENTRIES", 0)  # as if these were many
    ours = product(("64x0e + 64x1o", "0e + 1o", "64x1o + 64x0e"))
    (term,) = terms_of(ours)
    cpu = torch.device("cpu")
    for registers, holds_all in ((65536, False), (4 * 65536, True)):
        with described_as(replace(H200, registers=registers)):
            assert term.tables.is_held("Z", torch.float32, cpu) == holds_all
            (flat,) = ours._product.decomposition.flat_on(cpu).each.terms
        assert flat.side.is_known == holds_all
