"""The kernels that lay a sorted list of entries out and tell which groups a row has; Triton gives parameters types.

A program has BLOCK entries, rows or pieces of rows. Indices are 64 bits wide: a matrix may have more slots than 2**31.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = [
    *("count_keys", "cut_rows", "list_keys", "merge_keys", "order_pieces"),
    *("pack_rows", "place", "point", "spread", "survey", "unfold"),
]


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


@triton.jit
def _is_split(keys_ptr, first, last, entries, cut, width, is_row):
    """Return whether several pieces of rows that are packed share each row, whose entries begin at `first`.

    Of the pieces after the one where it begins those count that hold none of the next row, but for the first of these
    if the row does not begin a piece: then it begins this one.
    """
    piece = first // cut
    is_first = first == piece * cut
    row_before = tl.load(keys_ptr + first - 1, mask=is_row & (is_first == 0), other=0).to(tl.int64) // width
    has_before = is_row & (is_first == 0) & (piece > 0)
    row_of_piece = tl.load(keys_ptr + piece * cut - 1, mask=has_before, other=-1).to(tl.int64) // width
    begins_piece = is_first | (row_before == row_of_piece)
    ends = tl.where(last == entries, (last + cut - 1) // cut, last // cut)
    return is_row & (ends - piece - 1 > (begins_piece == 0).to(tl.int64))


@triton.jit(do_not_specialize=["stride", "entries", "row_count", "column_count", "size"])
def list_keys(
    keys_ptr, tally_ptr, rows_ptr, columns_ptr, entries, stride, row_count, column_count, size,
    LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """keys[e] = rows[e] * column_count + columns[e // size], LAST where the row is -1; tally[0:2]: outside, descending.

    These are how many entries are outside, and how many are not above the one before.
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    row = tl.load(rows_ptr + entry * stride, mask=is_entry, other=0).to(tl.int64)
    column = tl.load(columns_ptr + entry // size * stride, mask=is_entry, other=0).to(tl.int64)
    key = row * column_count + column
    tl.store(keys_ptr + entry, tl.where(row < 0, LAST, key), mask=is_entry)
    has_before = is_entry & (entry > 0)
    row_before = tl.load(rows_ptr + (entry - 1) * stride, mask=has_before, other=0).to(tl.int64)
    before = row_before * column_count + tl.load(columns_ptr + (entry - 1) // size * stride, mask=has_before, other=0)
    is_outside = is_entry & ((row < 0) | (row >= row_count) | (column < 0) | (column >= column_count))
    tl.atomic_add(tally_ptr, tl.sum(is_outside.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(tally_ptr + 1, tl.sum((has_before & (key <= before)).to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["entries", "steps", "width", "row_count", "column_count", "cut"])
def survey(
    positions_ptr, tally_ptr, keys_ptr, columns_ptr, entries, steps, width, row_count, column_count, cut,
    SIZES: tl.constexpr, IS_KEYED: tl.constexpr, IS_PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """positions[e] = entries of e's row, keys[e] // width, before it; tally[2:]: what `layouts.Survey` has.

    Unless IS_KEYED, keys are rows, and it counts in tally[0:2] which entries are outside, and in a row before the last.
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    key = tl.load(keys_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    before = tl.load(keys_ptr + entry - 1, mask=is_entry & (entry > 0), other=-1).to(tl.int64)
    row = key // width
    if IS_KEYED:
        tl.atomic_add(tally_ptr + 4, tl.sum((is_entry & (key == before)).to(tl.int64), 0), sem="relaxed")
    else:
        column = tl.load(columns_ptr + entry, mask=is_entry, other=0).to(tl.int64)
        is_outside = is_entry & ((row < 0) | (row >= row_count) | (column < 0) | (column >= column_count))
        tl.atomic_add(tally_ptr, tl.sum(is_outside.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(tally_ptr + 1, tl.sum((is_entry & (key < before)).to(tl.int64), 0), sem="relaxed")
    position = entry - _place_of(keys_ptr, row * width, entries, steps)
    tl.store(positions_ptr + entry, position, mask=is_entry)
    position = tl.where(is_entry, position, -1)
    tl.atomic_max(tally_ptr + 2, tl.max(position, 0), sem="relaxed")
    tl.atomic_add(tally_ptr + 3, tl.sum((position == 0).to(tl.int64), 0), sem="relaxed")
    is_shared = position == cut
    if IS_PACKED:
        last = _place_of(keys_ptr, (row + 1) * width, entries, steps)
        is_shared = _is_split(keys_ptr, entry, last, entries, cut, width, position == 0)
    tl.atomic_add(tally_ptr + 5, tl.sum(is_shared.to(tl.int64), 0), sem="relaxed")
    for power in tl.static_range(SIZES):
        size = 1 << power
        begins, again = is_entry & (position % size == 0), position == size
        tl.atomic_add(tally_ptr + 6 + power, tl.sum(begins.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(tally_ptr + 6 + SIZES + power, tl.sum(again.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["entries", "row_count", "steps"])
def unfold(
    coords_ptr, faults_ptr, pointers_ptr, others_ptr, entries, row_count, steps,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """coords[FIRST,e] = the row r whose entries, pointers[r] to pointers[r+1], hold e, the other one = others[e].

    faults counts the pointers that do not ascend from 0 to the number of entries.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = at < entries
    row = _place_of(pointers_ptr, at + 1, row_count + 1, steps) - 1
    tl.store(coords_ptr + FIRST * entries + at, row, mask=is_entry)
    other = tl.load(others_ptr + at, mask=is_entry, other=0)
    tl.store(coords_ptr + (1 - FIRST) * entries + at, other, mask=is_entry)
    is_pointer = at <= row_count
    pointer = tl.load(pointers_ptr + at, mask=is_pointer, other=0).to(tl.int64)
    before = tl.load(pointers_ptr + at - 1, mask=is_pointer & (at > 0), other=0).to(tl.int64)
    is_wrong = (pointer < before) | ((at == 0) & (pointer != 0)) | ((at == row_count) & (pointer != entries))
    tl.atomic_add(faults_ptr, tl.sum((is_pointer & is_wrong).to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["entries"])
def count_keys(counts_ptr, keys_ptr, entries, BLOCK: tl.constexpr):
    """counts[e] = 1 if keys[e] is not the one before."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    before = tl.load(keys_ptr + entry - 1, mask=is_entry & (entry > 0), other=-1)
    is_new = tl.load(keys_ptr + entry, mask=is_entry, other=-1) != before
    tl.store(counts_ptr + entry, is_new.to(tl.int64), mask=is_entry)


@triton.jit(do_not_specialize=["entries", "distinct", "width"])
def merge_keys(
    merged_ptr, coords_ptr, into_ptr, keys_ptr, others_ptr, ends_ptr, entries, distinct, width, BLOCK: tl.constexpr
):
    """merged[d] and coords[:,d] = a key of which ends counts d before it, into[others[e]] = that of keys[e]."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    key = tl.load(keys_ptr + entry, mask=is_entry, other=0)
    place = tl.load(ends_ptr + entry, mask=is_entry, other=1) - 1
    tl.store(merged_ptr + place, key, mask=is_entry)
    tl.store(coords_ptr + place, key.to(tl.int64) // width, mask=is_entry)
    tl.store(coords_ptr + distinct + place, key.to(tl.int64) % width, mask=is_entry)
    other = tl.load(others_ptr + entry, mask=is_entry, other=0)
    tl.store(into_ptr + other, place, mask=is_entry)


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


@triton.jit(do_not_specialize=["groups", "row_count", "steps", "cut"])
def point(
    pointers_ptr, keys_ptr, counts_ptr, rows_ptr, groups, row_count, steps, cut,
    IS_PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pointers[r] = the first group of row r, keys[r] = -1 - its groups, counts[r] = 2**32 for each of its pieces.

    And 1 more if the row is to be zeroed: it has no group, or several pieces share it.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = _place_of(rows_ptr, row, groups, steps)
    last = _place_of(rows_ptr, row + 1, groups, steps)
    length, is_row = last - first, row < row_count
    tl.store(pointers_ptr + row, first, mask=row <= row_count)
    tl.store(keys_ptr + row, -1 - length, mask=is_row)
    is_shared = length > cut
    if IS_PACKED:
        is_shared = _is_split(rows_ptr, first, last, groups, cut, 1, is_row & (length > 0))
    is_zeroed = (length == 0) | is_shared
    tl.store(counts_ptr + row, ((length + cut - 1) // cut << 32) + is_zeroed.to(tl.int64), mask=is_row)


@triton.jit
def _spread_rows(to_zero_ptr, order_ptr, ends_ptr, places_ptr, row, row_count):
    """Store rows_to_zero, which ends[r] counts up to r, and order."""
    is_row = row < row_count
    end = tl.load(ends_ptr + row, mask=is_row, other=0) & 0xFFFFFFFF
    before = tl.load(ends_ptr + row - 1, mask=is_row & (row > 0), other=0) & 0xFFFFFFFF
    tl.store(to_zero_ptr + end - 1, row, mask=is_row & (end != before))
    tl.store(order_ptr + row, tl.load(places_ptr + row, mask=is_row, other=0), mask=is_row)


@triton.jit(do_not_specialize=["groups", "row_count"])
def spread(
    to_zero_ptr, order_ptr, is_shared_ptr, pointers_ptr, ends_ptr, places_ptr, rows_ptr, groups, row_count,
    HAS_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows_to_zero and order; if HAS_GROUPS, is_shared."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _spread_rows(to_zero_ptr, order_ptr, ends_ptr, places_ptr, at, row_count)
    if HAS_GROUPS:
        is_group = at < groups
        row = tl.load(rows_ptr + at, mask=is_group, other=0).to(tl.int64)
        here = tl.load(pointers_ptr + row, mask=is_group, other=0)
        after = tl.load(pointers_ptr + row + 1, mask=is_group, other=0)
        tl.store(is_shared_ptr + at, (after - here > 1).to(tl.int8), mask=is_group)


@triton.jit(do_not_specialize=["pieces", "row_count", "steps", "cut"])
def cut_rows(
    bounds_ptr, keys_ptr, pointers_ptr, ends_ptr, columns_ptr, pieces, row_count, steps, cut,
    LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bounds[s] = the first and last group of piece s, keys[row_count + s] = the column in its middle, LAST without."""
    piece = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_piece = piece < pieces
    row = _place_of(ends_ptr, piece + 1 << 32, row_count, steps)
    has_groups = is_piece & (row < row_count)
    place = piece - (tl.load(ends_ptr + row - 1, mask=has_groups & (row > 0), other=0) >> 32)
    begin = tl.load(pointers_ptr + row, mask=has_groups, other=0).to(tl.int64)
    length = tl.load(pointers_ptr + row + 1, mask=has_groups, other=0) - begin
    count = tl.maximum((length + cut - 1) // cut, 1)
    first, last = begin + length * place // count, begin + length * (place + 1) // count
    tl.store(bounds_ptr + 2 * piece, tl.where(has_groups, first, 0), mask=is_piece)
    tl.store(bounds_ptr + 2 * piece + 1, tl.where(has_groups, last, 0), mask=is_piece)
    column = tl.load(columns_ptr + (first + last) // 2, mask=has_groups, other=0).to(tl.int64)
    tl.store(keys_ptr + row_count + piece, tl.where(has_groups, column, LAST), mask=is_piece)


@triton.jit(do_not_specialize=["pieces", "row_count", "cut"])
def order_pieces(
    to_zero_ptr, order_ptr, pieces_ptr, is_shared_ptr, bounds_ptr, places_ptr, pointers_ptr, ends_ptr, rows_ptr,
    pieces, row_count, cut, NEAR: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """pieces[s] = bounds of the pieces in the order of places, the longest of NEAR neighbours first, and is_shared.

    And what `spread` stores of rows, of which there are no more than pieces.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _spread_rows(to_zero_ptr, order_ptr, ends_ptr, places_ptr, at, row_count)
    is_piece = at < pieces
    chosen = tl.load(places_ptr + row_count + at, mask=is_piece, other=row_count) - row_count
    first = tl.load(bounds_ptr + 2 * chosen, mask=is_piece, other=0)
    last = tl.load(bounds_ptr + 2 * chosen + 1, mask=is_piece, other=0)
    length = last - first
    begin = tl.program_id(0).to(tl.int64) * BLOCK // NEAR * NEAR
    rank = tl.zeros_like(at)
    for step in range(0, NEAR, AT_ONCE):
        other = begin + step + tl.arange(0, AT_ONCE)
        is_other = other < pieces
        compared = tl.load(places_ptr + row_count + other, mask=is_other, other=row_count) - row_count
        other_last = tl.load(bounds_ptr + 2 * compared + 1, mask=is_other, other=-1)
        other_length = other_last - tl.load(bounds_ptr + 2 * compared, mask=is_other, other=0)
        is_longer = other_length[None, :] > length[:, None]
        is_earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < at[:, None])
        rank += tl.sum((is_longer | is_earlier).to(tl.int64), 1)
    to = begin + rank
    tl.store(pieces_ptr + 2 * to, first, mask=is_piece)
    tl.store(pieces_ptr + 2 * to + 1, last, mask=is_piece)
    has_groups = is_piece & (length > 0)
    row = tl.load(rows_ptr + first, mask=has_groups, other=0).to(tl.int64)
    here = tl.load(pointers_ptr + row, mask=has_groups, other=0)
    after = tl.load(pointers_ptr + row + 1, mask=has_groups, other=0)
    tl.store(is_shared_ptr + to, (after - here > cut).to(tl.int8), mask=is_piece)


@triton.jit
def _next_row(rows_ptr, pointers_ptr, place, mask):
    """Return where the row of the group at each place begins, and where the next row does, or this if it does there."""
    row = tl.load(rows_ptr + place, mask=mask, other=0).to(tl.int64)
    start = tl.load(pointers_ptr + row, mask=mask, other=0).to(tl.int64)
    end = tl.load(pointers_ptr + row + 1, mask=mask, other=0).to(tl.int64)
    return start, tl.where(start == place, place, end)


@triton.jit
def _packed_from(rows_ptr, pointers_ptr, piece, groups, cut):
    """Return the group with which each piece begins; `groups` for one after the last."""
    place = piece * cut
    is_piece = place < groups
    start, after = _next_row(rows_ptr, pointers_ptr, place, is_piece)
    _, after_before = _next_row(rows_ptr, pointers_ptr, tl.maximum(place - cut, 0), is_piece)
    follows = (start >= place - cut) & (start != after_before)
    first = tl.where(after < tl.minimum(place + cut, groups), after, tl.where(follows, start, place))
    return tl.where(is_piece, first, groups)


@triton.jit(do_not_specialize=["pieces", "groups", "cut"])
def pack_rows(
    pieces_ptr, is_shared_ptr, pointers_ptr, rows_ptr, pieces, groups, cut, BLOCK: tl.constexpr
):  # fmt: skip
    """pieces[s] = the first and last group of a piece of several short rows or of a part of one, and is_shared."""
    piece = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_piece = piece < pieces
    first = _packed_from(rows_ptr, pointers_ptr, piece, groups, cut)
    last = _packed_from(rows_ptr, pointers_ptr, piece + 1, groups, cut)
    tl.store(pieces_ptr + 2 * piece, first, mask=is_piece)
    tl.store(pieces_ptr + 2 * piece + 1, last, mask=is_piece)
    row = tl.load(rows_ptr + first, mask=is_piece, other=0).to(tl.int64)
    here = tl.load(pointers_ptr + row, mask=is_piece, other=0)
    after = tl.load(pointers_ptr + row + 1, mask=is_piece, other=0)
    tl.store(is_shared_ptr + piece, ((here < first) | (after > last)).to(tl.int8), mask=is_piece)
