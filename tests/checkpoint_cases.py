"""What tests/distributed/test_checkpoints.py runs: models saved by some ranks, and loaded by another number of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from dtensor_cases import message
from graph_cases import NODES, split_layer
from parallel_linear_cases import DTYPE, perceptron
from ranks import device
from tolerances import TOLERANCE
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from insum_ops.distributed import (
    ColumnParallel,
    RowParallel,
    SplitSpMM,
    clip_grad_norm_,
    load_whole_optimizer_state_dict,
    load_whole_state_dict,
    saved_patterns,
    whole_optimizer_state_dict,
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
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    step(model, optimizer)
    model[2].prune_(0.3)
    step(model, optimizer)
    state = {"model": whole_state_dict(model, sharded=True)}
    state["optimizer"] = whole_optimizer_state_dict(model, optimizer, sharded=True)
    checkpoint.save(state, checkpoint_id=folder("split"))
    expected("split", step(model, optimizer))  # of Adam's state, too


def load_split() -> None:
    model = split(fresh(1))
    load_patterns_(model, saved_patterns(folder("split"), "model."))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": whole_state_dict(model, sharded=True)}
    state["optimizer"] = whole_optimizer_state_dict(model, optimizer, sharded=True)
    checkpoint.load(state, checkpoint_id=folder("split"))
    load_whole_state_dict(model, state["model"])
    load_whole_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_expected("split", step(model, optimizer))
    alone = fresh(1)  # a model that is not split
    load_patterns_(alone, saved_patterns(folder("split"), "model."))
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    parts = get_state_dict(alone, optimizer)
    state = dict(zip(("model", "optimizer"), parts))
    checkpoint.load(state, checkpoint_id=folder("split"))
    set_state_dict(alone, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_expected("split", step(alone, optimizer))


def over_both() -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    """A model split over pairs of ranks, and sharded over those that hold the same blocks."""
    ranks = distributed.get_world_size()
    names = ("data", "model")
    mesh = init_device_mesh(device(), (ranks // 2, 2), mesh_dim_names=names)
    model = fresh(0)
    parallelize_module(model, mesh["model"], {"0": ColumnParallel(), "2": RowParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data"])
    return model, torch.optim.Adam(model.parameters(), lr=0.05), mesh


def fsdp_over_split_layers_trains_as_alone() -> str:
    """Ranks that share blocks have inputs of their own; patterns change, and the state comes whole."""
    model, optimizer, mesh = over_both()
    alone = fresh(0)
    other = torch.optim.Adam(alone.parameters(), lr=0.05)
    ranks, own = mesh.size(0), mesh.get_local_rank("data")
    for at in range(4):
        x = torch.randn(ranks, 4, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(at)).to(device())
        norms = []
        for each, given, trained in ((model, x[own], optimizer), (alone, x, other)):
            trained.zero_grad()
            each(given).square().mean().backward()
            norms.append(clip_grad_norm_(each, 0.1))
            trained.step()
            if at == 1:
                each[0].prune_(0.4)
                each[2].prune_(0.3)
        torch.testing.assert_close(*norms)
    states = whole_state_dict(model), whole_optimizer_state_dict(model, optimizer)
    names = [name for name, _ in alone.named_parameters()]
    for name in names:
        torch.testing.assert_close(states[0][name], alone.state_dict()[name], **TOLERANCE[DTYPE])
        for key, part in other.state[alone.get_parameter(name)].items():
            torch.testing.assert_close(states[1]["state"][name][key], part, **TOLERANCE[DTYPE])
    again, fresh_optimizer, _ = over_both()
    load_whole_state_dict(again, states[0])
    load_whole_optimizer_state_dict(again, fresh_optimizer, states[1])
    empty = {**states[0], "2.coords": states[0]["2.coords"][:, :1], "2.weight": states[0]["2.weight"][:1]}
    assert "the pattern leaves no block here" in message(lambda: load_whole_state_dict(again, empty))
    x = inputs()
    for each, trained in ((again, fresh_optimizer), (alone, other)):
        trained.zero_grad()
        each(x).square().mean().backward()
        trained.step()
    torch.testing.assert_close(again(x), alone(x), **TOLERANCE[DTYPE])
    return raised_by(lambda: checkpoint.save({"weight": model.state_dict()["0.weight"]}, checkpoint_id=folder("both")))


def features() -> Tensor:
    return torch.randn(NODES, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(3)).to(device())


def graph_step(layer: SplitSpMM, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step over the graph; the outputs of all ranks after it."""
    optimizer.zero_grad()
    layer(features()[layer.nodes]).square().sum().backward()
    optimizer.step()
    C = torch.zeros(NODES, 3, dtype=DTYPE, device=device())
    C[layer.nodes] = layer(features()[layer.nodes]).detach()
    distributed.all_reduce(C)
    return C


