"""Hooks, attributes and settings of a layer that would be lost if a layer of another class took its place."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

__all__ = ["has_tensor_hooks", "lost_in_swap", "private_names"]

CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
EVERY_MODULE = frozenset(vars(nn.Module()))
COMPILED = "_compiled_call_impl"  # set by `module.compile()`
WRAPPED = "_orig_mod"  # what `torch.compile(module)` names the module in its wrapper, which keeps its old `__call__`


def lost_in_swap(module: nn.Module, expected: Collection[str], path: str = "") -> str:
    """Say what swapping this module for one of another class would lose, and what to do; "" if nothing.

    Args:
        module: the layer that is to be swapped.
        expected: the names of attributes, parameters, buffers and children that the swap takes over or may drop.
            Whatever else the instance has is refused, such as a `forward` that was set on it.
        path: where the module is in its model, as `named_modules` names it.
    """
    if COMPILED in vars(module) or WRAPPED in module._modules or path.rpartition(".")[2] == WRAPPED:
        return "is compiled, which would be lost; convert first, then compile"
    if is_parametrized(module):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return (
            f"has a parametrization of {names}, which would be lost; remove it with "
            "torch.nn.utils.parametrize.remove_parametrizations, or convert first"
        )
    if any(_foreign_hooks(module)):
        return "has hooks, which would be lost; remove them, convert, and register them again"
    present = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    extras = sorted(present - EVERY_MODULE - set(expected))
    if extras:
        them = "them" if len(extras) > 1 else "it"
        return f"has {', '.join(extras)} of its own, which would be lost; convert first, then set {them} again"
    return ""


def private_names(module: nn.Module) -> set[str]:
    """Return the names with an underscore that a library keeps on its modules, but for those that the class has too.

    An instance that has a method of its class, such as `_conv_forward`, as its own attribute has been changed.
    """
    present = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    return {name for name in present if name.startswith("_") and not hasattr(type(module), name)}


def has_tensor_hooks(tensors: Collection[Tensor]) -> bool:
    """Whether one of these tensors has a hook on its gradient, which would not see the gradients of a copy."""
    return any(getattr(tensor, hooks, None) for tensor in tensors for hooks in TENSOR_HOOKS)


def _foreign_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module, but for those that its own class has registered, which are methods of the module."""
    for kind in (*CALL_HOOKS, *STATE_HOOKS):
        for hook in getattr(module, kind, {}).values():
            function = getattr(hook, "hook", hook)  # some are wrapped
            if getattr(function, "__self__", None) is not module:
                yield hook
