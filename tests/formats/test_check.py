"""What is no format says so: the full text of every error."""

from __future__ import annotations

import numpy
import pytest
import scipy.sparse
import torch

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, FormatError, GroupCOO

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


EYE = torch.eye(3)
VALUES = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
LISTED = ints([0, 1, 2], [2, 1, 0])  # coords [2, 3] of three entries

CONSTRUCTION = {
    "no dimension": (
        lambda: COO((), torch.ones(1), ()),
        "shape is []; a sparse format has at least one dimension",
    ),
    "negative size": (
        lambda: COO((ints(0), ints(0)), torch.ones(1), (2, -3)),
        "shape[1] is -3; a size is at least 0",
    ),
    "group_dim": (
        lambda: COO((ints(0), ints(0)), torch.ones(1), (2, 3), group_dim=2),
        "group_dim is 2 but shape is [2, 3]; choose from -2 to 1",
    ),
    "coords missing": (
        lambda: COO((ints(0),), torch.ones(1), (2, 3)),
        "coords holds 1 but shape is [2, 3]; give one for each dimension",
    ),
    "integer values": (
        lambda: COO((ints(0), ints(0)), ints(1), (2, 3)),
        f"values is torch.int32; values are {VALUES}",
    ),
    "bool values": (
        lambda: COO((ints(0), ints(0)), torch.ones(1, dtype=torch.bool), (2, 3)),
        f"values is torch.bool; values are {VALUES}",
    ),
    "complex values": (
        lambda: COO((ints(0), ints(0)), torch.ones(1, dtype=torch.complex64), (2, 3)),
        f"values is torch.complex64; values are {VALUES}",
    ),
    "values with too few axes": (
        lambda: GroupCOO((ints(0), ints([0])), torch.ones(1), (2, 3)),
        "values is [1]; in GroupCOO it must be [P, Q]",
    ),
    "values with too many axes": (
        lambda: COO((ints(0), ints(0)), torch.ones(1, 1), (2, 3)),
        "values is [1, 1]; in COO it must be [P]",
    ),
    "values of another block": (
        lambda: BlockGroupCOO((ints(0), ints([0])), torch.ones(1, 1, 2, 2), (4, 6), block_size=(2, 3)),
        "values is [1, 1, 2, 2]; in BlockGroupCOO it must be [P, Q, 2, 3]",
    ),
    "ELL with other rows": (
        lambda: ELL((None, ints([0], [1])), torch.ones(2, 1), (4, 6)),
        "values is [2, 1]; in ELL p is one of the 4 rows of dimension 0",
    ),
    "group of nothing": (
        lambda: GroupCOO((ints(0), torch.zeros(1, 0, dtype=torch.int32)), torch.ones(1, 0), (4, 6)),
        "values is [1, 0]; a group holds at least one entry",
    ),
    "group of a vector": (
        lambda: GroupCOO((ints(0),), torch.ones(1, 2), (4,)),
        "values is [1, 2]; a group of a vector holds one entry",
    ),
    "coordinate left out": (
        lambda: GroupCOO((None, ints([0])), torch.ones(1, 1), (4, 6)),
        "coords[0] is None, but GroupCOO stores this coordinate",
    ),
    "ELL's column left out": (
        lambda: ELL((None, None), torch.ones(4, 1), (4, 6)),
        "coords[1] is None, but ELL stores this coordinate",
    ),
    "ELL's row given": (
        lambda: ELL((ints(0), ints([0])), torch.ones(1, 1), (1, 6)),
        "coords[0] is a tensor, but in ELL the row is p itself; pass None",
    ),
    "float coordinates": (
        lambda: COO((ints(0), torch.zeros(1)), torch.ones(1), (2, 3)),
        "coords[1] is torch.float32; coordinates are torch.int32 or torch.int64",
    ),
    "short integer coordinates": (
        lambda: COO((ints(0, dtype=torch.int16), ints(0)), torch.ones(1), (2, 3)),
        "coords[0] is torch.int16; coordinates are torch.int32 or torch.int64",
    ),
    "coordinates of another shape": (
        lambda: GroupCOO((ints(0, 1), ints([0], [1])), torch.ones(2, 2), (2, 3)),
        "coords[1] is [2, 1] but values is [2, 2]; it must be [2, 2]",
    ),
    "rows of another shape": (
        lambda: BlockCOO((ints([0]), ints(0)), torch.ones(1, 2, 2), (2, 3), block_size=(2, 2)),
        "coords[0] is [1, 1] but values is [1, 2, 2]; it must be [1]",
    ),
    "two devices": (
        lambda: COO((ints(0), ints(0).to("meta")), torch.ones(1), (2, 3)),
        "coords[1] is on meta but values is on cpu; move one with .to()",
    ),
    "coordinate too large": (
        lambda: COO((ints(0, 1), ints(0, 3)), torch.ones(2), (2, 3)),
        "coords[1][1] is 3; along dimension 1 it is at least 0 and less than 3",
    ),
    "coordinate too large for the blocks": (
        lambda: BlockCOO((ints(0), ints(2)), torch.ones(1, 2, 2), (2, 3), block_size=(2, 2)),
        "coords[1][0] is 2; along dimension 1 it is at least 0 and less than 2",
    ),
    "padding in COO": (
        lambda: COO((ints(0), ints(-1)), torch.ones(1), (2, 3)),
        "coords[1][0] is -1; along dimension 1 it is at least 0 and less than 3",
    ),
    "padded row": (
        lambda: GroupCOO((ints(-1), ints([0])), torch.ones(1, 1), (2, 3)),
        "coords[0][0] is -1; along dimension 0 it is at least 0 and less than 2",
    ),
    "below -1": (
        lambda: GroupCOO((ints(0), ints([0, -2])), torch.ones(1, 2), (2, 3)),
        "coords[1][0, 1] is -2; along dimension 1 it is -1 for padding, or at least 0 and less than 3",
    ),
    "descending rows": (
        lambda: GroupCOO((ints(0, 2, 1), ints([0], [0], [0])), torch.ones(3, 1), (3, 3)),
        "coords[0][2] is 1 after 2; it must ascend: from_coo sorts",
    ),
    "padding in one dimension": (
        lambda: GroupCOO((ints(0), ints([0, 1]), ints([0, -1])), torch.ones(1, 2), (3, 3, 3)),
        "coords[1][0, 1] is 1 but coords[2][0, 1] is -1; padding is -1 in both",
    ),
}

