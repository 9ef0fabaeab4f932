"""Every public way to compute something, over objects that last: formats, graphs, clouds, layers.

`ENTRY_POINTS[name](dtype)` makes one with numbers of its own, the same each time, so that a fresh one has never been
called. Its function takes tensors alone; there are inputs for several callers, all of one layout, which differ in their
numbers and in whether positions hold a -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sparse_inputs import csr
from statements import DEVICE
from torch import Tensor

from insum_ops import insum, nn, sddmm, spmm
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

try:
    from e3nn import o3
except ImportError:  # an extra
    o3 = None

CALLERS = 4  # for whom there are inputs; of more, some have the same
FORMATS = (COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO)
SHAPE = [4, 5, 6]


@dataclass(frozen=True)
class EntryPoint:
    function: Callable[..., Tensor]
    inputs: Sequence[tuple[Tensor, ...]]  # of each caller
    parameters: Sequence[Tensor] = field(default=())  # that the function reads too
    owner: Any = None  # of what may be kept from call to call

    def of(self, caller: int) -> tuple[Tensor, ...]:
        return self.inputs[caller % len(self.inputs)]

    def run(self, caller: int) -> list[Tensor]:
        """The result without gradients, then the same with gradients of all that can have one."""
        given = self.of(caller)
        with torch.no_grad():
            plain = self.function(*given)
        learns = [tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor for tensor in given]
        result = self.function(*learns)
        asked = [tensor for tensor in (*learns, *self.parameters) if tensor.requires_grad]
        upstream = torch.linspace(-1, 1, result.numel(), dtype=result.dtype, device=result.device).view(result.shape)
        grads = torch.autograd.grad(result, asked, upstream, allow_unused=True)
        return [plain, result.detach(), *[grad for grad in grads if grad is not None]]


Maker = Callable[[torch.dtype], EntryPoint]
ENTRY_POINTS: dict[str, Maker] = {}


def _seeded(make: Maker) -> Maker:
    def made(dtype: torch.dtype) -> EntryPoint:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return make(dtype)

    return made


def _entry_point(name: str) -> Callable[[Maker], Maker]:
    def keep(make: Maker) -> Maker:
        ENTRY_POINTS[name] = _seeded(make)
        return make

    return keep


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    """The same numbers in every dtype."""
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, torch.float32).to(dtype)


def _matrix(dtype: torch.dtype) -> Tensor:
    """[12, 16], with empty rows, rows of different lengths and whole blocks of 4 x 4."""
    is_stored = torch.rand(3, 4).lt(0.5).repeat_interleave(4, 0).repeat_interleave(4, 1)
    return _random(12, 16, dtype=dtype) * is_stored.to(DEVICE)


def _made(form: type, A: Tensor) -> Any:
    return form.from_dense(A, block_size=(4, 4)) if form in (BlockCOO, BlockGroupCOO) else form.from_dense(A)


def _positions(length: int, extent: int, caller: int) -> Tensor:
    found = torch.randint(0, extent, (length,))
    if caller % 2:
        found[length // 2] = -1
    return found.to(DEVICE)


@_entry_point("insum gather")
def _gather(dtype: torch.dtype) -> EntryPoint:
    inputs = [(_random(10, 3, dtype=dtype), _positions(7, 10, caller)) for caller in range(CALLERS)]
    return EntryPoint(lambda X, at: insum("C[i,c] += X[I[i],c]", X=X, I=at), inputs)


@_entry_point("insum scatter")
def _scatter(dtype: torch.dtype) -> EntryPoint:
    inputs = [
        (_random(5, 3, dtype=dtype), _random(7, 3, dtype=dtype), _positions(7, 5, caller)) for caller in range(CALLERS)
    ]
    return EntryPoint(lambda C, X, at: insum("C[I[i],c] += X[i,c]", C=C, X=X, I=at), inputs)


@_entry_point("insum max")
def _max(dtype: torch.dtype) -> EntryPoint:
    inputs = [(_random(10, 3, dtype=dtype), _positions(7, 10, caller)) for caller in range(CALLERS)]
    return EntryPoint(lambda X, at: insum("C[c] = max(X[I[i],c])", X=X, I=at), inputs)


@_entry_point("insum min")
def _min(dtype: torch.dtype) -> EntryPoint:
    A = GroupCOO.from_dense(_matrix(dtype))
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint(lambda B: insum("C[m,n] = min(A[m,k] * B[k,n])", A=A, B=B), inputs, owner=A)


@_entry_point("insum by columns")
def _by_columns(dtype: torch.dtype) -> EntryPoint:
    """A format whose groups are of columns, and have to be arranged anew."""
    A = GroupCOO.from_dense(_matrix(dtype), group_dim=1)
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint(lambda B: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), inputs, owner=A)


def _with_format(form: type) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        A = _made(form, _matrix(dtype))
        inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
        return EntryPoint(lambda B: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), inputs, owner=A)

    return make


def _trained_values(form: type) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        A = _made(form, _matrix(dtype))
        inputs = [(_random(*A.values.shape, dtype=dtype), _random(16, 5, dtype=dtype)) for _ in range(CALLERS)]
        return EntryPoint(lambda AV, B: spmm(A.with_values(AV), B), inputs, owner=A)

    return make


for _form in FORMATS:
    ENTRY_POINTS[f"insum {_form.__name__}"] = _seeded(_with_format(_form))
    ENTRY_POINTS[f"spmm {_form.__name__} values"] = _seeded(_trained_values(_form))


def _reduced(reduce: str) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        A = GroupCOO.from_dense(_matrix(dtype))
        inputs = [(_random(2, 16, 5, dtype=dtype),) for _ in range(CALLERS)]
        return EntryPoint(lambda B: spmm(A, B, reduce), inputs, owner=A)

    return make


for _reduce in ("sum", "mean", "max", "min"):
    ENTRY_POINTS[f"spmm {_reduce}"] = _seeded(_reduced(_reduce))


@_entry_point("spmm torch CSR")
def _csr(dtype: torch.dtype) -> EntryPoint:
    A = csr(_matrix(dtype))
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint(lambda B: spmm(A, B), inputs, owner=A)


@_entry_point("spmm torch COO")
def _coo(dtype: torch.dtype) -> EntryPoint:
    A = _matrix(dtype).to_sparse().requires_grad_()
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint(lambda B: spmm(A, B), inputs, [A], owner=A)


@_entry_point("spmm edges")
def _edges(dtype: torch.dtype) -> EntryPoint:
    """One graph, and each caller's own weights for its edges."""
    edge_index = torch.randint(0, 9, (2, 30)).to(DEVICE)
    inputs = [(_random(30, dtype=dtype), _random(9, 4, dtype=dtype)) for _ in range(CALLERS)]
    return EntryPoint(lambda weight, B: spmm((edge_index, weight), B), inputs, owner=edge_index)


