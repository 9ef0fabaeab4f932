"""Twenty statements with operands to try them on, each beside the same in plain torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from insum_ops.equivariant.clebsch_gordan import clebsch_gordan
from insum_ops.formats import BlockGroupCOO, GroupCOO, kernel_map

from .generate import graph

__all__ = [
    *("EXAMPLES", "Draw", "Example", "Given"),
    *("batched_matmul", "edge_products", "embedding_bag", "gather_scale_scatter", "outer", "sampled_products"),
    *("scatter_counts", "transform_then_scatter", "triple_scores", "weighted_bags", "weighted_messages"),
]

HALF, SINGLE = torch.float16, torch.float32


@dataclass(frozen=True)
class Draw:
    """Where operands are made, how large, and whether they hold values or only a shape that plans are made for."""

    device: str = "cpu"
    is_small: bool = False
    is_blank: bool = False

    def size(self, full: int, small: int) -> int:
        return small if self.is_small else full

    def values(self, *shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
        if self.is_blank:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randn(shape, dtype=SINGLE, device=self.device).to(dtype)

    def positions(self, high: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(math.prod(shape))
        return torch.randint(0, high, shape, generator=generator).to(self.device)

    def edges(self, nodes: int, degree: int) -> tuple[Tensor, Tensor]:
        """Rows, ascending, and columns of a random graph whose degrees follow a power law."""
        pattern = graph(nodes, degree, 0.3)
        counts = torch.from_numpy(pattern.indptr).diff()
        rows = torch.repeat_interleave(torch.arange(nodes), counts)
        return rows.to(self.device), torch.from_numpy(pattern.indices).long().to(self.device)


@dataclass(frozen=True)
class Given:
    """The operands of a statement, and of the functions that compute the same by torch's own operations."""

    operands: Mapping[str, Any]
    arguments: tuple[Any, ...]  # of `Example.plain`
    size: tuple[int, ...] | None = None
    eager_arguments: tuple[Any, ...] | None = None  # of `Example.eager`, if they are others


@dataclass(frozen=True)
class Example:
    """A statement that a reader may choose.

    `plain` is what torch.compile is given. `eager`, where there is one, is what torch does best without it: a library's
    routine, or a loop that would be unrolled.
    """

    name: str
    family: str
    title: str
    about: str
    expr: str
    make: Callable[[Draw], Given]
    plain: Callable[..., Tensor]
    eager: Callable[..., Tensor] | None = None
    dtype: torch.dtype = SINGLE


# What users write without this library. The page shows these functions.


def csr_matmul(A: Tensor, B: Tensor) -> Tensor:
    return A @ B  # A is a torch.sparse_csr tensor


def gather_scale_scatter(row: Tensor, col: Tensor, value: Tensor, B: Tensor, rows: int) -> Tensor:
    C = torch.zeros(rows, *B.shape[1:], dtype=B.dtype, device=B.device)
    return C.index_add_(0, row, value.view(-1, *[1] * (B.dim() - 1)) * B[col])


def dense_matmul(A: Tensor, B: Tensor) -> Tensor:
    return A @ B  # zeros and all


def matmul_per_group(In: Tensor, Weight: Tensor, MAPX: Tensor, MAPY: Tensor, MAPZ: Tensor) -> Tensor:
    products = torch.bmm(In[MAPY.clamp(min=0)], Weight[MAPZ])
    products = products * (MAPX >= 0)[:, :, None]
    Out = torch.zeros(len(In), Weight.shape[2], dtype=In.dtype, device=In.device)
    return Out.index_add_(0, MAPX.clamp(min=0).flatten(), products.flatten(0, 1))


