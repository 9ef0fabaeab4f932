"""`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution over the voxels of a kernel map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compiler.errors import ShapeError
from .compiler.ranges import remember_range
from .formats.kernel_map import GroupedMap, KernelMap
from .functional import insum

__all__ = ["sparse_conv3d"]

# [is grouped][channels: dense, in groups, one by one]
STATIONARY = (
    "Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]",
    "Out[x,g,m] += In[NBR[x,z],g,c] * Weight[z,g,c,m]",
    "Out[x,g] += In[NBR[x,z],g] * Weight[z,g]",
)
GROUPED = (
    "Out[MAPX[p,q],m] += In[MAPY[p,q],c] * Weight[MAPZ[p],c,m]",
    "Out[MAPX[p,q],g,m] += In[MAPY[p,q],g,c] * Weight[MAPZ[p],g,c,m]",
    "Out[MAPX[p,q],g] += In[MAPY[p,q],g] * Weight[MAPZ[p],g]",
)
WEIGHT_GRADIENT = (
    "dWeight[MAPZ[p],c,m] += In[MAPY[p,q],c] * dOut[MAPX[p,q],m]",
    "dWeight[MAPZ[p],g,c,m] += In[MAPY[p,q],g,c] * dOut[MAPX[p,q],g,m]",
    "dWeight[MAPZ[p],g] += In[MAPY[p,q],g] * dOut[MAPX[p,q],g]",
)
DENSE, IN_GROUPS, ONE_BY_ONE = range(3)

# `python -m bench.bench_kernels conv` on one H200, float16: without atomics up to 64 channels, with them from 128 on
STATIONARY_CHANNELS = 64
FULL_ENOUGH = 0.25  # of a table's entries; below, most of what the output-stationary statement visits is -1
GROUP_SIZE = 128
GROUP_SIZE_OF_SUMS = 512  # a weight's gradient adds one tile for each group, so groups are long


def sparse_conv3d(
    features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None = None, groups: int = 1
) -> Tensor:
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: features [N, C] of the map's inputs to [X, M] of its outputs.

    `weight` is [M, *kernel_size, C / groups], spconv's layout; the number of axes is the map's, one to four.

    >>> from insum_ops.formats import kernel_map
    >>> line = kernel_map(torch.tensor([[0, 4], [0, 5], [0, 0]]), [6], batch_size=1, kernel_size=3)
    >>> sparse_conv3d(torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([[[2.0], [3.0], [4.0]]]), line)
    tensor([[ 43.],
            [ 32.],
            [300.]])
    """
    given, taken = features.shape, weight.shape
    fits = len(given) == 2 and given[0] == kernel_map.num_inputs and taken[1:-1] == kernel_map.kernel_size
    fits = fits and groups == 1 and taken[-1] == given[1] and (bias is None or bias.shape == taken[:1])
    if not fits:  # or there are groups, which have more to them
        _check(features, weight, kernel_map, bias, groups)
    kind, Weight = _split_weight(weight, groups)
    In = features.unflatten(1, (groups, -1)) if kind == IN_GROUPS else features
    seed = None if bias is None else bias.unflatten(0, (groups, -1)) if kind == IN_GROUPS else bias
    device = features.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        seed = None if seed is None else _cast(seed, dtype)
        with torch.autocast(device, enabled=False):
            Out = _convolve(_cast(In, dtype), _cast(Weight, dtype), seed, kernel_map, kind)
    else:
        Out = _convolve(In, Weight, seed, kernel_map, kind)
    return Out.flatten(1) if kind == IN_GROUPS else Out


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Under autocast float32 takes its type, before gradients are recorded: backward runs outside of it."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def _split_weight(weight: Tensor, groups: int) -> tuple[int, Tensor]:
    """How the channels are connected, and the weight with its axes in the statement's order; a view."""
    flat = weight.flatten(1, -2)  # [M, V, C / groups]
    if groups == 1:
        return DENSE, flat.permute(1, 2, 0)
    if groups == len(weight) and weight.shape[-1] == 1:
        return ONE_BY_ONE, flat.squeeze(2).T
    return IN_GROUPS, flat.unflatten(0, (groups, -1)).permute(2, 0, 3, 1)


