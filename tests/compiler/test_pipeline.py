"""From a call to what runs it: plans are made once, and a statement without a kernel still runs, loudly."""

from dataclasses import replace

import pytest
import torch
from children import in_child
from process_caches import forget
from tolerances import TOLERANCE

from insum_ops import insum
from insum_ops.compiler import pipeline
from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.errors import SettingError, UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.routes import prepared
from insum_ops.compiler.tuning.problem import candidates
from insum_ops.formats import GroupCOO
from insum_ops.formats.torch_state import rounds_float32, uses_tensor_cores

pytestmark = pytest.mark.every_route

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
    monkeypatch.setenv("INSUM_TUNE", "off")  # nothing to time routes with
    forget()
    given = tensors()
    message = (
        "^no config of this statement fits a small GPU: OutOfResources; "
        "running it as separate torch operations instead$"
    )
    with pytest.warns(UserWarning, match=message):
        result = insum(SPMM, size=(4, 3), **given)
    torch.testing.assert_close(result, dense(**given), **TOLERANCE[torch.float32])
    insum(SPMM, size=(4, 3), **given)  # said once
    forget()


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


@pytest.mark.parametrize("is_seeded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_deterministic_sums_that_may_not_be_rounded_are_not(dtype, is_seeded):
    """Products that overflow, or that are no half precision, meet in float32."""
    A = torch.tensor([300.0, 300.0, 1 + 2**-7, 1.0], dtype=dtype)
    B = torch.tensor([300.0, -300.0, 1 + 2**-7, -1 - 2**-6], dtype=dtype)
    extra = {"C": torch.tensor([2.0, 0.0], dtype=dtype)} if is_seeded else {}
    torch.use_deterministic_algorithms(True)
    try:
        M = torch.tensor([0, 0, 1, 1])
        result = insum("C[M[p]] += A[p] * B[p]", M=M, A=A, B=B, size=None if is_seeded else (2,), **extra)
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.dtype == dtype
    assert result.tolist() == [2.0 * is_seeded, 2**-14]


def test_what_runs_while_a_graph_is_captured_is_for_it_alone(monkeypatch):
    """Nothing is tuned then; what comes later is not to be held to it."""
    given = [torch.ones(3), torch.ones(3)]
    bound = bind(parse("C[i] = A[i] * B[i]"), dict(zip("AB", given)))
    statement = prepared.prepare("C[i] = A[i] * B[i]", "A,B", None, given, None)
    statement.runners.clear()
    monkeypatch.setattr(prepared, "is_captured", lambda device: True)
    monkeypatch.setattr(statement, "bound", replace(bound, device=torch.device("cuda")))
    monkeypatch.setattr(pipeline, "has_kernels", lambda device: True)
    monkeypatch.setattr(pipeline, "fastest_route", lambda *_: lambda tensors, fact: "captured")
    assert pipeline.runner_of(statement, given, None)(given, None) == "captured"
    assert not statement.runners
    monkeypatch.setattr(prepared, "is_captured", lambda device: False)
    assert pipeline.runner_of(statement, given, None)(given, None) == "captured"
    assert statement.runners


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has no such setting")
def test_torchs_newer_settings_of_precision_are_obeyed():
    """Torch's older function raises once they are used, so they have a process of their own."""

    def obeyed():
        matmul, seen = torch.backends.cuda.matmul, [rounds_float32()]
        for owner, word in ((matmul, "tf32"), (matmul, "ieee"), (matmul, "none"), (torch.backends, "tf32")):
            owner.fp32_precision = word
            assert insum("C[i] = A[i]", A=torch.ones(3)).tolist() == [1.0] * 3
            assert uses_tensor_cores(torch.float32) == rounds_float32()
            seen.append(rounds_float32())
        assert seen == [False, True, False, False, True]

    in_child(obeyed)


def test_a_misspelt_mode_is_an_error_and_no_slow_path(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "fast")
    monkeypatch.setattr(pipeline, "has_kernels", lambda device: True)
    forget()
    with pytest.raises(SettingError, match=r"^INSUM_TUNE is 'fast'; it must be one of default, full, off$"):
        insum(SPMM, size=(4, 3), **tensors())
    forget()


def test_a_format_is_rewritten_once():
    A = GroupCOO.from_dense(torch.eye(5), group_size=1)
    B = torch.randn(5, 2)
    for _ in range(2):
        assert torch.equal(insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), B)


def test_more_programs_than_a_launch_can_have_are_refused():
    rows = 2**31 + 8
    huge = torch.empty(1).expand(rows, 2, 2)
    bound = bind(parse("C[i,j] = A[i,j,k]"), {"A": huge})
    problem = prepared.problem_for(bound, {"A": huge})
    candidate = candidates(problem)[0]
    blocks = tuple((name, 1) for name, _ in candidate.config.blocks)
    narrow = replace(candidate, config=replace(candidate.config, blocks=blocks))
    with pytest.raises(
        UnsupportedError, match=r"^C\[i,j\] = A\[i,j,k\] needs \d+ programs, more than one launch can have$"
    ):
        problem.launcher(narrow)


@pytest.mark.cpu
def test_a_gpu_without_triton_runs_torch_operations(monkeypatch):
    monkeypatch.setattr(prepared, "TRITON_VERSION", "none")
    monkeypatch.setattr(prepared, "INTERPRETED", False)
    words = (
        "Triton is not installed, so statements run as separate torch operations; a torch for Linux brings it, with "
        "CUDA as triton and with ROCm as triton-rocm"
    )
    with pytest.warns(UserWarning, match=f"^{words}$"):
        assert not prepared.has_kernels(torch.device("cuda"))
