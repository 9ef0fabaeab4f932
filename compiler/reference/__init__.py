"""A bound statement to a torch.fx program of gathers, an einsum and a scatter: what it means, and the CPU's way.

A file imports only from those above it.

    demands   what a statement's program takes of memory, and how it rounds
    gathers   what a statement reads, as nodes of a `torch.fx` graph
    extremes  `C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])` as nodes of a `torch.fx` graph
    lower     a bound statement to its `torch.fx` graph, which says what it means
    products  contractions as products of matrices, sums and products of entries
    rows      sums by row on a CPU, by row offsets that are remembered with index tensors
    faster    the same graph in faster operations
    first     factors that are multiplied before they are gathered
    code      a `torch.fx` graph as a Python function
    groups    a contraction group by group, where an index tensor chooses a matrix for each row
    shared    several graphs as one, in which what they do alike is done once
    program   the fastest of these graphs as a function of tensors of any lengths
"""

from .demands import numbers_held, sums_in_float32, sums_in_half
from .faster import USUAL, Way
from .lower import lower, placeholders
from .program import Part, Program, joint_program_for, lowered, program_for, programs_for

__all__ = [
    "USUAL",
    "Part",
    "Program",
    "Way",
    "joint_program_for",
    "lower",
    "lowered",
    "numbers_held",
    "placeholders",
    "program_for",
    "programs_for",
    "sums_in_float32",
    "sums_in_half",
]
