"""Opaque torch operators for a convolution and its gradients, which tracers call with a map's parts.

Whatever depends on the voxels (their map, the form of the statement, its launch plan) is worked out inside of them when
they run, see `operator_calls`; here is what a tracer asks: schemas, shapes and costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..compiler import OperandError, bind, parse
from ..formats.torch_state import UNSAFE_IN_GRAPHS, is_exporting, is_readable, uncompiled
from ..formats.voxels.kernel_map import KernelMap
from ..formats.voxels.map_operators import map_of, voxel_library
from ..formats.voxels.map_parts import MapParts
from ..lru_cache import LRUCache
from .forms import STATIONARY
from .weight_views import IN_GROUPS, channel_kind, statement_weight

__all__ = [
    "OVER",
    "PLANS",
    "Backward",
    "Over",
    "same_rows",
    "traced_convolution",
    "voxel_convolution",
    "voxel_gradients",
]

PLANS: LRUCache[Any] = LRUCache(4096)  # launch plans of convolutions and their gradients, whatever the voxels

OVER = "Tensor source, Tensor target, str geometry, SymInt[] sizes, int groups, int side"
_TAGS = (torch.Tag.pt2_compliant_tag, *UNSAFE_IN_GRAPHS)
voxel_library.define(
    f"convolved_voxels(Tensor features, Tensor weight, Tensor? bias, {OVER}, bool is_swapped) -> Tensor", tags=_TAGS
)
# of the features, the weight and, if `wanted` has a third, the bias, those that are wanted: one operator, by one launch
# plan
voxel_library.define(
    f"voxel_convolution_gradients(Tensor dOut, Tensor features, Tensor weight, {OVER}, bool is_swapped, bool[] wanted)"
    " -> Tensor[]",
    tags=_TAGS,
)
voxel_library.define("same_rows(Tensor indices, Tensor other, str refusal) -> Tensor", tags=_TAGS)
voxel_convolution = torch.ops.insum_ops.convolved_voxels.default
voxel_gradients = torch.ops.insum_ops.voxel_convolution_gradients.default


class Backward(NamedTuple):
    """A pass backward through a convolution: the gradient of its result, what it is a convolution of, what is wanted.

    If `is_swapped`, it leads from the weight's output channels to its input channels.
    """

    dOut: Tensor
    features: Tensor
    weight: Tensor
    wanted: tuple[bool, ...]  # the gradients of the features, the weight and, if it is asked for, the bias
    kernel_map: KernelMap
    groups: int
    is_swapped: bool

    @property
    def sides(self) -> tuple[Tensor, Tensor, KernelMap]:
        """What has the weight's input channels, what has its output channels, and the map from one to the other."""
        if self.is_swapped:
            return self.dOut, self.features, self.kernel_map.inverse
        return self.features, self.dOut, self.kernel_map


class Over(NamedTuple):
    """What both operators go over, as they take it."""

    source: Tensor
    target: Tensor
    geometry: str
    sizes: Sequence[int]
    groups: int
    side: int

    @property
    def map(self) -> KernelMap:
        kernel_map = map_of(self.source, self.target, self.geometry, tuple(self.sizes))
        return kernel_map.inverse if self.side else kernel_map

    @property
    def backwards(self) -> Over:
        return self._replace(side=1 - self.side)

    @property
    def rows(self) -> int:
        return (self.source if self.side else self.target).shape[0]


def traced_convolution(features: Tensor, weight: Tensor, bias: Tensor | None, parts: MapParts, groups: int) -> Tensor:
    """Return a convolution over a map in its parts, as one operator."""
    over = parts.source, parts.target, parts.geometry, list(parts.sizes), groups, parts.side
    return voxel_convolution(features, weight, bias, *over, False)  # type: ignore[no-any-return]


@torch.library.register_fake("insum_ops::convolved_voxels", lib=voxel_library)
def _fake(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    over = Over(*parts)
    Weight, kind = statement_weight(weight, over.groups, is_swapped), channel_kind(weight, over.groups)
    In = features.unflatten(1, (over.groups, -1)) if kind == IN_GROUPS else features
    NBR = features.new_empty((over.rows, Weight.shape[0]), dtype=torch.int32)
    bound = bind(parse(STATIONARY[kind]), {"In": In, "Weight": Weight, "NBR": NBR}, None)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device).flatten(1)


@torch.library.register_fake("insum_ops::voxel_convolution_gradients", lib=voxel_library)
def _fake_gradients(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    wanted = rest[-1]
    likes = (features.shape, features), (weight.shape, weight), (dOut.shape[1:], dOut)
    kinds = [(shape, like.dtype) for (shape, like), is_wanted in zip(likes, wanted) if is_wanted]
    return [torch.empty(shape, dtype=dtype, device=dOut.device) for shape, dtype in kinds]


def same_rows(indices: Tensor, other: Tensor, refusal: str) -> Tensor:
    """Return the rows of `other` that equal those of `indices`, which are all in their order, int64 [N], for a tracer.

    Where the call runs it raises OperandError unless they are. What is gathered by these rows depends on that.
    """
    if not is_exporting():
        return torch.ops.insum_ops.same_rows.default(indices, other, refusal)  # type: ignore[no-any-return]
    torch._assert_async((indices == other).all(), refusal)
    return torch.arange(indices.shape[0], device=indices.device)


def _same(indices: Tensor, other: Tensor, refusal: str) -> Tensor:
    if not torch.equal(indices, other):
        raise OperandError(refusal)
    return torch.arange(indices.shape[0], device=indices.device)


@torch.library.register_fake("insum_ops::same_rows", lib=voxel_library)
def _fake_same(indices: Tensor, other: Tensor, refusal: str) -> Tensor:
    return indices.new_empty(indices.shape[:1], dtype=torch.int64)


for _key in ("CPU", "CUDA"):
    voxel_library.impl("same_rows", uncompiled(_same), _key)


def _flops_of(over: Over, weight: Tensor) -> int:
    if is_readable(over.source):
        return 2 * over.map.num_pairs * weight.shape[0] * weight.shape[-1]
    return 2 * over.rows * weight.numel()  # as if every output had an input at each tap


@register_flop_formula(voxel_convolution.overloadpacket, get_raw=True)
def _flops(features: Tensor, weight: Tensor, bias: Any, *rest: Any, **_: Any) -> int:
    """Return the multiplications and additions of a convolution over the pairs of its map."""
    return _flops_of(Over(*rest[:6]), weight)


@register_flop_formula(voxel_gradients.overloadpacket, get_raw=True)
def _gradient_flops(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    gradients: int = sum(rest[7][:2])  # adding up a bias's is not counted, as torch counts no sums
    return gradients * _flops_of(Over(*rest[:6]), weight)
