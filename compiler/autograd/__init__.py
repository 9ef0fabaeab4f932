"""Gradients as statements, and what makes torch see them: autograd functions, operators, rules of torch.func.

A file imports only from those above it.

    operators        two opaque torch operators, `insum_ops::run` and `insum_ops::run_with_winners`
    flop_formula     what `FlopCounterMode` counts of a statement
    legacy_vmap      batches of gradients, as `jacobian(vectorize=True)` asks for them, one at a time
    gradients        the gradients and tangents of a statement, evaluated by whatever evaluates a statement
    in_steps         the value and gradients of a statement of many factors, sharing what lies on the way
    functions        autograd functions of statements
    functorch_rules  statements inside the transforms of torch.func, and in forward mode
"""

from .flop_formula import flops
from .functions import by_torch, differentiable, unchecked
from .functorch_rules import transformed, transformed_sparse
from .gradients import gradients_of, is_sum
from .legacy_vmap import one_by_one
from .operators import implement, run_plain, run_plain_with_winners, run_several

__all__ = [
    "by_torch",
    "differentiable",
    "flops",
    "gradients_of",
    "implement",
    "is_sum",
    "one_by_one",
    "run_plain",
    "run_plain_with_winners",
    "run_several",
    "transformed",
    "transformed_sparse",
    "unchecked",
]
