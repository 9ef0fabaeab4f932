"""Formats from the sparse tensors of torch and scipy, against the dense tensors these stand for."""

from __future__ import annotations

import numpy
import pytest
import scipy.sparse
import torch
from tolerances import DTYPES

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO]
every_format = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.__name__)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)

LAYOUTS = {
    "coo": lambda A: A.to_sparse_coo(),
    "csr": lambda A: A.to_sparse_csr(),
    "csc": lambda A: A.to_sparse_csc(),
    "bsr": lambda A: A.to_sparse_bsr((2, 3)),
    "bsc": lambda A: A.to_sparse_bsc((2, 3)),
}


def matrix(dtype=torch.float64):
    dense = torch.randn(6, 9, device=DEVICE).to(dtype) * (torch.rand(6, 9, device=DEVICE) < 0.2)
    dense[2:4] = 0  # empty rows
    return dense


def blocks(kind, block_size):
    return {"block_size": block_size} if kind.is_blocked else {}


@every_format
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_dim", [0, 1])
def test_every_torch_layout_converts(kind, layout, group_dim):
    dense = matrix()
    A = kind.from_torch(LAYOUTS[layout](dense), group_dim=group_dim, **blocks(kind, (4, 2)))
    assert torch.equal(A.to_dense(), dense)
    assert A.group_dim == group_dim
    assert A.block_size == ((4, 2) if kind.is_blocked else None)
    if layout in ("coo", "csr", "csc"):
        expected = kind.from_dense(dense, group_dim=group_dim, **blocks(kind, (4, 2)))
        assert torch.equal(A.values, expected.values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_tensors_keep_their_dtype(dtype):
    dense = matrix(dtype)
    A = GroupCOO.from_torch(dense.to_sparse_coo())
    assert A.dtype == dtype
    assert torch.equal(A.to_dense(), dense)


@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
@pytest.mark.parametrize("layout", ["bsr", "bsc"])
@pytest.mark.parametrize("block_size", [None, (2, 3), [2, 3]])
def test_blocks_of_torch_are_kept(kind, layout, block_size):
    dense = matrix()
    source = LAYOUTS[layout](dense)
    A = kind.from_torch(source, block_size=block_size)
    assert A.block_size == (2, 3)
    assert A.nnz == source.values().numel()
    assert torch.equal(A.to_dense(), dense)


@every_format
def test_explicit_zeros_are_entries(kind):
    source = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0.0, 2.0]), (2, 2))
    A = kind.from_torch(source, **blocks(kind, (1, 1)))
    assert A.nnz == 2


@every_format
def test_an_uncoalesced_tensor_adds_its_duplicates(kind):
    coords = torch.tensor([[1, 0, 1, 1], [2, 0, 2, 0]])
    source = torch.sparse_coo_tensor(coords, torch.tensor([1.0, 2.0, 3.0, 4.0]), (2, 3))
    A = kind.from_torch(source, **blocks(kind, (2, 2)))
    assert A.to_dense().tolist() == [[2.0, 0.0, 0.0], [4.0, 0.0, 4.0]]


def test_torch_coo_may_have_any_number_of_dimensions():
    dense = torch.rand(3, 4, 2, 3) * (torch.rand(3, 4, 2, 3) < 0.3)
    for group_dim in range(4):
        A = GroupCOO.from_torch(dense.to_sparse_coo(), group_dim=group_dim)
        assert torch.equal(A.to_dense(), dense)


@every_format
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_reach_the_torch_tensor(kind, layout):
    dense = matrix().requires_grad_()
    source = LAYOUTS[layout](dense)
    A = kind.from_torch(source, **blocks(kind, (4, 2)))
    weight = torch.randn_like(dense)
    (A.to_dense() * weight).sum().backward()
    stored = (dense.detach() != 0) if layout in ("coo", "csr", "csc") else dense.grad != 0
    torch.testing.assert_close(dense.grad, weight * stored)
    assert bool((stored | (dense == 0)).all())


@every_format
@pytest.mark.parametrize("form", ["coo", "csr", "csc", "bsr", "dia", "lil", "dok"])
@pytest.mark.parametrize("make", [scipy.sparse.coo_matrix, scipy.sparse.coo_array])
def test_every_scipy_form_converts(kind, form, make):
    dense = matrix().cpu()
    source = make(dense.numpy()).asformat(form)
    A = kind.from_scipy(source, group_dim=1, **blocks(kind, (4, 2)))
    assert torch.equal(A.to_dense(), dense)
    assert A.dtype == torch.float64
    assert A.block_size == ((4, 2) if kind.is_blocked else None)


