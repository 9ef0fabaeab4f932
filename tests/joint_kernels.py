"""Has statements share a kernel wherever they can, with a config of the test's choice: nothing is timed."""

from __future__ import annotations

import pytest

from insum_ops.compiler import joint
from insum_ops.compiler.autograd import functions
from insum_ops.compiler.joint import fitted
from insum_ops.compiler.prepared import prepare
from insum_ops.compiler.tuning import joint_problem
from insum_ops.lru_cache import LRUCache


def share_kernels(monkeypatch: pytest.MonkeyPatch, config: int) -> list[tuple[str, ...]]:
    """Return what will hold the outputs of every joint kernel that was looked for and found; -1: the last config."""
    outputs: list[tuple[str, ...]] = []

    def choice(calls, run):
        statements = [prepare(*call) for call in calls]
        for statement, call in zip(statements, calls):
            statement.variant(call.tensors)
        problems = [statement.problem(call.tensors, call.fact) for statement, call in zip(statements, calls)]
        in_order = joint._groups(problems)[tuple(range(len(calls)))]
        own = joint_problem(problems, in_order)
        if own is None:
            return joint._Choice(None)
        outputs.append(tuple(statement.bound.statement.output.name for statement in statements))
        at = config if config < len(own.configs) else -1
        return joint._Choice(fitted(own.launcher(own.configs[at]), statements), tuple(range(len(calls))))

    monkeypatch.setattr(joint, "_choice", choice)
    monkeypatch.setattr(functions, "PLAIN_CALLS", LRUCache(64))  # no plan of another test is replayed
    return outputs
