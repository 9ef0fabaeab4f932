"""The fully connected tensor product, weights for each sample: ours, e3nn and cuequivariance, in float32 and tf32."""

from __future__ import annotations

import pytest

from ..case import OURS, Case, held, in_tf32, is_tf32, on
from ..conftest import Measure
from ..equivariant import Operands, Product, make, natural, precision
from ..peers import needs_gpu

PEERS = ("e3nn", "e3nn compiled", "cuequivariance")
PROVIDERS = (OURS, *PEERS, *map(in_tf32, (OURS, *PEERS)))
LMAX = on((1, 2, 3), (1, 2))
CHANNELS = on((16, 32, 64), (8,))
BATCH = on(10_000, 100)


@held
def operands(lmax: int, channels: int) -> tuple[Operands, Case]:
    irreps = natural(lmax, channels)
    given = make(Product(f"lmax {lmax}, {channels} channels", irreps, natural(lmax, 1), irreps, BATCH))
    return given, given.forward_case("tensor_product")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("lmax", LMAX)
def test_tensor_product(lmax: int, channels: int, provider: str, measure: Measure) -> None:
    given, case = operands(lmax, channels)
    if is_tf32(provider):
        needs_gpu("tf32")
    with precision("high" if is_tf32(provider) else "highest"):
        measure(case, provider, lambda: given.forward(provider))
