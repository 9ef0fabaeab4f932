"""The fastest form of a convolution, over a map that lasts: what is timed, when, and what is remembered of it."""

from __future__ import annotations

import json

import pytest
import torch
from short_clouds import cloud, expected_of, map_of, strided, submanifold
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches

from insum_ops import nn
from insum_ops.compiler.tuning import autotune
from insum_ops.compiler.tuning.tuning_cache import Key
from insum_ops.conv import choice as conv_choice
from insum_ops.conv import forms as conv_forms
from insum_ops.conv import functional as sparse_conv
from insum_ops.conv.forms import GROUPED, STATIONARY, TILED
from insum_ops.formats import KernelMap
from insum_ops.formats.voxels import kernel_map as kernel_map_module

DOUBLE = torch.float64
by_host = pytest.mark.skipif(IS_INTERPRETED, reason="the same with and without kernels, which are slow here")

# `fastest`, of calls that return how long they take


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Nothing is remembered yet, and a call takes as many milliseconds as it returns."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_time", lambda call, hopeless: call())
    return tmp_path


def key_of(statement="a"):
    return Key(statement, "", (), (), "", "cpu", "", "", False)


def contest(times, first, others=None, hosts=None, statement="a", more=(), enough=0.0):
    """The winner and the names that were started, in their order."""
    started = []

    def start(name):
        started.append(name)
        return lambda: times[name], (hosts or {}).get(name, 0.0)

    others = others or {}
    ways = {*first, *more, *[name for added in others.values() for name in added]}
    vary = lambda best, _: others.get(best, ())
    return autotune.fastest(key_of(statement), ways, list(first), start, enough=enough, others=vary), started


@pytest.mark.usefixtures("folder")
def test_the_one_that_takes_the_least_wins():
    assert contest({"a": 3.0, "b": 1.0, "c": 2.0}, "abc") == ("b", ["a", "b", "c"])


@pytest.mark.usefixtures("folder")
def test_what_is_fast_enough_ends_the_search_and_is_remembered():
    assert contest({"a": 3.0, "b": 1.5, "c": 1.0}, "abc", {"b": ["x"]}, enough=2.0) == ("b", ["a", "b"])
    assert contest({"a": 3.0, "b": 1.5, "c": 1.0}, "abc", {"b": ["x"]}) == ("b", [])
    assert contest({"a": 3.0, "b": 2.5, "x": 1.0}, "ab", {"b": ["x"]}, statement="b", enough=2.0)[0] == "x"


@pytest.mark.usefixtures("folder")
def test_of_those_that_are_fast_enough_the_one_that_asks_least_of_the_host_wins():
    times, hosts = {"a": 1.0, "b": 1.9, "c": 1.5}, {"a": 2.5, "b": 2.0, "c": 2.0}
    assert contest(times, "abc", hosts=hosts, enough=2.0) == ("b", ["a", "b"])
    assert contest(times, "abc", hosts={**hosts, "b": 2.1}, statement="b", enough=2.0) == ("c", ["a", "b", "c"])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("is_waited_for", "winner"), [(False, "tables"), (True, "kernel")])
