"""The kernel that reads the range of an index tensor, and whether it ascends; Triton gives its parameters types."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

__all__ = ["FAR", "survey_index"]

FAR = 2**62  # beyond any extent: positions farther from 0 count as this far
_FAR = tl.constexpr(FAR)


@triton.jit(do_not_specialize=["length", "stride", "place"])
def survey_index(results_ptr, index_ptr, length, stride, place, BLOCK: tl.constexpr):
    """results[place] = (FAR - least, FAR + largest, how many threads saw a position below the one before it).

    Results begin at 0, as memory is when many programs meet there by a maximum or a sum.
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
    tl.atomic_max(results_ptr + 3 * place, tl.max(least, 0), sem="relaxed")
    tl.atomic_max(results_ptr + 3 * place + 1, tl.max(largest, 0), sem="relaxed")
    tl.atomic_add(results_ptr + 3 * place + 2, tl.sum(descents, 0), sem="relaxed")
