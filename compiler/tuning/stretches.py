"""Tiles of long sums that read stretches of memory, ranked by what they load and how long they wait.

Such a sum takes as long as its bytes do, if enough loads are on their way at any time. The model counts the bytes of
all factors, once from memory and from the cache as often as tiles load them, in whole sectors; the turns in which a
program waits; that some multiprocessors have one program more than others; and what sharing a sum costs: a memset or a
second kernel, and the additions of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ..binding import power_of_two
from ..codegen import Config
from ..planning import Device, Schedule, is_varying

__all__ = ["L2_SPEED", "OVERLAP", "block_lengths", "most_parts", "stretch_configs", "stretch_seconds"]

# Elements of a tile along memory: of results, each of which costs a store or an addition, and of summands.
LEAST_ALONG, MOST_RESULTS, MOST_SUMMANDS = 4, 256, 8192
WARPS = (4, 2, 8, 1, 16)
EACH = (16, 8, 32, 4)  # elements of a tile to a thread: loads on their way, and sums in registers
SPARE_REGISTERS = 40  # of a thread, beside a tile's elements and their addresses
SHARES = (1, 2, 4, 8)  # programs of a shared sum, for each multiprocessor
MOST_PARTS = 2**31  # where nothing limits them
WIDTHS, LISTED, LISTED_SHARED = 4, 6, 4
FAR_BETTER = 4.0
UNROLLED = 4  # turns of a loop whose loads are on their way together, as the compiler unrolls it; an estimate
# Estimates, of which the ranks of measured times are all that was compared (`python -m bench rank`).
L2_SPEED = 1.5  # times the bandwidth of memory
OVERLAP = 0.3  # of what is not the longest part, and still not hidden behind it
OF_COPIES = 20  # times their bytes: 64 copies of 3,169 sums took an H200 0.0036 ms to add up beside the launch


def stretch_configs(schedule: Schedule, device: Device) -> tuple[Config, ...]:
    """Return configs of a sum that reads stretches of memory, the most promising first.

    The best of several widths come first, then other numbers of warps. One is left where sharing is far better.
    """
    space = StretchSpace(schedule, device)
    ranked = sorted(space.configs(), key=space.seconds)
    best_of_width: dict[int, Config] = {}
    best_of_kind: dict[tuple[int, int], Config] = {}
    for config in ranked:
        width = config.block(schedule.along)
        best_of_width.setdefault(width, config)
        best_of_kind.setdefault((width, config.num_warps), config)
    listed = [*list(best_of_width.values())[:WIDTHS], *best_of_kind.values()]
    if space.is_better_shared(listed[:1]):
        return tuple(listed[:1])
    return tuple(dict.fromkeys(listed))[: LISTED_SHARED if schedule.is_shared else LISTED]


def most_parts(schedule: Schedule, device: Device) -> int:
    """Return how many programs may share a sum at most: as many as the cache has room for copies of the output.

    The result is a power of two. An output may be far larger than what is written of it, as that of `Y[i,i] += X[i,k]`;
    lengths count by their power of two, as in tuning keys. Parts that are added to one output take no room.
    """
    if not schedule.has_copies:
        return MOST_PARTS
    bound = schedule.bound
    copies = device.l2_bytes // (prod(map(power_of_two, bound.size)) * bound.compute_dtype.itemsize)
    return power_of_two(copies + 1) // 2 if copies else 1


def block_lengths(schedule: Schedule, blocks: Mapping[str, int], extents: Mapping[str, int]) -> dict[str, int]:
    """Return the blocks, and those of the names of a flattened axis: its last names whole, as far as it goes."""
    lengths = dict(blocks)
    for flat in schedule.flats:
        rest = lengths[flat.name]
        for part in reversed(flat.parts):
            extent = max(extents[part], 1)
            lengths[part], rest = min(rest, extent), ceil(rest / extent)
    return lengths


def stretch_seconds(schedule: Schedule, config: Config, device: Device) -> float:
    """Return about how long a config of a sum that reads stretches of memory takes."""
    return StretchSpace(schedule, device).seconds(config)


class _Read(NamedTuple):
    """A factor: the bytes of an element, its index names, those along memory apart, and the loops that it varies in."""

    itemsize: int
    others: tuple[str, ...]
    along: tuple[str, ...]
    loops: tuple[str, ...]


@dataclass(frozen=True)
class StretchSpace:
    """All configs of a schedule whose sum reads stretches of memory, on a device."""

    schedule: Schedule
    device: Device

    @cached_property
    def reads(self) -> tuple[_Read, ...]:
        """What is read, each factor once."""
        schedule = self.schedule
        along, loops = {*schedule.parts_of(schedule.along)}, schedule.names("loop", "step")
        return tuple(
            _Read(
                schedule.bound.dtypes[factor.name].itemsize,
                tuple(names - along),
                tuple(names & along),
                tuple(loop for loop in loops if not names.isdisjoint(schedule.parts_of(loop))),
            )
            for factor in dict.fromkeys(schedule.accesses)
            for names in [{*factor.names}]
        )

    def configs(self) -> Iterator[Config]:
        """Yield all tiles that fit the statement, in every number of parts if its sum is shared."""
        schedule, along = self.schedule, self.schedule.along
        others = [name for name in schedule.axes if name != along]
        longest = min(power_of_two(schedule.extents[along]), MOST_RESULTS if schedule.is_kept(along) else MOST_SUMMANDS)
        for warps, each in product(WARPS, EACH):
            elements = warps * self.device.warp_width * each
            width = min(LEAST_ALONG, longest) if others else min(elements, longest)
            while width <= min(longest, elements):
                heights = [(name, min(elements // width, power_of_two(schedule.extents[name]))) for name in others]
                yield from self.in_parts(Config((*heights, (along, width)), warps))
                width *= 2

    def is_better_shared(self, best: Sequence[Config]) -> bool:
        """Whether the sum would take far less if programs shared it, by the estimate."""
        if not best or not self.schedule.may_be_shared:
            return False
        shared = StretchSpace(replace(self.schedule, is_shared=True), self.device)
        return any(self.seconds(best[0]) > FAR_BETTER * shared.seconds(config) for config in shared.configs())

    def in_parts(self, config: Config) -> Iterator[Config]:
        """Yield a config of a shared sum with every number of parts, any other as it is."""
        if not self.schedule.is_shared:
            yield config
            return
        blocks = dict(config.blocks)
        turns = self.turns(blocks)
        for share in SHARES:
            parts = min(power_of_two(share * self.device.wave // self.programs(blocks)), self.most_parts)
            if self.has_fixed_sums:  # as many as have turns to take, if each takes as many as the first
                parts = -(-turns // -(-turns // min(parts, turns)))
            if 1 < parts <= turns:
                copies = parts if self.schedule.has_copies else 1
                yield Config(config.blocks, config.num_warps, config.num_stages, parts=parts, copies=copies)

    @cached_property
    def most_parts(self) -> int:
        """How many programs may share a sum at most."""
        return most_parts(self.schedule, self.device)

    def turns(self, blocks: Mapping[str, int]) -> int:
        """Return the turns of the longest loop, which programs may share; 1 without any."""
        loops = self.schedule.names("loop", "step")
        return max([-(-self.schedule.extents[name] // blocks.get(name, 1)) for name in loops], default=1)

    @cached_property
    def has_fixed_sums(self) -> bool:
        """Whether no summed name varies in length: a tuned config is remembered for other lengths, by powers of two."""
        return not any(is_varying(self.schedule.bound, name) for name in self.schedule.bound.statement.summed)

    def programs(self, blocks: Mapping[str, int]) -> int:
        extents = self.schedule.extents
        return prod(-(-extents[name] // blocks.get(name, 1)) for name in self.schedule.names("grid", "tile"))

    def seconds(self, config: Config) -> float:
        """Return the estimated time of a config: what its bytes take, or its waiting, and a part of the other one."""
        moving, waiting = self.moving(config), self.waiting(config)
        return max(moving, waiting) + OVERLAP * min(moving, waiting) + self.seconds_of_parts(config)

    def moving(self, config: Config) -> float:
        """Return what the bytes take: each once from memory, all that is loaded from the cache."""
        device, blocks = self.device, dict(config.blocks)
        programs, processors = self.programs(blocks) * config.parts, device.multiprocessors
        most = ceil(programs / processors)
        uneven = most * processors / programs
        along, distinct = self.schedule.along, self.distinct
        if blocks[along] < self.schedule.extents[along]:
            row = blocks[along] * max(read.itemsize for read in self.reads)
            distinct *= 1 + device.sector_bytes / row / 2  # memory gives less of its bandwidth to short rows
        loaded = self.loaded(config.blocks)
        moved = max(distinct / device.bandwidth, loaded / (L2_SPEED * device.bandwidth))
        return max(moved * (1 + (uneven - 1) / 2), most * loaded / programs / device.read_rate)

    def waiting(self, config: Config) -> float:
        """Return how long programs wait for what they load, those that run at once together."""
        device, blocks, threads = self.device, dict(config.blocks), config.num_warps * self.device.warp_width
        at_once = device.resident(threads, 2 * prod(blocks.values()) / threads + SPARE_REGISTERS)
        waves = ceil(self.programs(blocks) * config.parts / (device.multiprocessors * at_once))
        turns = prod(self.count(name, blocks) for name in self.schedule.names("loop", "step"))
        return waves * device.latency * (1 + ceil(turns / config.parts) / UNROLLED)

    def count(self, name: str, blocks: Mapping[str, int]) -> int:
        """Return how many blocks a name has."""
        return ceil(self.schedule.extents[name] / blocks.get(name, 1))

    @cached_property
    def distinct(self) -> float:
        """The bytes of all factors."""
        return sum(self.bytes_of(read, self.schedule.extents) for read in self.reads)

    @cached_property
    def loaded(self) -> Callable[[tuple[tuple[str, int], ...]], float]:
        """The bytes that all programs load with such blocks: of a factor a tile in each turn that has another one."""
        return cache(self._loaded)

    def _loaded(self, blocks: tuple[tuple[str, int], ...]) -> float:
        schedule = self.schedule
        lengths = block_lengths(schedule, dict(blocks), schedule.extents)
        lengths = {name: min(length, schedule.extents[name]) for name, length in lengths.items()}
        counts = {name: self.count(name, dict(blocks)) for name in schedule.names("loop", "step")}
        return self.programs(dict(blocks)) * sum(
            prod(counts[loop] for loop in read.loops) * self.bytes_of(read, lengths) for read in self.reads
        )

    def bytes_of(self, read: _Read, lengths: Mapping[str, int]) -> float:
        """Return the bytes of a part of a factor that is so long along each name, in whole sectors along memory."""
        sector = self.device.sector_bytes
        rows, row = (prod(lengths.get(name, 1) for name in names) for names in (read.others, read.along))
        if all(lengths.get(name, 1) >= self.schedule.extents[name] for name in read.along):
            return float(rows * row * read.itemsize)  # whole rows, one after another
        return rows * (ceil(row * read.itemsize / sector) + 0.5) * sector

    def seconds_of_parts(self, config: Config) -> float:
        """Return what the sums of parts take: a kernel of their own, or a memset and additions; a conversion."""
        bound, device = self.schedule.bound, self.device
        if config.copies > 1:
            moved = prod(bound.size) * config.copies * bound.compute_dtype.itemsize / device.bandwidth
            return device.launch_gap + OF_COPIES * moved
        if config.parts == 1:
            return 0.0
        results = prod(self.schedule.extents[name] for name in self.schedule.free) * config.parts
        is_wide = bound.dtype.itemsize == 2
        return (1 + is_wide) * device.launch_gap + 4 * results * bound.compute_dtype.itemsize / device.bandwidth
