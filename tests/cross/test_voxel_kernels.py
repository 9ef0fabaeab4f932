"""The kernels of the voxel hash, of pairs and of tiles compile for GPUs that are not there, with all kinds of keys."""

from __future__ import annotations

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from insum_ops.formats.voxels import pair_kernels as pairs
from insum_ops.formats.voxels import tile_kernels as tiles
from insum_ops.formats.voxels.kernels import insert, look_up, place
from insum_ops.formats.voxels.pairs import TILE, WARPS, _tiling
from insum_ops.formats.voxels.tiles import KEYED

SIZES = ("count", "batch_size", "size0", "size1", "size2", "size3", "last_slot", "stride_row")


def compiled(kernel, sm, key, axes, **flags):
    constants = {"AXES": axes, "V": 27, "BLOCK": 256, "stride_column": 1, **flags}
    return built(
        kernel, sm, constants, {"keys_ptr": f"*{key}", "indices_ptr": f"*{key}", **dict.fromkeys(SIZES, "i32")}
    )


def built(kernel, sm, constants, types, warps=4):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps})


@pytest.mark.sampled
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("key", ["i32", "i64"])
@pytest.mark.parametrize("to_coarse", [False, True])
def test_the_hash_compiles(sm, key, to_coarse):
    axes = ((3, 2, 1, 1), (3, 1, 0, 2), (3, 2, 1, 1))
    inserting = compiled(insert, sm, key, axes, TO_COARSE=to_coarse, IS_INPUT=not to_coarse)
    searching = compiled(look_up, sm, key, axes, TO_COARSE=to_coarse)
    assert "atom" in inserting.asm["ptx"]
    assert "atom" not in searching.asm["ptx"]


@pytest.mark.sampled
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("volume", [1, 27, 343])
def test_the_kernels_of_pairs_compile(sm, volume):
    taps, rows, _, _ = _tiling(100_000, volume)
    assert taps * rows == TILE
    sizes = dict.fromkeys(("rows", "span", "group_size", "total", "entries"), "i32")
    constants = {"V": volume, "TAPS": taps, "ROWS": rows}
    counting = built(pairs.count, sm, constants, sizes, WARPS)
    grouping = built(pairs.group, sm, {**constants, "ALL_TAPS": 1 << (volume - 1).bit_length()}, sizes, WARPS)
    swapping = built(pairs.swap, sm, {"V": volume, "BLOCK": 1024}, sizes)
    assert re.search(r"\b(atom|red)\b", counting.asm["ptx"])
    assert not re.search(r"\b(atom|red)\b", grouping.asm["ptx"] + swapping.asm["ptx"])
    assert max(kernel.metadata.shared for kernel in (counting, grouping, swapping)) <= 48 * 1024


@pytest.mark.sampled("volume", "key")
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("volume", "key"), [(1, "i32"), (8, "i32"), (27, "i32"), (27, "i64"), (40, "i64")])
def test_the_kernels_of_tiles_compile(sm, volume, key):
    sizes = {"rows": "i32", "stretch": "i32", "order_ptr": "*i64"}
    constants = {"V": volume, "TAPS": 1 << (volume - 1).bit_length()}
    keying = built(tiles.key, sm, {**constants, "ROWS": KEYED}, {**sizes, "keys_ptr": f"*{key}"})
    counting, filling = (built(kernel, sm, {**constants, "SIZE": 128}, sizes) for kernel in (tiles.count, tiles.fill))
    for kernel in (keying, counting, filling):
        assert not re.search(r"\b(atom|red)\b", kernel.asm["ptx"])  # nothing depends on who comes first
        assert kernel.metadata.shared <= 48 * 1024


@pytest.mark.sampled
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("key", ["i32", "i64"])
@pytest.mark.parametrize("ndim", [1, 4])
def test_the_kernel_that_places_cells_compiles(sm, key, ndim):
    pointers = {"keys_ptr": f"*{key}", "indices_ptr": f"*{key}", "order_ptr": "*i64", "slots_ptr": "*i64"}
    placing = built(place, sm, {"NDIM": ndim, "BLOCK": 256}, {**pointers, **dict.fromkeys(SIZES, "i32")})
    assert not re.search(r"\b(atom|red)\b", placing.asm["ptx"])
