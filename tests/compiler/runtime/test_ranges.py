"""Index values are read once per tensor and version, and one out of range gets a message."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import messages
from statements import DEVICE, IS_INTERPRETED
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.errors import IndexRangeError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.runtime import ranges
from insum_ops.compiler.runtime.ranges import (
    ascends,
    check_ranges,
    remember_range,
    remembered_range,
    remembered_ranges,
    segment_lengths,
)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors whose values were read, in order."""
    found: list[Tensor] = []
    read_all = ranges._read

    def read(indices: Sequence[Tensor], asked: Sequence[bool]) -> Any:
        found.extend(indices)
        return read_all(indices, asked)

    monkeypatch.setattr(ranges, "_read", read)
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_smallest_and_largest(dtype: torch.dtype) -> None:
    assert remembered_range(torch.tensor([[3, -1], [7, 0]], dtype=dtype)) == (-1, 7)
    assert remembered_range(torch.tensor(5, dtype=dtype)) == (5, 5)
    assert remembered_range(torch.empty(0, 3, dtype=dtype)) == (0, -1)


def test_a_tensor_is_read_once(reads: list[Tensor]) -> None:
    index = torch.tensor([0, 2])
    for _ in range(3):
        assert remembered_range(index) == (0, 2)
    assert len(reads) == 1


def test_a_changed_tensor_is_read_again(reads: list[Tensor]) -> None:
    index = torch.tensor([0, 2])
    assert remembered_range(index) == (0, 2)
    index[0] = 9
    assert remembered_range(index) == (2, 9)
    assert len(reads) == 2


def test_a_tensor_with_other_data_is_read_again(reads: list[Tensor]) -> None:
    index = torch.tensor([0, 2])
    assert remembered_range(index) == (0, 2)
    index.data = torch.tensor([9, 2])  # no change that is counted
    assert remembered_range(index) == (2, 9)
    assert len(reads) == 2


def test_the_order_is_read_with_the_range_and_once(reads: list[Tensor]) -> None:
    sorted_index, index, one = torch.tensor([-1, 2, 2]), torch.tensor([2, 0]), torch.tensor([5])
    assert remembered_ranges(sorted_index, index, one, ordered=(0, 1)) == [(-1, 2), (0, 2), (5, 5)]
    read = [getattr(own, ranges._Range.attribute).ascends for own in (sorted_index, index, one)]
    assert read[:2] == [True, False]  # on a GPU the last one's is there too, though nobody asked
    assert [ascends(own) for own in (sorted_index, index, one)] == [True, False, True]
    index.copy_(torch.tensor([0, 2]))
    assert ascends(index)
    sorted_index[0] = 9
    assert not ascends(sorted_index)
    assert len(reads) == 3


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_kernel_reads_ranges_and_order_of_any_layout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "BLOCK", 16)
    monkeypatch.setattr(ranges, "PROGRAMS", 3)
    torch.manual_seed(0)
    for length in (1, 2, 15, 16, 17, 48, 49, 130):
        drawn = torch.randint(-3, 1000, (length,), dtype=dtype, device=DEVICE)
        tables = [drawn, drawn.sort().values, drawn.sort().values.flip(0), drawn.expand(3, -1), drawn - 2000]
        tables += [torch.stack([drawn, -drawn])[1], torch.stack([drawn, -drawn], 1)[:, 0], drawn[:1].expand(length)]
        tables += [torch.full((length,), torch.iinfo(dtype).max // 4, dtype=dtype, device=DEVICE), drawn[0]]
        found = ranges.read_by_kernel(tables)
        for table, (low, high, is_ascending) in zip(tables, found):
            assert (low, high) == (int(table.min()), int(table.max()))
            in_order = bool((table.flatten().diff() >= 0).all()) if table.ndim == 1 else None
            assert is_ascending is in_order
    ends = torch.iinfo(dtype)
    far = [torch.tensor(own, dtype=dtype, device=DEVICE) for own in ([ends.min] * 40, [7, ends.min, 9], [ends.max, 3])]
    (low, high, _), (other_low, other_high, _), (least, most, is_ascending) = ranges.read_by_kernel(far)
    assert low < 0
    assert high < 0
    assert other_low < 0
    assert (other_high, least, is_ascending) == (9, 3, False)
    assert most >= 2**31 - 1


@pytest.mark.kernels
def test_a_kernel_reads_right_after_one_was_interrupted_and_beside_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, other = torch.arange(100, device=DEVICE), torch.arange(7, -5, -1, device=DEVICE)
    expected = [(0, 99, True), (-4, 7, False)]
    assert ranges.read_by_kernel([index, other]) == expected
    survey, launches = ranges.SURVEY, count()

    def interrupted(*arguments: Any) -> None:
        if next(launches) == 1:
            raise KeyboardInterrupt
        survey(*arguments)

    monkeypatch.setattr(ranges, "SURVEY", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranges.read_by_kernel([1000 - index, other])
    assert ranges.read_by_kernel([index, other]) == expected
    with ThreadPoolExecutor(1 if IS_INTERPRETED else 4) as pool:  # Triton interprets on one thread
        assert list(pool.map(lambda _: ranges.read_by_kernel([index, other]), range(12))) == [expected] * 12
    many = [index + at for at in range(25)]
    assert ranges.read_by_kernel(many) == [(at, 99 + at, True) for at in range(25)]


def test_a_maker_says_whether_its_tensor_ascends(reads: list[Tensor]) -> None:
    first, second = torch.tensor([0, 1]), torch.tensor([0, 1])
    remember_range(first, 0, 1)
    remember_range(second, 0, 1, ascends=True)
    assert (ascends(first), ascends(second)) == (False, True)
    assert not reads


def test_a_tensor_that_grows_or_shrinks_at_its_address_is_read_again() -> None:
    positions, index, T = torch.tensor([0, 1, 9]), torch.empty(0, dtype=torch.int64), torch.randn(3)
    index.data = positions[:2]
    for _ in range(3):
        torch.testing.assert_close(insum("C[p] += T[I[p]]", T=T, I=index), T[:2])
    index.data = positions
    with pytest.raises(IndexRangeError, match=r"^I\[2\] is 9, outside T dimension 0, which has size 3; "):
        insum("C[p] += T[I[p]]", T=T, I=index)
    assert remembered_range(index) == (0, 9)
    index.data = positions[:2]
    torch.testing.assert_close(insum("C[p] += T[I[p]]", T=T, I=index), T[:2])


def test_what_is_known_of_segments_is_no_range() -> None:
    pointers = torch.tensor([0, 2, 5])
    assert segment_lengths(pointers) == (2, 3)
    assert remembered_range(pointers) == (0, 5)
    assert segment_lengths(pointers) == (2, 3)


def test_a_tensor_without_versions_is_read_every_time(reads: list[Tensor]) -> None:
    with torch.inference_mode():
        index = torch.tensor([0, 2])
        assert remembered_range(index) == (0, 2)
        index[0] = 9
        assert remembered_range(index) == (2, 9)
    assert len(reads) == 2


def saved_and_loaded(index: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"index": index}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["index"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index)), saved_and_loaded],
    ids=["copy", "deepcopy", "pickle", "save"],
)
def test_a_copy_is_read_for_itself(copied: Callable[[Tensor], Tensor]) -> None:
    index, A = torch.tensor([0, 1]), torch.ones(3)
    for _ in range(5):
        index[0] = 2
    insum("C[p] += A[E[p]]", A=A, E=index)
    other = copied(index)
    while other._version < index._version:  # the version of which the original's values are known
        other[1] = -1
    other[1] = -1
    assert insum("C[p] += A[E[p]]", A=A, E=other).tolist() == [1, 0]
    other[1] = 3
    with pytest.raises(IndexRangeError, match=r"^E\[1\] is 3, outside A dimension 0, which has size 3;"):
        insum("C[p] += A[E[p]]", A=A, E=other)


