"""Products recorded by make_fx with symbolic sizes and gradients inside, as nequip compiles, and run at other sizes.

Where kernels run, other statements stand in the graph than where torch's operations do.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from statements import DEVICE
from tolerances import assert_matches

from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct

pytestmark = pytest.mark.every_route

WIDE = "12x0e + 12x1o", "0e + 1o", "12x0e + 12x1o"
CHANNELWISE = [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True), (0, 1, 1, "uvu", True)]
OWN_WEIGHTS = {"shared_weights": False, "internal_weights": False}
LAYERS = {
    "mixed channels": lambda: FullyConnectedTensorProduct(*WIDE, **OWN_WEIGHTS),
    "uneven channels": lambda: FullyConnectedTensorProduct("12x0e + 5x1o", "0e + 1o", "7x0e + 12x1o", **OWN_WEIGHTS),
    "one channel": lambda: FullyConnectedTensorProduct("0e + 1o", "0e + 1o", "0e + 1o", **OWN_WEIGHTS),
    "channels apart": lambda: TensorProduct("8x0e + 8x1o", "0e + 1o", "8x0e + 8x1o", CHANNELWISE, **OWN_WEIGHTS),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11's own, while it traces an autograd.Function
@pytest.mark.parametrize("has_edges", [False, True], ids=["samples", "edges"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_a_recorded_product_runs_at_other_sizes(name, has_edges):
    layer = LAYERS[name]().to(DEVICE)

    def pass_both_ways(x, y, weight, src, dst):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, y, weight)]
        edges = {"src": src, "dst": dst, "num_nodes": x.shape[0]} if has_edges else {}
        z = layer(*leaves, **edges)
        grads = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        return [tensor.detach() for tensor in (z, *grads)]

    def operands(nodes, edges):
        shapes = (nodes if has_edges else edges, layer.irreps_in1.dim), (edges, layer.irreps_in2.dim)
        tensors = [torch.randn(shape, device=DEVICE) for shape in (*shapes, (edges, layer.weight_numel))]
        return *tensors, *(torch.randint(nodes, (edges,), device=DEVICE) for _ in range(2))

    recorded = make_fx(pass_both_ways, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*operands(5, 9))
    for sizes in ((7, 13), (5, 9), (3, 2)):
        tensors = operands(*sizes)
        for actual, expected in zip(recorded(*tensors), pass_both_ways(*tensors)):
            assert_matches(actual, expected.double())
