"""Few kernels are built: those first that are predicted to be fast, and no more once what was found is good enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from insum_ops.compiler.binding import bind
from insum_ops.compiler.language import parse
from insum_ops.compiler.planning.device import H200
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.tuning import search
from insum_ops.compiler.tuning.cost import Cost, floor_milliseconds
from insum_ops.compiler.tuning.problem import Candidate, Problem, candidates
from insum_ops.compiler.tuning.search import Search
from insum_ops.formats.facts import ConstantTables, OwnedRows

pytestmark = pytest.mark.cpu

PRODUCT = "C[i,j] += A[i,k] * B[k,j]"


def problem_of(text: str, dtype: torch.dtype = torch.float16, **shapes: tuple[int, ...]) -> Problem:
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    return problem_for(bind(parse(text), tensors), tensors, None, frozenset())


def product_of(rows: int, inner: int, columns: int) -> Problem:
    return problem_of(PRODUCT, A=(rows, inner), B=(inner, columns))


@pytest.fixture
def six_at_first(monkeypatch):
    monkeypatch.setattr(search, "FIRST", 6)
    monkeypatch.setattr(search, "FAR", 4.0)
    monkeypatch.setattr(search, "BUILDERS", 8)
    monkeypatch.setattr(search, "_cores", lambda: 16)


def cost_of(problem: Problem, way: Candidate) -> Cost:
    return Cost(way.schedule, way.config, problem.strides, H200, problem.flags.precision, way.schedule.extents)


def search_of(problem: Problem, goal: float | None = 0.0) -> Search:
    return Search(problem, candidates(problem), goal)


@pytest.mark.usefixtures("six_at_first")
def test_the_first_batch_has_those_that_are_predicted_to_be_fast():
    found = search_of(product_of(1001, 803, 907))
    first = found.batch({})
    assert len(first) == 6
    rest = [at for at in range(len(found.ways)) if at not in first]
    assert max(found.predicted[at] for at in first[1:]) <= min(found.predicted[at] for at in rest)


@pytest.mark.usefixtures("six_at_first")
def test_few_say_whether_a_way_is_as_lost_as_it_seems():
    own = search_of(product_of(1001, 803, 907))
    least = min(own.predicted)
    for share, count in ((0.1, 2), (1.0, 6)):
        found = replace(own, goal=share * least)
        first = found.batch({})
        assert len(first) == count
        assert not found.batch({at: found.predicted[at] for at in first}) or share == 1.0
    last = own.order[-1]
    lucky = search.next_batch(own.order, own.predicted, {last: 0.05 * own.predicted[last]}, 0.1 * least)
    assert len(lucky) > 1  # far faster than was predicted: then others may win as well


@pytest.mark.usefixtures("six_at_first")
def test_it_is_enough_where_another_route_or_a_kernel_is_near_the_floor():
    found = search_of(product_of(4096, 4096, 4096))
    times = dict.fromkeys(found.batch({}), 0.9 * found.enough)
    assert found.batch(times) == []
    other = search_of(product_of(4096, 4096, 4096), 0.9 * found.enough)
    assert other.batch(dict.fromkeys(other.batch({}), 100.0)) == []


@pytest.mark.usefixtures("six_at_first")
def test_it_ends_where_all_took_as_many_times_their_prediction_and_goes_on_where_none_ran():
    found = search_of(product_of(1001, 803, 907))
    first = found.batch({})
    as_predicted = {at: 100 * found.predicted[at] for at in first}
    assert found.batch(as_predicted) == []
    assert found.batch(dict.fromkeys(first)) != []  # none of them could be built


@pytest.mark.usefixtures("six_at_first")
def test_as_many_are_timed_as_make_a_first_batch_where_some_cannot_run():
    found = search_of(product_of(1001, 803, 907))
    first = found.batch({})
    times = {at: None if place else 100 * found.predicted[at] for place, at in enumerate(first)}
    more = found.batch(times)
    assert len(more) == 5
    times |= {at: 100 * found.predicted[at] for at in more}
    assert found.batch(times) == []


@pytest.mark.usefixtures("six_at_first")
def test_it_goes_on_where_predictions_were_wrong_by_very_different_factors():
    found = search_of(product_of(1001, 803, 907))
    first = found.batch({})
    alike = {at: 5 * found.predicted[at] for at in first}
    assert found.batch(alike) == []
    differing = {at: (2, 8)[place % 2] * found.predicted[at] for place, at in enumerate(first)}
    assert found.batch(differing) != []


EXPERTS = "Y[TOK[p,q],m] += GATE[p,q] * X[TOK[p,q],c] * W[EXP[p],c,m]"
# As compiled for sm_90 with a tile of 128 by 128 sums: four warps spill with 64 summands of a step, not with 32.
SPILLS = {(4, 64): True, (4, 32): False, (8, 64): False}


def test_an_operand_that_is_a_product_takes_registers_too():
    tensors = {
        "GATE": torch.empty(132, 128, dtype=torch.bfloat16, device="meta"),
        "X": torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta"),
        "W": torch.empty(8, 1024, 4096, dtype=torch.bfloat16, device="meta"),
        "TOK": torch.empty(132, 128, dtype=torch.int64, device="meta"),
        "EXP": torch.empty(132, dtype=torch.int64, device="meta"),
    }
    problem = problem_for(bind(parse(EXPERTS), tensors, (8192, 4096)), tensors, None, frozenset())
    ways = candidates(problem)
    (schedule, config) = next((way.schedule, way.config) for way in ways if way.schedule.uses_dot)
    for (warps, depth), is_spilled in SPILLS.items():
        own = replace(config, blocks=(("q", 128), ("m", 128), ("c", depth)), num_warps=warps, num_stages=3)
        cost = Cost(schedule, own, problem.strides, H200, problem.flags.precision, schedule.extents)
        assert cost.spills == is_spilled


def test_all_are_timed_on_request_and_where_the_lengths_of_rows_decide(monkeypatch):
    monkeypatch.setattr(search, "_cores", lambda: 2)
    problem = product_of(300, 300, 300)
    assert search_of(problem, None).batch({}) == list(range(len(candidates(problem))))
    text = "C[AM[p],n] += AV[p] * B[AK[p],n]"
    tensors = {"AV": torch.empty(60), "B": torch.empty(50, 40)}
    tensors |= {name: torch.zeros(60, dtype=torch.int64) for name in ("AM", "AK")}
    rows = problem_for(bind(parse(text), tensors, (9, 40)), tensors, OwnedRows("AM"), frozenset())
    assert search_of(rows).batch({}) == list(range(len(candidates(rows))))


@pytest.mark.usefixtures("six_at_first")
def test_of_groups_by_an_index_few_are_built_and_one_of_each_strategy_whatever_is_predicted(monkeypatch):
    text = "W[m,F[t],c] += X[Y[P[t],q],c] * D[Z[P[t],q],m]"
    tensors = {"X": torch.empty(9000, 64), "D": torch.empty(9000, 64)}
    tensors |= {name: torch.zeros(411, dtype=torch.int64) for name in ("F", "P")}
    tensors |= {name: torch.zeros(411, 512, dtype=torch.int64) for name in ("Y", "Z")}
    bound = bind(parse(text), tensors, (64, 27, 64))
    found = search_of(problem_for(bound, tensors, OwnedRows("F", is_whole=True), frozenset()))
    strategy = [way.schedule.strategy for way in found.ways]
    fast, slow = ({of for of in range(len(strategy)) if strategy[of] == name} for name in ("owner", "atomic"))
    assert fast | slow == {*range(len(strategy))}
    monkeypatch.setitem(vars(found), "predicted", [1.0 if of in fast else 10.0 for of in range(len(strategy))])
    first = found.batch({})
    assert len(first) == 7
    assert len(slow & {*first}) == 1
    # one row has nearly all positions: its owner takes as many times the prediction as there are rows
    times = {of: 50.0 if of in fast else 9.0 for of in first}
    while batch := found.batch(times):
        times |= {of: 50.0 if of in fast else 9.0 for of in batch}
    assert min(times.values()) == 9.0
    as_predicted = {of: found.predicted[of] for of in first}
    assert not slow & {*found.batch(as_predicted)}


@pytest.mark.usefixtures("six_at_first")
def test_loops_that_read_tables_are_not_built_beside_code_that_holds_them():
    i, j = torch.arange(99).view(11, 9) % 5, torch.arange(99).view(11, 9) % 7
    tables = {"I": i, "J": j, "V": torch.ones(11, 9)}
    tensors = {"X": torch.empty(20_000, 5, 68), "Y": torch.empty(20_000, 7, 68), **tables}
    bound = bind(parse("Z[b,k,u] += V[k,r] * X[b,I[k,r],u] * Y[b,J[k,r],u]"), tensors, (20_000, 11, 68))
    found, times = search_of(problem_for(bound, tensors, ConstantTables.of(tables), frozenset())), {}
    while batch := found.batch(times):
        times |= {at: 1.5 * found.predicted[at] for at in batch}
    assert {bool(way.schedule.tables) for way in found.ways} == {True, False}
    assert all(found.ways[at].schedule.tables for at in times)


def test_two_cores_build_eight_kernels_at_most(monkeypatch):
    monkeypatch.setattr(search, "FIRST", 6)
    monkeypatch.setattr(search, "BUILDERS", 8)
    monkeypatch.setattr(search, "_cores", lambda: 2)
    found, times = search_of(product_of(1001, 803, 907)), dict[int, float | None]()
    while batch := found.batch(times):
        times |= {at: 1000 / (1 + at) for at in batch}
    assert len(times) <= 8


def test_the_floor_is_a_launch_or_the_bytes_or_the_products():
    tiny = bind(parse("Y[i] = X[i]"), {"X": torch.empty(4, device="meta")})
    moved = bind(parse("Y[i] = X[i]"), {"X": torch.empty(2**28, device="meta")})
    square = torch.empty(8192, 8192, dtype=torch.float16, device="meta")
    product = bind(parse(PRODUCT), {"A": square, "B": square})
    assert floor_milliseconds(tiny, H200, False) == 1e3 * H200.launch_gap
    assert floor_milliseconds(tiny, H200, False, [(4,), (4,)]) == pytest.approx(3e3 * H200.launch_gap)
    assert floor_milliseconds(moved, H200, False, [(2**28,)]) > 1.5 * floor_milliseconds(moved, H200, False)
    assert floor_milliseconds(moved, H200, False) == pytest.approx(2e3 * 2**30 / (0.9 * H200.bandwidth))
    assert floor_milliseconds(product, H200, True) == pytest.approx(2e3 * 8192**3 / H200.flops(2))


def test_long_sums_of_few_rows_are_predicted_faster_with_many_numbers_at_once():
    problem = problem_of("Y[i] = max(X[i,j])", torch.float32, X=(623, 2597))
    costs = [(way.config, cost_of(problem, way)) for way in candidates(problem)]
    by_config = {config: cost.milliseconds for config, cost in costs if not cost.spills}
    fastest, slowest = (pick(by_config, key=by_config.__getitem__) for pick in (min, max))
    assert fastest.block("j") > slowest.block("j")
    assert fastest.block("i") <= 4


def test_odd_sizes_get_tiles_that_do_not_spill():
    """Of those of the tables all but two spill."""
    problem = problem_of("C[b,i,j] += A[b,i,k] * B[b,k,j]", torch.float32, A=(27, 87, 115), B=(27, 115, 165))
    clean = [way for way in candidates(problem) if not cost_of(problem, way).spills]
    assert len(clean) >= 4


def test_a_flattened_axis_moves_all_elements_of_its_names():
    problem = problem_of("Y[p,c] = X[p,c]", torch.float32, X=(600_000, 33))
    (cost, *_) = [cost_of(problem, way) for way in candidates(problem) if way.schedule.form == "flat"]
    elements = 600_000 * 33 * torch.float32.itemsize
    assert elements <= cost.loaded < 2 * elements
    assert elements <= cost.stored < 2 * elements
