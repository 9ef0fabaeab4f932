"""Two opaque torch operators, `insum_ops::run` and `insum_ops::run_with_winners`: tracers see a single node.

All planning happens inside them. The second is for a `max` or `min` whose gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bind import bind
from .parse import parse
from .pipeline import run, run_with_winners

__all__ = ["call", "call_with_winners"]

_ARGUMENTS = "(str expr, str names, SymInt[]? size, Tensor[] tensors, str fact, Tensor[] facts)"

_library = torch.library.Library("insum_ops", "DEF")
_library.define(f"run{_ARGUMENTS} -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(f"run_with_winners{_ARGUMENTS} -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _library.impl("run", run, _key)
    _library.impl("run_with_winners", run_with_winners, _key)


@torch.library.register_fake("insum_ops::run", lib=_library)
def _fake(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]
) -> Tensor:
    bound = bind(parse(expr), dict(zip(names.split(","), tensors)), size)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device)


@torch.library.register_fake("insum_ops::run_with_winners", lib=_library)
def _fake_with_winners(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]
) -> tuple[Tensor, Tensor]:
    bound = bind(parse(expr), dict(zip(names.split(","), tensors)), size)
    value = torch.empty(bound.size, dtype=bound.dtype, device=bound.device)
    return value, torch.empty(bound.size, dtype=bound.winner_dtype, device=bound.device)


call = torch.ops.insum_ops.run.default
call_with_winners = torch.ops.insum_ops.run_with_winners.default
