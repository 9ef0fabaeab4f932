"""The kernels that lay a sorted list of entries out and tell which groups a row has; Triton gives parameters types.

A program has BLOCK entries, rows or pieces of rows. Indices are 64 bits wide: a matrix may have more slots than 2**31.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = ["list_keys", "place", "point", "spread", "survey"]


@triton.jit
def _place_of(sorted_ptr, value, count, steps):
    """Return how many of sorted[0:count], which ascend, are below each value; `steps` halvings find it."""
    low = tl.zeros_like(value)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        is_open = low < high
        is_below = is_open & (tl.load(sorted_ptr + middle, mask=is_open, other=0).to(tl.int64) < value)
        high = tl.where(is_open & (is_below == 0), middle, high)
        low = tl.where(is_below, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["stride", "entries", "row_count", "column_count"])
def list_keys(
    keys_ptr, tally_ptr, rows_ptr, columns_ptr, entries, stride, row_count, column_count, BLOCK: tl.constexpr
):
    """keys[e] = rows[e] * column_count + columns[e]; tally[0:2]: how many are outside, and not above the one before."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    row = tl.load(rows_ptr + entry * stride, mask=is_entry, other=0).to(tl.int64)
    column = tl.load(columns_ptr + entry * stride, mask=is_entry, other=0).to(tl.int64)
    key = row * column_count + column
    tl.store(keys_ptr + entry, key, mask=is_entry)
    has_before = is_entry & (entry > 0)
    row_before = tl.load(rows_ptr + (entry - 1) * stride, mask=has_before, other=0).to(tl.int64)
    before = row_before * column_count + tl.load(columns_ptr + (entry - 1) * stride, mask=has_before, other=0)
    is_outside = is_entry & ((row < 0) | (row >= row_count) | (column < 0) | (column >= column_count))
    tl.atomic_add(tally_ptr, tl.sum(is_outside.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(tally_ptr + 1, tl.sum((has_before & (key <= before)).to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["entries", "steps", "width"])
def survey(positions_ptr, tally_ptr, keys_ptr, entries, steps, width, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """positions[e] = entries of e's row, keys[e] // width, before it; tally: the largest, rows, groups, several."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    row = tl.load(keys_ptr + entry, mask=is_entry, other=0).to(tl.int64) // width
    position = entry - _place_of(keys_ptr, row * width, entries, steps)
    tl.store(positions_ptr + entry, position, mask=is_entry)
    position = tl.where(is_entry, position, -1)
    tl.atomic_max(tally_ptr + 2, tl.max(position, 0), sem="relaxed")
    tl.atomic_add(tally_ptr + 3, tl.sum((position == 0).to(tl.int64), 0), sem="relaxed")
    for power in tl.static_range(SIZES):
        size = 1 << power
        begins, again = is_entry & (position % size == 0), position == size
        tl.atomic_add(tally_ptr + 4 + power, tl.sum(begins.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(tally_ptr + 4 + SIZES + power, tl.sum(again.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["entries", "size", "width"])
def place(
    AM_ptr, AK_ptr, source_ptr, is_padding_ptr, positions_ptr, ends_ptr, keys_ptr, others_ptr, entries, size, width,
    HAS_ENDS: tl.constexpr, IS_KEYED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AM[g] = the row of entry e, AK[g,q] = its column, source[g,q] = e; the last entry of a row fills up its group.

    If IS_KEYED, the row and the column are keys[e] // width and keys[e] % width, and e is listed as others[e].
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    row = tl.load(keys_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    column = tl.load(others_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    origin = entry
    if IS_KEYED:
        origin, column, row = column, row % width, row // width
    if HAS_ENDS:
        within = tl.load(positions_ptr + entry, mask=is_entry, other=0).to(tl.int64) % size
        group = tl.load(ends_ptr + entry, mask=is_entry, other=1) - 1
        slot = group * size + within
        tl.store(AM_ptr + group, row, mask=is_entry & (within == 0))
        tl.store(is_padding_ptr + slot, 0, mask=is_entry)
        position_after = tl.load(positions_ptr + entry + 1, mask=entry + 1 < entries, other=0)
        is_last = is_entry & (position_after == 0)
        for step in range(1, size):
            is_empty = is_last & (within + step < size)
            tl.store(AK_ptr + slot + step, -1, mask=is_empty)
            # every slot of padding reads another entry: its gradient is not added to one address
            tl.store(source_ptr + slot + step, (slot + step) % entries, mask=is_empty)
            tl.store(is_padding_ptr + slot + step, 1, mask=is_empty)
    else:
        slot = entry
        tl.store(AM_ptr + entry, row, mask=is_entry)
    tl.store(AK_ptr + slot, column, mask=is_entry)
    tl.store(source_ptr + slot, origin, mask=is_entry)


@triton.jit(do_not_specialize=["groups", "row_count", "steps"])
def point(pointers_ptr, lengths_ptr, counts_ptr, rows_ptr, groups, row_count, steps, BLOCK: tl.constexpr):
    """pointers[r] = the first group of row r, lengths[r] = its groups, counts[r] = 1 if these are not one."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = _place_of(rows_ptr, row, groups, steps)
    length = _place_of(rows_ptr, row + 1, groups, steps) - first
    tl.store(pointers_ptr + row, first, mask=row <= row_count)
    tl.store(lengths_ptr + row, length, mask=row < row_count)
    tl.store(counts_ptr + row, (length != 1).to(tl.int64), mask=row < row_count)


@triton.jit(do_not_specialize=["groups", "row_count"])
def spread(
    to_zero_ptr, is_shared_ptr, pointers_ptr, ends_ptr, rows_ptr, groups, row_count, BLOCK: tl.constexpr
):  # fmt: skip
    """rows_to_zero and is_shared; ends[r] counts the rows up to r that have another number of groups than one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < row_count
    end = tl.load(ends_ptr + at, mask=is_row, other=0)
    before = tl.load(ends_ptr + at - 1, mask=is_row & (at > 0), other=0)
    tl.store(to_zero_ptr + end - 1, at, mask=is_row & (end != before))
    is_group = at < groups
    row = tl.load(rows_ptr + at, mask=is_group, other=0).to(tl.int64)
    here = tl.load(pointers_ptr + row, mask=is_group, other=0)
    after = tl.load(pointers_ptr + row + 1, mask=is_group, other=0)
    tl.store(is_shared_ptr + at, (after - here > 1).to(tl.int8), mask=is_group)
