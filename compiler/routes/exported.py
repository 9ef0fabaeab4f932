"""A statement in a program that is exported on a GPU: its emitted kernel, in a form that Inductor compiles.

The config is fixed at export, where lengths may be symbols. The kernel is then emitted for an example of them: primes
above the longest block, which nothing divides and no tile holds, so that its source relies on no length that varies.
A plan is text, which an exported program keeps; the source is emitted from it anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...formats.torch_state import HALF, is_deterministic, may_round_sums, rounds_float32
from ...lru_cache import LRUCache
from ..binding import Bound, Meta, bind, kernel_strides, row_major
from ..codegen import Flags
from ..language import UnsupportedError, parse
from ..planning import device_of, resized
from ..runtime import Launcher, load
from ..tuning import Candidate, Problem, candidates, recall

__all__ = ["plan_for", "run_exported"]

LONGEST_BLOCK = 1024
ADDRESSABLE = 2**31  # bytes, up to which 32 bits count
LAUNCHERS = 512

_launchers: LRUCache[Launcher] = LRUCache(LAUNCHERS)


class _Example(NamedTuple):
    """Lengths and strides that stand for those of all calls, with the settings of torch at export."""

    size: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    varying: tuple[str, ...]  # index names whose lengths are symbols
    is_wide: bool  # addresses may need 64 bits
    precision: str
    sums_in_float32: bool
    deterministic: bool

    @staticmethod
    def from_text(text: str) -> tuple[_Example, dict[str, Any]]:
        """Return an example and a kernel's choices, as `plan_for` has written them."""
        size, shapes, strides, varying, *rest, choices = json.loads(text)
        lengths = tuple(size), tuple(map(tuple, shapes)), tuple(map(tuple, strides))
        return _Example(*lengths, tuple(varying), *rest), choices


def plan_for(expr: str, names: str, size: Sequence[int], tensors: Sequence[Tensor]) -> str | None:
    """Return the text by which `run_exported` evaluates a statement; None if no kernel does, or nothing is computed."""
    operands = dict(zip(names.split(","), tensors))
    bound = bind(parse(expr), operands, size)
    if bound.is_empty:
        return None
    example = _example(bound, tensors)
    problem = _problem(expr, names, [(t.dtype, t.device) for t in tensors], example)
    way = next((way for way in _ranked(problem) if _can_be_built(problem.launcher(way), tensors)), None)
    return None if way is None else json.dumps([*example, way.choices])


def _can_be_built(launcher: Launcher, tensors: Sequence[Tensor]) -> bool:
    """Return whether Triton builds a kernel on this machine, outside of the tracer that runs."""
    with _disable_current_modes():
        try:
            launcher.build([torch.empty(0, dtype=tensor.dtype, device=tensor.device) for tensor in tensors], None)
        except UnsupportedError:
            return False
    return True


def _ranked(problem: Problem) -> Iterator[Candidate]:
    """Yield the candidates that are one launch, the one that was tuned first."""
    tuned = recall(problem)
    for candidate in (*(() if tuned is None else (tuned,)), *candidates(problem)):
        if candidate.config.copies == 1:
            yield candidate


def _example(bound: Bound, tensors: Sequence[Tensor]) -> _Example:
    """Return lengths that stand for those of a traced call."""
    lengths = _Lengths([*bound.size, *(n for t in tensors for n in (*t.shape, *t.stride()))])
    shapes = tuple([tuple(map(lengths.example, t.shape)) for t in tensors])
    indices = bound.statement.index_names
    strides = tuple(
        [
            row_major(shape) if name in indices else tuple(map(lengths.example, t.stride()))
            for name, shape, t in zip(bound.shapes, shapes, tensors)
        ]
    )
    varying = tuple(sorted(name for name, extent in bound.extents.items() if not isinstance(extent, int)))
    spans = [(t.shape, t.stride(), t.dtype) for t in tensors] + [(bound.size, row_major(bound.size), bound.dtype)]
    is_wide = any(
        dtype.itemsize * sum((lengths.most(n) - 1) * lengths.most(step) for n, step in zip(shape, steps)) >= ADDRESSABLE
        for shape, steps, dtype in spans
    )
    is_half = bound.dtype in HALF
    precision = "tf32" if rounds_float32() else "ieee"
    sums = is_half and not may_round_sums(bound.dtype)
    size = tuple(map(lengths.example, bound.size))
    return _Example(size, shapes, strides, varying, is_wide, precision, sums, is_deterministic())


