"""Random statements against the loop nest, and the laws that every statement obeys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reduced_precision import reduced_precision
from reference import LoopNest, Read, Sum, dense
from statements import DEVICE, FORMATS, IS_INTERPRETED, Case, Operand, examples, random_index, random_values, statements
from tolerances import DTYPES, assert_matches, assert_within, bound
from torch import Tensor

from insum_ops import Insum, insum

pytestmark = pytest.mark.every_route

HALVES = (torch.float16, torch.bfloat16)


def run(case: Case) -> Tensor:
    return insum(case.expr, size=case.size, **case.tensors)


def limit(expected: Sum, summed_in: torch.dtype | None = None) -> Tensor:
    return bound(expected.dtype, expected.magnitude, expected.terms, expected.factors, summed_in)


def check(case: Case, poison: float = math.nan) -> None:
    """The call gives the loop nest's result in a new tensor, reads only what it must and changes nothing."""
    nest = LoopNest(case.expr, case.tensors, case.size)
    expected = nest.result()
    tensors = case.poisoned(nest.touched, poison).tensors
    before = {name: (tensor.clone(), tensor._version) for name, tensor in tensors.items()}

    actual = insum(case.expr, size=case.size, **tensors)

    assert actual.dtype == expected.dtype
    assert actual.device.type == torch.device(DEVICE).type
    assert_within(actual, expected.value, limit(expected))
    for name, tensor in tensors.items():
        assert tensor._version == before[name][1], f"{name} was written to"
        torch.testing.assert_close(tensor, before[name][0], rtol=0, atol=0, equal_nan=True)
        if actual.numel() > 0:
            assert actual.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr(), f"{name} was returned"


@pytest.mark.every_program
@settings(max_examples=examples(800, 200))
@given(statements(), st.sampled_from((math.nan, math.inf)))
def test_random_statements_equal_the_loop_nest(case: Case, poison: float) -> None:
    check(case, poison)


@settings(max_examples=examples(100, 20))
@given(statements(dtypes=HALVES))
def test_reduced_precision_flags_let_half_precision_meet_in_memory(case: Case) -> None:
    expected = LoopNest(case.expr, case.tensors, case.size).result()
    with reduced_precision(True):
        actual = run(case)
    assert actual.dtype == expected.dtype
    assert_within(actual, expected.value, limit(expected, summed_in=expected.dtype))


