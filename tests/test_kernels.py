"""Every scatter strategy, product and layout of code generation, on small problems, against the FX graph in float64.

Runs where the generated kernels run: under TRITON_INTERPRET=1, or on a GPU.
"""

import math
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import problem
from reference import LoopNest
from statements import DEVICE, examples, statements
from statements import IS_INTERPRETED as INTERPRETED
from tolerances import assert_matches, assert_within, bound

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.codegen import Config, Flags
from insum_ops.compiler.planning import rules, scatter
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.scatter import strategies
from insum_ops.compiler.reference.lower import lower, placeholders
from insum_ops.compiler.tuning.problem import Candidate, candidates
from insum_ops.formats import BlockCOO, BlockGroupCOO, GroupCOO
from insum_ops.formats.facts import OwnedRows, WrittenOnce
from insum_ops.formats.row_facts import longest_first, row_facts

pytestmark = pytest.mark.kernels


def matrix(rows, columns, density, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    dense[torch.rand(rows, columns, generator=generator) > density] = 0
    dense[rows // 2] = 0
    return dense.to(dtype).to(DEVICE)


def draw(*size, dtype=torch.float32):
    return torch.randn(*size, dtype=torch.float64).to(dtype).to(DEVICE)


def positions(high, *size):
    return torch.randint(-1, high, size, dtype=torch.int32, device=DEVICE)


def group_spmm(dtype, wide):
    A = GroupCOO.from_dense(matrix(7, 6, 0.4, dtype), group_size=2)
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(6, wide, dtype=dtype))
    return "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", tensors, (7, wide), A.facts.owned("AM")


def entry_spmm(dtype, wide):
    A = GroupCOO.from_dense(matrix(7, 6, 0.4, dtype), group_size=1)
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(6, wide, dtype=dtype))
    return "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", tensors, (7, wide), row_facts(A.AM, 7, cut=2).owned("AM")


def packed_spmm(dtype, wide):
    """Pieces of several rows, and parts of a full one; a factor of each row too."""
    A = matrix(9, 6, 0.25, dtype)
    A[4] = draw(6, dtype=dtype)
    A = GroupCOO.from_dense(A, group_size=1)
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(6, wide, dtype=dtype), F=draw(9, dtype=dtype))
    fact = row_facts(A.AM, 9, cut=2, is_packed=True).owned("AM")
    return "C[AM[p],n] += 0.5 * AV[p,q] * B[AK[p,q],n] * F[AM[p]]", tensors, (9, wide), fact


def block_spmm(dtype, wide):
    A = BlockGroupCOO.from_dense(matrix(12, 12, 0.08, dtype), block_size=(4, 3), group_size=2)
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(4, 3, wide, dtype=dtype))
    return "C[AM[p],i,n] += AV[p,q,i,j] * B[AK[p,q],j,n]", tensors, (3, 4, wide), A.facts.owned("AM")


def block_coo_spmm(dtype, wide):
    A = BlockCOO.from_dense(matrix(12, 12, 0.08, dtype), block_size=(4, 3))
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(4, 3, wide, dtype=dtype))
    return "C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]", tensors, (3, 4, wide), A.facts.owned("AM")


def group_max(dtype, wide):
    _, tensors, size, fact = group_spmm(dtype, wide)
    return "C[AM[p],n] = max(0.5 * AV[p,q] * B[AK[p,q],n])", tensors, size, fact


def block_max(dtype, wide):
    _, tensors, size, fact = block_spmm(dtype, wide)
    return "C[AM[p],i,n] = max(AV[p,q,i,j] * B[AK[p,q],j,n])", tensors, size, fact


def neighbour_max(dtype, wide):
    tensors = dict(NBR=positions(5, 6, 2), In=draw(5, wide, dtype=dtype), W=draw(2, wide, 5, dtype=dtype))
    return "Out[x,m] = max(In[NBR[x,z],c] * W[z,c,m])", tensors, None, None


def convolution(dtype, wide):
    tensors = dict(MX=positions(7, 2, 6), MY=positions(5, 2, 6), MZ=positions(2, 2))
    tensors |= dict(In=draw(5, wide, dtype=dtype), W=draw(2, wide, wide, dtype=dtype))
    return "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]", tensors, (7, wide), None


def convolution_weight(dtype, wide):
    tensors = dict(MX=positions(7, 2, 6), MY=positions(5, 2, 6), MZ=positions(2, 2))
    tensors |= dict(In=draw(5, 3, dtype=dtype), dOut=draw(7, wide, dtype=dtype))
    return "dW[MZ[p],c,m] += In[MY[p,q],c] * dOut[MX[p,q],m]", tensors, (2, 3, wide), None


