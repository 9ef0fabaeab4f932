"""A scatter `Y[G[p],c] += ...` whose programs take neighbours of p in turn, and add up those of one position first.

Where G is sorted, most neighbours have one position: their sum stays in registers, and is added to memory once. It is
right for any G, since a sum is added to memory as soon as the position changes.
"""

from __future__ import annotations

from .broadcast import Value
from .loads import conjunction, load_available, pointer, position_type
from .products import add_product, zeros
from .scope import Scope
from .spec import KernelSpec
from .stores import add_to_output, finish_sum

__all__ = ["write_runs"]

LOADED = 32  # elements of each factor that a thread has on their way, as far as registers allow; not more than
MOST, LEAST = 16, 4  # neighbours at once


def write_runs(scope: Scope) -> None:
    """Write the loops over a program's values of p: several at once, whose loads come first, and the last ones."""
    spec, name = scope.spec, scope.spec.schedule.run
    (place,) = spec.schedule.output.indirections
    axes, count = spec.result_axes, _at_once(spec)
    held, acc = Value("held"), Value("acc", axes)
    scope.line(f"acc = {zeros(spec, axes)}")
    scope.line(f"held = tl.full((), -1, {position_type(spec, place)})")
    scope.line(f"whole = first_row + (past_row - first_row) // {count} * {count}")
    scope.line(f"for start in range(first_row, whole, {count}):")
    body = scope.child()
    entries = [_entry(body, name, f"start + {at}") for at in range(count)]
    for entry, value in entries:
        _add(entry, held, acc, value)
    scope.line("for last in range(whole, past_row):")
    entry, value = _entry(scope.child(), name, "last")
    _add(entry, held, acc, value)
    scope.line("if held >= 0:")
    _flush(scope.child(), held, acc)


def _at_once(spec: KernelSpec) -> int:
    """Return how many neighbours are loaded at once."""
    width = spec.block(spec.result_axes[-1]) if spec.result_axes else 1
    return min(MOST, max(LEAST, LOADED * 32 * spec.config.num_warps // width), spec.config.run)


def _entry(scope: Scope, name: str, place: str) -> tuple[Scope, Value]:
    """Write the loads and the product of one value of p; return the scope that knows its position, and the product."""
    entry = scope.child(indent=0)
    entry.indices[name] = entry.let(place, (), entry.index(name))
    load_available(entry)
    value = Value(entry.symbols.fresh("value"), entry.spec.result_axes)
    add_product(entry, value, False)
    finish_sum(entry, value)
    return entry, value


def _add(scope: Scope, held: Value, acc: Value, value: Value) -> None:
    """Write the addition of a product to the sum that is held, or to memory what is held of another position."""
    at = scope.positions[scope.spec.schedule.output.indirections[0]]
    scope.line(f"if ({at.text} != held) & (held >= 0):")
    _flush(scope.child(), held, acc)
    scope.line(f"acc = tl.where({at.text} == held, acc + {value.text}, {value.text})")
    scope.line(f"held = {at.text}")


def _flush(scope: Scope, held: Value, acc: Value) -> None:
    """Write the addition of what is held to its place in memory."""
    schedule = scope.spec.schedule
    scope.positions[schedule.output.indirections[0]] = held
    masks = [scope.bounds[name] for name in schedule.free if name in scope.bounds]
    add_to_output(
        scope, acc, pointer(scope, schedule.output, "output", acc.axes), conjunction(scope.spec, masks, acc.axes)
    )
