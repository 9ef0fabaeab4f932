"""`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution over the voxels of a kernel map."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import conv_forms as forms
from .compiler.carried import owned
from .compiler.errors import OperandError, ShapeError
from .compiler.express import Key, again
from .compiler.one_by_one import one_by_one
from .compiler.ready import as_autocast, followed, is_transformed, may_autocast, pinned, remember_call
from .compiler.ready_call import PlainCall
from .conv_choice import Way, may_choose, size_of_sums, way_of
from .conv_operands import groups_by_tap, maps, operands_of
from .formats.guard import may_keep
from .formats.kernel_map import KernelMap
from .functional import OWNED, insum, insum_beside, insum_once, insum_owned
from .kernel_views import (
    DENSE,
    IN_GROUPS,
    ONE_BY_ONE,
    CallKey,
    KeptViews,
    KernelViews,
    as_weight,
    call_key,
    channel_kind,
    refuse_freed,
    statement_weight,
)
from .lru_cache import LRUCache

__all__ = ["convolve", "sparse_conv3d"]

CALLS = 64  # over one map that are kept
FIRST = "first"  # marks the memory of a call that was made once


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
    _check_types(features, weight, kernel_map, bias)
    return convolve(features, weight, kernel_map, bias, groups)


def convolve(
    features: Tensor,
    weight: Tensor,
    kernel_map: KernelMap,
    bias: Tensor | None,
    groups: int,
    kept: KeptViews | None = None,
) -> Tensor:
    """The same; `kept` are the views that a layer keeps of its own weight and bias."""
    views = None if kept is None else kept.get(weight, bias)
    if views is None or features.shape[0] != kernel_map.num_inputs:
        _check(features, weight, kernel_map, bias, groups)
        if views is None and kept is not None:
            views = kept.make(weight, bias, groups)
    if torch.compiler.is_compiling():
        features, weight, bias = followed(features), followed(weight), followed(bias)
    if (views is None and torch.compiler.is_compiling()) or may_autocast():  # a layer that is traced has no views
        device = features.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            features, weight = as_autocast(features, dtype), as_autocast(weight, dtype)
            seed = None if bias is None else as_autocast(bias, dtype)
            with torch.autocast(device, enabled=False):
                return _convolve(features, weight, seed, kernel_map, groups, False, None)
    function = _convolve if torch.is_grad_enabled() else _run
    return function(features, weight, bias, kernel_map, groups, False, views)


def _convolve(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_map: KernelMap,
    groups: int,
    is_swapped: bool,
    views: KernelViews | None,
) -> Tensor:
    """`is_swapped`: from the weight's output channels to its input channels."""
    wants_grad = features.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if wants_grad and torch.is_grad_enabled() and not is_transformed():
        return _Convolution.apply(features, weight, bias, kernel_map, groups, is_swapped, views)  # type: ignore[no-any-return]
    return _run(features, weight, bias, kernel_map, groups, is_swapped, views)


def _run(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_map: KernelMap,
    groups: int,
    is_swapped: bool,
    views: KernelViews | None,
) -> Tensor:
    """One statement; the bias is what its sums start from."""
    if views is None:
        Weight = statement_weight(weight, groups, is_swapped)
        key = call_key(Weight)
    else:
        Weight, key = (views.swapped, views.swapped_key) if is_swapped else (views.plain, views.plain_key)
    call = _call_for(features, Weight, kernel_map, key)
    tensors = (features, Weight) if bias is None else (features, Weight, bias)
    is_flat = len(call.shape) == 2
    is_first = not call.memory
    known, Out = None, None
    if not (is_first or torch.compiler.is_compiling()):
        # they stand for views of them: a kernel reads memory alone
        known, _, Out = again(call.memory, "standing", tensors, tensors)
    if Out is None:
        moving = {"In": features if is_flat else features.unflatten(1, (groups, -1)), "Weight": Weight}
        if bias is not None:
            moving["Out"] = (bias if is_flat else bias.view(call.shape[1:])).expand(call.shape)
        Out = _first(call, moving) if is_first and not call.facts else _pinned(call, known, moving)
    return Out if is_flat else Out.flatten(1)


def _first(call: _Call, moving: dict[str, Tensor]) -> Tensor:
    """A map's first use, perhaps its last: nothing is put in place for the next, and others' like it are remembered."""
    if may_keep():
        call.memory[FIRST] = True
    return insum_once(call.statement, call.shape, {**moving, **call.operands})


def _pinned(call: _Call, known: Key | None, moving: dict[str, Tensor]) -> Tensor:
    """With the map's tensors in place from now on; `known`: by which the next call finds it, None: somebody watches."""
    fact = OWNED if call.facts else ""
    if known is not None:
        made: PlainCall | None = call.memory.get(known)
        if made is None:
            made = pinned(call.statement, moving, call.operands, call.shape, fact, call.facts)
            remember_call(call.memory, known, made)
        return made(list(moving.values()))
    if call.facts:
        return insum_owned(call.memory, call.statement, call.operands, call.shape, fact, call.facts, **moving)
    return insum_beside(call.memory, call.statement, call.operands, call.shape, **moving)


class _Call(NamedTuple):
    """A statement over one map, but for the features, the weight and the bias."""

    statement: str
    shape: tuple[int, ...]
    operands: dict[str, Tensor]
    memory: dict[Any, Any]  # of how it runs
    facts: list[Tensor]  # where each tile's taps begin and which tiles have the most, if outputs are in tiles
    awaits: str  # made anew once that pays


