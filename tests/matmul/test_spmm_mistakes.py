"""What `spmm` says when it is handed something it will not multiply."""

from __future__ import annotations

import re

import numpy
import pytest
import scipy.sparse
import torch
from sparse_inputs import SPARSE_WARNINGS, scipy_of
from torch import Tensor

from insum_ops import sddmm, spmm
from insum_ops.compiler.language.errors import IndexRangeError, OperandError, ShapeError
from insum_ops.formats import FormatError, GroupCOO
from insum_ops.nn import SparseConvTensor, SpMM

pytestmark = SPARSE_WARNINGS


def sample() -> tuple[Tensor, Tensor]:
    return torch.tensor([[0.0, 5.0, 0.0], [6.0, 0.0, 7.0]]).to_sparse_csr(), torch.ones(3, 2)


def fails(error: type[Exception], message: str, A: object, B: object, reduce: str = "sum") -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        spmm(A, B, reduce)


def test_an_unknown_reduce_lists_the_choices():
    A, B = sample()
    choices = "choose from 'sum', 'mean', 'max', 'min', 'amax', 'amin'"
    fails(OperandError, f"reduce is 'prod'; {choices}", A, B, "prod")
    fails(OperandError, f"reduce is ['sum']; {choices}", A, B, ["sum"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_before_their_sizes_are_asked_for(layout: torch.layout) -> None:
    B, edges = torch.ones(3, 2), torch.tensor([[0, 1, 2], [1, 2, 0]])
    nested = torch.nested.nested_tensor([B, B], layout=layout)
    for A in (sample()[0], GroupCOO.from_torch(sample()[0]), (edges, None)):
        fails(OperandError, "B is a nested tensor; pass B.to_padded_tensor(0)", A, nested)
    remedy = "is a nested tensor; pass one for all edges, as torch.cat"
    fails(OperandError, f"edge_weight {remedy}(edge_weight.unbind(), -1)", (edges, nested), B)
    fails(OperandError, f"edge_index {remedy}(edge_index.unbind(), -1)", (nested, None), B)
    with pytest.raises(OperandError, match=r"^Y is a nested tensor; pass a dense one \[rows, D\]$"):
        sddmm((edges, None), B, nested)
    with pytest.raises(FormatError, match=r"^A is a nested tensor; pass A\.to_padded_tensor\(0\)$"):
        GroupCOO.from_dense(nested)
    remedy = r"pass one \[voxels, channels\], as torch\.cat\(features\.unbind\(\)\)"
    with pytest.raises(OperandError, match=f"^features is a nested tensor; {remedy}$"):
        SparseConvTensor(nested, torch.tensor([[0, 1, 1, 1]]), [2, 2, 2], 1)


def test_shapes_that_do_not_fit():
    A, _ = sample()
    fails(
        ShapeError,
        "index k is 3 in A dimension 1 but 4 in B dimension 0; they must agree\n"
        "    C[m,n] += A[m,k] * B[k,n]\n"
        "                         ^",
        A,
        torch.ones(4, 2),
    )
    fails(
        ShapeError,
        "index k is 3 in A dimension 1 but 4 in B dimension 0; they must agree\n"
        "    C[m] += A[m,k] * B[k]\n"
        "                       ^",
        A,
        torch.ones(4),
    )
    fails(
        ShapeError,
        "index k is 3 in A dimension 1 but 4 in B dimension 2; they must agree\n"
        "    C[...,m,n] += A[m,k] * B[...,k,n]\n"
        "                                 ^",
        A,
        torch.ones(2, 3, 4, 5),
    )


def test_what_B_must_be():
    A, _ = sample()
    fails(OperandError, "B is of type list; pass a dense tensor [K], [K, N] or [..., K, N]", A, [1.0])
    fails(OperandError, "B is a number; pass a dense tensor [K], [K, N] or [..., K, N]", A, torch.tensor(1.0))
    fails(
        OperandError,
        "B holds values, so it must be float16, bfloat16, float32 or float64, not int64; convert it with B.float()\n"
        "    C[m,n] += A[m,k] * B[k,n]\n"
        "                       ^",
        A,
        torch.ones(3, 2, dtype=torch.int64),
    )


def test_what_A_must_be():
    A, B = sample()
    fails(
        OperandError,
        "A is of type list; pass a format of insum_ops.formats, a torch sparse tensor, a scipy sparse array "
        "or (edge_index, edge_weight, size)",
        [1.0],
        B,
    )
    fails(
        OperandError,
        "A is a dense tensor; pass insum_ops.formats.GroupCOO.from_dense(A), or A.to_sparse_csr()",
        A.to_dense(),
        B,
    )
    cube = torch.ones(2, 2, 2).to_sparse()
    fails(
        ShapeError,
        "A is a torch.sparse_coo tensor of shape [2, 2, 2] with 0 dense dimensions; pass a sparse matrix",
        cube,
        B,
    )
    fails(
        ShapeError,
        "A is a torch.sparse_coo tensor of shape [2, 3] with 1 dense dimensions; pass a sparse matrix",
        torch.ones(2, 3).to_sparse(1),
        B,
    )
    fails(ShapeError, "A is a GroupCOO of shape [2, 2, 2]; pass a matrix", GroupCOO.from_dense(torch.ones(2, 2, 2)), B)
    fails(ShapeError, "A is a scipy array of shape [3]; pass a matrix", scipy.sparse.coo_array([1.0, 0.0, 2.0]), B)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_values_that_are_no_floats(dtype):
    A, B = sample()
    fails(
        OperandError, f"A holds values of {dtype}; convert them with A.float()", A.to_dense().to_sparse().to(dtype), B
    )


def test_complex_values():
    A, B = sample()
    remedy = "multiply by the real and by the imaginary part"
    sparse = A.to_dense().to_sparse().to(torch.complex64)
    fails(OperandError, f"A holds values of torch.complex64; {remedy}", sparse, B)
    array = scipy.sparse.csr_array(A.to_dense().cpu().numpy()).astype(numpy.complex64)
    fails(OperandError, f"A holds values of torch.complex64; {remedy}", array, B)
    graph = torch.tensor([[0], [1]]), torch.ones(1, dtype=torch.complex64)
    fails(OperandError, f"edge_weight is torch.complex64; {remedy}", graph, B)


def broken(kind, name, value, at=None):
    """Return a scipy array of which an array was replaced, or one position overwritten."""
    A = getattr(scipy.sparse, f"{kind}_array")(numpy.eye(4), **({"blocksize": (2, 2)} if kind == "bsr" else {}))
    if at is None:
        setattr(A, name, value(getattr(A, name)))
    else:
        (A.coords[0] if name == "coords" else getattr(A, name))[at] = value
    return A


BROKEN = {
    "column": (
        broken("csr", "indices", 77, 0),
        "A lists an entry at [0, 77], but its shape holds [4, 4]; mend its indices",
    ),
    "row": (
        broken("csc", "indices", -1, 1),
        "A lists an entry at [-1, 1], but its shape holds [4, 4]; mend its indices",
    ),
    "block": (
        broken("bsr", "indices", 9, 0),
        "A lists an entry at [0, 9], but its shape holds [2, 2]; mend its indices",
    ),
    "listed": (
        broken("coo", "coords", -1, 0),
        "A lists an entry at [-1, 0], but its shape holds [4, 4]; mend its indices",
    ),
    "descends": (broken("csr", "indptr", -5, 2), "A.indptr must ascend from 0 to 4, its entries; mend its indices"),
    "too far": (broken("csc", "indptr", 99, 4), "A.indptr must ascend from 0 to 4, its entries; mend its indices"),
    "blocks too far": (
        broken("bsr", "indptr", 99, 1),
        "A.indptr must ascend from 0 to 2, its entries; mend its indices",
    ),
    "rows": (broken("csr", "indptr", lambda x: x[:-1]), "A.indptr lists 4 positions but A has 4 rows; it must list 5"),
    "columns": (
        broken("csc", "indptr", lambda x: x[:-1]),
        "A.indptr lists 4 positions but A has 4 columns; it must list 5",
    ),
    "rows of blocks": (
        broken("bsr", "indptr", lambda x: x[:-1]),
        "A.indptr lists 2 positions but A has 2 rows of blocks; it must list 3",
    ),
    "values": (broken("csr", "data", lambda x: x[:2]), "A.data lists 2 entries but A.indices 4; mend its indices"),
    "listed values": (
        broken("coo", "data", lambda x: x[:2]),
        "A.data lists 2 entries but A.coords[0] 4; mend its indices",
    ),
    "listed columns": (
        broken("coo", "coords", lambda x: (x[0], x[1][:3])),
        "A.data lists 4 entries but A.coords[1] 3; mend its indices",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_indices_of_scipy(case):
    """Scipy's own functions take them on trust and may end the process; nothing is called before they are checked."""
    A, message = BROKEN[case]
    fails(OperandError, message, A, torch.ones(4, 2, dtype=torch.float64))
    with pytest.raises(FormatError, match=f"^{re.escape(message)}$"):
        GroupCOO.from_scipy(A)


def test_scipy_values_that_are_no_floats():
    fails(
        OperandError,
        "A holds values of torch.int64; convert them with A.astype('float32')",
        scipy.sparse.csr_array([[1, 0, 2]]),
        torch.ones(3, 2),
    )


@pytest.mark.skipif(numpy.dtype(numpy.longdouble).itemsize == 8, reason="a longdouble is a float64 here")
@pytest.mark.parametrize("kind", ["csr", "coo", "bsr"])
def test_scipy_values_that_torch_does_not_have(kind):
    A = scipy_of(torch.eye(4), kind).astype(numpy.longdouble)
    message = f"A holds values of {numpy.dtype(numpy.longdouble)}; convert them with A.astype('float32')"
    fails(OperandError, message, A, torch.ones(4, 2))
    with pytest.raises(FormatError, match=f"^{re.escape(message)}$"):
        GroupCOO.from_scipy(A)


@pytest.mark.cpu
def test_another_device():
    A, B = sample()
    for operand in (A, GroupCOO.from_torch(A), scipy_of(A.to_dense(), "csr")):
        fails(
            OperandError,
            "A is on cpu but B is on meta; move them to one device\n"
            "    C[m,n] += A[m,k] * B[k,n]\n"
            "                       ^",
            operand,
            B.to("meta"),
        )
    edge_index = torch.tensor([[0], [1]])
    weight = torch.ones(1, device="meta")
    fails(
        OperandError,
        "edge_weight is on meta but edge_index is on cpu; move them to one device",
        (edge_index, weight, 3),
        B,
    )


def test_tensors_without_memory():
    A, B = sample()
    for place in ("cpu", "meta"):
        for layout in (torch.sparse_coo, torch.sparse_csr):
            fails(
                OperandError,
                "A is on the meta device, where it lists no entries; give it memory and values first",
                A.to_dense().to_sparse(layout=layout).to("meta"),
                B.to(place),
            )
        fails(
            OperandError,
            "edge_index is on the meta device, where it lists no edges; give it memory and values first",
            (torch.zeros(2, 3, dtype=torch.int64, device="meta"), None),
            B.to(place),
        )


@pytest.mark.parametrize("pointers", [[0, 1, 1], [0, 3, 2], [1, 1, 2], [0, 1, 3]])
def test_pointers_that_do_not_share_out_the_entries(pointers):
    parts = torch.tensor(pointers), torch.tensor([0, 1]), torch.ones(2)
    for make, name in ((torch.sparse_csr_tensor, "crow_indices"), (torch.sparse_csc_tensor, "ccol_indices")):
        A = make(*parts, (2, 2), check_invariants=False)
        message = f"A.{name}() must ascend from 0 to 2, its entries; mend its indices"
        fails(IndexRangeError, message, A, torch.ones(2, 2))
        with pytest.raises(FormatError, match=f"^{re.escape(message)}$"):
            GroupCOO.from_torch(A)


def test_indices_outside_the_shape():
    B = torch.ones(3, 2)
    A = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 7]), torch.ones(2), (2, 3))
    fails(IndexRangeError, "A lists an entry at [1, 7], but its shape holds [2, 3]; mend its indices", A, B)
    remedy = "give the numbers of nodes as size=(sources, targets), the third part of the tuple"
    edge_index = torch.tensor([[0, 1], [1, 4]])
    fails(IndexRangeError, f"edge_index[1, 1] is 4 but there are 3 targets; {remedy}", (edge_index, None), B)
    fails(IndexRangeError, f"edge_index[0, 1] is 1 but there are 1 sources; {remedy}", (edge_index, None, (1, 9)), B)
    fails(IndexRangeError, f"edge_index[0, 0] is -1 but there are 3 sources; {remedy}", (edge_index - 1, None), B)


def test_wrong_tuples():
    B, edge_index, weight = torch.ones(3, 2), torch.tensor([[0, 1], [1, 2]]), torch.ones(2)
    remedy = (
        "pass (edge_index, edge_weight, size) with edge_index [2, E], edge_weight [E] or None, "
        "and size (sources, targets), a number or None"
    )
    fails(OperandError, f"A is a tuple of (Tensor); {remedy}", (edge_index,), B)
    fails(OperandError, f"A is a tuple of (list, Tensor); {remedy}", ([0], weight), B)
    fails(OperandError, f"A is a tuple of (Tensor, int); {remedy}", (edge_index, 3), B)
    fails(OperandError, f"A is a tuple of (Tensor, Tensor, int, int); {remedy}", (edge_index, weight, 3, 3), B)
    fails(
        OperandError,
        "edge_index is torch.float32; node numbers are int32 or int64, as edge_index.long() has them",
        (weight, None),
        B,
    )
    fails(ShapeError, "edge_index is [2]; it must be [2, E], sources first, then targets", (edge_index[0], None), B)
    fails(
        ShapeError,
        "edge_index is [3, 2]; it must be [2, E], sources first, then targets; pass edge_index.T",
        (edge_index[[0, 1, 0]], None),
        B,
    )
    fails(
        ShapeError,
        "size is (3, 3, 3); pass (sources, targets), a number for both, or None",
        (edge_index, None, (3, 3, 3)),
        B,
    )
    fails(ShapeError, "size is 3.0; pass (sources, targets), a number for both, or None", (edge_index, None, 3.0), B)
    fails(ShapeError, "size is '3'; pass (sources, targets), a number for both, or None", (edge_index, None, "3"), B)
    fails(ShapeError, "size is (3, -1); a size is at least 0", (edge_index, None, (3, -1)), B)
    fails(
        ShapeError,
        "edge_weight is [3] but edge_index is [2, 2]; give one weight for each edge",
        (edge_index, torch.ones(3)),
        B,
    )
    fails(
        OperandError,
        "edge_weight is torch.int64; convert it with edge_weight.float()",
        (edge_index, torch.ones(2, dtype=torch.int64)),
        B,
    )


def test_a_tracer_takes_edges():
    e, B = torch.tensor([[0, 1], [1, 2]]), torch.arange(6.0).view(3, 2)
    traced = torch.compile(lambda e, B: spmm((e, None), B), fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(e, B), spmm((e, None), B))


def test_a_bare_edge_index_is_no_graph():
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    words = "is a dense tensor [2, 3] of torch.int64, as an edge_index is; pass a graph as a tuple,"
    fails(OperandError, f"A {words} (A, None) or (A, edge_weight)", edge_index, torch.ones(3, 2))
    with pytest.raises(OperandError) as caught:
        sddmm(edge_index, torch.ones(3, 2), torch.ones(3, 2))
    assert str(caught.value) == f"pattern {words} (pattern, None) or (pattern, edge_weight)"
    kept = spmm((edge_index.int(), None), torch.eye(3))
    torch.testing.assert_close(kept, torch.eye(3)[[2, 0, 1]], rtol=0, atol=0)


def test_a_dense_mask_is_no_pattern():
    words = "pattern is a dense tensor; pass insum_ops.formats.GroupCOO.from_dense(pattern.float())"
    with pytest.raises(OperandError) as caught:
        sddmm(torch.ones(2, 2) > 0, torch.ones(2, 3), torch.ones(2, 3))
    assert str(caught.value) == words
    counts = torch.ones(3, 3, dtype=torch.int64)
    fails(OperandError, words.replace("pattern", "A"), counts, torch.ones(3, 2))


def test_the_sparse_matrix_comes_first():
    dense, form = torch.eye(3), GroupCOO.from_dense(torch.eye(3))
    swap, convert = "the sparse matrix comes first, so swap A and B", "pass B.to_dense()"
    fails(OperandError, f"B is a torch.sparse_coo tensor; {swap}", dense, dense.to_sparse())
    fails(OperandError, f"B is a GroupCOO; {swap}", dense, form)
    fails(OperandError, f"B is a torch.sparse_csr tensor; {convert}", form, dense.to_sparse_csr())
    fails(OperandError, f"B is a GroupCOO; {convert}", form, form)
    fails(OperandError, f"B is a torch.sparse_coo tensor; {convert}", dense.to_sparse(), dense.to_sparse())


def test_a_tensor_in_the_place_of_reduce():
    form, B = GroupCOO.from_dense(torch.eye(3)), torch.ones(3, 2)
    words = (
        "reduce is a tensor; choose from 'sum', 'mean', 'max', 'min', 'amax', 'amin'. A graph is one argument, "
        "(edge_index, edge_weight), and a layer holds its matrix, so that it is called with B alone"
    )
    for call in (lambda: spmm(form, B, B), lambda: SpMM(form)(form, B)):
        with pytest.raises(OperandError) as caught:
            call()
        assert str(caught.value) == words


def test_the_arguments_of_torch_sparse():
    index, value, B = torch.tensor([[0, 2], [1, 0]]), torch.tensor([5.0, 6.0]), torch.ones(2, 4)
    words = (
        "spmm takes A, B and reduce, not 5 arguments; what torch_sparse writes spmm(index, value, m, n, B) is "
        "spmm((index.flip(0), value, (n, m)), B)"
    )
    with pytest.raises(OperandError) as caught:
        spmm(index, value, 3, 2, B)
    assert str(caught.value) == words
    expected = torch.sparse_coo_tensor(index, value, (3, 2), check_invariants=True).to_dense() @ B
    torch.testing.assert_close(spmm((index.flip(0), value, (2, 3)), B), expected)


def test_an_array_in_the_place_of_the_dense_matrix():
    form = GroupCOO.from_dense(torch.eye(3))
    fails(OperandError, "B is of type ndarray; pass torch.from_numpy(B)", form, torch.ones(3, 2, device="cpu").numpy())


def test_edge_weights_that_are_not_dense():
    graph = torch.tensor([[0, 1], [1, 2]]), torch.ones(2).to_sparse()
    fails(
        OperandError, "edge_weight is a torch.sparse_coo tensor; pass edge_weight.to_dense()", graph, torch.ones(3, 2)
    )
