"""Sparse convolutions whose channels are split over four ranks, and convolutions of DTensors."""

from __future__ import annotations

import sys

import parallel_conv_cases
import pytest
import torch
from ranks import failures, on_ranks
from torch import nn

from insum_ops import sparse_conv3d
from insum_ops.compiler import OperandError
from insum_ops.conv.forms import STATIONARY, WEIGHT_GRADIENT
from insum_ops.distributed import convolutions
from insum_ops.formats import kernel_map

pytestmark = pytest.mark.cpu


def test_four_ranks_convolve_as_one():
    results = on_ranks("parallel_conv_cases", 4, parallel_conv_cases.NAMES)
    assert not failures(results)
    # each rank has a fourth of the output channels of the first layer, and of the input channels of the second
    assert results["the_pair_equals_the_whole"] == [[8 * 9 * 3 // 4, 8 // 4, 5 * 9 * 8 // 4, 5]] * 4
    for rank, messages in enumerate(results["mistakes"]):
        assert messages == expected_messages(rank)


def expected_messages(rank):
    """Most are the same sentence on every rank, about the one that is wrong."""
    found_by, says = "" if rank == 1 else "on rank 1, ", f"says rank {rank}"
    divides = "choose a multiple of 4"
    return {
        "channels": f"4 ranks do not divide out_channels=6 of the SubMConv2d, {says}; {divides}",
        "input channels": f"4 ranks do not divide in_channels=6 of the SubMConv2d, {says}; {divides}",
        "groups": f"4 ranks do not divide groups=6 of the SubMConv2d, {says}; {divides}",
        "groups by rows": f"the SubMConv2d has 4 groups, which RowParallel would tear apart, {says}; split it by "
        "ColumnParallel(gather_output=True)",
        "a kernel of 1": "the kernel of the SubMConv2d is 1, so that its memory holds a matrix [in_channels, "
        f"out_channels], which ColumnParallel can't split, {says}; leave it whole, or use nn.Linear on the features",
        "an order": f"order deals out blocks, but the layer is a SubMConv2d, {says}; leave order out: all channels "
        "cost the same",
        "twice": f"the SubMConv2d has been split or parametrized before, {says}; give a new layer to RowParallel",
        "other layers": "the layer is SubMConv2d(8, 8, kernel_size=[3, 3]) torch.float32 on rank 0 but SubMConv2d(8, "
        "16, kernel_size=[3, 3]) torch.float32 on rank 1; make it of the same sizes on every rank",
        "split voxels": "indices is a DTensor, but a convolution needs all voxels on every rank; pass "
        "indices.full_tensor(), and split features or weights by their channels",
        "other voxels": "indices is not the same on all ranks: rank 1 holds another than rank 0, and on this rank, "
        f"{rank}, it is [15, 3] torch.int64; give all ranks the same voxels in the same order",
        "features of another width": f"{found_by}SubMConv2d takes 16 channels but features have 20",
        "no cloud": f"{found_by}SubMConv2d takes a SparseConvTensor of insum_ops.nn, but got a Tensor; make one of "
        "features and voxels, SparseConvTensor(features, indices, spatial_shape, batch_size)",
        "a plain tensor with a gradient": "features asks for a gradient but is no DTensor, unlike weight, so that rank "
        f"{rank} would have only its own part of that gradient; pass "
        "torch.distributed.tensor.distribute_tensor(features, weight.device_mesh)",
        "features of another length": f"{found_by}features is [14, 4] but the kernel map has 15 input voxels; features "
        "are [voxels, channels]",
    }


@pytest.mark.parametrize(
    ("expr", "splits"),
    [
        (STATIONARY[0], ["None", "m", "c", "None", "None"]),
        (STATIONARY[1], ["None", "g", "None", "None"]),
        (STATIONARY[2], ["None", "g", "None", "None"]),
        (WEIGHT_GRADIENT[0], ["None", "m", "c", "None", "None"]),
        (WEIGHT_GRADIENT[1], ["None", "g", "None", "None"]),
    ],
)
def test_no_index_of_the_kernel_map_is_split(expr, splits):
    dense = expr in (STATIONARY[0], WEIGHT_GRADIENT[0])
    of_weight = convolutions.CHANNELS if dense else convolutions.GROUPS
    roles = [("In", "features", convolutions.FEATURES), ("dOut", "upstream", convolutions.FEATURES)]
    if expr in STATIONARY:
        roles[1:] = [("Weight", "weight", of_weight), ("Out", "bias", convolutions.BIAS)]
    of_gradient = convolutions.CHANNELS_OF_GRADIENT if dense else convolutions.GROUPS_OF_GRADIENT
    of_output = convolutions.FEATURES if expr in STATIONARY else of_gradient
    found = convolutions._splits(expr, tuple(roles), of_output, 5)
    assert [str(split.index) for split in found] == splits


class DTensor(torch.Tensor):
    """Named like torch's, to which rules belong."""


def test_a_dtensor_without_rules_is_refused_by_its_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "insum_ops.distributed")
    over = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
    weight = nn.Parameter(torch.ones(1, 3, 1)).detach().as_subclass(DTensor)
    with pytest.raises(OperandError) as caught:
        sparse_conv3d(torch.ones(2, 1), weight, over)
    assert str(caught.value) == (
        "weight is a DTensor; write `import insum_ops.distributed`, which knows how statements are split"
    )
