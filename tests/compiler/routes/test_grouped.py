"""Products grouped by an index tensor: the rewritten statement, its tables, and its runner, beside plain torch."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from gradient_checks import gradcheck
from memory_checker import checked_memory
from statements import IS_INTERPRETED

from insum_ops import insum
from insum_ops.compiler import pipeline
from insum_ops.compiler.planning.device import H200, described_as
from insum_ops.compiler.routes import choice
from insum_ops.compiler.routes.grouped import GroupedRunner, RunnerByCapture, RunnerByIndex, groupings_of
from insum_ops.compiler.routes.prepared import has_kernels, prepare
from insum_ops.compiler.runtime import group_tables, new_group_tables, note_use, recording, remembered_ranges, was_used
from insum_ops.compiler.runtime.group_tables import _for_graph, _Groups, _made, sorted_tables
from insum_ops.compiler.runtime.plan_cache import planned
from insum_ops.compiler.tuning import candidates
from insum_ops.formats.facts import ConstantTables, WrittenOnce

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = replace(H200, bandwidth=1e3)  # where reading a small weight for each position takes long
EXPERTS = "Y[p,m] += X[p,c] * W[E[p],c,m]"
GROUPED = [
    EXPERTS,
    "Y[T[p],m] += V[p] * X[T[p],c] * W[E[p],c,m]",
    "Y[E[p],c,m] += X[p,c] * Z[p,m]",
    "Y[E[p],c] += V[p] * X[p,c]",
    "Y[E[p]] += V[p]",
    "Y[c,E[p]] += X[p,c] * 2",
    "Y[p,c] += Z[p,m] * W[E[p],c,m]",
    "Y[T[p],c] += X[p,c] * X[E[p],c]",
    "Y[E[p],c] = max(X[p,c])",
    "Y[c,E[p]] = min(Z[p,m] * X[p,c])",
    "Y[E[p],c] = max(X[p,c] * Z[p,m])",
]


def operands(expr, positions=40, values=2, low=0):
    generator = torch.Generator().manual_seed(3)
    c, m, t = 5, 13, 3
    made = {
        "X": torch.randn(positions, c, dtype=torch.float64, generator=generator),
        "Z": torch.randn(positions, m, dtype=torch.float64, generator=generator),
        "V": torch.randn(positions, dtype=torch.float64, generator=generator),
        "W": torch.randn(values, c, m, dtype=torch.float64, generator=generator),
        "E": torch.randint(low, values, (positions,), generator=generator),
        "T": torch.randint(low, t, (positions,), generator=generator),
    }
    sizes = {"Y[T[p],m]": (t, m), "Y[E[p],c,m]": (values, c, m), "Y[E[p],c]": (values, c), "Y[E[p]]": (values,)}
    sizes |= {"Y[c,E[p]]": (c, values), "Y[T[p],c]": (t, c)}
    given = {name: tensor.to(DEVICE) for name, tensor in made.items() if f"{name}[" in expr}
    return given, sizes.get(expr.replace(" += ", " = ").split(" = ")[0])


def runners(expr, given, size):
    """Return a runner for each way to group a statement; without kernels, each runs as torch operations."""
    tensors = list(given.values())
    statement = prepare(expr, ",".join(given), size, tensors, None)
    kernel = pipeline._kernel if has_kernels(tensors[0].device) else lambda inner, variant, *_: inner.graph(variant)
    return [GroupedRunner(statement, way, kernel) for way in groupings_of(statement, tensors)]


def expected(expr, given, size):
    statement = prepare(expr, ",".join(given), size, list(given.values()), None)
    return statement.graph(statement.variant(list(given.values())))(list(given.values()), None)


@pytest.mark.every_route
def test_an_index_that_writes_more_rows_than_it_reads_is_not_grouped():
    """A program that owns a row of the output reads that row of U too, of which there are fewer."""
    expr, E = "Y[E[p],c] += V[p] * U[E[p],c]", torch.arange(40, device=DEVICE) % 2
    V, U = torch.randn(40, dtype=torch.float64, device=DEVICE), torch.randn(2, 5, dtype=torch.float64, device=DEVICE)
    given = dict(E=E, V=V, U=U)
    assert runners(expr, given, (2, 5))
    assert not runners(expr, given, (9, 5))
    rows = torch.zeros(9, 5, dtype=torch.float64, device=DEVICE).index_add(0, E, V[:, None] * U[E])
    torch.testing.assert_close(insum(expr, **given, size=(9, 5)), rows)


@pytest.mark.every_route
@pytest.mark.parametrize("low", [0, -1], ids=["whole", "padded"])
@pytest.mark.parametrize("expr", GROUPED)
def test_a_grouped_statement_means_the_same(expr, low):
    given, size = operands(expr, low=low)
    ways = runners(expr, given, size)
    assert ways
    for runner in ways:
        with checked_memory() if IS_INTERPRETED else nullcontext():
            result = runner(list(given.values()))
        torch.testing.assert_close(
            result, expected(expr, given, size), msg=lambda text, way=runner.way: f"{way}: {text}"
        )
        torch.testing.assert_close(runner.anew(list(given.values())), result)


@pytest.mark.every_route
@pytest.mark.parametrize("expr", GROUPED)
def test_what_has_no_entry_adds_nothing_though_it_is_nan(expr):
    given, size = operands(expr, low=-1)
    for name in {"X", "Z", "V"} & {*given}:
        if f"{name}[p" in expr and f"{name}[E[" not in expr:
            given[name][given["E"] < 0] = float("nan")
    for runner in runners(expr, given, size):
        result = runner(list(given.values()))
        assert not result.isnan().any()
        torch.testing.assert_close(result, expected(expr, given, size))


@pytest.mark.every_route
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("expr", [expr for expr in GROUPED if "+=" not in expr])
def test_winners_of_grouped_products_are_where_they_were_given(expr, is_sorted):
    given, size = operands(expr, low=-1)
    given = {name: tensor.round() if tensor.is_floating_point() else tensor for name, tensor in given.items()}  # ties
    if is_sorted:
        given["E"] = given["E"].sort().values
    tensors = list(given.values())
    statement = prepare(expr, ",".join(given), size, tensors, None, wants_winners=True)
    wanted = statement.graph(statement.variant(tensors))(tensors, None)
    (way,) = groupings_of(statement, tensors)
    kernel = pipeline._kernel if has_kernels(tensors[0].device) else lambda inner, variant, *_: inner.graph(variant)
    runner = GroupedRunner(statement, way, kernel)
    # kernels make tables in any order: here positions of a value stand from the last to the first
    positions, values, pointers = new_group_tables(given["E"].flip(0), way.count, way.tile)
    backwards = (torch.where(positions < 0, positions, len(given["E"]) - 1 - positions), values, pointers)
    for value, winners in (runner(tensors), runner.anew(tensors), runner.over(backwards, tensors)):
        torch.testing.assert_close(value, wanted[0])
        assert torch.equal(winners, wanted[1])


@pytest.mark.every_route
def test_few_positions_and_values_that_are_never_met():
    for positions, values in ((1, 1), (40, 2), (33, 3)):
        given, size = operands(EXPERTS, positions, values)
        given["E"].fill_(values - 1)
        for runner in runners(EXPERTS, given, size):
            torch.testing.assert_close(runner(list(given.values())), expected(EXPERTS, given, size))


@pytest.mark.every_route
def test_a_weight_chosen_by_an_index_is_grouped_where_nothing_is_timed():
    given, _ = operands(EXPERTS)
    X, W, E = given["X"], given["W"], given["E"]
    with described_as(SLOW):
        result = insum(EXPERTS, **given)
        assert was_used(E) is has_kernels(X.device) or X.is_cuda
    torch.testing.assert_close(result, torch.einsum("pc,pcm->pm", X, W[E]))


@pytest.mark.every_route
def test_gradients_of_a_grouped_statement():
    given, _ = operands(EXPERTS, positions=34, values=2)
    X, W, E = given["X"].requires_grad_(), given["W"].requires_grad_(), given["E"]
    with described_as(SLOW):
        assert gradcheck(lambda X, W: insum(EXPERTS, X=X, W=W, E=E), (X, W))


@pytest.mark.every_route
def test_an_index_that_changes_has_new_tables():
    given, _ = operands(EXPERTS)
    with described_as(SLOW):
        for _ in range(4):  # recorded, then replayed
            torch.testing.assert_close(insum(EXPERTS, **given), expected(EXPERTS, given, None))
        given["E"].copy_(given["E"].flip(0))
        torch.testing.assert_close(insum(EXPERTS, **given), expected(EXPERTS, given, None))
        for low in (0, -1):
            other = {**given, "E": operands(EXPERTS, low=low)[0]["E"].roll(7)}
            torch.testing.assert_close(insum(EXPERTS, **other), expected(EXPERTS, other, None))


def test_a_runner_by_index_takes_the_one_for_a_known_index_at_the_second_use():
    index = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    runner = RunnerByIndex(0, lambda tensors, fact: "known", lambda tensors, fact: "new")
    assert [runner([index]) for _ in range(3)] == ["new", "known", "known"]
    index += 1
    assert [runner([index]) for _ in range(2)] == ["new", "known"]
    assert runner([index.clone()]) == "new"


def test_a_runner_by_capture_takes_the_one_for_graphs_while_one_is_captured(monkeypatch):
    runner = RunnerByCapture(lambda tensors, fact: "eager", lambda tensors, fact: "captured")
    for is_captured, taken in ((False, "eager"), (True, "captured")):
        monkeypatch.setattr(recording, "is_capturing", lambda: is_captured)  # noqa: B023
        assert runner([]) == taken


@pytest.mark.every_route
def test_a_plan_for_new_index_tensors_meets_them():
    """So that one which is used again gets its tables, though it came after the plan was made."""

    def function(index):
        runner = RunnerByIndex(0, lambda tensors, fact: tensors[0] + 1, lambda tensors, fact: tensors[0] + 2)
        return runner([index])

    cache = {}
    call = lambda index: int(planned(cache, "", function, [index])[0])
    for _ in range(4):  # cold, recorded, replayed
        assert call(torch.zeros(3, dtype=torch.int64, device=DEVICE)) == 2
    index = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    assert [call(index) for _ in range(4)] == [2, 1, 1, 1]


@pytest.mark.parametrize("tile", [1, 2, 16])
@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize("count", [7, 30, 200], ids=["few", "more", "many"])
@pytest.mark.parametrize("make", [new_group_tables, sorted_tables])
@pytest.mark.every_route
def test_tables_list_each_position_once_in_a_tile_of_its_value(make, count, tile, low):
    length = 600  # of several programs
    index = torch.randint(low, count, (length, 2), device=DEVICE)[:, 1]
    positions, values, pointers = make(index, count, tile)
    check_tables(index, positions, values, pointers)


@pytest.mark.parametrize("tile", [1, 2])
@pytest.mark.parametrize("make", [new_group_tables, sorted_tables])
@pytest.mark.every_route
def test_any_negative_position_is_none(make, tile):
    index = torch.tensor([2, -1, 0, -1, -1, 2], device=DEVICE)
    other = torch.where(index < 0, torch.tensor([0, -9, 0, -65_534, -(2**40), 0], device=DEVICE), index)
    (positions, *rest), (expected, *others) = make(other, 3, tile), make(index, 3, tile)
    assert torch.equal(positions.sort(0).values, expected.sort(0).values)  # which kernels list in any order
    assert all(torch.equal(one, two) for one, two in zip(rest, others))


@pytest.mark.parametrize("count", [5, 21, 126, 127, 5000])
@pytest.mark.skipif(DEVICE != "cuda", reason="many programs count at once on a GPU")
def test_many_programs_place_each_position_once(count):
    for dtype in (torch.int32, torch.int64):
        for tile in (1, 16, 128):
            index = torch.randint(-1, count, (300_001,), device=DEVICE, dtype=dtype)[1:]  # which is not aligned
            positions, values, pointers = new_group_tables(index, count, tile)
            is_there = positions >= 0
            assert torch.equal(positions[is_there].sort().values.long(), torch.arange(300_000, device=DEVICE))
            own = values.view(-1, *[1] * (positions.dim() - 1)).expand_as(positions)[is_there]
            assert torch.equal(own, index[positions[is_there].long()].to(own.dtype))
            counts = torch.zeros(count + 2, device=DEVICE, dtype=torch.int64)
            counts.index_add_(0, own.long() + 1, torch.ones_like(own, dtype=torch.int64))
            assert torch.equal(counts[: count + 1], torch.bincount(index.long() + 1, minlength=count + 1))
            for value in (0, count - 1):
                first, last = pointers[value : value + 2].tolist()
                rows = positions[first:last]
                assert int((rows >= 0).sum()) == int((index == value).sum())


def check_tables(index, positions, values, pointers):
    rows = positions.view(len(values), -1).tolist()
    assert sorted(position for row in rows for position in row if position >= 0) == list(range(len(index)))
    for row, value in zip(rows, values.tolist()):
        assert all(int(index[position]) == value for position in row if position >= 0)
    for value, (first, last) in enumerate(zip(pointers.tolist(), pointers.tolist()[1:])):
        assert sum(position >= 0 for row in rows[first:last] for position in row) == int((index == value).sum())


@pytest.mark.kernels
@pytest.mark.parametrize("count", [7, 200])
@pytest.mark.parametrize("tile", [1, 16])
def test_tables_are_made_again_in_place_where_the_index_differs(tile, count):
    """As a captured graph does at each replay; what is known of the tables is known after it."""
    index = torch.randint(-1, count, (600,), device=DEVICE)
    made = _made(index, count, tile)
    made.load(index)
    before = [table.clone() for table in made.tables]
    for _ in range(2):
        made.make(index, True)
        assert made.flags.tolist() == [0, 0]
        assert all(map(torch.equal, made.tables, before))
        assert remembered_ranges(*made.tables[:2]) == [(-1 if tile > 1 else 0, 599), (-1, count - 1)]
    for _ in range(2):
        index[:300] = torch.randint(-1, count, (300,), device=DEVICE)
        made.make(index, True)
        assert made.flags.tolist() == [0, 1]
        check_tables(index, *made.tables)
        made.make(index, True)
        assert made.flags.tolist() == [0, 0]


def test_tables_are_remembered_until_the_index_changes():
    index = torch.randint(0, 3, (20,), device=DEVICE)
    tables = group_tables(index, 3, 16)
    assert group_tables(index, 3, 16)[0] is tables[0]
    assert group_tables(index, 3, 1)[0] is not tables[0]
    index[0] = 2
    assert group_tables(index, 3, 16)[0] is not tables[0]
    with torch.inference_mode():
        inside = torch.randint(0, 3, (20,), device=DEVICE)
    note_use(inside)  # which counts no changes
    assert not was_used(inside)


def test_copies_and_pickles_of_an_index_have_no_tables():
    index = torch.randint(0, 3, (20,), device=DEVICE)
    group_tables(index, 3, 16)
    for other in (copy.deepcopy(index), copy.copy(index), pickle.loads(pickle.dumps(index)), saved_and_loaded(index)):
        assert not was_used(other)
    assert was_used(index)


def saved_and_loaded(index):
    file = io.BytesIO()
    torch.save({"index": index}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["index"]


@pytest.mark.kernels
def test_an_index_whose_tables_a_graph_has_is_saved_without_them():
    index = torch.randint(0, 3, (20,), device=DEVICE)
    group_tables(index, 3, 16)
    (tables,) = _Groups.kept_with(index).tables.values()
    tables.load(index)
    _for_graph(index, tables)
    assert torch.equal(saved_and_loaded(index), index)


@pytest.mark.skipif(DEVICE != "cuda", reason="a graph is captured, or routes are timed, on a GPU")
def test_a_captured_graph_follows_an_index_that_is_written_to():
    given, _ = operands(EXPERTS, positions=500)
    insum(EXPERTS, **given), insum(EXPERTS, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = insum(EXPERTS, **given)
    for _ in range(2):
        given["E"].copy_(given["E"].flip(0).roll(3))
        graph.replay()
        torch.testing.assert_close(result, expected(EXPERTS, given, None))


@pytest.mark.skipif(DEVICE != "cuda", reason="a graph is captured, or routes are timed, on a GPU")
def test_the_routes_of_a_weight_chosen_by_an_index_are_timed(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "default")
    generator = torch.Generator(DEVICE).manual_seed(0)
    X = torch.randn(3000, 200, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    W = torch.randn(9, 200, 264, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    E = torch.randint(0, 9, (3000,), device=DEVICE, generator=generator)
    reference = torch.zeros(3000, 264, device=DEVICE, dtype=torch.float64)
    for value in range(9):
        reference[value == E] = X[value == E].double() @ W[value].double()
    for _ in range(4):
        result = insum(EXPERTS, X=X, W=W, E=E)
        assert (result.double() - reference).norm() < 0.01 * reference.norm()
    statement = prepare(EXPERTS, "X,W,E", None, [X, W, E], None)
    assert choice.chosen_route(statement, statement.variant([X, W, E]), None) == choice.GROUPED


TABLES = {"V": torch.tensor([[0.5, -2.0], [1.5, 0.0]]), "I": torch.tensor([[1, 0], [2, -1]])}
OVER_TABLES = "Z[E[p],i,u] += V[i,r] * X[T[p],I[i,r],u] * A[p]"


def over_tables(index):
    """A statement over constant tables whose products are scattered by `index`, with its operands and its fact."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator).to(DEVICE)
    fixed = {name: table.to(DEVICE, torch.float64 if name == "V" else torch.int32) for name, table in TABLES.items()}
    given = {"E": index.to(DEVICE), "X": draw(5, 3, 7), "A": draw(len(index))}
    given["T"] = torch.randint(5, (len(index),), generator=generator).to(DEVICE)
    return {**given, **fixed}, (4, 2, 7), ConstantTables.of(fixed)


