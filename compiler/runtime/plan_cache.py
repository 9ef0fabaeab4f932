"""The plan of a call: looked up by the layout of its tensors and torch's settings, made from one recorded run.

    planned(cache, call_key, function, tensors)     function(*tensors), by its plan from the third or fourth call on
    replayed(cache, call_key, tensors)              the same if there is a plan, else None
    keep_learning(cache, call_key, tensors, learn)  lets `replayed` serve calls whose gradients are recorded

The first call of a kind runs the function as it is, and leaves behind whatever the function keeps. The second one is
recorded, and its steps become a plan. Over a pattern, which may be gone after one call, the first call is not counted,
so that these are the second and the third. Calls over plain tensors may differ in the lengths of first dimensions:
of two recorded runs with other lengths a plan for all such lengths is made. What it knows of them, their classes, it
asks itself; a guard asks for the rest of the layout, and stands before the plans of all lengths. So lengths that a
kernel knows a divisor of have plans of their own if they come first; if not, those of lengths that nothing divides
serve them.

A cache is a dictionary that its owner keeps as long as what `call_key` and pinned tensors stand for: a format keeps one
with its pattern, and another one as soon as the pattern changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...formats.torch_state import (
    PLAIN,
    current_device,
    default_dtype,
    deterministic_flag,
    float32_precision,
    forward_state,
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
from ..binding import LengthClass, fact_length_class, length_class
from .generalise import generalised
from .launch import INTERPRETED, SEVERAL_GPUS, misaligned
from .plan import Plan, Services, plan_of
from .plan_steps import Steps
from .ranges import ascends, range_expression, remembered_ranges
from .recording import Recording, Recordings, active
from .tensor_guard import TensorGuard, layout_guard

__all__ = ["CacheOwner", "keep_learning", "planned", "replayed"]

Cache = dict[Any, Any]
Result = TypeVar("Result")
Learn = Callable[[Any, Sequence[Tensor], Any], Any]
RECENT = 6  # guards of one call, which are faster than making a key; one that misses takes a third of a microsecond
VARIANTS = 4  # plans of one set of lengths, which differ in what they ask, such as which index tensors are padded
ATTEMPTS = 8  # plans that are made for one kind
# Recorded runs of one kind without a plan, after which one call in as many is recorded: a map is used 32 times before
# its form is settled.
FRUITLESS = 64
CLASSES = 32  # plans of one layout for any lengths, which differ in the classes of these too

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


class _Keys(NamedTuple):
    """By what plans of a call are found. Places are those of its tensors, then of its numbers."""

    layout: tuple[Any, ...]  # settings, and the layouts of the tensors but for lengths that vary
    lengths: tuple[int | None, ...]  # these lengths, then the numbers; None where the layout has the length
    classes: tuple[LengthClass | int | None, ...]  # what a kernel may know of them; all of a number that is short

    @property
    def exact(self) -> tuple[Any, ...]:
        """What calls of these lengths share."""
        return "lengths", self.layout, self.lengths

    @property
    def kind(self) -> tuple[Any, ...]:
        """What calls share whose lengths are of these classes."""
        return "classes", self.layout, self.classes

    @property
    def varying(self) -> tuple[int, ...]:
        """The places of lengths and numbers that vary."""
        return tuple([at for at, known in enumerate(self.classes) if isinstance(known, LengthClass)])


class _Plans:
    """The plans of calls over tensors that one guard accepts, in the order in which they are asked.

    `varying` says at which places the guard leaves out lengths, which each plan compares then; None: nowhere.
    """

    __slots__ = ("plans", "varying")

    def __init__(self, varying: tuple[int, ...] | None = None) -> None:
        self.plans: tuple[Plan, ...] = ()
        self.varying = varying

    def add(self, plan: Plan) -> None:
        """Ask one more plan, before older ones but behind those whose kernels know more of what divides lengths."""
        most = VARIANTS if self.varying is None else CLASSES
        self.plans = tuple(sorted((plan, *self.plans[: most - 1]), key=lambda each: -each.divisor))


class _Kind:
    """Calls without a plan whose lengths are of the same classes, and recorded runs that no plan for all stands for."""

    __slots__ = ("attempts", "calls", "fruitless", "lengths", "samples")

    def __init__(self) -> None:
        self.calls = self.attempts = self.fruitless = 0  # of the runs that were recorded, those with and without a plan
        self.lengths: set[tuple[int | None, ...]] = set()  # of some calls
        self.samples: list[tuple[Steps, tuple[int | None, ...]]] = []

    def comes_again(self, keys: _Keys) -> bool:
        """Count a call, and return whether one of its lengths came before."""
        self.calls += 1
        if keys.lengths in self.lengths:
            return True
        if len(self.lengths) >= FRUITLESS:
            self.lengths.clear()
        self.lengths.add(keys.lengths)
        return False

    def is_due(self) -> bool:
        """Return whether the call that was counted last is to be recorded."""
        is_worth_it = self.fruitless < FRUITLESS or self.calls % FRUITLESS == 0
        return self.calls > 1 and self.attempts < ATTEMPTS and is_worth_it

    def joined(self, steps: Steps, keys: _Keys) -> Plan | None:
        """Return the plan of this run and an earlier one over other lengths; None if they took different steps."""
        for sample, lengths in self.samples:
            if lengths != keys.lengths:
                joined = generalised(sample, steps, lengths, keys.lengths, keys.classes)
                if joined is not None:
                    return plan_of(joined[0], SERVICES, joined[1])
        if keys.varying:
            self.samples = [*self.samples[-VARIANTS + 1 :], (steps, keys.lengths)]
        return None


Recent = tuple[TensorGuard, _Plans, Learn | None]


def replayed(
    cache: Cache, call_key: object, tensors: Sequence[Tensor], numbers: tuple[int, ...] = (), given: Any = None
) -> Any:
    """Return the result of a call by its plan, if there is one for tensors laid out like these; else None.

    Where gradients are recorded it has them if `keep_learning` was told how; `given` is passed on to what records them.

    This is all that a warm call does, so it asks for little: each question costs a microsecond where other work has
    used the caches of the processor. While torch casts, transforms, or traces for TorchScript, guards accept no tensor.
    Settings on which only some plans depend are asked by those.
    """
    recent = cache.get((call_key, len(numbers), len(tensors), is_grad_enabled()))
    if recent and not modes() and forward_state["_current_level"] < 0 and not Recordings.count:
        for tensor in tensors:
            if tensor.is_nested:  # a guard would ask for its strides, which ends the process
                return None
        arguments = (*tensors, *numbers) if numbers else tensors
        for guard, guarded, learn in recent:
            if guard(*tensors):
                for plan in guarded.plans:
                    if learn is None or plan.is_launched:
                        result = plan.replay(*arguments)
                    else:  # no gradients are recorded of the torch functions that it calls
                        set_grad_enabled(False)
                        try:
                            result = plan.replay(*arguments)
                        finally:
                            set_grad_enabled(True)
                    if result is not None:
                        return result if learn is None else learn(result, tensors, given)
    return None


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
    if any([tensor.is_nested for tensor in tensors]):
        return
    sizes = len(numbers), len(tensors)
    with torch.no_grad():  # as when the guards of the value were made
        recent = cache.get((call_key if plan_key is None else plan_key, *sizes, False)) or ()
        served = [plans for guard, plans, _ in recent if guard(*tensors)]
    for plans in served:
        _remember(cache, (call_key, *sizes, True), tensors, plans, learn)


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
    if modes() or forward_state["_current_level"] >= 0 or active() is not None:
        return function(*tensors)
    recent_key = call_key, len(numbers), len(tensors), is_grad_enabled()
    if not varies and cache.get(recent_key) is None:  # most calls over a pattern that is new are the only one of theirs
        cache[recent_key] = ()
        return function(*tensors)
    if transforms() is not None or may_autocast():
        return function(*tensors)
    keys = _keys((kind, call_key), tensors, numbers, varies, facts)
    return function(*tensors) if keys is None else _by_keys(cache, recent_key, keys, function, tensors, numbers, owned)


def _by_keys(
    cache: Cache,
    recent_key: tuple[Any, ...],
    keys: _Keys,
    function: Callable[..., Result],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...],
    owned: CacheOwner | tuple[()] | None,
) -> Result:
    """Return the result of a call that no guard leads to a plan of: by a plan that its keys find, or recorded."""
    any_length: _Plans = cache.get(keys.layout) or _Plans(keys.varying)
    exact: _Plans = cache.get(keys.exact) or _Plans()
    for plans in (exact, any_length):
        for plan in plans.plans:
            served: Result | None = plan.replay(*tensors, *numbers)
            if served is not None:
                _remember(cache, recent_key, tensors, plans)
                return served
    kind: _Kind | None = cache.get(keys.kind)
    if kind is None:
        kind = cache[keys.kind] = _Kind()
    comes_again = kind.comes_again(keys)
    # while a graph is captured nothing is tuned, nor read
    if not kind.is_due() or is_captured(tensors[0].device) or _is_unseen():
        return function(*tensors)
    result, steps = _recorded(function, tensors, owned)
    plans_key, plans = keys.layout, any_length
    new_plan = None if steps is None else kind.joined(steps, keys)
    if steps is not None and new_plan is None and comes_again:
        plans_key, plans = keys.exact, exact
        new_plan = plan_of(steps, SERVICES, (*[None] * len(tensors), *numbers))  # whose lengths the guard compares
    if new_plan is None:
        kind.fruitless += 1
        return result
    kind.attempts += 1
    plans.add(new_plan)
    cache[plans_key] = plans
    if plans is any_length or not keys.varying:  # lengths that have come twice may not come a third time
        _remember(cache, recent_key, tensors, plans)
    return result


def _keys(
    call_key: tuple[str, object], tensors: Sequence[Tensor], numbers: tuple[int, ...], varies: bool, facts: int
) -> _Keys | None:
    """Return the keys of a call, made of settings and layouts; None if one of the tensors has no plain memory.

    `varies` and `facts` are those of `planned`.
    """
    layout: tuple[Any, ...] = (call_key, len(numbers), len(tensors), float32_precision(), is_deterministic())
    lengths, classes = list[int | None](), list[LengthClass | int | None]()
    first_fact = len(tensors) - facts
    try:
        for at, tensor in enumerate(tensors):
            if type(tensor) not in PLAIN or tensor.is_neg() or tensor.layout is not torch.strided:
                return None
            shape, strides, known = tensor.shape, tensor.stride(), None
            if varies:
                known = length_class(shape, strides) if at < first_fact else fact_length_class(shape[0])
            layout += (shape if known is None else (None, *shape[1:]), strides, tensor.dtype, tensor.device)
            classes.append(known)
            lengths.append(None if known is None else shape[0])
    except RuntimeError:  # a tensor without strides
        return None
    classes += [(length_class((number,), (1,)) if varies else None) or number for number in numbers]
    return _Keys(layout + _repeated(tensors), (*lengths, *numbers), tuple(classes))


def _repeated(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the first place of each tensor if one is given in two places, which a plan takes once; else nothing."""
    ids = [id(tensor) for tensor in tensors]
    return tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()


