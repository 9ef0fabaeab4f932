"""What torch is doing around a call: modes, transforms, autocast, precision, determinism, capture. Read here alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from ..errors import UnsupportedError
from .recording import active

__all__ = [
    "HALF",
    "PLAIN",
    "as_autocast",
    "current_device",
    "float32_precision",
    "followed",
    "is_capturing",
    "is_deterministic",
    "is_free",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "may_autocast",
    "may_round_sums",
    "modes",
    "outside_transforms",
    "rounds_float32",
    "transforms",
    "uses_tensor_cores",
    "wants_gradient",
]

PLAIN = (Tensor, torch.nn.Parameter)
HALF = (torch.float16, torch.bfloat16)

# asked at every call, so without the Python functions around them
modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad, ... that are active
may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # whether any device's is on
is_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
is_wrapped = functorch.is_functorch_wrapped_tensor  # by vmap, grad, ...

# torch.backends.cuda.matmul.allow_*_reduced_precision_reduction
_fp16_reduction = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
_bf16_reduction = torch._C._get_cublas_allow_bf16_reduced_precision_reduction

# torch's word for products of float32 matrices on a GPU: `none` and `ieee` for full precision, `tf32`. It follows the
# older setting too, whose own function raises once the newer one was used.
_getter = getattr(torch._C, "_get_fp32_precision_getter", None)
float32_precision = partial(_getter, "cuda", "matmul") if _getter is not None else torch.get_float32_matmul_precision


def rounds_float32() -> bool:
    """Products of float32 may be rounded to tf32."""
    return float32_precision() not in ("none", "ieee", "highest")


def may_round_sums(dtype: torch.dtype) -> bool:
    """torch's flag for its own split-K: partial sums may meet in half precision."""
    allowed = _fp16_reduction() if dtype == torch.float16 else _bf16_reduction()
    return bool(allowed[0] if isinstance(allowed, tuple) else allowed)


def uses_tensor_cores(dtype: torch.dtype) -> bool:
    """Products in half precision, and in float32 where torch may round to tf32; all others are multiply-adds."""
    return dtype.itemsize == 2 or (dtype == torch.float32 and rounds_float32())


# a tracer asks once and keeps the answer: torch's own function returns a word, which it can't hold
setattr(uses_tensor_cores, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker


def is_watched() -> bool:
    """Somebody follows what happens (a tracer, a mode, a transform), so it must happen through a torch operator."""
    return torch.compiler.is_compiling() or modes() > 0 or transforms() is not None


def is_transformed() -> bool:
    """A transform of torch.func is active, or derivatives are carried forward."""
    if torch.compiler.is_compiling():
        return False
    return transforms() is not None or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled())


def _transforms() -> str:
    """What torch.func or forward mode does, as in "Vmap of Grad"; a tracer asks once and keeps the answer."""
    kinds = [interpreter.key().name for interpreter in functorch.get_interpreter_stack() or ()]
    if forward_ad._current_level >= 0 and "Jvp" not in kinds:
        kinds.append("Jvp")
    return " of ".join(kinds)


setattr(_transforms, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker


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
    kinds = _transforms()
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
        if torch.compiler.is_compiling():  # a tracer sees to that itself
            return
        recording = active()
        if recording is not None:
            recording.postpone()  # the next run will find what is made here
        if torch.is_inference_mode_enabled() or transforms() is not None:
            self.left = ExitStack()
            self.left.enter_context(torch.inference_mode(False))
            self.left.enter_context(torch._C._DisableFuncTorch())

    def __exit__(self, *given: Any) -> None:
        if self.left is not None:
            self.left.close()


def as_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Under autocast float32 takes its type, before gradients are recorded: backward runs outside of it."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def is_free() -> bool:
    """Nobody watches, casts or carries derivatives forward: a call like one before may go straight to its plan."""
    if torch.compiler.is_compiling() or modes() or transforms() is not None or may_autocast():
        return False
    return forward_ad._current_level < 0  # else a tensor may have a tangent, which its plan would lose


def wants_gradient(tensors: Sequence[Tensor]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False
