"""The kernels of the voxel hash; Triton gives their parameters types when it compiles them."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = ["insert", "look_up", "place"]


@triton.jit
def _reached(
    indices_ptr, row, tap, is_row, stride_row, stride_column, batch_size, size0, size1, size2, size3,
    AXES: tl.constexpr, TO_COARSE: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Return the key of the cell that voxel `row` reaches by `tap`, and whether there is one."""
    key = tl.zeros_like(row).to(KEY)
    scale = tl.full([], 1, KEY)
    is_inside = is_row
    for axis in tl.static_range(len(AXES) - 1, -1, -1):
        size = _size(size0, size1, size2, size3, axis).to(KEY)
        position = tl.load(indices_ptr + row * stride_row + (1 + axis) * stride_column, mask=is_row, other=0).to(KEY)
        step = (tap % AXES[axis][0] * AXES[axis][3]).to(KEY)
        tap = tap // AXES[axis][0]
        if TO_COARSE:
            position = position + AXES[axis][2] - step
            is_inside = is_inside & (position >= 0) & (position % AXES[axis][1] == 0)
            position = position // AXES[axis][1]
        else:
            position = position * AXES[axis][1] - AXES[axis][2] + step
        is_inside = is_inside & (position >= 0) & (position < size)
        key += position * scale
        scale *= size
    batch = tl.load(indices_ptr + row * stride_row, mask=is_row, other=0).to(KEY)
    is_inside = is_inside & (batch >= 0) & (batch < batch_size)
    return key + batch * scale, is_inside


@triton.jit
def _size(size0, size1, size2, size3, axis: tl.constexpr):
    if axis == 0:
        size = size0
    elif axis == 1:
        size = size1
    elif axis == 2:
        size = size2
    else:
        size = size3
    return size


@triton.jit
def _first_slot(key, last_slot):
    """Return a key's first slot by Fibonacci hashing: the middle bits of a product with an odd number."""
    return ((key.to(tl.int64) * 0x1E3779B97F4A7C15) >> 29) & last_slot


@triton.jit(do_not_specialize=["count", "batch_size", "size0", "size1", "size2", "size3", "last_slot"])
def insert(
    keys_ptr, rows_ptr, faults_ptr, indices_ptr, count, stride_row, stride_column,
    batch_size, size0, size1, size2, size3, last_slot,
    AXES: tl.constexpr, V: tl.constexpr, TO_COARSE: tl.constexpr, IS_INPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put every reached cell into the table; of inputs also their rows, and two faults: outside, given twice."""
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, tap = entry // V, (entry % V).to(tl.int32)
    is_row = row < count
    key, is_pending = _reached(
        indices_ptr, row, tap, is_row, stride_row, stride_column, batch_size, size0, size1, size2, size3,
        AXES, TO_COARSE, KEY,
    )  # fmt: skip
    if IS_INPUT:
        tl.store(faults_ptr + tl.zeros_like(tap), 1, mask=is_row & ~is_pending)
    free = tl.full([BLOCK], -1, KEY)
    # a lane that has nothing to insert writes free for free, and one that is done finds its slot taken, so neither
    # changes a slot; the former are most if a stride skips cells, and at one slot they would wait for each other:
    # 0.7 ms for a room of 65,667 voxels
    slot = _first_slot(tl.where(is_pending, key, entry.to(KEY)), last_slot)
    key = tl.where(is_pending, key, free)
    while tl.max(is_pending.to(tl.int32), 0) > 0:
        stored = tl.atomic_cas(keys_ptr + slot, free, key, sem="relaxed")
        if IS_INPUT:
            tl.store(rows_ptr + slot, row.to(tl.int32), mask=is_pending & (stored == free))
            tl.store(faults_ptr + 1 + tl.zeros_like(tap), 1, mask=is_pending & (stored == key))
        is_pending = is_pending & (stored != free) & (stored != key)
        slot = tl.where(is_pending, (slot + 1) & last_slot, slot)


@triton.jit(do_not_specialize=["count", "batch_size", "size0", "size1", "size2", "size3", "last_slot"])
def look_up(
    keys_ptr, rows_ptr, table_ptr, indices_ptr, count, stride_row, stride_column,
    batch_size, size0, size1, size2, size3, last_slot,
    AXES: tl.constexpr, V: tl.constexpr, TO_COARSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """table[row,tap] = the row stored with the reached cell, -1 where the hash has none."""
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, tap = entry // V, (entry % V).to(tl.int32)
    is_row = row < count
    key, is_pending = _reached(
        indices_ptr, row, tap, is_row, stride_row, stride_column, batch_size, size0, size1, size2, size3,
        AXES, TO_COARSE, KEY,
    )  # fmt: skip
    slot = _first_slot(key, last_slot)
    neighbour = tl.full([BLOCK], -1, tl.int32)
    while tl.max(is_pending.to(tl.int32), 0) > 0:
        stored = tl.load(keys_ptr + slot, mask=is_pending, other=-1)
        is_match = is_pending & (stored == key)
        neighbour = tl.where(is_match, tl.load(rows_ptr + slot, mask=is_match, other=-1), neighbour)
        is_pending = is_pending & (stored != key) & (stored != -1)
        slot = (slot + 1) & last_slot
    tl.store(table_ptr + entry, neighbour, mask=is_row)


@triton.jit(do_not_specialize=["count", "size0", "size1", "size2", "size3"])
def place(
    rows_ptr, indices_ptr, keys_ptr, order_ptr, slots_ptr, count, size0, size1, size2, size3,
    NDIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store, for cell number i in ascending order, row i in its slot and its coordinates in indices[i]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < count
    key = tl.load(keys_ptr + row, mask=is_row, other=0)
    slot = tl.load(slots_ptr + tl.load(order_ptr + row, mask=is_row, other=0), mask=is_row, other=0)
    tl.store(rows_ptr + slot, row.to(tl.int32), mask=is_row)
    for axis in tl.static_range(NDIM - 1, -1, -1):
        size = _size(size0, size1, size2, size3, axis).to(key.dtype)
        tl.store(indices_ptr + row * (NDIM + 1) + 1 + axis, key % size, mask=is_row)
        key = key // size
    tl.store(indices_ptr + row * (NDIM + 1), key, mask=is_row)
