"""Where the sums of a tile go: stored, added atomically or either of them, and what they start from."""

from __future__ import annotations

from collections.abc import Sequence

from ..language import Access, Var
from .broadcast import Value
from .loads import conjunction, moving_axes, pointer
from .scope import Scope
from .spec import TYPES, Axes

__all__ = ["early_seed", "output_masks", "store_sum"]


def early_seed(scope: Scope, axes: Axes) -> Value | None:
    """A seed that lacks an axis of the tile, as a bias does, is so small that it is loaded before the loops."""
    spec = scope.spec
    if not spec.bound.is_seeded or spec.schedule.is_atomic:
        return None
    kept = spec.kept(axes)
    return _load_seed(scope, kept) if _seed_axes(scope, kept) != kept else None


def _seed_axes(scope: Scope, axes: Axes) -> Axes:
    spec = scope.spec
    moving = moving_axes(scope, spec.schedule.output.indices, spec.bound.size, spec.strides[" seed"])
    return tuple(axis for axis in axes if axis in moving)


def _load_seed(scope: Scope, axes: Axes) -> Value:
    """What the sums of a tile start from."""
    spec, own = scope.spec, _seed_axes(scope, axes)
    mask = conjunction(spec, [mask for mask in output_masks(scope) if {*mask.axes} <= {*own}], own)
    guard = f", mask={mask}, other=0.0" if mask else ""
    address = pointer(scope, spec.schedule.output, "seed", own)
    return scope.let(f"tl.load({address}{guard}).to({spec.accumulate})", own, "seed")


def output_masks(scope: Scope) -> list[Value]:
    """Where the program's tile has places in the output."""
    masks = [scope.bounds[name] for name in scope.spec.schedule.free if name in scope.bounds]
    return masks + [scope.valid[access] for access in _own_places(scope) if access in scope.valid]


def _own_places(scope: Scope) -> tuple[Access, ...]:
    """Positions in the output that no other program writes: where there is none nothing is stored."""
    schedule = scope.spec.schedule
    return schedule.output.indirections if schedule.strategy in ("store-once", "owner") else ()


def store_sum(scope: Scope, acc: Value, seed: Value | None = None) -> None:
    """Bring the sums in `acc` to the output, by the schedule's strategy; `seed`: if it has been loaded already."""
    spec, schedule = scope.spec, scope.spec.schedule
    axes = spec.kept(acc.axes)
    _finish_sum(scope, acc, axes)
    masks, places = output_masks(scope), _own_places(scope)
    free = [access for access in scope.valid if set(access.names) <= set(schedule.free) and access not in places]
    entries = [scope.valid[access] for access in free]
    if schedule.strategy == "atomic":
        masks += entries
    elif entries:  # the element is written all the same: as zero, whatever the other factors hold
        scope.line(f"{acc.text} = tl.where({conjunction(spec, entries, axes)}, {acc.text}, 0.0)")
    mask = conjunction(spec, masks, axes)
    guard = f", mask={mask}" if mask else ""
    if spec.bound.is_seeded and not schedule.is_atomic:
        scope.line(f"{acc.text} += {spec.tile.spread(seed or _load_seed(scope, axes), axes)}")
    dtype = TYPES[schedule.sum_dtype(spec.flags.sum_dtype)]
    address = pointer(scope, schedule.output, "output", axes)
    value = acc.text if dtype == spec.accumulate else f"{acc.text}.to({dtype})"
    if schedule.strategy == "store-or-atomic":
        _store_or_add(scope, address, value, masks, axes)
    elif schedule.is_atomic:
        scope.line(f'tl.atomic_add({address}, {value}{guard}, sem="relaxed")')
    else:
        scope.line(f"tl.store({address}, {value}{guard})")


def _finish_sum(scope: Scope, acc: Value, kept: Axes) -> None:
    """Sum over the axes that the output lacks, and multiply by the statement's number."""
    spec, value = scope.spec, acc
    for axis in acc.axes:
        if axis not in kept:
            total = spec.tile.reduce("tl.sum", value, axis)
            scope.line(f"{acc.text} = {total.text}")
            value = Value(acc.text, total.axes)
    scale = spec.bound.statement.scale
    if scale != 1:
        scope.line(f"{acc.text} *= tl.full((), {float(scale)!r}, {spec.accumulate})")


def _store_or_add(scope: Scope, address: str, value: str, masks: Sequence[Value], axes: Axes) -> None:
    """Groups that have their row alone are stored, only the others are added atomically."""
    spec = scope.spec
    group = spec.schedule.output.indirections[0].indices[0]
    assert isinstance(group, Var)
    place = scope.indices[group.name]
    guard = f", mask={scope.bounds[group.name].text}, other=0" if group.name in scope.bounds else ""
    flag = scope.parameter("is_shared", spec.schedule.shared_index)
    shared = scope.let(f"tl.load({flag} + {place.text}{guard}) != 0", place.axes, "is_shared")
    alone = scope.let(f"{shared.text} == 0", place.axes, "is_alone")
    scope.line(f"tl.store({address}, {value}, mask={conjunction(spec, [*masks, alone], axes)})")
    scope.line(f"if tl.max({shared.text}.to(tl.int32)) > 0:" if place.axes else f"if {shared.text}:")
    mask = conjunction(spec, [*masks, shared], axes)
    scope.child().line(f'tl.atomic_add({address}, {value}, mask={mask}, sem="relaxed")')
