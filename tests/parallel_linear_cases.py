"""What tests/distributed/test_parallel_linear.py runs on several ranks: block-sparse layers whose blocks are split."""

from __future__ import annotations

from copy import deepcopy

import torch
from dtensor_cases import message
from tolerances import TOLERANCE
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from insum_ops.distributed import ColumnParallel, RowParallel, balanced_order, whole_state_dict
from insum_ops.nn import BlockSparseLinear

DTYPE = torch.float64


def skewed(rows: int, columns: int) -> Tensor:
    """A pattern whose first block rows are full and whose last ones are empty."""
    return torch.arange(columns)[None] < torch.linspace(columns, 0, rows).round()[:, None]


def perceptron() -> nn.Sequential:
    up = BlockSparseLinear(6, 32, block_size=(4, 2), dtype=DTYPE, pattern=skewed(8, 3))
    down = BlockSparseLinear(32, 9, block_size=(2, 4), dtype=DTYPE, density=0.5)
    return nn.Sequential(up, nn.Tanh(), down)


def in_dense(model: nn.Sequential, x: Tensor) -> Tensor:
    up, _, down = model
    return (x @ up.to_dense().T + up.bias).tanh() @ down.to_dense().T + down.bias


def the_pair_equals_the_whole() -> dict[str, int]:
    mesh, found = init_device_mesh("cpu", (distributed.get_world_size(),)), {}
    for name in ("stretches", "balanced"):
        torch.manual_seed(0)
        whole = perceptron()
        order = balanced_order(mesh.size(), whole[0], whole[2]) if name == "balanced" else None
        model = deepcopy(whole)
        if distributed.get_rank() == 1:
            with torch.no_grad():
                model[0].weight.zero_()  # the first rank's weights count
        parallelize_module(model, mesh, {"0": ColumnParallel(order), "2": RowParallel(order)})
        x = torch.randn(2, 5, 6, dtype=DTYPE, requires_grad=True)
        y = model(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        expected = in_dense(whole, x)
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(y, expected, **TOLERANCE[DTYPE])
        torch.testing.assert_close(grad, expected_grad, **TOLERANCE[DTYPE])
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(model[2].bias.grad, whole[2].bias.grad, **TOLERANCE[DTYPE])
        norms = torch.stack([sum(layer.weight.grad.square().sum() for layer in (model[0], model[2]))])
        distributed.all_reduce(norms)
        expected_norm = sum(layer.weight.grad.square().sum() for layer in (whole[0], whole[2]))
        torch.testing.assert_close(norms[0], expected_norm)
        state = whole_state_dict(model)
        assert state.keys() == whole.state_dict().keys()
        for key, value in whole.state_dict().items():
            assert torch.equal(state[key], value), key
        found[name] = model[0].coords.shape[1] + model[2].coords.shape[1]
    return found


def single_layers_equal_the_whole() -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for style, kind in ((ColumnParallel, {"gather_output": True}), (RowParallel, {"split_input": False})):
        for has_bias in (True, False):
            torch.manual_seed(0)
            whole = BlockSparseLinear(32, 16, block_size=2, dtype=DTYPE, density=0.4, bias=has_bias)
            ends = (whole, None) if style is ColumnParallel else (None, whole)
            layer = deepcopy(whole)
            parallelize_module(layer, mesh, style(balanced_order(mesh.size(), *ends), **kind))
            x = torch.randn(5, 32, dtype=DTYPE, requires_grad=True)
            upstream = torch.randn(5, 16, dtype=DTYPE)
            y, expected = layer(x), x @ whole.to_dense().T + (whole.bias if has_bias else 0)
            torch.testing.assert_close(y, expected, **TOLERANCE[DTYPE])
            (grad,) = torch.autograd.grad(y, x, upstream)
            torch.testing.assert_close(grad, upstream @ whole.to_dense(), **TOLERANCE[DTYPE])


def mistakes() -> dict[str, str]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))

    def split(layer: nn.Module, style: ColumnParallel | RowParallel) -> str:
        return message(lambda: parallelize_module(layer, mesh, style))

    torch.manual_seed(rank)
    differs = BlockSparseLinear(32, 32, block_size=4, density=0.3)
    torch.manual_seed(0)
    layer = BlockSparseLinear(12, 32, block_size=4, density=0.5)
    return {
        "a pattern that differs": split(differs, ColumnParallel()),
        "a mesh that does not divide": split(layer, RowParallel()),
        "another module": split(nn.Linear(8, 8), ColumnParallel()),
        "an order": split(layer, ColumnParallel(torch.zeros(8, dtype=torch.int64))),
    }


NAMES = ["the_pair_equals_the_whole", "single_layers_equal_the_whole", "mistakes"]
