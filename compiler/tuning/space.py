"""The space of configs of a schedule, and those worth timing: a handful by default, a grid of them on request.

The space has an axis for each choice: the tile along every axis of the schedule, the depth of a step, warps, stages,
which operand takes the rows' side of a dot, the order of programs, rows to a program, programs to a sum. Points of it
come from what was measured (`measured`) and, on request, from a grid; both are clipped to the statement's extents and
to what the device holds, and rules order them. No rule takes a point away that the device could run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, product
from math import prod

from ..binding import power_of_two
from ..codegen import Config
from ..language import Var
from ..planning import (
    LARGEST_TILE,
    SHORT,
    VECTOR_BYTES,
    Device,
    Schedule,
    device_of,
    is_varying,
    line_of,
)
from .footprint import accumulators, unrolled_registers
from .measured import Point, measured_points
from .stretches import most_parts, stretch_configs
from .traits import LONG_TILE, TENSOR_CORE_SIDE, Traits, fitting, gathers_rows, slices, table_axes, traits_of

__all__ = ["ONE_WARP", "TILES_AHEAD", "configs", "run_lengths", "spread"]

BUSY = 4  # programs for each multiprocessor, so that none waits for the last; an estimate, not measured
# Turns of a loop, if it has them, for each program that shares it, so that adding parts stays the smaller part; an
# estimate too.
LEAST_TURNS = 4
FEWER_PARTS = (1, 2, 4)  # times as many programs as would do, where each has one turn
MOST_ROWS = 8  # of a program, whose neighbours have as many groups
SORTED = 6  # configs that are tried with the longest rows first too
FORWARD = 3  # configs without a dot that are tried with grid positions one after another too
MOST_WARPS = 8
MOST_STAGES = 6
MOST_TILES_AHEAD = 12  # of a source that holds tables: they wait in registers
# Points that are tried with tiles of close cover too. Over tables in the source every point is, and close cover comes
# first: a product of 24 channels up to lmax 2 took an H200 0.035 ms so and 0.047 with padded tiles (4,000 samples), of
# 40 and 80 channels up to lmax 1 0.031 and 0.050, 0.119 and 0.187. Padded ones stay for where they have fewer programs.
COVERED = 1
# Tiles over tables in the source that have two axes, of one warp, which exchanges no sums with others: elements along
# memory, and of a thread; so many tiles are ahead, of which 2 and 8 took as long. One H200, products with weights for
# each sample in ms (share of the floor), by a one-off over all candidates: 108 channels up to lmax 1 0.761 by the first
# (1.00), 44 0.298 by the second (0.91), 107 up to lmax 2 0.329 by the third (0.87), 68 0.368 by the fourth (0.79), the
# gradient of y with 44 up to lmax 1 0.275 by the last (0.99). Before there was a loop, the best of the first four took
# 1.268, 0.332, 0.705 and 0.771. Statements that are added up take them too: sums of 48, 24, 12 and 6 channels took
# several warps up to 8 times as long (`python -m bench.products --seed 4211 --cases 2`).
ONE_WARP, TILES_AHEAD = ((128, 16), (64, 16), (64, 8), (32, 8), (32, 4)), 4
HARDLY_MORE = 1.15  # times the elements of the closest cover; an estimate, not measured
LEAST_ACCUMULATORS, MOST_ACCUMULATORS = 8, 256  # registers of a thread that a tile of the grid has sums in
# Copies of an output that programs scatter into, the most that gained: 5.6 million numbers into 773 places took an
# H200 0.068 ms with 256 copies, 0.076 with 64 and 0.617 without.
MOST_COPIES = 256
# Neighbours that a program takes in turn, whose sums of one position are added once; of a row each, or of tables, which
# have many rows each, and as many sums as leave a thread registers for what it loads. So many warps of a multiprocessor
# wait for rows at a time: 18,357 edges of 68 channels took 0.0150 ms in runs of 4, 0.0147 of 8, 0.0144 of 16 and 0.0202
# of 32, 29,474 edges of 24 channels to 44 rows 0.0382, 0.0340, 0.0313 and 0.0298 (`bench.products`, seed 25).
RUNS, LEAST_RUN, MOST_RUN, MOST_SUMS = (32, 64), 4, 32, 128
WAITING_WARPS = 8
MOST_AHEAD = 2  # vectors of a thread for each entry of a piece, up to which positions may be loaded ahead
LEAST_ADDITIONS = 16  # to each element of a copy, so that adding the copies up is the smaller part

GRID_SIDES = (16, 32, 64, 128, 256)
GRID_DEPTHS = (32, 64, 128)
GRID_WARPS = (1, 2, 4, 8)
GRID_STAGES = (2, 3, 4)
GRID_HEIGHTS = (1, 2, 4, 8, 16, 32)
# a coarser grid, whose points are compared by the cost model where nothing was measured
SPREAD_SIDES = (16, 32, 64, 128)
SPREAD_LINES = (0.5, 1)
SPREAD_WARPS = (4, 8)
SPREAD_STAGES = 3
SPREAD_LENGTHS = (1, 4, 16, 64, 256, 1024)
MOST_OF_A_THREAD = 32  # elements


def configs(schedule: Schedule, full: bool = False, has_order: bool = False) -> tuple[Config, ...]:
    """Return the configs of one schedule, the most promising first, each once.

    Args:
        schedule: the schedule, for the GPU of its tensors.
        full: whether a grid of configs follows, for a full search.
        has_order: whether the fact holds the order of rows by their length.
    """
    space = Space(schedule, device_of(schedule.bound.device))
    listed = stretch_configs(schedule, space.device) if schedule.along else ()
    ways = iter(()) if schedule.along and not full else space.in_program_orders(space.measured(), full)
    if schedule.uses_dot:
        ways = space.filling_first(ways)
    if schedule.form and not schedule.run:
        ways = map(space.filling, ways)
    if full:
        ways = chain(ways, space.grid())
    if has_order:
        ways = space.in_row_orders(ways)
    if schedule.is_shared:
        ways = (replace(config, parts=space.parts(config)) for config in ways)
        ways = (config for config in ways if config.parts > 1)
    if schedule.run:
        ways = space.in_runs(ways)
    if schedule.walks_rows or (schedule.run and not schedule.tables):
        ways = space.with_positions_ahead(ways)
    ways = chain(listed, ways)
    if schedule.has_copies:
        ways = (replace(config, copies=copies) for config in ways for copies in space.copies(config))
    return tuple(dict.fromkeys(ways))


def spread(schedule: Schedule, device: Device) -> tuple[Config, ...]:
    """Return configs from all over the space of a schedule, in no order; none where rows or tables shape its tiles."""
    if schedule.tables or schedule.has_table or schedule.merged is not None or schedule.owner is not None:
        return ()
    if schedule.run:
        return ()
    space = Space(schedule, device)
    ways: Iterable[Config] = chain.from_iterable(map(space.place, space.spread_points()))
    if not schedule.uses_dot and schedule.names("grid"):
        ways = (replace(config, reverse=True) for config in ways)
    if schedule.is_shared:
        ways = (replace(config, parts=parts) for config in ways for parts in space.numbers_of_parts(config))
    if schedule.has_copies:
        ways = (replace(config, copies=config.parts) for config in ways)
    return tuple(dict.fromkeys(ways))


def run_lengths(programs: int, warps: int, device: Device) -> tuple[int, int]:
    """Return how many neighbours programs over tables take in turn, where one each would make so many `programs`.

    The longest leaves each multiprocessor its warps, the other one twice as many.
    """
    longest = programs * warps // (device.wave * WAITING_WARPS)
    run = max(2 * LEAST_RUN, min(MOST_RUN, power_of_two(longest)))
    return run, run // 2


@dataclass(frozen=True)
class Space:
    """All configs of a schedule on a device."""

    schedule: Schedule
    device: Device

    # the axes of a tile

    @cached_property
    def traits(self) -> Traits:
        """The properties by which measured points are found."""
        return traits_of(self.schedule, self.device)

    @cached_property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tile axes that a point's narrow side holds, and those that its wide side holds."""
        schedule, traits = self.schedule, self.traits
        if traits.form == "unrolled":
            *others, vector = sorted(schedule.axes, key=lambda name: schedule.extents[name])
            return tuple(others), (vector,)
        if not schedule.uses_dot:
            return schedule.axes[:-1], schedule.axes[-1:]
        first, *others = schedule.names("tile")
        return ((first,), tuple(others)) if traits.is_narrow_first else (tuple(others), (first,))

    @cached_property
    def line(self) -> int:
        """The elements of a depth of 1, a line of memory; 64 for a table, whatever the dtype."""
        schedule = self.schedule
        itemsize = schedule.bound.dtype.itemsize
        return 64 if schedule.has_table else 128 // itemsize if schedule.merged is not None else line_of(itemsize)

    # points

    def measured(self) -> Iterator[Config]:
        """Yield the measured points as configs of this space."""
        has_turns = False
        for number, point in enumerate(measured_points(self.traits)):
            if point.is_else and has_turns:
                continue
            for config in self.place(point):
                has_turns |= config.rows > 1
                closer = tuple(self.covering(config)) if number < COVERED or self.schedule.tables else ()
                yield from (*closer, config) if self.traits.form == "unrolled tile" else (config, *closer)
        if self.traits.form == "unrolled tile":
            yield from self.along_memory()

    def along_memory(self) -> Iterator[Config]:
        """Yield tiles over tables in the source that lie along the memory of what has both axes.

        They are as deep as leaves a thread of their one warp its elements. What is summed over is walked in blocks.
        """
        schedule, axes = self.schedule, self.schedule.axes
        accesses = [schedule.output, *schedule.accesses]
        widest = [access.indices[-1] for access in accesses if {*axes} <= {*access.names}]
        if not widest or not isinstance(widest[-1], Var) or widest[-1].name not in axes:
            return
        along = widest[-1].name
        lengths = {name: power_of_two(schedule.extents[name]) for name in axes}
        for length, each in ONE_WARP:
            other = max(1, each * self.device.warp_width // min(lengths[along], length))
            blocks = {name: min(lengths[name], length if name == along else other) for name in axes}
            config = Config(tuple(blocks.items()), 1, TILES_AHEAD)
            yield from (config,) if self.has_registers(config) else ()

    def has_registers(self, config: Config) -> bool:
        """Whether a thread has registers for a tile over tables in the source, if it walks a summed axis in blocks."""
        schedule = self.schedule
        if not schedule.tables or all(schedule.is_one_step(own, config.block(own)) for own in schedule.names("step")):
            return True
        each = max(1, prod(size for _, size in config.blocks) // (config.num_warps * self.device.warp_width))
        ahead = min(config.num_stages, TILES_AHEAD)
        return unrolled_registers(schedule, each, ahead) <= self.device.thread_registers

    def place(self, point: Point) -> Iterator[Config]:
        """Yield a point as a config, clipped to the statement; nothing if the statement has no such point."""
        schedule, steps = self.schedule, self.schedule.names("step")
        if len(point.depths) not in (1, len(steps)):
            return
        narrow, wide = self.sides
        sizes = {**dict.fromkeys(narrow, point.narrow), **dict.fromkeys(wide, point.wide)}
        if schedule.uses_dot:
            depths = point.depths * len(steps) if len(point.depths) == 1 else point.depths
            sizes |= {name: int(depth * self.line) for name, depth in zip(steps, depths)}
            if schedule.has_table:
                long_steps = [name for name in steps if schedule.extents[name] > SHORT]
                sizes |= dict.fromkeys([name for name in steps if name not in long_steps[:1]], 64)
        # a row that begins before its first column needs a longer block than its columns do
        longer = wide if point.is_aligned else ()
        blocks = tuple(
            (name, sizes[name] if name in longer else fitting(schedule, name, sizes[name])) for name in self.order
        )
        elements = prod(size for _, size in blocks)
        if schedule.tables and len(schedule.axes) == 2 and elements > LARGEST_TILE:
            return
        warps = point.warps or max(1, min(elements // (self.device.warp_width * point.each), MOST_WARPS))
        swap = schedule.uses_dot and self.traits.is_narrow_first != point.is_narrow_rows
        config = Config(blocks, warps, point.stages, swap, point.reverse, is_aligned=point.is_aligned)
        yield from self.in_turn(config) if point.is_in_turn else (config,)

    def covering(self, config: Config) -> Iterator[Config]:
        """Yield the config with tiles that cover the extents more closely: along the sums, and along the results too.

        The bytes on their way stay as many: shallower steps have more stages, smaller tiles fewer warps.
        """
        schedule = self.schedule
        if not (schedule.uses_dot or schedule.tables) or config.rows > 1:
            return
        short = table_axes(schedule)
        own = [name for name in config.names if name in schedule.bound.extents and name not in short]
        fixed = [name for name in own if not is_varying(schedule.bound, name)]
        closer = {name: self.closest(name, config.block(name)) for name in fixed}
        steps = {name: size for name, size in closer.items() if schedule.roles[name] == "step"}
        for chosen in (steps, closer):
            blocks = tuple((name, chosen.get(name, size)) for name, size in config.blocks)
            if blocks != config.blocks:
                shallower = prod(config.block(name) // size for name, size in steps.items())
                most = max(MOST_TILES_AHEAD if schedule.tables else MOST_STAGES, config.num_stages)
                warps, smaller = (
                    config.num_warps,
                    prod(size for _, size in config.blocks) // prod(dict(blocks).values()),
                )
                warps = max(1, warps // smaller) if schedule.tables else warps
                stages = min(1 + (config.num_stages - 1) * shallower, most)
                covering = replace(config, blocks=blocks, num_warps=warps, num_stages=stages)
                yield from (covering,) if self.has_registers(covering) else ()

    def closest(self, name: str, size: int) -> int:
        """Return the longest tile up to `size` that covers an extent with hardly more padding than any other.

        48 is three tiles of 16 and not one of 64, 112 is two of 64: powers of two are all that Triton has.
        """
        schedule, extent = self.schedule, self.schedule.extents[name]
        # of one axis alone, fewer elements than a warp has threads would leave some without any
        least = self.device.warp_width if len(schedule.axes) == 1 else self.device.sector_bytes // 4
        least = TENSOR_CORE_SIDE if schedule.uses_dot else least
        tiles = [tile for tile in (8, *GRID_SIDES) if least <= tile < size] + [size]
        covered = {tile: -(-extent // tile) * tile for tile in tiles}
        return max(tile for tile in tiles if covered[tile] <= HARDLY_MORE * min(covered.values()))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The axes as configs list them."""
        schedule, (narrow, wide) = self.schedule, self.sides
        if not schedule.uses_dot:
            return (*narrow, *wide)
        return schedule.axes if schedule.has_table else (*schedule.names("tile"), *schedule.names("step"))

    def grid(self) -> Iterator[Config]:
        """Yield every combination for a full search, but for tiles that are too small or too large for their warps."""
        schedule = self.schedule
        if schedule.tables:
            return
        if not schedule.uses_dot:
            tall, widest = product(GRID_HEIGHTS, GRID_WARPS), self.traits.widest
            points = (Point(height, widest, warps) for height, warps in tall) if widest else self.spread_points()
            yield from self.in_program_orders(chain.from_iterable(map(self.place, points)), True)
            return
        rows, *others = schedule.names("tile")
        for row, column, depth, warps, stages, swap in product(
            GRID_SIDES, GRID_SIDES, GRID_DEPTHS, GRID_WARPS, GRID_STAGES, (False, True)
        ):
            sizes = {rows: row, **dict.fromkeys(others, column), **dict.fromkeys(schedule.names("step"), depth)}
            blocks = {name: max(TENSOR_CORE_SIDE, fitting(self.schedule, name, size)) for name, size in sizes.items()}
            config = Config(tuple(blocks.items()), warps, stages, swap)
            if LEAST_ACCUMULATORS <= accumulators(config, schedule, self.device) <= MOST_ACCUMULATORS:
                yield config

    def spread_points(self) -> Iterator[Point]:
        """Yield points from all over the space, of tiles that fit into the registers of their warps."""
        width = self.device.warp_width
        if self.schedule.uses_dot:
            for narrow, wide, depth, warps in product(SPREAD_SIDES, SPREAD_SIDES, SPREAD_LINES, SPREAD_WARPS):
                if LEAST_ACCUMULATORS <= narrow * wide / (warps * width) <= LONG_TILE:
                    yield Point(
                        narrow, wide, warps, SPREAD_STAGES, (depth,), is_narrow_rows=self.traits.is_narrow_first
                    )
            return
        heights = SPREAD_LENGTHS if len(self.schedule.axes) > 1 else (1,)
        for narrow, wide, warps in product(heights, SPREAD_LENGTHS, (1, *SPREAD_WARPS)):
            if warps * width <= narrow * wide <= MOST_OF_A_THREAD * warps * width:
                yield Point(narrow, wide, warps)

    # orders

    def in_program_orders(self, ways: Iterable[Config], full: bool) -> Iterator[Config]:
        """Yield the configs of a schedule without a dot in both orders of programs.

        First come those in which neighbouring programs differ in their grid position, since they share long operands: a
        channelwise product of 20,000 edges into 71 components took an H200 0.52 ms, and 0.82 in the other order. Of
        programs that gather parts of rows the other order was never among the fastest. What moves data writes the
        output in the order of its memory.
        """
        schedule = self.schedule
        if schedule.uses_dot or schedule.tables or schedule.form or not schedule.names("grid"):
            yield from ways
            return
        listed = list(ways)
        yield from (replace(config, reverse=True) for config in listed)
        forward = [] if gathers_rows(schedule) else [config for config in listed if self.has_two_orders(config)]
        yield from forward if full else forward[:FORWARD]

    def has_two_orders(self, config: Config) -> bool:
        """Return whether programs differ in more than one name, so that either may vary the fastest."""
        blocks, extents = dict(config.blocks), self.schedule.extents
        return sum(extents[name] > blocks.get(name, 1) for name in self.schedule.names("grid", "tile")) > 1

    def filling_first(self, ways: Iterable[Config]) -> Iterator[Config]:
        """Yield first the configs that have a program for each multiprocessor, if there are any."""
        listed = list(ways)
        is_idle = [self.programs(self.tiles(config)) < self.device.wave for config in listed]
        yield from (config for config, idle in zip(listed, is_idle) if not idle)
        yield from (config for config, idle in zip(listed, is_idle) if idle)

    def filling(self, config: Config) -> Config:
        """Return a config of what moves data with fewer rows to a tile, if multiprocessors would have too few warps.

        A thread keeps one element at least, and a tile two rows if they begin at other columns. Both sides of a
        transpose lie along memory: its tiles stay as they are. The diagonals of 537 matrices of 93 rows took an H200
        0.0019 ms and not 0.0023.
        """
        name, least = self.order[0], 2 if config.is_aligned else 1
        threads, is_turned = config.num_warps * self.device.warp_width, self.schedule.form == "turned"
        while not is_turned and config.block(name) > least and prod(dict(config.blocks).values()) > threads:
            if self.programs(self.tiles(config)) * config.num_warps >= self.device.wave * WAITING_WARPS:
                break
            config = replace(config, blocks=((name, config.block(name) // 2), *config.blocks[1:]))
        return config

    def with_positions_ahead(self, ways: Iterable[Config]) -> Iterator[Config]:
        """Yield the configs of walks over entries, and one also with positions that are loaded a turn ahead.

        That is the one of shortest runs, or of a row to a program: rows side by side have as many turns as the longest.
        Pieces of a warp have about as many each: products with 128 columns of float16 and 256 of float32 took an H200
        0.055 ms and not 0.059 (gowalla-bip), 0.146 and not 0.154 (fb-Cornell5).
        894,789 entries of 87 columns took an H200 0.0495 ms and not 0.0530, 883,993 of 49 0.0500 and not 0.0536, but
        322,981 of 207, which fill a thread's registers, 0.091 and not 0.076.
        """
        schedule = self.schedule
        is_indirect = any(factor.is_indirect for factor in schedule.accesses)
        owner = schedule.owner
        may_be_ahead = is_indirect and bool(schedule.names("segment") if owner is not None else schedule.run)
        for config in ways:
            yield config
            if owner is None:
                is_short = config.run == RUNS[0]
            elif owner.is_cut:
                vectors = prod(dict(config.blocks).values()) * schedule.bound.dtype.itemsize / VECTOR_BYTES
                is_short = config.num_warps == 1 and vectors <= MOST_AHEAD * self.device.warp_width
            else:
                is_short = dict(config.blocks).get(owner.row, 1) == 1
            if may_be_ahead and is_short:
                yield replace(config, is_ahead=True)

    def in_row_orders(self, ways: Iterable[Config]) -> Iterator[Config]:
        """Yield the configs also with the longest rows first, where rows of whole blocks take long.

        Whole rows of single entries are short, and gain more from neighbours that read the same operands: sorted,
        graphs took up to 1.5 times as long on an H200. Of a slice all operands are in the cache: a walk over ogbl-ddi
        by slices of 128 of 256 columns of float32 took 0.153 ms with the longest rows first, and 0.205 without. A set
        and rows in turn have one order each: the longest first, unless a program takes several rows.
        """
        schedule, rest, owner = self.schedule, iter(ways), self.schedule.owner
        if schedule.tables:
            yield from rest
        elif schedule.holds_set or schedule.has_rows_in_turn:
            yield from (replace(config, longest_first=config.rows == 1) for config in rest)
        elif owner is not None and schedule.uses_dot:
            first = list(islice(rest, SORTED))
            yield from first
            yield from (replace(config, longest_first=True) for config in first)
            yield from rest
        elif owner is not None and schedule.roles[owner.row] == "grid" and not owner.is_cut:
            column, parts = schedule.axes[-1], slices(schedule)
            yield from (replace(config, longest_first=config.block(column) in parts) for config in rest)
        else:
            yield from rest

    def in_turn(self, config: Config) -> Iterator[Config]:
        """Yield the config with as many persistent rows as leave a multiprocessor eight warps; nothing for one row."""
        schedule, merged = self.schedule, self.schedule.merged
        rows = self.programs(self.tiles(config)) // (self.device.wave * MOST_WARPS // config.num_warps)
        is_whole = merged is None or config.block(merged.name) >= schedule.extents[merged.name]
        if schedule.has_rows_in_turn and is_whole and rows > 1:
            yield replace(config, rows=min(rows, MOST_ROWS))

    def in_runs(self, ways: Iterable[Config]) -> Iterator[Config]:
        """Yield the configs with several neighbours to a program, which holds a sum for each row that tables name."""
        schedule = self.schedule
        rows = prod(schedule.extents[name] for name in schedule.names("unrolled") if name in schedule.free)
        for config in ways:
            if rows * max(1.0, accumulators(config, schedule, self.device)) <= MOST_SUMS:
                programs = self.programs(self.tiles(config))
                lengths = run_lengths(programs, config.num_warps, self.device) if schedule.tables else RUNS
                yield from (replace(config, run=run) for run in lengths)

    def parts(self, config: Config) -> int:
        """Return how many programs share a sum (split-K)."""
        tiles = self.tiles(config)
        turns = max(tiles[name] for name in self.schedule.names("loop", "step"))
        most = min(power_of_two(BUSY * self.device.wave // self.programs(tiles)), self.most_parts)
        return max(1, min(most, max(turns // LEAST_TURNS, min(turns, 2))))

    def numbers_of_parts(self, config: Config) -> Iterator[int]:
        """Yield how many programs may share a sum: as many as keep a GPU busy or have a turn each, or fewer."""
        tiles = self.tiles(config)
        turns = max(tiles[name] for name in self.schedule.names("loop", "step"))
        most = min(turns, BUSY * self.device.wave // self.programs(tiles), self.most_parts)
        most = power_of_two(most + 1) // 2 if most else 1
        yield from (most // fewer for fewer in FEWER_PARTS if most // fewer > 1)

    @cached_property
    def most_parts(self) -> int:
        """How many programs may share a sum at most."""
        return most_parts(self.schedule, self.device)

    def copies(self, config: Config) -> tuple[int, ...]:
        """Return how many copies of the output are tried: one for each part of a sum; two numbers for a scatter."""
        schedule = self.schedule
        if schedule.is_shared:
            return (config.parts,)
        elements = prod(schedule.bound.size)
        additions = prod(schedule.extents[name] for name in schedule.free)
        room = self.device.room_for_copies / (elements * schedule.bound.compute_dtype.itemsize)
        most = int(min(MOST_COPIES, room, additions / elements / LEAST_ADDITIONS))
        copies = power_of_two(most + 1) // 2
        return tuple(count for count in (copies, copies // 4) if count > 1)

    def tiles(self, config: Config) -> dict[str, int]:
        """Return how many tiles each name has, counted by the power of two of its length, as tuning keys do."""
        blocks = dict(config.blocks)
        return {name: power_of_two(extent) // blocks.get(name, 1) for name, extent in self.schedule.extents.items()}

    def programs(self, tiles: Mapping[str, int]) -> int:
        """Return how many programs there are with so many tiles of each name."""
        return prod(max(tiles[name], 1) for name in self.schedule.names("grid", "tile"))
