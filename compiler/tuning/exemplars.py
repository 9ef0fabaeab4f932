"""Exemplars: statements whose kernels identify a version of the code generator; together they reach all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...formats.facts import ConstantTables, Fact, OwnedRows, WrittenOnce
from ..binding import Bound, Meta, bind
from ..codegen import Flags
from ..language import parse

__all__ = ["EXEMPLARS", "Exemplar"]

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")  # the text of a kernel does not depend on the device


@dataclass(frozen=True)
class Exemplar:
    """A statement with sizes, dtype, and facts about its tensors."""

    expr: str
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors, and "" the size of an output that starts from nothing
    dtype: torch.dtype = HALF
    fact: Fact | None = None
    flags: Flags = field(default_factory=lambda: Flags(padded=frozenset()))
    has_order: bool = False

    @property
    def bound(self) -> Bound:
        statement = parse(self.expr)
        tensors = {
            name: Meta(shape, torch.int64 if name in statement.index_names else self.dtype, CPU)
            for name, shape in self.shapes.items()
            if name
        }
        return bind(statement, tensors, self.shapes.get(""))


def _flags(*padded: str, **settings: object) -> Flags:
    return Flags(padded=frozenset(padded), **settings)  # type: ignore[arg-type]


def _exemplars() -> tuple[Exemplar, ...]:
    dense = {"A": (70, 50), "B": (50, 130)}
    blocks = {"AM": (900,), "AK": (900,), "AV": (900, 32, 32), "B": (128, 32, 1024), "": (128, 32, 1024)}
    groups = {"AM": (300,), "AK": (300, 8), "AV": (300, 8), "B": (2000, 96), "": (200, 96)}
    pairs = {"AM": (64, 2), "AT": (700,), "AS": (700, 2), "AK": (700,)}
    group_spmm, group_max = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", "C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])"
    table = ConstantTables({"I": [[0, 2], [1, -1], [3, 3]], "V": [[0.5, 2.0], [1.0, 0.0], [3.0, -1.0]]})
    columns = {
        "R": [[2 * w + i for w in range(20)] for i in range(2)],
        "L": [[3 * u + j for u in range(24)] for j in range(3)],
    }
    columns_of_parts = ConstantTables({"I": [[0, 2], [1, -1]], "V": [[0.5, 2.0], [1.0, 0.0]], **columns})
    entries = {**groups, "AK": (300, 1), "AV": (300, 1)}
    rows = OwnedRows("AM")
    return (
        Exemplar("C[i,j] += A[i,k] * B[k,j]", dense),
        Exemplar("C[i,j] += A[i,k] * B[k,j]", dense, SINGLE, flags=_flags(precision="tf32")),
        Exemplar("C[i,j] = 2 * A[i,k] * B[k,j]", {**dense, "C": (70, 130)}, DOUBLE),
        Exemplar("C[i,j] += A[i,k] * B[k,j]", dense, flags=_flags(lazy=False)),
        Exemplar("C[i] += A[i,k] * B[k,0]", {"A": (70, 50), "B": (50, 1)}, SINGLE),
        Exemplar("C[i,j] = max(A[i,k] * B[k,j])", dense, SINGLE, flags=_flags(wants_winners=True)),
        Exemplar("C[i] += A[k]", {"A": (10_000,), "": (3,)}, SINGLE),
        Exemplar("dW[u,w] += T[b,i,u] * dZ[b,i,w]", {"T": (10_000, 9, 64), "dZ": (10_000, 9, 64)}, SINGLE),
        Exemplar(group_spmm, groups, SINGLE, rows, _flags("AK")),
        Exemplar(group_spmm, entries, SINGLE, OwnedRows("AM", cut=32), has_order=True),
        Exemplar(group_spmm, entries, SINGLE, OwnedRows("AM", cut=32, is_packed=True), has_order=True),
        Exemplar(group_spmm, {**groups, "C": (200, 96)}, HALF, None, _flags("AM", "AK", sum_dtype=SINGLE)),
        Exemplar(group_max, groups, SINGLE, rows, _flags("AK", wants_winners=True)),
        Exemplar(
            "C[F[p],n] = max(X[P[p],n])",
            {"F": (300,), "P": (300,), "X": (300, 96), "": (200, 96)},
            SINGLE,
            OwnedRows("F", is_whole=True, counted_by="P"),
            _flags(wants_winners=True),
        ),
        Exemplar(group_max, groups, HALF, rows, _flags("AK")),
        Exemplar("C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]", blocks, HALF, rows, has_order=True),
        Exemplar(
            "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]",
            {**pairs, "AV": (900, 32, 32), "B": (128, 32, 4096), "": (128, 32, 4096)},
            HALF,
            OwnedRows("AM", "AT"),
            _flags("AS"),
            has_order=True,
        ),
        Exemplar(
            "Y[t,WO[WT[p]],o] += X[t,WI[p],i] * WV[WS[p],o,i]",
            {**dict.fromkeys(("WT", "WS", "WI"), (200,)), "WO": (32,), "WV": (200, 128, 128), "X": (4096, 32, 128)}
            | {"": (4096, 32, 128)},
            HALF,
            OwnedRows("WO", "WT"),
            has_order=True,
        ),
        Exemplar(
            "dAV[AS[p,q],i,j] += dC[n,AM[p],i] * B[n,AK[p,q],j]",
            {"AS": (300, 8), "AM": (300,), "AK": (300, 8), "dC": (1024, 128, 32), "B": (1024, 128, 32)}
            | {"": (2200, 32, 32)},
            HALF,
            WrittenOnce("AS"),
            _flags("AS", "AK"),
        ),
        Exemplar(
            "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]",
            {"MX": (900, 64), "MY": (900, 64), "MZ": (900,), "In": (9000, 64), "W": (27, 64, 96), "": (9000, 96)},
            HALF,
            flags=_flags("MX", "MY"),
        ),
        Exemplar(
            "Z[b,ROW[TILE[p],i],w] += CG[p,i,j,k] * X[b,CGJ[p,j],u] * Y[b,CGK[p,k]] * W[b,CGL[p],u,w]",
            {"ROW": (4, 8), "TILE": (23,), "CGJ": (23, 8), "CGK": (23, 8), "CGL": (23,), "CG": (23, 8, 8, 8)}
            | {"X": (4000, 16, 32), "Y": (4000, 16), "W": (4000, 23, 32, 32), "": (4000, 16, 32)},
            SINGLE,
            OwnedRows("ROW", "TILE"),
            _flags("ROW", "CGJ", "CGK"),
        ),
        Exemplar(
            "Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,CGL[p],u,w]",
            {**dict.fromkeys(("CGI", "CGJ", "CGK", "CGV"), (40, 16)), "CGL": (40,), "X": (4000, 16, 32)}
            | {"Y": (4000, 16), "W": (4000, 20, 32, 32), "": (4000, 16, 32)},
            HALF,
            flags=_flags("CGI", "CGJ", "CGK"),
        ),
        Exemplar(
            "C[b,R[i,w]] += V[i,r] * A[b,L[I[i,r],u]] * B[b,I[i,r],u,w]",
            {"R": (2, 20), "V": (2, 2), "L": (3, 24), "I": (2, 2), "A": (4000, 72), "B": (4000, 3, 24, 20)}
            | {"": (4000, 40)},
            SINGLE,
            columns_of_parts,
        ),
        Exemplar("C[i] += A[k,i,j]", {"A": (5000, 3, 3)}, SINGLE),
        Exemplar("C[()] += A[i,j] * B[i,j]", dict.fromkeys("AB", (3001, 33))),
        Exemplar("C[()] = max(A[i,j,k])", {"A": (301, 33, 7)}, SINGLE),
        Exemplar("C[j] += A[i,j]", {"A": (3001, 33), "C": (33,)}),
        Exemplar("C[E[p]] += A[p]", {"A": (10_000,), "E": (10_000,), "": (30,)}, SINGLE),
        Exemplar("C[i] += 2", {"C": (50,)}, SINGLE),
        Exemplar("C[k,j,i] = A[i,j,k]", {"A": (70, 9, 90)}, SINGLE),
        Exemplar("C[b,i,j] = A[b,i] * B[b,j]", {"A": (300, 7), "B": (300, 99)}, HALF),
        Exemplar("C[P[q],n] += A[q,n]", {"P": (300,), "A": (300, 33), "": (50, 33)}, SINGLE),
        Exemplar("C[q,n] = A[P[q],n]", {"P": (300,), "A": (300, 40)}, HALF),
        Exemplar("C[q,n] = A[P[q],n]", {"P": (900_000,), "A": (300, 41)}, HALF),
        Exemplar("C[e,h] += A[P[e],h,d] * B[e,h,d]", {"P": (300,), "A": (90, 3, 11), "B": (300, 3, 11)}, SINGLE),
        Exemplar(
            "C[AM[e],h,d] += A[e,h] * B[P[e],h,d]",
            {"AM": (300,), "P": (300,), "A": (300, 3), "B": (90, 3, 11), "": (50, 3, 11)},
            SINGLE,
            rows,
        ),
        Exemplar(
            "C[P[e],h,d] += A[e,h] * B[Q[e],h,d]",
            {"P": (300,), "Q": (300,), "A": (300, 3), "B": (90, 3, 11), "": (50, 3, 11)},
            SINGLE,
        ),
        Exemplar("C[i] = min(0.5 * A[i,E[k]])", {"A": (100_000, 30_000), "E": (20,)}, SINGLE, flags=_flags("E")),
        Exemplar(
            "C[P[q],n] += A[q,n]", {"P": (3,), "A": (3, 70), "": (3, 70)}, SINGLE, ConstantTables({"P": [2, 0, 1]})
        ),
        Exemplar("Z[b,i,u] += V[i,q] * X[b,I[i,q],u]", {"V": (3, 2), "I": (3, 2), "X": (500, 4, 32)}, SINGLE, table),
        Exemplar(
            "Z[D[b],i,u] += V[i,q] * X[P[b],I[i,q],u]",
            {"V": (3, 2), "I": (3, 2), "D": (500,), "P": (500,), "X": (500, 4, 32), "": (50, 3, 32)},
            SINGLE,
            table,
            _flags("P"),
        ),
        Exemplar(
            "Z[b,i,w] += V[i,q] * X[b,I[i,q],u] * W[b,u,w]",
            {"V": (3, 2), "I": (3, 2), "X": (500, 4, 16), "W": (500, 16, 16)},
            SINGLE,
            table,
        ),
    )


EXEMPLARS = _exemplars()
