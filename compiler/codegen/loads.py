"""The loads of a kernel: positions behind indirections and the tiles of factors, each under the masks that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..binding import power_of_two
from ..language import Access, Const, Index, Var, walk
from ..planning import Factor, OneHot
from .broadcast import Value
from .scope import Narrow, Scope
from .spec import Axes, KernelSpec

__all__ = [
    "axes_of",
    "conjunction",
    "define_narrow",
    "hiding_masks",
    "load_ahead",
    "load_available",
    "load_factor",
    "load_next",
    "load_row",
    "moving_axes",
    "offset_of_rows",
    "pointer",
    "position_type",
    "take_loaded",
]


def load_available(scope: Scope) -> None:
    """Write the loads of all positions and tiles whose index names are defined by now, as far outside as possible."""
    _load_positions(scope)
    schedule = scope.spec.schedule
    for at, factor in enumerate(schedule.factors):
        hidden_by = [name for access in _hiding(scope.spec, factor) for name in access.names]
        if at not in scope.tiles and scope.knows(factor.names) and scope.knows(hidden_by):
            scope.tiles[at] = load_factor(scope, at, factor)


def _load_positions(scope: Scope) -> None:
    """Write the loads of all positions whose index names are defined by now; inner ones first, by which others are."""
    schedule, owner = scope.spec.schedule, scope.spec.schedule.owner
    rows = [Access(owner.index, (Var(owner.segment),))] if owner is not None and owner.is_packed else []
    for root in (*rows, *_indirections((schedule.output, *schedule.factors))):
        for access in walk(root):
            if access not in scope.positions and scope.knows(access.names):
                _load_position(scope, access)


def load_ahead(scope: Scope) -> None:
    """Write the loads of the first turn's positions, in variables that get those of the next turn, see `load_next`."""
    outer = {*scope.positions}
    _load_positions(scope)
    for loaded in (scope.positions, scope.valid):
        loaded |= {key: scope.let(at.text, at.axes, "ahead") for key, at in loaded.items() if key not in outer}


def take_loaded(scope: Scope, ahead: Scope) -> None:
    """Write the positions that were loaded in the turn before, by names that stay when the next ones are there."""
    for own, loaded in ((scope.positions, ahead.positions), (scope.valid, ahead.valid)):
        for access, value in loaded.items():
            if own.get(access) != value:
                own[access] = scope.let(value.text, value.axes, "now")


def load_next(scope: Scope, ahead: Scope) -> None:
    """Write the loads of the positions of the next turn, for which index names are defined in `scope`."""
    _load_positions(scope)
    for own, loaded in ((scope.positions, ahead.positions), (scope.valid, ahead.valid)):
        for access, value in loaded.items():
            if own[access] != value:  # some are the same for all entries
                scope.line(f"{value.text} = {own[access].text}")


def load_factor(scope: Scope, at: int, factor: Factor) -> Value:
    """Write the load of factor number `at`; 0 where it, or a factor that it is multiplied with, has no entry."""
    spec = scope.spec
    axes = spec.layouts.get(at) or axes_of(scope, factor.names)
    if isinstance(factor, OneHot):
        position, index = scope.positions[factor.position], scope.indices[factor.name]
        text = f"{spec.tile.spread(position, axes)} == {spec.tile.spread(index, axes)}"
        return scope.let(text, axes, "one_hot", torch.bool)
    stem = f"v_{scope.identifier(factor.name)}"
    narrow = next((part for part in scope.narrow if part.is_all_of(factor)), None)
    if narrow is not None:
        value = _load_narrow(scope, factor, narrow, stem)
    else:
        value = _load(scope, factor, axes, "0.0", stem, hiding_masks(scope, factor))
    dtype = spec.bound.dtypes[factor.name]
    if spec.flags.interpreted and dtype == torch.bfloat16:
        return Value(f"{value.text}.to(tl.float32)", value.axes, torch.float32)
    return Value(value.text, value.axes, dtype)


def define_narrow(scope: Scope) -> None:
    """Write the values of the first name of a flattened axis, if a factor has it and not the second: see `Narrow`.

    Threads of one warp hand numbers to each other; between warps they would go through shared memory.
    """
    spec = scope.spec
    if spec.config.num_warps > 1 or len(spec.axes) != 1 or spec.schedule.tables:
        return
    for flat in spec.schedule.flats:
        outer, *inner = flat.parts
        factors = [factor for factor in spec.schedule.factors if outer in factor.names]
        if len(inner) != 1 or spec.is_varying(outer) or all(inner[0] in factor.names for factor in factors):
            continue
        length, axes = spec.schedule.extents[outer], (flat.name,)
        values = scope.let(f"tl.arange(0, {power_of_two(length)})", axes, "narrow")
        bound = scope.let(f"{values.text} < {length}", axes, "in_narrow")
        places = scope.let(f"tl.minimum({scope.indices[outer].text}, {length - 1})", axes, "places")
        scope.narrow.append(Narrow(outer, inner[0], values, bound, places))