def _call_for(features: Tensor, Weight: Tensor, kernel_map: KernelMap, key: CallKey) -> _Call:
    """What all weights of one shape share over a map, in one setting; a tracer works it out itself."""
    if torch.compiler.is_compiling():
        return _prepare(features, Weight, kernel_map)
    settings = forms.settings_of(features.dtype)
    call: _Call | None = kernel_map.memory.get((key, settings))
    if call is None or (call.awaits and forms.is_due(call.awaits, kernel_map)):
        call = _prepare(features, Weight, kernel_map)
        if may_keep(*call.operands.values(), *call.facts):
            kernel_map.memory[key, settings] = call
    if call.awaits:
        kernel_map.count_use()
    return call


def _prepare(features: Tensor, Weight: Tensor, kernel_map: KernelMap) -> _Call:
    sizes, rows = Weight.shape, kernel_map.num_outputs
    kind = {2: ONE_BY_ONE, 3: DENSE, 4: IN_GROUPS}[len(sizes)]
    shape = (rows, sizes[1]) if kind == ONE_BY_ONE else (rows, *sizes[1:-2], sizes[-1])
    channels = 1 if kind == ONE_BY_ONE else max(sizes[-2:])
    way = way_of(features, Weight, kernel_map, kind, shape)
    awaits = ""
    if way is None:
        form = forms.form_of(kernel_map, channels, features.dtype, features.device)
        way = Way(form, forms.TILE_SIZE if form == forms.TILED else forms.GROUP_SIZE)
        awaits = forms.awaited(form, kernel_map) or ("ways" if may_choose(features) else "")
    operands, facts = operands_of(kernel_map, *way)
    memory: Any = {} if torch.compiler.is_compiling() else LRUCache(CALLS)  # a tracer keeps nothing
    return _Call(way.form[kind], shape, operands, memory, facts, awaits)


class _Convolution(torch.autograd.Function):
    """A convolution; the gradient of its input is one too, over the inverse map, so that it gathers as well."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernel_map: KernelMap,
        groups: int,
        is_swapped: bool,
        views: KernelViews | None,
    ) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.rest = kernel_map, groups, is_swapped, views
        ctx.bias_dtype = None if bias is None else bias.dtype
        return owned(_run(features, weight, bias, kernel_map, groups, is_swapped, views))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        features, weight = ctx.saved_tensors
        kernel_map, groups, is_swapped, views = ctx.rest
        wants_features, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        d_features = d_weight = d_bias = None
        if wants_features:
            if views is not None and not views.is_of(weight):
                refuse_freed("weight", weight)
                views = None
            d_features = _convolve(upstream, weight, None, kernel_map.inverse, groups, not is_swapped, views)
            d_features = _as_type(d_features, features.dtype)
        if wants_weight:
            if is_swapped:  # what came in has the weight's output channels
                d_weight = _weight_gradient(upstream, features, kernel_map.inverse, weight, groups)
            else:
                d_weight = _weight_gradient(features, upstream, kernel_map, weight, groups)
        if wants_bias:
            d_bias = _as_type(upstream.sum(0), ctx.bias_dtype)
        return d_features, d_weight, d_bias, None, None, None, None


def _weight_gradient(In: Tensor, dOut: Tensor, kernel_map: KernelMap, weight: Tensor, groups: int) -> Tensor:
    kind = channel_kind(weight, groups)
    if kind == IN_GROUPS:
        In, dOut = In.unflatten(1, (groups, -1)), dOut.unflatten(1, (groups, -1))
    if torch.are_deterministic_algorithms_enabled():
        parts = maps(kernel_map, forms.GROUP_SIZE_OF_PARTS)
        Part = insum(forms.GROUP_SUMS[kind], In=In, dOut=dOut, MAPX=parts["MAPX"], MAPY=parts["MAPY"])
        dWeight = insum(forms.TAP_SUMS[kind], Part=Part, MAPP=groups_by_tap(kernel_map, parts["MAPX"].shape[1]))
    else:
        channels = (groups,) if kind == ONE_BY_ONE else (*In.shape[1:], dOut.shape[-1])
        size = (kernel_map.volume, *channels)
        group_size = size_of_sums(In, dOut, kernel_map, kind, size)
        dWeight = _sums(forms.WEIGHT_GRADIENT[kind], kernel_map, group_size, size, {"In": In, "dOut": dOut})
    return _as_type(as_weight(dWeight, weight, groups), weight.dtype)


def _sums(
    statement: str, kernel_map: KernelMap, group_size: int, size: tuple[int, ...], given: dict[str, Tensor]
) -> Tensor:
    """A weight's gradient by groups of one size, with a memory of their own: others may be the fastest later."""
    operands = maps(kernel_map, group_size)
    if torch.compiler.is_compiling():
        return insum(statement, size=size, **given, **operands)
    memory: LRUCache[Any] | None = kernel_map.memory.get(("sums", group_size))
    if memory is None:
        memory = kernel_map.memory["sums", group_size] = LRUCache(CALLS)
    if (FIRST, size) in memory:
        return insum_beside(memory, statement, operands, size, **given)
    if may_keep():
        memory[FIRST, size] = True
    return insum_once(statement, size, {**given, **operands})


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _check_types(features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None) -> None:
    tensors = {"features": features, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, given in tensors.items():
        if not isinstance(given, Tensor):
            raise OperandError(f"{name} is of type {type(given).__name__}; pass a tensor")
    if not isinstance(kernel_map, KernelMap):
        raise OperandError(
            f"kernel_map is of type {type(kernel_map).__name__}; pass what insum_ops.formats.kernel_map makes"
        )


def _check(features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None, groups: int) -> None:
    given, taken = features.shape, weight.shape
    fits = len(given) == 2 and given[0] == kernel_map.num_inputs and taken[1:-1] == kernel_map.kernel_size
    if fits and groups == 1 and taken[-1] == given[1] and (bias is None or bias.shape == taken[:1]):
        return
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
