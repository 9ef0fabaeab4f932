"""The routes of a statement: one kernel, several smaller statements, or torch's own operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pretended_clock import pretended_clock
from statements import IS_INTERPRETED

from insum_ops import explain, insum, tune
from insum_ops.compiler.planning.device import H200, described_as
from insum_ops.compiler.planning.split import split
from insum_ops.compiler.routes import choice
from insum_ops.compiler.routes.choice import KERNEL, STATEMENTS, TORCH, fastest_route
from insum_ops.compiler.routes.grouped import GroupedRunner, RunnerByCapture, RunnerByIndex, groupings_of
from insum_ops.compiler.routes.prepared import prepare
from tests.tolerances import TOLERANCE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = replace(H200, vector_flops=1e6, tensor_flops=1e6)  # where the small tensors of a test are much work
CHAIN = "Y[i,l] += A[i,j] * B[j,k] * C[k,l]"


def error(result, expected):
    """Of all elements together: a sum near zero is not exact to the last place."""
    return float((result.double() - expected).norm() / expected.norm())


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    sizes = {"A": (17, 9), "B": (9, 12), "C": (12, 20)}
    return {name: torch.randn(size, dtype=torch.float64, device=DEVICE) for name, size in sizes.items()}


@pytest.fixture
def slow():
    with described_as(SLOW):
        yield


@pytest.mark.every_route
def test_a_chain_in_steps_equals_the_product_of_its_matrices(tensors, slow):
    A, B, C = tensors.values()
    torch.testing.assert_close(insum(CHAIN, **tensors), A @ B @ C)
    seed = torch.ones(17, 20, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(insum(f"{CHAIN} * 3", Y=seed, **tensors), 3 * A @ B @ C + 1)


@pytest.mark.every_route
def test_a_chain_in_steps_has_gradients_of_any_order(tensors, slow):
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    chain, is_fast = lambda A, B, C: insum(CHAIN, A=A, B=B, C=C), IS_INTERPRETED  # a minute otherwise
    assert torch.autograd.gradcheck(chain, leaves, fast_mode=is_fast)
    assert torch.autograd.gradgradcheck(chain, leaves, fast_mode=is_fast)


@pytest.mark.every_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_chain_in_steps_is_as_precise_as_torch_in_steps(tensors, slow, dtype):
    A, B, C = (tensor.to(dtype) for tensor in tensors.values())
    expected = A.double() @ B.double() @ C.double()
    assert error(insum(CHAIN, A=A, B=B, C=C), expected) < TOLERANCE[dtype]["rtol"]


@pytest.mark.every_route
def test_gathers_and_scatters_go_with_their_factors(slow):
    torch.manual_seed(0)
    X, W, V = (torch.randn(size, dtype=torch.float64, device=DEVICE) for size in ((8, 6), (6, 7), (7, 5)))
    rows, places = (torch.randint(0, 8, (30,), device=DEVICE) for _ in range(2))
    text = "Y[P[p],c] += X[I[p],a] * W[a,b] * V[b,c]"
    expected = torch.zeros(8, 5, dtype=torch.float64, device=DEVICE).index_add(0, places, X[rows] @ W @ V)
    torch.testing.assert_close(insum(text, size=(8, 5), X=X, W=W, V=V, I=rows, P=places), expected)


@pytest.mark.every_route
def test_what_is_absent_contributes_nothing_however_many_factors_there_are(slow):
    """In steps the 0 of an absent row would meet a NaN."""
    X = torch.ones(4, 3, dtype=torch.float64, device=DEVICE)
    W, V = torch.ones(3, 3, dtype=torch.float64, device=DEVICE), torch.ones(2, 3, 5, dtype=torch.float64, device=DEVICE)
    V[1] = torch.nan
    rows = torch.tensor([2, -1], device=DEVICE)
    result = insum("Y[p,c] += X[I[p],a] * W[a,b] * V[p,b,c]", X=X, W=W, V=V, I=rows)
    torch.testing.assert_close(result, torch.tensor([[9.0], [0.0]], dtype=torch.float64, device=DEVICE).expand(2, 5))


RELATIONS = "Y[D[e],o] += V[e] * X[S[e],c] * W[R[e],c,o]"


@pytest.fixture
def gathered_last():
    """Several statements win wherever they take part."""
    with described_as(replace(H200, bandwidth=1e3)), pretended_clock(choice) as contests:
        contests.runs = 0
        contests.winner = lambda _, ways: next(way for way in (STATEMENTS, KERNEL, *ways) if way in ways)
        yield contests


def split_ones(contests):
    """The statements that were evaluated as several."""
    return [key.statement for key, ways in contests if STATEMENTS in ways]


def relations(dtype=torch.float64):
    source = torch.Generator().manual_seed(0)
    sizes = dict(V=(90,), X=(7, 5), W=(2, 5, 4))
    given = {name: torch.randn(size, generator=source, dtype=torch.float64) for name, size in sizes.items()}
    index = {name: torch.randint(0, count - 1, (90,), generator=source) for name, count in dict(D=7, S=7, R=2).items()}
    return {name: tensor.to(DEVICE, dtype) for name, tensor in given.items()}, {
        name: tensor.to(DEVICE) for name, tensor in index.items()
    }


@pytest.mark.every_route
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_factors_that_are_multiplied_before_they_are_gathered(gathered_last, dtype):
    """No entry points at the last node and the last relation, which are NaN."""
    given, index = relations(dtype)
    V, X, W = (tensor.double() for tensor in given.values())
    D, S, R = index.values()
    rows = torch.einsum("e,ec,eco->eo", V, X[S], W[R])
    given["X"][-1] = given["W"][-1] = torch.nan
    seed = torch.ones(7, 4, dtype=dtype, device=DEVICE)
    for _ in range(3):  # recorded, then replayed
        result = insum(RELATIONS, size=(7, 4), **given, **index)
        expected = torch.zeros(7, 4, dtype=torch.float64, device=DEVICE).index_add(0, D, rows)
        torch.testing.assert_close(result.double(), expected, **TOLERANCE[dtype])
    result = insum(f"{RELATIONS} * 2", Y=seed, **given, **index)
    torch.testing.assert_close(result.double(), 2 * expected + 1, **TOLERANCE[dtype])
    if IS_INTERPRETED:
        assert RELATIONS in split_ones(gathered_last)[0]
        steps = explain(RELATIONS, size=(7, 4), **given, **index).split.steps
        assert [str(step) for step in steps] == [
            "Z[u,v,o] += X[u,c] * W[v,c,o]",
            "Y[D[e],o] += V[e] * Z[S[e],R[e],o]",
        ]


@pytest.mark.every_route
def test_what_is_multiplied_before_it_is_gathered_has_gradients(gathered_last):
    """No entry points at the last node and the last relation, whose NaN no gradient meets."""
    given, index = relations()
    given["X"][-1] = given["W"][-1] = torch.nan
    leaves = [given[name].requires_grad_() for name in "VXW"]
    (V, X, W), (D, S, R) = leaves, index.values()
    upstream = torch.linspace(-1, 1, 28, dtype=torch.float64, device=DEVICE).view(7, 4)
    rows = torch.einsum("e,ec,eco->eo", V, X[S], W[R])
    expected = torch.autograd.grad(rows, leaves, upstream[D])
    result = insum(RELATIONS, size=(7, 4), **given, **index)
    torch.testing.assert_close(torch.autograd.grad(result, leaves, upstream), expected)
    if IS_INTERPRETED:
        assert any("dY[" in statement for statement in split_ones(gathered_last))


@pytest.mark.every_route
def test_padding_keeps_factors_from_being_multiplied_first(gathered_last):
    given, index = relations()
    index["S"][::3] = -1
    given["W"][-1] = torch.nan
    index["R"][::3] = 1  # of a product that is absent
    V, X, W = (tensor.nan_to_num() for tensor in given.values())
    D, S, R = index.values()
    rows = torch.einsum("e,ec,eco->eo", V * (S >= 0), X[S.clamp(0)], W[R])
    expected = torch.zeros(7, 4, dtype=torch.float64, device=DEVICE).index_add(0, D, rows)
    torch.testing.assert_close(insum(RELATIONS, size=(7, 4), **given, **index), expected)
    assert not split_ones(gathered_last)


@pytest.mark.cpu
def test_tensors_on_the_way_need_room_and_all_experts_for_all_tokens_are_not_tried(monkeypatch):
    tensors = [torch.empty(size) for size in ((90,), (7, 5), (2, 5, 4))]
    tensors += [torch.zeros(90, dtype=torch.int64) for _ in range(3)]
    statement = prepare(RELATIONS, "V,X,W,D,S,R", (7, 4), tensors, None)
    steps = split(statement.bound, replace(H200, bandwidth=1e3), False)
    call = choice._Call(statement, statement.variant(tensors), tensors, None, None, None, steps, ())
    way = replace(groupings_of(statement, tensors)[0], gain=3 * steps.estimate)
    assert choice._statements(call) is not None
    assert choice._statements(replace(call, ways=(way,))) is None
    monkeypatch.setattr(choice, "_has_room", lambda device, held: held < 7 * 2 * 4 * 4)
    assert choice._statements(call) is None


def test_explain_shows_the_steps(tensors, slow):
    explained = explain(CHAIN, **{name: tensor.to("meta") for name, tensor in tensors.items()})
    assert explained.route == STATEMENTS
    assert explained.source is None
    assert [str(step) for step in explained.split.steps] == ["T[j,l] += B[j,k] * C[k,l]", "Y[i,l] += A[i,j] * T[j,l]"]
    assert (
        "several statements\n    T[j,l] += B[j,k] * C[k,l]\n    Y[i,l] += A[i,j] * T[j,l]\n\n"
        "kernel\n    none: it is evaluated as several statements in turn; explain each for its kernel"
    ) in str(explained)


def test_explain_shows_one_kernel_where_steps_save_nothing(tensors):
    explained = explain(CHAIN, **{name: tensor.to("meta") for name, tensor in tensors.items()})
    assert explained.route == KERNEL
    assert explained.split is None
    assert explained.source is not None


@pytest.mark.cpu
@pytest.mark.parametrize("has_room", [True, False])
def test_a_choice_is_timed_once_for_all_lengths_and_needs_room_each_time(monkeypatch, has_room):
    """Where a timer, which is not there, says that torch's operations are the fastest."""
    room, text = iter([True, has_room]), "Y[i,j] += A[i,k] * B[k,j]"
    monkeypatch.setattr(choice, "_fits_in_memory", lambda bound, wants_winners: next(room))
    B = torch.rand(7, 3, dtype=torch.float64)
    with pretended_clock(choice) as contests:
        contests.runs, contests.winner = 0, TORCH
        for rows, is_torch in ((501, True), (502, has_room)):
            tensors = [torch.rand(rows, 7, dtype=torch.float64), B]
            statement = prepare(text, "A,B", None, tensors, None)
            runner = fastest_route(statement, statement.variant(tensors), tensors, None, None, lambda *_: "kernel")
            assert (runner != "kernel") == is_torch
            if is_torch:
                torch.testing.assert_close(runner(tensors, None), tensors[0] @ B)
    assert len(contests) == 1