# name: (expression, shapes of values, (shape, extent it points into) of index tensors, size)
Spec = tuple[str, dict[str, tuple[int, ...]], dict[str, tuple[tuple[int, ...], int]], "tuple[int, ...] | None"]
FEATURES: dict[str, Spec] = {
    "copy": ("C[i] = A[i]", {"A": (5,)}, {}, None),
    "matmul": ("C[i,j] += A[i,k] * B[k,j]", {"A": (3, 5), "B": (5, 4)}, {}, None),
    "full reduction": ("C[()] += A[i] * B[i]", {"A": (6,), "B": (6,)}, {}, None),
    "full reduction into a seed": ("C[()] += A[i]", {"A": (6,), "C": ()}, {}, None),
    "full reduction into one element": ("C[0] += A[i]", {"A": (6,)}, {}, (1,)),
    "scalar factor": ("C[i] = S[()] * A[i]", {"A": (6,), "S": ()}, {}, None),
    "outer product": ("C[i,j] += A[i] * B[j]", {"A": (3,), "B": (4,)}, {}, None),
    "batched": ("C[b,i,j] += A[b,i,k] * B[b,k,j]", {"A": (2, 3, 5), "B": (2, 5, 4)}, {}, None),
    "chain of four": (
        "C[i,l] += A[i,j] * B[j,k] * D[k,l] * E[l]",
        {"A": (3, 4), "B": (4, 2), "D": (2, 5), "E": (5,)},
        {},
        None,
    ),
    "products of matrices beside an index that none has": (
        "C[i] += A[q,k] * B[k,j] * D[q,j]",
        {"A": (12, 4), "B": (4, 12), "D": (12, 12)},
        {},
        (2,),
    ),
    "trace": ("C[()] += A[i,i]", {"A": (4, 4)}, {}, None),
    "diagonal": ("C[i] += A[i,i,j]", {"A": (4, 4, 3)}, {}, None),
    "diagonal output": ("C[i,i] += A[i]", {"A": (4,)}, {}, None),
    "diagonal output into a seed": (
        "C[i,i,j] += A[i] * B[j]",
        {"A": (3,), "B": (2,), "C": (3, 3, 2)},
        {},
        None,
    ),
    "broadcast from a seed": ("C[i,j] += A[j]", {"A": (4,), "C": (3, 4)}, {}, None),
    "broadcast from size": ("C[i,j] = A[j]", {"A": (4,)}, {}, (3, 4)),
    "number only": ("C[i] += 2.5", {"C": (4,)}, {}, None),
    "number on a diagonal": ("C[i,i] += 2 * 0.5", {"C": (4, 4)}, {}, None),
    "number only, scattered": ("C[E[p]] += 1", {"C": (4,)}, {"E": ((7,), 4)}, None),
    "negative number": ("C[i] = -2 * A[i] * 0.5", {"A": (4,)}, {}, None),
    "a seed that '=' ignores": ("C[i] = A[i,j]", {"A": (4, 3), "C": (4,)}, {}, None),
    "the seed is a factor": ("C[i] += C[i] * A[i]", {"A": (4,), "C": (4,)}, {}, None),
    "the seed is a factor elsewhere": ("C[i,j] += C[j,i] * A[i]", {"A": (4,), "C": (4, 4)}, {}, None),
    "'=' reads its own output": ("C[i] = C[E[i]]", {"C": (5,)}, {"E": ((5,), 5)}, None),
    "gather": ("C[p] = A[E[p]]", {"A": (4,)}, {"E": ((7,), 4)}, None),
    "gather twice from one tensor": (
        "C[p] = A[E[p],F[p]]",
        {"A": (4, 3)},
        {"E": ((7,), 4), "F": ((7,), 3)},
        None,
    ),
    "one tensor in three factors": (
        "C[i] += A[i,j] * A[j,i] * A[E[i],j]",
        {"A": (4, 4)},
        {"E": ((4,), 4)},
        None,
    ),
    "scatter": ("C[E[p]] += A[p]", {"A": (7,)}, {"E": ((7,), 4)}, (4,)),
    "scatter, '='": ("C[E[p]] = A[p]", {"A": (7,)}, {"E": ((7,), 4)}, (4,)),
    "scatter in two dimensions": (
        "C[E[p],F[p]] += A[p]",
        {"A": (7,)},
        {"E": ((7,), 4), "F": ((7,), 3)},
        (4, 3),
    ),
    "scatter to where it was gathered": ("C[E[p]] += A[E[p]]", {"A": (4,)}, {"E": ((7,), 4)}, (4,)),
    "scattered diagonal": ("C[E[p],E[p]] += A[p]", {"A": (7,)}, {"E": ((7,), 4)}, (4, 4)),
    "scatter beside its own index": ("C[p,E[p]] += A[p]", {"A": (5,)}, {"E": ((5,), 3)}, (5, 3)),
    "scatter of a constant position": ("C[E[0],i] += A[i]", {"A": (5,)}, {"E": ((2,), 3)}, (3, 5)),
    "scatter of a broadcast": ("C[E[p],n] += A[p]", {"A": (5,)}, {"E": ((5,), 3)}, (3, 4)),
    "a loop that only the output has": ("C[E[p]] += A[i]", {"A": (3,)}, {"E": ((5,), 4)}, (4,)),
    "nested three deep": (
        "C[E[F[G[p]]]] += A[G[F[E[p]]]]",
        {"A": (4,)},
        {"E": ((4,), 4), "F": ((4,), 4), "G": ((4,), 4)},
        (4,),
    ),
    "nested in two dimensions": (
        "C[i] += A[E[F[i,j],G[j]]]",
        {"A": (5,)},
        {"E": ((3, 4), 5), "F": ((6, 2), 3), "G": ((2,), 4)},
        None,
    ),
    "constant beside an indirection": ("C[i] += A[1,E[i,0],i]", {"A": (2, 3, 4)}, {"E": ((4, 2), 3)}, None),
    "a tensor and an index share a name": (
        "i[j] += j[i,j] * n[p[p]]",
        {"j": (3, 4), "n": (5,)},
        {"p": ((6,), 5)},
        None,
    ),
    "the names of a kernel": (
        "acc[range[tl],pid] += mask[tl] * other[offs[tl],pid]",
        {"mask": (7,), "other": (3, 5)},
        {"range": ((7,), 4), "offs": ((7,), 3)},
        (4, 5),
    ),
    "nothing to sum over": ("C[i] += A[i,j] * B[j]", {"A": (4, 0), "B": (0,)}, {}, None),
    "nothing to write": ("C[i,j] += A[i,k] * B[k,j]", {"A": (0, 3), "B": (3, 4)}, {}, None),
    "no entries": (
        "C[E[p],n] += V[p] * B[F[p],n]",
        {"V": (0,), "B": (3, 4)},
        {"E": ((0,), 2), "F": ((0,), 3)},
        (2, 4),
    ),
    "all padding over an empty tensor": ("C[p] = A[E[p]]", {"A": (0,)}, {"E": ((4,), 0)}, None),
    "an empty loop beside a full one": ("C[i] = A[i] * B[j]", {"A": (3,), "B": (0,)}, {}, None),
}


