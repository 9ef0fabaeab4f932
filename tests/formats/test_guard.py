"""Nothing that is worked out under a tracer, a mode or a transform is kept: ordinary calls after it are right."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from entry_points import ENTRY_POINTS, EntryPoint
from process_caches import forget
from statements import IS_INTERPRETED
from tolerances import TOLERANCE
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.formats.errors import FormatError
from insum_ops.formats.guard import ChangeGuard, ChangeGuards, is_real, may_keep

NAMES = [
    *("insum gather", "insum max", "insum by columns", "insum COO", "spmm GroupCOO values", "spmm mean", "sddmm"),
    *("spmm edges", "SpMM", "BlockSparseLinear", "SubMConv3d", "SparseConv3d and back", "SparseAvgPool3d"),
    *("tensor product, shared weights", "tensor product, weights of each", "tensor product, channel by channel"),
]
# What a tracer that comes first is refused, by torch or by us: numbers that fake tensors do not have (RuntimeError and
# its kin), real tensors among fake ones (AssertionError), symbols as sizes (TypeError), a graph (UnsupportedError).
REFUSED = (RuntimeError, AssertionError, TypeError, UnsupportedError, FormatError)

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="kernels take no part in it")


class Holder(torch.nn.Module):
    """A module that holds what its function reads."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__()
        self.function = entry.function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


def exported(entry: EntryPoint) -> object:
    return torch.export.export(Holder(entry), entry.of(0), strict=False)


def traced(tracing_mode: str) -> Callable[[EntryPoint], object]:
    return lambda entry: make_fx(entry.function, tracing_mode=tracing_mode)(*entry.of(0))


def faked(entry: EntryPoint) -> object:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    with mode:
        return entry.function(*[mode.from_tensor(tensor) for tensor in entry.of(0)])


def differentiated(entry: EntryPoint) -> object:
    return torch.func.grad(lambda *given: entry.function(*given).sum())(*entry.of(0))


def batched(entry: EntryPoint) -> object:
    return torch.func.vmap(entry.function)(*[torch.stack([tensor, tensor]) for tensor in entry.of(0)])


def functionalized(entry: EntryPoint) -> object:
    return torch.func.functionalize(entry.function)(*entry.of(0))


def inferred(entry: EntryPoint) -> object:
    with torch.inference_mode():
        return entry.function(*entry.of(0))


WATCHERS: dict[str, Callable[[EntryPoint], object]] = {
    "export": exported,
    "make_fx fake": traced("fake"),
    "make_fx symbolic": traced("symbolic"),
    "make_fx real": traced("real"),
    "FakeTensorMode": faked,
    "grad": differentiated,
    "vmap": batched,
    "functionalize": functionalized,
    "inference_mode": inferred,
}


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    """What other tests have left behind is neither looked through nor a reason to be right."""
    forget()


def check_after(name: str, watch: Callable[[EntryPoint], object]) -> None:
    """An entry point that is watched at its first call gives afterwards what one gives that never was."""
    entry, fresh = ENTRY_POINTS[name](torch.float32), ENTRY_POINTS[name](torch.float32)
    with suppress(*REFUSED):
        watch(entry)
    assert all([is_real(tensor) for tensor in kept_tensors(entry)])
    for part, right in zip(entry.run(0), fresh.run(0), strict=True):
        assert is_real(part)
        torch.testing.assert_close(part, right, **TOLERANCE[torch.float32])


def kept_tensors(entry: EntryPoint) -> list[Tensor]:
    """All dense tensors that can be reached from an entry point, or from what the package's modules hold."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "insum_ops"]
    waiting: list[Any] = [entry, *[vars(module) for module in modules]]
    known, found = set[int](), list[Tensor]()
    while waiting:
        one = waiting.pop()
        if id(one) in known or isinstance(one, (type, ModuleType)):
            continue
        known.add(id(one))
        if isinstance(one, Tensor) and one.layout is torch.strided:
            found.append(one)
        is_ours = type(one).__module__.split(".")[0] in ("insum_ops", "entry_points", "builtins", "functools")
        if (is_ours or isinstance(one, (Tensor, torch.nn.Module))) and not _is_elsewhere(one):
            waiting += gc.get_referents(one)
    return found


def _is_elsewhere(one: object) -> bool:
    """The names of a module that is not the package's, which its functions lead to."""
    return isinstance(one, dict) and "__spec__" in one and str(one["__name__"]).split(".")[0] != "insum_ops"


