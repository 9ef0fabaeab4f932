"""Which gradients a pass backward asks an autograd function for.

`ctx.needs_input_grad` says whose tensors have a gradient at all. Forces are the gradient of an energy for positions
alone: no gradient of weights is wanted then, though the weights learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...formats.torch_state import is_dynamo, is_watched

__all__ = ["reached_gradients", "wanted_gradients"]

_will_run: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
LEAF = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return for each argument of an autograd function whether this pass backward wants its gradient.

    A leaf's is taken to be wanted: torch answers for a leaf that `torch.autograd.grad` names with an error, which takes
    longer than most kernels. A tracer asks for all.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    return needs if is_dynamo() else reached_gradients(ctx, needs)


def reached_gradients(ctx: Any, needs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return for each argument whether this pass backward wants its gradient; `needs` says which have one at all.

    No tracer may read this code.
    """
    if needs.count(True) < 2:  # one was asked for, else the function would not run
        return needs
    nodes = ctx.next_functions
    for node, _ in nodes:  # None for a tensor that needs no gradient
        if type(node) is not LEAF and node is not None and not _is_reached(node):
            break
    else:
        return needs
    following = [node for node, _ in nodes if node is not None]
    if len(following) != sum(needs) or is_watched():
        return needs
    reached = map(_is_reached, following)
    return tuple([need and next(reached) for need in needs])


def _is_reached(node: Any) -> bool:
    if type(node) is LEAF:
        return True
    try:
        return _will_run(node)
    except RuntimeError:  # no pass backward runs: somebody else calls the function
        return True
