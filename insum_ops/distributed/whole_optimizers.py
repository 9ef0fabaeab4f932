"""The state of an optimizer over ranks as it is without ranks, beside that of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import LBFGS, Optimizer

from ..compiler import OperandError
from ..linear.remap import STARTS
from .placed import full
from .rows import SplitSpMM
from .split_layers import SplitLayer
from .split_models import mesh_of_layer, split_layers_of, together, trained_parameters
from .whole import equal_share, own_values, placed_like, whole_values

__all__ = ["load_whole_optimizer_state_dict", "whole_optimizer_state_dict"]

State = dict[str, Any]


def whole_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, *, sharded: bool = False) -> State:
    """Return the state of an optimizer as it is without ranks, in which split layers have that of all their blocks.

    All ranks call it together, and each gets all of it. Saved beside `whole_state_dict`, it loads on any number of
    ranks by `load_whole_optimizer_state_dict`, or into a model that is not split by torch's `set_state_dict`, whose
    form it has. For `torch.distributed.checkpoint` pass `sharded=True`. An optimizer that has not stepped yet gives
    zeros of the sizes that its state will have, for a checkpoint to be loaded into.

    Args:
        model: a model in which some layers were split, as for `whole_state_dict`.
        optimizer: one that holds parameters of the model; those of a `SplitSpMM` by its `values`.
        sharded: whether what was split comes as DTensors, each rank with an equal share.

    Returns:
        "state", with a dictionary for each parameter by its name in the model, and "param_groups", which list these
        names as "params".

    Raises:
        OperandError: on every rank, if the optimizer holds a parameter that is not the model's, or the model has other
            split layers on one of them.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from insum_ops.distributed import RowParallel, whole_optimizer_state_dict
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer = BlockSparseLinear(64, 48, block_size=16, density=0.5)
        >>> _ = parallelize_module(layer, init_device_mesh("cpu", (1,)), RowParallel())
        >>> state = whole_optimizer_state_dict(layer, torch.optim.Adam(layer.parameters()))
        >>> list(state["state"]["weight"]["exp_avg"].shape)
        [6, 16, 16]
        >>> distributed.destroy_process_group()
    """
    names = _checked_names(model, optimizer)
    groups = [{**group, "params": [names[own] for own in group["params"]]} for group in optimizer.param_groups]
    states = {names[own]: dict(state) for own, state in _states(optimizer).items()}
    split = _of_split_layers(model, states, sharded)
    for name, state in states.items():
        rest = {key: part if sharded else full(part) for key, part in state.items() if key not in split.get(name, {})}
        states[name] = {key: split.get(name, {}).get(key, rest.get(key)) for key in state}
    return {"state": states, "param_groups": groups}


def load_whole_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what `whole_optimizer_state_dict` returned, on any number of ranks, for a model split over these.

    All ranks call it together, after `load_whole_state_dict`, which gives the model the patterns of the state.

    Args:
        model: the model whose parameters the optimizer holds.
        optimizer: of the kind that was saved, with the same groups of parameters.
        state_dict: the whole state; its tensors may be DTensors.

    Raises:
        OperandError: on every rank, if the state has other groups or parameters, or other numbers of blocks than the
            model; nothing is changed then.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from insum_ops.distributed import RowParallel, load_whole_optimizer_state_dict, whole_optimizer_state_dict
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer = BlockSparseLinear(64, 48, block_size=16, density=0.5)
        >>> _ = parallelize_module(layer, init_device_mesh("cpu", (1,)), RowParallel())
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> load_whole_optimizer_state_dict(layer, optimizer, whole_optimizer_state_dict(layer, optimizer))
        >>> list(optimizer.state[layer.weight]["exp_avg"].shape)
        [6, 16, 16]
        >>> distributed.destroy_process_group()
    """
    names = _checked_names(model, optimizer)
    layers, states = list(split_layers_of(model)), dict(state_dict["state"])
    ours = [[names[own] for own in group["params"]] for group in optimizer.param_groups]
    with together(layers) as ranks:
        theirs = [list(group["params"]) for group in state_dict["param_groups"]]
        if ours != theirs or not {*states} <= {*names.values()}:
            raise OperandError(
                f"the state_dict has the groups {theirs}, but the optimizer has {ours}, says rank {dist.get_rank()}; "
                "pass what whole_optimizer_state_dict returned for a model of the same layers"
            )
        listed = {name: [(key, type(part).__name__) for key, part in state.items()] for name, state in states.items()}
        ranks.equal("the optimizer's state_dict", str(listed), "load the same state on every rank")
    states = {name: {key: full(part) for key, part in state.items()} for name, state in states.items()}
    for prefix, layer in layers:
        whole = layer.whole_parts({}) if isinstance(layer, SplitLayer) else whole_values(layer)
        with together([(prefix, layer)]):
            for name in trained_parameters(layer):
                of_name = states.get(f"{prefix}{name}", {})
                states[f"{prefix}{name}"] = {
                    key: _own_part(layer, name, key, part, whole, prefix) for key, part in of_name.items()
                }
    for own, name in names.items():
        of_own = states.get(name, {})
        states[name] = {key: placed_like(part, own) if _is_like(part, own) else part for key, part in of_own.items()}
    stepped = {name: state for name, state in states.items() if state}
    # torch numbers parameters by whatever the groups call them
    optimizer.load_state_dict({"state": stepped, "param_groups": list(state_dict["param_groups"])})


