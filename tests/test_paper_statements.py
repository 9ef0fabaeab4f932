"""The statements of the paper by name, each against a dense float64 reference: values and every gradient.

The index arrays are built here with plain loops; the format-agnostic half below uses what the formats build.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import dense, positions
from statements import DEVICE, FORMATS, IS_INTERPRETED, random_index, random_values
from tolerances import DTYPES, assert_matches
from torch import Tensor

from insum_ops import insum

# An interpreted program takes about 15 ms, so interpreted tests have few of them.
SHAPES = [(5, 4, 3)] if IS_INTERPRETED else [(1, 1, 1), (5, 7, 3), (67, 101, 33), (37, 130, 129)]
BLOCKS = [(2, 3)] if IS_INTERPRETED else [(1, 1), (2, 3), (16, 16)]
GROUPS = [4] if IS_INTERPRETED else [4, 16]
SIDE, OCCUPIED = (2, 0.6) if IS_INTERPRETED else (5, 0.5)  # of the dense grid that convolutions are compared on

ROWS, COLS = (3, 5) if IS_INTERPRETED else (7, 9)  # of the matrix in format-agnostic statements
GROUP_SIZES = [3] if IS_INTERPRETED else [1, 3, 8]

every_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if not IS_INTERPRETED or dtype != torch.float64], ids=str
)
every_format = pytest.mark.parametrize("form", FORMATS)


def check(
    expr: str, tensors: dict[str, Tensor], reference: Callable[..., Tensor], size: Sequence[int] | None = None
) -> None:
    """`reference` computes the same from float64 copies; torch differentiates it."""
    own = {name: leaf(tensor.to(DEVICE)) for name, tensor in tensors.items()}
    wide = {name: leaf(widened(tensor)) for name, tensor in tensors.items()}
    actual, expected = insum(expr, size=size, **own), reference(**wide)
    assert_matches(actual, expected)
    compare_gradients(actual, values_of(own), expected, values_of(wide))


def check_format(expr: str, sparse: Any, tensors: dict[str, Tensor], reference: Callable[..., Tensor]) -> None:
    """`check` with the format `sparse` for the tensor that the statement calls A."""
    sparse = sparse.with_values(sparse.values.detach().clone().requires_grad_())
    own = {name: leaf(tensor.to(DEVICE)) for name, tensor in tensors.items()}
    wide = {name: leaf(widened(tensor)) for name, tensor in tensors.items()}
    A = leaf(dense(sparse))
    actual, expected = insum(expr, A=sparse, **own), reference(A, **wide)
    assert_matches(actual, expected)
    place = positions(sparse)
    compare_gradients(
        actual,
        [sparse.values, *own.values()],
        expected,
        [A, *wide.values()],
        lambda dA: torch.where(place >= 0, dA.flatten()[place], 0),
    )


def compare_gradients(
    actual: Tensor,
    leaves: Sequence[Tensor],
    expected: Tensor,
    wide: Sequence[Tensor],
    stored: Callable[[Tensor], Tensor] | None = None,
) -> None:
    upstream = random_values(tuple(actual.shape), actual.dtype, torch.Generator().manual_seed(1))
    own_grads = torch.autograd.grad(actual, leaves, upstream.to(DEVICE))
    wide_grads = list(torch.autograd.grad(expected, wide, upstream.double()))
    if stored is not None:
        wide_grads[0] = stored(wide_grads[0])
    for tensor, own_grad, wide_grad in zip(leaves, own_grads, wide_grads, strict=True):
        assert own_grad.dtype == tensor.dtype
        assert_matches(own_grad, wide_grad)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def values_of(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors.values() if tensor.is_floating_point()]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return random_values(shape, dtype, torch.Generator().manual_seed(sum(shape)))


def random_sparse(*shape: int, dtype: torch.dtype = torch.float64, density: float = 0.3) -> Tensor:
    """Some rows are empty, one is full."""
    A = draw(*shape, dtype=dtype)
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < density
    keep[::4] = False
    keep[-1] = True
    return A * keep


def grouped(pairs: Iterable[tuple[int, Any]], group_size: int) -> tuple[list[int], list[list[Any]]]:
    """Entries (row, entry) in groups of one row each; None fills the last group of a row."""
    rows: list[int] = []
    groups: list[list[Any]] = []
    for row, entries in itertools.groupby(sorted(pairs, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        items = [entry for _, entry in entries]
        for start in range(0, len(items), group_size):
            group = items[start : start + group_size]
            rows.append(row)
            groups.append(group + [None] * (group_size - len(group)))
    return rows, groups


def index(values: Any, *shape: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).reshape(shape)


def column(groups: list[list[Any]], at: int, group_size: int) -> Tensor:
    """One coordinate of every entry, -1 in the padding."""
    return index([[-1 if entry is None else entry[at] for entry in group] for group in groups], -1, group_size)


# SpMM, C = A @ B


@pytest.mark.sampled
@pytest.mark.every_route
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spmm_coo(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    M, K, N = shape
    A = random_sparse(M, K, dtype=dtype)
    AM, AK = A.nonzero(as_tuple=True)

    def reference(AV: Tensor, B: Tensor, **_: Tensor) -> Tensor:
        return torch.zeros(M, K, dtype=torch.float64).index_put((AM, AK), AV) @ B

    tensors = {"AM": AM.int(), "AK": AK.int(), "AV": A[AM, AK], "B": draw(K, N, dtype=dtype)}
    check("C[AM[p],n] += AV[p] * B[AK[p],n]", tensors, reference, size=(M, N))


@pytest.mark.sampled
@pytest.mark.every_route
@every_dtype
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spmm_group_coo(shape: tuple[int, int, int], group_size: int, dtype: torch.dtype) -> None:
    M, K, N = shape
    A = random_sparse(M, K, dtype=dtype)
    rows, groups = grouped(((m, (k,)) for m, k in A.nonzero().tolist()), group_size)
    AM, AK = index(rows, -1), column(groups, 0, group_size)

    def reference(AV: Tensor, B: Tensor, **_: Tensor) -> Tensor:
        # the padding lands in one more column, which meets a row of zeros
        wide = torch.zeros(M, K + 1, dtype=torch.float64).index_put(
            (AM[:, None].long(), AK.long()), AV, accumulate=True
        )
        return wide[:, :K] @ B

    AV = torch.where(AK >= 0, A[AM[:, None].long(), AK.long()], 0)
    tensors = {"AM": AM, "AK": AK, "AV": AV, "B": draw(K, N, dtype=dtype)}
    check("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", tensors, reference, size=(M, N))


@pytest.mark.sampled
@pytest.mark.every_route
@every_dtype
@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_spmm_block(block: tuple[int, int], group_size: int | None, dtype: torch.dtype) -> None:
    """BlockCOO where `group_size` is None, else BlockGroupCOO."""
    BM, BK = block
    rows, cols, N = (3, 3, 2) if IS_INTERPRETED else (5, 4, 7)
    keep = random_sparse(rows, cols, density=0.4) != 0
    A = draw(rows, cols, BM, BK, dtype=dtype) * keep[:, :, None, None]
    AM, groups = grouped(((m, (k,)) for m, k in keep.nonzero().tolist()), group_size or 1)
    AK = column(groups, 0, group_size or 1)
    at = index(AM, -1)[:, None].long(), AK.long()
    AV = torch.where((AK >= 0)[:, :, None, None], A[at], 0)

    def reference(AV: Tensor, B: Tensor, **_: Tensor) -> Tensor:
        if group_size is None:
            AV = AV[:, None]
        blocks = torch.zeros(rows, cols + 1, BM, BK, dtype=torch.float64).index_put(at, AV, accumulate=True)
        wide = blocks[:, :cols].permute(0, 2, 1, 3).reshape(rows * BM, cols * BK)
        return (wide @ B.flatten(0, 1)).unflatten(0, (rows, BM))

    tensors = {"AM": index(AM, -1), "AK": AK, "AV": AV, "B": draw(cols, BK, N, dtype=dtype)}
    expr = "C[AM[p],bm,n] += AV[p,q,bm,bk] * B[AK[p,q],bk,n]"
    if group_size is None:
        tensors |= {"AK": AK[:, 0], "AV": AV[:, 0]}
        expr = "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]"
    check(expr, tensors, reference, size=(rows, BM, N))


@pytest.mark.every_route
def test_elementwise_product_coo() -> None:
    A, B = random_sparse(30), draw(30, dtype=torch.float64)
    (AI,) = A.nonzero(as_tuple=True)

    def reference(AV: Tensor, B: Tensor, AI: Tensor) -> Tensor:
        return torch.zeros(30, dtype=torch.float64).index_put((AI,), AV) * B

    check("C[AI[p]] = AV[p] * B[AI[p]]", {"AI": AI, "AV": A[AI], "B": B}, reference, size=(30,))


@pytest.mark.every_route
@every_dtype
def test_gather_matmul_scatter(dtype: torch.dtype) -> None:
    """The paper's running example."""
    Y, R, X = (3, 4, 5) if IS_INTERPRETED else (33, 40, 65)
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "D": random_index((Y,), 7, 0.0, generator),
        "E": random_index((R,), 11, 0.0, generator),
        "A": draw(Y, 11, dtype=dtype),
        "B": draw(R, X, dtype=dtype),
        "C": draw(7, X, dtype=dtype),
    }

    def reference(A: Tensor, B: Tensor, C: Tensor, D: Tensor, E: Tensor) -> Tensor:
        return C.index_add(0, D, A[:, E] @ B)

    check("C[D[y],x] += A[y,E[r]] * B[r,x]", tensors, reference)


