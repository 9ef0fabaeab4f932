"""The kernels that sort a table's rows into tiles; Triton gives their parameters types when it compiles them."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = ["count", "fill", "key"]


@triton.jit(do_not_specialize=["rows", "stretch"])
def key(keys_ptr, table_ptr, bits_ptr, rows, stretch, V: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """keys[x] = a bit for each tap of row x, below the number of its stretch."""
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    row, tap = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TAPS)
    at = table_ptr + row.to(tl.int64)[:, None] * V + tap[None, :]
    neighbours = tl.load(at, mask=(row < rows)[:, None] & (tap < V)[None, :], other=-1)
    bits = tl.load(bits_ptr + tap, mask=tap < V, other=0).to(KEY)
    one = tl.full([1, 1], 1, KEY)
    tap_bits = tl.where(neighbours >= 0, one << bits[None, :], 0)
    tl.store(keys_ptr + row, tl.sum(tap_bits, 1) + ((row // stretch).to(KEY) << V), mask=row < rows)


@triton.jit
def _of_tile(table_ptr, order_ptr, rows, V: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr):
    """Return the rows of this program's tile, -1 past the last, and their neighbours as [TAPS, SIZE]."""
    place, tap = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, TAPS)
    row = tl.load(order_ptr + place, mask=place < rows, other=-1)
    at = table_ptr + row.to(tl.int64)[None, :] * V + tap[:, None]
    return row, tl.load(at, mask=(row >= 0)[None, :] & (tap < V)[:, None], other=-1)


@triton.jit(do_not_specialize=["rows"])
def count(counts_ptr, table_ptr, order_ptr, rows, V: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr):
    """counts[1+t] = how many taps the rows of tile t need between them; counts[0] = 0."""
    _, neighbours = _of_tile(table_ptr, order_ptr, rows, V, TAPS, SIZE)
    needs = tl.max((neighbours >= 0).to(tl.int32), 1)
    tl.store(counts_ptr + 1 + tl.program_id(0), tl.sum(needs, 0))
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, 0)


@triton.jit(do_not_specialize=["rows"])
def fill(
    row_ptr, tile_ptr, nbr_ptr, tap_ptr, table_ptr, order_ptr, firsts_ptr, rows,
    V: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store everything about tile t: its rows, and for each of its taps their neighbours."""
    t, slot, tap = tl.program_id(0), tl.arange(0, SIZE), tl.arange(0, TAPS)
    row, neighbours = _of_tile(table_ptr, order_ptr, rows, V, TAPS, SIZE)
    tl.store(row_ptr + t * SIZE + slot, row)
    needs = tl.max((neighbours >= 0).to(tl.int32), 1)
    p = tl.load(firsts_ptr + t) + tl.cumsum(needs, 0) - 1
    is_needed = needs > 0
    tl.store(tile_ptr + p, tl.zeros_like(p) + t, mask=is_needed)
    tl.store(tap_ptr + p, tap, mask=is_needed)
    tl.store(nbr_ptr + p.to(tl.int64)[:, None] * SIZE + slot[None, :], neighbours, mask=is_needed[:, None])
