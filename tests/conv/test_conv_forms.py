"""Which statement a convolution is: by its map, channels and precision, and tiles only for maps that are used often."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from reduced_precision import reduced_precision
from short_clouds import call_over, check_step, cloud, expected_of, map_of, strided, submanifold
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches
from torch._dynamo.testing import CompileCounterWithBackend

from insum_ops import sparse_conv3d
from insum_ops.compiler.planning.device import H200, described_as
from insum_ops.conv import forms as conv_forms
from insum_ops.conv.cost import MEASURED
from insum_ops.conv.forms import GROUPED, PAYS_AFTER, STATIONARY, TILED, awaited, form_of
from insum_ops.formats import KernelMap, kernel_map

GPU, CPU = torch.device("cuda"), torch.device("cpu")
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
CHANNELS = 64
# whose host takes no time, so that the few voxels of tests are worth what is made of them, as many are
QUICK = replace(H200, name="without a host", host_call=0.0, host_launch=0.0)
by_host = pytest.mark.skipif(IS_INTERPRETED, reason="the same with and without kernels, which are slow here")


def cube(apart=1, kernel_size=3):
    """A map of 64 voxels whose pairs nobody has counted: they were found right before."""
    indices = torch.cartesian_prod(torch.arange(1), *[torch.arange(4)] * 3).int() * torch.tensor([1, apart, 1, 1]).int()
    for _ in range(2):
        found = kernel_map(indices, [40, 4, 4], 1, kernel_size)
    assert not found.is_counted
    return found


def line(**options):
    return kernel_map(torch.tensor([[0, 4], [0, 5], [0, 0]]), [6], 1, **options)


def use(found, times=PAYS_AFTER):
    for _ in range(times):
        found.count_use()
    return found


@pytest.fixture
def _precision():
    """May be set in a test."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def _rounds():
    """Groups are a choice."""
    with reduced_precision(True):
        yield


