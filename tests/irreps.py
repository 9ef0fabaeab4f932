"""What tests of tensor products share: random irreps, dense references from e3nn in float64, layouts by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import strategies as st
from statements import DEVICE
from tolerances import assert_matches
from torch import Tensor

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")


def irreps_strings(max_mul: int = 3, max_l: int = 2, max_blocks: int = 3) -> st.SearchStrategy[str]:
    """Repeated blocks, multiplicity 0 and no block at all included."""
    block = st.builds("{}x{}{}".format, st.integers(0, max_mul), st.integers(0, max_l), st.sampled_from("eo"))
    return st.lists(block, max_size=max_blocks).map(" + ".join)


def dense_product(tp, x: Tensor, y: Tensor, weight: Tensor | None, is_magnitude: bool = False) -> Tensor:
    """e3nn's formula, path by path, from `instructions` alone: rows x and y, weight for all or for each row.

    `is_magnitude`: the sum of the summands' magnitudes instead.
    """
    if is_magnitude:
        x, y, weight = x.abs(), y.abs(), weight if weight is None else weight.abs()
    z = x.new_zeros(len(y), tp.irreps_out.dim)
    slices1, slices2, slices3 = (own.slices() for own in (tp.irreps_in1, tp.irreps_in2, tp.irreps_out))
    start = 0
    for path in tp.instructions:
        (mul1, ir1), (mul2, ir2) = tp.irreps_in1[path.i_in1], tp.irreps_in2[path.i_in2]
        mul3, ir3 = tp.irreps_out[path.i_out]
        X = x[:, slices1[path.i_in1]].unflatten(1, (mul1, ir1.dim))
        Y = y[:, slices2[path.i_in2]].unflatten(1, (mul2, ir2.dim))
        C = o3.wigner_3j(ir1.l, ir2.l, ir3.l, dtype=torch.float64).to(x) * path.path_weight
        C = C.abs() if is_magnitude else C
        W = x.new_ones(len(y), *path.path_shape)
        if path.has_weight:
            size = torch.Size(path.path_shape).numel()
            W = W * weight[..., start : start + size].unflatten(-1, path.path_shape)
            start += size
        first, second, third = {
            "uvw": ("uv", "uvw", "w"),
            "uvu": ("uv", "uv", "u"),
            "uvv": ("uv", "uv", "v"),
            "uuw": ("uu", "uw", "w"),
            "uuu": ("uu", "u", "u"),
            "uvuv": ("uv", "uv", "uv"),
        }[path.connection_mode]
        part = torch.einsum(f"b{first[0]}i,b{first[1]}j,ijk,b{second}->b{third}k", X, Y, C, W)
        z[:, slices3[path.i_out]] += part.reshape(len(y), mul3 * ir3.dim)
    return z


def doubles(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def assert_same(actual: Tensor, tensors: list[Tensor], expected: Tensor, wide: list[Tensor]) -> None:
    """Values, and gradients of all operands."""
    assert_matches(actual, expected)
    upstream = torch.randn(actual.shape)
    want = torch.autograd.grad(expected, wide, upstream.double())
    for got, reference in zip(torch.autograd.grad(actual, tensors, upstream.to(DEVICE)), want, strict=True):
        assert_matches(got, reference)


def second_gradients(tp, tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients of gradients, as forces are trained by, beside those of `dense_product`; for every pair of operands."""
    wide = doubles(tensors)
    upstream = torch.randn(len(tensors[1]), tp.irreps_out.dim)
    mixed = [torch.randn(tensor.shape) for tensor in tensors]
    found = []
    for given, call in ((tensors, tp), (wide, lambda *all_of: dense_product(tp, *all_of))):
        z = call(*given)
        first = torch.autograd.grad(z, given, upstream.to(z), create_graph=True)
        found.append(torch.autograd.grad(first, given, [part.to(z) for part in mixed]))
    return zip(*found, strict=True)


def to_ir_mul(irreps, x: Tensor) -> Tensor:
    """Each block [mul, 2l+1] transposed."""
    blocks = [x[..., where].unflatten(-1, (mul, ir.dim)) for (mul, ir), where in zip(irreps, irreps.slices()) if mul]
    return torch.cat([block.transpose(-1, -2).flatten(-2) for block in blocks] or [x], -1)
