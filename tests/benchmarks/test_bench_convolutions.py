"""The references that convolutions are checked with, and how spconv's fastest algorithm is found."""

from __future__ import annotations

import sys
from enum import Enum
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tolerances import TOLERANCE

import bench.convolutions as convolutions
from bench.case import Call, forget
from bench.harness import check
from bench.inputs import voxels
from insum_ops import nn as ours

pytest.importorskip("pytest_benchmark")
from bench.cases import test_backward as backward
from bench.cases import test_kernel_map as maps
from bench.cases import test_unet as unets

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the cases themselves are larger"),
]


class ConvAlgo(Enum):
    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class Tuner:
    def __init__(self, kernels: list[str]) -> None:
        self.kernels, self._nvrtc_caches = kernels, {}


@pytest.fixture
def spconv(monkeypatch):
    """As much of spconv as is touched, with our layers in it."""
    ops = SimpleNamespace(CONV_CPP=Tuner([]), GEMM_CPP=Tuner([]))
    core = SimpleNamespace(
        get_conv_algo_desp_from_param="conv {}".format, get_gemm_algo_desp_from_param="gemm {}".format
    )
    algo = SimpleNamespace(ConvTunerSimple=Tuner, GemmTunerSimple=Tuner, algocore=core)
    algo.ALL_IMPGEMM_PARAMS, algo.ALL_NATIVE_PARAMS = [1, 2], [3]
    names = ("SparseConvTensor", "SparseSequential", "SubMConv3d", "SparseConv3d", "SparseInverseConv3d")
    library = SimpleNamespace(ops=ops, ConvAlgo=ConvAlgo, **{name: getattr(ours, name) for name in names})
    constants = SimpleNamespace(SPCONV_ALLOW_TF32=False)
    modules = {"spconv": library, "spconv.pytorch": library, "spconv.pytorch.ops": ops}
    for name, module in {**modules, "spconv.algo": algo, "spconv.constants": constants}.items():
        monkeypatch.setitem(sys.modules, name, module)
    convolutions._kernels.cache_clear()
    yield SimpleNamespace(library=library, ops=ops, algo=algo, constants=constants)
    convolutions._kernels.cache_clear()


@pytest.fixture
def few(monkeypatch):
    """A cloud of two hundred voxels."""
    points = torch.rand(600, 3, generator=torch.Generator().manual_seed(0)).mul(6).numpy()
    monkeypatch.setitem(convolutions.LOADERS, "few", lambda: points)
    yield convolutions.scene("few", 1.0)
    forget()


def dense(given: convolutions.Scene, values: torch.Tensor) -> torch.Tensor:
    x, y, z = given.indices[:, 1:].long().T
    cells = values.new_zeros(*given.shape, values.shape[1]).index_put((x, y, z), values)
    return cells.movedim(-1, 0)[None]


def test_voxels_are_distinct_and_ascending():
    points = torch.tensor([[0.3, -0.1, 2.0], [-0.2, 0.0, 0.0], [0.4, -0.3, 2.1]]).numpy()
    assert voxels(points, 0.5, "cpu").tolist() == [[-1, 0, 0], [0, -1, 4]]


def test_the_reference_is_a_dense_convolution_with_its_gradients(few):
    torch.manual_seed(0)
    In, upstream = (few.features(3, torch.float64) for _ in range(2))
    Weight = convolutions.weight_for(3, torch.float64)
    leaves = In.clone().requires_grad_(), Weight.clone().requires_grad_()
    cells = torch.nn.functional.conv3d(dense(few, leaves[0]), leaves[1].movedim(-1, 1), padding=1)
    x, y, z = few.indices[:, 1:].long().T
    Out = cells[0, :, x, y, z].T
    dIn, dWeight = torch.autograd.grad(Out, leaves, upstream)
    torch.testing.assert_close(few.outputs(In, Weight), Out[few.rows], **TOLERANCE[torch.float64])
    found = few.gradients(In, Weight, upstream)
    torch.testing.assert_close(found, (dIn[few.rows], dWeight), **TOLERANCE[torch.float64])


