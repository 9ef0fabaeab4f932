"""Whether what is worked out now may be kept for later calls: the one place that says so."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_real", "may_keep"]

_modes = torch._C._len_torch_dispatch_stack  # FakeTensorMode, ProxyTorchDispatchMode, FunctionalTensorMode, ...
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by vmap, grad, ...
_is_functional = torch._is_functional_tensor


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own that holds numbers, and no tracer or transform stands behind it.

    >>> is_real(torch.zeros(2)), torch.func.vmap(lambda row: row * is_real(row))(torch.ones(1)).tolist()
    (True, [0.0])
    """
    return type(tensor) in (Tensor, torch.nn.Parameter) and not (_is_wrapped(tensor) or _is_functional(tensor))


def may_keep(*made: Tensor | None) -> bool:
    """Whether something may outlive the call that works it out; `made` are the tensors in it.

    Nothing may while somebody traces (torch.compile, torch.export, make_fx) or a mode stands between us and torch's
    operations, as FakeTensorMode does: sizes may be symbols then and tensors have no numbers, whether they tell or
    not. And nothing may in which a tensor is fake, functional, or wrapped by a transform of torch.func. What is made
    outside of the transforms, of tensors that they have not wrapped, is kept.

    >>> may_keep(torch.zeros(2), None)
    True
    >>> from torch._subclasses import FakeTensorMode
    >>> with FakeTensorMode():
    ...     may_keep(), may_keep(torch.zeros(2))
    (False, False)
    """
    if torch.compiler.is_compiling() or _modes() > 0:
        return False
    return all([tensor is None or is_real(tensor) for tensor in made])
