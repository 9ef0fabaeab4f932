"""Triton source -> loaded kernel -> one launch, with as little as possible between the call and the GPU."""

from __future__ import annotations

import linecache
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from textwrap import shorten
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

try:
    import triton
except ImportError:  # not on Linux: the FX graph runs everything
    triton = None

from ...formats.facts import Fact, OwnedRows
from ...formats.torch_state import INTERPRETED
from ..binding import Bound, row_major
from ..codegen import ALIGNED, NUMBERS, Kernel, Parameter
from ..language import Statement, UnsupportedError
from ..planning import Schedule, device_of
from .cache_folder import write_source
from .enqueue import Runner, enqueue
from .recording import active, is_for_graph

__all__ = [
    "INTERPRETED",
    "SEVERAL_GPUS",
    "TRITON_VERSION",
    "Launcher",
    "launcher",
    "load",
    "misaligned",
    "on_device",
    "reason_of",
    "refusing",
]

LARGEST_GRID = 2**31  # programs along a launch's first dimension
SEVERAL_GPUS = torch.cuda.device_count() > 1
TRITON_VERSION = triton.__version__ if triton is not None else "none"

# What Triton raises where it can't build a kernel: its own classes, among them those for too much shared memory and for
# ptxas; RuntimeError from a pass of its compiler; and what running ptxas or writing its files raises.
BUILD_ERRORS: tuple[type[BaseException], ...] = (RuntimeError, subprocess.SubprocessError, OSError)
if triton is not None:
    BUILD_ERRORS += (triton.errors.TritonError,)
LONGEST_REASON = 100  # characters
MODULE = "insum_kernel"  # of every kernel: Triton never forgets the last function of a module and name

Lines = tuple[int, None, list[str], str]  # as `linecache` holds them: length, time, lines, path


