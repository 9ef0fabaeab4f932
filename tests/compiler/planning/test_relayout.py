"""Tensors that are copied so that rows of them are picked instead of elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.binding import bind
from insum_ops.compiler.language import parse
from insum_ops.compiler.planning.device import H200
from insum_ops.compiler.planning.relayout import Split, relaid

pytestmark = pytest.mark.cpu

LONG = 1_000_000  # positions, beside which a copy is nothing


def steps_of(text: str, size: tuple[int, ...] | None = None, **tensors: Tensor) -> Split | None:
    """The steps for tensors on the meta device that have as many positions as tensors are long."""
    return relaid(bind(parse(text), tensors, size), H200)


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def positions(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("Y[c,p] = X[c,G[p]]", ["T[t,c] = X[c,t]", "Y[c,p] = T[G[p],c]"]),
        ("Y[c,p] += 2 * X[c,G[p]] * W[p]", ["T[t,c] = X[c,t]", "Y[c,p] += 2 * T[G[p],c] * W[p]"]),
        ("Y[c,G[p]] += V[c,p] * W[p]", ["T[G[p],c] += V[c,p] * W[p]", "Y[c,t] += T[t,c]"]),
        (
            "Y[c,G[p]] += X[c,E[p]]",
            ["T_[t,c] = X[c,t]", "T[G[p],c] += T_[E[p],c]", "Y[c,t] += T[t,c]"],
        ),
    ],
)
def test_steps_pick_rows_and_come_to_the_same(text, steps):
    long = dict(X=meta(32, 5000), V=meta(32, LONG), W=meta(LONG), G=positions(LONG), E=positions(LONG))
    names = parse(text).tensor_names
    size = (32, 5000) if "Y[c,G" in text else None
    parts = steps_of(text, size, **{name: long[name] for name in names})
    assert parts is not None
    assert [str(step) for step in parts.steps] == steps
    assert all(set(shape) == {32, 5000} for shape in parts.sizes)
    generator = torch.Generator().manual_seed(0)
    small = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in SMALL.items()}
    small |= {name: torch.randint(0, 9, (40,), generator=generator) for name in "GE"}
    size = (3, 9) if size else None
    want = insum(text, size=size, **{name: small[name] for name in names})
    for step, shape in zip(parts.steps, (*parts.sizes, None)):
        size_of_it = tuple({5000: 9, 32: 3}[length] for length in shape) if shape else size
        read = {name: small[name] for name in step.tensor_names}
        small[step.output.name] = insum(str(step), size=size_of_it, **read)
    torch.testing.assert_close(small["Y"], want)


SMALL = {"X": (3, 9), "V": (3, 40), "W": (40,)}


def test_what_gains_nothing_stays_as_it_is():
    X, G = meta(32, 5000), positions(LONG)
    assert steps_of("Y[p,c] = X[G[p],c]", X=meta(5000, 32), G=G) is None  # rows already
    assert steps_of("Y[p] = X[G[p]]", X=meta(5000), G=G) is None  # rows of one element
    assert steps_of("Y[c,p] = X[c,G[p]]", X=X, G=positions(100)) is None  # a copy takes longer
    assert steps_of("Y[c] = X[c,G[c]]", X=X, G=positions(32)) is None  # one element of each row
    assert steps_of("Y[c,G[p]] += V[c,p]", Y=X, V=meta(32, LONG), G=G) is None  # what is added to is rounded once
    assert steps_of("Y[c,p] = max(X[c,G[p]])", X=X, G=G) is None
