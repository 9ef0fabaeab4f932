"""`SparseConvTensor` where torch handles it: files, moves and casts, batches of a DataLoader."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from insum_ops.compiler import OperandError
from insum_ops.nn import SparseConv3d, SparseConvTensor, SparseInverseConv3d, SubMConv3d

pytestmark = pytest.mark.cpu

VOXELS = torch.tensor([[0, i, i, (3 * i) % 8] for i in range(6)], dtype=torch.int32)


def cloud(shape=(8, 8, 8)):
    return SparseConvTensor(torch.randn(6, 4), VOXELS.clone(), shape, 1)


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("copied", [saved, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@torch.no_grad()
def test_what_layers_saved_is_in_a_copy_and_a_file(copied):
    down, up, same = SparseConv3d(4, 4, 3, 2, indice_key="a"), SparseInverseConv3d(4, 4, 3, "a"), SubMConv3d(4, 4, 3)
    x = same(cloud())
    y = down(x)
    twin = copied(y)
    assert (twin.spatial_shape, twin.batch_size) == (y.spatial_shape, y.batch_size)
    assert torch.equal(twin.indices, y.indices)
    assert torch.equal(up(twin).features, up(y).features)
    assert torch.equal(up(twin).indices, x.indices)
    assert torch.equal(same(up(twin)).features, same(up(y)).features)


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32), ("double", torch.float64)],
)
def test_casts_share_the_voxels(cast, dtype):
    x = cloud()
    other = getattr(x, cast)()
    assert other.features.dtype == dtype
    assert other.voxels is x.voxels
    assert x.float() is x
    assert x.cpu() is x
    assert x.to("cpu", torch.float64).features.dtype == torch.float64


def test_another_device_has_no_maps():
    moved = cloud().to("meta")
    assert moved.features.is_meta
    assert moved.indices.is_meta
    assert not moved.indice_dict


def test_gradients_pass_a_cast():
    features = torch.randn(6, 4, requires_grad=True)
    SparseConvTensor(features, VOXELS, (8, 8, 8), 1).double().features.sum().backward()
    assert torch.equal(features.grad, torch.ones(6, 4))


def test_shared_memory():
    x = cloud()
    assert x.share_memory_() is x
    assert x.features.is_shared()
    assert x.indices.is_shared()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU")
def test_pinned_memory():
    (batch,) = DataLoader([cloud(), cloud()], batch_size=2, pin_memory=True)
    assert batch.features.is_pinned()
    assert batch.indices.is_pinned()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned")
def test_without_an_accelerator_no_memory_is_pinned():
    with pytest.raises(RuntimeError) as caught:
        cloud().pin_memory()
    assert str(caught.value) == (
        "memory is pinned for copies to an accelerator, but torch finds none here; leave pin_memory out, or ask "
        "torch.accelerator.is_available() first"
    )


def test_a_tensor_says_where_to_and_of_what_type():
    moved = cloud().to(torch.zeros(1, dtype=torch.float64))
    assert moved.features.dtype == torch.float64
    assert moved.indices.dtype == torch.int32


def test_a_batch_holds_the_grids_one_after_another():
    first, second = cloud(), cloud()
    batch = default_collate([{"x": default_collate([first, second])}, {"x": second}])["x"]
    assert batch.batch_size == 3
    assert torch.equal(batch.dense()[2], second.dense()[0])
    assert torch.equal(batch.dense()[0], first.dense()[0])
    assert torch.equal(first.indices, VOXELS)


def test_features_of_two_widths_are_no_batch():
    words = "a batch holds features of one number of channels, but here are 4 and 8; give all samples the same"
    with pytest.raises(OperandError) as error:
        default_collate([cloud().replace_feature(torch.ones(len(VOXELS), channels)) for channels in (4, 8)])
    assert str(error.value) == words


def test_grids_of_two_shapes_are_no_batch():
    words = (
        "a batch holds grids of one spatial_shape, but here are [8, 8, 8] and [9, 8, 8]; give all samples "
        "the shape of the largest"
    )
    with pytest.raises(OperandError) as error:
        default_collate([cloud(), cloud((9, 8, 8))])
    assert str(error.value) == words