CONVERSION = {
    "dense integers": (
        lambda: COO.from_dense(torch.ones(2, 2, dtype=torch.int64)),
        f"A is torch.int64; values are {VALUES}",
    ),
    "dense scalar": (
        lambda: COO.from_dense(torch.tensor(1.0)),
        "shape is []; a sparse format has at least one dimension",
    ),
    "sparse where dense is wanted": (
        lambda: COO.from_dense(EYE.to_sparse_coo()),
        "A has layout torch.sparse_coo; from_dense takes a dense tensor, from_torch a sparse one",
    ),
    "group_dim": (
        lambda: ELL.from_dense(EYE, group_dim=-3),
        "group_dim is -3 but shape is [3, 3]; choose from -2 to 1",
    ),
    "blocks of COO": (
        lambda: COO.from_dense(EYE, block_size=(2, 2)),
        "COO has no blocks, so it takes no block_size; use BlockCOO or BlockGroupCOO",
    ),
    "no blocks": (
        lambda: BlockCOO.from_dense(EYE),
        "BlockCOO needs block_size, a size for each dimension of shape [3, 3]",
    ),
    "too few block sizes": (
        lambda: BlockGroupCOO.from_dense(EYE, block_size=(2,)),
        "block_size is [2] but shape is [3, 3]; give a size for each dimension",
    ),
    "empty blocks": (
        lambda: BlockGroupCOO.from_dense(EYE, block_size=(2, 0)),
        "block_size[1] is 0; a block is at least 1 wide",
    ),
    "group size of COO": (
        lambda: COO.from_dense(EYE, group_size=2),
        "COO has no group size to choose; leave group_size out, or use GroupCOO or BlockGroupCOO",
    ),
    "group size of ELL": (
        lambda: ELL.from_coo(LISTED, torch.ones(3), (3, 3), group_size=2),
        "ELL has no group size to choose; leave group_size out, or use GroupCOO or BlockGroupCOO",
    ),
    "group size 0": (
        lambda: GroupCOO.from_dense(EYE, group_size=0),
        "group_size is 0; a group holds at least one entry",
    ),
    "group size in part": (
        lambda: GroupCOO.from_dense(EYE, group_size=1.5),
        "group_size is 1.5; give a whole number, or None to have one chosen",
    ),
    "block sizes in part": (
        lambda: BlockCOO.from_dense(EYE, block_size=(2.5, 1)),
        "block_size is [2.5, 1]; it holds a whole number for each dimension",
    ),
    "one block size": (
        lambda: BlockCOO.from_dense(EYE, block_size=2),
        "block_size is 2; it holds a whole number for each dimension",
    ),
    "shape in part": (
        lambda: COO.from_coo(LISTED, torch.ones(3), (3.5, 3)),
        "shape is [3.5, 3]; it holds a whole number for each dimension",
    ),
    "numpy": (
        lambda: COO.from_dense(numpy.eye(3)),
        "A is an ndarray; from_dense takes a dense tensor; pass torch.from_numpy(A)",
    ),
    "numpy as torch": (lambda: COO.from_torch(numpy.eye(3)), "A is an ndarray; from_torch takes a torch sparse tensor"),
    "dimension by name": (lambda: COO.from_dense(EYE, group_dim="m"), "group_dim is 'm'; choose from -2 to 1"),
    "dense without numbers": (
        lambda: COO.from_dense(EYE.to("meta")),
        "A is on the meta device, where it lists no entries; give it memory and numbers first",
    ),
    "sparse without numbers": (
        lambda: GroupCOO.from_torch(EYE.to_sparse_csr().to("meta")),
        "A is on the meta device, where it lists no entries; give it memory and numbers first",
    ),
    "listed without numbers": (
        lambda: GroupCOO.from_coo(LISTED.to("meta"), torch.ones(3, device="meta"), (3, 3)),
        "coords is on the meta device, where it lists no entries; give it memory and numbers first",
    ),
    "listed in lists": (
        lambda: COO.from_coo([[0], [1]], torch.ones(1), (3, 3)),
        "coords is of type list; pass torch.tensor(coords)",
    ),
    "listed by numpy": (
        lambda: COO.from_coo(LISTED, numpy.ones(3), (3, 3)),
        "values is of type ndarray; pass torch.from_numpy(values)",
    ),
    "listed blocks by numpy": (
        lambda: BlockCOO.from_blocks(LISTED, numpy.ones((3, 2, 2)), (6, 6)),
        "values is of type ndarray; pass torch.from_numpy(values)",
    ),
    "coordinates by numpy": (
        lambda: COO((numpy.zeros(1), ints(0)), torch.ones(1), (2, 3)),
        "coords[0] is of type ndarray; pass torch.from_numpy(coords[0])",
    ),
    "group size of a vector": (
        lambda: GroupCOO.from_dense(torch.ones(3), group_size=4),
        "group_size is 4 but shape is [3]; a group of a vector holds one entry",
    ),
    "listed integers": (
        lambda: COO.from_coo(LISTED, ints(1, 2, 3), (3, 3)),
        f"values is torch.int32; values are {VALUES}",
    ),
    "listed float coordinates": (
        lambda: COO.from_coo(LISTED.float(), torch.ones(3), (3, 3)),
        "coords is torch.float32; coordinates are integers",
    ),
    "listed bool coordinates": (
        lambda: COO.from_coo(LISTED.bool(), torch.ones(3), (3, 3)),
        "coords is torch.bool; coordinates are integers",
    ),
    "listed the other way round": (
        lambda: COO.from_coo(LISTED.T, torch.ones(3), (3, 3)),
        "coords is [3, 2]; it must be [2, nnz], a row for each dimension",
    ),
    "listed with other values": (
        lambda: COO.from_coo(LISTED, torch.ones(4), (3, 3)),
        "values is [4] but coords is [2, 3]; values must be [3]",
    ),
    "listed on two devices": (
        lambda: COO.from_coo(LISTED.to("meta"), torch.ones(3), (3, 3)),
        "coords is on meta but values is on cpu; move one with .to()",
    ),
    "listed outside": (
        lambda: GroupCOO.from_coo(LISTED, torch.ones(3), (3, 2)),
        "coords[1, 0] is 2; along dimension 1 it is at least 0 and less than 2",
    ),
    "listed below": (
        lambda: BlockCOO.from_coo(LISTED - 1, torch.ones(3), (3, 3), block_size=(2, 2)),
        "coords[0, 0] is -1; along dimension 0 it is at least 0 and less than 3",
    ),
    "listed blocks outside": (
        lambda: BlockCOO.from_blocks(LISTED, torch.ones(3, 2, 2), (4, 6)),
        "coords[0, 2] is 2; along dimension 0 it is at least 0 and less than 2",
    ),
    "listed blocks of COO": (
        lambda: COO.from_blocks(LISTED, torch.ones(3, 2, 2), (4, 6)),
        "COO has no blocks, so it takes no block_size; use BlockCOO or BlockGroupCOO",
    ),
    "listed blocks for another shape": (
        lambda: BlockCOO.from_blocks(LISTED, torch.ones(3, 2), (4, 6)),
        "block_size is [2] but shape is [4, 6]; give a size for each dimension",
    ),
    "listed blocks of other number": (
        lambda: BlockCOO.from_blocks(LISTED, torch.ones(2, 2, 2), (6, 6)),
        "values is [2, 2, 2] but coords is [2, 3]; values must be [3, 2, 2]",
    ),
    "hybrid tensor": (
        lambda: COO.from_torch(EYE.to_sparse(1)),
        "A is hybrid, with dense_dim() 1; use from_dense(A.to_dense())",
    ),
    "dense where sparse is wanted": (
        lambda: COO.from_torch(EYE),
        "A has layout torch.strided; from_torch takes torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, "
        "torch.sparse_bsr or torch.sparse_bsc, from_dense takes a dense tensor",
    ),
    "batch of matrices": (
        lambda: COO.from_torch(torch.ones(2, 3, 3).to_sparse_csr()),
        "A is a torch.sparse_csr tensor of shape [2, 3, 3]; only a matrix converts from this layout",
    ),
    "sparse integers": (
        lambda: COO.from_torch(torch.ones(2, 2, dtype=torch.int64).to_sparse_csr()),
        f"values is torch.int64; values are {VALUES}",
    ),
    "blocks left out": (
        lambda: BlockCOO.from_torch(EYE.to_sparse_csr()),
        "BlockCOO needs block_size, a size for each dimension of shape [3, 3]",
    ),
    "not of scipy": (
        lambda: COO.from_scipy(numpy.eye(3)),
        "A is an ndarray; from_scipy takes a scipy sparse array or matrix",
    ),
}