def _recorded(
    function: Callable[..., Result], tensors: Sequence[Tensor], owned: CacheOwner | tuple[()] | None
) -> tuple[Result, Steps | None]:
    """Return what a function returns, and its steps; None for these if they would not be those of another call."""
    with Recording(tensors) as recording:
        result = function(*tensors)
    result_slots = recording.result(result)
    if recording.is_postponed or recording.refusal or not recording.steps:
        return result, None
    unguarded = [] if owned is None or isinstance(owned, tuple) else owned.unguarded()  # now: the run works out some
    steps = Steps.of(recording, result_slots, [*unguarded, *recording.constants])
    pinned = [tensor for tensor in steps.pinned.values() if not tensor.is_floating_point()]
    is_of_any_pattern = owned is not None or all([id(tensor) in steps.owned for tensor in pinned])
    return result, steps if is_of_any_pattern else None


def _remember(
    cache: Cache, recent_key: tuple[Any, ...], tensors: Sequence[Tensor], plans: _Plans, learn: Learn | None = None
) -> None:
    """Let `replayed` ask plans of one more layout, behind its guard, and forget the oldest of too many guards.

    A guard compares all of a layout that a key does, and more, such as whether gradients are wanted, in a fraction of
    the time. It never accepts one tensor in two places, so that a call with one adds no guard. Plans for any length
    are asked last.
    """
    recent: tuple[Recent, ...] = cache.get(recent_key) or ()
    if _repeated(tensors) or any([asked is plans and guard(*tensors) for guard, asked, _ in recent]):
        return  # plans may be there more than once: their tensors want gradients, or do not
    guard = layout_guard(tensors, plans.varying or ())
    if guard is not None:
        entries = sorted((*recent, (guard, plans, learn)), key=lambda entry: entry[1].varying is not None)
        cache[recent_key] = tuple(entries[-RECENT:])
