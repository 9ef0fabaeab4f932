"""Triton source -> loaded kernel -> one launch, with as little as possible between the call and the GPU."""

from __future__ import annotations

import linecache
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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

from .bind import Bound, row_major
from .cache import write_source
from .enqueue import Runner, enqueue
from .errors import UnsupportedError
from .kernel import NUMBERS, Kernel, Parameter
from .schedule import Schedule

__all__ = [
    "BUILD_ERRORS",
    "INTERPRETED",
    "SEVERAL_GPUS",
    "TOO_LARGE",
    "TRITON_VERSION",
    "Launcher",
    "is_capturing",
    "launcher",
    "load",
    "misaligned",
    "on_device",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# Up to this size an output is zeroed whole: one memset, where picking rows is several operations for the host. The size
# is one that a GPU of 3 TB/s fills in about 3 us; it is reckoned, not measured.
SMALL = 8 * 2**20
FACTS = ("pointers", "order", "is_shared", "rows_to_zero")  # as they arrive after the tensors; some know the first two
LARGEST_GRID = 2**31  # programs along a launch's first dimension
SEVERAL_GPUS = torch.cuda.device_count() > 1
# whether calls are recorded into a CUDA graph; asked at every call, so without the Python function around it
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
TRITON_VERSION = triton.__version__ if triton is not None else "none"

# of a config that needs more memory on chip than there is
TOO_LARGE: tuple[type[BaseException], ...] = () if triton is None else (triton.runtime.errors.OutOfResources,)
# what a config may run into: too much shared memory, too few registers, a shape the compiler refuses
BUILD_ERRORS: tuple[type[BaseException], ...] = (
    () if triton is None else (*TOO_LARGE, triton.runtime.errors.PTXASError, triton.CompilationError)
)


@cache
def load(source: str, name: str) -> Any:
    """The kernel function that `source` defines, imported from a file so that debuggers and profilers can show it."""
    path = write_source(source)
    # Triton reads the lines back; another process may thin out the folder meanwhile
    linecache.cache[str(path)] = len(source), None, source.splitlines(keepends=True), str(path)
    module = ModuleType(f"insum_kernel_{path.stem}")
    exec(compile(source, str(path), "exec"), module.__dict__)  # the text that was emitted, whatever the file holds
    return getattr(module, name)


@dataclass
class Launcher:
    """A kernel bound to shapes and strides: give it tensors, get the result."""

    bound: Bound
    schedule: Schedule  # that the kernel was written for, perhaps at other sizes
    kernel: Kernel
    sum_dtype: torch.dtype
    order: tuple[int, ...]  # the kernel's tensors: positions in (*tensors, *facts, *winners, output)
    numbers: tuple[int, ...]  # extents and strides, fixed for this launcher
    programs: int
    scatter_dim: int  # the scattered dimension of the output
    seed: int  # the output tensor's number among the tensors, -1 without a seed
    wants_winners: bool = False  # a second result: where each of a max's or min's winners is
    # by which pointers are not aligned; shared by launchers of one kernel for other sizes
    runners: dict[int, Runner] = field(default_factory=dict)
    placed_runners: dict[tuple[int, ...], dict[int, Runner]] = field(default_factory=dict)
    # what takes its place while a graph is captured: faster on the device, where the host does not count
    captured: Launcher | None = None

    def __post_init__(self) -> None:
        self.is_covered, self.is_wide = self.schedule.covers_output, self.sum_dtype != self.bound.dtype
        # what sums start from could be the output itself
        self.adds_in_place = self.bound.is_seeded and self.schedule.strategy == "atomic" and not self.is_wide
        self.is_alone = self.is_covered and not self.wants_winners  # all it takes is memory for one output
        self.size, self.device = self.bound.size, self.bound.device
        self.strides = row_major(self.size)
        self.is_small = math.prod(self.size) * self.sum_dtype.itemsize <= SMALL
        # of the output beforehand: "" nothing, "zero" one operation over all of it, "fill" picked rows
        picks_rows = self.schedule.strategy == "store-or-atomic" and not (self.is_small or self.bound.is_seeded)
        self.preparation = "" if self.is_covered else "fill" if picks_rows else "zero"
        # memory that is empty or zero, and the output is what the kernel leaves there
        is_zeroed = self.preparation == "zero" and not self.bound.is_seeded
        self.is_plain = (self.is_covered or is_zeroed) and not (self.wants_winners or self.is_wide)

    def resized(self, bound: Bound, extents: Mapping[str, int]) -> Launcher:
        """The same kernel for tensors of other lengths and equal strides."""
        programs, numbers = self.at(extents)
        same = self.scatter_dim, self.seed, self.wants_winners, self.runners, self.placed_runners
        return Launcher(bound, self.schedule, self.kernel, self.sum_dtype, self.order, numbers, programs, *same)

    def at(self, extents: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
        """How many programs other lengths take, and which numbers."""
        numbers = tuple(
            [
                extents[number.name] if number.kind == "extent" else own
                for number, own in zip(self.kernel.numbers, self.numbers)
            ]
        )
        return _programs(self.kernel, extents, self.bound), numbers

    def once(self, size: tuple[int, ...], extents: Mapping[str, int], tensors: Sequence[Tensor]) -> Tensor:
        """The result of a kernel that is plain for tensors of other lengths, with nothing kept for the next time."""
        output = torch.empty_strided(size, row_major(size), dtype=self.sum_dtype, device=self.device)
        if not self.is_covered:
            output.zero_()
        self.launch((*tensors, output), *self.at(extents))
        return output

    def placed(self, strides: tuple[int, ...]) -> Launcher | None:
        """The same kernel for an output that is a part of a larger tensor; None: its source has a stride in it."""
        dims = {number.dim: at for at, number in enumerate(self.kernel.numbers) if _is_output_stride(number)}
        numbers = list(self.numbers)
        for dim, (stride, own) in enumerate(zip(strides, self.strides)):
            if dim in dims:
                numbers[dims[dim]] = stride
            elif stride != own and self.size[dim] > 1:
                return None
        # Triton specialises on strides
        runners = self.placed_runners.setdefault(strides, {})
        same = self.order, tuple(numbers), self.programs, self.scatter_dim, self.seed, self.wants_winners, runners
        return Launcher(self.bound, self.schedule, self.kernel, self.sum_dtype, *same)

    def into(
        self, size: tuple[int, ...], strides: tuple[int, ...], tensors: Sequence[Tensor], facts: Sequence[Tensor]
    ) -> Tensor | None:
        """The result of a kernel that is plain, in a shape of the caller's choice with as many elements.

        None: what is captured instead of it takes more, as a copy of what sums start from, in its own shape.
        """
        if self.captured is not None and is_capturing():
            return self.captured.into(size, strides, tensors, facts) if self.captured.is_plain else None
        output = torch.empty_strided(size, strides, dtype=self.sum_dtype, device=self.device)
        if not self.is_covered:
            output.zero_()
        self.launch((*tensors, *facts, output))
        return output

    def __call__(self, tensors: Sequence[Tensor], facts: Sequence[Tensor] = ()) -> Tensor | tuple[Tensor, Tensor]:
        if self.captured is not None and is_capturing():
            return self.captured(tensors, facts)
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
        if self.preparation == "fill":
            return output.index_fill_(self.scatter_dim, facts[3], 0) if facts[3].numel() else output
        return output.zero_()  # a third less for the host than torch.zeros

    def allocate_winners(self) -> Tensor:
        winners = torch.empty(self.bound.size, dtype=self.bound.winner_dtype, device=self.bound.device)
        return winners if self.schedule.covers_output else winners.fill_(-1)

    def launch(self, pool: Sequence[Tensor], programs: int = 0, numbers: tuple[int, ...] | None = None) -> None:
        programs, numbers = (self.programs, self.numbers) if numbers is None else (programs, numbers)
        # Triton specialises on which pointers are multiples of 16 bytes; everything else is fixed here
        pointers: list[Any] = [pool[position].data_ptr() for position in self.order]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        unaligned = misaligned(pointers) if bits & 15 else 0
        runner = self.runners.get(unaligned)
        if runner is None:
            with on_device(self.device):
                runner = self.runners[unaligned] = self.compile([pool[position] for position in self.order])
        # half a microsecond less for each pointer than for a tensor, which Triton asks for it
        arguments = [*([pool[position] for position in self.order] if INTERPRETED else pointers), *numbers]
        if SEVERAL_GPUS and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                runner(programs, arguments)
        else:
            runner(programs, arguments)

    def build(self, tensors: Sequence[Tensor], facts: Sequence[Tensor]) -> None:
        """Compile for these tensors without running."""
        if self.captured is not None:
            self.captured.build(tensors, facts)
        given = (*tensors, *facts)
        # what the kernel writes is a new tensor, and aligned
        unaligned = misaligned([0 if position < 0 else given[position].data_ptr() for position in self.order])
        if unaligned not in self.runners:
            output = torch.empty(0, dtype=self.sum_dtype, device=self.bound.device)
            winners = [torch.empty(0, dtype=self.bound.winner_dtype, device=self.bound.device)] * self.wants_winners
            pool = (*given, *winners, output)
            with on_device(self.device):
                self.runners[unaligned] = self.compile([pool[position] for position in self.order])

    @property
    def spills(self) -> int:
        """Registers that what was built keeps in slow memory."""
        return max(
            (getattr(getattr(runner, "compiled", None), "n_spills", 0) or 0 for runner in self.runners.values()),
            default=0,
        )

    def compile(self, tensors: list[Tensor]) -> Runner:
        function = load(self.kernel.source, self.kernel.name)
        if INTERPRETED:
            return lambda programs, arguments: function[(programs,)](*arguments)
        options = {"num_warps": self.kernel.num_warps, "num_stages": self.kernel.num_stages}
        try:
            compiled = function.warmup(*tensors, *self.numbers, grid=(self.programs,), **options)
            compiled[(self.programs, 1, 1)]  # loads it onto the device, where a config that is too large is refused
        except BUILD_ERRORS as error:
            raise UnsupportedError(
                f"the kernel of {self.bound.statement} could not be built ({type(error).__name__}); "
                f"its source is in {write_source(self.kernel.source)}"
            ) from error
        stream_of = triton.runtime.driver.active.get_current_stream
        return enqueue(compiled, self.bound.device.index, stream_of, TRITON_VERSION)


def launcher(
    bound: Bound,
    schedule: Schedule,
    kernel: Kernel,
    strides: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    sum_dtype: torch.dtype,
    wants_winners: bool = False,
) -> Launcher:
    """Resolve the kernel's parameters once; `names` gives the order in which tensors will arrive."""
    order = tuple(_position(given, bound, names) for given in kernel.parameters if given.kind not in NUMBERS)
    numbers = tuple(
        schedule.extents[number.name] if number.kind == "extent" else strides[number.name][number.dim]
        for number in kernel.numbers
    )
    programs = _programs(kernel, schedule.extents, bound)
    seed = names.index(bound.statement.output.name) if bound.is_seeded else -1
    facts = order, numbers, programs, bound.statement.scatter_dim, seed, wants_winners
    return Launcher(bound, schedule, kernel, sum_dtype, *facts)


def _programs(kernel: Kernel, extents: Mapping[str, int], bound: Bound) -> int:
    programs = kernel.parts
    for name, block in kernel.grid:
        programs *= -(-extents[name] // block)
    if programs >= LARGEST_GRID:
        raise UnsupportedError(f"{bound.statement} needs {programs} programs, more than one launch can have")
    return programs


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton builds and loads for that one, and new streams and events belong to it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_output_stride(number: Parameter) -> bool:
    return number.kind == "stride" and not number.name


def misaligned(pointers: Sequence[int]) -> int:
    """Which pointers are no multiple of 16 bytes, as bits."""
    return sum(1 << at for at, pointer in enumerate(pointers) if pointer & 15)


def _position(parameter: Parameter, bound: Bound, names: Sequence[str]) -> int:
    """Where a kernel's tensor stands in (*tensors, *facts, *winners, output)."""
    if parameter.kind in ("output", "winners"):
        return -1 if parameter.kind == "output" else -2
    if parameter.kind in FACTS:
        return len(names) + FACTS.index(parameter.kind)
    return names.index(bound.statement.output.name if parameter.kind == "seed" else parameter.name)