def is_stationary(kernel_map: KernelMap, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether outputs gather their inputs, or groups of pairs add to their outputs."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    if device.type == "cpu":  # pairs alone are visited there, whatever is absent
        return False
    inputs, outputs = kernel_map.num_inputs, kernel_map.num_outputs
    if inputs * kernel_map.most_per_input < FULL_ENOUGH * outputs * kernel_map.volume:
        return False
    matmul = torch.backends.cuda.matmul
    if dtype == torch.float16 and not matmul.allow_fp16_reduced_precision_reduction:
        return True
    if dtype == torch.bfloat16 and not matmul.allow_bf16_reduced_precision_reduction:
        return True
    return channels <= STATIONARY_CHANNELS


def _convolve(In: Tensor, Weight: Tensor, bias: Tensor | None, kernel_map: KernelMap, kind: int) -> Tensor:
    wants_grad = In.requires_grad or Weight.requires_grad or (bias is not None and bias.requires_grad)
    if wants_grad and torch.is_grad_enabled():
        return _Convolution.apply(In, Weight, bias, kernel_map, kind)  # type: ignore[no-any-return]
    return _run(In, Weight, bias, kernel_map, kind)


def _run(In: Tensor, Weight: Tensor, bias: Tensor | None, kernel_map: KernelMap, kind: int) -> Tensor:
    """One statement; the bias is what its sums start from."""
    sizes = Weight.shape
    if kind == ONE_BY_ONE:
        shape: tuple[int, ...] = (kernel_map.num_outputs, sizes[1])
        channels = 1
    else:
        shape, channels = (kernel_map.num_outputs, *sizes[1:-2], sizes[-1]), max(sizes[-2:])
    start: dict[str, Any] = {} if bias is None else {"Out": bias.expand(shape)}
    if is_stationary(kernel_map, channels, In.dtype, In.device):
        NBR = kernel_map.neighbours
        _remember(NBR, -1, kernel_map.num_inputs)
        return insum(STATIONARY[kind], In=In, NBR=NBR, Weight=Weight, **start)
    return insum(GROUPED[kind], size=shape, In=In, Weight=Weight, **_maps(kernel_map, GROUP_SIZE), **start)


def _maps(kernel_map: KernelMap, group_size: int) -> dict[str, Tensor]:
    voxels = min(kernel_map.num_inputs, kernel_map.num_outputs)  # no tap has more pairs
    if voxels < group_size:
        group_size = max(16, 1 << (voxels - 1).bit_length())
    grouped: GroupedMap = kernel_map.grouped(group_size)
    _remember(grouped.MAPX, -1, kernel_map.num_outputs)
    _remember(grouped.MAPY, -1, kernel_map.num_inputs)
    _remember(grouped.MAPZ, 0, kernel_map.volume)
    return {"MAPX": grouped.MAPX, "MAPY": grouped.MAPY, "MAPZ": grouped.MAPZ}


def _remember(index: Tensor, low: int, extent: int) -> None:
    if not torch.compiler.is_compiling():
        remember_range(index, low, extent - 1)


class _Convolution(torch.autograd.Function):
    """A convolution; the gradient of its input is one too, over the inverse map, so that it gathers as well."""

    @staticmethod
    def forward(ctx: Any, In: Tensor, Weight: Tensor, bias: Tensor | None, kernel_map: KernelMap, kind: int) -> Tensor:
        ctx.save_for_backward(In, Weight)
        ctx.kernel_map, ctx.kind = kernel_map, kind
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _run(In, Weight, bias, kernel_map, kind)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        In, Weight = ctx.saved_tensors
        kind, kernel_map = ctx.kind, ctx.kernel_map
        d_in = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            swapped = Weight if kind == ONE_BY_ONE else Weight.transpose(-1, -2)
            d_in = _convolve(upstream, swapped, None, kernel_map.inverse, kind).to(In.dtype)
        if ctx.needs_input_grad[1]:
            maps = _maps(kernel_map, GROUP_SIZE_OF_SUMS)
            shape = tuple(Weight.shape)
            d_weight = insum(WEIGHT_GRADIENT[kind], size=shape, In=In, dOut=upstream, **maps).to(Weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = upstream.sum(0).to(ctx.bias_dtype)
        return d_in, d_weight, d_bias, None, None


def _check(features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None, groups: int) -> None:
    if features.ndim != 2 or len(features) != kernel_map.num_inputs:
        raise ShapeError(
            f"features is {list(features.shape)} but the kernel map has {kernel_map.num_inputs} input voxels; "
            "features are [voxels, channels]"
        )
    if tuple(weight.shape[1:-1]) != kernel_map.kernel_size:
        raise ShapeError(
            f"weight is {list(weight.shape)} but the kernel map was made for kernel_size "
            f"{list(kernel_map.kernel_size)}; weights are [out channels, *kernel_size, in channels / groups]"
        )
    if groups < 1 or len(weight) % groups:
        raise ShapeError(
            f"weight has {len(weight)} output channels and groups is {groups}; groups must divide the channels"
        )
    if weight.shape[-1] * groups != features.shape[1]:
        raise ShapeError(
            f"features have {features.shape[1]} channels but weight is {list(weight.shape)} with groups {groups}, "
            f"which takes {weight.shape[-1] * groups}"
        )
    if bias is not None and tuple(bias.shape) != (len(weight),):
        raise ShapeError(f"bias is {list(bias.shape)} but weight has {len(weight)} output channels; give one each")
