"""One opaque torch operator, `insum_ops::run`: all planning happens inside it, so tracers see a single node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bind import bind
from .parse import parse
from .pipeline import run

__all__ = ["call"]

_library = torch.library.Library("insum_ops", "DEF")
_library.define(
    "run(str expr, str names, SymInt[]? size, Tensor[] tensors, str fact, Tensor[] facts) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("run", run, _key)


@torch.library.register_fake("insum_ops::run", lib=_library)
def _fake(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]
) -> Tensor:
    bound = bind(parse(expr), dict(zip(names.split(","), tensors)), size)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device)


call = torch.ops.insum_ops.run.default