@contextmanager
def refusing(statement: Statement, kernel: Kernel) -> Iterator[None]:
    """Turn whatever keeps a kernel from being built inside the context into an UnsupportedError.

    Memory that ran out is no fault of the kernel, and passes as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except BUILD_ERRORS as error:
        raise UnsupportedError(
            f"the kernel of {statement} could not be built ({reason_of(error)}){_where(kernel)}"
        ) from error


def _where(kernel: Kernel) -> str:
    """Return the end of an error that says where the kernel's source is; nothing if it can't be written."""
    try:
        return f"; its source is in {write_source(kernel.source)}"
    except OSError:  # which may be why it could not be built
        return ""


def reason_of(error: BaseException) -> str:
    """Return an error's class and its first line, or its last if it is Triton's, which quotes the source first.

    >>> reason_of(RuntimeError("PassManager::run failed\\n" + 500 * "more "))
    'RuntimeError: PassManager::run failed'
    """
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if triton is not None and isinstance(error, triton.CompilationError) else lines[0]
    return shorten(f"{type(error).__name__}: {line}".rstrip(": "), LONGEST_REASON, placeholder=" ...")


_functions: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()  # by source and name


def load(source: str, name: str) -> Any:
    """Return the kernel function that `source` defines, imported from a file that debuggers and profilers can show.

    All who load a source at one time share its function. The function, what Triton has built of it and the lines that
    Python's `linecache` holds are freed when no `Runner` keeps the function any more.
    """
    function = _functions.get((source, name))
    if function is None:
        path = str(write_source(source))
        # Triton reads the lines back; another process may thin out the folder meanwhile
        lines = linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
        module = ModuleType(MODULE)
        exec(compile(source, path, "exec"), module.__dict__)  # the text that was emitted, whatever the file holds
        function = getattr(module, name)
        finalize(function, _forget_lines, lines).atexit = False
        _functions[source, name] = function
    return function


def _forget_lines(lines: Lines) -> None:
    """Remove an entry of `linecache`, unless another function of the same source has replaced it."""
    if linecache.cache.get(lines[-1]) is lines:
        linecache.cache.pop(lines[-1], None)


@dataclass
class Launcher:
    """A kernel bound to shapes and strides: give it tensors, get the result."""

    bound: Bound
    schedule: Schedule  # that the kernel was written for, perhaps at other sizes
    kernel: Kernel
    sum_dtype: torch.dtype
    order: tuple[int, ...]  # the kernel's tensors: positions in (*tensors, *fact.tensors, *winners, output)
    numbers: tuple[int, ...]  # extents and strides, fixed for this launcher
    grid: tuple[tuple[int, int], ...]  # (extent, block) of each axis that programs are laid out along
    scatter_dim: int  # the scattered dimension of the output
    seed: int  # the output tensor's number among the tensors, -1 without a seed
    wants_winners: bool = False  # a second result: where each of a max's or min's winners is
    # by which pointers are not aligned; shared by launchers of one kernel for other sizes
    runners: dict[int, Runner] = field(default_factory=dict)
    placed_runners: dict[tuple[int, ...], dict[int, Runner]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)  # which pointers were not aligned where it could not be built
    # what takes its place while a graph is captured: faster on the device, where the host does not count
    captured: Launcher | None = None
    total: Launcher | None = None  # sums the copies of the output that the kernel writes to

    def __post_init__(self) -> None:
        self.programs = self.kernel.parts * math.prod([-(-extent // block) for extent, block in self.grid])
        if self.programs >= LARGEST_GRID:
            raise UnsupportedError(
                f"{self.bound.statement} needs {self.programs} programs, more than one launch can have"
            )
        self.is_covered = self.schedule.covers_output
        # one more operation makes the result of what the kernel leaves: a conversion, or the sum over copies
        self.is_wide = self.sum_dtype != self.bound.dtype or self.kernel.copies > 1
        # what sums start from could be the output itself
        self.adds_in_place = self.bound.is_seeded and self.schedule.strategy == "atomic" and not self.is_wide
        # all it takes is memory for one output, which may be a part of another tensor
        self.can_be_placed = self.is_covered and not self.wants_winners and not self.is_wide
        self.size, self.device = self.bound.size, self.bound.device
        self.strides = row_major(self.size)
        output_bytes = math.prod(self.size) * self.sum_dtype.itemsize
        # zeroed whole by one memset, where picking rows would be several operations
        self.is_small = output_bytes <= device_of(self.device).launch_gap * device_of(self.device).bandwidth
        # of the output beforehand: "" nothing, "zero" one operation over all of it, "fill" picked rows
        picks_rows = self.schedule.strategy == "store-or-atomic" and not (self.is_small or self.bound.is_seeded)
        self.preparation = "" if self.is_covered else "fill" if picks_rows else "zero"
        # memory that is empty or zero, and the output is what the kernel leaves there
        is_zeroed = self.preparation == "zero" and not self.bound.is_seeded
        self.is_plain = (self.is_covered or is_zeroed) and not (self.wants_winners or self.is_wide)

    def resized(self, bound: Bound, extents: Mapping[str, int]) -> Launcher:
        """Return a launcher of the same kernel for tensors of other lengths and equal strides."""
        numbers = tuple(
            [
                value if number.kind == "stride" else _number(number, bound, extents)
                for number, value in zip(self.kernel.numbers, self.numbers)
            ]
        )
        same = self.scatter_dim, self.seed, self.wants_winners, self.runners, self.placed_runners, self.refused
        grid = _grid(self.kernel, extents)
        return Launcher(bound, self.schedule, self.kernel, self.sum_dtype, self.order, numbers, grid, *same)

    def placed(self, strides: tuple[int, ...]) -> Launcher | None:
        """Return a launcher of the same kernel for an output that is a part of a larger tensor.

        The result is None if a stride that differs is fixed in the kernel's source, or is no multiple of what the
        source takes it for: several elements of a row are stored, or added, at once.
        """
        if self.schedule.stores_vectors and any(
            new % math.gcd(old, ALIGNED) for new, old in zip(strides, self.strides)
        ):
            return None
        dims = {number.dim: at for at, number in enumerate(self.kernel.numbers) if _is_output_stride(number)}
        numbers = list(self.numbers)
        for dim, (stride, contiguous_stride) in enumerate(zip(strides, self.strides)):
            if dim in dims:
                numbers[dims[dim]] = stride
            elif stride != contiguous_stride and self.size[dim] > 1:
                return None
        # Triton specialises on strides
        runners = self.placed_runners.setdefault(strides, {})
        same = self.order, tuple(numbers), self.grid, self.scatter_dim, self.seed, self.wants_winners, runners
        return Launcher(self.bound, self.schedule, self.kernel, self.sum_dtype, *same)

    def __call__(self, tensors: Sequence[Tensor], fact: Fact | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.captured is not None and is_for_graph():
            return self.captured(tensors, fact)
        if self.total is not None:
            return self.sum_copies(self.total, tensors, fact)
        if self.is_covered:
            output = torch.empty_strided(self.size, self.strides, dtype=self.sum_dtype, device=self.device)
        else:
            output = self.allocate(tensors, fact)
        passed = (*tensors, *(() if fact is None else fact.tensors))
        if self.wants_winners:
            winners = self.allocate_winners()
            self.launch((*passed, winners, output))
            return output, winners
        self.launch((*passed, output))
        return output.to(self.bound.dtype) if self.is_wide else output

    def sum_copies(self, total: Launcher, tensors: Sequence[Tensor], fact: Fact | None) -> Tensor:
        """Run the kernel on copies of the output, and add them up, to the seed if there is one."""
        elements = math.prod(self.size)
        shape = (self.kernel.copies, elements)
        copies = torch.empty_strided(shape, (elements, 1), dtype=self.sum_dtype, device=self.device)
        if not self.is_covered:
            copies.zero_()
        self.launch((*tensors, *(() if fact is None else fact.tensors), copies))
        seed = [tensors[self.seed].contiguous()] if self.bound.is_seeded else []
        output = torch.empty_strided(self.size, self.strides, dtype=self.bound.dtype, device=self.device)
        total.launch((copies, *seed, output))
        return output

    def allocate(self, tensors: Sequence[Tensor], fact: Fact | None) -> Tensor:
        """Return the output with everything in it that the kernel will not write itself."""
        output = torch.empty_strided(self.size, self.strides, dtype=self.sum_dtype, device=self.device)
        if self.bound.is_seeded:  # a plan allocates without the dispatcher, which `clone` would ask
            return output.copy_(tensors[self.seed])
        if self.preparation == "fill":
            assert isinstance(fact, OwnedRows)
            assert fact.rows_to_zero is not None
            rows = fact.rows_to_zero
            return output.index_fill_(self.scatter_dim, rows, 0) if rows.numel() else output
        return output.zero_()  # a third less for the host than torch.zeros

    def allocate_winners(self) -> Tensor:
        """Return memory for the winners' positions, -1 in it unless the kernel writes all of it."""
        winners = torch.empty(self.bound.size, dtype=self.bound.winner_dtype, device=self.bound.device)
        return winners if self.schedule.covers_output else winners.fill_(-1)

    def launch(self, pool: Sequence[Tensor]) -> None:
        """Run the kernel on `pool`: the tensors, the fact's, the winners if it stores them, and the output."""
        # Triton specialises on which pointers are multiples of 16 bytes; everything else is fixed here
        pointers: list[Any] = [pool[position].data_ptr() for position in self.order]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        unaligned = misaligned(pointers) if bits & 15 else 0
        runner = self.runners.get(unaligned)
        if runner is None:
            runner = self.built(unaligned, [pool[position] for position in self.order])
        if runner is None:
            self.launch_aligned(unaligned, pool)
            return
        recording = active()
        if recording is not None:
            kernel_tensors = [pool[position] for position in self.order]
            recording.launch(self.runners, unaligned, self.grid, self.kernel.parts, kernel_tensors, self.numbers)
        # half a microsecond less for each pointer than for a tensor, which Triton asks for it
        arguments = [*([pool[position] for position in self.order] if INTERPRETED else pointers), *self.numbers]
        if SEVERAL_GPUS and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                runner(self.programs, arguments)
        else:
            runner(self.programs, arguments)

    def launch_aligned(self, unaligned: int, pool: Sequence[Tensor]) -> None:
        """Run a kernel that was built for other alignments, since none can be built for these pointers.

        Tensors that it takes to be aligned, and are not, are copied before and, if it writes them, after.
        """
        accepted = next(iter(self.runners))
        places = {place % len(pool) for at, place in enumerate(self.order) if (unaligned & ~accepted) >> at & 1}
        copies = [_aligned_copy(tensor) if at in places else tensor for at, tensor in enumerate(pool)]
        self.launch(copies)
        written = sum(parameter.kind in ("output", "winners") for parameter in self.kernel.parameters)  # they come last
        for at in places:
            if at >= len(pool) - written:
                pool[at].copy_(copies[at])

    def build(self, tensors: Sequence[Tensor], fact: Fact | None) -> None:
        """Compile for these tensors without running."""
        if self.captured is not None:
            try:
                self.captured.build(tensors, fact)
            except UnsupportedError:  # captured graphs get the same as all others
                self.captured = None
        if self.total is not None:
            self.total.build_for_sums(self.sum_dtype, [tensors[self.seed]] if self.bound.is_seeded else [])
        winners = [self.bound.winner_dtype] * self.wants_winners
        self.build_for((*tensors, *(() if fact is None else fact.tensors)), (*winners, self.sum_dtype))

    def build_for(self, passed: Sequence[Tensor], written: Sequence[torch.dtype]) -> None:
        """Compile for tensors that are passed and those that the kernel writes, which are new ones, and aligned."""
        unaligned = misaligned([0 if position < 0 else passed[position].data_ptr() for position in self.order])
        if unaligned not in self.runners:
            pool = (*passed, *[torch.empty(0, dtype=dtype, device=self.bound.device) for dtype in written])
            self.built(unaligned, [pool[position] for position in self.order])

    def build_for_sums(self, dtype: torch.dtype, seed: list[Tensor]) -> None:
        """Compile a kernel that sums copies of this type."""
        self.build([torch.empty(0, dtype=dtype, device=self.device), *seed], None)

    def built(self, unaligned: int, tensors: list[Tensor]) -> Runner | None:
        """Return the kernel for tensors of which these are not aligned, built now if it was not yet.

        The result is None if it can't be built but one for other alignments was; if none was, UnsupportedError passes.
        """
        if unaligned not in self.refused:
            try:
                with on_device(self.device):
                    runner = self.runners[unaligned] = self.compile(tensors)
                return runner
            except UnsupportedError:
                if not self.runners:
                    raise
                self.refused.add(unaligned)
        # it may take for unaligned what is not, only not the other way round
        fitting = next((runner for accepted, runner in self.runners.items() if not unaligned & ~accepted), None)
        if fitting is not None:
            self.runners[unaligned] = fitting
        return fitting

    @property
    def spills(self) -> int:
        """The most registers that a kernel built so far spills to memory."""
        return max(
            (getattr(getattr(runner, "compiled", None), "n_spills", 0) or 0 for runner in self.runners.values()),
            default=0,
        )

    def compile(self, tensors: list[Tensor]) -> Runner:
        """Return the kernel compiled for tensors aligned like these; raise UnsupportedError if it can't be built."""
        with refusing(self.bound.statement, self.kernel):
            return compiled(self.kernel, tensors, self.numbers, self.programs)