METHODS = {
    "integer values": (
        lambda: COO.from_dense(EYE).with_values(ints(1, 2, 3)),
        f"values is torch.int32; values are {VALUES}",
    ),
    "values in a list": (
        lambda: COO.from_dense(EYE).with_values([1.0, 2.0, 3.0]),
        "values is of type list; pass torch.tensor(values)",
    ),
    "values of another shape": (
        lambda: GroupCOO.from_dense(EYE).with_values(torch.ones(3)),
        "values is [3] but the pattern holds [3, 1]",
    ),
    "values elsewhere": (
        lambda: COO.from_dense(EYE).with_values(torch.ones(3, device="meta")),
        "values is on meta but the pattern is on cpu; move one with .to()",
    ),
    "to integers": (
        lambda: COO.from_dense(EYE).to(torch.int32),
        f"values is torch.int32; values are {VALUES}",
    ),
    "dim0": (
        lambda: COO.from_dense(EYE).transpose(2, 0),
        "dim0 is 2 but shape is [3, 3]; choose from -2 to 1",
    ),
    "dim1": (
        lambda: COO.from_dense(torch.ones(3)).transpose(),
        "dim1 is 1 but shape is [3]; choose from -1 to 0",
    ),
    "regrouped along no dimension": (
        lambda: COO.from_dense(EYE).regroup(2),
        "group_dim is 2 but shape is [3, 3]; choose from -2 to 1",
    ),
    "regrouped by a size that there is not": (
        lambda: COO.from_dense(EYE).regroup(1, 4),
        "COO has no group size to choose; leave group_size out, or use GroupCOO or BlockGroupCOO",
    ),
}

