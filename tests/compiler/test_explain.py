"""`explain` shows every stage of a statement and runs none of them; `tune` times what it can."""

from __future__ import annotations

import ast
from textwrap import indent
from typing import Any

import pytest
import torch
from statements import IS_INTERPRETED
from torch import fx

import insum_ops
from insum_ops import explain, insum, tune
from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.codegen import Config
from insum_ops.compiler.explain import Explanation, Tuning
from insum_ops.compiler.language.errors import IndexRangeError, UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.planning.schedule import Schedule
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.runtime.launch import Launcher
from insum_ops.compiler.tuning.autotune import Timing
from insum_ops.compiler.tuning.problem import Candidate, Problem, candidates
from insum_ops.compiler.tuning.tuning_cache import Entry, TuningCache
from insum_ops.formats import BlockGroupCOO, GroupCOO

SPMM = "C[m,n] += A[m,k] * B[k,n]"


def matrix() -> torch.Tensor:
    A = torch.zeros(5, 6)
    A[0, :3], A[2, 1], A[4, 5] = 1, 2, 3
    return A


def spmm() -> Explanation:
    return explain(SPMM, A=GroupCOO.from_dense(matrix(), group_size=2), B=torch.ones(6, 40))


def test_the_printed_text() -> None:
    found = spmm()
    assert (
        str(found)
        == f"""\
statement
    C[m,n] += A[m,k] * B[k,n]

rewritten
    C[AM[p],n] += AV[p,q] * B[AK[p,q],n]

extents
    index    extent
    m             5
    k             6
    n            40
    p             4
    q             2

FX program
    def forward(AM, AV, AK, B):
        ge = torch.ge(AK, 0)
        narrow = torch.narrow(B, 0, 0, 1)
        zeros_like = torch.zeros_like(narrow)
        size = B.size(0)
        where = torch.where(ge, AK, size)
        cat = torch.cat([B, zeros_like], 0)
        where_1 = torch.where(ge, AV, 0)
        reshape = torch.reshape(where, (-1, 2))
        reshape_1 = torch.reshape(where_1, (-1, 2))
        embedding_bag = torch.nn.functional.embedding_bag(reshape, cat, per_sample_weights = reshape_1, mode = 'sum')
        zeros = torch.zeros((5, 40), dtype = torch.float32, device = device(type='cpu'))
        index_add_ = zeros.index_add_(0, AM, embedding_bag)
        return index_add_

schedule
{indent(str(found.schedule), "    ")}

default config
    {found.config}

Triton source
{indent(str(found.source).strip(), "    ")}"""
    )
    assert repr(found) == str(found)


def test_the_parts_are_attributes() -> None:
    found = spmm()
    assert str(found.statement) == SPMM
    assert str(found.rewritten) == "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
    assert found.extents == {"m": 5, "k": 6, "n": 40, "p": 4, "q": 2}
    assert isinstance(found.graph, fx.GraphModule)
    assert isinstance(found.schedule, Schedule)
    assert isinstance(found.config, Config)
    assert not found.is_tuned
    assert isinstance(found.source, str)
    with pytest.raises(AttributeError):
        found.source = ""  # type: ignore[misc]


def test_the_schedule_says_how_the_result_is_scattered() -> None:
    found = spmm()
    assert found.schedule is not None
    assert str(found.schedule).splitlines()[0] == f"scatter: {found.schedule.strategy}, product: multiply-add"


def test_the_source_is_python_that_defines_a_kernel() -> None:
    source = spmm().source
    assert source is not None
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == 1
    assert "@triton.jit" in source


def test_the_graph_is_what_insum_runs() -> None:
    A, B = GroupCOO.from_dense(matrix(), group_size=2), torch.rand(6, 40)
    found = explain(SPMM, A=A, B=B)
    assert torch.equal(found.graph(A.AM, A.AV, A.AK, B), insum(SPMM, A=A, B=B))


def test_a_statement_without_a_format_is_not_rewritten() -> None:
    found = explain("C[i] += 0.5 * A[i,k]", A=torch.ones(3, 4))
    assert found.rewritten is None
    assert str(found).startswith(
        """\
statement
    C[i] += 0.5 * A[i,k]

extents
    index    extent
    i             3
    k             4

FX program
    def forward(A):
        einsum = torch.einsum('ik->i', A)
        mul = torch.mul(einsum, 0.5)
        contiguous = mul.contiguous()
        return contiguous

schedule
"""
    )