@pytest.mark.every_route
@pytest.mark.parametrize("low", [0, -1])
def test_a_scatter_over_constant_tables_is_sorted(low):
    index = torch.randint(low, 4, (40,), generator=torch.Generator().manual_seed(1))
    given, size, fact = over_tables(index)
    tensors, kept = list(given.values()), (given["E"] >= 0).double()
    statement = prepare(OVER_TABLES, ",".join(given), size, tensors, fact)
    kernel = pipeline._kernel if has_kernels(tensors[0].device) else lambda inner, variant, *_: inner.graph(variant)
    (way,) = groupings_of(statement, tensors, fact)
    assert str(way.statement) == "Z[F[t],i,u] += V[i,r] * X[T[P[t]],I[i,r],u] * A[P[t]]"
    coefficients = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE)
    coefficients[0, 1], coefficients[0, 0], coefficients[1, 2] = 0.5, -2.0, 1.5
    products = torch.einsum("ij,pju,p->piu", coefficients, given["X"][given["T"]], given["A"] * kept)
    expected = torch.zeros(size, dtype=torch.float64, device=DEVICE).index_add_(0, given["E"].clamp(min=0), products)
    for run in (GroupedRunner(statement, way, kernel), GroupedRunner(statement, way, kernel).anew):
        torch.testing.assert_close(run(tensors, fact), expected)


