"""How statements may be split over ranks, worked out from their text alone."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from insum_ops import functional
from insum_ops.compiler import OperandError
from insum_ops.distributed import bytes_moved, cheapest_split, splits_of

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (
            "C[i,j] += A[i,k] * B[k,j]",
            [
                "along i: C Shard(0), A Shard(0), B Replicate -> Shard(0)",
                "along j: C Shard(1), A Replicate, B Shard(1) -> Shard(1)",
                "along k: C Partial(sum), A Shard(1), B Shard(0) -> Partial(sum)",
            ],
        ),
        (
            "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
            [
                "along p: C Partial(sum), AM Shard(0), AV Shard(0), AK Shard(0), B Replicate -> Partial(sum)",
                "along n: C Shard(1), AM Replicate, AV Replicate, AK Replicate, B Shard(1) -> Shard(1)",
                "along q: C Partial(sum), AM Replicate, AV Shard(1), AK Shard(1), B Replicate -> Partial(sum)",
            ],
        ),
        (
            "C[i] = max(A[i,k])",
            ["along i: C Shard(0), A Shard(0) -> Shard(0)", "along k: C Replicate, A Shard(1) -> Partial(max)"],
        ),
        (
            "C[i,I[i,p]] += A[i,p]",
            [
                "along i: C Shard(0), I Shard(0), A Shard(0) -> Shard(0)",
                "along p: C Partial(sum), I Shard(1), A Shard(1) -> Partial(sum)",
            ],
        ),
        ("C[i] += A[i,i]", []),  # a diagonal
        (
            "C[i,j] += A[i,k] * A[j,k]",
            ["along k: C Partial(sum), A Shard(1) -> Partial(sum)"],
        ),  # A would be cut in two ways
        ("C[i] += C[i] * A[i,k]", ["along i: C Shard(0), A Shard(0) -> Shard(0)"]),  # C is a factor as well
        (
            "C[i] = A[i,k]",
            ["along i: C Shard(0), A Shard(0) -> Shard(0)", "along k: C Replicate, A Shard(1) -> Partial(sum)"],
        ),
        ("C[i,j] += A[j] * 2", ["along j: C Shard(1), A Shard(0) -> Shard(1)"]),  # nobody tells the shards of i
        ("C[0,i] += A[2,i]", ["along i: C Shard(1), A Shard(1) -> Shard(1)"]),
    ],
)
def test_the_text_tells_along_which_indices_a_statement_splits(expr, expected):
    assert [str(split) for split in splits_of(expr) if split.index is not None] == expected


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("C[i] += A[i,k] * B[k]", ["A", "B"]),
        ("C[i] += A[i] * A[i] * B[i]", ["B"]),
        ("C[i] = max(A[i] * B[i])", []),
        ("C[I[p]] += A[p]", ["A"]),
    ],
)
def test_a_sum_is_linear_in_each_factor_that_occurs_once(expr, names):
    assert [
        n for s in splits_of(expr)[1:] if s.index is None for n, p in s.inputs.items() if n != "C" and p.is_partial()
    ] == names


@pytest.mark.parametrize(
    ("placements", "index"),
    [
        ({"A": Shard(0), "B": Replicate()}, "i"),
        ({"A": Shard(1), "B": Shard(0)}, "k"),
        ({"A": Replicate(), "B": Replicate()}, None),
        ({"A": Replicate(), "B": Shard(1)}, "j"),
        ({"A": Shard(0), "B": Shard(1)}, "j"),  # A is smaller, so that A moves
    ],
)
def test_the_fewest_bytes_move(placements, index):
    nbytes = {"A": 400, "B": 4000}
    split = cheapest_split("C[i,j] += A[i,k] * B[k,j]", placements, nbytes, 4)
    costs = {
        str(s): sum(bytes_moved(placements[n], s.inputs[n], nbytes[n], 4) for n in placements)
        for s in splits_of("C[i,j] += A[i,k] * B[k,j]")
    }
    assert split.index == index
    assert costs[str(split)] == min(costs.values())


def test_a_partial_result_can_be_refused():
    placements = {"A": Shard(1)}
    assert cheapest_split("C[i] = max(A[i,k])", placements, {"A": 8}, 2).output == Partial("max")
    assert cheapest_split("C[i] = max(A[i,k])", placements, {"A": 8}, 2, partial=False).output == Shard(0)


def test_without_the_rules_a_dtensor_is_refused(monkeypatch):
    class DTensor(torch.Tensor):
        pass

    monkeypatch.delitem(functional.sys.modules, "insum_ops.distributed")
    with pytest.raises(OperandError) as caught:
        functional._refuse_unfit("C[i] += A[i]", {"A": torch.ones(2).as_subclass(DTensor)}, None, RuntimeError())
    assert str(caught.value) == (
        "A is a DTensor; write `import insum_ops.distributed`, which knows how statements are split\n"
        "    C[i] += A[i]\n            ^"
    )
