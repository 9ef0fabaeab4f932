"""Products with weights for all samples: e3tools, e3nn's benchmark, one-hot kinds in MACE and NequIP; and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

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
    return given, replace(case, limit=limit, facts={**case.facts, "series": kind})


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


def _pair(given: Operands, wigner: Callable[..., Tensor], i_out: int) -> tuple[Tensor, Tensor]:
    """T [b (2l+1), paths u] and W [paths u, w] of one output."""
    exact = given.exact
    T, weights = [], []
    for _, path, W in exact.weight_views(given.W, yield_instruction=True):
        if path.i_out != i_out:
            continue
        (u, first), (_, second) = exact.irreps_in1[path.i_in1], exact.irreps_in2[path.i_in2]
        C = wigner(first.l, second.l, exact.irreps_out[i_out].ir.l).to(given.X)
        X = given.X[:, exact.irreps_in1.slices()[path.i_in1]].unflatten(1, (u, first.dim))
        Y = given.Y[:, exact.irreps_in2.slices()[path.i_in2]]
        T.append(path.path_weight * torch.einsum("ijk,bui,bj->bku", C, X, Y))
        weights.append(W[:, 0])
    return torch.cat(T, 2).flatten(0, 1), torch.cat(weights)


@pytest.mark.parametrize("provider", [OURS, CUBLAS, "e3nn"])
@pytest.mark.parametrize("kind", ["ieee", "tf32"])
def test_beside_matmul(kind: str, provider: str, measure: Measure) -> None:
    if kind == "tf32":
        needs_gpu("tf32")
    with precision("high" if kind == "tf32" else "highest"):
        given, case = contraction(kind)
        make_call = lambda: dense_products(given) if provider == CUBLAS else given.forward(provider)
        measure(case, provider, make_call)
