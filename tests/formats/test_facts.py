"""What formats say about their rows, against a loop over the groups; facts as objects and as text."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import TOLERANCE
from torch import Tensor, fx

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO
from insum_ops.formats.errors import FormatError
from insum_ops.formats.facts import ConstantTables, Fact, OwnedRows, WrittenOnce, piece_count
from insum_ops.formats.row_facts import row_facts
from insum_ops.functional import insum, insum_pinned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
groups = st.integers(0, 9).flatmap(
    lambda num_rows: st.tuples(
        st.just(num_rows), st.lists(st.integers(0, num_rows - 1), max_size=20) if num_rows else st.just([])
    )
)


@given(groups, st.sampled_from([torch.int32, torch.int64]))
def test_facts_equal_those_of_a_loop(drawn, dtype):
    num_rows, rows = drawn
    rows = sorted(rows)
    facts = row_facts(torch.tensor(rows, dtype=dtype, device=DEVICE), num_rows)
    counts = [rows.count(row) for row in range(num_rows)]
    assert facts.pointers.tolist() == [sum(counts[:row]) for row in range(num_rows + 1)]
    assert facts.is_shared.tolist() == [counts[row] > 1 for row in rows]
    assert facts.rows_to_zero.tolist() == [row for row in range(num_rows) if counts[row] != 1]
    assert facts.order.tolist() == sorted(range(num_rows), key=lambda row: -counts[row])
    assert facts.order.dtype == torch.int32
    assert facts.pointers.dtype == torch.int32
    assert facts.is_shared.dtype == torch.bool
    assert facts.rows_to_zero.dtype == torch.int64


@given(groups, st.integers(1, 5))
def test_pieces_of_rows_are_no_longer_than_their_cut_and_hold_every_group_once(drawn, cut):
    num_rows, rows = drawn
    rows = sorted(rows)
    facts = row_facts(torch.tensor(rows, dtype=torch.int64, device=DEVICE), num_rows, cut)
    pieces = facts.pieces.view(-1, 2).tolist()
    spans = [(first, last) for first, last in pieces if first < last]
    assert sorted(at for first, last in spans for at in range(first, last)) == [*range(len(rows))]
    assert len(pieces) == piece_count(num_rows, len(rows), cut)
    assert all(last - first <= cut for first, last in spans)
    assert all(len({*rows[first:last]}) == 1 for first, last in spans)
    owners = [rows[first] for first, _ in spans]
    lengths = [last - first for first, last in pieces]
    assert lengths == sorted(lengths, reverse=True)  # the longest first, those without any last
    without_any = [False] * (len(pieces) - len(spans))
    assert facts.is_shared.tolist() == [*(owners.count(row) > 1 for row in owners), *without_any]
    assert facts.rows_to_zero.tolist() == [row for row in range(num_rows) if owners.count(row) != 1]


@given(groups, st.integers(1, 5))
def test_packed_pieces_hold_whole_rows_or_a_part_of_one(drawn, cut):
    num_rows, rows = drawn
    rows = sorted(rows)
    facts = row_facts(torch.tensor(rows, dtype=torch.int64, device=DEVICE), num_rows, cut, is_packed=True)
    spans = facts.pieces.view(-1, 2).tolist()
    assert [at for first, last in spans for at in range(first, last)] == [*range(len(rows))]
    assert len(spans) == piece_count(num_rows, len(rows), cut, is_packed=True)
    assert all(0 < last - first < 3 * cut for first, last in spans)
    shared = set()
    for (first, last), is_shared in zip(spans, facts.is_shared.tolist()):
        held = {*rows[first:last]}
        whole = [at for at, row in enumerate(rows) if row in held] == [*range(first, last)]
        assert is_shared != whole
        assert whole or len(held) == 1
        shared |= held if is_shared else set()
    assert facts.rows_to_zero.tolist() == [row for row in range(num_rows) if row not in rows or row in shared]


@pytest.mark.parametrize("group_dim", [0, 1, 2])
@pytest.mark.parametrize("kind", [COO, GroupCOO, BlockCOO, BlockGroupCOO])
def test_formats_have_the_facts_of_their_group_coordinate(kind, group_dim):
    dense = (torch.rand(5, 6, 7) < 0.2).double()
    block_size = (2, 3, 2) if kind.is_blocked else None
    A = kind.from_dense(dense, group_dim=group_dim, block_size=block_size)
    num_rows = -(-dense.shape[group_dim] // (block_size or (1, 1, 1))[group_dim])
    rows = A.coords[group_dim].tolist()
    assert A.facts.pointers.tolist() == [sum(r < row for r in rows) for row in range(num_rows + 1)]


def test_ell_needs_no_facts():
    assert ELL.from_dense(torch.eye(3)).facts is None


def test_facts_are_worked_out_once_per_pattern():
    A = GroupCOO.from_dense(torch.eye(3))
    B = A.with_values(2 * A.values)
    assert A.facts is A.facts
    assert B.facts is A.facts
    assert A.to(torch.float16).facts is A.facts
    assert A.T.facts is A.facts
    assert A.regroup(1).facts is B.regroup(1).facts


def owned(rows: str = "AM", tiles: str = "", count: int = 4) -> OwnedRows:
    """About the rows of three groups, with the first `count` of its tensors."""
    facts = row_facts(torch.tensor([0, 2, 2], device=DEVICE), 4)
    return OwnedRows(rows, tiles, *facts.owned(rows).tensors[:count])


TABLES = {"I": [[2, 0], [1, -1]], "V": [[0.1, -2.5], [1e-30, 3.0]]}
FACTS = {
    "AS once": WrittenOnce("AS"),
    "AM": owned("AM"),
    "AM cut 2": row_facts(torch.tensor([0, 2, 2], device=DEVICE), 4, cut=2).owned("AM"),
    "AM packed 2": row_facts(torch.tensor([0, 2, 2], device=DEVICE), 4, cut=2, is_packed=True).owned("AM"),
    "ROW.TILE": owned("ROW", "TILE", 2),
    "WO.WT": owned("WO", "WT", 1),
    "A": OwnedRows("A"),
    "tables": ConstantTables(TABLES),
}
every_fact = pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)


@every_fact
def test_a_fact_outlives_its_text(fact: Fact) -> None:
    again = Fact.from_text(fact.to_text(), list(fact.tensors))
    assert again == fact
    assert again is not None
    assert type(again) is type(fact)
    assert (again.names, str(again), hash(again)) == (fact.names, str(fact), hash(fact))
    assert all(one is other for one, other in zip(again.tensors, fact.tensors, strict=True))


def test_no_fact_is_an_empty_text() -> None:
    assert Fact.from_text("", []) is None


def test_numbers_are_the_same_after_their_text() -> None:
    again = Fact.from_text(ConstantTables(TABLES).to_text(), [])
    assert isinstance(again, ConstantTables)
    assert again.numbers == TABLES


def test_tables_by_their_digest_alone_are_no_fact() -> None:
    """As in programs that were exported before the numbers were a part of the text."""
    assert Fact.from_text(str(ConstantTables(TABLES)), []) is None


@pytest.mark.parametrize(
    ("fact", "names"),
    [
        (WrittenOnce("AS"), ("AS",)),
        (OwnedRows("AM"), ("AM",)),
        (OwnedRows("ROW", "TILE"), ("ROW", "TILE")),
        (ConstantTables(TABLES), ("I", "V")),
    ],
)
def test_a_fact_names_the_tensors_that_it_speaks_of(fact: Fact, names: tuple[str, ...]) -> None:
    assert fact.names == names


def test_facts_are_equal_whatever_is_in_their_tensors() -> None:
    other = row_facts(torch.tensor([0, 0, 1], device=DEVICE), 2).owned("AM")
    assert other == owned()
    assert hash(other) == hash(owned())
    assert ConstantTables.of({"I": torch.tensor([2, 0])}) == ConstantTables({"I": [2, 0]})


def test_facts_that_say_or_hold_something_else_differ() -> None:
    others = [OwnedRows("AK"), OwnedRows("AM", "AT"), OwnedRows("AT", "AM"), WrittenOnce("AM"), WrittenOnce("AK")]
    others += [owned(count=count) for count in range(5)]
    others += [ConstantTables({"AM": [0, 1]}), ConstantTables({"AM": [1, 0]}), ConstantTables({"AK": [1, 0]})]
    assert len({*others}) == len({fact.key for fact in others}) == len(others)
    assert OwnedRows("AM") != "AM"


def test_tensors_come_in_the_order_that_kernels_take() -> None:
    fact = row_facts(torch.tensor([0, 2, 2], device=DEVICE), 4, cut=1).owned("AM")
    assert OwnedRows.TENSORS == ("pointers", "order", "is_shared", "rows_to_zero", "pieces")
    assert all(getattr(fact, name) is tensor for name, tensor in zip(OwnedRows.TENSORS, fact.tensors, strict=True))


@pytest.mark.parametrize("name", OwnedRows.TENSORS)
def test_tensors_of_more_dimensions_are_refused(name: str) -> None:
    given = dict.fromkeys(OwnedRows.TENSORS, torch.zeros(3)) | {name: torch.zeros(2, 3)}
    with pytest.raises(FormatError, match=f"^{re.escape(f'{name} is [2, 3]; it has one dimension')}$"):
        OwnedRows("AM", **given)


def test_a_tensor_without_those_before_it_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^order is given without pointers; a kernel takes them in this order$"):
        OwnedRows("AM", order=torch.zeros(2))


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        ("AS once", [3], "the fact 'AS once' has no tensors, but 1 are given"),
        ("", [3, 2], "the fact '' has no tensors, but 2 are given"),
        ('known {"I": [0]}', [3], "the fact 'known' has no tensors, but 1 are given"),
        ("AM", [3] * 5, "'AM' takes pointers, order, is_shared, rows_to_zero, but 5 tensors are given"),
        (
            "AM cut 32",
            [3] * 4,
            "'AM cut 32' takes pointers, order, is_shared, rows_to_zero, pieces, but 4 tensors are given",
        ),
        ("AM", [3, 3], "pointers is [3] but order is [3]; there is one pointer more than there are rows"),
    ],
)
def test_text_with_other_tensors_is_refused(text: str, sizes: list[int], message: str) -> None:
    with pytest.raises(FormatError, match=f"^{re.escape(message)}$"):
        Fact.from_text(text, [torch.zeros(size) for size in sizes])


EXPR = "Z[b,i,u] += V[i,q] * X[b,I[i,q],u]"


def _tables() -> dict[str, Tensor]:
    return {name: torch.tensor(numbers, device=DEVICE) for name, numbers in TABLES.items()}


@pytest.mark.parametrize("text", [ConstantTables(TABLES).to_text(), str(ConstantTables(TABLES)), ""])
def test_the_operator_means_the_same_with_the_fact_and_without(text: str) -> None:
    tables, X = _tables(), torch.randn(5, 3, 16, device=DEVICE)
    found = torch.ops.insum_ops.run(EXPR, "V,X,I", (5, 2, 16), [tables["V"], X, tables["I"]], text, [])
    expected = torch.zeros(5, 2, 16, dtype=torch.float64, device=DEVICE)
    for i in range(2):
        for at, value in zip(TABLES["I"][i], TABLES["V"][i]):
            expected[:, i] += value * X[:, int(at)].double() if at >= 0 else 0.0
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.float32])


def test_a_compiled_graph_holds_the_numbers_itself() -> None:
    """So that it needs nothing of the process which made it."""
    graphs: list[fx.GraphModule] = []

    def noted(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    fact, tables = ConstantTables(TABLES), _tables()
    run = lambda X: insum_pinned({}, EXPR, tables, (5, 2, 16), fact, X=X)
    X = torch.randn(5, 3, 16, device=DEVICE)
    found = torch.compile(run, backend=noted, fullgraph=True)(X)
    torch.testing.assert_close(found, insum(EXPR, X=X, **tables), **TOLERANCE[torch.float32])
    texts = [node.args[4] for graph in graphs for node in graph.graph.nodes if "insum_ops" in str(node.target)]
    assert [Fact.from_text(text, []) for text in texts] == [fact]


def test_nothing_keeps_a_fact_that_nobody_has() -> None:
    facts = [ConstantTables({"I": [[7, 7], [7, 7]]}), owned()]
    gone = [weakref.ref(fact) for fact in facts] + [weakref.ref(tensor) for tensor in facts[1].tensors]
    for fact in facts:
        str(fact), fact.key, fact.to_text(), fact.without_tensors()
    del facts, fact
    gc.collect()
    assert not any(each() is not None for each in gone)


def test_calls_do_not_keep_the_tensors_of_their_facts_alive() -> None:
    rows = torch.tensor([0, 2, 2], device=DEVICE)
    fact = owned()
    gone = [weakref.ref(tensor) for tensor in fact.tensors]
    given = [rows, torch.ones(3, 17, device=DEVICE)]
    found = torch.ops.insum_ops.run("C[AM[p],n] += A[p,n]", "AM,A", (4, 17), given, str(fact), list(fact.tensors))
    assert found.sum(1).tolist() == [17.0, 0.0, 34.0, 0.0]
    del fact
    gc.collect()
    assert not any(each() is not None for each in gone)