@pytest.mark.every_route
@every_dtype
def test_sddmm(dtype: torch.dtype) -> None:
    M, K, depth = (4, 3, 5) if IS_INTERPRETED else (9, 7, 20)
    A = random_sparse(M, K, dtype=dtype)
    AM, AK = A.nonzero(as_tuple=True)
    X, Y = draw(M, depth, dtype=dtype), draw(K, depth, dtype=dtype)
    plain = {"AM": AM, "AK": AK, "X": X, "Y": Y}
    check("CV[p] = X[AM[p],d] * Y[AK[p],d]", plain, lambda X, Y, **_: (X @ Y.T)[AM, AK])
    sampled = {**plain, "AV": A[AM, AK]}
    check("CV[p] = AV[p] * X[AM[p],d] * Y[AK[p],d]", sampled, lambda X, Y, AV, **_: AV * (X @ Y.T)[AM, AK])


@pytest.mark.every_route
@every_dtype
def test_mixture_of_experts(dtype: torch.dtype) -> None:
    n, experts, u, w, m = (3, 2, 3, 2, 2) if IS_INTERPRETED else (6, 3, 5, 4, 2)
    T = random_index((n,), experts, 0.0, torch.Generator().manual_seed(3))
    tensors = {"X": draw(n, u, m, dtype=dtype), "W": draw(experts, u, w, dtype=dtype), "T": T}
    check("Z[n,w,m] += X[n,u,m] * W[T[n],u,w]", tensors, lambda X, W, T: W[T].transpose(1, 2) @ X)


