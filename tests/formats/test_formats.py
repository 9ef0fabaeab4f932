"""Every format against the dense tensor it stands for: round trips, regrouping, gradients, printing."""

from __future__ import annotations

import copy
import io
from dataclasses import FrozenInstanceError

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from hypothesis import given
from hypothesis import strategies as st
from tolerances import DTYPES

import insum_ops.formats
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, FormatError, GroupCOO

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO]
every_format = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.__name__)


def options(kind, ndim, group_dim=0, group_size=None, blocks=(2, 3, 1, 2)):
    """Keywords that `kind` takes."""
    taken = {"group_dim": group_dim}
    if kind.takes_group_size and ndim > 1:
        taken["group_size"] = group_size
    if kind.is_blocked:
        taken["block_size"] = blocks[:ndim]
    return taken


@st.composite
def sparse_tensors(draw):
    """A dense tensor of 1 to 4 dimensions, some of size 0 or 1, and how to group and block it."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    torch.manual_seed(draw(st.integers(0, 2**20)))
    density = draw(st.sampled_from([0.0, 0.1, 0.4, 1.0]))
    dense = torch.randn(shape, dtype=torch.float64, device=DEVICE) * (torch.rand(shape, device=DEVICE) < density)
    group_dim = draw(st.integers(-len(shape), len(shape) - 1))
    blocks = tuple(draw(st.integers(1, max(1, min(size, 4)))) for size in shape)
    return dense, {
        "group_dim": group_dim,
        "group_size": draw(st.sampled_from([None, 1, 2, 3, 8])),
        "blocks": blocks,
    }


def sparse(*shape, density=0.3, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE) * (torch.rand(shape, device=DEVICE) < density)


def is_padding(A):
    """For each slot, whether its coordinates say that there is no entry."""
    others = [c for dim, c in enumerate(A.coords) if dim != A.group_dim]
    return others[0] < 0 if others else torch.zeros(A.values.shape[: len(A.value_axes)], dtype=torch.bool)


def same_parts(A, B):
    return torch.equal(A.values, B.values) and all(
        a is b is None or torch.equal(a, b) for a, b in zip(A.coords, B.coords, strict=True)
    )


@every_format
@given(sparse_tensors())
def test_dense_round_trip(kind, drawn):
    dense, chosen = drawn
    A = kind.from_dense(dense, **options(kind, dense.ndim, **chosen))
    assert A.shape == tuple(dense.shape)
    assert torch.equal(A.to_dense(), dense)


@every_format
@given(sparse_tensors())
def test_listed_entries_in_any_order_make_the_same_format(kind, drawn):
    dense, chosen = drawn
    taken = options(kind, dense.ndim, **chosen)
    A = kind.from_dense(dense, **taken)
    coords = dense.nonzero().T
    shuffle = torch.randperm(coords.shape[1], device=DEVICE)
    B = kind.from_coo(coords[:, shuffle], dense[dense != 0][shuffle], dense.shape, **taken)
    assert same_parts(A, B)


@every_format
@given(sparse_tensors())
def test_what_converters_build_passes_the_checks_of_construction(kind, drawn):
    dense, chosen = drawn
    A = kind.from_dense(dense, **options(kind, dense.ndim, **chosen))
    B = kind(A.coords, A.values, A.shape, A.group_dim, A.block_size)
    assert (A.nnz, A.has_padding, A.padding_share) == (B.nnz, B.has_padding, B.padding_share)
    assert repr(A) == repr(B)


@every_format
@given(sparse_tensors())
def test_the_protocol_holds(kind, drawn):
    dense, chosen = drawn
    A = kind.from_dense(dense, **options(kind, dense.ndim, **chosen))
    assert A.group_dim == chosen["group_dim"] % dense.ndim
    extents = dict(zip(A.value_axes, A.values.shape, strict=False))
    assert A.values.shape == (*extents.values(), *(A.block_size or ()))
    for dim, (coord, axes) in enumerate(zip(A.coords, A.coord_axes, strict=True)):
        assert axes == (("p",) if dim == A.group_dim else A.value_axes)
        assert (coord is None) == (kind is ELL and dim == A.group_dim)
        if coord is not None:
            assert coord.shape == tuple(extents[axis] for axis in axes)
            assert coord.dtype == torch.int32
            assert coord.device == A.device == dense.device
    padding = is_padding(A)
    assert A.has_padding == bool(padding.any())
    assert not A.values[padding.to(DEVICE)].any()
    assert all(bool((c[padding] == -1).all()) for d, c in enumerate(A.coords) if d != A.group_dim)
    if kind in (COO, GroupCOO) or (kind is ELL and dense.ndim > 1):
        assert A.nnz == int((dense != 0).sum())
    for form in (A, A.regroup(dense.ndim - 1), A.transpose(0, -1)):  # a last block counts with what is in the tensor
        assert form.nnz == int(form.with_values(torch.ones_like(form.values)).to_dense().sum())
        assert form.padding_share == (1 - form.nnz / form.values.numel() if form.values.numel() else 0)


@every_format
@given(sparse_tensors(), st.integers(0, 3), st.integers(0, 3))
def test_regrouping_and_transposing_keep_the_tensor(kind, drawn, dim0, dim1):
    dense, chosen = drawn
    A = kind.from_dense(dense, **options(kind, dense.ndim, **chosen))
    dim0, dim1 = dim0 % dense.ndim, dim1 % dense.ndim
    B = A.regroup(dim0)
    assert type(B) is kind
    assert (B.group_dim, B.shape, B.nnz) == (dim0, A.shape, A.nnz)
    assert torch.equal(B.to_dense(), dense)
    C = B.transpose(dim0, dim1)
    assert C.group_dim == dim1
    assert torch.equal(C.to_dense(), dense.transpose(dim0, dim1))
    kind(C.coords, C.values, C.shape, C.group_dim, C.block_size)
    assert torch.equal(C.regroup(dim0).to_dense(), dense.transpose(dim0, dim1))
    if kind is not ELL or dense.ndim > 1:
        expected = kind.from_dense(dense, **options(kind, dense.ndim, dim0, B.group_size, chosen["blocks"]))
        assert same_parts(B, expected) or dim0 == A.group_dim


@given(sparse_tensors())
def test_group_coo_of_size_one_is_coo(drawn):
    dense, chosen = drawn
    A = GroupCOO.from_dense(dense, group_dim=chosen["group_dim"], group_size=1)
    B = COO.from_dense(dense, group_dim=chosen["group_dim"])
    assert A.values[:, 0].tolist() == B.values.tolist()
    assert [c.flatten().tolist() for c in A.coords] == [c.tolist() for c in B.coords]


@given(st.integers(0, 2**20), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1))
def test_group_coo_of_the_fullest_row_is_ell(seed, rows, columns, group_dim):
    torch.manual_seed(seed)
    dense = sparse(rows, columns, density=0.5)
    dense.select(1 - group_dim, 0).fill_(1.0)  # no row is empty
    fullest = int((dense != 0).sum(1 - group_dim).max())
    A = GroupCOO.from_dense(dense, group_dim=group_dim, group_size=fullest)
    B = ELL.from_dense(dense, group_dim=group_dim)
    assert A.coords[group_dim].tolist() == list(range(B.num_groups))
    assert torch.equal(A.coords[1 - group_dim], B.coords[1 - group_dim])
    assert torch.equal(A.values, B.values)


@every_format
@pytest.mark.parametrize("shape", [(0,), (5,), (0, 4), (4, 0), (3, 5), (2, 0, 3), (2, 3, 4)])
def test_an_empty_tensor_works(kind, shape):
    for group_dim in range(len(shape)):
        A = kind.from_dense(torch.zeros(shape), **options(kind, len(shape), group_dim))
        assert torch.equal(A.to_dense(), torch.zeros(shape))
        if kind is not ELL:
            assert (A.num_groups, A.nnz) == (0, 0)
            assert A.facts.rows_to_zero.tolist() == list(range(len(A.facts.pointers) - 1))
        assert torch.equal(A.regroup(0).to_dense(), torch.zeros(shape))
        none = torch.zeros(len(shape), 0, dtype=torch.int64)
        assert same_parts(A, kind.from_coo(none, torch.zeros(0), shape, **options(kind, len(shape), group_dim)))


def test_an_empty_row_has_no_group_except_in_ell():
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [0.0, 3.0]])
    assert COO.from_dense(dense).AM.tolist() == [1, 1, 3]
    assert GroupCOO.from_dense(dense, group_size=2).AM.tolist() == [1, 3]
    assert ELL.from_dense(dense).AK.tolist() == [[-1, -1], [0, 1], [-1, -1], [1, -1]]


def test_blocks_that_overhang_the_shape_are_padded_with_zeros():
    A = BlockGroupCOO.from_dense(torch.ones(3, 5), block_size=(2, 4), group_size=2)
    assert A.values.shape == (2, 2, 2, 4)
    assert A.values[1, 1].tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert torch.equal(A.to_dense(), torch.ones(3, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_format
def test_every_float_dtype_is_kept(kind, dtype):
    dense = sparse(5, 7, dtype=dtype)
    A = kind.from_dense(dense, **options(kind, 2))
    coords = torch.tensor([[0, 0, 1], [1, 1, 0]])
    B = kind.from_coo(coords, torch.ones(3, dtype=dtype), (2, 3), **options(kind, 2))
    assert A.dtype == A.to_dense().dtype == A.regroup(1).dtype == dtype
    assert B.to_dense().tolist() == [[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    assert torch.equal(A.regroup(1).to_dense(), dense)


@every_format
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 3)])
def test_gradients_reach_values_and_the_dense_tensor(kind, shape):
    dense = sparse(*shape, density=0.6).requires_grad_()
    pattern = kind.from_dense(dense.detach(), **options(kind, len(shape), group_size=2))
    last = len(shape) - 1

    def back_and_forth(values):
        return pattern.with_values(values).transpose(0, last).regroup(0).regroup(last).to_dense()

    values = pattern.values.clone().requires_grad_()
    gradcheck(lambda v: pattern.with_values(v).to_dense(), values)
    gradcheck(lambda v: pattern.with_values(v).regroup(last).values, values)
    gradcheck(back_and_forth, values)
    gradgradcheck(lambda v: back_and_forth(v).square(), values)
    (gradient,) = torch.autograd.grad(
        kind.from_dense(dense, **options(kind, len(shape))).to_dense().square().sum(), dense
    )
    torch.testing.assert_close(gradient, 2 * dense.detach())


@pytest.mark.parametrize("kind", [ELL, GroupCOO, BlockGroupCOO])
def test_padding_holds_nothing_even_when_its_values_do(kind):
    dense = sparse(5, 7)
    A = kind.from_dense(dense, **options(kind, 2, group_size=4))
    assert A.has_padding
    values = A.values.clone()
    values[is_padding(A)] = float("nan")
    values.requires_grad_()
    B = A.with_values(values)
    assert torch.equal(B.to_dense(), dense)
    assert torch.equal(B.regroup(1).to_dense(), dense)
    B.regroup(1).values.sum().backward()
    assert torch.equal(values.grad[is_padding(A)], torch.zeros_like(values.grad[is_padding(A)]))
    assert bool((values.grad[~is_padding(A)] == 1).all())


def test_regrouping_is_kept_and_shared():
    A = GroupCOO.from_dense(sparse(6, 8))
    first, again = A.regroup(1), A.with_values(A.values + 1).regroup(1)
    assert first.coords is again.coords
    assert A.regroup(0) is A
    assert A.regroup(-2) is A
    assert A.regroup(0, A.group_size) is A
    assert A.T.regroup(0).coords is A.T.regroup(0).coords
    torch.testing.assert_close(again.to_dense(), A.with_values(A.values + 1).to_dense())


def test_regrouping_may_choose_the_group_size():
    dense = sparse(6, 8, density=0.7)
    A = GroupCOO.from_dense(dense, group_size=2)
    for dim in (0, 1):
        B = A.regroup(dim, group_size=5)
        assert B.group_size == 5
        assert torch.equal(B.to_dense(), dense)
    assert A.regroup(1).group_size == GroupCOO.from_dense(dense, group_dim=1).group_size


@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("kind", [COO, BlockCOO])
def test_entries_in_groups_are_those_of_the_format_with_groups(kind, group_size, group_dim):
    """The values stay where they are; each is in one slot."""
    dense, options = sparse(6, 8, density=0.7), {"group_dim": group_dim}
    options |= {"block_size": (2, 1)} if kind.is_blocked else {}
    A = kind.from_dense(dense, **options)
    grouped = (BlockGroupCOO if kind.is_blocked else GroupCOO).from_dense(dense, group_size=group_size, **options)
    found = A.in_groups(group_size)
    assert found.values.data_ptr() == A.values.data_ptr()
    assert found.value_axes == grouped.value_axes
    assert found.coord_axes == grouped.coord_axes
    for mine, theirs in zip(found.coords, grouped.coords, strict=True):
        assert torch.equal(mine, theirs)
    is_entry = found.value_source >= 0
    assert torch.equal(found.values[found.value_source[is_entry].long()], grouped.values[is_entry])
    assert found.value_source[is_entry].sort().values.tolist() == list(range(A.num_groups))
    assert A.with_values(A.values + 1).in_groups(group_size).coords is found.coords
    assert torch.equal(A.regroup(group_dim).to_dense(), dense)


@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("shape", [(6, 8), (10, 3), (2, 2)], ids=str)
def test_rows_together_are_those_of_the_format(shape, group_dim):
    """Each entry is met once, at the place of its row in a set, and each row is in one set."""
    dense = sparse(*shape, density=0.6)
    A = BlockCOO.from_dense(dense, block_size=(2, 1))
    found = A.row_ordered_view(group_dim, 2)
    assert found.values.data_ptr() == A.values.data_ptr()
    rows, columns = found.coords if group_dim == 0 else found.coords[::-1]
    grid = (shape[0] // 2, shape[1])
    assert rows[rows >= 0].sort().values.tolist() == list(range(grid[group_dim]))
    p, q = (found.value_source >= 0).nonzero().T
    entries = found.value_source[p, q].long()
    assert entries.sort().values.tolist() == list(range(A.num_groups))
    assert torch.equal(rows[found.sets.long()[p], q], A.coords[group_dim][entries].int())
    assert torch.equal(columns[p], A.coords[1 - group_dim][entries].int())
    assert found.sets.diff().ge(0).all()
    assert torch.equal(found.facts.pointers.diff(), torch.bincount(found.sets, minlength=len(rows)).int())
    assert A.with_values(A.values + 1).row_ordered_view(group_dim, 2).sets is found.sets


def test_an_entry_that_stands_twice_is_met_twice():
    AM, AK = torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1])
    A = BlockCOO((AM, AK), torch.ones(3, 1, 1), (2, 2), block_size=(1, 1))
    found = A.row_ordered_view(0, 2)
    assert found.value_source.tolist() == [[0, 2], [1, -1]]
    assert found.coords[1].tolist() == [1, 1]


def test_no_entry_is_met_nowhere():
    A = BlockCOO.from_dense(torch.zeros(4, 4), block_size=(2, 2))
    found = A.row_ordered_view(0, 2)
    assert found.value_source.shape == (0, 2)
    assert found.facts.pointers.tolist() == [0, 0]


def test_transposing_copies_nothing():
    A = BlockGroupCOO.from_dense(sparse(6, 8), block_size=(2, 3))
    B = A.T
    assert (B.shape, B.block_size, B.group_dim) == ((8, 6), (3, 2), 1)
    assert B.coords == (A.coords[1], A.coords[0])
    assert B.values.data_ptr() == A.values.data_ptr()
    assert A.transpose(1, 1) is A
    assert torch.equal(B.T.to_dense(), A.to_dense())


def test_to_moves_values_alone_to_another_dtype():
    A = GroupCOO.from_dense(sparse(4, 5))
    B = A.to(torch.float16)
    assert (B.dtype, B.coords) == (torch.float16, A.coords)
    assert A.to(DEVICE, torch.float16).dtype == A.to(dtype=torch.float16).dtype == torch.float16
    assert A.to(A.device) is A.to(torch.float64) is A.to(device=str(A.device)) is A


@every_format
def test_to_moves_everything_to_another_device(kind):
    A = kind.from_dense(sparse(4, 5), **options(kind, 2))
    B = A.to("meta", torch.float32)
    assert {c.device.type for c in B.coords if c is not None} | {B.device.type} == {"meta"}
    assert (B.dtype, B.nnz, B.has_padding) == (torch.float32, A.nnz, A.has_padding)
    C = A.to("cpu")
    assert C.device.type == "cpu"
    assert torch.equal(C.to_dense(), A.to_dense().cpu())


def test_to_is_differentiable():
    values = torch.ones(2, requires_grad=True)
    A = COO.from_coo(torch.tensor([[0, 1], [1, 0]]), values, (2, 2))
    A.to(torch.float64).to_dense().sum().backward()
    assert values.grad.tolist() == [1.0, 1.0]


def test_the_letters_of_a_matrix():
    dense = torch.tensor([[0.0, 5.0], [6.0, 7.0]])
    A = GroupCOO.from_dense(dense, group_size=2)
    assert A.AM is A.coords[0]
    assert A.AK is A.coords[1]
    assert A.AV is A.values


def test_sizes():
    A = BlockGroupCOO.from_dense(torch.eye(5), block_size=(2, 2), group_size=2)
    assert (A.ndim, A.nnz, A.num_groups, A.group_size, A.padding_share) == (2, 9, 3, 2, 15 / 24)
    assert A.nbytes == 4 * (3 + 6) + 4 * 24
    assert (COO.from_dense(torch.eye(5)).group_size, ELL.from_dense(torch.eye(5)).group_size) == (1, 1)


@pytest.mark.parametrize(
    ("A", "expected"),
    [
        (
            GroupCOO.from_dense(torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]), group_size=2),
            "GroupCOO(shape=[2, 3], nnz=4, groups=3, group_dim=0, group_size=2, padding=33.3%, bytes=60)",
        ),
        (
            BlockCOO.from_dense(torch.eye(3), block_size=(2, 2), group_dim=1),
            "BlockCOO(shape=[3, 3], block_size=[2, 2], nnz=5, groups=2, group_dim=1, group_size=1, "
            "padding=37.5%, bytes=48)",
        ),
        (
            ELL.from_dense(torch.zeros(2, 3, dtype=torch.float64)),
            "ELL(shape=[2, 3], nnz=0, groups=2, group_dim=0, group_size=0, padding=0.0%, bytes=0)",
        ),
    ],
)
def test_repr_is_one_line(A, expected):
    assert repr(A) == expected


@every_format
def test_copies_and_files_keep_the_tensor(kind):
    dense = sparse(4, 6)
    A = kind.from_dense(dense, **options(kind, 2))
    A.regroup(1)
    file = io.BytesIO()
    torch.save(A, file)
    file.seek(0)
    for B in (copy.copy(A), copy.deepcopy(A), torch.load(file, weights_only=False)):
        assert type(B) is kind
        assert torch.equal(B.regroup(1).to_dense(), dense)


def test_formats_are_frozen_and_compare_by_identity():
    A, B = COO.from_dense(torch.eye(2)), COO.from_dense(torch.eye(2))
    with pytest.raises(FrozenInstanceError):
        A.values = B.values
    assert A != B
    assert len({A, B}) == 2


def test_what_the_package_exports():
    assert sorted(insum_ops.formats.__all__) == [
        "BlockCOO",
        "BlockGroupCOO",
        "COO",
        "ELL",
        "FormatError",
        "GroupCOO",
        "GroupedMap",
        "KernelMap",
        "group_size",
        "kernel_map",
    ]
    assert issubclass(FormatError, ValueError)