@pytest.fixture
def _deterministic():
    """May be set in a test."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    """The rules are asked for a form, and not the clock, for a GPU that need not be there."""
    monkeypatch.setenv("INSUM_TUNE", "off")
    with described_as(H200):
        yield


@pytest.fixture
def _quick():
    with described_as(QUICK):
        yield


def capture(monkeypatch):
    monkeypatch.setattr(KernelMap, "is_captured", True)


def made_of(found):
    """What of a map was counted or sorted."""
    sizes = conv_forms.GROUP_SIZE, conv_forms.TILE_SIZE
    return found.is_counted, *map(found.has_parts, ("groups", "tiles"), sizes)


def is_bare(found):
    return not any(made_of(found))


@pytest.mark.usefixtures("_precision")
@by_host
def test_which_form_a_convolution_takes_over_a_map_that_is_used_often():
    full, few, large = use(cube()), use(cube(apart=9)), use(cube(kernel_size=5))
    assert form_of(few, 64, HALF, GPU) is TILED  # where sums must not be rounded on the way, as in these tests
    with reduced_precision(True):
        assert form_of(full, 64, HALF, GPU) is form_of(full, 256, HALF, GPU) is TILED
        assert form_of(few, 64, HALF, GPU) is form_of(few, 256, HALF, GPU) is TILED
        assert form_of(large, 64, HALF, GPU) is form_of(large, 256, HALF, GPU) is STATIONARY
        with described_as(QUICK):
            assert form_of(large, 256, HALF, GPU) is GROUPED
        assert form_of(full, 64, DOUBLE, GPU) is form_of(full, 64, SINGLE, GPU) is GROUPED
        assert form_of(full, 64, HALF, CPU) is GROUPED
        torch.set_float32_matmul_precision("high")
        assert form_of(few, 64, SINGLE, GPU) is TILED


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("channels", [64, 256])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE])
def test_a_table_stands_in_until_tiles_pay(channels, dtype):
    torch.set_float32_matmul_precision("high")
    found = cube()
    for _ in range(PAYS_AFTER):
        form = form_of(found, channels, dtype, GPU)
        assert form is STATIONARY
        assert awaited(form, found) == "tiles"
        assert not conv_forms.is_due("tiles", found)
        found.count_use()
    assert conv_forms.is_due("tiles", found)
    form = form_of(found, channels, dtype, GPU)
    assert form is TILED
    assert not awaited(form, found)


def test_tiles_that_are_there_are_taken_at_once():
    found = cube()
    found.tiled(conv_forms.TILE_SIZE)
    assert form_of(found, 64, HALF, GPU) is TILED
    assert form_of(found.inverse, 64, HALF, GPU) is TILED  # the same rows through the opposite taps
    strided = line(kernel_size=2, stride=2, kind="strided")
    strided.tiled(conv_forms.TILE_SIZE)
    assert form_of(strided, 64, HALF, GPU) is TILED
    assert form_of(strided.inverse, 64, HALF, GPU) is STATIONARY
    other = cube()
    other.tiled(conv_forms.TILE_SIZE // 2)
    assert form_of(other, 64, HALF, GPU) is STATIONARY


def numbers_of(voxels, pairs, volume=27):
    """A new map whose pairs have been counted, as far as the choice of a form looks at it."""
    sizes = dict(num_inputs=voxels, num_outputs=voxels, volume=volume, num_pairs=pairs)
    return SimpleNamespace(**sizes, is_counted=True, is_captured=False, memory={})


@pytest.mark.usefixtures("_rounds")
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.voxels} voxels, {row.channels} channels")
def test_a_new_map_is_grouped_where_a_call_was_measured_to_take_less_with_all_that_it_makes(row):
    making = 0.07
    expected = row.groups + making < row.table
    assert conv_forms.groups_pay(numbers_of(row.voxels, row.pairs), row.channels, HALF, GPU) is expected
    made = numbers_of(row.voxels, row.pairs)
    made.memory[conv_forms.GROUP_SIZE] = {}
    assert conv_forms.groups_pay(made, row.channels, HALF, GPU) is (row.groups < row.table)


@pytest.mark.usefixtures("_rounds")
def test_fewer_voxels_and_slower_hosts_make_no_groups():
    def pays(voxels, device=H200):
        with described_as(device):
            return conv_forms.groups_pay(numbers_of(voxels, 5 * voxels), 256, HALF, GPU)

    assert pays(80_000)
    assert not pays(8000)
    assert pays(8000, QUICK)
    assert not pays(80_000, replace(H200, host_launch=3 * H200.host_launch))


def test_sums_in_a_wider_type_cost_groups_more():
    room = numbers_of(80_000, 540_000)
    assert not conv_forms.groups_pay(room, 256, HALF, GPU)
    with reduced_precision(True):
        assert conv_forms.groups_pay(room, 256, HALF, GPU)


@pytest.mark.usefixtures("_rounds")
def test_a_map_too_small_to_gain_waits_for_no_count():
    few = cube(apart=9)
    assert form_of(few, 256, HALF, GPU) is STATIONARY
    assert awaited(STATIONARY, few) == "tiles"
    assert is_bare(few)
    few.memory[conv_forms.GROUP_SIZE] = {}  # some other layer's
    assert form_of(few, CHANNELS, HALF, GPU) is GROUPED
    assert few.is_counted


@pytest.mark.usefixtures("_rounds", "_quick")
def test_groups_that_are_there_are_taken_at_once_and_none_are_made_during_a_capture(monkeypatch):
    known, often = cube(apart=9), use(cube(apart=9))
    assert known.num_pairs == often.num_pairs  # counted
    known.memory[conv_forms.GROUP_SIZE] = {}
    capture(monkeypatch)
    assert form_of(known, CHANNELS, HALF, GPU) is GROUPED
    assert form_of(often, CHANNELS, HALF, GPU) is STATIONARY


@pytest.mark.usefixtures("_rounds", "_quick")
def test_what_groups_may_gain_is_counted_at_once():
    few, full = cube(apart=9), cube()
    assert form_of(few, CHANNELS, HALF, GPU) is GROUPED
    assert form_of(full, CHANNELS, HALF, GPU) is STATIONARY
    assert few.is_counted
    assert full.is_counted


@by_host
def test_multiply_adds_and_large_kernels_have_nothing_to_wait_for():
    full, large = cube(), cube(kernel_size=5)
    for times in (0, PAYS_AFTER):
        use(full, times)
        use(large, times)
        assert form_of(full, 64, DOUBLE, GPU) is form_of(full, 64, SINGLE, GPU) is GROUPED
        assert form_of(large, 64, HALF, GPU) is STATIONARY
        assert not awaited(STATIONARY, large)


@pytest.mark.usefixtures("_rounds", "_quick")
def test_during_a_capture_what_is_there_is_taken(monkeypatch):
    often, tiled, strided = use(cube()), cube(), use(line(kernel_size=2, stride=2, kind="strided"))
    tiled.tiled(conv_forms.TILE_SIZE)
    capture(monkeypatch)
    for channels in (CHANNELS, 256):
        assert form_of(often, channels, HALF, GPU) is form_of(often.inverse, channels, HALF, GPU) is STATIONARY
        assert form_of(strided, channels, HALF, GPU) is STATIONARY
        assert form_of(tiled, channels, HALF, GPU) is TILED
        assert form_of(tiled.inverse, channels, HALF, GPU) is STATIONARY  # its taps would have to be turned round
    assert is_bare(often)
    assert is_bare(strided)


@pytest.mark.usefixtures("_rounds", "_quick")
def test_what_was_never_counted_is_not_grouped_during_a_capture(monkeypatch):
    indices = torch.tensor([[0, 0], [0, 3], [0, 4]])
    for _ in range(2):
        scattered = kernel_map(indices, [8], 1, kernel_size=7, stride=7, padding=3, kind="strided")
    assert not scattered.is_counted
    capture(monkeypatch)
    assert form_of(scattered, CHANNELS, HALF, GPU) is STATIONARY
    assert is_bare(scattered)


@pytest.mark.usefixtures("_deterministic")
@by_host
def test_a_deterministic_form_is_the_same_from_the_first_use_on():
    full, large = cube(), cube(kernel_size=5)
    torch.use_deterministic_algorithms(True)
    for times in (0, PAYS_AFTER):
        use(full, times)
        assert form_of(full, 64, HALF, GPU) is form_of(full, 64, DOUBLE, GPU) is TILED
        assert form_of(large, 64, HALF, GPU) is form_of(full, 64, HALF, CPU) is STATIONARY
        assert not awaited(STATIONARY, full)


def test_the_directions_of_a_submanifold_count_as_one_and_others_for_themselves():
    submanifold, strided = line(kernel_size=3), line(kernel_size=2, stride=2, kind="strided")
    for found in (submanifold, strided):
        use(found, 3)
        use(found.inverse, 2)
    assert submanifold.uses == submanifold.inverse.uses == 5
    assert (strided.uses, strided.inverse.uses, strided.inverse.inverse.uses) == (3, 2, 3)


def test_copies_of_a_map_count_on_and_a_moved_one_counts_anew():
    found = use(line(kernel_size=3), 3)
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert use(twin, 2).uses == 5
    moved = found.to("cpu")
    assert moved.uses == 0  # and has its tiles to make
    assert (use(moved, 1).uses, found.uses) == (1, 3)


# through the moment at which tiles pay, on the route of this device


@pytest.fixture
def often(monkeypatch):
    """Convolutions take the forms of half precision on a GPU, and tiles pay after two of them."""
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 2)
    monkeypatch.setattr(conv_forms, "form_of", lambda found, channels, *_: form_of(found, channels, HALF, GPU))


def taken(layer, found, is_swapped=False):
    """The form that the map remembers for a layer."""
    statement = call_over(layer, found, is_swapped).statement
    return next(form for form in (STATIONARY, GROUPED, TILED) if statement in form)


@pytest.mark.every_route
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(submanifold, {}, id="submanifold", marks=by_host),
        pytest.param(submanifold, dict(groups=2), id="groups", marks=by_host),
        pytest.param(submanifold, dict(groups=4), id="depthwise", marks=by_host),
        pytest.param(strided, {}, id="strided"),
    ],
)
def test_values_and_gradients_are_right_before_and_after(make, options):
    layer, x, forms = make(**options), cloud(), []
    for _ in range(3):
        y = check_step(layer, x)
        forms.append((taken(layer, map_of(y)), taken(layer, map_of(y).inverse, is_swapped=True)))
    calls = 1 if make is submanifold else 2  # until tiles pay: both directions share them or each has its own
    assert forms == [(STATIONARY, STATIONARY)] * calls + [(TILED, TILED)] * (3 - calls)


@pytest.mark.usefixtures("often", "_rounds")
@by_host
def test_layers_of_many_channels_over_a_sparse_map_group_it_and_others_take_that(monkeypatch):
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 9)
    x, forms = cloud(), []
    # products take all the time, one second each; groups take as long as 800 of them, some ten pairs less 400 or 1500
    slow = replace(H200, multiprocessors=1, tensor_flops=1.25, bandwidth=1e30, host_call=8e5, host_launch=0.0)
    with torch.no_grad(), described_as(slow):
        for layer in (submanifold(), submanifold(8, 8), submanifold(2, 2)):
            of_layer = x.replace_feature(x.features.repeat(1, 2)[:, : layer.in_channels])
            y = layer(of_layer)
            assert_matches(y.features, expected_of(layer, of_layer, y))
            forms.append(taken(layer, map_of(y)))
    assert forms == [STATIONARY, GROUPED, GROUPED]


@pytest.mark.usefixtures("often")
@by_host
def test_layers_that_share_a_map_count_together():
    layers, x = [submanifold() for _ in range(3)], cloud()
    with torch.no_grad():
        for layer, form in zip(layers, (STATIONARY, STATIONARY, TILED)):
            y = layer(x)
            assert taken(layer, map_of(x)) is form
        assert map_of(x).uses == 2
        y = layers[0](x)
        assert_matches(y.features, expected_of(layers[0], x, y))
    assert taken(layers[0], map_of(x)) is TILED
    assert taken(layers[1], map_of(x)) is TILED  # weights of one shape share what a map prepared


@pytest.mark.usefixtures("often")
def test_a_map_counts_the_function_and_every_mode():
    x, layer = cloud(), submanifold()
    found, _ = layer.map(x)
    with torch.inference_mode():
        sparse_conv3d(x.features, layer.weight, found, layer.bias)
    assert found.uses == 1
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    torch.func.functional_call(layer, parameters, (x,))
    assert found.uses == 2
    assert not found.has_tiles()
    with torch.inference_mode():
        layer(x)
    assert found.has_tiles()
    check_step(layer, x)  # what was made in inference mode trains


@pytest.mark.usefixtures("often")
def test_a_call_that_is_captured_goes_on_over_the_table(monkeypatch):
    layer, x = submanifold(), cloud()
    with torch.no_grad():
        for _ in range(2):
            layer(x)
        before = made_of(map_of(x))
        with monkeypatch.context() as patch:
            capture(patch)
            y = layer(x)
            assert taken(layer, map_of(x)) is STATIONARY
            assert made_of(map_of(x)) == before
        assert_matches(y.features, expected_of(layer, x, y))
        layer(x)
    assert taken(layer, map_of(x)) is TILED


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("make", [submanifold, strided])
def test_deterministic_calls_are_bitwise_equal_and_count_nothing(make):
    layer, x = make(), cloud()
    leaves = [x.features, *layer.parameters()]
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2 if IS_INTERPRETED else 20):
            y = layer(x)
            results.append([y.features, *torch.autograd.grad(y.features.square().sum(), leaves)])
            assert taken(layer, map_of(y)) is taken(layer, map_of(y).inverse, is_swapped=True) is TILED
    finally:
        torch.use_deterministic_algorithms(False)
    for again in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(again, results[0], strict=True))
    assert map_of(y).uses == map_of(y).inverse.uses == 0


@pytest.mark.usefixtures("often")
@by_host
def test_copies_of_a_layer_and_its_map_serve_on():
    layer, x = submanifold(), cloud()
    with torch.no_grad():
        expected = layer(x).features
        twin, found = copy.deepcopy(layer), copy.deepcopy(map_of(x))
        for _ in range(3):
            assert_matches(sparse_conv3d(x.features, twin.weight, found, twin.bias), expected)
            assert_matches(twin(x).features, expected)
    assert found.has_tiles()
    assert taken(twin, map_of(x)) is TILED


@pytest.mark.usefixtures("often")
@by_host
def test_compiled_calls_come_to_tiles_as_others_do_and_are_traced_once():
    torch._dynamo.reset()
    layer, x = submanifold(), cloud()
    layer.map(x)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for form in (STATIONARY, TILED, TILED):
        check_step(compiled, x)
        assert taken(layer, map_of(x)) is form
    assert counter.frame_count == 1


@by_host
def test_a_tracer_may_be_the_first_to_use_a_map():
    torch._dynamo.reset()
    layer, x = submanifold(), cloud()
    layer.map(x)

    @torch.no_grad()
    def call(features):
        return layer(x.replace_feature(features)).features

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for run in (compiled, call, compiled):
        assert_matches(run(x.features), expected_of(layer, x, x))


@by_host
def test_layers_under_autocast_share_a_map():
    """Their weights are cast anew at every call, and are other tensors each time."""
    layers, x = [submanifold().float(), submanifold().float()], cloud()
    x = x.replace_feature(x.features.detach().float())
    half = x.replace_feature(x.features.bfloat16())
    for _ in range(4):
        for layer in layers:
            with torch.autocast(DEVICE, torch.bfloat16):
                y = layer(x)
            assert y.features.dtype == torch.bfloat16
            assert_matches(y.features, expected_of(copy.deepcopy(layer).bfloat16().double(), as_double(half), x))
            y.features.float().sum().backward()


def as_double(x):
    return x.replace_feature(x.features.double())
