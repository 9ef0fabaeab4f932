"""The express lane: a call like one before is a few comparisons, one allocation and one launch.

All that a kernel depends on is compared, in two steps, each at its cheapest:

- `is_free` and `look_up`, by which a call is found: nobody follows, casts or differentiates it; torch's settings;
  and each tensor's type, shape, strides, dtype, device and sign. Whoever looks a call up asks about gradients too.
- `Express`, which is what was found: no index tensor has changed (by its version counter, or its known range if it
  comes with the call), the plan's kernel is still the same one (until it is tuned, or torch's flags of how sums are
  rounded change), and which pointers are aligned.

What stays between calls is held here, so its memory is not given away; where it lies is compared too.
Where anything differs the answer is None, and the long way, which checks everything, finds out what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .launch import INTERPRETED, SEVERAL_GPUS, Launcher, is_capturing, misaligned
from .pipeline import Plan
from .ranges import remembered_range

__all__ = ["PLAIN", "Express", "Key", "again", "entry", "is_free", "look_up", "may_autocast", "modes", "transforms"]

PLAIN = (Tensor, torch.nn.Parameter)
Key = tuple[Any, ...]

# asked at every call, so without the Python functions around them
modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad, ... that are active
may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # whether any device's is on
_precision = getattr(torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision)
_is_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# torch.empty_strided on the current device, without the dispatcher: what compiled graphs call
_quick = None if INTERPRETED else getattr(torch._C, "_dynamo", None)


def is_free() -> bool:
    """Nobody watches, casts or carries derivatives forward: a call like one before may go straight to its plan."""
    if torch.compiler.is_compiling() or modes() or transforms() is not None or may_autocast():
        return False
    return forward_ad._current_level < 0  # else a tensor may have a tangent, which its plan would lose


def look_up(memory: Mapping[Any, Any], marks: object, tensors: Sequence[Tensor]) -> tuple[Key | None, Any]:
    """By what a call is remembered, None: not at all; and what is remembered of one like it."""
    try:
        layouts = [(one.shape, one.stride(), one.dtype, one.device) for one in tensors if type(one) in PLAIN]
    except RuntimeError:  # a tensor without strides: others say so
        return None, None
    if len(layouts) != len(tensors):
        return None, None
    key = (marks, _precision(), _is_deterministic(), *layouts)
    known = memory.get(key)
    if known is None:
        return (None if any([tensor.is_neg() for tensor in tensors]) else key), None
    call, spaced = known
    for number in spaced:
        if tensors[number].is_neg():
            return None, None
    return key, call


def again(memory: Mapping[Any, Any], marks: object, tensors: Sequence[Tensor]) -> tuple[Key | None, Tensor | None]:
    """By what a call is remembered, None: not at all; and its result if it goes by the lane. Asks for no gradient."""
    if not is_free():
        return None, None
    key, call = look_up(memory, marks, tensors)
    express = None if call is None else call.express
    return key, None if express is None else express(tensors)


def entry(key: Key, call: object) -> tuple[object, list[int]]:
    """What `look_up` finds: a call, and which of its tensors may have memory that holds the negatives of their values.

    The imaginary part of a conjugate is such a tensor, and no two of its elements are neighbours.
    """
    layouts: Sequence[Any] = key[3:]
    return call, [
        number
        for number, (shape, strides, *_) in enumerate(layouts)
        if all([stride != 1 or extent == 1 for extent, stride in zip(shape, strides)])
    ]


def _allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Uninitialised memory on `device`, which is the current one, by its size, strides and dtype."""
    quick = getattr(getattr(_quick, "guards", None), f"_empty_strided_{device.type}", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


class Express:
    """A kernel with all that stays in place; it takes what comes with a call, in the caller's order.

    `fixed` are a plan's tensors and facts, None where one comes; `comes[i]` are the places that the i-th of them takes.
    `read` are the index tensors that stay, in the version of which it is known which of them are `padded`. None:
    whoever finds the call has compared all that stays already, as the memory of a format does.
    """

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        padded: tuple[bool, ...],
        fixed: Sequence[Tensor | None],
        comes: Sequence[Sequence[int]],
        read: Sequence[tuple[Tensor, int]] | None,
        final: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        moving = {place: number for number, places in enumerate(comes) for place in places}
        order = list(enumerate(launcher.order, 1))  # after the number of programs
        known = [(at, place) for at, place in order if place >= 0 and place not in moving]
        self.stays: list[tuple[int, Any]] = [(at, fixed[place]) for at, place in known]
        self.places = [(at, moving[place]) for at, place in order if place in moving]
        (self.output_at,) = [at for at, place in order if place < 0]
        self.arguments: list[Any] = [launcher.programs, *[0] * len(order), *launcher.numbers]
        for at, tensor in self.stays:
            self.arguments[at] = tensor.data_ptr()
        self.end = len(order) + 1
        self.unaligned = misaligned(self.arguments[1 : self.end])  # among what stays
        # facts are nobody else's to move
        own: list[tuple[int, Any]] = [(at, fixed[place]) for at, place in known if place < len(plan.names)]
        self.pointers = [] if read is None else [(tensor.data_ptr, self.arguments[at]) for at, tensor in own]
        self.read = tuple(read or ())
        self.compares = bool(self.read or self.pointers)
        self.pointed = [
            (moving[place], extent, is_padded)
            for (place, extent), is_padded in zip(plan.pointed, padded)
            if place in moving
        ]
        self.plan, self.padded, self.launcher = plan, padded, launcher
        self.is_half, self.runners, self.kernels = plan.is_half, plan.runners, launcher.runners
        self.is_zeroed, self.dtype, self.device = not launcher.is_covered, launcher.sum_dtype, launcher.device
        self.size, self.strides = final
        self.empty = _allocator(self.device)
        self.captured: Express | None = None
        if launcher.captured is not None:
            self.captured = Express(plan, launcher.captured, padded, fixed, comes, read, final)
            self.captured.launcher = launcher  # which is still the plan's

    def __call__(self, moving: Sequence[Tensor]) -> Tensor | None:
        """The result; None: something has changed."""
        if self.captured is not None and is_capturing():
            return self.captured(moving)
        if self.compares:
            for index, version in self.read:
                if index._version != version:
                    return None
            for data_ptr, pointer in self.pointers:
                if data_ptr() != pointer:
                    return None
        for number, extent, is_padded in self.pointed:
            low, high = remembered_range(moving[number])
            if high >= extent or (low < 0) is not is_padded:
                return None
        if self.runners.get(self.plan.with_rounding(self.padded) if self.is_half else self.padded) is not self.launcher:
            return None
        if SEVERAL_GPUS and self.device.index != _current_device():
            with torch.cuda.device(self.device):
                return self(moving)
        arguments, bits = self.arguments.copy(), 0
        for at, number in self.places:
            arguments[at] = pointer = moving[number].data_ptr()
            bits |= pointer
        output = self.empty(self.size, self.strides, self.dtype)
        arguments[self.output_at] = pointer = output.data_ptr()
        is_unaligned = (bits | pointer) & 15
        kernel = self.kernels.get(misaligned(arguments[1 : self.end]) if is_unaligned else self.unaligned)
        if kernel is None:
            return None
        if self.is_zeroed:
            output.zero_()
        if INTERPRETED:
            arguments = self.as_tensors(moving, output)
        kernel(*arguments)
        return output

    def as_tensors(self, moving: Sequence[Tensor], output: Tensor) -> list[Any]:
        """The arguments for the interpreter, which takes no pointers."""
        arguments = self.arguments.copy()
        for at, tensor in self.stays:
            arguments[at] = tensor
        for at, number in self.places:
            arguments[at] = moving[number]
        arguments[self.output_at] = output
        return arguments
