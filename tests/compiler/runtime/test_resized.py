"""Calls of other sizes: which share a kernel, and that what is worked out anew for them is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import APPLICATIONS, positions, problem, values
from statements import DEVICE, examples, statements

from insum_ops import insum
from insum_ops.compiler import pipeline
from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.binding.shape_class import bucket, known_divisor
from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.language.errors import IndexRangeError, ShapeError
from insum_ops.compiler.language.ir import Var, walk
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.planning.schedule import resized
from insum_ops.compiler.routes.prepared import prepare, problem_for
from insum_ops.compiler.tuning.problem import Candidate, candidates
from insum_ops.formats.facts import OwnedRows, WrittenOnce

FACTS = (
    "numbers",
    "programs",
    "order",
    "size",
    "strides",
    "seed",
    "scatter_dim",
    "sum_dtype",
    "is_covered",
    "is_small",
)


def other_size(own, lengths):
    """The same problem with other lengths of its tensors' first dimensions, and of the output's."""
    bound = own.bound
    shapes = {name: (lengths.get(shape[0], shape[0]), *shape[1:]) for name, shape in bound.shapes.items()}
    tensors = {name: torch.empty(shape, dtype=bound.dtypes[name], device="meta") for name, shape in shapes.items()}
    size = (lengths.get(bound.size[0], bound.size[0]), *bound.size[1:])
    given = problem(str(bound.statement), tensors, size, own.fact, own.flags)
    return replace(given, bound=replace(given.bound, statement=bound.statement), rows=own.rows)


def long(own, least):
    """The application's problem with first dimensions that count roughly."""
    firsts = {shape[0] for shape in own.bound.shapes.values()} | {own.bound.size[0]}
    return other_size(own, {first: least + 2 * at + 1 for at, first in enumerate(sorted(firsts)) if first > 100})


@pytest.mark.sampled("least", "more")
@pytest.mark.parametrize(
    ("least", "more"), [(5000, 2), (5000, 1001 * 2), (5000, 3100), (5008, 1), (624, 1), (624, 380)]
)
@pytest.mark.parametrize("name", APPLICATIONS)
def test_sizes_that_count_alike_share_every_kernel(name, least, more):
    one = long(APPLICATIONS[name].problem(), least)
    firsts = {shape[0] for shape in one.bound.shapes.values()} | {one.bound.size[0]}
    other = other_size(one, {first: first + more for first in firsts if first > 512})
    assert other.bound.extents != one.bound.extents
    assert other.signature == one.signature
    for mine, theirs in zip(candidates(one), candidates(other), strict=True):
        known, fresh = one.launcher(mine), other.launcher(theirs)
        assert resized(mine.schedule, other.bound, other.fact) == theirs.schedule.extents
        again = other.resized(known)
        assert again.kernel == known.kernel == fresh.kernel
        assert again.runners is known.runners
        for fact in FACTS:
            assert getattr(again, fact) == getattr(fresh, fact), fact


