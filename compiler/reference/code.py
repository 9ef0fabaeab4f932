"""A `torch.fx` graph as a Python function."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

__all__ = ["compiled"]

DEVICE = re.compile(r"\bdevice\(type='(\w+)'(?:, index=(\d+))?\)")  # as torch.fx writes one


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """Return a graph as a function; not as a GraphModule, of which torch.fx keeps the text while the process lives.

    Devices are made once. Of what new memory takes a CPU, half was its device where other work has used the caches.
    """
    code = graph.python_code("self")
    source = code.src.replace("def forward(self, ", "def forward(", 1).replace("def forward(self)", "def forward()", 1)
    devices = {
        found[0]: (f"{found[1]}{found[2] or ''}", torch.device(found[1], *map(int, filter(None, [found[2]]))))
        for found in DEVICE.finditer(source)
    }
    source = DEVICE.sub(lambda found: f"device.{devices[found[0]][0]}", source)
    scope = {**code.globals, "device": SimpleNamespace(**dict(devices.values()))}  # a name that no tensor has
    exec(compile(source, "<torch.fx graph of an indirect einsum>", "exec"), scope)
    return scope["forward"]  # type: ignore[no-any-return]
