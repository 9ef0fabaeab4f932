"""A bound statement to schedules: which index is grid, tile or loop, how results reach the output, for which device.

A file imports only from those above it.

    device           what a GPU can do, as data
    constant_tables  reading constant tables, numbers in nested lists that a kernel's source may hold
    contraction      how the factors of one tile are multiplied and summed
    block_rows       how the rows of a block-sparse matrix are taken
    scatter          how a result may reach the output, and what the statement becomes for it
    movement         tiles of statements that move data: flattened axes, transposes
    stretches        long sums over memory as it lies
    schedule         a role for every index of a statement, and what follows from the roles
    rules            a bound statement to the schedules that are worth trying
    joint            several statements to schedules of one kernel
    relayout         a tensor copied so that rows of it are picked instead of elements
    split            a statement of many factors as several of fewer
    grouping         a statement over tiles of equal index
    aligned          a product over copies of its operands whose rows are aligned
"""

from .aligned import KNOWN_DIVISOR, Aligned, AlignedCopy, aligned
from .block_rows import blocks_side_by_side, may_be_listed, rows_of_a_set
from .constant_tables import line_of_access, number_at
from .contraction import SHORT, Dot, Leaf, Node, Product, Sum, dots, leaves, multiply
from .device import DEVICES, H200, Device, described_as, device_of, line_of
from .grouping import Grouping, groupings, number_of_tiles
from .joint import holds_sums, in_turns, joint_schedules, may_share_kernel, summed_schedules
from .movement import VECTOR_BYTES, WARP_ROW, block_along
from .relayout import Split
from .rules import LARGEST_TILE, MOST_ENTRIES, other_schedules, schedules
from .scatter import ON_CHIP_EXTENT, Factor, Flat, Merged, OneHot, Owner, is_of_one_length, is_varying, strategies
from .schedule import Schedule, Strides, resized
from .split import split

__all__ = [
    "DEVICES",
    "H200",
    "KNOWN_DIVISOR",
    "LARGEST_TILE",
    "MOST_ENTRIES",
    "ON_CHIP_EXTENT",
    "SHORT",
    "VECTOR_BYTES",
    "WARP_ROW",
    "Aligned",
    "AlignedCopy",
    "Device",
    "Dot",
    "Factor",
    "Flat",
    "Grouping",
    "Leaf",
    "Merged",
    "Node",
    "OneHot",
    "Owner",
    "Product",
    "Schedule",
    "Split",
    "Strides",
    "Sum",
    "aligned",
    "block_along",
    "blocks_side_by_side",
    "described_as",
    "device_of",
    "dots",
    "groupings",
    "holds_sums",
    "in_turns",
    "is_of_one_length",
    "is_varying",
    "joint_schedules",
    "leaves",
    "line_of",
    "line_of_access",
    "may_be_listed",
    "may_share_kernel",
    "multiply",
    "number_at",
    "number_of_tiles",
    "other_schedules",
    "resized",
    "rows_of_a_set",
    "schedules",
    "split",
    "strategies",
    "summed_schedules",
]