# point-cloud convolution


class Cloud:
    """A dense grid, some of it occupied, and the pairs (offset z, input y, output x) of a 3^3 convolution."""

    def __init__(self) -> None:
        is_occupied = torch.rand(SIDE, SIDE, SIDE, generator=torch.Generator().manual_seed(4)) < OCCUPIED
        self.voxels = is_occupied.nonzero()
        number = {tuple(voxel): at for at, voxel in enumerate(self.voxels.tolist())}
        self.pairs = []
        for z, offset in enumerate(itertools.product((-1, 0, 1), repeat=3)):
            for voxel, x in number.items():
                y = number.get(tuple(v + o for v, o in zip(voxel, offset, strict=True)))
                if y is not None:
                    self.pairs.append((z, y, x))

    def __len__(self) -> int:
        return len(self.voxels)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        channels, maps = (2, 3) if IS_INTERPRETED else (3, 4)
        return {"In": draw(len(self), channels, dtype=dtype), "Weight": draw(27, channels, maps, dtype=dtype)}

    def reference(self, In: Tensor, Weight: Tensor, **_: Tensor) -> Tensor:
        at = tuple(self.voxels.T)
        grid = torch.zeros(SIDE, SIDE, SIDE, In.shape[1], dtype=torch.float64).index_put(at, In)
        kernel = Weight.permute(2, 1, 0).unflatten(2, (3, 3, 3))
        out = F.conv3d(grid.permute(3, 0, 1, 2)[None], kernel, padding=1)[0]
        return out.permute(1, 2, 3, 0)[at]


