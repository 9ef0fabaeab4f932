"""What users write without this library, for the workloads that `statements.py` has no function for."""

from __future__ import annotations

import torch
from torch import Tensor

from .statements import gather_scale_scatter

__all__ = [
    "adapted",
    "bilinear",
    "block_products",
    "column_scatter",
    "coordinate_product",
    "csr_product",
    "dense_mttkrp",
    "dense_tensor_product",
    "experts_by_mask",
    "experts_in_groups",
    "experts_sorted",
    "filtered_messages",
    "four_factors",
    "gathered_adapters",
    "hash_levels",
    "joint_histogram",
    "largest_neighbour",
    "linear_attention",
    "mttkrp",
    "paths_without_mixing",
    "scatter_rows",
    "segment_extreme",
    "sparse_rows",
    "taps",
    "ttmc",
    "tucker",
    "weighted_experts",
    "weighted_groups",
]


def zeros(size: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(size, dtype=like.dtype, device=like.device)


def four_factors(A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return torch.einsum("bij,ijk,kl,la->ab", A, B, C, D)


def tucker(G: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    return torch.einsum("ijk,ai,bj,ck->abc", G, A, B, C)


def bilinear(X: Tensor, W: Tensor, Z: Tensor) -> Tensor:
    return torch.nn.functional.bilinear(X, Z, W)


def linear_attention(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    return Q @ (K.transpose(1, 2) @ V)


def joint_histogram(X: Tensor, G: Tensor, H: Tensor, size: tuple[int, int]) -> Tensor:
    return zeros((size[0] * size[1],), X).index_add_(0, G * size[1] + H, X).view(size)


def scatter_rows(X: Tensor, G: Tensor, size: tuple[int, ...]) -> Tensor:
    return zeros(size, X).index_add_(0, G, X)


def column_scatter(X: Tensor, G: Tensor, size: tuple[int, ...]) -> Tensor:
    return zeros(size, X).index_add_(1, G, X)


def filtered_messages(W: Tensor, X: Tensor, T: Tensor, U: Tensor, size: tuple[int, ...]) -> Tensor:
    return zeros(size, X).index_add_(0, T, W * X[U])


def segment_extreme(kind: str, X: Tensor, G: Tensor, size: tuple[int, ...]) -> Tensor:
    return zeros(size, X).scatter_reduce_(0, G[:, None].expand_as(X), X, kind, include_self=False)


def largest_neighbour(X: Tensor, N: Tensor) -> Tensor:
    return X[N].amax(1)


def sparse_rows(V: Tensor, X: Tensor, K: Tensor) -> Tensor:
    return (V * X[K]).sum(1)


def coordinate_product(V: Tensor, X: Tensor, I: Tensor, J: Tensor, size: tuple[int, ...]) -> Tensor:  # noqa: E741
    return gather_scale_scatter(I, J, V, X, size[0])


def csr_product(V: Tensor, X: Tensor, I: Tensor, J: Tensor, size: tuple[int, ...]) -> Tensor:  # noqa: E741
    """A sorted coordinate list as torch's CSR matrix, made at each call as the statement's operands are given."""
    counts = torch.bincount(I, minlength=size[0])
    pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    A = torch.sparse_csr_tensor(pointers, J, V, (size[0], len(X)), check_invariants=False)
    return A @ X


def mttkrp(V: Tensor, B: Tensor, C: Tensor, I: Tensor, J: Tensor, K: Tensor, size: tuple[int, ...]) -> Tensor:  # noqa: E741
    return zeros(size, B).index_add_(0, I, V[:, None] * B[J] * C[K])


def ttmc(V: Tensor, B: Tensor, C: Tensor, I: Tensor, J: Tensor, K: Tensor, size: tuple[int, ...]) -> Tensor:  # noqa: E741
    return zeros(size, B).index_add_(0, I, V[:, None, None] * B[J][:, :, None] * C[K][:, None, :])


def dense_mttkrp(X: Tensor, B: Tensor, C: Tensor) -> Tensor:
    return torch.einsum("ijk,jr,kr->ir", X, B, C)


def hash_levels(W: Tensor, T: Tensor, H: Tensor) -> Tensor:
    return torch.stack([(W[:, l, :, None] * T[l][H[:, l]]).sum(1) for l in range(len(T))], 1)  # noqa: E741


def gathered_adapters(X: Tensor, A: Tensor, B: Tensor, U: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(X[:, None], A[U]), B[U])[:, 0]


def adapted(X: Tensor, A: Tensor, U: Tensor) -> Tensor:
    return torch.bmm(X, A[U])


def experts_by_mask(X: Tensor, W: Tensor, E: Tensor) -> Tensor:
    Y = X.new_zeros(len(X), W.shape[2])
    for expert, matrix in enumerate(W):
        mine = (expert == E).nonzero()[:, 0]
        Y = Y.index_add(0, mine, X[mine] @ matrix)
    return Y


def experts_sorted(X: Tensor, W: Tensor, E: Tensor) -> Tensor:
    counts = torch.bincount(E, minlength=len(W)).tolist()
    return torch.cat([own @ matrix for own, matrix in zip(X.split(counts), W)])


def experts_in_groups(X: Tensor, W: Tensor, E: Tensor) -> Tensor:
    """Sorted by expert and multiplied by torch's grouped product."""
    expert, order = E.sort()
    ends = torch.searchsorted(expert, torch.arange(len(W), device=E.device), right=True).int()
    products = torch._grouped_mm(X[order], W, offs=ends)
    return torch.zeros_like(products).index_copy(0, order, products)


def weighted_experts(X: Tensor, W: Tensor, G: Tensor, T: Tensor, E: Tensor, size: tuple[int, ...]) -> Tensor:
    Y = zeros(size, X)
    for expert, matrix in enumerate(W):
        mine = (expert == E).nonzero()[:, 0]
        Y = Y.index_add(0, T[mine], G[mine][:, None] * (X[T[mine]] @ matrix))
    return Y


def weighted_groups(X: Tensor, W: Tensor, G: Tensor, T: Tensor, E: Tensor, size: tuple[int, ...]) -> Tensor:
    return zeros(size, X).index_add(0, T, G[:, None] * experts_in_groups(X[T], W, E))


def taps(X: Tensor, W: Tensor, I: Tensor, J: Tensor, K: Tensor, size: tuple[int, ...]) -> Tensor:  # noqa: E741
    """A product for each group of pairs with one tap, and its rows added up."""
    return zeros(size, X).index_add_(0, I.flatten(), torch.bmm(X[J], W[K]).flatten(0, 1))


def block_products(V: Tensor, X: Tensor, I: Tensor, J: Tensor, size: tuple[int, ...]) -> Tensor:  # noqa: E741
    return zeros(size, X).index_add_(0, I, torch.bmm(V, X[J]))


def dense_tensor_product(
    V: Tensor, X: Tensor, Y: Tensor, W: Tensor, I: Tensor, J: Tensor, K: Tensor, L: Tensor,  # noqa: E741
    size: tuple[int, ...],
) -> Tensor:  # fmt: skip
    table = zeros((size[1], X.shape[1], Y.shape[1], W.shape[1]), X).index_put_((I, J, K, L), V, accumulate=True)
    return torch.einsum("ijkl,bju,bk,bluw->biw", table, X, Y, W)


def paths_without_mixing(
    V: Tensor, X: Tensor, Y: Tensor, I: Tensor, J: Tensor, K: Tensor, size: tuple[int, ...]  # noqa: E741
) -> Tensor:  # fmt: skip
    products = V[None, :, None] * X[:, J] * Y[:, K, None]
    return zeros(size, X).index_add_(1, I, products)