MISTAKES = {
    f"{where}: {name}": mistake
    for where, mistakes in {"construction": CONSTRUCTION, "conversion": CONVERSION, "method": METHODS}.items()
    for name, mistake in mistakes.items()
}


LARGE = {
    "dense": lambda kind: kind.from_dense(torch.ones(4, 3), block_size=(64, 64)),
    "one dimension": lambda kind: kind.from_dense(torch.ones(4, 3), block_size=(2, 4)),
    "listed": lambda kind: kind.from_coo(LISTED, torch.ones(3), (4, 3), block_size=(5, 3)),
    "listed blocks": lambda kind: kind.from_blocks(ints([0], [0]), torch.ones(1, 8, 2), (4, 3)),
    "torch": lambda kind: kind.from_torch(torch.ones(4, 3).to_sparse(), block_size=(5, 3)),
    "bsr": lambda kind: kind.from_torch(torch.ones(4, 2).to_sparse_bsr((2, 2)), block_size=(8, 2)),
    "scipy": lambda kind: kind.from_scipy(scipy.sparse.coo_array(numpy.ones((4, 3))), block_size=(4, 4)),
    "parts": lambda kind: kind(
        (ints(0), ints([0] if kind is BlockGroupCOO else 0)),
        torch.ones(1, *[1] * (kind is BlockGroupCOO), 8, 2),
        (4, 2),
        block_size=(8, 2),
    ),
    "three dimensions": lambda kind: kind.from_dense(torch.ones(4, 3, 2), block_size=(2, 2, 3)),
}
SIZES = {
    "dense": ([64, 64], [4, 3]),
    "one dimension": ([2, 4], [4, 3]),
    "listed": ([5, 3], [4, 3]),
    "listed blocks": ([8, 2], [4, 3]),
    "torch": ([5, 3], [4, 3]),
    "bsr": ([8, 2], [4, 2]),
    "scipy": ([4, 4], [4, 3]),
    "parts": ([8, 2], [4, 2]),
    "three dimensions": ([2, 2, 3], [4, 3, 2]),
}


