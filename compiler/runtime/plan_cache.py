"""The plan of a call: looked up by the layout of its tensors and torch's settings, made from one recorded run.

    planned(cache, call_key, function, tensors)     function(*tensors), by its plan from the third or fourth call on
    replayed(cache, call_key, tensors)              the same if there is a plan, else None
    keep_learning(cache, call_key, tensors, learn)  lets `replayed` serve calls whose gradients are recorded

The first call of a kind runs the function as it is, and leaves behind whatever the function keeps. The second one is
recorded, and its steps become a plan. Over a pattern, which may be gone after one call, the first call is not counted,
so that these are the second and the third. Calls over plain tensors may differ in the lengths of first dimensions:
of two recorded runs with other lengths a plan for all such lengths is made. Lengths that a kernel knows a divisor of
have plans of their own if they come first; if not, those of lengths that nothing divides serve them.

A cache is a dictionary that its owner keeps as long as what `call_key` and pinned tensors stand for: a format keeps one
with its pattern, and another one as soon as the pattern changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...formats.torch_state import (
    PLAIN,
    current_device,
    default_dtype,
    deterministic_flag,
    float32_precision,
    forward_level,
    is_captured,
    is_capturing,
    is_deterministic,
    is_grad_enabled,
    may_autocast,
    may_round_sums,
    modes,
    refuse_script_tracer,
    set_grad_enabled,
    transforms,
)
from ..binding import fact_class, shape_class, undivided
from .generalise import generalised
from .launch import INTERPRETED, SEVERAL_GPUS, misaligned
from .plan import Plan, Services, plan_of
from .plan_steps import Steps
from .ranges import ascends, range_expression, remembered_ranges
from .recording import Recording, Recordings, active
from .tensor_guard import layout_guard

__all__ = ["CacheOwner", "keep_learning", "planned", "replayed"]

Cache = dict[Any, Any]
Result = TypeVar("Result")
Learn = Callable[[Any, Sequence[Tensor], Any], Any]
RECENT = 6  # layouts of one call that are compared by a tensor guard, which is faster than making a key
VARIANTS = 4  # plans of one kind, which differ in what their guards ask, such as which index tensors are padded
ATTEMPTS = 8  # recorded runs of one kind
SEEN: list[Any] = []  # what a cache holds for a call that came once, before any layout of it is looked at
POSTPONED = 64  # runs of one kind that were recorded too early: a map is used 32 times before its form is settled

# torch.empty_strided on the current device, without the dispatcher: what compiled graphs call
_guards = None if INTERPRETED else getattr(getattr(torch._C, "_dynamo", None), "guards", None)


_is_unseen = getattr(torch._C, "_is_torch_function_all_disabled", lambda: False)  # while recordings are paused


def _empty_on(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that allocates uninitialised memory on `device`, given size, strides and dtype."""
    allocate = getattr(_guards, f"_empty_strided_{device.type}", None)
    if allocate is not None:
        return allocate  # type: ignore[no-any-return]
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


SERVICES = Services(
    INTERPRETED,
    SEVERAL_GPUS,
    is_capturing,
    remembered_ranges,
    ascends,
    range_expression,
    may_round_sums,
    float32_precision,
    default_dtype,
    deterministic_flag,
    misaligned,
    _empty_on,
    current_device,
)


class CacheOwner(Protocol):
    """What keeps a cache of plans with itself, as a format does in its `memory`."""

    def unguarded(self) -> list[Tensor]: ...


class _Layout:
    """The plans of calls whose tensors have one layout, and how often a plan was tried to be made."""

    __slots__ = ("attempts", "plans", "postponed")

    def __init__(self) -> None:
        self.plans: tuple[Plan, ...] = ()
        self.attempts = self.postponed = 0  # recorded runs, and those of them that were not yet like the next

    def add(self, plan: Plan) -> None:
        self.plans = (plan, *self.plans[: VARIANTS - 1])


class _AnyLength(_Layout):
    """Recorded runs of calls that differ in the lengths of first dimensions, and the plans for all lengths."""

    __slots__ = ("samples",)

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[Steps, list[int | None]]] = []

    def learn(self, steps: Steps, lengths: list[int | None]) -> None:
        """Make a plan of this run and an earlier one, if they took the same steps."""
        for sample, sample_lengths in self.samples:
            joined = None if sample_lengths == lengths else generalised(sample, steps, sample_lengths, lengths)
            if joined is not None:
                plan = plan_of(joined[0], SERVICES, joined[1])
                if plan is not None:
                    self.add(plan)
                return
        self.samples = [*self.samples[-VARIANTS + 1 :], (steps, lengths)]


