"""Choosing a kernel: what was measured before is used, and two processes do not measure the same thing twice."""

import pytest
import torch

from insum_ops.compiler import autotune
from insum_ops.compiler.autotune import candidates, choose, recall, tuning_mode
from insum_ops.compiler.bind import bind
from insum_ops.compiler.cache import Entry, TuningCache
from insum_ops.compiler.errors import UnsupportedError
from insum_ops.compiler.parse import parse
from insum_ops.compiler.pipeline import problem_for


@pytest.fixture
def problem(tmp_path, monkeypatch):
    """A problem as a GPU would see it: tuning is on, nothing is interpreted, nothing is known yet."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("INSUM_TUNE", raising=False)
    monkeypatch.setattr(autotune, "INTERPRETED", False)
    tensors = {"A": torch.randn(40, 50), "B": torch.randn(50, 60)}
    return problem_for(bind(parse("C[i,j] += A[i,k] * B[k,j]"), tensors), tensors)


def forbidden(*_, **__):
    raise AssertionError("measured again")


def test_a_measured_config_is_used_without_measuring(problem, monkeypatch):
    monkeypatch.setattr(autotune, "_measure", forbidden)
    other = candidates(problem)[1]
    TuningCache().put(problem.key, Entry(other.choices, ((other.choices, 0.5),)))
    assert choose(problem, [], []).kernel.source == problem.launcher(other).kernel.source


def test_what_another_process_measured_meanwhile_is_used(problem, monkeypatch):
    monkeypatch.setattr(autotune, "_measure", forbidden)
    other, answers = candidates(problem)[1], iter([None, candidates(problem)[1]])
    monkeypatch.setattr(autotune, "recall", lambda _: next(answers))
    assert choose(problem, [], []).kernel.source == problem.launcher(other).kernel.source


def test_a_config_that_is_not_ours_is_not_used(problem):
    foreign = {**candidates(problem)[0].choices, "num_warps": 64}
    TuningCache().put(problem.key, Entry(foreign, ((foreign, 0.5),)))
    assert recall(problem) is None


def test_with_tuning_off_the_first_candidate_runs(problem, monkeypatch):
    monkeypatch.setattr(autotune, "_measure", forbidden)
    monkeypatch.setenv("INSUM_TUNE", "off")
    assert choose(problem, [], []).kernel.source == problem.launcher(candidates(problem)[0]).kernel.source


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "quick")
    with pytest.raises(UnsupportedError, match=r"^INSUM_TUNE is 'quick'; it must be one of default, full, off$"):
        tuning_mode()


def test_lengths_of_one_power_of_two_share_a_key():
    def key(rows):
        tensors = {"I": torch.zeros(rows, dtype=torch.int64), "B": torch.randn(5, 60)}
        return problem_for(bind(parse("C[p,n] = B[I[p],n]"), tensors), tensors).key

    assert key(33) == key(64) != key(65)