def output_stationary(dtype, wide):
    tensors = dict(NBR=positions(5, 6, 2), In=draw(5, wide, dtype=dtype), W=draw(2, wide, 5, dtype=dtype))
    return "Out[x,m] += In[NBR[x,z],c] * W[z,c,m]", tensors, None, None


def product_tensors(dtype):
    return dict(I=positions(3, 2, 3), J=positions(3, 2, 3), K=positions(4, 2, 3), V=draw(2, 3, dtype=dtype))


def tensor_product(dtype, wide):
    tensors = product_tensors(dtype) | dict(X=draw(2, 3, wide, dtype=dtype), Y=draw(2, 4, dtype=dtype))
    tensors |= dict(W=draw(2, 2, wide, 3, dtype=dtype))
    return "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,p,u,w]", tensors, (2, 3, 3), None


def tensor_product_y(dtype, wide):
    tensors = product_tensors(dtype) | dict(X=draw(2, 3, 3, dtype=dtype), dZ=draw(2, 3, wide, dtype=dtype))
    tensors |= dict(W=draw(2, 2, 3, wide, dtype=dtype))
    return "dY[b,K[p,q]] += V[p,q] * X[b,J[p,q],u] * dZ[b,I[p,q],w] * W[b,p,u,w]", tensors, (2, 4), None


def sampled(dtype, wide):
    tensors = dict(AM=positions(5, 7), AK=positions(6, 7, 2))
    tensors |= dict(dC=draw(5, wide, dtype=dtype), B=draw(6, wide, dtype=dtype))
    return "dAV[p,q] += dC[AM[p],n] * B[AK[p,q],n]", tensors, None, None


def paper_example(dtype, wide):
    tensors = dict(D=positions(5, wide), E=positions(6, wide))
    tensors |= dict(A=draw(wide, 6, dtype=dtype), B=draw(wide, 5, dtype=dtype))
    return "C[D[y],x] += A[y,E[r]] * B[r,x]", tensors, (5, 5), None


def full_sum(dtype, wide):
    tensors = dict(A=draw(3 * wide, dtype=dtype), B=draw(3 * wide, dtype=dtype))
    return "C[()] += A[i] * B[i] * 0.5", tensors, None, None


def corner(dtype, wide):
    tensors = dict(A=draw(5, 5, dtype=dtype), C=draw(5, 5, 3, dtype=dtype), S=draw(2, dtype=dtype))
    return "C[i,i,0] += A[i,i] * S[1]", tensors, None, None


def grouped_gradient(dtype, wide):
    tensors = dict(AM=positions(5, 3), AK=positions(6, 3, 3))
    tensors |= dict(dY=draw(wide, 5, 3, dtype=dtype), X=draw(wide, 6, 8, dtype=dtype))
    return "dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i] * 0.5", tensors, None, None


def scaled_gradient(dtype, wide):
    tensors = dict(AM=positions(5, 3), AK=positions(6, 3, 3), S=draw(3, 3, dtype=dtype))
    tensors |= dict(dY=draw(wide, 5, 3, dtype=dtype), X=draw(wide, 6, 8, dtype=dtype))
    return "dW[p,o,i,q] += S[p,q] * X[t,AK[p,q],i] * dY[t,AM[p],o]", tensors, None, None


def placed_gradient(dtype, wide):
    """Every place is written once; a product that has no entry there is 0."""
    places = torch.tensor([[3, 0, -1], [4, -1, -1], [1, 5, 2]], dtype=torch.int32, device=DEVICE)
    tensors = dict(S=places, AM=positions(5, 3), AK=positions(6, 3, 3))
    tensors |= dict(dY=draw(wide, 5, 3, dtype=dtype), X=draw(wide, 6, 8, dtype=dtype))
    return "dW[S[p,q],o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]", tensors, (6, 3, 8), WrittenOnce("S")


def owned_neighbours(dtype, wide):
    A = BlockCOO.from_dense(matrix(12, 12, 0.08, dtype), block_size=(4, 3))
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(4, 3, 3, wide - wide % 2 + 2, dtype=dtype)[..., :4])
    return "C[AM[p],q,i,n] += AV[p,i,j] * B[AK[p],q,j,n]", tensors, (3, 3, 4, 4), A.facts.owned("AM")


