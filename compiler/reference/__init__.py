"""A bound statement to a torch.fx program of gathers, an einsum and a scatter: what it means, and the CPU's way.

A file imports only from those above it.

    gathers   what a statement reads, as nodes of a `torch.fx` graph
    extremes  `C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])` as nodes of a `torch.fx` graph
    lower     a bound statement to its `torch.fx` graph
"""

from .lower import lower, placeholders, program_for

__all__ = [
    "lower",
    "placeholders",
    "program_for",
]
