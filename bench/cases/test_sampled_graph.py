"""What a graph costs that was sampled for one step: a product with it, and a step of training, conversion included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch import Tensor

from insum_ops import insum, spmm
from insum_ops.formats import GroupCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..peers import installed

pytestmark = pytest.mark.alone
NODES, EDGES, COLUMNS = on((20_000, 65_000, 64), (500, 1500, 8))
VALUE, STEP = "a new graph", "a step of training over a new graph"
IN_GROUPS = f"{OURS}, GroupCOO"
PROVIDERS = (OURS, IN_GROUPS, "torch.sparse", "index_add", "PyG")

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # of edge_index, edge_weight and features


@dataclass(frozen=True)
class Operands:
    edge_index: Tensor
    weight: Tensor
    X: Tensor
    expected: Tensor


@held
def operands() -> Operands:
    edge_index, weight = torch.randint(NODES, (2, EDGES), device=DEVICE), torch.rand(EDGES, device=DEVICE)
    X = torch.randn(NODES, COLUMNS, device=DEVICE)
    products = weight.double()[:, None] * X.double()[edge_index[0]]
    expected = torch.zeros(NODES, COLUMNS, dtype=torch.float64, device=DEVICE).index_add_(0, edge_index[1], products)
    return Operands(edge_index, weight, X, expected)


def coo(edge_index: Tensor, weight: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(edge_index.flip(0), weight, (NODES, NODES), check_invariants=False)


def added(edge_index: Tensor, weight: Tensor, X: Tensor) -> Tensor:
    """What torch's own functions make of it without a sparse tensor."""
    return X.new_zeros(X.shape).index_add(0, edge_index[1], weight[:, None] * X[edge_index[0]])


def product_of(provider: str) -> Product:
    if provider == OURS:
        return lambda edge_index, weight, X: spmm((edge_index, weight), X)
    if provider == IN_GROUPS:
        grouped = lambda edge_index, weight: GroupCOO.from_coo(edge_index.flip(0), weight, (NODES, NODES))
        return lambda edge_index, weight, X: insum("C[m,n] += A[m,k] * B[k,n]", A=grouped(edge_index, weight), B=X)
    if provider == "torch.sparse":
        return lambda edge_index, weight, X: torch.sparse.mm(coo(edge_index, weight), X)
    if provider == "PyG":
        scatter = installed("torch_geometric.utils").scatter
        return lambda edge_index, weight, X: scatter(weight[:, None] * X[edge_index[0]], edge_index[1], 0, NODES)
    return added


def provide(provider: str, what: str, given: Operands) -> Call:
    """Products over edges of which there are another number each time."""
    product, lengths = product_of(provider), count()
    X = given.X.clone().requires_grad_(what == STEP)

    def run() -> None:
        edges = EDGES - 37 * next(lengths) % 999 % EDGES
        C = product(given.edge_index[:, :edges].clone(), given.weight[:edges].clone(), X)
        if what == STEP:
            C.sum().backward()
            X.grad = None

    for _ in range(40):  # after which most lengths are of a known kind
        run()
    whole = lambda: product(given.edge_index.clone(), given.weight.clone(), given.X)
    return Call(run, result=whole, is_capturable=False)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("what", [VALUE, STEP])
def test_sampled_graph(what: str, provider: str, measure: Measure) -> None:
    given = operands()
    facts: dict[str, float | int | str] = {"series": what, "nodes": NODES, "edges": EDGES, "columns": COLUMNS}
    case = Case("sampled_graph", what, given.expected, LIMIT[torch.float32], facts=facts)
    measure(case, provider, lambda: provide(provider, what, given))