def _load_narrow(scope: Scope, factor: Access, narrow: Narrow, stem: str) -> Value:
    """Write the load of a factor along the first name of a flattened axis, and what each element of the axis gets."""
    own = scope.child(indent=0)
    own.indices[narrow.outer], own.bounds[narrow.outer] = narrow.values, narrow.bound
    value = _load(own, factor, narrow.values.axes, "0.0", stem, hiding_masks(scope, factor))
    return scope.let(f"tl.gather({value.text}, {narrow.places.text}, 0)", narrow.values.axes, stem)


def axes_of(scope: Scope, names: Sequence[str]) -> Axes:
    """Return the tile axes that values of these index names vary over."""
    return scope.spec.ordered({axis for name in names for axis in scope.indices[name].axes})


def _load_position(scope: Scope, access: Access) -> None:
    """Write the load of an index tensor, and where it holds a position if it may hold -1."""
    identifier = scope.identifier(access.name)
    dtype, wanted = scope.spec.bound.dtypes[access.name], position_type(scope.spec, access)
    cast = f".to({wanted})" if f"tl.{str(dtype).removeprefix('torch.')}" != wanted else ""
    position = _load(scope, access, axes_of(scope, access.names), "-1", f"at_{identifier}", [], cast)
    scope.positions[access] = position
    if _may_be_negative(scope.spec, access):
        scope.valid[access] = scope.let_once(f"{position.text} >= 0", position.axes, f"has_{identifier}")


def load_row(scope: Scope, access: Access, entry: Value, has_entry: Value) -> Value:
    """Write the load of the row that an entry belongs to, by the index tensor that says so; return it."""
    (segment,) = access.names
    own = scope.child(indent=0)
    own.indices[segment], own.bounds[segment] = entry, has_entry
    _load_position(own, access)
    return own.positions[access]


def position_type(spec: KernelSpec, access: Access) -> str:
    """Return the type of positions in registers: 32 bits if they are enough, for half as many instructions an address.

    Those that are longer in memory are read by their lower half alone. Lengths that stand for any others tell nothing.
    """
    bound = spec.bound
    extents = [2**31 if spec.flags.is_wide else p.extent for p in bound.pointed if p.index == access.name]
    is_short = bound.dtypes[access.name] == torch.int32 or max(extents, default=2**31) < 2**31
    return "tl.int32" if is_short else "tl.int64"


def _may_be_negative(spec: KernelSpec, access: Access) -> bool:
    """Whether an index tensor, or one that it is read through, may hold -1."""
    padded = spec.flags.padded
    return (
        padded is None or access.name in padded or any(_may_be_negative(spec, inner) for inner in access.indirections)
    )


def _indirections(factors: Sequence[Factor]) -> list[Access]:
    return [
        access
        for factor in factors
        for access in (factor.indirections if isinstance(factor, Access) else (factor.position,))
    ]


def _hiding(spec: KernelSpec, factor: Factor) -> list[Access]:
    """Return the indirections of other factors whose -1 must mask this factor too, since 0 * NaN is NaN."""
    return [access for access in _indirections(spec.schedule.factors) if set(access.names) <= set(factor.names)]


def hiding_masks(scope: Scope, factor: Factor) -> tuple[Value, ...]:
    """Return where the factors that this one is multiplied with have entries, as far as they may lack them."""
    return tuple(scope.valid[access] for access in _hiding(scope.spec, factor) if access in scope.valid)


def _load(
    scope: Scope, access: Access, axes: Axes, other: str, stem: str, hiding: Sequence[Value], cast: str = ""
) -> Value:
    address = pointer(scope, access, "tensor", axes)
    masks = [scope.bounds[name] for name in access.names if name in scope.bounds]
    masks += [scope.valid[index] for index in access.indirections if index in scope.valid] + list(hiding)
    mask = conjunction(scope.spec, masks, axes)
    guard = f", mask={mask}, other={other}" if mask else ""
    return scope.let_once(f"tl.load({address}{guard}){cast}", axes, stem)


def conjunction(spec: KernelSpec, masks: Sequence[Value], axes: Axes) -> str:
    """Return the conjunction of masks; those over the same axes are joined before they are spread over the tile."""
    groups: dict[Axes, dict[str, None]] = {}
    for mask in masks:
        groups.setdefault(mask.axes, {})[mask.text] = None
    joined = []
    for mask_axes, texts in groups.items():
        text = " & ".join(texts)
        joined.append(Value(text if len(texts) == 1 else f"({text})", mask_axes))
    return " & ".join(spec.tile.spread(mask, axes) for mask in joined)


