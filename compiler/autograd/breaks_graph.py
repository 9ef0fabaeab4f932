"""What is refused while torch.compile traces or records a call breaks the graph there, so that the call raises it.

Torch would raise another error in its place, about its trace. With `fullgraph=True` its words are those of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ...formats.torch_state import is_dynamo, is_recorded
from ..language import InsumError, on_problem

__all__ = ["breaks_graph"]


def breaks_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of an operator, or of what says which shape it returns, break the graph of torch.compile."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except InsumError as error:
            if not is_recorded():
                raise
            raise torch._dynamo.exc.Unsupported(str(error)) from error

    return call


def _leave_graph(problem: str) -> None:
    """Break the graph where our Python code is read: that an error is raised there is all that torch would tell."""
    if is_dynamo():
        torch._dynamo.graph_break(msg=problem)


on_problem.append(_leave_graph)
