"""Statements with a format in them whose launch plans serve any pattern, be it new at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..formats.torch_state import is_watched, wants_gradient
from .binding import Recipe, SparseFormat
from .routes import has_kernels
from .runtime import PLAIN_CALLS, planned, remember_coordinates

__all__ = ["evaluate_rewritten"]


def evaluate_rewritten(
    recipe: Recipe, form: SparseFormat, dense: Mapping[str, Tensor], evaluate: Callable[..., Tensor]
) -> Tensor:
    """Return the value of a statement with its format rewritten away, by a plan that takes the pattern as it is given.

    Index tensors are inputs of the plan, those of the fact too. A format that lasts has plans of its own beside it, to
    which this call is a part of what they record, and which pin its pattern.
    """
    tensors = recipe.tensors(form, dense)
    fact = recipe.fact(form) if has_kernels(form.device) else None  # torch's operations read none
    run = lambda *_: evaluate(recipe.text, tensors, recipe.size, fact)
    values = list(tensors.values())
    if is_watched() or wants_gradient(values):
        return recipe.finish(run())
    remember_coordinates(form)
    facts, key = ((), None) if fact is None else (fact.tensors, fact.key)
    marks = "rewritten", recipe.text, key, *tensors
    C = planned(PLAIN_CALLS, marks, run, [*values, *facts], recipe.size, varies=True, owned=None, facts=len(facts))
    return recipe.finish(C)
