"""A cost model: how long a device would take for a statement at least, and for a candidate about, by the device model.

The model ranks candidates, so that few are built; it need not be right by the clock. What it counts: programs and the
waves that they come in, sectors that are read and written, operations of whole tiles with what they pad, the time that
a turn of a loop waits for memory, and additions in memory. `python -m bench rank TIMES.json` says how well it ranks
what was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from math import ceil, gcd, log2, prod

import torch

from ..binding import Bound, bucket
from ..codegen import Config
from ..language import Access, Var
from ..planning import VECTOR_BYTES, Device, Schedule, Strides, number_at
from .footprint import accumulators, computed_operands, shared_bytes
from .stretches import L2_SPEED, OVERLAP, block_lengths, stretch_seconds

__all__ = ["NEAR", "Cost", "JointCost", "floor_milliseconds"]

NEAR = 0.85  # of the floor: a route that comes so near leaves nothing worth building a kernel for
REACHED = 0.9  # of a device's bandwidth: what a copy reaches (`make bench CASES=bench/cases/test_roof.py`)
# Estimates, of which the ranks of measured times are all that was compared (`python -m bench rank`).
REGISTERS = 40  # of a thread, for addresses and positions
# Registers for each element of a tile that a thread loads: its number, its address and its mask. Rows that begin
# between sectors are loaded number by number. Of 233 kernels of the suite at odd sizes all 92 that spill are found so.
LOADED = {"dot": 1.4, "exact dot": 2.5, "plain": 3.5}
VECTORS = 0.3  # of that, where rows begin at sectors and a thread loads several numbers at once
SPILLED = 2.0  # times longer, about: what spills is not even timed if something else does not
ADDRESSING = 4  # operations for an element that is loaded, beside its product
# Instructions of what moves data: for a row of a tile in each of its warps, for an element of it, and for an element of
# a flattened axis, whose names each thread works out. Counted in what was built for an H200.
ROW, ROW_ELEMENT, ALIGNED_ELEMENT, FLAT_ELEMENT, DIVISION = 12, 2, 5, 22, 10
MOVED, TURNED = 1.5, 3.0  # registers for an element of such a row, and of one whose columns go round
UNALIGNED = 0.25  # more bytes, as it were, where a row is written that begins between sectors
AT_ONCE = 16  # neighbours of a run that are loaded together
ADDITION = 2.0  # times a store: what an addition in memory takes
EXCHANGE = 10  # operations that take as long as handing a number to another thread and adding it there
COPIES_AT_ONCE = 512  # that a program adds up while it waits for them once
LINE_BYTES = 128
ASYNCHRONOUS, DIVISOR = 4, 16  # bytes that a thread can load ahead; of the lengths that Triton knows divided


def floor_milliseconds(
    bound: Bound, device: Device, uses_tensor_cores: bool, between: Sequence[Sequence[int]] = ()
) -> float:
    """Return the least time of a statement: to launch it, to move each number once, or to make each product.

    Products of three or more factors may be made in fewer steps, so that they have no such floor. Steps with tensors of
    the sizes `between` are launches of their own, which write and read these, at best in the cache.
    """
    statement, extents = bound.statement, bound.extents
    bytes_moved = prod(bound.size) * bound.dtype.itemsize
    for access in statement.reads:
        numbers = min(prod(extents[name] for name in access.names), prod(bound.shapes[access.name]))
        bytes_moved += numbers * bound.dtypes[access.name].itemsize
    cached = 2 * sum(map(prod, between)) * bound.dtype.itemsize / L2_SPEED
    is_product = len(statement.accesses) == 2 and not between
    flops = 2 * prod(extents[name] for name in statement.names) if is_product else 0
    rate = device.flops(bound.dtype.itemsize) if uses_tensor_cores else device.multiprocessors * device.vector_flops
    launches = (1 + len(between)) * device.launch_gap
    return 1e3 * max(launches, (bytes_moved + cached) / (REACHED * device.bandwidth), flops / rate)


@dataclass(frozen=True)
class Cost:
    """One candidate on one device; extents may be rounded, where all lengths of a tuning key are to cost the same."""

    schedule: Schedule
    config: Config
    strides: Strides
    device: Device
    precision: str
    extents: Mapping[str, int]
    in_order: Collection[str] = ()  # index tensors that scatter and ascend

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The block of each axis, and of the names of a flattened one: its last names whole, as far as it goes."""
        return block_lengths(self.schedule, dict(self.config.blocks), self.extents)

    def count(self, name: str) -> int:
        """Return how many blocks a name has."""
        if name == self.schedule.run:
            return ceil(self.extents[name] / self.config.run)
        return ceil(self.extents[name] / self.blocks.get(name, 1))

    def length(self, name: str) -> int:
        """Return how much of a block is there: a mask leaves out the rest."""
        return min(self.blocks.get(name, 1), self.extents[name])

    @cached_property
    def programs(self) -> float:
        tiles = prod(self.count(name) for name in self.schedule.names("grid", "tile"))
        return max(1.0, tiles * self.config.parts / self.config.rows)

    @cached_property
    def looped(self) -> dict[str, float]:
        """How many turns a program makes over each name."""
        schedule, turns = self.schedule, dict[str, float]()
        for name in schedule.names("loop", "step"):
            turns[name] = float(self.count(name))
        if schedule.owner is not None:
            entries = self.extents[schedule.owner.segment] / max(self.extents[schedule.owner.row], 1)
            turns[schedule.owner.segment] = max(1.0, entries / self.blocks.get(schedule.owner.segment, 1))
        return turns

    @cached_property
    def turns(self) -> float:
        return max(1.0, prod(self.looped.values()) / self.config.parts * self.in_turn / self.at_once)

    @property
    def in_turn(self) -> int:
        """How many rows, or neighbours of a run, a program takes one after another."""
        return self.config.rows * self.config.run

    @property
    def at_once(self) -> int:
        """How many of those are on their way together; one of them has many tiles over constant tables."""
        return 1 if self.schedule.tables else min(self.config.run, AT_ONCE)

    # constant tables

    def tiles_of(self, access: Access) -> int:
        """Return how many tiles of an access there are: one for each row that constant tables name."""
        schedule, tiles = self.schedule, 1
        for index, length in zip(access.indices, schedule.bound.shapes.get(access.name, schedule.bound.size)):
            names = {index.name} if isinstance(index, Var) else {*index.names} if isinstance(index, Access) else set()
            unrolled = [name for name in names if schedule.roles.get(name) == "unrolled"]
            tiles *= min(length, prod(self.extents[name] for name in unrolled)) if unrolled else 1
        return tiles

    @cached_property
    def entries(self) -> int:
        """How many products a program makes of each element: one for each number of the tables that is not 0."""
        schedule = self.schedule
        held = [factor for factor in schedule.accesses if factor.name in schedule.tables]
        if not held:
            return 1
        shape = schedule.bound.shapes[held[0].name]
        places = product(*map(range, shape))
        return max(1, sum(bool(number_at(schedule.tables[held[0].name], place)) for place in places))

    @cached_property
    def held_of(self) -> dict[str, float]:
        """How many registers of a thread hold the tiles of each tensor of constant tables, and "" the sums of a run."""
        schedule, threads = self.schedule, self.config.num_warps * self.device.warp_width
        held = {access.name: access for access in schedule.accesses if self.is_read(access)}
        held |= {"": schedule.output} if schedule.run else {}
        elements = {name: prod(self.blocks.get(axis, 1) for axis in access.names) for name, access in held.items()}
        return {name: self.tiles_of(access) * max(1.0, elements[name] / threads) for name, access in held.items()}

    @property
    def held(self) -> float:
        return sum(self.held_of.values())

    def is_read(self, access: Access) -> bool:
        """Return whether a kernel loads a tensor: constant tables are in its source."""
        return access.name in self.strides and access.name not in self.schedule.tables

    # bytes

    def sectors(self, access: Access, strides: Sequence[int], itemsize: int) -> float:
        """Return how many sectors one block of an access touches."""
        axes = [name for name in access.names if self.blocks.get(name, 1) > 1]
        elements, sector = prod(self.length(name) for name in axes), self.device.sector_bytes
        along = [index for index, stride in zip(access.indices, strides) if stride == 1]
        name = next((index.name for index in along if isinstance(index, Var) and index.name in axes), None)
        if name is None:  # a sector for each, of which later turns find some in the cache
            is_looped = any(isinstance(index, Var) and index.name in self.looped for index in along)
            return elements * (0.5 if is_looped else 1.0)
        run = self.length(name)
        is_aligned = all(stride * itemsize % sector == 0 for stride in strides if stride != 1)
        is_aligned |= self.config.is_aligned and access is self.schedule.output
        return elements / run * (ceil(run * itemsize / sector) + (0 if is_aligned else 0.5))

    @cached_property
    def loaded_of(self) -> dict[str, float]:
        """Bytes of each tensor that all programs read, from the cache or from memory."""
        schedule, loaded = self.schedule, dict[str, float]()
        for factor in schedule.accesses:
            for access in (factor, *factor.indirections):
                if not self.is_read(access):
                    continue
                itemsize = schedule.bound.dtypes[access.name].itemsize
                turns = prod(turns for name, turns in self.looped.items() if name in access.names)
                share = self.config.parts if turns > 1 else 1
                sectors = self.sectors(access, self.strides[access.name], itemsize) * self.tiles_of(access)
                each = sectors * max(1.0, turns / share) * self.device.sector_bytes
                loaded[access.name] = loaded.get(access.name, 0.0) + self.programs * self.in_turn * each
        return loaded

    @property
    def loaded(self) -> float:
        return sum(self.loaded_of.values())

    @cached_property
    def additions(self) -> float:
        """How many additions a run makes for each of its entries: one for each place, where neighbours share one."""
        schedule, run = self.schedule, self.config.run
        places = [
            length for index, length in zip(schedule.output.indices, schedule.bound.size) if isinstance(index, Access)
        ]
        if run == 1 or not schedule.run or any(own.name not in self.in_order for own in schedule.output.indirections):
            return 1.0
        return min(1.0, 1 / run + prod(map(bucket, places)) / self.extents[schedule.run])

    @cached_property
    def stored(self) -> float:
        """Bytes that are written, those that are added to counted more, and set to zero before."""
        schedule, bound = self.schedule, self.schedule.bound
        itemsize = bound.dtype.itemsize
        sectors = self.sectors(schedule.output, self.strides[""], itemsize) * self.tiles_of(schedule.output)
        per_program = sectors * self.device.sector_bytes
        total = self.programs * self.in_turn * per_program
        if schedule.is_atomic:
            total = total * ADDITION * self.additions
        return total + (0 if schedule.covers_output else self.numbers(bound.statement.output, bound.size) * itemsize)

    @cached_property
    def distinct_of(self) -> dict[str, float]:
        """Bytes of each tensor that is read."""
        bound = self.schedule.bound
        reads = bound.statement.reads
        return {a.name: self.numbers(a, bound.shapes[a.name]) * bound.dtypes[a.name].itemsize for a in reads}

    @property
    def written(self) -> float:
        """Bytes of the output."""
        bound = self.schedule.bound
        return self.numbers(bound.statement.output, bound.size) * bound.dtype.itemsize

    @property
    def distinct(self) -> float:
        """Bytes of all tensors, each once."""
        return sum(self.distinct_of.values()) + self.written

    @property
    def cut(self) -> float:
        """Bytes that stand for what is written of two rows in one sector."""
        schedule, bound = self.schedule, self.schedule.bound
        if not schedule.may_be_aligned or self.config.is_aligned:
            return 0.0
        return UNALIGNED * self.numbers(bound.statement.output, bound.size) * bound.dtype.itemsize

    def numbers(self, access: Access, shape: Sequence[int]) -> int:
        """Return how many numbers a tensor has; lengths that are pointed into count by their power of two."""
        lengths = [
            self.extents.get(index.name, length) if isinstance(index, Var) else bucket(length)
            for index, length in zip(access.indices, shape)
        ]
        return prod(lengths)

    # time

    @cached_property
    def crowding(self) -> float:
        """Seconds of the additions that meet at one line of memory, which takes one after another."""
        schedule, bound = self.schedule, self.schedule.bound
        if not schedule.is_atomic or not (schedule.output.indirections or schedule.is_shared):
            return 0.0
        sectors = self.sectors(schedule.output, self.strides[""], bound.dtype.itemsize)
        additions = self.programs * self.in_turn * self.additions * sectors
        lines = max(1.0, prod(bound.size) * bound.compute_dtype.itemsize / LINE_BYTES)
        return additions / (lines * self.config.copies) * self.device.line_addition

    @cached_property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at once."""
        device, threads = self.device, self.config.num_warps * self.device.warp_width
        sums = self.held if self.schedule.tables else accumulators(self.config, self.schedule, device)
        shared = shared_bytes(self.schedule, self.config, device, self.precision) if self.schedule.uses_dot else 0
        return device.resident(threads, REGISTERS + sums, shared)

    @cached_property
    def kind(self) -> str:
        """Of its products: by tensor cores, by multiply-adds of whole tiles, or one by one."""
        if not self.schedule.uses_dot:
            return "plain"
        dtype = self.schedule.bound.dtype
        is_exact = dtype == torch.float32 and self.precision == "ieee"
        return "dot" if self.device.tensor_core(dtype) and not is_exact else "exact dot"

    @cached_property
    def spills(self) -> bool:
        """Whether a thread would need more registers than there are."""
        schedule, threads = self.schedule, self.config.num_warps * self.device.warp_width
        if schedule.form == "rows" and not schedule.names("step"):
            is_turned = self.config.is_aligned and self.reach > self.blocks[schedule.axes[-1]]
            moved = self.elements * self.tiles * (TURNED if is_turned else MOVED)
            return REGISTERS + moved > self.device.thread_registers
        total = REGISTERS + accumulators(self.config, schedule, self.device)
        for factor in schedule.factors:
            if isinstance(factor, Access) and factor.name in self.strides:
                elements = prod(self.blocks.get(name, 1) for name in factor.names) / threads
                is_whole = self.is_aligned(factor)
                total += elements * LOADED[self.kind] * (VECTORS if is_whole else 1)
        for node in computed_operands(schedule):
            total += prod(self.blocks[axis] for axis in node.axes) / threads
        return total > self.device.thread_registers

    def is_aligned(self, access: Access) -> bool:
        """Return whether rows of a tensor begin at sectors."""
        strides, itemsize = self.strides[access.name], self.schedule.bound.dtypes[access.name].itemsize
        return 1 in strides and all(
            stride * itemsize % self.device.sector_bytes == 0 for stride in strides if stride > 1
        )

    @cached_property
    def operations(self) -> float:
        """Seconds of a multiprocessor for one turn of one program."""
        schedule, device, dtype = self.schedule, self.device, self.schedule.bound.dtype
        padded = prod(self.blocks.get(name, 1) for name in schedule.axes)
        if self.kind == "dot":
            rows = min((self.blocks.get(name, 1) for name in schedule.names("tile")), default=1)
            used = min(1.0, rows / device.dot_rows(dtype)) if device.dot_rows(dtype) else 1.0
            return 2 * padded / (device.tensor_flops * 2 / dtype.itemsize * max(used, 0.25))
        if schedule.form in ("rows", "flat", "runs") and not schedule.names("step"):
            return 2 * self.moving_instructions * self.config.num_warps * device.warp_width / device.vector_flops
        each = 2.0 if schedule.uses_dot else len(schedule.factors) + ADDRESSING
        if schedule.tables:
            each = 2 * (2 * self.entries + self.held / max(1.0, padded / (self.config.num_warps * device.warp_width)))
        idle = min(1.0, padded / (self.config.num_warps * device.warp_width))  # threads without an element
        return each * padded / max(idle, 0.03) / device.vector_flops * (dtype.itemsize / 4 if dtype.itemsize > 4 else 1)

    @property
    def folding(self) -> float:
        """Seconds of a multiprocessor in which threads that have summands side by side hand them to each other.

        390,825 products of three rows of 229 took an H200 0.096 ms where a warp has 64 numbers of four rows, 0.105
        where two warps have 256, 0.142 where four have them, and 0.247 where eight have 256 numbers of 16 rows.
        """
        schedule, device = self.schedule, self.device
        if schedule.uses_dot or schedule.tables or not schedule.names("step"):
            return 0.0
        along = prod(self.blocks.get(name, 1) for name in schedule.names("step"))
        results = prod(self.blocks.get(name, 1) for name in schedule.names("tile"))
        along = min(along, self.config.num_warps * device.warp_width)
        return results * along * log2(min(along, device.warp_width)) * EXCHANGE / device.vector_flops

    @property
    def adding_up(self) -> float:
        """Seconds in which copies of the output are added up, beside the launch."""
        schedule, device, copies = self.schedule, self.device, self.config.copies
        if not schedule.has_copies:
            return 0.0
        bytes_read = copies * prod(schedule.bound.size) * schedule.bound.compute_dtype.itemsize
        return bytes_read / (L2_SPEED * device.bandwidth) + device.latency * (1 + copies / COPIES_AT_ONCE)

    # statements that move rows

    @property
    def reach(self) -> int:
        """How many columns a row of a tile spans, with those before its first one."""
        return self.length(self.schedule.axes[-1]) + (self.device.warp_width if self.config.is_aligned else 0)

    @property
    def height(self) -> int:
        """How many rows of a tile a thread has elements of."""
        rows = prod(self.blocks[name] for name in self.schedule.axes[:-1]) * self.at_once
        return max(1, rows * self.across // (self.config.num_warps * self.device.warp_width))

    @property
    def vector(self) -> int:
        """How many neighbours a thread loads or stores at once."""
        if self.config.is_aligned:
            return 1
        return gcd(self.extents[self.schedule.axes[-1]], VECTOR_BYTES // self.schedule.bound.dtype.itemsize)

    @property
    def across(self) -> int:
        """How many threads have elements of one row; warps beside those have other rows."""
        threads = self.config.num_warps * self.device.warp_width
        return min(threads, max(1, self.blocks[self.schedule.axes[-1]] // self.vector))

    @property
    def columns(self) -> int:
        """How many times a thread loads or stores of a row; columns that no row has are not there."""
        return ceil(min(self.reach, self.blocks[self.schedule.axes[-1]]) / (self.across * self.vector))

    @property
    def elements(self) -> int:
        """How many registers the elements of a tile take of a thread; halves that are loaded together share one."""
        halves = 2 if self.vector > 1 and self.schedule.bound.dtype.itemsize == 2 else 1
        return self.height * self.columns * self.vector // halves

    @property
    def tiles(self) -> int:
        """How many factors and positions have the rows and the columns of a tile, and wait in registers at once."""
        *rows, column = self.schedule.axes
        parts = {part for flat in self.schedule.flats if flat.name in rows for part in flat.parts} | {*rows}
        reads = *self.schedule.factors, *self.schedule.bound.statement.index_accesses
        return max(1, sum(column in read.names and bool(parts & {*read.names}) for read in reads))

    @property
    def moving_instructions(self) -> float:
        """The instructions of a warp for one tile of a statement that moves data."""
        schedule = self.schedule
        each = len(schedule.factors) + (ALIGNED_ELEMENT if self.config.is_aligned else ROW_ELEMENT)
        if schedule.form == "flat":
            return (each + FLAT_ELEMENT) * self.elements
        divisions = sum(len(flat.parts) - 1 for flat in schedule.flats)
        return self.height * (ROW + DIVISION * divisions + each * self.columns)

    @property
    def milliseconds(self) -> float:
        """About how long it takes."""
        device, config = self.device, self.config
        if self.schedule.along:
            return 1e3 * (device.launch_gap + stretch_seconds(self.schedule, config, device))
        programs, slots = self.programs, device.multiprocessors * self.resident
        # over constant tables programs are short, and one begins as soon as another ends
        waves = max(1.0, programs / slots) if self.schedule.tables else ceil(programs / slots)
        busiest = ceil(programs / device.multiprocessors)  # programs of one multiprocessor
        work = busiest * (self.turns * self.operations + self.in_turn * self.folding)
        stages = max(1, config.num_stages - 1) if self.is_loaded_ahead else 1
        waiting = waves * device.latency * (self.turns / stages + 1)
        moved = max(
            (self.distinct + self.cut) / device.bandwidth, (self.loaded + self.stored) / (L2_SPEED * device.bandwidth)
        )
        moved = max(moved, self.crowding, programs / device.start_rate)
        moved *= max(1.0, device.multiprocessors / programs)  # few programs do not fill the bus
        parts = sorted((work, waiting, moved))
        longest = (parts[2] + OVERLAP * (parts[0] + parts[1])) * (SPILLED if self.spills else 1)
        return 1e3 * (device.launch_gap * (1 + self.prepared) + longest + self.adding_up)

    @property
    def is_loaded_ahead(self) -> bool:
        """Whether operands of a dot arrive in shared memory while others are multiplied: four bytes at a time at least.

        Triton knows of a length between rows whether 16 divides it, and no more.
        """
        schedule = self.schedule
        sizes = {name: schedule.bound.dtypes[name].itemsize for name in self.strides if name in schedule.bound.dtypes}
        return schedule.uses_dot and all(
            sizes[factor.name] >= ASYNCHRONOUS
            or all(stride == 1 or stride % DIVISOR == 0 for stride in self.strides[factor.name])
            for factor in schedule.accesses
            if factor.name in sizes
        )

    @property
    def prepared(self) -> int:
        """How many more launches there are: an output is set to zero before, or copies are added up, or converted."""
        schedule = self.schedule
        is_converted = schedule.sum_dtype(None) != schedule.bound.dtype and not schedule.has_copies
        return int(not schedule.covers_output) + schedule.has_copies + is_converted


@dataclass(frozen=True)
class JointCost(Cost):
    """One config of a kernel that several statements share: what they read is loaded once, and held for all."""

    others: tuple[Cost, ...] = ()  # besides the first, which has the grid of all

    @classmethod
    def of(cls, parts: Sequence[Cost]) -> JointCost:
        first, *others = parts
        settings = first.device, first.precision, first.extents, first.in_order
        return cls(first.schedule, first.config, first.strides, *settings, tuple(others))

    @cached_property
    def parts(self) -> tuple[Cost, ...]:
        settings = self.device, self.precision, self.extents, self.in_order
        return Cost(self.schedule, self.config, self.strides, *settings), *self.others

    @cached_property
    def held_of(self) -> dict[str, float]:
        return {**_most([part.held_of for part in self.parts]), "": sum(part.held_of.get("", 0) for part in self.parts)}

    @cached_property
    def loaded_of(self) -> dict[str, float]:
        return _most([part.loaded_of for part in self.parts])

    @cached_property
    def distinct_of(self) -> dict[str, float]:
        return _most([part.distinct_of for part in self.parts])

    @property
    def written(self) -> float:
        return sum(part.written for part in self.parts)

    @cached_property
    def stored(self) -> float:
        return sum(part.stored for part in self.parts)

    @cached_property
    def crowding(self) -> float:
        return max(part.crowding for part in self.parts)

    @cached_property
    def entries(self) -> int:
        return sum(part.entries for part in self.parts)

    @cached_property
    def spills(self) -> bool:
        """Whether a thread would need more registers than there are."""
        needed = REGISTERS + self.held if self.schedule.tables else 0
        return needed > self.device.thread_registers or any(part.spills for part in self.parts)

    @property
    def prepared(self) -> int:
        return sum(part.prepared for part in self.parts)


def _most(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest number of each name."""
    return {name: max(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(chain.from_iterable(parts))}
