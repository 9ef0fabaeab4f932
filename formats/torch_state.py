"""What torch is doing around a call: tracers, modes, transforms, autocast, precision, determinism, capture.

The one module that asks torch, for `formats`, `compiler` and the layers alike; it imports nothing of the project. Most
of its names are torch's own functions, which cost no call more than they do themselves and which a tracer knows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

__all__ = [
    "HALF",
    "INTERPRETED",
    "OLDEST_GPU",
    "PLAIN",
    "UNSAFE_IN_GRAPHS",
    "as_autocast",
    "asked_once",
    "autocast_dtype",
    "current_device",
    "default_dtype",
    "deterministic_flag",
    "float32_precision",
    "forward_mode",
    "forward_state",
    "has_saving_hooks",
    "is_autocast_enabled",
    "is_batched",
    "is_batched_by_dynamo",
    "is_captured",
    "is_capturing",
    "is_compiling",
    "is_deterministic",
    "is_dynamo",
    "is_exporting",
    "is_followed",
    "is_forward_mode",
    "is_free",
    "is_functional",
    "is_grad_enabled",
    "is_inference_mode",
    "is_readable",
    "is_recorded",
    "is_stand_in",
    "is_traced",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "is_zero",
    "may_autocast",
    "may_change_operands",
    "may_round_sums",
    "modes",
    "primal_of",
    "records_gradient",
    "refuse_script_tracer",
    "refuse_torchscript",
    "rounds_float32",
    "set_grad_enabled",
    "transform_kinds",
    "transforms",
    "uncompiled",
    "undifferentiated",
    "unseen_saving",
    "untransformed",
    "uses_tensor_cores",
    "wants_gradient",
]

PLAIN = (Tensor, torch.nn.Parameter)
HALF = (torch.float16, torch.bfloat16)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # kernels run on any device, as Python
OLDEST_GPU = (7, 5)  # the least compute capability that Triton compiles for
# of operators that read sizes from the device, or keep memory of their first call, which mode="reduce-overhead" lends:
# they run between the CUDA graphs that it makes
UNSAFE_IN_GRAPHS = tuple([tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None])

is_grad_enabled = torch.is_grad_enabled
set_grad_enabled = torch._C._set_grad_enabled  # no context, which costs ten times as much
is_inference_mode = torch.is_inference_mode_enabled
autocast_dtype = torch.get_autocast_dtype
default_dtype = torch.get_default_dtype
is_deterministic = torch.are_deterministic_algorithms_enabled  # not what it calls itself, which a tracer can't ask
deterministic_flag = torch._C._get_deterministic_algorithms  # that, for launch plans, which no tracer reads

# asked at every call, so without the Python functions around them
modes = torch._C._len_torch_dispatch_stack  # FakeTensorMode, ProxyTorchDispatchMode, FunctionalTensorMode, ...
transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad, ... that are active
may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # whether any device's is on
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
forward_state = vars(forward_ad)  # whose "_current_level" is negative unless derivatives are carried forward
is_wrapped = functorch.is_functorch_wrapped_tensor  # by vmap, grad, ...
_script_tracer = torch._C._get_tracing_state  # torch.jit.trace's; None: it does not run
is_batched = functorch.is_batchedtensor  # by vmap, outermost
is_functional = torch._is_functional_tensor  # by torch.func.functionalize
# what compiles Python code when it is called; None: nothing does
_frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_compiler_of_frames = getattr(_frames, "get_eval_frame_callback", lambda: sys.modules.get("torch._dynamo"))


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return a function of which torch.compile compiles no part where a graph breaks at it.

    Torch's own wrapper, which takes as long as a dozen calls, is left out where no frames are compiled, as inside of a
    compiled graph.
    """
    outside = _disable_dynamo(function)

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        runs_as_it_is = not torch.compiler.is_dynamo_compiling() and _compiler_of_frames() is None
        return (function if runs_as_it_is else outside)(*arguments, **named)

    return cast(Function, called)


