"""The entries of a matrix in the order in which its source lists them: the format of a pattern that is young.

To sort entries into groups takes as long as several products with them, which a graph that was sampled for one step
never earns back. So the first products with a new pattern on a GPU are statements over its index tensors as they are,
whose launch plans serve any pattern; one that goes on being used is converted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..compiler import has_kernels, read_ranges
from ..formats import COO
from ..formats.check import VALUE_DTYPES
from ..formats.convert import Layout
from ..formats.facts import RowFacts
from ..formats.torch_state import has_saving_hooks, is_deterministic, is_free
from ..functional import insum

__all__ = ["Listed", "list_entries", "may_list"]

# Products with a pattern before it is converted. It says how patterns are used, not how fast a GPU is: a model of a few
# layers multiplies by a sampled graph once for each, and a graph that lasts is converted in the first steps.
YOUNG = 4

Form = TypeVar("Form", bound="Listed")


class _NoPlans(dict[Any, Any]):
    """A cache of launch plans that stays empty: a pattern that does not last is worth none of its own."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@dataclass(frozen=True, eq=False, repr=False)
class Listed(COO):
    """A[AM[p], AK[p]] += AV[p] with entries in any order: nothing is known of rows, along neither dimension."""

    @property
    def facts(self) -> RowFacts | None:
        """None: rows may be anywhere."""
        return None

    def regroup(self: Form, group_dim: int, group_size: int | None = None) -> Form:
        """Return the same entries, since no order suits one dimension better than the other."""
        return self if group_dim == self.group_dim else self._with(group_dim=group_dim)

    def regrouped_view(self: Form, group_dim: int) -> Form:  # type: ignore[override]
        """Return `regroup(group_dim)`: the values are in place."""
        return self.regroup(group_dim)

    def product(self, statement: str, B: Tensor, **shares: Tensor) -> Tensor:
        """Return the value of a statement with A, B and perhaps R, as one over plain tensors; differentiable."""
        rows = self.shape[:1]
        size = rows if B.ndim == 1 else (*B.shape[:-2], *rows, B.shape[-1])
        return insum(_over_entries(statement), AM=self.AM, AK=self.AK, AV=self.values, B=B, **shares, size=size)

    def fits(self, B: Tensor) -> bool:
        """Return whether B has as many rows as the matrix has columns, lies with it, and holds numbers like its own."""
        is_long = B.shape[0 if B.ndim == 1 else -2] == self.shape[1]
        return is_long and B.device == self.device and B.dtype in VALUE_DTYPES


@cache
def _over_entries(statement: str) -> str:
    """Return a statement over A[m,k] as one over its entries.

    >>> _over_entries("C[b,m,n] += R[m] * A[m,k] * B[b,k,n]")
    'C[b,AM[p],n] += R[AM[p]] * AV[p] * B[b,AK[p],n]'
    """
    return re.sub(r"\b[mk]\b", lambda name: f"A{name[0].upper()}[p]", statement.replace("A[m,k]", "AV[p]"))


def may_list(device: torch.device) -> bool:
    """Return whether entries may be added up in any order, by kernels, in a call that nobody traces or transforms.

    Whoever is told of what is saved for gradients sees the same in each call: a checkpoint runs one again and compares.
    """
    return has_kernels(device) and is_free() and not (is_deterministic() or has_saving_hooks())


def list_entries(
    rows: Tensor, columns: Tensor, nothing: Tensor, shape: tuple[int, int], refuse: Callable[[], NoReturn]
) -> Listed:
    """Return the pattern of entries at `rows` and `columns` [E], which nobody else may write to.

    `nothing` [E] stands for values. `refuse` raises for an entry outside the shape. The host waits once.
    """
    (low, high), (least, most) = read_ranges((rows, columns), ordered=(0, 1))
    if min(low, least) < 0 or high >= shape[0] or most >= shape[1]:
        refuse()
    pattern = Listed._laid_out(Layout((rows, columns), None), nothing, len(rows), shape).as_private()
    pattern.pattern_cache.memory = _NoPlans()  # type: ignore[assignment]
    return pattern
