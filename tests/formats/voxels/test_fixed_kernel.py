"""Fixed kernels are launched with what Triton would have compiled for the very same arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from statements import examples
from torch._subclasses import FakeTensorMode

from insum_ops.formats import fixed_kernel as launches
from insum_ops.formats.errors import FormatError
from insum_ops.formats.fixed_kernel import FixedKernel
from insum_ops.formats.voxels import hash_table as voxel_hash
from insum_ops.formats.voxels import pairs as voxel_pairs
from insum_ops.formats.voxels import tiles as voxel_tiles

compiled_only = pytest.mark.skipif(launches.INTERPRETED, reason="the interpreter compiles nothing")
AXES = ((3, 1, 1, 1),) * 3
# the kernel, how many tensors and numbers it takes, and its constants
KERNELS = {
    "insert": (voxel_hash._insert, 4, 9, (AXES, 27, False, True, 256)),
    "look_up": (voxel_hash._look_up, 4, 9, (AXES, 27, False, 256)),
    "place": (voxel_hash._place, 5, 5, (3, 256)),
    "count": (voxel_pairs._count, 2, 2, (27, 32, 128)),
    "group": (voxel_pairs._group, 5, 4, (27, 32, 32, 128)),
    "swap": (voxel_pairs._swap, 2, 1, (27, 1024)),
    "key": (voxel_tiles._key, 3, 2, (27, 32, 128)),
    "count of tiles": (voxel_tiles._count, 3, 1, (27, 32, 128)),
    "fill": (voxel_tiles._fill, 7, 1, (27, 32, 128)),
}
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**31 + 16]), st.integers(0, 2**40))


@st.composite
def arguments(draw, tensors, numbers):
    memory = torch.zeros(64, dtype=torch.int32)
    made = []
    for _ in range(tensors):
        tensor = memory[draw(st.sampled_from([0, 0, 0, 2, 4, 5])) :]
        may_be_wide = tensor.data_ptr() % 8 == 0
        made.append(tensor.view(torch.int64) if may_be_wide and draw(st.booleans()) else tensor)
    return made, draw(st.lists(LENGTHS, min_size=numbers, max_size=numbers))


def specialisation(kernel, tensors, numbers, constants):
    """What Triton itself tells kernels apart by."""
    function = kernel.function
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    binder = triton.runtime.jit.create_function_from_signature(function.signature, function.params, backend)
    return binder(*tensors, *numbers, *constants)[1]


@compiled_only
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=examples(60, 60))
@given(data=st.data())
def test_calls_with_one_key_are_one_kernel_to_triton(name, data):
    kernel, tensors, numbers, constants = KERNELS[name]
    kinds = []
    for _ in range(2):
        given_tensors, given_numbers = data.draw(arguments(tensors, numbers))
        pointers = [tensor.data_ptr() for tensor in given_tensors]
        key = kernel.key(0, pointers, given_tensors, given_numbers, constants)
        kinds.append((key, specialisation(kernel, given_tensors, given_numbers, constants)))
    (first, one), (second, other) = kinds
    assert (first == second) == (one == other)


@compiled_only
def test_other_constants_and_devices_have_other_keys():
    kernel, tensors = voxel_pairs._swap, [torch.zeros(4, dtype=torch.int32)] * 2
    pointers = [tensor.data_ptr() for tensor in tensors]
    keys = {kernel.key(device, pointers, tensors, (5,), (taps, 1024)) for device in (0, 1) for taps in (27, 8)}
    assert len(keys) == 4


class Stub:
    """Stands for a Triton function: notes what it is asked to compile and to run."""

    def __init__(self):
        free = SimpleNamespace(do_not_specialize=True)
        self.params, self.built, self.ran = [free] * 4, [], []

    def warmup(self, *given, **options):
        self.built.append((given, options))
        return Compiled(self.ran)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, ran):
        self.run = lambda *given: ran.append(given)

    def __getitem__(self, grid):
        return None


@compiled_only
def test_a_kernel_is_compiled_once_and_gets_pointers_numbers_and_constants(monkeypatch):
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: f"stream of {device}"))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    stub = Stub()
    kernel, (first, second) = FixedKernel(stub, num_warps=16), (torch.zeros(8, dtype=torch.int32) for _ in range(2))
    kernel((3, 2), (first, second), (7,), (27,))
    kernel((5, 1), (second, first), (9,), (27,))
    assert stub.built == [((first, second, 7, 27), {"grid": (1, 1), "num_warps": 16})]
    common = ("stream of None", "function", "metadata", None, None, None)
    assert stub.ran == [
        (3, 2, 1, *common, first.data_ptr(), second.data_ptr(), 7, 27),
        (5, 1, 1, *common, second.data_ptr(), first.data_ptr(), 9, 27),
    ]
    kernel((3, 2), (first[1:], second), (7,), (27,))  # not aligned
    kernel((3, 2), (first, second), (2**31,), (27,))
    assert len(stub.built) == 3


def test_tensors_without_memory_are_refused():
    """Under FakeTensorMode a GPU's kernel would read and write wherever such a tensor claims to lie."""
    kernel, tensors, numbers, constants = KERNELS["swap"]
    with FakeTensorMode():
        fake = [torch.zeros(8, dtype=torch.int32) for _ in range(tensors)]
    with pytest.raises(FormatError) as refused:
        kernel((1, 1), fake, [8] * numbers, constants)
    assert str(refused.value) == (
        "voxels without memory have no kernel map, as under FakeTensorMode or while a program is traced; "
        "call the layer once on real voxels first"
    )