def asked_once(function: Function) -> Function:
    """Let a tracer that reads our code call a function, instead of reading it, and keep the answer for its graph.

    `torch.compiler.assume_constant_result` marks it in the same way, and imports all of the tracer: over a second.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker
    return function


def is_autocast_enabled(kind: str) -> bool:
    """Return whether autocast is active on a kind of device; it casts nothing on "meta", of which torch can't tell."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def is_compiling() -> bool:
    """Return whether torch.compile or torch.export traces the code.

    No alias of torch's function: where a graph breaks, a tracer that was told so by an alias goes on as if it were not.
    The functions below ask torch's own, since this one would cost each of them a call more.
    """
    return torch.compiler.is_compiling()


def is_dynamo() -> bool:
    """Return whether the tracer reads our Python code, as that of torch.compile, instead of running it."""
    return torch.compiler.is_dynamo_compiling()


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph holds what is launched on a device now: nothing can be read from it then, nor timed.

    What is made or chosen for such a graph is not kept for calls to come.
    """
    return device.type == "cuda" and is_capturing()


def is_exporting() -> bool:
    """Return whether torch.export runs our code, so that what it records must need nothing of ours."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_recorded() -> bool:
    """Return whether an operator runs without memory because torch.compile records it, not torch.export."""
    return torch._guards.TracingContext.try_get() is not None and not torch.compiler.is_exporting()


# torch.backends.cuda.matmul.allow_*_reduced_precision_reduction
_fp16_reduction = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
_bf16_reduction = torch._C._get_cublas_allow_bf16_reduced_precision_reduction

# torch's word for products of float32 matrices on a GPU: `none` and `ieee` for full precision, `tf32`. It follows the
# older setting too, whose own function raises once the newer one was used.
_getter = getattr(torch._C, "_get_fp32_precision_getter", None)
float32_precision = partial(_getter, "cuda", "matmul") if _getter is not None else torch.get_float32_matmul_precision


def rounds_float32() -> bool:
    """Return whether products of float32 may be rounded to tf32."""
    return float32_precision() not in ("none", "ieee", "highest")


def may_round_sums(dtype: torch.dtype) -> bool:
    """Return torch's flag for its own split-K: whether partial sums of `dtype` may meet in half precision."""
    allowed = _fp16_reduction() if dtype == torch.float16 else _bf16_reduction()
    return bool(allowed[0] if isinstance(allowed, tuple) else allowed)


@asked_once  # torch's own function returns a word, which a tracer can't hold
def uses_tensor_cores(dtype: torch.dtype) -> bool:
    """Return whether products are of half precision, or of float32 where torch may round to tf32.

    All other products are multiply-adds.
    """
    return dtype.itemsize == 2 or (dtype == torch.float32 and rounds_float32())


def forward_mode() -> AbstractContextManager[object]:
    """Return a context in which derivatives are carried forward, where torch has turned that off."""
    return forward_ad._set_fwd_grad_enabled(True)


def primal_of(tensor: Tensor) -> Tensor:
    """Return a tensor without its tangent."""
    return forward_ad.unpack_dual(tensor).primal  # type: ignore[no-any-return]


def is_forward_mode() -> bool:
    """Return whether derivatives are carried forward: a tensor may have a tangent."""
    return forward_ad._current_level >= 0


_saving_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: True)


def has_saving_hooks() -> bool:
    """Return whether someone is told of what is saved for gradients, as checkpoints and offloading are."""
    return _saving_hooks(False) is not None


def unseen_saving() -> AbstractContextManager[object]:
    """Return a context in which nobody is told of what is saved for gradients, as of calls that are only timed."""
    same = lambda tensor: tensor
    return torch.autograd.graph.saved_tensors_hooks(same, same) if has_saving_hooks() else nullcontext()


def is_watched() -> bool:
    """Return whether a tracer, a mode or a transform follows what happens: it must happen through torch operators."""
    return torch.compiler.is_compiling() or modes() > 0 or transforms() is not None


def is_traced(tensors: Sequence[Tensor]) -> bool:
    """Return whether a tracer follows a call over these tensors, and no transform inside of it."""
    if torch.compiler.is_compiling():
        return not transform_kinds()
    if modes() == 0:  # asked at every call with gradients, so before what costs more
        return False
    return any([type(tensor) not in PLAIN for tensor in tensors]) and not transform_kinds()


