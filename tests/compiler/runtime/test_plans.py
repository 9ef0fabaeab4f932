"""Launch plans: one recorded run of a function, replayed on other tensors, is what the function gives for them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from recorded_plans import Function, Surroundings, assert_same, joined, plan_for, recorded
from torch import Tensor
from torch.nn import functional

from insum_ops.compiler.runtime.enqueue import LaunchCall
from insum_ops.compiler.runtime.launch import misaligned
from insum_ops.compiler.runtime.plan import EPOCH, plan_of
from insum_ops.compiler.runtime.plan_cache import SERVICES, keep_learning, planned, replayed
from insum_ops.compiler.runtime.plan_steps import ALLOCATE
from insum_ops.compiler.runtime.recording import Recording, active, paused

pytestmark = pytest.mark.cpu


def refusal(function: Function, *tensors: Tensor) -> str:
    with Recording(tensors) as recording:
        result = function(*tensors)
    recording.result(result)
    return recording.refusal


# torch operations


def _written_in_place(x: Tensor, y: Tensor) -> Tensor:
    total = x.new_zeros(4, 3)
    total[1:3] += x[:2]
    total.view(-1)[::5].mul_(2)
    total[0].copy_(y[0])
    total += 1
    return total


def _several(x: Tensor, y: Tensor) -> Any:
    first, second = x.split(2)
    return first + 1, None, [second.T, y], torch.max(x, 0)


def _iterated(x: Tensor, y: Tensor) -> Tensor:
    first, *rest = x
    return torch.stack([first, *rest]) + sum(row for row in y)


def _sliced(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[..., 1:], y[:, None, 0], x[1:, ::2][[0, 1, 0, 1]]], dim=1)


def _out(x: Tensor, y: Tensor) -> Tensor:
    made = torch.empty_like(x)
    torch.add(x, y, alpha=2, out=made)
    return torch.mul(made, made, out=None)


def _with_bits(x: Tensor, y: Tensor) -> Tensor:
    bits, rounded = y > 0, x.clone()
    bits ^= x > 1
    functional.dropout(rounded, 1.0, inplace=True)
    return x * bits + rounded


FUNCTIONS: dict[str, Function] = {
    "operators": lambda x, y: (x * 2 - y) @ x.T,
    "views": lambda x, y: x.T.unflatten(1, (2, -1)).permute(2, 0, 1).flatten(1) + y[0, 0],
    "in place": _written_in_place,
    "several results": _several,
    "rows": _iterated,
    "slices": _sliced,
    "out": _out,
    "made anew": lambda x, y: torch.eye(3) + torch.arange(3) + y.new_full((), float("inf")).clamp(max=3),
    "of the first alone": lambda x, y: x.sum(1),
    "an input itself": lambda x, y: (x, x + y),
    "a dtype and back": lambda x, y: x.double().mul(3).to(x.dtype) + y.to(torch.int64),
    "in place by other names": lambda x, y: _with_bits(functional.relu(x.clone(), inplace=True), y),
    "conditions": lambda x, y: torch.where(x > 0, x, y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_gives_what_the_function_gives(name):
    function = FUNCTIONS[name]
    plan = plan_for(function, torch.randn(4, 3), torch.randn(4, 3))
    for _ in range(2):
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        assert_same(plan.replay(x.clone(), y.clone()), function(x.clone(), y.clone()))


def test_what_is_written_to_an_input_is_written_again():
    def function(x: Tensor, y: Tensor) -> Tensor:
        x[0].zero_()
        x += y
        return x.sum()

    plan = plan_for(function, torch.randn(4, 3), torch.randn(4, 3))
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    own = x.clone()
    assert_same(plan.replay(own, y), function(x, y))
    assert_same(own, x)


def test_a_pinned_tensor_is_read_as_it_is_now():
    table = torch.randn(3)
    plan = plan_for(lambda x: x * table, torch.randn(4, 3))
    x = torch.randn(4, 3)
    assert_same(plan.replay(x), x * table)
    table.mul_(2)
    assert_same(plan.replay(x), x * table)
    assert list(plan.pinned.values()) == [table]


def test_a_plan_holds_what_is_pinned_and_no_input():
    table, x = torch.randn(3), torch.randn(4, 3)
    plan = plan_for(partial(torch.mul, table), x)
    pinned, given = ref(table), ref(x)
    del table, x
    assert given() is None
    assert pinned() is not None
    del plan
    assert pinned() is None


READERS: dict[str, Function] = {
    "tolist": lambda x: x * x.tolist()[0][0],
    "item": lambda x: x * x[0, 0].item(),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "float": lambda x: x * float(x[0, 0]),
    "nonzero": lambda x: x[:, 0].nonzero().float(),
    "where of one": lambda x: torch.where(x[:, 0] > 0)[0].float(),
    "a mask": lambda x: x[x > 0],
    "equal": lambda x: x * torch.equal(x, x),
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2) + x,
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_numbers_has_no_plan(name):
    function, cache = READERS[name], dict[Any, Any]()
    assert refusal(function, torch.randn(4, 3).abs())
    for sign in (1, 1, 1, -1, 1, -1):
        x = sign * torch.randn(4, 3).abs()
        assert_same(planned(cache, "", function, [x]), function(x))


def test_a_tensor_that_was_made_before_is_never_given_to_two():
    kept = torch.randn(3)
    assert refusal(lambda x: kept, torch.randn(3)) == "a tensor is returned that was made before"
    assert refusal(lambda x: (x, [kept]), torch.randn(3)) == "a tensor is returned that was made before"
    cache = dict[Any, Any]()
    results = [planned(cache, "", lambda x: kept.clone() if x is None else kept + x * 0, [torch.zeros(3)])] * 4
    assert all([result.data_ptr() != kept.data_ptr() for result in results])


def test_a_strided_view_begins_where_its_tensor_begins():
    whole = torch.randn(40)
    explicit = lambda x: x.as_strided((2, 3), (3, 1), x.storage_offset() + 2) * 1
    function = lambda x: torch.as_strided(x, (2, 2), (4, 1), storage_offset=x.storage_offset() + 1) * 1
    implicit = lambda x: x.as_strided((2, 3), (4, 1)) * 1
    for view in (explicit, function, implicit):
        plan = plan_for(view, whole[5:17])
        for start in (5, 0, 9, 28):
            x = whole[start : start + 12]
            assert_same(plan.replay(x), view(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_new_memory_is_filled_with_a_row_that_is_not_expanded_first(dtype):
    def function(x: Tensor) -> Tensor:
        memory = torch.empty_strided((4, 3), (3, 1), dtype=dtype, device="cpu")
        return memory.copy_(x.expand(4, 3))

    plan = plan_for(function, torch.randn(3))
    assert Tensor.expand not in [step.function for step in plan.steps]
    for x in (torch.randn(3), torch.randn(3)):
        assert_same(plan.replay(x), x.to(dtype).expand(4, 3).clone())


def test_what_is_expanded_to_another_shape_than_the_memory_stays_so():
    def function(x: Tensor) -> Tensor:
        memory = torch.empty_strided((2, 4, 3), (12, 3, 1), dtype=torch.float32, device="cpu")
        return memory.copy_(x.expand(4, 3))

    x = torch.randn(3)
    assert_same(plan_for(function, x).replay(x), x.expand(2, 4, 3).clone())


def test_one_tensor_in_two_places():
    cache = dict[Any, Any]()

    def function(x: Tensor, y: Tensor) -> Tensor:
        made = x.clone()
        made += y
        return made * x

    for turn in range(9):
        x, y = torch.randn(4), torch.randn(4)
        given = [(x, x), (x, y), (y, y)][turn % 3]
        assert_same(planned(cache, "", function, given), function(*given))


class Held:
    """Weak references to what a function makes."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, x: Tensor) -> Tensor:
        made = x + 1
        self.made.append(ref(made))
        return made

    @property
    def alive(self) -> int:
        return len([made for made in self.made if made() is not None])