def replayed(
    cache: Cache, call_key: object, tensors: Sequence[Tensor], numbers: tuple[int, ...] = (), given: Any = None
) -> Any:
    """Return the result of a call by its plan, if there is one for tensors laid out like these; else None.

    Where gradients are recorded it has them if `keep_learning` was told how; `given` is passed on to what records them.

    This is all that a warm call does, so it asks for little: each question costs a microsecond where other work has
    used the caches of the processor. While torch casts, transforms, or traces for TorchScript, guards accept no tensor.
    Settings on which only some plans depend are asked by those.
    """
    recent = cache.get((call_key, numbers, len(tensors), is_grad_enabled()))
    if recent and not modes() and forward_level() < 0 and not Recordings.count:
        for tensor in tensors:
            if tensor.is_nested:  # a guard would ask for its strides, which ends the process
                return None
        for guard, layout, learn in recent:
            if guard(*tensors):
                for plan in layout.plans:
                    if learn is None or plan.is_launched:
                        result = plan.replay(*tensors, *numbers)
                    else:
                        result = _unrecorded(plan, tensors, numbers)
                    if result is not None:
                        return result if learn is None else learn(result, tensors, given)
                return None
    return None


def _unrecorded(plan: Plan, tensors: Sequence[Tensor], numbers: tuple[int, ...]) -> Any:
    """Return what a plan makes, no gradients being recorded of the torch functions that it calls."""
    set_grad_enabled(False)
    try:
        return plan.replay(*tensors, *numbers)
    finally:
        set_grad_enabled(True)


def keep_learning(
    cache: Cache,
    call_key: object,
    tensors: Sequence[Tensor],
    learn: Learn,
    numbers: tuple[int, ...] = (),
    plan_key: object = None,
) -> None:
    """Let `replayed` serve calls like this one where gradients are recorded, once the value of this one has a plan.

    Args:
        cache: where plans of such calls are kept.
        call_key: by which `replayed` will be asked for them.
        tensors: the arguments of the call that has just run.
        learn: `learn(value, tensors, given)` returns the value with its gradients recorded. It holds nothing that the
            cache's owner holds too: that is in `given`.
        numbers: sizes, as `planned` was given them.
        plan_key: by which `planned` was asked for the value without gradients; None for `call_key`.
    """
    recent_key = call_key, numbers, len(tensors), True
    recent = cache.get(recent_key)
    if recent == () or transforms() is not None or may_autocast():
        return
    call = ("", call_key if plan_key is None else plan_key)
    key = _key((call, numbers, len(tensors), float32_precision(), is_deterministic()), tensors)
    layout: _Layout | None = None if key is None else cache.get(key)
    if layout is not None and layout.plans:
        cache[recent_key] = _with_recent(recent or (), layout, tensors, learn)


def planned(
    cache: Cache,
    call_key: object,
    function: Callable[..., Result],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...] = (),
    varies: bool = False,
    owned: CacheOwner | tuple[()] | None = (),
    kind: str = "",
    facts: int = 0,
) -> Result:
    """Return `function(*tensors)`, replayed from a plan if there is one for tensors like these.

    Args:
        cache: where plans of such calls are kept.
        call_key: all that the function depends on beside the tensors, the numbers and torch's settings; hashable.
        function: plain torch code around statements; it asks for no gradient, unless its `kind` says so.
        tensors: its arguments, in the order in which a plan takes them.
        numbers: sizes on which the function depends, which may differ from call to call as lengths do.
        varies: whether one plan may serve calls that differ in the lengths of first dimensions.
        owned: the format whose `memory` the cache is, which guards its tensors itself. None if calls over other index
            tensors share the cache: all of them are among `tensors` then, and none is ever pinned but the `constants`
            of a recording.
        kind: tells functions apart that have one `call_key`, and differ in whether gradients are asked for.
        facts: how many of the last tensors are those of a fact, on whose lengths no kernel is built.
    """
    result: Result | None = replayed(cache, call_key, tensors, numbers)
    if result is not None:
        return result
    refuse_script_tracer()
    if modes() or forward_level() >= 0 or active() is not None:
        return function(*tensors)
    recent_key = call_key, numbers, len(tensors), is_grad_enabled()
    if not varies and cache.get(recent_key) is None:  # most calls over a pattern that is new are the only one of theirs
        cache[recent_key] = SEEN
        return function(*tensors)
    if transforms() is not None or may_autocast():
        return function(*tensors)
    return _by_key(cache, recent_key, kind, function, tensors, varies, owned, facts)


