"""A bound statement as a Python function of torch operations, which runs it on tensors of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...lru_cache import LRUCache
from ..binding import Bound
from ..language import Var
from .code import compiled
from .demands import may_stay_half, orders_of, path_of
from .faster import USUAL, Way, overwrite, short_names
from .first import multiplied_first
from .gathers import large_gathers, lengths_of, placeholders
from .groups import Grouped, index_of_groups
from .products import Products
from .shared import Joint

__all__ = ["Part", "Program", "joint_program_for", "lowered", "program_for", "programs_for"]

PROGRAMS = 512  # a program is a few kB of byte code
ROOM = __name__.rpartition(".")[0]  # where functions are defined that read numbers, as torch's operations do not

_programs: LRUCache[Program] = LRUCache(PROGRAMS)
_joint_programs: LRUCache[JointProgram] = LRUCache(PROGRAMS)


class Part(NamedTuple):
    """A sum among several that one program evaluates."""

    bound: Bound
    padded: frozenset[str]
    way: Way
    operands: tuple[int, ...]  # which of the program's tensors stand for its placeholders


@dataclass(frozen=True)
class JointProgram:
    """The graph of several sums as a Python function, which takes tensors of any lengths, and then those lengths."""

    function: Callable[..., Any]
    lengths: tuple[tuple[int, str | int], ...]  # which of `lengths_of` which bound statement come after the tensors

    def lengths_in(self, parts: Sequence[Part]) -> list[int]:
        """Return the lengths that the function takes when it runs these bound statements."""
        lengths = [lengths_of(part.bound) for part in parts]
        return [lengths[at][key] for at, key in self.lengths]


@dataclass(frozen=True)
class Program:
    """The graph of a statement as a Python function; it takes tensors of any lengths, and then those lengths."""

    way: Way
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
    are contracted and tensors on the way laid out, which factors get a row of zeros for -1 or are multiplied before
    they are gathered, whether groups are contracted one by one and matrices are small, and the type of winners'
    positions. The key holds these.
    """
    stays_half = _stays_half(bound)
    key = _program_key(bound, padded, wants_winners, sums_in_half, way)
    program = _programs.get(key)
    if program is None:
        lowering = Grouped(bound, padded, True, bound.dtype if sums_in_half or way.in_half else None, way)
        graph = lowering.finished_graph(wants_winners)
        graph.eliminate_dead_code()
        overwrite(lowering.entry_products)
        called = [node.target for node in graph.nodes if node.op == "call_function"]
        is_torch = not any(str(getattr(target, "__module__", "")).startswith(ROOM) for target in called)
        choices = frozenset({*lowering.choices, *(["in_half"] if stays_half else [])})
        lengths = lowering.length_arguments
        program = _programs[key] = Program(way, compiled(graph), lengths, str(graph), is_torch, choices)
    return program


def _program_key(
    bound: Bound, padded: frozenset[str], wants_winners: bool, sums_in_half: bool, way: Way
) -> tuple[object, ...]:
    winner_dtype = bound.winner_dtype if wants_winners else None
    groups = index_of_groups(bound), index_of_groups(bound, is_timed=True)
    orders = path_of(bound), orders_of(bound), short_names(bound)
    first = multiplied_first(bound)
    sizes = bound.is_empty, winner_dtype, large_gathers(bound), first and first.factors, *orders, *groups
    kinds = *bound.dtypes.items(), bound.dtype, bound.device, bound.is_seeded, sums_in_half, way, _stays_half(bound)
    return (str(bound.statement), padded, wants_winners, *kinds, *sizes)


def _stays_half(bound: Bound) -> bool:
    return bound.device.type == "cpu" and bool(bound.statement.reduced) and may_stay_half(bound)


def joint_program_for(parts: Sequence[Part]) -> JointProgram:
    """Return the program of several sums, which may have names in common for different tensors and lengths.

    What they read or make alike is read or made once; each result has memory of its own.
    """
    key = tuple([(_program_key(bound, padded, False, False, way), operands) for bound, padded, way, operands in parts])
    program = _joint_programs.get(key)
    if program is None:
        program = _joint_programs[key] = _joined(parts)
    return program


def _joined(parts: Sequence[Part]) -> JointProgram:
    lowerings = [Grouped(each.bound, each.padded, True, _half_of(each), each.way) for each in parts]
    graphs = [lowering.finished_graph(False) for lowering in lowerings]
    names: list[list[Hashable]] = [[*part.operands] for part in parts]
    lengths = dict[Hashable, tuple[int, str | int]]()
    dimensions = dict[tuple[int, int], Hashable]()  # of tensors, and which argument is their length
    for at, (part, lowering) in enumerate(zip(parts, lowerings)):
        found = _dimensions_of(part)
        for key in lowering.length_arguments:
            places = found.get(key, ())
            name = next((dimensions[each] for each in places if each in dimensions), (at, key))
            dimensions.update(dict.fromkeys(places, name))
            lengths.setdefault(name, (at, key))
            names[at].append(name)
    tensors = range(1 + max([number for part in parts for number in part.operands]))
    joint = Joint([*tensors, *lengths])
    for own, lowering, graph in zip(names, lowerings, graphs):
        graph.eliminate_dead_code()
        joint.add(graph, own, lowering.entry_products)
    return JointProgram(compiled(joint.finished()), tuple(lengths.values()))


def _dimensions_of(part: Part) -> dict[str | int, list[tuple[int, int]]]:
    """Return the dimensions of the program's tensors that each index name of a part runs along."""
    statement, numbers = part.bound.statement, dict(zip(placeholders(part.bound), part.operands))
    found: dict[str | int, list[tuple[int, int]]] = {}
    for access in (*statement.accesses, *statement.index_accesses):
        for dim, index in enumerate(access.indices):
            if isinstance(index, Var):
                found.setdefault(index.name, []).append((numbers[access.name], dim))
    return found


def _half_of(part: Part) -> torch.dtype | None:
    return part.bound.dtype if part.way.in_half else None


def programs_for(
    bound: Bound, padded: frozenset[str], wants_winners: bool = False, by_torch: bool = False
) -> dict[str, Program]:
    """Return the programs of a bound statement that differ, by the names of their ways; the first is the likeliest.

    If `by_torch`, they are of torch's own operations, which torch can differentiate.
    """
    program_by = lambda way: program_for(bound, padded, wants_winners, way=way)
    programs = {"as a rule": program_by(USUAL._replace(by_rows=not by_torch))}
    for name, program in (found := list(programs.items())):
        for choice in sorted(program.choices - ({"by_rows"} if by_torch else set())):
            other = program_by(program.way._replace(**{choice: not getattr(USUAL, choice)}))
            if all(other.text != known.text for known in programs.values()):
                found.append((f"{name}, {'not ' if getattr(USUAL, choice) else ''}{choice}", other))
                programs.update(found[-1:])
    return programs


def lowered(bound: Bound, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
    """Return the value of a bound statement by torch's operations, whatever symbols a tracer has for its lengths.

    Every index tensor may hold -1, or what is out of range: a tracer's tensors have no numbers to look for it.
    """
    by_name = dict(zip(names, tensors))
    padded = frozenset(access.name for access in bound.statement.index_accesses)
    lowering = Products(bound, padded, True, refuses=True)
    function, lengths = compiled(lowering.finished_graph(False)), lengths_of(bound)
    operands = [by_name[name] for name in placeholders(bound)]
    return function(*operands, *[lengths[key] for key in lowering.length_arguments])
