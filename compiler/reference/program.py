"""A bound statement as a Python function of torch operations, which runs it on tensors of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...lru_cache import LRUCache
from ..binding import Bound
from .code import compiled
from .demands import may_stay_half, orders_of, path_of
from .faster import USUAL, Way, short_names
from .gathers import large_gathers, lengths_of, placeholders
from .groups import Grouped, index_of_groups
from .products import Products

__all__ = ["Program", "lowered", "program_for", "ways_for"]

PROGRAMS = 512  # a program is a few kB of byte code
ROOM = __name__.rpartition(".")[0]  # where functions are defined that read numbers, as torch's operations do not

_programs: LRUCache[Program] = LRUCache(PROGRAMS)


@dataclass(frozen=True)
class Program:
    """The graph of a statement as a Python function; it takes tensors of any lengths, and then those lengths."""

    function: Callable[..., Any]
    lengths: tuple[str | int, ...]  # which of `lengths_of(bound)` come after the tensors
    text: str  # of the graph: ways that have one are the same
    is_torch: bool  # whether it calls torch's operations alone
    choices: frozenset[str]  # fields of its way that it depends on

    def lengths_in(self, bound: Bound) -> list[int]:
        """Return the lengths that the function takes when it runs this bound statement."""
        lengths = lengths_of(bound)
        return [lengths[key] for key in self.lengths]


def program_for(
    bound: Bound,
    padded: frozenset[str],
    wants_winners: bool = False,
    sums_in_half: bool = False,
    way: Way = USUAL,
) -> Program:
    """Return the program of a bound statement; statements that differ only in lengths share one.

    With `sums_in_half` half precision is left to torch's operations as it is: for those that sum in float32.

    Lengths also decide what a program does, though seldom: whether anything is summed at all, in which order factors
    are contracted and tensors on the way laid out, which factors get a row of zeros for -1, whether groups are
    contracted one by one and matrices are small, and the type of winners' positions. The key holds these.
    """
    winner_dtype = bound.winner_dtype if wants_winners else None
    groups = index_of_groups(bound), index_of_groups(bound, is_timed=True)
    orders = path_of(bound), orders_of(bound), short_names(bound)
    stays_half = bound.device.type == "cpu" and bool(bound.statement.reduced) and may_stay_half(bound)
    sizes = bound.is_empty, winner_dtype, large_gathers(bound), *orders, *groups
    kinds = *bound.dtypes.items(), bound.dtype, bound.device, bound.is_seeded, sums_in_half, way, stays_half
    key = (str(bound.statement), padded, wants_winners, *kinds, *sizes)
    program = _programs.get(key)
    if program is None:
        lowering = Grouped(bound, padded, True, bound.dtype if sums_in_half or way.in_half else None, way)
        graph = lowering.finished_graph(wants_winners)
        graph.eliminate_dead_code()
        called = [node.target for node in graph.nodes if node.op == "call_function"]
        is_torch = not any(str(getattr(target, "__module__", "")).startswith(ROOM) for target in called)
        choices = frozenset({*lowering.choices, *(["in_half"] if stays_half else [])})
        lengths = lowering.length_arguments
        program = _programs[key] = Program(compiled(graph), lengths, str(graph), is_torch, choices)
    return program


def ways_for(bound: Bound, padded: frozenset[str], wants_winners: bool = False) -> dict[str, Way]:
    """Return the ways in which programs of a bound statement differ, by their names; the first is the likeliest."""
    ways = {"as a rule": USUAL}
    for name, way in (found := list(ways.items())):
        for choice in sorted(program_for(bound, padded, wants_winners, way=way).choices):
            other = way._replace(**{choice: not getattr(USUAL, choice)})
            if other not in ways.values():
                ways[f"{name}, not {choice}" if getattr(way, choice) else f"{name}, {choice}"] = other
                found.append(list(ways.items())[-1])
    return ways


def lowered(bound: Bound, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
    """Return the value of a bound statement by torch's operations, whatever symbols a tracer has for its lengths.

    Every index tensor may hold -1: a tracer's tensors have no numbers to look for it.
    """
    by_name = dict(zip(names, tensors))
    padded = frozenset(access.name for access in bound.statement.index_accesses)
    lowering = Products(bound, padded, True)
    function, lengths = compiled(lowering.finished_graph(False)), lengths_of(bound)
    operands = [by_name[name] for name in placeholders(bound)]
    return function(*operands, *[lengths[key] for key in lowering.length_arguments])