@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
@pytest.mark.parametrize("source", LARGE)
def test_a_block_larger_than_the_tensor_is_refused(source, kind):
    block_size, shape = SIZES[source]
    whole = "matrix" if len(shape) == 2 else "tensor"
    with pytest.raises(FormatError) as caught:
        LARGE[source](kind)
    assert str(caught.value) == (
        f"block_size is {block_size} but shape is {shape}; a block can't be larger than the {whole}"
    )


@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)], ids=str)
def test_where_there_are_no_rows_or_columns_any_block_fits(shape, kind):
    A = kind.from_dense(torch.ones(shape), block_size=[size or 64 for size in shape])
    assert (A.nnz, A.padding_share, A.num_groups) == (0, 0, 0)
    assert A.to_dense().shape == shape


@pytest.mark.cpu
@pytest.mark.parametrize(("make", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(make, text):
    with pytest.raises(FormatError) as error:
        make()
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (
            lambda: COO.from_dense(torch.ones(1, 2, 1)).T,
            "T is for matrices, but shape is [1, 2, 1]; use transpose(dim0, dim1)",
        ),
        (
            lambda: COO.from_dense(EYE, group_dim=1).AM,
            "AM is a part of a matrix grouped by rows, not of COO(shape=[3, 3], nnz=3, groups=3, "
            "group_dim=1, group_size=1, padding=0.0%, bytes=36); see coords and values",
        ),
        (
            lambda: ELL.from_dense(EYE).AM,
            "AM is a part of a matrix grouped by rows, not of ELL(shape=[3, 3], nnz=3, groups=3, "
            "group_dim=0, group_size=1, padding=0.0%, bytes=24); see coords and values",
        ),
        (
            lambda: COO.from_dense(torch.ones(2)).AK,
            "AK is a part of a matrix grouped by rows, not of COO(shape=[2], nnz=2, groups=2, group_dim=0, "
            "group_size=1, padding=0.0%, bytes=16); see coords and values",
        ),
    ],
)
def test_a_part_that_there_is_not_is_named(read, text):
    with pytest.raises(AttributeError) as error:
        read()
    assert str(error.value) == text


def test_good_parts_are_taken_as_they_are():
    AM, AK, AV = (
        ints(0, 0, 2),
        ints([0, 1], [2, -1], [0, 2]),
        torch.tensor([[1.0, 2.0], [3.0, 0.0], [4.0, 5.0]]),
    )
    A = GroupCOO([AM, AK], AV, [3, 3], group_dim=-2)
    assert (A.coords, A.shape, A.group_dim) == ((AM, AK), (3, 3), 0)
    assert A.AV is AV
    assert (A.nnz, A.has_padding) == (5, True)
    assert A.to_dense().tolist() == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [4.0, 0.0, 5.0]]
    assert torch.equal(A.regroup(1).to_dense(), A.to_dense())


def test_repeated_entries_of_given_parts_add():
    A = COO((ints(0, 0, 1), ints(2, 2, 1)), torch.tensor([1.0, 2.0, 3.0]), (2, 3))
    for B in (A, A.regroup(1), A.T.T):
        assert B.to_dense().tolist() == [[0.0, 0.0, 3.0], [0.0, 3.0, 0.0]]


def test_int32_coordinates_may_index_a_size_beyond_int32():
    A = COO((ints(0), ints(5)), torch.ones(1), (2, 2**33))
    assert A.nnz == 1
