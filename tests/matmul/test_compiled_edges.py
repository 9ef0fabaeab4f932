"""Products over the edges of a graph whose first call is compiled, with each reduction."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_matches
from torch._dynamo.testing import CompileCounterWithBackend

from insum_ops import sddmm, spmm

pytestmark = pytest.mark.cpu


def reduced(edges, weight, x, targets, reduce):
    """The rows of a product over edges, one by one."""
    rows = [[] for _ in range(targets)]
    for at, (source, target) in enumerate(edges.T.tolist()):
        rows[target].append(weight[at] * x[source])
    combine = {"mean": lambda row: row.mean(0), "max": lambda row: row.amax(0), "min": lambda row: row.amin(0)}[reduce]
    return torch.stack([combine(torch.stack(row)) if row else torch.zeros_like(x[0]) for row in rows])


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_every_reduction_is_compiled_at_five_sizes_and_trains(reduce):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(
        lambda x, edges, weight: spmm((edges, weight, (len(x), 9)), x, reduce=reduce), fullgraph=True, backend=counter
    )
    for n in (1, 23, 13, 32, 5):
        torch.manual_seed(n)
        x = torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(3 * n, dtype=torch.float64, requires_grad=True)
        edges = torch.stack([torch.randint(n, (3 * n,)), torch.randint(9, (3 * n,))])
        y, expected = call(x, edges, weight), reduced(edges, weight, x, 9, reduce)
        assert_matches(y, expected)
        upstream = torch.randn_like(expected)
        for one, other in zip(*(torch.autograd.grad(made, [x, weight], upstream) for made in (y, expected))):
            assert_matches(one, other)
    assert counter.frame_count == 2


def test_the_mean_of_a_compiled_call_refuses_a_node_that_is_not_there():
    torch._dynamo.reset()
    call = torch.compile(lambda x, edges: spmm((edges, None), x, reduce="mean"), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"^targets\[1\] is 7, outside N dimension 0, which has size 2"):
        call(torch.ones(2, 3), torch.tensor([[0, 1], [1, 7]]))
    with pytest.raises(IndexError, match=r"^edge_index\[0, 1\] is 7 but there are 2 sources; "):
        call(torch.ones(2, 3), torch.tensor([[0, 7], [1, 1]]))


def test_a_compiled_mean_over_a_batch_keeps_half_precision():
    torch._dynamo.reset()
    edges, x = torch.tensor([[0, 1, 1], [1, 1, 0]]), torch.randn(2, 3, 2, 5)
    call = torch.compile(lambda x: spmm((edges, None), x, reduce="mean"), fullgraph=True, backend="aot_eager")
    y = call(x.half())
    assert y.dtype == torch.float16
    assert_matches(y, torch.stack([x[..., 1, :], x.mean(-2)], -2).half().double())


def test_a_compiled_sample_of_more_sources_than_targets():
    torch._dynamo.reset()
    X, Y = torch.randn(2, 3, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    edges = torch.tensor([[8, 0, 5], [1, 0, 1]])
    call = torch.compile(lambda X, Y: sddmm((edges, None), X, Y), fullgraph=True, backend="aot_eager")
    assert_matches(call(X, Y), (X[edges[1]] * Y[edges[0]]).sum(1))
