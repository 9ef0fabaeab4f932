"""Triton source -> loaded kernel -> one launch, with as little as possible between the call and the GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

try:
    import triton
except ImportError:  # not on Linux: the FX graph runs everything
    triton = None

from .bind import Bound
from .cache import write_source
from .errors import UnsupportedError
from .kernel import Kernel, Parameter
from .schedule import Schedule

__all__ = ["BUILD_ERRORS", "INTERPRETED", "TRITON_VERSION", "Launcher", "launcher", "load"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# Up to this size an output is zeroed whole: one memset, where picking rows is several operations for the host. The size
# is one that a GPU of 3 TB/s fills in about 3 us; it is reckoned, not measured.
SMALL = 8 * 2**20
FACTS = ("pointers", "order", "is_shared", "rows_to_zero")  # as they arrive after the tensors; some know the first two
LARGEST_GRID = 2**31  # programs along a launch's first dimension
SEVERAL_GPUS = torch.cuda.device_count() > 1
TRITON_VERSION = triton.__version__ if triton is not None else "none"

# what a config may run into: too much shared memory, too few registers, a shape the compiler refuses
BUILD_ERRORS: tuple[type[BaseException], ...] = (
    ()
    if triton is None
    else (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError, triton.CompilationError)
)


@cache
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
    order: tuple[int, ...]  # the kernel's tensors: positions in (*tensors, *facts, *winners, output)
    numbers: tuple[int, ...]  # extents and strides, fixed for this launcher
    programs: int
    scatter_dim: int  # the scattered dimension of the output
    seed: int  # the output tensor's number among the tensors, -1 without a seed
    wants_winners: bool = False  # a second result: where each of a max's or min's winners is
    # by which pointers are not aligned; shared by launchers of one kernel for other sizes
    runners: dict[int, Callable[..., None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_covered, self.is_wide = self.schedule.covers_output, self.sum_dtype != self.bound.dtype
        self.is_alone = self.is_covered and not self.wants_winners  # all it takes is memory for one output
        self.size, self.device = self.bound.size, self.bound.device
        self.strides = torch.empty(self.size, device="meta").stride()
        self.is_small = math.prod(self.size) * self.sum_dtype.itemsize <= SMALL

    def into(
        self, size: tuple[int, ...], strides: tuple[int, ...], tensors: Sequence[Tensor], facts: Sequence[Tensor]
    ) -> Tensor:
        """The result of a kernel that writes all of it, in a shape of the caller's choice with as many elements."""
        output = torch.empty_strided(size, strides, dtype=self.sum_dtype, device=self.device)
        self.launch((*tensors, *facts, output))
        return output

    def __call__(self, tensors: Sequence[Tensor], facts: Sequence[Tensor] = ()) -> Tensor | tuple[Tensor, Tensor]:
        if self.is_covered:
            output = torch.empty_strided(self.size, self.strides, dtype=self.sum_dtype, device=self.device)
        else:
            output = self.allocate(tensors, facts)
        if self.wants_winners:
            winners = self.allocate_winners()
            self.launch((*tensors, *facts, winners, output))
            return output, winners
        self.launch((*tensors, *facts, output))
        return output.to(self.bound.dtype) if self.is_wide else output

    def allocate(self, tensors: Sequence[Tensor], facts: Sequence[Tensor]) -> Tensor:
        """The output with whatever the kernel will not write itself already in it."""
        size, device = self.size, self.device
        if self.bound.is_seeded:
            seed = tensors[self.seed]
            if seed.dtype is self.sum_dtype:
                return seed.clone(memory_format=torch.contiguous_format)
            return seed.to(self.sum_dtype, copy=True, memory_format=torch.contiguous_format)
        output = torch.empty_strided(size, self.strides, dtype=self.sum_dtype, device=device)
        if self.schedule.strategy == "store-or-atomic" and not self.is_small:
            return output.index_fill_(self.scatter_dim, facts[3], 0) if facts[3].numel() else output
        return output.zero_()  # a third less for the host than torch.zeros

    def allocate_winners(self) -> Tensor:
        winners = torch.empty(self.bound.size, dtype=self.bound.winner_dtype, device=self.bound.device)
        return winners if self.schedule.covers_output else winners.fill_(-1)

    def launch(self, pool: Sequence[Tensor]) -> None:
        # Triton specialises on which pointers are multiples of 16 bytes; everything else is fixed here
        pointers: list[Any] = [pool[position].data_ptr() for position in self.order]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        unaligned = _unaligned(pointers) if bits & 15 else 0
        runner = self.runners.get(unaligned)
        if runner is None:
            runner = self.runners[unaligned] = self.compile([pool[position] for position in self.order])
        # half a microsecond less for each pointer than for a tensor, which Triton asks for it
        arguments = [pool[position] for position in self.order] if INTERPRETED else pointers
        if SEVERAL_GPUS and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                runner(self.programs, *arguments, *self.numbers)
        else:
            runner(self.programs, *arguments, *self.numbers)

    def build(self, tensors: Sequence[Tensor], facts: Sequence[Tensor]) -> None:
        """Compile for these tensors without running."""
        output = torch.empty(0, dtype=self.sum_dtype, device=self.bound.device)  # as aligned as any new tensor
        winners = [torch.empty(0, dtype=self.bound.winner_dtype, device=self.bound.device)] * self.wants_winners
        pool = (*tensors, *facts, *winners, output)
        arguments = [pool[position] for position in self.order]
        unaligned = _unaligned([tensor.data_ptr() for tensor in arguments])
        if unaligned not in self.runners:
            self.runners[unaligned] = self.compile(arguments)

    @property
    def spills(self) -> int:
        """Registers that what was built keeps in slow memory."""
        return max(
            (getattr(getattr(runner, "compiled", None), "n_spills", 0) or 0 for runner in self.runners.values()),
            default=0,
        )

    def compile(self, tensors: list[Tensor]) -> Callable[..., None]:
        function = load(self.kernel.source, self.kernel.name)
        if INTERPRETED:
            return lambda programs, *arguments: function[(programs,)](*arguments)
        options = {"num_warps": self.kernel.num_warps, "num_stages": self.kernel.num_stages}
        try:
            compiled = function.warmup(*tensors, *self.numbers, grid=(self.programs,), **options)
            compiled[(self.programs, 1, 1)]  # loads it onto the device, where a config that is too large is refused
        except BUILD_ERRORS as error:
            raise UnsupportedError(
                f"the kernel of {self.bound.statement} could not be built ({type(error).__name__}); "
                f"its source is in {write_source(self.kernel.source)}"
            ) from error
        device = self.bound.device.index
        run, kernel, metadata = compiled.run, compiled.function, compiled.packed_metadata
        stream_of = triton.runtime.driver.active.get_current_stream

        def launch(programs: int, *arguments: object) -> None:
            run(programs, 1, 1, stream_of(device), kernel, metadata, None, None, None, *arguments)

        launch.compiled = compiled  # type: ignore[attr-defined]  # freeing it would unload the kernel
        return launch