@pytest.mark.every_route
@every_dtype
def test_convolution_coo(dtype: torch.dtype) -> None:
    cloud = Cloud()
    MAPZ, MAPY, MAPX = index(cloud.pairs, -1, 3).unbind(1)
    tensors = cloud.tensors(dtype) | {"MAPX": MAPX, "MAPY": MAPY, "MAPZ": MAPZ}
    size = (len(cloud), tensors["Weight"].shape[2])
    check("Out[MAPX[p],m] += In[MAPY[p],c] * Weight[MAPZ[p],c,m]", tensors, cloud.reference, size)
    ones = tensors | {"MAPV": torch.ones(len(cloud.pairs), dtype=dtype)}
    actual = insum(
        "Out[MAPX[p],m] += MAPV[p] * In[MAPY[p],c] * Weight[MAPZ[p],c,m]",
        size=size,
        **{name: tensor.to(DEVICE) for name, tensor in ones.items()},
    )
    assert_matches(actual, cloud.reference(**{name: widened(tensor) for name, tensor in tensors.items()}))


@pytest.mark.sampled
@pytest.mark.every_route
@every_dtype
@pytest.mark.parametrize("group_size", GROUPS)
def test_convolution_grouped(group_size: int, dtype: torch.dtype) -> None:
    cloud = Cloud()
    MAPZ, groups = grouped(((z, (y, x)) for z, y, x in cloud.pairs), group_size)
    tensors = cloud.tensors(dtype)
    tensors |= {
        "MAPZ": index(MAPZ, -1),
        "MAPY": column(groups, 0, group_size),
        "MAPX": column(groups, 1, group_size),
    }
    size = (len(cloud), tensors["Weight"].shape[2])
    check("Out[MAPX[p,q],m] += In[MAPY[p,q],c] * Weight[MAPZ[p],c,m]", tensors, cloud.reference, size)


@pytest.mark.every_route
@every_dtype
def test_convolution_output_stationary(dtype: torch.dtype) -> None:
    cloud = Cloud()
    NBR = torch.full((len(cloud), 27), -1)
    for z, y, x in cloud.pairs:
        NBR[x, z] = y
    check("Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]", cloud.tensors(dtype) | {"NBR": NBR}, cloud.reference)


# equivariant tensor product

BATCH, PATHS, LEFT, RIGHT, OUT, CHANNELS, MAPS = (2, 2, 3, 2, 3, 2, 3) if IS_INTERPRETED else (3, 5, 9, 4, 9, 4, 6)


def clebsch_gordan() -> Tensor:
    """[l, i, j, k], with as many zeros as the real one."""
    return random_sparse(PATHS, OUT, LEFT, RIGHT, density=0.1)


def product_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"X": (BATCH, LEFT, CHANNELS), "Y": (BATCH, RIGHT), "W": (BATCH, PATHS, CHANNELS, MAPS)}
    return {name: draw(*shape, dtype=dtype) / 4 for name, shape in shapes.items()}


def product_reference(CG: Tensor, X: Tensor, Y: Tensor, W: Tensor) -> Tensor:
    return torch.einsum("lijk,bju,bk,bluw->biw", CG, X, Y, W)


