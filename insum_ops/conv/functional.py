"""`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution over the voxels of a kernel map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import (
    OperandError,
    ShapeError,
    composite,
    direct_apply,
    followed,
    is_batched,
    keep_learning,
    owned,
    planned,
    planned_backward,
    refuse_freed,
    replayed,
    run_plain,
    takes_composites,
)
from ..formats.facts import OwnedRows
from ..formats.guard import may_keep
from ..formats.torch_state import (
    PLAIN,
    as_autocast,
    autocast_dtype,
    is_autocast_enabled,
    is_deterministic,
    is_dynamo,
    is_exporting,
    is_followed,
    is_free,
    is_traced,
    is_transformed,
    is_watched,
    may_autocast,
    wants_gradient,
)
from ..formats.voxels.kernel_map import KernelMap
from ..formats.voxels.map_building import parts_of
from ..formats.voxels.map_operators import from_parts
from ..formats.voxels.map_parts import MapParts, described
from ..functional import insum, on_refusal, tensor_without_rules
from ..not_scripted import not_scripted
from . import forms as forms
from .choice import Way, may_choose, way_of, way_of_sums
from .operands import groups_by_tap, maps, neighbours, operands_of
from .operators import OVER, PLANS, Backward, traced_convolution
from .weight_views import IN_GROUPS, ONE_BY_ONE, channel_kind, statement_weight

__all__ = ["convolution_gradients", "convolve", "gradient_call", "planned_convolution", "sparse_conv3d"]


@not_scripted
def sparse_conv3d(
    features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None = None, groups: int = 1
) -> Tensor:
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: sparse convolution of voxel features over a kernel map.

    The map says which input voxel each output voxel reads through each tap of the kernel; it is made once and used by
    all convolutions of one geometry. The name is that of the usual case: a map may have one to four axes. Gradients
    reach features, weight and bias, to any order. `insum_ops.nn` has layers with spconv's names around it.

    Args:
        features: features of the map's input voxels [N, C], in the order of its `indices`.
        weight: the kernel [M, *kernel_size, C / groups], spconv's layout.
        kernel_map: what `insum_ops.formats.kernel_map` makes of voxel coordinates.
        bias: what is added to every output voxel [M]; None for nothing.
        groups: how many groups of channels are convolved apart; divides C and M.

    Returns:
        Features of the map's output voxels [X, M], in the order of its `out_indices`.

    Raises:
        OperandError: an argument is of a wrong type, not floating point, or on another device.
        ShapeError: the features' rows or channels, the weight's kernel size, the bias or `groups` do not fit.

    Example:
        >>> import torch
        >>> from insum_ops import sparse_conv3d
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
    features: Tensor, weight: Tensor, kernel_map: KernelMap | MapParts, bias: Tensor | None, groups: int
) -> Tensor:
    """Return what `sparse_conv3d` returns, for arguments whose types were checked."""
    if is_followed(features):
        if is_dynamo() and takes_composites():
            parts = parts_of(kernel_map)
            over = parts.source, parts.target, parts.geometry, parts.sizes, groups, parts.side
            return _traced_layer(features, weight, bias, *over)  # type: ignore[no-any-return]
        _check(features, weight, kernel_map, bias, groups)
        features, weight, bias = followed(features), followed(weight), followed(bias)
        run: Callable[..., Tensor] = _traced
    else:
        if isinstance(kernel_map, MapParts):  # a graph has ended between the map and its use
            kernel_map = from_parts(kernel_map)
        run = planned_convolution if type(features) in PLAIN and type(weight) in PLAIN else _as_operator
        if not may_autocast():
            return run(features, weight, bias, kernel_map, groups)
    device = features.device.type
    if is_autocast_enabled(device):
        _check(features, weight, kernel_map, bias, groups)
        dtype = autocast_dtype(device)
        features, weight = as_autocast(features, dtype), as_autocast(weight, dtype)
        seed = None if bias is None else as_autocast(bias, dtype)
        with torch.autocast(device, enabled=False):
            return run(features, weight, seed, kernel_map, groups)
    return run(features, weight, bias, kernel_map, groups)


def _traced(
    features: Tensor, weight: Tensor, bias: Tensor | None, kernel_map: KernelMap | MapParts, groups: int
) -> Tensor:
    """Return the convolution for a tracer: an operator, or where that can't be differentiated or exported a statement.

    The statement reads the table of neighbours, whose sizes are known however many pairs it holds.
    """
    if is_traced([features, weight]) and not is_exporting():
        return traced_convolution(features, weight, bias, parts_of(kernel_map), groups)
    Weight, kind = statement_weight(weight, groups), channel_kind(weight, groups)
    In = features.unflatten(1, (groups, -1)) if kind == IN_GROUPS else features
    NBR = neighbours(kernel_map)["NBR"]
    Out = insum(forms.STATIONARY[kind], In=In, Weight=Weight, NBR=NBR).flatten(1)
    return Out if bias is None else Out + bias.to(Out.dtype)


def _convolve_parts(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: Tensor,
    target: Tensor,
    geometry: str,
    sizes: Sequence[int],
    groups: int,
    side: int,
) -> Tensor:
    kernel_size = described(geometry, tuple(sizes))[1].kernel_size
    parts = MapParts(source, target, geometry, tuple(sizes), kernel_size, side)
    _check(features, weight, parts, bias, groups)
    return traced_convolution(features, weight, bias, parts, groups)


_traced_layer = composite(
    f"convolution_layer(Tensor features, Tensor weight, Tensor? bias, {OVER}) -> Tensor", _convolve_parts
)


def _as_operator(features: Tensor, weight: Tensor, bias: Tensor | None, kernel_map: KernelMap, groups: int) -> Tensor:
    """Return the convolution of tensors that are no plain ones, such as DTensors, for which torch finds the rule."""
    _check_types(features, weight, kernel_map, bias)
    tensors = {"features": features, "weight": weight, "bias": bias}
    name, problem = tensor_without_rules(tensors)
    if name:
        raise OperandError(problem)
    try:
        _check(features, weight, kernel_map, bias, groups)
    except ShapeError as error:
        for tell in on_refusal:
            tell(error, tensors)
        raise
    try:
        return traced_convolution(features, weight, bias, parts_of(kernel_map), groups)
    except TypeError as error:
        name, problem = tensor_without_rules(tensors, error)
        if name:
            raise OperandError(problem) from None
        raise


def planned_convolution(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_map: KernelMap,
    groups: int,
    is_swapped: bool = False,
    call: _Call | None = None,
) -> Tensor:
    """Return the convolution, by a launch plan where there is one; autocast has been applied.

    A plan takes the map's index tensors as it takes the features, so that it serves clouds that are new at every call.
    If `is_swapped`, it leads from the weight's output channels to its input channels. `call` is what `_used` has found
    for it, if it was asked before.
    """
    if call is None:
        call = _used(features, weight, kernel_map, groups, is_swapped)
    learning = (features, weight) if bias is None else (features, weight, bias)
    tensors, sizes = (*learning, *call.tensors), call.sizes
    rest = kernel_map, groups, is_swapped
    value = replayed(PLANS, call.key, tensors, sizes, (rest, len(learning)))
    if value is not None:
        return value  # type: ignore[no-any-return]
    run = lambda *_: _run(call, features, weight, bias, *rest)
    if not wants_gradient(learning) or is_transformed():
        return planned(PLANS, call.key, run, tensors, sizes, varies=True, owned=None)
    with torch.no_grad():
        value = planned(PLANS, call.key, run, tensors, sizes, varies=True, owned=None)
    result = _Convolution.apply((rest, value), *learning)
    keep_learning(PLANS, call.key, tensors, _learn, sizes)
    return result  # type: ignore[no-any-return]


def _run(
    call: _Call,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_map: KernelMap,
    groups: int,
    is_swapped: bool,
) -> Tensor:
    """Check the tensors and evaluate one statement; the bias is what its sums start from."""
    if not is_swapped:
        _check(features, weight, kernel_map, bias, groups)
    if not is_watched():
        refuse_freed("weight", weight)
        if bias is not None:
            refuse_freed("bias", bias)
    Weight, is_flat = statement_weight(weight, groups, is_swapped), len(call.shape) == 2
    operands = {"In": features if is_flat else features.unflatten(1, (groups, -1)), "Weight": Weight, **call.operands}
    if bias is not None:
        operands["Out"] = (bias if is_flat else bias.view(call.shape[1:])).expand(call.shape)
    if call.fact is not None and is_free() and not wants_gradient(list(operands.values())):
        Out = run_plain(call.statement, ",".join(operands), call.shape, list(operands.values()), call.fact)
    else:
        Out = insum(call.statement, size=call.shape, **operands)
    return Out if is_flat else Out.flatten(1)


class _Call(NamedTuple):
    """A statement with its operands over one map; features, weight and bias are added by each call."""

    statement: str
    shape: tuple[int, ...]
    operands: dict[str, Tensor]
    fact: OwnedRows | None  # where each tile's taps begin and which tiles have the most, if outputs are in tiles
    awaits: str  # what replaces this call once it pays, as `forms.awaited` names it; "" for nothing
    key: tuple[Any, ...]  # of its launch plans
    tensors: tuple[Tensor, ...]  # of the map, which a plan takes
    sizes: tuple[int, int]  # rows of the features and of the result, which differ from map to map


def _used(features: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int, is_swapped: bool) -> _Call:
    """Return the statement and operands for weights of one shape over a map, kept with the map by torch's settings.

    It is one more use of the map, which may be the last one before another form pays.
    """
    key = "statement", weight.shape, groups, is_swapped, *forms.settings_of(features.dtype)
    call: _Call | None = kernel_map.memory.get(key)
    if call is None or (call.awaits and forms.is_due(call.awaits, kernel_map)):
        if not is_swapped:
            _check(features, weight, kernel_map, None, groups)
        call = _prepare(features, weight, kernel_map, groups, is_swapped)
        if may_keep(*call.tensors):
            kernel_map.memory[key] = call
    if call.awaits:
        kernel_map.count_use()
    return call


def _prepare(features: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int, is_swapped: bool) -> _Call:
    """Return the statement and operands for weights of one shape, in the fastest form or by the rules of forms.py."""
    if not is_watched():
        refuse_freed("weight", weight)
    Weight = statement_weight(weight, groups, is_swapped)
    sizes, rows, kind = Weight.shape, kernel_map.num_outputs, channel_kind(weight, groups)
    shape = (rows, sizes[1]) if kind == ONE_BY_ONE else (rows, *sizes[1:-2], sizes[-1])
    channels = 1 if kind == ONE_BY_ONE else max(sizes[-2:])
    way = way_of(features, Weight, kernel_map, kind, shape)
    awaits = ""
    if way is None:
        form = forms.form_of(kernel_map, channels, features.dtype, features.device)
        way = Way(form, forms.TILE_SIZE if form == forms.TILED else forms.GROUP_SIZE)
        awaits = forms.awaited(form, kernel_map) or ("ways" if may_choose(features) else "")
    operands, fact = operands_of(kernel_map, *way)
    statement, tensors = way.form[kind], (*operands.values(), *(() if fact is None else fact.tensors))
    key = "convolution", statement, weight.shape, groups, is_swapped
    return _Call(statement, shape, operands, fact, awaits, key, tensors, (kernel_map.num_inputs, rows))


def _plans(ctx: Any, saved: tuple[Tensor, Tensor], dOut: Tensor) -> Any:
    if is_batched(dOut):  # whose products can't be timed
        return None, (), saved, True, None
    ctx.call = call = gradient_call(Backward(dOut, *saved, ctx.needs_input_grad[1:3], *ctx.over))
    return PLANS, (*call.key, ctx.bias_dtype), (*saved, *call.tensors), True, None


def _planned_gradients(
    ctx: Any, wanted: tuple[bool, ...], dOut: Tensor, features: Tensor, weight: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    grads = convolution_gradients(Backward(dOut, features, weight, wanted[1:], *ctx.over), ctx.call, ctx.bias_dtype)
    return None, *grads[: len(wanted) - 1]


class _Convolution(torch.autograd.Function):
    """A convolution. The gradient of its input is a convolution over the inverse map, so that it gathers as well."""

    @staticmethod
    def forward(
        ctx: Any,
        planned_call: tuple[tuple[KernelMap, int, bool], Tensor],
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.over, value = planned_call
        ctx.bias_dtype = None if bias is None else bias.dtype
        return owned(value)

    backward = staticmethod(planned_backward(_plans, _planned_gradients))


_apply = direct_apply(_Convolution)


def _learn(value: Tensor, tensors: Sequence[Tensor], given: tuple[tuple[KernelMap, int, bool], int]) -> Any:
    """Return a planned convolution with its gradients recorded."""
    rest, count = given
    return _apply((rest, value), *tensors[:count])


class _GradientCall(NamedTuple):
    """What the gradients of a convolution read of a map."""

    key: tuple[Any, ...]  # of their launch plans
    tensors: tuple[Tensor, ...]  # of the map, which a plan takes
    of_features: _Call | None  # by which the features' gradient is computed; None if it is not wanted
    of_weight: dict[str, Tensor]  # what the weight's gradient reads; nothing if it is not wanted


def gradient_call(backward: Backward) -> _GradientCall:
    """Return what gradients read of a map, kept with it by torch's settings as soon as their forms are settled."""
    features, dOut, kernel_map, wanted = backward.features, backward.dOut, backward.kernel_map, backward.wanted[:2]
    same = backward.weight.shape, backward.groups, backward.is_swapped
    settings = map(forms.settings_of, dict.fromkeys((dOut.dtype, features.dtype)))
    mark = "gradients", *same, wanted, *settings
    call: _GradientCall | None = kernel_map.memory.get(mark)
    if call is not None:
        return call
    of_features, of_weight, is_settled = None, dict[str, Tensor](), True
    key: tuple[Any, ...] = same
    if wanted[0]:
        of_features = _used(dOut, backward.weight, kernel_map.inverse, backward.groups, not backward.is_swapped)
        key, is_settled = (*key, of_features.statement), not of_features.awaits
    if wanted[1]:
        of_weight, is_sized = _operands_of_sums(backward)
        is_settled = is_settled and is_sized
    tensors = *(() if of_features is None else of_features.tensors), *of_weight.values()
    # both gradients may read the same groups, and no guard takes a tensor twice
    distinct = {id(tensor): tensor for tensor in tensors}
    places = [*distinct]
    key = *key, *[places.index(id(tensor)) for tensor in tensors]
    call = _GradientCall(key, tuple(distinct.values()), of_features, of_weight)
    if is_settled and may_keep(*tensors):
        kernel_map.memory[mark] = call
    return call