class _Lengths:
    """A number for each symbol among some lengths."""

    def __init__(self, lengths: Sequence[int | torch.SymInt]) -> None:
        self.values: dict[Any, int] = {}
        symbolic = [length.node for length in lengths if isinstance(length, torch.SymInt)]
        hints = {node.expr: node.hint for node in symbolic if node.expr.is_Symbol}
        for node in symbolic:
            for symbol in sorted(node.expr.free_symbols, key=str):
                if symbol not in self.values:
                    least = max(hints.get(symbol) or 0, LONGEST_BLOCK, *self.values.values())
                    self.values[symbol] = next(n for n in count(least + 1) if _is_prime(n))

    def example(self, length: int | torch.SymInt) -> int:
        return int(length.node.expr.subs(self.values)) if isinstance(length, torch.SymInt) else length

    def most(self, length: int | torch.SymInt) -> float:
        """Return the upper bound of a length, infinite if there is none."""
        if isinstance(length, int):
            return length
        upper = length.node.shape_env.bound_sympy(length.node.expr).upper
        return int(upper) if upper.is_Integer else math.inf


def _is_prime(n: int) -> bool:
    return all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


def _problem(expr: str, names: str, kinds: Sequence[tuple[torch.dtype, torch.device]], example: _Example) -> Problem:
    """Return the tuning problem of an example."""
    order = tuple(names.split(",")) if names else ()
    metas = {name: Meta(shape, *kind) for name, shape, kind in zip(order, example.shapes, kinds)}
    bound = replace(bind(parse(expr), metas, example.size), dynamic=frozenset(example.varying))
    flags = Flags(
        precision=example.precision,
        sum_dtype=torch.float32 if example.sums_in_float32 else None,
        warp_width=device_of(bound.device).warp_width,
        is_wide=example.is_wide,
    )
    strides = kernel_strides(bound, dict(zip(order, example.strides)))
    return Problem(bound, strides, order, None, flags, example.deterministic)


def _launcher(expr: str, names: str, tensors: Sequence[Tensor], plan: str) -> Launcher:
    """Return the launcher of a plan, which no tensor of a tracer was used for."""
    kinds = tuple([(tensor.dtype, tensor.device) for tensor in tensors])
    key = expr, names, kinds, plan
    launcher = _launchers.get(key)
    if launcher is None:
        example, choices = _Example.from_text(plan)
        problem = _problem(expr, names, kinds, example)
        way = next((way for way in candidates(problem) if way.choices == choices), None)
        if way is None:
            raise UnsupportedError(
                f"the kernel of {expr!r} in this program was chosen by another version of insum_ops; export it again"
            )
        launcher = _launchers[key] = problem.launcher(way)
    return launcher


def run_exported(expr: str, names: str, size: Sequence[int], tensors: Sequence[Tensor], plan: str) -> Tensor:
    """Return the value of a statement by the kernel of a plan.

    All of it is seen by a tracer: what prepares the output, and the kernel. An index out of range fails an assertion on
    the device; the kernel takes it for -1, which is no entry, and so never reads there.
    """
    launcher = _launcher(expr, names, tensors, plan)
    operands = dict(zip(names.split(","), tensors))
    bound = bind(parse(expr), operands, size)
    pool = [*_masked(bound, operands).values()]
    output = _prepared(launcher, bound, pool)
    pool.append(output)
    kernel, extents = launcher.kernel, resized(launcher.schedule, bound, None)
    strides = {name: tensor.stride() for name, tensor in zip((*operands, ""), pool)}
    if bound.is_seeded:
        strides[" seed"] = strides[bound.statement.output.name]
    numbers = [
        strides[number.name][number.dim] if number.kind == "stride" else extents[number.name]
        for number in kernel.numbers
    ]
    programs = kernel.parts * math.prod([-(-extents[name] // block) for name, block in kernel.grid])
    function = torch.library.wrap_triton(load(kernel.source, kernel.name))
    launch = function[(programs,)]
    launch(*[pool[at] for at in launcher.order], *numbers, num_warps=kernel.num_warps, num_stages=kernel.num_stages)
    return output.to(bound.dtype) if launcher.is_wide else output


def _prepared(launcher: Launcher, bound: Bound, tensors: Sequence[Tensor]) -> Tensor:
    """Return the output with everything in it that the kernel does not write itself."""
    if bound.is_seeded and not launcher.is_covered:
        seed = tensors[launcher.seed].to(launcher.sum_dtype, copy=True)
        return seed.contiguous()
    make = torch.empty if launcher.is_covered else torch.zeros
    return make(bound.size, dtype=launcher.sum_dtype, device=bound.device)


def _masked(bound: Bound, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the operands, with -1 for each index that is out of range; such an index fails an assertion."""
    extents: dict[str, Any] = {}
    for pointed in bound.pointed:
        extents[pointed.index] = torch.sym_min(pointed.extent, extents.get(pointed.index, pointed.extent))
    masked = dict(operands)
    for name, extent in extents.items():
        is_inside = masked[name] < extent
        torch._assert_async(is_inside.all(), f"{name} holds a position outside of what it points into")
        masked[name] = torch.where(is_inside, masked[name], -1).contiguous()
    return masked