def matmul_per_tap(In: Tensor, Weight: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    Out = torch.zeros(len(In), Weight.shape[2], dtype=In.dtype, device=In.device)
    for tap, (source, target) in enumerate(pairs):
        Out.index_add_(0, target, In[source] @ Weight[tap])
    return Out


def dense_tensor_product(CG: Tensor, X: Tensor, Y: Tensor, W: Tensor) -> Tensor:
    return torch.einsum("ijkl,bju,bk,bluw->biw", CG, X, Y, W)


def gather_matmul_scatter(A: Tensor, B: Tensor, D: Tensor, E: Tensor, rows: int) -> Tensor:
    C = torch.zeros(rows, B.shape[1], dtype=B.dtype, device=B.device)
    return C.index_add_(0, D, A[:, E] @ B)


def sampled_products(X: Tensor, Y: Tensor, I: Tensor, J: Tensor) -> Tensor:  # noqa: E741 - the statement's names
    return (X[I] * Y[J]).sum(1)


def weighted_bags(W: Tensor, E: Tensor, TOK: Tensor) -> Tensor:
    return (W[:, :, None] * E[TOK]).sum(1)


def embedding_bag(W: Tensor, E: Tensor, TOK: Tensor) -> Tensor:
    return F.embedding_bag(TOK, E, per_sample_weights=W, mode="sum")


def transform_then_scatter(X: Tensor, W: Tensor, rel: Tensor, dst: Tensor, src: Tensor, value: Tensor) -> Tensor:
    H = torch.einsum("jc,rco->rjo", X, W)  # every node for every relation
    Y = torch.zeros(len(X), W.shape[2], dtype=X.dtype, device=X.device)
    return Y.index_add_(0, dst, value[:, None] * H[rel, src])


def three_way_products(V: Tensor, B: Tensor, C: Tensor, at: Tensor, rows: int) -> Tensor:
    M = torch.zeros(rows, B.shape[1], dtype=B.dtype, device=B.device)
    return M.index_add_(0, at[0], V[:, None] * B[at[1]] * C[at[2]])


def edge_products(Q: Tensor, K: Tensor, DST: Tensor, SRC: Tensor) -> Tensor:
    return (Q[DST] * K[SRC]).sum(2)


def weighted_messages(P: Tensor, V: Tensor, DST: Tensor, SRC: Tensor) -> Tensor:
    Y = torch.zeros_like(V)
    return Y.index_add_(0, DST, P[:, :, None] * V[SRC])


def scatter_amax(row: Tensor, col: Tensor, value: Tensor, X: Tensor, rows: int) -> Tensor:
    messages = value[:, None] * X[col]
    M = torch.zeros(rows, X.shape[1], dtype=X.dtype, device=X.device)
    return M.scatter_reduce_(0, row[:, None].expand_as(messages), messages, "amax", include_self=False)


def scatter_counts(BIN: Tensor, V: Tensor, bins: int) -> Tensor:
    return torch.zeros(bins, dtype=V.dtype, device=V.device).index_add_(0, BIN, V)


def matmul_per_expert(X: Tensor, W: Tensor, routed: list[tuple[Tensor, Tensor]]) -> Tensor:
    Y = torch.zeros(len(X), W.shape[2], dtype=X.dtype, device=X.device)
    for expert, (token, gate) in enumerate(routed):
        Y.index_add_(0, token, gate[:, None] * (X[token] @ W[expert]))
    return Y


def triple_scores(E: Tensor, R: Tensor, HEAD: Tensor, REL: Tensor, TAIL: Tensor) -> Tensor:
    return (E[HEAD] * R[REL] * E[TAIL]).sum(1)


def batched_matmul(A: Tensor, B: Tensor) -> Tensor:
    return torch.bmm(A, B)


def outer(A: Tensor, B: Tensor) -> Tensor:
    return torch.outer(A, B)


# Operands.


def graph_matrix(draw: Draw, columns: int | None, is_transposed: bool = False, is_format: bool = True) -> Given:
    """A random graph as a matrix, and what it is multiplied with; `columns` None: a vector."""
    nodes = draw.size(50_000, 60)
    row, col = draw.edges(nodes, 12)
    value = draw.values(len(row))
    B = draw.values(nodes) if columns is None else draw.values(nodes, columns)
    plain = (col, row, value, B, nodes) if is_transposed else (row, col, value, B, nodes)
    eager = (_csr(*plain[:3], nodes), B)
    if not is_format:
        return Given(dict(AM=row, AK=col, AV=value, B=B), plain, (nodes, *B.shape[1:]), eager)
    A = GroupCOO.from_coo(torch.stack([row, col]), value, (nodes, nodes))
    name = "dC" if is_transposed else "x" if columns is None else "B"
    return Given({"A": A, name: B}, plain, None, eager)


def _csr(row: Tensor, col: Tensor, value: Tensor, nodes: int) -> Tensor:
    order = (row * nodes + col).argsort()
    pointers = torch.zeros(nodes + 1, dtype=torch.int64, device=row.device)
    pointers[1:] = torch.bincount(row, minlength=nodes).cumsum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they are in beta
        return torch.sparse_csr_tensor(pointers, col[order], value[order], (nodes, nodes), check_invariants=False)


def block_matrix(draw: Draw) -> Given:
    edge, blocks = 32, draw.size(128, 3)
    keep = (
        torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).to(draw.device) < draw.size(10, 50) / 100
    )
    at = keep.nonzero().T
    stored = draw.values(at.shape[1], edge, edge, dtype=HALF)
    if draw.is_blank:
        stored.fill_(1)  # from_dense keeps the blocks that are not zero
    side = blocks * edge
    dense = torch.zeros(blocks, blocks, edge, edge, dtype=HALF, device=draw.device)
    dense[at[0], at[1]] = stored
    dense = dense.transpose(1, 2).reshape(side, side)
    A = BlockGroupCOO.from_dense(dense, block_size=(edge, edge))
    B = draw.values(side, draw.size(2048, 40), dtype=HALF)
    return Given(dict(A=A, B=B), (dense, B))


