"""Random statements, run again and again over other tensors: values and gradients beside plain torch in float64.

    python tests/fuzz_values.py --seconds 60 --seed 0 --jobs 2

The statements are those of tests/cross/fuzz.py and a few families more. Each is called with other numbers, positions
that are sorted or not, with and without -1, changed where they lie, with other lengths, with views whose memory begins
anywhere, with other leaves that learn: what a launch plan, a fact or a tuned route of an earlier call must not outlive.
Where no position reads a factor lies NaN or Inf at times, which no result and no gradient may hold.

A kernel that reads outside its memory takes its process along, so calls are made in processes of their own: one that
dies or hangs is a finding, which names the statement, and another one goes on after it. The exit status is 1 then, and
where a result is wrong or an error is not one of this library's. `--one SEED NUMBER` runs one of the statements again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "cross"))

import fast_interpreter
import torch
from error_bounds import Precision, Sums, error_bound, statement_in_torch
from fuzz import _sizes, samples
from reference import Read, read_sentence
from statements import DEVICE, IS_INTERPRETED, base_shape, view
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.language import Access
from insum_ops.compiler.language.errors import InsumError
from insum_ops.compiler.language.parse import parse

FAMILIES = (  # what one call of an application reads; squares and other repeated factors; scatters; odd rows
    "C[i,j] += A[i,k] * B[k,j]",
    "C[j,i] += A[i,k] * B[j,k]",
    "C[b,i,j] += A[b,i,k] * B[b,k,j]",
    "C[p,n] += A[p,k] * W[S[p],k,n]",
    "C[R[p],n] += A[p,k] * W[S[p],k,n]",
    "C[R[p],n] += A[p] * X[T[p],k] * W[S[p],k,n]",
    "C[M[p],n] += A[p] * B[K[p],n]",
    "C[M[p],n] += B[K[p],n]",
    "C[M[p]] += A[p]",
    "C[M[p],n] += A[p,q] * B[K[p,q],n]",
    "C[m,n] += A[m,q] * B[K[m,q],n]",
    "dA[p] += D[M[p],n] * B[K[p],n]",
    "C[M[p],h,n] += A[p,h] * B[K[p],h,n]",
    "C[i] += X[i,k] * X[i,k]",
    "C[i,j] += X[i,k] * X[j,k]",
    "C[i,k] += X[i,k] * X[i,k] * X[i,k]",
    "C[i] += X[i,j] * W[j,k] * X[i,k]",
    "C[p] += X[S[p],k] * X[T[p],k]",
    "C[S[p],k] += X[S[p],k] * X[T[p],k] * E[p]",
    "C[b,w] += W[u,v,w] * X[b,u] * Y[b,v]",
    "C[b,w] += W[b,u,v,w] * X[b,u] * Y[b,v]",
    "C[M[e],k,u] += G[k,i,j] * X[K[e],i,u] * Y[e,j] * R[e,u]",
    "C[M[e],Z[p],u] += V[p] * X[K[e],I[p],u] * Y[e,J[p]] * R[e,L[p],u]",
    "Out[MX[p,q],m] += In[MY[p,q],c] * Weight[MZ[p],c,m]",
    "Out[x,m] += In[N[x,z],c] * Weight[z,c,m]",
    "dW[MZ[p],c,m] += In[MY[p,q],c] * dOut[MX[p,q],m]",
    "C[i,j] += A[j,i]",
    "C[P[i],j] = A[i,j]",
    "C[i,j] += A[P[i],Q[j]]",
    "C[i] += A[i,k]",
    "C[k] += A[i,k]",
    "C[i,k] = max(A[i,j] * B[j,k])",
    "C[M[p],n] = max(A[p,n])",
    "C[M[p],n] = min(A[p] * B[K[p],n])",
)
BIG = (3, 16, 520, 1003, 1999, 2041, 3001)  # where matrices are multiplied on a GPU, as they lie or over aligned copies
MOST_POINTS_OF_PRODUCTS = 1.5e10
MOST_POINTS = 3e7 if DEVICE.startswith("cuda") else 2e4 if IS_INTERPRETED else 3e5
CALLS = 8
HUNG = 60.0  # seconds for one statement, after which nothing is begun
NO_ENTRY = (-1, -1, -1, -7, -100, -65_534, -(2**31))  # any negative position is none
ORDERS = ("random", "sorted", "sorted", "padded", "padded and sorted", "equal", "reversed")
LEFT = ("contiguous", "contiguous", "contiguous", "transposed", "strided", "expanded", "shifted", "wide")


@dataclass(frozen=True)
class Subject:
    """A statement at sizes of which the long ones may vary, and what its tensors are made of."""

    expr: str
    dtypes: Mapping[str, torch.dtype]
    settled: Mapping[object, int]
    settings: Mapping[str, Any]
    is_seeded: bool


def subjects(seed: int) -> Iterator[Subject]:
    """Without end; the same ones for the same seed. A pattern in INSUM_FUZZ_ONLY leaves some families alone."""
    random, only = Random(seed), os.environ.get("INSUM_FUZZ_ONLY", "")
    for again in range(1000):
        drawn = [sample.expr for sample in samples(seed + 7919 * again, 60)] if again or seed % 4 > 1 else []
        random.shuffle(drawn)
        known = random.sample(FAMILIES, len(FAMILIES))
        if only:
            known, drawn = [expr for expr in known if re.search(only, expr)], []
        for at in range(max(len(drawn), len(known))):
            for chosen in (known[at : at + 1], drawn[at : at + 1]):
                for expr in chosen:
                    subject = _subject(expr, random)
                    if subject is not None:
                        yield subject


def _subject(expr: str, random: Random) -> Subject | None:
    statement = parse(expr)
    if not statement.accesses:
        return None
    is_product = not statement.index_names and len(statement.accesses) > 1 and statement.is_sum
    is_large = is_product and DEVICE.startswith("cuda") and expr in FAMILIES and random.random() < 0.6
    most = MOST_POINTS_OF_PRODUCTS if is_large else MOST_POINTS
    for _ in range(20):
        settled: dict[object, int] = {}
        shapes = _sizes(statement, random, settled)
        for root, length in settled.items():
            if random.random() < 0.35:  # odd ones, among them such as no tile divides
                settled[root] = max(1, length + random.choice((-1, 1, 3)), *_least(statement, root))
        if most > MOST_POINTS:
            settled = {root: random.choice(BIG) for root in settled}
        shapes = _sizes(statement, random, settled)
        if _points(expr, shapes) <= most and max(map(math.prod, shapes.values())) <= 2e7:
            break
    else:
        return None
    menu = (torch.float16, torch.bfloat16, torch.float32, torch.float32, torch.float64)
    one = random.choice(menu)
    dtypes = {}
    for name in shapes:
        is_index = name in statement.index_names
        mixed = random.choice(menu) if random.random() < 0.04 else one
        dtypes[name] = random.choice((torch.int32, torch.int64)) if is_index else mixed
    settings = {
        "precision": random.choice(("highest", "highest", "high")),
        "deterministic": random.random() < 0.12,
        "rounds": random.random() < 0.5,
    }
    return Subject(expr, dtypes, settled, settings, statement.is_sum and random.random() < 0.2)


def _least(statement: Any, root: object) -> list[int]:
    """Constant positions ask for some length: none is shortened then."""
    return [4] if any(text.isdigit() for text in str(statement).replace("[", ",").replace("]", ",").split(",")) else []


def _points(expr: str, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """How many numbers the reference holds at once, nearly: the gathered factors, and their product."""
    extents: dict[str, int] = {}
    sentence = read_sentence(expr)

    def note(read: Read, shape: tuple[int, ...]) -> None:
        for index, length in zip(read.indices, shape):
            if isinstance(index, Read):
                note(index, shapes[index.name])
            elif isinstance(index, str):
                extents[index] = length

    note(sentence.output, shapes[""])
    for factor in sentence.factors:
        if isinstance(factor, Read):
            note(factor, shapes[factor.name])
    return float(math.prod(extents.values()))


class Calls:
    """The calls of one subject, one after the other."""

    def __init__(self, subject: Subject, random: Random) -> None:
        self.subject, self.random = subject, random
        self.statement = parse(subject.expr)
        self.generator = torch.Generator().manual_seed(random.randrange(2**31))
        self.told: list[str] = []
        self.targets: dict[str, int] = {}
        self.settled = dict(subject.settled)
        self.layouts = {name: random.choice(LEFT) for name in subject.dtypes}
        self.tensors: dict[str, Tensor] = {}
        self.unread: dict[str, Tensor] = {}  # by name, where NaN or Inf lies
        self.size: tuple[int, ...] = ()

    def draw(self, is_longer: bool) -> None:
        """New tensors; if `is_longer`, with other lengths where they are long."""
        if is_longer:
            fresh = {}
            for root, length in self.settled.items():
                fresh[root] = length if length <= 64 else max(65, int(length * self.random.uniform(0.6, 1.3)))
            self.settled = fresh
        shapes = _sizes(self.statement, self.random, dict(self.settled))
        self.size = shapes.pop("")
        self.tensors = {}
        limits: dict[str, int] = {}
        for pointing in self.statement.pointings:
            limit = (self.size if pointing.is_output else shapes[pointing.into])[pointing.dim]
            limits[pointing.name] = min(limits.get(pointing.name, limit), limit)
        self.targets = limits
        if self.subject.is_seeded:
            shapes[self.statement.output.name] = self.size
        for name, shape in shapes.items():
            layout = self.layouts.setdefault(name, "contiguous")
            if name in limits:
                values = self.positions(shape, limits[name], self.random.choice(ORDERS))
                layout = layout if layout != "expanded" else "contiguous"
            else:
                values = 2 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 1
            dtype = self.subject.dtypes.get(name) or self.values_dtype
            self.tensors[name] = self.laid(values.to(dtype), layout)
        self.unread = {}
        if self.random.random() < 0.3:
            self.spoil()

    def spoil(self) -> None:
        """Put NaN or Inf where positions along a dimension read no factor."""
        self.told.append("spoilt")
        read: dict[tuple[str, int], set[str]] = {}
        for pointing in self.statement.pointings:
            if not pointing.is_output and pointing.into not in self.targets:
                read.setdefault((pointing.into, pointing.dim), set()).add(pointing.name)
        for (name, dim), indices in read.items():
            tensor = self.tensors[name]
            own = [access.indices[dim] for access in self.statement.accesses if access.name == name]
            if (
                0 in tensor.stride()
                or name == self.statement.output.name
                or not all(isinstance(index, Access) for index in own)
            ):
                continue
            positions = torch.cat([self.tensors[index].long().flatten() for index in indices])
            is_read = torch.zeros(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
            is_read[positions[positions >= 0]] = True
            where = (~is_read).view([-1 if own == dim else 1 for own in range(tensor.ndim)]).expand_as(tensor)
            tensor.masked_fill_(where, self.random.choice((math.nan, math.inf)))
            self.unread[name] = where | self.unread.get(name, torch.zeros_like(where))

    def wide(self) -> dict[str, Tensor]:
        """The tensors in float64, with 0 where no position reads them."""
        values = {name: tensor.detach() for name, tensor in self.tensors.items()}
        values |= {name: values[name].masked_fill(where, 0) for name, where in self.unread.items()}
        return {name: value.double() if value.is_floating_point() else value for name, value in values.items()}

    @property
    def values_dtype(self) -> torch.dtype:
        return next(dtype for dtype in self.subject.dtypes.values() if dtype.is_floating_point)

    def positions(self, shape: tuple[int, ...], limit: int, order: str) -> Tensor:
        self.told.append(order)
        index = torch.randint(0, max(limit, 1), shape, generator=self.generator)
        if order == "equal":
            index.fill_(self.random.randrange(max(limit, 1)))
        if "padded" in order or limit == 0:
            is_hidden = torch.rand(shape, generator=self.generator) < (0.2 if limit else 2.0)
            index[is_hidden] = self.random.choice(NO_ENTRY)
        if "sorted" in order and index.ndim:
            index = index.flatten().sort().values.view(shape)
        if order == "reversed" and index.ndim:
            index = index.flatten().sort(descending=True).values.view(shape)
        return index

    def laid(self, values: Tensor, layout: str) -> Tensor:
        """The numbers on the device, in memory that lies as a layout says."""
        shape = tuple(values.shape)
        if layout in ("shifted", "wide") and shape:
            wide = (*shape[:-1], shape[-1] + 3) if layout == "wide" else shape
            memory = torch.full((1 + math.prod(wide),), 0, dtype=values.dtype, device=DEVICE)[1:].view(wide)
            seen = memory[..., : shape[-1]] if layout == "wide" else memory
        elif layout in ("shifted", "wide"):
            return values.to(DEVICE)
        else:
            memory = torch.zeros(base_shape(layout, shape), dtype=values.dtype, device=DEVICE)
            seen = view(layout, memory, shape)
            if layout == "expanded":
                memory.copy_(values[: memory.shape[0]] if shape else values)
                return seen
        seen.copy_(values)
        return seen

    def change_in_place(self) -> None:
        """Other positions and other numbers where the old ones lie."""
        for name, tensor in self.tensors.items():
            if 0 in tensor.stride() or self.random.random() < 0.4:
                continue
            with torch.no_grad():
                if name in self.targets:
                    if self.unread:
                        continue
                    order = self.random.choice(ORDERS)
                    tensor.copy_(self.positions(tuple(tensor.shape), self.targets[name], order))
                else:
                    tensor.detach().mul_(-0.5)

    def run(self) -> Iterator[str]:
        """Make all calls; yield what is wrong."""
        self.draw(False)
        self.first_shapes = {**{name: tuple(t.shape) for name, t in self.tensors.items()}, "": self.size}
        for number in range(CALLS):
            kind = (
                "first"
                if not number
                else self.random.choice(
                    ("again", "new", "new", "in place", "in place", "longer", "longer", "relaid", "settings")
                )
            )
            self.told = [kind]
            if kind in ("first", "new", "longer"):
                self.draw(kind == "longer")
            elif kind == "in place":
                self.change_in_place()
            elif kind == "relaid":
                for name in self.tensors:
                    self.layouts[name] = self.random.choice(LEFT)
                self.draw(False)
            elif kind == "settings":
                self.subject.settings["deterministic"] = not self.subject.settings["deterministic"]  # type: ignore[index]
            if self.points > 2 * max(MOST_POINTS, _points(self.subject.expr, self.first_shapes)):
                return
            yield from self.call()

    @property
    def points(self) -> float:
        return _points(self.subject.expr, {**{name: tuple(t.shape) for name, t in self.tensors.items()}, "": self.size})

    def call(self) -> Iterator[str]:
        settings = self.subject.settings
        torch.set_float32_matmul_precision(settings["precision"])
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = settings["rounds"]
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = settings["rounds"]
        values = [name for name, tensor in self.tensors.items() if tensor.is_floating_point()]
        learning = [name for name in values if self.random.random() < 0.7] if self.random.random() < 0.75 else []
        asked = self.random.sample(learning, self.random.randint(1, len(learning))) if learning else []
        is_twice = self.statement.is_sum and bool(asked) and self.random.random() < 0.15
        mode = (
            self.random.choice((torch.enable_grad, torch.no_grad, torch.inference_mode))
            if not learning
            else torch.enable_grad
        )
        self.told += [f"learning {','.join(learning)}", f"asked {','.join(asked)}", f"twice {is_twice}", mode.__name__]
        leaves = {name: self.tensors[name].detach().requires_grad_(name in learning) for name in values}
        given = dict(self.tensors)
        for name, leaf in leaves.items():
            given[name] = leaf.view_as(leaf) if self.random.random() < 0.4 else leaf
        wanted = [leaves[name] for name in asked]
        call = lambda: insum(
            self.subject.expr, **given, **({} if self.statement.output.name in given else {"size": self.size})
        )
        second: list[Tensor] = []
        torch.use_deterministic_algorithms(settings["deterministic"])
        try:
            with warnings.catch_warnings(), mode():
                warnings.simplefilter("ignore")
                result = call()
                if asked and self.random.random() < 0.2:
                    result = call()
                upstream = self.upstream(result)
                grads: list[Any] = []
                if asked and result.requires_grad:
                    how: dict[str, Any] = {"allow_unused": True, "create_graph": is_twice, "retain_graph": True}
                    grads = [*torch.autograd.grad(result, wanted, upstream, **how)]
                    if not is_twice and self.random.random() < 0.2:
                        grads = [*torch.autograd.grad(result, wanted, upstream, **how)]
                    if is_twice:
                        second = _second(grads, wanted)
        except InsumError as error:
            if settings["deterministic"]:
                self.told.append("refused")
                return
            yield f"refused: {error}"
            return
        finally:
            torch.use_deterministic_algorithms(False)
        yield from self.compared(result, upstream, dict(zip(asked, grads)), second)

    def upstream(self, result: Tensor) -> Tensor:
        kind = self.random.choice(("plain", "plain", "expanded", "transposed"))
        if kind == "expanded":
            return torch.ones((), dtype=result.dtype, device=result.device).expand(result.shape)
        drawn = (2 * torch.rand(result.shape, generator=self.generator, dtype=torch.float64) - 1).to(result.dtype)
        return self.laid(drawn, "transposed" if kind == "transposed" else "contiguous")

    def compared(
        self, result: Tensor, upstream: Tensor, grads: Mapping[str, Tensor | None], second: list[Tensor]
    ) -> Iterator[str]:
        """Yield what differs from float64, each element within the bound that its own summands set."""
        expr, names = self.subject.expr, list(grads)
        if not self.statement.is_sum:
            expected = _extreme(expr, self.wide(), self.size)
            tolerance = 4 * torch.finfo(self.coarsest).eps
            yield from _told("value", result, expected, tolerance * expected.abs().nan_to_num(0, 0, 0) + tolerance)
            return
        parts: list[list[Tensor]] = []
        for of in (lambda t: t, torch.abs, torch.ones_like):
            wide = {n: of(t) if t.is_floating_point() else t for n, t in self.wide().items()}
            leaves = [wide[name].clone().requires_grad_() for name in names]
            wide |= dict(zip(names, leaves))
            scaled = expr.replace("-1.25", "1.25").replace("-3", "3") if parts else expr  # magnitudes, and their number
            is_given = self.statement.output.name in wide
            value = statement_in_torch(scaled, wide, None if is_given else self.size)
            made: list[Any] = [None] * len(leaves)
            if leaves and value.requires_grad:
                how: dict[str, Any] = {"allow_unused": True, "create_graph": bool(second)}
                made = [*torch.autograd.grad(value, leaves, of(upstream.double()), **how)]
            twice = _second(made, leaves) if second else []
            made = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, made)]
            parts.append([each.detach() for each in (value, *made, *twice)])
        factors = len(self.statement.accesses) + 2
        told = [("value", result), *grads.items(), *[(f"second {name}", grad) for name, grad in zip(names, second)]]
        for at, (name, actual) in enumerate(told):
            sums = Sums(*[part[at] for part in parts])
            if actual is None:
                if bool((sums.value != 0).any()):
                    yield f"{name}: no gradient"
                continue
            precision = Precision("", self.coarsest, self.subject.settings["precision"])
            limit = error_bound(precision, sums, factors, 4 if at <= len(names) else 12, 2)
            if precision.is_half and (self.subject.settings["rounds"] or at > len(names)):
                limit = limit + precision.rounding * sums.terms * sums.magnitude
            yield from _told(name, actual, sums.value, limit)

    @property
    def coarsest(self) -> torch.dtype:
        dtypes = [t.dtype for t in self.tensors.values() if t.is_floating_point()]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _second(grads: list[Any], leaves: list[Tensor]) -> list[Tensor]:
    """The gradients of the sum of all gradients."""
    total = sum([grad.sum() for grad in grads if grad is not None and grad.requires_grad])
    made: list[Any] = [None] * len(leaves)
    if isinstance(total, Tensor):
        made = [*torch.autograd.grad(total, leaves, allow_unused=True)]
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, made)]


def _extreme(expr: str, tensors: Mapping[str, Tensor], size: tuple[int, ...]) -> Tensor:
    """The largest or smallest product of each place in float64, 0 where there is none."""
    sentence = read_sentence(expr)
    sign = 1.0 if sentence.reduction == "max" else -1.0
    names = list(dict.fromkeys(_index_names(sentence.output, sentence.factors)))
    left = ",".join(names)
    inner = expr[expr.index("(", expr.index("=")) + 1 : expr.rindex(")")]  # not that of an output without indices
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    ones = {n: torch.ones_like(t) if t.is_floating_point() else t for n, t in wide.items()}
    text, extents = f"Every_[{left}] = {inner}", {}
    _extents(sentence.output, tensors, extents, size)
    for factor in sentence.factors:
        if isinstance(factor, Read):
            _extents(factor, tensors, extents, None)
    every = tuple(extents[name] for name in names)
    product = statement_in_torch(text, wide, every)
    exists = statement_in_torch(f"Every_[{left}] = {_without_numbers(inner)}", ones, every) > 0
    flat = torch.zeros(every, dtype=torch.int64, device=product.device)
    for dim, index in enumerate(sentence.output.indices):
        place = _place(index, tensors, extents, names, product.device)
        exists = exists & (place >= 0)
        flat = flat * size[dim] + place.clamp_min(0)
    result = torch.full((math.prod(size),), -math.inf, dtype=torch.float64, device=product.device)
    result.scatter_reduce_(0, flat[exists], sign * product[exists], "amax")
    return torch.where(result.isinf(), 0.0, sign * result).view(size)


def _without_numbers(product: str) -> str:
    return " * ".join(part for part in product.replace(" ", "").split("*") if "[" in part)


def _index_names(output: Read, factors: Any) -> Iterator[str]:
    for read in (output, *[factor for factor in factors if isinstance(factor, Read)]):
        for index in read.indices:
            if isinstance(index, Read):
                yield from _index_names(index, ())
            elif isinstance(index, str):
                yield index


def _extents(read: Read, tensors: Mapping[str, Tensor], extents: dict[str, int], shape: Any) -> None:
    shape = tuple(tensors[read.name].shape) if shape is None else shape
    for index, length in zip(read.indices, shape):
        if isinstance(index, Read):
            _extents(index, tensors, extents, None)
        elif isinstance(index, str):
            extents[index] = length


def _place(
    index: Any, tensors: Mapping[str, Tensor], extents: Mapping[str, int], names: list[str], device: Any
) -> Tensor:
    """A position over all names."""
    if isinstance(index, int):
        return torch.tensor(index, device=device).expand([extents[name] for name in names])
    if isinstance(index, str):
        shape = [extents[name] if name == index else 1 for name in names]
        return torch.arange(extents[index], device=device).view(shape).expand([extents[name] for name in names])
    places = [_place(own, tensors, extents, names, device) for own in index.indices]
    found = tensors[index.name].long()[tuple(place.clamp_min(0) for place in places)]
    for place in places:
        found = torch.where(place < 0, -1, found)
    return found


def _told(name: str, actual: Tensor, expected: Tensor, limit: Tensor) -> Iterator[str]:
    if actual.shape != expected.shape:
        yield f"{name}: shape {list(actual.shape)} and not {list(expected.shape)}"
        return
    wrong = ~((actual.double() - expected).abs() <= limit)
    if actual.dtype == torch.float16:
        wrong &= ~(actual.isinf() & (expected.abs() > 3e4))
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        yield (
            f"{name} {actual.dtype}: {int(wrong.sum())} of {actual.numel()} wrong; at {where} "
            f"{actual[where].item():.6g} and not {expected[where].item():.6g}, allowed {limit[where].item():.2g}"
        )


def work(seed: int, start: int, end: float) -> None:
    """Run the subjects of a seed from number `start` on, and tell of each."""
    tell = lambda number, what, **words: print(json.dumps({"number": number, "what": what, **words}), flush=True)
    for number, subject in enumerate(subjects(seed)):
        if time.time() > end:
            break
        if number < start:
            continue
        tell(number, "begin", expr=subject.expr)
        calls = Calls(subject, Random(seed * 100_003 + number))
        try:
            problem = next(calls.run(), "")
            if problem:
                tell(number, "wrong", problem=f"{problem}\n    {describe(calls)}")
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        except Exception as error:
            lines = [*traceback.format_exc().strip().splitlines()[-14:], describe(calls)]
            tell(number, "raised", problem=f"{type(error).__name__}: {str(error)[:600]}\n" + "\n    ".join(lines))
            if "CUDA" in str(error):
                raise SystemExit(3) from error
        tell(number, "done")


def describe(calls: Calls) -> str:
    subject = calls.subject
    tensors = ", ".join(
        f"{n} {str(t.dtype)[6:]}{list(t.shape)} by {list(t.stride())}+{t.storage_offset()}"
        for n, t in calls.tensors.items()
    )
    return f"{subject.expr} | size {list(calls.size)} | {tensors} | {dict(subject.settings)} | {calls.told}"


class Report:
    """What came of all workers."""

    def __init__(self) -> None:
        self.counts, self.findings, self.lock = Counter[str](), list[str](), threading.Lock()

    def add(self, kind: str, finding: str = "") -> None:
        with self.lock:
            self.counts[kind] += 1
            self.findings += [finding] if finding else []


def follow(report: Report, seed: int, tune: str, end: float) -> None:
    """Run a worker until the end; where it dies, another one goes on after the statement that it died of."""
    start = 0
    while time.time() < end:
        with tempfile.TemporaryDirectory(prefix="insum-fuzz-") as folder, open(Path(folder) / "errors", "w+") as errors:
            caches = {"INSUM_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            variables = {**os.environ, "INSUM_TUNE": tune, "OMP_NUM_THREADS": "1", **caches}
            command = [sys.executable, __file__, "--worker", str(seed), str(start), str(end)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables)
            timer = threading.Timer(end + HUNG - time.time(), process.kill)
            timer.start()
            told: dict[str, Any] = {"what": "started", "number": start - 1}
            assert process.stdout is not None
            for line in process.stdout:
                told = json.loads(line)
                where = f"[{tune}, --one {seed} {told['number']}]"
                if told["what"] == "done":
                    report.add(f"statements, tuning {tune}")
                elif told["what"] != "begin":
                    report.add(told["what"], f"{where} {told['problem']}")
            code = process.wait()
            timer.cancel()
            errors.seek(0)
            if code:
                kind = "hung" if time.time() > end + HUNG - 1 else "dead"
                last = errors.read()[-700:]
                report.add(kind, f"[{tune}, --one {seed} {told['number']}] {kind}, {code}: {told.get('expr')}\n{last}")
            start = told["number"] + 1


def run(seed: int, jobs: int, seconds: float) -> Report:
    """Run workers for some seconds, half of them with tuning; return what came of it."""
    report, end = Report(), time.time() + seconds
    threads = [
        threading.Thread(target=follow, args=(report, seed * 1000 + job, ("off", "default")[job % 2], end))
        for job in range(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return report


def main() -> int:
    if IS_INTERPRETED:
        fast_interpreter.install()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", nargs=2, type=int, metavar=("SEED", "NUMBER"), help="run one statement here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        seed, start, end = options.worker
        work(int(seed), int(start), float(end))
        return 0
    if options.one:
        seed, number = options.one
        subject = next(subject for at, subject in enumerate(subjects(seed)) if at == number)
        calls = Calls(subject, Random(seed * 100_003 + number))
        for problem in calls.run():
            print(problem, "\n   ", describe(calls))
        return 0
    report = run(options.seed, options.jobs, options.seconds)
    for finding in report.findings:
        print(finding)
    print(f"{dict(report.counts)}, seed {options.seed}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
