"""The kernel that reads the range of an index tensor, and whether it ascends; Triton gives its parameters types."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = ["FAR", "survey_index"]

FAR = 2**62  # beyond any extent: positions farther from 0 count as this far
_FAR = tl.constexpr(FAR)


@triton.jit(do_not_specialize=["length", "stride", "place", "programs"])
def survey_index(
    sums_ptr, answer_ptr, index_ptr, length, stride, place, programs, BLOCK: tl.constexpr, WORDS: tl.constexpr
):
    """sums[3 * place :] = (FAR - least, FAR + largest, how many threads saw a position below the one before it).

    Programs of several launches meet in the sums [WORDS], which are 0 before, by a maximum or a sum; the last word
    counts the programs that have been there. The last one of `programs` writes the sums to the answer, and zeros them.
    A launch that others follow has 0 for `programs`.
    """
    least, largest = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    descents = tl.zeros([BLOCK], tl.int64)
    lanes = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, length, tl.num_programs(0) * BLOCK):
        at = start + lanes
        is_inside = at < length
        value = tl.load(index_ptr + at * stride, mask=is_inside, other=0).to(tl.int64)
        before = tl.load(index_ptr + (at - 1) * stride, mask=is_inside & (at > 0), other=0).to(tl.int64)
        descents = tl.where(is_inside & (at > 0) & (value < before), 1, descents)
        value = tl.minimum(tl.maximum(value, 1 - _FAR), _FAR - 1)
        least = tl.maximum(least, tl.where(is_inside, _FAR - value, 0))
        largest = tl.maximum(largest, tl.where(is_inside, _FAR + value, 0))
    tl.atomic_max(sums_ptr + 3 * place, tl.max(least, 0), sem="relaxed")
    tl.atomic_max(sums_ptr + 3 * place + 1, tl.max(largest, 0), sem="relaxed")
    tl.atomic_add(sums_ptr + 3 * place + 2, tl.sum(descents, 0), sem="relaxed")
    before_this = tl.atomic_add(sums_ptr + WORDS - 1, 1, sem="acq_rel")
    if before_this == programs - 1:
        words = tl.arange(0, WORDS)
        # from the cache that all multiprocessors share, where the others have added to them
        tl.store(answer_ptr + words, tl.load(sums_ptr + words, cache_modifier=".cg"))
        tl.store(sums_ptr + words, tl.zeros([WORDS], tl.int64))
