"""Results files as pytest-benchmark would write them, small, for tests of what is made of them."""

from __future__ import annotations

import json
from pathlib import Path

H200 = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cpu": "a processor",
    "python": "3.12.1",
    "packages": {"torch": "2.11.0", "triton": "3.6.0"},
}
CPU = {"gpu": "none", "architecture": "x86_64", "threads": 2, "cpu": "a processor", "packages": {"torch": "2.13.0"}}


def entry(experiment: str, case: str, provider: str, ms: float, x: float | None = None, **facts: object) -> dict:
    info = dict(experiment=experiment, case=case, provider=provider, device="cuda", x=x, facts=facts, error=1e-7)
    info |= dict(flops=2e9 * (1 - x) if x is not None and x < 1 else 2e9, traffic=1e8)
    info |= dict(device_ms=ms, device_p20=0.9 * ms, device_p80=1.1 * ms, cold_ms=2 * ms, timing="graph")
    info |= dict(queued_ms=ms + 0.25)
    return {"extra_info": info, "stats": {"median": 3e-3 * ms, "min": 2.5e-3 * ms}}


def noted(experiment: str, case: str, provider: str, value: float, unit: str) -> dict:
    info = dict(experiment=experiment, case=case, provider=provider, device="cuda", x=None, facts={})
    info |= dict(flops=0.0, traffic=0.0, value=value, unit=unit)
    return {"extra_info": info, "stats": {"median": 1e-6, "min": 1e-6}}


def spmm(ours: float, theirs: float, case: str = "cora") -> list[dict]:
    return [
        entry("unstructured_spmm", case, "insum_ops", ours),
        entry("unstructured_spmm", case, "torch.sparse", theirs),
    ]


def write(path: Path, entries: list[dict], machine: dict = H200) -> Path:
    data = {
        "machine_info": machine,
        "commit_info": {"id": "0123456789abcdef", "dirty": False},
        "datetime": "2026-11-15T10:00:00+00:00",
        "benchmarks": entries,
    }
    path.write_text(json.dumps(data))
    return path


def every_kind() -> list[dict]:
    """Rows of each experiment that has a figure of its own, with one that ours loses."""
    rows = []
    for sparsity, ours, bsr in ((0.0, 2.0, 3.0), (0.5, 0.8, 1.1), (0.9, 0.2, 0.3)):
        for provider, ms in (("insum_ops", ours), ("dense", 1.0), ("TorchBSR", bsr)):
            case = f"32x32, {sparsity:.0%} sparse"
            rows.append(entry("structured_spmm", case, provider, ms, sparsity, series="32x32"))
    for graph, ours in (("cora", 0.5), ('<hubs> & "spokes"', 1.25)):
        for provider, ms in (("insum_ops", ours), ("torch.sparse", 1.0)):
            case, series = f"{graph}, float32, N = 128", "float32, N = 128"
            rows.append(entry("unstructured_spmm", case, provider, ms, series=series))
    for step, ms in (("COO", 20.0), ("+ group", 4.0), ("insum_ops", 0.5), ("dense", 2.0)):
        rows.append(entry("ablation", "4096^2", step, ms))
    for size, ms in ((1, 3.0), (4, 1.0), (16, 1.5)):
        facts = dict(series="cora", accesses=100 * size, bytes=50 + size)
        rows.append(entry("group_size", f"cora, groups of {size}", "insum_ops", ms, size, **facts))
    for nnz in (1e3, 1e4):
        for provider, ms in (("insum_ops", nnz / 1e5), ("torch.sparse", nnz / 5e4)):
            rows.append(entry("scaling", f"{nnz:.0f} entries", provider, ms, nnz))
    rows.append(noted("cost", "compile", "insum_ops", 1.25, "s"))
    rows.append(noted("host", "format", "insum_ops", 28.0, "us"))
    rows.append(noted("host", "format", "torch.sparse", 35.0, "us"))
    roof = entry("roof", "copy", "torch", 1.0)
    roof["extra_info"]["flops"] = 0.0
    peak = entry("roof", "matmul float16", "torch", 1.0, series="float16")
    peak["extra_info"]["traffic"] = 0.0
    return [*rows, roof, peak]