@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
def test_blocks_of_scipy_are_kept(kind):
    dense = matrix().cpu()
    source = scipy.sparse.bsr_array(dense.numpy(), blocksize=(2, 3))
    A = kind.from_scipy(source)
    assert A.block_size == (2, 3)
    assert A.nnz == source.nnz
    assert torch.equal(A.to_dense(), dense)


def test_scipy_arrays_may_have_any_number_of_dimensions():
    dense = (torch.rand(3, 4, 5) < 0.3).float()
    A = GroupCOO.from_scipy(scipy.sparse.coo_array(dense.numpy()), group_dim=2)
    assert torch.equal(A.to_dense(), dense)


@pytest.mark.parametrize("kind", ["csr", "csc", "bsr"])
def test_scipy_arrays_with_room_for_more(kind):
    """What lies behind the last pointer is no entry."""
    source = getattr(scipy.sparse, f"{kind}_array")(numpy.eye(4))
    source.data = numpy.concatenate([source.data, source.data[:2]])
    source.indices = numpy.concatenate([source.indices, source.indices[:2]])
    torch.testing.assert_close(COO.from_scipy(source).to_dense(), torch.eye(4, dtype=torch.float64))


def test_a_compressed_vector_of_scipy():
    source = scipy.sparse.csr_array(numpy.array([1.0, 0.0, 2.0]))
    torch.testing.assert_close(COO.from_scipy(source).to_dense(), torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))


def test_a_format_does_not_share_memory_with_scipy():
    source = scipy.sparse.eye_array(3, format="csr")
    A = COO.from_scipy(source)
    source.data[:] = 7
    assert A.values.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
def test_blocks_may_be_listed_in_any_order_with_duplicates(kind):
    coords = torch.tensor([[1, 0, 1], [0, 1, 0]])
    values = torch.arange(18.0, dtype=torch.float64).reshape(3, 2, 3).requires_grad_()
    A = kind.from_blocks(coords, values, (3, 5))
    expected = torch.zeros(4, 6, dtype=torch.float64)
    expected[2:, :3] = (values[0] + values[2]).detach()
    expected[:2, 3:] = values[1].detach()
    assert torch.equal(A.to_dense(), expected[:3, :5])
    torch.autograd.gradcheck(lambda v: kind.from_blocks(coords, v, (3, 5)).values, values)


@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
def test_last_blocks_count_with_what_is_in_the_matrix_whatever_they_come_from(kind):
    dense = torch.zeros(5, 7, dtype=torch.float64)
    dense[0, 1], dense[4, 6], dense[2, 6] = 1, 2, 3
    options = {"block_size": (2, 3), **({"group_size": 2} if kind is BlockGroupCOO else {})}
    coords = dense.nonzero().T
    blocks = kind.from_dense(dense, **options)
    listed = blocks._entry_coords()[:, blocks._positions() if blocks.has_padding else slice(None)]
    values = blocks.flat_values[blocks._positions()] if blocks.has_padding else blocks.flat_values
    made = [
        blocks,
        kind.from_coo(coords, dense[tuple(coords)], (5, 7), **options),
        kind.from_torch(dense.to_sparse(), **options),
        kind.from_torch(dense.to_sparse_csr(), **options),
        kind.from_scipy(scipy.sparse.coo_array(dense.numpy()), **options),
        kind.from_blocks(listed, values, (5, 7), **({"group_size": 2} if kind is BlockGroupCOO else {})),
        kind(blocks.coords, blocks.values, (5, 7), block_size=(2, 3)),
        blocks.to(torch.float32),
    ]
    for A in made:  # whole, cut on the right, cut at the corner: 2 * 3 + 2 * 1 + 1 * 1 of three blocks of 6
        slots = 6 if kind is BlockGroupCOO else 3
        assert (A.nnz, A.padding_share) == (9, 1 - 9 / (6 * slots))
    assert A.T.nnz == A.regroup(1).nnz == 9
    assert kind.from_torch(torch.ones(4, 6).to_sparse_bsr((2, 3))).nnz == 24
