"""The tensor products that are measured are the published ones, checked whole, beside peers on their own kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("pytest_benchmark")
pytest.importorskip("e3nn")
import bench.case
import bench.equivariant
from bench.case import LIMIT_TF32, OURS
from bench.cases import test_tensor_product as products
from bench.equivariant import COMPILED, SAMPLES, Operands, Product, make, natural
from bench.harness import check
from insum_ops import nn

pytestmark = pytest.mark.cpu

# paths and weights as the models' own code gives them
PUBLISHED = {
    "DiffDock-L1": (10, 6928),
    "DiffDock-L2": (12, 7128),
    "tetris-poly-1": (24, 648),
    "tetris-poly-2": (5, 664),
    "e3tools convolution": (4, 7680),
    "e3tools transformer": (4, 6400),
    "e3nn's benchmark": (24, 12288),
    "MACE skip_tp": (3, 4374528),
    "NequIP self-connection": (8, 28672),
    "mace-medium": (8, 1024),
    "mace-large": (17, 2176),
    "SevenNet-l3i5": (34, 1760),
    "mace-medium, gather and scatter": (8, 1024),
    "mace-large, gather and scatter": (17, 2176),
}


def anew(name: str) -> ModuleType:
    """The module executed once more, with this moment's device, beside the one that others have imported."""
    spec = find_spec(name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gpu_sizes_are_the_published_ones(monkeypatch):
    monkeypatch.setattr(bench.case, "DEVICE", "cuda")
    modules = ("test_equivariant", "test_equivariant_shared", "test_equivariant_edges")
    products = [own for name in modules for own in anew(f"bench.cases.{name}").PRODUCTS.values()]
    layers = {own.name: own.built(nn) for own in products}
    assert {name: (len(own.instructions), own.weight_numel) for name, own in layers.items()} == PUBLISHED
    assert all(2_000 <= own.batch <= 20_000 for own in products)


PRODUCT = Product("small", natural(1, 2), natural(1, 1), natural(1, 2), 100)
KINDS = Product("kinds", natural(1, 2), "3x0e", natural(1, 2), 100, is_shared=True, is_one_hot=True)
GRAPH = Product("graph", natural(1, 4), natural(1, 1), natural(1, 1), 100, "uvu", nodes=7)


@pytest.fixture(params=[PRODUCT, KINDS, GRAPH], ids=lambda product: product.name)
def given(request) -> Operands:
    return make(request.param)


def test_samples_that_meet_are_all_checked(given):
    rows = {"small": SAMPLES, "kinds": 100, "graph": 7}[given.product.name]
    assert len(given.forward_case("experiment").expected) == rows


@pytest.mark.parametrize("sample", [0, 99])
def test_samples_that_are_checked_lie_between_the_first_and_the_last(sample, monkeypatch):
    given = make(PRODUCT)
    layer, forward, training = given.layer(OURS), given.forward_case("experiment"), given.training_case("experiment")

    def wrong(x, y, w):
        found = layer(x, y, w)
        return torch.cat([found[:sample], 2 * found[sample : sample + 1], found[sample + 1 :]])

    monkeypatch.setattr(Operands, "layer", lambda self, provider: wrong)
    for call, case in ((given.forward(OURS), forward), (given.training(OURS), training)):
        with pytest.raises(AssertionError, match=r"^relative error .* is above"):
            check(call.result(), case.expected, case.limit)


class Tilted(torch.autograd.Function):
    """The operand as it is, but one element of its gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, operand):
        return operand.clone()

    @staticmethod
    def backward(ctx, gradient):
        wrong = gradient.clone()
        wrong.view(-1)[0] *= 2
        return wrong


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_wrong_gradient_of_any_operand_is_found(given, at, monkeypatch):
    if given.product.is_one_hot and at == 1:
        pytest.skip("kinds do not learn")
    case, layer = given.training_case("experiment"), given.layer(OURS)
    check(given.training(OURS).result(), case.expected, case.limit)

    def wrong(*operands):
        return layer(*(Tilted.apply(own) if number == at else own for number, own in enumerate(operands)))

    monkeypatch.setattr(Operands, "layer", lambda self, provider: wrong)
    with pytest.raises(AssertionError, match=r"^relative error .* is above 4e-05$"):
        check(given.training(OURS).result(), case.expected, case.limit)


def test_gradients_of_another_scale_are_found(given, monkeypatch):
    case, layer = given.training_case("experiment"), given.layer(OURS)
    monkeypatch.setattr(Operands, "layer", lambda self, provider: lambda *operands: 1000 * layer(*operands))
    with pytest.raises(AssertionError, match=r"^relative error 9\.99e\+02 is above 4e-05$"):
        check(given.training(OURS).result(), case.expected, case.limit)


def test_forces_are_checked_by_a_case_of_their_own():
    given = make(PRODUCT)
    case = given.training_case("experiment", is_force=True)
    assert (case.name, case.facts["series"]) == ("forces, small", "forces")
    for provider in (OURS, "e3nn"):
        check(given.training(provider, is_force=True).result(), case.expected, case.limit)
    with pytest.raises(AssertionError, match=r"^relative error .* is above 4e-05$"):
        check(given.training(OURS).result(), case.expected, case.limit)


@pytest.mark.parametrize("provider", [OURS, "e3nn"])
def test_a_provider_in_tf32_has_its_limit(provider):
    given = make(PRODUCT)
    case, call = given.forward_case("experiment"), given.forward(f"{provider} tf32")
    assert (given.forward(provider).limit, call.limit) == (None, LIMIT_TF32)
    assert check(call.result(), case.expected, call.limit) < 1e-6  # a CPU has no tf32


def test_peers_are_allowed_tf32_where_ours_is(monkeypatch):
    monkeypatch.setattr(products, "needs_gpu", lambda what: None)
    seen = {}
    for provider in products.PROVIDERS:
        note = lambda case, provider, make: seen.update({provider: torch.get_float32_matmul_precision()})
        products.test_tensor_product(1, 8, provider, note)
    names = (OURS, "e3nn", "e3nn compiled", "cuequivariance")
    assert seen == {**dict.fromkeys(names, "highest"), **{f"{name} tf32": "high" for name in names}}


def cuequivariance(monkeypatch, method: str, seen: list[torch.Tensor]) -> None:
    """A stand-in whose layers note the weights they are called with."""
    layer = lambda x, y, w: seen.append(w)
    layer.f = SimpleNamespace(method=method)
    module = SimpleNamespace(
        Irreps=lambda group, irreps: [], mul_ir=None, FullyConnectedTensorProduct=lambda *irreps, **options: layer
    )
    monkeypatch.setattr(bench.equivariant, "installed", lambda name: module)
    monkeypatch.setattr(bench.equivariant, "needs_gpu", lambda what: None)


def test_cuequivariance_off_its_fused_path_is_skipped(monkeypatch):
    given = make(PRODUCT)
    cuequivariance(monkeypatch, "naive", [])
    with pytest.raises(pytest.skip.Exception, match=r"^cuequivariance is on its naive path, not on fused_tp$"):
        given.layer("cuequivariance")


def test_cuequivariance_takes_shared_weights_as_a_row(monkeypatch):
    seen: list[torch.Tensor] = []
    own, shared = make(PRODUCT), make(replace(PRODUCT, is_shared=True))
    cuequivariance(monkeypatch, "fused_tp", seen)
    for given in (own, shared):
        given.layer("cuequivariance")(given.X, given.Y, given.W)
    assert [list(weight.shape) for weight in seen] == [[100, 16], [1, 16]]


def test_compiling_a_peer_is_asked_for(monkeypatch):
    monkeypatch.setattr(bench.equivariant, "needs_gpu", lambda what: None)
    monkeypatch.setattr(torch, "compile", lambda layer: "compiled")
    given = make(PRODUCT)
    monkeypatch.delenv(COMPILED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=rf"^compiling e3nn takes up to a minute a case; set {COMPILED}=1"):
        given.layer("e3nn compiled")
    monkeypatch.setenv(COMPILED, "1")
    assert given.layer("e3nn compiled") == "compiled"


def test_a_row_has_the_peak_of_its_memory(monkeypatch):
    given = make(PRODUCT)
    assert given.forward(OURS).facts == {}
    monkeypatch.setattr(bench.equivariant, "DEVICE", "cuda")
    monkeypatch.setattr(bench.equivariant, "peak_mib", lambda run: 1.26)
    monkeypatch.setattr(Operands, "layer", lambda self, provider: given.exact)
    assert given.forward(OURS).facts == given.training(OURS).facts == {"peak_mib": 1.3}
