"""What is converted is remembered with its source: nothing is sorted twice, nothing stale is used, nothing leaks."""

from __future__ import annotations

import gc
import io
from weakref import ref

import pytest
import torch
from sparse_inputs import (
    BLOCKS,
    SPARSE_WARNINGS,
    TENSORS,
    csr,
    edges,
    random_dense,
    random_matrix,
    scipy_of,
    uncoalesced,
)
from statements import DEVICE
from tolerances import assert_matches

from insum_ops import sddmm, spmm
from insum_ops.formats import GroupCOO
from insum_ops.formats.convert import lay_out_groups
from insum_ops.identity_cache import ByIdentity
from insum_ops.matmul import edges as edges_module
from insum_ops.matmul import torch_sparse as sparse_source
from insum_ops.matmul.arrange import Arranged
from insum_ops.matmul.operands import as_format
from insum_ops.nn import SpMM

pytestmark = SPARSE_WARNINGS
KINDS = {**TENSORS, **BLOCKS}


@pytest.fixture
def counted(monkeypatch) -> dict[str, int]:
    """How often patterns were worked out and values gathered, where none stays as it is listed."""
    counts = {"arranged": 0, "filled": 0}
    for module in (sparse_source, edges_module):
        monkeypatch.setattr(module, "may_list", lambda device: False)
    for module, name in ((sparse_source, "arrange_listed"), (edges_module, "arrange_edges")):
        arrange = getattr(module, name)

        def counting(*args, arrange=arrange, **kwargs):
            counts["arranged"] += 1
            return arrange(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)
    write = Arranged.write

    def counting_write(self, values):
        counts["filled"] += 1
        return write(self, values)

    monkeypatch.setattr(Arranged, "write", counting_write)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_converts_nothing(kind, counted):
    A, B = KINDS[kind](random_matrix(6, 4)), random_dense(4, 3)
    for reduce in ("sum", "mean"):
        for other in (B, B + 1, B[:, :1]):
            spmm(A, other, reduce)
    assert counted == {"arranged": 1, "filled": 1}
    sddmm(A, random_dense(6, 2), random_dense(4, 2))
    assert counted == {"arranged": 1, "filled": 1}


def test_a_graph_is_converted_once(counted):
    edge_index, weight, size = edges(random_matrix(6, 4))
    B = random_dense(4, 3)
    for _ in range(3):
        spmm((edge_index, weight, size), B)
        spmm((edge_index, None, size), B)
    assert counted == {"arranged": 1, "filled": 1}
    spmm((edge_index, weight.clone(), size), B)  # other weights, the same pattern
    assert counted == {"arranged": 1, "filled": 2}
    spmm((edge_index, weight, (4, 9)), B)  # another size
    assert counted == {"arranged": 2, "filled": 3}
    spmm((edge_index, weight, (4, 9)), B)
    assert counted == {"arranged": 2, "filled": 3}


def test_two_sizes_of_one_graph_are_both_remembered(counted):
    edge_index, weight, _ = edges(random_matrix(6, 4))
    for _ in range(2):
        for targets in (6, 7):
            assert spmm((edge_index, weight, (4, targets)), random_dense(4, 3)).shape == (targets, 3)
    assert counted["arranged"] == 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "uncoalesced"])
def test_changed_values_are_gathered_but_not_sorted(kind, counted):
    dense = random_matrix(6, 4)
    A, B = KINDS[kind](dense), random_dense(4, 3)
    spmm(A, B)
    (A._values() if A.layout is torch.sparse_coo else A.values()).mul_(2)
    assert_matches(spmm(A, B), 2 * dense @ B)
    assert counted == {"arranged": 1, "filled": 2}
    with torch.no_grad():
        A.mul_(3)
    assert_matches(spmm(A, B), 6 * dense @ B)
    assert counted == {"arranged": 1, "filled": 3}


def test_changed_values_of_an_uncoalesced_tensor(counted):
    dense, B = random_matrix(6, 4), random_dense(4, 3)
    A = uncoalesced(dense)
    spmm(A, B)
    A._values().mul_(2)
    assert_matches(spmm(A, B), 2 * dense @ B)


