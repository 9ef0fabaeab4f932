"""Every kernel that ships compiles for A100, H100 and B200, uses their tensor cores and stays within their memory.

Needs no GPU, but a process in which Triton does not interpret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from insum_ops.compiler.autotune import Candidate, Problem
from insum_ops.compiler.bind import bind
from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.differentiate import terms
from insum_ops.compiler.parse import parse
from insum_ops.compiler.pipeline import problem_for
from statements import IS_INTERPRETED

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="a process that interprets kernels can't compile them: run `make test-cross`"
)

Build = Callable[[Problem, Candidate, int], object]
INDEX = torch.int32
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """A statement of a shipped layer at a size it is used at."""

    name: str
    expr: str
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor, the output's among them
    dtype: torch.dtype
    fact: str = ""  # the index tensor that a format knows to be sorted
    padded: frozenset[str] = frozenset()
    sum_dtype: torch.dtype | None = None
    precision: str = "ieee"

    def gradient(self, wrt: str, fact: str = "") -> Case:
        ((expr, _, _),) = terms(self.expr, wrt)
        output = parse(self.expr).output.name
        shapes = {**self.shapes, f"d{output}": self.shapes[output], f"d{wrt}": self.shapes[wrt]}
        return replace(self, name=f"{self.name} d{wrt}", expr=expr, shapes=shapes, fact=fact)

    @property
    def problem(self) -> Problem:
        statement = parse(self.expr)
        is_index = {access.name for access in statement.index_accesses}
        tensors = {
            name: torch.empty(self.shapes[name], dtype=INDEX if name in is_index else self.dtype, device="meta")
            for name in statement.tensor_names
        }
        found = problem_for(bind(statement, tensors, self.shapes[statement.output.name]), tensors, self.fact)
        return replace(found, flags=Flags(self.precision, self.sum_dtype, padded=self.padded))


def group_spmm(dtype: torch.dtype) -> Case:
    shapes = {"AM": (90_000,), "AK": (90_000, 8), "AV": (90_000, 8), "B": (40_000, 128), "C": (40_000, 128)}
    expr = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
    return Case("GroupCOO SpMM", expr, shapes, dtype, "AM", frozenset({"AK"}))


def block_spmm(edge: int) -> Case:
    P, R = 1600, 4096 // edge
    shapes = {"AM": (P,), "AK": (P,), "AV": (P, edge, edge), "B": (R, edge, 4096), "C": (R, edge, 4096)}
    expr = "C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]"
    return Case(f"BlockCOO SpMM {edge}", expr, shapes, HALF, "AM")


def convolution(channels: int, dtype: torch.dtype, sum_dtype: torch.dtype | None = None) -> Case:
    P, X = 5300, 65_663
    shapes = {"MX": (P, 128), "MY": (P, 128), "MZ": (P,)}
    shapes |= {"In": (X, channels), "Out": (X, channels), "W": (27, channels, channels)}
    expr = "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]"
    padded = frozenset({"MX", "MY"})
    return Case(f"convolution {channels}", expr, shapes, dtype, padded=padded, sum_dtype=sum_dtype)


def tensor_product(precision: str) -> Case:
    """lmax 2: 11 paths of up to 25 coefficients, 9 components."""
    shapes = dict.fromkeys(("I", "J", "K", "V"), (11, 32))
    shapes |= {"X": (10_000, 9, 32), "Y": (10_000, 9), "Z": (10_000, 9, 32), "W": (10_000, 11, 32, 32)}
    expr = "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,p,u,w]"
    return Case("tensor product", expr, shapes, SINGLE, padded=frozenset("IJK"), precision=precision)


def cases():
    for dtype in (SINGLE, HALF):
        forward = group_spmm(dtype)
        yield from (forward, forward.gradient("AV"))
    for edge in (32, 128):
        forward = block_spmm(edge)
        yield from (forward, forward.gradient("B", fact="AK"), forward.gradient("AV"))
    for channels in (32, 128):
        forward = convolution(channels, HALF)
        yield from (forward, convolution(channels, BRAIN), convolution(channels, HALF, SINGLE))
        yield from (forward.gradient("In"), forward.gradient("W"))
    for precision in ("ieee", "tf32"):
        forward = tensor_product(precision)
        yield from (forward, *map(forward.gradient, "XYW"))
