"""No kernel touches memory out of bounds, and no two programs race: golden statements, random ones, voxel maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_cases import GOLDEN, Golden
from hypothesis import given, settings
from memory_checker import checked_memory
from problems import APPLICATIONS, problem, told_apart
from statements import IS_INTERPRETED, IS_THOROUGH, Case, examples, random_values, statements
from test_kernels import FLAGS, rows_together
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.codegen import Config
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.planning import rules
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.tuning.problem import Candidate, candidates
from insum_ops.formats import kernel_map
from insum_ops.formats.voxels import pairs as voxel_pairs

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")]

# Programs of this kernel tell of mistaken voxels by storing 1 in one place.
FLAG_RAISERS = ("insert",)


def test_every_golden_statement_is_checked() -> None:
    assert GOLDEN.keys() == APPLICATIONS.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_kernels_stay_in_bounds(name: str) -> None:
    golden = Golden(name, torch.float32, 17)
    with checked_memory() as checker:
        for launcher in golden.in_tiles():
            golden.run(launcher)
    assert checker.launches > 0


@pytest.mark.parametrize("name", [name for name in GOLDEN if not name.endswith("_in_turn")])
def test_candidates_for_golden_statements_stay_in_bounds(name: str) -> None:
    """Statements whose rows are taken in turn are the same ones as without that."""
    golden = Golden(name, torch.float32, 5)
    with checked_memory() as checker:
        for launcher in golden.in_candidates(3):
            golden.run(launcher)
    assert checker.launches > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_sums_that_are_taken_again_stay_in_their_rows(rows: int) -> None:
    """Two rows of 16 in a tile of 64: row 0 alone has the column that holds NaN."""
    expr, tensors, size, fact = rows_together(torch.float32, 17)
    tensors["B"][3] = torch.nan
    own = problem(expr, tensors, size, fact, FLAGS)
    (way,) = schedules(own.bound, own.strides, "owner", own.fact, use_dot=True)
    assert way.merged is not None
    blocks = tuple((axis, 64 if axis == way.merged.name else 16) for axis in way.axes)
    with checked_memory():
        result = own.launcher(Candidate(way, Config(blocks, 1, 1, rows=rows)))(list(tensors.values()), fact)
    assert result[0].isnan().all()
    assert result[1:].isfinite().all()


def test_random_statements_and_their_gradients_stay_in_bounds() -> None:
    with checked_memory() as checker:

        @settings(max_examples=examples(0, 100))
        @given(statements(reductions=("sum", "sum", "sum", "max")))
        def check(case: Case) -> None:
            tensors = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in case.tensors.items()}
            result = insum(case.expr, size=case.size, **tensors)
            upstream = random_values(tuple(result.shape), result.dtype, torch.Generator().manual_seed(1))
            leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
            torch.autograd.grad(result, leaves, upstream, allow_unused=True)

        check()
    assert checker.launches > examples(0, 150)


def test_every_candidate_of_random_statements_stays_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SHARED_LOOP", 2)
    with checked_memory() as checker:

        @settings(max_examples=examples(0, 40))
        @given(statements((torch.float32,)))
        def check(case: Case) -> None:
            own = problem(case.expr, case.tensors, case.size, flags=FLAGS)
            if not own.bound.is_empty:
                for candidate in candidates(own):
                    own.launcher(candidate)(list(case.tensors.values()))

        check()
    assert checker.launches > examples(0, 90)


# an index that scatters and is read by, or reads one row of, another factor; rows beside others; what a run holds apart
SORTED = (
    "C[S[p],k] += X[S[p],k] * X[T[p],k] * E[p]",
    "C[S[p],h,k] += X[T[p],h,k] * E[p,h]",
    "C[S[p],Z[q],k] += X[T[p],Z[q],k] * E[p,q]",
)


@pytest.mark.parametrize("expr", list(SORTED) if IS_THOROUGH else list(SORTED[:1]))
@pytest.mark.parametrize("entries", [1, 17, 33] if IS_THOROUGH else [17])
def test_every_walk_of_sorted_entries_stays_in_bounds(expr: str, entries: int) -> None:
    """Runs of one place, with positions ahead or without, of a row that all entries share and of several."""
    shapes = {"p": entries, "h": 3, "q": 2, "k": 20}
    for rows in (1, 5) if IS_THOROUGH else (1,):
        tensors = {
            "S": torch.randint(0, rows, (entries + 1,)).sort().values[1:],
            "T": torch.randint(0, rows, (entries,)).int(),
            "Z": torch.tensor([1, 0]),
        }
        statement = parse(expr)
        for factor in statement.accesses:
            size = [
                rows if str(index)[0] == "S" or str(index)[0] == "T" else shapes.get(str(index), 2)
                for index in factor.indices
            ]
            tensors[factor.name] = torch.randn(size[::-1]).permute(*range(len(size))[::-1])
        given = {name: tensors[name] for name in statement.tensor_names}
        left = [128 if str(index)[0] == "S" else shapes.get(str(index), 2) for index in statement.output.indices]
        own = problem(expr, given, left, flags=FLAGS)
        with checked_memory() as checker:
            for candidate in told_apart(candidates(replace(own, in_order=("S",)))):
                own.launcher(candidate)(list(given.values()))
        assert checker.launches > 2


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
        for indices in (cloud(shape)[:12], cloud(shape)[:5].long().T.contiguous().T, cloud(shape)[:1]):
            made = kernel_map(indices, list(shape), 2, *sizes, kind=kind)
            for side in (made, made.inverse):
                side.grouped(4)
                side.tiled(16)
    assert checker.launches > 10
