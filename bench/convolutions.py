"""Clouds as voxels, a layer over them as a user calls it, and spconv's beside it at the best of its algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum_ops.conv.forms import PAYS_AFTER

from .case import DEVICE, LIMIT, LIMIT_TF32, PEER_FAILURES, Call, held, on
from .harness import wall_ms
from .inputs import cloud_loaders, submanifold_map, voxels
from .peers import installed

__all__ = [
    "FLOAT16",
    "FLOAT16_FULL",
    "FLOAT32",
    "LOADERS",
    "OFTEN",
    "PLAIN",
    "SPCONV",
    "TF32",
    "Precision",
    "Scene",
    "asked",
    "centimetres",
    "fastest",
    "new_layer",
    "new_tensor",
    "scene",
    "weight_for",
    "with_map",
]

SPCONV = "spconv"
PLAIN = "torch, one matmul a tap"
KEY = "map"  # under which the layers keep it
ALGORITHMS = ("MaskImplicitGemm", "MaskSplitImplicitGemm", "Native")
CHECKED_ROWS = 2000  # of a result, spread evenly: what float64 works out again
LOADERS = cloud_loaders()
OFTEN = on(PAYS_AFTER + 1, 1)  # calls from which on a library does nothing new for a map


@dataclass(frozen=True)
class Precision:
    """What a case computes in, and the torch settings that ask for it."""

    name: str
    dtype: torch.dtype
    limit: float
    is_reduced: bool = True  # whether partial sums may meet in float16
    is_tf32: bool = False


FLOAT16 = Precision("float16", torch.float16, LIMIT[torch.float16])
FLOAT16_FULL = Precision("float16, float32 sums", torch.float16, LIMIT[torch.float16], is_reduced=False)
TF32 = Precision("tf32", torch.float32, LIMIT_TF32, is_tf32=True)
FLOAT32 = Precision("float32", torch.float32, LIMIT[torch.float32])


@contextmanager
def asked(precision: Precision) -> Iterator[None]:
    """torch's flags as a user sets them; `fastest` passes the one for tf32 on to spconv."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, torch.get_float32_matmul_precision()
    matmul.allow_fp16_reduced_precision_reduction = precision.is_reduced
    torch.set_float32_matmul_precision("high" if precision.is_tf32 else "highest")
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before[0]
        torch.set_float32_matmul_precision(before[1])


