"""What version 0.1.0 pickled, before its modules moved to other folders, is read and computes the same."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from tolerances import TOLERANCE

from insum_ops import formats, insum, nn
from insum_ops.formats import kernel_map
from insum_ops.nn import SparseConvTensor

pytestmark = pytest.mark.cpu

PICKLED = sorted((Path(__file__).parent / "pickled").glob("*.pickle"))


@pytest.mark.parametrize("path", PICKLED, ids=lambda path: path.stem)
def test_a_pickle_of_an_older_version_computes_what_it_did(path):
    saved = pickle.loads(path.read_bytes())
    thing, given, expected = saved["object"], saved["given"], saved["expected"]
    with torch.no_grad():
        if isinstance(thing, SparseConvTensor):
            result = thing.dense()
        elif path.stem == "convolutions":
            result = thing(SparseConvTensor(*given, [3, 3, 3], batch_size=1))
        elif isinstance(thing, torch.nn.Module):
            result = thing(*given) if isinstance(given, tuple) else thing(given)
        else:
            result = insum("C[m,n] += A[m,k] * B[k,n]", A=thing, B=given)
    torch.testing.assert_close(result, expected, **TOLERANCE[torch.float32])


def test_old_names_of_modules_hide_no_function():
    for path in PICKLED:
        pickle.loads(path.read_bytes())
    assert kernel_map.__name__ == formats.kernel_map.__name__ == "kernel_map"
    assert callable(formats.kernel_map)
    assert callable(nn.from_e3nn)
    assert callable(nn.sparsify)


def test_what_a_tensor_keeps_of_its_voxels_is_read_from_a_pickle_of_the_module_that_held_it() -> None:
    x = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1)
    x.voxels.map(nn.SubMConv1d(1, 1, 3).layout)
    text = pickle.dumps(x.map_cache, protocol=0)
    assert b"insum_ops.conv.voxels" in text
    cache = pickle.loads(text.replace(b"insum_ops.conv.voxels", b"insum_ops.conv.tensor"))
    assert torch.equal(cache.voxels.indices, x.indices)
    (cached,), (expected,) = cache.voxels.maps.values(), x.voxels.maps.values()
    assert torch.equal(cached.kernel_map.neighbours, expected.kernel_map.neighbours)
