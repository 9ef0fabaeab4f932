"""Gradients as statements, and what makes torch see them: autograd functions, operators, rules of torch.func.

A file imports only from those above it.

    operators        two opaque torch operators, `insum_ops::run` and `insum_ops::run_with_winners`
    legacy_vmap      `torch.autograd.grad(..., is_grads_batched=True)`, by which `jacobian(vectorize=True)` works
    gradients        the gradients and tangents of a statement, evaluated
    functions        autograd functions of statements
    functorch_rules  torch.func and forward mode
"""

from .functions import differentiable, unchecked
from .functorch_rules import transformed, transformed_sparse
from .gradients import gradients_of, is_sum
from .legacy_vmap import one_by_one
from .operators import implement, run_plain

__all__ = [
    "differentiable",
    "gradients_of",
    "implement",
    "is_sum",
    "one_by_one",
    "run_plain",
    "transformed",
    "transformed_sparse",
    "unchecked",
]