def features(spec: Spec, dtype: torch.dtype, missing: float) -> Case:
    expr, values, indices, size = spec
    generator = torch.Generator().manual_seed(1)
    operands = {
        name: Operand(random_values(shape, dtype, generator).to(DEVICE), "contiguous", shape)
        for name, shape in values.items()
    }
    for name, (shape, target) in indices.items():
        base = random_index(shape, target, missing, generator).to(DEVICE, torch.int32)
        operands[name] = Operand(base, "contiguous", shape)
    return Case(expr, operands, size)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES.keys())
def test_feature(spec: Spec, dtype: torch.dtype) -> None:
    shares = (0.3, 1.0) if IS_INTERPRETED and dtype == torch.float32 else (0.3,) if IS_INTERPRETED else (0.0, 0.3, 1.0)
    for missing in shares if spec[2] else (0.0,):
        check(features(spec, dtype, missing))


HOSTILE_NAMES = (
    *("torch", "self", "device", "inf", "nan", "expr", "len", "print", "int", "range", "None_", "insum"),
    *(
        "tl",
        "triton",
        "acc",
        "out",
        "seed",
        "pid",
        "mask",
        "offs",
        "pointers",
        "is_shared",
        "size_p",
        "stride",
    ),
)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_tensor_and_an_index_may_be_called_anything(name: str) -> None:
    """What generated programs call their own, as a factor, as an index tensor and as an index."""
    A, E = torch.rand(4, device=DEVICE), torch.tensor([3, -1, 0], device=DEVICE)
    expected = torch.stack([A[3], A.new_zeros(()), A[0]])
    assert torch.equal(insum(f"C[p] = {name}[E[p]]", E=E, **{name: A}), expected)
    assert torch.equal(insum(f"C[p] = A[{name}[p]]", A=A, **{name: E}), expected)
    assert torch.equal(insum(f"C[{name}] = A[E[{name}]]", A=A, E=E), expected)
    assert torch.equal(insum(f"{name}[p] += A[E[p]]", A=A, E=E, **{name: expected}), 2 * expected)


def test_the_paper_spells_it_with_a_capital() -> None:
    assert Insum is insum


