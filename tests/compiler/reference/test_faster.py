"""The program that runs gives what the graph means: faster operations, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import TOLERANCE
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from insum_ops import insum
from insum_ops.compiler import JointCall, run_several
from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.reference import groups
from insum_ops.compiler.reference.code import compiled
from insum_ops.compiler.reference.faster import Way
from insum_ops.compiler.reference.lower import lower, placeholders
from insum_ops.compiler.reference.program import Part, joint_program_for, program_for, programs_for
from insum_ops.compiler.reference.rows import row_sums, weighted_row_sums

pytestmark = pytest.mark.cpu

STATEMENTS = {
    # products
    "Y[a,d] += A[a,b] * B[b,c] * D[c,d]": ("A 3 4", "B 4 5", "D 5 2"),
    "Y[d,a] += A[a,b] * B[b,d]": ("A 3 4", "B 4 5"),
    "Y[b,m,n] += A[b,m,k] * B[b,k,n]": ("A 2 3 4", "B 2 4 5"),
    "Y[n,b,m] += A[m,b,k] * B[n,k,b]": ("A 3 2 4", "B 5 4 2"),
    "Y[b,n] += A[b,k,j] * B[b,j,k,n]": ("A 2 3 4", "B 2 4 3 5"),
    "Y[b,c,m] += A[c,m,b,k] * B[k,b,c]": ("A 3 2 4 5", "B 5 4 3"),
    "Y[i] += A[i,j] * B[j]": ("A 3 4", "B 4"),
    "Y[j] += B[i] * A[i,j]": ("A 3 4", "B 3"),
    "Y[i,k] += A[i,j,k] * B[j]": ("A 3 4 2", "B 4"),
    "Y[()] += A[i,j] * A[i,j]": ("A 3 4",),
    "Y[()] += A[i,j] * B[j,i]": ("A 3 4", "B 4 3"),
    "Y[i,j] += A[i] * B[j]": ("A 3", "B 4"),
    "Y[i,j] += 0.5 * A[i,k] * B[j,l]": ("A 3 2", "B 4 5"),
    "Y[k,x,i] += A[i,j,k]": ("A 3 4 2", "size 2 6 3"),
    "Y[j] += A[i,j]": ("A 3 4", "Y 4"),
    # diagonals
    "Y[b,i] += A[b,i,i]": ("A 2 3 3",),
    "Y[i,j] += A[i,j,i,j]": ("A 3 2 3 2",),
    "Y[i] += A[i,i,i]": ("A 3 3 3",),
    "Y[i] += A[i,i,I[i]]": ("A 3 3 4", "I 3 < 4"),
    "Y[i,b,i] += A[b,i]": ("A 2 3",),
    "Y[i,i] += A[b,i]": ("A 2 3", "Y 3 3"),
    "Y[i,i,i] += A[i]": ("A 3",),
    # several indirections
    "Y[p,f] += A[I[p],J[p],f]": ("A 2 3 4", "I 20 < 2", "J 20 < 3"),
    "Y[p,l,f] += W[p,l,c] * A[l,H[p,l,c],f]": ("W 5 2 3", "A 2 4 3", "H 5 2 3 < 4"),
    "Y[p,q] += A[p,J[q],I[p]]": ("A 6 3 2", "I 6 < 2", "J 5 < 3"),
    "Y[I[p],J[p]] += A[p]": ("A 9", "I 9 < 2", "J 9 < 3", "size 2 3"),
    "Y[I[p],J[q],c] += A[p,q,c]": ("A 4 3 2", "I 4 < 2", "J 3 < 3", "size 2 3 2"),
    "Y[c,I[p],J[p]] += A[p,c]": ("A 9 2", "I 9 < 2", "J 9 < 3", "size 2 2 3"),
    "Y[I[p],c,J[p]] += A[p,c]": ("A 9 2", "I 9 < 2", "J 9 < 3", "size 2 2 3"),
    "Y[p,I[p]] += A[p]": ("A 4", "I 4 < 3", "size 4 3"),
    "Y[0,I[p]] += A[p]": ("A 4", "I 4 < 3", "size 2 3"),
    "Y[I[0],c] += A[c]": ("A 4", "I 2 < 3", "size 3 4"),
    # sums by row
    "Y[I[p],c] += V[p] * A[J[p],c]": ("V 20", "A 6 9", "I 20 < 4", "J 20 < 6", "size 4 9"),
    "Y[I[p],c,d] += A[J[p],c,d] * V[p]": ("V 20", "A 6 3 4", "I 20 < 4", "J 20 < 6", "Y 4 3 4"),
    "Y[I[p],c] += V[p,q] * A[J[p,q],c]": ("V 7 3", "A 6 9", "I 7 < 4", "J 7 3 < 6", "size 4 9"),
    "Y[I[p],c] += 2 * V[q,p] * A[J[p,q],c]": ("V 3 7", "A 6 3", "I 7 < 4", "J 7 3 < 6", "size 4 3"),
    "Y[I[p],c] += A[J[p,q],c]": ("A 6 9", "I 7 < 4", "J 7 3 < 6", "size 4 9"),
    "Y[I[q],c] += V[p,q] * A[J[p,q],c]": ("V 7 3", "A 6 9", "I 3 < 4", "J 7 3 < 6", "size 4 9"),
    "Y[b,c] += V[b,l] * A[J[b,l],c]": ("V 5 3", "A 6 9", "J 5 3 < 6"),
    "Y[a,b,c] += A[J[a,b,l],c]": ("A 6 9", "J 2 5 3 < 6"),
    "Y[I[p],c] += A[p,c]": ("A 20 9", "I 20 < 4", "size 4 9"),
    "Y[I[p,q],c,d] += A[q,c,p,d]": ("A 3 4 5 2", "I 5 3 < 4", "Y 4 4 2"),
    "Y[I[p],c] += A[c,p]": ("A 3 20", "I 20 < 4", "size 4 3"),
    "Y[c,I[p]] += A[c,p]": ("A 3 20", "I 20 < 4", "size 3 4"),
    "Y[I[p]] += V[p] * A[J[p]]": ("V 20", "A 6", "I 20 < 4", "J 20 < 6", "size 4"),
    "Y[I[K[p]],c] += A[p,c]": ("A 20 9", "I 5 < 4", "K 20 < 5", "size 4 9"),
    "Y[b,i,k] += A[b,i,j] * B[b,j,k]": ("A 7 3 4", "B 7 4 5"),
    # products that overwrite gathered rows, or don't
    "Y[p,c] = A[I[p],c] * A[I[p],c]": ("A 6 9", "I 20 < 6"),
    "Y[p,c] = A[I[p],c] * V[p] * A[I[p],c]": ("A 6 9", "I 20 < 6", "V 20"),
    "Y[p,h] += A[I[p],h,d] * B[J[p],h,d]": ("A 6 3 4", "B 5 3 4", "I 20 < 6", "J 20 < 5"),
    "Y[p,d] += A[I[p],h,d] * B[J[p],h]": ("A 6 3 4", "B 5 3", "I 20 < 6", "J 20 < 5"),
    "Y[p] += V[p,d] * A[I[p],d] * B[J[p],d]": ("A 6 4", "B 5 4", "V 20 4", "I 20 < 6", "J 20 < 5"),
    # factors that are multiplied before they are gathered
    "Y[D[e],o] += V[e] * A[S[e],c] * W[R[e],c,o]": (
        *("V 40", "A 6 3", "W 2 3 4", "D 40 < 6", "S 40 < 6", "R 40 < 2", "size 6 4"),
    ),
    "Y[e,o] += A[S[e],c] * W[R[e],o,c]": ("A 6 3", "W 2 4 3", "S 40 < 6", "R 40 < 2"),
    "Y[e,o] += A[S[e],c,c] * W[R[e],c,o]": ("A 6 3 3", "W 2 3 4", "S 40 < 6", "R 40 < 2"),
    "Y[e,o] += A[S[e],S[e],c] * W[R[e],c,o]": ("A 6 6 3", "W 2 3 4", "S 40 < 6", "R 40 < 2"),
    "Y[e] += B[D[e],o] * A[S[e],c] * W[R[e],c,o]": (
        *("B 5 4", "A 6 3", "W 2 3 4", "D 40 < 5", "S 40 < 6", "R 40 < 2"),
    ),
    "Y[p,q,o] += 0.5 * A[S[p,q],c] * W[R[p],c,o]": ("A 6 3", "W 2 3 4", "S 9 7 < 6", "R 9 < 2"),
    "Y[p,o] += A[S[p],b,c] * W[S[p],c,o] * B[b]": ("A 6 2 3", "W 6 3 4", "S 40 < 6", "B 2"),
    "Y[D[e],o] += V[e] * U[e] * A[S[e],c] * W[c,o]": (
        "V 40",
        "U 40",
        "A 6 3",
        "W 3 4",
        "D 40 < 6",
        "S 40 < 6",
        "Y 6 4",
    ),
    # one element of each row
    "Y[i,c] = A[i,K[i,c]]": ("A 7 4", "K 7 3 < 4"),
    "Y[c,i] += A[K[c,i],c] * V[i]": ("A 4 5", "K 5 3 < 4", "V 3"),
    "Y[i] += A[i,K[i]] * V[i]": ("A 7 4", "K 7 < 4", "V 7"),
    "Y[d,i,c] = A[i,K[c,i,d],c]": ("A 3 4 5", "K 5 3 2 < 4"),
    "Y[i,d] += A[i,K[d,e,i]]": ("A 3 4", "K 2 5 3 < 4"),
    "Y[J[i,K[i,c]],c] += A[i,c]": ("A 6 9", "J 6 4 < 5", "K 6 9 < 4", "size 5 9"),
    "Y[b,k,i] += A[b,i,j] * B[J[b],k,j]": ("A 7 3 4", "B 5 6 4", "J 7 < 5"),
    "Y[I[p],c] += B[J[p],c] * A[K[p],c]": ("B 5 9", "A 6 9", "I 20 < 4", "J 20 < 5", "K 20 < 6", "size 4 9"),
}


def drawn(words: tuple[str, ...], kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    """Operands by their shapes; positions are sorted, not sorted, or some of them -1, of 32 bits then."""
    torch.manual_seed(0)
    tensors, size = {}, None
    for text in words:
        name, *sizes = text.partition("<")[0].split()
        shape = tuple(map(int, sizes))
        if name == "size":
            size = shape
        elif "<" in text:
            high = int(text.partition("<")[2])
            positions = torch.randint(-1 if kind == "padded" else 0, high, shape)
            if kind == "sorted":
                positions = positions.flatten().sort().values.reshape(shape)
            tensors[name] = positions.int() if kind == "padded" else positions
        else:
            tensors[name] = torch.randn(shape, dtype=torch.float64).to(dtype)
    return tensors, size


@pytest.mark.sampled("expr", "kind")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "padded"])
@pytest.mark.parametrize("expr", STATEMENTS)
def test_faster_operations_give_what_the_graph_means(expr: str, kind: str, dtype: torch.dtype) -> None:
    assert_program_means(expr, kind, *drawn(STATEMENTS[expr], kind, dtype))


def assert_program_means(expr: str, kind: str, tensors: dict[str, Tensor], size: Any) -> None:
    """A program's result is that of the graph in float64, in memory of its own, in every way; operands stay as is."""
    bound = bind(parse(expr), tensors, size)
    padded = frozenset(bound.statement.index_names) if kind == "padded" else frozenset[str]()
    values = [tensors[name] for name in placeholders(bound)]
    copies = [value.clone() for value in values]
    ways = {
        *[program.way for program in programs_for(bound, padded).values()],
        Way(by_rows=False),
        Way(by_entries=True),
    }
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    meaning = lower(bind(parse(expr), wide, size), padded)
    expected = meaning(*(wide[name] for name in placeholders(bound)))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[bound.dtype]
    memory = {value.untyped_storage().data_ptr() for value in values}
    for program in [program_for(bound, padded, way=way) for way in ways for _ in range(2)]:
        result = program.function(*values, *program.lengths_in(bound))  # the second time by what the first has kept
        assert result.is_contiguous()
        assert result.dtype == bound.dtype
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
        assert result.untyped_storage().data_ptr() not in memory
    assert all(torch.equal(value, copy) for value, copy in zip(values, copies))


