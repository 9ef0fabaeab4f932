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
    remade: Callable[[Any], Callable[..., Tensor]] | None = None  # the function of another owner

    @classmethod
    def over(
        cls,
        owner: Any,
        remade: Callable[[Any], Callable[..., Tensor]],
        inputs: Sequence[tuple[Tensor, ...]],
        parameters: Sequence[Tensor] = (),
    ) -> EntryPoint:
        return cls(remade(owner), inputs, parameters, owner, remade)

    def with_owner(self, owner: Any) -> EntryPoint:
        """The same function and inputs over another owner, a copy of this one."""
        assert self.remade is not None
        parameters = list(owner.parameters()) if isinstance(owner, torch.nn.Module) else self.parameters
        return EntryPoint.over(owner, self.remade, self.inputs, parameters)

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
    return EntryPoint.over(A, lambda A: lambda B: insum("C[m,n] = min(A[m,k] * B[k,n])", A=A, B=B), inputs)


@_entry_point("insum by columns")
def _by_columns(dtype: torch.dtype) -> EntryPoint:
    """A format whose groups are of columns, and have to be arranged anew."""
    A = GroupCOO.from_dense(_matrix(dtype), group_dim=1)
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint.over(A, lambda A: lambda B: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), inputs)


def _with_format(form: type) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        A = _made(form, _matrix(dtype))
        inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
        return EntryPoint.over(A, lambda A: lambda B: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), inputs)

    return make


def _trained_values(form: type) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        A = _made(form, _matrix(dtype))
        inputs = [(_random(*A.values.shape, dtype=dtype), _random(16, 5, dtype=dtype)) for _ in range(CALLERS)]
        return EntryPoint.over(A, lambda A: lambda AV, B: spmm(A.with_values(AV), B), inputs)

    return make


for _form in FORMATS:
    ENTRY_POINTS[f"insum {_form.__name__}"] = _seeded(_with_format(_form))
    ENTRY_POINTS[f"spmm {_form.__name__} values"] = _seeded(_trained_values(_form))


def _reduced(reduce: str) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        A = GroupCOO.from_dense(_matrix(dtype))
        inputs = [(_random(2, 16, 5, dtype=dtype),) for _ in range(CALLERS)]
        return EntryPoint.over(A, lambda A: lambda B: spmm(A, B, reduce), inputs)

    return make


for _reduce in ("sum", "mean", "max", "min"):
    ENTRY_POINTS[f"spmm {_reduce}"] = _seeded(_reduced(_reduce))


@_entry_point("spmm torch CSR")
def _csr(dtype: torch.dtype) -> EntryPoint:
    A = csr(_matrix(dtype))
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint.over(A, lambda A: lambda B: spmm(A, B), inputs)


@_entry_point("spmm torch COO")
def _coo(dtype: torch.dtype) -> EntryPoint:
    A = _matrix(dtype).to_sparse().requires_grad_()
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint.over(A, lambda A: lambda B: spmm(A, B), inputs, [A])


@_entry_point("spmm edges")
def _edges(dtype: torch.dtype) -> EntryPoint:
    """One graph, and each caller's own weights for its edges."""
    edge_index = torch.randint(0, 9, (2, 30)).to(DEVICE)
    inputs = [(_random(30, dtype=dtype), _random(9, 4, dtype=dtype)) for _ in range(CALLERS)]
    return EntryPoint.over(edge_index, lambda edges: lambda weight, B: spmm((edges, weight), B), inputs)


@_entry_point("spmm edges of several sizes")
def _edges_of_sizes(dtype: torch.dtype) -> EntryPoint:
    edge_index = torch.randint(0, 9, (2, 30)).to(DEVICE)
    inputs = [(_random(9 + caller, 4, dtype=dtype),) for caller in range(CALLERS)]
    return EntryPoint.over(edge_index, lambda edges: lambda B: spmm((edges, None), B, reduce="mean"), inputs)


@_entry_point("sddmm")
def _sddmm(dtype: torch.dtype) -> EntryPoint:
    pattern = GroupCOO.from_dense(_matrix(dtype))
    inputs = [(_random(12, 3, dtype=dtype), _random(16, 3, dtype=dtype)) for _ in range(CALLERS)]
    return EntryPoint.over(pattern, lambda pattern: lambda X, Y: sddmm(pattern, X, Y).to_dense(), inputs)


@_entry_point("SpMM")
def _spmm_layer(dtype: torch.dtype) -> EntryPoint:
    layer = nn.SpMM(_matrix(dtype).to_sparse(), trainable=True)
    inputs = [(_random(16, 5, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint.over(layer, lambda layer: layer, inputs, list(layer.parameters()))


@_entry_point("BlockSparseLinear")
def _linear(dtype: torch.dtype) -> EntryPoint:
    layer = nn.BlockSparseLinear(24, 32, block_size=8, density=0.5).to(DEVICE, dtype)
    inputs = [(_random(2, 3, 24, dtype=dtype),) for _ in range(CALLERS)]
    return EntryPoint.over(layer, lambda layer: layer, inputs, list(layer.parameters()))


def _clouds() -> list[nn.SparseConvTensor]:
    """Two, of which several callers share each."""
    found = []
    for _ in range(2):
        indices = (torch.rand(2, *SHAPE) < 0.3).nonzero().int().to(DEVICE)
        found.append(nn.SparseConvTensor(torch.zeros(len(indices), 0, device=DEVICE), indices, SHAPE, 2))
    return found


def _of_clouds(network: Any) -> Callable[..., Tensor]:
    """The network's features over the one of its clouds that has as many voxels."""

    def function(features: Tensor) -> Tensor:
        cloud = next(cloud for cloud in network.clouds if len(cloud.indices) == len(features))
        found: Tensor = network(cloud.replace_feature(features)).features
        return found

    return function


def _over_clouds(*layers: Any) -> Maker:
    def make(dtype: torch.dtype) -> EntryPoint:
        network = torch.nn.Sequential(*[layer() for layer in layers]).to(DEVICE)
        for parameter in network.parameters():  # the same numbers in every dtype
            parameter.data = parameter.data.to(dtype)
        clouds = _clouds()
        network.clouds = clouds
        inputs = [(_random(len(clouds[at % 2].indices), 4, dtype=dtype),) for at in range(CALLERS)]
        return EntryPoint.over(network, _of_clouds, inputs, list(network.parameters()))

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


def _of_product(layer: Any) -> Callable[..., Tensor]:
    def function(x: Tensor, y: Tensor, weight: Tensor, *edges: Tensor) -> Tensor:
        src, dst = edges or (None, None)
        found: Tensor = layer(x, y, weight, src=src, dst=dst)
        return found

    return function


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

        return EntryPoint.over(layer, _of_product, inputs)

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