def _by_key(
    cache: Cache,
    recent_key: tuple[Any, ...],
    kind: str,
    function: Callable[..., Result],
    tensors: Sequence[Tensor],
    varies: bool,
    owned: CacheOwner | tuple[()] | None,
    facts: int,
) -> Result:
    """Return the result of a call that no guard of a recent layout accepts: by a plan that a key finds, or recorded."""
    call_key, numbers, *_ = recent_key
    settings = (kind, call_key), numbers, len(tensors), float32_precision(), is_deterministic()
    key = _key(settings, tensors)
    if key is None:
        return function(*tensors)
    layout: _Layout | None = cache.get(key)
    if layout is not None:
        recent = cache.get(recent_key)
        if recent != ():
            cache[recent_key] = _with_recent(recent or (), layout, tensors)
        for plan in layout.plans:
            result: Result | None = plan.replay(*tensors, *numbers)
            if result is not None:
                return result
        if type(layout) is _AnyLength:  # whose plans are for every length: what is recorded below is for these
            layout = None
    any_length, lengths = None, list[int | None]()
    if varies:
        any_length_key, lengths = _any_length_key(settings, tensors, numbers, facts)
        any_length = served = cache.get(any_length_key)
        if served is None or not served.plans:
            served = cache.get(_undivided_key(any_length_key))
        for plan in () if layout is not None or served is None else served.plans:
            result = plan.replay(*tensors, *numbers)
            if result is not None:
                cache[key] = served  # found sooner the next time
                return result
        if any_length is None:
            any_length = cache[any_length_key] = _AnyLength()
    if layout is None:
        if any_length is None or not any_length.plans:
            cache[key] = _Layout()
        if any_length is None or not any_length.attempts:
            if any_length is not None:
                any_length.attempts = 1
            return function(*tensors)
        layout = _Layout()
    return _recorded(layout, any_length, function, tensors, lengths, owned)


def _key(settings: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return the cache key, made of settings and layouts; None if one of the tensors has no plain memory."""
    key = settings
    try:
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.is_neg() or tensor.layout is not torch.strided:
                return None
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    except RuntimeError:  # a tensor without strides
        return None
    return key + _repeated(tensors)


def _repeated(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the first place of each tensor if one is given in two places, which a plan takes once; else nothing."""
    ids = [id(tensor) for tensor in tensors]
    return tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()


def _any_length_key(
    settings: tuple[Any, ...], tensors: Sequence[Tensor], numbers: tuple[int, ...], facts: int
) -> tuple[tuple[Any, ...], list[int | None]]:
    """Return the cache key that calls share which differ in the lengths of first dimensions, and those lengths.

    Its last part is the classes of the lengths.
    """
    call_key, _, *state = settings
    classes: list[tuple[Any, ...]] = [shape_class((number,), (1,)) for number in numbers]
    kinds: tuple[Any, ...] = ()
    lengths, read = list[int | None](), len(tensors) - facts
    for at, tensor in enumerate(tensors):
        shape, strides = tensor.shape, tensor.stride()
        length_class = shape_class(shape, strides) if at < read else fact_class(shape, strides)
        classes.append(length_class)
        kinds += tensor.dtype, tensor.device
        lengths.append(None if length_class[0] is shape else shape[0])
    return ("any length", call_key, *state, kinds, *_repeated(tensors), tuple(classes)), [*lengths, *numbers]


def _undivided_key(any_length_key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of calls like these over lengths that nothing divides, whose plans hold for these too.

    Lengths that are new at every call would otherwise need a plan, and kernels, for each set of divisors.
    """
    *rest, classes = any_length_key
    return *rest, tuple(map(undivided, classes))


def _recorded(
    layout: _Layout,
    any_length: _AnyLength | None,
    function: Callable[..., Result],
    tensors: Sequence[Tensor],
    lengths: list[int | None],
    owned: CacheOwner | tuple[()] | None,
) -> Result:
    """Run a function, and make a plan of what it does if one can be made now."""
    if layout.attempts >= ATTEMPTS or (any_length is not None and any_length.attempts >= ATTEMPTS and not layout.plans):
        return function(*tensors)
    if is_captured(tensors[0].device) or _is_unseen():  # when nothing is tuned, nor read
        return function(*tensors)
    with Recording(tensors) as recording:
        result = function(*tensors)
    result_slots = recording.result(result)
    if recording.is_postponed:
        layout.postponed += 1
        if layout.postponed >= POSTPONED:
            layout.attempts = ATTEMPTS
        return result
    layout.attempts += 1
    if recording.refusal or not recording.steps:
        layout.attempts = ATTEMPTS
        return result
    unguarded = [] if owned is None or isinstance(owned, tuple) else owned.unguarded()  # now: the run works out some
    steps = Steps.of(recording, result_slots, [*unguarded, *recording.constants])
    pinned = [tensor for tensor in steps.pinned.values() if not tensor.is_floating_point()]
    if owned is None and not all([id(tensor) in steps.owned for tensor in pinned]):
        return result
    plan = plan_of(steps, SERVICES)
    if plan is not None:
        layout.add(plan)
    if any_length is not None:
        any_length.attempts += 1
        any_length.learn(steps, lengths)
    return result


def _with_recent(
    recent: tuple[Any, ...], layout: _Layout, tensors: Sequence[Tensor], learn: Learn | None = None
) -> tuple[Any, ...]:
    """Return the recent layouts with one more, each behind its guard; nothing if there would be more than a few.

    A guard compares all that a key does, and more, such as whether gradients are wanted, in a fraction of the time. It
    never accepts one tensor in two places, so that a call with one adds no guard.
    """
    if _repeated(tensors) or any([guard(*tensors) for guard, *_ in recent]):
        return recent  # a layout may be there more than once: its tensors want gradients, or do not
    guard = layout_guard(tensors) if len(recent) < RECENT else None
    return () if guard is None else (*recent, (guard, layout, learn))