def test_changed_weights_are_gathered_but_not_sorted(counted):
    dense, B = random_matrix(6, 4), random_dense(4, 3)
    edge_index, weight, size = edges(dense)
    spmm((edge_index, weight, size), B)
    weight.mul_(2)
    assert_matches(spmm((edge_index, weight, size), B), 2 * dense @ B)
    assert counted == {"arranged": 1, "filled": 2}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_changed_pattern_is_converted_anew(kind):
    dense, B = random_matrix(6, 4), random_dense(4, 3)
    A = TENSORS[kind](dense)
    spmm(A, B)
    if A.layout is torch.sparse_coo:
        others = A._indices()[1]
    else:
        others = A.row_indices() if A.layout is torch.sparse_csc else A.col_indices()
    others.copy_(others.max() - others)
    expected = torch.zeros_like(dense)
    if A.layout is torch.sparse_coo:
        expected.index_put_(tuple(A._indices()), A._values(), accumulate=True)
    elif A.layout is torch.sparse_csr:
        expected.index_put_((_rows(A.crow_indices()), A.col_indices().long()), A.values(), accumulate=True)
    else:
        expected.index_put_((A.row_indices(), _rows(A.ccol_indices())), A.values(), accumulate=True)
    assert_matches(spmm(A, B), expected @ B)


def _rows(pointers):
    return torch.arange(len(pointers) - 1, device=pointers.device).repeat_interleave(pointers.diff())


def test_a_changed_graph_is_converted_anew():
    dense, B = random_matrix(5, 5), random_dense(5, 3)
    edge_index, weight, size = edges(dense)
    spmm((edge_index, weight, size), B)
    edge_index.copy_(edge_index.flip(0))
    assert_matches(spmm((edge_index, weight, size), B), dense.T @ B)
    assert_matches(spmm((edge_index, weight, (5, 5)), B), dense.T @ B)


def test_a_sparse_tensor_that_grows_is_converted_anew():
    A, B = random_matrix(6, 4).to_sparse(), random_dense(4, 3)
    spmm(A, B)
    A.add_(torch.ones(6, 4, dtype=torch.float64, device=DEVICE).to_sparse())
    assert_matches(spmm(A, B), A.to_dense() @ B)
    A.zero_()
    assert not spmm(A, B).any()


def test_a_sparse_tensor_with_more_rows_is_converted_anew():
    dense = random_matrix(4, 3).to(DEVICE)
    A, B = dense.to_sparse(), torch.randn(3, 2, device=DEVICE)
    assert spmm(A, B).shape == (4, 2)
    A.sparse_resize_((6, 3), 2, 0)  # the same entries
    assert_matches(spmm(A, B), torch.cat([dense, dense.new_zeros(2, 3)]).double() @ B.double())


@torch.no_grad()
def test_a_parameter_that_is_cast_is_converted_anew():
    dense, module = random_matrix(6, 4).to(DEVICE, torch.float32), torch.nn.Module()
    edge_index, weight, size = edges(dense)
    module.A, module.weight = torch.nn.Parameter(dense.to_sparse()), torch.nn.Parameter(weight)
    B = torch.randn(4, 3, device=DEVICE)
    for dtype in (torch.float32, torch.float64, torch.float32):
        module.to(dtype)  # the same objects, and no version is counted
        for _ in range(3):
            for found in (spmm(module.A, B), spmm((edge_index, module.weight, size), B)):
                assert found.dtype == dtype
                assert_matches(found, dense.double() @ B.double())


@torch.no_grad()
def test_weights_with_other_data_are_gathered_again():
    dense = random_matrix(6, 4).to(DEVICE)
    edge_index, weight, size = edges(dense)
    B, start = torch.randn(4, 3, device=DEVICE), weight.clone()
    for factor in (1.0, 2.0, 3.0):
        torch.nn.utils.vector_to_parameters(factor * start, [weight])  # `weight.data = ...`
        for _ in range(3):
            assert_matches(spmm((edge_index, weight, size), B), factor * dense.double() @ B.double())


def test_gradients_of_a_sparse_tensor_follow_its_values_and_keep_no_graph():
    dense = random_matrix(6, 4)
    A, B = csr(dense).requires_grad_(), random_dense(4, 3)
    for factor in (1, 2, 4, 8):  # the later ones replayed
        C = spmm(A, B)
        (d_A,) = torch.autograd.grad((C * C).sum() / 2, A)
        expected = factor * dense.double() @ B.double()
        assert_matches(C, expected)
        assert_matches(d_A.to_dense(), torch.where(dense != 0, expected @ B.double().T, 0))
        with torch.no_grad():
            A.mul_(2)
    with torch.no_grad():
        spmm(A, B)
    assert not as_format(A.detach()).values.requires_grad


