"""Layers and functions as a user calls them, host time included, beside what they replace: ratios from one run.

    INSUM_DATA=folder python -m bench.bench_layers spmm spmm_backward linear conversion

`wall` is the time of one call among many, the host's share included; `device` is the GPU's alone, by CUDA-graph replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.sparse._triton_ops import bsr_dense_addmm
from triton.runtime.errors import OutOfResources

from insum_ops import spmm as our_spmm
from insum_ops.formats import GroupCOO
from insum_ops.nn import BlockSparseLinear

from .harness import check, device_ms, geomean, peak_mib, table, wall_ms
from .inputs import graphs

try:
    from torch_geometric.utils import spmm as pyg_spmm
except ImportError:
    pyg_spmm = None

DEVICE = "cuda"
LIMIT = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def spmm() -> None:
    """spmm(A, B) with A a torch CSR tensor, N = 32, 128, 512."""
    rows, walls, devices = [], {}, {}
    for dtype, (name, graph) in product((torch.float32, torch.float16), graphs(DEVICE).items()):
        csr = _with_values(graph, graph.values().to(dtype))
        exact = _with_values(graph, csr.values().double())
        for N in (32, 128, 512):
            B = torch.randn(graph.shape[1], N, device=DEVICE, dtype=dtype)
            ours, theirs = lambda: our_spmm(csr, B), lambda: torch.sparse.mm(csr, B)
            check(ours(), exact @ B.double(), LIMIT[dtype])
            wall, wall_torch = wall_ms(ours), wall_ms(theirs)
            wall_pyg = wall_ms(lambda: pyg_spmm(csr, B)) if pyg_spmm is not None else float("nan")
            device, device_torch = device_ms(ours, replays=7), device_ms(theirs, replays=7)
            walls.setdefault((dtype, N), []).append(wall_torch / wall)
            devices.setdefault((dtype, N), []).append(device_torch / device)
            rows.append((name, str(dtype)[6:], N, wall_torch, wall_pyg, wall, wall_torch / wall, device_torch / device))
    names = ("graph", "dtype", "N", "torch", "PyG", "ours", "wall speed-up", "device speed-up")
    print(table("spmm as called, ms", names, rows))
    for key in walls:
        least = f"least {min(walls[key]):.2f}x wall, {min(devices[key]):.2f}x device"
        print(f"   {key}: geomean {geomean(walls[key]):.2f}x wall, {geomean(devices[key]):.2f}x device; {least}")


def spmm_backward() -> None:
    """Forward and backward, gradients of B and of A's values, N = 128, float32."""
    rows, ratios = [], []
    for name, graph in graphs(DEVICE).items():
        B = torch.randn(graph.shape[1], 128, device=DEVICE, requires_grad=True)
        upstream = torch.randn(graph.shape[0], 128, device=DEVICE)
        theirs, ours = (graph.clone().requires_grad_() for _ in range(2))
        step = lambda A, multiply: _step(lambda: multiply(A, B), upstream, (A, B))
        step(theirs, torch.sparse.mm)
        expected, expected_B = theirs.grad.values(), B.grad
        step(ours, our_spmm)
        check(ours.grad.values(), expected, 1e-4)
        check(B.grad, expected_B, 1e-4)
        time_torch = wall_ms(lambda: step(theirs, torch.sparse.mm))
        time_ours = wall_ms(lambda: step(ours, our_spmm))
        on_device = device_ms(lambda: step(ours, our_spmm), calls=3)
        ratios.append(time_torch / time_ours)
        rows.append((name, time_torch, time_ours, ratios[-1], on_device))
    print(table("spmm forward + backward, ms", ("graph", "torch", "ours", "speed-up", "ours, device"), rows))
    print(f"   geomean {geomean(ratios):.2f}x, least {min(ratios):.2f}x")


