"""The columns of the table that two processes fill, over gloo: data parallel, sharded, split and as DTensors.

This file as a program fills cells of one row or of many: `rank_columns.py FOLDER NAME|COLUMN ...`. Each of its two ranks
writes what its cells gave to a file in the folder. A cell has a process group of its own: after an error the ranks may
be out of step.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from entry_cases import CASES, EntryCase
from entry_columns import N, close, copies
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import insum_ops.distributed
from insum_ops.nn import BlockSparseLinear

RANKS = 2
PATIENCE = timedelta(seconds=20)  # of a rank that waits for the other
STEPS = 2
RATE = 1e-3


class Scaled(nn.Module):
    """An entry point behind a parameter, so that each has something to train."""

    def __init__(self, case: EntryCase) -> None:
        super().__init__()
        self.layer = case.make()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, first: Tensor, *others: Any) -> Tensor:
        return self.layer(first * self.scale.mean(), *others)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def _loss(value: Tensor) -> Tensor:
    return value.square().sum()


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stepped(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
                parameter.grad = None


def _data_parallel(case: EntryCase, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Train two steps, each rank on inputs of its own, and compare with one process that trains on both."""
    alone, rank = Scaled(case), distributed.get_rank()
    shared = wrap(copy.deepcopy(alone))
    for step in range(STEPS):
        inputs = [case.at(N + step + other) for other in range(RANKS)]
        value = shared(*inputs[rank])
        _loss(value).backward()
        grads = {name.removeprefix("module."): _whole(p.grad) for name, p in shared.named_parameters()}
        losses = [alone(*given) for given in inputs]
        (sum(map(_loss, losses)) / RANKS).backward()
        close(value, losses[rank])
        for name, parameter in alone.named_parameters():
            close(grads[name], parameter.grad)
        _stepped(alone)
        _stepped(shared)


def ddp(case: EntryCase) -> None:
    """DistributedDataParallel."""
    _data_parallel(case, DistributedDataParallel)


def ddp_static(case: EntryCase) -> None:
    """DistributedDataParallel with static_graph."""
    _data_parallel(case, lambda model: DistributedDataParallel(model, static_graph=True))


def fsdp2(case: EntryCase) -> None:
    """fully_shard, of the entry point where it has parameters, and of the whole."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = _mesh()
        if any(True for _ in model.layer.parameters()):
            fully_shard(model.layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    _data_parallel(case, wrap)


def _split_inputs(inputs: tuple[Any, ...], case: EntryCase, mesh: DeviceMesh, along_lengths: bool) -> tuple[Any, ...]:
    """The inputs as DTensors: split along the lengths that vary, or along the last of the other dimensions."""
    split = []
    for at, x in enumerate(inputs):
        if not isinstance(x, Tensor) or not (x.is_floating_point() or along_lengths):
            split.append(x)
            continue
        varying = case.varying[at]
        features = [dim for dim in range(x.ndim) if dim not in varying]
        dims = list(varying) if along_lengths else features[-1:]
        placement = Shard(dims[0]) if dims else Replicate()
        split.append(x if isinstance(x, DTensor) else distribute_tensor(x, mesh, [placement]))
    return tuple(split)


class Split(ParallelStyle):
    """Features of the inputs over ranks, parameters whole, the output whole again."""

    def __init__(self, case: EntryCase) -> None:
        self.case = case

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter = lambda _, inputs, mesh: _split_inputs(inputs, self.case, mesh, False)
        leave = lambda _, value, mesh: value.full_tensor()
        return distribute_module(module, device_mesh, None, enter, leave)


def tensor_parallel(case: EntryCase) -> None:
    """parallelize_module: a block-sparse layer's own styles, and features split over ranks for others."""
    model, mesh = nn.Sequential(), _mesh()
    model.layer = _wide_linear() if isinstance(case.make(), BlockSparseLinear) else case.make()
    alone = copy.deepcopy(model.layer)
    is_linear = isinstance(model.layer, BlockSparseLinear)
    style = insum_ops.distributed.ColumnParallel(gather_output=True) if is_linear else Split(case)
    parallelize_module(model, mesh, {"layer": style})
    given, plain = copies(case.at(N), case.wants_grad), copies(case.at(N), case.wants_grad)
    value, expected = model.layer(*given), alone(*plain)
    close(value, expected)
    _loss(value).backward()
    _loss(expected).backward()
    for at in case.wants_grad:
        close(_whole(given[at].grad), plain[at].grad)


def _wide_linear() -> nn.Module:
    torch.manual_seed(0)
    return BlockSparseLinear(16, 32, block_size=8, density=0.5)


def as_dtensors(case: EntryCase) -> None:
    """DTensors in, split along the lengths that vary, and DTensors out; parameters are DTensors too."""
    mesh, alone = _mesh(), case.make()
    module = distribute_module(copy.deepcopy(alone), mesh)
    given = _split_inputs(case.at(N), case, mesh, True)
    given = tuple(
        x.detach().requires_grad_(at in case.wants_grad) if isinstance(x, DTensor) else x for at, x in enumerate(given)
    )
    plain = copies(case.at(N), case.wants_grad)
    value, expected = module(*given), alone(*plain)
    assert isinstance(value, DTensor), f"the result is a {type(value).__name__}"
    close(value.full_tensor(), expected)
    _loss(value).backward()
    _loss(expected).backward()
    for at in case.wants_grad:
        close(_whole(given[at].grad), plain[at].grad)
    for own, other in zip(module.parameters(), alone.parameters()):
        close(_whole(own.grad), other.grad)


COLUMNS: dict[str, Callable[[EntryCase], None]] = {
    "DDP": ddp,
    "DDP static": ddp_static,
    "FSDP2": fsdp2,
    "TP": tensor_parallel,
    "DTensor": as_dtensors,
}


def _be_rank(rank: int, folder: Path, cells: list[str]) -> None:
    for number, cell in enumerate(cells):
        name, column = cell.split("|")
        store = distributed.FileStore(str(folder / f"store-{number}"), RANKS)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=PATIENCE)
        try:
            COLUMNS[column](CASES[name])
            found = "passed", ""
        except Exception:
            found = "failed", traceback.format_exc()
        (folder / f"{number}-{rank}.json").write_text(json.dumps(found))
        distributed.destroy_process_group()


def main(folder: str, *cells: str) -> int:
    """Fork the ranks of a process that has imported all they need."""
    torch.set_num_threads(1)
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                _be_rank(rank, Path(folder), list(cells))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