@pytest.mark.parametrize(
    "words", [("A 6 9", "B 5 9", "I 1 < 6", "J 1 3 < 5"), ("A 6 9", "B 5 9", "I 6 < 6", "J 6 3 < 5")]
)
@pytest.mark.parametrize("step", [1, 2])
def test_rows_are_multiplied_at_positions_that_are_views(words: tuple[str, ...], step: int) -> None:
    """One row's columns share its position, and a position may lie between others."""
    tensors, size = drawn(words, "unsorted", torch.float64)
    views = {name: tensor[::step] if name in ("I", "J") else tensor for name, tensor in tensors.items()}
    assert_program_means("Y[p,q] += A[I[p],c] * B[J[p,q],c]", "unsorted", views, size)
    shared = {**tensors, "I": tensors["I"][:1].expand(len(tensors["J"]))}
    assert_program_means("Y[p,q] += A[I[p],c] * B[J[p,q],c]", "unsorted", shared, size)


def test_a_row_that_is_hidden_adds_nothing_even_if_it_is_not_a_number() -> None:
    X = torch.full((3, 9), torch.nan)
    X[1] = 1
    V, rows, columns = torch.tensor([2.0, torch.nan, 3.0]), torch.tensor([0, -1, 1]), torch.tensor([1, 0, -1])
    result = insum("Y[I[p],c] += V[p] * X[J[p],c]", V=V, X=X, I=rows, J=columns, size=(3, 9))
    assert result[:, 0].tolist() == [2, 0, 0]
    result = insum("Y[I[p],c] += X[p,c]", X=X, I=torch.tensor([-1, 2, -1]), size=(3, 9))
    assert result[:, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sampled_rows_are_chosen_by_columns_of_a_table_in_which_any_negative_number_is_none(dtype: torch.dtype) -> None:
    X, Z = torch.rand(4, 9), torch.rand(5, 9)
    table = torch.tensor([[3, 4], [0, -9], [3, 1], [2, -100_000]], dtype=dtype)
    result = insum("Y[p] += X[I[p],c] * Z[J[p],c]", X=X, Z=Z, I=table[:, 0], J=table[:, 1])
    torch.testing.assert_close(result, torch.stack([X[3] @ Z[4], torch.zeros(()), X[3] @ Z[1], torch.zeros(())]))


def test_an_index_that_is_written_to_is_sorted_anew() -> None:
    X, index = torch.rand(6, 9), torch.tensor([2, 0, 1, 0, 2, 1])
    for _ in range(4):
        result = insum("Y[I[p],c] += X[p,c]", X=X, I=index, size=(3, 9))
        torch.testing.assert_close(result, torch.zeros(3, 9).index_add(0, index, X))
        index[0] = (index[0] + 1) % 3
        index[5] = 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_of_rows_that_are_added_as_they_come_are_not_rounded(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    X = torch.tensor([1 + eps, -1 - 2 * eps], dtype=dtype)[:, None].expand(2, 4).contiguous()
    V, rows, chosen = torch.tensor([1 + eps, 1, 1], dtype=dtype), torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1])
    result = weighted_row_sums(X, chosen, V, rows, 2, False)
    assert result.dtype == dtype
    assert result[1].tolist() == [eps**2] * 4  # 0 if (1 + eps)^2 is rounded before