def test_a_blocked_format() -> None:
    A = BlockGroupCOO.from_dense(torch.eye(64), block_size=(16, 16), group_size=1)
    found = explain(SPMM, A=A, B=torch.ones(64, 32))
    assert str(found.rewritten) == "C[AM[p],bm,n] += AV[p,q,bm,bk] * B[AK[p,q],bk,n]"
    assert found.extents == {"m": 64, "k": 64, "n": 32, "p": 4, "q": 1, "bm": 16, "bk": 16}
    assert found.schedule is not None
    assert found.schedule.uses_dot


def test_no_kernel_where_no_product_is_formed() -> None:
    found = explain("C[i] += A[i,k]", A=torch.ones(3, 0))
    assert (found.schedule, found.config, found.source) == (None, None, None)
    assert str(found).endswith(
        """
FX program
    def forward(A):
        zeros = torch.zeros((3,), dtype = torch.float32, device = device(type='cpu'))
        return zeros

kernel
    none: no product is formed"""
    )


def test_no_kernel_where_no_scatter_is_deterministic() -> None:
    A, E = torch.ones(200), torch.zeros(200, dtype=torch.int64)
    torch.use_deterministic_algorithms(True)
    try:
        found = explain("C[E[p]] += A[p]", A=A, E=E, size=(200,))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.source is None
    assert str(found).endswith("kernel\n    none: no scatter in one kernel is deterministic")


def test_tensors_without_data_will_do() -> None:
    E = torch.empty(7, dtype=torch.int64, device="meta")
    found = explain("C[E[p]] += A[p]", E=E, A=torch.empty(7, device="meta"), size=(3,))
    assert "torch.ge(E, 0)" in str(found)
    assert found.source is not None


def test_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(fx.GraphModule, "__call__", never)
    monkeypatch.setattr(Launcher, "__call__", never)
    monkeypatch.setattr(Launcher, "build", never)
    B = torch.rand(6, 40, requires_grad=True)
    explain(SPMM, A=GroupCOO.from_dense(matrix()), B=B)
    assert B.grad is None


def test_an_index_out_of_range_is_refused_like_by_insum() -> None:
    tensors = {"A": torch.ones(3), "E": torch.tensor([3])}
    messages = []
    for function in (insum, explain):
        with pytest.raises(IndexRangeError) as caught:
            function("C[p] = A[E[p]]", **tensors)  # type: ignore[operator]
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def problem_of(found: Explanation, tensors: dict[str, torch.Tensor]) -> Problem:
    return problem_for(bind(parse(str(found.statement)), tensors), tensors, None, frozenset())


@pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels are never tuned")
def test_a_tuned_config_is_shown(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("INSUM_TUNE", "default")
    tensors = {"A": torch.ones(64, 64), "B": torch.ones(64, 64)}
    expr = "C[i,j] += A[i,k] * B[k,j]"
    found = explain(expr, **tensors)
    assert not found.is_tuned
    assert "\ndefault config\n" in str(found)

    problem = problem_of(found, tensors)
    other = candidates(problem)[1]
    assert other.config != found.config
    TuningCache().put(problem.key, Entry(other.choices, ((other.choices, 0.5),)))
    tuned = explain(expr, **tensors)
    assert tuned.is_tuned
    assert tuned.config == other.config
    assert f"\ntuned config\n    {other.config}\n" in str(tuned)

    monkeypatch.setenv("INSUM_TUNE", "off")
    assert explain(expr, **tensors).config == found.config


MAX = "C[m,n] = max(A[m,k] * B[k,n])"


def test_a_maximum_is_shown_down_to_its_kernel() -> None:
    found = explain(MAX, A=GroupCOO.from_dense(matrix()), B=torch.rand(6, 40))
    assert str(found.rewritten) == "C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])"
    assert found.schedule is not None
    assert "scatter: owner, product: multiply-max" in str(found)
    assert found.source is not None
    assert "tl.maximum" in found.source
    assert "ptr_of_winners" not in found.source
    assert "torch.amax" in str(found)


def test_winners_are_shown_where_a_gradient_would_need_them() -> None:
    found = explain(MAX, A=GroupCOO.from_dense(matrix()), B=torch.rand(6, 40, requires_grad=True))
    assert found.source is not None
    assert "ptr_of_winners" in found.source
    assert "return (" in found.graph.code


def test_why_a_maximum_has_no_kernel() -> None:
    tensors = {"E": torch.tensor([0, 1, 1]), "A": torch.ones(3)}
    found = explain("C[E[p],E[p]] = max(A[p])", **tensors, size=(2, 2))
    assert found.schedule is None
    assert found.why_no_kernel == (
        "max needs rows of C that a format or one index tensor over one index chooses, "
        "so this runs as separate torch operations"
    )
    assert str(found).endswith(f"kernel\n    none: {found.why_no_kernel}")


def test_a_maximum_by_an_index_tensor_takes_its_rows_in_order() -> None:
    found = explain("C[E[p]] = max(A[p])", E=torch.tensor([0, 1, 1]), A=torch.ones(3), size=(2,))
    assert found.route == "tiles of equal index"
    assert found.why_no_kernel.endswith("by a kernel over tables of it")


def test_a_candidate_names_its_reduction() -> None:
    found = explain(MAX, A=torch.ones(3, 6), B=torch.ones(6, 40))
    assert found.schedule is not None
    assert found.config is not None
    assert str(Candidate(found.schedule, found.config)).startswith("store max ")


def test_tuning_needs_a_gpu() -> None:
    with pytest.raises(UnsupportedError) as caught:
        tune(SPMM, A=GroupCOO.from_dense(matrix()), B=torch.ones(6, 40))
    assert str(caught.value) == "tuning needs CUDA tensors, but these are on cpu; move them with .cuda()"


def test_a_tuning_prints_as_a_table() -> None:
    found = spmm()
    assert found.schedule is not None
    first = Candidate(found.schedule, Config((("r", 4), ("n", 64)), 1, 2))
    second = Candidate(found.schedule, Config((("r", 128), ("n", 64)), 8, 2))
    tuning = Tuning(found.statement, (Timing(first, 0.0125), Timing(second, None, "OutOfResources")))
    assert tuning.best.candidate is first
    assert str(tuning) == repr(tuning) == "\n".join([SPMM, *map(str, tuning.timings)])
    assert "0.0125 ms" in str(tuning)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tuning_on_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("INSUM_TUNE", "default")
    A, B = GroupCOO.from_dense(matrix().cuda(), group_size=2), torch.rand(6, 40, device="cuda")
    found = tune(SPMM, A=A, B=B)
    assert found.best.milliseconds is not None
    explained = explain(SPMM, A=A, B=B)
    assert explained.is_tuned
    assert explained.config == found.best.candidate.config
    torch.testing.assert_close(insum(SPMM, A=A, B=B), matrix().cuda() @ B)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_to_tune() -> None:
    with pytest.raises(UnsupportedError) as caught:
        tune("C[i] += A[i,k]", A=torch.ones(3, 0, device="cuda"))
    assert str(caught.value) == "there is nothing to tune: no product is formed, so no kernel runs"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_maximum_without_a_kernel_can_not_be_tuned() -> None:
    tensors = {"E": torch.tensor([0, 1, 1], device="cuda"), "A": torch.ones(3, device="cuda")}
    with pytest.raises(UnsupportedError) as caught:
        tune("C[E[p],E[p]] = min(A[p])", **tensors, size=(2, 2))
    assert str(caught.value) == (
        "there is nothing to tune: min needs rows of C that a format or one index tensor over one index chooses, "
        "so this runs as separate torch operations"
    )


def test_both_are_public() -> None:
    assert {"explain", "tune"} <= set(insum_ops.__all__)


def test_tokens_grouped_by_expert_stay_so_and_meet_their_weights_in_a_dot() -> None:
    routes = torch.zeros(4, 40)
    routes[torch.randint(4, (40,)), torch.arange(40)] = 1.0
    tensors = {"R": GroupCOO.from_dense(routes, group_size=16), "X": torch.ones(40, 32), "W": torch.ones(4, 32, 32)}
    found = explain("Y[t,m] += R[e,t] * X[t,c] * W[e,c,m]", **tensors)
    assert str(found.rewritten) == "Y[RT[p,q],m] += RV[p,q] * X[RT[p,q],c] * W[RE[p],c,m]"
    assert found.schedule is not None
    assert found.schedule.uses_dot
