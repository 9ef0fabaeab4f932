"""Every scatter strategy, product and layout of code generation, on small problems, against the FX graph in float64.

Runs where the generated kernels run: under TRITON_INTERPRET=1, or on a GPU.
"""

import dataclasses
import math

import pytest
import torch
from insum_ops.compiler.autotune import Candidate, Problem
from insum_ops.compiler.bind import bind
from insum_ops.compiler.codegen import Config, Flags
from insum_ops.compiler.lower import lower, placeholders
from insum_ops.compiler.parse import parse
from insum_ops.compiler.schedule import schedules
from insum_ops.formats import BlockCOO, BlockGroupCOO, GroupCOO
from statements import DEVICE
from statements import IS_INTERPRETED as INTERPRETED
from tolerances import assert_within, bound

pytestmark = pytest.mark.skipif(not INTERPRETED and DEVICE != "cuda", reason="needs TRITON_INTERPRET=1 or a GPU")


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


def group_spmm(dtype):
    A = GroupCOO.from_dense(matrix(9, 12, 0.4, dtype), group_size=2)
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(12, 20, dtype=dtype))
    return "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", tensors, (9, 20), "AM", A.facts


def block_spmm(dtype):
    A = BlockGroupCOO.from_dense(matrix(48, 64, 0.01, dtype), block_size=(16, 16), group_size=2)
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(4, 16, 24, dtype=dtype))
    return "C[AM[p],i,n] += AV[p,q,i,j] * B[AK[p,q],j,n]", tensors, (3, 16, 24), "AM", A.facts


def block_coo_spmm(dtype):
    A = BlockCOO.from_dense(matrix(48, 64, 0.01, dtype), block_size=(16, 16))
    tensors = dict(AM=A.AM, AK=A.AK, AV=A.AV, B=draw(4, 16, 24, dtype=dtype))
    return "C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]", tensors, (3, 16, 24), "AM", A.facts


def convolution(dtype):
    tensors = dict(MX=positions(11, 3, 16), MY=positions(10, 3, 16), MZ=positions(2, 3))
    tensors |= dict(In=draw(10, 20, dtype=dtype), W=draw(2, 20, 18, dtype=dtype))
    return "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]", tensors, (11, 18), "", None


def convolution_weight(dtype):
    tensors = dict(MX=positions(11, 3, 16), MY=positions(10, 3, 16), MZ=positions(2, 3))
    tensors |= dict(In=draw(10, 20, dtype=dtype), dOut=draw(11, 18, dtype=dtype))
    return "dW[MZ[p],c,m] += In[MY[p,q],c] * dOut[MX[p,q],m]", tensors, (2, 20, 18), "", None


def output_stationary(dtype):
    tensors = dict(NBR=positions(10, 17, 3), In=draw(10, 20, dtype=dtype), W=draw(3, 20, 18, dtype=dtype))
    return "Out[x,m] += In[NBR[x,z],c] * W[z,c,m]", tensors, None, "", None


def tensor_product(dtype):
    tensors = dict(I=positions(4, 3, 4), J=positions(4, 3, 4), K=positions(4, 3, 4), V=draw(3, 4, dtype=dtype))
    tensors |= dict(X=draw(5, 4, 16, dtype=dtype), Y=draw(5, 4, dtype=dtype), W=draw(5, 3, 16, 16, dtype=dtype))
    return "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,p,u,w]", tensors, (5, 4, 16), "", None


def tensor_product_y(dtype):
    tensors = dict(I=positions(4, 3, 4), J=positions(4, 3, 4), K=positions(4, 3, 4), V=draw(3, 4, dtype=dtype))
    tensors |= dict(X=draw(5, 4, 16, dtype=dtype), dZ=draw(5, 4, 16, dtype=dtype), W=draw(5, 3, 16, 16, dtype=dtype))
    return "dY[b,K[p,q]] += V[p,q] * X[b,J[p,q],u] * dZ[b,I[p,q],w] * W[b,p,u,w]", tensors, (5, 4), "", None


def sampled(dtype):
    tensors = dict(AM=positions(9, 7), AK=positions(12, 7, 2), dC=draw(9, 20, dtype=dtype), B=draw(12, 20, dtype=dtype))
    return "dAV[p,q] += dC[AM[p],n] * B[AK[p,q],n]", tensors, None, "", None


