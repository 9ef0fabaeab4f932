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
    assert sum(own[1] for own in results["patterns_change_in_training_as_in_the_whole"]) == 40
    for rank, messages in enumerate(results["mistakes"]):
        assert messages == expected_messages(rank)


def expected_messages(rank):
    """Most are the same sentence on every rank, about the one that is wrong."""
    density = "give a number above 0 and up to 1, the share of blocks to keep"
    same_x, same_state = "pass an input of one shape and dtype on every rank", "load the same state on every rank"
    of_x = "x is [5, 16] torch.float32 on rank 0 but"
    of_layer = "what whole_state_dict returned for a model of the same layers"
    of_style = "this style is for a BlockSparseLinear or a sparse convolution that has not been split"
    messages = {
        "a pattern that differs": "coords is not the same on all ranks: rank 1, 2, 3 hold others than rank 0, and on "
        f"this rank, {rank}, it is [2, 19] torch.int32; seed all ranks alike before the layer is made",
        "a mesh that does not divide": f"4 ranks do not divide in_features=12 in blocks of 4, says rank {rank}: 3 "
        "block columns; choose in_features that are a multiple of 16",
        "another module": f"the module is a Linear on rank {rank}; {of_style}",
        "another module on one rank": f"the module is a Linear on rank 1; {of_style}",
        "an order": "order does not list each of the 8 block rows once, says rank 1; take it from balanced_order",
        "an order that is a list": f"order is of type list on rank {rank}; pass a tensor of whole numbers",
        "an order that differs": "order is not the same on all ranks: rank 1 holds another than rank 0, and on this "
        f"rank, {rank}, it is [8] torch.int64; compute it from the same pattern on all ranks",
        "other sizes": "the layer is (4, 4) blocks of [32, 12] torch.float32, with bias on rank 0 but (4, 4) blocks of "
        "[64, 12] torch.float32, with bias on rank 1; make it of the same sizes on every rank",
        "a state without blocks": f"weight is not in the state_dict, says rank 1; pass {of_layer}",
        "a state with more": f"more is of no layer, says rank {rank}; pass {of_layer}",
        "a state that differs": "weight is not the same on all ranks: rank 1 holds another than rank 0, and on this "
        f"rank, {rank}, it is [16, 4, 4] torch.float32; {same_state}",
        "other layers": "the list of split layers is 0.ByRows on rank 0 but 1.ByRows on rank 1; split the same layers "
        "on every rank",
    }
    for style in ("ColumnParallel", "RowParallel"):
        messages |= {
            f"{style}: features": "x is [5, 15] on rank 1; its last dimension must be 16",
            f"{style}: a batch": f"{of_x} [4, 16] torch.float32 on rank 1; {same_x}",
            f"{style}: a dtype": "on rank 1, x is torch.float64 but the weight is torch.float32; convert one with "
            ".to(), or use autocast",
            f"{style}: a gradient": f"{of_x} [5, 16] torch.float32 with a gradient on rank 1; {same_x}",
            f"{style}: a transform": f"a layer that is split over ranks runs under Vmap of torch.func on rank {rank}, "
            "which follows no exchange between ranks; call it outside of transforms, and differentiate it by "
            "torch.autograd",
            f"{style}: no tensor": "on rank 1, x is of type list; pass a tensor [..., in_features]",
            f"{style}: a mask that differs": "mask is not the same on all ranks: rank 1 holds another than rank 0, and "
            f"on this rank, {rank}, it is [8, 4] torch.bool; give the same pattern on every rank",
            f"{style}: a mask of another shape": "on rank 1, mask is [7, 4] but the blocks are [8, 4]; give one bool "
            "per block",
            f"{style}: densities": "density is 0.5 on rank 0 but 0.25 on rank 1; prune to the same density on every "
            "rank",
            f"{style}: no density": f"on rank 1, density is -1; {density}",
            f"{style}: too many": "density is 0.9, which is 29 blocks, but 16 are stored; set_pattern_ adds blocks",
            f"{style}: weights": "the layer is split over ranks; call reset_parameters() before it is split, on every "
            "rank",
        }
    return messages


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