LENGTHS = st.one_of(
    st.integers(65, 5000), *[st.integers(1, 5000 // step).map(step.__mul__) for step in (16, 128, 1024)]
)
VALUE_TYPES = (torch.float16, torch.float32, torch.float64)


@st.composite
def pairs_of_problems(draw):
    """A random statement over lengths that count alike, and what one of its kernels may rely on drawn as well."""
    statement = parse(draw(statements(is_plain=True, reductions=("sum", "sum", "max"))).expr)
    roots = statement.output, *statement.accesses
    inner = [access for root in roots for access in walk(root)]
    later = {str(index) for access in inner for index in access.indices[1:]}
    firsts = {str(access.indices[0]) for access in inner if access.indices and isinstance(access.indices[0], Var)}
    varying = sorted(firsts - later)[:2]
    lengths = {name: draw(LENGTHS) for name in ("", *varying)}
    fixed = {name: draw(st.sampled_from((1, 3, 8, 16, 32))) for name in statement.names}
    dtype, is_seeded = draw(st.sampled_from(VALUE_TYPES)), statement.op == "+=" and draw(st.booleans())
    scattered = statement.output.indirections[0].name if len(statement.output.indirections) == 1 else ""
    facts = (*[OwnedRows(scattered)] * 3, WrittenOnce(scattered)) if scattered else ()
    fact = draw(st.sampled_from((*facts, None)))
    padded = draw(st.sampled_from((None, frozenset())))
    flags = Flags(padded=padded, wants_winners=not statement.is_sum and draw(st.booleans()))

    def made(extents, behind):
        """`behind`: how long a first dimension is that no index runs over."""

        def shape(access):
            sizes = [
                extents[str(i)] if isinstance(i, Var) else 7 if dim else behind for dim, i in enumerate(access.indices)
            ]
            return tuple(sizes)

        given = {a.name: values(*shape(a), dtype=dtype) for a in statement.accesses}
        given |= {a.name: positions(*shape(a)) for a in inner if a.name not in (*given, statement.output.name)}
        size = shape(statement.output)
        given |= {statement.output.name: values(*size, dtype=dtype)} if is_seeded else {}
        own = problem(str(statement), given, size, fact, flags)
        return replace(
            own, bound=replace(own.bound, statement=statement), rows=(100, 3) if fact is not None else (0, 0)
        )

    def other(length):
        """Another length that counts alike."""
        step, most = known_divisor(length), bucket(length)
        if length <= 64:
            return length
        found = step * draw(st.integers(most // 2 // step + 1, most // step))
        return found if known_divisor(found) == step else length

    again = {name: other(length) for name, length in lengths.items()}
    return tuple(made({**fixed, **{name: own[name] for name in varying}}, own[""]) for own in (lengths, again))


@settings(max_examples=examples(120, 1))
@given(pairs_of_problems())
def test_no_source_of_a_random_statement_holds_a_length_that_varies(pair):
    one, other = pair
    assert one.signature == other.signature
    for mine in candidates(one):
        again = other.resized(one.launcher(mine))
        own = replace(mine.schedule, bound=other.bound, extents=resized(mine.schedule, other.bound, other.fact))
        fresh = other.launcher(Candidate(own, mine.config))
        assert again.kernel == fresh.kernel
        for fact in FACTS:
            assert getattr(again, fact) == getattr(fresh, fact), fact


def test_which_loop_programs_share_does_not_depend_on_lengths_that_count_alike():
    def sources(first, second):
        given = {"E": positions(first), "A": values(first, 16), "F": positions(second), "B": values(second, 16)}
        own = problem("C[()] += A[E[p],c] * B[F[q],c]", {**given, "A": values(9, 16), "B": values(9, 16)})
        ways = candidates(own)
        assert any(way.config.parts > 1 for way in ways)
        return [own.launcher(way).kernel.source for way in ways]

    assert sources(2140, 3555) == sources(3540, 2475)


def test_sizes_that_a_source_would_tell_apart_have_other_signatures():
    def signature(rows, columns=64, **options):
        tensors = {
            "E": torch.empty(rows, dtype=torch.int32, device="meta"),
            "X": torch.empty(9000, columns, device="meta"),
        }
        bound = bind(parse("Y[i,c] = X[E[i],c]"), tensors)
        return replace(problem_for(bound, tensors), **options).signature

    assert signature(5001) == signature(5002) == signature(5004) == signature(8191)
    assert signature(5001) != signature(5008)  # a block of 16 divides one of them
    assert signature(5001) != signature(8193)  # tuned configs are remembered by powers of two
    assert signature(5008) == signature(5024) != signature(5120)  # which has no bound at blocks of 1024
    assert signature(701) == signature(1003) != signature(1024)
    assert signature(61) != signature(63)  # a program may hold all of them
    assert signature(5001) != signature(5001, columns=65)
    assert signature(5001) != signature(5001, deterministic=True)
    assert signature(2**23 + 1) != signature(2**23 + 3)  # addresses may need 64 bits for one of them


GATHER = "Y[i,c] = X[E[i],c]"
ENTRIES = (2001, 2003, 2047, 2032, 2049, 4095, 61)  # the first three count alike


def gather(rows, columns=8, last=0, expr=GATHER, dtype=torch.float32, wide=None):
    """The tensors of a call, its prepared statement, and the variant that these tensors are."""
    tensors = {"E": torch.zeros(rows, dtype=torch.int64), "X": torch.zeros(1500, columns, dtype=dtype)}
    tensors["E"][-1] = last
    if wide is not None:
        tensors["X"] = torch.zeros(1500, wide, dtype=dtype)[:, :columns]
    given = list(tensors.values())
    plan = prepare(expr, "E,X", None, given, None)
    return given, plan, plan.variant(given)


CALLS = [
    *({"rows": rows} for rows in ENTRIES),
    {"rows": 2001, "columns": 9},
    {"rows": 2003, "wide": 10},
    {"rows": 2003, "last": -1},
    {"rows": 2047, "last": -1},
    {"rows": 2003, "dtype": torch.float16},
    {"rows": 2047, "dtype": torch.float64},
    {"rows": 2003, "expr": "Y[i,c] = max(X[E[i],c])"},
    {"rows": 2047, "expr": "Y[i,c] = max(X[E[i],c])"},
]


def test_statements_have_one_kernel_key_exactly_where_their_problems_have_one_signature():
    found = [gather(**call) for call in CALLS]
    keys = [plan.kernel_key(variant, None) for _, plan, variant in found]
    signatures = [plan.problem(tensors, None).signature for tensors, plan, _ in found]
    for one in range(len(CALLS)):
        for other in range(one):
            assert (keys[one] == keys[other]) == (signatures[one] == signatures[other]), (CALLS[one], CALLS[other])
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == len(CALLS) - 5  # two of 2001, and one each of 2049, a -1 and a max, have that of others


@pytest.mark.parametrize("change", ["deterministic", "precision", "tuning"])
def test_settings_keep_statements_from_having_one_kernel_key(monkeypatch, change):
    _, plan, variant = gather(2001)
    before = plan.kernel_key(variant, None)
    precision = torch.get_float32_matmul_precision()
    try:
        if change == "deterministic":
            torch.use_deterministic_algorithms(True)
        elif change == "precision":
            torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
        else:
            monkeypatch.setenv("INSUM_TUNE", "full")
        _, plan, variant = gather(2003)
        assert plan.kernel_key(variant, None) != before
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)


def test_a_mistake_beside_kin_is_still_told():
    X, Y = torch.zeros(2001, 3), torch.zeros(2003, 3)
    assert insum("Z[i,c] = X[i,c] * Y[i,c]", X=X, Y=X).shape == (2001, 3)
    assert insum("Z[i,c] = X[i,c] * Y[i,c]", X=Y, Y=Y).shape == (2003, 3)
    for _ in range(2):
        with pytest.raises(
            ShapeError, match=r"^index i is 2001 in X dimension 0 but 2003 in Y dimension 0; they must agree\n"
        ):
            insum("Z[i,c] = X[i,c] * Y[i,c]", X=X, Y=Y)
        with pytest.raises(
            ShapeError, match=r"^index i is 2001 in X dimension 0 but 2003 in size dimension 0; they must"
        ):
            insum("Z[i,c] = X[i,c] * Y[i,c]", X=X, Y=X, size=(2003, 3))
    E = torch.full((2005,), 2002)
    assert insum(GATHER, X=Y, E=E).shape == (2005, 3)
    with pytest.raises(IndexRangeError, match=r"^E\[0\] is 2002, outside X dimension 0, which has size 2001;"):
        insum(GATHER, X=X, E=E)


@pytest.mark.kernels
def test_a_call_of_another_size_runs_a_kernel_that_is_there(monkeypatch):
    def call(rows):
        X = torch.arange(24.0, device=DEVICE).view(3, 8)
        E = torch.arange(rows, device=DEVICE) % 3
        assert torch.equal(insum("Y[i,c] = X[E[i],c]", X=X, E=E), X[E])

    call(1501)
    monkeypatch.setattr(
        "insum_ops.compiler.tuning.problem.emit", lambda *given: pytest.fail("a kernel is emitted again")
    )
    for rows in (1503, 2047, 1999):
        call(rows)


@pytest.mark.kernels
@pytest.mark.parametrize("is_seeded", [False, True])
def test_kin_are_resized_without_a_problem(monkeypatch, is_seeded):
    def call(rows):
        X = torch.arange(rows * 2.0, device=DEVICE).view(rows, 2) % 7
        E = torch.arange(rows, device=DEVICE).flip(0)
        start = {"Y": torch.ones(rows, 2, device=DEVICE)} if is_seeded else {}
        found = insum("Y[E[i],c] += X[i,c]", X=X, E=E, size=(rows, 2), **start)
        assert torch.equal(found, X.flip(0) + is_seeded)

    call(1025)
    monkeypatch.setattr(pipeline, "choose", lambda *given: pytest.fail("a launcher is chosen again"))
    for rows in (1027, 2047):
        call(rows)
