"""No kernel touches memory out of bounds, and no two programs race: golden statements, random ones, voxel maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_checker import checked_memory
from problems import APPLICATIONS, problem
from statements import IS_INTERPRETED, Case, random_values, statements
from test_kernels import (
    FLAGS,
    biased_rows_alone,
    block_coo_spmm,
    convolution,
    draw,
    group_max,
    group_spmm,
    many_rows_together,
    paper_example,
    placed_gradient,
    positions,
    rows_together,
    tensor_product,
    tiled_convolution,
)
from torch import Tensor

from insum_ops import insum, nn
from insum_ops.compiler import schedule
from insum_ops.compiler.kernel import Config
from insum_ops.compiler.problem import Candidate, Problem, candidates
from insum_ops.compiler.schedule import schedules
from insum_ops.compiler.sparse import fact_tensors
from insum_ops.formats import kernel_map, voxel_pairs, voxel_tiles
from insum_ops.formats.facts import longest_first

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")

# Programs of this kernel tell of mistaken voxels by storing 1 in one place.
FLAG_RAISERS = ("insert",)


def path_tables(dtype: torch.dtype, wide: int) -> tuple[str, dict[str, Tensor], tuple[int, ...], str, list[Tensor]]:
    """Two tiles of rows, the last one not full; three paths."""
    pointers = torch.tensor([0, 2, 3], dtype=torch.int32)
    tensors = dict(ROW=torch.tensor([[2, 0], [1, -1]]).int(), TILE=torch.tensor([0, 0, 1]).int())
    tensors |= dict(CGJ=positions(3, 3, 2), CGK=positions(2, 3, 2), CGL=torch.tensor([1, 0, 1]).int())
    tensors |= dict(CG=draw(3, 2, 2, 2, dtype=dtype), X=draw(2, 3, wide, dtype=dtype), Y=draw(2, 2, dtype=dtype))
    tensors |= dict(W=draw(2, 2, wide, 3, dtype=dtype))
    return APPLICATIONS["tensor_product_tables"].expr, tensors, (2, 3, 3), "ROW.TILE", [pointers, longest_first(pointers)]


# The statement of each golden file at odd sizes with padding.
GOLDEN: dict[str, Callable[..., Any]] = {
    "gather_matmul_scatter": paper_example,
    "group_spmm_owner": group_spmm,
    "group_spmm_store_or_atomic": group_spmm,
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


def golden(name: str, wide: int) -> tuple[Problem, list[Tensor], list[Tensor]]:
    """The problem, its tensors and its facts. Only tensors that hold a -1 are masked."""
    application = APPLICATIONS[name]
    expr, tensors, size, fact, facts = GOLDEN[name](torch.float32, wide)
    known = [] if facts is None else facts if isinstance(facts, list) else fact_tensors(facts)
    padded = frozenset(n for n, t in tensors.items() if not t.is_floating_point() and bool((t < 0).any()))
    flags = replace(FLAGS, padded=padded, wants_winners=application.wants_winners)
    own = problem(expr, tensors, size, fact if application.strategy != "atomic" else "", flags)
    return own, list(tensors.values()), known


def test_every_golden_statement_is_checked() -> None:
    assert GOLDEN.keys() == APPLICATIONS.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_kernels_stay_in_bounds(name: str) -> None:
    """In the tiles of the golden file, which are larger than these tensors, and in several small ones."""
    application = APPLICATIONS[name]
    own, tensors, facts = golden(name, 17)
    with checked_memory() as checker:
        for way in schedules(own.bound, own.strides, application.strategy, own.fact, use_dot=application.uses_dot):
            least = 16 if way.uses_dot else 2
            small = tuple((axis, least) for axis in way.axes)
            if way.merged is not None:
                small = tuple((axis, 32 if axis == way.merged.name else least) for axis in way.axes)
            large = tuple(zip(way.axes, application.blocks))
            for blocks in (small, large) if len(large) == len(small) else (small,):
                own.launcher(Candidate(way, Config(blocks, 1, 1, rows=application.rows)))(tensors, facts)
    assert checker.launches > 0


def spread(ways: tuple[Candidate, ...], most: int) -> tuple[Candidate, ...]:
    """`most` of many, the first and the last among them."""
    if len(ways) <= most:
        return ways
    return tuple(ways[round(at * (len(ways) - 1) / (most - 1))] for at in range(most))


@pytest.mark.parametrize("name", GOLDEN)
def test_candidates_for_golden_statements_stay_in_bounds(name: str) -> None:
    own, tensors, facts = golden(name, 5)
    with checked_memory() as checker:
        for candidate in spread(candidates(own), 6):
            own.launcher(candidate)(tensors, facts)
    assert checker.launches > 0


def test_random_statements_and_their_gradients_stay_in_bounds() -> None:
    with checked_memory() as checker:

        @settings(max_examples=100)
        @given(statements(reductions=("sum", "sum", "sum", "max")))
        def check(case: Case) -> None:
            tensors = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in case.tensors.items()}
            result = insum(case.expr, size=case.size, **tensors)
            upstream = random_values(tuple(result.shape), result.dtype, torch.Generator().manual_seed(1))
            leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
            torch.autograd.grad(result, leaves, upstream, allow_unused=True)

        check()
    assert checker.launches > 150


def test_every_candidate_of_random_statements_stays_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SHARED_LOOP", 2)
    with checked_memory() as checker:

        @settings(max_examples=40)
        @given(statements((torch.float32,)), st.booleans())
        def check(case: Case, swap: bool) -> None:
            own = problem(case.expr, case.tensors, case.size, flags=FLAGS)
            if not own.bound.is_empty:
                for candidate in candidates(own):
                    own.launcher(candidate)(list(case.tensors.values()), [])

        check()
    assert checker.launches > 90


def cloud(shape: tuple[int, ...], density: float = 0.3) -> Tensor:
    indices = (torch.rand(2, *shape) < density).nonzero().int()
    return indices[torch.randperm(len(indices))]


@pytest.mark.parametrize(
    "geometry",
    [("subm", 3, 1, 0), ("strided", 3, 2, 1), ("strided", 2, 2, 0), ("transposed", 3, 2, 1)],
    ids=str,
)
def test_kernels_of_voxel_maps_stay_in_bounds(geometry: tuple[str, int, int, int], monkeypatch: Any) -> None:
    """Several tiles of taps, blocks of rows and steps of a block."""
    monkeypatch.setattr(voxel_pairs, "TILE", 128)
    monkeypatch.setattr(voxel_pairs, "MOST_TAPS", 16)
    kind, *sizes = geometry
    shape = (4, 3, 5)
    with checked_memory(FLAG_RAISERS) as checker:
        for indices in (cloud(shape), cloud(shape).long().T.contiguous().T, cloud(shape)[:1]):
            made = kernel_map(indices, list(shape), 2, *sizes, kind=kind)
            for side in (made, made.inverse):
                side.grouped(4)
                side.tiled(16)
    assert checker.launches > 10
