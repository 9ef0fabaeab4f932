"""Problems for code generation, with tensors that have a shape and nothing else: no GPU, no values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from statements import IS_INTERPRETED
from torch import Tensor

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.tuning.problem import Candidate, Problem
from insum_ops.formats.facts import Fact, OwnedRows, WrittenOnce


def values(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def positions(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def problem(
    expr: str,
    tensors: Mapping[str, Tensor],
    size: Sequence[int] | None = None,
    fact: Fact | None = None,
    flags: Flags = Flags(),  # noqa: B008 - frozen
    deterministic: bool = False,
) -> Problem:
    bound = bind(parse(expr), dict(tensors), size)
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    strides[""] = values(*bound.size).stride()
    if bound.is_seeded:
        strides[" seed"] = strides[bound.statement.output.name]
    told = None if fact is None else fact.without_tensors()
    return Problem(bound, strides, tuple(tensors), told, flags, deterministic)


def told_apart(ways: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates that differ in more than warps and stages, which mean nothing to Triton's interpreter."""
    if not IS_INTERPRETED:
        return list(ways)
    alike = lambda way: replace(way, config=replace(way.config, num_warps=1, num_stages=1))
    return list({str(alike(way).choices): way for way in ways}.values())


@dataclass(frozen=True)
class Application:
    """A statement of the paper at a size of the paper's, the scatter it should get and tiles to print it with."""

    expr: str
    tensors: dict[str, Tensor]
    size: tuple[int, ...] | None
    fact: Fact | None
    strategy: str
    uses_dot: bool
    blocks: tuple[int, ...]  # of each tile axis, in the schedule's order
    padded: frozenset[str] = field(default=frozenset())
    wants_winners: bool = False
    rows: int = 1  # to a program, one after another

    def problem(self, flags: Flags | None = None) -> Problem:
        flags = flags or Flags(padded=self.padded, wants_winners=self.wants_winners)
        return problem(self.expr, self.tensors, self.size, self.fact, flags)


def _pairs() -> dict[str, Tensor]:
    """Rows of 32 x 32 blocks in pairs."""
    indices = {"AM": positions(64, 2), "AT": positions(700), "AS": positions(700, 2), "AK": positions(700)}
    return {**indices, "AV": values(900, 32, 32), "B": values(128, 32, 1024)}


def _group_spmm() -> dict[str, Tensor]:
    return {"AM": positions(3000), "AK": positions(3000, 8), "AV": values(3000, 8), "B": values(2000, 128)}