def test_a_call_reads_each_index_tensor_once(reads: list[Tensor]) -> None:
    E, A = torch.tensor([0, 1, 1]), torch.ones(3)
    for _ in range(3):
        insum("C[E[p]] += A[E[p]] * A[p]", E=E, A=A, size=(2,))
    assert len(reads) == 1


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that the host waited for, in order, if tensors of a CPU are read as those of a GPU are."""
    found: list[Tensor] = []
    tolist = Tensor.tolist

    def read(indices: Sequence[Tensor], asked: Sequence[bool]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "tolist", lambda tensor: (found.append(tensor), tolist(tensor))[1])
            return ranges._read_together(indices, asked)

    monkeypatch.setattr(ranges, "_read_on_cpu", read)
    return found


def test_all_new_index_tensors_of_a_call_are_read_at_once(reads: list[Tensor], waits: list[Tensor]) -> None:
    """Cold, recorded and replayed; of both dtypes, one of them in two places, one without entries."""
    text, X = "Y[T[e],c] += X[U[e],c] * W[R[e],c] * V[R[e],c] * Z[N[k],c]", torch.rand(4, 2, dtype=torch.float64)
    dense, none = dict(X=X, W=X + 1, V=X + 2, Z=X + 3), torch.empty(0, dtype=torch.int32)
    for call in range(6):
        T, U, R = torch.tensor([0, 2, 2]), torch.tensor([3, 1, 0], dtype=torch.int32), torch.tensor([1, 2, 3])
        reads.clear(), waits.clear()
        insum(text, **dense, T=T, U=U, R=R, N=none, size=(3, 2))
        assert (len(reads), len(waits)) == (3, 1), call
        assert remembered_ranges(T, U, R, none, T) == [(0, 2), (0, 3), (1, 3), (0, -1), (0, 2)]
        assert len(waits) == 1
    reads.clear(), waits.clear()
    known = dict(T=T, U=U, R=R, N=none)
    for _ in range(2):
        insum(text, **dense, **known, size=(3, 2))
    assert not reads
    U[0] = 2  # what has changed is read alone
    insum(text, **dense, **known, size=(3, 2))
    assert (len(reads), len(waits)) == (1, 1)


def test_one_of_several_new_index_tensors_is_out_of_range() -> None:
    text, X = "Y[T[e],c] += X[U[e],c]", torch.rand(4, 2)
    T = torch.tensor([0, 2])
    for high in (3, 3, 3, 3, 7):  # the last of which a plan refuses
        U = torch.tensor([high, 0], dtype=torch.int32)
        if high < 4:
            torch.testing.assert_close(insum(text, X=X, T=T.clone(), U=U, size=(3, 2))[2], X[0])
        else:
            with pytest.raises(IndexRangeError, match=r"^U\[0\] is 7, outside X dimension 0, which has size 4; "):
                insum(text, X=X, T=T.clone(), U=U, size=(3, 2))


def test_a_padded_tensor_among_new_ones_is_no_other_one() -> None:
    text, X = "Y[T[e],c] += X[U[e],c]", torch.rand(4, 2, dtype=torch.float64)
    for call in range(8):
        T, U = torch.tensor([0, 2]), torch.tensor([3, -1 if call % 2 else 1])
        expected = torch.zeros(3, 2, dtype=torch.float64)
        expected[0] = X[3]
        if call % 2 == 0:
            expected[2] = X[1]
        torch.testing.assert_close(insum(text, X=X, T=T, U=U, size=(3, 2)), expected)


def test_tensors_without_versions_are_read_at_once_every_time(reads: list[Tensor], waits: list[Tensor]) -> None:
    with torch.inference_mode():
        T, U = torch.tensor([0, 2]), torch.tensor([3, 1])
        for _ in range(2):
            assert remembered_ranges(T, U) == [(0, 2), (1, 3)]
    assert (len(reads), len(waits)) == (4, 2)


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "is_captured", lambda device: True)
    index: Any = SimpleNamespace(device=torch.device("cuda"), is_cpu=False, _version=0)
    assert remembered_range(index) == (-1, -1)  # unchecked, and perhaps -1


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("expr", ["C[i,k] = A[AM[i],k]", "C[AM[i],k] += A[i,k]", "C[AM[i],k] = max(A[i,k])"])
def test_what_has_no_values_tells_shapes(expr: str, casts: bool) -> None:
    A, AM = torch.empty(3, 4, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):  # which casts nothing there
        C = insum(expr, A=A, AM=AM, size=(3, 4))
    assert (C.shape, C.device.type, C.dtype) == ((3, 4), "meta", torch.float32)


def test_index_tensors_that_hold_a_negative_value_are_told() -> None:
    tensors = {"E": torch.tensor([0, -1]), "F": torch.tensor([0, 1]), "A": torch.ones(2)}
    bound = bind(parse("C[E[p]] += A[F[p]]"), tensors, (1,))
    assert check_ranges(bound, tensors) == {"E"}


A, B = torch.ones(3), torch.ones(2, 5)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"A": A, "E": torch.tensor([0, 2, 3, 7])},
        """