def compiled(kernel: Kernel, tensors: Sequence[Tensor], numbers: Sequence[int], programs: int) -> Runner:
    """Return a kernel compiled for arguments like these and loaded onto the device of the tensors."""
    function = load(kernel.source, kernel.name)
    if INTERPRETED:
        return lambda programs, arguments: function[(programs,)](*arguments)
    device = tensors[0].device
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        binary = function.warmup(*tensors, *numbers, grid=(programs,), **options)
        binary[(programs, 1, 1)]  # loads it onto the device, where a config that is too large is refused
    runner = enqueue(binary, device.index, triton.runtime.driver.active.get_current_stream, TRITON_VERSION)
    runner.function = function  # type: ignore[attr-defined]  # for tensors that are aligned otherwise
    return runner


def launcher(
    bound: Bound,
    schedule: Schedule,
    kernel: Kernel,
    strides: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    sum_dtype: torch.dtype,
    wants_winners: bool = False,
) -> Launcher:
    """Return the kernel's launcher, its parameters resolved; `names` is the order in which tensors will arrive."""
    pointers = [parameter for parameter in kernel.parameters if parameter.kind not in NUMBERS]
    order = tuple(_position(parameter, bound, names) for parameter in pointers)
    numbers = tuple(
        strides[number.name][number.dim] if number.kind == "stride" else _number(number, bound, schedule.extents)
        for number in kernel.numbers
    )
    grid = _grid(kernel, schedule.extents)
    seed = names.index(bound.statement.output.name) if bound.is_seeded else -1
    fields = order, numbers, grid, bound.statement.scatter_dim, seed, wants_winners
    return Launcher(bound, schedule, kernel, sum_dtype, *fields)


