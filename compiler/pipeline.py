"""The stages in order, memoised: parse -> bind -> lower or (schedule -> emit -> tune -> launch). Read this file first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .autotune import Problem, choose
from .bind import Bound, bind
from .codegen import Flags
from .launch import INTERPRETED, Launcher
from .lower import lower, placeholders
from .parse import parse
from .ranges import check_ranges

__all__ = ["run"]

_plans: dict[object, Plan] = {}


def run(expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]) -> Tensor:
    """Evaluate a statement over plain tensors; `names` joins their names with commas, in the order of `tensors`."""
    settings = _settings()
    key = (expr, names, None if size is None else tuple(size), fact, settings, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan(expr, names, size, tensors, fact, settings)
    return plan(tensors, facts)


def _settings() -> tuple[str, bool, bool, bool]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        bool(matmul.allow_fp16_reduced_precision_reduction),
        bool(matmul.allow_bf16_reduced_precision_reduction),
    )


@dataclass
class Plan:
    """A bound statement and what runs it."""

    bound: Bound
    names: tuple[str, ...]
    problem: Problem | None  # None: the FX graph runs it
    launcher: Launcher | None = None
    graphs: dict[frozenset[str], Callable[..., Tensor]] = field(default_factory=dict)  # by which index tensors hold a -1

    def __call__(self, tensors: list[Tensor], facts: list[Tensor]) -> Tensor:
        padded = check_ranges(self.bound, dict(zip(self.names, tensors)))
        if self.problem is None:
            return self.graph(padded)(*(tensors[self.names.index(name)] for name in placeholders(self.bound)))
        if self.launcher is None:
            self.launcher = choose(self.problem, tensors, facts)
        return self.launcher(tensors, facts)

    def graph(self, padded: frozenset[str]) -> Callable[..., Tensor]:
        if padded not in self.graphs:
            self.graphs[padded] = lower(self.bound, padded)
        return self.graphs[padded]


def _plan(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, settings: tuple[str, bool, bool, bool]
) -> Plan:
    order = tuple(names.split(",")) if names else ()
    named = dict(zip(order, tensors))
    bound = bind(parse(expr), named, size)
    if bound.device.type == "cpu" and not INTERPRETED or bound.is_empty:
        return Plan(bound, order, None)
    precision, deterministic, fp16, bf16 = settings
    reduced = {torch.float16: fp16, torch.bfloat16: bf16}.get(bound.dtype, True)
    flags = Flags(
        precision="ieee" if precision == "highest" else "tf32",
        sum_dtype=None if reduced else torch.float32,
        interpreted=INTERPRETED,
    )
    if INTERPRETED and bound.dtype == torch.bfloat16:
        flags = Flags(flags.precision, torch.float32, True)
    strides = {name: tensor.stride() for name, tensor in named.items()}
    strides[""] = torch.empty(bound.size, device="meta").stride()
    if bound.is_seeded:
        strides[" seed"] = named[bound.statement.output.name].stride()
    return Plan(bound, order, Problem(bound, strides, order, fact, flags, deterministic))
