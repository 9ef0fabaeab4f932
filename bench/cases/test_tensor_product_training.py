"""Gradients of the fully connected tensor product, and those of forces, which differentiate twice."""

from __future__ import annotations

import pytest

from ..case import OURS, Case, held, on
from ..conftest import Measure
from ..equivariant import Operands, Product, make, natural

PROVIDERS = (OURS, "e3nn", "cuequivariance")
LMAX = on((1, 2, 3), (1, 2))
CHANNELS, FORCE_CHANNELS = on(((16, 32, 64), (16, 32)), ((8,), (8,)))
BATCH = on(10_000, 100)


@held
def operands(lmax: int, channels: int) -> Operands:
    irreps = natural(lmax, channels)
    return make(Product(f"lmax {lmax}, {channels} channels", irreps, natural(lmax, 1), irreps, BATCH))


@held
def case(lmax: int, channels: int, is_force: bool) -> Case:
    return operands(lmax, channels).training_case("tensor_product_training", is_force)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("lmax", LMAX)
def test_gradients(lmax: int, channels: int, provider: str, measure: Measure) -> None:
    given = operands(lmax, channels)
    measure(case(lmax, channels, False), provider, lambda: given.training(provider))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("channels", FORCE_CHANNELS)
@pytest.mark.parametrize("lmax", LMAX)
def test_forces(lmax: int, channels: int, provider: str, measure: Measure) -> None:
    given = operands(lmax, channels)
    measure(case(lmax, channels, True), provider, lambda: given.training(provider, is_force=True))