@pytest.mark.parametrize("is_interpreted", [True, False])
def test_memory_is_freed_as_early_as_in_the_function(is_interpreted):
    """Each step may have the memory of those before it that nobody reads any more."""
    held, seen = Held(), []

    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = noted(held, x.view(-1).view(3, 2))
            seen.append(held.alive)
        return x

    def noted(step: Function, *given: Tensor) -> Tensor:
        recording = active()
        with paused():
            result = step(*given)
        if recording is not None:
            recording.call(lambda x: (seen.append(held.alive), step(x))[1], given, {}, result)
        return result

    plan = plan_for(function, torch.zeros(3, 2), services=Surroundings(is_interpreted).services)
    held.made.clear()
    seen.clear()
    assert_same(plan.replay(torch.zeros(3, 2)), torch.full((3, 2), 4.0))
    assert max(seen) == 1  # what the step reads


# kernels


def address_of(tensor: Tensor, *place: int) -> int:
    return tensor[place].data_ptr()


class Kernel:
    """Adds 1 to each float that it is given an address of and notes how it was called."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls: list[tuple[int, list[Any]]] = []

    def __call__(self, programs: int, arguments: Sequence[Any]) -> None:
        self.calls.append((programs, list(arguments)))
        for argument in arguments[: self.count]:
            address = argument.data_ptr() if isinstance(argument, Tensor) else argument
            ctypes.c_float.from_address(address).value += 1


class Launching:
    """Notes a launch as a launcher does: the kernels by which of their pointers are not aligned."""

    def __init__(self, count: int, grid: Callable[..., Any] = lambda *tensors: ((1, 1),), parts: int = 1) -> None:
        self.count, self.grid, self.parts = count, grid, parts
        self.kernels: dict[int, Any] = {}

    def kernel(self, unaligned: int = 0) -> Kernel:
        found: Kernel = self.kernels.setdefault(unaligned, Kernel(self.count))
        return found

    def __call__(self, *tensors: Tensor) -> None:
        unaligned, recording = misaligned([tensor.data_ptr() for tensor in tensors]), active()
        self.kernel(unaligned)
        if recording is not None:
            given = [len(tensors[0])]
            recording.launch(self.kernels, unaligned, self.grid(*tensors), self.parts, tensors, given)
        else:
            self.kernel(unaligned)(1, [tensor.data_ptr() for tensor in tensors])


def aligned(*shape: int) -> Tensor:
    """Memory that begins at a multiple of 16 bytes."""
    made = torch.zeros(torch.Size(shape).numel() + 16)
    return made[(-made.data_ptr() % 16) // 4 :][: torch.Size(shape).numel()].view(shape)


@pytest.fixture
def pointers() -> Surroundings:
    return Surroundings(is_interpreted=False)


def test_views_that_kernels_alone_read_are_addresses(pointers):
    launch, pinned = Launching(4), aligned(8, 4)

    def function(x: Tensor) -> Tensor:
        made = x * 1
        upper, lower = made.view(2, 4, 4).unbind(0)
        launch(x[2:].T, lower.flatten(), upper[2], pinned[1:].view(-1))
        return made

    plan = plan_for(function, aligned(8, 4), services=pointers.services)
    x = aligned(8, 4)
    result = plan.replay(x)
    ((programs, arguments),) = launch.kernel().calls
    expected = [address_of(x, 2, 0), address_of(result, 4, 0), address_of(result, 2, 0), address_of(pinned, 1, 0)]
    assert (programs, arguments) == (1, [*expected, 4])
    assert plan.source.count("(x0, 1)") == plan.source.count("= f") == 1  # the product alone is asked for a tensor


def test_a_plan_of_kernels_over_views_has_nothing_that_torch_could_record(pointers):
    launch = Launching(2)
    made = lambda: ALLOCATE((4, 4), (4, 1))
    launched = lambda x: (launch(x.expand(4, 4), result := made()), result)[1]
    viewed = lambda x: (launch(x, result := made()), result.view(2, 8))[1]
    plans = [plan_for(function, aligned(4), services=pointers.services) for function in (launched, viewed)]
    assert [plan.is_launched for plan in plans] == [True, True]
    plan = plan_for(lambda x: launched(x * 1), aligned(4), services=pointers.services)
    assert not plan.is_launched


def test_interpreted_kernels_take_tensors():
    launch = Launching(2)
    function = lambda x: (launch(x[1:], made := x * 1), made)[1]
    plan = plan_for(function, aligned(8, 4))
    x = aligned(8, 4)
    result = plan.replay(x)
    ((_, (first, second, length)),) = launch.kernel().calls
    assert (first.data_ptr(), second.data_ptr(), length) == (address_of(x, 1, 0), result.data_ptr(), 7)
    assert (float(x[1, 0]), float(result[0, 0])) == (1, 1)


def odd(*shape: int) -> Tensor:
    """Memory that begins 4 bytes after a multiple of 16."""
    return aligned(torch.Size(shape).numel() + 1)[1:].view(shape)


@pytest.mark.parametrize("first", [aligned, odd])
def test_an_unaligned_tensor_takes_the_kernel_for_it_or_misses(pointers, first):
    launch = Launching(2)

    def function(x: Tensor) -> Tensor:
        made = aligned(4, 4)
        launch(x, made)
        return made

    other = odd if first is aligned else aligned
    plan = plan_for(function, first(4, 4), services=pointers.services)
    mine, others = launch.kernel(int(first is odd)), int(other is odd)
    x = first(4, 4)
    assert plan.replay(x) is not None
    assert mine.calls[-1][1][0] == x.data_ptr()
    assert plan.replay(other(4, 4)) is None
    kernel = launch.kernel(others)  # once there is one, it runs
    x = other(4, 4)
    assert plan.replay(x) is not None
    assert kernel.calls[-1][1][0] == x.data_ptr()
    assert len(mine.calls) == 1


@pytest.mark.parametrize("is_packed", [False, True], ids=["arguments one by one", "arguments in one"])
def test_a_kernel_is_launched_by_the_c_function_behind_it(pointers, is_packed):
    launch, reached, asked = Launching(2), list[Any](), list[Any]()
    fixed = 77, None, (4, 1), b"ppi"
    stream_of = lambda device: asked.append(device) or 7
    launch.kernel().call = LaunchCall(lambda *given: reached.append(given), stream_of, 3, fixed, is_packed)

    def function(x: Tensor) -> Tensor:
        made = aligned(4, 4)
        launch(x, made)
        launch(made, x)
        return made

    plan, x = plan_for(function, aligned(4, 4), services=pointers.services), aligned(4, 4)
    made = plan.replay(x)
    assert asked == [3]  # once for both
    for given, (first, second) in zip(reached, ((x, made), (made, x)), strict=True):
        arguments = first.data_ptr(), second.data_ptr(), 4
        assert given == (1, 1, 1, 7, *fixed, *((arguments,) if is_packed else arguments))
    assert plan.replay(odd(4, 4)) is None
    assert len(reached) == 2
    assert not launch.kernel().calls


def test_inputs_in_one_memory_may_have_their_own_later(pointers):
    launch, whole = Launching(2), aligned(8)

    def function(x: Tensor, y: Tensor) -> Tensor:
        launch(*torch.broadcast_tensors(x, y))
        return x + y

    plan = plan_for(function, whole[:4].view(1, 4), whole[4:].view(4, 1), services=pointers.services)
    x, y = aligned(1, 4), aligned(4, 1)
    assert_same(plan.replay(x, y), x + y)
    assert float(x[0, 0]) == float(y[0, 0]) == 1
    assert launch.kernel().calls[-1][1][:2] == [x.data_ptr(), y.data_ptr()]


def test_an_input_without_memory_misses(pointers):
    launch = Launching(1)
    plan = plan_for(lambda x: (launch(x[1:]), x.new_zeros(1))[1], aligned(4, 4), services=pointers.services)
    x = torch.zeros(4, 4)
    x.untyped_storage().resize_(0)
    assert plan.replay(x) is None
    assert not launch.kernel().calls


def test_a_varying_length_makes_as_many_programs(pointers):
    launch = Launching(2, lambda x, y: ((len(x), 4), (3, 2)), parts=5)
    function = lambda x: (launch(x, made := x.new_zeros(len(x), 4)), made)[1]
    plan = joined(function, [aligned(4, 4)], [aligned(8, 4)], pointers.services)
    for length, blocks in ((4, 1), (5, 2), (9, 3), (33, 9)):
        x = aligned(length, 4)
        result = plan.replay(x)
        unaligned = misaligned([x.data_ptr(), result.data_ptr()])
        programs, arguments = launch.kernel(unaligned).calls[-1]
        assert (programs, arguments) == (5 * blocks * 2, [x.data_ptr(), result.data_ptr(), length])


def test_a_pinned_tensor_that_has_moved_misses(pointers):
    launch, pinned = Launching(2), aligned(4, 4)
    plan = plan_for(lambda x: (launch(pinned[1:], made := x * 1), made)[1], aligned(4, 4), services=pointers.services)
    assert plan.replay(aligned(4, 4)) is not None
    pinned.add_(1)
    assert plan.replay(aligned(4, 4)) is not None
    pinned.data = aligned(4, 4)
    assert plan.replay(aligned(4, 4)) is None


def test_a_replay_is_on_the_device_of_its_tensors(monkeypatch):
    entered: list[int] = []

    @contextmanager
    def device(index: int) -> Any:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    surroundings = Surroundings(has_several_devices=True)
    steps = replace(recorded(lambda x: x + 1, torch.zeros(3)), device=torch.device("cuda", 1))
    plan = plan_of(steps, surroundings.services)
    assert plan is not None
    for current, expected in ((1, []), (0, [1]), (1, [1]), (2, [1, 1])):
        surroundings.device = current
        assert_same(plan.replay(torch.ones(3)), torch.full((3,), 2.0))
        assert entered == expected


# guards


def test_tuning_ends_all_plans(monkeypatch):
    monkeypatch.setattr(EPOCH, "number", EPOCH.number)
    plan = plan_for(lambda x: x + 1, torch.zeros(3))
    EPOCH.number += 1
    assert plan.replay(torch.zeros(3)) is None


def test_a_plan_for_eager_calls_is_not_captured():
    surroundings = Surroundings()
    steps = recorded(lambda x: x + 1, torch.zeros(3))
    eager, any_time = (
        plan_of(replace(steps, is_for_eager_calls=is_eager), surroundings.services) for is_eager in (True, False)
    )
    for surroundings.is_capturing in (False, True):
        assert (eager.replay(torch.zeros(3)) is None) is surroundings.is_capturing
        assert any_time.replay(torch.zeros(3)) is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sums_of_half_precision_depend_on_torchs_flags(dtype):
    surroundings = Surroundings()
    plan = plan_for(lambda x: x + 1, torch.zeros(3, dtype=dtype), services=surroundings.services)
    surroundings.rounds = False
    assert (plan.replay(torch.zeros(3, dtype=dtype)) is None) is (dtype != torch.float32)


def test_a_pinned_index_tensor_must_not_change():
    x, index = torch.randn(4), torch.tensor([2, 0])
    function = lambda x: x[index] * 1
    plan = plan_for(function, x)
    assert_same(plan.replay(x), function(x))
    index[0] = 1
    assert plan.replay(x) is None
    plan = plan_for(function, x)
    index.data = torch.tensor([3, 3])
    assert plan.replay(x) is None
    steps = recorded(function, x, owned=[index])  # who owns it guards it
    plan = plan_of(steps, Surroundings().services)
    index[0] = 1
    assert_same(plan.replay(x), function(x))
    with torch.inference_mode():
        index = torch.tensor([2, 0])  # it does not tell when it changes
    assert plan_of(recorded(function, x), Surroundings().services) is None


@pytest.mark.parametrize(
    "read",
    [
        lambda index: index,
        lambda index: index.contiguous(),
        lambda index: index.view(-1),
        lambda index: index.int(),
        lambda index: index.to(torch.int32)[None].clone().flatten(),
    ],
    ids=["itself", "in order already", "a view", "cast", "copied"],
)
def test_index_tensors_are_in_range_and_padded_as_they_were(read):
    def function(x: Tensor, index: Tensor) -> Tensor:
        recording = active()
        if recording is not None:
            recording.ranged(read(index), 4, False)
        return x[index] * 1

    x = torch.randn(4)
    plan = plan_for(function, x, torch.tensor([0, 3]))
    assert_same(plan.replay(x, torch.tensor([2, 1])), x[[2, 1]])
    for outside in ([0, 4], [-1, 3]):
        assert plan.replay(x, torch.tensor(outside)) is None


@pytest.mark.parametrize("services", [Surroundings().services, SERVICES], ids=["nothing is known", "ranges are kept"])
def test_kernels_that_were_chosen_by_an_order_are_for_that_order(services):
    def function(x: Tensor, index: Tensor) -> Tensor:
        recording = active()
        if recording is not None:
            recording.ranged(index, 4, False, True)
        return x[index] * 1

    x = torch.randn(4)
    plan = plan_for(function, x, torch.tensor([0, 3]), services=services)
    index = torch.tensor([2, 2])
    for _ in range(2):
        assert_same(plan.replay(x, index), x[[2, 2]])
        assert plan.replay(x, torch.tensor([2, 1])) is None
    index[1] = 1
    for _ in range(2):
        assert plan.replay(x, index) is None
    index[0] = 0
    assert_same(plan.replay(x, index), x[[0, 1]])


# threads


def test_threads_record_apart_while_another_replays():
    """Each has steps of its own, however they take turns."""
    replayed = plan_for(lambda x: (x + 1) * 2, torch.zeros(3))
    meet, wrong = threading.Barrier(3), list[Any]()

    def record(factor: int) -> None:
        def function(x: Tensor) -> Tensor:
            for _ in range(20):
                meet.wait(30)
                x = x * factor + 1
            return x

        plan = plan_for(function, torch.zeros(3))
        x = torch.rand(3, dtype=torch.float64)
        if len(plan.steps) != 40 or active() is not None:
            wrong.append(plan)
        expected = x
        for _ in range(20):
            expected = expected * factor + 1
        if not torch.equal(plan.replay(x), expected):
            wrong.append(factor)

    def replay() -> None:
        for number in range(20):
            meet.wait(30)
            x = torch.full((3,), float(number))
            if active() is not None or not torch.equal(replayed.replay(x), (x + 1) * 2):
                wrong.append(number)

    threads = [threading.Thread(target=target) for target in (lambda: record(2), lambda: record(3), replay)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def fresh_and_its_view(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty_strided((2, 6), (6, 1), dtype=x.dtype, device=x.device)
    made.zero_()
    return made, made.view(3, 4)


def only_the_view(x: Tensor) -> Tensor:
    return fresh_and_its_view(x)[1]


def test_memory_that_is_returned_beside_its_view_keeps_its_shape() -> None:
    x = torch.zeros(1)
    plan = plan_of(recorded(fresh_and_its_view, x), Surroundings().services)
    assert plan is not None
    assert [tuple(part.shape) for part in plan.replay(x)] == [(2, 6), (3, 4)]


def test_what_is_returned_as_a_view_alone_is_no_view() -> None:
    x = torch.zeros(1)
    plan = plan_of(recorded(only_the_view, x), Surroundings().services)
    assert plan is not None
    result = plan.replay(x)
    assert result.shape == (3, 4)
    assert result._base is None
    assert not result.any()


def test_runs_that_are_never_like_the_next_are_seldom_recorded() -> None:
    were_recorded = []

    def function(x: Tensor) -> Tensor:
        recording = active()
        were_recorded.append(recording is not None)
        if recording is not None:
            recording.postpone()
        return x + 1

    cache: dict[Any, Any] = {}
    for number in range(200):
        assert planned(cache, "a mark", function, (torch.full((2,), float(number)),)).tolist() == [number + 1.0] * 2
    assert any(were_recorded)
    assert sum(were_recorded[100:]) <= 2  # lest a later one is


@pytest.mark.parametrize("is_interpreted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_settings_are_asked_where_kernels_depend_on_them_and_left_to_torch_on_a_cpu(is_interpreted, dtype):
    surroundings, x = Surroundings(is_interpreted), torch.zeros(3, dtype=dtype)
    alone = plan_for(lambda x: x + 1, x, services=surroundings.services)
    widened = plan_for(lambda x: (x.float() + 1).to(dtype), x, services=surroundings.services)
    assert alone.replay(x) is not None
    assert widened.replay(x) is not None
    surroundings.precision = "tf32"  # of products of float32
    assert (alone.replay(x) is None) is (is_interpreted and dtype == torch.float32)
    assert (widened.replay(x) is None) is is_interpreted


def test_one_key_may_stand_for_other_numbers_of_tensors():
    cache, a, b = {}, torch.ones(3), torch.full((3,), 2.0)
    for _ in range(5):
        assert_same(planned(cache, "sum", lambda *given: sum(given[1:], given[0]) * 1, (a,), varies=True), a)
        assert_same(planned(cache, "sum", lambda *given: sum(given[1:], given[0]) * 1, (a, b), varies=True), a + b)


def test_a_function_that_learns_is_told_from_one_that_does_not():
    cache, x = {}, torch.ones(3, requires_grad=True)
    for _ in range(5):
        with torch.no_grad():
            assert not planned(cache, "twice", lambda x: x * 2, (x,)).requires_grad
        result = planned(cache, "twice", lambda x: x * 2, (x,), kind="learns")
        assert torch.autograd.grad(result.sum(), x)[0].tolist() == [2, 2, 2]


def test_nothing_is_replayed_while_a_run_is_recorded():
    cache, x = {}, torch.ones(3)
    function = lambda x: x * 2
    for _ in range(5):
        planned(cache, "twice", function, (x,))
    assert replayed(cache, "twice", (x,)) is not None
    with Recording([x]) as recording:
        assert replayed(cache, "twice", (x,)) is None
        planned(cache, "twice", function, (x,))
    assert len(recording.steps) == 1
    assert replayed(cache, "twice", (x,)) is not None


class Doubled(torch.autograd.Function):
    """A value that is given, as twice a tensor."""

    @staticmethod
    def forward(ctx: Any, value: list[Tensor], x: Tensor) -> Tensor:
        return value[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return None, 2 * grad_output


def learn_doubled(value: Tensor, tensors: Sequence[Tensor], given: list[str]) -> Tensor:
    given.append("learned")
    result: Tensor = Doubled.apply([value], *tensors)
    return result


def learned_cache(x: Tensor) -> dict[Any, Any]:
    """A cache with the plan of twice a tensor, which calls with gradients share."""
    cache: dict[Any, Any] = {}
    for _ in range(3):
        with torch.no_grad():
            planned(cache, "twice", lambda x: x * 2, (x,))
        keep_learning(cache, "twice", (x,), learn_doubled)
    return cache


def test_a_plan_serves_calls_that_learn_as_well():
    x, seen = torch.ones(3, requires_grad=True), []
    cache = learned_cache(x)
    y = torch.full((3,), 5.0, requires_grad=True)
    value = replayed(cache, "twice", (y,), (), seen)
    assert (value.tolist(), seen) == ([10.0] * 3, ["learned"])
    assert torch.autograd.grad(value.sum(), y)[0].tolist() == [2.0] * 3
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert replayed(cache, "twice", (y,), (), seen).grad_fn is None
    assert seen == ["learned"]


@pytest.mark.parametrize(
    "unlike",
    [torch.ones(3), torch.ones(4, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)],
    ids=["without a gradient", "longer", "of another type"],
)
def test_a_call_unlike_the_one_that_learned_misses(unlike):
    cache, seen = learned_cache(torch.ones(3, requires_grad=True)), []
    assert replayed(cache, "twice", (unlike,), (), seen) is None
    assert not seen


def test_a_plan_that_misses_leaves_gradients_recorded():
    x, seen = torch.ones(3, requires_grad=True), []
    cache = learned_cache(x)
    EPOCH.number += 1
    try:
        assert replayed(cache, "twice", (x,), (), seen) is None
    finally:
        EPOCH.number -= 1
    assert torch.is_grad_enabled()
    assert not seen


def test_what_transforms_wrap_does_not_reach_a_plan_that_learns():
    x, seen = torch.ones(3, requires_grad=True), []
    cache = learned_cache(x)
    asked = lambda row: row * (replayed(cache, "twice", (row,), (), seen) is None)
    torch.func.vmap(asked)(torch.ones(2, 3))
    torch.func.grad(lambda row: asked(row).sum())(torch.ones(3))
    torch.func.jvp(asked, (torch.ones(3),), (torch.ones(3),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert replayed(cache, "twice", (x,), (), seen) is None
    assert not seen


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_no_tensor_of_a_plan() -> None:
    """A guard would ask for its strides, at which torch ends the process."""
    cache, rows = dict[Any, Any](), torch.ones(3, 4)
    for _ in range(5):
        planned(cache, "sum", lambda x: x + 1, [rows])
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
    assert replayed(cache, "sum", [rows]) is not None
    assert replayed(cache, "sum", [nested]) is None
    assert all((part == 2).all() for part in planned(cache, "sum", lambda x: x + 1, [nested]).unbind())
