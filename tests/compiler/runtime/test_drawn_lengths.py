"""Calls of drawn lengths and kinds, one after the other: each is right whatever plans those before it have left behind.

Between two calls everything may change that a plan could rest on: lengths and their classes, which of them are equal,
layouts, types, who wants gradients, settings, padding, and what index tensors hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from process_caches import forget
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.language.errors import IndexRangeError
from insum_ops.compiler.routes import choice
from insum_ops.formats import COO, GroupCOO

pytestmark = pytest.mark.every_route

CALLS = 16 if IS_INTERPRETED else 60
COLUMNS = 4
# none, one, short, where classes begin and end, primes, powers of two, and what kernels know a divisor of
LENGTHS = (0, 1, 2, 17, 63, 64, 65, 67, 127, 128, 129, 130, 131, 144, 160, 176, 192, 211, 240, 251, 255, 256, 257, 263)
FAMILIES = ((80, 96, 112), range(65, 129), (80, 96, 97, 111, 112, 113), range(120, 140))  # of one sequence of calls
SOURCE_LENGTHS = (1, 7, 64, 66, 67, 70, 71, 80, 96, 97, 128, 131, 144, 200)  # that positions point into


class Call(NamedTuple):
    """A statement, its operands, and what it means in float64: a function of its values, then of its positions."""

    expr: str
    size: tuple[int, ...] | None
    values: dict[str, Tensor]
    positions: dict[str, Tensor]
    reference: Callable[..., Tensor]


class Draw:
    """The numbers of one sequence of calls, most of which are of one kind, so that plans are made and used."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = Random(seed), torch.Generator().manual_seed(seed)
        self.family, self.recent = FAMILIES[seed % len(FAMILIES)], [66]
        self.least = self.one_of([-1, 0])  # of positions
        self.learns = self.one_of([False, True])

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def rarely(self) -> bool:
        return self.random.random() < 0.06

    def length(self, lengths: Sequence[int]) -> int:
        """A length of few classes, for which there are plans soon; one that came lately; or one of the list."""
        usual = self.one_of(self.family)
        found = self.one_of([usual, usual, usual, usual, self.one_of(self.recent), self.one_of(lengths)])
        found = max(found, min(lengths))
        self.recent = [*self.recent[-2:], found]
        return found

    def values(self, *shape: int, may_repeat: bool = True) -> Tensor:
        """Random numbers, rarely in a strange layout: one row may stand for all."""
        if len(shape) == 2 and self.rarely():
            return self.values(*shape[::-1], may_repeat=False).T
        if self.rarely():
            return self.values(*shape[:-1], shape[-1] + 3, may_repeat=False)[..., : shape[-1]]
        if may_repeat and self.rarely():
            return self.values(1, *shape[1:]).expand(shape)
        dtype = torch.float32 if self.rarely() else torch.float64
        return torch.randn(shape, generator=self.numbers, dtype=dtype).to(DEVICE)

    def positions(self, extent: int, *shape: int) -> Tensor:
        least, dtype = -1 - self.least if self.rarely() else self.least, torch.int64 if self.rarely() else torch.int32
        return torch.randint(least, extent, shape, generator=self.numbers).to(dtype).to(DEVICE)


def rows_of(A: Tensor, index: Tensor) -> Tensor:
    """A[index], zeros where that is -1."""
    return torch.where((index >= 0)[..., None], A[index.long().clamp(min=0)], 0.0)


def gathered(draw: Draw) -> Call:
    length, source = draw.length(LENGTHS), draw.length(SOURCE_LENGTHS)
    values, positions = {"A": draw.values(source, COLUMNS)}, {"I": draw.positions(source, length, 2)}
    return Call("C[p,n] += A[I[p,q],n]", None, values, positions, lambda A, index: rows_of(A, index).sum(1))


def started(draw: Draw) -> Call:
    """Sums begin with a tensor that is as long as the result; the other lengths may be equal to it."""
    length, source = draw.length(LENGTHS), draw.length(SOURCE_LENGTHS)
    values = {"A": draw.values(source, COLUMNS), "W": draw.values(length), "C": draw.values(length, COLUMNS)}
    reference = lambda A, W, C, index: C + rows_of(A, index) * W[:, None]
    return Call("C[p,n] += A[I[p],n] * W[p]", None, values, {"I": draw.positions(source, length)}, reference)


def scattered(draw: Draw) -> Call:
    length, rows = draw.length(LENGTHS), draw.length(SOURCE_LENGTHS)
    values, positions = {"A": draw.values(length, COLUMNS), "W": draw.values(length)}, draw.positions(rows, length)

    def reference(A: Tensor, W: Tensor, index: Tensor) -> Tensor:
        """Absent entries go to a row behind the last one."""
        places = torch.where(index < 0, rows, index.long())
        return A.new_zeros(rows + 1, COLUMNS).index_add(0, places, A * W[:, None])[:rows]

    return Call("C[I[p],n] += A[p,n] * W[p]", (rows, COLUMNS), values, {"I": positions}, reference)


def multiplied(draw: Draw) -> Call:
    rows, inner = draw.length(LENGTHS), draw.length(SOURCE_LENGTHS)
    values = {"A": draw.values(inner, rows), "B": draw.values(inner, COLUMNS), "S": draw.values(rows)}
    reference = lambda A, B, S: A.T @ B * S[:, None]
    return Call("C[m,n] += A[k,m] * B[k,n] * S[m]", None, values, {}, reference)


def extreme(draw: Draw) -> Call:
    length, source = max(draw.length(LENGTHS), 1), draw.length(SOURCE_LENGTHS)
    values = {"A": draw.values(source, COLUMNS, may_repeat=False)}  # of equal ones torch gives all a gradient
    positions = draw.positions(source, length, 2).clamp(min=0)
    reference = lambda A, index: A[index.long()].amax(1)
    return Call("C[p,n] = max(A[I[p,q],n])", None, values, {"I": positions}, reference)


