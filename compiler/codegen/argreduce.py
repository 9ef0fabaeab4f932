"""`max` and `min` in a kernel: the accumulator holds the best product so far, and beside it the winner's position.

A tile of the accumulator may hold several candidates for one output element, along the axis of a step: each lane keeps
its own winner through the loops, and the lanes are reduced once, after them. The kernel's variable `acc` holds the best
product so far, `place` its position, if winners are wanted, and `found` whether there was any, if an element may have
none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..language import Access, Var
from .broadcast import Value
from .loads import conjunction, pointer
from .loops import open_loops
from .products import evaluate, widened
from .scope import Scope
from .spec import TYPES, Axes, KernelSpec

__all__ = ["write_extremum"]

INTEGERS = {torch.int32: "tl.int32", torch.int64: "tl.int64"}


def write_extremum(scope: Scope) -> None:
    """Write the loops of a `max` or `min`, and the store of the winners."""
    start, axes = len(scope.lines), scope.spec.result_axes
    _write_no_winner(scope, axes)
    has_product = _compete(open_loops(scope), axes)
    if has_product is not None:  # its axes are known only now, from the masks in the loops
        before = scope.aside()
        before.line(f"found = {_full(scope.spec, has_product.axes, '0', 'tl.int1')}")
        scope.lines[start:start] = before.lines
    _store_winner(scope, axes, has_product)


def _is_max(spec: KernelSpec) -> bool:
    return spec.schedule.reduction == "max"


def _worst(spec: KernelSpec) -> str:
    return 'float("-inf")' if _is_max(spec) else 'float("inf")'


def _place_type(spec: KernelSpec) -> str:
    return INTEGERS[spec.bound.winner_dtype]


def _full(spec: KernelSpec, axes: Axes, value: str, dtype: str) -> str:
    return f"tl.full({spec.tile.shape(axes) if axes else '()'}, {value}, {dtype})"


def _write_no_winner(scope: Scope, axes: Axes) -> None:
    """Write an accumulator that no product has reached."""
    spec = scope.spec
    if spec.flags.wants_winners:
        scope.line(f"acc = {_full(spec, axes, '0.0', spec.accumulate)}")
        scope.line(f"place = {_full(spec, axes, '-1', _place_type(spec))}")
    else:
        scope.line(f"acc = {_full(spec, axes, _worst(spec), spec.accumulate)}")


# in the loops


def _compete(scope: Scope, axes: Axes) -> Value | None:
    """Write the comparison of the loaded tiles' product with the best so far.

    Return the variable that tells whether there was any product, or None if none is needed.
    """
    spec, product = scope.spec, _candidate(scope, axes)
    masks = [scope.bounds[name] for name in spec.schedule.names("segment", "step") if name in scope.bounds]
    masks += scope.valid.values()
    mask, text = conjunction(spec, masks, axes), spec.tile.spread(product, axes)
    if spec.flags.wants_winners:
        _keep_better(scope, axes, text, mask)
        return None
    has_product = _note_product(scope, masks)
    text = f"tl.where({mask}, {text}, {_worst(spec)})" if mask else text
    function = "tl.maximum" if _is_max(spec) else "tl.minimum"
    scope.line(f"acc = {function}(acc, {text}, propagate_nan=tl.PropagateNan.ALL)")
    return has_product


def _candidate(scope: Scope, axes: Axes) -> Value:
    """Return the product, times the statement's number, in the type that products are compared in."""
    spec, tree, scale = scope.spec, scope.spec.schedule.tree, scope.spec.bound.statement.scale
    number = f"tl.full((), {float(scale)!r}, {spec.accumulate})"
    if tree is None:
        return scope.let(number, (), "product")
    value = evaluate(scope, tree, axes)
    text = widened(spec, value, value.axes)
    if scale == 1 and text.isidentifier():
        return Value(text, value.axes)
    return scope.let(text if scale == 1 else f"{text} * {number}", value.axes, "product")


def _keep_better(scope: Scope, axes: Axes, product: str, mask: str) -> None:
    """Write the choice between a product and the best so far, with its position.

    NaN beats every number. Of equal products the one that is met first, or has the smaller position, stays.
    """
    spec, loops = scope.spec, scope.spec.loops
    place = spec.tile.spread(_position_of_product(scope), axes)
    loses = f"({product} {'<=' if _is_max(spec) else '>='} acc)"  # false for a NaN
    beats = f"(place < 0) | (({loses} == 0) & (acc == acc))"
    owner = spec.schedule.owner
    is_counted = owner is not None and bool(owner.counted_by)  # whose groups come in an order of their own
    if is_counted or loops != tuple(name for name in spec.bound.statement.reduced if name in loops):
        same = f"(({product} == acc) | (({product} != {product}) & (acc != acc)))"
        beats += f" | ({same} & ({place} < place))"
    better = scope.let(f"{mask} & ({beats})" if mask else beats, axes, "better")
    scope.line(f"acc = tl.where({better.text}, {product}, acc)")
    scope.line(f"place = tl.where({better.text}, {place}, place)")


