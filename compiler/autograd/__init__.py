"""Gradients as statements, and what makes torch see them: autograd functions, operators, rules of torch.func.

A file imports only from those above it.

    breaks_graph      errors of operators that torch.compile records
    operators         two opaque torch operators, `insum_ops::run` and `insum_ops::run_with_winners`
    composite         a whole layer as one operator, which torch.compile takes apart
    flop_formula      what `FlopCounterMode` counts of a statement
    wanted            which gradients a pass backward asks for
    direct_apply      `apply` of an autograd function for calls that a plan has served
    legacy_vmap       batches of gradients or tangents, as `jacobian(vectorize=True)` makes them, one at a time
    planned_backward  `backward` of an autograd function, by the launch plan of its gradients
    gradients         the gradients and tangents of a statement, evaluated by whatever evaluates a statement
    run_gradients     one opaque torch operator for several gradients of a sum over plain tensors
    in_steps          the value and gradients of a statement of many factors, sharing what lies on the way
    torch_gradients   whether torch differentiates the operations of a call on a CPU
    functions         autograd functions of statements
    functorch_rules   statements inside the transforms of torch.func, and in forward mode
    format_operators  two opaque torch operators for a statement with a format in it
"""

from .composite import composite, takes_composites
from .direct_apply import direct_apply
from .flop_formula import flops
from .format_operators import followed_sparse, implement
from .functions import differentiable
from .functorch_rules import transformed
from .gradients import gradients_of, is_sum
from .legacy_vmap import is_batched, unbatch_gradients
from .operators import (
    below_autograd,
    refuse_transforms,
    replay_first,
    run_plain,
    run_plain_with_winners,
    run_several,
    run_summed,
    traced,
)
from .planned_backward import gradients_key, planned_backward
from .run_gradients import separate_gradients
from .wanted import wanted_gradients

__all__ = [
    "below_autograd",
    "composite",
    "differentiable",
    "direct_apply",
    "flops",
    "followed_sparse",
    "gradients_key",
    "gradients_of",
    "implement",
    "is_batched",
    "is_sum",
    "planned_backward",
    "refuse_transforms",
    "replay_first",
    "run_plain",
    "run_plain_with_winners",
    "run_several",
    "run_summed",
    "separate_gradients",
    "takes_composites",
    "traced",
    "transformed",
    "unbatch_gradients",
    "wanted_gradients",
]