def paper_example(dtype):
    tensors = dict(D=positions(9, 18), E=positions(12, 17), A=draw(18, 12, dtype=dtype), B=draw(17, 20, dtype=dtype))
    return "C[D[y],x] += A[y,E[r]] * B[r,x]", tensors, (9, 20), "", None


def full_sum(dtype):
    return (
        "C[()] += A[i] * B[i] * 0.5",
        dict(A=draw(300, dtype=dtype), B=draw(300, dtype=dtype)),
        None,
        "",
        None,
    )


def corner(dtype):
    tensors = dict(A=draw(5, 5, dtype=dtype), C=draw(5, 5, 3, dtype=dtype), S=draw(2, dtype=dtype))
    return "C[i,i,0] += A[i,i] * S[1]", tensors, None, "", None


CASES = [
    (group_spmm, "atomic"),
    (group_spmm, "owner"),
    (group_spmm, "store-or-atomic"),
    (block_spmm, "atomic"),
    (block_spmm, "owner"),
    (block_spmm, "store-or-atomic"),
    (block_coo_spmm, "owner"),
    (block_coo_spmm, "store-or-atomic"),
    (convolution, "atomic"),
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


def problem_of(make, dtype, flags):
    expr, tensors, size, fact, facts = make(dtype)
    bound = bind(parse(expr), tensors, size)
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    strides[""] = torch.empty(bound.size, device="meta").stride()
    if bound.is_seeded:
        strides[" seed"] = strides[bound.statement.output.name]
    known = [facts.pointers, facts.is_shared, facts.rows_to_zero] if facts is not None else []
    return Problem(bound, strides, tuple(tensors), fact, flags, False), tensors, known


def expected(bound, tensors):
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    bound = bind(bound.statement, wide, bound.size if bound.statement.output.name not in wide else None)
    return lower(bound)(*(wide[name] for name in placeholders(bound)))


def run_all(make, strategy, dtype, blocks, swap, flags, use_dot):
    problem, tensors, known = problem_of(make, dtype, flags)
    for schedule in schedules(problem.bound, problem.strides, strategy, problem.fact, use_dot=use_dot):
        least = 16 if schedule.uses_dot else 1
        sizes = tuple((axis, max(block, least)) for axis, block in zip(schedule.axes, blocks))
        launcher = problem.launcher(Candidate(schedule, Config(sizes, 1, 1, swap)))
        result = launcher(list(tensors.values()), known)
        assert result.dtype == problem.bound.dtype
        scale = expected(problem.bound, {n: t.abs() if t.is_floating_point() else t for n, t in tensors.items()})
        terms = max(1, math.prod(problem.bound.extents[name] for name in problem.bound.statement.names))
        limit = bound(result.dtype, scale.cpu(), terms, len(tensors))
        assert_within(result, expected(problem.bound, tensors).cpu(), limit)
        yield schedule


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("make", "strategy"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_generated_kernel_equals_the_graph(make, strategy, dtype):
    flags = Flags(
        interpreted=INTERPRETED, sum_dtype=torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
    )
    assert list(run_all(make, strategy, dtype, (8, 16, 16, 16), False, flags, use_dot=None))


@pytest.mark.parametrize(
    ("blocks", "use_dot"),
    [((1, 32, 32, 32), False), ((16, 16, 32, 32), True), ((4, 1, 16, 16), False)],
    ids=str,
)
@pytest.mark.parametrize(("make", "strategy"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_every_tile_shape_and_product(make, strategy, use_dot, blocks):
    for swap in (False, True) if use_dot else (False,):
        list(run_all(make, strategy, torch.float32, blocks, swap, Flags(interpreted=INTERPRETED), use_dot))


@pytest.mark.parametrize("use_dot", [True, False])
@pytest.mark.parametrize(("make", "strategy"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_eager_broadcasting_gives_the_same_result(make, strategy, use_dot):
    list(
        run_all(
            make,
            strategy,
            torch.float32,
            (16, 16, 16, 16),
            False,
            Flags(interpreted=INTERPRETED, lazy=False),
            use_dot,
        )
    )


def test_dot_is_chosen_where_the_paper_uses_tensor_cores():
    for make, strategy in [
        (block_spmm, "owner"),
        (convolution, "atomic"),
        (tensor_product, "on-chip"),
        (paper_example, "atomic"),
    ]:
        problem, _, _ = problem_of(make, torch.float16, Flags())
        first = schedules(problem.bound, problem.strides, strategy, problem.fact)[0]
        assert first.uses_dot, dataclasses.asdict(first)