def test_a_step_of_training_is_seen():
    edge_index, weight, size = edges(random_matrix(6, 4))
    weight, B = torch.nn.Parameter(weight), random_dense(4, 3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            frozen = spmm((edge_index, weight, size), B)
        C = spmm((edge_index, weight, size), B)
        expected = torch.zeros(6, 3, dtype=torch.float64, device=DEVICE)
        expected.index_add_(0, edge_index[1], weight.detach()[:, None] * B[edge_index[0]])
        assert_matches(C, expected)
        assert_matches(frozen, expected)
        optimizer.zero_grad()
        C.pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_source_frees_what_was_kept(kind):
    A, B = KINDS[kind](random_matrix(6, 4)), random_dense(4, 3)
    before = len(sparse_source._sources)
    spmm(A, B, "mean")
    spmm(A, B)
    kept = ref(as_format(A))
    assert len(sparse_source._sources) == before + 1
    del A
    assert kept() is None
    assert len(sparse_source._sources) == before


def test_a_dead_graph_frees_what_was_kept():
    edge_index, weight, size = edges(random_matrix(6, 4))
    gc.collect()  # what other tests left
    before = len(edges_module._edges)
    form = ref(as_format((edge_index, weight, size)))
    weights = ref(weight)
    assert len(edges_module._edges) == before + 1
    del weight
    assert weights() is None  # what is kept does not hold the weights
    del edge_index
    gc.collect()
    assert form() is None
    assert len(edges_module._edges) == before


def test_another_tensor_at_the_same_address_is_another():
    table: ByIdentity[int] = ByIdentity()
    for number in range(50):
        A = torch.ones(1)
        assert table.get(A) is None
        table.keep(A, number)
        assert table.get(A) == number
        table.keep(A, number + 1)
        assert (table.get(A), len(table)) == (number + 1, 1)
        del A
    assert len(table) == 0


def test_a_saved_tensor_takes_nothing_along():
    edge_index, weight, size = edges(random_matrix(6, 4))
    spmm((edge_index, weight, size), random_dense(4, 3))
    file = io.BytesIO()
    torch.save(edge_index.clone(), file)
    plain = file.tell()
    file = io.BytesIO()
    torch.save(edge_index, file)
    assert file.tell() == plain


def test_a_scipy_array_is_read_at_every_call():
    dense, B = random_matrix(6, 4), random_dense(4, 3)
    A = scipy_of(dense, "csr")
    assert_matches(spmm(A, B), dense @ B)
    A.data *= 2
    assert_matches(spmm(A, B), 2 * dense @ B)


def test_an_inference_tensor_is_read_at_every_call():
    dense, B = random_matrix(6, 4), random_dense(4, 3)
    with torch.inference_mode():
        A, graph = csr(dense), edges(dense)
        assert_matches(spmm(A, B), dense @ B)
        A.values().mul_(2)
        assert_matches(spmm(A, B), 2 * dense @ B)
        assert_matches(spmm(graph, B), dense @ B)
        graph[1].mul_(2)
        graph[0].copy_(graph[0].clone())
        assert_matches(spmm(graph, B), 2 * dense @ B)


@pytest.mark.parametrize("kind", ["csr", "coo", "csc", "edges"])
def test_a_layer_groups_unstructured_matrices_with_the_heuristic_and_a_product_on_a_cpu_not(kind):
    dense = random_matrix(40, 30)
    A = edges(dense) if kind == "edges" else KINDS[kind](dense)
    assert SpMM(A).A.group_size == GroupCOO.from_dense(dense).group_size
    form = as_format(A)
    assert form.group_size == 1 if form.device.type == "cpu" else isinstance(form, GroupCOO)
    assert form.nnz == int((dense != 0).sum())
    assert_matches(form.to_dense(), dense)


@pytest.mark.parametrize("group_size", [1, 3])
def test_values_come_back_from_their_slots_in_the_order_of_their_list(group_size):
    coords = torch.tensor([[2, 0, 2, 2, 0, 2], [1, 1, 0, 1, 3, 2]], device=DEVICE)
    order = torch.tensor([1, 4, 2, 0, 3, 5], device=DEVICE)  # by rows, one entry twice
    values = torch.arange(1.0, 7.0, device=DEVICE)
    layout = lay_out_groups(coords[:, order], (3, 4), 0, group_size)
    gather = layout.gather.after(order)
    arranged = Arranged(GroupCOO._laid_out(layout, gather(values), 6, (3, 4)), gather.source.flatten())
    assert torch.equal(arranged.read(arranged.write(values)), values)
    assert torch.equal(arranged.coords, coords)
