"""Tensor products of models in use: their operands, their float64 values and gradients, and each library's way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_ops import nn as ours
from insum_ops.formats import GroupCOO

from .case import DEVICE, LIMIT, LIMIT_TF32, OURS, TF32, Call, Case, held, is_tf32, on
from .harness import peak_mib
from .peers import cuda_libraries, installed, needs_gpu

__all__ = [
    "COMPILED",
    "GROUPED",
    "OPEN_EQUIVARIANCE",
    "OWN_LAYOUT",
    "POSITIONS",
    "Operands",
    "Product",
    "kept",
    "make",
    "mul",
    "natural",
    "precision",
]

POSITIONS, GROUPED = f"{OURS}, positions", f"{OURS}, grouped by kind"  # a one-hot second input, written shorter
OPEN_EQUIVARIANCE = "OpenEquivariance"
OWN_LAYOUT = "cuequivariance, its own layout"  # the same kernels, without the copies that bring blocks into e3nn's
COMPILED = "INSUM_BENCH_COMPILED"  # set to 1: compile e3nn too, up to a minute a case
# that are checked where each has its own weights, spread evenly: float64 of all would take most of the memory
SAMPLES = 64
# cuequivariance's own kernels; where it can't load or use them it falls back to plain torch
FUSED = {"uvw": "fused_tp", "uvu": "uniform_1d", "kinds": "indexed_linear"}

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def mul(gpu: int) -> int:
    """A multiplicity, an eighth of it on a CPU."""
    return on(gpu, -(-gpu // 8))


def natural(lmax: int, channels: int) -> str:
    """Degrees 0 to lmax with the parity of spherical harmonics."""
    return " + ".join(f"{channels}x{degree}{'eo'[degree % 2]}" for degree in range(lmax + 1))


@contextmanager
def precision(name: str) -> Iterator[None]:
    """torch's float32 matmul precision: "highest" is ieee, "high" tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Product:
    """A tensor product by its irreps and sizes."""

    name: str
    in1: str
    in2: str
    out: str  # uvu: which irreps are kept
    batch: int
    mode: str = "uvw"
    is_shared: bool = False
    is_one_hot: bool = False
    nodes: int = 0  # of the graph that has `batch` edges; 0: there is none

    def built(self, library: Any) -> Any:
        """The module of e3nn's `o3` or of ours, whose names and arguments agree."""
        options = dict(shared_weights=self.is_shared, internal_weights=False)
        if self.mode == "uvw":
            return library.FullyConnectedTensorProduct(self.in1, self.in2, self.out, **options)
        return library.TensorProduct(self.in1, self.in2, *self._channelwise(), **options)

    def paths(self) -> tuple[str, list[tuple[int, int, int, str, bool]]]:
        """The output and the instructions of a channelwise product, as every library takes them."""
        out, found = self._channelwise()
        return str(out), found

    def _channelwise(self) -> tuple[Any, list[tuple[int, int, int, str, bool]]]:
        """Every path into a kept irrep, each with an output of its own, sorted as MACE and cuequivariance do."""
        o3 = installed("e3nn.o3")
        in1, in2, kept = o3.Irreps(self.in1), o3.Irreps(self.in2), o3.Irreps(self.out)
        paths = [
            (i, j, (channels, irrep))
            for i, (channels, first) in enumerate(in1)
            for j, (_, second) in enumerate(in2)
            for irrep in first * second
            if irrep in kept
        ]
        out, places, _ = o3.Irreps([block for _, _, block in paths]).sort()
        found = [(i, j, place, self.mode, True) for (i, j, _), place in zip(paths, places)]
        return out, sorted(found, key=lambda path: path[2])


