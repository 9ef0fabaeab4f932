"""Channelwise products of models in use, weights for each edge: MACE, SevenNet; alone and as a whole convolution."""

from __future__ import annotations

import pytest

from ..case import OURS, on
from ..conftest import Measure
from ..equivariant import Product, kept, mul, natural

PROVIDERS = (OURS, "e3nn", "cuequivariance")
EDGES, NODES = on((20_000, 1_000), (50, 10))
WIDE = mul(128)
MEDIUM = natural(1, WIDE), natural(3, 1), natural(2, 1)
LARGE = natural(2, WIDE), natural(3, 1), natural(3, 1)
SEVENNET = f"{WIDE}x0e + {mul(64)}x1e + {mul(32)}x2e + {mul(32)}x3e", "0e + 1e + 2e + 3e", "0e + 1e + 2e + 3e"
PRODUCTS = {
    product.name: product
    for product in (
        Product("mace-medium", *MEDIUM, EDGES, "uvu"),
        Product("mace-large", *LARGE, EDGES, "uvu"),
        Product("SevenNet-l3i5", *SEVENNET, EDGES, "uvu"),
        Product("mace-medium, gather and scatter", *MEDIUM, EDGES, "uvu", nodes=NODES),
        Product("mace-large, gather and scatter", *LARGE, EDGES, "uvu", nodes=NODES),
    )
}
given = kept(PRODUCTS)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("is_training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_edges(name: str, is_training: bool, provider: str, measure: Measure) -> None:
    own, case = given(name, is_training)
    call = own.training if is_training else own.forward
    measure(case, provider, lambda: call(provider))
