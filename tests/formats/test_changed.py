"""What changed after a call is seen by the next one: coordinates, torch's sparse tensors, edges, patterns of layers."""

from __future__ import annotations

import copy
import gc
import pickle
from itertools import product
from weakref import ref

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS, edges, random_matrix
from statements import DEVICE
from tolerances import assert_matches

from insum_ops import insum, nn, sddmm, spmm
from insum_ops.compiler.language.errors import IndexRangeError, OperandError, ShapeError
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO
from insum_ops.formats.errors import FormatError
from insum_ops.matmul import edges as edges_module

pytestmark = SPARSE_WARNINGS
STATEMENTS = {  # and the product of a dense matrix with B that each of them is
    "rows": ("C[m,n] += A[m,k] * B[k,n]", lambda A, B: A @ B),
    "columns": ("C[k,n] += A[m,k] * B[m,n]", lambda A, B: A.T @ B),
}
FORMATS = [COO, GroupCOO, BlockCOO, BlockGroupCOO, ELL]
every_format = pytest.mark.parametrize("kind", FORMATS)
every_statement = pytest.mark.parametrize("statement", STATEMENTS)
every_way = pytest.mark.parametrize("how", ["in place", "data", "data twice"])


def made(kind, size=8):
    """A square matrix whose last rows and columns are empty, with two groups in some rows and one in others."""
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(size, size, generator=generator) * (torch.rand(size, size, generator=generator) < 0.4)
    dense[-2:], dense[:, -2:], dense[0, :4] = 0, 0, 1
    options = {"block_size": (2, 2)} if kind.is_blocked else {}
    return kind.from_dense(dense.to(DEVICE), **options, **({"group_size": 2} if kind.takes_group_size else {}))


def dense_of(A):
    """The matrix, entry by entry."""
    coords = [None if coord is None else coord.tolist() for coord in A.coords]
    values, (high, wide) = A.values.detach().double().cpu(), A.block_size or (1, 1)
    found = torch.zeros(A.shape, dtype=torch.float64)
    for at in product(*map(range, values.shape[: len(A.value_axes)])):
        m, k = (entry(coord, at) for coord in coords)
        for i, j in product(range(high), range(wide)):
            if m >= 0 and k >= 0:
                found[m * high + i, k * wide + j] += values[(*at, i, j) if A.block_size else at]
    return found.to(A.device)


def entry(coord, at):
    if coord is None:
        return at[0]
    found = coord[at[0]]
    return found[at[1]] if isinstance(found, list) else found


def change(tensor, new, how):
    if how == "in place":
        tensor.copy_(new)
        return
    if how == "data twice":
        tensor.data = new.clone()  # memory that is given away may come back
    tensor.data = new.clone()


def other_rows(A):
    """Ascending rows in which other groups meet."""
    rows = A.coords[0]
    return torch.where(rows == rows[0], rows[-1].clamp(max=rows[0] + 1), rows)


def other_columns(A):
    """Each column counted from the last one; padding stays."""
    last = A.shape[1] // (A.block_size or (1, 1))[1] - 1
    return torch.where(A.coords[1] < 0, A.coords[1], last - A.coords[1])


@every_way
@every_statement
@every_format
def test_coordinates_changed_after_calls_are_read_with_all_that_hangs_on_them(kind, statement, how):
    expr, expected = STATEMENTS[statement]
    A, B = made(kind), torch.randn(8, 3, device=DEVICE)
    twin = A.with_values(2 * A.values)
    for _ in range(3):
        assert_matches(insum(expr, A=A, B=B), expected(dense_of(A), B.double()))
        assert_matches(insum(expr, A=twin, B=B), expected(2 * dense_of(A), B.double()))
    before = dense_of(A)
    for dim, new in enumerate((None if kind is ELL else other_rows(A), other_columns(A))):
        if new is not None:
            change(A.coords[dim], new, how)
            assert not torch.equal(dense_of(A), before)
            before = dense_of(A)
            for _ in range(3):
                assert_matches(insum(expr, A=A, B=B), expected(before, B.double()))
                assert_matches(insum(expr, A=twin, B=B), expected(2 * before, B.double()))
    assert_matches(A.to_dense(), before)
    assert_matches(A.T.to_dense(), before.T)
    assert_matches(A.regroup(1).to_dense(), before)


