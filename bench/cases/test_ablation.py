"""What each idea brings, block SpMM at 90 %: COO, + groups, + blocks, + fusion on Tensor Cores, + lazy broadcasting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.runtime.ranges import check_ranges
from insum_ops.compiler.tuning.autotune import tune
from insum_ops.formats import COO, BlockGroupCOO, GroupCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..peers import fx_graph, needs_gpu, torch_bsr

STEPS = ("COO", "+ group", "+ group + block", "+ fusion, Tensor Cores", OURS)
PROVIDERS = (*STEPS, "TorchBSR", "dense")
SIZE, EDGE = on(4096, 256), 32
DTYPE = on(torch.float16, torch.float32)
GROUPS = {"+ group": 16, "+ group + block": 4}  # the paper's
BLOCKED = "C[AM[p],i,n] += AV[p,q,i,j] * B[AK[p,q],j,n]"


@held
def operands() -> tuple[Case, Tensor, Tensor]:
    grid = SIZE // EDGE
    mask = torch.zeros(grid * grid, device=DEVICE, dtype=DTYPE)
    mask[torch.randperm(grid * grid, device=DEVICE)[: max(1, grid * grid // 10)]] = 1
    mask = mask.view(grid, grid).repeat_interleave(EDGE, 0).repeat_interleave(EDGE, 1)
    dense = torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE) * mask
    B = torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE)
    expected = dense.double() @ B.double()
    # without fusion products are rounded to float16 before they are added up: four times the usual error
    case = Case("ablation", f"{SIZE}^2, 90% sparse, {EDGE}x{EDGE}", expected, 4 * LIMIT[DTYPE])
    return case, dense, B


def provide(step: str, dense: Tensor, B: Tensor) -> Call:
    if step == "dense":
        return Call(lambda: dense @ B)
    if step == "TorchBSR":
        return torch_bsr(dense, B, EDGE)
    if step == "COO":
        coo = COO.from_dense(dense)
        return unfused("C[AM[p],n] += AV[p] * B[AK[p],n]", coo, B, tuple(B.shape))
    if step == "+ group":
        group = GroupCOO.from_dense(dense, group_size=GROUPS[step])
        return unfused("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", group, B, tuple(B.shape))
    block = BlockGroupCOO.from_dense(dense, block_size=(EDGE, EDGE), group_size=GROUPS["+ group + block"])
    B_blocks, size = B.unflatten(0, (-1, EDGE)), (SIZE // EDGE, EDGE, SIZE)
    if step == "+ group + block":
        return unfused(BLOCKED, block, B_blocks, size)
    return fused(block, B_blocks, size, is_lazy=step == OURS)


def unfused(expr: str, A: COO | GroupCOO, B: Tensor, size: tuple[int, ...]) -> Call:
    """The statement as separate torch operations, the gathered operand and the products written out."""
    graph, arguments = fx_graph(expr, size, {"AM": A.AM, "AV": A.AV, "AK": A.AK, "B": B})
    flat = lambda: graph(*arguments).reshape(SIZE, -1)
    return Call(lambda: graph(*arguments), result=flat, facts={"bytes": A.nbytes})


def fused(A: BlockGroupCOO, B: Tensor, size: tuple[int, ...], is_lazy: bool) -> Call:
    """One kernel, tuned, with lazy or with eager broadcasting of index tiles."""
    needs_gpu("a fused kernel")
    tensors = {"AM": A.AM, "AV": A.AV, "AK": A.AK, "B": B}
    bound = bind(parse(BLOCKED), tensors, size)
    assert A.facts is not None
    fact = A.facts.owned("AM")
    problem = problem_for(bound, tensors, fact, check_ranges(bound, tensors))
    problem = replace(problem, flags=replace(problem.flags, lazy=is_lazy))
    _, launch = tune(problem, list(tensors.values()), fact)
    run = lambda: launch(list(tensors.values()), fact)
    return Call(run, result=lambda: run().flatten(0, 1), facts={"bytes": A.nbytes})  # type: ignore[union-attr]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ablation(provider: str, measure: Measure) -> None:
    case, dense, B = operands()
    measure(case, provider, lambda: provide(provider, dense, B))