def convolution(draw: Draw) -> Given:
    """A submanifold 3 x 3 x 3 over a wavy surface."""
    side, channels = draw.size(256, 8), draw.size(64, 16)
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    z = (8 + 6 * torch.sin(x / 9) * torch.cos(y / 13)).long()
    voxels = torch.stack([torch.zeros_like(x), x, y, z], 2).view(-1, 4).to(draw.device)
    maps = kernel_map(voxels, (side, side, 16), 1, kernel_size=3).grouped(128)
    In = draw.values(len(voxels), channels, dtype=HALF)
    Weight = (draw.values(27, channels, channels) / math.sqrt(9 * channels)).to(HALF)
    MAPX, MAPY, MAPZ = maps.MAPX, maps.MAPY, maps.MAPZ
    pairs = []
    for tap in range(27):
        source, target = MAPY[tap == MAPZ].flatten(), MAPX[tap == MAPZ].flatten()
        pairs.append((source[source >= 0].long(), target[source >= 0].long()))
    operands = dict(MAPX=MAPX, MAPY=MAPY, MAPZ=MAPZ, In=In, Weight=Weight)
    wide = (MAPX.long(), MAPY.long(), MAPZ.long())
    return Given(operands, (In, Weight, *wide), (len(voxels), channels), (In, Weight, pairs))


def tensor_product(draw: Draw) -> Given:
    """Every path of degrees 0 to 2, coefficients as a sparse tensor over (output, first, second, path)."""
    degrees, channels, batch = range(3), draw.size(32, 4), draw.size(4096, 6)
    first = [0, 1, 4, 9]  # component of each degree
    entries, values, path = [], [], 0
    for l1 in degrees:
        for l2 in degrees:
            for l3 in range(abs(l1 - l2), min(l1 + l2, 2) + 1):
                (j, k, i), own = clebsch_gordan(l1, l2, l3)
                entries.append(torch.stack([first[l3] + i, first[l1] + j, first[l2] + k, torch.full_like(i, path)]))
                values.append(own)
                path += 1
    shape, at = (9, 9, 9, path), torch.cat(entries, 1).to(draw.device)
    value = torch.cat(values).to(SINGLE).to(draw.device)
    CG = GroupCOO.from_coo(at, value, shape)
    dense = torch.zeros(shape, device=draw.device)
    dense[tuple(at)] = value
    X, Y = draw.values(batch, 9, channels), draw.values(batch, 9)
    W = draw.values(batch, path, channels, channels)
    return Given(dict(CG=CG, X=X, Y=Y, W=W), (dense, X, Y, W))


def gather_matmul(draw: Draw) -> Given:
    rows, inner, kept, targets, width = (
        draw.size(*both) for both in ((8192, 40), (2048, 30), (1024, 20), (4096, 16), (512, 24))
    )
    D, E = draw.positions(targets, rows), draw.positions(inner, kept)
    A, B = draw.values(rows, inner, dtype=HALF), (draw.values(kept, width) / math.sqrt(kept)).to(HALF)
    return Given(dict(A=A, B=B, D=D, E=E), (A, B, D, E, targets), (targets, width))


