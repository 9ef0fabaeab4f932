"""The choice between ways to one product: timed once for each size, a guess where nothing may be timed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended_clock import Contests, pretended_clock
from statements import DEVICE

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product  # noqa: E402
from tolerances import assert_matches  # noqa: E402

from insum_ops.equivariant import choice  # noqa: E402
from insum_ops.equivariant import shared_weights as shared  # noqa: E402
from insum_ops.equivariant.choice import fastest_way  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct  # noqa: E402

IRREPS = ("3x0e + 3x1o", "0e + 1o", "3x0e + 3x1o")
LARGE = ("20x0e + 20x1o", "0e + 1o", "20x0e + 20x1o")  # wide enough for tables in memory


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Contests]:
    """As where there is a GPU to time; what wins runs, and is compared."""
    monkeypatch.setattr(choice, "_may_time", lambda tensor: True)
    with pretended_clock(choice) as made:
        made.runs = 0
        yield made


def never(name: str) -> object:
    raise AssertionError(f"{name} was run")


def test_a_guess_is_taken_where_nothing_may_be_timed():
    memory: dict[object, str] = {}
    assert fastest_way(memory, ("Z",), ("first", "second"), never, {"X": torch.ones(3)}) == "first"
    assert not memory


def test_a_choice_is_kept_by_the_power_of_two_of_lengths(contests):
    memory: dict[object, str] = {}
    for contests.winner, rows in (("second", 5), ("first", 8), ("first", 9), ("first", 7)):
        taken = fastest_way(memory, ("Z",), ("first", "second"), never, {"X": torch.ones(rows)})
        assert taken == ("first" if rows == 9 else "second")
    assert fastest_way(memory, ("Z",), ("third",), never, {"X": torch.ones(5)}) == "third"
    assert fastest_way(memory, ("X",), ("first", "second"), never, {"X": torch.ones(5)}) == "first"
    assert len(contests) == 3


def test_keys_on_disk_differ_by_shapes_and_not_by_lengths(contests):
    def key(*shape, what="Z", ways=("held", "in memory")):
        fastest_way({}, (what, 10), ways, never, {"X": torch.ones(shape)})
        return contests[-1][0]

    assert key(5, 4, 3) == key(8, 4, 3) == key(5, 4, 3, ways=("in memory", "held"))
    assert len({key(5, 4, 3), key(9, 4, 3), key(5, 4, 2), key(5, 4, 3, what="X")}) == 4


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
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("learns", [(False, False, False), (True, True, True)], ids=str)
@pytest.mark.parametrize("way", ["held", "in memory"])
def test_either_way_to_weights_of_each_sample_is_right(contests, way, learns):
    """Of columns where they lie if nothing learns, else in order."""
    contests.winner = way if any(learns) else f"columns, {'coefficients held' if way == 'held' else 'tables in memory'}"
    ours = FullyConnectedTensorProduct(*LARGE, shared_weights=False, internal_weights=False)
    assert_right(ours, learns, rows=2)  # an interpreter takes a second for each, of matrices in memory
    assert sum(contests.winner in names for _, names in contests) == (4 if any(learns) else 1)


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("learns", [(False, False, False), (True, False, True), (True, True, True)], ids=str)
@pytest.mark.parametrize("way", shared.WAYS)
def test_either_way_to_shared_weights_is_right(contests, way, learns):
    contests.winner = way
    assert_right(FullyConnectedTensorProduct(*IRREPS, internal_weights=False), learns)
    # columns as they are; a second input that learns may be a potential's, with gradients of gradients to come
    timed = {(key.statement.split()[-4], key.statement.split()[-2]) for key, _ in contests}
    assert ("T", "3" if learns[1] else "2") in timed
    assert ("X", "2") in timed or learns != (True, False, True)
