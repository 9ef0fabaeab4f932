"""What is called whenever a module runs, and would be lost with it where another takes its place."""

from __future__ import annotations

from torch import nn

__all__ = ["HOOKS", "has_hooks"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks, None) for hooks in HOOKS)
