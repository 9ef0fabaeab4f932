"""`backward` of an autograd function: its gradients by their launch plan, else computed, and recorded for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...formats.torch_state import is_dynamo, is_grad_enabled, is_watched
from ..runtime import planned, replayed
from .legacy_vmap import is_batched, unbatch_gradients
from .wanted import reached_gradients

__all__ = ["Plans", "format_key", "gradients_key", "planned_backward"]

# (cache or None, key of the call, tensors, whether lengths may vary, `owned` of `planned`)
Plans = tuple[dict[Any, Any] | None, object, Sequence[Tensor], bool, Any]


def gradients_key(call_key: object, wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Return the key of the plan that computes the wanted ones among the gradients of a call.

    `wanted` is as autograd asks: of what describes the call, which is no tensor, then of the tensors.
    """
    return "gradients", call_key, tuple(wanted)


def format_key(expr: str, name: str, dense: Sequence[str]) -> tuple[str, ...]:
    """Return the key of a call over a format, whose tensors are its values, then those that `dense` names."""
    return expr, name, *dense


def planned_backward(
    plans: Callable[[Any, tuple[Any, ...], Tensor], Plans],
    gradients: Callable[..., Any],
    finish: Callable[[Any, tuple[Any, ...], Any], Any] | None = None,
) -> Callable[..., Any]:
    """Return the `backward` of an autograd function of one result.

    Args:
        plans: `plans(ctx, saved, grad_output)`, which is asked once for each pass, returns what `planned` takes for the
            gradients: the cache, a key of the call, the tensors that are read beside the gradient of the result,
            whether lengths may vary, and `owned`. The cache is None where there are to be no plans. Sizes on which the
            gradients depend are those of these tensors and of the result's gradient. If that is a batch that is older
            than `torch.func`, which has no plan, it is asked once more for each gradient in it.
        gradients: `gradients(ctx, wanted, grad_output, *tensors)` returns a gradient or None for each argument of the
            function. It may be recorded, and where gradients are differentiated in turn it runs as it is.
        finish: `finish(ctx, saved, grads)` returns the gradients as autograd takes them, if a plan can't make them so.
    """

    @unbatch_gradients
    def computed(
        ctx: Any, grad_output: Tensor, saved: tuple[Any, ...], wanted: tuple[bool, ...], call: Plans | None = None
    ) -> Any:
        """Return the gradients where they have no plan."""
        cache, key, tensors, varies, owned = plans(ctx, saved, grad_output) if call is None else call
        run = partial(gradients, ctx, wanted)
        if is_watched() or is_grad_enabled() or cache is None:  # last: a tracer would read the whole cache
            grads = run(grad_output, *tensors)
        else:
            plan_key = gradients_key(key, wanted)
            grads = planned(cache, plan_key, run, (grad_output, *tensors), varies=varies, owned=owned)
        return grads if finish is None else finish(ctx, saved, grads)

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad  # unpacked once, as checkpointed layers want it
        if is_dynamo():
            return computed(ctx, grad_output, saved, wanted)
        wanted = reached_gradients(ctx, wanted)
        call = cache, key, tensors, _, _ = plans(ctx, saved, grad_output)
        if cache is not None:
            # the key is `gradients_key`'s, written out: every step comes here
            grads = replayed(cache, ("gradients", key, wanted), (grad_output, *tensors))
            if grads is not None:
                return grads if finish is None else finish(ctx, saved, grads)
        return computed(ctx, grad_output, saved, wanted, None if is_batched(grad_output) else call)

    return backward
