"""`apply` of an autograd function for calls that a plan has served, without what torch asks before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["direct_apply"]


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` for tensors that the guard of a launch plan has accepted.

    Torch's own first asks whether a transform of torch.func is active and looks at each argument for a wrapper that
    one has left behind, which takes a third of its time. A guard accepts neither. The pass backward, of every call,
    goes straight to the function's `backward`; torch's own way there is two Python functions, which look for a `vjp`.

    >>> class Twice(torch.autograd.Function):
    ...     forward = staticmethod(lambda ctx, x: 2 * x)
    ...     backward = staticmethod(lambda ctx, grad_output: 2 * grad_output)
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(direct_apply(Twice)(x).sum(), x)
    (tensor([2., 2.]),)
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]
