"""What the table of torch's tools is filled for: each entry point as a module, and its inputs at any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import insum_ops
from insum_ops import insum, sddmm, spmm
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (1, 7, 13, 32, 5)  # 1 first, which torch gives a graph of its own; then primes and a power of two

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class EntryCase:
    """One row of the table: a module, its inputs at size n, and which of their dimensions follow n."""

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    varying: tuple[tuple[int, ...], ...]  # of each input, or of all tensors in it
    wants_grad: tuple[int, ...] = (0,)  # inputs that are differentiated

    def at(self, n: int) -> Inputs:
        """The inputs at a size, the same ones in every call."""
        torch.manual_seed(n)
        return tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), self.inputs(n))

    def make(self) -> nn.Module:
        """A new module, with the same numbers in every call."""
        torch.manual_seed(0)
        module = self.module().to(DEVICE)
        if isinstance(module, Calls):  # formats and sparse tensors, which no module moves
            for name in module.held:
                setattr(module, name, getattr(module, name).to(DEVICE))
        return module


class Calls(nn.Module):
    """A function as a module, with tensors and formats that it holds."""

    def __init__(self, call: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.call = call
        for name, value in held.items():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.held = tuple(held)

    def forward(self, *inputs: Any) -> Any:
        return self.call(*inputs, *[getattr(self, name) for name in self.held])


def _matrix(rows: int = 11, columns: int = 13) -> Tensor:
    """A sparse matrix, also where models are made on the meta device, as by from_pretrained: its entries are read."""
    torch.manual_seed(0)
    dense = torch.randn(rows, columns, device="cpu")
    dense[torch.rand(rows, columns, device="cpu") < 0.7] = 0
    return dense


def _edges(nodes: int, edges: int) -> Tensor:
    return torch.randint(nodes, (2, edges))


FORMATS: dict[str, Callable[[Tensor], Any]] = {
    "COO": COO.from_dense,
    "ELL": ELL.from_dense,
    "GroupCOO": lambda dense: GroupCOO.from_dense(dense, group_size=2),
    "BlockCOO": lambda dense: BlockCOO.from_dense(dense, block_size=(4, 4)),
    "BlockGroupCOO": lambda dense: BlockGroupCOO.from_dense(dense, block_size=(4, 4), group_size=2),
}
PRODUCT = "C[m,n] += A[m,k] * B[k,n]"


def _times(B: Tensor, A: Any) -> Tensor:
    return insum(PRODUCT, A=A, B=B)


def _statements() -> list[EntryCase]:
    dense = lambda x, w: insum("Y[b,o] += X[b,i] * W[i,o]", X=x, W=w)
    gather = lambda x, index: insum("Y[e,c] += X[I[e],c]", X=x, I=index)
    scatter = lambda x, w, i: insum("Y[I[e,0],c] += X[I[e,1],c] * W[e]", X=x, I=i, W=w, size=x.shape)
    largest = lambda x, index: insum("Y[i,c] = max(X[I[i,k],c])", X=x, I=index)
    return [
        EntryCase("insum, dense", lambda: Calls(dense, w=torch.randn(4, 3)), lambda n: (torch.randn(n, 4),), ((0,),)),
        EntryCase(
            "insum, gather",
            lambda: Calls(gather),
            lambda n: (torch.randn(n, 4), torch.randint(n, (2 * n,))),
            ((0,), (0,)),
        ),
        EntryCase(
            "insum, scatter",
            lambda: Calls(scatter),
            lambda n: (torch.randn(n, 4), torch.randn(3 * n), _edges(n, 3 * n).T.contiguous()),
            ((0,), (0,), (0,)),
            (0, 1),
        ),
        EntryCase(
            "insum, max",
            lambda: Calls(largest),
            lambda n: (torch.randn(n, 4), torch.randint(n, (n, 3))),
            ((0,), (0,)),
        ),
    ]


def _formats() -> list[EntryCase]:
    cases = []
    for name, make in FORMATS.items():
        held = lambda make=make: Calls(_times, A=make(_matrix()))
        cases.append(EntryCase(f"insum, {name} held", held, lambda n: (torch.randn(13, n),), ((1,),)))
        given = lambda n, make=make: (torch.randn(13, n), make(_matrix()))
        cases.append(EntryCase(f"insum, {name} passed", lambda: Calls(_times), given, ((1,), ())))
    return cases


def _sparse(layout: str) -> Tensor:
    return _matrix().to_sparse() if layout == "coo" else _matrix().to_sparse_csr()


def _product(x: Tensor, A: Tensor) -> Tensor:
    return spmm(A, x)


def _matmul() -> list[EntryCase]:
    columns = lambda n: (torch.randn(13, n),)
    graph = lambda n: (torch.randn(n, 4), _edges(n, 3 * n), torch.randn(3 * n))
    along = lambda x, edges, weight: spmm((edges, weight), x)
    mean = lambda x, edges, weight: spmm((edges, weight), x, reduce="mean")
    scores = lambda x, edges, weight: sddmm((edges, None), x, 2 * x)
    sampled = lambda x, A: sddmm(A, x[:11], x[11:24]).to_dense()
    rows = lambda n: (torch.randn(24, n),)
    cases = [
        EntryCase("nn.SpMM", lambda: insum_ops.nn.SpMM(_matrix().to_sparse()), columns, ((1,),)),
        EntryCase("nn.SpMM, trained", lambda: insum_ops.nn.SpMM(_matrix().to_sparse(), True), columns, ((1,),)),
        EntryCase("spmm of edges", lambda: Calls(along), graph, ((0,), (1,), (0,)), (0, 2)),
        EntryCase("spmm of edges, mean", lambda: Calls(mean), graph, ((0,), (1,), (0,)), (0, 2)),
        EntryCase("sddmm of edges", lambda: Calls(scores), graph, ((0,), (1,), (0,))),
    ]
    for layout in ("coo", "csr"):
        made = partial(_sparse, layout)
        cases.append(
            EntryCase(f"spmm of a {layout} tensor", lambda made=made: Calls(_product, A=made()), columns, ((1,),))
        )
        cases.append(
            EntryCase(f"sddmm of a {layout} tensor", lambda made=made: Calls(sampled, A=made()), rows, ((1,),))
        )
    return cases


def _linear() -> list[EntryCase]:
    def layer() -> nn.Module:
        torch.manual_seed(0)
        return insum_ops.nn.BlockSparseLinear(16, 24, block_size=8, density=0.5)

    return [EntryCase("nn.BlockSparseLinear", layer, lambda n: (torch.randn(n, 16),), ((0,),))]


IRREPS = "4x0e+4x1o", "1x0e+1x1o", "4x0e+4x1o"


def _products() -> list[EntryCase]:
    def fully(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return insum_ops.nn.FullyConnectedTensorProduct(*IRREPS, **options)

    def channelwise(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        paths = [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True), (0, 1, 1, "uvu", True)]
        return insum_ops.nn.TensorProduct(*IRREPS, paths, **options)

    cases = []
    for name, make in (("FullyConnectedTensorProduct", fully), ("TensorProduct", channelwise)):
        pair = lambda n: (torch.randn(n, 16), torch.randn(n, 4))
        cases.append(EntryCase(f"nn.{name}, shared", make, pair, ((0,), (0,)), (0, 1)))
        own = lambda n, make=make: (torch.randn(n, 16), torch.randn(n, 4), torch.randn(n, make().weight_numel))
        per = lambda make=make: make(shared_weights=False, internal_weights=False)
        cases.append(EntryCase(f"nn.{name}, per sample", per, own, ((0,), (0,), (0,)), (0, 1, 2)))

        def along(make: Callable[..., nn.Module] = make) -> nn.Module:
            layer = make(shared_weights=False, internal_weights=False)
            return _Along(layer)

        edges = lambda n, make=make: (
            torch.randn(n, 16),
            torch.randn(3 * n, 4),
            torch.randn(3 * n, make().weight_numel),
            *_edges(n, 3 * n),
        )
        cases.append(EntryCase(f"nn.{name}, per edge", along, edges, ((0,),) * 5, (0, 1, 2)))
    return cases


class _Along(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        return self.layer(x, y, weight, src=src, dst=dst)


class _OverVoxels(nn.Module):
    """A convolution over voxels that are given with the features."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        return self.layer(insum_ops.nn.SparseConvTensor(features, indices, [8, 8, 8], 1)).features


