"""A kernel that Triton can't build is dropped and noted; another one runs, or torch does, and no raw error gets out."""

from __future__ import annotations

import re
import subprocess
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton
from process_caches import forget
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches
from triton.runtime.errors import OutOfResources, PTXASError

from insum_ops import explain, insum
from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.codegen import Kernel
from insum_ops.compiler.explain import Tuning
from insum_ops.compiler.in_place import run_in_place
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.routes import prepared
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.runtime import launch
from insum_ops.compiler.tuning import autotune

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are interpreted here: run `make test-interpreter`"),
]

PRODUCT = "C[m,n] += A[m,k] * B[k,n]"
REFUSED = RuntimeError("PassManager::run failed\nmodule {\n  tt.func public @insum_kernel\n}")
REASON = "RuntimeError: PassManager::run failed"
Refuse = Callable[..., list[str]]


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, device=DEVICE)


def start_afresh() -> None:
    forget()
    prepared._warned.clear()
    autotune._forget()


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Has the compiler raise an error for the kernels that a function picks, given those that were asked for before."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    start_afresh()
    build, asked = launch.compiled, list[str]()

    def start(is_refused: Callable[[Sequence[str]], bool], error: BaseException = REFUSED) -> list[str]:
        def compiled(kernel: Kernel, *given: Any) -> Any:
            asked.append(kernel.source)
            if is_refused(asked):
                raise error
            return build(kernel, *given)

        monkeypatch.setattr(launch, "compiled", compiled)
        return asked

    yield start
    start_afresh()


def none_built(count: int, statement: str = PRODUCT, reason: str = REASON) -> str:
    return f"none of the {count} kernels of {statement} could be built for {DEVICE} ({reason})"


def ways(A: torch.Tensor, B: torch.Tensor) -> Any:
    tensors = {"A": A, "B": B}
    return problem_for(bind(parse(PRODUCT), tensors), tensors, padded=frozenset())


def test_the_next_config_runs_where_one_is_refused(refuse: Refuse) -> None:
    A, B = normal(40, 20), normal(20, 70)
    asked = refuse(lambda asked: len(set(asked)) == 1)
    assert_matches(insum(PRODUCT, A=A, B=B), A @ B)
    assert len(set(asked)) == 2


def test_what_was_refused_is_explained(refuse: Refuse) -> None:
    A, B = normal(40, 20), normal(20, 70)
    first, second, *_ = ways(A, B).ways
    refuse(lambda asked: len(set(asked)) == 1)
    insum(PRODUCT, A=A, B=B)
    found = explain(PRODUCT, A=A, B=B)
    assert found.config == second.config
    assert found.refused == ((first, REASON),)
    assert str(found).endswith(f"\n\ncould not be built\n    {first}  {REASON}")


def test_torch_runs_a_statement_of_which_no_kernel_can_be_built_and_one_warning_says_so(refuse: Refuse) -> None:
    A, B = normal(40, 20), normal(20, 70)
    count = len(ways(A, B).ways)
    asked = refuse(lambda asked: True)
    message = f"{none_built(count)}; running it as separate torch operations instead"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        assert_matches(insum(PRODUCT, A=A, B=B), A @ B)
    assert len(asked) == count
    with warnings.catch_warnings():  # said once, and tried once for all lengths that share their kernels
        warnings.simplefilter("error")
        assert_matches(insum(PRODUCT, A=A, B=B), A @ B)
        for rows in (70, 100, 101):
            A = normal(rows, 20)
            assert_matches(insum(PRODUCT, A=A, B=B), A @ B)
    found = explain(PRODUCT, A=normal(40, 20), B=B)
    assert found.source is None
    assert found.why_no_kernel == f"none of the {count} that there are could be built"
    assert len(found.refused) == count


def test_a_gradient_of_which_no_kernel_can_be_built_is_right(refuse: Refuse) -> None:
    A, B = normal(40, 20).requires_grad_(), normal(20, 70)
    refuse(lambda asked: True)
    with pytest.warns(UserWarning, match="could be built") as told:
        insum(PRODUCT, A=A, B=B).sum().backward()
    assert [str(warning.message).split(" could be built")[0].split(" kernels of ")[1] for warning in told] == [
        PRODUCT,
        "dA[m,k] += dC[m,n] * B[k,n]",
    ]
    assert A.grad is not None
    assert_matches(A.grad, torch.ones_like(A @ B).detach() @ B.T)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfResources(200_000, 101_376, "shared memory"), "OutOfResources: out of resource: shared memory, Required"),
        (PTXASError("`ptxas` failed with error code 1\nptxas /tmp/x.ptx"), "PTXASError: PTXAS error: `ptxas` failed"),
        (triton.CompilationError("a\nb", None, "tf32 is not known"), "CompilationError: tf32 is not known"),
        (subprocess.CalledProcessError(1, ["ptxas"]), "CalledProcessError: Command '['ptxas']' returned"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_the_compiler_raises_is_a_refusal(error: Exception, reason: str, refuse: Refuse) -> None:
    A, B = normal(40, 20), normal(20, 70)
    refuse(lambda asked: True, error)
    with pytest.warns(UserWarning, match="could be built") as told:
        assert_matches(insum(PRODUCT, A=A, B=B), A @ B)
    (warning,) = told
    assert f"({reason}" in str(warning.message)
    assert "\n" not in str(warning.message)
    assert len(str(warning.message)) < 300


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory")], ids=lambda e: type(e).__name__
)
def test_what_is_no_fault_of_a_kernel_passes(error: BaseException, refuse: Refuse) -> None:
    A, B = normal(40, 20), normal(20, 70)
    refuse(lambda asked: True, error)
    with pytest.raises(type(error)):
        insum(PRODUCT, A=A, B=B)
    refuse(lambda asked: False)
    assert_matches(insum(PRODUCT, A=A, B=B), A @ B)


