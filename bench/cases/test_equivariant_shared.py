"""Products with weights for all samples: e3tools, e3nn's benchmark, one-hot kinds in MACE and NequIP; and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.formats import ELL

from ..case import LIMIT_TF32, OURS, Call, Case, held, on
from ..conftest import Measure
from ..equivariant import GROUPED, POSITIONS, Operands, Product, kept, make, mul, natural, precision
from ..peers import installed, needs_gpu

E3TOOLS = f"{mul(64)}x0e + {mul(16)}x1o"
E3NN = f"{mul(8)}x0e + {mul(8)}x1e + {mul(8)}x2e + {mul(8)}x3o"
MACE = natural(2, mul(128))
WIDE = mul(32)
TENSORS = " + ".join(f"{WIDE}x{degree}{parity}" for degree in (1, 2, 3) for parity in "oe")
NEQUIP, GATED = f"{WIDE}x0o + {WIDE}x0e + {TENSORS}", f"{WIDE}x0o + {mul(224)}x0e + {TENSORS}"
BATCH, ATOMS = on(10_000, 50), on(2_000, 20)
PRODUCTS = {
    product.name: product
    for product in (
        Product("e3tools transformer", E3TOOLS, "0e + 1o", E3TOOLS, BATCH, is_shared=True),
        Product("e3nn's benchmark", E3NN, E3NN, E3NN, BATCH, is_shared=True),
        Product("MACE skip_tp", MACE, f"{mul(89)}x0e", MACE, ATOMS, is_shared=True, is_one_hot=True),
        Product("NequIP self-connection", NEQUIP, "2x0e", GATED, BATCH, is_shared=True, is_one_hot=True),
    )
}
# cuequivariance has weights by kind in a layout of its own, so that its gradients are not those of the others
ROWS = [
    pytest.param(name, is_training, provider, id=f"{name}-{'training' if is_training else 'forward'}-{provider}")
    for name, product in PRODUCTS.items()
    for is_training in (False, True)
    for provider in (OURS, POSITIONS, GROUPED, "e3nn", "cuequivariance")
    if product.is_one_hot or provider not in (POSITIONS, GROUPED)
    if not (product.is_one_hot and is_training and provider == "cuequivariance")
]
CHANNELS = mul(64)
CUBLAS = "torch.matmul"
LAYER, ALONE = "the layer", "its contraction with the weights alone"


given = kept(PRODUCTS)


@pytest.mark.parametrize(("name", "is_training", "provider"), ROWS)
def test_shared(name: str, is_training: bool, provider: str, measure: Measure) -> None:
    own, case = given(name, is_training)
    call = own.training if is_training else own.forward
    measure(case, provider, lambda: call(provider))


@held
def contraction(kind: str) -> tuple[Operands, Case]:
    irreps = natural(2, CHANNELS)
    name = f"lmax 2, {CHANNELS} channels, {kind}"
    given = make(Product(name, irreps, natural(2, 1), irreps, BATCH, is_shared=True))
    case = given.forward_case("shared_product")
    limit = LIMIT_TF32 if kind == "tf32" else case.limit
    return given, replace(case, limit=limit)


def dense_products(given: Operands) -> Call:
    """The contraction with the weights alone: x and y are multiplied beforehand, one matmul for each output degree."""
    wigner, exact = installed("e3nn.o3").wigner_3j, given.exact
    with torch.no_grad():
        pairs = [_pair(given, wigner, i_out) for i_out in range(len(exact.irreps_out))]

    def run() -> list[Tensor]:
        return [T @ W for T, W in pairs]

    def result() -> Tensor:
        blocks = (Z.unflatten(0, (given.product.batch, -1)).mT.flatten(1) for Z in run())
        return torch.cat(list(blocks), 1)

    return Call(run, result=result)


def alone(given: Operands) -> Call:
    """The same contraction as one statement of ours: T [b, rows of all paths, u], W [path, u, w]."""
    wigner, exact = installed("e3nn.o3").wigner_3j, given.exact
    first = [where.start // CHANNELS for where in exact.irreps_out.slices()]  # component of each block
    T, weights, places = [], [], []
    with torch.no_grad():
        for number, (_, path, W) in enumerate(exact.weight_views(given.W, yield_instruction=True)):
            own = _products(given, wigner, path)
            places += [(first[path.i_out] + row, len(places) + row, number) for row in range(own.shape[1])]
            T.append(own)
            weights.append(W[:, 0])
    place, dim = torch.tensor(places).T, exact.irreps_out.dim // CHANNELS
    A = ELL.from_coo(place, torch.ones(len(places)), (dim, len(places), len(weights))).to(given.X.device)
    operands = {"T": torch.cat(T, 1), "W": torch.stack(weights), "A": A}

    def run() -> Tensor:
        return insum(
            "Z[b,i,w] += T[b,r,u] * W[l,u,w] * A[i,r,l]", size=(given.product.batch, dim, CHANNELS), **operands
        )

    def result() -> Tensor:
        blocks = [where.stop // CHANNELS for where in exact.irreps_out.slices()]
        Z = run()
        return torch.cat([Z[:, start:stop].mT.flatten(1) for start, stop in zip(first, blocks)], 1)

    return Call(run, result=result)


def _products(given: Operands, wigner: Callable[..., Tensor], path: Any) -> Tensor:
    """T [b, components, u] of one path: x and y multiplied, without the weights."""
    exact = given.exact
    (u, first), (_, second) = exact.irreps_in1[path.i_in1], exact.irreps_in2[path.i_in2]
    C = wigner(first.l, second.l, exact.irreps_out[path.i_out].ir.l).to(given.X)
    X = given.X[:, exact.irreps_in1.slices()[path.i_in1]].unflatten(1, (u, first.dim))
    Y = given.Y[:, exact.irreps_in2.slices()[path.i_in2]]
    return path.path_weight * torch.einsum("ijk,bui,bj->bku", C, X, Y)  # type: ignore[no-any-return]


def _pair(given: Operands, wigner: Callable[..., Tensor], i_out: int) -> tuple[Tensor, Tensor]:
    """T [b (2l+1), paths u] and W [paths u, w] of one output."""
    exact = given.exact
    T, weights = [], []
    for _, path, W in exact.weight_views(given.W, yield_instruction=True):
        if path.i_out != i_out:
            continue
        T.append(_products(given, wigner, path))
        weights.append(W[:, 0])
    return torch.cat(T, 2).flatten(0, 1), torch.cat(weights)


@pytest.mark.parametrize("provider", [OURS, CUBLAS, "e3nn"])
@pytest.mark.parametrize("what", [LAYER, ALONE])
@pytest.mark.parametrize("kind", ["ieee", "tf32"])
def test_beside_matmul(kind: str, what: str, provider: str, measure: Measure) -> None:
    """The whole layer, and what torch.matmul does of it, each beside that."""
    if kind == "tf32":
        needs_gpu("tf32")
    if what == ALONE and provider == "e3nn":
        pytest.skip("e3nn does not mix channels apart")
    with precision("high" if kind == "tf32" else "highest"):
        given, whole = contraction(kind)
        facts = {**whole.facts, "series": f"{what}, {kind}"}
        case = replace(whole, name=f"{whole.name}, {what}", facts=facts)
        if provider == CUBLAS:
            measure(case, provider, lambda: dense_products(given))
        else:
            ours_alone = provider == OURS and what == ALONE
            measure(case, provider, lambda: alone(given) if ours_alone else given.forward(provider))
