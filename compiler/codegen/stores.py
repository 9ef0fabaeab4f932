"""The stores of a tile's sums: plain, atomic or either of them, and the seed that sums start from."""

from __future__ import annotations

from collections.abc import Sequence

from ..binding import power_of_two
from ..language import Access, Var
from .broadcast import Value
from .loads import conjunction, moving_axes, pointer
from .products import zeros
from .scope import Scope
from .spec import TYPES, Axes

__all__ = [
    "add_to_output",
    "begin_row",
    "early_seed",
    "entry_masks",
    "finish_sum",
    "load_shared",
    "output_masks",
    "store_interleaved",
    "store_sum",
]


def early_seed(scope: Scope, axes: Axes) -> Value | None:
    """Write the load of a seed that lacks an axis of the tile, as a bias does, before the loops; it is small.

    None if there is no seed, or if it has all axes and is loaded where it is added.
    """
    spec = scope.spec
    if not spec.is_seeded_here:
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


def load_shared(scope: Scope) -> Value | None:
    """Write the load of where the program's groups, or pieces, share their row with others; None if nothing tells.

    It comes before the loops: after them a program would wait for it, as long as for a turn.
    """
    spec, place = scope.spec, scope.piece
    if spec.schedule.strategy != "store-or-atomic":
        return None
    name = spec.schedule.owner.row if spec.schedule.owner is not None else ""
    if place is None:
        name = str(spec.schedule.output.indirections[0].indices[0])
        place = scope.indices[name]
    guard = f", mask={scope.bounds[name].text}, other=0" if name in scope.bounds else ""
    flag = scope.parameter("is_shared", spec.schedule.shared_index)
    return scope.let(f"tl.load({flag} + {place.text}{guard}) != 0", place.axes, "is_shared")


def store_sum(scope: Scope, acc: Value, seed: Value | None = None, shared: Value | None = None) -> None:
    """Write the sums in `acc` to the output by the strategy; `seed` and `shared` are given if loaded already."""
    spec, schedule = scope.spec, scope.spec.schedule
    axes = spec.kept(acc.axes)
    finish_sum(scope, acc)
    masks = output_masks(scope)
    if schedule.strategy == "atomic":
        masks += entry_masks(scope)
    mask = conjunction(spec, masks, axes)
    guard = f", mask={mask}" if mask else ""
    if spec.is_seeded_here:
        scope.line(f"{acc.text} += {spec.tile.spread(seed or _load_seed(scope, axes), axes)}")
    address = pointer(scope, schedule.output, "output", axes)
    value = _rounded(scope, acc.text)
    if schedule.strategy == "store-or-atomic":
        _store_or_add(scope, address, value, masks, axes, shared or load_shared(scope))
    elif schedule.is_atomic:
        add_to_output(scope, acc, address, mask)
    else:
        leaves = ', eviction_policy="evict_first"' if spec.config.evicts else ""
        scope.line(f"tl.store({address}, {value}{guard}{leaves})")


def begin_row(scope: Scope, acc: Value) -> None:
    """Write the store of the sums that are held where the entry in scope is of another row, and the start of its sums.

    Of a row that several pieces share a piece has nothing else.
    """
    spec, owner = scope.spec, scope.spec.owner
    held, row = scope.indices[owner.row], scope.positions[Access(owner.index, (Var(owner.segment),))]
    if owner.segment in scope.bounds:  # what comes after the last entry is of no other row
        inside = scope.bounds[owner.segment].text
        row = scope.let(f"tl.where({inside}, {row.text}, {held.text})", row.axes, "row")
    is_next = scope.let(f"{row.text} != {held.text}", row.axes, "is_next")
    body = scope.child(indent=0) if row.axes else scope.child()
    if not row.axes:
        scope.line(f"if {is_next.text}:")
    done = body.let(acc.text, acc.axes, "done")
    finish_sum(body, done)
    axes = spec.kept(acc.axes)
    mask = conjunction(spec, [*output_masks(body), *([is_next] if row.axes else [])], axes)
    address = pointer(body, spec.schedule.output, "output", axes)
    body.line(f"tl.store({address}, {_rounded(body, done.text)}{f', mask={mask}' if mask else ''})")
    nothing = zeros(spec, acc.axes)
    kept = f"tl.where({spec.tile.spread(is_next, acc.axes)}, {nothing}, {acc.text})" if row.axes else nothing
    body.line(f"{acc.text} = {kept}")
    body.line(f"{held.text} = {row.text}")


