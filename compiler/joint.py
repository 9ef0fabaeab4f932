"""Several sums over the same tensors, such as the gradients of a statement: in one kernel, or one after the other.

Where tuning is on, both are timed and the choice is kept as tuned configs are. Where nothing may be timed, each
statement is evaluated by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.facts import ConstantTables, Fact
from ..formats.torch_state import is_capturing
from ..lru_cache import LRUCache
from .planning import resized
from .prepared import PreparedStatement, has_kernels, prepare
from .runtime import INTERPRETED, JointLauncher, on_device, paused
from .tuning import JointProblem, fastest, joint_problem, tuning_mode

__all__ = ["JointCall", "run_jointly"]

APART = "apart"
CHOICES = 1024

Run = Callable[..., Any]  # (expr, names, size, tensors, fact, wants_winners)


class JointCall(NamedTuple):
    """One of several statements over plain tensors."""

    expr: str
    names: str  # of the tensors, joined by commas
    size: tuple[int, ...]
    tensors: list[Tensor]
    fact: Fact | None = None


class _Choice(NamedTuple):
    launcher: JointLauncher | None  # None: each statement has a kernel of its own


_choices: LRUCache[_Choice] = LRUCache(CHOICES)  # by what calls have in common that the same kernels run


def run_jointly(calls: Sequence[JointCall], run: Run) -> list[Tensor]:
    """Return the values of several statements over plain tensors; `run` evaluates one of them."""
    launcher = _launcher(calls, run) if len(calls) > 1 and _share_names(calls) else None
    if launcher is None:
        return [run(*call, False) for call in calls]
    return launcher([call.tensors for call in calls])


def _share_names(calls: Sequence[JointCall]) -> bool:
    """Whether a name stands for one tensor in all calls; constant tables are in the source, whatever their names."""
    tables = [call.fact.numbers if isinstance(call.fact, ConstantTables) else {} for call in calls]
    tensors: dict[str, Tensor] = {}
    for call, own in zip(calls, tables):
        for name, tensor in zip(call.names.split(","), call.tensors):
            if name not in own and tensors.setdefault(name, tensor) is not tensor:
                return False
    is_clear = not any(name in tensors for own in tables for name in own)
    return is_clear and has_kernels(calls[0].tensors[0].device)


def _launcher(calls: Sequence[JointCall], run: Run) -> JointLauncher | None:
    """Return the joint kernel for tensors like these if it is faster than kernels of their own, else None."""
    statements = [prepare(*call) for call in calls]
    variants = [statement.variant(call.tensors) for statement, call in zip(statements, calls)]
    parts = zip(statements, variants, calls)
    key = tuple([statement.kernel_key(variant, call.fact) for statement, variant, call in parts])
    choice = _choices.get(key)
    if choice is None:
        if INTERPRETED or tuning_mode() == "off" or (calls[0].tensors[0].is_cuda and is_capturing()):
            return None
        choice = _choices[key] = _Choice(_timed(calls, statements, run))
    if choice.launcher is None:
        return None
    return fitted(choice.launcher, statements)


def fitted(launcher: JointLauncher, statements: Sequence[PreparedStatement]) -> JointLauncher:
    """Return a launcher for the lengths of these statements' tensors."""
    bounds = [statement.bound for statement in statements]
    return launcher.resized(bounds, resized(launcher.kernel.schedule, bounds[0], None))


def _timed(calls: Sequence[JointCall], statements: Sequence[PreparedStatement], run: Run) -> JointLauncher | None:
    """Return the joint kernel that takes the least, None if separate ones do; measured now unless it is remembered."""
    joint = joint_problem([statement.problem(call.tensors, call.fact) for statement, call in zip(statements, calls)])
    if joint is None:
        return None
    tensors = [call.tensors for call in calls]
    with on_device(statements[0].bound.device), paused(), torch.no_grad():  # none of it is a part of the call
        way = _fastest(joint, tensors, lambda: [run(*call, False) for call in calls])
        config = next((config for config in joint.configs if str(config) == way), None)
        launcher = None if config is None else joint.launcher(config)
        if launcher is not None:
            launcher.build(tensors)
    return launcher


def _fastest(joint: JointProblem, tensors: Sequence[list[Tensor]], apart: Callable[[], object]) -> str:
    """Return the name of the fastest way: a config's text, or `APART`."""
    ways, launchers = [APART, *map(str, joint.configs)], dict[str, JointLauncher]()
    together_ms, apart_ms = joint.host_milliseconds

    def start(way: str) -> tuple[Callable[[], object], float] | None:
        if way == APART:
            return apart, apart_ms
        launchers.update({} if launchers else joint.built(tensors))
        launcher = launchers.get(way)
        return None if launcher is None else (lambda: launcher(tensors), together_ms)

    return fastest(joint.key, ways, ways, {}, start)