def pointer(scope: Scope, access: Access, kind: str, axes: Axes) -> str:
    """Return the addresses of a tile over `axes`, of a tensor that is read or, by `kind`, of the output or its seed."""
    spec, bound = scope.spec, scope.spec.bound
    is_output = kind in ("output", "winners", "seed")
    base = scope.parameter(kind, spec.output if is_output else access.name)
    shape = bound.size if is_output else bound.shapes[access.name]
    key = {"output": spec.output, "winners": "", "seed": " seed"}.get(kind, access.name)
    strides = spec.strides[key]
    dtype = bound.dtype if is_output else bound.dtypes[access.name]
    itemsize = bound.winner_dtype.itemsize if kind == "winners" else dtype.itemsize
    is_wide = spec.flags.is_wide or _span(shape, strides) * itemsize >= 2**31
    addends = list(_addends(scope, access.indices, shape, strides))
    # a result may be written to a place of other strides than it would be allocated with, see `Launcher.placed`
    # unless it is one of several, which their kernel's launcher allocates
    is_known = not is_output or (kind == "output" and (spec.schedule.stores_vectors or bool(spec.output)))
    is_vector = is_known and any(value.axes and strides[dim] == 1 for dim, value in addends)
    terms = []
    for dim, value in addends:
        if not {*value.axes} <= {*axes}:  # the address does not depend on those, see `moving_axes`
            continue
        if strides[dim] == 0 or shape[dim] == 1 or value.text == "0":
            if value.axes:  # the address does not change, but its shape must be the tile's
                terms.append(Term(value, " * 0"))
            continue
        # a sum in two steps has a distance in the second that the compiler knows
        parts = scope.sums.get(str(access.indices[dim]), ()) if strides[dim] == 1 else ()
        step = "" if strides[dim] == 1 else f" * {scope.stride(key, dim, strides[dim], is_vector)}"
        terms += [Term(part, step, is_wide) for part in parts or [value]]
    return " + ".join([base, *_offsets(spec, terms, axes)])


class Term(NamedTuple):
    """A part of an address: an index, by what it is multiplied, and whether the product needs 64 bits."""

    value: Value
    step: str
    is_wide: bool = False

    def over(self, spec: KernelSpec, axes: Axes) -> str:
        text = spec.tile.spread(self.value, axes)
        return f"tl.cast({text}, tl.int64){self.step}" if self.is_wide else f"{text}{self.step}"


def _offsets(spec: KernelSpec, terms: Sequence[Term], axes: Axes) -> Iterator[str]:
    """Yield what is added to an address, over the axes of a tile.

    What moves data takes as long as its instructions, of which each addition to an address is three for an element. So
    terms over the same axes are added up before, in 32 bits; and all of them, unless those of the last axis lie along
    memory: they are at constant distances from each other, which is part of a load or a store and no addition.
    """
    is_along = any(not term.step and term.value.axes == axes[-1:] for term in terms)
    groups: dict[object, list[Term]] = {}
    for at, term in enumerate(terms):
        key = at if not (spec.schedule.form and term.value.axes) else term.value.axes if is_along else axes
        groups.setdefault(key, []).append(term)
    for group in groups.values():
        own = tuple(axis for axis in axes if any(axis in term.value.axes for term in group))
        if len(group) == 1:
            yield group[0].over(spec, axes)
        else:
            yield spec.tile.spread(Value(f"({' + '.join(term.over(spec, own) for term in group)})", own), axes)


def offset_of_rows(scope: Scope, name: str) -> Value:
    """Return where the rows of the output begin that lie along `name`, in elements; in 32 bits, perhaps its rest."""
    spec, output = scope.spec, scope.spec.schedule.output
    strides = spec.strides[spec.output]
    addends = [
        (dim, value)
        for dim, value in _addends(scope, output.indices, spec.bound.size, strides)
        if str(output.indices[dim]) != name and spec.bound.size[dim] > 1
    ]
    axes = spec.ordered({axis for _, value in addends for axis in value.axes})
    terms = [
        f"{spec.tile.spread(value, axes)} * {scope.stride(spec.output, dim, strides[dim], False)}"
        for dim, value in addends
    ]
    return Value(" + ".join(terms) or "0", axes)


def _addends(
    scope: Scope, indices: Sequence[Index], shape: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[int, Value]]:
    """Yield the values that an address is the sum of, each with the dimension by whose stride it is multiplied.

    Dimensions over all names of a flattened axis, which lie in memory as they do in the axis, are one value.
    """
    dim = 0
    while dim < len(indices):
        end, value = dim + 1, _index_value(scope, indices[dim])
        for flat in scope.spec.schedule.flats:
            past = dim + len(flat.parts)
            is_whole = tuple(map(str, indices[dim:past])) == flat.parts and min(shape[dim:past]) > 1
            if is_whole and all(strides[at - 1] == strides[at] * shape[at] for at in range(dim + 1, past)):
                end, value = past, scope.indices[flat.name]
        yield end - 1, value
        dim = end


def moving_axes(scope: Scope, indices: Sequence[Index], shape: Sequence[int], strides: Sequence[int]) -> set[str]:
    """Return the axes along which an address changes: not those of a dimension that is expanded or has one element."""
    moved = [index for index, size, stride in zip(indices, shape, strides) if size > 1 and stride != 0]
    return {axis for index in moved for axis in _index_value(scope, index).axes}


def _index_value(scope: Scope, index: Index) -> Value:
    if isinstance(index, Var):
        return scope.indices[index.name]
    return Value(str(index.value)) if isinstance(index, Const) else scope.positions[index]


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements apart the first and the last element lie."""
    return sum((size - 1) * abs(stride) for size, stride in zip(shape, strides) if size > 1)