def test_a_sorted_index_of_constant_tables_is_not_sorted_again():
    given, size, fact = over_tables(torch.arange(40) // 10)
    tensors = list(given.values())
    assert groupings_of(prepare(OVER_TABLES, ",".join(given), size, tensors, fact), tensors, fact) == ()


def test_atomic_sums_over_constant_tables_are_not_sorted_where_results_must_repeat():
    given, size, fact = over_tables(torch.arange(40).flip(0) // 10)
    tensors = list(given.values())
    statement = prepare(OVER_TABLES, ",".join(given), size, tensors, fact)
    assert len(groupings_of(statement, tensors, fact)) == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert groupings_of(statement, tensors, fact) == ()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_a_fact_says_about_rows_is_not_undone():
    given, size = operands("Y[E[p],c] += V[p] * X[p,c]")
    tensors = list(given.values())
    statement = prepare("Y[E[p],c] += V[p] * X[p,c]", ",".join(given), size, tensors, WrittenOnce("E"))
    assert groupings_of(statement, tensors, WrittenOnce("E")) == ()


@pytest.mark.kernels
def test_a_launch_plan_serves_lengths_that_have_as_many_tiles():
    """Of two lengths with as many tiles a plan for all lengths was made, whose programs left out further tiles.

    Where there were fewer tiles they read beyond the last one.
    """
    expr, cache, kept = "Y[E[p],c,m] += X[p,c] * Z[p,m]", {}, []

    def kernel(statement, variant, tensors, fact, _):
        own = statement.problem(tensors, fact)
        atomic = next(way for way in candidates(own) if way.schedule.strategy == "atomic")
        kept.append(own.resized(kept[0]) if kept else own.launcher(atomic))
        return kept[-1]

    def run(*tensors):
        statement = prepare(expr, ",".join(given), size, list(tensors), None)
        way = next(way for way in groupings_of(statement, list(tensors)) if way.tile > 1)
        return GroupedRunner(statement, way, kernel)(list(tensors))

    for length in (140, 141, 142, 250, 251, 252, 141):
        given, size = operands(expr, length)
        tensors = list(given.values())
        result = planned(cache, "grouped", run, tensors, varies=True, owned=None)
        torch.testing.assert_close(result, expected(expr, given, size))
