"""Many vectors, each times a matrix of its own, on a CPU: by whichever of two ways was measured to be faster."""

from __future__ import annotations

from functools import lru_cache
from time import perf_counter

import torch
from torch import Tensor

from ...formats.torch_state import is_deterministic, modes
from ..binding import bucket

__all__ = ["vectors_times_matrices"]

SIZES = 1024  # of which the answer is kept
BATCH = 64  # vectors that are multiplied to find out; for more of them both ways take as many times more
LARGEST = 1 << 16  # numbers of a matrix, from which on a routine's own time is nothing beside theirs
ROUNDS = 5
CLEAR = 1.2  # times faster: else the batched product, which holds less


def vectors_times_matrices(vectors: Tensor, matrices: Tensor, is_summed_last: bool) -> Tensor:
    """Return `Y[b,n] += X[b,k] * W[b,k,n]`, or with `W[b,n,k]` if what is summed is last there.

    The result may have one more dimension of length 1. Under deterministic algorithms nothing that is measured decides,
    and nothing is measured where somebody watches.
    """
    _, first, second = matrices.shape
    summed, others = (second, first) if is_summed_last else (first, second)
    may_be_measured = summed * others < LARGEST and not is_deterministic() and not modes()
    if may_be_measured and _is_faster_by_entries(bucket(summed), bucket(others), is_summed_last, matrices.dtype):
        return _by_entries(vectors, matrices, is_summed_last)
    return _by_products(vectors, matrices, is_summed_last)


def _by_entries(vectors: Tensor, matrices: Tensor, is_summed_last: bool) -> Tensor:
    dim = 2 if is_summed_last else 1
    return (matrices * vectors.unsqueeze(3 - dim)).sum(dim)


def _by_products(vectors: Tensor, matrices: Tensor, is_summed_last: bool) -> Tensor:
    return torch.bmm(matrices, vectors.unsqueeze(2)) if is_summed_last else torch.bmm(vectors.unsqueeze(1), matrices)


@lru_cache(maxsize=SIZES)
def _is_faster_by_entries(summed: int, others: int, is_summed_last: bool, dtype: torch.dtype) -> bool:
    """Return whether products of entries, which are then summed, take clearly less than a batched product.

    That calls a routine for each matrix, which for a small one takes longer than its numbers do. Both ways are timed in
    turns, on operands that are made for it.
    """
    shape = (BATCH, others, summed) if is_summed_last else (BATCH, summed, others)
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
        matrices, vectors = (torch.ones(size, dtype=dtype, device="cpu") for size in (shape, (BATCH, summed)))
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            for at, way in enumerate((_by_products, _by_entries)):
                start = perf_counter()
                way(vectors, matrices, is_summed_last)
                best[at] = min(best[at], perf_counter() - start)
    return best[0] > CLEAR * best[1]
