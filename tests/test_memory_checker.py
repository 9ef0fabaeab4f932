"""The memory checker finds planted faults: what is out of bounds, directly or by an index tensor, and what races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from memory_checker import MemoryFault, checked_memory
from statements import IS_INTERPRETED

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")]

ROWS, COLUMNS = 6, 4


@triton.jit
def copy(out_ptr, source_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def gather(out_ptr, source_ptr, index_ptr, count, IS_MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + at, mask=at < count, other=0)
    is_read = (at < count) & (row >= 0) if IS_MASKED else at < count
    tl.store(out_ptr + at, tl.load(source_ptr + row, mask=is_read, other=0.0), mask=at < count)


@triton.jit
def scatter(out_ptr, source_ptr, index_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + row, tl.load(source_ptr + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def scatter_add(out_ptr, source_ptr, index_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + at, mask=at < count, other=0)
    tl.atomic_add(out_ptr + row, tl.load(source_ptr + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def copy_columns(out_ptr, source_ptr, rows, columns, stride_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[i,j] = source[i,j] of `columns` columns."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    is_element = (row < rows) & (column < columns)
    held = tl.load(source_ptr + row * stride_row + column, mask=is_element, other=0.0)
    tl.store(out_ptr + row * columns + column, held, mask=is_element)


@triton.jit
def store_first_then_add(out_ptr):
    if tl.program_id(0) == 0:
        tl.store(out_ptr, 1.0)
    else:
        tl.atomic_add(out_ptr, 1.0)


@triton.jit
def pass_on(out_ptr):
    """out[i+1] = out[i], one program after another, as no GPU promises."""
    at = tl.program_id(0)
    tl.store(out_ptr + at + 1, tl.load(out_ptr + at) + 1.0)


@triton.jit
def add_then_read(out_ptr, total_ptr):
    tl.atomic_add(total_ptr, 1.0)
    tl.store(out_ptr + tl.program_id(0), tl.load(total_ptr))


@triton.jit
def raise_flag(flag_ptr):
    tl.store(flag_ptr + tl.zeros([4], tl.int32), 1)


@triton.jit
def follow_address(out_ptr, address):
    """`address` is that of a tensor which is not passed."""
    tl.store(out_ptr, tl.load(address.to(tl.pointer_type(tl.float32))))


@triton.jit
def take_lock(lock_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_cas(lock_ptr + at, tl.zeros([BLOCK], tl.int32), at + 1)


def values(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


def index(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def side_by_side() -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one storage, [6, 4] each."""
    whole = values(ROWS, 2 * COLUMNS)
    return whole[:, :COLUMNS], whole[:, COLUMNS:]


def overrun(kernel: Any, grid: int, *arguments: Any) -> Callable[[], None]:
    return lambda: kernel[(grid,)](*arguments)


def unpassed() -> None:
    hidden = values(4)
    follow_address[(1,)](values(1), hidden.data_ptr())


