"""The columns of the table that two processes fill, over gloo: data parallel, sharded, split and as DTensors.

This file as a program fills cells of one row or of many: `rank_columns.py FOLDER NAME|COLUMN ...`. Its two ranks write
what their cells gave to files in the folder. A cell has a process group of its own: after an error the ranks may be out
of step.
"""

from __future__ import annotations

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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from insum_ops.distributed import ColumnParallel, RowParallel
from insum_ops.nn import BlockSparseLinear, SparseConvolution

RANKS = 2
PATIENCE = timedelta(seconds=20)  # of a rank that waits for the other
STEPS = 2
RATE = 1e-3
STYLED = (BlockSparseLinear, SparseConvolution)


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
    shared = wrap(Scaled(case))
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


def _split(inputs: tuple[Any, ...], case: EntryCase, mesh: DeviceMesh, along_lengths: bool) -> tuple[Any, ...]:
    """The inputs as DTensors: all split along the lengths that vary, or the first along the last other dimension.

    Index tensors are split for statements alone; others take them whole, as they do formats and clouds.
    """
    split: list[Any] = []
    for x, varying in zip(inputs, case.varying):
        if not isinstance(x, Tensor) or not (x.is_floating_point() or (along_lengths and "insum" in case.name)):
            split.append(x)
            continue
        features = [dim for dim in range(x.ndim) if dim not in varying] if x is inputs[0] else []
        dims = varying if along_lengths else features[-1:]
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        split.append(whole.redistribute(placements=[Shard(dim) for dim in dims[:1]] or [Replicate()]))
    return tuple(split)


def _with_whole_parameters(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parameters as DTensors, which torch asks of a module that takes some; each rank has all of them."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            part.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
    return module


class Split(ParallelStyle):
    """Features of the inputs over ranks, parameters whole, the output whole again."""

    def __init__(self, case: EntryCase) -> None:
        self.case = case

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: _split(inputs, self.case, device_mesh, False))
        module.register_forward_hook(lambda _, inputs, value: value.full_tensor())
        return _with_whole_parameters(module, device_mesh)


def _equals_alone(
    call: Callable[..., Tensor], module: nn.Module, alone: nn.Module, given: tuple[Any, ...], case: EntryCase
) -> None:
    """Compare value and gradients with those of one process; plain tensors are whole on each rank."""
    plain = copies(case.at(N), case.wants_grad)
    expected = alone(*plain)
    _loss(expected).backward()
    with implicit_replication():
        value = call(*given)
        close(_whole(value), expected)
        _loss(value).backward()
    for at in case.wants_grad:
        close(_whole(given[at].grad), plain[at].grad)
    for own, other in zip(module.parameters(), alone.parameters()):
        if own.shape == other.shape:
            close(_whole(own.grad), other.grad)


def tensor_parallel(case: EntryCase) -> None:
    """parallelize_module: own styles of block-sparse layers and convolutions, features split over ranks for others."""
    make = _wide_linear if isinstance(case.make(), BlockSparseLinear) else case.make
    has_styles = [name for name, part in make().named_modules() if isinstance(part, STYLED)]
    styles = [ColumnParallel(gather_output=True), RowParallel(split_input=False)] if has_styles else [Split(case)]
    for style in styles:
        model, alone = nn.Sequential(), make()
        model.layer = make()
        parallelize_module(model, _mesh(), {".".join(filter(None, ["layer", *has_styles])): style})
        _equals_alone(model.layer, model.layer, alone, copies(case.at(N), case.wants_grad), case)


def _wide_linear() -> nn.Module:
    torch.manual_seed(0)
    return BlockSparseLinear(16, 32, block_size=8, density=0.5)


def as_dtensors(case: EntryCase) -> None:
    """DTensors in, split along the lengths that vary, and DTensors out; parameters are DTensors too."""
    mesh, alone = _mesh(), case.make()
    module = _with_whole_parameters(case.make(), mesh)
    given = tuple(
        x.detach().requires_grad_(at in case.wants_grad) if isinstance(x, DTensor) else x
        for at, x in enumerate(_split(case.at(N), case, mesh, True))
    )

    def call(*inputs: Any) -> Tensor:
        value = module(*inputs)
        assert isinstance(value, DTensor), f"the result is a {type(value).__name__}"
        return value

    _equals_alone(call, module, alone, given, case)


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
