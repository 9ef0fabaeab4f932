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
NARROW = ("rows_ptr", "columns_ptr", "keys_ptr", "merged_ptr")
FLAGS = [(False, False), (False, True), (True, False), (True, True)]
NUMBERS = (
    *("entries", "stride", "row_count", "column_count", "steps", "size", "width"),
    *("groups", "pieces", "cut", "distinct"),
)


KERNELS = [
    ("list_keys", {}),
    ("count_keys", {}),
    ("merge_keys", {}),
    ("cut_rows", {}),
    ("order_pieces", {"NEAR": NEAR, "AT_ONCE": AT_ONCE}),
    ("pack_rows", {}),
    *[("unfold", {"FIRST": first}) for first in (0, 1)],
    *[("point", {"IS_PACKED": is_packed}) for is_packed in (False, True)],
    *[("spread", {"HAS_GROUPS": has_groups}) for has_groups in (False, True)],
    *[("survey", {"SIZES": len(SURVEYED), "IS_PACKED": on, "IS_KEYED": keyed}) for on, keyed in FLAGS],
    *[("place", {"HAS_ENDS": on, "IS_KEYED": keyed}) for on, keyed in FLAGS],
]


@pytest.mark.sampled
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("index", ["*i32", "*i64"])
@pytest.mark.parametrize(("name", "constants"), KERNELS, ids=[f"{name}-{[*own.values()]}" for name, own in KERNELS])
def test_the_kernels_of_layouts_compile(name, constants, index, sm):
    types = dict.fromkeys(WIDE, "*i64") | dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(NARROW, index)
    types |= {"others_ptr": "*i64", "is_shared_ptr": "*i1", "is_padding_ptr": "*i1"}
    if name in ("list_keys", "cut_rows"):
        constants = constants | {"LAST": torch.iinfo(torch.int32 if index == "*i32" else torch.int64).max}
    ptx = built(getattr(kernels, name), sm, {"BLOCK": BLOCK, **constants}, types).asm["ptx"]
    assert "atom" in ptx or name != "list_keys"