def add_to_output(scope: Scope, acc: Value, address: str, mask: str) -> None:
    """Write the atomic addition of sums to the output."""
    guard = f", mask={mask}" if mask else ""
    scope.line(f'tl.atomic_add({address}, {_rounded(scope, acc.text)}{guard}, sem="relaxed")')


def store_interleaved(scope: Scope, rows: Sequence[str], start: int, step: int) -> None:
    """Write rows of sums whose elements lie between each other: element x of row r at `start + r + x * step`.

    One tile with the rows side by side is written to whole sectors, where each row alone would touch all of them.
    """
    spec, (axis,) = scope.spec, scope.spec.kept(scope.spec.axes)
    output, width = scope.spec.schedule.output, power_of_two(len(rows))
    (place,) = output.indirections
    scope.positions[place] = Value(str(start))
    along, beside = scope.indices[axis].text, scope.let(f"tl.arange(0, {width})", (), "beside").text
    address = f"{pointer(scope, output, 'output', ())} + ({along}[:, None] * {step} + {beside}[None, :])"
    masks = [f"({beside} < {len(rows)})[None, :]"] if width > len(rows) else []
    masks += [mask.text if not mask.axes else f"{mask.text}[:, None]" for mask in output_masks(scope)]
    guard = f", mask={' & '.join(masks)}" if masks else ""
    joined = _joined([*rows, *[rows[-1]] * (width - len(rows))])
    tile = scope.let(f"tl.reshape({joined}, ({spec.block(axis)}, {width}))", (), "beside")
    scope.line(f"tl.store({address}, {_rounded(scope, tile.text)}{guard})")


def _joined(rows: Sequence[str]) -> str:
    """Return rows side by side along new last dimensions of two, which together count them in their order."""
    return rows[0] if len(rows) == 1 else f"tl.join({_joined(rows[::2])}, {_joined(rows[1::2])})"


def _rounded(scope: Scope, text: str) -> str:
    """Return sums in the type in which they are written."""
    dtype = TYPES[scope.spec.schedule.sum_dtype(scope.spec.flags.sum_dtype)]
    return text if dtype == scope.spec.accumulate else f"{text}.to({dtype})"


def entry_masks(scope: Scope) -> list[Value]:
    """Return where the program's results have entries, by the indirections that stand for no place in the output."""
    schedule, places = scope.spec.schedule, _exclusive_places(scope)
    free = [access for access in scope.valid if set(access.names) <= set(schedule.free) and access not in places]
    return [scope.valid[access] for access in free]


def finish_sum(scope: Scope, acc: Value) -> None:
    """Write the sum over the axes that the output lacks, times the statement's number, 0 where there is no entry."""
    spec, value, kept = scope.spec, acc, scope.spec.kept(acc.axes)
    for axis in acc.axes:
        if axis not in kept:
            total = spec.tile.reduce("tl.sum", value, axis)
            scope.line(f"{acc.text} = {total.text}")
            value = Value(acc.text, total.axes)
    scale = spec.bound.statement.scale
    if scale != 1:
        scope.line(f"{acc.text} *= tl.full((), {float(scale)!r}, {spec.accumulate})")
    entries = entry_masks(scope)
    if entries and spec.schedule.strategy != "atomic":
        # an element without an entry is written too, as zero, though other factors may be NaN there
        scope.line(f"{acc.text} = tl.where({conjunction(spec, entries, kept)}, {acc.text}, 0.0)")


def _store_or_add(
    scope: Scope, address: str, value: str, masks: Sequence[Value], axes: Axes, shared: Value | None
) -> None:
    """Write a plain store for groups that are alone in their row, and an atomic addition for the others."""
    assert shared is not None
    spec = scope.spec
    alone = scope.let(f"{shared.text} == 0", shared.axes, "is_alone")
    scope.line(f"tl.store({address}, {value}, mask={conjunction(spec, [*masks, alone], axes)})")
    scope.line(f"if tl.max({shared.text}.to(tl.int32)) > 0:" if shared.axes else f"if {shared.text}:")
    mask = conjunction(spec, [*masks, shared], axes)
    scope.child().line(f'tl.atomic_add({address}, {value}, mask={mask}, sem="relaxed")')
