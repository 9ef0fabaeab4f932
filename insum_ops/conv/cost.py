"""The time of each form of a convolution over a map, estimated from the map, the layer and the GPU.

The forms differ in how many products of a row of features by a tap's weight they make, and in how results reach memory:

- a table makes one for every output and tap, whether the pair is there or not, and stores each result once;
- groups make one for every pair, and add its results to the output in memory;
- tiles make one for every tap that some output of a tile has, and store each result once.

The estimate is tested against `MEASURED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from ..compiler import Device

__all__ = ["MEASURED", "MEASURED_SUMS", "Measured", "MeasuredSums", "Work", "grouping_milliseconds", "milliseconds"]

# Parts of what a GPU can do at most, as kernels reach them; fitted to `MEASURED`, where they are within 15 % of it.
TENSOR_CORE_USE = 0.8
GATHERS = 2.0  # features read by many outputs come from the cache: as fast as this many times the memory
# bytes that pass through memory for each byte that is added there: read, and written; less where the cache holds all
ADDED_IN_CACHE, ADDED_IN_MEMORY = 1.6, 2.4
# Operations of the host, by the time that they take: groups are made by two kernels, and the host waits to learn how
# many there are, to allocate and to prepare another statement. One H200, first convolutions over clouds of 20,000 and
# 80,000 voxels at 64 to 256 channels in float16 and tf32: 0.1 to 0.3 ms longer in groups than over the table, 0.2 in
# the middle, less what the kernels differ by.
GROUPING_OPERATIONS = 19


@dataclass(frozen=True)
class Work:
    """A convolution over a map, as far as its time depends on it."""

    inputs: int
    outputs: int
    volume: int  # taps of the kernel
    channels: int  # of the inputs or the outputs, whichever are more
    itemsize: int
    sum_itemsize: int  # of sums that meet in memory


def milliseconds(form: str, work: Work, pairs: int, device: Device) -> float:
    """Return the milliseconds of a convolution by tensor cores; `form` is "table", "tiles" or "groups"."""
    entries = work.outputs * work.volume
    row = work.channels * work.itemsize
    multiply = 2 * work.channels**2 / (TENSOR_CORE_USE * device.flops(work.itemsize))
    per_product = multiply + row / (GATHERS * device.bandwidth)
    if form == "table":
        return 1e3 * entries * per_product
    if form == "tiles":  # outputs that are sorted by their taps lack few: between all of them and none
        return 1e3 * sqrt(pairs * entries) * per_product
    results = work.channels * work.sum_itemsize
    is_cached = work.inputs * row + work.outputs * results <= device.l2_bytes
    added = (ADDED_IN_CACHE if is_cached else ADDED_IN_MEMORY) * results / device.bandwidth
    return 1e3 * pairs * (per_product + added)


def grouping_milliseconds(device: Device) -> float:
    """Return how long a call waits for groups of a map that has none yet."""
    return device.host_milliseconds(GROUPING_OPERATIONS)


class Measured(NamedTuple):
    """Milliseconds on the device of one convolution, in tiles and groups of 128."""

    voxels: int
    pairs: int
    channels: int
    table: float
    tiles: float
    groups: float


# One H200, 3^3 submanifolds at 5 cm in float16, sums rounded on the way where they are added: a room, whose table is
# 38 % full, and a scan, 18 % full. The pairs are estimated from these shares, and the parts above were fitted to these
# rows: they are no test of the estimate at other sizes.
MEASURED = (
    Measured(65_667, 673_743, 64, table=0.040, tiles=0.023, groups=0.041),
    Measured(65_667, 673_743, 256, table=0.37, tiles=0.22, groups=0.32),
    Measured(79_943, 388_523, 64, table=0.047, tiles=0.023, groups=0.027),
    Measured(79_943, 388_523, 256, table=0.46, tiles=0.18, groups=0.18),
)


class MeasuredSums(NamedTuple):
    """Milliseconds on the device of a weight's gradient over the room, by the size of the groups that it sums."""

    channels: int
    precision: str
    by_size: dict[int, float]


MEASURED_SUMS = (
    MeasuredSums(64, "float16", {128: 0.044, 512: 0.029, 2048: 0.027}),
    MeasuredSums(256, "float16", {128: 0.53, 512: 0.31, 2048: 0.26}),
    MeasuredSums(64, "tf32", {128: 0.074, 512: 0.068, 2048: 0.098}),
    MeasuredSums(256, "tf32", {128: 1.12, 512: 0.82, 2048: 0.87}),
)