@every_way
@every_format
def test_gradients_follow_changed_coordinates(kind, how):
    A, expr = made(kind).to(torch.float64), STATEMENTS["rows"][0]
    B, upstream = (torch.randn(8, 3, dtype=torch.float64, device=DEVICE) for _ in range(2))
    A, B = A.with_values(A.values.clone().requires_grad_()), B.requires_grad_()
    changes = [(1, other_columns)] if kind is ELL else [(0, other_rows), (1, other_columns)]
    for dim, new in [(0, None), *changes]:
        if new is not None:
            change(A.coords[dim], new(A), how)
        listed = dense_of(A.with_values(torch.ones_like(A.values)))  # how often each entry is
        for _ in range(3):
            d_values, d_B = torch.autograd.grad(insum(expr, A=A, B=B), (A.values, B), upstream)
            assert_matches(d_B, dense_of(A).T @ upstream)
            assert_matches(dense_of(A.with_values(d_values)), (upstream @ B.T) * listed)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@every_format
def test_reductions_follow_changed_coordinates(kind, reduce):
    A, B = made(kind), torch.rand(8, 3, device=DEVICE) + 1
    A = A.with_values(A.values.abs())
    for is_changed in (False, True):
        if is_changed:
            A.coords[1].copy_(other_columns(A))
            if kind is ELL:
                A.coords[1][0] = -1  # a row loses its entries
            else:
                A.coords[0].add_(1)
        dense, listed = dense_of(A), dense_of(A.with_values(torch.ones_like(A.values)))
        assert listed.max() == 1
        expected = dense @ B.double()
        if reduce == "mean":
            expected = expected / listed.sum(1, keepdim=True).clamp(min=1)
        elif reduce == "max":  # of positive products, and zeros that blocks store
            expected = (dense[:, :, None] * B.double()).amax(1)
        for _ in range(3):
            assert_matches(spmm(A, B, reduce), expected)


def test_padding_that_comes_and_goes_is_counted():
    A, B = GroupCOO.from_dense(torch.ones(2, 2, device=DEVICE), group_size=2), torch.randn(2, 3, device=DEVICE)
    for columns, nnz in ([[0, 1], [0, 1]], 4), ([[0, -1], [-1, -1]], 1), ([[1, 0], [1, 0]], 4):
        A.AK.copy_(torch.tensor(columns))
        assert (A.nnz, A.has_padding) == (nnz, nnz < 4)
        assert_matches(A.to_dense(), dense_of(A))
        assert_matches(spmm(A, B), dense_of(A) @ B.double())


def test_coordinates_that_are_cut_at_the_same_address_are_read_anew():
    A, B = made(COO), torch.randn(8, 3, device=DEVICE)
    spmm(A, B)
    for part in (*A.coords, A.values):
        part.data = part.data[:7]
    assert A.nnz == 7
    assert_matches(spmm(A, B), dense_of(A) @ B.double())


@every_statement
def test_a_regrouped_format_that_changes_leaves_its_source_alone(statement):
    expr, expected = STATEMENTS[statement]
    A, B = made(GroupCOO), torch.randn(8, 3, device=DEVICE)
    other = A.regroup(1)
    before = dense_of(A)
    for _ in range(3):
        insum(expr, A=A, B=B)
        insum(expr, A=other, B=B)
    other.coords[0].copy_(torch.where(other.coords[0] < 0, -1, 7 - other.coords[0]))
    for _ in range(3):
        assert_matches(insum(expr, A=other, B=B), expected(before.flip(0), B.double()))
        assert_matches(insum(expr, A=A, B=B), expected(before, B.double()))
    leaf = B.clone().requires_grad_()
    for _ in range(2):
        (d_leaf,) = torch.autograd.grad(insum(expr, A=A, B=leaf).sum(), leaf)
        assert_matches(d_leaf, expected(before.T, torch.ones(8, 3, dtype=torch.float64, device=DEVICE)))
        A.regroup(1).coords[0].neg_()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda A: pickle.loads(pickle.dumps(A))])