@dataclass(frozen=True, eq=False)
class Scene:
    """The occupied voxels of one cloud, and what float64 makes of a convolution 3^3 over them."""

    name: str
    size: float  # of a voxel, in metres
    indices: Tensor  # [N, 4]  int32: batch, then voxel coordinates from 0
    shape: list[int]
    by_tap: tuple[Tensor, ...]  # [2, pairs] each: input and output voxel
    rows: Tensor  # [R]  that are checked

    @property
    def pairs(self) -> int:
        return sum(pairs.shape[1] for pairs in self.by_tap)

    @property
    def neighbours(self) -> Tensor:
        """[27, N]: the voxel that an output reads through a tap, -1 where there is none; no order of pairs is in it."""
        table = torch.full((len(self.by_tap), len(self.indices)), -1, device=self.indices.device)
        for row, (source, target) in zip(table, self.by_tap):
            row[target] = source
        return table

    def features(self, channels: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(len(self.indices), channels, device=DEVICE, dtype=dtype)

    def outputs(self, In: Tensor, Weight: Tensor) -> Tensor:
        """Out[rows], in float64."""
        return self._gathered(In, taps(Weight), source=0, target=1)

    def gradients(self, In: Tensor, Weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """dIn[rows] and dWeight, in float64."""
        dIn = self._gathered(upstream, taps(Weight).transpose(1, 2), source=1, target=0)
        dtaps = [upstream[target].double().T @ In[source].double() for source, target in self.by_tap]
        return dIn, torch.stack(dtaps, 1).view(Weight.shape)

    def _gathered(self, values: Tensor, matrices: Tensor, source: int, target: int) -> Tensor:
        place = torch.full((len(self.indices),), -1, device=DEVICE)
        place[self.rows] = torch.arange(len(self.rows), device=DEVICE)
        made = torch.zeros(len(self.rows), matrices.shape[2], device=DEVICE, dtype=torch.float64)
        for matrix, pairs in zip(matrices, self.by_tap):
            at = place[pairs[target]]
            made.index_add_(0, at[at >= 0], values[pairs[source][at >= 0]].double() @ matrix)
        return made


def taps(Weight: Tensor) -> Tensor:
    """[M, 3, 3, 3, C] -> [27, C, M], in float64."""
    return Weight.flatten(1, 3).permute(1, 2, 0).double()


@held
def scene(name: str, size: float) -> Scene:
    points = voxels(np.asarray(LOADERS[name]()), size, DEVICE)
    points = points - points.amin(0)
    triples = submanifold_map(points)
    counts = triples[0].bincount(minlength=27).tolist()
    indices = torch.cat([torch.zeros_like(points[:, :1]), points], 1).int().contiguous()
    rows = torch.linspace(0, len(points) - 1, min(CHECKED_ROWS, len(points)), device=DEVICE).long().unique()
    return Scene(name, size, indices, (points.amax(0) + 1).tolist(), triples[1:].split(counts, 1), rows)


def centimetres(size: float) -> str:
    return f"{100 * size:g} cm"


def weight_for(channels: int, dtype: torch.dtype) -> Tensor:
    """[M, 3, 3, 3, C], spconv's layout and ours."""
    drawn: Tensor = torch.randn(channels, 3, 3, 3, channels, device=DEVICE) * channels**-0.5
    return drawn.to(dtype)


def new_layer(library: Any, Weight: Tensor, **options: object) -> Any:
    """A submanifold layer of ours or of spconv's with that weight; no bias."""
    layer: Any = library.SubMConv3d(Weight.shape[-1], len(Weight), 3, bias=False, indice_key=KEY, **options)
    layer = layer.to(Weight.device, Weight.dtype)
    layer.load_state_dict({"weight": Weight})
    return layer


def new_tensor(library: Any, given: Scene, features: Tensor) -> Any:
    """Voxels that the library has not seen before: their coordinates are copied, since ours knows a tensor again."""
    return library.SparseConvTensor(features, given.indices.clone(), given.shape, 1)


def with_map(layer: Any, x: Any) -> Any:
    """`x` with its map made, for spconv too, whose calls leave it with their result alone."""
    with torch.no_grad():
        x.indice_dict = layer(x).indice_dict
    return x


def fastest(make: Callable[[Any, Any], Call]) -> Call:
    """`make(spconv, algorithm)` for whichever of spconv's algorithms takes the least time, each tuned on this case."""
    spconv = installed("spconv.pytorch")
    is_tf32 = torch.get_float32_matmul_precision() != "highest"
    constants: Any = installed("spconv.constants")
    constants.SPCONV_ALLOW_TF32 = is_tf32
    found, failures = [], []
    for name in ALGORITHMS:
        try:
            tuners = _forget_tuned(is_tf32)
            call = make(spconv, getattr(spconv.ConvAlgo, name))
            facts = {**call.facts, "algorithm": name}
            found.append((_once_ms(call.run), tuners, replace(call, facts=facts, is_capturable=False)))
        except PEER_FAILURES as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    if not found:
        raise RuntimeError("; ".join(failures))
    _, tuners, call = min(found, key=lambda entry: entry[0])
    _use(tuners)
    return call


def _once_ms(run: Callable[[], object]) -> float:
    if DEVICE == "cuda":
        return wall_ms(run, calls=5, rounds=3)
    start = perf_counter()
    run()
    return perf_counter() - start


def _forget_tuned(is_tf32: bool) -> tuple[Any, Any] | None:
    """New tuners: those that spconv has know a kernel by its channels, whatever the cloud and with tf32 or not."""
    try:
        ops, (kinds, known) = installed("spconv.pytorch.ops"), _kernels()
        if ops.CONV_CPP is None:  # a build for CPUs tunes nothing
            return None
        tuners = tuple(kind(kernels) for kind, kernels in zip(kinds, known))
        for new, old in zip(tuners, (ops.CONV_CPP, ops.GEMM_CPP)):
            new._nvrtc_caches = old._nvrtc_caches  # compiled already
        _use(tuners)
    except PEER_FAILURES as error:
        if is_tf32:
            raise RuntimeError(f"kernels without tf32 can't be forgotten: {error}") from error
        return None
    return tuners


@lru_cache(maxsize=1)
def _kernels() -> tuple[Sequence[Any], Sequence[list[Any]]]:
    """spconv's two tuners, and the kernels that each chooses among."""
    algo = installed("spconv.algo")
    implicit = [algo.algocore.get_conv_algo_desp_from_param(given) for given in algo.ALL_IMPGEMM_PARAMS]
    native = [algo.algocore.get_gemm_algo_desp_from_param(given) for given in algo.ALL_NATIVE_PARAMS]
    return (algo.ConvTunerSimple, algo.GemmTunerSimple), (implicit, native)


def _use(tuners: Any) -> None:
    if tuners is not None:
        ops: Any = installed("spconv.pytorch.ops")
        ops.CONV_CPP, ops.GEMM_CPP = tuners
