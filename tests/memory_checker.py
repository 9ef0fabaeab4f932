"""Every access of interpreted Triton kernels, checked: nothing out of bounds, no two programs that race.

    with checked_memory() as checker:
        insum("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", ...)

Each tensor of a launch gets an address range of its own, far from all others, and every pointer that a kernel loads,
stores or adds through is translated back to the tensor's memory. So a pointer tells which argument it was made from,
and what it reaches must be an element of that very argument: not of another tensor, not of the rest of a storage that
the argument is a strided view of. Reads are seen like writes, and nothing is touched that must not be.

Programs of one launch run in any order. An element that one of them stores is therefore no other program's to load, to
store or to add to, and one that is added to atomically is no other program's to load. Which programs touched an
element is remembered for the launch, so that such a race is found whatever order the interpreter takes them in.

The kernel stops at the first fault, which `checked_memory` raises as a `MemoryFault`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

__all__ = ["MemoryChecker", "MemoryFault", "checked_memory"]

# An argument's addresses begin at a multiple of this: above every real address, and too far apart to stray across.
APART = 2**50
NOBODY, SEVERAL = -1, -2  # where the number of the program that touched an element stands otherwise

Array = Any  # of numpy


class MemoryFault(AssertionError):
    """A kernel touched what it must not, or two of its programs race."""


@dataclass
class Memory:
    """One storage, and which program of the launch loaded, stored or added to each byte that begins an access."""

    start: int
    size: int
    loaded: Array = field(init=False)
    stored: Array = field(init=False)
    added: Array = field(init=False)

    def __post_init__(self) -> None:
        self.loaded, self.stored, self.added = (np.full(self.size, NOBODY, dtype=np.int32) for _ in range(3))


@dataclass
class Argument:
    """A tensor of the launch: which elements it has, and where they lie."""

    name: str
    tensor: Tensor
    memory: Memory
    first: int  # the address that its pointer has in the kernel

    def __post_init__(self) -> None:
        tensor = self.tensor
        self.itemsize = tensor.element_size()
        reach = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        span = 0 if tensor.numel() == 0 else 1 + sum(reach)
        is_element = torch.zeros(span, dtype=torch.bool)
        if span:
            is_element.as_strided(tensor.shape, tensor.stride()).fill_(True)
        self.is_element = is_element.numpy()

    def __str__(self) -> str:
        shape, strides = list(self.tensor.shape), list(self.tensor.stride())
        return f"{self.name} ({self.tensor.dtype}, shape {shape}, strides {strides})"


@dataclass
class Launch:
    """The arguments of one launch, by the address range that the kernel sees them at."""

    kernel: str
    may_store_equals: bool  # several programs may store one value to one element
    arguments: list[Argument] = field(default_factory=list)
    memories: dict[int, Memory] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> Argument:
        storage = tensor.untyped_storage()
        memory = self.memories.setdefault(storage.data_ptr(), Memory(storage.data_ptr(), storage.nbytes()))
        # as aligned as the real pointer
        first = (len(self.arguments) + 1) * APART + tensor.data_ptr() % 4096
        self.arguments.append(Argument(name, tensor, memory, first))
        return self.arguments[-1]

    def fault(self, text: str) -> MemoryFault:
        return MemoryFault(f"{self.kernel}, program {self.program}: {text}")

    @property
    def program(self) -> tuple[int, int, int]:
        index: tuple[int, int, int] = interpreter.interpreter_builder.grid_idx
        return index

    @property
    def program_number(self) -> int:
        (x, y, z), (width, height, _) = self.program, interpreter.interpreter_builder.grid_dim
        return int(x + width * (y + height * z))

    def located(self, verb: str, pointers: Array, is_active: Array, itemsize: int) -> tuple[Array, list[Located]]:
        """Real addresses for those of the kernel, and what is touched: all of it elements of the right argument."""
        real = np.zeros(pointers.shape, dtype=np.uint64)
        found = []
        numbers = (pointers + np.uint64(APART // 2)) // np.uint64(APART)
        for number in np.unique(numbers[is_active]).tolist():
            is_own = is_active & (numbers == number)
            if not 1 <= number <= len(self.arguments):
                address = int(pointers[is_own][0])
                raise self.fault(f"{verb} {hex(address)}, which is in no argument's memory")
            argument = self.arguments[number - 1]
            offsets = (pointers[is_own] - np.uint64(argument.first)).astype(np.int64)
            self._check_bounds(verb, argument, offsets, itemsize)
            real[is_own] = (offsets + argument.tensor.data_ptr()).astype(np.uint64)
            cells = offsets + (argument.tensor.data_ptr() - argument.memory.start)
            found.append(Located(argument, cells, is_own))
        return real, found

    def _check_bounds(self, verb: str, argument: Argument, offsets: Array, itemsize: int) -> None:
        places, rest = np.divmod(offsets, argument.itemsize)
        is_inside = (places >= 0) & (places < len(argument.is_element)) & (rest == 0) & (itemsize == argument.itemsize)
        is_inside[is_inside] = argument.is_element[places[is_inside]]
        if not is_inside.all():
            at = int(places[~is_inside][0])
            raise self.fault(f"{verb} {argument} at element {at:+d} from its first, where it has none")

    def note_loads(self, touched: Sequence[Located]) -> None:
        for one in touched:
            memory = one.argument.memory
            self._check_alone("loads", one, "stores", memory.stored)
            self._check_alone("loads", one, "adds to", memory.added)
            self._note(memory.loaded, one.cells)

    def note_atomics(self, touched: Sequence[Located]) -> None:
        for one in touched:
            memory = one.argument.memory
            self._check_alone("adds to", one, "stores", memory.stored)
            self._check_alone("adds to", one, "loads", memory.loaded)
            self._note(memory.added, one.cells)

    def note_stores(self, touched: Sequence[Located], values: Array, held: Array) -> None:
        """`held`: what is in memory where `values` will be."""
        for one in touched:
            memory = one.argument.memory
            own, old = _bits(values[one.is_own]), _bits(held[one.is_own])
            self._check_single(one, own)
            is_changed = own != old if self.may_store_equals else np.ones(own.shape, dtype=bool)
            self._check_alone("stores", replace_cells(one, is_changed), "stores", memory.stored)
            self._check_alone("stores", one, "loads", memory.loaded)
            self._check_alone("stores", one, "adds to", memory.added)
            self._note(memory.stored, one.cells)

    def _check_single(self, one: Located, values: Array) -> None:
        """No two lanes of one store have different values for one element."""
        _, first, place = np.unique(one.cells, return_index=True, return_inverse=True)
        is_twice = values[first][place.reshape(-1)] != values
        if is_twice.any():
            at = one.element(int(one.cells[is_twice][0]))
            raise self.fault(f"stores two values to {one.argument} at element {at:+d} at once")

    def _check_alone(self, verb: str, one: Located, other_verb: str, programs: Array) -> None:
        others = programs[one.cells]
        is_race = (others != NOBODY) & (others != self.program_number)
        if is_race.any():
            at, other = one.element(int(one.cells[is_race][0])), int(others[is_race][0])
            who = "several other programs" if other == SEVERAL else f"program number {other}"
            raise self.fault(f"{verb} {one.argument} at element {at:+d}, which {who} {other_verb}: a race")

    def _note(self, programs: Array, cells: Array) -> None:
        own, before = self.program_number, programs[cells]
        programs[cells] = np.where((before == NOBODY) | (before == own), own, SEVERAL)


@dataclass(frozen=True)
class Located:
    """The lanes of one access that touch one argument."""

    argument: Argument
    cells: Array  # bytes from the start of its memory
    is_own: Array

    def element(self, cell: int) -> int:
        offset = cell - (self.argument.tensor.data_ptr() - self.argument.memory.start)
        return offset // self.argument.itemsize


def replace_cells(one: Located, is_kept: Array) -> Located:
    return Located(one.argument, one.cells[is_kept], one.is_own)


def _bits(values: Array) -> Array:
    """Values as whole numbers, so that NaN equals itself and 0 differs from -0."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


