"""The kernels that count, group and swap a table's pairs; Triton gives their parameters types when it compiles them.

A program has TAPS taps and the `span` rows of one block, ROWS of them at a time.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = ["count", "group", "swap"]


@triton.jit
def _tile(table_ptr, row, tap, end, V: tl.constexpr):
    """Return table[row,tap] as [TAPS, ROWS]; -1 past the last."""
    at = table_ptr + row.to(tl.int64)[None, :] * V + tap[:, None]
    return tl.load(at, mask=(tap < V)[:, None] & (row < end)[None, :], other=-1)


@triton.jit(do_not_specialize=["rows", "span"])
def count(counts_ptr, table_ptr, rows, span, V: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """counts[1+block,tap] = its pairs; counts[0,tap] += them, whole numbers, so that any order gives the same."""
    tap = tl.program_id(0) * TAPS + tl.arange(0, TAPS)
    block = tl.program_id(1)
    end = tl.minimum((block + 1) * span, rows)
    pairs_here = tl.zeros([TAPS, ROWS], tl.int32)
    for start in range(block * span, end, ROWS):
        pairs_here += (_tile(table_ptr, start + tl.arange(0, ROWS), tap, end, V) >= 0).to(tl.int32)
    pairs = tl.sum(pairs_here, 1)
    tl.store(counts_ptr + (1 + block) * V + tap, pairs, mask=tap < V)
    tl.atomic_add(counts_ptr + tap, pairs, mask=tap < V, sem="relaxed")


@triton.jit
def _groups(pairs, group_size):
    return pairs // group_size + (pairs % group_size > 0).to(tl.int32)


@triton.jit
def _pairs_before(counts_ptr, block, tap, V: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """Return how many pairs of each tap earlier blocks have."""
    pairs_here = tl.zeros([TAPS, ROWS], tl.int32)
    for start in range(0, block, ROWS):
        earlier = start + tl.arange(0, ROWS)
        at = counts_ptr + (1 + earlier)[None, :] * V + tap[:, None]
        pairs_here += tl.load(at, mask=(tap < V)[:, None] & (earlier < block)[None, :], other=0)
    return tl.sum(pairs_here, 1)


@triton.jit(do_not_specialize=["rows", "span", "group_size", "total"])
def group(
    x_ptr, y_ptr, z_ptr, table_ptr, counts_ptr, rows, span, group_size, total,
    V: tl.constexpr, ALL_TAPS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """MAPX[p,q] = x, MAPY[p,q] = table[x,z], MAPZ[p] = z: every pair in its place, -1 after a tap's last pair.

    The last tap has all groups that are left of `total`.
    """
    first_tap, block = tl.program_id(0) * TAPS, tl.program_id(1)
    tap = first_tap + tl.arange(0, TAPS)
    every = tl.arange(0, ALL_TAPS)
    earlier = tl.load(counts_ptr + every, mask=every < tl.minimum(first_tap, V), other=0)
    pairs = tl.load(counts_ptr + tap, mask=tap < V, other=0)
    groups = _groups(pairs, group_size)
    first_group = tl.sum(_groups(earlier, group_size), 0) + tl.cumsum(groups, 0) - groups
    groups = tl.where(tap == V - 1, total - first_group, groups)
    first_slot = first_group.to(tl.int64) * group_size

    done = _pairs_before(counts_ptr, block, tap, V, TAPS, ROWS)
    end = tl.minimum((block + 1) * span, rows)
    for start in range(block * span, end, ROWS):
        row = start + tl.arange(0, ROWS)
        neighbour = _tile(table_ptr, row, tap, end, V)
        is_pair = neighbour >= 0
        pair_count = is_pair.to(tl.int32)
        slot = (first_slot + done - 1)[:, None] + tl.cumsum(pair_count, 1)
        tl.store(x_ptr + slot, tl.broadcast_to(row[None, :], [TAPS, ROWS]), mask=is_pair)
        tl.store(y_ptr + slot, neighbour, mask=is_pair)
        done += tl.sum(pair_count, 1)

    # of what a tap has but once, the taps of its groups and the padding after its pairs, every block writes a share
    first, step = block * ROWS, tl.num_programs(1) * ROWS
    for start in range(first, tl.max(groups, 0), step):
        place = (start + tl.arange(0, ROWS))[None, :]
        group_tap = tl.broadcast_to(tap[:, None], [TAPS, ROWS])
        tl.store(z_ptr + first_group[:, None] + place, group_tap, mask=place < groups[:, None])
    padding = groups.to(tl.int64) * group_size - pairs
    for start in range(first, tl.max(padding, 0).to(tl.int32), step):
        place = (start + tl.arange(0, ROWS))[None, :]
        slot, is_padding = (first_slot + pairs)[:, None] + place, place < padding[:, None]
        tl.store(x_ptr + slot, -1, mask=is_padding)
        tl.store(y_ptr + slot, -1, mask=is_padding)


@triton.jit(do_not_specialize=["entries"])
def swap(swapped_ptr, table_ptr, entries, V: tl.constexpr, BLOCK: tl.constexpr):
    """swapped[table[x,z],z] = x."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    neighbour = tl.load(table_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    tl.store(swapped_ptr + neighbour * V + entry % V, (entry // V).to(tl.int32), mask=neighbour >= 0)
