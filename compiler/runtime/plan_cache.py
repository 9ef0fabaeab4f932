"""Which plan a call has: found by the layout of its tensors and torch's settings, made from one recorded run.

    planned(cache, marks, function, tensors)        function(*tensors), by its plan from the third or fourth call on

The first call of a kind runs the function as it is, and leaves behind whatever the function keeps. The second one is
recorded, and its steps become a plan. Over a pattern, which may be gone after one call, the first is not even looked
at, so that these are the second and the third. Calls over plain tensors may differ in the lengths of first dimensions:
of two recorded runs with other lengths a plan for all such lengths is made.

A cache is a dictionary that its owner keeps as long as what `marks` and pinned tensors stand for: a format keeps one
with its pattern, which is another one as soon as the pattern changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats.torch_state import (
    PLAIN,
    current_device,
    float32_precision,
    is_capturing,
    is_deterministic,
    is_forward_mode,
    may_autocast,
    may_round_sums,
    modes,
    transforms,
)
from ..binding import shape_class
from .launch import INTERPRETED, SEVERAL_GPUS, misaligned
from .plan import Plan, Services, Steps, generalised, plan_of
from .ranges import range_expression, remembered_range
from .recording import Recording, active
from .tensor_guard import recogniser

__all__ = ["planned"]

Cache = dict[Any, Any]
RECENT = 6  # layouts of one call that are recognised: the last of them sooner than by a key
VARIANTS = 4  # plans of one kind, which differ in what their guards ask, such as which index tensors are padded
ATTEMPTS = 8  # recorded runs of one kind
SEEN: list[Any] = []  # what a cache holds for a call that came once, before any layout of it is looked at
POSTPONED = 64  # runs of one kind that were recorded too early: a map is used 32 times before its form is settled

# torch.empty_strided on the current device, without the dispatcher: what compiled graphs call
_guards = None if INTERPRETED else getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def _empty_on(device: torch.device) -> Callable[..., Tensor]:
    """Return what makes uninitialised memory on `device` by size, strides and dtype."""
    quick = getattr(_guards, f"_empty_strided_{device.type}", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


SERVICES = Services(
    INTERPRETED,
    SEVERAL_GPUS,
    is_capturing,
    remembered_range,
    range_expression,
    may_round_sums,
    misaligned,
    _empty_on,
    current_device,
)


class _Kind:
    """Calls of one layout: their plans, or that there are none yet."""

    def __init__(self) -> None:
        self.plans: tuple[Plan, ...] = ()
        self.attempts = self.postponed = 0  # recorded runs, and those of them that were not yet like the next

    def add(self, plan: Plan) -> None:
        self.plans = (plan, *self.plans[: VARIANTS - 1])


class _Family(_Kind):
    """Calls whose tensors differ in the lengths of first dimensions: recorded runs, and plans for all lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[Steps, list[int | None]]] = []

    def learn(self, steps: Steps, lengths: list[int | None]) -> None:
        """Make a plan of this run and an earlier one, if they took the same steps."""
        for other, others in self.samples:
            joined = None if others == lengths else generalised(other, steps, others, lengths)
            if joined is not None:
                plan = plan_of(joined[0], SERVICES, joined[1])
                if plan is not None:
                    self.add(plan)
                return
        self.samples = [*self.samples[-VARIANTS + 1 :], (steps, lengths)]


def planned(
    cache: Cache,
    marks: object,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...] = (),
    varies: bool = False,
    owned: Sequence[Tensor | None] = (),
) -> Any:
    """Return `function(*tensors)`, replayed from a plan if there is one for tensors like these.

    Args:
        cache: where plans of such calls are kept.
        marks: all that the function depends on beside the tensors, the numbers and torch's settings; hashable.
        function: plain torch code around statements; it asks for no gradient.
        tensors: its arguments, in the order in which a plan takes them.
        numbers: sizes on which the function depends, which may differ from call to call as lengths do.
        varies: whether one plan may serve calls that differ in the lengths of first dimensions.
        owned: tensors among those that the function pins which the cache's owner guards itself.
    """
    if modes() or is_forward_mode() or active() is not None:
        return function(*tensors)
    settings = (marks, numbers, len(tensors), float32_precision(), is_deterministic())
    recent = cache.get(settings)
    if recent is None and not varies:  # most calls over a pattern that is new are the only one of theirs
        cache[settings] = SEEN
        return function(*tensors)
    if recent:
        for recognises, kind in recent:
            if recognises(*tensors):  # and so nobody casts or transforms them
                for plan in kind.plans:
                    result = plan.replay(*tensors, *numbers)
                    if result is not None:
                        return result
                if type(kind) is _Kind:
                    return _recorded(kind, None, function, tensors, [], owned)
                break
    if transforms() is not None or may_autocast():
        return function(*tensors)
    return _by_key(cache, settings, recent, function, tensors, numbers, varies, owned)