def _number(number: Parameter, bound: Bound, extents: Mapping[str, int]) -> int:
    """Return a length that is passed to a kernel: an extent, or the elements of a copy of the output."""
    return math.prod(bound.size) if number.kind == "copy" else extents[number.name]


def _grid(kernel: Kernel, extents: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    return tuple([(extents[name], block) for name, block in kernel.grid])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton builds and loads for that one, and new streams and events belong to it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _aligned_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides in memory of its own; an expanded tensor stays expanded."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _is_output_stride(number: Parameter) -> bool:
    return number.kind == "stride" and not number.name


def misaligned(pointers: Sequence[int]) -> int:
    """Return which pointers are no multiple of 16 bytes, one bit for each."""
    return sum(1 << at for at, pointer in enumerate(pointers) if pointer & 15)


def _position(parameter: Parameter, bound: Bound, names: Sequence[str]) -> int:
    """Return the position of a kernel's tensor in (*tensors, *fact.tensors, *winners, output)."""
    if parameter.kind in ("output", "winners"):
        return -1 if parameter.kind == "output" else -2
    if parameter.kind in OwnedRows.TENSORS:
        return len(names) + OwnedRows.TENSORS.index(parameter.kind)
    return names.index(bound.statement.output.name if parameter.kind == "seed" else parameter.name)
