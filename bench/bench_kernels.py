"""The compiler's kernels beside cuSPARSE, cuBLAS and, where given, reference kernels: ratios from one run.

    INSUM_DATA=folder python -m bench.bench_kernels spmm block conv tensor_product host

`INSUM_DATA` holds graphs/ and clouds/ of npz files (generated inputs without it). `INSUM_YARDSTICKS` may name a Python
file with hand-written kernels to time beside ours; it is no part of this project.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from insum_ops import insum, sparse_conv3d
from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.reference.lower import lower, placeholders
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.tuning.autotune import tune
from insum_ops.formats import BlockCOO, GroupCOO, kernel_map

from .harness import check, device_ms, geomean, host_us, table
from .inputs import clebsch_gordan, clouds, graphs, submanifold_map, voxels
from .peers import torch_bsr

DEVICE = "cuda"
LIMIT = {torch.float16: 5e-3, torch.float32: 1e-5}  # fp16: sums that meet in fp16, as torch's flag allows


def yardsticks() -> ModuleType | None:
    path = os.environ.get("INSUM_YARDSTICKS")
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("yardsticks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["yardsticks"] = module
    spec.loader.exec_module(module)
    return module


def spmm() -> None:
    """C[m,n] += A[m,k] * B[k,n], A in GroupCOO, N = 128."""
    peer, rows, ratios = yardsticks(), [], {torch.float32: [], torch.float16: []}
    for dtype in (torch.float32, torch.float16):
        for name, graph in graphs(DEVICE).items():
            csr = torch.sparse_csr_tensor(
                graph.crow_indices(), graph.col_indices(), graph.values().to(dtype), graph.shape
            )
            B = torch.randn(graph.shape[1], 128, device=DEVICE, dtype=dtype)
            reference = (
                torch.sparse_csr_tensor(
                    *(getattr(graph, n)() for n in ("crow_indices", "col_indices")),
                    csr.values().double(),
                    graph.shape,
                )
                @ B.double()
            )
            theirs = device_ms(lambda: csr @ B)
            degree = csr.values().numel() / max(int((csr.crow_indices().diff() > 0).sum()), 1)
            base = 1 << max(round(degree) - 1, 0).bit_length()
            best = (float("inf"), 0, 0.0)
            sticks = []
            chosen = GroupCOO.from_torch(csr).group_size
            for size in sorted({chosen, max(base // 2, 1), base, base * 2} & {1, 2, 4, 8, 16, 32, 64, 128, 256}):
                A = GroupCOO.from_torch(csr, group_size=size)
                error = check(insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), reference, LIMIT[dtype])
                best = min(best, (device_ms(lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)), size, error))
                if peer is not None:
                    sticks.append(_group_yardstick(peer, csr, B, size))
            stick = min(sticks, default=float("nan"))
            ratios[dtype].append(theirs / best[0])
            rows.append(
                (
                    name,
                    str(dtype)[6:],
                    theirs,
                    stick,
                    best[0],
                    best[1],
                    theirs / best[0],
                    best[0] / stick,
                    best[2],
                )
            )
    print(
        table(
            "SpMM N=128",
            ("graph", "dtype", "cuSPARSE", "yardstick", "ours", "group", "speed-up", "ours/stick", "error"),
            rows,
        )
    )
    for dtype, found in ratios.items():
        print(f"   {dtype}: geomean {geomean(found):.2f}x, least {min(found):.2f}x over cuSPARSE")


def _group_yardstick(peer: ModuleType, csr: Tensor, B: Tensor, size: int) -> float:
    AM, AK, AV, several = peer.group_rows(csr.crow_indices(), csr.col_indices(), csr.values(), size)
    P, N = len(AM), B.shape[1]
    C = torch.empty(csr.shape[0], N, device=DEVICE, dtype=B.dtype)
    best = float("inf")
    for BP, warps in ((8, 4), (4, 1), (1, 1), (8, 2), (2, 1)):

        def call(BP: int = BP, warps: int = warps) -> None:
            if several.numel():
                C.index_fill_(0, several, 0)
            peer.group_spmm[((P + BP - 1) // BP,)](AM, AK, AV, B, C, P, N, size, BP, num_warps=warps)

        best = min(best, device_ms(call, replays=7))
    return best


def block() -> None:
    """C[m,n] += A[m,k] * B[k,n], A in BlockCOO, 4096^3, fp16."""
    peer, rows, size = yardsticks(), [], 4096
    B = torch.randn(size, size, device=DEVICE, dtype=torch.float16)
    dense = torch.randn(size, size, device=DEVICE, dtype=torch.float16)
    cublas = device_ms(lambda: dense @ B)
    for edge in (32, 64, 128):
        for sparsity in (0.0, 0.5, 0.8, 0.9, 0.95):
            mask = torch.rand(size // edge, size // edge, device=DEVICE) >= sparsity
            values = dense * mask.repeat_interleave(edge, 0).repeat_interleave(edge, 1)
            A = BlockCOO.from_dense(values, block_size=(edge, edge))
            error = check(
                insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B),
                values.double() @ B.double(),
                LIMIT[torch.float16],
            )
            ours = device_ms(lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B))
            stick = _block_yardstick(peer, A, B) if peer is not None else float("nan")
            rows.append((edge, sparsity, cublas, stick, ours, cublas / ours, ours / stick, error))
    print(
        table(
            "block SpMM 4096^3 fp16",
            ("block", "sparsity", "cuBLAS", "yardstick", "ours", "over dense", "ours/stick", "error"),
            rows,
        )
    )


def block_peers() -> None:
    """32 x 32 blocks beside torch's own block-sparse kernel, tuned, and the same statement through Inductor."""
    rows, size, edge = [], 4096, 32
    B = torch.randn(size, size, device=DEVICE, dtype=torch.float16)
    for sparsity in (0.8, 0.9, 0.95):
        mask = torch.rand(size // edge, size // edge, device=DEVICE) >= sparsity
        dense = torch.randn(size, size, device=DEVICE, dtype=torch.float16)
        dense *= mask.repeat_interleave(edge, 0).repeat_interleave(edge, 1)
        A = BlockCOO.from_dense(dense, block_size=(edge, edge))
        call = lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
        check(call(), dense.double() @ B.double(), LIMIT[torch.float16])
        ours = device_ms(call)
        bsr = _torch_bsr(dense, B, edge)
        inductor = _inductor(A, B, dense)
        lazy, eager = (_broadcast(A, B, is_lazy) for is_lazy in (True, False))
        rows.append((sparsity, ours, bsr, inductor, bsr / ours, inductor / ours, lazy, eager, eager / lazy))
    names = ("sparsity", "ours", "TorchBSR", "Inductor", "over BSR", "over Inductor", "lazy", "eager", "eager/lazy")
    print(table("block SpMM 4096^3 fp16, 32 x 32", names, rows))


def _torch_bsr(dense: Tensor, B: Tensor, edge: int) -> float:
    return device_ms(torch_bsr(dense, B, edge).run, replays=7)


def _inductor(A: BlockCOO, B: Tensor, dense: Tensor) -> float:
    tensors = {"AM": A.AM, "AV": A.AV, "AK": A.AK, "B": B.unflatten(0, (-1, A.block_size[0]))}
    size = (A.shape[0] // A.block_size[0], A.block_size[0], B.shape[1])
    bound = bind(parse("C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]"), tensors, size)
    with inductor_config.patch({"triton.native_matmul": True}):
        compiled = torch.compile(lower(bound, frozenset()), dynamic=False)
        arguments = [tensors[name] for name in placeholders(bound)]
        check(compiled(*arguments).flatten(0, 1), dense.double() @ B.double(), LIMIT[torch.float16])
        return device_ms(lambda: compiled(*arguments))


def _broadcast(A: BlockCOO, B: Tensor, is_lazy: bool) -> float:
    """The same schedule and configs, with and without lazy broadcasting: the best of each."""
    tensors = {"AM": A.AM, "AV": A.AV, "AK": A.AK, "B": B.unflatten(0, (-1, A.block_size[0]))}
    size = (A.shape[0] // A.block_size[0], A.block_size[0], B.shape[1])
    bound = bind(parse("C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]"), tensors, size)
    assert A.facts is not None
    fact = A.facts.owned("AM")
    problem = problem_for(bound, tensors, fact, frozenset())
    problem = replace(problem, flags=replace(problem.flags, lazy=is_lazy))
    _, best = tune(problem, list(tensors.values()), fact)
    return device_ms(lambda: best(list(tensors.values()), fact))


def _block_yardstick(peer: ModuleType, A: BlockCOO, B: Tensor) -> float:
    edge, size = A.block_size[0], B.shape[1]
    C = torch.empty(A.shape[0], size, device=DEVICE, dtype=B.dtype)
    best = float("inf")
    for swap, BN, warps, stages in (
        (True, 256, 4, 4),
        (True, 128, 4, 3),
        (False, 128, 4, 3),
        (False, 256, 8, 3),
        (False, 128, 8, 3),
    ):
        grid = (size // BN, A.shape[0] // edge)
        try:
            best = min(
                best,
                device_ms(
                    lambda: peer.block_spmm_owner[grid](
                        A.facts.pointers,
                        A.AK,
                        A.AV,
                        B,
                        C,
                        size,
                        edge,
                        edge,
                        BN,
                        swap,
                        num_warps=warps,
                        num_stages=stages,
                    ),
                    replays=7,
                ),
            )
        except peer.triton.runtime.errors.OutOfResources:
            continue
    return best


def conv() -> None:
    """Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m] and sparse_conv3d, 3^3 submanifold, 5 cm voxels, fp16."""
    peer, rows, matmul = yardsticks(), [], torch.backends.cuda.matmul
    for name, xyz in clouds().items():
        points = voxels(xyz, 0.05, DEVICE)
        triples = submanifold_map(points)
        n, pairs = len(points), triples.shape[1]
        ones = torch.ones(pairs, device=DEVICE, dtype=torch.float16)
        neighbours = torch.full((n, 27), -1, dtype=torch.int32, device=DEVICE)
        neighbours[triples[2], triples[0]] = triples[1].int()
        corner = points - points.amin(0)
        indices = torch.cat([torch.zeros_like(corner[:, :1]), corner], 1).int()
        whole = kernel_map(indices, (corner.amax(0) + 1).tolist(), 1, kernel_size=3)
        for channels in (32, 64, 128):
            In = torch.randn(n, channels, device=DEVICE, dtype=torch.float16)
            W = torch.randn(27, channels, channels, device=DEVICE, dtype=torch.float16) * channels**-0.5
            reference = torch.zeros(n, channels, device=DEVICE, dtype=torch.float64)
            for z in range(27):
                pick = triples[:, triples[0] == z]
                reference.index_add_(0, pick[2], In[pick[1]].double() @ W[z].double())
            found: dict[bool, list[tuple[float, str, float]]] = {True: [], False: []}
            sticks: dict[bool, list[float]] = {True: [], False: []}
            for fast in (True, False):
                matmul.allow_fp16_reduced_precision_reduction = fast
                for size in (64, 128):
                    K = GroupCOO.from_coo(triples, ones, (27, n, n), group_dim=0, group_size=size)
                    maps = dict(MZ=K.coords[0], MY=K.coords[1], MX=K.coords[2])
                    call = lambda: insum(
                        "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]",
                        In=In,
                        W=W,
                        size=(n, channels),
                        **maps,
                    )
                    error = check(call(), reference, LIMIT[torch.float16])
                    found[fast].append((device_ms(call), f"group {size}", error))
                    if peer is not None:
                        sticks[fast].append(_conv_yardstick(peer, maps, In, W, size, fast))
                call = lambda: insum("Out[x,m] += In[NBR[x,z],c] * W[z,c,m]", In=In, W=W, NBR=neighbours)
                error = check(call(), reference, LIMIT[torch.float16])
                found[fast].append((device_ms(call), "stationary", error))
                weight = W.permute(2, 0, 1).reshape(channels, 3, 3, 3, channels)
                whole.tiled()  # as after a few calls
                call = lambda: sparse_conv3d(In, weight, whole)
                error = check(call(), reference, LIMIT[torch.float16])
                found[fast].append((device_ms(call), "sparse_conv3d", error))
            for fast in (True, False):
                ours, how, error = min(found[fast])
                stick = min(sticks[fast], default=float("nan"))
                rows.append((name, pairs, channels, "fp16" if fast else "fp32", stick, ours, how, ours / stick, error))
        matmul.allow_fp16_reduced_precision_reduction = True
    print(
        table(
            "convolution",
            ("cloud", "pairs", "channels", "sums", "yardstick", "ours", "how", "ours/stick", "error"),
            rows,
        )
    )


def _conv_yardstick(peer: ModuleType, maps: dict[str, Tensor], In: Tensor, W: Tensor, size: int, fast: bool) -> float:
    P, channels = maps["MY"].shape[0], In.shape[1]

    def call() -> Tensor:
        out = torch.zeros(len(In), channels, device=DEVICE, dtype=torch.float16 if fast else torch.float32)
        peer.conv_group[(P, 1)](
            maps["MX"],
            maps["MY"],
            maps["MZ"],
            In,
            W,
            out,
            channels,
            channels,
            size,
            channels,
            min(channels, 64),
            num_warps=4,
            num_stages=3,
        )
        return out if fast else out.half()

    return device_ms(call, replays=7)


def tensor_product() -> None:
    """Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,p,u,w], batch 10,000, fp32."""
    peer, rows, batch = yardsticks(), [], 10_000
    for lmax in (1, 2, 3):
        coordinates, values, shape = clebsch_gordan(lmax)
        paths, size = shape[:2]
        longest = int(torch.bincount(coordinates[0]).max())
        CG = GroupCOO.from_coo(
            coordinates.to(DEVICE),
            values.to(DEVICE),
            shape,
            group_dim=0,
            group_size=max(16, 1 << (longest - 1).bit_length()),
        )
        maps = dict(CGI=CG.coords[1], CGJ=CG.coords[2], CGK=CG.coords[3], CGV=CG.values)
        for channels in (16, 32, 64):
            X = torch.randn(batch, size, channels, device=DEVICE)
            Y = torch.randn(batch, size, device=DEVICE)
            W = torch.randn(batch, paths, channels, channels, device=DEVICE)
            few = slice(0, 64)
            dense = CG.to_dense().double()
            reference = torch.einsum("pijk,bju,bk,bpuw->biw", dense, X[few].double(), Y[few].double(), W[few].double())
            floor = (X.numel() * 2 + Y.numel() + W.numel()) * 4 / 4.3e9
            for precision in ("high", "highest"):
                torch.set_float32_matmul_precision(precision)
                call = lambda: insum(
                    "Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,p,u,w]",
                    X=X,
                    Y=Y,
                    W=W,
                    size=(batch, size, channels),
                    **maps,
                )
                error = check(call()[few], reference, 3e-3 if precision == "high" else 1e-5)
                ours = device_ms(call)
                stick = _product_yardstick(peer, maps, X, Y, W, precision) if peer is not None else float("nan")
                rows.append((lmax, channels, precision, floor, stick, ours, ours / stick, ours / floor, error))
            torch.set_float32_matmul_precision("highest")
    print(
        table(
            "tensor product, batch 10,000",
            (
                "lmax",
                "channels",
                "precision",
                "floor",
                "yardstick",
                "ours",
                "ours/stick",
                "ours/floor",
                "error",
            ),
            rows,
        )
    )


def _product_yardstick(
    peer: ModuleType, maps: dict[str, Tensor], X: Tensor, Y: Tensor, W: Tensor, precision: str
) -> float:
    CGI, CGJ, CGK = (maps[name].clamp_min(0) for name in ("CGI", "CGJ", "CGK"))
    P, Q = CGI.shape
    batch, size, channels = X.shape
    Z = torch.empty_like(X)
    side = max(16, 1 << (size - 1).bit_length())
    best = float("inf")
    for warps in (1, 2, 4):
        call = lambda: peer.tensor_product[(batch, 1)](
            CGI,
            CGJ,
            CGK,
            maps["CGV"],
            X,
            Y,
            W,
            Z,
            size,
            size,
            size,
            P,
            Q,
            channels,
            channels,
            side,
            channels,
            "tf32" if precision == "high" else "ieee",
            num_warps=warps,
        )
        best = min(best, device_ms(call, replays=7))
    return best


def cold() -> None:
    """Seconds from empty caches to the first result, default tuning; run it with an empty INSUM_CACHE_DIR."""
    rows, n = [], 4096
    B = torch.randn(n, n, device=DEVICE, dtype=torch.float16)
    mask = torch.rand(n // 32, n // 32, device=DEVICE) > 0.9
    block = BlockCOO.from_dense(
        torch.randn(n, n, device=DEVICE, dtype=torch.float16) * mask.repeat_interleave(32, 0).repeat_interleave(32, 1),
        block_size=(32, 32),
    )
    graph = next(iter(graphs(DEVICE).values()))
    group = GroupCOO.from_torch(graph)
    maps = dict(
        MZ=torch.randint(27, (4000,), device=DEVICE),
        MY=torch.randint(-1, 60000, (4000, 128), device=DEVICE),
        MX=torch.randint(-1, 60000, (4000, 128), device=DEVICE),
    )
    In, W = (
        torch.randn(60000, 64, device=DEVICE, dtype=torch.float16),
        torch.randn(27, 64, 64, device=DEVICE, dtype=torch.float16),
    )
    cases = {
        "block SpMM": lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=block, B=B),
        "SpMM": lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=group, B=torch.randn(graph.shape[1], 128, device=DEVICE)),
        "convolution": lambda: insum(
            "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]", In=In, W=W, size=(60000, 64), **maps
        ),
    }
    for name, call in cases.items():
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        rows.append((name, time.perf_counter() - start))
    print(table("first call, seconds", ("statement", "seconds"), rows))


def host() -> None:
    """What one cached call of a tiny problem costs on the host."""
    A = GroupCOO.from_dense(torch.eye(16, device=DEVICE), group_size=1)
    B = torch.randn(16, 16, device=DEVICE)
    raw = dict(AM=A.AM, AK=A.AK, AV=A.AV)
    size = (16, 16)
    plain = host_us(lambda: insum("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", B=B, size=size, **raw))
    formed = host_us(lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B))
    dense = host_us(lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=B, B=B))
    torch_own = host_us(lambda: B @ B)
    B.requires_grad_()
    tracked = host_us(lambda: insum("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", B=B, size=size, **raw))
    print(
        table(
            "host time, microseconds",
            ("scattered", "stored", "format", "with gradient", "torch B @ B"),
            [(plain, dense, formed, tracked, torch_own)],
        )
    )


BENCHMARKS = {
    "spmm": spmm,
    "block": block,
    "block_peers": block_peers,
    "conv": conv,
    "tensor_product": tensor_product,
    "host": host,
    "cold": cold,
}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or BENCHMARKS:
        BENCHMARKS[wanted]()