def grouped(draw: Draw) -> Call:
    """Products with a weight that an index tensor chooses, which tables of its positions put in tiles."""
    length, kinds = draw.length(LENGTHS), draw.one_of([3, 3, 7])
    values = {"X": draw.values(length, 16), "W": draw.values(kinds, 16, 16)}

    def reference(X: Tensor, W: Tensor, index: Tensor) -> Tensor:
        chosen = W[index.long().clamp(min=0)]
        return torch.where((index >= 0)[:, None], torch.einsum("pc,pcm->pm", X, chosen), 0.0)

    return Call("Y[p,m] += X[p,c] * W[E[p],c,m]", None, values, {"E": draw.positions(kinds, length)}, reference)


def summed_products(draw: Draw) -> Call:
    """Products of rows, added up by an index tensor: the weight's gradient of `grouped`."""
    length, kinds = draw.length(LENGTHS), draw.one_of([3, 3, 7])
    values, index = {"X": draw.values(length, 16), "Z": draw.values(length, 16)}, draw.positions(kinds, length)

    def reference(X: Tensor, Z: Tensor, index: Tensor) -> Tensor:
        places = torch.where(index < 0, kinds, index.long())
        return X.new_zeros(kinds + 1, 16, 16).index_add(0, places, X[:, :, None] * Z[:, None])[:kinds]

    return Call("Y[E[p],c,m] += X[p,c] * Z[p,m]", (kinds, 16, 16), values, {"E": index}, reference)


def sparse(draw: Draw) -> Call:
    """A format of a pattern that is new, over rows that are not."""
    rows, source = draw.length(LENGTHS[1:]), draw.length(SOURCE_LENGTHS)
    count = draw.random.randint(1, 200)
    coords = torch.stack([torch.randint(0, size, (count,), generator=draw.numbers) for size in (rows, source)])
    numbers = torch.randn(count, generator=draw.numbers, dtype=torch.float64).to(DEVICE)
    form = draw.one_of([COO, GroupCOO]).from_coo(coords.to(DEVICE), numbers, (rows, source))
    values = {"B": draw.values(source, COLUMNS)}
    dense = form.to_dense()
    return Call("C[m,n] += A[m,k] * B[k,n]", None, values, {"A": form}, lambda B, _: dense @ B)


KINDS = {"gathered": gathered, "started": started, "scattered": scattered, "multiplied": multiplied}
KINDS |= {"extreme": extreme, "sparse": sparse, "grouped": grouped, "summed_products": summed_products}


def check(draw: Draw, call: Call) -> None:
    """A call is right, and so are the gradients of those of its values that want one."""
    learning = [name for name in call.values if draw.learns is not draw.rarely()]
    values = {name: tensor.detach().requires_grad_(name in learning) for name, tensor in call.values.items()}
    torch.use_deterministic_algorithms(draw.rarely())
    try:
        with torch.set_grad_enabled(not draw.rarely()):
            found = insum(call.expr, size=call.size, **values, **call.positions)
        wide = {name: tensor.detach().double().requires_grad_(name in learning) for name, tensor in values.items()}
        expected = call.reference(*wide.values(), *call.positions.values())
        assert_matches(found, expected)
        if found.requires_grad:
            upstream = torch.randn(expected.shape, generator=draw.numbers, dtype=found.dtype).to(DEVICE)
            leaves = [values[name] for name in learning]
            grads = torch.autograd.grad(found, leaves, upstream)
            wanted = torch.autograd.grad(expected, [wide[name] for name in learning], upstream.double())
            for one, right in zip(grads, wanted, strict=True):
                assert_matches(one / 16, right / 16)
    finally:
        torch.use_deterministic_algorithms(False)


def check_changes(draw: Draw, call: Call) -> None:
    """After a change in place of its positions a call is right again, and one past the end is refused."""
    for name, index in call.positions.items():
        if isinstance(index, Tensor) and index.numel() > 1 and draw.rarely():
            index.copy_(index.flip(0))
            check(draw, call)
            beyond = index.clone()
            beyond.view(-1)[-1] = 10_000
            with pytest.raises(IndexRangeError, match="is 10000, outside"):
                insum(call.expr, size=call.size, **call.values, **{**call.positions, name: beyond})


def check_sequence(kind: str, seed: int, calls: int = CALLS) -> None:
    forget()
    draw = Draw(seed)
    for number in range(calls):
        call = KINDS[kind](draw)
        try:
            check(draw, call)
            check_changes(draw, call)
            if draw.rarely():
                check(draw, call)
        except Exception as error:
            shapes = {name: tuple(each.shape) for name, each in {**call.values, **call.positions}.items()}
            error.add_note(f"call {number} of seed {seed}: {call.expr}, size {call.size}, {shapes}")
            raise


@pytest.mark.sampled(times=1 if IS_INTERPRETED else 2)
@pytest.mark.parametrize("tuning", ["off", "default"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_right_whatever_came_before(kind, seed, tuning, monkeypatch):
    if tuning == "off":
        monkeypatch.setenv("INSUM_TUNE", "off")
    check_sequence(kind, seed)


@pytest.mark.sampled(times=1 if IS_INTERPRETED else 2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["grouped", "summed_products"])
def test_calls_by_groups_are_right_whatever_came_before(kind, seed, monkeypatch):
    """How many tiles there are follows from lengths, and may be equal for different ones."""
    monkeypatch.setenv("INSUM_TUNE", "off")
    monkeypatch.setattr(choice, "CLEAR", 0.0)  # wherever there are ways to group products
    check_sequence(kind, seed)
