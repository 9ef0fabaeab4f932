"""Whether torch differentiates the operations of a call on a CPU, or each gradient is a statement.

Torch keeps what it gathers on the way to a value, which a gradient that is a statement gathers again, and needs no
Python between two operations. Statements have sums by row offsets, which torch's gradients have not. Where something is
gathered or scattered the clock decides, once for calls of a kind; those that hold a lot on their way are statements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats.torch_state import HALF, PLAIN, is_deterministic, is_wrapped, unseen_saving
from ...lru_cache import LRUCache
from ..binding import bucket
from ..language import InsumError, parse
from ..reference import numbers_held
from ..routes import grad_like, prepare
from ..runtime import INTERPRETED, active, remembered_ranges
from ..tuning import choice_key, fastest, tuning_mode
from .operators import run_plain

__all__ = ["by_torch", "evaluated_for_torch", "is_faster_by_torch"]

STATEMENTS_KEPT = 4096  # of which it is kept whether they have index tensors
CHOICES = 2048  # kept, of some 500 bytes each
HELD = 1 << 22  # numbers that a sum may hold on its way: of more, the host's part is little and what is kept is much
UNSETTLED = 2  # calls after the first until there are launch plans: a recorded one takes ten times as long as those
BY_TORCH, AS_STATEMENTS = "by torch", "as statements"

_choices: LRUCache[str] = LRUCache(CHOICES)

Evaluate = Callable[[list[Tensor]], Tensor]  # of tensors to a value with gradients


def by_torch(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> bool:
    """Return whether torch itself differentiates the operations of a call that nobody watches, whatever they take.

    On a CPU torch does so for sums in which nothing is gathered or scattered: its own gradients then take the least,
    and what is kept for them is no more than what the sum makes on its way. Where a tensor or the result is empty,
    nothing would lead to the tensors.
    """
    return not _index_names(expr) and _may_be_torchs(expr, operands, size)


def evaluated_for_torch(expr: str, names: str, size: Sequence[int] | None, tensors: Sequence[Tensor]) -> Tensor:
    """Return the value of a sum whose operations torch differentiates; half precision is float32 all the way.

    Gradients are summed by operations that round what they are given, so that none is given half precision.
    """
    if not any([tensor.dtype in HALF for tensor in tensors]):
        return run_plain(expr, names, size, list(tensors), None)
    dtype = prepare(expr, names, size, list(tensors), None).bound.dtype
    wide = [tensor.float() if tensor.dtype in HALF else tensor for tensor in tensors]
    return run_plain(expr, names, size, wide, None).to(dtype)


def is_faster_by_torch(
    expr: str, operands: Mapping[str, Tensor], size: Sequence[int] | None, ways: Callable[[str], Evaluate]
) -> bool:
    """Return whether torch differentiates a sum with index tensors, where that was timed to be faster.

    Else, and where nothing may be timed, gradients are statements. They are so too where an index holds -1: a gradient
    of torch's multiplies what that hides by 0, and 0 times NaN is NaN. `ways`, asked for BY_TORCH or AS_STATEMENTS,
    returns what evaluates the sum over other tensors.
    """
    if tuning_mode() == "off" or is_deterministic() or not _may_be_torchs(expr, operands, size):
        return False
    layouts = [
        (*map(bucket, each.shape), tuple([min(stride, 2) for stride in each.stride()]), each.dtype, each.requires_grad)
        for each in operands.values()
    ]
    key = expr, tuple(operands), None if size is None else tuple(map(bucket, size)), tuning_mode(), *layouts
    choice = _choices.get(key)
    if choice is None:
        choice = _chosen(expr, operands, size, ways)
        if choice:
            _choices[key] = choice
    return choice == BY_TORCH and not _hides(expr, operands)


def _hides(expr: str, operands: Mapping[str, Tensor]) -> bool:
    """Return whether an index tensor of a statement holds -1."""
    return any([low < 0 for low, _ in remembered_ranges(*[operands[name] for name in _index_names(expr)])])


def _chosen(
    expr: str, operands: Mapping[str, Tensor], size: Sequence[int] | None, ways: Callable[[str], Evaluate]
) -> str:
    """Return the way that takes the least, measured now unless it is remembered; "" if that is for another call.

    What is timed makes plans, as calls do, and so never inside a call that is recorded: that one keeps its way. A wrong
    call is for its evaluation to refuse.
    """
    if active() is not None:
        return AS_STATEMENTS
    names, values = ",".join(operands), list(operands.values())
    try:
        statement = prepare(expr, names, size, values, None)
        if statement.padding(statement.variant(values)):
            return ""
    except InsumError:
        return ""
    bound = statement.bound
    if bound.is_empty or numbers_held(bound) > HELD:
        return AS_STATEMENTS
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in values]
    wanted = [tensor for tensor in leaves if tensor.requires_grad]
    upstream = grad_like(bound.size, bound.dtype)

    def start(way: str) -> tuple[Callable[[], object], float]:
        evaluate, holds = ways(way), float(way == BY_TORCH)  # of equals the one that holds less wins
        return lambda: torch.autograd.grad(evaluate(leaves), wanted, upstream), holds

    lengths = [(name, bucket(extent)) for name, extent in bound.extents.items()]
    lengths += [(f"[{dim}]", bucket(extent)) for dim, extent in enumerate(bound.size)]
    learning = ",".join(name for name, tensor in zip(operands, leaves) if tensor.requires_grad)
    named = dict(zip(operands, leaves))
    key = choice_key(f"gradients of {expr}", named, lengths, f"by plans for {learning}", False, torch.__version__)
    both = [AS_STATEMENTS, BY_TORCH]
    with unseen_saving():
        return fastest(key, both, both, start, is_waited_for=True, unsettled=UNSETTLED)


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
