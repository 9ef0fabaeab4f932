"""Calls of other sizes: which share a kernel, and that what is worked out anew for them is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import APPLICATIONS, problem
from statements import DEVICE, IS_INTERPRETED

from insum_ops import insum
from insum_ops.compiler import autotune
from insum_ops.compiler.autotune import candidates
from insum_ops.compiler.bind import bind
from insum_ops.compiler.parse import parse
from insum_ops.compiler.pipeline import problem_for

FACTS = ("numbers", "programs", "order", "size", "strides", "seed", "scatter_dim", "sum_dtype", "is_covered")


def other_size(own, lengths):
    """The same problem with other lengths of its tensors' first dimensions, and of the output's."""
    bound = own.bound
    shapes = {name: (lengths.get(shape[0], shape[0]), *shape[1:]) for name, shape in bound.shapes.items()}
    tensors = {name: torch.empty(shape, dtype=bound.dtypes[name], device="meta") for name, shape in shapes.items()}
    size = (lengths.get(bound.size[0], bound.size[0]), *bound.size[1:])
    given = problem(str(bound.statement), tensors, size, own.fact, own.flags)
    return replace(given, bound=replace(given.bound, statement=bound.statement), rows=own.rows)


def long(own):
    """The application's problem with first dimensions that count roughly."""
    firsts = {shape[0] for shape in own.bound.shapes.values()} | {own.bound.size[0]}
    return other_size(own, {first: 5000 + 2 * at + 1 for at, first in enumerate(sorted(firsts)) if first > 100})


@pytest.mark.parametrize("name", APPLICATIONS)
def test_sizes_that_count_alike_share_every_kernel(name):
    one = long(APPLICATIONS[name].problem())
    firsts = {shape[0] for shape in one.bound.shapes.values()} | {one.bound.size[0]}
    other = other_size(one, {first: first + 1001 * 2 for first in firsts if first > 1024})
    assert other.bound.extents != one.bound.extents
    assert other.signature == one.signature
    for mine, theirs in zip(candidates(one), candidates(other), strict=True):
        known, fresh = one.launcher(mine), other.launcher(theirs)
        again = other.resized(known)
        assert again.kernel == known.kernel == fresh.kernel
        assert again.runners is known.runners
        for fact in (
            "numbers",
            "programs",
            "order",
            "size",
            "strides",
            "seed",
            "scatter_dim",
            "sum_dtype",
            "is_covered",
        ):
            assert getattr(again, fact) == getattr(fresh, fact), fact


def test_sizes_that_a_source_would_tell_apart_have_other_signatures():
    def signature(rows, columns=64, **options):
        tensors = {
            "E": torch.empty(rows, dtype=torch.int32, device="meta"),
            "X": torch.empty(9000, columns, device="meta"),
        }
        bound = bind(parse("Y[i,c] = X[E[i],c]"), tensors)
        return replace(problem_for(bound, tensors), **options).signature

    assert signature(5001) == signature(5003) == signature(8191)
    assert signature(5001) != signature(5002)  # a block of two divides one of them
    assert signature(5001) != signature(8193)  # tuned configs are remembered by powers of two
    assert signature(1001) != signature(1003)  # a block may be as long
    assert signature(5001) != signature(5001, columns=65)
    assert signature(5001) != signature(5001, deterministic=True)
    assert signature(2**23 + 1) != signature(2**23 + 3)  # addresses may need 64 bits for one of them


@pytest.mark.skipif(not IS_INTERPRETED and DEVICE != "cuda", reason="needs TRITON_INTERPRET=1 or a GPU")
def test_a_call_of_another_size_runs_a_kernel_that_is_there(monkeypatch):
    def call(rows):
        X = torch.arange(24.0, device=DEVICE).view(3, 8)
        E = torch.arange(rows, device=DEVICE) % 3
        assert torch.equal(insum("Y[i,c] = X[E[i],c]", X=X, E=E), X[E])

    call(1501)
    monkeypatch.setattr(autotune, "emit", lambda *given: pytest.fail("a kernel is emitted again"))
    for rows in (1503, 2047, 1999):
        call(rows)