def test_the_seed_comes_back_where_nothing_is_written() -> None:
    C, E, A = (
        torch.randn(4, 3, device=DEVICE),
        torch.tensor([1, -1], device=DEVICE),
        torch.ones(2, 3, device=DEVICE),
    )
    result = insum("C[E[p],n] += A[p,n]", C=C, E=E, A=A)
    assert torch.equal(result[[0, 2, 3]], C[[0, 2, 3]])
    assert result is not C


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_dtype_is_torch_promotion(dtype: torch.dtype) -> None:
    for other in DTYPES:
        A, B = torch.ones(2, dtype=dtype, device=DEVICE), torch.ones(2, dtype=other, device=DEVICE)
        promoted = torch.promote_types(dtype, other)
        assert insum("C[i] = A[i] * B[i]", A=A, B=B).dtype == promoted
        assert insum("C[i] += 2.5 * A[i]", A=A, C=B).dtype == promoted
        assert insum("C[i] = 2.5 * A[i]", A=A, C=B).dtype == dtype
        assert insum("C[i] = A[i] * s[()]", A=A, s=B[0]).dtype == promoted  # a tensor without dimensions counts too


@settings(max_examples=examples(60, 10))
@given(statements(dtypes=(torch.float64,), is_plain=True), st.data())
def test_linear_in_each_factor(case: Case, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(case.value_names))
    first = case.operands[name].base
    second = torch.rand_like(first)
    parts = [case.with_bases({name: base}) for base in (first, second)]
    combined = run(case.with_bases({name: 2 * first - 3 * second}))

    sums = [LoopNest(part.expr, part.tensors, part.size).result() for part in parts]
    magnitude = 2 * sums[0].magnitude + 3 * sums[1].magnitude
    allowed = 3 * bound(torch.float64, magnitude, sums[0].terms, sums[0].factors + 1)
    assert_within(combined, (2 * run(parts[0]) - 3 * run(parts[1])).cpu(), allowed)


@settings(max_examples=examples(60, 10))
@given(statements(dtypes=(torch.float64,), is_plain=True), st.data())
def test_invariant_under_a_joint_permutation_of_a_summed_index(case: Case, data: st.DataObject) -> None:
    nest = LoopNest(case.expr, case.tensors, case.size)
    inner = [name for name in nest.extents if name not in nest.sentence.output.indices]
    assume(inner)
    name = data.draw(st.sampled_from(inner))
    order = torch.tensor(data.draw(st.permutations(range(nest.extents[name]))), dtype=torch.int64, device=DEVICE)
    bases = {}
    for read in reads(nest):
        base = bases.get(read.name, case.operands[read.name].base)
        for dim, index in enumerate(read.indices):
            if index == name:
                base = base.index_select(dim, order)
        bases[read.name] = base

    expected = nest.result()
    assert_within(run(case.with_bases(bases)), run(case).cpu(), 2 * limit(expected))


@settings(max_examples=examples(60, 10))
@given(statements(dtypes=(torch.float64,), is_plain=True), st.data())
def test_padding_adds_nothing(case: Case, data: st.DataObject) -> None:
    nest = LoopNest(case.expr, case.tensors, case.size)
    pointing = {
        index
        for read in reads(nest)
        if not case.operands[read.name].base.is_floating_point()
        for index in read.indices
        if isinstance(index, str) and index not in nest.sentence.output.indices
    }
    assume(pointing)
    name = data.draw(st.sampled_from(sorted(pointing)))
    operands = dict(case.operands)
    for read in reads(nest):
        base = operands[read.name].base
        for dim, index in enumerate(read.indices):
            if index == name:
                padding = base.new_full(
                    (*base.shape[:dim], 2, *base.shape[dim + 1 :]),
                    7 if base.is_floating_point() else -1,
                )
                base = torch.cat([base, padding], dim)
        operands[read.name] = Operand(base, "contiguous", tuple(base.shape))

    assert_within(run(replace(case, operands=operands)), run(case).cpu(), 2 * limit(nest.result()))


