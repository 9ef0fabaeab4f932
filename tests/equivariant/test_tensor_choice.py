"""The choice between ways to one product: timed once for each size, a guess where nothing may be timed."""

from __future__ import annotations

import pytest
import torch
from statements import DEVICE

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product  # noqa: E402
from tolerances import assert_matches  # noqa: E402

from insum_ops.equivariant import choice, decomposition, format_term_statements, path_tables, tables  # noqa: E402
from insum_ops.equivariant import shared_weights as shared  # noqa: E402
from insum_ops.equivariant.choice import fastest_way  # noqa: E402
from insum_ops.equivariant.decomposition import decompose  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct  # noqa: E402

IRREPS = ("3x0e + 3x1o", "0e + 1o", "3x0e + 3x1o")
LARGE = ("20x0e + 20x1o", "0e + 1o", "20x0e + 20x1o")  # wide enough for tables in memory


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' statements where no kernel runs too, as torch operations; nothing is remembered."""
    decompose.cache_clear()
    for module in (tables, shared, format_term_statements):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


def never(name: str) -> object:
    raise AssertionError(f"{name} was run")


def test_a_guess_is_taken_where_nothing_may_be_timed():
    memory: dict[object, str] = {}
    assert fastest_way(memory, ("Z",), ("first", "second"), never, {"X": torch.ones(3)}) == "first"
    assert not memory


def test_a_choice_is_kept_by_the_power_of_two_of_lengths(monkeypatch):
    asked: list[int] = []

    def timed(what, ways, run, tensors):
        asked.append(len(tensors["X"]))
        return ways[-1]

    monkeypatch.setattr(choice, "_may_time", lambda tensor: True)
    monkeypatch.setattr(choice, "_timed", timed)
    memory: dict[object, str] = {}
    for rows in (5, 8, 9, 7):
        assert fastest_way(memory, ("Z",), ("first", "second"), never, {"X": torch.ones(rows)}) == "second"
    assert asked == [5, 9]
    assert fastest_way(memory, ("Z",), ("first",), never, {"X": torch.ones(5)}) == "first"
    assert fastest_way(memory, ("X",), ("first", "second"), never, {"X": torch.ones(5)}) == "second"
    assert asked == [5, 9, 5]


def test_keys_on_disk_differ_by_shapes_and_not_by_lengths():
    key = lambda *shape, what="Z": choice._key((what, 10), ("held", "in memory"), {"X": torch.ones(shape)})
    assert key(5, 4, 3) == key(8, 4, 3)
    assert len({key(5, 4, 3), key(9, 4, 3), key(5, 4, 2), key(5, 4, 3, what="X")}) == 4
    assert key(5, 4, 3) == choice._key(("Z", 10), ("in memory", "held"), {"X": torch.ones(5, 4, 3)})


def assert_right(ours: FullyConnectedTensorProduct, learns: tuple[bool, ...], rows: int = 5) -> None:
    """Values, and gradients of those of x, y and weight that learn."""
    weights = (ours.weight_numel,) if ours.shared_weights else (rows, ours.weight_numel)
    shapes = (rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), weights
    tensors = [(torch.randn(shape) / 2).to(DEVICE).requires_grad_(own) for shape, own in zip(shapes, learns)]
    wide = [tensor.detach().double().cpu().requires_grad_(tensor.requires_grad) for tensor in tensors]
    actual, expected = ours(*tensors), dense_product(ours, *wide)
    assert_matches(actual, expected)
    if any(learns):
        upstream = torch.randn(actual.shape)
        leaves, references = ([own for own in each if own.requires_grad] for each in (tensors, wide))
        want = torch.autograd.grad(expected, references, upstream.double())
        for found, reference in zip(torch.autograd.grad(actual, leaves, upstream.to(DEVICE)), want, strict=True):
            assert_matches(found, reference)


@pytest.mark.every_route
@pytest.mark.parametrize("way", [path_tables.HELD, path_tables.IN_MEMORY])
def test_either_way_to_weights_of_each_sample_is_right(way, monkeypatch):
    seen = []
    monkeypatch.setattr(path_tables, "fastest_way", lambda memory, what, *rest: seen.append(what[0]) or way)
    ours = FullyConnectedTensorProduct(*LARGE, shared_weights=False, internal_weights=False)
    assert_right(ours, (True, True, True), rows=2)  # an interpreter takes a second for each, of matrices in memory
    assert {*seen} == {*"ZXYW"}


@pytest.mark.every_route
@pytest.mark.parametrize("way", [*decomposition.WAYS.values()])
def test_either_way_to_columns_is_right(way, monkeypatch):
    seen = []
    monkeypatch.setattr(decomposition, "fastest_way", lambda memory, what, ways, *rest: seen.append(ways) or way)
    assert_right(
        FullyConnectedTensorProduct(*LARGE, shared_weights=False, internal_weights=False), (False, False, False)
    )
    assert sorted(seen[0]) == sorted(decomposition.WAYS.values())


@pytest.mark.every_route
@pytest.mark.parametrize("learns", [(False, False, False), (True, False, True), (True, True, True)], ids=str)
@pytest.mark.parametrize("way", shared.WAYS)
def test_either_way_to_shared_weights_is_right(way, learns, monkeypatch):
    seen = []

    def fastest(memory, what, ways, run, tensors):
        seen.append((what[0], tensors["X"].dim()))
        return way

    monkeypatch.setattr(shared, "fastest_way", fastest)
    assert_right(FullyConnectedTensorProduct(*IRREPS, internal_weights=False), learns)
    # columns as they are; a second input that learns may be a potential's, with gradients of gradients to come
    assert ("T", 3 if learns[1] else 2) in seen
    assert ("X", 2) in seen or learns != (True, False, True)
