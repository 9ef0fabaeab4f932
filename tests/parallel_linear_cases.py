"""What tests/distributed/test_parallel_linear.py runs on several ranks: block-sparse layers whose blocks are split."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from dtensor_cases import message
from ranks import device
from tolerances import TOLERANCE
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from insum_ops.distributed import (
    ColumnParallel,
    RowParallel,
    balanced_order,
    clip_grad_norm_,
    load_whole_state_dict,
    whole_state_dict,
)
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
    mesh, found = init_device_mesh(device(), (distributed.get_world_size(),)), {}
    for name in ("stretches", "balanced"):
        torch.manual_seed(0)
        whole = perceptron().to(device())
        order = balanced_order(mesh.size(), whole[0], whole[2]) if name == "balanced" else None
        model = deepcopy(whole)
        if distributed.get_rank() == 1:
            with torch.no_grad():
                model[0].weight.zero_()  # the first rank's weights count
        parallelize_module(model, mesh, {"0": ColumnParallel(order), "2": RowParallel(order)})
        x = torch.randn(2, 5, 6, dtype=DTYPE, device=device(), requires_grad=True)
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
        norms = [clip_grad_norm_(model, 0.5), nn.utils.clip_grad_norm_(whole.parameters(), 0.5)]
        torch.testing.assert_close(norms[0].double(), norms[1])
        torch.testing.assert_close(model[2].bias.grad, whole[2].bias.grad)
        found[name] = model[0].coords.shape[1] + model[2].coords.shape[1]
    return found


def single_layers_equal_the_whole() -> None:
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    for style, kind in ((ColumnParallel, {"gather_output": True}), (RowParallel, {"split_input": False})):
        for has_bias in (True, False):
            torch.manual_seed(0)
            whole = BlockSparseLinear(32, 16, block_size=2, device=device(), dtype=DTYPE, density=0.4, bias=has_bias)
            ends = (whole, None) if style is ColumnParallel else (None, whole)
            layer = deepcopy(whole)
            parallelize_module(layer, mesh, style(balanced_order(mesh.size(), *ends), **kind))
            x = torch.randn(5, 32, dtype=DTYPE, device=device(), requires_grad=True)
            upstream = torch.randn(5, 16, dtype=DTYPE, device=device())
            y, expected = layer(x), x @ whole.to_dense().T + (whole.bias if has_bias else 0)
            torch.testing.assert_close(y, expected, **TOLERANCE[DTYPE])
            (grad,) = torch.autograd.grad(y, x, upstream)
            torch.testing.assert_close(grad, upstream @ whole.to_dense(), **TOLERANCE[DTYPE])
            layer.float()
            with torch.autocast(device(), torch.bfloat16):
                assert layer(x.detach().float()).dtype == torch.bfloat16


def gradients_of_gradients() -> None:
    """A penalty on the gradient of the pair and of single layers, beside the input itself."""
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    column, row = ColumnParallel(gather_output=True), RowParallel(split_input=False)
    pair, alone = {"0": ColumnParallel(), "2": RowParallel()}, {"0": column, "2": row}
    for plan in (pair, alone):
        torch.manual_seed(0)
        whole = perceptron().to(device())
        model = parallelize_module(deepcopy(whole), mesh, plan)
        x = torch.randn(5, 6, dtype=DTYPE, device=device(), requires_grad=True)
        found = []
        for own in (model, lambda x, whole=whole: in_dense(whole, x)):
            (grad,) = torch.autograd.grad(own(x).pow(3).sum(), x, create_graph=True)
            first = (model if own is model else whole)[0].weight
            found.append((grad, *torch.autograd.grad(grad.square().sum() + x.sum(), [x, first])))
        (grad, second, of_weight), (expected, expected_second, expected_of_weight) = found
        torch.testing.assert_close(grad, expected, **TOLERANCE[DTYPE])
        torch.testing.assert_close(second, expected_second, **TOLERANCE[DTYPE])
        parts = {"coords": whole[0].coords, "weight": expected_of_weight}
        torch.testing.assert_close(of_weight, model[0].own_parts(parts)["weight"], **TOLERANCE[DTYPE])


def patterns_change_in_training_as_in_the_whole() -> list[int]:
    """Adam's state moves with the blocks; blocks are chosen among those of all ranks."""
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    torch.manual_seed(0)
    whole = perceptron().to(device())
    model = deepcopy(whole)
    order = balanced_order(mesh.size(), whole[0], whole[2])
    parallelize_module(model, mesh, {"0": ColumnParallel(order), "2": RowParallel(order)})
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (whole, model)]
    for step in range(5):
        x = torch.randn(4, 6, dtype=DTYPE, device=device())
        for each, optimizer in zip((whole, model), optimizers):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
            if step == 1:
                each[0].prune_(0.4)
            if step == 2:
                each[2].prune_(0.3, optimizer=optimizer)
            if step == 3:
                mask = torch.eye(8, 3, dtype=torch.bool, device=device())
                mask[:, 0] = True
                draws = torch.Generator(device()).manual_seed(3)
                each[0].set_pattern_(mask, init="random", generator=draws, optimizer=optimizer)
                every = torch.ones(each[2].whole_grid if each is model else each[2].grid, device=device()) == 1
                each[2].set_pattern_(every, optimizer=optimizer)
    torch.testing.assert_close(model(x), whole(x), **TOLERANCE[DTYPE])
    state = whole_state_dict(model)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(state[key], value, **TOLERANCE[DTYPE])
    return [model[0].coords.shape[1], model[2].coords.shape[1]]