GROUP_SPMM = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
GROUP_MAX = "C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])"
CONVOLUTION_TILED = "Out[ROW[TILE[p],q],m] += In[NBR[p,q],c] * Weight[TAP[p],c,m]"
PATH_TABLES = "Z[b,ROW[TILE[p],i],w] += CG[p,i,j,k] * X[b,CGJ[p,j],u] * Y[b,CGK[p,k]] * W[b,CGL[p],u,w]"
APPLICATIONS = {
    "gather_matmul_scatter": Application(
        "C[D[y],x] += A[y,E[r]] * B[r,x]",
        {"D": positions(1000), "E": positions(300), "A": values(1000, 700), "B": values(300, 256)},
        (512, 256),
        None,
        "atomic",
        True,
        (64, 32, 128),
    ),
    "group_spmm_owner": Application(
        GROUP_SPMM, _group_spmm(), (2000, 128), OwnedRows("AM"), "owner", False, (4, 128), frozenset({"AK"})
    ),
    "group_spmm_store_or_atomic": Application(
        GROUP_SPMM, _group_spmm(), (2000, 128), OwnedRows("AM"), "store-or-atomic", False, (4, 128), frozenset({"AK"})
    ),
    "entry_spmm_pieces": Application(
        GROUP_SPMM,
        {"AM": positions(9000), "AK": positions(9000, 1), "AV": values(9000, 1), "B": values(2000, 128)},
        (2000, 128),
        OwnedRows("AM", cut=32),
        "store-or-atomic",
        False,
        (4, 128),
    ),
    "entry_spmm_packed": Application(
        f"{GROUP_SPMM} * F[AM[p]]",
        {"AM": positions(9000), "AK": positions(9000, 1), "AV": values(9000, 1), "B": values(2000, 128)}
        | {"F": values(2000)},
        (2000, 128),
        OwnedRows("AM", cut=32, is_packed=True),
        "store-or-atomic",
        False,
        (2, 128),
    ),
    "group_max_owner": Application(
        GROUP_MAX, _group_spmm(), (2000, 128), OwnedRows("AM"), "owner", False, (4, 128), frozenset({"AK"})
    ),
    "group_max_winners_owner": Application(
        GROUP_MAX, _group_spmm(), (2000, 128), OwnedRows("AM"), "owner", False, (4, 128), frozenset({"AK"}), True
    ),
    "block_spmm_owner": Application(
        "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]",
        {"AM": positions(900), "AK": positions(900), "AV": values(900, 32, 32), "B": values(128, 32, 1024)},
        (128, 32, 1024),
        OwnedRows("AM"),
        "owner",
        True,
        (32, 32, 128),
    ),
    "block_spmm_together": Application(
        "C[AM[AT[p],q],bm,n] += AV[AS[p,q],bm,bk] * B[AK[p],bk,n]",
        _pairs(),
        (128, 32, 1024),
        OwnedRows("AM", "AT"),
        "owner",
        True,
        (64, 32, 256),
        frozenset({"AS"}),
    ),
    "block_spmm_together_in_turn": Application(
        "C[AM[AT[p],q],bm,n] += AV[AS[p,q],bm,bk] * B[AK[p],bk,n]",
        _pairs(),
        (128, 32, 1024),
        OwnedRows("AM", "AT"),
        "owner",
        True,
        (64, 32, 512),
        frozenset({"AS"}),
        rows=4,
    ),
    "block_linear_in_turn": Application(
        "Y[t,WO[WT[p]],bo] += X[t,WI[p],bi] * WV[WS[p],bo,bi]",
        {
            "WO": positions(32),
            "WT": positions(200),
            "WS": positions(200),
            "WI": positions(200),
            "WV": values(200, 128, 128),
            "X": values(4096, 32, 128),
        },
        (4096, 32, 128),
        OwnedRows("WO", "WT"),
        "owner",
        True,
        (256, 64, 128),
        rows=4,
    ),
    "block_gradient_store_once": Application(
        "dAV[AS[p,q],bm,bk] += dC[n,AM[p],bm] * B[n,AK[p,q],bk]",
        {
            "AS": positions(300, 8),
            "AM": positions(300),
            "AK": positions(300, 8),
            "dC": values(1024, 128, 32),
            "B": values(1024, 128, 32),
        },
        (2200, 32, 32),
        WrittenOnce("AS"),
        "store-once",
        True,
        (32, 64, 128),
        frozenset({"AS", "AK"}),
    ),
    "convolution_atomic": Application(
        "Out[MAPX[p,q],m] += In[MAPY[p,q],c] * Weight[MAPZ[p],c,m]",
        {
            "MAPX": positions(900, 64),
            "MAPY": positions(900, 64),
            "MAPZ": positions(900),
            "In": values(10000, 64),
            "Weight": values(27, 64, 96),
        },
        (10000, 96),
        None,
        "atomic",
        True,
        (64, 32, 64),
        frozenset({"MAPX", "MAPY"}),
    ),
    "convolution_tiled": Application(
        CONVOLUTION_TILED,
        {
            "ROW": positions(79, 128),
            "TILE": positions(1100),
            "NBR": positions(1100, 128),
            "TAP": positions(1100),
            "In": values(10000, 64),
            "Weight": values(27, 64, 96),
        },
        (10000, 96),
        OwnedRows("ROW", "TILE"),
        "owner",
        True,
        (64, 32, 64),
        frozenset({"ROW", "NBR"}),
    ),
    "tensor_product_tables": Application(
        PATH_TABLES,
        {
            "ROW": positions(4, 8),
            "TILE": positions(23),
            "CGJ": positions(23, 8),
            "CGK": positions(23, 8),
            "CGL": positions(23),
            "CG": values(23, 8, 8, 8),
            "X": values(4000, 16, 32),
            "Y": values(4000, 16),
            "W": values(4000, 23, 32, 32),
        },
        (4000, 16, 32),
        OwnedRows("ROW", "TILE"),
        "owner",
        True,
        (8, 8, 8, 32, 32),
        frozenset({"ROW", "CGJ", "CGK"}),
    ),
    "tensor_product_on_chip": Application(
        "Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,CGL[p],u,w]",
        {
            "CGI": positions(40, 16),
            "CGJ": positions(40, 16),
            "CGK": positions(40, 16),
            "CGL": positions(40),
            "CGV": values(40, 16),
            "X": values(4000, 16, 32),
            "Y": values(4000, 16),
            "W": values(4000, 20, 32, 32),
        },
        (4000, 16, 32),
        None,
        "on-chip",
        True,
        (16, 16, 32, 32),
        frozenset({"CGI", "CGJ", "CGK"}),
    ),
}