def test_the_fastest_algorithm_is_chosen_with_its_own_tuners(spconv, monkeypatch):
    times = {"MaskImplicitGemm": 2.0, "MaskSplitImplicitGemm": 1.0}
    tuned = {}

    def make(library, algorithm) -> Call:
        tuned[algorithm.name] = spconv.ops.CONV_CPP, spconv.ops.GEMM_CPP
        if algorithm is ConvAlgo.Native:
            raise RuntimeError("can't find suitable algorithm")
        return Call(lambda: algorithm.name)

    monkeypatch.setattr(convolutions, "_once_ms", lambda run: times[run()])
    call = convolutions.fastest(make)
    assert call.facts == {"algorithm": "MaskSplitImplicitGemm"}
    assert not call.is_capturable
    assert tuned["MaskSplitImplicitGemm"] == (spconv.ops.CONV_CPP, spconv.ops.GEMM_CPP)
    assert len({id(tuner) for pair in tuned.values() for tuner in pair}) == 6
    assert [tuner.kernels for tuner in tuned["Native"]] == [["conv 1", "conv 2"], ["gemm 3"]]


def test_a_peer_whose_algorithms_all_fail_says_why(spconv):
    def make(library, algorithm) -> Call:
        raise KeyError(torch.bfloat16)

    message = (
        r"^MaskImplicitGemm: KeyError: torch\.bfloat16; MaskSplitImplicitGemm: KeyError: torch\.bfloat16; "
        r"Native: KeyError: torch\.bfloat16$"
    )
    with pytest.raises(RuntimeError, match=message):
        convolutions.fastest(make)


def test_tf32_is_asked_of_both_and_of_no_one_later(spconv):
    seen = []

    def make(library, algorithm) -> Call:
        seen.append((torch.get_float32_matmul_precision(), spconv.constants.SPCONV_ALLOW_TF32))
        return Call(lambda: None)

    for precision in (convolutions.TF32, convolutions.FLOAT32):
        with convolutions.asked(precision):
            convolutions.fastest(make)
    assert seen == [("high", True)] * 3 + [("highest", False)] * 3
    assert torch.get_float32_matmul_precision() == "highest"


def test_tuners_that_can_not_be_renewed_cost_tf32_alone(spconv):
    spconv.algo.ConvTunerSimple = None
    assert convolutions.fastest(lambda library, algorithm: Call(lambda: None)).facts["algorithm"]
    message = "kernels without tf32 can't be forgotten: 'NoneType' object is not callable"
    with convolutions.asked(convolutions.TF32), pytest.raises(RuntimeError, match=message):
        convolutions.fastest(lambda library, algorithm: Call(lambda: None))


@pytest.mark.parametrize("at", [0, 1])
def test_gradients_of_another_scale_are_found(few, at):
    torch.manual_seed(0)
    given = backward.convolution("few", 1.0, 4)
    result, case = given.call("insum_ops").result(), given.case
    assert check(result, case.expected, case.limit) < 1e-5
    wrong = tuple(1000 * own if number == at else own for number, own in enumerate(result))
    with pytest.raises(AssertionError, match=r"^relative error 9\.99e\+02 is above 4e-05$"):
        check(wrong, case.expected, case.limit)


def zeroed(table: torch.Tensor) -> torch.Tensor:
    return table.clamp(max=0)


def backwards(table: torch.Tensor) -> torch.Tensor:
    return table.flip(0)


def with_one_wrong(table: torch.Tensor) -> torch.Tensor:
    wrong = table.clone()
    wrong[0, (wrong[0] > 0).nonzero()[0]] -= 1
    return wrong


@pytest.mark.parametrize("fault", [zeroed, backwards, with_one_wrong])
@pytest.mark.parametrize("provider", ["insum_ops", "spconv"])
def test_a_map_of_wrong_pairs_is_found(spconv, few, monkeypatch, provider, fault):
    given = maps.operands("few", 1.0)
    case, table = given.case(maps.MAP), few.neighbours.int()
    assert check(maps.our_map(given).result(), case.expected, case.limit) == 0
    for found in (table, fault(table)):
        spconv.ops.get_indice_pairs_implicit_gemm = lambda *sizes, found=found, **options: (None, None, found)
        made = SimpleNamespace(neighbours=found.T)
        monkeypatch.setattr(maps, "kernel_map", lambda *sizes, made=made, **options: made)
        result = maps.provide(provider, maps.MAP, given).result()
        if found is table:
            assert check(result, case.expected, case.limit) == 0
        else:
            with pytest.raises(AssertionError, match=r"^relative error .* is above 0e\+00$"):
                check(result, case.expected, case.limit)


@pytest.mark.parametrize("what", [maps.NEW, maps.REUSED])
def test_spconv_is_called_as_ours_is(spconv, few, what):
    torch.manual_seed(0)
    given = maps.operands("few", 1.0)
    call = maps.provide("spconv", what, given)
    torch.testing.assert_close(call.result().double(), given.expected, **TOLERANCE[torch.float32])