def test_a_table_of_times_notes_what_was_refused(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [normal(40, 20), normal(20, 70)]
    problem = ways(*given)
    first = problem.launcher(problem.ways[0]).kernel.source
    refuse(lambda asked: asked[-1] == first)
    monkeypatch.setattr(autotune, "device_milliseconds", lambda call, hopeless: 0.5)
    timings, best = autotune.tune(problem, given, None)
    assert_matches(best(given), given[0] @ given[1])
    assert timings[-1] == autotune.Timing(problem.ways[0], None, REASON)
    assert str(Tuning(parse(PRODUCT), timings)).splitlines()[-1] == f"{REASON}  {problem.ways[0]}"
    assert autotune.refusals(problem) == ((problem.ways[0], REASON),)


def test_nothing_is_tuned_where_nothing_can_be_built(refuse: Refuse) -> None:
    given = [normal(40, 20), normal(20, 70)]
    problem = ways(*given)
    refuse(lambda asked: True)
    with pytest.raises(UnsupportedError) as caught:
        autotune.tune(problem, given, None)
    assert str(caught.value) == none_built(len(problem.ways))


def unaligned(*size: int) -> torch.Tensor:
    """A tensor that does not begin at a multiple of 16 bytes."""
    return normal(1 + torch.Size(size).numel())[1:].view(size)


def test_a_kernel_that_can_not_be_built_for_a_view_runs_on_a_copy(refuse: Refuse) -> None:
    A, B = normal(40, 20), normal(20, 70)
    assert_matches(insum(PRODUCT, A=A, B=B), A @ B)
    refuse(lambda asked: True)
    for _ in range(2):
        for left, right in ((unaligned(40, 20), B), (A, unaligned(20, 70)), (A, B)):
            assert_matches(insum(PRODUCT, A=left, B=right), left @ right)


def test_a_kernel_for_a_view_runs_on_what_is_aligned_too(refuse: Refuse) -> None:
    A, B = unaligned(40, 20), normal(20, 70)
    assert_matches(insum(PRODUCT, A=A, B=B), A @ B)
    refuse(lambda asked: True)
    A = normal(40, 20)
    assert_matches(insum(PRODUCT, A=A, B=B), A @ B)


def test_an_expanded_view_is_copied_as_one(refuse: Refuse) -> None:
    vector, B = normal(8), normal(20, 70)
    expand = lambda vector: vector[2:7:4, None].expand(2, 20)
    assert_matches(insum(PRODUCT, A=expand(vector), B=B), expand(vector) @ B)
    refuse(lambda asked: True)
    A = expand(normal(9)[1:])
    assert_matches(insum(PRODUCT, A=A, B=B), A @ B)


@pytest.mark.parametrize("is_built_once", [False, True])
def test_what_can_not_be_written_to_its_place_is_copied_there(is_built_once: bool, refuse: Refuse) -> None:
    A, B = normal(3, 4), normal(4, 2)
    write_to = lambda place: run_in_place(PRODUCT, "A,B", (3, 2), [A, B], None, place=place)
    insum(PRODUCT, A=A, B=B)
    if is_built_once:
        write_to(normal(3, 6)[:, 2:4])
    refuse(lambda asked: True)
    for start in (3, 2, 3):
        whole = normal(3, 6)
        expected = whole.clone()
        expected[:, start : start + 2] = A @ B
        place = whole[:, start : start + 2]
        assert write_to(place) is place
        assert_matches(whole, expected)


def test_a_sum_grows_in_a_place_for_which_no_kernel_can_be_built(refuse: Refuse) -> None:
    expr, A, index = "C[I[p],n] += A[p,n]", normal(4, 3), torch.tensor([0, 1, 0, 1], device=DEVICE)
    C = normal(2, 3)
    add_to = lambda total: run_in_place(expr, "A,I,C", (2, 3), [A, index, total], None, total=total)
    expected = C + A[:2] + A[2:]
    assert_matches(add_to(C), expected)
    refuse(lambda asked: True)
    total = unaligned(2, 3)
    expected = total + A[:2] + A[2:]
    assert_matches(add_to(total), expected)
