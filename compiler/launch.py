"""Triton source -> loaded kernel -> one launch, with as little as possible between the call and the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .bind import Bound
from .cache import write_source
from .codegen import Kernel, Parameter
from .schedule import Schedule

__all__ = ["INTERPRETED", "Launcher", "launcher", "load"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=None)
def load(source: str, name: str) -> Any:
    """The kernel function that `source` defines, imported from a file so that debuggers and profilers can show it."""
    path = write_source(source)
    module = ModuleType(f"insum_kernel_{path.stem}")
    exec(compile(source, str(path), "exec"), module.__dict__)  # the text that was emitted, whatever the file holds
    return getattr(module, name)


@dataclass
class Launcher:
    """A kernel bound to shapes and strides: give it tensors, get the result."""

    bound: Bound
    schedule: Schedule
    kernel: Kernel
    sum_dtype: torch.dtype
    sources: list[tuple[str, int]]  # each tensor argument: where it comes from ("tensor", "fact", "output") and its number
    numbers: tuple[int, ...]  # extents and strides, fixed for this launcher
    programs: int
    scatter_dim: int  # the scattered dimension of the output
    seed: int  # the output tensor's number among the tensors, -1 without a seed
    compiled: dict[int, Any] = field(default_factory=dict)  # by pointer alignment

    def __call__(self, tensors: Sequence[Tensor], facts: Sequence[Tensor] = ()) -> Tensor:
        output = self.allocate(tensors, facts)
        if self.programs:
            self.launch(self.arguments(tensors, facts, output))
        return output if self.sum_dtype == self.bound.dtype else output.to(self.bound.dtype)

    def allocate(self, tensors: Sequence[Tensor], facts: Sequence[Tensor]) -> Tensor:
        """The output with whatever the kernel will not write itself already in it."""
        size, device = self.bound.size, self.bound.device
        if self.schedule.covers_output and self.programs:
            return torch.empty(size, dtype=self.sum_dtype, device=device)
        if self.bound.is_seeded:
            return tensors[self.seed].to(self.sum_dtype, copy=True, memory_format=torch.contiguous_format)
        if self.schedule.strategy == "store-or-atomic":
            output = torch.empty(size, dtype=self.sum_dtype, device=device)
            return output.index_fill_(self.scatter_dim, facts[2], 0) if facts[2].numel() else output
        return torch.zeros(size, dtype=self.sum_dtype, device=device)

    def arguments(self, tensors: Sequence[Tensor], facts: Sequence[Tensor], output: Tensor) -> list[Any]:
        groups: dict[str, Sequence[Tensor]] = {"tensor": tensors, "fact": facts, "output": (output,)}
        return [*(groups[kind][number] for kind, number in self.sources), *self.numbers]

    def launch(self, arguments: list[Any]) -> None:
        if INTERPRETED:
            load(self.kernel.source, self.kernel.name)[(self.programs,)](*arguments)
            return
        alignment = 0
        for position in range(len(self.sources)):
            if arguments[position].data_ptr() & 15:
                alignment |= 1 << position
        compiled = self.compiled.get(alignment)
        if compiled is None:
            compiled = self.compiled[alignment] = self.compile(arguments)
        compiled[(self.programs, 1, 1)](*arguments)

    def compile(self, arguments: list[Any]) -> Any:
        function = load(self.kernel.source, self.kernel.name)
        compiled = function.warmup(
            *arguments, grid=(self.programs,), num_warps=self.kernel.num_warps, num_stages=self.kernel.num_stages
        )
        compiled._init_handles()
        return compiled


def launcher(
    bound: Bound, schedule: Schedule, kernel: Kernel, strides: Mapping[str, tuple[int, ...]], names: Sequence[str], sum_dtype: torch.dtype
) -> Launcher:
    """Resolve the kernel's parameters once; `names` gives the order in which tensors will arrive."""
    sources: list[tuple[str, int]] = []
    numbers: list[int] = []
    for parameter in kernel.parameters:
        kind, number = _resolve(parameter, bound, schedule, strides, names)
        if kind == "number":
            numbers.append(number)
        else:
            sources.append((kind, number))
    programs = 1
    for name, block in kernel.grid:
        programs *= -(-schedule.extents[name] // block)
    if bound.is_empty:
        programs = 0
    scattered = bound.statement.output.indirections
    dim = bound.statement.output.indices.index(scattered[0]) if scattered else 0
    seed = names.index(bound.statement.output.name) if bound.is_seeded else -1
    used = sum_dtype if schedule.is_atomic else bound.dtype
    return Launcher(bound, schedule, kernel, used, sources, tuple(numbers), programs, dim, seed)


def _resolve(
    parameter: Parameter, bound: Bound, schedule: Schedule, strides: Mapping[str, tuple[int, ...]], names: Sequence[str]
) -> tuple[str, int]:
    resolve: dict[str, Callable[[], tuple[str, int]]] = {
        "tensor": lambda: ("tensor", names.index(parameter.name)),
        "seed": lambda: ("tensor", names.index(bound.statement.output.name)),
        "output": lambda: ("output", 0),
        "pointers": lambda: ("fact", 0),
        "is_shared": lambda: ("fact", 1),
        "extent": lambda: ("number", schedule.extents[parameter.name]),
        "stride": lambda: ("number", strides[parameter.name][parameter.dim]),
    }
    return resolve[parameter.kind]()
