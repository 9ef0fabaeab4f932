"""The stores of a tile's sums: plain, atomic or either of them, and the seed that sums start from."""

from __future__ import annotations

from collections.abc import Sequence

from ..language import Access, Var
from .broadcast import Value
from .loads import conjunction, moving_axes, pointer
from .scope import Scope
from .spec import TYPES, Axes

__all__ = ["early_seed", "output_masks", "store_sum"]


def early_seed(scope: Scope, axes: Axes) -> Value | None:
    """Write the load of a seed that lacks an axis of the tile, as a bias does, before the loops; it is small.

    None if there is no seed, or if it has all axes and is loaded where it is added.
    """
    spec = scope.spec
    if not spec.bound.is_seeded or spec.schedule.is_atomic:
        return None
    kept = spec.kept(axes)
    return _load_seed(scope, kept) if _seed_axes(scope, kept) != kept else None


def _seed_axes(scope: Scope, axes: Axes) -> Axes:
    """Return those of `axes` along which the seed varies."""
    spec = scope.spec
    moving = moving_axes(scope, spec.schedule.output.indices, spec.bound.size, spec.strides[" seed"])
    return tuple(axis for axis in axes if axis in moving)


def _load_seed(scope: Scope, axes: Axes) -> Value:
    """Write the load of the seed, which the sums of a tile start from."""
    spec, seed_axes = scope.spec, _seed_axes(scope, axes)
    mask = conjunction(spec, [mask for mask in output_masks(scope) if {*mask.axes} <= {*seed_axes}], seed_axes)
    guard = f", mask={mask}, other=0.0" if mask else ""
    address = pointer(scope, spec.schedule.output, "seed", seed_axes)
    return scope.let(f"tl.load({address}{guard}).to({spec.accumulate})", seed_axes, "seed")


def output_masks(scope: Scope) -> list[Value]:
    """Return the masks of where the program's tile has places in the output."""
    masks = [scope.bounds[name] for name in scope.spec.schedule.free if name in scope.bounds]
    return masks + [scope.valid[access] for access in _exclusive_places(scope) if access in scope.valid]


def _exclusive_places(scope: Scope) -> tuple[Access, ...]:
    """Return the indirections of an output that no other program writes: where they are -1 nothing is stored."""
    schedule = scope.spec.schedule
    return schedule.output.indirections if schedule.strategy in ("store-once", "owner") else ()


def store_sum(scope: Scope, acc: Value, seed: Value | None = None) -> None:
    """Write the sums in `acc` to the output by the schedule's strategy; `seed` is given if it is loaded already."""
    spec, schedule = scope.spec, scope.spec.schedule
    axes = spec.kept(acc.axes)
    _finish_sum(scope, acc, axes)
    masks, places = output_masks(scope), _exclusive_places(scope)
    free = [access for access in scope.valid if set(access.names) <= set(schedule.free) and access not in places]
    entries = [scope.valid[access] for access in free]
    if schedule.strategy == "atomic":
        masks += entries
    elif entries:  # an element without an entry is written too, as zero, though other factors may be NaN there
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
    """Write the sum over the axes that the output lacks, times the statement's number."""
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
    """Write a plain store for groups that are alone in their row, and an atomic addition for the others."""
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
