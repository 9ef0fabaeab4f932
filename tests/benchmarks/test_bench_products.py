"""Products of drawn sizes: the same for a seed, none of a size that a rule names, and rows that say who is ahead."""

from __future__ import annotations

import pytest

pytest.importorskip("pytest_benchmark")
pytest.importorskip("e3nn")
import bench.products
from bench.case import OURS
from bench.equivariant import OWN_LAYOUT, Product, natural
from bench.products import FORCES, FORWARD, GRADIENTS, Row, draw, run_case, summary
from bench.roofs import Roofs

pytestmark = pytest.mark.cpu

ROOFS = Roofs(copied=1e8, cached=1e8, flops=1e9, launch=1e-3)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ten_products_are_drawn_from_a_seed(seed):
    products = draw(seed)
    assert len(products) == 10
    assert products == draw(seed) != draw(seed + 1)
    for product in products:
        multiplicities = [int(block.partition("x")[0]) for block in product.in1.split(" + ")]
        assert multiplicities[0] & (multiplicities[0] - 1)
        assert 1_000 <= product.batch <= 60_000
    assert {product.is_shared for product in products if product.mode == "uvw"} == {False, True}
    assert {bool(product.nodes) for product in products if product.mode == "uvu"} == {False, True}


@pytest.mark.parametrize(
    "product",
    [
        Product("weights for each", natural(1, 3), natural(1, 1), natural(1, 3), 20),
        Product("weights for all", natural(1, 3), natural(1, 1), natural(1, 3), 20, is_shared=True),
        Product("uvu", natural(1, 4), natural(1, 1), natural(1, 1), 30, "uvu", nodes=7),
    ],
    ids=lambda product: product.name,
)
def test_a_case_is_checked_and_timed_in_every_pass(product, monkeypatch):
    monkeypatch.setattr(bench.products, "timed", lambda call: {"device_ms": 0.002, "timing": "graph"})
    rows = list(run_case(product, lambda: ROOFS))
    assert [row.pass_ for row in rows] == [FORWARD, GRADIENTS, *([FORCES] if product.mode == "uvu" else [])]
    for row in rows:
        assert row.us == {OURS: 2.0, "e3nn": 2.0}
        assert row.ratio == 1.0
        assert 0 < row.share <= 1
        assert all("needs a GPU" in reason for reason in row.failures.values())


def test_a_wrong_result_of_ours_has_no_time(monkeypatch):
    monkeypatch.setattr(bench.products, "timed", lambda call: {"device_ms": 0.002, "timing": "graph"})
    right = bench.products.Operands.layer
    wrong = lambda self, provider: lambda *given: 1.1 * right(self, provider)(*given)
    monkeypatch.setattr(bench.products.Operands, "layer", wrong)
    product = Product("uvu", natural(1, 4), natural(1, 1), natural(1, 1), 30, "uvu")
    (row, *_) = run_case(product, lambda: ROOFS)
    assert not row.us
    assert row.failures[OURS].startswith("AssertionError: relative error")


def test_what_no_graph_captured_is_told(monkeypatch):
    monkeypatch.setattr(bench.products, "timed", lambda call: {"device_ms": 0.002, "timing": "queue"})
    row = {"us": {}, "failures": {}}
    bench.products._time(row, OURS, lambda: None)
    assert row["us"] == {OURS: 2.0}
    assert "which the host may hold up" in row["failures"][OURS]


def test_the_table_names_the_best_peer_in_the_same_layout():
    row = Row("uvu: small", FORWARD, 10.0, {OURS: 20.0, "e3nn": 60.0, "cuequivariance": 40.0, OWN_LAYOUT: 15.0})
    assert (row.best, row.ratio, row.share) == (40.0, 2.0, 0.5)
    lines = summary([row], 3)
    assert lines[0] == "== tensor products, seed 3, microseconds on cpu"
    assert lines[-1] == "uvu forward: 1 cases, 2.00x as geometric mean, least 2.00x, 0 below 1.1x"
