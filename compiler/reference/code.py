"""A `torch.fx` graph as a Python function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["compiled"]


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """Return a graph as a function; not as a GraphModule, of which torch.fx keeps the text while the process lives."""
    code = graph.python_code("self")
    source = code.src.replace("def forward(self, ", "def forward(", 1).replace("def forward(self)", "def forward()", 1)
    exec(compile(source, "<torch.fx graph of an indirect einsum>", "exec"), code.globals)
    return code.globals["forward"]  # type: ignore[no-any-return]