@pytest.mark.every_route
@every_dtype
def test_tensor_product_coo(dtype: torch.dtype) -> None:
    CG = clebsch_gordan().to(dtype)
    at = CG.nonzero(as_tuple=True)
    CGL, CGI, CGJ, CGK = (coordinate.int() for coordinate in at)

    def reference(CGV: Tensor, X: Tensor, Y: Tensor, W: Tensor, **_: Tensor) -> Tensor:
        return product_reference(torch.zeros(CG.shape, dtype=torch.float64).index_put(at, CGV), X, Y, W)

    tensors = product_tensors(dtype) | {"CGL": CGL, "CGI": CGI, "CGJ": CGJ, "CGK": CGK, "CGV": CG[at]}
    expr = "Z[b,CGI[p],w] += CGV[p] * X[b,CGJ[p],u] * Y[b,CGK[p]] * W[b,CGL[p],u,w]"
    check(expr, tensors, reference, size=(BATCH, OUT, MAPS))


@pytest.mark.sampled
@pytest.mark.every_route
@every_dtype
@pytest.mark.parametrize("group_size", GROUPS)
def test_tensor_product_grouped(group_size: int, dtype: torch.dtype) -> None:
    CG = clebsch_gordan().to(dtype)
    CGL, groups = grouped(((path, (i, j, k)) for path, i, j, k in CG.nonzero().tolist()), group_size)
    CGI, CGJ, CGK = (column(groups, at, group_size) for at in range(3))
    paths = index(CGL, -1)
    at = (paths[:, None].long(), CGI.long(), CGJ.long(), CGK.long())
    is_entry = CGI >= 0

    def reference(CGV: Tensor, X: Tensor, Y: Tensor, W: Tensor, **_: Tensor) -> Tensor:
        entries = tuple(coordinate.expand_as(is_entry)[is_entry] for coordinate in at)
        wide = torch.zeros(CG.shape, dtype=torch.float64).index_put(entries, CGV[is_entry])
        return product_reference(wide, X, Y, W)

    tensors = product_tensors(dtype) | {"CGL": paths, "CGI": CGI, "CGJ": CGJ, "CGK": CGK}
    tensors["CGV"] = torch.where(is_entry, CG[at], 0)
    expr = "Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,CGL[p],u,w]"
    check(expr, tensors, reference, size=(BATCH, OUT, MAPS))


# format-agnostic statements

MATRIX_STATEMENTS: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    "SpMM": ("C[m,n] += A[m,k] * B[k,n]", {"B": (COLS, 5)}, "mk,kn->mn"),
    "SpMM, B first": ("C[m,n] += B[k,n] * A[m,k]", {"B": (COLS, 5)}, "mk,kn->mn"),
    "transposed SpMM": ("C[k,n] += A[m,k] * B[m,n]", {"B": (ROWS, 5)}, "mk,mn->kn"),
    "linear layer": ("Y[b,m] += X[b,k] * A[m,k]", {"X": (4, COLS)}, "mk,bk->bm"),
    "batched SpMM": ("C[b,m,n] += A[m,k] * B[b,k,n]", {"B": (2, COLS, 3)}, "mk,bkn->bmn"),
    "SpMV": ("c[m] += A[m,k] * b[k]", {"b": (COLS,)}, "mk,k->m"),
    "bilinear form": ("S[()] += x[m] * A[m,k] * y[k]", {"x": (ROWS,), "y": (COLS,)}, "mk,m,k->"),
    "row sums": ("S[m] += A[m,k]", {}, "mk->m"),
    "column sums": ("S[k] += A[m,k]", {}, "mk->k"),
    "sum": ("S[()] += A[m,k]", {}, "mk->"),
    "to dense": ("D[m,k] = A[m,k]", {}, "mk->mk"),
    "transposed to dense": ("D[k,m] = A[m,k]", {}, "mk->km"),
    "elementwise product": ("C[m,k] = A[m,k] * B[m,k]", {"B": (ROWS, COLS)}, "mk,mk->mk"),
    "inner product": ("S[()] += A[m,k] * B[m,k]", {"B": (ROWS, COLS)}, "mk,mk->"),
    "scaled by rows and columns": (
        "C[m,n] += x[m] * A[m,k] * y[k] * B[k,n]",
        {"x": (ROWS,), "y": (COLS,), "B": (COLS, 3)},
        "mk,m,k,kn->mn",
    ),
    "outer": ("C[m,k,n] += A[m,k] * b[n]", {"b": (3,)}, "mk,n->mkn"),
}