def test_one_index_may_choose_rows_and_columns() -> None:
    X, index = torch.rand(4, 9), torch.tensor([2, 0, 1, 2])
    for _ in range(2):
        summed = insum("Y[I[p],c] += X[p,c]", X=X, I=index, size=(4, 9))
        chosen = insum("Y[p,c] += X[I[p],c]", X=X, I=index)
        both = insum("Y[I[p],c] += X[I[p],c]", X=X, I=index, size=(4, 9))
        torch.testing.assert_close(summed, torch.zeros(4, 9).index_add(0, index, X))
        torch.testing.assert_close(chosen, X[index])
        torch.testing.assert_close(both, torch.zeros(4, 9).index_add(0, index, X[index]))


def test_what_is_dense_is_differentiated_by_torch_to_any_order() -> None:
    A = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    B = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    product = lambda A, B: insum("Y[i,k] += A[i,j] * B[j,k] * A[i,j]", A=A, B=B)
    for _ in range(4):
        assert torch.autograd.gradcheck(product, (A, B))
        assert torch.autograd.gradgradcheck(product, (A, B))
    result = product(A, B)
    assert result.grad_fn is not None
    assert not product(A.detach(), B.detach()).requires_grad


@pytest.mark.parametrize("expr", ["Y[j] += A[()]", "Y[i,j] += A[i]", "Y[j] += A[i] * A[i]"])
def test_an_empty_result_leads_back_to_what_it_was_made_of(expr: str) -> None:
    A = torch.rand((3,) if "A[i]" in expr else (), dtype=torch.float64, requires_grad=True)
    for length in (2, 0, 2, 0):
        Y = insum(expr, A=A, size=(3, length) if "Y[i,j]" in expr else (length,))
        assert Y.requires_grad
        (grad,) = torch.autograd.grad(Y.sum(), A)
        assert length or not grad.any()


