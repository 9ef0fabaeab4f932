"""The kernels that read index tensors compile for GPUs that are not there, with numbers of both widths."""

from __future__ import annotations

import pytest
from test_voxel_kernels import built

from insum_ops.compiler.runtime import group_kernels, range_kernel
from insum_ops.compiler.runtime.group_tables import BLOCK, FEW_GROUPS, LONG_BLOCK
from insum_ops.compiler.runtime.ranges import BLOCK as RANGE_BLOCK
from insum_ops.compiler.runtime.ranges import LEAST_WORDS

KERNELS = {
    "survey_index": (range_kernel.survey_index, {"BLOCK": RANGE_BLOCK, "WORDS": LEAST_WORDS}),
    "compare": (group_kernels.compare, {"BLOCK": BLOCK}),
    **{
        f"count, {few}": (group_kernels.count, {"FEW": few, "MAY_SKIP": True, "BLOCK": BLOCK})
        for few in (0, FEW_GROUPS)
    },
    "scan": (group_kernels.scan, {"TILE": 16, "MAY_SKIP": True, "BLOCK": LONG_BLOCK}),
    "place": (group_kernels.place, {"TILE": 16, "FEW": 0, "MAY_SKIP": False, "BLOCK": BLOCK}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("length", ["i32", "i64"])
@pytest.mark.parametrize("index", ["*i32", "*i64"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_of_index_tensors_compile(name: str, index: str, length: str, sm: int) -> None:
    kernel, constants = KERNELS[name]
    numbers = ("length", "stride", "place", "groups", "filled", "programs")
    types = dict.fromkeys(numbers, "i32") | {"length": length, "sums_ptr": "*i64", "answer_ptr": "*i64"}
    types |= dict.fromkeys(("index_ptr", "seen_ptr"), index)
    assert built(kernel, sm, constants, types).asm["ptx"]