def sampled(draw: Draw) -> Given:
    nodes = draw.size(50_000, 50)
    row, col = draw.edges(nodes, 12)
    X, Y = draw.values(nodes, 128), draw.values(nodes, 128)
    return Given(dict(X=X, Y=Y, I=row, J=col), (X, Y, row, col))


def bags(draw: Draw) -> Given:
    words, batch, length, width = (draw.size(*both) for both in ((500_000, 90), (16_384, 10), (32, 5), (128, 8)))
    W, E, TOK = draw.values(batch, length), draw.values(words, width), draw.positions(words, batch, length)
    return Given(dict(W=W, E=E, TOK=TOK), (W, E, TOK))


def relational(draw: Draw) -> Given:
    nodes, relations, channels = draw.size(20_000, 40), draw.size(16, 3), draw.size(64, 16)
    dst, src = draw.edges(nodes, 12)
    rel = draw.positions(relations, len(dst))
    value = draw.values(len(dst), dtype=HALF)
    X = draw.values(nodes, channels, dtype=HALF)
    W = (draw.values(relations, channels, channels) / math.sqrt(12 * channels)).to(HALF)
    A = GroupCOO.from_coo(torch.stack([rel, dst, src]), value, (relations, nodes, nodes), group_size=draw.size(64, 4))
    return Given(dict(A=A, X=X, W=W), (X, W, rel, dst, src, value))


