"""Statements evaluated into memory of the caller's: parts of a gradient in their place, sums added to a total."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..formats.facts import Fact
from .language import UnsupportedError
from .pipeline import runner_of
from .routes import prepare
from .runtime import Launcher, resolved

__all__ = ["run_in_place"]


def run_in_place(
    expr: str,
    names: str,
    size: tuple[int, ...],
    tensors: list[Tensor],
    fact: Fact | None,
    total: Tensor | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """Evaluate a statement into memory of the caller's if a kernel can, and return the tensor that holds the result.

    `total` is the output tensor among `tensors`, which the caller gives away: a kernel that adds atomically adds to it
    in place, any other makes a new tensor. `place` may be a part of a larger tensor, of less than 2**31 bytes: a
    kernel that writes all of its output writes it there; the result of any other is copied there.
    """
    tensors = [resolved(tensor) for tensor in tensors]
    runner: Any = runner_of(prepare(expr, names, size, tensors, fact), tensors, fact)
    passed = (*tensors, *(() if fact is None else fact.tensors))
    adds = total is not None and type(runner) is Launcher and runner.adds_in_place
    if total is not None and adds and total.stride() == runner.strides:
        runner.launch((*passed, total))
        return total
    if place is None:
        return runner(tensors, fact)  # type: ignore[no-any-return]
    placed = runner.placed(place.stride()) if type(runner) is Launcher and runner.can_be_placed else None
    if placed is not None:
        try:
            placed.launch((*passed, place))
            return place
        except UnsupportedError:  # for an output that lies like this it can't be built
            pass
    return place.copy_(runner(tensors, fact))
