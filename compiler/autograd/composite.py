"""Composite operators: a whole layer, which torch.compile's first tracer records as one operator.

That tracer, Dynamo, guards every object and function of ours that it reads, and a compiled graph asks its guards at
each call: of a tensor product that was up to four hundred. AOTAutograd, which runs next and guards nothing, takes the
operator apart into the statements of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...formats.torch_state import asked_once, may_change_operands
from .breaks_graph import breaks_graph
from .operators import library

__all__ = ["composite", "takes_composites"]


def composite(schema: str, function: Callable[..., Tensor]) -> Any:
    """Return the torch operator of a schema that runs as `function` does, of which tracers see all that it calls.

    Torch keeps graphs on disk by what an operator is given: that must be all that the function depends on, and whoever
    changes what one is taken apart into gives it another name.
    """
    name = schema.split("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, breaks_graph(function), "CompositeImplicitAutograd")
    return getattr(torch.ops.insum_ops, name).default


@asked_once  # guards of torch's own hold what the answer depends on
def takes_composites() -> bool:
    """Return whether Dynamo records composite operators: without autocast and transforms, and not for export."""
    return not (may_change_operands() or torch.compiler.is_exporting())
