"""The express lane: a call like one before is a few comparisons, one allocation and one launch.

All that a kernel depends on is compared, in two steps, each at its cheapest:

- `is_free` and `look_up`, or both in `again`, by which a call is found: nobody follows, casts or differentiates it;
  torch's settings; and each tensor's type, shape, strides, dtype, device and sign, for a few layouts in one question to
  torch, for more by a key. Whoever looks a call up asks about gradients too.
- the lane that `express` makes, which is what was found: no index tensor has changed (by its version counter, or its
  known range if it comes with the call), the plan's kernel is still the same one (until it is tuned, or torch's flags
  of how sums are rounded change), and which pointers are aligned.

What stays between calls is held here, so its memory is not given away; where it lies is compared too.
Where anything differs the answer is None, and the long way, which checks everything, finds out what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .launch import INTERPRETED, SEVERAL_GPUS, Launcher, is_capturing, misaligned
from .pipeline import Plan
from .ranges import known_version, remembered_range
from .recognise import recogniser
from .settings import rounds_float32

__all__ = [
    "PLAIN",
    "SETTINGS",
    "Key",
    "Lane",
    "again",
    "express",
    "is_free",
    "look_up",
    "may_autocast",
    "modes",
    "remember_call",
    "transforms",
]

PLAIN = (Tensor, torch.nn.Parameter)
Key = tuple[Any, ...]
Lane = Callable[[Sequence[Tensor]], "Tensor | None"]
Ranged = tuple[Callable[[], "Tensor | None"], int, int]  # a reference to an index tensor, its version and address

# asked at every call, so without the Python functions around them
modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad, ... that are active
may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # whether any device's is on
_is_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
SETTINGS = ("marks", "tensors", "precision", "is_deterministic")  # with which each key begins, before the layouts
RECENT = 6  # layouts of one call that are recognised: the last of them sooner than by a key
# torch.empty_strided on the current device, without the dispatcher: what compiled graphs call
_quick = None if INTERPRETED else getattr(torch._C, "_dynamo", None)


def _nobody() -> None:
    """Whose a range is before any is known, as a reference to somebody who is gone."""


def _no_lane(moving: Sequence[Tensor]) -> None:
    """The lane to a kernel that takes more than a launch: the long way knows what."""


def is_free() -> bool:
    """Nobody watches, casts or carries derivatives forward: a call like one before may go straight to its plan."""
    if torch.compiler.is_compiling() or modes() or transforms() is not None or may_autocast():
        return False
    return forward_ad._current_level < 0  # else a tensor may have a tangent, which its plan would lose


def look_up(memory: dict[Any, Any], marks: object, tensors: Sequence[Tensor]) -> tuple[Key | None, Any]:
    """By what a call is remembered, None: not at all; and what is remembered of one like it."""
    settings: Key = (marks, len(tensors), rounds_float32(), _is_deterministic())
    recent = memory.get(settings)
    if recent:
        for recognises, key, call in recent:
            if recognises(*tensors):
                return key, call
    return _by_key(memory, settings, recent, tensors)


def again(
    memory: dict[Any, Any], marks: object, tensors: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[Key | None, Any, Tensor | None]:
    """`look_up` where a call `is_free`, and its result if it goes by the lane over what is `given`.

    Whoever asks has asked about gradients, and about tracers too, to whom no memory is open. Both functions are written
    out here: most calls come this way, and each would cost them as much as a comparison.
    """
    if modes() or forward_ad._current_level >= 0:
        return None, None, None
    settings: Key = (marks, len(tensors), rounds_float32(), _is_deterministic())
    recent = memory.get(settings)
    if recent:
        for recognises, key, call in recent:
            if recognises(*tensors):  # and so nobody casts or transforms them
                lane = call.express
                return key, call, None if lane is None else lane(given)
    if transforms() is not None or may_autocast():
        return None, None, None
    known, call = _by_key(memory, settings, recent, tensors)
    lane = None if call is None else call.express
    return known, call, None if lane is None else lane(given)


def _by_key(
    memory: dict[Any, Any], settings: Key, recent: tuple[Any, ...] | None, tensors: Sequence[Tensor]
) -> tuple[Key | None, Any]:
    """`look_up` for a call that is none of the `recent` ones."""
    key = settings
    try:
        for one in tensors:
            if type(one) not in PLAIN or one.is_neg():
                return None, None
            key += (one.shape, one.stride(), one.dtype, one.device)
    except RuntimeError:  # a tensor without strides: others say so
        return None, None
    call = memory.get(key)
    if call is not None and recent != () and is_free():
        memory[settings] = _with_recent(recent or (), key, call, tensors)
    return key, call


def remember_call(memory: dict[Any, Any], key: Key, call: object) -> None:
    """`look_up` finds it from now on, and nothing that it found by this key before."""
    memory.pop(key[: len(SETTINGS)], None)
    memory[key] = call


def _with_recent(recent: tuple[Any, ...], key: Key, call: object, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The few calls that are recognised before any key is made; none of them where there are more than a few.

    A recogniser compares all that a key does, and more, in a fraction of the time. One tensor in two places it never
    takes for two, and that they are one says nothing of the calls to come.
    """
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        return recent
    recognises = recogniser(tensors) if len(recent) < RECENT else None
    return () if recognises is None else (*recent, (recognises, key, call))


