"""From a call to what runs it: plans are made once, and a statement without a kernel still runs, loudly."""

from dataclasses import replace

import pytest
import torch
from tolerances import TOLERANCE

from insum_ops import insum
from insum_ops.compiler import pipeline, ready
from insum_ops.compiler.bind import bind
from insum_ops.compiler.errors import UnsupportedError
from insum_ops.compiler.parse import parse
from insum_ops.compiler.problem import candidates
from insum_ops.formats import GroupCOO

SPMM = "C[AM[p],n] += AV[p] * B[AK[p],n]"


def tensors(entries=9):
    return {
        "AM": torch.randint(4, (entries,)),
        "AK": torch.randint(6, (entries,)),
        "AV": torch.randn(entries),
        "B": torch.randn(6, 3),
    }


def dense(AM, AK, AV, B):
    A = torch.zeros(4, 6, dtype=torch.float64).index_put((AM, AK), AV.double(), accumulate=True)
    return (A @ B.double()).float()


def test_a_plan_is_made_once_for_equal_shapes():
    pipeline._plans.clear()
    for _ in range(3):
        insum(SPMM, size=(4, 3), **tensors())
    assert len(pipeline._plans) == 1
    insum(SPMM, size=(4, 3), **tensors(10))
    assert len(pipeline._plans) == 2


def test_plans_do_not_fill_memory(monkeypatch):
    monkeypatch.setattr(pipeline, "PLANS", 3)
    for entries in range(1, 8):
        insum(SPMM, size=(4, 3), **tensors(entries))
        assert len(pipeline._plans) <= 3


def test_a_new_minus_one_is_noticed_though_shapes_are_equal():
    given = tensors()
    insum(SPMM, size=(4, 3), **given)
    given["AK"][2] = -1
    expected = {name: tensor[given["AK"] >= 0] if name != "B" else tensor for name, tensor in given.items()}
    torch.testing.assert_close(insum(SPMM, size=(4, 3), **given), dense(**expected), **TOLERANCE[torch.float32])


def test_a_statement_that_no_kernel_fits_runs_as_torch_operations_and_says_so(monkeypatch):
    def refuse(*_):
        raise UnsupportedError("no config of this statement fits a small GPU: OutOfResources")

    monkeypatch.setattr(pipeline, "has_kernels", lambda device: True)
    monkeypatch.setattr(pipeline, "choose", refuse)
    pipeline._plans.clear()
    ready._plans.clear()
    given = tensors()
    message = (
        "^no config of this statement fits a small GPU: OutOfResources; "
        "running it as separate torch operations instead$"
    )
    with pytest.warns(UserWarning, match=message):
        result = insum(SPMM, size=(4, 3), **given)
    torch.testing.assert_close(result, dense(**given), **TOLERANCE[torch.float32])
    insum(SPMM, size=(4, 3), **given)  # said once
    pipeline._plans.clear()
    ready._plans.clear()


@pytest.mark.parametrize("is_seeded", [False, True])
def test_deterministic_mode_scatters_in_order(is_seeded):
    given = tensors()
    extra = {"C": torch.randn(4, 3)} if is_seeded else {}
    size = None if is_seeded else (4, 3)
    torch.use_deterministic_algorithms(True)
    try:
        results = [insum(SPMM, size=size, **given, **extra) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    expected = dense(**given) + extra.get("C", 0)
    torch.testing.assert_close(results[0], expected, **TOLERANCE[torch.float32])
    assert all(torch.equal(results[0], result) for result in results)


def test_a_format_is_rewritten_once():
    A = GroupCOO.from_dense(torch.eye(5), group_size=1)
    B = torch.randn(5, 2)
    for _ in range(2):
        assert torch.equal(insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), B)


def test_more_programs_than_a_launch_can_have_are_refused():
    rows = 2**31 + 8
    huge = torch.empty(1).expand(rows, 2, 2)
    bound = bind(parse("C[i,j] = A[i,j,k]"), {"A": huge})
    problem = pipeline.problem_for(bound, {"A": huge})
    candidate = candidates(problem)[0]
    blocks = tuple((name, 1) for name, _ in candidate.config.blocks)
    narrow = replace(candidate, config=replace(candidate.config, blocks=blocks))
    with pytest.raises(
        UnsupportedError, match=r"^C\[i,j\] = A\[i,j,k\] needs \d+ programs, more than one launch can have$"
    ):
        problem.launcher(narrow)
