"""The FX program of a statement: few operations, small intermediates, memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import LoopNest
from torch import Tensor, fx

from insum_ops import insum
from insum_ops.compiler.binding.bind import Bound, bind
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.reference.lower import lower, placeholders

pytestmark = pytest.mark.cpu


def bound_of(expr: str, tensors: dict[str, Tensor], size: Any = None) -> Bound:
    return bind(parse(expr), tensors, size)


def program(expr: str, padded: frozenset[str] | None = None, size: Any = None, **tensors: Tensor) -> fx.GraphModule:
    return lower(bound_of(expr, tensors, size), padded)


def operations(module: fx.GraphModule) -> list[str]:
    """The names of the torch functions and methods that a program calls, in order."""
    calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_method")]
    return [node.target if node.op == "call_method" else node.target.__name__ for node in calls]


def run(expr: str, size: Any = None, **tensors: Tensor) -> Tensor:
    bound = bound_of(expr, tensors, size)
    result = lower(bound)(*(tensors[name] for name in placeholders(bound)))
    assert isinstance(result, Tensor)
    return result


def largest_intermediate(module: fx.GraphModule, **tensors: Tensor) -> int:
    """Elements of the largest tensor that a program makes on its way."""
    largest = 0

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            nonlocal largest
            if n.op != "placeholder" and isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    arguments = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    Watch(module).run(*(tensors[name] for name in arguments))
    return largest


A, B, V = torch.rand(3, 4), torch.rand(4, 5), torch.rand(4)
E = torch.tensor([2, 0, 1, 2])
NONE: frozenset[str] = frozenset()


def test_a_plain_product_is_one_einsum() -> None:
    assert operations(program("C[i,j] += A[i,k] * B[k,j]", A=A, B=B)) == ["einsum", "contiguous"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_that_is_not_summed_is_moved_and_multiplied_as_it_is(dtype: torch.dtype) -> None:
    """It is rounded once either way: to the last bit what float32 gives, rounded."""
    torch.manual_seed(0)
    X, Z, places = torch.randn(5, 7).to(dtype), torch.randn(5, 3).to(dtype), torch.tensor([4, -1, 0, 4])
    statements = {
        "Y[j,i] += X[i,j]": X.T,
        "Y[i,j,k] += X[i,j] * Z[i,k]": (X.float()[:, :, None] * Z.float()[:, None]).to(dtype),
        "Y[i,j] += 0.3 * X[i,j]": (0.3 * X.float()).to(dtype),
        "Y[p,j] += X[P[p],j]": torch.where(places[:, None] < 0, 0, X[places]),
        "Y[i] += X[i,i]": X.diagonal(),
    }
    for text, expected in statements.items():
        operands = {"X": X[:, :5] if "i,i" in text else X, "Z": Z, "P": places}
        read = {name: operand for name, operand in operands.items() if f"{name}[" in text}
        assert torch.equal(insum(text, **read), expected), text
        if "P" not in text:
            assert "to" not in operations(program(text, **read))


def test_what_is_no_product_is_a_copy_and_no_view_of_an_operand() -> None:
    square = torch.rand(3, 3)
    for text in ("C[i] += A[i,i]", "C[j,i] += A[i,j]", "C[i,j] += A[i,j]", "C[j] += A[0,j]", "C[j] += A[i,j]"):
        result = insum(text, A=square)
        assert result.untyped_storage().data_ptr() != square.untyped_storage().data_ptr()
        assert result.is_contiguous()


def test_a_gather_is_one_index_select() -> None:
    found = program("C[p,j] = A[E[p],j]", NONE, A=A, E=E)
    assert operations(found) == ["index_select", "contiguous"]


def test_a_scatter_is_one_index_add() -> None:
    found = program("C[E[p]] += V[p]", NONE, V=V, E=E, size=(3,))
    assert operations(found) == ["zeros", "index_add_"]


def test_only_index_tensors_that_may_hold_a_negative_value_are_masked() -> None:
    tensors = {"A": A, "V": V, "E": E, "F": E}
    for padded, masks in ((NONE, 0), (frozenset({"F"}), 1), (None, 2)):
        found = operations(program("C[E[p],j] += V[p] * A[F[p],j]", padded, (3, 4), **tensors))
        assert found.count("ge") == masks
        assert bool({"where", "clamp", "cat"} & set(found)) == (masks > 0)


def test_an_index_that_stands_twice_is_compared_once() -> None:
    found = operations(program("C[E[p]] += A[E[p],F[p]] * V[E[p]]", A=A, V=V, E=E, F=E, size=(3,)))
    assert found.count("ge") == 2


def test_the_arguments_are_what_is_read_and_then_the_seed() -> None:
    tensors = {"V": V, "C": torch.zeros(3), "E": E}
    assert placeholders(bound_of("C[E[p]] += V[p]", tensors)) == ("E", "V", "C")
    assert placeholders(bound_of("C[E[p]] = V[p]", tensors)) == ("E", "V")


def test_nothing_is_computed_where_nothing_is_summed() -> None:
    assert operations(program("C[i] += A[i,k] * X[k,l]", A=A, X=torch.rand(4, 0))) == ["zeros"]
    seeded = program("C[i] += A[i,k] * X[k,l]", A=A, X=torch.rand(4, 0), C=torch.rand(3))
    assert operations(seeded) == ["to"]


def test_three_factors_are_contracted_in_pairs() -> None:
    A, B, C = torch.rand(50, 2), torch.rand(2, 60), torch.rand(60, 2)
    module = program("D[i,l] += A[i,j] * B[j,k] * C[k,l]", A=A, B=B, C=C)
    assert operations(module).count("einsum") == 2
    assert largest_intermediate(module, A=A, B=B, C=C) == 100  # A (B C), never A B


def test_sums_are_taken_before_scattering() -> None:
    E, V, B = torch.randint(0, 9, (20,)), torch.rand(20, 30), torch.rand(30, 2)
    module = program("C[E[p],n] += V[p,k] * B[k,n]", NONE, (9, 2), E=E, V=V, B=B)
    assert largest_intermediate(module, E=E, V=V, B=B) == 20 * 2


def test_hiding_what_no_product_reads_copies_a_factor_but_grows_none() -> None:
    """E[p] = -1 hides V[p,k], and all of B if no p is left; neither mask is spread over p, k and n at once."""
    E, V, B = torch.randint(0, 9, (20,)), torch.rand(20, 30), torch.rand(30, 2)
    module = program("C[E[p],n] += V[p,k] * B[k,n]", size=(9, 2), E=E, V=V, B=B)
    assert largest_intermediate(module, E=E, V=V, B=B) == V.numel()


def test_only_what_is_used_is_gathered() -> None:
    B, E = torch.rand(6, 1000, 50), torch.randint(0, 1000, (7,))
    module = program("C[p,n] = B[2,E[p],n]", B=B, E=E)
    assert largest_intermediate(module, B=B, E=E) == 1000 * 50  # B[2], which is a view


@pytest.mark.parametrize("expr", ["C[i,j] = A[i,j]", "C[j,i] = A[i,j]", "C[i] = A[i,0]", "C[i] += D[i] * A[i,0]"])
def test_the_result_is_memory_of_its_own(expr: str) -> None:
    tensors = {"A": A.clone(), "D": torch.ones(3)} if "D" in expr else {"A": A.clone()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    result = run(expr, **tensors)
    assert result.is_contiguous()
    result.fill_(torch.nan)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name])


def test_a_seed_is_copied_not_changed() -> None:
    C = torch.rand(3)
    before = C.clone()
    result = run("C[E[p]] += V[p]", C=C, E=E, V=V)
    assert torch.equal(C, before)
    assert torch.equal(result, before.index_add(0, E, V))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    A = torch.full((1, 4096), 0.1, dtype=dtype)
    expected = A.double().sum(1).to(dtype)
    assert torch.equal(run("C[i] += A[i,k]", A=A), expected)


def test_a_program_is_plain_torch() -> None:
    module = program("C[E[p],n] += V[p] * A[E[p],n]", A=A, V=V, E=E, size=(3, 4))
    for node in module.graph.nodes:
        assert node.op in ("placeholder", "call_function", "call_method", "output")
    assert not dict(module.named_parameters())


def test_a_program_can_be_compiled() -> None:
    tensors = {"A": A, "V": V, "E": E}
    bound = bound_of("C[E[p],n] += V[p] * A[E[p],n]", tensors, (3, 4))
    arguments = [tensors[name] for name in placeholders(bound)]
    compiled = torch.compile(lower(bound), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), lower(bound)(*arguments))


@pytest.mark.parametrize(
    ("one", "other"),
    [("A", "a"), ("rowMajor", "row_major"), ("range", "range_1"), ("\u00e9", "_"), ("tensor0_", "Tensor0_")],
)
def test_tensors_whose_names_torch_fx_would_spell_alike_stay_apart(one: str, other: str) -> None:
    for first, second in ((one, other), (other, one)):
        tensors = {first: torch.full((2,), 3.0), second: torch.full((2,), 5.0)}
        assert run(f"C[i] = {first}[i] * {second}[i]", **tensors).tolist() == [15, 15]


def test_more_index_names_than_letters() -> None:
    """Of two factors; of more than two, each pair has letters of its own."""
    left, right = (",".join(f"i{k}" for k in range(first, last)) for first, last in ((0, 27), (26, 53)))
    with pytest.raises(UnsupportedError) as caught:
        run(f"C[()] += A[{left}] * B[{right}]", A=torch.ones([1] * 27), B=torch.ones([1] * 27))
    assert str(caught.value) == "the statement uses 53 index names, at most 52 can be contracted"
    factors = " * ".join(f"A[i{k},i{k + 1}]" for k in range(60))
    assert run(f"C[()] += {factors}", A=torch.full((2, 2), 0.5)) == 2


@pytest.mark.parametrize(
    ("expr", "size"),
    [
        ("C[x,p,n] += V[p,q] * B[K[p,q],n]", (2, 4, 3)),  # an index that no factor has
        ("C[p,n] += V[p,0] * B[K[p,0],n]", (4, 3)),  # nothing to sum
        ("C[n] += V[p,q] * B[K[p,q],n]", (3,)),  # two indices to sum
        ("C[q,n] += V[p,q] * B[K[p,q],n]", (5, 3)),  # the first index summed
        ("C[p] += V[p,q] * B[K[p,q],n]", (4,)),
        ("C[p,q] += V[p,q] * B[K[p,q],n]", (4, 5)),
        ("C[n,p] += B[K[p,q],n] * 0.5 * V[p,q]", (3, 4)),
    ],
)
def test_weighted_rows_and_what_only_looks_like_them(expr: str, size: tuple[int, ...]) -> None:
    V, B = torch.randn(4, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    K = torch.randint(-1, 6, (4, 5))
    tensors = {"V": V, "B": B, "K": K}
    expected = LoopNest(expr, tensors, size).result().value
    torch.testing.assert_close(insum(expr, size=size, **tensors), expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_scattered_outer_product_that_is_summed_by_columns():
    G, A, B = torch.tensor([2, 0, 2]), torch.randn(3).requires_grad_(), torch.randn(5).requires_grad_()
    Y = insum("Y[G[i],j] += A[i] * B[j]", G=G, A=A, B=B, size=(4, 5))
    upstream = torch.randn(4, 5)
    dA, dB = torch.autograd.grad(Y, (A, B), upstream)
    torch.testing.assert_close(dA, upstream[G] @ B)
    torch.testing.assert_close(dB, A @ upstream[G])


def test_a_name_that_stands_twice_is_a_view_of_the_diagonal() -> None:
    X = torch.randn(3, 4, 4, dtype=torch.float64)
    traces = program("Y[b] += X[b,i,i]", NONE, X=X)
    assert "index" not in " ".join(operations(traces))
    assert torch.allclose(traces(X), X.diagonal(dim1=1, dim2=2).sum(1))
    copied = program("Y[b,i] = X[i,b,b,i]", NONE, X=X.new_ones(4, 3, 3, 4).cumsum(0).cumsum(3))
    tensor = X.new_ones(4, 3, 3, 4).cumsum(0).cumsum(3)
    assert torch.equal(copied(tensor), torch.einsum("ibbi->bi", tensor))
    kept = tensor.clone()
    copied(tensor).zero_()
    assert torch.equal(tensor, kept)


def test_places_in_several_dimensions_are_added_by_one_position() -> None:
    torch.manual_seed(0)
    G, H, V = torch.randint(0, 4, (50,)), torch.randint(0, 3, (50,)), torch.randn(50, 5, dtype=torch.float64)
    expected = torch.zeros(4, 3, 5, dtype=torch.float64).index_put((G, H), V, accumulate=True).permute(2, 0, 1)
    found = lower(bind(parse("Y[c,G[p],H[p]] += V[p,c]"), {"V": V, "G": G, "H": H}, (5, 4, 3)), NONE)
    assert "index_add_" in operations(found)
    torch.testing.assert_close(found(G, H, V), expected)
    Y = torch.randn(5, 3, 4, dtype=torch.float64).transpose(1, 2)
    kept = Y.clone()
    seeded = lower(bind(parse("Y[c,G[p],H[p]] += V[p,c]"), {"V": V, "G": G, "H": H, "Y": Y}), NONE)
    torch.testing.assert_close(seeded(G, H, V, Y), kept + expected)
    assert torch.equal(Y, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_maximum_of_one_factor_is_one_operation_in_its_own_precision(dtype: torch.dtype) -> None:
    X = torch.randn(6, 7, dtype=dtype)
    X[2, 3] = torch.nan
    found = program("Y[i] = max(X[i,j])", NONE, X=X)
    assert "to" not in operations(found)
    assert torch.equal(found(X).nan_to_num(9), X.amax(1).nan_to_num(9))
    G = torch.tensor([0, 2, 2, 0, 3, 3])
    scattered = lower(bind(parse("Y[G[p],c] = min(X[p,c])"), {"X": X, "G": G}, (5, 7)), NONE)
    expected = torch.zeros(5, 7, dtype=dtype).scatter_reduce(0, G[:, None].expand(6, 7), X, "amin", include_self=False)
    torch.testing.assert_close(scattered(G, X), expected, equal_nan=True)
