"""The kernels that lay matrices out compile for GPUs that are not there, with coordinates of both widths."""

from __future__ import annotations

import pytest
import torch
from test_voxel_kernels import built

from insum_ops.formats import layout_kernels as kernels
from insum_ops.formats.group_size import NEAR
from insum_ops.formats.layouts import AT_ONCE, BLOCK, SURVEYED

WIDE = (
    *("tally_ptr", "counts_ptr", "source_ptr", "ends_ptr", "to_zero_ptr", "places_ptr"),
    *("coords_ptr", "into_ptr", "faults_ptr"),
)
NUMBERS = (
    *("entries", "stride", "row_count", "column_count", "steps", "size", "width"),
    *("groups", "pieces", "cut", "distinct"),
)


@pytest.mark.sampled
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("index", ["*i32", "*i64"])
def test_the_kernels_of_layouts_compile(sm, index):
    types = dict.fromkeys(WIDE, "*i64") | dict.fromkeys(NUMBERS, "i32")
    types |= {
        "rows_ptr": index,
        "columns_ptr": index,
        "keys_ptr": index,
        "merged_ptr": index,
        "others_ptr": "*i64",
        "is_shared_ptr": "*i1",
        "is_padding_ptr": "*i1",
    }
    last = {"LAST": torch.iinfo(torch.int32 if index == "*i32" else torch.int64).max}
    assert "atom" in built(kernels.list_keys, sm, {"BLOCK": BLOCK, **last}, types).asm["ptx"]
    built(kernels.count_keys, sm, {"BLOCK": BLOCK}, types)
    built(kernels.merge_keys, sm, {"BLOCK": BLOCK}, types)
    built(kernels.cut_rows, sm, {"BLOCK": BLOCK, **last}, types)
    built(kernels.order_pieces, sm, {"BLOCK": BLOCK, "NEAR": NEAR, "AT_ONCE": AT_ONCE}, types)
    built(kernels.pack_rows, sm, {"BLOCK": BLOCK}, types)
    for is_on in (False, True):
        built(kernels.unfold, sm, {"BLOCK": BLOCK, "FIRST": int(is_on)}, types)
        built(kernels.point, sm, {"BLOCK": BLOCK, "IS_PACKED": is_on}, types)
        built(kernels.spread, sm, {"BLOCK": BLOCK, "HAS_GROUPS": is_on}, types)
        for is_keyed in (False, True):
            counted = {"BLOCK": BLOCK, "SIZES": len(SURVEYED), "IS_PACKED": is_on, "IS_KEYED": is_keyed}
            built(kernels.survey, sm, counted, types)
            built(kernels.place, sm, {"BLOCK": BLOCK, "HAS_ENDS": is_on, "IS_KEYED": is_keyed}, types)
