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

from ...formats.torch_state import PLAIN, deterministic_flag, has_saving_hooks, is_deterministic, is_wrapped
from ...lru_cache import LRUCache
from ..language import InsumError, parse
from ..prepared import PreparedStatement, prepare
from ..reference import numbers_held
from ..routes import grad_like
from ..runtime import INTERPRETED, active, planned, remembered_ranges
from ..tuning import bucketed_lengths, choice_key, fastest, tuning_mode
from .operators import run_plain

__all__ = ["by_torch"]

STATEMENTS_KEPT = 4096  # of which it is kept whether they have index tensors
CHOICES = 2048  # kept, of some 500 bytes each
SHARE = 16  # of the machine's memory: what torch may keep for the gradients of one call
BY_TORCH, AS_STATEMENTS = "by torch", "as statements"

_choices: LRUCache[str] = LRUCache(CHOICES)
_engine: Any = torch.autograd.Variable._execution_engine
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)  # of who runs backward

Graph = Callable[[list[Tensor]], Tensor]  # of detached tensors: a value that torch can differentiate
Summed = Callable[..., Tensor]  # of a graph or None, and tensors: the value, with gradients by torch or as statements


def by_torch(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> bool:
    """Return whether torch itself differentiates the operations of a call that nobody watches, not statements.

    On a CPU torch does so for sums in which nothing is gathered or scattered: its own gradients then take the least,
    and what is kept for them is no more than what the sum makes on its way. Where a tensor or the result is empty,
    nothing would lead to the tensors.
    """
    return not _index_names(expr) and _may_be_torchs(expr, operands, size)


def graph_of(
    expr: str, operands: Mapping[str, Any], size: tuple[int, ...] | None, plan: tuple[Any, ...], summed: Summed
) -> Graph | None:
    """Return what evaluates a sum with index tensors for torch to differentiate, where that was timed to be faster.

    Else, and where nothing may be timed, the result is None: gradients are statements. They are so too where hooks are
    told of what is saved, as those of checkpoints, which count it, and where an index holds -1: a gradient of torch's
    multiplies what that hides by 0, and 0 times NaN is NaN. `plan` holds the arguments of `planned` for this call, and
    `summed` evaluates it either way.
    """
    if tuning_mode() == "off" or is_deterministic() or has_saving_hooks() or not _may_be_torchs(expr, operands, size):
        return None
    cache, call_key, _, tensors, numbers, varies, pattern = plan
    names = ",".join(operands)  # not the operands: a graph is kept for calls to come
    run = lambda *leaves: run_plain(expr, names, size, list(leaves), None)
    graph = lambda leaves: planned(cache, ("graph", call_key), run, leaves, numbers, varies, pattern, "learns")
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors]
    key = expr, tuple(operands), size, tuning_mode(), *layouts
    choice = _choices.get(key)
    if choice is None:
        choice = _chosen(expr, operands, size, graph, summed)
        if choice:
            _choices[key] = choice
    return graph if choice == BY_TORCH and not _hides(expr, operands) else None


def may_go_by_graph(expr: str, operands: Mapping[str, Tensor]) -> bool:
    """Return whether a call like one that had a graph may be differentiated by torch too: see `graph_of`."""
    return not (deterministic_flag() or has_saving_hooks() or _hides(expr, operands))


def _hides(expr: str, operands: Mapping[str, Tensor]) -> bool:
    """Return whether an index tensor of a statement holds -1."""
    return any([low < 0 for low, _ in remembered_ranges(*[operands[name] for name in _index_names(expr)])])


def differentiated(graph: Graph, tensors: Sequence[Tensor], needs_grads: Sequence[bool]) -> list[Tensor]:
    """Return detached tensors for those that need a gradient, and the value that torch can differentiate by them."""
    leaves = [tensor.detach().requires_grad_() if needs else tensor for tensor, needs in zip(tensors, needs_grads)]
    with torch.enable_grad():
        value = graph(leaves)
    return [*[leaf for leaf in leaves if leaf.requires_grad], value]


def gradients_by_torch(kept: Sequence[Tensor], needs_grads: Sequence[bool], grad_output: Tensor) -> list[Tensor | None]:
    """Return the gradient of each tensor that needs one, by what `differentiated` returned; None for the others.

    The graph stays if the caller's own does, who may ask again; else what torch has kept is let go on the way, so that
    gradients lie in memory that the processor has just used. A gradient is laid out as a statement's is: torch's may
    have one number in the place of many.
    """
    *leaves, value = kept
    # `torch.autograd.grad` without its checks, which took a tenth of a millisecond where other work has used the caches
    grads = iter(_engine.run_backward((value,), (grad_output,), _keeps_graph(), False, tuple(leaves), False, False))
    return [next(grads).contiguous() if needs else None for needs in needs_grads]


def _may_be_torchs(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> bool:
    """Return whether torch can differentiate the operations of a sum over these tensors on a CPU."""
    if INTERPRETED or not _reads_all(expr, tuple(operands)) or (size is not None and 0 in size):
        return False
    for tensor in operands.values():
        if type(tensor) not in PLAIN or not (tensor.is_cpu and tensor.numel()) or is_wrapped(tensor):
            return False
    return True


@lru_cache(maxsize=STATEMENTS_KEPT)
def _reads_all(expr: str, names: tuple[str, ...]) -> bool:
    """Return whether a statement is a sum that reads all tensors of these names."""
    statement = parse(expr)
    reads = {*statement.tensor_names, *((statement.output.name,) if statement.op == "+=" else ())}
    return statement.is_sum and set(names) <= reads


@lru_cache(maxsize=STATEMENTS_KEPT)
def _index_names(expr: str) -> tuple[str, ...]:
    return parse(expr).index_names


def _chosen(expr: str, operands: Mapping[str, Tensor], size: Sequence[int] | None, graph: Graph, summed: Summed) -> str:
    """Return the way that takes the least, measured now unless it is remembered; "" if that is for another call.

    What is timed makes plans, as calls do, and so never inside a call that is recorded. A wrong call is for its
    evaluation to refuse.
    """
    if active() is not None:
        return ""
    values = list(operands.values())
    try:
        statement = prepare(expr, ",".join(operands), size, values, None)
        if statement.padding(statement.variant(values)):
            return ""
    except InsumError:
        return ""
    if not _may_be_kept(statement):
        return AS_STATEMENTS
    bound = statement.bound
    leaves = {
        name: tensor.detach().requires_grad_() if tensor.requires_grad else tensor for name, tensor in operands.items()
    }
    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    upstream = grad_like(bound.size, bound.dtype)

    def start(way: str) -> tuple[Callable[[], object], float]:
        chosen, holds = (graph, 1.0) if way == BY_TORCH else (None, 0.0)  # of equals the one that holds less wins
        return lambda: torch.autograd.grad(summed(chosen, *leaves.values()), wanted, upstream), holds

    learning = ",".join(name for name, tensor in leaves.items() if tensor.requires_grad)
    lengths, version = bucketed_lengths(bound), torch.__version__
    key = choice_key(f"gradients of {expr}", leaves, lengths, f"for {learning}", False, version)
    ways = [BY_TORCH, AS_STATEMENTS]
    return fastest(key, ways, ways, start, is_waited_for=True)


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
