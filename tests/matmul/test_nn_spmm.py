"""`nn.SpMM` holds a sparse matrix as a module does: it moves, saves, loads, trains and prints."""

from __future__ import annotations

import copy
import pickle
import re
from weakref import ref

import pytest
import torch
from gradient_checks import gradcheck
from sparse_inputs import (
    BLOCKS,
    EVERY_KIND,
    FORMATS,
    SPARSE_WARNINGS,
    blocked,
    csr,
    edges,
    is_entry,
    random_dense,
    random_matrix,
)
from statements import DEVICE
from tolerances import assert_matches
from torch import nn

from insum_ops.compiler.language.errors import OperandError, ShapeError
from insum_ops.formats import COO, ELL, BlockCOO, FormatError, GroupCOO
from insum_ops.nn import SpMM

pytestmark = SPARSE_WARNINGS
KINDS = {**EVERY_KIND, **BLOCKS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_matrix(kind):
    A, B = blocked(random_matrix(12, 8)), random_dense(8, 3)
    layer = SpMM(KINDS[kind](A)).to(DEVICE)
    assert_matches(layer(B), A @ B)
    counts = is_entry(A, kind).sum(1, keepdim=True).clamp(min=1)
    assert_matches(layer(B, reduce="mean"), A @ B / counts)
    assert_matches(layer(random := random_dense(2, 8, 3)), A @ random)


def test_a_graph_without_a_size_has_the_nodes_its_edges_name():
    layer = SpMM((torch.tensor([[0, 2], [1, 3]]), None))
    assert layer.A.shape == (4, 4)
    assert layer(torch.ones(4, 1)).flatten().tolist() == [0, 1, 0, 1]
    assert SpMM((torch.empty(2, 0, dtype=torch.int64), None)).A.shape == (0, 0)


def test_what_it_prints():
    A = torch.tensor([[0.0, 5.0], [6.0, 7.0]])
    statement = "C[m,n] += A[m,k] * B[k,n]"
    assert repr(SpMM(A.to_sparse())) == f"SpMM({statement}, shape=[2, 2], nnz=3, GroupCOO)"
    assert (
        repr(SpMM(COO.from_dense(A), trainable=True)) == f"SpMM({statement}, shape=[2, 2], nnz=3, COO, trainable=True)"
    )


def test_what_it_registers():
    layer = SpMM(csr(random_matrix(6, 4)))
    assert not list(layer.parameters())
    assert list(layer.state_dict()) == ["AM", "AK", "AV"]
    layer = SpMM(csr(random_matrix(6, 4)), trainable=True)
    assert [name for name, _ in layer.named_parameters()] == ["AV"]
    assert set(layer.state_dict()) == {"AM", "AK", "AV"}
    assert layer.trainable
    assert list(SpMM(ELL.from_dense(random_matrix(6, 4))).state_dict()) == ["AK", "AV"]


@pytest.mark.parametrize("kind", FORMATS)
def test_values_train(kind):
    layer = SpMM(FORMATS[kind](random_matrix(5, 4)), trainable=True)
    B = random_dense(4, 2).requires_grad_()
    assert gradcheck(lambda values, B: torch.func.functional_call(layer, {"AV": values}, (B,)), (layer.AV, B))


def test_training_leaves_the_matrix_it_was_made_of_alone():
    for A in (csr(random_matrix(6, 4)), GroupCOO.from_dense(random_matrix(6, 4)), BLOCKS["bsr"](random_matrix(6, 4))):
        values = A.values() if isinstance(A, torch.Tensor) else A.values
        before = values.clone()
        layer = SpMM(A, trainable=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        B = random_dense(4, 3)
        layer(B).sum().backward()
        optimizer.step()
        assert torch.equal(values, before)
        assert_matches(layer(B), layer.A.to_dense() @ B)


def test_no_gradient_flows_back_to_a_source():
    A = csr(random_matrix(6, 4)).requires_grad_()
    assert not SpMM(A)(random_dense(4, 3)).requires_grad


@pytest.mark.parametrize("trainable", [False, True])
def test_dtypes_follow_the_module(trainable):
    A, B = random_matrix(6, 4), random_dense(4, 3)
    layer = SpMM(csr(A), trainable)
    layer(B, "mean")
    assert layer.float()(B.float()).dtype == torch.float32
    assert layer.half()(B.half(), "mean").dtype == torch.float16
    assert layer.AK.dtype == torch.int32
    assert layer.A.dtype == torch.float16


@pytest.mark.parametrize("trainable", [False, True])
def test_it_moves(trainable):
    A, B = random_matrix(6, 4), random_dense(4, 3)
    layer = SpMM(csr(A).cpu(), trainable)
    layer(B.cpu())
    layer.to(DEVICE)
    assert layer.A.device.type == DEVICE
    assert_matches(layer(B), A @ B)
    moved = copy.deepcopy(layer)
    for name, tensor in [*moved._buffers.items(), *moved._parameters.items()]:  # as a move between devices would
        if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
            moved._buffers[name] = tensor.clone()
    assert_matches(moved(B), A @ B)
    assert moved._form.coords[0] is moved.AM  # on a GPU `A` may be in groups of another size


@pytest.mark.parametrize("trainable", [False, True])
def test_a_state_of_the_same_size_loads_with_its_pattern(trainable):
    dense, B = random_matrix(6, 6), random_dense(6, 3)
    one = SpMM(GroupCOO.from_dense(dense, group_size=2), trainable)
    other = SpMM(GroupCOO.from_dense(dense.flip(1), group_size=2), trainable)
    for reduce in ("sum", "mean"):
        one(B, reduce)
    source = one.A.coords[1].clone()
    twin = SpMM(one.A)
    one.load_state_dict(other.state_dict())
    assert torch.equal(twin.AK, source)  # a layer made of another's matrix has its own
    assert_matches(one(B), dense.flip(1) @ B)
    C = one(B.requires_grad_())
    assert_matches(*(torch.autograd.grad(C.sum(), B)[0], dense.flip(1).sum(0)[:, None].expand(6, 3)))
    one.load_state_dict(SpMM(GroupCOO.from_dense(dense, group_size=2)).state_dict(), assign=True)
    assert_matches(one(B), dense @ B)


def test_counts_of_the_mean_follow_a_loaded_pattern():
    first, second = torch.zeros(2, 3, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    first[0], second[1] = 6, 6
    layer, other = (SpMM(COO.from_dense(A)) for A in (first, second))
    B = torch.ones(3, 1, device=DEVICE)
    assert layer(B, "mean").flatten().tolist() == [6, 0]
    layer.load_state_dict(other.state_dict())
    assert layer(B, "mean").flatten().tolist() == [0, 6]


def test_a_state_of_another_size_does_not_load():
    layer = SpMM(COO.from_dense(torch.eye(3)))
    state = SpMM(COO.from_dense(torch.ones(3, 3))).state_dict()
    message = "AM is [9] in the state_dict but [3] here; it was saved with a matrix of other entries"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        layer.load_state_dict(state)
    assert torch.equal(layer(torch.eye(3)), torch.eye(3))


def test_a_state_that_points_outside_does_not_load():
    layer = SpMM(COO.from_dense(torch.eye(3)))
    state = SpMM(COO.from_dense(torch.eye(5)[:, [0, 1, 4]])).state_dict()
    model = nn.Sequential(layer)
    message = (
        "Error(s) in loading state_dict for Sequential:\n\t0.AM in the state_dict names 4 but the matrix here is "
        "[3, 3]; it was saved with a matrix of another shape"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        model.load_state_dict({f"0.{name}": part for name, part in state.items()})
    assert torch.equal(layer(torch.eye(3)), torch.eye(3))
    blocks = SpMM(BlockCOO.from_dense(torch.eye(4), block_size=(2, 2)))
    state = SpMM(BlockCOO.from_dense(torch.eye(6)[:, :4], block_size=(2, 2))).state_dict()
    message = "AK in the state_dict names 2 but the matrix here is [4, 4], [2, 2] blocks; it was saved with"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        blocks.load_state_dict({**state, "AK": state["AK"] + 1})
    assert torch.equal(blocks(torch.eye(4)), torch.eye(4))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("AM"), "AM is not in the state_dict but AK and AV are; a matrix is loaded whole"),
        (lambda state: [state.pop("AM"), state.pop("AK")], "AM is not in the state_dict but AV is; a matrix is loaded"),
        (lambda state: state.pop("AV"), "AV is not in the state_dict but AM and AK are; a matrix is loaded whole"),
        (
            lambda state: state.update(AV=[1.0]),
            "AV in the state_dict is of type list; it was not saved by an SpMM",
        ),
        (
            lambda state: state.update(AM=state["AM"].flip(0)),
            "AM and AK in the state_dict make no COO [3, 3]: coords[0][1] is 1 after 2; it must ascend: from_coo sorts",
        ),
    ],
)
def test_a_state_that_is_no_whole_matrix_changes_nothing(change, message, strict):
    layer, state = SpMM(COO.from_dense(torch.eye(3))), SpMM(COO.from_dense(2 * torch.eye(3))).state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        layer.load_state_dict(state, strict=strict)
    assert torch.equal(layer(torch.eye(3)), torch.eye(3))

    layer.load_state_dict({}, strict=False)


def test_copies_stand_on_their_own():
    A, B = random_matrix(6, 4), random_dense(4, 3)
    layer = SpMM(csr(A), trainable=True)
    layer(B, "mean")
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.A.values is twin.AV
        with torch.no_grad():
            twin.AV.mul_(2)
        assert_matches(twin(B), 2 * A @ B)
        assert_matches(layer(B), A @ B)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_it_is_traced_whole(reduce):
    A, B = random_matrix(6, 4), random_dense(4, 3).requires_grad_()
    layer = SpMM(csr(A), trainable=True)
    expected = layer(B, reduce)
    known = torch.autograd.grad(expected.sum(), (B, layer.AV))  # one ordinary call works out the pattern's facts
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    C = traced(B, reduce)
    assert_matches(C, expected)
    for one, other in zip(torch.autograd.grad(C.sum(), (B, layer.AV)), known):
        assert_matches(one, other)


def test_the_format_is_made_once():
    layer = SpMM(edges(random_matrix(6, 4)))
    assert layer.A is layer.A
    layer(random_dense(4, 3))
    assert layer.A is layer.A


def test_what_it_will_not_hold():
    with pytest.raises(ShapeError, match=r"^A is a COO of shape \[2, 2, 2\]; pass a matrix$"):
        SpMM(COO.from_dense(torch.ones(2, 2, 2)))
    message = "A is a dense tensor; pass insum_ops.formats.GroupCOO.from_dense(A), or A.to_sparse_csr()"
    with pytest.raises(OperandError, match=f"^{re.escape(message)}$"):
        SpMM(torch.eye(3))


@pytest.mark.parametrize("trainable", [False, True])
def test_groups_of_another_size_compute_the_same(trainable):
    """What a layer does after it has moved to a GPU that other groups suit better."""
    dense = random_matrix(7, 5)
    layer = SpMM(csr(dense), trainable=trainable)
    layer._gpu_size = 2 * layer.A.group_size
    B = random_dense(5, 3)
    for _ in range(2):
        assert_matches(layer(B), dense @ B)
        assert layer.A.group_size == layer._gpu_size
    assert (layer.A is layer.A) is not trainable  # regrouped once if nothing changes
    if trainable:
        layer(B).sum().backward()
        assert_matches(layer.AV.grad.sum(), B.sum(1)[(dense != 0).nonzero()[:, 1]].sum())
    else:
        layer.AV.mul_(2)
        assert_matches(layer(B), 2 * dense @ B)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("trainable", [False, True])
def test_a_layer_whose_groups_suit_another_device_is_compiled_cold(trainable):
    """How many groups of another size there are depends on numbers, which a tracer has not."""
    dense = random_matrix(7, 5)
    layer = SpMM(csr(dense), trainable=trainable)
    layer._gpu_size = 2 * layer.A.group_size
    B = random_dense(5, 3).requires_grad_()
    C = torch.compile(layer, fullgraph=True, backend="aot_eager")(B)
    assert_matches(C, dense @ B)
    C.sum().backward()
    assert_matches(B.grad, dense.sum(0)[:, None].expand(5, 3))


def moved():
    """A layer whose groups do not suit the GPU that it is on, as it were, and its matrix."""
    dense = torch.eye(6, 5, device=DEVICE)
    layer = SpMM(GroupCOO.from_dense(dense, group_size=2))
    layer._gpu_size = 4
    return layer, dense


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("how", ["in place", "data"])
def test_regrouped_values_follow_the_layers_own(how, times):
    layer, dense = moved()
    B = torch.randn(5, 4, device=DEVICE)
    for factor in (2, 3):
        assert_matches(layer(B), dense.double() @ B.double())
        assert layer.A is layer.A
        for _ in range(times):  # memory that was given away may come back
            if how == "data":
                layer.AV.data = layer.AV.data * factor
            else:
                layer.AV.mul_(factor)
        dense = dense * factor**times
    assert_matches(layer(B), dense.double() @ B.double())


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_regrouped_layer_refuses_coordinates_that_were_overwritten_until_they_are_back(how):
    layer, dense = moved()
    B = torch.randn(5, 4, device=DEVICE)
    assert_matches(layer(B), dense.double() @ B.double())
    places = layer.AK.clone()
    for new in (torch.where(places == 0, 3, places), places):
        if how == "data":
            layer.AK.data = new
        else:
            layer.AK.copy_(new)
        if new is not places:
            with pytest.raises(FormatError, match=r"^AM and AK were overwritten with other coordinates"):
                layer(B)
    assert_matches(layer(B), dense.double() @ B.double())


def test_a_compiled_layer_computes_in_the_groups_that_suit_its_gpu(monkeypatch):
    """Its values are regrouped when they or the coordinates have changed, and no format is made in other calls."""
    torch._dynamo.reset()
    layer, dense = moved()
    sizes = list[int]()
    own = GroupCOO.regroup
    monkeypatch.setattr(GroupCOO, "regroup", lambda form, dim, size=None: sizes.append(size) or own(form, dim, size))
    B = torch.randn(5, 4, device=DEVICE, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(B).sum().backward()
    assert_matches(compiled(B), dense.double() @ B.double())
    assert_matches(B.grad, 3 * dense.double().sum(0)[:, None].expand(5, 4))
    assert sizes.count(4) == 1
    layer.AV.mul_(2)
    assert_matches(compiled(B), 2 * dense.double() @ B.double())
    assert_matches(compiled(B, "mean"), 2 * dense.double() @ B.double())  # a row has one entry
    places = layer.AK.clone()
    layer.AK.copy_(torch.where(places == 0, 3, places))
    with pytest.raises(FormatError, match=r"^AM and AK were overwritten with other coordinates"):
        compiled(B)
    layer.AK.copy_(places)
    assert_matches(compiled(B), 2 * dense.double() @ B.double())


def test_a_regrouped_layer_compiles():
    torch._dynamo.reset()
    layer, dense = moved()
    B = torch.randn(5, 4, device=DEVICE)
    layer(B)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_matches(compiled(B), dense.double() @ B.double())
    layer.AV.mul_(2)
    assert_matches(compiled(B), 2 * dense.double() @ B.double())


@pytest.mark.parametrize("size", [None, 8], ids=["own groups", "other groups"])
@pytest.mark.parametrize("trainable", [True, False])
def test_values_of_one_call_do_not_outlive_it(trainable, size):
    A, B = random_matrix(6, 4), random_dense(4, 3)
    layer = SpMM(GroupCOO.from_dense(A), trainable)
    layer._gpu_size = size  # as on a GPU that likes larger groups
    call = lambda values: torch.func.functional_call(layer, {"AV": values}, (B,))
    values = layer.AV.detach().clone().requires_grad_()
    doubled = values * 2  # holds a graph
    call(doubled).sum().backward()
    known = ref(doubled)
    del doubled
    assert known() is None
    values = values.detach()
    assert_matches(torch.func.vmap(call)(torch.stack([values, 2 * values])), torch.stack([A @ B, 2 * A @ B]))
    assert_matches(copy.deepcopy(layer)(B), A @ B)  # which could not copy a tensor of a transform
    assert_matches(torch.func.jvp(call, (values,), (2 * values,))[1], 2 * A @ B)
    assert_matches(pickle.loads(pickle.dumps(layer))(B), A @ B)
    layer.AM = layer.AM.clone()  # known anew inside a transform
    assert_matches(torch.func.vmap(call)(torch.stack([values, 2 * values])), torch.stack([A @ B, 2 * A @ B]))
    assert_matches(copy.deepcopy(layer)(B), A @ B)


def test_a_copy_keeps_no_addresses_of_the_original():
    A, B = random_matrix(6, 4), random_dense(4, 3)
    layer = SpMM(GroupCOO.from_dense(A))
    layer._gpu_size = 8
    layer(B)
    assert layer._last is not None
    layer.compile(backend="eager")  # of the original too
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._last is None
        assert twin._compiled_call_impl is None
        assert_matches(twin(B), A @ B)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_compiled_it_runs_after_a_checkpoint_is_loaded(reduce):
    torch._dynamo.reset()
    A, B = random_matrix(6, 4), random_dense(4, 3).requires_grad_()
    layer = SpMM(csr(A), trainable=True)
    layer(B, reduce).sum().backward()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(B, reduce)
    layer.load_state_dict(SpMM(csr(2 * A), trainable=True).state_dict())
    counts = (A != 0).sum(1, keepdim=True).clamp(min=1) if reduce == "mean" else 1
    actual = compiled(B, reduce)
    assert_matches(actual, 2 * A @ B / counts)
    (d_B,) = torch.autograd.grad(actual.sum(), B)
    assert_matches(d_B, (2 * A / counts).sum(0)[:, None].expand(4, 3))


def test_a_layer_on_the_meta_device_is_not_multiplied():
    A, B = random_matrix(6, 4), random_dense(4, 3)
    layer = SpMM(csr(A)).to("meta")
    message = (
        "the layer is on the meta device, where its matrix has no entries; give it memory with .to_empty(device=...) "
        "and load a state_dict"
    )
    for given in (B, B.to("meta")):
        with pytest.raises(OperandError, match=f"^{re.escape(message)}$"):
            layer(given)
    layer.load_state_dict(layer.state_dict(), assign=True)
    layer.to_empty(device=B.device).load_state_dict(SpMM(csr(A)).state_dict())
    assert_matches(layer(B), A @ B)


@pytest.mark.cpu
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kind", ["COO", "ELL", "GroupCOO", "BlockCOO"])
def test_a_layer_is_exported_before_its_first_call(kind, trainable):
    A, B = blocked(random_matrix(12, 8)), random_dense(8, 3)
    layer = SpMM(KINDS[kind](A), trainable)
    program = torch.export.export(layer, (B,), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    for columns in (3, 7, 2):
        other = random_dense(8, columns)
        assert_matches(program.module()(other), A @ other)
    assert set(program.state_dict) == set(layer.state_dict())


def test_a_layer_is_made_where_new_tensors_are_meta_tensors():
    """As from_pretrained of transformers makes a model, which reads a matrix on a real device all the same."""
    A, B = torch.tensor([[0.0, 5.0], [6.0, 7.0]]), torch.tensor([[1.0], [10.0]])
    for layout in (torch.sparse_coo, torch.sparse_csr):
        with torch.device("meta"):
            layer = SpMM(A.to_sparse(layout=layout))
        assert layer(B).tolist() == (A @ B).tolist()