class _OverCloud(nn.Module):
    """A convolution over a cloud made beforehand, with other features."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: Tensor, cloud: Any) -> Tensor:
        return self.layer(cloud.replace_feature(features)).features


def _voxels(n: int) -> Tensor:
    places = torch.randperm(512)[:n]
    return torch.stack([places * 0, places // 64, places // 8 % 8, places % 8], 1).int()


def _convolutions() -> list[EntryCase]:
    def cloud(n: int) -> Inputs:
        indices = _voxels(n)
        return torch.randn(n, 4), insum_ops.nn.SparseConvTensor(torch.randn(n, 4), indices, [8, 8, 8], 1)

    layers = {
        "nn.SubMConv3d": lambda: insum_ops.nn.SubMConv3d(4, 6, 3),
        "nn.SparseConv3d": lambda: insum_ops.nn.SparseConv3d(4, 6, 3, 2, 1),
    }
    cases = []
    for name, layer in layers.items():
        over = lambda layer=layer: _OverCloud(layer())
        cases.append(EntryCase(f"{name}, given cloud", over, cloud, ((0,), (0,))))
        voxels = lambda layer=layer: _OverVoxels(layer())
        inputs = lambda n: (torch.randn(n, 4), _voxels(n))
        cases.append(EntryCase(f"{name}, given voxels", voxels, inputs, ((0,), (0,))))
    return cases


CASES = {
    case.name: case for case in [*_statements(), *_formats(), *_matmul(), *_linear(), *_products(), *_convolutions()]
}
