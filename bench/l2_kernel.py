"""A kernel that reads a small tensor many times, by which the speed of the L2 cache is measured."""

import triton
import triton.language as tl

__all__ = ["read_again"]


@triton.jit
def read_again(X_ptr, Y_ptr, count, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program adds up ROUNDS blocks of X, which begin where no other program's do at that time."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(ROUNDS):
        block = (program + turn * 61) % (count // BLOCK)
        total += tl.load(X_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(Y_ptr + program, tl.sum(total))