def is_followed(tensor: Tensor) -> bool:
    """Return whether a tracer follows what is done with a tensor, be it inside of a transform."""
    return torch.compiler.is_compiling() or (modes() > 0 and type(tensor) not in PLAIN)


def is_transformed() -> bool:
    """Return whether a transform of torch.func is active, or derivatives are carried forward."""
    if torch.compiler.is_compiling():
        return False
    return transforms() is not None or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled())


def is_stand_in(tensor: Tensor) -> bool:
    """Return whether a tensor has a size and no numbers, as all have that torch's FakeTensorMode makes."""
    return type(tensor).__name__ == "FakeTensor"


def is_readable(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor lie in memory that may be read now."""
    return type(tensor) in PLAIN and not tensor.is_meta and not is_captured(tensor.device)


def undifferentiated(tensor: Tensor) -> Tensor:
    """Return an index tensor without what `grad`, `vjp` and `jvp` wrap all of their arguments in.

    One that vmap batches stays as it is.
    """
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def untransformed() -> AbstractContextManager[object]:
    """Return a context outside of all transforms, which would wrap what is made of plain tensors too."""
    is_inside = not torch.compiler.is_compiling() and transforms() is not None
    return torch._C._DisableFuncTorch() if is_inside else nullcontext()


@asked_once  # a compiled graph is guarded by what torch's transforms were
def transform_kinds() -> str:
    """Return what torch.func or forward mode does, as in "Vmap of Grad"."""
    kinds = [interpreter.key().name for interpreter in functorch.get_interpreter_stack() or ()]
    if forward_ad._current_level >= 0 and "Jvp" not in kinds:
        kinds.append("Jvp")
    return " of ".join(kinds)


def is_batched_by_dynamo() -> bool:
    """Return whether Dynamo reads a call inside of vmap alone: nothing is differentiated before the batch is made."""
    return torch.compiler.is_dynamo_compiling() and {*transform_kinds().split(" of ")} == {"Vmap"}


@asked_once  # and by what its autocast was
def may_change_operands() -> bool:
    """Return whether autocast or a transform is active, on which a call's tensors depend."""
    return may_autocast() or transform_kinds() != ""


def refuse_torchscript() -> NoReturn:
    """Raise TypeError, since TorchScript has no operator for a statement."""
    raise TypeError(
        "torch.jit.script and torch.jit.trace have no operator for a statement; use torch.compile, or torch.export for "
        "a model in a file"
    )


def refuse_script_tracer() -> None:
    """Raise TypeError while torch.jit.trace records the call, which sees neither a kernel nor a number among sizes."""
    if _script_tracer() is not None:
        refuse_torchscript()


def is_free() -> bool:
    """Return whether nobody watches, casts or carries derivatives forward.

    A call like one before may then go straight to its plan. Raise TypeError while torch.jit.trace records the call.
    """
    if torch.compiler.is_compiling():
        return False
    refuse_script_tracer()
    if modes() or transforms() is not None or may_autocast():
        return False
    return forward_ad._current_level < 0  # else a tensor may have a tangent, which its plan would lose


def is_zero(size: int) -> bool:
    """Return whether a size is 0; one that a tracer knows only when the call runs, as of what is found, is not."""
    if type(size) is int:
        return size == 0
    is_none: object = size == 0
    return is_none.node.guard_or_false(__file__, 0) if isinstance(is_none, torch.SymBool) else bool(is_none)


def wants_gradient(tensors: Sequence[Tensor]) -> bool:
    """Return whether gradients are recorded and one of the tensors asks for one."""
    if is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def records_gradient(tensors: Sequence[Tensor]) -> bool:
    """Return whether a call over these tensors is to be an autograd function of ours.

    What torch.export records is differentiated by torch when the program runs, and our functions are not in it: where
    Dynamo reads them for it, with `strict=True`, what they do inside is recorded without gradients.
    """
    return wants_gradient(tensors) and not torch.compiler.is_exporting()


def as_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 in autocast's dtype, before gradients are recorded: backward runs outside of autocast."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
