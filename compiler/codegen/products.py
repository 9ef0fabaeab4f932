"""The tree of a tile's products as expressions: elementwise, `tl.dot`, sums, and the accumulator they are added to."""

from __future__ import annotations

import torch

from ..planning import Dot, Leaf, Node, Product, Sum
from .broadcast import Lazy, Value
from .loads import conjunction
from .scope import Scope
from .spec import TYPES, Axes, KernelSpec

__all__ = ["add_product", "evaluate", "widened", "zeros"]


def zeros(spec: KernelSpec, axes: Axes) -> str:
    """Return an accumulator of zeros over `axes`."""
    if not axes:
        return f"tl.full((), 0.0, {spec.accumulate})"
    shape = spec.tile.shape(axes)
    if isinstance(spec.schedule.tree, Dot):  # a dot adds to two dimensions, whatever the tiles around it look like
        shape = Lazy(spec.axes, spec.tile.blocks).shape(axes)
    return f"tl.zeros({shape}, {spec.accumulate})"


def add_product(scope: Scope, acc: Value, in_loop: bool) -> None:
    """Write the addition of the loaded tiles' product to the accumulator, or outside all loops its first value."""
    spec, tree = scope.spec, scope.spec.schedule.tree
    if isinstance(tree, Dot) and in_loop:
        scope.line(f"{acc.text} = {_dot(scope, tree, acc.axes, acc.text)}")
        return
    value = evaluate(scope, tree, acc.axes) if tree is not None else Value("1.0")
    text = widened(spec, value, acc.axes)
    entries = _has_entries(scope, acc.axes)
    if entries:
        text = f"tl.where({entries}, {text}, 0.0)"
    is_whole = value.axes == acc.axes and bool(acc.axes) and not entries and spec.flags.lazy
    if in_loop:
        scope.line(f"{acc.text} += {text}")
    elif is_whole or isinstance(tree, Dot):
        scope.line(f"{acc.text} = {text}")
    else:
        scope.line(f"{acc.text} = {zeros(spec, acc.axes)} + {text}")


def _has_entries(scope: Scope, axes: Axes) -> str:
    """Return where a product has all its entries, or "" if the masks of its factors see to that.

    They do not if a factor lacks an index of an index tensor that holds -1, or a summed index whose last block is not
    full: its value there is not masked, and may be infinite, which 0 times is NaN.
    """
    spec, schedule, factors = scope.spec, scope.spec.schedule, scope.spec.schedule.factors
    accesses = [access for factor in schedule.accesses for access in factor.indirections]
    padded = [access for access in dict.fromkeys(accesses) if access in scope.valid]
    if all(set(access.names) <= set(factor.names) for access in padded for factor in factors):
        padded = []
    summed = [name for name in schedule.names("segment", "step", "tile") if not schedule.is_kept(name)]
    lacking = [name for name in summed if not all(schedule.parts_of(name)[0] in factor.names for factor in factors)]
    bounds = [scope.bounds[name] for name in lacking if name in scope.bounds]
    masks = [*[scope.valid[access] for access in padded], *bounds]
    if schedule.uses_dot or not masks:
        return ""
    joint = spec.ordered({axis for mask in masks for axis in mask.axes})
    seen = Value(conjunction(spec, masks, joint), joint)
    for axis in joint:
        if axis not in axes:
            seen = spec.tile.reduce("tl.max", Value(f"({seen.text}).to(tl.int32)", seen.axes), axis)
            seen = Value(f"({seen.text} > 0)", seen.axes)
    return spec.tile.spread(Value(f"({seen.text})", seen.axes), axes)


def widened(spec: KernelSpec, value: Value, axes: Axes) -> str:
    """Return a value over `axes` in the type that sums are taken in."""
    return _converted(spec, spec.tile.spread(value, axes), value)


def _converted(spec: KernelSpec, text: str, value: Value) -> str:
    if value.dtype is None or TYPES.get(value.dtype) == spec.accumulate:
        return text
    return f"{text if text.isidentifier() else f'({text})'}.to({spec.accumulate})"


def evaluate(scope: Scope, node: Node, axes: Axes) -> Value:
    """Write the value of a node of the tree, with its axes in the order of `axes`."""
    spec = scope.spec
    if isinstance(node, Leaf):
        return scope.tiles[node.at]
    if isinstance(node, Dot):
        result_axes = tuple(axis for axis in axes if axis in node.axes)
        return scope.let(spec.tile.result(_dot(scope, node, result_axes), result_axes), result_axes, "product")
    if isinstance(node, Sum):
        if spec.block(node.over) == 1:
            return evaluate(scope, node.of, axes)
        value = evaluate(scope, node.of, spec.sum_axes(node, axes))
        total = spec.tile.reduce("tl.sum", Value(widened(spec, value, value.axes), value.axes), node.over)
        return scope.let(total.text, total.axes, "total")
    return _product(scope, node, axes)


def _product(scope: Scope, node: Product, axes: Axes) -> Value:
    spec = scope.spec
    left, right = evaluate(scope, node.left, axes), evaluate(scope, node.right, axes)
    joint = tuple(axis for axis in axes if axis in left.axes or axis in right.axes)
    if left.dtype == torch.bool or right.dtype == torch.bool:
        mask, value = (left, right) if left.dtype == torch.bool else (right, left)
        if value.dtype != torch.bool:
            text = f"tl.where({spec.tile.spread(mask, joint)}, {widened(spec, value, joint)}, 0.0)"
            return scope.let(text, joint, "scattered")
    return scope.let(f"{widened(spec, left, joint)} * {widened(spec, right, joint)}", joint, "scaled")


def _dot(scope: Scope, node: Dot, axes: Axes, acc: str = "") -> str:
    spec = scope.spec
    (left, left_axes), (right, right_axes) = spec.dot_sides(node, axes)
    a, b = evaluate(scope, left, left_axes), evaluate(scope, right, right_axes)
    if not spec.is_deep(node):
        return _short_dot(spec, node, axes, a, b, acc)
    texts = [spec.tile.operand(a, left_axes), spec.tile.operand(b, right_axes)]
    is_double = spec.accumulate == "tl.float64"  # as it is with a seed of float64, whatever the factors are
    is_exact = a.dtype == b.dtype and a.dtype in TYPES and (a.dtype == torch.float64 or not is_double)
    dtype = a.dtype if is_exact else None
    if dtype is None:
        texts = [_converted(spec, text, value) for text, value in zip(texts, (a, b))]
    extra = f", {acc}" if acc else ""
    if is_double:
        return f"tl.dot({', '.join(texts)}{extra}, out_dtype=tl.float64)"
    if dtype in (None, torch.float32):
        # a product of factors that were half precision is exact to within the rounding of tf32
        is_half = spec.bound.dtype in (torch.float16, torch.bfloat16)
        extra += f', input_precision="{"tf32" if is_half else spec.flags.precision}"'
    return f"tl.dot({', '.join(texts)}{extra})"


def _short_dot(spec: KernelSpec, node: Dot, axes: Axes, a: Value, b: Value, acc: str) -> str:
    """Return a dot as a sum of elementwise products, for a depth that `tl.dot` does not take."""
    joint = spec.short_dot_axes(node, *axes)
    text = f"{widened(spec, a, joint)} * {widened(spec, b, joint)}"
    total = spec.tile.reduce("tl.sum", Value(text, joint), node.over).text
    return f"{acc} + {total}" if acc else total