E[2] is 3, outside A dimension 0, which has size 3; a negative position means no entry
    C[p] += A[E[p]]
              ^
""",
    ),
    (
        {"A": A, "E": torch.tensor([[0, 1, 2], [0, 4, 2]]), "size": (4,)},
        """
E[1,1] is 4, outside C dimension 0, which has size 4; a negative position means no entry
    C[E[j,i]] += A[i]
      ^
""",
    ),
    (
        {"B": B, "E": torch.tensor(5, dtype=torch.int32)},
        """
E[()] is 5, outside B dimension 1, which has size 5; a negative position means no entry
    C[i] += B[i,E[()]]
                ^
""",
    ),
    (
        {"A": A, "E": torch.tensor([1, 0]), "F": torch.tensor([0, 2])},
        """
F[1] is 2, outside E dimension 0, which has size 2; a negative position means no entry
    C[i] = A[E[F[i]]]
               ^
""",
    ),
    (
        {"A": torch.ones(0), "E": torch.tensor([-1, 0])},
        """
E[1] is 0, outside A dimension 0, which has size 0; a negative position means no entry
    C[i] = A[E[i]]
             ^
""",
    ),
    (
        {"A": torch.ones(4), "B": A, "E": torch.tensor([3])},
        """
E[0] is 3, outside B dimension 0, which has size 3; a negative position means no entry
    C[i] = A[E[i]] * B[E[i]]
                       ^
""",
    ),
]


@pytest.mark.parametrize(("tensors", "text"), MISTAKES, ids=[text.split("\n")[1] for _, text in MISTAKES])
def test_message(tensors: dict[str, Any], text: str) -> None:
    ((expr, expected),) = messages(text)
    for _ in range(2):  # what is remembered is refused as well
        with pytest.raises(IndexRangeError) as caught:
            insum(expr, **tensors)
        assert str(caught.value) == expected


def test_out_of_range_is_an_index_error_too() -> None:
    with pytest.raises(IndexError):
        insum("C[p] += A[E[p]]", A=A, E=torch.tensor([9]))


def test_any_negative_value_is_no_entry() -> None:
    E = torch.tensor([-1, 1, -7])
    assert insum("C[p] += A[E[p]]", A=A, E=E).tolist() == [0, 1, 0]
