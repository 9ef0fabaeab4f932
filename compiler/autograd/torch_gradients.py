"""Whether torch differentiates the operations of a call on a CPU, or each gradient is a statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...formats.torch_state import PLAIN, is_wrapped
from ..language import parse
from ..runtime import INTERPRETED

__all__ = ["by_torch"]

STATEMENTS_KEPT = 4096  # of which it is kept whether they are such sums


def by_torch(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> bool:
    """Return whether torch itself differentiates the operations of a call that nobody watches, not statements.

    On a CPU torch does so for sums in which nothing is gathered or scattered: its own gradients then take the least,
    and what is kept for them is no more than what the sum makes on its way. Where a tensor or the result is empty,
    nothing would lead to the tensors.
    """
    if INTERPRETED or not _is_plain_sum(expr, tuple(operands)) or (size is not None and 0 in size):
        return False
    for tensor in operands.values():
        if type(tensor) not in PLAIN or not (tensor.is_cpu and tensor.numel()) or is_wrapped(tensor):
            return False
    return True


@lru_cache(maxsize=STATEMENTS_KEPT)
def _is_plain_sum(expr: str, names: tuple[str, ...]) -> bool:
    """Return whether a statement is a sum without index tensors that reads all tensors of these names."""
    statement = parse(expr)
    reads = {*statement.tensor_names, *((statement.output.name,) if statement.op == "+=" else ())}
    return statement.is_sum and not statement.index_names and set(names) <= reads
