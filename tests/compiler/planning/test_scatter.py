"""How a result may reach the output, and what the statement becomes for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import GROUP_SPMM, positions, problem, values
from torch import Tensor

from insum_ops.compiler.binding.shape_class import known_divisor
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.scatter import is_varying, strategies
from insum_ops.compiler.tuning.problem import Problem
from insum_ops.formats.facts import ConstantTables, Fact, OwnedRows


def ways(own: Problem) -> tuple[str, ...]:
    return strategies(own.bound, own.fact, own.deterministic)


def over_table(expr: str, table: Tensor, size: tuple[int, ...], V: Tensor, fact: Fact | None = None) -> tuple[str, ...]:
    return ways(problem(expr, {"I": positions(*table.shape), "V": V}, size, fact or ConstantTables.of({"I": table})))


@pytest.mark.parametrize("table", [torch.tensor([2, 0, 1]), torch.tensor([[2, 0, 1], [5, 3, 4]])])
def test_a_known_table_that_leads_to_every_place_once_is_stored(table: Tensor) -> None:
    indices = "p,q"[: 2 * table.ndim - 1]
    expr, V = f"C[I[{indices}],n] += V[{indices},n]", values(*table.shape, 16)
    assert over_table(expr, table, (table.numel(), 16), V) == ("store-once",)
    assert over_table(expr, table, (table.numel() + 1, 16), V) == ("atomic",)  # a place that nothing leads to
    assert over_table(expr, table.clamp(max=1), (table.numel(), 16), V) == ("atomic",)
    assert over_table(expr, table, (table.numel(), 16), V, ConstantTables.of({"J": table})) == ("atomic",)


def test_a_known_table_may_lead_to_any_dimension() -> None:
    table = torch.tensor([2, 0, 1])
    assert over_table("C[n,I[p]] += V[p,n]", table, (16, 3), values(3, 16)) == ("store-once",)
    assert over_table("C[n,I[p]] += V[p,n]", table, (3, 16), values(3, 3)) == ("atomic",)


def test_a_known_table_that_is_read_in_part_leads_to_some_places_only() -> None:
    square, V = torch.tensor([[0, 1], [2, 3]]), values(2, 16)
    assert over_table("C[I[p,p],n] += V[p,n]", square, (4, 16), V) == ("atomic",)
    assert over_table("C[I[p,0],n] += V[p,n]", square, (4, 16), V) == ("atomic",)


def test_rows_are_apart_by_all_dimensions_but_the_last() -> None:
    one = {"E": positions(50), "V": values(256, 50)}
    assert ways(problem("Z[b,E[p]] += V[b,p]", one, (256, 8))) == ("on-chip", "atomic")
    several = {"E": positions(50), "V": values(2, 128, 50, 16)}
    assert ways(problem("Z[a,b,E[p],w] += V[a,b,p,w]", several, (2, 128, 8, 16))) == ("on-chip", "atomic")


def group_spmm(expr: str = GROUP_SPMM) -> Problem:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": values(200, 128)}
    given = {name: tensor for name, tensor in tensors.items() if f"{name}[" in expr}
    return problem(expr, given, (200, 128), OwnedRows("AM"))


def test_nothing_is_known_of_rows_unless_it_is_said() -> None:
    assert strategies(group_spmm().bound) == ("atomic",)


def test_only_a_program_that_looks_at_its_rows_keeps_the_fact_about_them() -> None:
    own = group_spmm()
    looked_at = {
        way: schedules(own.bound, own.strides, way, own.fact)[0].shared_index for way in (*ways(own), "atomic")
    }
    assert looked_at == {"owner": "", "store-or-atomic": "AM", "atomic": ""}


def test_factors_are_read_at_the_row_too() -> None:
    own = group_spmm("C[AM[p],n] += AV[p,q] * B[AM[p],n]")
    (way, *_) = schedules(own.bound, own.strides, "owner", own.fact)
    assert str(way.output) == "C[r,n]"
    assert [str(factor) for factor in way.factors] == ["AV[p,q]", "B[r,n]"]


@pytest.mark.parametrize(
    ("length", "divisor"), [(0, 0), (64, 64), (65, 1), (80, 16), (1000, 1), (128, 128), (3072, 1024)]
)
def test_few_divisors_of_a_length_are_told_apart(length: int, divisor: int) -> None:
    assert known_divisor(length) == divisor


def test_lengths_vary_by_call_along_first_dimensions_and_where_only_an_example_is_known() -> None:
    bound = group_spmm().bound
    assert [name for name in "pqn" if is_varying(bound, name)] == ["p"]
    assert [name for name in "pqn" if is_varying(replace(bound, dynamic=frozenset("n")), name)] == ["p", "n"]
