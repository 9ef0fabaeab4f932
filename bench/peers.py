"""What users would run instead; a peer that is not installed, or that needs a GPU where there is none, is skipped."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.reference.lower import lower, placeholders
from insum_ops.compiler.runtime.ranges import check_ranges

from .case import DEVICE, PEER_FAILURES, Call
from .harness import device_ms

__all__ = ["PEERS", "cuda_libraries", "fits", "fx_graph", "inductor", "installed", "needs_gpu", "searched", "torch_bsr"]

PEERS = "INSUM_BENCH_PEERS"  # a folder of packages that are not installed; what is installed comes before them
sys.path += [folder for folder in [os.environ.get(PEERS)] if folder and folder not in sys.path]


def cuda_libraries(*names: str) -> None:
    """Load torch's own CUDA libraries for a peer that was linked to others of the same names."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [] if nvidia is None else list(nvidia.submodule_search_locations or ())
    for name in names:
        for path in (path for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{name}"))):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def installed(module: str) -> ModuleType:
    """The peer's module, or a skipped row."""
    try:
        return importlib.import_module(module)
    except PEER_FAILURES as error:  # not there, or broken: a shared library that it wants is often not found
        pytest.skip(f"{module.partition('.')[0]} can't be imported: {error}")


def needs_gpu(what: str) -> None:
    if DEVICE != "cuda":
        pytest.skip(f"{what} needs a GPU")


# what torch's own table for its kernel varies; the first of each is where the search begins
BSR_CHOICES = {
    "SPLIT_N": (16, 8, 32, 64),
    "num_warps": (4, 2, 8),
    "num_stages": (4, 1, 2, 3, 5),
    "GROUP_SIZE_ROW": (4, 1, 2, 8),
}
BSR_TOGETHER = ("SPLIT_N", "num_warps")  # a wider tile wants more warps
# of a thread: sums that want more of them go through memory. With such tiles the search at 128 x 128 was still
# compiling after three minutes, without them it took 37 s.
REGISTERS = 255


def torch_bsr(dense: Tensor, B: Tensor, edge: int) -> Call:
    """torch's own block-sparse kernel, tuned; its own table knows the A100 alone."""
    needs_gpu("TorchBSR")
    kernels, errors = installed("torch.sparse._triton_ops"), installed("triton.runtime.errors")
    bsr, start = dense.to_sparse_bsr((edge, edge)), torch.zeros(len(dense), B.shape[1], device=B.device, dtype=B.dtype)

    def run(meta: dict[str, int]) -> Callable[[], Tensor]:
        return lambda: kernels.bsr_dense_addmm(start, bsr, B, beta=0, meta=meta)

    def milliseconds(meta: dict[str, int]) -> float:
        if not fits(meta, edge, B.shape[1]):
            return float("inf")
        try:
            return device_ms(run(meta), replays=5)
        except errors.OutOfResources:
            return float("inf")

    chosen = searched(BSR_CHOICES, BSR_TOGETHER, milliseconds)
    return Call(run(chosen), facts=chosen)


def fits(meta: Mapping[str, int], edge: int, columns: int) -> bool:
    """Whether a thread's registers hold its share of a tile's sums."""
    return edge * columns // meta["SPLIT_N"] <= REGISTERS * 32 * meta["num_warps"]


def searched(
    choices: Mapping[str, Sequence[int]], together: Sequence[str], cost: Callable[[dict[str, int]], float]
) -> dict[str, int]:
    """The best values of some names that are searched together, then of each other name in turn."""
    best = {name: values[0] for name, values in choices.items()}
    known: dict[tuple[int, ...], float] = {}
    for names in (tuple(together), *((name,) for name in choices if name not in together)):
        tried = [{**best, **dict(zip(names, values))} for values in product(*(choices[name] for name in names))]
        for each in tried:
            if (*each.values(),) not in known:
                known[(*each.values(),)] = cost(each)
        best = min(tried, key=lambda each: known[(*each.values(),)])
    return best


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