def convolution_gradients(
    backward: Backward, call: _GradientCall, bias_dtype: torch.dtype | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the features, the weight and the bias, those that are wanted."""
    dOut, features, weight, wanted, kernel_map, groups, is_swapped = backward
    d_features = d_weight = d_bias = None
    if wanted[0]:
        d_features = planned_convolution(
            dOut, weight, None, kernel_map.inverse, groups, not is_swapped, call.of_features
        )
        d_features = _as_type(d_features, features.dtype)
    if wanted[1]:
        d_weight = _weight_gradient(backward, call.of_weight)
    if wanted[2:] == (True,):
        d_bias = _as_type(insum(forms.BIAS_GRADIENT, dOut=dOut), bias_dtype or dOut.dtype)
    return d_features, d_weight, d_bias


def _operands_of_sums(backward: Backward) -> tuple[dict[str, Tensor], bool]:
    """Return what the gradient of a weight reads of a map, and whether that stays so."""
    _, _, kernel_map = backward.sides
    if not is_deterministic():
        kind, In, dOut, size = _sums(backward)
        way, is_settled = way_of_sums(In, dOut, kernel_map, kind, size)
        return maps(kernel_map, way.size), is_settled
    parts = maps(kernel_map, forms.GROUP_SIZE_OF_PARTS)
    MAPP = groups_by_tap(kernel_map, parts["MAPX"].shape[1])
    return {"MAPX": parts["MAPX"], "MAPY": parts["MAPY"], "MAPP": MAPP}, True


def _sums(backward: Backward) -> tuple[int, Tensor, Tensor, tuple[int, ...]]:
    """Return the kind of channels, both factors of the weight's gradient, and its size as a statement has it."""
    In, dOut, kernel_map = backward.sides
    groups, kind = backward.groups, channel_kind(backward.weight, backward.groups)
    if kind == IN_GROUPS:
        In, dOut = In.unflatten(1, (groups, -1)), dOut.unflatten(1, (groups, -1))
    return kind, In, dOut, (*dOut.shape[1:], kernel_map.volume, *(() if kind == ONE_BY_ONE else In.shape[-1:]))


def _weight_gradient(backward: Backward, operands: dict[str, Tensor]) -> Tensor:
    """Return the gradient of the weight, in two statements without atomics if torch is to be deterministic."""
    kind, In, dOut, size = _sums(backward)
    if "MAPP" in operands:
        Part = insum(forms.GROUP_SUMS[kind], In=In, dOut=dOut, MAPX=operands["MAPX"], MAPY=operands["MAPY"])
        dWeight = insum(forms.TAP_SUMS[kind], Part=Part, MAPP=operands["MAPP"])
    else:
        dWeight = insum(forms.WEIGHT_GRADIENT[kind], size=size, In=In, dOut=dOut, **operands)
    return _as_type(dWeight.reshape(backward.weight.shape), backward.weight.dtype)


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _check_types(features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None) -> None:
    """Refuse arguments that are no tensors, and what is no kernel map."""
    tensors = {"features": features, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise OperandError(f"{name} is of type {type(tensor).__name__}; pass a tensor")
    if not isinstance(kernel_map, (KernelMap, MapParts)):
        raise OperandError(
            f"kernel_map is of type {type(kernel_map).__name__}; pass what insum_ops.formats.kernel_map makes"
        )


def _check(
    features: Tensor, weight: Tensor, kernel_map: KernelMap | MapParts, bias: Tensor | None, groups: int
) -> None:
    """Refuse features, weights, biases and groups whose shapes do not fit each other and the map."""
    # not `len(features)`, by which a tracer would take their number for a constant
    shape, kernel = features.shape, weight.shape
    fits = len(shape) == 2 and shape[0] == kernel_map.num_inputs and kernel[1:-1] == kernel_map.kernel_size
    if fits and groups == 1 and kernel[-1] == shape[1] and (bias is None or bias.shape == kernel[:1]):
        return
    if len(shape) != 2 or shape[0] != kernel_map.num_inputs:
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
