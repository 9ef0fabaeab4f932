"""What users would run instead; a peer that is not installed, or that needs a GPU where there is none, is skipped."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from itertools import product
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from insum_ops.compiler.bind import bind
from insum_ops.compiler.lower import lower, placeholders
from insum_ops.compiler.parse import parse
from insum_ops.compiler.ranges import check_ranges

from .case import DEVICE, Call
from .harness import device_ms

__all__ = ["fx_graph", "inductor", "installed", "needs_gpu", "torch_bsr"]


def installed(module: str) -> ModuleType:
    """The peer's module, or a skipped row."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module.partition('.')[0]} can't be imported: {error}")


def needs_gpu(what: str) -> None:
    if DEVICE != "cuda":
        pytest.skip(f"{what} needs a GPU")


def torch_bsr(dense: Tensor, B: Tensor, edge: int) -> Call:
    """torch's own block-sparse kernel, at the best of twelve configs; its own table knows the A100 alone."""
    needs_gpu("TorchBSR")
    kernels, errors = installed("torch.sparse._triton_ops"), installed("triton.runtime.errors")
    bsr, start = dense.to_sparse_bsr((edge, edge)), torch.zeros(len(dense), B.shape[1], device=B.device, dtype=B.dtype)
    best: tuple[float, dict[str, int]] = (float("inf"), {})
    for split, warps, stages in product((16, 32, 64), (2, 4), (3, 4)):
        meta = {"SPLIT_N": split, "GROUP_SIZE_ROW": 4, "num_warps": warps, "num_stages": stages}
        call = lambda: kernels.bsr_dense_addmm(start, bsr, B, beta=0, meta=meta)
        try:
            best = min(best, (device_ms(call, replays=5), meta), key=lambda found: found[0])
        except errors.OutOfResources:
            continue
    chosen = best[1]
    return Call(lambda: kernels.bsr_dense_addmm(start, bsr, B, beta=0, meta=chosen), facts=chosen)


def fx_graph(
    expr: str, size: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A statement as separate torch operations, gather, einsum and scatter-add, with its arguments."""
    bound = bind(parse(expr), dict(tensors), size)
    return lower(bound, check_ranges(bound, dict(tensors))), [tensors[name] for name in placeholders(bound)]


def inductor(expr: str, size: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Call:
    """The same statement through TorchInductor with `native_matmul`, compiled beforehand."""
    needs_gpu("Inductor's native_matmul")
    graph, arguments = fx_graph(expr, size, tensors)
    with inductor_config.patch({"triton.native_matmul": True}):
        compiled = torch.compile(graph, dynamic=False)
        compiled(*arguments)
    return Call(lambda: compiled(*arguments), result=lambda: compiled(*arguments))
