"""Statements whose schedules are tested, and what rules make of them."""

from __future__ import annotations

import torch
from problems import CONVOLUTION_TILED, GROUP_MAX, GROUP_SPMM, positions, problem, values

from insum_ops.compiler.planning.rules import other_schedules, schedules
from insum_ops.compiler.planning.scatter import strategies
from insum_ops.compiler.planning.schedule import Schedule
from insum_ops.compiler.tuning.problem import Problem
from insum_ops.formats.facts import Fact, OwnedRows

ROWS, TILES = OwnedRows("AM"), OwnedRows("ROW", "TILE")


def ways(own: Problem) -> tuple[str, ...]:
    return strategies(own.bound, own.fact, own.deterministic)


def scheduled(own: Problem, strategy: str, use_dot: bool | None = None) -> Schedule:
    return schedules(own.bound, own.strides, strategy, own.fact, own.deterministic, use_dot)[0]


def others(own: Problem, strategy: str) -> tuple[Schedule, ...]:
    return other_schedules(own.bound, own.strides, strategy, own.fact, own.deterministic)


def spmm(fact: Fact | None = ROWS, is_seeded: bool = False, deterministic: bool = False) -> Problem:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": values(200, 128)}
    if is_seeded:
        tensors["C"] = values(200, 128)
    size = None if is_seeded else (200, 128)
    return problem(GROUP_SPMM, tensors, size, fact, deterministic=deterministic)


def scatter(expr: str, batch: int, extent: int, deterministic: bool = False) -> Problem:
    tensors = {"E": positions(50), "V": values(batch, 50, 16)}
    return problem(expr, tensors, (batch, extent, 16), deterministic=deterministic)


def maximum(fact: Fact | None = ROWS, deterministic: bool = False) -> Problem:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": values(200, 128)}
    return problem(GROUP_MAX, tensors, (200, 128), fact, deterministic=deterministic)


BLOCK_GRADIENT = "dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]"


def block_gradient(
    o: int = 32, i: int = 32, Q: int = 8, expr: str = BLOCK_GRADIENT, dtype: torch.dtype = torch.float16
) -> Problem:
    dense = {"dY": values(512, 40, o, dtype=dtype), "X": values(512, 50, i, dtype=dtype)}
    return problem(expr, {"AM": positions(300), "AK": positions(300, Q), **dense})


def tiled(
    expr: str = CONVOLUTION_TILED, is_seeded: bool = False, rows: int = 1000, deterministic: bool = False
) -> Problem:
    tensors = {"ROW": positions(-(-rows // 16), 16), "TILE": positions(300), "NBR": positions(300, 16)}
    tensors |= {"TAP": positions(300), "In": values(rows, 32), "Weight": values(27, 32, 48)}
    if is_seeded:
        tensors["Out"] = values(48).expand(rows, 48)
    return problem(expr, tensors, None if is_seeded else (rows, 48), TILES, deterministic=deterministic)
