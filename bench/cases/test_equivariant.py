"""Fully connected products of models in use, weights for each edge: DiffDock, e3nn's tetris, e3tools."""

from __future__ import annotations

import pytest

from ..case import OURS, on
from ..conftest import Measure
from ..equivariant import Product, kept, mul

PROVIDERS = (OURS, "e3nn", "cuequivariance")
EDGES, POINTS = on(10_000, 50), on(20_000, 50)
DIFFDOCK = f"{mul(10)}x1o + {mul(10)}x1e + {mul(48)}x0e + {mul(48)}x0o"
TETRIS = f"{mul(64)}x0e + {mul(24)}x1e + {mul(24)}x1o + {mul(16)}x2e + {mul(16)}x2o"
HARMONICS = "0e + 1o + 2e + 3o"
E3TOOLS = f"{mul(64)}x0e + {mul(16)}x1o", "0e + 1o", f"{mul(80)}x0e + {mul(16)}x1o"
PRODUCTS = {
    product.name: product
    for product in (
        Product("DiffDock-L1", DIFFDOCK, "0e + 1o", DIFFDOCK, EDGES),
        Product("DiffDock-L2", DIFFDOCK, "0e + 1o + 2e", DIFFDOCK, EDGES),
        Product("tetris-poly-1", HARMONICS, HARMONICS, TETRIS, POINTS),
        Product("tetris-poly-2", TETRIS, "0e + 1o + 2e", "0o + 6x0e", POINTS),
        Product("e3tools convolution", *E3TOOLS, EDGES),
    )
}
given = kept(PRODUCTS)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("is_training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str, is_training: bool, provider: str, measure: Measure) -> None:
    own, case = given(name, is_training)
    call = own.training if is_training else own.forward
    measure(case, provider, lambda: call(provider))
