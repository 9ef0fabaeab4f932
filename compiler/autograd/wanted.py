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
LEAF = "AccumulateGrad"


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return for each argument of an autograd function whether this pass backward wants its gradient.

    A leaf's is taken to be wanted: torch answers for a leaf that `torch.autograd.grad` names with an error, which takes
    longer than most kernels. A tracer asks for all.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    return needs if is_dynamo() else reached_gradients(ctx, needs)


def reached_gradients(ctx: Any, needs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return what `wanted_gradients` does, of those that `needs` says, if no tracer reads our code."""
    if sum(needs) < 2:
        return needs
    nodes = [node for node, _ in ctx.next_functions if node is not None]  # one for each that needs a gradient
    if len(nodes) != sum(needs):
        return needs
    for node in nodes:
        if type(node).__name__ != LEAF:
            break
    else:
        return needs
    following = iter(nodes)
    return needs if is_watched() else tuple([need and _is_reached(next(following)) for need in needs])


def _is_reached(node: Any) -> bool:
    if type(node).__name__ == LEAF:
        return True
    try:
        return _will_run(node)
    except RuntimeError:  # no pass backward runs: somebody else calls the function
        return True
