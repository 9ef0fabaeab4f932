"""A `torch.fx` graph as a Python function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

__all__ = ["compiled"]


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """Return a graph as a function; not as a GraphModule, of which torch.fx keeps the text while the process lives."""
    code = graph.python_code("self")
    exec(compile(code.src, "<torch.fx graph of an indirect einsum>", "exec"), code.globals)
    return partial(code.globals["forward"], None)
