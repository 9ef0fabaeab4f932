"""Block-sparse layers whose blocks are split over four ranks."""

from __future__ import annotations

import parallel_linear_cases
import pytest
from ranks import failures, on_ranks

from insum_ops.compiler import OperandError, ShapeError
from insum_ops.distributed import balanced_order
from insum_ops.nn import BlockSparseLinear

pytestmark = pytest.mark.cpu


def test_four_ranks_compute_as_one():
    results = on_ranks("parallel_linear_cases", 4, parallel_linear_cases.NAMES)
    assert not failures(results)
    blocks = {name: [own[name] for own in results["the_pair_equals_the_whole"]] for name in ("stretches", "balanced")}
    assert sum(blocks["balanced"]) == sum(blocks["stretches"])
    assert max(blocks["balanced"]) < max(blocks["stretches"])
    for rank, messages in enumerate(results["mistakes"]):
        assert messages == {
            "a pattern that differs": "coords is not the same on all ranks: rank 1, 2, 3 hold others than rank 0, and "
            f"on this rank, {rank}, it is [2, 19] torch.int32; seed all ranks alike before the layer is made",
            "a mesh that does not divide": f"4 ranks do not divide in_features=12 in blocks of 4, says rank {rank}: 3 "
            "block columns; choose in_features that are a multiple of 16",
            "another module": f"the module is a Linear on rank {rank}; this style is for a BlockSparseLinear that has "
            "not been split",
            "an order": f"order does not list each of the 8 block rows once, says rank {rank}; take it from "
            "balanced_order",
        }


def test_shares_are_as_equal_as_the_largest_blocks_allow():
    layer = BlockSparseLinear(64, 64, block_size=8, pattern=parallel_linear_cases.skewed(8, 8))
    counts = layer.coords[0].long().bincount(minlength=8)
    order = balanced_order(2, layer)
    assert sorted(order.tolist()) == list(range(8))
    shares = counts[order].view(2, 4).sum(1)
    assert int((shares[0] - shares[1]).abs()) <= int(counts.max())
    assert int((shares[0] - shares[1]).abs()) < int((counts[:4].sum() - counts[4:].sum()).abs())


@pytest.mark.parametrize(
    ("ranks", "layers", "error", "text"),
    [
        (
            2,
            (None, None),
            OperandError,
            "neither up nor down is given; pass the layer whose blocks are to be shared, or both",
        ),
        (3, ((16, 16), None), ShapeError, "3 ranks do not divide 4 blocks; choose another number, or smaller blocks"),
        (
            2,
            ((16, 16), (32, 16)),
            ShapeError,
            "up has 4 block rows but down 8 block columns; pass layers that follow one another, with blocks of one "
            "length between them",
        ),
    ],
)
def test_what_can_not_be_balanced_is_refused(ranks, layers, error, text):
    up, down = (None if sizes is None else BlockSparseLinear(*sizes, block_size=4, density=0.5) for sizes in layers)
    with pytest.raises(error) as caught:
        balanced_order(ranks, up, down)
    assert str(caught.value) == text
