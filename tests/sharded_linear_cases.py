"""What tests/distributed/test_sharded_linear.py runs on ranks: patterns that change in training, under FSDP2."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from dtensor_cases import message
from parallel_linear_cases import DTYPE, perceptron
from ranks import device
from tolerances import TOLERANCE
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1),
}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batch(step: int, rank: int | None) -> Tensor:
    """The inputs of a rank, or of all ranks."""
    x = torch.randn(distributed.get_world_size() * 3, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(step))
    x = x.to(device())
    return x if rank is None else x.chunk(distributed.get_world_size())[rank]


def train(model: nn.Module, layers: list[Any], optimizer: torch.optim.Optimizer, rank: int | None) -> list[Tensor]:
    """Steps between which patterns lose and gain blocks; the outputs of each step."""
    outputs = []
    for step in range(6):
        optimizer.zero_grad()
        y = model(batch(step, rank))
        y.square().mean().backward()
        optimizer.step()
        outputs.append(y.detach())
        if step == 1:
            layers[0].prune_(0.4)  # looks for the optimizer
        if step == 2:
            layers[1].prune_(0.3, optimizer=optimizer)
        if step == 3:
            mask = layers[0].mask
            mask[-1] = True
            draws = torch.Generator(device()).manual_seed(7)
            layers[0].set_pattern_(mask, init="random", generator=draws, optimizer=optimizer)
        if step == 4:
            with torch.no_grad():
                outputs.append(model(batch(9, rank)))  # a pass after which the root's weights stay whole
            mask = layers[1].mask
            mask[0] = ~mask[0]
            layers[1].set_pattern_(mask, optimizer=optimizer)
    return outputs


def patterns_change_under_fsdp_as_alone() -> dict[str, list[list[int]]]:
    rank, found = distributed.get_rank(), {}
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        whole = perceptron().to(device())
        model = deepcopy(whole)
        if name != "SGD":
            fully_shard(model[0], mesh=mesh)  # a group of its own, and one for the rest
        fully_shard(model, mesh=mesh)
        found[name] = check(whole, model, make, rank)
    return found


def check(whole: nn.Module, model: nn.Module, make: Any, rank: int) -> list[list[int]]:
    layers, alone = [model[0], model[2]], [whole[0], whole[2]]
    expected = train(whole, alone, make(whole.parameters()), None)
    optimizer = make(model.parameters())
    outputs = train(model, layers, optimizer, rank)
    for output, reference in zip(outputs, expected, strict=True):
        own = reference.chunk(distributed.get_world_size())[rank]
        torch.testing.assert_close(output, own, **TOLERANCE[DTYPE])
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer, reference in zip(layers, alone):
        assert torch.equal(layer.coords, reference.coords)
        torch.testing.assert_close(full(layer.weight.detach()), reference.weight.detach(), **TOLERANCE[DTYPE])
        torch.testing.assert_close(full(layer.bias.detach()), reference.bias.detach(), **TOLERANCE[DTYPE])
        assert id(layer.weight) in held
        assert isinstance(layer.weight, DTensor)
    return [list(layer.weight.shape) for layer in layers]


def half_precision_stays_after_a_change() -> str:
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    model = perceptron().float().to(device())
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model[0].prune_(0.5)
    y = model(torch.randn(5, 6, device=device()))
    y.float().square().mean().backward()
    model[2].prune_(0.2)
    model(torch.randn(5, 6, device=device())).float().square().mean().backward()
    assert model[2].weight.grad.shape == model[2].weight.shape
    return f"{y.dtype} {model[0].weight.dtype} {model[0].weight.grad.dtype}"


def mistakes() -> dict[str, str]:
    is_odd = distributed.get_rank() == 1
    model = perceptron()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    layer, mask = model[0], torch.ones(8, 3, dtype=torch.bool)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters()) if is_odd else torch.optim.SGD(model.parameters())
    found = {
        "a mask that differs": message(lambda: layer.set_pattern_(~torch.eye(8, 3).bool() if is_odd else mask)),
        "a mask of another shape": message(lambda: layer.set_pattern_(mask[1:] if is_odd else mask)),
        "densities": message(lambda: layer.prune_(0.25 if is_odd else 0.5)),
        "no block": message(lambda: layer.set_pattern_(mask & False)),
        "an optimizer": message(lambda: layer.set_pattern_(mask, optimizer=other)),
    }
    hook = model[1].register_forward_hook(lambda *_: found.update({"in a pass": message(lambda: layer.prune_(0.3))}))
    model(batch(0, 0))
    hook.remove()
    layer.set_pattern_(mask)
    model(batch(0, 0))
    return found


NAMES = ["patterns_change_under_fsdp_as_alone", "half_precision_stays_after_a_change", "mistakes"]
