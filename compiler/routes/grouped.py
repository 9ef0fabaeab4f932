"""The runner of a statement whose products are grouped by an index tensor, and of one for index tensors that change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...formats.facts import ConstantTables, Fact, OwnedRows, WrittenOnce
from ...formats.torch_state import is_captured, is_deterministic, uses_tensor_cores
from ..binding import kernel_strides
from ..planning import Grouping, device_of, groupings
from ..runtime import GroupTables, active, ascends, group_tables, is_for_graph, new_group_tables, note_use, was_used
from .prepared import PreparedStatement, Result, Runner, prepare

__all__ = ["GroupedRunner", "Kernel", "RunnerByCapture", "RunnerByIndex", "by_kernel", "groupings_of"]

# by a statement, its variant, its tensors, a fact about them and the milliseconds of another route, or 0
Kernel = Callable[[PreparedStatement, Any, list[Tensor], Fact | None, float], Runner]


def by_kernel(
    kernel: Kernel,
    text: str,
    names: Sequence[str],
    size: tuple[int, ...],
    tensors: list[Tensor],
    fact: Fact | None = None,
    wants_winners: bool = False,
    ms: float = 0.0,
) -> Result:
    """Return the value of a statement as one kernel, whose runner is kept; `kernel` returns it for new layouts.

    It need not try many if another way takes so many milliseconds that none can take fewer.
    """
    statement = prepare(text, ",".join(names), size, tensors, fact, wants_winners)
    variant = statement.variant(tensors)
    return statement.runner(variant, lambda: kernel(statement, variant, tensors, fact, ms))(tensors, fact)


def groupings_of(statement: PreparedStatement, tensors: list[Tensor], fact: Fact | None = None) -> tuple[Grouping, ...]:
    """Return the ways to group the products of a statement by an index tensor, the most promising first.

    Facts other than constant tables are about the order of a statement's products, which stays as it is. Over constant
    tables an index is grouped that is not sorted yet: a kernel adds up neighbours of one place as they come.
    """
    bound = statement.bound
    tables = fact.numbers if isinstance(fact, ConstantTables) else {}
    if fact is not None and not tables:
        return ()
    if tables and (is_deterministic() or is_captured(bound.device)):
        return ()  # neighbours are added atomically in the end; and nothing can be waited for in a graph
    named = dict(zip(statement.names, tensors))
    strides = kernel_strides(bound, {name: tensor.stride() for name, tensor in named.items()})
    ways = groupings(bound, strides, device_of(bound.device), uses_tensor_cores(bound.dtype), tables)
    return tuple(way for way in ways if not (tables and ascends(named[way.index])))


@dataclass(eq=False)
class GroupedRunner:
    """Evaluates a statement over tiles of equal index; `kernel` returns the runner of one as one kernel.

    Another way to evaluate it takes `ms` milliseconds, 0 if none was timed.
    """

    statement: PreparedStatement
    way: Grouping
    kernel: Kernel
    ms: float = 0.0
    text: str = field(init=False)
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.text, self.names = str(self.way.statement), self.way.statement.tensor_names

    @property
    def at(self) -> int:
        """The index tensor's number among the statement's tensors."""
        return self.statement.names.index(self.way.index)

    def __call__(self, tensors: list[Tensor], fact: Fact | None = None) -> Result:
        return self.over(self.tables(tensors), tensors, fact)

    def anew(self, tensors: list[Tensor], fact: Fact | None = None) -> Result:
        """Evaluate the statement with tables that are made now, as those of an index that changes are."""
        return self.over(self.tables(tensors, new_group_tables), tensors, fact)

    def tables(self, tensors: list[Tensor], make: Callable[..., GroupTables] = group_tables) -> GroupTables:
        """Return the tables of the index tensor."""
        return make(tensors[self.at], self.way.count, self.way.tile)

    def over(self, tables: GroupTables, tensors: list[Tensor], fact: Fact | None = None) -> Result:
        """Evaluate the statement with tables of its index tensor."""
        way, named = self.way, dict(zip(self.statement.names, tensors))
        named[way.positions], named[way.values], _ = tables
        passed = [named[name] for name in self.names]
        grouped_fact = self._fact(tables) if fact is None else fact
        size, wants_winners = self.statement.bound.size, self.statement.wants_winners
        return by_kernel(self.kernel, self.text, self.names, size, passed, grouped_fact, wants_winners, self.ms)

    def _fact(self, tables: GroupTables) -> Fact | None:
        """Return what the tables say about rows of the output, and in what order the products come."""
        way = self.way
        if way.is_scattered:
            is_counted = self.statement.wants_winners and way.positions in self.names
            counted_by = way.positions if is_counted else ""  # no product depends on the place of another
            return OwnedRows(way.values, "", tables[2], is_whole=True, counted_by=counted_by)
        return WrittenOnce(way.positions) if way.is_stored_once else None


@dataclass(eq=False)
class RunnerByIndex:
    """Takes one runner for an index tensor that was used before and has not changed, and another for a new one."""

    at: int  # the index tensor among the statement's tensors
    known: Runner
    new: Runner

    def __call__(self, tensors: list[Tensor], fact: Fact | None = None) -> Result:
        index = tensors[self.at]
        is_known, recording = was_used(index), active()
        if recording is not None:
            recording.check(was_used, index, is_known)
        if not is_known:
            note_use(index)
            if recording is not None:
                recording.call(note_use, (index,), {}, None, has_written=True)  # of each new one that a replay gets
        return (self.known if is_known else self.new)(tensors, fact)


@dataclass(eq=False)
class RunnerByCapture:
    """Takes one runner while a CUDA graph is captured, and another for eager calls.

    A captured graph compares an index tensor with what its tables were made of, at every replay.
    """

    eager: Runner
    captured: Runner

    def __call__(self, tensors: list[Tensor], fact: Fact | None = None) -> Result:
        return (self.captured if is_for_graph() else self.eager)(tensors, fact)
