"""SpMM on the CPU: `C[m,n] += A[m,k] * B[k,n]` with A in GroupCOO, through torch.fx, beside torch.sparse.mm.

INSUM_DATA=folder python -m bench.bench_cpu
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch

from insum_ops import insum
from insum_ops.formats import GroupCOO

from .harness import check, table
from .inputs import graphs


def milliseconds(call: Callable[[], object], calls: int = 15) -> float:
    call()
    times = []
    for _ in range(calls):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    rows = []
    for name, graph in graphs("cpu").items():
        if graph.values().numel() > 300_000:
            continue
        B = torch.randn(graph.shape[1], 128)
        A = GroupCOO.from_torch(graph)
        call = lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
        error = check(call(), graph.to_dense().double() @ B.double() if graph.shape[0] < 30_000 else graph @ B, 1e-5)
        ours, theirs = milliseconds(call), milliseconds(lambda: graph @ B)
        rows.append((name, graph.values().numel(), A.group_size, ours, theirs, ours / theirs, error))
    print(
        table("SpMM on the CPU, N=128, ms", ("graph", "nnz", "group", "ours", "torch.sparse", "ratio", "error"), rows)
    )


if __name__ == "__main__":
    main()
