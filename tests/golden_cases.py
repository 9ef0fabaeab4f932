"""The statements of the golden files at odd sizes with padding, as kernels that can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from problems import APPLICATIONS, problem
from statements import DEVICE
from test_kernels import (
    FLAGS,
    biased_rows_alone,
    block_coo_spmm,
    convolution,
    draw,
    entry_spmm,
    group_max,
    group_spmm,
    many_rows_together,
    packed_spmm,
    paper_example,
    placed_gradient,
    positions,
    rows_together,
    tensor_product,
    tiled_convolution,
)
from torch import Tensor

from insum_ops.compiler.codegen import Config
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.runtime.launch import Launcher
from insum_ops.compiler.tuning.problem import Candidate, Problem, candidates
from insum_ops.formats.facts import Fact, OwnedRows
from insum_ops.formats.row_facts import longest_first

__all__ = ["GOLDEN", "Golden"]


def path_tables(dtype: torch.dtype, wide: int) -> tuple[str, dict[str, Tensor], tuple[int, ...], Fact]:
    """Two tiles of rows, the last one not full; three paths."""

    def listed(numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    pointers = listed([0, 2, 3])
    tensors = dict(ROW=listed([[2, 0], [1, -1]]), TILE=listed([0, 0, 1]))
    tensors |= dict(CGJ=positions(3, 3, 2), CGK=positions(2, 3, 2), CGL=listed([1, 0, 1]))
    tensors |= dict(CG=draw(3, 2, 2, 2, dtype=dtype), X=draw(2, 3, wide, dtype=dtype), Y=draw(2, 2, dtype=dtype))
    tensors |= dict(W=draw(2, 2, wide, 3, dtype=dtype))
    expr = APPLICATIONS["tensor_product_tables"].expr
    return expr, tensors, (2, 3, 3), OwnedRows("ROW", "TILE", pointers, longest_first(pointers))


GOLDEN: dict[str, Callable[..., Any]] = {
    "gather_matmul_scatter": paper_example,
    "group_spmm_owner": group_spmm,
    "group_spmm_store_or_atomic": group_spmm,
    "entry_spmm_pieces": entry_spmm,
    "entry_spmm_packed": packed_spmm,
    "group_max_owner": group_max,
    "group_max_winners_owner": group_max,
    "block_spmm_owner": block_coo_spmm,
    "block_spmm_together": rows_together,
    "block_spmm_together_in_turn": many_rows_together,
    "block_linear_in_turn": biased_rows_alone,
    "block_gradient_store_once": placed_gradient,
    "convolution_atomic": convolution,
    "convolution_tiled": tiled_convolution,
    "tensor_product_tables": path_tables,
    "tensor_product_on_chip": tensor_product,
}


class Golden:
    """The problem of a golden file, with tensors and its fact; only index tensors that hold a -1 are masked."""

    def __init__(self, name: str, dtype: torch.dtype, wide: int) -> None:
        self.application = APPLICATIONS[name]
        expr, tensors, size, fact = GOLDEN[name](dtype, wide)
        self.tensors: list[Tensor] = list(tensors.values())
        self.fact: Fact | None = fact
        padded = frozenset(n for n, t in tensors.items() if not t.is_floating_point() and bool((t < 0).any()))
        flags = replace(FLAGS, padded=padded, wants_winners=self.application.wants_winners)
        if self.application.strategy == "atomic":
            fact = None
        self.problem: Problem = problem(expr, tensors, size, fact, flags)

    def run(self, launcher: Launcher) -> tuple[Tensor, ...]:
        result = launcher(self.tensors, self.fact)
        return result if isinstance(result, tuple) else (result,)

    def in_tiles(self, warps: int = 1) -> Iterator[Launcher]:
        """The golden file's schedule in several small tiles, and in its own ones, which are larger than the tensors."""
        own, application = self.problem, self.application
        for way in schedules(own.bound, own.strides, application.strategy, own.fact, use_dot=application.uses_dot):
            least = 16 if way.uses_dot else 2
            merged = way.merged.name if way.merged is not None else None
            small = tuple((axis, 32 if axis == merged else least) for axis in way.axes)
            large = tuple(zip(way.axes, application.blocks))
            for blocks in (small, large) if len(large) == len(small) else (small,):
                yield own.launcher(Candidate(way, Config(blocks, warps, 1, rows=application.rows)))

    def in_candidates(self, most: int) -> Iterator[Launcher]:
        """At most so many ways that tuning may choose, the first and the last among them."""
        ways = candidates(self.problem)
        if len(ways) > most:
            ways = tuple(ways[round(at * (len(ways) - 1) / max(1, most - 1))] for at in range(most))
        yield from map(self.problem.launcher, ways)