def _allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Uninitialised memory on `device`, which is the current one, by its size, strides and dtype."""
    quick = getattr(getattr(_quick, "guards", None), f"_empty_strided_{device.type}", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


def express(
    plan: Plan,
    launcher: Launcher,
    padded: tuple[bool, ...],
    fixed: Sequence[Tensor | None],
    comes: Sequence[Sequence[int]],
    read: Sequence[tuple[Tensor, int]] | None,
    final: tuple[tuple[int, ...], tuple[int, ...]],
    kernel_of: Launcher | None = None,
    is_current: bool = not SEVERAL_GPUS,
) -> Lane:
    """A kernel with all that stays in place; it takes what comes with a call, in the caller's order.

    `fixed` are a plan's tensors and facts, None where one comes; `comes[i]` are the places that the i-th of them takes.
    `read` are the index tensors that stay, in the version of which it is known which of them are `padded`. None:
    whoever finds the call has compared all that stays already, as the memory of a format does. The plan's own kernel
    is `launcher`, and what runs is that of `kernel_of`, None: the same. `is_current`: the device need not be asked for.
    """
    runs = launcher if kernel_of is None else kernel_of
    moving_at = {place: number for number, places in enumerate(comes) for place in places}
    order = list(enumerate(runs.order))
    stays: list[tuple[int, Any]] = [(at, fixed[place]) for at, place in order if place >= 0 and place not in moving_at]
    moves = tuple([(at, moving_at[place]) for at, place in order if place in moving_at])
    is_pair = len(comes) == 2 and sorted([number for _, number in moves]) == [0, 1]
    (one_at, _), (other_at, _) = sorted(moves, key=itemgetter(1)) if is_pair else ((0, 0), (0, 0))
    (output_at,) = [at for at, place in order if place < 0]
    template: list[Any] = [*[0] * len(order), *runs.numbers]
    for at, tensor in stays:
        template[at] = tensor.data_ptr()
    pointers_end = len(order)
    unaligned = misaligned(template[:pointers_end])  # among what stays
    # facts are nobody else's to move
    own = [] if read is None else [(at, tensor) for at, tensor in stays if runs.order[at] < len(plan.names)]
    pointers = tuple([(tensor.data_ptr, template[at]) for at, tensor in own])
    versions = tuple(read or ())
    # index tensors that come with a call: their number, the extent that they point into, whether they are padded
    pointed = [
        (moving_at[place], extent, is_padded)
        for (place, extent), is_padded in zip(plan.pointed, padded)
        if place in moving_at
    ]
    # and of each the last one whose range is known: whose, version, pointer. Threads share them, so each is one tuple
    ranged: list[Ranged] = [(_nobody, 0, 0)] * len(pointed)
    compares = bool(versions or pointers or pointed)
    # in cells, not on an object: a call reads each of them
    is_half, variants, with_rounding, kernels = plan.is_half, plan.runners, plan.with_rounding, runs.runners
    programs, is_zeroed, dtype, device = runs.programs, not runs.is_covered, runs.sum_dtype, runs.device
    usual = kernels.get(unaligned)
    (size, strides), empty = final, _allocator(device)
    # lanes of their own: one that called itself would hold its tensors until the cycle collector came
    captured: Lane | None = None
    elsewhere: Lane | None = None
    if runs.captured is not None and runs.captured.is_plain:
        captured = express(plan, launcher, padded, fixed, comes, read, final, runs.captured, is_current)
    elif runs.captured is not None:
        captured = _no_lane
    if not is_current:
        elsewhere = express(plan, launcher, padded, fixed, comes, read, final, kernel_of, True)

    def lane(moving: Sequence[Tensor]) -> Tensor | None:
        """The result; None: something has changed."""
        if captured is not None and is_capturing():
            return captured(moving)
        if compares:
            for index, version in versions:
                if index._version != version:
                    return None
            for data_ptr, pointer in pointers:
                if data_ptr() != pointer:
                    return None
            for at, (number, extent, is_padded) in enumerate(pointed):
                owner, version, pointer = ranged[at]
                index = moving[number]
                if owner() is not index or index._version != version or index.data_ptr() != pointer:
                    low, high = remembered_range(index)
                    if high >= extent or (low < 0) is not is_padded:
                        return None
                    known = known_version(index)
                    if known is not None:
                        ranged[at] = ref(index), known, index.data_ptr()
        if variants.get(with_rounding(padded) if is_half else padded) is not launcher:
            return None
        if elsewhere is not None and device.index != _current_device():
            with torch.cuda.device(device):
                return elsewhere(moving)
        arguments = template.copy()
        if is_pair:  # as most are: a matrix' values and a dense tensor
            one, other = moving
            arguments[one_at] = pointer = one.data_ptr()
            arguments[other_at] = bits = other.data_ptr()
            bits |= pointer
        else:
            bits = 0
            for at, number in moves:
                arguments[at] = pointer = moving[number].data_ptr()
                bits |= pointer
        output = empty(size, strides, dtype)
        arguments[output_at] = pointer = output.data_ptr()
        is_unaligned = (bits | pointer) & 15
        kernel = kernels.get(misaligned(arguments[:pointers_end])) if is_unaligned else usual
        if kernel is None:
            return None
        if is_zeroed:
            output.zero_()
        if INTERPRETED:  # which takes no pointers
            for at, tensor in (*stays, *[(at, moving[number]) for at, number in moves], (output_at, output)):
                arguments[at] = tensor
        kernel(programs, arguments)
        return output

    return lane
