"""One run of a function, noted step by step: the torch operations that it calls and the kernels that it launches.

A function that is planned is plain torch code around launches. While a `Recording` is active in a thread, each torch
function that returns a tensor becomes a `Call`, each kernel a `Launch`; a tensor that is neither an input nor made by
a step is pinned: the plan keeps it. A plan of a run that reads numbers out of a tensor would be fixed to those numbers,
so that none is made, unless the code that reads them states a guard instead, as index ranges do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...formats.guard import offset_in_memory, versions_of
from ...formats.torch_state import is_capturing
from ..binding import LengthClass

__all__ = [
    "Call",
    "Check",
    "Derived",
    "Launch",
    "Range",
    "Recording",
    "Recordings",
    "Slice",
    "Slot",
    "Step",
    "View",
    "active",
    "is_for_graph",
    "paused",
    "slots_in",
]

# what reads numbers out of tensors, or makes tensors whose shapes depend on numbers
READS = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"),
    *("bincount", "histc", "repeat_interleave"),
}
# what copies the numbers of its first argument
COPIES = {"to", "int", "long", "contiguous", "clone", "reshape", "flatten", "resolve_neg"}


class _Thread(threading.local):
    recording: Recording | None = None


class Recordings:
    """How many recordings there are in all threads: asking a thread for its own takes longer."""

    count = 0
    lock = threading.Lock()


_thread = _Thread()


def active() -> Recording | None:
    """Return the recording of this thread, or None."""
    return _thread.recording


def is_for_graph() -> bool:
    """Return whether a CUDA graph is captured, for which another runner may be faster.

    Where none is, the plan that is recorded is for eager calls alone.
    """
    if is_capturing():
        return True
    recording = active()
    if recording is not None:
        recording.is_for_eager_calls = True
    return False


def paused() -> AbstractContextManager[object]:
    """Record nothing inside the context: what happens there is worked out once, or stated as a guard."""
    recording = active()
    return torch._C.DisableTorchFunction() if recording is None else _paused(recording)


@contextmanager
def _paused(recording: Recording) -> Iterator[None]:
    _thread.recording = None
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        _thread.recording = recording


@dataclass(frozen=True)
class Call:
    """One torch function, or another function over tensors, with its arguments; tensors among them are `Slot`s."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: Any  # Slots, in the structure that the function returns
    has_effect: bool  # it writes to one of its arguments
    views: tuple[View, ...] = ()  # those of its results that are views of an argument

    def view(self, slot: Slot) -> View | None:
        """Return what a result is a view of, or None."""
        return next((view for view in self.views if view.slot == slot), None)


@dataclass(frozen=True)
class Launch:
    """One kernel; `kernels` has one for each set of pointers that are not aligned, `unaligned` is that of this run."""

    kernels: dict[int, Callable[[int, Sequence[Any]], None]]
    unaligned: int
    grid: tuple[tuple[int, int], ...]  # (extent, block) of each axis
    parts: int
    tensors: tuple[Slot, ...]
    numbers: tuple[int, ...]


Step = Call | Launch


@dataclass(frozen=True)
class Slot:
    """A tensor of a plan, by its number."""

    number: int


@dataclass(frozen=True)
class View:
    """A tensor in the memory of another one."""

    slot: Slot
    base: Slot
    offset: int  # bytes behind the base's first element
    itemsize: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    is_whole: bool  # all of the base's elements, in the order in which they lie


