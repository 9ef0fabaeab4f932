"""Several statements as one tuning problem: the configs of their joint kernel, its launchers, and its key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeVar

from torch import Tensor

from ...formats.torch_state import uses_tensor_cores
from ..binding import power_of_two
from ..codegen import Config, Kernel, emit_joint, emit_summed
from ..language import UnsupportedError
from ..planning import (
    LARGEST_TILE,
    Schedule,
    Strides,
    device_of,
    in_turns,
    is_varying,
    joint_schedules,
    summed_schedules,
)
from ..runtime import JointLauncher, joint_launcher
from .autotune import BUILDERS, host_milliseconds
from .cost import Cost, JointCost, floor_milliseconds
from .footprint import unrolled_registers
from .problem import Problem, digest
from .space import ONE_WARP, TILES_AHEAD, run_lengths
from .tuning_cache import Key

__all__ = ["JointProblem", "SummedProblem", "joint_problem", "summed_problem"]

# Warps of a program, and elements of a tile for each thread, of statements over constant tables and of others. One H200
# (torch 2.11, triton 3.6): of 1 to 8 each, the fastest of 13 kinds of gradients along edges was among these.
WARPS = (1, 2, 4)
ELEMENTS = {True: (1, 2), False: (4, 8)}
# Over tables a warp takes a whole row first, in vectors of up to so many elements: gradients of x and weights of 18,357
# edges of 68 channels took 0.030 ms so and 0.035 with four warps to a row (`python -m bench.products --seed 25`).
VECTOR = 4
EACH_OF_A_SUM, MOST_WARPS = 16, 16  # elements for a thread of a sum that is too long for few warps; not measured
# Where programs add parts of sums: elements along memory, warps, and elements for each thread, so that a tile has far
# more elements than its sides have results; not measured.
WIDTHS, WARPS_OF_PARTS, EACH_OF_PARTS = (128, 64, 256), (4, 8), (32, 16)

MOST_PRODUCTS = 1024  # of a source of statements that are added up; an estimate
# Elements for each thread of one warp, over tables where programs add parts of sums: rows that are summed along. One
# H200, gradients of x, y and weights (`python -m bench.products --seed 4211 --cases 0`, `--seed 7702 --cases 0 4`): of
# 44 channels up to lmax 1 0.82 ms with two rows, 0.69 with four and with eight, 0.97 in three kernels; of 108 channels
# 1.94 with two, 1.69 with four, 2.63 in three; of 68 channels up to lmax 2 0.56 with one or two, 0.63 in three. In
# tiles of all weights, summed whole, the first took 0.88 with four warps and 1.59 with eight.
EACH_OF_ROWS = (2, 4, 8, 16)
# Products of a thread of a joint kernel over tables, of tiles with two axes of fixed length. Compiled for sm_90, those
# gradients of 43 channels up to lmax 2 have 1,992 of four rows, in 255 registers; in tiles of all weights they have
# 3,984 by eight warps, spill 2.5 kB and take a minute to compile.
MOST_OF_A_THREAD = 2048
BLOCK_COSTS = 4  # elements: what a block costs beside its length; not measured

Item = TypeVar("Item")


def joint_problem(problems: Sequence[Problem], in_order: Collection[int] = ()) -> JointProblem | None:
    """Return the problem of several statements in one kernel; None if they share none.

    What a name stands for is the same tensor in all of them, but for constant tables. The statements at the places
    `in_order` scatter by a sorted index: where programs can take neighbours in turn, they hold their sums.
    """
    bounds, strides, facts = zip(*[(problem.bound, problem.strides, problem.fact) for problem in problems])
    schedules = joint_schedules(bounds, strides, facts, problems[0].deterministic)
    if schedules is None:
        return None
    turns = in_turns(schedules, in_order) if in_order else None
    joint = JointProblem(tuple(problems), turns or schedules)
    return joint if joint.configs else None


@dataclass(frozen=True)
class JointProblem:
    """Statements that one kernel may run, each with its schedule in that kernel."""

    problems: tuple[Problem, ...]
    schedules: tuple[Schedule, ...]

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """The configs that are worth trying: over tables a row to a warp, then those with few elements for each thread.

        A program holds every tile that it has loaded until the last result is stored.
        """
        first = self.schedules[0]
        if any(schedule.is_shared for schedule in self.schedules) and not first.tables:
            choices = product(WIDTHS, EACH_OF_PARTS, WARPS_OF_PARTS)
            return tuple(dict.fromkeys(self._config(warps, each, along) for along, each, warps in choices))
        width = device_of(first.bound.device).warp_width
        summed = prod(power_of_two(first.extents[name]) for name in first.names("step"))
        most = min(summed // (EACH_OF_A_SUM * width), MOST_WARPS)
        more = [warps for warps in (most, most // 2) if warps > max(WARPS)]
        ways = [self._config(warps, each) for each in ELEMENTS[bool(first.tables)] for warps in (*more, *WARPS)]
        if any(schedule.is_shared for schedule in self.schedules):
            ways = [self._config(1, each) for each in EACH_OF_ROWS]
        ways = list(dict.fromkeys(ways))
        if first.tables:
            row = power_of_two(first.extents[first.names("tile", "step")[-1]])
            ways.insert(0, self._config(1, max(1, min(VECTOR, row // width))))
        if any(schedule.run for schedule in self.schedules):
            ways = [turned for config in ways for turned in self._in_turns(config)]
        ways = list(dict.fromkeys(ways))
        fixed = [name for name in first.axes if not is_varying(first.bound, name)]
        is_wide = bool(first.tables) and len(fixed) > 1
        return tuple(config for config in ways if not is_wide or self._of_a_thread(config) <= MOST_OF_A_THREAD)

    def _costs(self, config: Config) -> list[Cost]:
        """Return what each statement of a config costs."""
        return [problem.cost(part, config) for part, problem in zip(self.schedules, self.problems)]

    def _of_a_thread(self, config: Config) -> int:
        """Return how many products a thread has: one for each entry of the tables and element of a tile."""
        entries = sum(cost.entries for cost in self._costs(config))
        threads = config.num_warps * device_of(self.schedules[0].bound.device).warp_width
        return entries * max(1, prod(block for _, block in config.blocks) // threads)

    def _config(self, warps: int, each: int, along: int = LARGEST_TILE) -> Config:
        """Return a config with tiles of so many elements for each thread, or of all that is summed over if it is more.

        A tile holds what is summed over, then what lies side by side in memory, of one name no more than `along`.
        """
        first = self.schedules[0]
        blocks = {name: power_of_two(first.extents[name]) for name in first.names("step")}
        room = warps * each * device_of(first.bound.device).warp_width // prod(blocks.values())
        for name in reversed(first.names("tile")):
            blocks[name] = max(1, min(power_of_two(first.extents[name]), room, along))
            room, along = room // blocks[name], LARGEST_TILE
        return Config(tuple((name, blocks[name]) for name in first.names("tile", "step")), warps, 1)

    def _in_turns(self, config: Config) -> Iterator[Config]:
        """Yield a config of one row at a time so that programs take neighbours in turn; nothing if warps would be idle.

        A program has more to do for each neighbour than one of a statement alone, and takes half as many.
        """
        first = self.schedules[0]
        (turn,) = {schedule.run for schedule in self.schedules if schedule.run}
        device, row = device_of(first.bound.device), {name: block for name, block in config.blocks if name != turn}
        if config.num_warps > 1 and prod(row.values()) < config.num_warps * device.warp_width:
            return
        tiles = prod(-(-first.extents[name] // block) for name, block in row.items())
        programs = power_of_two(first.extents[turn]) * power_of_two(tiles) // 2
        blocks = tuple((name, row.get(name, 1)) for name, _ in config.blocks)
        for run in run_lengths(programs, config.num_warps, device):
            yield Config(blocks, config.num_warps, 1, run=run)

    @cached_property
    def strides(self) -> tuple[Strides, ...]:
        """The strides of each statement's tensors; its output has its number for a name."""
        return tuple({**problem.strides, str(at): problem.strides[""]} for at, problem in enumerate(self.problems))

    def kernel(self, config: Config) -> Kernel:
        return emit_joint(self.schedules, self.strides, config, [problem.flags for problem in self.problems])

    def predicted_milliseconds(self, config: Config) -> float:
        """Return about how long the kernel of a config takes."""
        parts = sorted(zip(self.schedules, self.problems), key=lambda pair: not pair[0].run)
        alone = replace(config, run=1)  # one that holds no sums adds each neighbour by itself
        costs = [problem.cost(part, config if part.run else alone) for part, problem in parts]
        return JointCost.of(costs).milliseconds

    def launcher(self, config: Config) -> JointLauncher:
        """Return the launcher of a config, which is not built yet."""
        sums = [part.sum_dtype(problem.flags.sum_dtype) for part, problem in zip(self.schedules, self.problems)]
        names = [problem.names for problem in self.problems]
        return joint_launcher(self.schedules, self.kernel(config), self.strides, names, sums)

    def built(self, tensors: Sequence[Sequence[Tensor]], configs: Sequence[Config]) -> dict[str, JointLauncher]:
        """Return the launchers of those configs that can be built for these tensors, by the text of their configs."""

        def build(config: Config) -> tuple[str, JointLauncher] | None:
            try:
                launcher = self.launcher(config)
                launcher.build(tensors)
            except UnsupportedError:
                return None
            return str(config), launcher

        with ThreadPoolExecutor(BUILDERS) as pool:
            return dict(pair for pair in pool.map(build, configs) if pair is not None)

    @cached_property
    def key(self) -> Key:
        """The key under which the faster of the joint kernel and separate ones is remembered."""
        keys = [problem.key for problem in self.problems]
        return replace(
            keys[0],
            statement="together: " + "; ".join(key.statement for key in keys),
            codegen=digest([*(key.codegen for key in keys), *(self.kernel(config).source for config in self.configs)]),
            dtypes=_joined([key.dtypes for key in keys]),
            extents=_joined([key.extents for key in keys]),
            layout=" | ".join(key.layout for key in keys),
            precision=" | ".join(key.precision for key in keys),
        )

    @property
    def host_milliseconds(self) -> tuple[float, float]:
        """How long calls keep the host busy: of the joint kernel, and of a kernel for each statement."""
        launch = host_milliseconds(self.schedules[0].bound.device, "")
        apart = [
            host_milliseconds(part.bound.device, "" if part.covers_output else "zero", total != part.bound.dtype)
            for part, problem in zip(self.schedules, self.problems)
            for total in [part.sum_dtype(problem.flags.sum_dtype)]
        ]
        return sum(apart) - launch * (len(apart) - 1), sum(apart)


