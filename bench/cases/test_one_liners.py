"""Layers that have no module here, as statements: a mixture of experts and graph attention, beside plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.formats import GroupCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..generate import graph
from ..peers import installed, needs_gpu

EXPERTS, TOP = 8, 2
TOKENS, WIDTHS = on(8192, 256), on((1024, 4096), (64, 128))
MIXED = on(torch.bfloat16, torch.float32)
LOOP = "torch, one matmul an expert"
NODES, DEGREE, HEADS, CHANNELS = on(50_000, 1_000), 12, 4, on(32, 8)
SEPARATE = "torch, gather and index_add"


@dataclass(frozen=True)
class Routed:
    case: Case
    expert: Tensor  # [TOKENS * TOP]
    token: Tensor
    gate: Tensor
    X: Tensor  # [TOKENS, C]
    W: Tensor  # [EXPERTS, C, M]


@held
def routed() -> Routed:
    C, M = WIDTHS
    X = torch.randn(TOKENS, C, device=DEVICE, dtype=MIXED)
    W = torch.randn(EXPERTS, C, M, device=DEVICE, dtype=MIXED) * C**-0.5
    scores = torch.randn(TOKENS, EXPERTS, device=DEVICE).softmax(1)
    gates, experts = scores.topk(TOP, 1)
    token = torch.arange(TOKENS, device=DEVICE).repeat_interleave(TOP)
    expert, order = experts.flatten().sort(stable=True)
    token, gate = token[order], gates.flatten()[order].to(MIXED)
    expected = torch.zeros(TOKENS, M, device=DEVICE, dtype=torch.float64)
    for e in range(EXPERTS):
        mine = token[expert == e]
        expected.index_add_(0, mine, gate[expert == e, None].double() * (X[mine].double() @ W[e].double()))
    case = Case(
        "mixture_of_experts",
        f"{TOKENS} tokens, top {TOP} of {EXPERTS}, {C} to {M}",
        expected,
        LIMIT[MIXED],
        flops=2.0 * TOKENS * TOP * C * M,
        traffic=float(MIXED.itemsize * (X.numel() + W.numel() + TOKENS * M)),
    )
    return Routed(case, expert, token, gate, X, W)


def experts_by(provider: str, given: Routed) -> Call:
    X, W, token, gate = given.X, given.W, given.token, given.gate
    counts = torch.bincount(given.expert, minlength=EXPERTS)
    if provider == LOOP:
        parts = list(zip(token.split(counts.tolist()), gate.split(counts.tolist())))

        def run() -> Tensor:
            Y = torch.zeros(TOKENS, W.shape[2], device=X.device, dtype=X.dtype)
            for W_e, (mine, weight) in zip(W, parts):
                Y.index_add_(0, mine, weight[:, None] * (X[mine] @ W_e))
            return Y

        return Call(run)
    if provider == "torch grouped_mm":
        needs_gpu(provider)
        grouped, ends = torch._grouped_mm, counts.cumsum(0).int()

        def run_grouped() -> Tensor:
            Y = torch.zeros(TOKENS, W.shape[2], device=X.device, dtype=X.dtype)
            return Y.index_add_(0, token, gate[:, None] * grouped(X[token], W, offs=ends))

        return Call(run_grouped)
    pairs = torch.stack([given.expert, token])
    R = GroupCOO.from_coo(pairs, gate, (EXPERTS, TOKENS), group_dim=0, group_size=on(128, 32))
    maps = dict(EXP=R.coords[0], TOK=R.coords[1], GATE=R.values)
    expr = "Y[TOK[p,q],m] += GATE[p,q] * X[TOK[p,q],c] * W[EXP[p],c,m]"
    return Call(lambda: insum(expr, X=X, W=W, size=(TOKENS, W.shape[2]), **maps))


@pytest.mark.parametrize("provider", [OURS, LOOP, "torch grouped_mm"])
def test_mixture_of_experts(provider: str, measure: Measure) -> None:
    given = routed()
    measure(given.case, provider, lambda: experts_by(provider, given))


@dataclass(frozen=True)
class Attended:
    case: Case
    src: Tensor  # int64 for every provider, as graphs come: torch's indexing would turn others into it at each call
    dst: Tensor
    Q: Tensor  # [NODES, HEADS, CHANNELS]
    K: Tensor
    V: Tensor


@held
def attended() -> Attended:
    pattern = graph(NODES, DEGREE, 0.3)
    src = torch.from_numpy(pattern.indices).to(DEVICE)
    counts = torch.from_numpy(pattern.indptr).diff()
    dst = torch.repeat_interleave(torch.arange(NODES), counts).to(DEVICE)
    Q, K, V = (torch.randn(NODES, HEADS, CHANNELS, device=DEVICE) for _ in range(3))
    expected = separately(src, dst, Q.double(), K.double(), V.double())
    entries = len(src)
    case = Case(
        "graph_attention",
        f"{NODES} nodes, {entries} edges, {HEADS} heads of {CHANNELS}",
        expected,
        LIMIT[torch.float32],
        flops=4.0 * entries * HEADS * CHANNELS,
        traffic=4.0 * (4 * Q.numel() + 2 * entries),
    )
    return Attended(case, src, dst, Q, K, V)


def separately(src: Tensor, dst: Tensor, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Softmax over the edges into a node of Q . K, times V: every edge's rows written out."""
    score = (Q[dst] * K[src]).sum(2)
    top = torch.full_like(Q[:, :, 0], -torch.inf).index_reduce_(0, dst, score, "amax")
    weight = (score - top[dst]).exp()
    total = torch.zeros_like(top).index_add_(0, dst, weight)
    return torch.zeros_like(V).index_add_(0, dst, (weight / total[dst])[:, :, None] * V[src])


def in_statements(src: Tensor, dst: Tensor, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    S = insum("S[e,h] += Q[DST[e],h,c] * K[SRC[e],h,c]", Q=Q, K=K, DST=dst, SRC=src)
    top = insum("M[DST[e],h] = max(S[e,h])", S=S, DST=dst, size=Q.shape[:2])
    P = (S - top[dst]).exp()
    Z = insum("Z[DST[e],h] += P[e,h]", P=P, DST=dst, size=Q.shape[:2])
    R = Z.reciprocal()
    return insum("Y[DST[e],h,c] += P[e,h] * R[DST[e],h] * V[SRC[e],h,c]", P=P, R=R, V=V, DST=dst, SRC=src, size=V.shape)


def attention_by(provider: str, given: Attended) -> Call:
    src, dst, Q, K, V = given.src, given.dst, given.Q, given.K, given.V
    if provider == SEPARATE:
        return Call(lambda: separately(src, dst, Q, K, V))
    if provider == "PyG":
        utils = installed("torch_geometric.utils")

        def run() -> Tensor:
            weight = utils.softmax((Q[dst] * K[src]).sum(2), dst, num_nodes=NODES)
            return utils.scatter(weight[:, :, None] * V[src], dst, dim_size=NODES)  # type: ignore[no-any-return]

        return Call(run)
    return Call(lambda: in_statements(src, dst, Q, K, V))


@pytest.mark.parametrize("provider", [OURS, SEPARATE, "PyG"])
def test_graph_attention(provider: str, measure: Measure) -> None:
    given = attended()
    measure(given.case, provider, lambda: attention_by(provider, given))
