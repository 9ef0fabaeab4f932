"""Gathered factors that are multiplied at all positions first: the steps, and that they come to the same."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reduced_precision import reduced_precision
from torch import Tensor

from insum_ops.compiler.binding import bind
from insum_ops.compiler.language import Access, Statement, Var, parse
from insum_ops.compiler.planning.device import H200
from insum_ops.compiler.planning.split import Split, split
from insum_ops.compiler.routes import steps

pytestmark = pytest.mark.cpu

RELATIONS = "Y[D[e],o] += V[e] * X[S[e],c] * W[R[e],c,o]"
SIZES = dict(e=130_903, n=9_417, r=21, c=47, o=43)


def planned(
    text: str, sizes: dict[str, int], size: str, dtypes: dict[str, torch.dtype] | None = None, **dims: str
) -> Split | None:
    """Return the steps for operands with these dimensions; D, S, R and U are index tensors."""
    tensors = {}
    for name, dim in dims.items():
        dtype = torch.int32 if name in "DSRU" else (dtypes or {}).get(name, torch.float16)
        tensors[name] = torch.empty([sizes[letter] for letter in dim], dtype=dtype, device="meta")
    return split(bind(parse(text), tensors, [sizes[letter] for letter in size] or None), H200, True)


def relations(text: str = RELATIONS, sizes: dict[str, int] = SIZES, **dtypes: torch.dtype) -> Split | None:
    dims = dict(V="e", X="nc", W="rco", D="e", S="e", R="e")
    return planned(text, sizes, "no", dtypes, **dims)


def test_nodes_meet_all_relations_before_edges_pick_them() -> None:
    parts = relations()
    assert parts is not None
    assert str(parts) == "Z[u,v,o] += X[u,c] * W[v,c,o]\nY[D[e],o] += V[e] * Z[S[e],R[e],o]"
    assert parts.sizes == ((9_417, 21, 43),)
    assert parts.gain == 2.0 < parts.estimate  # so that one kernel is timed as well


def test_numbers_and_the_sign_of_the_statement_stay_with_the_last_step() -> None:
    parts = relations("Y[D[e],o] = 3 * X[S[e],c] * W[R[e],c,o] * V[e]")
    assert parts is not None
    assert str(parts.steps[1]) == "Y[D[e],o] = 3 * V[e] * Z[S[e],R[e],o]"


def test_the_gradient_for_nodes_is_split_too_and_that_for_weights_is_not() -> None:
    dims = dict(Y="no", V="e", D="e", S="e", R="e")
    nodes = planned("X[S[e],c] += Y[D[e],o] * V[e] * W[R[e],c,o]", SIZES, "nc", W="rco", **dims)
    assert str(nodes) == "Z[u,v,c] += Y[u,o] * W[v,c,o]\nX[S[e],c] += V[e] * Z[D[e],R[e],c]"
    weights = planned("W[R[e],c,o] += Y[D[e],o] * V[e] * X[S[e],c]", SIZES, "rco", X="nc", **dims)
    assert weights is None


def test_few_entries_of_many_positions_stay_whole() -> None:
    assert relations(sizes={**SIZES, "e": 2_000}) is None


def test_one_factor_is_summed_before_it_is_gathered() -> None:
    parts = planned("Y[e] += X[U[e],c]", dict(e=1_000_000, n=1_000, c=64), "", X="nc", U="e")
    assert str(parts) == "Z[u] += X[u,c]\nY[e] += Z[U[e]]"


def test_two_factors_with_one_index_share_its_positions() -> None:
    parts = planned("Y[e] += A[U[e],c] * B[U[e],c]", dict(e=1_000_000, n=1_000, c=64), "", A="nc", B="nc", U="e")
    assert str(parts) == "Z[u] += A[u,c] * B[u,c]\nY[e] += Z[U[e]]"


def test_a_name_that_an_index_tensor_has_is_not_summed_first() -> None:
    sizes = dict(e=100_000, n=50, c=64)
    assert planned("Y[e] += X[U[e,c],c]", sizes, "", X="nc", U="ec") is None


def test_a_product_is_not_rounded_where_the_statement_is_not() -> None:
    assert relations(V=torch.float32) is None
    assert relations(V=torch.float32, X=torch.float32, W=torch.float32) is not None


def test_padding_and_half_precision_that_may_not_be_rounded_keep_a_statement_whole() -> None:
    shapes = dict(V=(130_903,), X=(9_417, 47), W=(21, 47, 43))
    tensors = {name: torch.empty(shape, dtype=torch.float16, device="meta") for name, shape in shapes.items()}
    tensors |= {name: torch.empty(130_903, dtype=torch.int64, device="meta") for name in "DSR"}
    bound = bind(parse(RELATIONS), tensors, (9_417, 43))
    for may_round in (True, False):
        with reduced_precision(may_round):
            assert (steps.split_of(bound, ()) is not None) is may_round
            assert steps.split_of(bound, ("S",)) is None


def evaluated(statement: Statement, tensors: dict[str, Tensor], extents: dict[str, int]) -> Tensor:
    """Return the sum of all products, each of them formed by itself."""
    names = statement.names
    grid = dict(zip(names, torch.meshgrid(*[torch.arange(extents[name]) for name in names], indexing="ij")))

    def read(access: Access) -> Tensor:
        return tensors[access.name][tuple(grid[str(at)] if isinstance(at, Var) else read(at) for at in access.indices)]

    product = prod(map(read, statement.accesses))
    summed = [at for at, name in enumerate(names) if name not in statement.free]
    return product.sum(summed) if summed else product


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_steps_come_to_the_same_as_the_statement(seed: int) -> None:
    """Of random factors, some gathered; beside torch.einsum over rows that are gathered first, in float64."""
    source = torch.Generator().manual_seed(seed)
    pick = lambda count: int(torch.randint(0, count, (), generator=source))
    large, small = dict(e=200_000, c=61, d=31, o=29), dict(e=11, c=3, d=2, o=4)
    rows = {"U": 53, "R": 7}  # positions that index tensors point into, of which none is the length of a name
    factors, dims = [], dict[str, list[str]]()
    for name in "ABC"[: 1 + pick(3)]:
        names = [letter for letter in "cdo" if pick(2)] or ["c"]
        first = ("", "e", "U", "R")[pick(4)]
        dims[name] = [*([first] if first else []), *names]
        factors.append(f"{name}[{','.join(f'{dim}[e]' if dim in rows else dim for dim in dims[name])}]")
    reached = [letter for letter in "cdo" if any(letter in own for own in dims.values())]
    has_entries = any(own[0] in ("e", *rows) for own in dims.values())
    free = [*(["e"] if has_entries and pick(2) else []), *[letter for letter in reached if pick(2)]]
    text = f"Y[{','.join(free) or '()'}] += {' * '.join(factors)}"

    def shape(name: str, sizes: dict[str, int]) -> list[int]:
        return [rows[dim] if dim in rows else sizes[dim] for dim in dims[name]]

    index = {name: torch.randint(0, count, (small["e"],), generator=source) for name, count in rows.items()}
    used = {name: tensor for name, tensor in index.items() if f"{name}[" in text}
    metas = {name: torch.empty(shape(name, large), device="meta") for name in dims}
    metas |= {name: torch.empty(large["e"], dtype=torch.int64, device="meta") for name in used}
    parts = split(bind(parse(text), metas), H200, True)
    assume(parts is not None and "Z[" in str(parts))
    assert parts is not None
    tensors = {name: torch.rand(shape(name, small), generator=source, dtype=torch.float64) for name in dims}
    gathered = [tensor[index[dims[name][0]]] if dims[name][0] in rows else tensor for name, tensor in tensors.items()]
    terms = ",".join("".join("e" if dim in rows else dim for dim in own) for own in dims.values())
    expected = torch.einsum(f"{terms}->{''.join(free)}", *gathered)
    tensors |= used
    for step, size in zip(parts.steps, [*parts.sizes, ()]):
        lengths = {large[name]: small[name] for name in large}
        extents = {**small, **{str(at): lengths.get(length, length) for at, length in zip(step.output.indices, size)}}
        tensors[step.output.name] = evaluated(step, tensors, extents)
    torch.testing.assert_close(tensors["Y"], expected)
