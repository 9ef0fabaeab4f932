"""Formats where torch handles them: files, pytrees, moves, casts, batches of a DataLoader, torch's sparse tensors."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from insum_ops import spmm
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, FormatError, GroupCOO

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:Sparse")]

DENSE = torch.tensor([[0.0, 5.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [6.0, 7.0, 2.0, 0.0], [0.0, 0.0, 3.0, 0.0]])
KINDS = (COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO)


def made(kind, **options):
    return kind.from_dense(DENSE, **({"block_size": (2, 2)} if kind in (BlockCOO, BlockGroupCOO) else {}), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_with_weights_only(kind):
    A, file = made(kind), io.BytesIO()
    spmm(A, torch.eye(4)), A.regroup(1)
    torch.save({"matrix": A}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)["matrix"]
    assert type(read) is kind
    assert torch.equal(read.to_dense(), DENSE)
    assert torch.equal(spmm(read, torch.eye(4)), DENSE)


def test_a_file_with_coordinates_outside_the_shape_is_refused():
    A = made(COO)
    state = {**A.__getstate__(), "shape": (4, 2)}
    with pytest.raises(FormatError, match="it is at least 0 and less than"):
        object.__new__(COO).__setstate__(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_taken_apart_and_put_together(kind):
    A = made(kind)
    same = pytree.tree_map(lambda leaf: leaf, A)
    assert same.values is A.values
    assert same.pattern_cache is A.pattern_cache  # of the same coordinates
    copied = pytree.tree_map(torch.clone, {"a": [A]})["a"][0]
    assert type(copied) is kind
    assert torch.equal(copied.to_dense(), DENSE)
    assert torch.equal(spmm(pytree.tree_map(lambda leaf: leaf * 1, A), torch.eye(4)), DENSE)
    shapes = pytree.tree_map(lambda leaf: leaf.shape, A)  # a leaf may be anything
    assert shapes.values == A.values.shape
    _, spec = pytree.tree_flatten(A)
    restored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert torch.equal(pytree.tree_unflatten(pytree.tree_leaves(A), restored).to_dense(), DENSE)
    assert restored == spec


@pytest.mark.parametrize("change", [lambda leaf: None, lambda leaf: leaf.shape, lambda leaf: leaf.to("meta")])
def test_a_format_without_numbers_is_printed_too(change):
    A = GroupCOO.from_dense(DENSE, group_size=2)
    assert repr(pytree.tree_map(change, A)) == f"GroupCOO(shape={list(DENSE.shape)}, group_dim=0)"


def test_coordinates_that_a_tree_made_nonsense_of_are_refused():
    broken = pytree.tree_map(lambda leaf: leaf * 100, made(GroupCOO))
    with pytest.raises(FormatError, match="it is at least 0 and less than"):
        spmm(broken, torch.eye(4))


def test_gradients_of_a_tree_reach_the_values():
    A = made(GroupCOO)
    values = A.values.clone().requires_grad_()
    spmm(pytree.tree_map(lambda leaf: leaf + 0, A.with_values(values)), torch.ones(4, 1)).sum().backward()
    assert torch.equal(values.grad != 0, A.coords[1] >= 0)


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32), ("double", torch.float64)],
)
def test_casts(cast, dtype):
    A = made(GroupCOO)
    assert getattr(A, cast)().dtype == dtype
    assert torch.equal(getattr(A, cast)().to_dense().float(), DENSE)
    assert A.float() is A
    assert A.cpu() is A


def test_memory_is_shared_between_processes():
    A = made(GroupCOO)
    before = spmm(A, torch.eye(4))
    assert A.share_memory_() is A
    assert all(part.is_shared() for part in (A.values, *A.coords))
    assert torch.equal(spmm(A, torch.eye(4)), before)
    assert torch.equal(pickle.loads(pickle.dumps(A)).to_dense(), DENSE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU")
def test_pinned_memory():
    pinned = made(GroupCOO).pin_memory()
    assert all(part.is_pinned() for part in (pinned.values, *pinned.coords))
    assert torch.equal(pinned.to("cuda", non_blocking=True).to_dense().cpu(), DENSE)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned")
def test_without_an_accelerator_no_memory_is_pinned():
    with pytest.raises(RuntimeError) as caught:
        made(GroupCOO).pin_memory()
    assert str(caught.value) == (
        "memory is pinned for copies to an accelerator, but torch finds none here; leave pin_memory out, or ask "
        "torch.accelerator.is_available() first"
    )


def test_a_tensor_says_where_to_and_of_what_type():
    moved = made(GroupCOO).to(torch.zeros(1, dtype=torch.float64, device="meta"))
    assert (moved.device.type, moved.dtype) == ("meta", torch.float64)


def test_workers_of_a_loader_send_formats():
    loader = DataLoader([(made(kind), number) for number, kind in enumerate(KINDS)], batch_size=None, num_workers=1)
    for number, (A, label) in enumerate(loader):
        assert (type(A), label) == (KINDS[number], number)
        assert torch.equal(A.to_dense(), DENSE)


def test_a_batch_is_refused_with_a_remedy():
    A = made(GroupCOO)
    words = (
        "a batch of GroupCOO is not stacked, since each has a pattern of its own; pass collate_fn=list to the "
        "DataLoader, or a collate_fn that joins them, such as into one matrix with all of them on its diagonal"
    )
    with pytest.raises(TypeError) as error:
        default_collate([A, A])
    assert str(error.value) == words
    (batch,) = DataLoader([A, A], batch_size=2, collate_fn=list)
    assert [torch.equal(each.to_dense(), DENSE) for each in batch] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_dim", [0, 1])
def test_torch_and_back(kind, group_dim):
    A = made(kind, group_dim=group_dim)
    B = A.to_torch()
    names = {0: (torch.sparse_csr, torch.sparse_bsr), 1: (torch.sparse_csc, torch.sparse_bsc)}
    assert B.layout is names[group_dim][kind in (BlockCOO, BlockGroupCOO)]
    assert torch.equal(B.to_dense(), DENSE)
    assert torch.equal(kind.from_torch(B, group_dim=group_dim).to_dense(), DENSE)
    values = A.values.clone().requires_grad_()
    A.with_values(values).to_torch().to_dense().sum().backward()
    assert values.grad.sum() == A.nnz  # one for each entry, none for padding


def test_torch_keeps_zeros_drops_padding_and_passes_gradients():
    A = GroupCOO.from_coo(torch.tensor([[0, 0, 2], [1, 0, 2]]), torch.tensor([0.0, 1.0, 2.0]), (3, 3), group_size=2)
    assert A.to_torch()._nnz() == A.to_torch(torch.sparse_coo)._nnz() == A.nnz == 3
    values = A.values.clone().requires_grad_()
    (A.with_values(values).to_torch(torch.sparse_coo) @ torch.ones(3, 1)).sum().backward()
    assert values.grad.tolist() == [[1.0, 1.0], [1.0, 0.0]]


def test_torch_of_other_dimensions():
    cube = torch.zeros(2, 3, 4)
    cube[1, 2, 3] = 5
    assert torch.equal(COO.from_dense(cube).to_torch().to_dense(), cube)
    assert torch.equal(COO.from_dense(torch.tensor([0.0, 3.0])).to_torch().to_dense(), torch.tensor([0.0, 3.0]))


@pytest.mark.parametrize(
    ("A", "layout", "words"),
    [
        (
            made(COO),
            torch.sparse_csc,
            "a COO grouped along dimension 0 makes torch.sparse_csr or torch.sparse_coo, not torch.sparse_csc; "
            "use A.regroup(...) first, or convert the result",
        ),
        (
            made(BlockCOO),
            torch.sparse_coo,
            "a BlockCOO grouped along dimension 0 makes torch.sparse_bsr, not torch.sparse_coo; "
            "use A.regroup(...) first, or convert the result",
        ),
        (
            BlockCOO.from_dense(torch.ones(3, 3), block_size=(2, 2)),
            None,
            "torch's blocks must divide the shape, but shape is [3, 3] and block_size [2, 2]; "
            "use A.to_dense().to_sparse()",
        ),
        (
            BlockCOO.from_dense(torch.ones(2, 2, 2), block_size=(2, 2, 2)),
            None,
            "torch has no blocks of 3 dimensions, as in BlockCOO(shape=[2, 2, 2], block_size=[2, 2, 2], nnz=8, "
            "groups=1, group_dim=0, group_size=1, padding=0.0%, bytes=44); use A.to_dense().to_sparse()",
        ),
    ],
)
def test_torch_has_no_such_layout(A, layout, words):
    with pytest.raises(FormatError) as error:
        A.to_torch(layout)
    assert str(error.value) == words