def a_state_loads_into_a_split_model() -> None:
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    torch.manual_seed(1)
    saved = perceptron().to(device())
    saved[2].prune_(0.2)
    torch.manual_seed(0)
    model = perceptron().to(device())
    parallelize_module(model, mesh, {"0": ColumnParallel(), "2": RowParallel()})
    load_whole_state_dict(model, saved.state_dict())
    x = torch.randn(4, 6, dtype=DTYPE, device=device())
    torch.testing.assert_close(model(x), saved(x), **TOLERANCE[DTYPE])
    for sharded in (False, True):
        for key, value in whole_state_dict(model, sharded=sharded).items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(value, saved.state_dict()[key]), key


def layer_mistakes(style: ColumnParallel | RowParallel, mesh: DeviceMesh, is_odd: bool) -> tuple[dict[str, str], Any]:
    """Of one rank, in calls of a split layer and changes of its pattern; and the layer."""
    kind = type(style).__name__
    made = BlockSparseLinear(16, 32, block_size=4, density=0.5)
    parallelize_module(made, mesh, style)
    mask = torch.ones(8, 4) == 1
    other_mask = mask if not is_odd else ~torch.eye(8, 4).bool()
    bad_mask = mask[1:] if is_odd else mask
    x = torch.randn(5, 16)
    found = {
        f"{kind}: features": message(lambda: made(x[:, 1:] if is_odd else x)),
        f"{kind}: a batch": message(lambda: made(x[1:] if is_odd else x)),
        f"{kind}: a dtype": message(lambda: made(x.double() if is_odd else x)),
        f"{kind}: a gradient": message(lambda: made(x.clone().requires_grad_(is_odd))),
        f"{kind}: a transform": message(lambda: torch.func.vmap(made)(x)),
        f"{kind}: no tensor": message(lambda: made([1] if is_odd else x)),
        f"{kind}: a mask that differs": message(lambda: made.set_pattern_(other_mask)),
        f"{kind}: a mask of another shape": message(lambda: made.set_pattern_(bad_mask)),
        f"{kind}: densities": message(lambda: made.prune_(0.25 if is_odd else 0.5)),
        f"{kind}: no density": message(lambda: made.prune_(-1 if is_odd else 0.5)),
        f"{kind}: too many": message(lambda: made.prune_(0.9)),
        f"{kind}: weights": message(made.reset_parameters),
    }
    made(x)  # all ranks have come to the same place
    return found, made


def mistakes() -> dict[str, str]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    is_odd = rank == 1

    def split(layer: nn.Module, style: ColumnParallel | RowParallel) -> str:
        return message(lambda: parallelize_module(layer, mesh, style))

    torch.manual_seed(rank)
    differs = BlockSparseLinear(32, 32, block_size=4, density=0.3)
    torch.manual_seed(0)
    layer = BlockSparseLinear(12, 32, block_size=4, density=0.5)
    wide = BlockSparseLinear(12, 64 if is_odd else 32, block_size=4, density=1.0)
    other = nn.Linear(8, 8) if is_odd else deepcopy(layer)
    order = torch.zeros(8, dtype=torch.int64) if is_odd else torch.arange(8)
    found = {
        "a pattern that differs": split(differs, ColumnParallel()),
        "a mesh that does not divide": split(layer, RowParallel()),
        "another module": split(nn.Linear(8, 8), ColumnParallel()),
        "another module on one rank": split(other, ColumnParallel()),
        "an order": split(deepcopy(layer), ColumnParallel(order)),
        "an order that is a list": split(deepcopy(layer), ColumnParallel(list(range(8)))),
        "an order that differs": split(deepcopy(layer), ColumnParallel(torch.arange(8).flip(0) if is_odd else order)),
        "other sizes": split(wide, ColumnParallel()),
    }
    torch.manual_seed(0)
    for style in (ColumnParallel(), RowParallel(split_input=False)):
        of_layer, made = layer_mistakes(style, mesh, is_odd)
        found |= of_layer
    state = whole_state_dict(made)
    short = {key: value for key, value in state.items() if key != "weight" or not is_odd}
    more = {**state, "more": torch.ones(1)}
    negative = {**state, "weight": -state["weight"] if is_odd else state["weight"]}
    elsewhere = nn.Sequential(made if not is_odd else nn.Linear(2, 2))
    if is_odd:
        elsewhere.append(made)
    found |= {
        "a state without blocks": message(lambda: load_whole_state_dict(made, short)),
        "a state with more": message(lambda: load_whole_state_dict(made, more)),
        "a state that differs": message(lambda: load_whole_state_dict(made, negative)),
        "other layers": message(lambda: whole_state_dict(elsewhere)),
    }
    return found


NAMES = [
    "the_pair_equals_the_whole",
    "single_layers_equal_the_whole",
    "gradients_of_gradients",
    "patterns_change_in_training_as_in_the_whole",
    "a_state_loads_into_a_split_model",
    "mistakes",
]
