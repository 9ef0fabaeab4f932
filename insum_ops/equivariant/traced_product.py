"""`insum_ops::tensor_product`: a whole product, which torch.compile's first tracer records as one operator.

That tracer, Dynamo, guards every object and function of ours that it reads, and a compiled graph asks its guards at
each call: of a product that was up to four hundred. AOTAutograd, which runs next and guards nothing, takes the operator
apart into the statements of the product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ..formats.torch_state import may_change_operands
from .clebsch_gordan import Irreps, read_irreps
from .decomposition import decompose
from .paths import Instruction

__all__ = ["as_text", "from_text", "is_one_operator", "traced_product"]

library = torch.library.Library("insum_ops", "FRAGMENT")
library.define(
    "tensor_product(str text, Tensor x, Tensor y, Tensor? weight, Tensor? src, Tensor? dst, SymInt num_rows) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
traced_product = torch.ops.insum_ops.tensor_product.default


def as_text(irreps: Sequence[Irreps], instructions: Sequence[Instruction], layout: str) -> str:
    """Return all that a product depends on: torch keeps graphs on disk by what an operator is given."""
    paths = [(*path[:5], float(path.path_weight), path.path_shape) for path in instructions]
    return json.dumps([*map(str, irreps), paths, layout])


def from_text(text: str) -> tuple[tuple[Irreps, Irreps, Irreps], tuple[Instruction, ...], str]:
    """Return irreps, instructions and layout; the inverse of `as_text`."""
    *irreps, paths, layout = json.loads(text)
    in1, in2, out = [read_irreps("irreps", side) for side in irreps]
    return (in1, in2, out), tuple([Instruction._make((*path[:-1], tuple(path[-1]))) for path in paths]), layout


def is_one_operator() -> bool:
    """Return whether Dynamo records a product as one operator: without autocast and transforms, and not for export.

    A tracer asks once: guards of torch's own hold what the answer depends on.
    """
    return not (may_change_operands() or torch.compiler.is_exporting())


setattr(is_one_operator, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker


def _product(
    text: str, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None, num_rows: int
) -> Tensor:
    with _disable_current_modes():  # its tables are kept
        irreps, instructions, layout = from_text(text)
        decomposition = decompose(*irreps, instructions, layout)
    assert decomposition is not None  # else the product is zeros, and this is not called
    mode = detect_fake_mode([x, y])
    if mode is not None:  # of one compilation; tables are constants of its graphs, and gradients read them later
        mode.allow_non_fake_inputs = True
    return decomposition(x, y, weight, src, dst, num_rows)


library.impl("tensor_product", _product, "CompositeImplicitAutograd")