@_entry_point("spmm edges of several sizes")
def _edges_of_sizes(dtype: torch.dtype) -> EntryPoint:
    edge_index = torch.randint(0, 9, (2, 30)).to(DEVICE)
    inputs = [(_random(9 + caller, 4, dtype=dtype),) for caller in range(CALLERS)]
    return EntryPoint(lambda B: spmm((edge_index, None), B, reduce="mean"), inputs, owner=edge_index)


@_entry_point("sddmm")
def _sddmm(dtype: torch.dtype) -> EntryPoint:
    pattern = GroupCOO.from_dense(_matrix(dtype))
    inputs = [(_random(12, 3, dtype=dtype), _random(16, 3, dtype=dtype)) for _ in range(CALLERS)]
    return EntryPoint(lambda X, Y: sddmm(pattern, X, Y).to_dense(), inputs, owner=pattern)


@_entry_point("SpMM")
def _spmm_layer(dtype: torch.dtype) -> EntryPoint:
    layer = nn.SpMM(_matrix(dtype).to_sparse(), trainable=True)
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint(layer, inputs, list(layer.parameters()), owner=layer)


@_entry_point("BlockSparseLinear")
def _linear(dtype: torch.dtype) -> EntryPoint:
    layer = nn.BlockSparseLinear(24, 32, block_size=8, density=0.5).to(DEVICE, dtype)
    inputs = [(_random(2, 3, 24, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint(layer, inputs, list(layer.parameters()), owner=layer)


def _clouds() -> list[nn.SparseConvTensor]:
    """Two, of which several callers share each."""
    found = []
    for _ in range(2):
        indices = (torch.rand(2, *SHAPE) < 0.3).nonzero().int().to(DEVICE)
        found.append(nn.SparseConvTensor(torch.zeros(len(indices), 0, device=DEVICE), indices, SHAPE, 2))
    return found


def _over_clouds(*layers: Any) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        network = torch.nn.Sequential(*[layer() for layer in layers]).to(DEVICE)
        for parameter in network.parameters():  # the same numbers in every dtype
            parameter.data = parameter.data.to(dtype)
        clouds = _clouds()

        def function(features: Tensor) -> Tensor:
            cloud = next(cloud for cloud in clouds if len(cloud.indices) == len(features))
            found: Tensor = network(cloud.replace_feature(features)).features
            return found

        inputs = [(_random(len(clouds[at % 2].indices), 4, dtype=dtype),) for at in range(CALLERS)]
        return EntryPoint(function, inputs, list(network.parameters()), owner=(network, clouds))

    return make


CONVOLUTIONS = {
    "SubMConv3d": [lambda: nn.SubMConv3d(4, 3, 3)],
    "SubMConv3d groups": [lambda: nn.SubMConv3d(4, 4, 3, groups=2, indice_key="a")],
    "SparseConv3d and back": [
        lambda: nn.SparseConv3d(4, 3, 2, 2, indice_key="down"),
        lambda: nn.SparseInverseConv3d(3, 2, 2, indice_key="down"),
    ],
    "SparseConvTranspose3d": [lambda: nn.SparseConvTranspose3d(4, 3, 2, 2)],
    "SparseMaxPool3d": [lambda: nn.SparseMaxPool3d(2)],
    "SparseAvgPool3d": [lambda: nn.SparseAvgPool3d(2)],
}
for _name, _layers in CONVOLUTIONS.items():
    ENTRY_POINTS[_name] = _seeded(_over_clouds(*_layers))


def _product(rows: int, make: Callable[[], Any], is_each: bool, kind: str = "") -> Maker:
    def made(dtype: torch.dtype) -> EntryPoint:
        layer = make()
        weight = _random(layer.weight_numel, dtype=dtype)
        inputs = []
        for caller in range(CALLERS):
            x = _random(rows, layer.irreps_in1.dim, dtype=dtype)
            y = _random(rows, layer.irreps_in2.dim, dtype=dtype)
            if kind == "one-hot":
                y = torch.randint(0, layer.irreps_in2.dim, (rows,)).to(DEVICE)
            own = _random(rows, layer.weight_numel, dtype=dtype) if is_each else weight * (1 + caller)
            edges = (_positions(rows, rows, caller), _positions(rows, rows, 0)) if kind == "edges" else ()
            inputs.append((x, y, own, *edges))

        def function(x: Tensor, y: Tensor, weight: Tensor, *edges: Tensor) -> Tensor:
            src, dst = edges or (None, None)
            found: Tensor = layer(x, y, weight, src=src, dst=dst)
            return found

        return EntryPoint(function, inputs, owner=layer)

    return made


def _fully_connected(is_shared: bool, in2: str = "1x1o") -> Any:
    return nn.FullyConnectedTensorProduct(
        "2x0e + 2x1o", in2, "3x0e + 3x1o", shared_weights=is_shared, internal_weights=False
    ).to(DEVICE)


def _channel_wise() -> Any:
    paths = [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True)]
    return nn.TensorProduct(
        "4x0e + 4x1o", "1x0e", "4x0e + 4x1o", paths, shared_weights=False, internal_weights=False
    ).to(DEVICE)


PRODUCTS = {
    "tensor product, shared weights": _product(5, lambda: _fully_connected(True), False),
    "tensor product, weights of each": _product(5, lambda: _fully_connected(False), True),
    "tensor product along edges": _product(5, lambda: _fully_connected(False), True, "edges"),
    "tensor product, one-hot": _product(5, lambda: _fully_connected(True, "3x0e"), False, "one-hot"),
    "tensor product, channel by channel": _product(5, _channel_wise, True),
}
if o3 is not None:
    for _name, _maker in PRODUCTS.items():
        ENTRY_POINTS[_name] = _seeded(_maker)