@dataclass(frozen=True)
class Slice:
    """A slice among the arguments of a function."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class Range:
    """The positions in an index tensor are below `extent`, and some are negative if `is_padded`.

    Whether they ascend too, or not, where kernels were chosen by it.
    """

    slot: Slot
    extent: int
    is_padded: bool
    ascends: bool | None = None


@dataclass(frozen=True)
class Derived:
    """A length that is worked out from others, as `function(*args)`; kernels know of it what `known` says.

    In steps for calls of any lengths it has Lengths among its arguments, and is one that others refer to by a place
    behind those of the inputs and the numbers.
    """

    function: Callable[..., int]
    args: tuple[Any, ...]
    known: LengthClass | int  # a number: they may know all of it


@dataclass(frozen=True)
class Check:
    """A question about an index tensor, whose answer a replay must get too."""

    function: Callable[[Tensor], bool]
    slot: Slot
    answer: bool


@dataclass
class Recording(TorchFunctionMode):
    """The steps of one run over `inputs`, and what a replay has to check."""

    inputs: Sequence[Tensor]
    steps: list[Step] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    pinned: dict[int, Tensor] = field(default_factory=dict)  # by slot
    refusal: str = ""  # why no plan can be made of this run
    is_postponed: bool = False
    is_for_eager_calls: bool = False  # while a CUDA graph is captured another kernel runs
    copies: dict[object, Tensor] = field(default_factory=dict)  # of inputs, which several statements read alike
    constants: list[Tensor] = field(default_factory=list)  # index tensors that are no caller's, and never change

    def __post_init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []  # every tensor that was seen, so that no other one gets its id
        self.slots: dict[int, Slot] = {}
        for tensor in self.inputs:
            self._new(tensor)

    def __enter__(self) -> Recording:
        with Recordings.lock:
            Recordings.count += 1
        _thread.recording = self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        with Recordings.lock:
            Recordings.count -= 1
        _thread.recording = None
        super().__exit__(*exception)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors_in((args, tuple(kwargs.values())))
        before = versions_of(tensors)
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in READS or (name == "__getitem__" and _has_mask(args[1])) or (name == "where" and len(args) == 1):
            self.refuse(f"{name} reads numbers out of a tensor")
        elif name == "__setitem__" or _tensors_in(result):
            self.call(function, args, kwargs, result, before != versions_of(tensors))
        return result

    def refuse(self, why: str) -> None:
        """State that no plan can be made of this run."""
        self.refusal = self.refusal or why

    def postpone(self) -> None:
        """State that this run is not yet like those to come: a later one may be recorded."""
        self.is_postponed = True

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        has_written: bool = False,
    ) -> None:
        """Note a function that has been called; `has_written`: an argument has another version since."""
        name = getattr(function, "__name__", "")
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        has_effect = has_written or is_in_place or kwargs.get("out") is not None  # inference tensors have no version
        arg_slots = self._stated(tuple(args))
        kwarg_slots = tuple((key, self._stated(value)) for key, value in kwargs.items())
        result_slots = self._result_slots(result)
        views = [] if has_effect else [self._view(part, args) for part in _tensors_in(result)]
        kept_views = tuple([view for view in views if view is not None])
        self.steps.append(Call(function, arg_slots, kwarg_slots, result_slots, has_effect, kept_views))

    def launch(
        self,
        kernels: dict[int, Any],
        unaligned: int,
        grid: Sequence[tuple[int, int]],
        parts: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
    ) -> None:
        """Note a kernel that is launched."""
        slots = tuple([self._slot(tensor) for tensor in tensors])
        self.steps.append(Launch(kernels, unaligned, tuple(grid), parts, slots, tuple(numbers)))

    def ranged(self, index: Tensor, extent: int, is_padded: bool, ascends: bool | None = None) -> None:
        """Note that the range of an index tensor was compared with the dimension it points into, and its order read.

        The order of a view is not that of its base, and is not asked again: a kernel is right for any.
        """
        own = slot = self._slot(index)
        maker = self.maker_of(slot)
        while isinstance(maker, Call):
            view, name = maker.view(slot), getattr(maker.function, "__name__", "")
            if view is None and name not in COPIES:
                break
            slot = slots_in(maker.args)[0] if view is None else view.base  # which has all numbers that this one has
            maker = self.maker_of(slot)
        if maker is None:  # an input or pinned; what a step makes is in range by how it is made
            self.ranges.append(Range(slot, extent, is_padded, ascends if slot == own else None))

    def check(self, function: Callable[[Tensor], bool], index: Tensor, answer: bool) -> None:
        """Note what a function says of an index tensor; of one that a step makes it always says the same."""
        slot = self._slot(index)
        if slot.number < len(self.inputs):
            self.checks.append(Check(function, slot, answer))

    def derive(self, function: Callable[..., int], *args: int, known: LengthClass | int) -> None:
        """Note a length `function(*args)` on which steps depend, and what kernels may know of it.

        It must be noted unless it is a multiple of an input's length: two runs in which it is equal by chance would
        make a plan for all lengths with that number in it.
        """
        self.derived.append(Derived(function, args, known))

    def is_input(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an input of the run, which nobody changes in it."""
        slot = self.slots.get(id(tensor))
        return slot is not None and slot.number < len(self.inputs)

    def maker_of(self, slot: Slot) -> Step | None:
        """Return the step that made a tensor; None for inputs and pinned tensors."""
        for step in reversed(self.steps):
            if not isinstance(step, Call) or step.has_effect or slot in slots_in(step.args):
                continue  # what returns its argument has not made it
            if slot in slots_in(step.results):
                return step
        return None

    def result(self, result: Any) -> Any:
        """Return a function's result with Slots for its tensors; refuse one that is no tensor of a step or input."""
        slots = self._stated(result)
        for slot in slots_in(slots):
            if slot.number in self.pinned:  # a replay would give the same memory to every caller
                self.refuse("a tensor is returned that was made before")
        return slots

    def _slot(self, tensor: Tensor) -> Slot:
        """Return the slot of a tensor; one that was not seen before is pinned."""
        slot = self.slots.get(id(tensor))
        if slot is None:
            slot = self._new(tensor)
            self.pinned[slot.number] = tensor
        return slot

    def _new(self, tensor: Tensor) -> Slot:
        """Return a new slot for a tensor."""
        slot = Slot(len(self.seen))
        self.seen.append(tensor)
        return self.slots.setdefault(id(tensor), slot)  # of a tensor that is given twice, the first place

    def _view(self, result: Tensor, args: Sequence[Any]) -> View | None:
        """Return the argument in whose memory a result lies, and where; None if it has memory of its own.

        None too if two arguments lie there: nobody knows which of them the result is a view of.
        """
        bases: dict[Slot, tuple[Tensor, int]] = {}
        for tensor in _tensors_in(args):
            if tensor is result or not tensor.layout == result.layout == torch.strided:
                continue
            if tensor.dtype != result.dtype or not tensor.numel() or not result.numel():
                continue
            offset = offset_in_memory(result, tensor)
            if offset is not None:
                bases[self._slot(tensor)] = tensor, offset
        if len(bases) != 1:
            return None
        ((slot, (base, offset)),) = bases.items()
        is_whole = result.numel() == base.numel() and result.is_contiguous() and base.is_contiguous()
        layout = tuple(result.shape), result.stride(), is_whole
        return View(self._slot(result), slot, offset, result.element_size(), *layout)

    def _result_slots(self, result: Any) -> Any:
        """Return a function's result with Slots for its tensors, which the step makes."""
        if isinstance(result, Tensor):
            return self.slots.get(id(result)) or self._new(result)
        if isinstance(result, (tuple, list)):
            return tuple([self._result_slots(part) for part in result])
        return result

    def _stated(self, value: Any) -> Any:
        """Return an argument with Slots for its tensors; refuse the run if it is a dictionary."""
        if isinstance(value, Tensor):
            return self._slot(value)
        if isinstance(value, (tuple, list)):
            parts = [self._stated(part) for part in value]
            return tuple(parts) if isinstance(value, tuple) else parts
        if isinstance(value, slice):
            return Slice(*[self._stated(part) for part in (value.start, value.stop, value.step)])
        if isinstance(value, dict):
            self.refuse("a function takes a dictionary")
        return value


def slots_in(stated: Any) -> list[Slot]:
    """Return the Slots among stated arguments or results."""
    if isinstance(stated, Slot):
        return [stated]
    if isinstance(stated, (tuple, list)):
        return [slot for part in stated for slot in slots_in(part)]
    return slots_in((stated.start, stated.stop, stated.step)) if isinstance(stated, Slice) else []


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors_in(part)] if isinstance(value, (tuple, list)) else []


def _has_mask(index: Any) -> bool:
    """Return True if a tensor is indexed by a boolean mask, which makes the result's shape depend on numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    return any([isinstance(part, Tensor) and part.dtype == torch.bool for part in parts])