def _checked_names(model: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Return the names of the parameters that an optimizer holds, on all ranks or on none."""
    layers = list(split_layers_of(model))
    with together(layers):
        if isinstance(optimizer, LBFGS):
            raise OperandError("optimizer is LBFGS, whose state spans all parameters; leave it out and make a new one")
        of_layers = {
            own: f"{prefix}{name}" for prefix, layer in layers for name, own in trained_parameters(layer).items()
        }
        names = {**of_layers, **{own: name for name, own in model.named_parameters()}}
        held = [own for group in optimizer.param_groups for own in group["params"]]
        strange = [list(own.shape) for own in held if own not in names]
        if strange:
            raise OperandError(
                f"optimizer holds a parameter {strange[0]} that is not among the model's, says rank {dist.get_rank()}; "
                "pass the model that it trains"
            )
    return {own: names[own] for own in held}


def _states(optimizer: Optimizer) -> dict[Any, State]:
    """Return an optimizer's state by parameter; before the first step, what that will find."""
    if optimizer.state:
        return dict(optimizer.state)
    held = [own for group in optimizer.param_groups for own in group["params"] if own.requires_grad]
    grads, rates = [own.grad for own in held], [group["lr"] for group in optimizer.param_groups]
    for own in held:
        own.grad = torch.zeros_like(own)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()  # makes the state, and changes no parameter
    for own, grad in zip(held, grads):
        own.grad = grad
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    states = {own: dict(state) for own, state in optimizer.state.items()}
    optimizer.state.clear()
    starts = {name: option for kind, name, option in STARTS if isinstance(optimizer, kind)}
    options = {own: group for group in optimizer.param_groups for own in group["params"]}
    return {
        own: {
            key: torch.full_like(part, float(options[own][starts[key]]) if key in starts else 0.0)
            if isinstance(part, Tensor)
            else part
            for key, part in state.items()
        }
        for own, state in states.items()
    }


def _of_split_layers(model: nn.Module, states: Mapping[str, State], sharded: bool) -> dict[str, State]:
    """Return the state of all ranks for the parameters of split layers, by name and key."""
    found: dict[str, State] = {}
    layers = list(split_layers_of(model))
    own: dict[str, dict[str, State]] = {prefix: {} for prefix, _ in layers}
    with together(layers) as ranks:
        for prefix, layer in layers:
            for name, parameter in trained_parameters(layer).items():
                for key, part in states.get(f"{prefix}{name}", {}).items():
                    if isinstance(part, Tensor) and part.numel() > 1 and not _is_like(part, parameter):
                        raise OperandError(
                            f"{key} of {prefix}{name} is {list(part.shape)}, which is not by block, says rank "
                            f"{dist.get_rank()}; leave this optimizer's state out and make a new one"
                        )
                    if _is_like(part, parameter):
                        own[prefix].setdefault(key, {})[name] = part
        listed = {prefix: {key: [*parts] for key, parts in of_layer.items()} for prefix, of_layer in own.items()}
        ranks.equal("the optimizer's state", str(listed), "step it on every rank, or on none")
    for prefix, layer in layers:
        for key, parts in own[prefix].items():
            values = {name: full(part) for name, part in parts.items()}
            whole = (
                layer.whole_parts(values) if isinstance(layer, SplitLayer) else whole_values(layer, values["values"])
            )
            for name in values:
                part = equal_share(name, whole[name], mesh_of_layer(layer)) if sharded else whole[name]
                found.setdefault(f"{prefix}{name}", {})[key] = part
    return found


def _own_part(
    layer: SplitLayer | SplitSpMM, name: str, key: str, part: Any, whole: Mapping[str, Tensor], prefix: str
) -> Any:
    """Return this rank's share of one state of a layer's parameter, if it fits the layer."""
    if not isinstance(part, Tensor) or part.ndim == 0:
        return part
    if isinstance(layer, SplitSpMM):
        expected, what = whole["entries"].shape[1], "entries"
    else:
        sizes = layer._pattern_sizes
        expected, what = (sizes.out_features, "features") if name == "bias" else (whole["coords"].shape[1], "blocks")
    if len(part) != expected:
        raise OperandError(
            f"{key} of {prefix}{name} in the state_dict has {len(part)} {what}, but the layer has {expected}, says "
            f"rank {dist.get_rank()}; load the model's state by load_whole_state_dict first"
        )
    part = part.to(layer.coords.device if isinstance(layer, SplitLayer) else layer.send.device)
    if isinstance(layer, SplitSpMM):
        return own_values(layer, {"entries": whole["entries"], "values": part})["values"]
    return layer.own_parts({"coords": whole["coords"], name: part})[name]


def _is_like(part: Any, parameter: Any) -> bool:
    """Whether a state has a part for each block, or each element, of a parameter."""
    return isinstance(part, Tensor) and part.ndim == parameter.ndim > 0 and len(part) == len(parameter)