def save_graph() -> None:
    layer, A, *_ = split_layer("random", trainable=True)
    with torch.no_grad():
        layer.values.mul_((layer.graph_entries[0] + 2 * layer.graph_entries[1]).double().sin())
    optimizer = torch.optim.Adam([layer.values], lr=0.05)
    dense = A.to_dense()
    rows, columns = A.indices()
    values = (dense[rows, columns] * (rows + 2 * columns).double().sin()).requires_grad_()
    alone = torch.optim.Adam([values], lr=0.05)
    for at in range(3):
        if at == 2:
            state = {"model": whole_state_dict(layer, sharded=True)}
            state["optimizer"] = whole_optimizer_state_dict(layer, optimizer, sharded=True)
            checkpoint.save(state, checkpoint_id=folder("graph"))
        C = graph_step(layer, optimizer)
        alone.zero_grad()
        product = lambda: torch.zeros_like(dense).index_put((rows, columns), values) @ features()
        product().square().sum().backward()
        alone.step()
    torch.testing.assert_close(C, product().detach(), **TOLERANCE[DTYPE])
    expected("graph", product())


def load_graph() -> None:
    layer, *_ = split_layer("good", trainable=True)
    optimizer = torch.optim.Adam([layer.values])
    state = {"model": whole_state_dict(layer, sharded=True)}
    state["optimizer"] = whole_optimizer_state_dict(layer, optimizer, sharded=True)
    checkpoint.load(state, checkpoint_id=folder("graph"))
    load_whole_state_dict(layer, state["model"])
    load_whole_optimizer_state_dict(layer, optimizer, state["optimizer"])
    assert_expected("graph", graph_step(layer, optimizer))


def raised_by(call: Callable[[], object]) -> str:
    """What this rank raised, which torch hands to all."""
    try:
        call()
    except CheckpointException as error:
        return str(error.failures[distributed.get_rank()][0])
    raise AssertionError("nothing was raised")


def own_parts_are_refused() -> dict[str, str]:
    """A state_dict of a rank's own blocks in a distributed checkpoint; torch gathers what each rank raises."""
    model, found = split(fresh(0)), {}
    optimizer = torch.optim.Adam(model.parameters())
    if distributed.get_world_size() > 1:  # one rank has all blocks
        found["save"] = raised_by(lambda: checkpoint.save(model.state_dict(), checkpoint_id=folder("refused")))
    for key, part in model.state_dict().items():  # a rank's own file is another matter
        torch.save(part, folder(f"{distributed.get_rank()}.pt"))
        again = torch.load(folder(f"{distributed.get_rank()}.pt"), weights_only=True)
        assert type(again) is Tensor, key
        assert torch.equal(again, part), key
    model.load_state_dict(model.state_dict())
    found["a parameter of another model"] = message(
        lambda: whole_optimizer_state_dict(model, torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    )
    found["LBFGS"] = message(lambda: whole_optimizer_state_dict(model, torch.optim.LBFGS(model.parameters())))
    state = whole_optimizer_state_dict(model, optimizer)
    assert not optimizer.state  # as it was
    other = {**state, "param_groups": [{**state["param_groups"][0], "params": ["0.weight"]}]}
    found["other groups"] = message(lambda: load_whole_optimizer_state_dict(model, optimizer, other))
    model[0].prune_(0.1)
    found["other blocks"] = message(lambda: load_whole_optimizer_state_dict(model, optimizer, state))
    assert not optimizer.state
    return found


SAVE = ["save_under_fsdp", "save_split", "save_graph"]
LOAD = ["load_under_fsdp", "load_split", "load_graph", "own_parts_are_refused"]
