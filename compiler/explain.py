"""`explain` shows a statement at every stage of the compiler and runs nothing; `tune` times each way to run it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent

import torch
from torch import Tensor, fx

from ..formats.facts import Fact
from .binding import Bound, Kind, Recipe, SparseFormat, best_group_dim, bind, is_sparse, recipe, sparse_factor
from .codegen import Config
from .language import Statement, UnsupportedError, parse
from .pipeline import runner_of
from .planning import Schedule, Split, strategies
from .reference import lower
from .routes import (
    ALIGNED,
    CLEAR,
    GROUPED,
    KERNEL,
    LEAST_GAIN,
    STATEMENTS,
    TORCH,
    PreparedStatement,
    chosen_route,
    groupings_of,
    prepare,
    problem_for,
    split_of,
)
from .row_order import with_row_order
from .runtime import EPOCH, check_ranges
from .tuning import Candidate, Timing, candidates, recall, refusals
from .tuning import tune as time_all

__all__ = ["Explanation", "Tuning", "explanation_of", "tuning_of"]

Operands = Mapping[str, "Tensor | SparseFormat"]
ROUTES = {
    STATEMENTS: "it is evaluated as several statements in turn; explain each for its kernel",
    TORCH: "torch's own operations were timed to be faster",
    GROUPED: "its products are taken in tiles in which an index tensor has one value, by a kernel over tables of it",
    ALIGNED: "its operands are copied into rows that begin at multiples of 16 bytes, and the product of those is taken",
}


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Every stage of one statement; prints them all."""

    statement: Statement
    rewritten: Statement | None  # without the sparse format; None: there is none
    extents: Mapping[str, int]
    graph: fx.GraphModule
    schedule: Schedule | None = None  # None, like what follows: there is no kernel, `why_no_kernel` says why
    config: Config | None = None
    is_tuned: bool = False  # the config was measured to be the best
    source: str | None = None
    why_no_kernel: str = ""
    refused: tuple[tuple[Candidate, str], ...] = ()  # ways for which no kernel could be built, and why
    route: str = KERNEL  # or several statements, or torch operations
    split: Split | None = None  # the statements that it may be evaluated by in turn

    @property
    def sections(self) -> dict[str, str]:
        """What is printed of each stage, by its title, in the order of the stages."""
        sections = {"statement": str(self.statement)}
        if self.rewritten is not None:
            sections["rewritten"] = str(self.rewritten)
        sections["extents"] = _table(self.extents)
        sections["FX program"] = _program(self.graph)
        if self.split is not None:
            sections[STATEMENTS] = str(self.split)
        if self.schedule is None or self.source is None:
            sections["kernel"] = f"none: {self.why_no_kernel}"
        else:
            sections["schedule"] = str(self.schedule)
            sections["tuned config" if self.is_tuned else "default config"] = str(self.config)
            sections["Triton source"] = self.source.strip()
        if self.refused:
            sections["could not be built"] = "\n".join(f"{way}  {reason}" for way, reason in self.refused)
        return sections

    def __str__(self) -> str:
        return "\n\n".join(f"{title}\n{indent(text, '    ')}" for title, text in self.sections.items())

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, eq=False, repr=False)
class Tuning:
    """The ways to run a statement and their times, best first; prints as a table."""

    statement: Statement
    timings: tuple[Timing, ...]

    @property
    def best(self) -> Timing:
        return self.timings[0]

    def __str__(self) -> str:
        return "\n".join([str(self.statement), *map(str, self.timings)])

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class _Call:
    """A checked call and what `pipeline` is asked to run for it, which has no sparse format any more."""

    statement: Statement
    bound: Bound
    expr: str  # of the indirect statement, like all that follows
    tensors: dict[str, Tensor]
    size: Sequence[int] | None
    fact: Fact | None

    @property
    def wants_winners(self) -> bool:
        """True for a `max` or `min` whose gradient is wanted: its kernel stores the winners' positions too."""
        return not self.statement.is_sum and any(tensor.requires_grad for tensor in self.tensors.values())

    def prepared(self, fact: Fact | None) -> PreparedStatement:
        """Return the indirect statement over its tensors as `pipeline` prepares it."""
        values = list(self.tensors.values())
        return prepare(self.expr, ",".join(self.tensors), self.size, values, fact, self.wants_winners)


@torch.no_grad()
def explanation_of(expr: str, operands: Operands, size: Sequence[int] | None = None) -> Explanation:
    """Return every stage of a call, which is checked as `evaluate` does and not run."""
    call = _call(expr, operands, size)
    bound = bind(parse(call.expr), call.tensors, call.size)
    rewritten = None if call.expr is expr else bound.statement
    extents = {**call.bound.extents, **bound.extents}
    padded = None if bound.device.type == "meta" else check_ranges(bound, call.tensors)
    stages = call.statement, rewritten, extents, lower(bound, padded, call.wants_winners)
    fact = call.fact
    if fact is not None and bound.device.type == "meta":  # where no lengths of rows can be read
        fact = fact.without_tensors()
    problem = problem_for(bound, call.tensors, fact, padded, wants_winners=call.wants_winners)
    parts = split_of(bound, padded or ()) if fact is None else None
    route = _route(call, bound, fact, parts)
    if route == STATEMENTS:
        parts = split_of(bound, padded or (), LEAST_GAIN)
    if route != KERNEL:
        return Explanation(*stages, why_no_kernel=ROUTES[route], route=route, split=parts)
    ways = () if bound.is_empty else candidates(problem)
    if not ways:
        why = "no product is formed" if bound.is_empty else _why_no_way(bound.statement)
        return Explanation(*stages, why_no_kernel=why)
    refused = refusals(problem)
    left = [way for way in ways if way not in [candidate for candidate, _ in refused]]
    if not left:
        why = f"none of the {len(ways)} that there are could be built"
        return Explanation(*stages, why_no_kernel=why, refused=refused)
    tuned = recall(problem)
    way, is_tuned = tuned or left[0], tuned is not None
    chosen = way.schedule, way.config, is_tuned, problem.launcher(way).kernel.source
    return Explanation(*stages, *chosen, refused=refused, split=parts)