def tiled_convolution(dtype, wide):
    """Three tiles, the second of which needs no tap and the last of which is not full."""
    size = 4 if wide < 16 else 20
    rows = 2 * size + 1
    ROW = torch.full((3, size), -1, dtype=torch.int32)
    ROW.view(-1)[:rows] = torch.randperm(rows)
    TILE, pointers = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 0, 2], [0, 2, 2, 3]))
    tensors = dict(ROW=ROW.to(DEVICE), TILE=TILE, NBR=positions(5, 3, size), TAP=positions(2, 3).clamp_min(0))
    tensors |= dict(In=draw(5, wide, dtype=dtype), W=draw(2, wide, wide + 1, dtype=dtype))
    expr = "Out[ROW[TILE[p],q],m] += In[NBR[p,q],c] * W[TAP[p],c,m]"
    return expr, tensors, (rows, wide + 1), OwnedRows("ROW", "TILE", pointers, longest_first(pointers))


def seeded_tiles(dtype, wide):
    """The sums start from a bias, the same one for every row."""
    expr, tensors, size, fact = tiled_convolution(dtype, wide)
    tensors["Out"] = draw(size[1], dtype=dtype).expand(size)
    return expr, tensors, None, fact


def grouped_tiles(dtype, wide):
    """Channels in two groups."""
    _, tensors, (rows, _), fact = tiled_convolution(dtype, wide)
    tensors |= dict(In=draw(5, 2, wide, dtype=dtype), W=draw(2, 2, wide, 3, dtype=dtype))
    return "Out[ROW[TILE[p],q],g,m] += In[NBR[p,q],g,c] * W[TAP[p],g,c,m]", tensors, (rows, 2, 3), fact


def depthwise_tiles(dtype, wide):
    _, tensors, (rows, _), fact = tiled_convolution(dtype, wide)
    tensors["W"] = draw(2, wide, dtype=dtype)
    return "Out[ROW[TILE[p],q],g] += In[NBR[p,q],g] * W[TAP[p],g]", tensors, (rows, wide), fact


def tiled_max(dtype, wide):
    _, *rest = tiled_convolution(dtype, wide)
    return "Out[ROW[TILE[p],q],m] = max(In[NBR[p,q],c] * W[TAP[p],c,m])", *rest


def rows_together(dtype, wide):
    """Two sets of two rows, the last one not full; rows lack some of their set's columns, and one set all of them."""
    tensors = dict(AM=[[2, 0], [1, -1]], AT=[0, 0, 0], AS=[[0, -1], [2, 1], [-1, 3]], AK=[1, 0, 3])
    tensors = {name: torch.tensor(own, dtype=torch.int32, device=DEVICE) for name, own in tensors.items()}
    tensors |= dict(AV=draw(4, 16, 3, dtype=dtype), B=draw(4, 3, wide, dtype=dtype))
    pointers = torch.tensor([0, 3, 3], dtype=torch.int32, device=DEVICE)
    expr = "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]"
    return expr, tensors, (3, 16, wide), OwnedRows("AM", "AT", pointers, longest_first(pointers))


def biased_rows_together(dtype, wide):
    """The columns' side first, and sums that start from a bias of each row."""
    _, tensors, _, fact = rows_together(dtype, wide)
    tensors |= dict(B=draw(wide, 4, 3, dtype=dtype), C=draw(3, 16, dtype=dtype).expand(wide, 3, 16))
    return "C[n,AM[AT[p],q],i] += B[n,AK[p],j] * AV[AS[p,q],i,j]", tensors, None, fact


def long_rows_together(dtype, wide):
    """Several steps to a block."""
    expr, tensors, size, fact = rows_together(dtype, wide)
    tensors |= dict(AV=draw(4, 16, 20, dtype=dtype), B=draw(4, 20, wide, dtype=dtype))
    return expr, tensors, size, fact


def many_rows_together(dtype, wide):
    """Six sets, of which the first, the last and two others side by side have no columns."""
    expr, tensors, *_ = rows_together(dtype, wide)
    own = dict(AM=[[8, 0], [4, 1], [7, 9], [2, 6], [5, 10], [3, -1]], AT=[1, 1, 4, 4, 4])
    own |= dict(AS=[[0, 1], [-1, 2], [3, -1], [-1, 0], [2, 2]], AK=[1, 3, 2, 3, 0])
    tensors |= {name: torch.tensor(value, dtype=torch.int32, device=DEVICE) for name, value in own.items()}
    pointers = torch.tensor([0, 0, 2, 2, 2, 5, 5], dtype=torch.int32, device=DEVICE)
    return expr, tensors, (11, 16, wide), OwnedRows("AM", "AT", pointers, longest_first(pointers))


