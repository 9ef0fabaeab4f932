"""The kernels that put the positions of an index tensor into tiles of equal value; Triton gives their parameters types.

They count how many positions each value has, find where its tiles begin, and place each position in the next free slot
of its value. If MAY_SKIP, all but `compare` do nothing unless `flags[0]`, or for `place` `flags[1]`, holds a 1: a graph
launches them at every replay, so that they are as few as can be. Counts begin at -1, as positions and values do, so
that one fill serves all; `scan` leaves counts and the first flag as it wants to find them.

Positions of one value meet in one count. Where there are few values (FEW of them, a power of two, or 0 where there are
many) a program first ranks its own positions, and adds to each count once.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = ["compare", "count", "place", "scan"]


@triton.jit(do_not_specialize=["length", "stride"])
def compare(flags_ptr, index_ptr, seen_ptr, length, stride, BLOCK: tl.constexpr):
    """flags[0] = 1 where some index[p] is not seen[p]; it is 0 before."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(index_ptr + at * stride, mask=at < length, other=0)
    seen = tl.load(seen_ptr + at, mask=at < length, other=0)
    if tl.max((value != seen).to(tl.int32), 0) > 0:
        tl.store(flags_ptr, 1)


@triton.jit
def _group(index_ptr, at, length, stride, groups):
    """Return 1 + index[p], 0 for a position that points nowhere."""
    value = tl.load(index_ptr + at * stride, mask=at < length, other=-1).to(tl.int64)
    return tl.where((value >= 0) & (value < groups - 2), value + 1, 0).to(tl.int32)


@triton.jit
def _one_hot(group, inside, FEW: tl.constexpr):
    """Return [FEW, BLOCK]: a 1 where a position is one of a group."""
    return ((tl.arange(0, FEW)[:, None] == group[None, :]) & inside[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["length", "stride", "groups", "filled"])
def count(
    flags_ptr, index_ptr, counts_ptr, tables_ptr, length, stride, groups, filled,
    FEW: tl.constexpr, MAY_SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts[1+index[p]] += 1. Tables that are made again are filled with -1, as new ones are."""
    is_wanted = True
    if MAY_SKIP:
        is_wanted = tl.load(flags_ptr) != 0
    if is_wanted:
        if MAY_SKIP:
            for start in range(tl.program_id(0) * BLOCK, filled, tl.num_programs(0) * BLOCK):
                slot = start + tl.arange(0, BLOCK)
                tl.store(tables_ptr + slot, tl.full([BLOCK], -1, tl.int32), mask=slot < filled)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < length
        group = _group(index_ptr, at, length, stride, groups)
        if FEW:
            own = tl.sum(_one_hot(group, inside, FEW), 1)
            tl.atomic_add(counts_ptr + tl.arange(0, FEW), own, mask=own > 0, sem="relaxed")
        else:
            tl.atomic_add(counts_ptr + group, tl.full([BLOCK], 1, tl.int32), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["groups"])
def scan(
    flags_ptr, counts_ptr, starts_ptr, slots_ptr, groups,
    TILE: tl.constexpr, MAY_SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """starts[g] = the first tile of group g, which is free however long the groups are; slots[g] = its first slot."""
    is_wanted = True
    if MAY_SKIP:
        flag = tl.load(flags_ptr)
        is_wanted = flag != 0
        tl.debug_barrier()  # all threads have read it
        tl.store(flags_ptr, 0)
        tl.store(flags_ptr + 1, flag)
    if is_wanted:
        before = tl.zeros([], tl.int32)
        for start in range(0, groups, BLOCK):
            group = start + tl.arange(0, BLOCK)
            counts = tl.load(counts_ptr + group, mask=group < groups, other=-1) + 1
            first = before + tl.cumsum(counts, 0) - counts
            if TILE > 1:
                first = first // TILE + group
            tl.store(starts_ptr + group, first, mask=group < groups)
            tl.store(slots_ptr + group, first * TILE, mask=group < groups)
            tl.store(counts_ptr + group, tl.full([BLOCK], -1, tl.int32), mask=group < groups)
            before += tl.sum(counts, 0)


@triton.jit(do_not_specialize=["length", "stride", "groups"])
def place(
    flags_ptr, index_ptr, seen_ptr, slots_ptr, positions_ptr, values_ptr, length, stride, groups,
    TILE: tl.constexpr, FEW: tl.constexpr, MAY_SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """positions[s] = p and values[s // TILE] = index[p], s the next free slot of p's group; seen[p] = index[p]."""
    is_wanted = True
    if MAY_SKIP:
        is_wanted = tl.load(flags_ptr + 1) != 0
    if is_wanted:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < length
        group = _group(index_ptr, at, length, stride, groups)
        if FEW:
            hot = _one_hot(group, inside, FEW)
            own = tl.sum(hot, 1)
            first = tl.atomic_add(slots_ptr + tl.arange(0, FEW), own, mask=own > 0, sem="relaxed")
            slot = tl.sum(tl.where(hot > 0, first[:, None] + tl.cumsum(hot, 1) - 1, 0), 0)
        else:
            slot = tl.atomic_add(slots_ptr + group, tl.full([BLOCK], 1, tl.int32), mask=inside, sem="relaxed")
        tl.store(positions_ptr + slot, at.to(tl.int32), mask=inside)
        tl.store(values_ptr + slot // TILE, group - 1, mask=inside)
        tl.store(seen_ptr + at, tl.load(index_ptr + at * stride, mask=inside, other=0), mask=inside)
