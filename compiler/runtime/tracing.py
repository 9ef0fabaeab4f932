"""What a call does about torch's state, as `formats.torch_state` reads it: leave transforms, follow a tracer."""

from __future__ import annotations

from contextlib import ContextDecorator, ExitStack
from typing import Any

import torch

from ...formats.torch_state import is_compiling, is_inference_mode, transform_kinds, transforms
from ..language import UnsupportedError
from .recording import active

__all__ = ["followed", "outside_transforms"]

FOLLOWS_FUNCTIONS = torch.__version__ >= "2.11"  # of autograd inside a transform: an older tracer fails at them


def _leave_uncompiled() -> None:
    """Break the graph; apart from `followed`, in which newer tracers would fail at the words alone."""
    torch._dynamo.graph_break(
        f"torch {torch.__version__} can't follow the gradient of a statement inside torch.compile, so that it runs "
        "uncompiled; leave out fullgraph=True, or use torch 2.11 or newer"
    )


def followed(tensor: Any) -> Any:
    """The same tensor, or None, for a tracer inside a transform: a first gradient and batches are all it can follow.

    Whether one of the transform's own inputs wants a gradient it does not know, and would take it for a constant, but
    it knows of what it has made itself.
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
    """What is made here outlives the call: it is no part of a transform, and good for training too.

    Every first call over new voxels or a new pattern passes here, so that it costs next to nothing where there is
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

    def __exit__(self, *given: Any) -> None:
        if self.left is not None:
            self.left.close()
