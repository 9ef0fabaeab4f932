"""Statements of many families, written down before anything was tuned for them; their sizes are drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from insum_ops.formats import GroupCOO

from . import plain_torch as plain
from .statements import (
    batched_matmul,
    edge_products,
    embedding_bag,
    outer,
    sampled_products,
    scatter_counts,
    transform_then_scatter,
    triple_scores,
    weighted_bags,
    weighted_messages,
)
from .workload import Range, Workload

__all__ = ["FAMILIES", "SUITE"]

HALF, BRAIN, DOUBLE = torch.float16, torch.bfloat16, torch.float64

LONG = Range(4_000_000, 20_000_000, 200, 900)  # many numbers
SIDE = Range(2048, 8192, 20, 90)  # of a dense matrix
EDGE = Range(512, 4096, 9, 60)  # of one that is multiplied
NODES = Range(20_000, 60_000, 20, 60)
EDGES = Range(300_000, 900_000, 60, 200)
WIDE = Range(64, 256, 3, 18)  # channels
SLIM = Range(16, 96, 2, 12)
FEW = Range(4, 12, 2, 4)  # heads, neighbours
SOME = Range(16, 64, 3, 7)  # experts, relations
RANK = Range(8, 32, 2, 5)


def counted(X: Tensor, G: Tensor, size: tuple[int, ...]) -> Tensor:
    return torch.bincount(G, X, size[0])


def routing(X: Tensor, W: Tensor, G: Tensor, T: Tensor, E: Tensor) -> Mapping[str, object]:
    pairs = torch.stack([E, T])
    return {"X": X, "W": W, "G": GroupCOO.from_coo(pairs, G, (len(W), len(X)), group_dim=0, group_size=64)}


NETWORKS = (
    Workload(
        "network",
        "four-factors",
        "Y[a,b] += A[b,i,j] * B[i,j,k] * C[k,l] * D[l,a]",
        dict(a=EDGE, b=EDGE, i=WIDE, j=SLIM, k=WIDE, l=WIDE),
        dict(A="b i j", B="i j k", C="k l", D="l a"),
        plain.four_factors,
        scaled=dict(B="j", C="k", D="l"),
    ),
    Workload(
        "network",
        "chain",
        "Y[a,d] += A[a,b] * B[b,c] * C[c,d]",
        dict(a=EDGE, b=WIDE, c=EDGE, d=WIDE),
        dict(A="a b", B="b c", C="c d"),
        lambda A, B, C: torch.linalg.multi_dot((A, B, C)),
        dtype=BRAIN,
        scaled=dict(B="b", C="c"),
    ),
    Workload(
        "network",
        "tucker",
        "Y[a,b,c] += G[i,j,k] * A[a,i] * B[b,j] * C[c,k]",
        dict(a=WIDE, b=WIDE, c=WIDE, i=RANK, j=RANK, k=RANK),
        dict(G="i j k", A="a i", B="b j", C="c k"),
        plain.tucker,
    ),
    Workload(
        "network",
        "bilinear",
        "Y[b,o] += X[b,i] * W[o,i,j] * Z[b,j]",
        dict(b=EDGE, o=SLIM, i=WIDE, j=SLIM),
        dict(X="b i", W="o i j", Z="b j"),
        plain.bilinear,
    ),
    Workload(
        "network",
        "linear-attention",
        "Y[b,n,d] += Q[b,n,k] * K[b,m,k] * V[b,m,d]",
        dict(b=FEW, n=EDGE, m=EDGE, k=SLIM, d=SLIM),
        dict(Q="b n k", K="b m k", V="b m d"),
        plain.linear_attention,
        dtype=HALF,
        scaled=dict(K="m", V="k"),
    ),
)
SUMS = (
    Workload(
        "sum",
        "squares",
        "Y[()] += X[i,j] * X[i,j]",
        dict(i=SIDE, j=SIDE),
        dict(X="i j"),
        lambda X: (X * X).sum(),
    ),
    Workload("sum", "columns", "Y[j] += X[i,j]", dict(i=SIDE, j=SIDE), dict(X="i j"), lambda X: X.sum(0)),
    Workload("sum", "rows", "Y[i] += X[i,j]", dict(i=SIDE, j=SIDE), dict(X="i j"), lambda X: X.sum(1)),
    Workload(
        "sum",
        "middle",
        "Y[i,k] += X[i,j,k]",
        dict(i=SLIM, j=SIDE, k=SLIM),
        dict(X="i j k"),
        lambda X: X.sum(1),
        dtype=HALF,
    ),
    Workload(
        "sum",
        "weighted-columns",
        "Y[j] += W[i] * X[i,j]",
        dict(i=SIDE, j=SIDE),
        dict(W="i", X="i j"),
        lambda W, X: W @ X,
    ),
    Workload("sum", "row-maximum", "Y[i] = max(X[i,j])", dict(i=EDGE, j=EDGE), dict(X="i j"), lambda X: X.amax(1)),
)
HISTOGRAMS = (
    Workload(
        "histogram",
        "numbers",
        "Y[G[p]] += X[p]",
        dict(p=LONG, g=Range(100, 1000, 5, 20)),
        dict(X="p", G="p < g"),
        lambda X, G, size: scatter_counts(G, X, size[0]),
        size="g",
        library=("bincount", counted),
        regrouped=("Y",),
    ),
    Workload(
        "histogram",
        "joint",
        "Y[G[p],H[p]] += X[p]",
        dict(p=LONG, g=SLIM, h=SLIM),
        dict(X="p", G="p < g", H="p < h"),
        plain.joint_histogram,
        size="g h",
        regrouped=("Y",),
    ),
    Workload(
        "histogram",
        "rows",
        "Y[G[p],c] += X[p,c]",
        dict(p=EDGES, g=Range(50, 400, 3, 9), c=SLIM),
        dict(X="p c", G="p < g"),
        plain.scatter_rows,
        size="g c",
        regrouped=("Y",),
    ),
)
EDGE_SCORES = Workload(
    "edges",
    "scores",
    "S[e,h] += Q[T[e],h,d] * K[U[e],h,d]",
    dict(n=NODES, e=EDGES, h=FEW, d=Range(8, 48, 2, 9)),
    dict(Q="n h d", K="n h d", T="e < n sorted", U="e < n"),
    lambda Q, K, T, U: edge_products(Q, K, T, U),
)
EDGE_SUMS = Workload(
    "edges",
    "weighted-sum",
    "Y[T[e],h,d] += A[e,h] * X[U[e],h,d]",
    dict(n=NODES, e=EDGES, h=FEW, d=Range(8, 48, 2, 9)),
    dict(A="e h", X="n h d", T="e < n sorted", U="e < n"),
    lambda A, X, T, U, size: weighted_messages(A, X, T, U),
    size="n h d",
)
EDGE_FAMILY = (
    EDGE_SCORES,
    replace(EDGE_SCORES, name="scores-new-index", is_changing=True),
    EDGE_SUMS,
    replace(EDGE_SUMS, name="weighted-sum-unsorted", operands={**EDGE_SUMS.operands, "T": "e < n"}),
    replace(EDGE_SUMS, name="weighted-sum-new-index", is_changing=True),
    Workload(
        "edges",
        "filtered",
        "Y[T[e],c] += W[e,c] * X[U[e],c]",
        dict(n=NODES, e=EDGES, c=WIDE),
        dict(W="e c", X="n c", T="e < n sorted", U="e < n"),
        plain.filtered_messages,
        size="n c",
        dtype=HALF,
    ),
)
SCATTER = Workload(
    "scatter",
    "sorted",
    "Y[G[p],c] += X[p,c]",
    dict(p=Range(500_000, 2_000_000, 60, 300), n=NODES, c=SLIM),
    dict(X="p c", G="p < n sorted"),
    plain.scatter_rows,
    size="n c",
)
SCATTERS = (
    SCATTER,
    replace(SCATTER, name="unsorted", operands=dict(X="p c", G="p < n")),
    Workload(
        "scatter",
        "columns",
        "Y[c,G[p]] += X[c,p]",
        dict(p=EDGES, n=NODES, c=SLIM),
        dict(X="c p", G="p < n"),
        plain.column_scatter,
        size="c n",
    ),
    Workload(
        "gather",
        "rows",
        "Y[p,c] = X[G[p],c]",
        dict(p=EDGES, n=NODES, c=WIDE),
        dict(X="n c", G="p < n"),
        lambda X, G: X[G],
        dtype=HALF,
    ),
    Workload(
        "gather",
        "columns",
        "Y[c,p] = X[c,G[p]]",
        dict(p=EDGES, n=NODES, c=SLIM),
        dict(X="c n", G="p < n"),
        lambda X, G: X[:, G],
    ),
)
LAYOUTS = (
    Workload(
        "permutation",
        "transpose",
        "Y[j,i] = X[i,j]",
        dict(i=SIDE, j=SIDE),
        dict(X="i j"),
        lambda X: X.T.clone(memory_format=torch.contiguous_format),
    ),
    Workload(
        "permutation",
        "heads",
        "Y[b,n,h,d] = X[b,h,n,d]",
        dict(b=FEW, h=FEW, n=EDGE, d=WIDE),
        dict(X="b h n d"),
        lambda X: X.transpose(1, 2).clone(memory_format=torch.contiguous_format),
        dtype=HALF,
    ),
    Workload(
        "permutation",
        "reversed",
        "Y[k,j,i] = X[i,j,k]",
        dict(i=WIDE, j=WIDE, k=WIDE),
        dict(X="i j k"),
        lambda X: X.permute(2, 1, 0).clone(memory_format=torch.contiguous_format),
    ),
    Workload(
        "diagonal",
        "batched",
        "Y[b,i] = X[b,i,i]",
        dict(b=EDGE, i=WIDE),
        dict(X="b i i"),
        lambda X: X.diagonal(dim1=1, dim2=2).clone(memory_format=torch.contiguous_format),
    ),
    Workload(
        "diagonal",
        "traces",
        "Y[b] += X[b,i,i]",
        dict(b=EDGE, i=WIDE),
        dict(X="b i i"),
        lambda X: X.diagonal(dim1=1, dim2=2).sum(1),
    ),
    Workload(
        "diagonal",
        "scaling",
        "Y[i,j] = D[i] * X[i,j]",
        dict(i=SIDE, j=SIDE),
        dict(D="i", X="i j"),
        lambda D, X: D[:, None] * X,
    ),
    Workload("outer", "vectors", "Y[i,j] = A[i] * B[j]", dict(i=SIDE, j=SIDE), dict(A="i", B="j"), outer),
    Workload(
        "outer",
        "batched",
        "Y[b,i,j] = A[b,i] * B[b,j]",
        dict(b=EDGE, i=WIDE, j=WIDE),
        dict(A="b i", B="b j"),
        lambda A, B: A[:, :, None] * B[:, None, :],
        dtype=HALF,
    ),
)
DENSE = (
    Workload(
        "dense",
        "matmul",
        "C[m,n] += A[m,k] * B[k,n]",
        dict(m=SIDE, n=SIDE, k=EDGE),
        dict(A="m k", B="k n"),
        lambda A, B: A @ B,
        dtype=HALF,
    ),
    Workload(
        "dense",
        "batched",
        "C[b,m,n] += A[b,m,k] * B[b,k,n]",
        dict(b=SOME, m=WIDE, n=WIDE, k=WIDE),
        dict(A="b m k", B="b k n"),
        batched_matmul,
    ),
    Workload(
        "dense", "vector", "y[i] += A[i,j] * x[j]", dict(i=SIDE, j=SIDE), dict(A="i j", x="j"), lambda A, x: A @ x
    ),
)
EXPERT = Workload(
    "experts",
    "unsorted",
    "Y[p,m] += X[p,c] * W[E[p],c,m]",
    dict(p=Range(4096, 16_384, 20, 60), e=SOME, c=Range(512, 2048, 4, 24), m=Range(512, 2048, 4, 24)),
    dict(X="p c", W="e c m", E="p < e"),
    plain.experts_by_mask,
    dtype=BRAIN,
    traced=plain.experts_in_groups,
    library=("grouped_mm", plain.experts_in_groups),
    scaled=dict(W="c"),
    regrouped=("W",),
)
TOP = Workload(
    "experts",
    "weighted",
    "Y[T[p],m] += G[p] * X[T[p],c] * W[E[p],c,m]",
    dict(p=Range(4096, 16_384, 20, 60), t=Range(2048, 8192, 10, 30), e=SOME, c=WIDE, m=WIDE),
    dict(X="t c", W="e c m", G="p", T="p < t", E="p < e"),
    plain.weighted_experts,
    size="t m",
    dtype=BRAIN,
    traced=plain.weighted_groups,
    library=("grouped_mm", plain.weighted_groups),
    scaled=dict(W="c"),
    regrouped=("W",),
)
GROUPED = (
    EXPERT,
    replace(
        EXPERT,
        name="sorted",
        operands={**EXPERT.operands, "E": "p < e sorted"},
        plain=plain.experts_sorted,
    ),
    replace(EXPERT, name="new-index", is_changing=True),
    TOP,
    replace(
        TOP,
        name="format",
        expr="Y[t,m] += G[e,t] * X[t,c] * W[e,c,m]",
        indirect=TOP.expr,
        as_formats=routing,
        fixed=("G",),
    ),
    Workload(
        "adapters",
        "low-rank",
        "Y[b,o] += X[b,i] * A[U[b],i,r] * B[U[b],r,o]",
        dict(b=Range(256, 2048, 4, 12), u=SOME, i=Range(256, 1024, 4, 20), r=RANK, o=Range(256, 1024, 4, 20)),
        dict(X="b i", A="u i r", B="u r o", U="b < u"),
        plain.gathered_adapters,
        dtype=HALF,
        scaled=dict(A="i", B="r"),
        regrouped=("A", "B"),
    ),
    Workload(
        "adapters",
        "sequences",
        "Y[b,s,o] += X[b,s,i] * A[U[b],i,o]",
        dict(b=SOME, s=WIDE, u=SOME, i=Range(128, 512, 4, 20), o=Range(128, 512, 4, 20)),
        dict(X="b s i", A="u i o", U="b < u"),
        plain.adapted,
        dtype=BRAIN,
        scaled=dict(A="i"),
        regrouped=("A",),
    ),
    Workload(
        "relations",
        "convolution",
        "Y[D[e],o] += V[e] * X[S[e],c] * W[R[e],c,o]",
        dict(n=Range(5_000, 20_000, 10, 30), e=Range(60_000, 300_000, 40, 120), r=Range(6, 24, 2, 4), c=SLIM, o=SLIM),
        dict(V="e", X="n c", W="r c o", D="e < n", S="e < n", R="e < r"),
        lambda V, X, W, D, S, R, size: transform_then_scatter(X, W, R, D, S, V),
        size="n o",
        dtype=HALF,
        scaled=dict(W="c"),
        regrouped=("W",),
    ),
    Workload(
        "relations",
        "taps",
        "Y[I[p,q],m] += X[J[p,q],c] * W[K[p],c,m]",
        dict(n=NODES, p=Range(2_000, 6_000, 6, 16), q=Range(64, 128, 4, 9), k=Range(9, 27, 3, 5), c=SLIM, m=SLIM),
        dict(X="n c", W="k c m", I="p q < n", J="p q < n", K="p < k sorted"),
        plain.taps,
        size="n m",
        dtype=HALF,
        scaled=dict(W="c"),
        regrouped=("W",),
    ),
    Workload(
        "blocks",
        "product",
        "Y[I[p],i,b] += V[p,i,j] * X[J[p],j,b]",
        dict(p=Range(500, 3_000, 6, 20), m=Range(64, 160, 3, 6), i=SLIM, j=SLIM, b=Range(256, 1024, 5, 20)),
        dict(V="p i j", X="m j b", I="p < m sorted", J="p < m"),
        plain.block_products,
        size="m i b",
        dtype=HALF,
        scaled=dict(V="j"),
        regrouped=("X", "Y"),
    ),
)
MAXIMA = (
    Workload(
        "segments",
        "maximum",
        "Y[G[p],c] = max(X[p,c])",
        dict(p=Range(100_000, 250_000, 60, 200), n=NODES, c=SLIM),
        dict(X="p c", G="p < n sorted"),
        partial(plain.segment_extreme, "amax"),
        size="n c",
    ),
    Workload(
        "segments",
        "minimum-unsorted",
        "Y[G[p],c] = min(X[p,c])",
        dict(p=Range(100_000, 250_000, 60, 200), n=NODES, c=SLIM),
        dict(X="p c", G="p < n"),
        partial(plain.segment_extreme, "amin"),
        size="n c",
    ),
    Workload(
        "edge-convolution",
        "neighbours",
        "Y[i,c] = max(X[N[i,k],c])",
        dict(i=NODES, n=NODES, k=Range(8, 32, 2, 5), c=WIDE),
        dict(X="n c", N="i k < n"),
        plain.largest_neighbour,
    ),
)
SPARSE = (
    Workload(
        "sampled",
        "products",
        "S[p] += X[I[p],k] * Y[J[p],k]",
        dict(n=NODES, m=NODES, p=EDGES, k=WIDE),
        dict(X="n k", Y="m k", I="p < n sorted", J="p < m"),
        sampled_products,
    ),
    Workload(
        "sampled",
        "triples",
        "S[t] += E[H[t],d] * R[L[t],d] * E[T[t],d]",
        dict(n=NODES, r=SOME, t=EDGES, d=WIDE),
        dict(E="n d", R="r d", H="t < n", L="t < r", T="t < n"),
        lambda E, R, H, L, T: triple_scores(E, R, H, L, T),
        regrouped=("R",),
    ),
    Workload(
        "spmv",
        "float64",
        "Y[I[p]] += V[p] * X[J[p]]",
        dict(n=NODES, m=NODES, p=EDGES),
        dict(V="p", X="m", I="p < n sorted", J="p < m"),
        plain.coordinate_product,
        size="n",
        dtype=DOUBLE,
        library=("CSR", plain.csr_product),
    ),
    Workload(
        "spmv",
        "equal-rows",
        "Y[i] += V[i,k] * X[K[i,k]]",
        dict(i=NODES, m=NODES, k=Range(8, 40, 2, 5)),
        dict(V="i k", X="m", K="i k < m"),
        plain.sparse_rows,
    ),
    Workload(
        "spmv",
        "matrix",
        "Y[I[p],c] += V[p] * X[J[p],c]",
        dict(n=NODES, m=NODES, p=EDGES, c=WIDE),
        dict(V="p", X="m c", I="p < n sorted", J="p < m"),
        plain.coordinate_product,
        size="n c",
        library=("CSR", plain.csr_product),
    ),
    Workload(
        "bags",
        "weighted",
        "Y[b,d] += W[b,l] * E[T[b,l],d]",
        dict(n=Range(100_000, 500_000, 20, 60), b=Range(4_000, 16_000, 5, 15), l=SOME, d=WIDE),
        dict(W="b l", E="n d", T="b l < n"),
        lambda W, E, T: weighted_bags(W, E, T),
        library=("embedding_bag", lambda W, E, T: embedding_bag(W, E, T)),
    ),
    Workload(
        "bags",
        "ragged",
        "Y[B[p],d] += W[p] * E[T[p],d]",
        dict(n=Range(100_000, 500_000, 20, 60), b=Range(4_000, 16_000, 5, 15), p=EDGES, d=SLIM),
        dict(W="p", E="n d", B="p < b sorted", T="p < n"),
        lambda W, E, B, T, size: torch.zeros(size, dtype=E.dtype, device=E.device).index_add_(0, B, W[:, None] * E[T]),
        size="b d",
        dtype=HALF,
    ),
    Workload(
        "hash-grid",
        "one-level",
        "Y[p,f] += W[p,c] * T[H[p,c],f]",
        dict(p=EDGES, n=Range(100_000, 500_000, 20, 60), f=Range(2, 4, 2, 4)),
        dict(W="p 8", T="n f", H="p 8 < n"),
        lambda W, T, H: weighted_bags(W, T, H),
    ),
    Workload(
        "hash-grid",
        "levels",
        "Y[p,l,f] += W[p,l,c] * T[l,H[p,l,c],f]",
        dict(
            p=Range(50_000, 200_000, 10, 40),
            l=Range(8, 16, 2, 3),
            n=Range(50_000, 500_000, 20, 60),
            f=Range(2, 4, 2, 4),
        ),
        dict(W="p l 8", T="l n f", H="p l 8 < n"),
        plain.hash_levels,
    ),
    Workload(
        "decomposition",
        "mttkrp",
        "M[I[p],r] += V[p] * B[J[p],r] * C[K[p],r]",
        dict(i=NODES, j=NODES, k=NODES, p=EDGES, r=SLIM),
        dict(V="p", B="j r", C="k r", I="p < i sorted", J="p < j", K="p < k"),
        plain.mttkrp,
        size="i r",
    ),
    Workload(
        "decomposition",
        "ttmc",
        "M[I[p],r,s] += V[p] * B[J[p],r] * C[K[p],s]",
        dict(i=NODES, j=NODES, k=NODES, p=Range(100_000, 400_000, 40, 120), r=RANK, s=RANK),
        dict(V="p", B="j r", C="k s", I="p < i sorted", J="p < j", K="p < k"),
        plain.ttmc,
        size="i r s",
    ),
    Workload(
        "decomposition",
        "dense-mttkrp",
        "M[i,r] += X[i,j,k] * B[j,r] * C[k,r]",
        dict(i=WIDE, j=WIDE, k=WIDE, r=RANK),
        dict(X="i j k", B="j r", C="k r"),
        plain.dense_mttkrp,
    ),
)
PRODUCTS = (
    Workload(
        "tensor-product",
        "fully-connected",
        "Z[b,I[p],w] += V[p] * X[b,J[p],u] * Y[b,K[p]] * W[b,L[p],u,w]",
        dict(
            b=Range(1024, 4096, 4, 12),
            p=Range(40, 90, 8, 20),
            l=Range(4, 12, 2, 4),
            u=Range(16, 56, 3, 9),
            w=Range(16, 56, 3, 9),
        ),
        dict(V="p", X="b 9 u", Y="b 9", W="b l u w", I="p < 9 sorted", J="p < 9", K="p < 9", L="p < l"),
        plain.dense_tensor_product,
        size="b 9 w",
        fixed=("V",),
        scaled=dict(W="u"),
        regrouped=("X", "Y", "W", "Z"),
    ),
    Workload(
        "tensor-product",
        "without-mixing",
        "Z[b,I[p],u] += V[p] * X[b,J[p],u] * Y[b,K[p]]",
        dict(b=Range(10_000, 40_000, 5, 15), p=Range(30, 60, 8, 20), u=SLIM),
        dict(V="p", X="b 9 u", Y="b 9", I="p < 9 sorted", J="p < 9", K="p < 9"),
        plain.paths_without_mixing,
        size="b 9 u",
        fixed=("V",),
        regrouped=("X", "Y", "Z"),
    ),
)
# How far a CPU's sizes are from small ones to full ones, where it is not half way: there plain torch takes about 0.7 ms
# on one core of a Neoverse N1, and between 0.2 and 2 ms whatever the seed.
CPU_SHARES = {
    "network-chain": 0.35,
    "network-tucker": 0.6,
    "network-linear-attention": 0.3,
    "sum-squares": 0.7,
    "sum-columns": 0.75,
    "sum-rows": 0.85,
    "sum-middle": 0.8,
    "sum-weighted-columns": 0.8,
    "sum-row-maximum": 1.0,
    "histogram-numbers": 0.65,
    "histogram-joint": 0.6,
    "histogram-rows": 0.6,
    "edges-scores": 0.4,
    "edges-scores-new-index": 0.45,
    "edges-weighted-sum": 0.45,
    "edges-filtered": 0.45,
    "edges-weighted-sum-unsorted": 0.4,
    "scatter-sorted": 0.55,
    "scatter-unsorted": 0.45,
    "scatter-columns": 0.7,
    "gather-rows": 0.6,
    "gather-columns": 0.55,
    "permutation-transpose": 0.7,
    "permutation-heads": 0.75,
    "permutation-reversed": 0.75,
    "diagonal-batched": 0.7,
    "diagonal-traces": 1.0,
    "diagonal-scaling": 0.75,
    "outer-vectors": 0.9,
    "outer-batched": 0.7,
    "dense-matmul": 0.0,
    "dense-batched": 0.75,
    "dense-vector": 0.85,
    "experts-unsorted": 0.15,
    "experts-sorted": 0.1,
    "experts-new-index": 0.15,
    "experts-weighted": 0.1,
    "experts-format": 0.15,
    "adapters-low-rank": 0.55,
    "adapters-sequences": 0.2,
    "relations-convolution": 0.2,
    "relations-taps": 0.35,
    "blocks-product": 0.25,
    "segments-maximum": 0.55,
    "sampled-products": 0.45,
    "sampled-triples": 0.4,
    "spmv-float64": 0.75,
    "spmv-equal-rows": 0.8,
    "spmv-matrix": 0.45,
    "bags-weighted": 0.65,
    "hash-grid-one-level": 0.4,
    "hash-grid-levels": 0.35,
    "decomposition-mttkrp": 0.4,
    "decomposition-ttmc": 0.45,
    "decomposition-dense-mttkrp": 0.8,
    "tensor-product-fully-connected": 0.2,
}
WRITTEN_DOWN = (
    *NETWORKS,
    *SUMS,
    *HISTOGRAMS,
    *EDGE_FAMILY,
    *SCATTERS,
    *LAYOUTS,
    *DENSE,
    *GROUPED,
    *MAXIMA,
    *SPARSE,
    *PRODUCTS,
)
SUITE = tuple(replace(each, cpu_share=CPU_SHARES.get(each.id, each.cpu_share)) for each in WRITTEN_DOWN)
FAMILIES = tuple(dict.fromkeys(workload.family for workload in SUITE))