@dataclass(frozen=True)
class Operands:
    """What every provider of a product is given, and e3nn in float64, which says what the results must be."""

    product: Product
    exact: Any
    X: Tensor  # [batch, in1] or [nodes, in1]
    Y: Tensor  # [batch, in2]
    W: Tensor  # [batch, weights] or [weights]
    upstream: Tensor
    kinds: Tensor  # [batch] where the ones of a one-hot Y are
    src: Tensor  # [batch] of a graph
    dst: Tensor  # [batch], ascending

    @property
    def checked(self) -> slice | Tensor:
        """Which rows of results and gradients; all of them where one row depends on several samples."""
        batch = self.product.batch
        if self.product.is_shared or self.product.nodes or batch <= SAMPLES:
            return slice(None)
        return torch.linspace(0, batch - 1, SAMPLES, device=DEVICE).long()

    def leaves(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> tuple[Tensor, ...]:
        """Copies that gradients are asked of; float32 ones share their memory."""
        is_learnt = (True, not self.product.is_one_hot, True)
        given = (own[rows].detach().to(dtype) for own in (self.X, self.Y, self.W))
        return tuple(own.requires_grad_(learns) for own, learns in zip(given, is_learnt))

    def forward_case(self, experiment: str) -> Case:
        with torch.no_grad():
            expected = self._along_edges(self.exact)(*self.leaves(torch.float64, self.checked))
        case = self._case(experiment, self.product.name, expected, LIMIT[torch.float32])
        second = self.product.batch if self.product.is_one_hot else self.Y.numel()
        traffic = 4.0 * (self.X.numel() + second + self.W.numel() + self.upstream.numel())
        return replace(case, flops=self.flops, traffic=traffic)

    def training_case(self, experiment: str, is_force: bool = False) -> Case:
        leaves, layer = self.leaves(torch.float64, self.checked), self._along_edges(self.exact)
        upstream = self.upstream[self.checked].double()
        found = _forces(layer, leaves) if is_force else _gradients(layer, leaves, upstream)
        name = f"forces, {self.product.name}" if is_force else self.product.name
        case = self._case(experiment, name, found, 4 * LIMIT[torch.float32])
        return replace(case, facts={**case.facts, "series": "forces"}) if is_force else case

    def _case(self, experiment: str, name: str, expected: Tensor | tuple[Tensor, ...], limit: float) -> Case:
        facts = {"batch": self.product.batch, "weights": self.exact.weight_numel}
        return Case(experiment, name, expected, limit, facts=facts)

    @property
    def flops(self) -> float:
        """Products with weights; 0 where channels never mix, and nobody counts them."""
        exact = self.exact
        if self.product.mode != "uvw":
            return 0.0
        kinds = exact.irreps_in2.dim if self.product.is_one_hot else 1  # all but one meet a zero
        sizes = (int(exact.irreps_out[path.i_out].ir.dim * prod(path.path_shape)) for path in exact.instructions)
        return 2.0 * self.product.batch * sum(sizes) / kinds

    def forward(self, provider: str) -> Call:
        """One product without gradients."""
        layer, given = self.layer(provider), (self.X, self.Y, self.W)

        def run() -> Tensor:
            with torch.no_grad():
                return layer(*given)

        limit = LIMIT_TF32 if is_tf32(provider) else None
        waits = provider == "cuequivariance" and self.product.is_one_hot  # it checks on the host that kinds are sorted
        return Call(run, lambda: run()[self.checked], not waits, limit, _memory(run))

    def training(self, provider: str, is_force: bool = False) -> Call:
        """Forward and backward: gradients of x, y and weights; or those of the squares of the forces on y."""
        layer, leaves = self.layer(provider), self.leaves()

        def run() -> tuple[Tensor, ...]:
            return _forces(layer, leaves) if is_force else _gradients(layer, leaves, self.upstream)

        return Call(run, result=lambda: tuple(own[self.checked] for own in run()), facts=_memory(run))

    def layer(self, provider: str) -> Layer:
        """The provider's product of x, y and weights; whether tf32 is allowed is for `precision` to say."""
        product, provider = self.product, provider.removesuffix(TF32)
        if provider in ("cuequivariance", OWN_LAYOUT):
            return self._cuequivariance(is_own_layout=provider == OWN_LAYOUT)
        if provider == OPEN_EQUIVARIANCE:
            return self._openequivariance()
        if provider.startswith("e3nn"):
            layer = product.built(installed("e3nn.o3")).to(DEVICE)
            return self._along_edges(_compiled(layer) if provider == "e3nn compiled" else layer)
        layer = product.built(ours).to(DEVICE)
        if product.nodes:
            return lambda x, y, w: layer(x, y, w, src=self.src, dst=self.dst, num_nodes=product.nodes)
        if provider in (POSITIONS, GROUPED):
            kinds = self.kinds if provider == POSITIONS else GroupCOO.from_dense(self.Y, group_dim=1)
            return lambda x, y, w: layer(x, kinds, w)
        return layer  # type: ignore[no-any-return]

    def _along_edges(self, layer: Layer) -> Layer:
        """What a user of a layer without edges writes: a gather, the product, a scatter."""
        if not self.product.nodes:
            return layer

        def convolved(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            messages = layer(x.index_select(0, self.src), y, w)
            return messages.new_zeros(self.product.nodes, messages.shape[1]).index_add_(0, self.dst, messages)

        return convolved

    @staticmethod
    def differentiated(
        layer: Layer, leaves: Sequence[Tensor], upstream: Tensor, is_force: bool = False
    ) -> tuple[Tensor, ...]:
        """Gradients of the leaves that want them; or those of the squares of the forces on y."""
        return _forces(layer, leaves) if is_force else _gradients(layer, leaves, upstream)

    def _openequivariance(self) -> Layer:
        """Its kernels for channelwise products, alone or with the gather and the scatter inside."""
        needs_gpu(OPEN_EQUIVARIANCE)
        cuda_libraries("libnvrtc.so.1*", "libcublas.so.1*")
        oeq, product = installed("openequivariance"), self.product
        if not oeq.BUILT_EXTENSION:
            pytest.skip(f"OpenEquivariance has no extension: {str(oeq.BUILT_EXTENSION_ERROR)[-300:]}")
        if product.mode != "uvu":
            pytest.skip("OpenEquivariance is beside channelwise products alone")
        options = dict(shared_weights=product.is_shared, internal_weights=False)
        problem = oeq.TPProblem(product.in1, product.in2, *product.paths(), **options)
        if not product.nodes:
            return oeq.TensorProduct(problem)  # type: ignore[no-any-return]
        layer = oeq.TensorProductConv(problem, deterministic=False)
        return lambda x, y, w: layer(x, y, w, self.dst, self.src)

    def reference(self, provider: str) -> Layer:
        """What a provider must give, in float64.

        With both parities cuequivariance has its paths, and so weights and outputs, in another order than e3nn. What
        it must give then is what plain torch makes of its own polynomial.
        """
        irreps = installed("e3nn.o3").Irreps(self.product.in1)
        is_ordered = len({ir.l for _, ir in irreps}) == len(irreps)
        if provider == "cuequivariance" and self.product.mode == "uvu" and not is_ordered:
            return self._cuequivariance("naive")
        return self._along_edges(self.exact)

    def _cuequivariance(self, method: str | None = None, is_own_layout: bool = False) -> Layer:
        """Its fused kernels, with e3nn's irreps and weights, which it takes as they are; or another of its methods."""
        needs_gpu("cuequivariance")
        cue, cuet = installed("cuequivariance"), installed("cuequivariance_torch")
        product = self.product
        in1, in2, out = (cue.Irreps("O3", own) for own in (product.in1, product.in2, product.out))
        if product.is_one_hot:
            return self._cuequivariance_by_kind(in1, out)
        layout = cue.ir_mul if is_own_layout else cue.mul_ir
        options = dict(layout=layout, shared_weights=product.is_shared, internal_weights=False, device=DEVICE)
        if method is not None:
            options["method"] = method
        if product.mode == "uvw":
            layer = cuet.FullyConnectedTensorProduct(in1, in2, out, **options)
        else:
            layer = cuet.ChannelWiseTensorProduct(in1, in2, [irrep for _, irrep in out], **options)
        _check_method(layer.f, method or FUSED[product.mode])
        if product.nodes:
            return self._cuequivariance_along_edges(layer)
        if product.is_shared:
            return lambda x, y, w: layer(x, y, w[None])
        return layer  # type: ignore[no-any-return]

    def _cuequivariance_by_kind(self, in1: Any, out: Any) -> Layer:
        """Its linear layer with weights by kind: they are laid out beforehand, samples are sorted by kind and back."""
        cue, cuet = installed("cuequivariance"), installed("cuequivariance_torch")
        linear = cuet.SegmentedPolynomial(cue.descriptors.linear(in1, out).polynomial, method=FUSED["kinds"]).to(DEVICE)
        _check_method(linear, FUSED["kinds"])
        count = self.exact.irreps_in2.dim
        W = torch.cat([own.transpose(0, 1).flatten(1) for own in self.exact.weight_views(self.W)], 1) * count**-0.5
        inward = cuet.TransposeIrrepsLayout(in1, source=cue.mul_ir, target=cue.ir_mul, device=DEVICE)
        outward = cuet.TransposeIrrepsLayout(out, source=cue.ir_mul, target=cue.mul_ir, device=DEVICE)
        kinds, order = self.kinds.sort()
        back = order.argsort()
        return lambda x, y, w: outward(linear([W, inward(x[order])], input_indices={0: kinds})[0])[back]

    def _cuequivariance_along_edges(self, layer: Any) -> Layer:
        """Its kernel with the gather and the scatter inside; its module would copy a tensor from the host each time."""
        size = {0: torch.empty(self.product.nodes, 1, device=DEVICE)}
        indices = dict(input_indices={1: self.src}, output_indices={0: self.dst}, output_shapes=size)

        def convolved(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            found = layer.f([w, layer.transpose_in1(x), layer.transpose_in2(y)], **indices)
            return layer.transpose_out(found[0])  # type: ignore[no-any-return]

        return convolved


def _check_method(polynomial: Any, wanted: str) -> None:
    if polynomial.method != wanted:
        pytest.skip(f"cuequivariance is on its {polynomial.method} path, not on {wanted}")


def make(product: Product) -> Operands:
    """Random operands; a graph has edges sorted by where they end, as neighbour lists come."""
    exact = product.built(installed("e3nn.o3")).to(DEVICE, torch.float64)
    batch, rows = product.batch, product.nodes or product.batch
    normal = lambda *size: torch.randn(*size, device=DEVICE)
    X = normal(rows, exact.irreps_in1.dim)
    W = normal(exact.weight_numel) if product.is_shared else normal(batch, exact.weight_numel)
    kinds = torch.randint(exact.irreps_in2.dim, (batch,), device=DEVICE)
    if product.is_one_hot:
        Y = torch.nn.functional.one_hot(kinds, exact.irreps_in2.dim).float()
    else:
        Y = normal(batch, exact.irreps_in2.dim)
    src, dst = torch.randint(rows, (2, batch), device=DEVICE)
    upstream = normal(rows, exact.irreps_out.dim)
    return Operands(product, exact, X, Y, W, upstream, kinds, src, dst.sort().values)


def kept(products: Mapping[str, Product]) -> Callable[[str, bool], tuple[Operands, Case]]:
    """The operands of the product asked for last and its case, forward or training, until another is asked for."""

    @held
    def operands(name: str) -> Operands:
        return make(products[name])

    @held
    def case(name: str, is_training: bool) -> Case:
        own = operands(name)
        return own.training_case("equivariant_training") if is_training else own.forward_case("equivariant")

    return lambda name, is_training: (operands(name), case(name, is_training))


def _gradients(layer: Layer, leaves: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(layer(*leaves), wanted, upstream)


def _forces(layer: Layer, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the squared forces; the energy is the product's sum of squares, forces are its slope in y."""
    energy = layer(*leaves).square().sum()
    (force,) = torch.autograd.grad(energy, leaves[1], create_graph=True)
    return torch.autograd.grad(force.square().sum(), leaves)


def _memory(run: Callable[[], object]) -> dict[str, float]:
    return {"peak_mib": round(peak_mib(run), 1)} if DEVICE == "cuda" else {}


def _compiled(layer: Layer) -> Layer:
    needs_gpu("torch.compile of e3nn")  # a CPU would first have to compile C++ for half a minute
    if os.environ.get(COMPILED) != "1":
        pytest.skip(f"compiling e3nn takes up to a minute a case; set {COMPILED}=1 to do it")
    return torch.compile(layer)