def reads(nest: LoopNest) -> Iterator[Read]:
    """Every read of a plain statement, those inside indirections included; each tensor has exactly one."""
    pending: list[Read] = [*nest.reads, *nest.sentence.output.inner]
    while pending:
        read = pending.pop()
        yield read
        pending += read.inner


# What no product reads, though no single -1 hides it: it takes all of them together. Every route keeps that out. If a
# factor lacks an index of the tensor that holds the -1 (Weight[z,c,m] beside NBR[x,z]) and some entry of it is there, a
# matrix product (tl.dot, or an einsum on a CPU) lets NaN and Inf in it reach the results of the absent ones; kernels
# that multiply and add keep them out. The statements here are too small for a dot to be chosen.
RULED_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "all of another factor is missing": (
        "C[i] = A[i] * B[E[j]]",
        {"A": [math.nan] * 3, "B": [1.0], "E": [-1, -1]},
    ),
    "an offset that no voxel has": (
        "Out[x] += In[NBR[x,z]] * Weight[z]",
        {"In": [1.0, 2.0], "NBR": [[0, -1], [1, -1]], "Weight": [1.0, math.nan]},
    ),
    "two indices that are never there together": (
        "C[i] = A[i] * B[E[j]] * D[F[j]]",
        {"A": [math.nan] * 3, "B": [1.0], "D": [1.0], "E": [0, -1], "F": [-1, 0]},
    ),
    "an output that is never there": (
        "C[E[p]] += A[i] * B[p]",
        {"A": [math.nan], "B": [1.0], "C": [3.0], "E": [-1]},
    ),
}


@pytest.mark.parametrize(("expr", "lists"), RULED_OUT.values(), ids=RULED_OUT.keys())
def test_nothing_leaks_in_that_no_product_reads(expr: str, lists: dict[str, Any]) -> None:
    tensors = {name: torch.tensor(values, device=DEVICE) for name, values in lists.items()}
    expected = LoopNest(expr, tensors).result()
    assert_within(insum(expr, **tensors), expected.value, limit(expected))


@pytest.mark.every_program
@settings(max_examples=examples(150, 40))
@given(statements(missing=((0.3, 0.6), (0.5, 1.0))), st.sampled_from((math.nan, math.inf)))
def test_random_statements_with_many_missing_entries_equal_the_loop_nest(case: Case, poison: float) -> None:
    check(case, poison)


@pytest.mark.parametrize("poison", [math.nan] if IS_INTERPRETED else [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_leaks_from_rows_that_no_entry_refers_to(name: str, group_dim: int, poison: float) -> None:
    """Rows 4 and 5 of A are empty, and so are its columns 2 and 3: no output and no gradient may see them."""
    A = random_values((11, 7), torch.float64, torch.Generator().manual_seed(2))
    A[torch.rand(A.shape, generator=torch.Generator().manual_seed(3)) < 0.5] = 0
    A[4:6], A[:, 2:4] = 0, 0
    sparse = FORMATS[name](A.to(DEVICE), group_dim)
    B = random_values((7, 5), torch.float64, torch.Generator().manual_seed(4)).to(DEVICE)
    B[2:4] = poison
    B.requires_grad_()
    values = sparse.values.detach().clone().requires_grad_()
    sparse = sparse.with_values(values)

    C = insum("C[m,n] += A[m,k] * B[k,n]", A=sparse, B=B)

    clean = B.detach().cpu().nan_to_num(0, 0, 0)
    assert_matches(C, A @ clean)
    upstream = random_values((11, 5), torch.float64, torch.Generator().manual_seed(5))
    dense_grad = upstream @ clean.T
    grad = upstream.clone()
    grad[4:6] = poison
    dB, dvalues = torch.autograd.grad(C, (B, values), grad.to(DEVICE))
    assert_matches(dB, A.T @ upstream)
    assert_matches(
        dense(sparse.with_values(dvalues)),
        torch.where(dense(sparse.with_values(torch.ones_like(values))) > 0, dense_grad, 0),
    )