def test_copies_of_what_has_changed_know_nothing_of_before(copied):
    A, B = made(GroupCOO), torch.randn(8, 3, device=DEVICE)
    spmm(A, B), A.regroup(1), A.facts
    known = copied(A)
    A.AM.copy_(other_rows(A))
    other = copied(A)
    A.AK.copy_(other_columns(A))
    assert not torch.equal(dense_of(A), dense_of(other))
    for one in (A, other, known):
        assert_matches(spmm(one, B), dense_of(one) @ B.double())
        assert_matches(spmm(one.T, B), dense_of(one).T @ B.double())


def test_coordinates_written_over_with_what_was_there_keep_what_is_known():
    A, B = made(GroupCOO), torch.randn(8, 3, device=DEVICE)
    A.AM.copy_(other_rows(A))
    spmm(A, B)
    facts = A.facts
    for _ in range(3):
        for coord in A.coords:
            coord.copy_(coord.clone())
        assert A.facts is facts
        assert_matches(spmm(A, B), dense_of(A) @ B.double())
    A.AK.copy_(other_columns(A))
    assert A.facts is not facts
    assert_matches(spmm(A, B), dense_of(A) @ B.double())
    facts = A.facts
    A.AK.data = A.AK.clone()  # elsewhere, where no call has it
    assert A.facts is not facts
    assert_matches(spmm(A, B), dense_of(A) @ B.double())


@torch.inference_mode()
def test_formats_made_in_inference_mode_notice_changes_too():
    A, B = made(GroupCOO), torch.randn(8, 3, device=DEVICE)
    assert not any(coord.is_inference() for coord in A.coords)
    uncounted = GroupCOO(tuple(coord.clone() for coord in A.coords), A.values, A.shape)
    for one in (A, uncounted):
        for new in (None, other_rows, other_rows):
            if new is not None:
                one.AM.copy_(new(one))
            for _ in range(2):
                assert_matches(spmm(one, B), dense_of(one) @ B.double())
    uncounted.AK.data = other_columns(uncounted)
    assert_matches(spmm(uncounted, B), dense_of(uncounted) @ B.double())


def test_coordinates_that_are_no_format_any_more_are_refused():
    A, B = GroupCOO.from_dense(torch.eye(4, device=DEVICE), group_size=1), torch.ones(4, 2, device=DEVICE)
    spmm(A, B)
    A.AM[0] = 2
    for use in (lambda: spmm(A, B), lambda: A.facts, lambda: insum(STATEMENTS["columns"][0], A=A, B=B)):
        with pytest.raises(FormatError, match=r"^coords\[0\]\[1\] is 1 after 2; it must ascend: from_coo sorts$"):
            use()
    A.AM[0] = 1
    assert_matches(spmm(A, B), dense_of(A) @ B.double())


def test_a_backward_after_a_change_is_refused():
    A, B = made(GroupCOO), torch.randn(8, 3, device=DEVICE, requires_grad=True)
    words = (
        r"^the coordinates of {} have changed since the call that is differentiated; "
        r"change them after its backward, or change a copy$"
    )
    for _ in range(3):
        C = spmm(A, B)
        A.AK.copy_(other_columns(A))
        with pytest.raises(OperandError, match=words.format("A")):
            C.sum().backward()
        V = sddmm(A, B, B)
        A.AK.copy_(other_columns(A))
        with pytest.raises(OperandError, match=words.format("pattern")):
            V.values.sum().backward()


TORCH = {
    "coo": (lambda A: A.to_sparse(), lambda A: (A._indices()[1], A._values())),
    "csr": (lambda A: A.to_sparse_csr(), lambda A: (A.col_indices(), A.values())),
    "csc": (lambda A: A.to_sparse_csc(), lambda A: (A.row_indices(), A.values())),
    "bsr": (lambda A: A.to_sparse_bsr((2, 2)), lambda A: (A.col_indices(), A.values())),
    "bsc": (lambda A: A.to_sparse_bsc((2, 2)), lambda A: (A.row_indices(), A.values())),
}


