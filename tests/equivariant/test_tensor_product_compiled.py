"""Tensor products whose first call is compiled: their tables are ready where the layer is."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from insum_ops import tensor_product
from insum_ops.compiler import OperandError
from insum_ops.equivariant import layers, product
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch's, while it traces

IRREPS = "4x0e+4x1o", "1x0e+1x1o", "4x0e+4x1o"
CHANNELWISE = [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True), (0, 1, 1, "uvu", True)]


def _graph(call, *inputs: Tensor) -> list[str]:
    """The operations of a compiled call."""
    names: list[str] = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(*inputs)
    return names


@pytest.mark.sampled
@pytest.mark.parametrize(
    "remade", [lambda layer: layer, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("kind", ["fully connected", "channelwise"])
def test_a_compiled_call_copies_no_tables(kind, is_shared, remade, monkeypatch):
    """They would be copied, and converted, in every step."""
    monkeypatch.setattr(layers, "has_kernels", lambda device: True)  # as on a GPU
    options = {} if is_shared else {"shared_weights": False, "internal_weights": False}
    make = FullyConnectedTensorProduct if kind == "fully connected" else TensorProduct
    layer = remade(make(*IRREPS, *([] if make is FullyConnectedTensorProduct else [CHANNELWISE]), **options))
    weights = [] if is_shared else [torch.randn(5, layer.weight_numel)]
    found = _graph(layer, torch.randn(5, 16), torch.randn(5, 4), *weights)
    assert [name for name in found if "format_value" in name or "insum_ops" in name]
    assert not [name for name in found if name == "to" or "_to_copy" in name]


def test_a_function_whose_first_call_is_exported_reads_its_irreps():
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return tensor_product(x, y, weight, irreps_in1=IRREPS[0], irreps_in2=IRREPS[1], irreps_out=IRREPS[2])

    product._products.clear()
    product._cached_product.cache_clear()
    x, y, layer = torch.randn(5, 16), torch.randn(5, 4), FullyConnectedTensorProduct(*IRREPS)
    program = torch.export.export(Layer(), (x, y, layer.weight.detach())).module()
    torch.testing.assert_close(program(x, y, layer.weight.detach()), layer(x, y).detach())


def test_a_function_whose_first_call_is_compiled_reads_its_irreps():
    torch._dynamo.reset()
    product._products.clear()
    x, y, weight = torch.randn(5, 16), torch.randn(5, 4), torch.randn(64, requires_grad=True)
    call = lambda *irreps: tensor_product(
        x, y, weight, irreps_in1=irreps[0], irreps_in2=irreps[1], irreps_out=irreps[2]
    )
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*IRREPS).sum(), weight)
    torch.testing.assert_close(found, torch.autograd.grad(call(*IRREPS).sum(), weight))
    remedy = "write multiplicities, degrees and parities, as in '16x0e + 8x1o'"
    words = f"irreps_in1 is '4q', which e3nn can't read as irreps; {remedy}"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(words)):
        compiled("4q", *IRREPS[1:])
    with pytest.raises(OperandError, match=f"^{re.escape(words)}$"):
        torch.compile(call, backend="aot_eager")("4q", *IRREPS[1:])
