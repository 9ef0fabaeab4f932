"""The kernels that lay matrices out compile for GPUs that are not there, with coordinates of both widths."""

from __future__ import annotations

import pytest
from test_voxel_kernels import built

from insum_ops.formats import layout_kernels as kernels
from insum_ops.formats.layouts import BLOCK, SURVEYED

WIDE = ("tally_ptr", "counts_ptr", "source_ptr", "ends_ptr", "to_zero_ptr")
NUMBERS = (
    *("entries", "stride", "row_count", "column_count", "steps", "size", "width"),
    "groups",
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
        "others_ptr": "*i64",
        "is_shared_ptr": "*i1",
        "is_padding_ptr": "*i1",
    }
    assert "atom" in built(kernels.list_keys, sm, {"BLOCK": BLOCK}, types).asm["ptx"]
    built(kernels.survey, sm, {"BLOCK": BLOCK, "SIZES": len(SURVEYED)}, types)
    built(kernels.point, sm, {"BLOCK": BLOCK}, types)
    built(kernels.spread, sm, {"BLOCK": BLOCK}, types)
    for is_on in (False, True):
        for is_keyed in (False, True):
            built(kernels.place, sm, {"BLOCK": BLOCK, "HAS_ENDS": is_on, "IS_KEYED": is_keyed}, types)