def launcher(
    bound: Bound,
    schedule: Schedule,
    kernel: Kernel,
    strides: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    sum_dtype: torch.dtype,
    wants_winners: bool = False,
    runners: dict[int, Callable[..., None]] | None = None,
) -> Launcher:
    """Resolve the kernel's parameters once; `names` gives the order in which tensors will arrive."""
    order: list[int] = []
    numbers: list[int] = []
    for parameter in kernel.parameters:
        if parameter.kind == "extent":
            numbers.append(schedule.extents[parameter.name])
        elif parameter.kind == "stride":
            numbers.append(strides[parameter.name][parameter.dim])
        else:
            order.append(_position(parameter, bound, names))
    programs = kernel.parts
    for name, block in kernel.grid:
        programs *= -(-schedule.extents[name] // block)
    if programs >= LARGEST_GRID:
        raise UnsupportedError(f"{bound.statement} needs {programs} programs, more than one launch can have")
    scattered = bound.statement.output.indirections
    dim = bound.statement.output.indices.index(scattered[0]) if scattered else 0
    seed = names.index(bound.statement.output.name) if bound.is_seeded else -1
    kept = {} if runners is None else runners
    facts = tuple(order), tuple(numbers), programs, dim, seed, wants_winners, kept
    return Launcher(bound, schedule, kernel, sum_dtype, *facts)


def _unaligned(pointers: Sequence[int]) -> int:
    """Which pointers are no multiple of 16 bytes, as bits."""
    return sum(1 << at for at, pointer in enumerate(pointers) if pointer & 15)


def _position(parameter: Parameter, bound: Bound, names: Sequence[str]) -> int:
    """Where a kernel's tensor stands in (*tensors, *facts, *winners, output)."""
    if parameter.kind in ("output", "winners"):
        return -1 if parameter.kind == "output" else -2
    if parameter.kind in FACTS:
        return len(names) + FACTS.index(parameter.kind)
    return names.index(bound.statement.output.name if parameter.kind == "seed" else parameter.name)