@pytest.mark.sampled
@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_was_watched_first_is_right_afterwards(name, watcher):
    if name in ENTRY_POINTS:  # tensor products need e3nn, an extra
        check_after(name, WATCHERS[watcher])


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["insum by columns", "SpMM"])
def test_what_was_compiled_first_is_right_afterwards(name, backend):
    torch._dynamo.reset()
    try:
        check_after(name, lambda entry: torch.compile(entry.function, backend=backend)(*entry.of(0)))
    finally:
        torch._dynamo.reset()


def test_tensors_without_numbers_of_their_own_are_not_kept():
    real = torch.ones(2)
    assert may_keep(real, torch.nn.Parameter(real), None)
    fake = FakeTensorMode().from_tensor(real)
    assert not may_keep(real, fake)
    seen = []
    look = lambda row: (seen.append((may_keep(row), may_keep(real))), row.sum())[1]
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.functionalize(look)(torch.ones(2))
    assert seen == [(False, True)] * 3
    with FakeTensorMode():
        assert not may_keep(real)


def written(tensor: Tensor) -> None:
    tensor[0] = 9


def moved(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def moved_and_back(tensor: Tensor) -> None:
    """Memory that is given away may come back, at the same address with other numbers."""
    shape = tensor.shape
    tensor.data = torch.zeros(2, dtype=tensor.dtype)
    tensor.data = torch.zeros(shape, dtype=tensor.dtype)


def cut(tensor: Tensor) -> None:
    tensor.data = tensor.data[:1]


def of_another_shape(tensor: Tensor) -> None:
    tensor.data = tensor.data.as_strided((3, 2), tensor.stride())


def of_other_strides(tensor: Tensor) -> None:
    tensor.data = tensor.data.as_strided(tensor.shape, (1, 2))


CHANGES = (written, moved, moved_and_back, cut, of_another_shape, of_other_strides)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_change_of_a_tensor_escapes_its_guard(change):
    tensor, other = torch.arange(8)[:6].view(2, 3), torch.zeros(3)
    guard, guards = ChangeGuard(tensor), ChangeGuards([other, None, tensor])
    assert guard.holds_for(tensor)
    assert guards.hold()
    change(tensor)
    assert not guard.holds_for(tensor)
    assert not guards.hold()
    assert guards.renewed() is None


@pytest.mark.parametrize("change", [written, cut], ids=lambda change: change.__name__)
def test_tensors_without_versions_are_compared_with_a_copy(change):
    with torch.inference_mode():
        tensor = torch.arange(6).view(2, 3)
        guards, unseeing = ChangeGuards([tensor]), ChangeGuards([tensor], compares=False)
        assert ChangeGuard.of(tensor) is None
        tensor.add_(1).sub_(1)
        assert guards.hold()
        change(tensor)
        assert not guards.hold()
        assert unseeing.hold()


def test_a_guard_is_renewed_for_tensors_that_hold_what_they_held():
    tensor = torch.arange(6)
    guards = ChangeGuards([tensor])
    tensor.add_(0)
    assert not guards.hold()
    assert guards.renewed() is None
    guards = ChangeGuards([tensor])
    guards.keep_values()
    tensor.add_(0)
    renewed = guards.renewed()
    assert not guards.hold()
    assert renewed is not None
    assert renewed.hold()
    tensor.add_(1)
    assert not renewed.hold()
    assert renewed.renewed() is None
    assert not renewed.have_kept_values()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guards: pickle.loads(pickle.dumps(guards))])
def test_copies_of_guards_hold_if_the_guards_did(copied):
    tensor = torch.arange(6)
    guards = ChangeGuards([tensor])
    known = copied(guards)
    tensor.add_(1)
    assert known.hold()
    assert not copied(guards).hold()
    known.tensors[0].add_(1)
    assert not known.hold()


def test_a_guard_keeps_no_tensor_alive():
    tensor = torch.arange(6)
    guard, watch = ChangeGuard(tensor), weakref.ref(tensor)
    del tensor
    assert watch() is None
    assert guard.memory is not None