def _by_key(
    cache: Cache,
    settings: tuple[Any, ...],
    recent: Any,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...],
    varies: bool,
    owned: Sequence[Tensor | None],
) -> Any:
    """`planned` for a call that is none of the recent ones."""
    key = _key(settings, tensors)
    if key is None:
        return function(*tensors)
    kind: _Kind | None = cache.get(key)
    if kind is not None:
        if recent != ():
            cache[settings] = _with_recent(recent or (), kind, tensors)
        for plan in kind.plans:
            result = plan.replay(*tensors, *numbers)
            if result is not None:
                return result
        if type(kind) is _Family:  # whose plans are for every length: what is recorded below is for these
            kind = None
    family, lengths = None, list[int | None]()
    if varies:
        rougher, lengths = _family_of(settings, tensors, numbers)
        family = cache.get(rougher)
        if family is None:
            family = cache[rougher] = _Family()
        elif kind is None:
            for plan in family.plans:
                result = plan.replay(*tensors, *numbers)
                if result is not None:
                    cache[key] = family  # found sooner the next time
                    return result
    if kind is None:
        if family is None or not family.plans:
            cache[key] = _Kind()
        if family is None or not family.attempts:
            if family is not None:
                family.attempts = 1
            return function(*tensors)
        kind = _Kind()
    return _recorded(kind, family, function, tensors, lengths, owned)


def _key(settings: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return settings and layouts; None if one of the tensors has no plain memory."""
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


def _family_of(
    settings: tuple[Any, ...], tensors: Sequence[Tensor], numbers: tuple[int, ...]
) -> tuple[tuple[Any, ...], list[int | None]]:
    """Return what calls have in common that differ in the lengths of first dimensions, and the lengths."""
    marks, _, *rest = settings
    key: tuple[Any, ...] = ("any length", marks, *rest, *[shape_class((number,), (1,)) for number in numbers])
    lengths = list[int | None]()
    for tensor in tensors:
        shape, strides = tensor.shape, tensor.stride()
        alike = shape_class(shape, strides)
        key += (alike, tensor.dtype, tensor.device)
        lengths.append(None if alike[0] is shape else shape[0])
    return key + _repeated(tensors), [*lengths, *numbers]


def _recorded(
    kind: _Kind,
    family: _Family | None,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    lengths: list[int | None],
    owned: Sequence[Tensor | None],
) -> Any:
    """Run a function, and make a plan of what it does if one can be made now."""
    if kind.attempts >= ATTEMPTS or (family is not None and family.attempts >= ATTEMPTS and not kind.plans):
        return function(*tensors)
    if tensors[0].is_cuda and is_capturing():  # when nothing is tuned, nor read
        return function(*tensors)
    with Recording(tensors) as recording:
        result = function(*tensors)
    stated = recording.result(result)
    if recording.is_postponed:
        kind.postponed += 1
        if kind.postponed >= POSTPONED:
            kind.attempts = ATTEMPTS
        return result
    kind.attempts += 1
    if recording.refusal or not recording.steps:
        kind.attempts = ATTEMPTS
        return result
    steps = Steps.of(recording, stated, owned)
    plan = plan_of(steps, SERVICES)
    if plan is not None:
        kind.add(plan)
    if family is not None:
        family.attempts += 1
        family.learn(steps, lengths)
    return result


def _with_recent(recent: tuple[Any, ...], kind: _Kind, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the few kinds that are recognised before any key is made; none of them where there are more than a few.

    A recogniser compares all that a key does, and more, such as whether gradients are wanted, in a fraction of the
    time. One tensor in two places it never
    takes for two, and that they are one says nothing of the calls to come.
    """
    if _repeated(tensors) or any([recognises(*tensors) for recognises, _ in recent]):
        return recent  # a kind may be there more than once: its tensors want gradients, or do not
    recognises = recogniser(tensors) if len(recent) < RECENT else None
    return () if recognises is None else (*recent, (recognises, kind))
