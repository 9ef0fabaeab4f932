"""Models trained under torch's wrappers: by two processes that share the work, and by one that does all of it.

As a script it is the two processes, which it forks after all imports: `python wrapped_training.py FOLDER [CASE...]`
writes to the folder what each case gave to each of them, or the error that it raised.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from insum_ops import nn

STEPS, PROCESSES = 3, 2
Gradients = dict[str, Tensor | None]
Step = tuple[Gradients, list[Tensor]]  # what a training step gave; the outputs are of a process's own shards


class UNet(torch.nn.Module):
    """Takes and returns a `SparseConvTensor`, through all kinds of sparse layers."""

    def __init__(self, norm: type = torch.nn.BatchNorm1d, is_checkpointed: bool = False, has_unused: bool = False):
        super().__init__()
        self.first = nn.SparseSequential(
            nn.SubMConv3d(4, 8, 3, bias=False, indice_key="fine"), norm(8), torch.nn.ReLU()
        )
        self.down = nn.SparseSequential(nn.SparseConv3d(8, 8, 2, 2, indice_key="down"), nn.SparseReLU())
        self.coarse = nn.SparseSequential(nn.SubMConv3d(8, 8, 3, groups=2), nn.SparseMaxPool3d(2))
        self.up = nn.SparseSequential(nn.SparseInverseConv3d(8, 8, 2, "down"), nn.SubMConv3d(8, 4, 1))
        self.last = nn.SubMConv3d(4, 4, 3, groups=4, bias=False, indice_key="last")
        self.scale = torch.nn.Linear(4, 4)
        self.is_checkpointed, self.has_unused = is_checkpointed, has_unused

    def run(self, block: torch.nn.Module, x: nn.SparseConvTensor) -> nn.SparseConvTensor:
        return checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)

    def forward(self, x: nn.SparseConvTensor) -> nn.SparseConvTensor:
        down = self.run(self.down, self.run(self.first, x))
        y = self.last(self.run(self.up, down))
        pooled = self.run(self.coarse, down).features.sum() / 100
        y = y.replace_feature(y.features + pooled)
        return y if self.has_unused else y.replace_feature(self.scale(y.features))


class Pyramid(torch.nn.Module):
    """Returns one `SparseConvTensor` for each resolution, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.SubMConv2d(4, 4, 3)
        self.coarse = nn.SparseConv2d(4, 4, 3, 2, 1)

    def forward(self, x: nn.SparseConvTensor) -> dict[str, nn.SparseConvTensor]:
        fine = self.fine(x)
        return {"fine": fine, "coarse": self.coarse(fine.replace_feature(fine.features.relu()))}


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "3x0e + 2x1o")

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x[:, :10], x[:, 10:])


def cloud(spatial_shape: list[int], dtype: torch.dtype) -> nn.SparseConvTensor:
    indices = (torch.rand(2, *spatial_shape) < 0.4).nonzero().int()
    return nn.SparseConvTensor(torch.randn(len(indices), 4, dtype=dtype), indices, spatial_shape, 2)


def matrix(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.4)).to_sparse()


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[torch.dtype], Any]]] = {
    "u-net": (UNet, lambda dtype: cloud([5, 6, 4], dtype)),
    # a BatchNorm on the CPU does not take weights and statistics of two types
    "u-net with LayerNorm": (lambda: UNet(torch.nn.LayerNorm), lambda dtype: cloud([5, 6, 4], dtype)),
    "u-net, checkpointed": (lambda: UNet(is_checkpointed=True), lambda dtype: cloud([5, 6, 4], dtype)),
    "u-net with unused parameters": (lambda: UNet(has_unused=True), lambda dtype: cloud([5, 6, 4], dtype)),
    "pyramid": (Pyramid, lambda dtype: cloud([7, 6], dtype)),
    "linear": (
        lambda: torch.nn.Sequential(
            nn.BlockSparseLinear(10, 12, block_size=4, density=0.5),
            torch.nn.ReLU(),
            nn.BlockSparseLinear(12, 6, block_size=2, density=0.4),
        ),
        lambda dtype: torch.randn(9, 10, dtype=dtype),
    ),
    "spmm": (
        lambda: torch.nn.Sequential(nn.SpMM(matrix(12, 10), trainable=True), nn.SpMM(matrix(10, 12), trainable=True)),
        lambda dtype: torch.randn(10, 5, dtype=dtype),
    ),
    "tensor product": (Product, lambda dtype: torch.randn(9, 14, dtype=dtype)),
}