def linear() -> None:
    """BlockSparseLinear 4096 x 4096 on 4096 tokens beside nn.Linear and torch's BSR kernel, tuned."""
    rows, size = [], 4096
    names = ("dtype", "block", "density", "forward", "over dense", "device", "over BSR", "fwd+bwd", "its device")
    for dtype, edge in product((torch.float16, torch.bfloat16), (32, 64, 128)):
        x = torch.randn(size, size, device=DEVICE, dtype=dtype, requires_grad=True)
        upstream = torch.randn(size, size, device=DEVICE, dtype=dtype)
        dense = nn.Linear(size, size, device=DEVICE, dtype=dtype)
        dense_times = _layer_times(dense, x, upstream)
        for density in (1.0, 0.5, 0.3, 0.1, 0.05, 0.01):
            layer = BlockSparseLinear(size, size, edge, density, device=DEVICE, dtype=dtype)
            twin = layer.to_linear()
            with torch.no_grad():
                expected = nn.functional.linear(x.double(), twin.weight.double(), twin.bias.double())
                check(layer(x), expected, LIMIT[dtype])
            ours = _layer_times(layer, x, upstream)
            is_short = dtype == torch.float16
            bsr = _torch_bsr(twin, x, edge) if is_short and density <= 0.5 else float("nan")
            ratios = (theirs / own for theirs, own in zip(dense_times, ours))
            forward, on_device, training, training_device, _ = ratios
            over = (forward, on_device, bsr / ours[1], training, training_device)
            rows.append((str(dtype)[6:], edge, density, ours[0], *over, dense_times[4], ours[4]))
        print(
            table("BlockSparseLinear 4096 x 4096, 4096 tokens, ms", (*names, "dense MiB", "MiB"), rows[-6:]), flush=True
        )


def conversion() -> None:
    """What converting a CSR tensor costs on the GPU, and after how many calls at N = 128 it has paid for itself."""
    rows = []
    for name, graph in graphs(DEVICE).items():
        B = torch.randn(graph.shape[1], 128, device=DEVICE)
        convert = wall_ms(lambda: GroupCOO.from_torch(graph).facts, calls=5)
        theirs, ours = device_ms(lambda: graph @ B), device_ms(lambda: our_spmm(graph, B))
        gain = theirs - ours
        rows.append((name, convert, theirs, ours, convert / gain if gain > 0 else float("inf")))
    print(table("conversion on the GPU, ms", ("graph", "convert", "torch call", "our call", "calls to pay"), rows))


def _with_values(graph: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(graph.crow_indices(), graph.col_indices(), values, graph.shape)


def _step(forward: Callable[[], Tensor], upstream: Tensor, leaves: tuple[Tensor, ...]) -> None:
    for leaf in leaves:
        leaf.grad = None
    forward().backward(upstream)


def _layer_times(layer: nn.Module, x: Tensor, upstream: Tensor) -> tuple[float, float, float, float, float]:
    """Forward as called and on the device, forward + backward as called and on the device, its peak memory in MiB."""

    def inference() -> None:
        with torch.no_grad():
            layer(x)

    step = lambda: _step(lambda: layer(x), upstream, (x, *layer.parameters()))
    training = wall_ms(step), device_ms(step, calls=3, replays=7)
    return wall_ms(inference), device_ms(inference, replays=7), *training, peak_mib(step)


def _torch_bsr(twin: nn.Linear, x: Tensor, edge: int) -> float:
    """torch's own kernel computes W @ x.T: the best of several configs, on the device."""
    bsr, right = twin.weight.detach().to_sparse_bsr((edge, edge)), x.detach().T
    start, best = torch.zeros_like(right), float("inf")
    for split, warps, stages in product((16, 32, 64), (4,), (3, 4)):
        meta = {"SPLIT_N": split, "GROUP_SIZE_ROW": 4, "num_warps": warps, "num_stages": stages}
        try:
            best = min(best, device_ms(lambda: bsr_dense_addmm(start, bsr, right, beta=0, meta=meta), replays=5))
        except OutOfResources:
            continue
    return best


BENCHMARKS = {"spmm": spmm, "spmm_backward": spmm_backward, "linear": linear, "conversion": conversion}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or BENCHMARKS:
        BENCHMARKS[wanted]()