@pytest.mark.parametrize("layout", TORCH)
def test_parts_of_torch_tensors_changed_in_place_are_read(layout):
    make, parts = TORCH[layout]
    dense = torch.arange(1.0, 5, device=DEVICE).diag().roll(2, 1)
    A, B = make(dense), torch.randn(4, 3, device=DEVICE)
    for _ in range(3):
        assert_matches(spmm(A, B), dense.double() @ B.double())
    index, values = parts(A)
    values.mul_(2)
    for _ in range(3):
        assert_matches(spmm(A, B), 2 * dense.double() @ B.double())
    index.copy_(index.flip(-1))
    assert_matches(spmm(A, B), A.to_dense().double() @ B.double())
    assert not torch.equal(A.to_dense(), 2 * dense)


@pytest.mark.parametrize("is_parameter", [False, True])
@every_way
def test_a_coo_tensor_with_other_data_is_converted_again(how, is_parameter):
    first, second = random_matrix(6, 4).to_sparse(), random_matrix(6, 4).to_sparse()
    A, B = first.clone(), torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
    A = torch.nn.Parameter(A) if is_parameter else A
    for sparse in (first, second, 2 * second):
        with torch.no_grad():
            change(A, sparse, how)
            for _ in range(3):
                assert_matches(spmm(A, B), sparse.to_dense() @ B)
        leaf = B.clone().requires_grad_()
        (d_leaf,) = torch.autograd.grad(spmm(A, leaf).sum(), leaf)
        assert_matches(d_leaf, sparse.to_dense().sum(0)[:, None].expand(4, 3))


def test_what_is_remembered_of_tensors_keeps_none_alive():
    A, (edge_index, weight, size) = random_matrix(6, 4).to_sparse(), edges(random_matrix(6, 4))
    B = torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
    for _ in range(3):
        spmm(A, B), spmm((edge_index, weight, size), B)
    owners = [ref(A), ref(edge_index), ref(weight)]
    del A, edge_index, weight
    gc.collect()
    assert [owner() for owner in owners] == [None] * 3


def test_a_graph_in_many_sizes_does_not_fill_memory(monkeypatch):
    monkeypatch.setattr(edges_module, "SIZES", 3)
    edge_index, weight, _ = edges(random_matrix(4, 4))
    for size in (*range(4, 12), 4):
        B = torch.randn(size, 2, dtype=torch.float64, device=DEVICE)
        assert_matches(spmm((edge_index, weight, size), B), graph(edge_index, weight, (size, size)) @ B)
        assert len(edges_module._edges.get(edge_index)) <= 3


def graph(edge_index, weight, size):
    dense = torch.zeros(size[1], size[0], dtype=torch.float64, device=DEVICE)
    for source, target, value in zip(*edge_index.tolist(), weight.tolist()):
        dense[target, source] += value
    return dense


@every_way
def test_edges_that_change_are_arranged_again(how):
    edge_index, weight, size = edges(random_matrix(6, 4))
    B = torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
    other = torch.stack([3 - edge_index[0], 5 - edge_index[1]])
    for new in (edge_index.clone(), other, edge_index.roll(1, 1)):
        change(edge_index, new, how)
        for _ in range(3):
            assert_matches(spmm((edge_index, weight, size), B), graph(new, weight, size) @ B)
            assert_matches(spmm((edge_index, None, size), B), graph(new, torch.ones_like(weight), size) @ B)
    edge_index.data, weight.data = edge_index.data[:, :5], weight.data[:5]  # at the same addresses
    for _ in range(2):
        assert_matches(spmm((edge_index, weight, size), B), graph(edge_index, weight, size) @ B)
    change(edge_index, edge_index + 4, how)
    with pytest.raises(IndexRangeError, match=r"but there are [46] (sources|targets); give the numbers of nodes as"):
        spmm((edge_index, weight, size), B)