@pytest.fixture
def step(few, monkeypatch) -> unets.Step:
    monkeypatch.setattr(unets, "SIZE", 1.0)
    torch.manual_seed(0)
    return unets.step("few")


UNETS = pytest.mark.parametrize("what", [unets.REUSED, unets.ANEW, unets.OTHER])


@UNETS
@pytest.mark.parametrize("provider", ["insum_ops", "spconv", convolutions.PLAIN])
def test_every_unet_has_the_same_scores_and_gradients(spconv, step, provider, what):
    case, call = step.case(what), unets.provide(provider, what, step)
    for _ in range(2):
        assert check(call.result(), case.expected, case.limit) < 1e-5
        call.run()


@UNETS
def test_a_gradient_of_a_unet_that_is_no_number_is_found(step, what, monkeypatch):
    case, call, exact = step.case(what), unets.provide("insum_ops", what, step), torch.autograd.grad

    def spoiled(*given):
        *right, last = exact(*given)
        return *right, last * float("nan")

    monkeypatch.setattr(torch.autograd, "grad", spoiled)
    with pytest.raises(AssertionError, match=r"^relative error nan is above"):
        check(call.result(), case.expected, case.limit)


@pytest.mark.parametrize("layer", ["stem", "levels.down.0", "levels.below.before.0.0", "levels.up.0"])
def test_a_layer_of_a_unet_that_gives_zeros_is_found(step, layer, monkeypatch):
    case, exact = step.case(unets.ANEW), unets.Step.model

    def wrong(self, *given):
        model = exact(self, *given)
        model.get_submodule(layer).weight.detach().zero_()
        return model

    monkeypatch.setattr(unets.Step, "model", wrong)
    with pytest.raises(AssertionError, match=r"^relative error .* is above"):
        check(unets.provide("insum_ops", unets.ANEW, step).result(), case.expected, case.limit)


def test_other_sizes_are_checked_by_the_step_that_is_timed(step, monkeypatch):
    """A fault of smaller clouds alone: the whole one is right."""
    case, exact = step.case(unets.OTHER), unets.Step.tensor

    def wrong(self, library, left_out=0.0, dtype=torch.float32):
        x = exact(self, library, left_out, dtype)
        return x.replace_feature(2 * x.features) if left_out else x

    monkeypatch.setattr(unets.Step, "tensor", wrong)
    with pytest.raises(AssertionError, match=r"^relative error .* is above"):
        check(unets.provide("insum_ops", unets.OTHER, step).result(), case.expected, case.limit)


def test_other_sizes_leave_out_a_share_of_small_clouds_too(step, monkeypatch):
    sizes, exact = [], unets.Step.tensor

    def seen(self, *given):
        x = exact(self, *given)
        sizes.append(len(x.features))
        return x

    monkeypatch.setattr(unets.Step, "tensor", seen)
    call, all_voxels = unets.provide("insum_ops", unets.OTHER, step), len(step.features)
    for _ in range(8):
        call.run()
    assert max(sizes) == all_voxels < 2000
    assert sorted(set(unets.LEFT_OUT)) == [number / 500 for number in range(50)]
    assert sizes == [all_voxels - int(share * all_voxels) for share in unets.LEFT_OUT[: len(sizes)]]
    assert all(first != second for first, second in pairwise(sizes))


def test_spconv_says_which_maps_it_reuses(spconv, step):
    facts = {what: unets.provide("spconv", what, step).facts for what in (unets.REUSED, unets.ANEW)}
    assert facts[unets.REUSED]["maps"] == "the first level's reused, the others made anew: spconv keeps no more"
    assert "maps" not in facts[unets.ANEW]


def test_gradients_of_the_plain_unet_are_ours(few, step):
    gradients = []
    for library in (ours, unets.plain_convolutions):
        model = step.model(library, torch.float64)
        x = library.SparseConvTensor(step.features.double(), few.indices, step.shape, 1)
        gradients.append(torch.autograd.grad(step.losses(model(x)), unets.parameters(model)))
    torch.testing.assert_close(*gradients, **TOLERANCE[torch.float64])


def test_a_small_cloud_is_never_left_without_voxels(few, monkeypatch):
    monkeypatch.setattr(unets, "SIZE", 1.0)
    forget()
    given = unets.step("few")
    left = [len(given.tensor(ours, share).features) for share in unets.LEFT_OUT]
    assert min(left) >= len(given.features) // 2
    assert len(set(left)) > 2
