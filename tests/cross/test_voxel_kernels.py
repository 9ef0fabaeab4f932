"""The voxel hash's kernels compile for GPUs that are not there, with int32 and int64 keys."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from insum_ops.formats.voxel_kernels import insert, look_up

SIZES = ("count", "batch_size", "size0", "size1", "size2", "size3", "last_slot", "stride_row")


def compiled(kernel, sm, key, axes, **flags):
    constants = {"AXES": axes, "V": 27, "BLOCK": 256, "stride_column": 1, **flags}
    types = {"keys_ptr": f"*{key}", "indices_ptr": f"*{key}", **dict.fromkeys(SIZES, "i32")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": 4})


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("key", ["i32", "i64"])
@pytest.mark.parametrize("to_coarse", [False, True])
def test_the_hash_compiles(sm, key, to_coarse):
    axes = ((3, 2, 1, 1), (3, 1, 0, 2), (3, 2, 1, 1))
    inserting = compiled(insert, sm, key, axes, TO_COARSE=to_coarse, IS_INPUT=not to_coarse)
    searching = compiled(look_up, sm, key, axes, TO_COARSE=to_coarse)
    assert "atom" in inserting.asm["ptx"]
    assert "atom" not in searching.asm["ptx"]