def sharded(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """On the CPU, where there is a GPU too."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)), **options)


def by_blocks(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    for block in model.children():
        if list(block.parameters()):
            sharded(block, **options)
    return sharded(model, **options)


def half(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DDP, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "DDP, unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "DDP, bucket views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "FSDP": sharded,
    "FSDP, freed": lambda model: sharded(model, reshard_after_forward=True),
    "FSDP by blocks": lambda model: by_blocks(model, reshard_after_forward=True),
    "FSDP by blocks, kept": lambda model: by_blocks(model, reshard_after_forward=False),
    "FSDP by blocks, bfloat16": lambda model: by_blocks(model, mp_policy=half(torch.bfloat16)),
    "FSDP by blocks, float16": lambda model: by_blocks(model, mp_policy=half(torch.float16)),
}
DTYPES = {"FSDP by blocks, bfloat16": torch.bfloat16, "FSDP by blocks, float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A model under a wrapper; `parts`: batches whose gradients are added up before the processes share them."""

    model: str
    wrapper: str
    parts: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}: {self.wrapper}" + (", accumulated" if self.parts > 1 else "")

    @property
    def computes_in(self) -> torch.dtype:
        return DTYPES.get(self.wrapper, torch.float64)

    @property
    def alone(self) -> tuple[str, int, torch.dtype, bool]:
        """What `train_alone` takes for the same numbers; under DDP buffers are always those of the first process."""
        return self.model, self.parts, self.computes_in, self.wrapper.startswith("DDP")


def make(model: str, computes_in: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[model][0]().to(stored_in(computes_in))


def shard(model: str, computes_in: torch.dtype, step: int, part: int, rank: int) -> Any:
    torch.manual_seed(1 + rank + PROCESSES * (part + 2 * step))
    return MODELS[model][1](stored_in(computes_in))


def stored_in(computes_in: torch.dtype) -> torch.dtype:
    return torch.float64 if computes_in is torch.float64 else torch.float32


PLAIN = [name for name in WRAPPERS if "unused" not in name and name not in DTYPES]
CASES = {
    case.name: case
    for case in [
        *[Case("u-net", wrapper) for wrapper in PLAIN],
        *[Case("u-net with LayerNorm", wrapper) for wrapper in DTYPES],
        *[Case("u-net, checkpointed", wrapper) for wrapper in ("DDP, static graph", "FSDP by blocks")],
        *[Case("u-net with unused parameters", wrapper) for wrapper in ("DDP, unused", "DDP, static graph")],
        *[Case("pyramid", wrapper) for wrapper in ("DDP, static graph", "DDP, unused", "FSDP by blocks")],
        *[
            Case(model, wrapper)
            for model in ("linear", "spmm", "tensor product")
            for wrapper in ("DDP", "DDP, static graph", "FSDP", "FSDP by blocks")
        ],
        *[Case("u-net", wrapper, parts=2) for wrapper in ("DDP", "FSDP by blocks")],
    ]
}


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, nn.SparseConvTensor):
        return [output.features]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    return [output]


def wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def loss_of(output: Any) -> Tensor:
    return 10 * torch.stack([wide(tensor).square().mean() for tensor in tensors_of(output)]).sum()


def full(gradient: Any) -> Tensor | None:
    """A gradient as one process would have it."""
    if gradient is None:
        return None
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().clone()


def gradients_of(model: torch.nn.Module) -> Gradients:
    return {name.removeprefix("module."): full(own.grad) for name, own in model.named_parameters()}


