"""Layers and functions that TorchScript can't compile say so, in the place of what its compiler finds first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from .formats.torch_state import refuse_torchscript

__all__ = ["NotScripted", "not_scripted"]

Function = TypeVar("Function", bound=Callable[..., Any])


class NotScripted:
    """A base of layers; `torch.jit.script` calls this method of every module that it is about to compile."""

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript()


def not_scripted(function: Function) -> Function:
    """Give a function what `torch.jit.script` calls before it compiles one, given or called by what it compiles."""
    setattr(function, "__prepare_scriptable__", refuse_torchscript)  # noqa: B010 - no such attribute to a type checker
    return function
