"""The express lane: a call takes it, something that decides the call changes, and the result is right again."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from weakref import ref

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from insum_ops import conv_forms, insum, nn, spmm
from insum_ops.compiler import autotune, express, launch, pipeline, ready, ready_call
from insum_ops.compiler.errors import IndexRangeError, OperandError
from insum_ops.compiler.launch import Launcher
from insum_ops.compiler.problem import candidates
from insum_ops.formats import GroupCOO
from insum_ops.formats.errors import FormatError
from insum_ops.functional import insum_beside

pytestmark = SPARSE_WARNINGS
HAS_LANE = IS_INTERPRETED or DEVICE != "cpu"  # a graph of torch operations has none
SPMM = "C[m,n] += A[m,k] * B[k,n]"
RAW = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
GATHER = "C[i,n] += B[I[i],n]"


def matrix(rows=6, columns=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(rows, columns, generator=generator)
    return (dense * (torch.rand(rows, columns, generator=generator) < 0.5)).to(DEVICE, dtype)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


class Lane:
    """How many calls took the lane to its end, and how many left it since something had changed."""

    taken = left = 0

    @contextmanager
    def is_taken(self, times=1):
        before = self.taken
        yield
        assert self.taken - before == times * HAS_LANE

    def avoided(self):
        return self.is_taken(0)


@pytest.fixture
def lane(monkeypatch):
    counted, original = Lane(), express.express

    def counting(*given):
        run = original(*given)

        def call(moving):
            result = run(moving)
            counted.taken += result is not None
            counted.left += result is None
            return result

        return call

    for module in (express, ready_call):
        monkeypatch.setattr(module, "express", counting)
    ready._plans.clear()
    return counted


class Case:
    """One way to multiply by a matrix, and what it reads."""

    def __init__(self, kind, dense=None):
        self.dense = matrix() if dense is None else dense
        self.format = GroupCOO.from_dense(self.dense, group_size=2)
        self.csr, self.memory = self.dense.to_sparse_csr(), {}
        self.layer = nn.SpMM(self.format)
        self.layer._gpu_size = None  # its own groups, whatever suits a GPU
        self.kind = kind

    def __call__(self, B):
        if self.kind == "csr":
            return spmm(self.csr, B)
        if self.kind == "layer":
            return self.layer(B)
        if self.kind == "format":
            return insum(SPMM, A=self.format, B=B)
        A = self.format
        if self.kind == "raw":
            return insum(RAW, AM=A.AM, AK=A.AK, AV=A.AV, B=B, size=(6, B.shape[1]))
        return insum_beside(self.memory, RAW, {"AM": A.AM, "AK": A.AK}, (6, B.shape[1]), AV=A.AV, B=B)

    def warm(self, lane, B):
        for _ in range(4):
            self(B)
        with lane.is_taken():
            self.check(B)

    def check(self, B):
        assert_matches(self(B), self.dense.double() @ B.detach().double())


KINDS = ["csr", "layer", "format", "raw", "beside"]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_calls_seen_before_take_the_lane_and_share_nothing(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    first, second = case(B), case(2 * B)
    assert_matches(second, 2 * first.double())
    assert_matches(first, case.dense.double() @ B.double())


@every_kind
@pytest.mark.parametrize(
    "change",
    [lambda B: B[:, :3].contiguous(), lambda B: B.T.contiguous().T, lambda B: torch.cat([B, B], 1)[:, :4]],
    ids=["shape", "strides", "gaps"],
)
def test_other_layouts_are_other_calls(lane, kind, change):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    for tensor in (change(B), B, change(B), change(B), change(B)):
        case.check(tensor)
    with lane.is_taken():
        case.check(change(B))


@every_kind
def test_another_dtype_is_another_call(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    with lane.avoided():
        assert case(B.double()).dtype == torch.float64


@every_kind
def test_memory_that_is_not_aligned_has_its_own_kernel(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    shifted = torch.cat([B.flatten(), B.flatten()])[1:21].view(5, 4)
    assert shifted.data_ptr() % 16
    for _ in range(3):
        case.check(shifted)
        case.check(B)
    with lane.is_taken(2):
        case.check(shifted)
        case.check(B)


@every_kind
def test_the_first_memory_may_be_the_one_that_is_not_aligned(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    shifted = torch.cat([B.flatten(), B.flatten()])[1:21].view(5, 4)
    case.warm(lane, shifted)
    case.check(B)
    case.check(B)
    with lane.is_taken(2):
        case.check(B)
        case.check(shifted)


@every_kind
def test_pointers_of_freed_tensors_are_not_kept(lane, kind):
    case = Case(kind)
    case.warm(lane, drawn(5, 4))
    for _ in range(4):
        B = drawn(5, 4)
        with lane.is_taken():
            case.check(B)
        del B
    case.format = case.format.with_values(case.format.values.clone())
    case.check(drawn(5, 4))


@every_kind
@pytest.mark.parametrize("layouts", [express.RECENT, express.RECENT + 2], ids=["a few", "more"])
def test_layouts_in_turn_all_take_the_lane(lane, kind, layouts):
    case = Case(kind)
    Bs = [drawn(5, 2 + width) for width in range(layouts)]
    for B in Bs * 3:
        case.check(B)
    with lane.is_taken(2 * layouts):
        for B in (*Bs, *Bs):
            case.check(B)


@every_kind
def test_modes_in_turn_all_take_the_lane(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    leaf = B.clone().requires_grad_()
    for turn in range(3):
        with lane.is_taken(4) if turn else nullcontext():
            case.check(B)
            with torch.no_grad():
                case.check(B)
                case.check(leaf)
            with torch.inference_mode():
                case.check(B)


@every_kind
def test_without_guards_calls_are_found_by_their_keys(lane, kind, monkeypatch):
    monkeypatch.setattr(express, "recogniser", lambda tensors: None)
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    case.check(drawn(5, 3))
    with lane.is_taken():
        case.check(2 * B)
    with lane.avoided():
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert case(B).dtype == torch.bfloat16
        batch = torch.func.vmap(case)(torch.stack([B, 2 * B]))
        assert_matches(batch[1], 2 * case.dense.double() @ B.double())
        case.check(B.T.contiguous().T)


def test_one_tensor_in_two_places_is_found_by_its_key(lane):
    A, B = drawn(4, 4), drawn(4, 4)
    for left, right in [(A, A), (A, B), (B, B), (A, B)] * 3:
        found = insum("C[i,j] += A[i,k] * B[k,j]", A=left, B=right)
        assert_matches(found, left.double() @ right.double())


def test_one_tensor_in_two_places_takes_no_recogniser_from_others():
    memory, (A, B) = {}, (drawn(4, 4), drawn(4, 4))
    key, _ = express.look_up(memory, "marks", (A, B))
    express.remember_call(memory, key, "call")
    for left, right in [(A, B), (A, A), (B, A), (B, B)]:
        assert express.look_up(memory, "marks", (left, right)) == (key, "call")
    ((recognises, *_),) = memory[key[: len(express.SETTINGS)]]
    assert recognises(A, B)


def test_a_call_that_is_remembered_anew_replaces_the_one_that_was_recognised():
    memory, tensors = {}, (drawn(5, 4), drawn(2))
    key, call = express.look_up(memory, "marks", tensors)
    assert call is None
    for call in ("first", "second", "third"):
        express.remember_call(memory, key, call)
        for _ in range(3):
            assert express.look_up(memory, "marks", tensors) == (key, call)
    assert express.look_up(memory, "marks", tensors[:1])[1] is None
    assert express.look_up(memory, "others", tensors)[1] is None


def test_nothing_is_recognised_that_was_found_while_somebody_casts():
    memory, tensors = {}, (drawn(5, 4),)
    key, _ = express.look_up(memory, "marks", tensors)
    express.remember_call(memory, key, "call")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert express.look_up(memory, "marks", tensors) == (key, "call")
    assert list(memory) == [key]
    assert express.look_up(memory, "marks", tensors) == (key, "call")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert express.again(memory, "marks", tensors, tensors) == (None, None, None)


@pytest.mark.parametrize("kind", ["layer", "format", "raw", "beside"])
def test_values_changed_in_place_or_replaced_are_read(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    values = case.layer.AV if kind == "layer" else case.format.values
    values.mul_(2)
    case.dense = 2 * case.dense
    with lane.is_taken():
        case.check(B)
    values.data = 2 * values.data
    case.dense = 2 * case.dense
    with lane.is_taken():
        case.check(B)
    values.data = values.data.double()
    with lane.avoided():
        case.check(B.double())
    values.data = values.data.T.contiguous().T.float()  # the same shape in other strides
    with lane.avoided():
        case.check(B)


def test_a_torch_tensor_that_changes_is_converted_anew(lane):
    case, B = Case("csr"), drawn(5, 4)
    case.warm(lane, B)
    with torch.no_grad():
        case.csr.mul_(2)
    case.dense = 2 * case.dense
    case.warm(lane, B)
    case.csr.requires_grad_()
    assert spmm(case.csr, B).requires_grad
    with torch.no_grad(), lane.is_taken():
        case.check(B)


def test_a_layers_buffers_that_are_replaced_are_read(lane):
    case, B = Case("layer"), drawn(5, 4)
    case.warm(lane, B)
    case.layer.AV = 3 * case.layer.AV
    case.dense = 3 * case.dense
    case.check(B)
    case.layer.double()
    case.check(B.double())


def outside(kind):
    """What is said of a column 9: by the format that it is a part of, or of an index tensor."""
    if kind == "format":
        words = r"is 9; along dimension 1 it is -1 for padding, or at least 0 and less than 5$"
        return pytest.raises(FormatError, match=words)
    return pytest.raises(IndexRangeError, match=r"is 9, outside B dimension 0, which has size 5;")


@pytest.mark.parametrize("kind", ["format", "raw", "beside"])  # a layer refuses to be overwritten
@pytest.mark.parametrize("how", ["in place", "data"])
def test_coordinates_that_change_are_noticed(lane, kind, how):
    case, B = Case(kind, torch.eye(6, device=DEVICE)[:, :5]), drawn(5, 4)
    case.warm(lane, B)
    columns = case.format.AK
    places = columns.clone()
    places[columns == 0] = 3
    if how == "data":
        columns.data = places
    else:
        columns.copy_(places)
    case.dense = case.dense[:, [3, 1, 2, 0, 4]] * torch.tensor([1.0, 1, 1, 0, 1], device=DEVICE)
    case.dense[0], case.dense[3] = torch.eye(5, device=DEVICE)[3], torch.eye(5, device=DEVICE)[3]
    if kind != "raw":  # what comes with a call is read wherever it lies, and its range again if it has changed
        with lane.avoided():
            case.check(B)
    case.check(B)
    columns[columns == 3] = 9
    with outside(kind):
        case(B)


@pytest.mark.parametrize("kind", ["format", "raw", "beside"])  # a layer refuses to be overwritten
def test_coordinates_in_other_memory_are_checked(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    columns = case.format.AK
    columns.data = torch.where(columns == 3, 9, columns)
    with lane.avoided(), outside(kind):
        case(B)


@every_kind
def test_gradients_are_recorded_after_calls_without_them(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    leaf = B.clone().requires_grad_()
    for _ in range(2):
        leaf.grad = None
        case(leaf).sum().backward()
        assert_matches(leaf.grad, (case.dense.double().sum(0)[:, None]).expand(5, 4))
    with torch.no_grad(), lane.is_taken():
        assert not case(leaf).requires_grad
    with torch.inference_mode(), lane.is_taken():
        assert case(B).is_inference()
    with lane.is_taken():
        assert not case(B).is_inference()


@every_kind
def test_who_watches_casts_or_transforms_keeps_a_call_off_the_lane(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with lane.avoided():
        with Watch():
            case.check(B)
        assert "insum_ops.run.default" in seen
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert case(B).dtype == torch.bfloat16
        tangent = torch.func.jvp(case, (B,), (torch.ones_like(B),))[1]
        assert_matches(tangent, case.dense.double().sum(1)[:, None].expand(6, 4))
        batch = torch.func.vmap(case)(torch.stack([B, 2 * B]))
        assert_matches(batch[1], 2 * case.dense.double() @ B.double())


@pytest.mark.parametrize("kind", ["layer", "format"])
def test_tracers_keep_a_call_off_the_lane(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    with lane.avoided():
        assert_matches(torch.compile(case, backend="aot_eager", fullgraph=True)(B), case.dense.double() @ B.double())
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert type(case(mode.from_tensor(B))) is not torch.Tensor


@every_kind
def test_negated_memory_and_other_types_of_tensors_leave_the_lane(lane, kind):
    case = Case(kind)
    B = torch.complex(drawn(5, 4), drawn(5, 4)).imag  # in the strides of a negated one
    case.warm(lane, B)
    negated = torch.complex(B, -B).conj().imag
    assert negated.is_neg()
    assert negated.stride() == B.stride()
    with lane.avoided():
        case.check(negated)
    case.warm(lane, drawn(5, 4))
    negated = torch.complex(drawn(5, 8), drawn(5, 8)).conj().imag.as_strided((5, 4), (4, 1))  # in a usual one's strides
    assert negated.is_neg()
    with lane.avoided():
        case.check(negated)

    class Marked(torch.Tensor):
        pass

    case.warm(lane, drawn(5, 4))
    with lane.avoided():
        case(drawn(5, 4).as_subclass(Marked))


@every_kind
def test_settings_are_part_of_a_call(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    before = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    try:
        with lane.avoided():
            case.check(B)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        with lane.avoided():
            case(B)
    finally:
        torch.set_float32_matmul_precision(before)
    with lane.is_taken():
        case.check(B)


def test_numbers_have_the_default_dtype_of_the_call(lane):
    places = torch.tensor([2, 0], device=DEVICE)
    before = torch.get_default_dtype()
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found = insum("C[I[i]] += 2", I=places, size=(3,))
        finally:
            torch.set_default_dtype(before)
        assert found.dtype == dtype
        assert found.tolist() == [2, 0, 2]


def test_flags_of_how_sums_are_rounded_are_asked_at_each_call(lane):
    case, B = Case("format", matrix(dtype=torch.float16)), drawn(5, 4, dtype=torch.float16)
    case.warm(lane, B)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    try:
        with lane.avoided():
            case.check(B)
        case.warm(lane, B)
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    with lane.avoided():
        case.check(B)


@pytest.mark.skipif(not HAS_LANE, reason="kernels alone are tuned")
@every_kind
def test_a_plan_that_has_another_kernel_by_now_launches_that(lane, kind, monkeypatch):
    case, B = Case(kind), drawn(5, 4)
    plans, original = [], express.express
    for module in (express, ready_call):
        monkeypatch.setattr(module, "express", lambda plan, *rest: (plans.append(plan), original(plan, *rest))[1])
    case.warm(lane, B)
    (key, launcher), *_ = plans[-1].runners.items()
    plans[-1].runners[key] = tuned = launcher.resized(launcher.bound, launcher.schedule.extents)
    with lane.avoided():
        case.check(B)
    with lane.is_taken():
        case.check(B)
    assert plans[-1].runners[key] is tuned


@pytest.mark.skipif(not IS_INTERPRETED, reason="pretends to have two devices")
def test_another_current_device_is_changed_for_the_call(lane, monkeypatch):
    current, original = [None], express.express  # a CPU's number

    @contextmanager
    def device(wanted):
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(ready_call, "express", lambda *given: original(*given, None, False))
    monkeypatch.setattr(express, "_current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    case, B = Case("format"), drawn(5, 4)
    case.warm(lane, B)
    current[0] = "another"
    with lane.is_taken(2):  # the lane for its own device is one in the other
        case.check(B)
    assert current == ["another"]


@pytest.mark.parametrize("kind", ["csr", "layer", "format", "beside"])
def test_a_lane_dies_with_what_it_belongs_to(lane, kind):
    case, B = Case(kind), drawn(5, 4)
    case.warm(lane, B)
    columns = ref(case.layer.AK if kind == "layer" else case.format.AK)
    gc.collect()
    gc.disable()
    try:
        del case
        assert columns() is None
    finally:
        gc.enable()


def test_index_tensors_that_come_with_a_call_are_checked_each_time(lane):
    B, places = drawn(5, 4), torch.tensor([2, 0, 4], device=DEVICE)
    for _ in range(3):
        insum(GATHER, B=B, I=places)
    with lane.is_taken():
        assert_matches(insum(GATHER, B=B, I=places.flip(0)), B[[4, 0, 2]].double())
    padded = torch.tensor([2, -1, 4], device=DEVICE)
    assert_matches(insum(GATHER, B=B, I=padded), B[[2, 0, 4]].double() * torch.tensor([[1], [0], [1]], device=DEVICE))
    places[1] = 7
    with pytest.raises(IndexRangeError, match=r"^I\[1\] is 7, outside B dimension 0, which has size 5;"):
        insum(GATHER, B=B, I=places)


@pytest.mark.parametrize("how", ["in place", "data", "inference", "freed"])
def test_an_index_tensor_that_came_before_and_changed_since_is_checked_again(lane, how):
    B = drawn(5, 4)
    with torch.inference_mode(how == "inference"):
        places = torch.tensor([2, 0, 4], device=DEVICE)
        for _ in range(3):
            insum(GATHER, B=B, I=places)
        for known in ([4, 0, 2], [1, 7, 1]):
            changed = torch.tensor(known, device=DEVICE)
            if how == "data":
                places.data = changed
            elif how == "freed":
                del places
                places = changed
            else:
                places.copy_(changed)
            if 7 not in known:
                with lane.is_taken():
                    assert_matches(insum(GATHER, B=B, I=places), B[known].double())
                continue
            with pytest.raises(IndexRangeError, match=r"^I\[1\] is 7, outside B dimension 0, which has size 5;"):
                insum(GATHER, B=B, I=places)


def test_index_tensors_with_padding_and_without_take_turns_on_lanes_that_are_made_once(lane, monkeypatch):
    B, places = drawn(5, 4), torch.tensor([2, 0, 4], device=DEVICE)
    padded = torch.tensor([2, -1, 4], device=DEVICE)
    for index in (places, padded) * 3:
        insum(GATHER, B=B, I=index)
    monkeypatch.setattr(ready_call, "express", None)
    for _ in range(3):
        with lane.is_taken(2):
            assert_matches(insum(GATHER, B=B, I=places), B[[2, 0, 4]].double())
            found = insum(GATHER, B=B, I=padded)
        assert_matches(found, B[[2, 0, 4]].double() * torch.tensor([[1], [0], [1]], device=DEVICE))


def test_what_is_no_tensor_is_refused_as_ever(lane):
    case = Case("csr")
    case.warm(lane, drawn(5, 4))
    for B in ([[1.0]], None, 3):
        with pytest.raises(OperandError, match=r"^B is of type (list|NoneType|int); pass a dense tensor \[K\]"):
            spmm(case.csr, B)


@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mean"])
def test_reductions_of_one_matrix_are_kept_apart(lane, reduce):
    dense = matrix().abs() + 1
    csr, B = dense.to_sparse_csr(), drawn(5, 4).abs()
    for name in ("sum", "max", "min", "mean", reduce, reduce, reduce):
        products = dense.double()[:, :, None] * B.double()
        expected = {"sum": products.sum(1), "mean": products.mean(1)}
        expected |= {"max": products.amax(1), "min": products.amin(1)}
        assert_matches(spmm(csr, B, name), expected[name])


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_takes_the_lane_until_something_of_it_changes(lane, bias):
    layer = nn.BlockSparseLinear(32, 16, 16, density=1.0, bias=bias, device=DEVICE)

    def check(x):
        start = 0 if layer.bias is None else layer.bias.detach().double()
        with torch.no_grad():
            assert_matches(layer(x), x.double() @ layer.to_dense().detach().double().T + start)

    def warm(x):
        for _ in range(4):
            check(x)
        with lane.is_taken():
            check(x)

    for shape in ((3, 32), (2, 3, 32)):
        warm(drawn(*shape))
    with torch.no_grad():
        layer.weight.mul_(2)
    with lane.is_taken():
        check(drawn(3, 32))
    layer.weight.data = layer.weight.data.transpose(1, 2)  # the same memory, shape and type
    with lane.avoided():
        check(drawn(3, 32))
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    if bias:
        layer.bias = torch.nn.Parameter(torch.randn_like(layer.bias))
    warm(drawn(3, 32))
    x = drawn(3, 32).requires_grad_()
    layer(x).sum().backward()
    assert_matches(x.grad, layer.to_dense().detach().double().sum(0).expand(3, 32))
    layer.set_pattern_(torch.tensor([[True, False]], device=DEVICE))
    warm(drawn(3, 32))
    with lane.avoided(), pytest.raises(OperandError, match=r"^x is torch\.float64 but the weight is torch\.float32;"):
        layer(drawn(3, 32).double())


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_layer_takes_the_lane_until_something_of_it_changes(lane, groups, monkeypatch):
    monkeypatch.setattr(conv_forms, "form_of", lambda *given: conv_forms.STATIONARY)
    line = torch.tensor([[0, 0], [0, 1], [0, 3]], device=DEVICE, dtype=torch.int32)
    layer = nn.SubMConv1d(4, 4, 3, groups=groups, indice_key="line").to(DEVICE)
    given = nn.SparseConvTensor(drawn(3, 4), line, [4], 1)

    def check(features):
        dense = torch.zeros(4, 4, dtype=torch.float64, device=DEVICE)
        dense[[0, 1, 3]] = features.double()
        weight, bias = (own.detach().double() for own in (layer.weight.movedim(-1, 1), layer.bias))
        expected = torch.nn.functional.conv1d(dense.T[None], weight, bias, padding=1, groups=groups)[0].T[[0, 1, 3]]
        with torch.no_grad():
            assert_matches(layer(given.replace_feature(features)).features, expected)

    def warm():
        for _ in range(4):
            check(drawn(3, 4))
        with lane.is_taken():
            check(drawn(3, 4))

    warm()
    with torch.no_grad():
        layer.bias.mul_(2)
        layer.weight.mul_(2)
    with lane.is_taken():
        check(drawn(3, 4))
    layer.bias = torch.nn.Parameter(torch.randn_like(layer.bias))
    layer.weight.data = torch.randn_like(layer.weight)
    with lane.is_taken():
        check(drawn(3, 4))
    with lane.avoided():
        check(drawn(4, 3).T)
    features = drawn(3, 4).requires_grad_()
    layer(given.replace_feature(features)).features.sum().backward()
    assert features.grad is not None
    warm()


@pytest.mark.skipif(not IS_INTERPRETED, reason="tells kernels apart as they are interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["csr", "layer", "format"])
def test_while_a_graph_is_captured_the_kernel_for_captures_runs(lane, monkeypatch, kind, dtype):
    """Also where that takes more than a launch: sums of half precision meet in float32."""
    seen, compiled, chosen = [], Launcher.compile, autotune._choose

    def compile_(launcher, tensors):
        run = compiled(launcher, tensors)
        return lambda *given: (seen.append(launcher.schedule.strategy), run(*given))

    def choose(problem, *rest):
        best = chosen(problem, *rest)
        others = [way for way in candidates(problem) if way.schedule.strategy != best.schedule.strategy]
        return autotune._with_captured(best, problem.launcher(others[0]))

    monkeypatch.setattr(Launcher, "compile", compile_)
    monkeypatch.setattr(autotune, "_choose", choose)
    monkeypatch.setattr(autotune, "_launchers", {})
    monkeypatch.setattr(pipeline, "_plans", {})
    case, B = Case(kind, matrix(dtype=dtype)), drawn(5, 4, dtype=dtype)

    def check(captures):
        for module in (launch, express):
            monkeypatch.setattr(module, "is_capturing", lambda: captures)
        seen.clear()
        case.check(B)
        return seen

    assert check(captures=False) == check(captures=False) == ["owner"]
    assert check(captures=True) == ["store-or-atomic"]
    assert check(captures=False) == ["owner"]
    case.warm(lane, B)
    with lane.is_taken(2 if dtype == torch.float32 else 0):  # the lane for captures is one in the other
        assert check(captures=True) == ["store-or-atomic"]
    assert check(captures=False) == ["owner"]
