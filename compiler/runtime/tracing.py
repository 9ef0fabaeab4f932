"""How a call deals with transforms and tracers, which `formats.torch_state` detects: it leaves them or follows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...formats.guard import is_real
from ...formats.torch_state import is_compiling, is_inference_mode, modes, transform_kinds, transforms
from ..language import UnsupportedError
from .recording import active

__all__ = ["followed", "outside_modes", "outside_transforms"]

FOLLOWS_FUNCTIONS = torch.__version__ >= "2.11"  # of autograd inside a transform: an older tracer fails at them


def _leave_uncompiled() -> None:
    """Break the graph; it is not inside `followed`, since newer tracers would fail at the mere call."""
    torch._dynamo.graph_break(
        msg=f"torch {torch.__version__} can't follow the gradient of a statement inside torch.compile, so that it runs "
        "uncompiled; leave out fullgraph=True, or use torch 2.11 or newer"
    )


def followed(tensor: Any) -> Any:
    """Return the tensor, or None for None, such that a tracer inside a transform differentiates it.

    A tracer does not know whether one of the transform's own inputs wants a gradient, and would take it for a constant,
    but it knows this of a view that it has made itself. It can follow a first gradient and batches.

    Raises:
        UnsupportedError: the call is inside another transform under torch.compile.
    """
    kinds = transform_kinds()
    if "Grad" not in kinds and "Jvp" not in kinds:
        return tensor
    if kinds != "Grad":
        raise UnsupportedError(
            f"{kinds} is inside torch.compile, which can follow a single Grad of torch.func; "
            "leave out torch.compile, or compile what is inside the transform"
        )
    if not FOLLOWS_FUNCTIONS:
        _leave_uncompiled()
    return tensor.view_as(tensor) if tensor is not None and tensor.is_floating_point() else tensor


class outside_transforms(ContextDecorator):
    """A context, or decorator, for making tensors that outlive the call: outside of transforms and inference mode.

    Every first call over new voxels or a new pattern passes here, so that it costs next to nothing if there is
    nothing to leave.
    """

    def _recreate_cm(self) -> outside_transforms:
        return outside_transforms()  # of a decorated function each call has its own

    def __enter__(self) -> None:
        self.left: ExitStack | None = None
        if is_compiling():  # a tracer sees to that itself
            return
        recording = active()
        if recording is not None:
            recording.postpone()  # the next run will find what is made here
        if is_inference_mode() or transforms() is not None:
            self.left = ExitStack()
            self.left.enter_context(torch.inference_mode(False))
            self.left.enter_context(torch._C._DisableFuncTorch())

    def __exit__(self, *exception: Any) -> None:
        if self.left is not None:
            self.left.close()


@contextmanager
def outside_modes(*tensors: Tensor | None) -> Iterator[None]:
    """A context for reading tensors that are constants to a tracer which runs our code, as make_fx does.

    Torch's modes see none of it. They are not left if one of the tensors is a stand-in of the tracer.
    """
    if modes() == 0 or is_compiling() or not all(tensor is None or is_real(tensor) for tensor in tensors):
        yield
        return
    with _disable_current_modes():
        yield