@pytest.mark.parametrize("is_inference", [False, True])
@every_way
def test_a_layers_pattern_that_changes_is_refused_until_it_is_back(how, is_inference):
    with torch.inference_mode(is_inference):
        layer = nn.BlockSparseLinear(
            8, 8, 2, pattern=torch.eye(4, dtype=torch.bool, device=DEVICE), bias=False, device=DEVICE
        )
        if is_inference:
            layer.coords = layer.coords.clone()  # which counts no versions, as one that is moved here
        x = torch.randn(3, 8, device=DEVICE)
        dense = torch.zeros(8, 8, dtype=torch.float64, device=DEVICE)
        for row in range(4):
            dense[2 * row : 2 * row + 2, 2 * row : 2 * row + 2] = layer.weight[row].detach()
        for columns in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 0], [0, 1, 2, 3]):
            change(layer.coords, torch.stack([layer.coords[0], layer.coords.new_tensor(columns)]), how)
            for _ in range(3):
                if columns == [0, 1, 2, 3]:
                    assert_matches(layer(x), x.double() @ dense.T)
                else:
                    with pytest.raises(OperandError, match=r"^coords was overwritten with another pattern"):
                        layer(x)


@every_way
@pytest.mark.parametrize("make", [lambda: nn.SubMConv3d(2, 2, 3), lambda: nn.SparseConv3d(2, 2, 2, 2)])
def test_voxels_that_change_get_another_map(make, how):
    places = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1], [0, 3, 3, 3]], device=DEVICE, dtype=torch.int32)
    layer = make().double().to(DEVICE)
    x = nn.SparseConvTensor(torch.randn(4, 2, dtype=torch.float64, device=DEVICE), places, [4, 4, 4], 1)
    size, stride, padding = (3, 1, 1) if isinstance(layer, nn.SubMConv3d) else (2, 2, 0)
    conv = torch.nn.Conv3d(2, 2, size, stride, padding, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        conv.weight.copy_(layer.weight.movedim(-1, 1)), conv.bias.copy_(layer.bias)
    layer(x)
    moved = torch.tensor([[0, 2, 0, 0], [0, 0, 2, 1], [0, 0, 0, 0], [0, 3, 0, 3]], device=DEVICE, dtype=torch.int32)
    change(x.indices, moved, how)
    for one in (copy.deepcopy(x), x):
        y, dense = layer(one), torch.zeros(1, 2, 4, 4, 4, dtype=torch.float64, device=DEVICE)
        for row, (batch, *at) in enumerate(moved.tolist()):
            dense[(batch, slice(None), *at)] = one.features[row]
        batch, *at = y.indices.long().T
        assert_matches(y.features, conv(dense)[batch, :, at[0], at[1], at[2]])


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({3: 0, 4: 0}, "size is of type dict; pass a number per dimension, as in size=(3, 4)"),
        ({3, 4}, "size is of type set; pass a number per dimension, as in size=(3, 4)"),
        ((3.0, 4.0), "size must hold integers of 0 or more, but it is [3.0, 4.0]"),
        ([3, 4.0], "size must hold integers of 0 or more, but it is [3, 4.0]"),
        ((3, 4 + 0j), "size must hold integers of 0 or more, but it is [3, (4+0j)]"),
    ],
)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_size_that_equals_one_remembered_is_refused_all_the_same(size, words, is_sparse):
    X, places = torch.randn(3, 4, device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    expr, operands = "C[I[i],n] += X[i,n]", {"I": places, "X": X}
    if is_sparse:
        operands, expr = {"X": GroupCOO.from_dense(X), "I": places}, "C[I[i],n] += X[i,n]"
    expected = torch.zeros(3, 4, dtype=torch.float64, device=DEVICE).index_add(0, places, X.double())
    for good in ((3, 4), [3, 4], torch.Size([3, 4]), (3, 4)):
        assert_matches(insum(expr, **operands, size=good), expected)
    for _ in range(2):
        with pytest.raises(ShapeError) as caught:
            insum(expr, **operands, size=size)
        assert str(caught.value) == words
