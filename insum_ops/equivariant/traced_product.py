"""`insum_ops::tensor_product`: a whole product as one operator, which AOTAutograd takes apart into its statements."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ..compiler import composite
from .clebsch_gordan import Irreps, read_irreps
from .decomposition import decompose
from .paths import Instruction

__all__ = ["as_text", "from_text", "traced_product"]


def as_text(irreps: Sequence[Irreps], instructions: Sequence[Instruction], layout: str) -> str:
    """Return all that a product depends on: torch keeps graphs on disk by what an operator is given."""
    paths = [(*path[:5], float(path.path_weight), path.path_shape) for path in instructions]
    return json.dumps([*map(str, irreps), paths, layout])


def from_text(text: str) -> tuple[tuple[Irreps, Irreps, Irreps], tuple[Instruction, ...], str]:
    """Return irreps, instructions and layout; the inverse of `as_text`."""
    *irreps, paths, layout = json.loads(text)
    in1, in2, out = [read_irreps("irreps", side) for side in irreps]
    return (in1, in2, out), tuple([Instruction._make((*path[:-1], tuple(path[-1]))) for path in paths]), layout


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


traced_product = composite(
    "tensor_product(str text, Tensor x, Tensor y, Tensor? weight, Tensor? src, Tensor? dst, SymInt num_rows) -> Tensor",
    _product,
)