@pytest.mark.sampled
@pytest.mark.every_route
@every_format
@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("name", MATRIX_STATEMENTS)
def test_matrix_statement_over_every_format(name: str, group_dim: int, form: str) -> None:
    expr, shapes, equation = MATRIX_STATEMENTS[name]
    sparse = FORMATS[form](random_sparse(ROWS, COLS).to(DEVICE), group_dim)
    tensors = {name: draw(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    check_format(expr, sparse, tensors, lambda A, **dense: torch.einsum(equation, A, *dense.values()))


@pytest.mark.sampled
@pytest.mark.every_route
@every_dtype
@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spmm_over_every_format(shape: tuple[int, int, int], form: str, dtype: torch.dtype) -> None:
    M, K, N = shape
    sparse = FORMATS[form](random_sparse(M, K, dtype=dtype).to(DEVICE), 0)
    check_format("C[m,n] += A[m,k] * B[k,n]", sparse, {"B": draw(K, N, dtype=dtype)}, lambda A, B: A @ B)


@pytest.mark.every_route
@every_format
def test_a_format_beside_a_seed_and_an_indirection(form: str) -> None:
    sparse = FORMATS[form](random_sparse(ROWS, COLS).to(DEVICE), 0)
    tensors = {"C": draw(ROWS, 3, dtype=torch.float64), "B": draw(4, 3, dtype=torch.float64)}
    E = random_index((COLS,), 4, 0.0, torch.Generator().manual_seed(5)).to(DEVICE)

    def statement(values: Tensor, C: Tensor, B: Tensor) -> Tensor:
        return insum("C[m,n] += 0.5 * A[m,k] * B[E[k],n]", A=sparse.with_values(values), C=C, B=B, E=E)

    own = [leaf(sparse.values), *(leaf(tensor.to(DEVICE)) for tensor in tensors.values())]
    wide = [leaf(dense(sparse)), *map(leaf, tensors.values())]
    actual, expected = statement(*own), wide[1] + 0.5 * wide[0] @ wide[2][E.cpu()]
    assert_matches(actual, expected)
    place = positions(sparse)
    compare_gradients(actual, own, expected, wide, lambda dA: torch.where(place >= 0, dA.flatten()[place], 0))


@every_format
def test_convolution_over_every_format(form: str) -> None:
    """The kernel map is a sparse tensor [z, y, x], grouped by the offset z as in the paper, or otherwise."""
    cloud = Cloud()
    A = torch.zeros(27, len(cloud), len(cloud), dtype=torch.float64)
    A[index(cloud.pairs, -1, 3).long().unbind(1)] = 1
    tensors = cloud.tensors(torch.float64)
    for group_dim in (1, 2):
        sparse = FORMATS[form](A.to(DEVICE), group_dim)
        actual = insum(
            "Out[x,m] += A[z,y,x] * In[y,c] * Weight[z,c,m]",
            A=sparse,
            **{name: t.to(DEVICE) for name, t in tensors.items()},
        )
        assert_matches(actual, cloud.reference(**tensors))
    check_format(
        "Out[x,m] += A[z,y,x] * In[y,c] * Weight[z,c,m]",
        FORMATS[form](A.to(DEVICE), 0),
        tensors,
        lambda A, In, Weight: torch.einsum("zyx,yc,zcm->xm", A, In, Weight),
    )


@every_format
def test_tensor_product_over_every_format(form: str) -> None:
    """CG is a sparse tensor [l, i, j, k], grouped by the path l."""
    sparse = FORMATS[form](clebsch_gordan().to(DEVICE), 0)
    expr = "Z[b,i,w] += A[l,i,j,k] * X[b,j,u] * Y[b,k] * W[b,l,u,w]"
    check_format(expr, sparse, product_tensors(torch.float64), lambda A, **rest: product_reference(A, **rest))