def freed() -> None:
    follow_address[(1,)](values(1), values(4).data_ptr())


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "a direct overrun by a read": (
        overrun(copy, 3, values(10), values(8), 10, 4),
        "copy, program (2, 0, 0): loads source_ptr (torch.float32, shape [8], strides [1]) "
        "at element +8 from its first, where it has none",
    ),
    "a direct overrun by a write": (
        overrun(copy, 3, values(8), values(10), 10, 4),
        "copy, program (2, 0, 0): stores out_ptr (torch.float32, shape [8], strides [1]) "
        "at element +8 from its first, where it has none",
    ),
    "an index past the end, read through": (
        overrun(gather, 2, values(5), values(6), index(0, 5, 3, 6, 1), 5, True, 4),
        "gather, program (0, 0, 0): loads source_ptr (torch.float32, shape [6], strides [1]) "
        "at element +6 from its first, where it has none",
    ),
    "an index past the end, written through": (
        overrun(scatter, 2, values(6), values(5), index(0, 5, 3, 1, 9), 5, 4),
        "scatter, program (1, 0, 0): stores out_ptr (torch.float32, shape [6], strides [1]) "
        "at element +9 from its first, where it has none",
    ),
    "an index past the end, added through": (
        overrun(scatter_add, 2, values(6), values(5), index(0, 5, 3, 1, 9), 5, 4),
        "scatter_add, program (1, 0, 0): adds to out_ptr (torch.float32, shape [6], strides [1]) "
        "at element +9 from its first, where it has none",
    ),
    "padding that is not masked": (
        overrun(gather, 2, values(5), values(6), index(0, 5, -1, 2, 1), 5, False, 4),
        "gather, program (0, 0, 0): loads source_ptr (torch.float32, shape [6], strides [1]) "
        "at element -1 from its first, where it has none",
    ),
    "the next slice of a strided view": (
        overrun(copy_columns, 1, values(ROWS, 5), side_by_side()[0], ROWS, 5, 2 * COLUMNS, 8, 8),
        "copy_columns, program (0, 0, 0): loads source_ptr (torch.float32, shape [6, 4], strides [8, 1]) "
        "at element +4 from its first, where it has none",
    ),
    "the slice before a strided view": (
        overrun(gather, 1, values(1), side_by_side()[1], index(-1), 1, False, 4),
        "gather, program (0, 0, 0): loads source_ptr (torch.float32, shape [6, 4], strides [8, 1]) "
        "at element -1 from its first, where it has none",
    ),
    "anything of an empty tensor": (
        overrun(gather, 1, values(1), values(0), index(0), 1, True, 4),
        "gather, program (0, 0, 0): loads source_ptr (torch.float32, shape [0], strides [1]) "
        "at element +0 from its first, where it has none",
    ),
    "swapping past the end": (
        overrun(take_lock, 2, index(0, 0, 0, 0, 0), 4),
        "take_lock, program (1, 0, 0): swaps lock_ptr (torch.int32, shape [5], strides [1]) "
        "at element +5 from its first, where it has none",
    ),
    "two programs that store to one element": (
        overrun(scatter, 2, values(6), values(5), index(0, 5, 3, 1, 0), 5, 4),
        "scatter, program (1, 0, 0): stores out_ptr (torch.float32, shape [6], strides [1]) "
        "at element +0, which program number 0 stores: a race",
    ),
    "one store of two values to one element": (
        overrun(scatter, 2, values(6), values(5), index(0, 5, 3, 5, 1), 5, 4),
        "scatter, program (0, 0, 0): stores two values to out_ptr (torch.float32, shape [6], strides [1]) "
        "at element +5 at once",
    ),
    "a store beside an atomic addition": (
        overrun(store_first_then_add, 2, values(1)),
        "store_first_then_add, program (1, 0, 0): adds to out_ptr (torch.float32, shape [1], strides [1]) "
        "at element +0, which program number 0 stores: a race",
    ),
    "a load of what another program stores": (
        overrun(pass_on, 2, values(3)),
        "pass_on, program (1, 0, 0): loads out_ptr (torch.float32, shape [3], strides [1]) "
        "at element +1, which program number 0 stores: a race",
    ),
    "a load of what other programs add to": (
        overrun(add_then_read, 2, values(2), values(1)),
        "add_then_read, program (1, 0, 0): adds to total_ptr (torch.float32, shape [1], strides [1]) "
        "at element +0, which program number 0 loads: a race",
    ),
    "equal stores of a kernel that was not excused": (
        overrun(raise_flag, 2, index(0)),
        "raise_flag, program (1, 0, 0): stores flag_ptr (torch.int32, shape [1], strides [1]) "
        "at element +0, which program number 0 stores: a race",
    ),
}


@pytest.mark.parametrize(("launch", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_found(launch: Callable[[], None], words: str) -> None:
    with pytest.raises(MemoryFault) as caught, checked_memory():
        launch()
    assert str(caught.value) == words


@pytest.mark.parametrize("launch", [unpassed, freed])
def test_memory_that_was_not_passed_is_out_of_bounds(launch: Callable[[], None]) -> None:
    with pytest.raises(MemoryFault, match=r"loads 0x[0-9a-f]+, which is in no argument's memory"), checked_memory():
        launch()


def test_a_view_that_overlaps_another_races_with_it() -> None:
    """Two arguments, one storage."""
    whole = values(9)
    with pytest.raises(MemoryFault, match="a race"), checked_memory():
        copy[(2,)](whole[1:], whole[:-1], 8, 4)


def test_sound_kernels_pass_and_compute_what_they_did() -> None:
    source, places = values(6), index(0, 5, -1, 2, 1)
    left, _ = side_by_side()
    gathered, added, columns, flag = values(5), torch.zeros(6), values(ROWS, 4), index(0)
    with checked_memory(equal_stores=("raise_flag",)) as checker:
        gather[(2,)](gathered, source, places, 5, True, 4)
        scatter_add[(2,)](added, source, index(0, 1, 0, 1, 0, 5), 6, 4)
        copy_columns[(1,)](columns, left, ROWS, 4, 2 * COLUMNS, 8, 8)
        raise_flag[(3,)](flag)
    assert checker.launches == 4
    assert torch.equal(gathered, torch.where(places < 0, 0, source[places.clamp_min(0)]))
    torch.testing.assert_close(added, torch.zeros(6).index_add(0, index(0, 1, 0, 1, 0, 5), source))
    assert torch.equal(columns, left)
    assert flag.item() == 1


def test_nothing_is_checked_outside() -> None:
    with checked_memory() as checker:
        pass
    copy[(1,)](values(4), values(4), 4, 4)
    assert checker.launches == 0
