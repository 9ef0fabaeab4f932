"""What the torch program of a statement takes of memory, and where it rounds."""

from __future__ import annotations

import pytest
import torch
from reduced_precision import reduced_precision

from insum_ops.compiler.binding import Bound, bind
from insum_ops.compiler.language import parse
from insum_ops.compiler.reference import numbers_held, sums_in_float32
from insum_ops.compiler.reference.demands import may_stay_half

pytestmark = pytest.mark.cpu


def bound(text: str, size: tuple[int, ...] | None = None, **shapes: tuple[int, ...]) -> Bound:
    statement = parse(text)
    tensors = {
        name: torch.empty(shape, dtype=torch.int64 if name in statement.index_names else torch.float16, device="meta")
        for name, shape in shapes.items()
    }
    return bind(statement, tensors, size)


@pytest.mark.parametrize(
    ("text", "shapes", "is_sound"),
    [
        ("Y[i,j] += A[i,k] * B[k,j]", dict(A=(3, 4), B=(4, 5)), True),
        ("Y[i] += A[i,k]", dict(A=(3, 4)), True),
        ("Y[i,j] = A[i] * B[j]", dict(A=(3,), B=(5,)), True),
        ("Y[i] += A[i,k] * B[k,i]", dict(A=(3, 4), B=(4, 3)), False),  # products of entries, summed afterwards
        ("Y[i] += A[i,k] * B[j]", dict(A=(3, 4), B=(5,)), False),  # both are summed first
        ("Y[i,l] += A[i,j] * B[j,k] * C[k,l]", dict(A=(3, 4), B=(4, 5), C=(5, 6)), True),
        ("Y[i,l] += A[i,j] * V[j] * C[j,l]", dict(A=(3, 4), V=(4,), C=(4, 6)), True),
        ("Y[()] += A[i,j] * A[i,j]", dict(A=(3, 4)), False),
        ("Y[i] += A[i,j] * V[j]", dict(A=(3, 4), V=(4,)), True),
        ("Y[b,o] += X[b,i] * A[U[b],i,r] * B[U[b],r,o]", dict(X=(9, 3), A=(4, 3, 2), B=(4, 2, 5), U=(9,)), True),
        ("Y[b] += X[b,i] * A[U[b],i]", dict(X=(9, 3), A=(4, 3), U=(9,)), False),  # no matrix: entry by entry
    ],
)
def test_torch_rounds_half_precision_where_an_operation_ends(text, shapes, is_sound):
    assert sums_in_float32(bound(text, **shapes)) is is_sound


@pytest.mark.parametrize(
    ("text", "size", "shapes", "may_stay", "may_round"),
    [
        ("Y[i,j] += A[i,k] * B[k,j]", None, dict(A=(3, 4), B=(4, 5)), True, False),  # one product, rounded once
        ("Y[I[p],c] += X[p,c]", (4, 3), dict(X=(9, 3), I=(9,)), True, True),
        ("Y[I[p],c] += X[p,c]", (4, 3), dict(X=(900, 3), I=(900,)), False, True),  # too many meet
        ("Y[I[p],c] += W[p] * X[J[p],c]", (4, 3), dict(W=(9,), X=(5, 3), I=(9,), J=(9,)), True, True),
        # products of entries, which torch would round before it sums them
        ("Y[p] += W[p,c] * X[J[p],c]", None, dict(W=(9, 3), X=(5, 3), J=(9,)), False, True),
        ("Y[I[p],c] += 3 * X[p,c]", (4, 3), dict(X=(9, 3), I=(9,)), False, True),
    ],
)
def test_half_precision_stays_where_few_numbers_meet_and_torchs_flags_allow_it(text, size, shapes, may_stay, may_round):
    given = bound(text, size, **shapes)
    with reduced_precision(True):
        assert may_stay_half(given) is may_stay
    assert may_stay_half(given) is (may_stay and not may_round)


def test_what_is_gathered_and_what_lies_on_the_way_counts():
    plain = numbers_held(bound("Y[i,j] += A[i,k] * B[k,j]", A=(30, 40), B=(40, 50)))
    assert plain == 2 * (2 * 30 * 50) + 30 * 40 + 40 * 50
    gathered = bound("Y[p,j] += A[I[p],j]", I=(1000,), A=(30, 50))
    assert numbers_held(gathered) >= 2 * 1000 * 50
    chain = bound("Y[a,d] += A[a,b] * B[b,c] * C[c,d]", A=(9, 2), B=(2, 900), C=(900, 3))
    assert numbers_held(chain) < 2 * 900 * 9


def test_a_maximum_of_one_factor_holds_its_results_and_one_of_two_all_products():
    lone = bound("Y[i] = max(A[i,k])", A=(30, 400))
    pair = bound("Y[i,j] = max(A[i,k] * B[k,j])", A=(30, 400), B=(400, 50))
    assert numbers_held(lone) == 2 * 30 + 30 * 400
    assert numbers_held(pair) > 2 * 30 * 400 * 50
    assert numbers_held(pair, wants_winners=True) > 3 * numbers_held(pair)