@pytest.mark.cpu
@pytest.mark.parametrize("new", [choice.KERNEL, choice.GROUPED])
def test_a_graph_may_take_another_route_than_eager_calls(new):
    """Where a timer, which is not there, finds tables slow where a graph has to look after them."""
    chosen = {"route of": choice.GROUPED, choice.NEW_INDEX: new, choice.CAPTURED: choice.KERNEL}
    tensors = [torch.rand(700, 5), torch.randint(0, 9, (700,))]
    statement = prepare("Y[G[p],c] += X[p,c]", "X,G", (9, 5), tensors, None)
    with pretended_clock(choice) as contests:
        contests.runs = 0
        contests.winner = lambda key, _: next(
            (own for what, own in chosen.items() if key.statement.startswith(what)), ""
        )
        runner = fastest_route(statement, statement.variant(tensors), tensors, None, None, lambda *_: "kernel")
    assert isinstance(runner, RunnerByCapture)
    assert runner.captured == "kernel"
    assert isinstance(runner.eager, GroupedRunner if new == choice.GROUPED else RunnerByIndex)


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is timed without a GPU")
class TestTimed:
    """What was timed, on a GPU."""

    @pytest.fixture(autouse=True)
    def timing(self, monkeypatch, tmp_path):
        monkeypatch.setenv("INSUM_TUNE", "default")
        monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    def test_a_timed_product_is_right_by_whatever_route(self, dtype):
        torch.manual_seed(0)
        A, B = (torch.randn(size, dtype=dtype, device=DEVICE) for size in ((300, 210), (210, 260)))
        text = "Y[i,j] += A[i,k] * B[k,j]"
        expected = A.double() @ B.double()
        for _ in range(4):  # the last are replayed
            result = insum(text, A=A, B=B)
            assert result.dtype is dtype
            assert error(result, expected) < TOLERANCE[dtype]["rtol"]
        assert explain(text, A=A, B=B).route in (KERNEL, TORCH)

    def test_a_gathered_and_scattered_product_in_half_precision(self):
        torch.manual_seed(0)
        A, B = (torch.randn(size, dtype=torch.float16, device=DEVICE) for size in ((300, 200), (64, 48)))
        rows, places = torch.randperm(300, device=DEVICE), torch.randint(0, 200, (64,), device=DEVICE)
        expected = torch.zeros(300, 48, dtype=torch.float64, device=DEVICE)
        expected.index_add_(0, rows, A[:, places].double() @ B.double())
        for _ in range(4):
            result = insum("C[D[y],x] += A[y,E[r]] * B[r,x]", A=A, B=B, D=rows, E=places, size=(300, 48))
            assert error(result, expected) < TOLERANCE[torch.float16]["rtol"]

    def test_tune_lists_the_other_routes(self):
        A = torch.randn(200, 200, device=DEVICE)
        tuned = tune("Y[i,j] += A[i,k] * B[k,j]", A=A, B=A)
        assert TORCH in str(tuned)
        times = [timing.milliseconds for timing in tuned.timings if timing.milliseconds is not None]
        assert all(time > 0 for time in times)

    def test_a_chain_of_large_matrices_is_never_one_kernel(self):
        torch.manual_seed(0)
        A, B, C = (torch.randn(300, 300, device=DEVICE) for _ in range(3))
        expected = A.double() @ B.double() @ C.double()
        assert error(insum(CHAIN, A=A, B=B, C=C), expected) < TOLERANCE[torch.float32]["rtol"]
        assert explain(CHAIN, A=A, B=B, C=C).route in (STATEMENTS, TORCH)
        assert tune(CHAIN, A=A, B=B, C=C).best.candidate in (STATEMENTS, TORCH)
