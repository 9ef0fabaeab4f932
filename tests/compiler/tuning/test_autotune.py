"""Choosing a kernel: what was measured before is used, and two processes do not measure the same thing twice."""

import re
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.errors import SettingError, UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.runtime import launch
from insum_ops.compiler.tuning import autotune, clock, settings
from insum_ops.compiler.tuning.autotune import Timing, choose, recall
from insum_ops.compiler.tuning.problem import candidates
from insum_ops.compiler.tuning.settings import tuning_mode
from insum_ops.compiler.tuning.tuning_cache import Entry, TuningCache
from insum_ops.formats.facts import OwnedRows
from insum_ops.formats.row_facts import row_facts


@pytest.fixture
def problem(tmp_path, monkeypatch):
    """A problem as a GPU would see it: tuning is on, nothing is interpreted, nothing is known yet."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("INSUM_TUNE", raising=False)
    monkeypatch.setattr(settings, "INTERPRETED", False)
    tensors = {"A": torch.randn(40, 50), "B": torch.randn(50, 60)}
    return problem_for(bind(parse("C[i,j] += A[i,k] * B[k,j]"), tensors), tensors)


def building(monkeypatch, refuse=lambda source: None):
    """Kernels are refused where the given function has an error for their source, and built elsewhere without a GPU."""

    def compiled(kernel, tensors, numbers, programs):
        error = refuse(kernel.source)
        if error is not None:
            raise error
        return lambda programs, arguments: None

    monkeypatch.setattr(launch, "compiled", compiled)
    autotune._forget()


def chosen(problem):
    """The source of what runs a problem."""
    tensors = [torch.zeros(shape) for shape in problem.bound.shapes.values()]
    return choose(problem, tensors, None).kernel.source


def sources(problem):
    return [problem.launcher(candidate).kernel.source for candidate in candidates(problem)]


def test_a_measured_config_is_used_without_measuring(problem, monkeypatch):
    building(monkeypatch)
    other = candidates(problem)[1]
    TuningCache().put(problem.key, Entry(other.choices, ((other.choices, 0.5),)))
    assert chosen(problem) == sources(problem)[1]


def test_what_another_process_measured_meanwhile_is_used(problem, monkeypatch):
    building(monkeypatch)
    other = candidates(problem)[1].choices
    answers = iter([None, *[Entry(other, ((other, 0.5),))] * 3])
    monkeypatch.setattr(autotune, "_entry", lambda _: next(answers))
    assert chosen(problem) == sources(problem)[1]


def test_a_config_that_is_not_ours_is_not_used(problem):
    foreign = {**candidates(problem)[0].choices, "num_warps": 64}
    TuningCache().put(problem.key, Entry(foreign, ((foreign, 0.5),)))
    assert recall(problem) is None


PASS_FAILED = RuntimeError("PassManager::run failed")
ERRORS = [OutOfResources(200_000, 101_376, "shared memory"), PTXASError("bad"), PASS_FAILED]


def test_the_next_best_runs_where_the_measured_config_can_not_be_built_any_more(problem, monkeypatch):
    first, second, third = [candidate.choices for candidate in candidates(problem)[:3]]
    TuningCache().put(problem.key, Entry(third, ((second, 0.4), (third, 0.5), (first, 0.6))))
    own = sources(problem)
    building(monkeypatch, lambda source: PASS_FAILED if source == own[2] else None)
    assert chosen(problem) == own[1]
    assert recall(problem) == candidates(problem)[1]


def test_what_can_not_be_built_any_more_is_measured_anew(problem, monkeypatch):
    first = candidates(problem)[0].choices
    TuningCache().put(problem.key, Entry(first, ((first, 0.5),)))
    own = sources(problem)
    building(monkeypatch, lambda source: PASS_FAILED if source == own[0] else None)
    monkeypatch.setattr(autotune, "device_milliseconds", lambda call, hopeless: 0.5)
    assert chosen(problem) == own[1]
    entry = TuningCache().get(problem.key)
    assert entry.config == candidates(problem)[1].choices
    assert entry.refused == ((first, "RuntimeError: PassManager::run failed"),)


def test_what_captured_graphs_would_get_is_left_out_where_it_can_not_be_built(problem, monkeypatch):
    first, second = [candidate.choices for candidate in candidates(problem)[:2]]
    TuningCache().put(problem.key, Entry(first, ((second, 0.1), (first, 0.5))))
    own = sources(problem)
    building(monkeypatch, lambda source: PASS_FAILED if source == own[1] else None)
    tensors = [torch.zeros(shape) for shape in problem.bound.shapes.values()]
    found = choose(problem, tensors, None)
    assert found.kernel.source == own[0]
    assert found.captured is None


def test_with_tuning_off_the_first_candidate_runs(problem, monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    building(monkeypatch)
    assert chosen(problem) == sources(problem)[0]


@pytest.mark.cpu
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_with_tuning_off_the_first_candidate_runs_that_can_be_built(problem, error, monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    own = sources(problem)
    building(monkeypatch, lambda source: error if source == own[0] else None)
    assert chosen(problem) == own[1]
    building(monkeypatch, lambda source: error)
    message = f"none of the {len(own)} kernels of C[i,j] += A[i,k] * B[k,j] could be built for cpu "
    with pytest.raises(UnsupportedError, match=rf"^{re.escape(message)}\({re.escape(type(error).__name__)}: [^\n]*\)$"):
        chosen(problem)


def groups(dtype=torch.float32):
    """A product over groups with facts: one launch over owned rows, or zeros and a launch."""
    AM, AK = torch.tensor([0, 1, 1]), torch.tensor([[0, 1], [1, 2], [0, 2]])
    tensors = {"AM": AM, "AK": AK, "AV": torch.randn(3, 2, dtype=dtype), "B": torch.randn(3, 64, dtype=dtype)}
    bound = bind(parse("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"), tensors, (2, 64))
    own = problem_for(bound, tensors, row_facts(AM, 2).owned("AM"))
    return own, {way.schedule.strategy: way for way in candidates(own)}


def test_what_waits_for_the_host_takes_one_launch():
    """A few microseconds on the device do not pay for a memset that keeps the host busy longer."""
    own, ways = groups()
    rank = lambda strategy, ms: autotune._rank(Timing(ways[strategy], ms), own.launcher(ways[strategy]))
    assert own.launcher(ways["owner"]).preparation == ""
    assert own.launcher(ways["store-or-atomic"]).preparation == "zero"
    assert rank("owner", 0.006) < rank("store-or-atomic", 0.003)
    assert rank("store-or-atomic", 0.05) < rank("owner", 0.06)
    assert rank("owner", 0.003) < rank("owner", 0.006)
    assert rank("owner", 9.0) < autotune._rank(Timing(ways["owner"], None, "spills"), None)


def test_a_cast_afterwards_keeps_the_host_busy_too():
    own, ways = groups(torch.float16)
    rank = lambda strategy, ms: autotune._rank(Timing(ways[strategy], ms), own.launcher(ways[strategy]))
    assert own.launcher(ways["store-or-atomic"]).is_wide
    assert rank("owner", 0.02) < rank("store-or-atomic", 0.009)
    assert rank("store-or-atomic", 0.035) < rank("owner", 0.036)


@pytest.mark.usefixtures("problem")  # for its empty cache
@pytest.mark.parametrize(("ms", "is_other"), [(0.003, True), (0.0055, True), (0.0059, False)])
def test_captured_graphs_get_what_is_faster_on_the_device(ms, is_other, monkeypatch):
    building(monkeypatch)
    own, ways = groups()
    eager, quick = ways["owner"].choices, ways["store-or-atomic"].choices
    TuningCache().put(own.key, Entry(eager, ((quick, ms), (eager, 0.006))))
    tensors = [torch.zeros(2)] * len(own.names)
    fact = OwnedRows("AM", "", *[torch.zeros(2)] * 4)
    found = choose(own, tensors, fact)
    assert found.schedule.strategy == "owner"
    assert (found.captured is not None) is is_other
    if is_other:
        assert found.captured.schedule.strategy == "store-or-atomic"
        assert own.resized(found).captured.kernel is found.captured.kernel
        assert choose(own, [], None).captured is not None  # from memory


def test_what_makes_its_output_another_way_has_no_other_for_captures():
    own, ways = groups()
    eager, quick = (own.launcher(ways[name]) for name in ("owner", "store-or-atomic"))
    assert autotune._with_captured(eager, quick).captured is quick
    quick.is_plain = False  # as where picked rows are filled
    assert autotune._with_captured(quick, eager).captured is None


def blocks_in(rows):
    """A product with blocks in these rows, as a problem."""
    blocks = len(rows)
    tensors = {
        "AM": torch.tensor(rows),
        "AV": torch.randn(blocks, 32, 32),
        "AK": torch.zeros(blocks, dtype=torch.int64),
        "B": torch.randn(8, 32, 64),
    }
    bound = bind(parse("C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]"), tensors, (4, 32, 64))
    return problem_for(bound, tensors, row_facts(tensors["AM"], 4).owned("AM"))


def test_rows_of_one_length_are_tuned_apart_from_others():
    """There an order by length brings nothing, so that a config without it may win."""
    even, uneven = blocks_in([0, 0, 1, 1, 2, 2, 3, 3]), blocks_in([0, 0, 1, 1, 2, 2, 3])
    assert even.rows == uneven.rows == (4, 2)
    assert not even.is_uneven
    assert uneven.is_uneven
    assert even.key != uneven.key
    assert any(candidate.config.longest_first for candidate in candidates(uneven))


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "quick")
    with pytest.raises(SettingError, match=r"^INSUM_TUNE is 'quick'; it must be one of default, full, off$"):
        tuning_mode()


def test_sizes_that_index_tensors_point_into_are_part_of_a_key():
    """Of 9 rows a program keeps all, of 4000 none."""

    def key(rows, columns):
        tensors = {"X": torch.ones(100, columns, 16), "V": torch.ones(30)}
        tensors |= {name: torch.zeros(30, dtype=torch.int32) for name in "IJ"}
        return problem_for(bind(parse("Z[b,I[p],w] += X[b,J[p],w] * V[p]"), tensors, (100, rows, 16)), tensors).key

    assert key(9, 9) == key(10, 11)
    assert key(9, 9) != key(4000, 9)
    assert key(9, 9) != key(9, 4000)


def test_lengths_of_one_power_of_two_share_a_key():
    def key(rows):
        tensors = {"I": torch.zeros(rows, dtype=torch.int64), "B": torch.randn(5, 60)}
        return problem_for(bind(parse("C[p,n] = B[I[p],n]"), tensors), tensors).key

    assert key(33) == key(64) != key(65)


@pytest.mark.parametrize(("second", "expected"), [(0.1, 0.05), (4.0, 4.0)])
def test_a_call_that_seems_hopeless_is_timed_again(second, expected, monkeypatch):
    spans = iter([5.0, second])
    monkeypatch.setattr(clock, "_elapsed_with_host", lambda call: (next(spans, 0.5), 0.0))
    monkeypatch.setattr(clock, "captured", lambda call, count: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert clock.device_milliseconds(lambda: None, hopeless=1.0) == expected
