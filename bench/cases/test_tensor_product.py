"""The fully connected tensor product, weights for each sample, float32: ours beside e3nn and cuequivariance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import pytest
import torch
from torch import Tensor

from insum_ops.nn import FullyConnectedTensorProduct

from ..case import DEVICE, LIMIT, LIMIT_TF32, OURS, Call, Case, held, on
from ..conftest import Measure
from ..peers import installed, needs_gpu

TF32 = f"{OURS} tf32"
PROVIDERS = (OURS, TF32, "e3nn", "e3nn compiled", "cuequivariance")
LMAX = on((1, 2, 3), (1, 2))
CHANNELS = on((16, 32, 64), (8,))
BATCH = on(10_000, 100)
SAMPLES = 64  # that are checked: the float64 product of all would take most of the memory


@dataclass(frozen=True)
class Operands:
    case: Case
    irreps: str
    second: str
    X: Tensor
    Y: Tensor
    W: Tensor


@held
def operands(lmax: int, channels: int) -> Operands:
    o3 = installed("e3nn.o3")
    parity = ("e", "o")
    irreps = " + ".join(f"{channels}x{degree}{parity[degree % 2]}" for degree in range(lmax + 1))
    second = " + ".join(f"1x{degree}{parity[degree % 2]}" for degree in range(lmax + 1))
    exact = o3.FullyConnectedTensorProduct(irreps, second, irreps, shared_weights=False).to(DEVICE, torch.float64)
    X = torch.randn(BATCH, exact.irreps_in1.dim, device=DEVICE)
    Y = torch.randn(BATCH, exact.irreps_in2.dim, device=DEVICE)
    W = torch.randn(BATCH, exact.weight_numel, device=DEVICE)
    few = slice(0, SAMPLES)
    with torch.no_grad():
        expected = exact(X[few].double(), Y[few].double(), W[few].double())
    components = (exact.irreps_out[path.i_out].ir.dim * prod(path.path_shape) for path in exact.instructions)
    case = Case(
        "tensor_product",
        f"lmax {lmax}, {channels} channels",
        expected,
        LIMIT[torch.float32],
        flops=2.0 * BATCH * sum(components),
        traffic=4.0 * (2 * X.numel() + Y.numel() + W.numel()),
        facts={"lmax": lmax, "channels": channels, "batch": BATCH, "weights": exact.weight_numel},
    )
    return Operands(case, irreps, second, X, Y, W)


def provide(provider: str, given: Operands) -> Call:
    X, Y, W = given.X, given.Y, given.W
    irreps = given.irreps, given.second, given.irreps
    if provider == "cuequivariance":
        return cuequivariance(given)
    layer: Callable[..., Tensor]
    if provider in (OURS, TF32):
        layer = FullyConnectedTensorProduct(*irreps, shared_weights=False).to(DEVICE)
    else:
        layer = installed("e3nn.o3").FullyConnectedTensorProduct(*irreps, shared_weights=False).to(DEVICE)
    if provider == "e3nn compiled":
        needs_gpu("torch.compile of e3nn")  # a CPU would first have to compile C++ for half a minute
        layer = torch.compile(layer)
    return _call(lambda: layer(X, Y, W), LIMIT_TF32 if provider == TF32 else None)


def _call(run: Callable[[], Tensor], limit: float | None = None) -> Call:
    def quiet() -> Tensor:
        with torch.no_grad():
            return run()

    return Call(quiet, result=lambda: quiet()[:SAMPLES], limit=limit)


def cuequivariance(given: Operands) -> Call:
    """Its fused kernels, with e3nn's irreps and weights, which it takes as they are."""
    needs_gpu("cuequivariance")
    cue, cuet = installed("cuequivariance"), installed("cuequivariance_torch")
    first, second = cue.Irreps("O3", given.irreps), cue.Irreps("O3", given.second)
    options = dict(layout=cue.mul_ir, shared_weights=False, internal_weights=False, device=DEVICE)
    layer = cuet.FullyConnectedTensorProduct(first, second, first, **options)
    return _call(lambda: layer(given.X, given.Y, given.W))


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("lmax", LMAX)
def test_tensor_product(lmax: int, channels: int, provider: str, measure: Measure) -> None:
    given = operands(lmax, channels)
    if provider == TF32:
        needs_gpu("tf32")
    with _precision("high" if provider == TF32 else "highest"):
        measure(given.case, provider, lambda: provide(provider, given))