def _position_of_product(scope: Scope) -> Value:
    """Return the position of a product over the reduced names, the last of which varies fastest.

    Groups that are counted by an index tensor stand where that says.
    """
    spec, reduced = scope.spec, scope.spec.bound.statement.reduced
    owner, values = spec.schedule.owner, dict(scope.indices)
    if owner is not None and owner.counted_by:
        values[owner.segment] = scope.positions[Access(owner.counted_by, (Var(owner.segment),))]
    if not reduced:
        return scope.let(_full(spec, (), "0", _place_type(spec)), (), "at")
    axes = spec.ordered({axis for name in reduced for axis in values[name].axes})
    text = ""
    for name in reduced:
        value = f"tl.cast({spec.tile.spread(values[name], axes)}, {_place_type(spec)})"
        before = f"({text})" if "+" in text else text
        text = f"{before} * {_length(scope, name)} + {value}" if text else value
    return scope.let(text, axes, "at")


def _length(scope: Scope, name: str) -> str:
    return scope.extent(name) if scope.spec.is_varying(name) else str(scope.spec.schedule.extents[name])


def _note_product(scope: Scope, masks: Sequence[Value]) -> Value | None:
    """Write whether an element has had any product, and return that variable; None if every element has one."""
    spec, segments = scope.spec, scope.spec.schedule.names("segment")
    if not scope.valid and not segments:
        return None
    axes = spec.ordered({axis for mask in masks for axis in mask.axes})
    text = conjunction(spec, masks, axes)
    if not text:
        (segment,) = segments
        text, axes = f"({scope.indices[segment].text} >= 0)", scope.indices[segment].axes
    scope.line(f"found = found | {text}")
    return Value("found", axes)


# after the loops


def _store_winner(scope: Scope, axes: Axes, has_product: Value | None) -> None:
    """Write the reduction over the lanes of each output element, and the store; an element without a product is 0."""
    spec, output = scope.spec, scope.spec.schedule.output
    for axis in axes:
        if axis not in spec.schedule.free:
            if spec.flags.wants_winners:
                _choose_winning_lane(scope, axes, axis)
            else:
                has_product = _choose_best_lane(scope, axes, axis, has_product)
            axes = tuple(other for other in axes if other != axis)
    if has_product is not None:
        scope.line(f"acc = tl.where({spec.tile.spread(has_product, axes)}, acc, 0.0)")
    masks = [scope.bounds[name] for name in spec.schedule.free if name in scope.bounds]
    masks += [scope.valid[access] for access in output.indirections if access in scope.valid]
    mask = conjunction(spec, masks, axes)
    guard = f", mask={mask}" if mask else ""
    dtype = TYPES[spec.schedule.sum_dtype(None)]
    value = "acc" if dtype == spec.accumulate else f"acc.to({dtype})"
    scope.line(f"tl.store({pointer(scope, output, 'output', axes)}, {value}{guard})")
    if spec.flags.wants_winners:
        scope.line(f"tl.store({pointer(scope, output, 'winners', axes)}, place{guard})")


def _reduced(spec: KernelSpec, function: str, text: str, axes: Axes, axis: str) -> str:
    return spec.tile.reduce(function, Value(text, axes), axis).text


def _choose_best_lane(scope: Scope, axes: Axes, axis: str, has_product: Value | None) -> Value | None:
    """Write the reduction of values along one axis; return whether there was any product, reduced as well."""
    spec = scope.spec
    function = "tl.max" if _is_max(spec) else "tl.min"
    lanes = f"tl.where(acc == acc, acc, {_worst(spec)})"
    scope.line(f"is_nan = {_reduced(spec, 'tl.max', '(acc != acc).to(tl.int32)', axes, axis)} > 0")
    scope.line(f"acc = {_reduced(spec, function, lanes, axes, axis)}")
    scope.line('acc = tl.where(is_nan, float("nan"), acc)')
    if has_product is None or axis not in has_product.axes:
        return has_product
    any_lane = spec.tile.reduce("tl.max", Value("found.to(tl.int32)", has_product.axes), axis)
    scope.line(f"found = {any_lane.text} > 0")
    return Value("found", any_lane.axes)


def _choose_winning_lane(scope: Scope, axes: Axes, axis: str) -> None:
    """Write the reduction of values and of their positions along one axis."""
    spec, none = scope.spec, torch.iinfo(scope.spec.bound.winner_dtype).max
    function = "tl.max" if _is_max(spec) else "tl.min"

    def across(text: str) -> str:
        if not spec.flags.lazy or len(axes) == 1:
            return text
        slots = ", ".join("None" if other == axis else ":" for other in axes)
        return f"{text}[{slots}]"

    scope.line(f"is_nan = {_reduced(spec, 'tl.max', '(acc != acc).to(tl.int32)', axes, axis)} > 0")
    lanes = f"tl.where((place >= 0) & (acc == acc), acc, {_worst(spec)})"
    scope.line(f"best = {_reduced(spec, function, lanes, axes, axis)}")
    scope.line(f"is_best = (place >= 0) & tl.where({across('is_nan')}, acc != acc, acc == {across('best')})")
    scope.line(f"place = {_reduced(spec, 'tl.min', f'tl.where(is_best, place, {none})', axes, axis)}")
    scope.line(f'acc = tl.where(place == {none}, 0.0, tl.where(is_nan, float("nan"), best))')
    scope.line(f"place = tl.where(place == {none}, -1, place)")