def test_calls_that_wait_are_ranked_by_the_time_until_their_result(monkeypatch, is_waited_for, winner):
    """By a clock that the host and the device move on, the device not before it is waited for."""
    milliseconds, queued = [0.0], [0.0]
    host, device = {"tables": 0.4, "kernel": 0.1, "slow": 9.0}, {"tables": 0.1, "kernel": 0.3, "slow": 9.0}
    counts = dict.fromkeys(host, 0)

    def call(name):
        counts[name] += 1
        milliseconds[0] += host[name]
        queued[0] += device[name]
        return device[name]

    def synchronize():
        milliseconds[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(autotune, "perf_counter", lambda: 1e-3 * milliseconds[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    start = lambda name: (lambda: call(name), 0.0)
    times = {}
    ways = ["tables", "kernel", "slow"]
    assert autotune.fastest(key_of(), ways, ways, start, times, is_waited_for=is_waited_for) == winner
    if is_waited_for:
        assert times == pytest.approx({"tables": 0.5, "kernel": 0.4, "slow": 18.0})
        assert counts["slow"] == 2  # built, and timed once
        assert counts["kernel"] > 10


@pytest.mark.usefixtures("folder")
def test_others_are_timed_only_after_the_one_that_they_vary():
    others = {"a": ["x"], "b": ["y", "z"]}
    times = {"a": 3.0, "b": 2.0, "x": 0.0, "y": 1.0, "z": 1.5}
    assert contest(times, "ab", others) == ("y", ["a", "b", "y", "z"])
    assert contest({**times, "y": 2.5, "z": 2.5}, "ab", others, statement="b") == ("b", ["a", "b", "y", "z"])


@pytest.mark.usefixtures("folder")
def test_the_host_decides_between_those_that_the_device_finds_equally_good_alone():
    hosts = {"a": 5.0, "b": 9.0, "c": 1.0}
    assert contest({"a": 3.0, "b": 1.0, "c": 2.0}, "abc", hosts=hosts)[0] == "b"
    assert contest({"a": 1.01, "b": 1.0, "c": 1.02}, "abc", hosts=hosts, statement="b")[0] == "c"


def test_a_winner_is_remembered_with_the_times_of_all(folder):
    assert contest({"a": 3.0, "b": 1.0}, "ab")[0] == "b"
    assert contest({}, "ab") == ("b", [])
    (file,) = (folder / "tuning").glob("*.json")
    stored = json.loads(file.read_text())
    assert (stored["config"], stored["times"]) == ({"way": "b"}, [[{"way": "b"}, 1.0], [{"way": "a"}, 3.0]])
    autotune._cache.cache_clear()  # another process
    assert contest({}, "ab") == ("b", [])
    assert contest({}, "a", {"a": ["b"]}) == ("b", [])


@pytest.mark.usefixtures("folder")
def test_a_name_that_there_is_no_more_is_timed_anew():
    assert contest({"a": 3.0, "b": 1.0}, "ab")[0] == "b"
    assert contest({"a": 3.0, "c": 4.0}, "ac") == ("a", ["a", "c"])


@pytest.mark.usefixtures("folder")
def test_what_a_full_search_found_is_good_for_those_who_search_less():
    assert contest({"a": 3.0, "x": 1.0}, "a", {"a": ["x"]})[0] == "x"
    assert contest({}, "a", more="x") == ("x", [])
    assert contest({"a": 3.0}, "a") == ("a", ["a"])


def test_without_memory_for_all_the_rest_decide_for_now(folder):
    def start(name):
        def call():
            if name in missing[0]:
                raise torch.OutOfMemoryError
            return times[name]

        return call, 0.0

    times = {"a": 3.0, "b": 1.0, "c": 2.0, "x": 0.0}
    vary = lambda best, _: ["x"] if best == "c" else []
    missing = [""]
    for missing[0], winner in (("b", "c"), ("abc", "a")):
        assert autotune.fastest(key_of(), [*"abcx"], ["a", "b", "c"], start, others=vary) == winner
        assert not [*(folder / "tuning").glob("*.json")]
    missing[0] = ""
    assert autotune.fastest(key_of(), [*"abcx"], ["a", "b", "c"], start, others=vary) == "b"


def test_what_runs_but_can_not_be_timed_for_lack_of_memory_is_left_out(folder, monkeypatch):
    def timed(call, hopeless):
        if call() == 1.0:  # a graph can't have what others have freed
            raise torch.OutOfMemoryError
        return call()

    monkeypatch.setattr(autotune, "_time", timed)
    assert contest({"a": 3.0, "b": 1.0, "c": 2.0}, "abc", {"c": ["x"]}) == ("c", ["a", "b", "c"])
    assert not [*(folder / "tuning").glob("*.json")]


# the choice of a form, on the route of this device


class Contests(list):
    """A stand-in for `fastest`: which ways were asked for; every one of them runs, and `winner` wins."""

    winner = "table"

    def __call__(self, key, ways, first, start, enough, is_waited_for, others):
        self.is_waited_for = is_waited_for
        names = [*first, *[name for way in first for name in others(way, {})]]
        assert {*names} <= {*ways}
        self.append((key, names))
        self.enough = enough
        self.results = [start(name)[0]() for name in names]
        assert_matches(torch.stack(self.results), torch.stack(self.results[:1] * len(names)).double())
        return self.winner if self.winner in names else names[-1]


@pytest.fixture
def contests(monkeypatch):
    """A map lasts from its second use on, and is small: tiles and groups of 4, 8 and 16."""
    made = Contests()
    monkeypatch.setattr(conv_choice, "fastest", made)
    monkeypatch.setattr(conv_choice, "_is_cpu", lambda device: False)  # all forms, whatever runs them
    monkeypatch.setattr(conv_choice, "may_choose", lambda features: not torch.are_deterministic_algorithms_enabled())
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 2)
    monkeypatch.setattr(conv_choice, "TILE_SIZE", 8)
    monkeypatch.setattr(conv_choice, "GROUP_SIZE", 8)
    monkeypatch.setattr(conv_choice, "FULL_SIZES", {TILED: (4, 16), GROUPED: (4, 16)})
    monkeypatch.setattr(conv_choice, "OTHER_SIZES", {GROUPED: (4, 16)})
    monkeypatch.setattr(conv_choice, "tuning_mode", lambda: "full")  # and not that of kernels, by the hundred on a GPU
    monkeypatch.setattr(conv_choice, "SIZES_OF_SUMS", (2, 16))
    monkeypatch.setattr(sparse_conv, "may_choose", lambda features: conv_choice.may_choose(features))
    return made


def step(layer, x):
    """Values and gradients are right."""
    y = layer(x)
    expected = expected_of(layer, x, y)
    assert_matches(y.features, expected)
    upstream, leaves = torch.randn_like(expected), [x.features, *layer.parameters()]
    for one, other in zip(*(torch.autograd.grad(made, leaves, upstream) for made in (y.features, expected))):
        assert_matches(one, other)
    return map_of(y)


def call_of(layer, found):
    kind = layer.weight.shape, layer.groups, False
    return found.memory[("statement", *kind, *conv_forms.settings_of(layer.weight.dtype))]


def statement_of(layer, found):
    return call_of(layer, found).statement


WAYS = ["table", "tiles of 8", "groups of 8", "tiles of 4", "tiles of 16", "groups of 4", "groups of 16"]


LAYERS = {
    "submanifold": (submanifold, {}),
    "groups": (submanifold, dict(groups=2)),
    "depthwise": (submanifold, dict(groups=4)),
    "strided": (strided, {}),
}
FEW = [(layer, winner) for layer in LAYERS for winner in (WAYS if layer == "submanifold" else WAYS[3::3])]


@pytest.mark.parametrize(("layer", "winner"), FEW)
def test_a_map_that_lasts_takes_what_won(contests, layer, winner):
    make, options = LAYERS[layer]
    contests.winner = winner
    layer, x = make(**options), cloud()
    for _ in range(4):
        found = step(layer, x)
    form = {"tab": STATIONARY, "til": TILED, "gro": GROUPED}[winner[:3]]
    assert statement_of(layer, found) in form
    for way in WAYS[1:]:
        kind, _, size = way.partition(" of ")
        if way == winner or way != WAYS[-1]:  # in which gradients of weights are summed too
            assert found.has_parts(kind, int(size)) is (way == winner)


@by_host
@pytest.mark.parametrize("winner", ["groups of 2", "groups of 16"])
def test_weight_gradients_sum_the_groups_that_won(contests, monkeypatch, winner):
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 6)  # after gradients that sum others
    contests.winner = winner
    layer, x = submanifold(), cloud()
    found = step(layer, x)
    size = int(winner.removeprefix("groups of "))
    had = found.has_parts("groups", size)
    for _ in range(7):
        found = step(layer, x)
    assert len(contests) == 3
    assert not had
    assert found.has_parts("groups", size)


@by_host
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


@by_host
def test_each_layer_shape_is_asked_for_once(contests):
    x, layers = cloud(), [submanifold(), submanifold(), submanifold(out=6)]
    for _ in range(5):
        for layer in layers:
            step(layer, x)
    asked = [(key.statement, dict(key.extents)) for key, _ in contests]
    shapes = [tuple(extents[str(at)] for at in range(3)) for statement, extents in asked if "dWeight" not in statement]
    assert sorted(shapes) == [(3, 4, 4), (3, 4, 4), (3, 4, 6), (3, 6, 4)]  # features and, transposed, their gradients
    sums = [extents for statement, extents in asked if "dWeight" in statement]
    assert sorted(extents["0"] for extents in sums) == [4, 6]
    assert {key.layout for key, _ in contests if "dWeight" not in key.statement} == {
        "In:2,1;Weight:2,1,2",
        "In:2,1;Weight:2,2,1",
    }


@by_host
def test_a_key_counts_voxels_and_pairs_by_their_power_of_two(contests):
    keys = []
    for voxels in (17, 18, 20):
        layer, x = submanifold(bias=False), cloud(voxels=voxels)
        with torch.no_grad():
            for _ in range(3):
                layer(x)
        keys.append(contests[-1][0])
        lengths = dict(keys[-1].extents)
        assert lengths["inputs"] == lengths["outputs"] == 32
    assert {dict(key.extents)["pairs"] for key in keys} <= {32, 64}
    assert len(contests) == 3


@by_host
def test_tiles_of_other_sizes_are_for_a_full_search(contests, monkeypatch):
    monkeypatch.setattr(conv_choice, "tuning_mode", lambda: "default")
    layer, x = submanifold(), cloud()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    ((_, names),) = contests
    assert {*names} == {"table", "tiles of 8", "groups of 8", "groups of 4", "groups of 16"}


@by_host
@pytest.mark.parametrize(("mode", "enough"), [("full", 0.0), ("default", 1.0)])
@pytest.mark.parametrize(("form", "name"), [(STATIONARY, "table"), (GROUPED, "groups of 8"), (TILED, "tiles of 8")])
def test_the_form_of_the_rules_comes_first_and_may_be_enough(contests, monkeypatch, form, name, mode, enough):
    monkeypatch.setattr(conv_choice, "tuning_mode", lambda: mode)
    monkeypatch.setattr(conv_choice, "host_milliseconds", lambda *_: 1.0)
    monkeypatch.setattr(conv_choice, "form_of", lambda *_: form)
    layer, x = submanifold(), cloud()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    ((_, names),) = contests
    assert (names[0], contests.enough) == (name, enough)


@by_host
@pytest.mark.parametrize("winner", ["table", "groups of 8"])
def test_a_cpu_waits_for_the_table_and_for_groups_of_one_size(contests, monkeypatch, winner):
    monkeypatch.setattr(conv_choice, "_is_cpu", lambda device: True)
    contests.winner = winner
    layer, x = submanifold(), cloud()
    for _ in range(4):
        found = step(layer, x)
    assert contests.is_waited_for
    assert contests.enough == 0
    assert [{*names} for _, names in contests] == [{"table", "groups of 8"}] * 2  # features and their gradients
    assert statement_of(layer, found) in (STATIONARY if winner == "table" else GROUPED)


@by_host
@pytest.mark.cpu
@pytest.mark.parametrize("kind", LAYERS)
def test_forms_are_timed_on_a_cpu(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(conv_forms, "PAYS_AFTER", 2)
    monkeypatch.setenv("INSUM_TUNE", "default")
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    make, options = LAYERS[kind]
    layer, x = make(**options), cloud()
    for _ in range(4):
        step(layer, x)
    stored = [json.loads(path.read_text()) for path in (tmp_path / "tuning").glob("*.json")]
    forms = [
        entry["times"] for entry in stored if "NBR" in entry["key"]["statement"] and ";" in entry["key"]["statement"]
    ]
    assert forms
    assert all({way["way"] for way, _ in times} == {"table", "groups of 128"} for times in forms)


def test_a_large_kernel_has_no_tiles(contests):
    layer, x = nn.SubMConv3d(2, 2, 5, indice_key="own").double().to(DEVICE), cloud(2)
    indices = torch.nn.functional.pad(x.indices, (0, 2))
    x = nn.SparseConvTensor(x.features, indices, [12, 1, 1], 2)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    ((_, names),) = contests
    assert {*names} == {"table", "groups of 8", "groups of 4", "groups of 16"}


@by_host
@pytest.mark.parametrize("why", ["new", "captured", "off", "deterministic", "watched", "empty"])
def test_nothing_is_timed_where_it_must_not_be(contests, monkeypatch, why):
    layer, x = submanifold(), cloud(voxels=0 if why == "empty" else 18)
    if why == "captured":
        monkeypatch.setattr(KernelMap, "is_captured", True)
    elif why == "off":
        monkeypatch.setattr(conv_choice, "may_choose", lambda features: False)
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


@by_host
def test_calls_with_tuning_off_choose_nothing(monkeypatch):
    class OnGPU:
        is_cuda = True

    monkeypatch.setattr(conv_choice, "INTERPRETED", False)
    for mode, expected in (("default", True), ("full", True), ("off", False)):
        monkeypatch.setenv("INSUM_TUNE", mode)
        assert conv_choice.may_choose(OnGPU()) is conv_choice.may_choose(torch.empty(1, 1, device="cpu")) is expected
        assert not conv_choice.may_choose(torch.empty(1, 1, device="meta"))
    monkeypatch.setenv("INSUM_TUNE", "default")
    torch.use_deterministic_algorithms(True)
    try:
        assert not conv_choice.may_choose(OnGPU())
    finally:
        torch.use_deterministic_algorithms(False)


@by_host
def test_a_choice_made_in_inference_mode_serves_training(contests):
    contests.winner = "groups of 4"
    layer, x = submanifold(), cloud()
    with torch.inference_mode():
        for _ in range(4):
            layer(x)
    found = step(layer, x)
    assert statement_of(layer, found) in GROUPED
    assert call_of(layer, found).operands["MAPX"].shape[1] == 4


@pytest.mark.parametrize("winner", ["tiles of 4", "groups of 16", "table"])
@by_host
def test_a_compiled_call_takes_what_won(contests, winner, monkeypatch):
    torch._dynamo.reset()
    contests.winner = winner
    layer, x = submanifold(), cloud()
    for _ in range(4):
        found = step(layer, x)
    assert len(contests) == 3
    statement = statement_of(layer, found)
    monkeypatch.setattr(kernel_map_module, "_start_of", lambda *_: pytest.fail("the map is known"))

    def call(features):
        return layer(x.replace_feature(features)).features

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_matches(compiled(x.features), expected_of(layer, x, x))
    y, expected = compiled(x.features), expected_of(layer, x, x)
    upstream, leaves = torch.randn_like(expected), [x.features, *layer.parameters()]
    for one, other in zip(*(torch.autograd.grad(made, leaves, upstream) for made in (y, expected))):
        assert_matches(one, other)
    assert statement_of(layer, found) == statement
    assert len(contests) == 3
