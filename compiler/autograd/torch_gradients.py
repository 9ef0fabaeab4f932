"""Whether torch differentiates the operations of a call on a CPU, or each gradient is a statement.

Torch keeps what it gathers on the way to a value, which a gradient that is a statement gathers again; statements have
sums by row offsets, which torch's gradients have not. The clock decides, once for calls of a kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats.torch_state import PLAIN, has_saving_hooks, is_deterministic, is_wrapped
from ...lru_cache import LRUCache
from ..binding import bucket
from ..language import InsumError, parse
from ..prepared import PreparedStatement, prepare
from ..reference import numbers_held
from ..routes import grad_like
from ..runtime import INTERPRETED, paused, planned
from ..tuning import choice_key, fastest, tuning_mode
from .operators import run_plain

__all__ = ["by_torch"]

STATEMENTS_KEPT = 4096  # of which it is kept whether they have index tensors
CHOICES = 2048  # kept, of some 500 bytes each
SHARE = 16  # of the machine's memory: what torch may keep for the gradients of one call
BY_TORCH, AS_STATEMENTS = "by torch", "as statements"

_choices: LRUCache[str] = LRUCache(CHOICES)

AsStatements = Callable[[Mapping[str, Any]], Tensor]


def by_torch(
    expr: str, operands: Mapping[str, Any], size: Sequence[int] | None = None, statements: AsStatements | None = None
) -> bool:
    """Return whether torch itself differentiates the operations of a sum that nobody watches, not statements.

    On a CPU torch does so where nothing is gathered or scattered: its own gradients then take the least, and what is
    kept for them is no more than what the sum makes on its way. A sum with index tensors goes the way that was timed
    to be faster, for which `statements` evaluates it with gradients that are statements; without it, and where nothing
    may be timed, they are. Where a tensor or the result is empty, nothing would lead to the tensors.
    """
    names = tuple(operands)
    if INTERPRETED or not _reads_all(expr, names) or (size is not None and 0 in size):
        return False
    for tensor in operands.values():
        if type(tensor) not in PLAIN or not (tensor.is_cpu and tensor.numel()) or is_wrapped(tensor):
            return False
    if _is_dense(expr):
        return True
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in operands.values()]
    key = expr, names, None if size is None else tuple(size), tuning_mode(), *layouts
    choice = _choices.get(key)
    if choice is None and statements is not None:
        choice = _choices[key] = _chosen(expr, operands, size, statements)
    return choice == BY_TORCH


@lru_cache(maxsize=STATEMENTS_KEPT)
def _reads_all(expr: str, names: tuple[str, ...]) -> bool:
    """Return whether a statement is a sum that reads all tensors of these names."""
    statement = parse(expr)
    reads = {*statement.tensor_names, *((statement.output.name,) if statement.op == "+=" else ())}
    return statement.is_sum and set(names) <= reads


@lru_cache(maxsize=STATEMENTS_KEPT)
def _is_dense(expr: str) -> bool:
    return not parse(expr).index_accesses


def _chosen(expr: str, operands: Mapping[str, Tensor], size: Sequence[int] | None, statements: AsStatements) -> str:
    """Return the way that takes the least, measured now unless it is remembered.

    Whoever counts what is saved for a gradient, as checkpoints do, sees the same way in each call: it is settled by the
    first one, without a measurement if that is theirs. A wrong call is for its evaluation to refuse.
    """
    if tuning_mode() == "off" or is_deterministic() or has_saving_hooks():
        return AS_STATEMENTS
    names, values = ",".join(operands), [tensor.detach() for tensor in operands.values()]
    try:
        statement = prepare(expr, names, size, values, None)
        if statement.padding(statement.variant(values)) or not _may_be_kept(statement):
            return AS_STATEMENTS
    except InsumError:
        return AS_STATEMENTS
    bound, cache = statement.bound, dict[Any, Any]()
    leaves = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in operands.items()}
    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    upstream = grad_like(bound.size, bound.dtype)

    def run(*tensors: Tensor) -> Tensor:
        return run_plain(expr, names, size, list(tensors), None)

    def start(way: str) -> tuple[Callable[[], object], float]:
        if way == AS_STATEMENTS:
            return lambda: torch.autograd.grad(statements(leaves), wanted, upstream), 0.0  # of equals: it holds less
        evaluated = lambda: planned(cache, expr, run, list(leaves.values()), kind="learns")
        return lambda: torch.autograd.grad(evaluated(), wanted, upstream), 1.0

    lengths = [(name, bucket(extent)) for name, extent in bound.extents.items()]
    lengths += [(f"[{dim}]", bucket(extent)) for dim, extent in enumerate(bound.size)]
    learning = ",".join(name for name, tensor in leaves.items() if tensor.requires_grad)
    key = choice_key(f"gradients of {expr}", leaves, lengths, f"for {learning}", False, torch.__version__)
    ways = [BY_TORCH, AS_STATEMENTS]
    with paused():  # none of it is a part of the call
        return fastest(key, ways, ways, {}, start, is_waited_for=True)


def _may_be_kept(statement: PreparedStatement) -> bool:
    """Return whether there is room for what torch keeps on the way."""
    bound = statement.bound
    return not bound.is_empty and numbers_held(bound) * bound.compute_dtype.itemsize * SHARE <= _memory()


@lru_cache(maxsize=1)
def _memory() -> int:
    """Return how many bytes of memory this machine has; 0 if it does not tell."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
