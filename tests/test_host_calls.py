"""How many Python functions a warm training step enters, of ours and of torch's way to an autograd function.

Each takes the host up to a microsecond: other work has used the caches of the processor since.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_ops
from insum_ops import compiler, formats, insum
from insum_ops.nn import BlockSparseLinear, SparseConvTensor, SubMConv3d

pytestmark = pytest.mark.cpu
FOLDERS = [str(Path(str(package.__file__)).parent) for package in (insum_ops, compiler, formats)]
FILES = (*FOLDERS, str(torch.autograd.function.__file__))
STEPS = str(Path(str(compiler.__file__)).parent / "reference")  # what computes on a CPU
WARM = 60  # calls after which a map's form is settled, and has a plan


def linear() -> Callable[[], Tensor]:
    layer, x = BlockSparseLinear(64, 64, block_size=16, density=0.3), torch.randn(32, 64, requires_grad=True)
    return lambda: layer(x)


def statement() -> Callable[[], Tensor]:
    positions, B = torch.arange(16), torch.randn(16, 16, requires_grad=True)
    return lambda: insum("C[p,n] += B[I[p],n] * B[p,n]", I=positions, B=B)


def convolution() -> Callable[[], Tensor]:
    indices = torch.ones(1, 3, 3, 3).nonzero().int()
    layer, features = SubMConv3d(4, 4, 3), torch.randn(len(indices), 4, requires_grad=True)
    x = SparseConvTensor(features, indices, [3, 3, 3], batch_size=1)
    return lambda: layer(x).features


def entered(call: Callable[[], Any]) -> list[str]:
    """Return the names of the functions that a call enters, without a launch plan, which is in no file, and steps."""
    names: list[str] = []

    def look(frame: Any, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(FILES) and not file.startswith(STEPS):
            names.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(("case", "most"), [(linear, 20), (statement, 18), (convolution, 40)])
def test_a_warm_step_enters_few_functions(case, most):
    run = case()
    upstream = torch.randn_like(run().detach())
    for _ in range(WARM):
        run().backward(upstream)
    names = entered(lambda: run().backward(upstream))
    assert len(names) <= most, " ".join(names)