@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("column", [0, -1])
def test_one_element_is_read_at_positions_without_dimensions(row: int, column: int) -> None:
    A, B = torch.rand(1, 1, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    J, K = torch.tensor(row), torch.tensor(column)
    chosen = A[0, 0] if row == column == 0 else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(insum("Y[()] += A[J[()],K[()]]", A=A, J=J, K=K), chosen)
    torch.testing.assert_close(insum("Y[k] += B[k] * A[J[()],K[()]]", A=A, B=B, J=J, K=K), B * chosen)


class Operations(TorchDispatchMode):
    """The names of the operations that ran and are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name != "aten::_unsafe_view":
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("expr", "shapes", "operations"),
    [
        (
            "Y[b,o] += X[b,i] * A[U[b],i,r] * B[U[b],r,o]",
            dict(X=(9, 3), A=(4, 3, 2), B=(4, 2, 5), U=(9,)),
            ["index_select", "index_select", "bmm", "bmm"],
        ),
        (
            "Y[a,b,c] += G[i,j,k] * A[a,i] * B[b,j] * C[c,k]",
            dict(G=(3, 4, 5), A=(30, 3), B=(40, 4), C=(50, 5)),
            ["mm", "mm", "mm"],
        ),
        ("Y[b,n] += X[b,m] * A[b,m,n]", dict(X=(9, 3), A=(9, 3, 2)), ["bmm"]),
        ("Y[b,n] += X[b,m] * A[b,n,m]", dict(X=(9, 3), A=(9, 2, 3)), ["bmm"]),
    ],
)
def test_products_are_formed_without_copies(expr: str, shapes: dict[str, Any], operations: list[str]) -> None:
    tensors = {name: torch.rand(shape) if name != "U" else torch.zeros(shape).long() for name, shape in shapes.items()}
    bound = bind(parse(expr), tensors)
    program, values = program_for(bound, frozenset()), [tensors[name] for name in placeholders(bound)]
    with Operations() as seen:
        program.function(*values, *program.lengths_in(bound))
    assert seen.names == operations


def test_a_program_has_the_ways_that_it_differs_in() -> None:
    def ways(expr: str, **tensors: Tensor) -> list[str]:
        size = (4, 9) if "I[" in expr else None
        return list(programs_for(bind(parse(expr), tensors, size), frozenset()))

    A, X, index = torch.rand(5, 3, 2), torch.rand(5, 3), torch.randint(4, (5,))
    assert ways("Y[i,k] += X[i,j] * B[j,k]", X=X, B=torch.rand(3, 2)) == ["as a rule"]
    assert ways("Y[b,k] += X[b,j] * A[b,j,k]", X=X, A=A) == ["as a rule", "as a rule, by_entries"]
    rows = ["as a rule", "as a rule, not by_rows", "as a rule, not by_rows, puts"]
    assert ways("Y[I[p],c] += X[p,c]", X=torch.rand(5, 9), I=index) == rows


def test_factors_are_multiplied_before_they_are_gathered_where_that_takes_less() -> None:
    def has_way(entries: int, padded: frozenset[str] = frozenset()) -> bool:
        tensors = {"X": torch.rand(9, 5), "W": torch.rand(3, 5, 4)}
        tensors |= {name: torch.zeros(entries, dtype=torch.int64) for name in "SR"}
        bound = bind(parse("Y[e,o] += X[S[e],c] * W[R[e],c,o]"), tensors)
        return any(program.way.multiplies_first for program in programs_for(bound, padded).values())

    assert has_way(200)
    assert not has_way(10)  # 27 products at all positions
    assert not has_way(200, frozenset({"S"}))


def test_which_factors_are_multiplied_first_is_told_apart_by_lengths() -> None:
    """Two factors that one index tensor points into are multiplied first only where they are of one length."""
    way = Way(multiplies_first=True)
    statement = parse("Y[e] += X[S[e],c] * W[S[e],c] * P[T[e],d] * Q[U[e],d]")
    for rows in (4, 6):
        tensors = {"X": torch.randn(4, 9), "W": torch.randn(rows, 9), "P": torch.randn(3, 8), "Q": torch.randn(2, 8)}
        tensors |= {name: torch.randint(2, (60,)) for name in "STU"}
        bound = bind(statement, tensors)
        program = program_for(bound, frozenset(), way=way)
        found = program.function(*[tensors[name] for name in placeholders(bound)], *program.lengths_in(bound))
        chosen = {name: tensors[name].double()[tensors[index]] for name, index in zip("XWPQ", "SSTU")}
        expected = (chosen["X"] * chosen["W"]).sum(1) * (chosen["P"] * chosen["Q"]).sum(1)
        torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["mul_", "to", "clone", "contiguous", "new_full"])
def test_no_operand_is_overwritten_whatever_its_name(name: str) -> None:
    values, B = torch.randn(5, 4), torch.randn(5, 4)
    before, expected = values.clone(), values.double() * B.double()
    for _ in range(3):
        result = insum(f"C[i,j] += {name}[i,j] * B[i,j]", **{name: values}, B=B)
        torch.testing.assert_close(result.double(), expected, **TOLERANCE[torch.float32])
        assert torch.equal(values, before)


RELATIONS = "Y[D[e],o] += V[e] * X[S[e],c] * W[R[e],c,o]"


@pytest.mark.parametrize("way", [Way(), Way(multiplies_first=True)], ids=["gathered", "multiplied"])
def test_sums_in_one_program_give_what_they_give_apart(way: Way) -> None:
    names = {"V": "e", "X": "nc", "W": "rco", "dY": "no"}
    sizes = dict(e=40, n=6, r=2, c=3, o=9)
    tensors = {name: torch.randn([sizes[letter] for letter in dims]) for name, dims in names.items()}
    tensors |= {name: torch.randint(2 if name == "R" else 6, (40,)) for name in "DSR"}
    sums = {
        "dV[e] += dY[D[e],o] * X[S[e],c] * W[R[e],c,o]": (40,),
        "dX[S[e],c] += dY[D[e],o] * V[e] * W[R[e],c,o]": (6, 3),
        "dW[R[e],c,o] += dY[D[e],o] * V[e] * X[S[e],c]": (2, 3, 9),
        "dU[e] += dY[D[e],o] * X[S[e],c] * W[R[e],c,o]": (40,),
    }
    bounds = [
        bind(
            statement := parse(text), {name: tensors[name] for name in statement.tensor_names if name in tensors}, size
        )
        for text, size in sums.items()
    ]
    numbers = {name: at for at, name in enumerate(tensors)}
    parts = [Part(bound, frozenset(), way, tuple([numbers[name] for name in placeholders(bound)])) for bound in bounds]
    program, copies = joint_program_for(parts), {name: tensor.clone() for name, tensor in tensors.items()}
    with Operations() as together:
        found = program.function(*tensors.values(), *program.lengths_in(parts))
    with Operations() as apart:
        programs = [program_for(bound, frozenset(), way=way) for bound in bounds]
        expected = [
            one.function(*[tensors[name] for name in placeholders(bound)], *one.lengths_in(bound))
            for one, bound in zip(programs, bounds)
        ]
    assert all(map(torch.equal, found, expected))
    assert len({value.untyped_storage().data_ptr() for value in found}) == len(found)
    assert all(torch.equal(tensors[name], copy) for name, copy in copies.items())
    assert together.names.count("index_select") < apart.names.count("index_select")


@pytest.mark.parametrize("way", [Way(), Way(by_rows=False)], ids=["by rows", "by torch"])
def test_sums_of_one_program_are_added_up_each_in_its_own_memory(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of one size begin as zeros that look alike, and products of two dtypes meet ones that do."""
    monkeypatch.setattr(groups, "NUMBERS_FOR_A_GROUP", 0)
    shapes = {"V": (40,), "P": (6,), "Q": (6,), "X": (40, 3), "Z": (40, 3), "B": (6, 3, 9)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {name: torch.randint(6, (40,)) for name in "STR"} | {"W": torch.randn(40, 3, dtype=torch.float64)}
    V, P, Q, X, Z, B, S, T, R, W = [own.double() if own.is_floating_point() else own for own in tensors.values()]
    zeros = torch.zeros(6, dtype=torch.float64)
    sums = {
        "dP[S[e]] += V[e] * Q[T[e]]": zeros.index_add(0, S, V * Q[T]),
        "dQ[T[e]] += V[e] * P[S[e]]": zeros.index_add(0, T, V * P[S]),
        "M[c,o] += X[e,c] * B[R[e],c,o]": torch.einsum("ec,eco->co", X, B[R]),
        "N[c,o] += Z[e,c] * B[R[e],c,o]": torch.einsum("ec,eco->co", Z, B[R]),
        "Y[e] += X[e,c] * Z[e,c]": (X * Z).sum(1),
        "E[e] += X[e,c] * W[e,c]": (X * W).sum(1),
    }
    order, parts = list(tensors), []
    for text, expected in sums.items():
        statement = parse(text)
        bound = bind(
            statement, {name: tensors[name] for name in statement.tensor_names if name in tensors}, expected.shape
        )
        parts.append(Part(bound, frozenset(), way, tuple(map(order.index, placeholders(bound)))))
    program = joint_program_for(parts)
    found = program.function(*tensors.values(), *program.lengths_in(parts))
    for value, expected in zip(found, sums.values(), strict=True):
        torch.testing.assert_close(value.double(), expected, **TOLERANCE[torch.float32])


def test_one_name_may_stand_for_other_tensors_and_lengths_in_sums_of_one_program() -> None:
    """As tables of a tensor product do, which are other ones for each of its gradients."""
    X, sums, expected = torch.randn(6, 5), [], []
    for rows, terms in ((4, 3), (7, 2), (4, 2)):
        tensors = {"X": X, "T": torch.randint(5, (rows, terms)), "V": torch.randn(rows, terms)}
        sums.append(JointCall("Y[b,r] += X[b,T[r,t]] * V[r,t]", "X,T,V", (6, rows), [*tensors.values()]))
        expected.append(torch.einsum("brt,rt->br", X.double()[:, tensors["T"]], tensors["V"].double()))
    for value, reference in zip(run_several(sums), expected, strict=True):
        torch.testing.assert_close(value.double(), reference, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", ["unsorted", "padded"])
@pytest.mark.parametrize(
    "expr", [RELATIONS, "Z[e] += X[D[e],c] * X[S[e],c] * V[e]", "Y[D[e],c] += X[S[e],c] * X[S[e],c] * V[e]"]
)
def test_gradients_of_one_program_are_right_to_second_order(expr: str, kind: str) -> None:
    torch.manual_seed(1)
    shapes = {"V": (30,), "X": (5, 3), "W": (2, 3, 4)}
    values = {name: torch.randn(shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}
    values = {name: value for name, value in values.items() if f"{name}[" in expr}
    low = -1 if kind == "padded" else 0
    places = {name: torch.randint(low, 2 if name == "R" else 5, (30,)) for name in "DSR" if f"{name}[e" in expr}
    size = None if expr.startswith("Z") else (5, 4 if "W" in expr else 3)
    call = lambda *given: insum(expr, size=size, **dict(zip(values, given)), **places)
    assert torch.autograd.gradcheck(call, tuple(values.values()))
    assert torch.autograd.gradgradcheck(call, tuple(values.values()))
    wide = list(values.values())
    upstream = torch.randn_like(call(*wide))
    expected = torch.autograd.grad(call(*wide), wide, upstream)
    narrow = [value.detach().float().requires_grad_() for value in wide]
    for _ in range(4):  # recorded, and then replayed
        found = torch.autograd.grad(call(*narrow), narrow, upstream.float())
        for one, other in zip(found, expected):
            torch.testing.assert_close(one.double(), other, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("count", [20, 1000])
def test_rows_of_an_index_that_is_new_are_summed_to_the_same_bits(
    count: int, is_padded: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for rows, columns in ((1, 9), (3, 45), (700, 8), (50, 130)):
        index, values = torch.randint(-1 if is_padded else 0, rows, (count,)), torch.randn(count, columns).to(dtype)
        first, *later = [row_sums(values, index, rows, is_padded) for _ in range(3)]
        assert all(torch.equal(first, result) for result in later)
        shown = index >= 0
        expected = torch.zeros(rows, columns, dtype=torch.float64).index_add_(0, index[shown], values[shown].double())
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(first.double(), expected.to(dtype).double(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_of_a_sorted_index_that_lies_apart_in_memory(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for count in (5, 400):
        index = torch.stack([torch.randint(7, (count,)).sort().values, torch.randint(9, (count,))], 1).to(dtype)[:, 0]
        values, weights = torch.randn(count, 9), torch.randn(count)
        table, columns = torch.randn(6, 9), torch.randint(6, (count,), dtype=dtype)
        zeros = torch.zeros(7, 9, dtype=torch.float64)
        expected = zeros.index_add(0, index, values.double())
        torch.testing.assert_close(row_sums(values, index, 7, False).double(), expected, **TOLERANCE[torch.float32])
        found = weighted_row_sums(table, columns, weights, index, 7, False)
        expected = zeros.index_add(0, index, weights.double()[:, None] * table.double()[columns])
        torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("way", [Way(), Way(by_entries=True)], ids=["products", "entries"])
@pytest.mark.parametrize("expr", ["Y[b,n] += X[b,m] * A[b,m,n]", "Y[n,b] += A[b,n,m] * X[b,m]"])
def test_vectors_times_matrices_have_gradients_by_either_way(expr: str, way: Way) -> None:
    shapes = (9, 3), (9, 3, 5) if "A[b,m,n]" in expr else (9, 5, 3)
    left, right = (torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    bound = bind(parse(expr), {"X": left, "A": right})
    program, named = program_for(bound, frozenset(), way=way), {"X": left, "A": right}
    result = program.function(*[named[name] for name in placeholders(bound)], *program.lengths_in(bound))
    matrix = right if "A[b,m,n]" in expr else right.transpose(1, 2)
    expected = torch.bmm(left[:, None], matrix)[:, 0]
    expected = expected if "Y[b,n]" in expr else expected.T
    torch.testing.assert_close(result, expected, **TOLERANCE[torch.float64])
    upstream = torch.rand_like(expected)
    found, wanted = (torch.autograd.grad(value, (left, right), upstream) for value in (result, expected))
    torch.testing.assert_close(found, wanted, **TOLERANCE[torch.float64])


def test_a_gradient_exists_where_nothing_is_summed() -> None:
    A, B = torch.rand(3, 0, requires_grad=True), torch.rand(0, 2, requires_grad=True)
    result = insum("Y[i,k] += A[i,j] * B[j,k]", A=A, B=B)
    grads = torch.autograd.grad(result.sum(), (A, B))
    assert [grad.shape for grad in grads] == [A.shape, B.shape]
    Y = torch.rand(3, requires_grad=True)
    filled = insum("Y[i] = C[i,j]", Y=Y, C=torch.rand(3, 2, requires_grad=True))
    assert torch.autograd.grad(filled.sum(), Y)[0].tolist() == [0, 0, 0]


GROUPS = {
    "Y[p,m] += X[p,c] * W[E[p],c,m]": ("X 20 3", "W 4 3 5", "E 20 < 4"),
    "Y[m,p] += W[c,E[p],m] * X[p,c]": ("X 20 3", "W 3 4 5", "E 20 < 4"),
    "Y[m] += X[p,c] * W[E[p],c,m]": ("X 20 3", "W 4 3 5", "E 20 < 4"),
    "W[E[p],c,m] += X[p,c] * Y[p,m]": ("X 20 3", "Y 20 5", "E 20 < 4", "size 4 3 5"),
    "W[c,E[p],m] += X[p,c] * Y[p,m]": ("X 20 3", "Y 20 5", "E 20 < 4", "W 3 4 5"),
    "Y[T[p],m] += G[p] * X[T[p],c] * W[E[p],c,m]": ("G 20", "X 6 3", "W 4 3 5", "E 20 < 4", "T 20 < 6", "size 6 5"),
    "Y[I[p,q],m] += X[J[p,q],c] * W[E[p],c,m]": ("X 6 3", "W 4 3 5", "E 7 < 4", "I 7 2 < 6", "J 7 2 < 6", "size 6 5"),
    "W[E[p],c,m] += X[J[p,q],c] * Y[I[p,q],m]": ("X 6 3", "Y 6 5", "E 7 < 4", "I 7 2 < 6", "J 7 2 < 6", "size 4 3 5"),
    "Y[b,o] += X[b,i] * A[U[b],i,r] * B[U[b],r,o]": ("X 9 3", "A 4 3 2", "B 4 2 5", "U 9 < 4"),
    "Y[b,s,o] += 2 * X[b,s,i] * A[U[b],i,o]": ("X 9 2 3", "A 4 3 5", "U 9 < 4", "Y 9 2 5"),
    "Y[p] += X[p,c] * W[E[p],F[p],c]": ("X 20 3", "W 4 5 3", "E 20 < 4", "F 20 < 5"),
    "Y[E[p],c] += X[p,c] * W[E[p],c]": ("X 20 3", "W 4 3", "E 20 < 4", "size 4 3"),
    "Y[b,I[p,q],m] += V[p,q] * X[b,J[p,q],c] * W[b,E[p],c,m]": (
        *("V 7 2", "X 3 6 3", "W 3 4 3 5", "E 7 < 4", "I 7 2 < 6", "J 7 2 < 6", "size 3 6 5"),
    ),
    "Y[I[p],m] += V[p,q] * X[J[p,q],c] * W[E[p],c,m]": (
        *("V 7 2", "X 6 3", "W 4 3 5", "E 7 < 4", "I 7 < 6", "J 7 2 < 6", "size 6 5"),
    ),
    "Y[p,m] += V[p,q] * X[J[p,q],c] * W[E[p],c,m]": ("V 7 2", "X 6 3", "W 4 3 5", "E 7 < 4", "J 7 2 < 6"),
    "Y[p,q,m] += V[p] * X[J[p,q],c] * W[E[p],c,m]": ("V 7", "X 6 3", "W 4 3 5", "E 7 < 4", "J 7 2 < 6"),
    "Y[q,m,p] += V[q,p] * X[J[p,q],c] * W[E[p],c,m]": ("V 2 7", "X 6 3", "W 4 3 5", "E 7 < 4", "J 7 2 < 6"),
    "Y[m] += V[p,q,r] * X[J[p,q,r],c] * G[p] * W[E[p],c,m]": (
        *("V 5 2 3", "G 5", "X 6 3", "W 4 3 5", "E 5 < 4", "J 5 2 3 < 6"),
    ),
    "W[E[p],c,m] += X[J[p,q],c] * Y[p,m]": ("X 6 3", "Y 7 5", "E 7 < 4", "J 7 2 < 6", "size 4 3 5"),
    "Y[I[p,q],m] += X[J[p],c] * W[E[p],c,m] * V[p,q]": (
        *("V 7 2", "X 6 3", "W 4 3 5", "E 7 < 4", "I 7 2 < 6", "J 7 < 6", "size 6 5"),
    ),
    "Y[I[p,x],m] += X[p,x,c] * W[E[p],c,m] * V[x]": (
        *("V 2", "X 7 2 3", "W 4 3 5", "E 7 < 4", "I 7 2 < 6", "size 6 5"),
    ),
}


@pytest.mark.sampled("expr", "kind")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "padded"])
@pytest.mark.parametrize("expr", GROUPS)
def test_groups_give_what_the_graph_means(
    expr: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "NUMBERS_FOR_A_GROUP", 0)
    tensors, size = drawn(GROUPS[expr], kind, dtype)
    assert groups.index_of_groups(bind(parse(expr), tensors, size)) is not None
    assert_program_means(expr, kind, tensors, size)


@pytest.mark.parametrize("kind", ["unsorted", "padded"])
@pytest.mark.parametrize("expr", list(GROUPS)[::3])
def test_groups_that_may_be_worth_it_are_a_way(expr: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "FEWEST_NUMBERS", 0)
    tensors, size = drawn(GROUPS[expr], kind, torch.float64)
    bound = bind(parse(expr), tensors, size)
    assert groups.index_of_groups(bound) is None
    assert any(program.way.in_groups for program in programs_for(bound, frozenset()).values())
    assert_program_means(expr, kind, tensors, size)


@pytest.mark.parametrize("expr", ["Y[p,m] += X[p,c] * W[E[p],c,m]", "Y[i,c] = A[i,K[i,c]]"])
def test_a_result_in_memory_of_its_own_is_not_copied(expr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "NUMBERS_FOR_A_GROUP", 0)
    tensors, _ = drawn({**STATEMENTS, **GROUPS}[expr], "unsorted", torch.float32)
    bound = bind(parse(expr), tensors)
    program = program_for(bound, frozenset())
    with Operations() as seen:
        program.function(*[tensors[name] for name in placeholders(bound)], *program.lengths_in(bound))
    assert "clone" not in seen.names


def test_groups_that_are_all_hidden_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "NUMBERS_FOR_A_GROUP", 0)
    tensors, _ = drawn(GROUPS["Y[p,m] += X[p,c] * W[E[p],c,m]"], "sorted", torch.float32)
    tensors["E"] = torch.full((20,), -1)
    assert_program_means("Y[p,m] += X[p,c] * W[E[p],c,m]", "padded", tensors, None)


@pytest.mark.parametrize("expr", ["Y[p] += W[E[p],p]", "Y[c] += W[E[F[p]],c]", "Y[E[p],p] += X[p]", "Y[p,c] += X[p,c]"])
def test_what_does_not_fall_apart_into_groups(expr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "NUMBERS_FOR_A_GROUP", 0)
    shapes = {"W": (4, 5), "X": (5, 3) if "c" in expr else (5,)}
    tensors: dict[str, Tensor] = {name: torch.rand(shape) for name, shape in shapes.items() if f"{name}[" in expr}
    tensors |= {name: torch.zeros(5, dtype=torch.int64) for name in "EF" if f"{name}[" in expr}
    size = (4, 5) if expr.startswith("Y[E") else None
    assert groups.index_of_groups(bind(parse(expr), tensors, size)) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("count", [256, 257, 3000])
def test_long_rows_are_summed_in_parts_and_rounded_once(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSUM_TUNE", "off")  # other ways err as torch's own sums do
    torch.manual_seed(0)
    X, index = torch.rand(count, 9, dtype=torch.float64).to(dtype), torch.ones(count, dtype=torch.int64)
    index[:3] = torch.tensor([3, 0, 3])
    expected = torch.zeros(5, 9, dtype=torch.float64).index_add(0, index, X.double())
    tolerance = {torch.float64: 1e-13, torch.float32: 5e-7, torch.float16: 5e-4}[dtype]
    result = insum("Y[I[p],c] += X[p,c]", X=X, I=index, size=(5, 9))
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=0)
    columns = torch.randint(0, count, (count,), dtype=torch.int32)
    expected = torch.zeros(5, 9, dtype=torch.float64).index_add(0, index, X.double()[columns] * X.double()[:, :1])
    result = insum("Y[I[p],c] += V[p] * X[J[p],c]", X=X, V=X[:, 0], I=index, J=columns, size=(5, 9))
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("expr", ["Y[j] += X[i,j]", "Y[j] += X[j,i]"])
def test_half_precision_of_a_lone_factor_is_summed_as_it_is_and_rounded_once(expr: str, dtype: torch.dtype) -> None:
    column = torch.cat([torch.tensor([2048.0]), torch.full((4096,), 0.5)]).to(dtype)  # in `dtype` 2048 + 0.5 is 2048
    X = column[:, None].expand(-1, 3) if "X[i,j]" in expr else column.expand(3, -1)
    bound = bind(parse(expr), {"X": X.contiguous()})
    program = program_for(bound, frozenset())
    with Operations() as seen:
        result = program.function(X.contiguous(), *program.lengths_in(bound))
    assert result.tolist() == [4096.0] * 3
    assert "_to_copy" not in seen.names


@pytest.mark.parametrize("expr", ["Y[i] = max(X[i,j])", "Y[j] = min(X[i,j])"])
def test_the_first_of_equal_winners_has_the_gradient_and_a_nan_wins(expr: str) -> None:
    X = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 5.0, torch.nan], [1.0, 3.0, 0.0]], requires_grad=True)
    grad = torch.autograd.grad(insum(expr, X=X).sum(), X)[0]
    rows = [[0, 1, 0], [1, 0, 0], [0, 1, 0]] if "max" in expr else [[0, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert grad.tolist() == rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("low", [0, -1])
def test_what_is_scattered_competes_with_infinite_products_too(low: int, reduction: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    index, values = torch.randint(low, 6, (20,)), torch.randn(20, 3).to(dtype)
    index[index == 4] = 5  # so that no product reaches row 4
    values[index == 0, 0] = -torch.inf if reduction == "max" else torch.inf
    values[(index == 1).nonzero()[0, 0], 1] = torch.nan
    values.requires_grad_()
    expected, gradient = torch.zeros(6, 3, dtype=dtype), torch.zeros(20, 3, dtype=dtype)
    for row in range(6):
        own = (index == row).nonzero()[:, 0]
        if len(own):
            best, place = getattr(values.detach()[own], reduction)(0)
            expected[row] = best
            gradient[own[place], torch.arange(3)] = 1
    for _ in range(4):  # recorded, and then replayed
        result = insum(f"Y[G[p],c] = {reduction}(X[p,c])", X=values, G=index, size=(6, 3))
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0)
        (found,) = torch.autograd.grad(result, values, torch.ones_like(result))
        torch.testing.assert_close(found, gradient, rtol=0, atol=0)


def test_what_a_negative_position_hides_is_hidden_once_and_a_factor_beside_it_too() -> None:
    class Wheres(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += function.overloadpacket is torch.ops.aten.where
            return function(*args, **(kwargs or {}))

    P = torch.tensor([[0, -1], [2, 0], [-1, 2]])
    X, V = torch.arange(6.0, dtype=torch.float64).reshape(3, 2), torch.tensor([1.0, torch.nan, 2], dtype=torch.float64)
    for text, most in (("Y[P[i,c],c] += X[i,c]", 1), ("Y[P[i,c],c] += X[i,c] * V[i]", 3)):
        tensors = {"P": P, "X": X, **({"V": V} if "V" in text else {})}
        tensors["P"] = P if "V" not in text else torch.tensor([[0, -1], [-1, -1], [-1, 2]])
        bound = bind(parse(text), tensors, (3, 2))
        program = program_for(bound, frozenset({"P"}))
        with Wheres() as wheres:
            result = program.function(*[tensors[name] for name in placeholders(bound)], *program.lengths_in(bound))
        expected = torch.zeros(3, 2, dtype=torch.float64)
        for row in range(3):
            for column in range(2):
                if (place := int(tensors["P"][row, column])) >= 0:
                    expected[place, column] += X[row, column] * (V[row] if "V" in text else 1)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert wheres.count <= most


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("meta"), torch.device("meta", 0)], ids=str)
def test_a_program_has_memory_where_its_graph_says(device: torch.device) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.zeros, ((2,),), {"device": device}))
    made = compiled(graph)()
    assert made.device == torch.zeros(2, device=device).device
    assert made.shape == (2,)