@contextmanager
def syncing(model: torch.nn.Module, is_last: bool) -> Iterator[None]:
    """Gradients are shared after the last of several batches."""
    is_fsdp = not isinstance(model, DistributedDataParallel)
    if is_fsdp:
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    with nullcontext() if is_fsdp or is_last else model.no_sync():  # type: ignore[operator, union-attr]
        yield


def train_shared(case: Case, rank: int) -> list[Step]:
    """The part of one of two processes."""
    model = WRAPPERS[case.wrapper](make(case.model, case.computes_in))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps: list[Step] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = []
        for part in range(case.parts):
            with syncing(model, part == case.parts - 1):
                output = model(shard(case.model, case.computes_in, step, part, rank))
                loss_of(output).backward()
            outputs += [tensor.detach().clone() for tensor in tensors_of(output)]
        steps.append((gradients_of(model), outputs))
        optimizer.step()
    with torch.no_grad():
        output = model.eval()(shard(case.model, case.computes_in, STEPS, 0, rank))
        steps.append(({}, tensors_of(output)))
    return steps


def train_alone(name: str, parts: int, computes_in: torch.dtype, shares_buffers: bool) -> list[list[Step]]:
    """The same by one process without a wrapper: for each rank what it should see."""
    model = make(name, computes_in)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[list[Step]] = [[] for _ in range(PROCESSES)]
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(PROCESSES)]
    for step in range(STEPS):
        sums: Gradients = {name: None for name, _ in model.named_parameters()}
        outputs: list[list[Tensor]] = [[] for _ in range(PROCESSES)]
        for rank in range(PROCESSES):
            twin = twin_of(model, buffers[rank], computes_in)
            for part in range(parts):
                output = twin(cast(shard(name, computes_in, step, part, rank), computes_in))
                loss_of(output).backward()
                outputs[rank] += [tensor.detach() for tensor in tensors_of(output)]
            for key, own in twin.named_parameters():
                if own.grad is not None:
                    share = own.grad.to(stored_in(computes_in)) / PROCESSES
                    total = sums[key]
                    sums[key] = share if total is None else total + share
            buffers[rank] = dict(twin.named_buffers())
        for rank in range(PROCESSES):
            seen[rank].append((sums, outputs[rank]))
        for key, own in model.named_parameters():
            own.grad = sums[key]
        optimizer.step()
        if shares_buffers:
            buffers = [copy.deepcopy(buffers[0]) for _ in range(PROCESSES)]
    with torch.no_grad():
        for rank in range(PROCESSES):
            twin = twin_of(model, buffers[rank], computes_in).eval()
            output = twin(cast(shard(name, computes_in, STEPS, 0, rank), computes_in))
            seen[rank].append(({}, tensors_of(output)))
    return seen


def twin_of(model: torch.nn.Module, buffers: dict[str, Tensor], dtype: torch.dtype) -> torch.nn.Module:
    twin = copy.deepcopy(model)
    for name, own in twin.named_buffers():
        own.copy_(buffers[name])
    return twin.to(dtype)


def cast(given: Any, dtype: torch.dtype) -> Any:
    if isinstance(given, nn.SparseConvTensor):
        return given.replace_feature(given.features.to(dtype))
    return given.to(dtype)


def main(rank: int, folder: Path, names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    for number, name in enumerate(CASES):
        if name not in names:
            continue
        # of its own for each case: after an error the two may be out of step
        meeting = f"file://{folder / f'meeting-{number}'}"
        distributed.init_process_group("gloo", meeting, timedelta(seconds=30), PROCESSES, rank)
        try:
            result: Any = train_shared(CASES[name], rank)
        except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, UserWarning):
            result = traceback.format_exc()
        torch.save(result, folder / f"{number}-{rank}.pt")
        distributed.destroy_process_group()


def forked(rank: int, folder: Path, names: Iterable[str]) -> int:
    """Start one of the two processes; return its number."""
    child = os.fork()
    if child:
        return child
    try:
        main(rank, folder, names)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    children = [forked(rank, Path(sys.argv[1]), sys.argv[2:] or CASES) for rank in range(PROCESSES)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))
