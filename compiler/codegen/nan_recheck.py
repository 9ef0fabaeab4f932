"""NaN recheck: sums of merged rows that are NaN are computed again row by row.

Rows that share a tile multiply absent entries by 0. If an operand is NaN or infinite the sum of such a row is wrong: a
kernel detects a sum that is NaN, and recomputes the rows of that tile a few at a time, under masks.
"""

from __future__ import annotations

from dataclasses import replace

from ..planning import leaves, multiply
from .broadcast import Value
from .grid import bound_index, split_merged
from .loads import load_available
from .loops import open_loops
from .products import add_product, zeros
from .scope import Scope
from .spec import KernelSpec
from .stores import store_sum

__all__ = ["is_needed", "recheck_tile", "sum_rows_again", "with_few_rows", "without_rows"]

FEW_ROWS = 4  # that are summed again at a time: they take registers beside the tile's own


def is_needed(scope: Scope) -> bool:
    """Whether rows of a tile differ in their summands and a factor of the dot is not masked for it.

    The scope is that in which products are summed.
    """
    schedule = scope.spec.schedule
    if not schedule.holds_set or not schedule.uses_dot:
        return False
    accesses = [access for factor in schedule.accesses for access in factor.indirections]
    summed = [access for access in accesses if access in scope.valid and not {*access.names} <= {*schedule.free}]
    return any(not {*access.names} <= {*factor.names} for access in summed for factor in schedule.factors)


def recheck_tile(scope: Scope, acc: Value) -> None:
    """Write the recomputation of a tile's rows, under the condition that one of its stored sums is NaN."""
    total = _sum_of_sums(scope, acc)
    scope.line(f"if {total} != {total}:")
    wrong = scope.child()
    wrong.line("tl.debug_barrier()")  # what other threads have stored comes first
    sum_rows_again(wrong)


def _sum_of_sums(scope: Scope, acc: Value) -> str:
    """Return a sum that is NaN if one of the sums is, taken along columns first, which are summed side by side."""
    if not scope.spec.flags.lazy:
        return scope.let(f"tl.sum({acc.text})", (), "total").text
    value = acc
    for axis in reversed(acc.axes[1:]):
        value = scope.spec.tile.reduce("tl.sum", value, axis)
    # the last without its axis: reducing a dot's sums to a vector and that to a number ends Triton's compiler in a
    # failed assertion for sm_100 (OptimizeTMemLayouts in 3.6 and 3.7), unless a reshape stands between
    return scope.let(f"tl.sum({value.text})", (), "total").text


def sum_rows_again(scope: Scope) -> None:
    """Write the sums of a tile's rows again and store them: a few rows and one summed index at a time, masked."""
    spec, merged = scope.spec, scope.spec.merged
    size = spec.block(merged.name)
    single = _without_dot(with_few_rows(spec, min(FEW_ROWS, size)))
    outside, few = without_rows(scope, single, "single"), single.block(merged.name)
    first = outside.let(f"tl.min({scope.indices[merged.name].text})", (), "first")
    outside.line(f"for part in range({size // few}):")
    rows = outside.child()
    rows.define(merged.name, f"{first.text} + part * {few} + {single.tile.arange(merged.name)}", (merged.name,))
    bound_index(rows, merged.name, size)  # few rows may divide an extent past which the tile goes on
    split_merged(rows)
    load_available(rows)
    exact = Value("exact", spec.result_axes)
    rows.line(f"exact = {zeros(single, exact.axes)}")
    add_product(open_loops(rows), exact, in_loop=True)
    store_sum(rows, exact)


def with_few_rows(spec: KernelSpec, count: int) -> KernelSpec:
    """Return a spec whose tiles hold `count` of the merged rows."""
    blocks = {**dict(spec.config.blocks), spec.merged.name: count}
    return replace(spec, config=replace(spec.config, blocks=tuple(blocks.items())))


def without_rows(scope: Scope, spec: KernelSpec, prefix: str) -> Scope:
    """Return a scope for tiles of other rows: names of rows and summed names are not defined there."""
    merged = spec.merged
    return scope.without((merged.name, merged.outer, merged.inner, *scope.spec.schedule.names("step")), spec, prefix)


def _without_dot(spec: KernelSpec) -> KernelSpec:
    """Return a spec with a loop over each summed index and elementwise products in place of a dot."""
    whole = spec.schedule
    steps = whole.names("step")
    roles = {name: "loop" if name in steps else role for name, role in whole.roles.items()}
    axes = [leaf.axes - {*steps} for leaf in sorted(leaves(whole.tree), key=lambda leaf: leaf.at)]
    return replace(spec, schedule=replace(whole, roles=roles, tree=multiply(axes)), layouts={})
