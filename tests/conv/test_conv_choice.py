"""The fastest form of a convolution, over a map that lasts: what is timed, when, and that whatever wins is right."""

from __future__ import annotations

import json

import pytest
import torch
from pretended_clock import pretended_clock
from short_clouds import call_over, check_step, cloud, expected_of, map_of, strided, submanifold
from statements import DEVICE
from tolerances import assert_matches

from insum_ops import nn
from insum_ops.conv import choice as conv_choice
from insum_ops.conv import forms as conv_forms
from insum_ops.conv.forms import GROUPED, STATIONARY, TILED
from insum_ops.formats import KernelMap


@pytest.fixture
def contests(monkeypatch):
    """A map lasts from its second use on, and all forms take part, whatever runs them."""
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 2)
    monkeypatch.setattr(conv_choice, "_is_cpu", lambda device: False)
    with pretended_clock(conv_choice) as made:
        made.mode = "full"
        yield made


def large():
    """A cloud with tiles and groups of each size, of which all but one are full."""
    return cloud(voxels=2100, length=1200)


def steps(layer, x, count=4):
    """Train, with values and gradients that are right; return the map."""
    for _ in range(count):
        y = check_step(layer, x)
    return map_of(y)


def calls(layer, x, count=3):
    with torch.no_grad():
        for _ in range(count):
            layer(x)


FEW = {"table", "groups of 128", "groups of 64", "groups of 256"}
WAYS = sorted(FEW | {"tiles of 128", "tiles of 64", "tiles of 256"})
LAYERS = {
    "submanifold": (submanifold, {}),
    "groups": (submanifold, dict(groups=2)),
    "depthwise": (submanifold, dict(groups=4)),
    "strided": (strided, {}),
}


@pytest.mark.parametrize(
    ("layer", "winner"),
    [(layer, winner) for layer in LAYERS for winner in (WAYS if layer == "submanifold" else WAYS[2::3])],
)
def test_a_map_that_lasts_takes_what_won(contests, layer, winner):
    make, options = LAYERS[layer]
    contests.winner = winner
    layer = make(**options)
    found = steps(layer, large())
    form = {"tab": STATIONARY, "til": TILED, "gro": GROUPED}[winner[:3]]
    assert call_over(layer, found).statement in form
    for way in {*WAYS} - {"table", "groups of 128"}:  # which gradients of weights may have summed
        kind, _, size = way.partition(" of ")
        assert found.has_parts(kind, int(size)) is (way == winner)


def test_weight_gradients_sum_the_groups_that_won(contests, monkeypatch):
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 6)  # after gradients that sum others
    contests.winner = "groups of 2048"
    layer, x = submanifold(), large()
    for count, size in ((1, 512), (7, 2048)):
        assert steps(layer, x, count).has_parts("groups", size)
    assert len(contests) == 3


def test_layers_of_two_dtypes_take_turns(contests):
    layer, single, x = submanifold(), submanifold().float(), cloud()
    reference = submanifold()
    reference.load_state_dict(single.state_dict())
    with torch.no_grad():
        for _ in range(6):
            assert_matches(layer(x).features, expected_of(layer, x, x))
            rounded = x.replace_feature(x.features.float())
            expected = expected_of(reference, rounded.replace_feature(rounded.features.double()), x)
            assert_matches(single(rounded).features, expected)
    assert len(contests) == 2


def test_each_layer_shape_is_timed_once(contests):
    """Its values, its features' gradient and its weight's; two layers have one shape."""
    x, layers = cloud(), [submanifold(), submanifold(), submanifold(out=6)]
    for _ in range(5):
        for layer in layers:
            check_step(layer, x)
    assert len({key for key, _ in contests}) == len(contests) == 6


def test_clouds_of_about_as_many_voxels_and_pairs_share_a_choice(contests):
    for length in (20, 21, 22, 30):  # 40 to 60 voxels; 116 to 128 pairs, then 176
        calls(submanifold(), cloud(voxels=2 * length, length=length))
    first, *same, other = (key for key, _ in contests)
    assert same == [first] * 2
    assert other != first


@pytest.mark.parametrize(
    ("mode", "kernel", "is_cpu", "ways"),
    [
        ("full", 3, False, {*WAYS}),
        ("default", 3, False, FEW | {"tiles of 128"}),
        ("full", 5, False, FEW),
        ("default", 3, True, {"table", "groups of 128"}),
    ],
)
def test_what_is_timed(contests, monkeypatch, mode, kernel, is_cpu, ways):
    """The form of the rules comes first, for it may be enough; a large kernel has no tiles."""
    monkeypatch.setattr(conv_choice, "_is_cpu", lambda device: is_cpu)
    contests.mode = mode
    layer, x = nn.SubMConv3d(2, 2, kernel).double().to(DEVICE), cloud(2)
    calls(layer, nn.SparseConvTensor(x.features, torch.nn.functional.pad(x.indices, (0, 2)), [12, 1, 1], 2))
    ((_, names),) = contests
    assert names[0] == "groups of 128"
    assert {*names} == ways
    assert (contests.enough > 0) == (mode == "default" and not is_cpu)


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["submanifold", "depthwise"])
def test_forms_are_timed_on_a_cpu(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 2)
    monkeypatch.setenv("INSUM_TUNE", "default")
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    make, options = LAYERS[kind]
    steps(make(**options), cloud())
    stored = [json.loads(path.read_text()) for path in (tmp_path / "tuning").glob("*.json")]
    forms = [
        entry["times"] for entry in stored if "NBR" in entry["key"]["statement"] and ";" in entry["key"]["statement"]
    ]
    assert forms
    assert all({way["way"] for way, _ in times} == {"table", "groups of 128"} for times in forms)


@pytest.mark.parametrize("why", ["new", "captured", "off", "deterministic", "watched", "empty"])
def test_nothing_is_timed_where_it_must_not_be(contests, monkeypatch, why):
    layer, x = submanifold(), cloud(voxels=0 if why == "empty" else 18)
    if why == "captured":
        monkeypatch.setattr(KernelMap, "is_captured", True)
    elif why == "off":
        contests.mode = "off"
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        for _ in range(2 if why == "new" else 5):
            with torch.no_grad():
                if why == "watched":
                    torch.func.vmap(lambda features: layer(x.replace_feature(features)).features)(x.features[None])
                else:
                    layer(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not contests


def test_a_choice_made_in_inference_mode_serves_training(contests):
    contests.winner = "groups of 64"
    layer, x = submanifold(), large()
    with torch.inference_mode():
        for _ in range(4):
            layer(x)
    found = steps(layer, x, 1)
    assert call_over(layer, found).operands["MAPX"].shape[1] == 64


@pytest.mark.parametrize("winner", ["tiles of 64", "groups of 256", "table"])
def test_a_compiled_call_takes_what_won(contests, winner):
    torch._dynamo.reset()
    contests.winner = winner
    layer, x = submanifold(), cloud()
    found = steps(layer, x)
    assert len(contests) == 3
    statement = call_over(layer, found).statement
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_matches(compiled(x).features, expected_of(layer, x, x))
    check_step(compiled, x)
    assert call_over(layer, found).statement == statement
    assert len(contests) == 3
