"""What tests/distributed/test_checkpoints.py runs: models saved by some ranks, and loaded by another number of them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from graph_cases import NODES, split_layer
from parallel_linear_cases import DTYPE, perceptron
from ranks import device
from tolerances import TOLERANCE
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from insum_ops.distributed import (
    ColumnParallel,
    RowParallel,
    load_whole_state_dict,
    saved_patterns,
    whole_state_dict,
)
from insum_ops.nn import load_patterns_


def folder(name: str) -> Path:
    return Path(os.environ["CHECKPOINTS"]) / name


def inputs() -> Tensor:
    return torch.randn(4, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(2)).to(device())


def expected(name: str, value: Tensor) -> None:
    """What the ranks that save find; those that load compare."""
    if distributed.get_rank() == 0:
        torch.save(value.detach().cpu(), folder(f"{name}.pt"))


def assert_expected(name: str, value: Tensor) -> None:
    torch.testing.assert_close(value.detach().cpu(), torch.load(folder(f"{name}.pt")), **TOLERANCE[DTYPE])


def fresh(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return perceptron().to(device())


def sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    fully_shard(model, mesh=init_device_mesh(device(), (distributed.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step; the outputs after it."""
    optimizer.zero_grad()
    model(inputs()).square().mean().backward()
    optimizer.step()
    return model(inputs())


def save_under_fsdp() -> None:
    model, optimizer = sharded(fresh(0))
    step(model, optimizer)
    model[0].prune_(0.4)
    step(model, optimizer)
    state, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": state, "optimizer": states}, checkpoint_id=folder("fsdp"))
    expected("fsdp", step(model, optimizer))  # of Adam's state, too


def load_under_fsdp() -> None:
    model = fresh(1)
    load_patterns_(model, saved_patterns(folder("fsdp"), "model."))
    model, optimizer = sharded(model)
    state, states = get_state_dict(model, optimizer)
    both = {"model": state, "optimizer": states}
    checkpoint.load(both, checkpoint_id=folder("fsdp"))
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    assert_expected("fsdp", step(model, optimizer))


def split(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColumnParallel(), "2": RowParallel()})
    return model


def save_split() -> None:
    model = split(fresh(0))
    model[2].prune_(0.3)
    checkpoint.save(whole_state_dict(model, sharded=True), checkpoint_id=folder("split"))
    expected("split", model(inputs()))


def load_split() -> None:
    model = split(fresh(1))
    load_patterns_(model, saved_patterns(folder("split")))
    state = whole_state_dict(model, sharded=True)
    checkpoint.load(state, checkpoint_id=folder("split"))
    load_whole_state_dict(model, state)
    assert_expected("split", model(inputs()))
    alone = fresh(1)  # a model that is not split
    load_patterns_(alone, saved_patterns(folder("split")))
    state = alone.state_dict()
    checkpoint.load(state, checkpoint_id=folder("split"))
    alone.load_state_dict(state)
    assert_expected("split", alone(inputs()))


def features() -> Tensor:
    return torch.randn(NODES, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(3)).to(device())


def save_graph() -> None:
    layer, A, *_ = split_layer("random", trainable=True)
    with torch.no_grad():
        layer.values.mul_((layer.graph_entries[0] + 2 * layer.graph_entries[1]).double().sin())
    checkpoint.save(whole_state_dict(layer, sharded=True), checkpoint_id=folder("graph"))
    dense = A.to_dense()
    rows, columns = A.indices()
    dense[rows, columns] *= (rows + 2 * columns).double().sin()
    expected("graph", dense @ features())


def load_graph() -> None:
    layer, *_ = split_layer("good", trainable=True)
    state = whole_state_dict(layer, sharded=True)
    checkpoint.load(state, checkpoint_id=folder("graph"))
    load_whole_state_dict(layer, state)
    C = torch.zeros(NODES, 3, dtype=DTYPE, device=device())
    C[layer.nodes] = layer(features()[layer.nodes]).detach()
    distributed.all_reduce(C)
    assert_expected("graph", C)


SAVE = ["save_under_fsdp", "save_split", "save_graph"]
LOAD = ["load_under_fsdp", "load_split", "load_graph"]
