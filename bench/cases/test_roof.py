"""What this machine can do at most: bytes copied and dense products, the roofs of the roofline plot."""

from __future__ import annotations

import pytest
import torch

from ..case import DEVICE, Call, Case, on
from ..conftest import Measure

BYTES = on(2**32, 2**27)
SIZE = on(8192, 1024)
DTYPES = on((torch.float16, torch.float32), (torch.float32,))


def test_copy(measure: Measure) -> None:
    def make() -> Call:
        source = torch.ones(BYTES // 4, device=DEVICE)
        target = torch.empty_like(source)
        # as called: replayed from a graph the same copy took 3.1 ms on an H200, where calls of it took 2.0
        return Call(lambda: target.copy_(source), is_capturable=False)

    measure(Case("roof", "copy", traffic=2.0 * BYTES), "torch", make)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul(dtype: torch.dtype, measure: Measure) -> None:
    def make() -> Call:
        A, B = (torch.randn(SIZE, SIZE, device=DEVICE, dtype=dtype) for _ in range(2))
        return Call(lambda: A @ B)

    name = str(dtype)[6:]
    measure(Case("roof", f"matmul {name}", flops=2.0 * SIZE**3, facts={"series": name}), "torch", make)
