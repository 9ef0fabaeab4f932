"""Tensor products of several kinds: their operands, and the statements one by one as a reference for all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from statements import DEVICE, IS_INTERPRETED
from torch import Tensor

from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct

UNEQUAL = ("2x0e + 3x1o + 2x0o", "0e + 1o", "3x0e + 2x1o + 1x1e")
ONE = ("1x0e", "0e", "1x0e + 2x0e")  # a term with a single weight
MIXED = [  # weights of some paths, the second input with and without its one channel
    (0, 0, 0, "uvw", True),
    (1, 1, 0, "uuw", True),
    (0, 1, 1, "uvw", True),
    (1, 0, 2, "uvu", False),
]


@dataclass(frozen=True)
class Case:
    """A product and how its rows are chosen."""

    irreps: tuple[str, str, str]
    is_shared: bool = False
    has_edges: bool = False
    layout: str = "mul_ir"
    paths: object = None

    def built(self) -> TensorProduct:
        options = dict(shared_weights=self.is_shared, internal_weights=False, layout=self.layout)
        if self.paths is None:
            return FullyConnectedTensorProduct(*self.irreps, **options)
        return TensorProduct(*self.irreps, self.paths, **options)


CASES = {
    "each": Case(UNEQUAL),
    "shared": Case(UNEQUAL, is_shared=True),
    "ir_mul": Case(("2x0e + 2x1o", "0e + 1o", "2x0e + 2x1o"), layout="ir_mul"),
    "tables": Case(("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o")),
    "edges": Case(UNEQUAL, has_edges=True),
    "edges, shared": Case(UNEQUAL, is_shared=True, has_edges=True),
    "edges, tables": Case(("12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o"), has_edges=True),
    "apart": Case(("2x1o + 2x1e + 3x0e + 3x0o", "0e + 1o", "2x1o + 2x1e + 3x0e + 3x0o")),
    "modes": Case(("2x0e + 1x1o", "0e + 1o", "2x0e + 2x1o + 1x1o"), paths=MIXED),
    "one weight": Case(ONE),
    "a path too few": Case(("2x0e + 2x2e + 3x1o", "0e + 3o", "2x0e + 3x0o")),
}
if IS_INTERPRETED:
    CASES = {name: CASES[name] for name in ("each", "apart", "edges", "edges, tables", "shared", "one weight")}


def operands(case: Case, ours: TensorProduct, rows: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    nodes = 4 if case.has_edges else rows
    lead = () if case.is_shared else (rows,)
    shapes = (nodes, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (*lead, ours.weight_numel)
    given = [torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in shapes]
    if not case.has_edges:
        return given, {}
    src, dst = torch.tensor([[0, 3, -1], [2, 2, 1]], device=DEVICE)
    return given, {"src": src, "dst": dst}


def composed(ours: TensorProduct, x: Tensor, y: Tensor, weight: Tensor, src=None, dst=None) -> Tensor:
    """The statements one by one, each with a node of its own."""
    rows = len(y) if dst is None else len(x)
    return ours._product.decomposition.composed(x, y, weight, src, dst, rows)  # type: ignore[union-attr]


def learning(tensors: list[Tensor], which: tuple[bool, ...]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_(learns) for tensor, learns in zip(tensors, which, strict=True)]


def has_one_statement(ours: TensorProduct, weight: Tensor) -> bool:
    return len(ours._product.decomposition.work(weight).terms) == 1  # type: ignore[union-attr]


def is_one_node(z: Tensor) -> bool:
    return type(z.grad_fn).__name__ == "_ProductBackward"