def third_order(draw: Draw) -> Given:
    shape = (draw.size(20_000, 20), draw.size(10_000, 15), draw.size(5_000, 10))
    entries, rank = draw.size(1_000_000, 60), 64
    keys = (
        torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(0))[:entries]
        if draw.is_small
        else None
    )
    if keys is None:
        keys = torch.randint(0, math.prod(shape), (entries,), generator=torch.Generator().manual_seed(0)).unique()
    keys = keys.sort().values.to(draw.device)
    at = torch.stack([keys // (shape[1] * shape[2]), keys // shape[2] % shape[1], keys % shape[2]])
    V, B, C = draw.values(len(keys)), draw.values(shape[1], rank), draw.values(shape[2], rank)
    return Given(dict(A=GroupCOO.from_coo(at, V, shape), B=B, C=C), (V, B, C, at, shape[0]))


def heads(draw: Draw, is_scores: bool) -> Given:
    nodes, count, channels = draw.size(50_000, 40), 4, draw.size(32, 8)
    DST, SRC = draw.edges(nodes, 12)
    V = draw.values(nodes, count, channels)
    if is_scores:
        K = draw.values(nodes, count, channels)
        return Given(dict(Q=V, K=K, DST=DST, SRC=SRC), (V, K, DST, SRC))
    P = draw.values(len(DST), count)
    return Given(dict(P=P, V=V, DST=DST, SRC=SRC), (P, V, DST, SRC), tuple(V.shape))


def neighbours(draw: Draw) -> Given:
    given = graph_matrix(draw, draw.size(64, 8))
    return Given({"A": given.operands["A"], "X": given.operands["B"]}, given.arguments)


def bins(draw: Draw) -> Given:
    count, numbers = draw.size(1024, 7), draw.size(1_000_000, 200)
    BIN, V = draw.positions(count, numbers), draw.values(numbers)
    return Given(dict(BIN=BIN, V=V), (BIN, V, count), (count,))


def experts(draw: Draw) -> Given:
    tokens, count, C, M = (draw.size(*both) for both in ((4096, 24), (8, 3), (1024, 16), (2048, 16)))
    scores = torch.randn(tokens, count, generator=torch.Generator().manual_seed(0)).softmax(1).to(draw.device)
    gates, chosen = scores.topk(2, 1)
    token = torch.arange(tokens, device=draw.device).repeat_interleave(2)
    expert, gate = chosen.flatten(), gates.flatten().to(HALF)
    X, W = draw.values(tokens, C, dtype=HALF), (draw.values(count, C, M) / math.sqrt(C)).to(HALF)
    R = GroupCOO.from_coo(torch.stack([expert, token]), gate, (count, tokens), group_size=draw.size(128, 4))
    routed = [(token[expert == e], gate[expert == e]) for e in range(count)]
    return Given(dict(R=R, X=X, W=W), (X, W, routed))


def triples(draw: Draw) -> Given:
    entities, relations, count = draw.size(100_000, 30), draw.size(500, 4), draw.size(200_000, 50)
    HEAD, TAIL, REL = (
        draw.positions(entities, count),
        draw.positions(entities, 1, count)[0],
        draw.positions(relations, count),
    )
    E, R = draw.values(entities, 128), draw.values(relations, 128)
    return Given(dict(E=E, R=R, HEAD=HEAD, REL=REL, TAIL=TAIL), (E, R, HEAD, REL, TAIL))


def batches(draw: Draw) -> Given:
    batch, side = draw.size(64, 2), draw.size(512, 24)
    A, B = draw.values(batch, side, side, dtype=HALF), (draw.values(batch, side, side) / math.sqrt(side)).to(HALF)
    return Given(dict(A=A, B=B), (A, B))


def vectors(draw: Draw) -> Given:
    A, B = draw.values(draw.size(8192, 20)), draw.values(draw.size(8192, 30))
    return Given(dict(A=A, B=B), (A, B))


PAPER, GRAPHS, TENSORS, DENSE = "The paper's applications", "Graphs", "Tensors and tables", "Dense"
EXAMPLES = tuple(
    Example(*fields)
    for fields in (
        (
            "spmm",
            PAPER,
            "Sparse times dense (SpMM)",
            "A graph's matrix, 50,000 x 50,000 with 12 entries a row on average, times 128 columns. The rows of the "
            "format GroupCOO are cut into groups of equal length.",
            "C[m,n] += A[m,k] * B[k,n]",
            lambda draw: graph_matrix(draw, 128),
            gather_scale_scatter,
            csr_matmul,
        ),
        (
            "block-spmm",
            PAPER,
            "Block-sparse times dense",
            "The same line with a matrix of 32 x 32 blocks, one in ten stored: the format alone makes it another "
            "kernel, on tensor cores.",
            "C[m,n] += A[m,k] * B[k,n]",
            block_matrix,
            dense_matmul,
            None,
            HALF,
        ),
        (
            "convolution",
            PAPER,
            "Sparse convolution",
            "A 3 x 3 x 3 convolution over 65,536 voxels of a surface. A kernel map lists which voxel reaches which "
            "output through which tap.",
            "Out[MAPX[p,q],m] += In[MAPY[p,q],c] * Weight[MAPZ[p],c,m]",
            convolution,
            matmul_per_group,
            matmul_per_tap,
            HALF,
        ),
        (
            "tensor-product",
            PAPER,
            "Equivariant tensor product",
            "Features of degrees 0 to 2 with 32 channels are multiplied with spherical harmonics and with weights of "
            "their own for each sample; the Clebsch-Gordan coefficients CG are a sparse tensor.",
            "Z[b,i,w] += CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[b,l,u,w]",
            tensor_product,
            dense_tensor_product,
        ),
        (
            "gather-matmul-scatter",
            PAPER,
            "Gather, multiply, scatter",
            "Columns of A are gathered by E, the product's rows are added to the rows that D names: one kernel, no "
            "tensor in between.",
            "C[D[y],x] += A[y,E[r]] * B[r,x]",
            gather_matmul,
            gather_matmul_scatter,
            None,
            HALF,
        ),
        (
            "coo-spmm",
            GRAPHS,
            "SpMM over an edge list",
            "The same product as SpMM, over the coordinates of the entries as a graph library has them, without a "
            "format.",
            "C[AM[p],n] += AV[p] * B[AK[p],n]",
            lambda draw: graph_matrix(draw, 128, is_format=False),
            gather_scale_scatter,
            csr_matmul,
        ),
        (
            "spmv",
            GRAPHS,
            "Sparse times vector (SpMV)",
            "One step of PageRank: a graph's matrix times a vector.",
            "y[m] += A[m,k] * x[k]",
            lambda draw: graph_matrix(draw, None),
            gather_scale_scatter,
            csr_matmul,
        ),
        (
            "spmm-gradient",
            GRAPHS,
            "Gradient of SpMM",
            "The gradient for B is a statement too: B and C have changed places. The matrix is regrouped along its "
            "columns once, so that nothing is added atomically.",
            "dB[k,n] += A[m,k] * dC[m,n]",
            lambda draw: graph_matrix(draw, 128, is_transposed=True),
            gather_scale_scatter,
            csr_matmul,
        ),
        (
            "edge-scores",
            GRAPHS,
            "Attention scores along edges",
            "For each edge and head, the query of the node that it enters times the key of the node that it leaves.",
            "S[e,h] += Q[DST[e],h,c] * K[SRC[e],h,c]",
            lambda draw: heads(draw, is_scores=True),
            edge_products,
        ),
        (
            "edge-messages",
            GRAPHS,
            "Weighted messages along edges",
            "The other half of graph attention: values are weighted along edges and added up at the nodes.",
            "Y[DST[e],h,c] += P[e,h] * V[SRC[e],h,c]",
            lambda draw: heads(draw, is_scores=False),
            weighted_messages,
        ),
        (
            "neighbour-max",
            GRAPHS,
            "Maximum over neighbours",
            "A segment maximum: the largest of the weighted features of a node's neighbours. A node without any has 0.",
            "M[m,c] = max(A[m,k] * X[k,c])",
            neighbours,
            scatter_amax,
        ),
        (
            "relational",
            GRAPHS,
            "Relational graph convolution",
            "Edges are of 16 relations, each with a weight matrix of its own. A is a sparse tensor over relation, "
            "target and source.",
            "Y[i,o] += A[r,i,j] * X[j,c] * W[r,c,o]",
            relational,
            transform_then_scatter,
            None,
            HALF,
        ),
        (
            "sddmm",
            GRAPHS,
            "Sampled dense-dense product (SDDMM)",
            "Of the product of two dense matrices, only the elements at the entries of a sparse one.",
            "S[p] += X[I[p],k] * Y[J[p],k]",
            sampled,
            sampled_products,
        ),
        (
            "embedding-bag",
            TENSORS,
            "Embedding bag",
            "Rows of a table of 500,000 embeddings are looked up, weighted and added, 32 to a bag.",
            "Y[b,d] += W[b,l] * E[TOK[b,l],d]",
            bags,
            weighted_bags,
            embedding_bag,
        ),
        (
            "mixture-of-experts",
            TENSORS,
            "Mixture of experts",
            "Each of 4,096 tokens goes to two of eight experts. The routing R is a sparse matrix whose values are the "
            "gates.",
            "Y[t,m] += R[e,t] * X[t,c] * W[e,c,m]",
            experts,
            matmul_per_expert,
            None,
            HALF,
        ),
        (
            "mttkrp",
            TENSORS,
            "MTTKRP",
            "The step of a tensor decomposition: a sparse tensor of three dimensions and a million entries times two "
            "factor matrices.",
            "M[i,r] += A[i,j,k] * B[j,r] * C[k,r]",
            third_order,
            three_way_products,
        ),
        (
            "triple-scores",
            TENSORS,
            "Scores of a knowledge graph",
            "DistMult: head, relation and tail are looked up in two tables, multiplied and summed. E occurs twice.",
            "S[t] += E[HEAD[t],d] * R[REL[t],d] * E[TAIL[t],d]",
            triples,
            triple_scores,
        ),
        (
            "histogram",
            TENSORS,
            "Weighted histogram",
            "A million numbers are added to 1,024 bins: a scatter without a product.",
            "H[BIN[i]] += V[i]",
            bins,
            scatter_counts,
        ),
        (
            "bmm",
            DENSE,
            "Batched matrix product",
            "Nothing sparse at all: 64 products of 512 x 512 matrices, which a library does as well or better.",
            "C[b,m,n] += A[b,m,k] * B[b,k,n]",
            batches,
            batched_matmul,
            None,
            HALF,
        ),
        (
            "outer-product",
            DENSE,
            "Outer product",
            "The smallest statement with a tile of two axes; only the memory's speed counts.",
            "C[i,j] = A[i] * B[j]",
            vectors,
            outer,
        ),
    )
)