def rows_alone(dtype, wide):
    """Seven rows in an order of their own, two without columns; several steps to a block."""
    own = dict(AM=[3, 6, 0, 5, 1, 4, 2], AT=[0, 2, 2, 3, 5, 6, 6, 6], AS=[7, 1, 0, 3, 2, 4, 6, 5])
    own |= dict(AK=[1, 0, 3, 3, 2, 0, 1, 2])
    tensors = {name: torch.tensor(value, dtype=torch.int32, device=DEVICE) for name, value in own.items()}
    tensors |= dict(AV=draw(8, 16, 20, dtype=dtype), B=draw(4, 20, wide, dtype=dtype))
    pointers = torch.tensor([0, 1, 1, 3, 4, 4, 5, 8], dtype=torch.int32, device=DEVICE)
    expr = "C[AM[AT[p]],i,n] += 0.5 * AV[AS[p],i,j] * B[AK[p],j,n]"
    return expr, tensors, (7, 16, wide), OwnedRows("AM", "AT", pointers, longest_first(pointers))


def biased_rows_alone(dtype, wide):
    _, tensors, _, fact = rows_alone(dtype, wide)
    tensors |= dict(B=draw(wide, 4, 20, dtype=dtype), C=draw(7, 16, dtype=dtype).expand(wide, 7, 16))
    return "C[n,AM[AT[p]],i] += B[n,AK[p],j] * AV[AS[p],i,j]", tensors, None, fact


IN_TURN = [
    rows_together,
    biased_rows_together,
    long_rows_together,
    many_rows_together,
    rows_alone,
    biased_rows_alone,
]


def weight_gradient(dtype, wide):
    tensors = dict(L=positions(2, 3), T=draw(40, 3, wide, dtype=dtype), dZ=draw(40, 3, 4, dtype=dtype))
    return "dW[L[i],u,w] += T[b,i,u] * dZ[b,i,w]", tensors, (2, wide, 4), None