def summed_problem(problems: Sequence[Problem]) -> SummedProblem | None:
    """Return the problem of several statements whose results are added up; None if no kernel does that.

    Those have one output, and what else has one name is one tensor, or has one length, in all of them.
    """
    bounds, strides, facts = zip(*[(problem.bound, problem.strides, problem.fact) for problem in problems])
    schedules = summed_schedules(bounds, strides, facts, problems[0].deterministic)
    problem = None if schedules is None else SummedProblem(tuple(problems), schedules)
    return problem if problem is not None and problem.configs else None


@dataclass(frozen=True)
class SummedProblem(JointProblem):
    """Statements that one kernel adds up, each with its schedule in that kernel."""

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """The configs that are worth trying; none if their source would be long."""
        registers = device_of(self.schedules[0].bound.device).thread_registers
        ways = dict.fromkeys(
            self._summed_config(along, each)
            for along, each in ONE_WARP
            if all(unrolled_registers(part, each, TILES_AHEAD) <= registers for part in self.schedules)
        )
        return tuple(config for config in ways if sum(cost.entries for cost in self._costs(config)) <= MOST_PRODUCTS)

    def _summed_config(self, along: int, each: int) -> Config:
        """Return a config with tiles of one warp, `each` elements for a thread, up to `along` of them side by side.

        What is summed over is taken in blocks, which are as long in all statements, so that their tiles can be added.
        """
        room, most = each * device_of(self.schedules[0].bound.device).warp_width, along
        parts = list(zip(self.schedules, self.strides))
        blocks: dict[str, int] = {}
        for is_along in (True, False):
            names = [
                (name, own) for own, strides in parts for name in own.axes if _is_along(name, own, strides) is is_along
            ]
            summed = [own.extents[name] for name, own in names if name not in own.free]
            for name, own in names:
                is_kept = name in own.free
                blocks[name] = min(power_of_two(own.extents[name]), most) if is_kept else _covering(summed, most)
            most = max(1, room // max([blocks[name] for name, _ in names], default=1))
        return Config(tuple(blocks.items()), 1, TILES_AHEAD)

    @property
    def apart_floor(self) -> float:
        """The least milliseconds of one statement after the other: each but the first reads what it adds to, too."""
        bound = self.problems[0].bound
        device, tensor_cores = device_of(bound.device), uses_tensor_cores(bound.dtype)
        alone = sum(floor_milliseconds(problem.bound, device, tensor_cores) for problem in self.problems)
        again = prod(bound.size) * bound.dtype.itemsize * (len(self.problems) - 1)
        return alone + 1e3 * again / device.bandwidth

    @cached_property
    def strides(self) -> tuple[Strides, ...]:
        return tuple(problem.strides for problem in self.problems)

    def kernel(self, config: Config) -> Kernel:
        return emit_summed(self.schedules, self.strides, config, [problem.flags for problem in self.problems])


def _is_along(name: str, schedule: Schedule, strides: Strides) -> bool:
    """Whether the elements of a factor that has all axes lie side by side along a name."""
    whole = [factor for factor in schedule.accesses if {*schedule.axes} <= {*factor.names}]
    return any(
        str(index) == name and stride == 1
        for factor in whole
        for index, stride in zip(factor.indices, strides[factor.name])
    )


def _covering(extents: Sequence[int], most: int) -> int:
    """Return the block by which extents take the least, the longest of several such.

    What lies beyond an end costs as much as what is inside, and each block as much as a few elements.

    >>> _covering([48], 32), _covering([24, 6], 16), _covering([92, 87], 128)
    (16, 8, 32)
    """
    blocks = [1 << power for power in range(most.bit_length()) if 1 << power <= power_of_two(max(extents))]
    cost = lambda block: sum(-(-extent // block) for extent in extents) * (block + BLOCK_COSTS)
    return min(blocks, key=lambda block: (cost(block), -block))


def _joined(tuples: Sequence[tuple[Item, ...]]) -> tuple[Item, ...]:
    return tuple(item for each in tuples for item in each)