def _route(call: _Call, bound: Bound, fact: Fact | None, parts: Split | None) -> str:
    """Return the route of a call: the one that was timed to be the fastest, or the one that goes untimed."""
    if not bound.is_empty:
        values, prepared = list(call.tensors.values()), call.prepared(fact)
        is_timed = bound.device.type == "cuda"
        chosen = chosen_route(prepared, prepared.variant(values), fact) if is_timed else None
        if chosen is not None:
            return chosen
        if not bound.statement.is_sum and groupings_of(prepared, values, fact):
            return GROUPED
    return STATEMENTS if parts is not None and parts.gain > CLEAR else KERNEL


@torch.no_grad()
def tuning_of(expr: str, operands: Operands, size: Sequence[int] | None = None, full: bool = False) -> Tuning:
    """Time the ways to run a call on its GPU and return the times; calls of its kind take the best from now on.

    Raises UnsupportedError if its tensors are not on a GPU or no kernel runs it.
    """
    call = _call(expr, operands, size)
    if call.bound.device.type != "cuda":
        where = f"these are on {call.bound.device}"
        raise UnsupportedError(f"tuning needs CUDA tensors, but {where}; move them with .cuda()")
    values, prepared = list(call.tensors.values()), call.prepared(call.fact)
    if prepared.bound.is_empty:
        raise UnsupportedError("there is nothing to tune: no product is formed, so no kernel runs")
    has_kernel = bool(strategies(prepared.bound, prepared.fact))
    if not prepared.bound.statement.is_sum and not has_kernel and not groupings_of(prepared, values, call.fact):
        raise UnsupportedError(f"there is nothing to tune: {_why_no_way(prepared.bound.statement)}")
    variant, times = prepared.variant(values), dict[str, float]()
    timings: tuple[Timing, ...] = ()
    parts = split_of(prepared.bound, prepared.padding(variant)) if call.fact is None else None
    if has_kernel and (parts is None or parts.gain <= CLEAR):
        timings, _ = time_all(prepared.problem(values, call.fact), values, call.fact, full)
    prepared.runners.clear()
    runner_of(prepared, values, call.fact, times)
    EPOCH.number += 1  # launch plans hold the kernels that were chosen before
    others = {route: Timing(route, ms) for route, ms in sorted(times.items(), key=lambda pair: pair[1])}
    others.pop(KERNEL, None)
    best = others.pop(chosen_route(prepared, variant, call.fact) or KERNEL, None)
    return Tuning(call.statement, (*([] if best is None else [best]), *timings, *others.values()))


def _call(expr: str, operands: Operands, size: Sequence[int] | None) -> _Call:
    """Return a checked call, its format rewritten away; raise InsumError if its operands do not fit."""
    statement = parse(expr)
    bound = bind(statement, operands, size)
    tensors = {name: operand for name, operand in operands.items() if isinstance(operand, Tensor)}
    sparse = {name: operand for name, operand in operands.items() if is_sparse(operand)}
    if not sparse:
        return _Call(statement, bound, expr, tensors, size, None)
    target = sparse_factor(statement, sparse)
    form = sparse[target.name]
    has_groups = form.coords[form.group_dim] is not None
    group_dim = best_group_dim(statement, target, form.group_dim, has_groups)
    form = with_row_order(expr, size, target.name, form, group_dim, tensors)
    how = Recipe(*recipe(bound, target, Kind(*Kind.of(form))))
    return _Call(statement, bound, how.text, how.tensors(form, tensors), how.size, how.fact(form))


def _why_no_way(statement: Statement) -> str:
    """Return why no kernel can run a statement."""
    if statement.is_sum:
        return "no scatter in one kernel is deterministic"
    return (
        f"{statement.reduction} needs rows of {statement.output.name} that a format or one index tensor over one index "
        "chooses, so this runs as separate torch operations"
    )


def _table(extents: Mapping[str, int]) -> str:
    wide = max([len("index"), *map(len, extents)])
    rows = [f"{name:{wide}}{extent:>10}" for name, extent in extents.items()]
    return "\n".join([f"{'index':{wide}}{'extent':>10}", *rows])


def _program(graph: fx.GraphModule) -> str:
    """Return the graph's code as one would write it: no `self`, no aliases of arguments, no variables set to None."""
    arguments = {node.name: str(node.target) for node in graph.graph.nodes if node.op == "placeholder"}
    lines = []
    for line in graph.code.splitlines():
        line = re.sub(r";  [\w =]+ = None$", "", line.rstrip())
        line = line.replace("torch.functional.", "torch.").replace("(self, ", "(").replace("(self)", "()")
        # the tensors' own names instead of the graph's lower-case ones, but not inside an einsum's equation
        line = re.sub(r"'[^']*'|(?<![.\w])\w+", lambda word: arguments.get(word[0], word[0]), line)
        name, _, value = line.strip().partition(" = ")
        if line and name != value:
            lines.append(line)
    return "\n".join(lines)
