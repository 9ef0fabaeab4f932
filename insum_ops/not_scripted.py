"""Layers that TorchScript can't compile say so, in the place of what its compiler finds first."""

from __future__ import annotations

from typing import NoReturn

from .formats.torch_state import refuse_torchscript

__all__ = ["NotScripted"]


class NotScripted:
    """A base of layers; `torch.jit.script` calls this method of every module that it is about to compile."""

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript()