MERGED = [
    (grouped_gradient, "store"),
    (scaled_gradient, "store"),
    (placed_gradient, "store-once"),
    (placed_gradient, "atomic"),
    (owned_neighbours, "owner"),
    (owned_neighbours, "store-or-atomic"),
    (owned_neighbours, "atomic"),
]
CASES = [
    (grouped_gradient, "store"),
    (placed_gradient, "store-once"),
    (group_spmm, "atomic"),
    (group_spmm, "owner"),
    (group_spmm, "store-or-atomic"),
    (entry_spmm, "store-or-atomic"),
    (packed_spmm, "store-or-atomic"),
    (block_spmm, "atomic"),
    (block_spmm, "owner"),
    (block_spmm, "store-or-atomic"),
    (block_coo_spmm, "owner"),
    (block_coo_spmm, "store-or-atomic"),
    (group_max, "owner"),
    (block_max, "owner"),
    (neighbour_max, "store"),
    (convolution, "atomic"),
    (tiled_convolution, "owner"),
    (tiled_convolution, "atomic"),
    (seeded_tiles, "owner"),
    (grouped_tiles, "owner"),
    (depthwise_tiles, "owner"),
    (tiled_max, "owner"),
    (rows_together, "owner"),
    (biased_rows_together, "owner"),
    (convolution_weight, "atomic"),
    (convolution_weight, "on-chip"),
    (output_stationary, "store"),
    (tensor_product, "atomic"),
    (tensor_product, "on-chip"),
    (tensor_product_y, "atomic"),
    (tensor_product_y, "on-chip"),
    (sampled, "store"),
    (paper_example, "atomic"),
    (full_sum, "store"),
    (corner, "store"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
FLAGS = Flags(interpreted=INTERPRETED)

every_case = pytest.mark.parametrize(("make", "strategy"), CASES, ids=lambda x: getattr(x, "__name__", x))


def problem_of(make, dtype, flags, wide):
    expr, tensors, size, fact = make(dtype, wide)
    return problem(expr, tensors, size, fact, flags), tensors, fact


def expected(bound, tensors):
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    bound = bind(bound.statement, wide, bound.size if bound.statement.output.name not in wide else None)
    return lower(bound)(*(wide[name] for name in placeholders(bound)))


def run_all(make, strategy, blocks, use_dot, flags, dtype=torch.float32, wide=3, swap=False):
    """Every schedule of a case. An interpreted loop step takes about 15 ms, hence the small extents."""
    own, tensors, fact = problem_of(make, dtype, flags, wide)
    found = schedules(own.bound, own.strides, strategy, own.fact, use_dot=use_dot)
    assert found
    for way in found:
        least = 16 if way.uses_dot else 1
        sizes = tuple((axis, max(block, least)) for axis, block in zip(way.axes, blocks))
        launcher = own.launcher(Candidate(way, Config(sizes, 1, 1, swap)))
        result = launcher(list(tensors.values()), fact)
        assert result.dtype == own.bound.dtype
        scale = expected(own.bound, {n: t.abs() if t.is_floating_point() else t for n, t in tensors.items()})
        terms = max(1, math.prod(own.bound.extents[name] for name in own.bound.statement.names))
        limit = bound(result.dtype, scale.cpu(), terms, len(tensors))
        assert_within(result, expected(own.bound, tensors).cpu(), limit)


@pytest.mark.parametrize("make", [rows_together, tiled_convolution, weight_gradient])
def test_every_schedule_of_a_full_search(make):
    """What rules leave out by default is as right, with the first config of each."""
    own, tensors, known = problem_of(make, torch.float16, FLAGS, 17)
    magnitudes = {n: t.abs() if t.is_floating_point() else t for n, t in tensors.items()}
    terms = math.prod(own.bound.extents[name] for name in own.bound.statement.names)
    limit = bound(torch.float16, expected(own.bound, magnitudes).cpu(), terms, len(tensors))
    next(tensors[name] for name in ("B", "In", "T") if name in tensors).view(-1)[5] = float("nan")
    wanted = expected(own.bound, tensors).cpu()
    firsts = [next(ways) for _, ways in groupby(candidates(own, full=True), key=lambda way: way.schedule)]
    assert {way.schedule.uses_dot for way in firsts} == {False, True}
    for way in firsts:
        result = own.launcher(way)(list(tensors.values()), known).cpu()
        assert torch.equal(result.isnan(), wanted.isnan())
        assert_within(result.nan_to_num(), wanted.nan_to_num(), limit)


@pytest.mark.sampled
@pytest.mark.parametrize("in_turn", [1, 2, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [rows_together, biased_rows_together, long_rows_together])
def test_what_a_row_lacks_keeps_away_from_it(make, bad, in_turn):
    """Another row of its set has a column that holds NaN or infinity."""
    own, tensors, fact = problem_of(make, torch.float32, FLAGS, 17)
    (way,) = schedules(own.bound, own.strides, "owner", own.fact, use_dot=True)
    assert way.merged is not None
    sizes = tuple((axis, 32) for axis in way.axes)
    run = own.launcher(Candidate(way, Config(sizes, 1, 1, swap=make is biased_rows_together, rows=in_turn)))
    rows = 1 if make is biased_rows_together else 0
    whole = run(list(tensors.values()), fact).movedim(rows, 0)
    tensors["B"].movedim(rows, 0)[3] = bad  # which row 0 alone has
    found = run(list(tensors.values()), fact).movedim(rows, 0)
    assert not found[0].isfinite().any()
    torch.testing.assert_close(found[1:], whole[1:])


@pytest.mark.sampled("make", "lazy")
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("make", IN_TURN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_program_may_own_several_rows(make, dtype, lazy, rows):
    """One after another, also where the last program has fewer and where some have no columns."""
    own, tensors, fact = problem_of(make, dtype, replace(FLAGS, lazy=lazy), 17)
    (way,) = schedules(own.bound, own.strides, "owner", own.fact, use_dot=True)
    assert way.has_rows_in_turn
    sizes = tuple((axis, 32 if way.merged and axis == way.merged.name else 16) for axis in way.axes)
    for swap in (False, True):
        launcher = own.launcher(Candidate(way, Config(sizes, 1, 1, swap=swap, rows=rows)))
        assert rows == 1 or f"first_row + {rows}" in launcher.kernel.source
        found = launcher(list(tensors.values()), fact)
        scale = expected(own.bound, {n: t.abs() if t.is_floating_point() else t for n, t in tensors.items()})
        terms = math.prod(own.bound.extents[name] for name in own.bound.statement.names)
        assert_within(found, expected(own.bound, tensors).cpu(), bound(dtype, scale.cpu(), terms, len(tensors)))


@pytest.mark.parametrize(("make", "owner"), [(block_spmm, "AM"), (tiled_convolution, "TILE")], ids=["rows", "tiles"])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_the_longest_rows_come_first(make, owner, lazy):
    own, tensors, fact = problem_of(make, torch.float32, Flags(interpreted=INTERPRETED, lazy=lazy), 17)
    (way,) = schedules(own.bound, own.strides, "owner", own.fact, use_dot=True)
    launcher = own.launcher(Candidate(way, Config(tuple((axis, 16) for axis in way.axes), 1, 1, longest_first=True)))
    assert f"i_r = tl.load(ptr_of_{owner}_order + i_r)" in launcher.kernel.source
    assert_matches(launcher(list(tensors.values()), fact), expected(own.bound, tensors))


@pytest.mark.sampled("make", "strategy", "use_dot")
@every_case
@pytest.mark.parametrize("use_dot", [True, False], ids=["dot", "fma"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generated_kernel_equals_the_graph(make, strategy, dtype, use_dot):
    """One tile holds every extent, and is larger than it."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    flags = Flags(interpreted=INTERPRETED, sum_dtype=torch.float32 if is_half else None)
    run_all(make, strategy, (32, 16, 16, 16), use_dot, flags, dtype)


@pytest.mark.sampled("make", "strategy")
@every_case
@pytest.mark.parametrize("swap", [False, True], ids=["", "swap"])
def test_several_tiles_and_steps_of_a_dot(make, strategy, swap):
    run_all(make, strategy, (16, 16, 16, 16), True, FLAGS, wide=17, swap=swap)


@pytest.mark.sampled("make", "strategy")
@every_case
@pytest.mark.parametrize("blocks", [(1, 2, 2, 2), (4, 1, 4, 4), (2, 4, 2, 2)], ids=str)
def test_several_tiles_and_steps_of_multiply_add(make, strategy, blocks):
    run_all(make, strategy, blocks, False, FLAGS)


@pytest.mark.parametrize("use_dot", [True, False], ids=["dot", "fma"])
@pytest.mark.parametrize("block", [16, 64], ids=["steps", "one step"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_is_added_to_float64_is_summed_as_float64_whatever_the_factors_are(dtype, block, use_dot):
    tensors = {"C": draw(9, 7, dtype=torch.float64), "A": draw(9, 40, dtype=dtype), "B": draw(40, 7, dtype=dtype)}
    own = problem("C[m,n] += A[m,k] * B[k,n]", tensors, flags=FLAGS)
    for way in schedules(own.bound, own.strides, "store", use_dot=use_dot):
        config = Config(tuple((axis, block) for axis in way.axes), 1, 1)
        assert_matches(own.launcher(Candidate(way, config))(list(tensors.values())), expected(own.bound, tensors))


def seeded_gradient(dtype, wide):
    tensors = dict(dW=draw(wide, 4, dtype=dtype), T=draw(40, 3, wide, dtype=dtype), dZ=draw(40, 3, 4, dtype=dtype))
    return "dW[u,w] += T[b,i,u] * dZ[b,i,w]", tensors, None, None


SHARED = [
    (weight_gradient, "atomic"),
    (seeded_gradient, "store"),
    (output_stationary, "store"),
    (convolution, "atomic"),
    (placed_gradient, "store-once"),
]


@pytest.mark.sampled("make", "strategy")
@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize(("use_dot", "dtype"), [(True, torch.float16), (True, torch.float32), (False, torch.float32)])
@pytest.mark.parametrize(("make", "strategy"), SHARED, ids=lambda x: getattr(x, "__name__", x))
def test_programs_may_share_a_sum(make, strategy, dtype, use_dot, parts, monkeypatch):
    """Some parts are longer than others, and some may be empty; they meet in memory, or have a copy of the output."""
    for loop in ("SHARED_LOOP", "SHORT_SHARED_LOOP"):
        monkeypatch.setattr(rules, loop, 2)
    own, tensors, fact = problem_of(make, dtype, FLAGS, 17)
    magnitudes = {n: t.abs() if t.is_floating_point() else t for n, t in tensors.items()}
    terms = math.prod(own.bound.extents[name] for name in own.bound.statement.names)
    limit = bound(dtype, expected(own.bound, magnitudes).cpu(), terms, len(tensors))
    shared = [way for way in schedules(own.bound, own.strides, strategy, own.fact, use_dot=use_dot) if way.is_shared]
    assert shared
    for way in shared:
        sizes = tuple((axis, 16 if way.uses_dot else 2) for axis in way.axes)
        config = Config(sizes, 1, 1, parts=parts, copies=parts if way.has_copies else 1)
        given = {name: tensor.clone() for name, tensor in tensors.items()}  # sums may be added to the output in place
        result = own.launcher(Candidate(way, config))(list(given.values()), fact)
        assert result.dtype == dtype
        assert_within(result, expected(own.bound, tensors).cpu(), limit)


@pytest.mark.parametrize("parts", [2, 1024])
def test_copies_are_added_to_what_the_output_starts_from_however_many_they_are(parts):
    tensors = {"C": draw(1), "A": draw(1, 2 * parts)}
    own = problem("C[i] += A[i,k]", tensors, flags=FLAGS)
    way = schedules(own.bound, own.strides, "store")[-1].in_copies()  # of the sum as one program has it
    config = Config(tuple((axis, 2) for axis in way.axes), 1, 1, parts=parts, copies=parts)
    result = own.launcher(Candidate(way, config))(list(tensors.values()), None)
    limit = bound(torch.float32, tensors["A"].abs().sum(1).cpu(), 2 * parts, 2)
    assert_within(result, expected(own.bound, tensors).cpu(), limit)


@pytest.mark.sampled("make", "strategy")
@pytest.mark.parametrize(("make", "strategy"), MERGED, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("swap", [False, True], ids=["", "swap"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("width", [16, 32])
def test_neighbours_side_by_side(make, strategy, width, lazy, swap):
    """24 or 12 columns of three neighbours in one tile or several, the last one not full."""
    flags = replace(FLAGS, lazy=lazy)
    own, _, _ = problem_of(make, torch.float32, flags, 17)
    assert schedules(own.bound, own.strides, strategy, own.fact, use_dot=True)[0].merged is not None
    run_all(make, strategy, (width,) * 3, True, flags, wide=17, swap=swap)


@settings(max_examples=examples(60, 25))
@given(
    *(st.integers(1, 4), st.integers(2, 9), st.integers(1, 20), st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 40)),
    *(st.sampled_from((16, 32, 64)), st.booleans(), st.booleans()),
)
def test_neighbours_of_any_extent(P, Q, o, i, t, width, is_placed, swap):
    generator = torch.Generator().manual_seed(P * Q * o * i * t)
    places = torch.randperm(P * Q, generator=generator).view(P, Q)
    places[places >= max(1, P * Q - Q)] = -1
    tensors = dict(S=places) if is_placed else {}
    tensors |= dict(AM=torch.randint(0, 3, (P,), generator=generator))
    tensors |= dict(AK=torch.randint(-1, 4, (P, Q), generator=generator))
    tensors |= dict(dY=torch.randn(t, 3, o, generator=generator), X=torch.randn(t, 4, i, generator=generator))
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    left, size, strategy = "dW[p,q,o,i]", None, "store"
    if is_placed:
        left, size, strategy = "dW[S[p,q],o,i]", (int(places.max()) + 1, o, i), "store-once"
    own = problem(
        f"{left} += dY[t,AM[p],o] * X[t,AK[p,q],i]", tensors, size, WrittenOnce("S") if is_placed else None, FLAGS
    )
    way = schedules(own.bound, own.strides, strategy, own.fact, use_dot=True)[0]
    assume(way.merged is not None)
    sizes = tuple((axis, width if axis == way.merged.name else 32 if axis == "o" else 16) for axis in way.axes)
    result = own.launcher(Candidate(way, Config(sizes, 1, 1, swap)))(list(tensors.values()))
    magnitudes = {name: x.abs() if x.is_floating_point() else x for name, x in tensors.items()}
    limit = bound(result.dtype, expected(own.bound, magnitudes).cpu(), t, 2)
    assert_within(result, expected(own.bound, tensors).cpu(), limit)


def test_padding_beside_an_entry_hides_what_it_does_not_read():
    own, tensors, _ = problem_of(placed_gradient, torch.float32, FLAGS, 3)
    tensors["AM"][:], tensors["AK"][:] = 1, torch.where(tensors["S"] < 0, -1, 2)
    for name, row in (("X", 5), ("X", 0), ("dY", 0)):
        tensors[name][:, row] = float("nan")
    for way in schedules(own.bound, own.strides, "store-once", own.fact, use_dot=True):
        sizes = tuple((axis, 32) for axis in way.axes)
        result = own.launcher(Candidate(way, Config(sizes, 1, 1)))(list(tensors.values()))
        block = torch.einsum("to,ti->oi", tensors["dY"][:, 1].double(), tensors["X"][:, 2].double())
        assert_matches(result, block.expand(6, 3, 8))


@pytest.mark.parametrize("sizes", [(2, 4), (1, 8), (4, 2)], ids=str)
def test_what_is_infinite_stays_so_beside_the_end_of_a_sum(sizes):
    """Blocks of 4 or 8 end beyond the 5 summands; rows side by side have up to 3 entries, and one has none."""
    bad = float("inf")
    tensors = {"A": torch.tensor([bad, 1.0, -bad], device=DEVICE), "B": draw(3, 5).abs()}
    own = problem("C[i] += A[i] * B[i,k]", tensors, flags=FLAGS)
    for way in schedules(own.bound, own.strides, "store"):
        run = own.launcher(Candidate(way, Config(tuple(zip(way.axes, sizes)), 1, 1)))
        assert_matches(run(list(tensors.values())), expected(own.bound, tensors))
    _, tensors, (rows, wide), fact = packed_spmm(torch.float32, 3)
    fact = row_facts(tensors["AM"], rows).owned("AM")
    tensors |= dict(AV=tensors["AV"].abs(), B=tensors["B"].abs(), F=torch.full((rows,), bad, device=DEVICE))
    own = problem("C[AM[p],n] += AV[p,q] * B[AK[p,q],n] * F[AM[p]]", tensors, (rows, wide), fact, FLAGS)
    for way in schedules(own.bound, own.strides, "owner", own.fact):
        run = own.launcher(Candidate(way, Config(tuple(zip(way.axes, sizes)), 1, 1)))
        assert_matches(run(list(tensors.values()), fact), expected(own.bound, tensors))


@pytest.mark.parametrize("make", [tiled_convolution, seeded_tiles, depthwise_tiles, tiled_max])
@pytest.mark.parametrize("use_dot", [True, False], ids=["dot", "fma"])
def test_tiles_write_every_row_and_nothing_else(make, use_dot):
    """NaN before and behind the output stays; in the output no element stays NaN, and a tile without taps writes 0."""
    own, tensors, fact = problem_of(make, torch.float32, FLAGS, 3)
    rows, wide = own.bound.size
    for way in schedules(own.bound, own.strides, "owner", own.fact, use_dot=use_dot):
        assert way.covers_output
        sizes = tuple((axis, 16 if way.uses_dot else 2) for axis in way.axes)
        memory = torch.full((rows + 4, wide), float("nan"), device=DEVICE)
        own.launcher(Candidate(way, Config(sizes, 1, 1))).launch((*tensors.values(), *fact.tensors, memory[2:-2]))
        assert memory[:2].isnan().all()
        assert memory[-2:].isnan().all()
        assert_matches(memory[2:-2], expected(own.bound, tensors))
        idle = memory[2:-2][tensors["ROW"][1].long()]
        assert torch.equal(idle, tensors["Out"][:4] if "Out" in tensors else torch.zeros_like(idle))


def test_a_full_last_tile_has_no_mask():
    """Nothing is compared where ROW is known to hold no -1."""
    expr, tensors, _, fact = tiled_convolution(torch.float32, 3)
    tensors["ROW"] = torch.randperm(12, device=DEVICE).int().view(3, 4)
    own = problem(expr, tensors, (12, 4), fact, replace(FLAGS, padded=frozenset({"NBR"})))
    for use_dot in (True, False):
        (way, *_) = schedules(own.bound, own.strides, "owner", own.fact, use_dot=use_dot)
        sizes = tuple((axis, 16 if way.uses_dot else 2) for axis in way.axes)
        launcher = own.launcher(Candidate(way, Config(sizes, 1, 1)))
        assert "has_ROW" not in launcher.kernel.source
        assert_matches(launcher(list(tensors.values()), fact), expected(own.bound, tensors))


EAGER = [
    (group_spmm, "owner"),
    (group_spmm, "store-or-atomic"),
    (entry_spmm, "store-or-atomic"),
    (packed_spmm, "store-or-atomic"),
    (block_spmm, "owner"),
    (convolution, "atomic"),
    (tiled_convolution, "owner"),
    (tensor_product, "on-chip"),
    (sampled, "store"),
]


@pytest.mark.parametrize("use_dot", [True, False], ids=["dot", "fma"])
@pytest.mark.parametrize(("make", "strategy"), EAGER, ids=lambda x: getattr(x, "__name__", x))
def test_eager_broadcasting_gives_the_same_result(make, strategy, use_dot):
    run_all(make, strategy, (16, 16, 16, 16), use_dot, replace(FLAGS, lazy=False))


@settings(max_examples=examples(100, 40))
@given(
    statements((torch.float32,), largest={1: 5, 2: 4, 3: 3, 4: 2, 5: 2}), st.booleans(), st.booleans(), st.booleans()
)
def test_random_statements_whatever_the_schedule(case, use_dot, lazy, swap):
    """Dots where extents are far too short for one, sums on chip where there are few programs."""
    own = problem(case.expr, case.tensors, case.size, flags=replace(FLAGS, lazy=lazy))
    assume(not own.bound.is_empty)
    expected = LoopNest(case.expr, case.tensors, case.size).result()
    limit = bound(expected.dtype, expected.magnitude, expected.terms, expected.factors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "ON_CHIP_PROGRAMS", 0)
        ways = strategies(own.bound)
    for strategy in ways:
        for found in schedules(own.bound, own.strides, strategy, use_dot=use_dot):
            sizes = tuple(zip(found.axes, (16,) * 4 if found.uses_dot else (4, 2, 4, 2)))
            launcher = own.launcher(Candidate(found, Config(sizes, 1, 1, swap and found.uses_dot)))
            assert_within(launcher(list(case.tensors.values())), expected.value, limit)
