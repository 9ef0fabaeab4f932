"""A statement as several smaller ones, evaluated in turn: which there are, and what each of them reads and makes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from ...formats.torch_state import HALF, may_round_sums, uses_tensor_cores
from ..binding import Bound
from ..planning import Split, device_of, split

__all__ = ["LEAST_GAIN", "Step", "evaluated", "may_be_kept", "split_of", "steps_of"]

# The estimated time of one kernel over that of steps from which on both are timed. The estimate does not know how many
# programs a kernel has: of 89 by 149 by 135 by 9 in float32 one took an H200 0.024 ms, estimated 0.003 (dense-mttkrp).
LEAST_GAIN = 0.5


class Step(NamedTuple):
    """One of the smaller statements."""

    text: str
    names: tuple[str, ...]  # of the tensors that it reads
    size: tuple[int, ...]
    output: str


def split_of(bound: Bound, padded: Collection[str], least: float = 1.0) -> Split | None:
    """Return the smaller statements by which a sum may be evaluated; None if one kernel takes no longer, see `split`.

    A statement stays whole where an index tensor is padded: a product that is absent contributes nothing, while a
    tensor on the way would hold a 0 for it, and 0 times NaN is NaN. Tensors on the way round half precision, as those
    of torch.einsum do, so that it stays whole too where torch may not round partial sums.
    """
    if padded or (bound.dtype in HALF and not may_round_sums(bound.dtype)):
        return None
    return split(bound, device_of(bound.device), uses_tensor_cores(bound.dtype), least)


def steps_of(bound: Bound, parts: Split) -> tuple[Step, ...]:
    """Return the smaller statements of a bound one as calls."""
    *first, last = [(str(step), step.tensor_names, step.output.name) for step in parts.steps]
    steps = [Step(text, names, size, output) for (text, names, output), size in zip(first, parts.sizes)]
    text, names, output = last
    if bound.is_seeded and output not in names:
        names = (*names, output)
    return (*steps, Step(text, names, bound.size, output))


def may_be_kept(bound: Bound, steps: Sequence[Step]) -> bool:
    """Return whether the tensors on the way hold no more numbers than those that the statement reads and writes.

    What is kept for gradients is then at most twice what they need in any case.
    """
    own = sum(prod(bound.shapes[name]) for name in {access.name for access in bound.statement.accesses})
    return sum(prod(step.size) for step in steps[:-1]) <= own + prod(bound.size)


def evaluated(
    steps: Sequence[Step], tensors: Mapping[str, Tensor], run: Callable[[Step, list[Tensor]], Tensor], keeps: bool
) -> list[Tensor]:
    """Return what each step makes; `run` evaluates one on the tensors that it reads.

    Unless it `keeps` them all, a tensor on the way lives until it is read, and the result of the last step is returned
    alone.
    """
    named, results = dict(tensors), list[Tensor]()
    for step in steps:
        result = run(step, [named[name] for name in step.names])
        if keeps:
            results.append(result)
        else:
            results = [result]
            for name in step.names:
                if name not in tensors:  # made by an earlier step, and read by this one alone
                    del named[name]
        named[step.output] = result
    return results