@dataclass
class MemoryChecker:
    """What was checked so far."""

    equal_stores: frozenset[str] = frozenset()  # kernels whose programs may store equal values to one element
    launches: int = 0
    accesses: int = 0
    launch: Launch | None = None
    parameters: list[str] = field(default_factory=list)  # of the launch, before their arguments are converted
    fault: MemoryFault | None = None

    def begin(self, kernel: str, parameters: list[str]) -> None:
        self.launches += 1
        self.launch, self.parameters = Launch(kernel, kernel in self.equal_stores), parameters

    def located(self, verb: str, pointers: Any, is_active: Array) -> tuple[Any, list[Located]]:
        """`pointers` with real addresses, and what they touch."""
        assert self.launch is not None
        self.accesses += 1
        data = np.asarray(pointers.data)
        is_active = np.broadcast_to(np.asarray(is_active, dtype=bool), data.shape)
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        real, touched = self.launch.located(verb, data, is_active, itemsize)
        return interpreter.TensorHandle(real, pointers.dtype), touched


@contextmanager
def checked_memory(equal_stores: Sequence[str] = ()) -> Iterator[MemoryChecker]:
    """Check every launch of an interpreted kernel in here; the first fault is raised where the kernel was launched.

    Args:
        equal_stores: Names of kernels that raise a flag from several programs: equal values that they store to
            one element are no race.
    """
    checker = MemoryChecker(frozenset(equal_stores))
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    run, convert = executor.__call__, interpreter._implicit_cvt
    load, store = builder.create_masked_load, builder.create_masked_store
    swap, add = builder.create_atomic_cas, builder.create_atomic_rmw

    def checked_run(self: Any, *args: Any, **kwargs: Any) -> None:
        checker.begin(self.fn.__name__, [name for name in self.arg_names if name not in self.constexprs])
        try:
            run(self, *args, **kwargs)
        except InterpreterError:
            fault, checker.fault = checker.fault, None
            if fault is None:
                raise
            raise fault from None
        finally:
            checker.launch = None

    def converted(arg: Any) -> Any:
        """Numbers and tensors arrive in the order of the parameters."""
        made = convert(arg)
        name = checker.parameters.pop(0)
        if isinstance(arg, Tensor):
            assert checker.launch is not None
            made.handle.data = np.array([checker.launch.add(name, arg).first], dtype=np.uint64)
        return made

    def remembering(access: Callable[..., Any]) -> Callable[..., Any]:
        """The interpreter puts errors into words: the fault itself is kept aside."""

        @functools.wraps(access)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return access(*args, **kwargs)
            except MemoryFault as fault:
                checker.fault = fault
                raise

        return call

    def checked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        real, touched = checker.located("loads", pointers, mask.data)
        checker.launch.note_loads(touched)  # type: ignore[union-attr]
        return load(self, real, mask, other, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        real, touched = checker.located("stores", pointers, mask.data)
        held = load(self, real, mask, None, None, None, False)
        values = np.broadcast_to(value.data, real.data.shape)
        checker.launch.note_stores(touched, values, held.data)  # type: ignore[union-attr]
        return store(self, real, value, mask, *rest)

    def checked_swap(self: Any, pointers: Any, *rest: Any) -> Any:
        real, touched = checker.located("swaps", pointers, True)
        checker.launch.note_atomics(touched)  # type: ignore[union-attr]
        return swap(self, real, *rest)

    def checked_add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        real, touched = checker.located("adds to", pointers, mask.data)
        checker.launch.note_atomics(touched)  # type: ignore[union-attr]
        return add(self, operation, real, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", checked_run)
        patch.setattr(interpreter, "_implicit_cvt", converted)
        patch.setattr(builder, "create_masked_load", remembering(checked_load))
        patch.setattr(builder, "create_masked_store", remembering(checked_store))
        patch.setattr(builder, "create_atomic_cas", remembering(checked_swap))
        patch.setattr(builder, "create_atomic_rmw", remembering(checked_add))
        yield checker
