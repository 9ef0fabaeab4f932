"""How far a sum of products may lie from its exact value, by its length and dtype: a few lines of theory.

Let u be the relative error of one operation, so that each computed result is the exact one times some 1 + d, |d| <= u.
A product of f factors takes f - 1 multiplications, and in a sum of n products, whatever the order of summation, no
summand passes through more than n additions. Each summand hence reaches the result with a factor between (1 - u)^(n+f)
and (1 + u)^(n+f): the sum is off by at most

    ((1 + u)^(n+f) - 1) * sum |products|,

about (n + f) u times the sum of magnitudes, which the cancellation in the sum does not shrink. What adds to it:

- Products and sums of half precision are taken in float32, and the result is rounded to half precision once, by u of
  that type times the result. Tensor cores chop where other units round: u is the whole of eps in a sum, half of it in a
  rounding.
- Where float32 may be tf32, both operands of a matrix product lose all but 11 bits, chopped: eps is 2^-10. Operands
  that are products of half-precision factors are float32 too, and take the same way. A product of f factors may be a
  chain of matrix products, in which f operands are chopped.
- A statement for each occurrence of a tensor makes a part of its gradient, and layers may add up several statements:
  each such part is rounded by itself.
- Numbers below the smallest normal one have no relative precision: n + f times the smallest one of the type.

`statement_in_torch` is what a user would write without this package: gather, einsum, add at the positions on the left.
In float64 it is the exact value, over absolute values the sum of magnitudes, and over ones the length of each sum.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from reference import Position, Read, read_sentence
from statements import IS_INTERPRETED
from torch import Tensor

__all__ = ["PRECISIONS", "Precision", "Sums", "error_bound", "exact_sums", "statement_in_torch"]

TF32 = 2.0**-10  # eps: 11 bits of precision, one of them implicit


@dataclass(frozen=True)
class Precision:
    """A dtype and what torch allows products of float32 matrices."""

    name: str
    dtype: torch.dtype
    matmul: str = "highest"

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def rounding(self) -> float:
        """The largest relative error of a conversion to the dtype; Triton's interpreter chops bfloat16."""
        eps = torch.finfo(self.dtype).eps
        return eps if IS_INTERPRETED and self.dtype == torch.bfloat16 else eps / 2

    @contextmanager
    def allowed(self) -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matmul)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


PRECISIONS = (
    Precision("fp16", torch.float16),
    Precision("bf16", torch.bfloat16),
    Precision("fp32", torch.float32),
    Precision("tf32", torch.float32, "high"),
)


@dataclass(frozen=True)
class Sums:
    """Exact sums of products in float64, the sums of their magnitudes, and how many products each has."""

    value: Tensor
    magnitude: Tensor
    terms: Tensor


def error_bound(precision: Precision, sums: Sums, factors: int, parts: int = 1, rounded_factors: int = 0) -> Tensor:
    """The largest error of each element.

    Args:
        factors: Numbers in a product.
        parts: Partial results that are rounded to the dtype before they are added up.
        rounded_factors: Constants among the factors that were rounded to the dtype.
    """
    info, wide = torch.finfo(precision.dtype), torch.finfo(torch.float32)
    chopped = 0.0
    if precision.matmul == "high" or (precision.is_half and factors > 2):
        chopped = TF32
    growth = (1 + wide.eps) ** (sums.terms + factors + parts) * (1 + chopped) ** max(2, factors)
    growth *= (1 + precision.rounding) ** rounded_factors
    error = (growth - 1) * sums.magnitude
    rounded = sums.value.abs() + error if parts == 1 else (2 * parts - 1) * (sums.magnitude + error)
    smallest = info.tiny * info.eps + wide.tiny * (sums.terms + factors)
    return error + precision.rounding * rounded + parts * smallest


def exact_sums(
    function: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    upstream: Tensor,
    magnitude: Callable[..., Tensor] | None = None,
) -> list[Sums]:
    """Of a function that is linear in each leaf: its value, then the gradient of each leaf for `upstream`.

    Gradients of such a function over absolute values are sums of magnitudes again, and over ones they count.

    Args:
        magnitude: The function with the absolute values of its own constants, if it has any.
    """

    def all_of(chosen: Callable[..., Tensor], of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        own = [of(leaf.detach().cpu().double()).requires_grad_() for leaf in leaves]
        result = chosen(*own)
        given = of(upstream.detach().cpu().double())
        return [result.detach(), *torch.autograd.grad(result, own, given)]

    magnitude = magnitude or function
    values = all_of(function, torch.clone)
    magnitudes, terms = all_of(magnitude, _magnitude), all_of(magnitude, torch.ones_like)
    return [Sums(*each) for each in zip(values, magnitudes, terms, strict=True)]


def _magnitude(values: Tensor) -> Tensor:
    """Never 0, where an absolute value that is taken once more would have no gradient."""
    return values.abs().clamp_min(1e-100)


def statement_in_torch(expr: str, tensors: Mapping[str, Tensor], size: Position | None = None) -> Tensor:
    """The statement's result by indexing, torch.einsum and index_put, in the dtype of the tensors."""
    sentence = read_sentence(expr)
    reads = [factor for factor in sentence.factors if isinstance(factor, Read)]
    extents: dict[str, int] = {}
    for read in (*reads, sentence.output):
        _note_extents(read, tensors, extents, size if read is sentence.output else None)
    seed = tensors.get(sentence.output.name)
    shape = size if seed is None else tuple(seed.shape)
    if shape is None:
        shape = tuple(extents[index] for index in sentence.output.indices if isinstance(index, str))
    device = tensors[reads[0].name].device
    operands = [_gathered(read, tensors, extents) for read in reads]
    places, kept = [], list(dict.fromkeys(_names(sentence.output)))
    is_placed = torch.ones([1] * len(kept), dtype=torch.bool, device=device)
    for index in sentence.output.indices:
        place = _aligned(*_position(index, tensors, extents, device), kept)
        is_placed = is_placed & (place >= 0)
        places.append(place.clamp_min(0))
    names = list(dict.fromkeys(name for _, own in operands for name in own))
    ones = torch.ones([extents[name] for name in kept], dtype=operands[0][0].dtype, device=device)
    letters = dict(zip((*names, *(name for name in kept if name not in names)), string.ascii_letters))
    terms = ["".join(letters[name] for name in own) for _, own in operands]
    left = "".join(letters[name] for name in kept)
    missing = [name for name in kept if name not in names]
    tensors_of = [value for value, _ in operands]
    if missing:
        terms.append(left)
        tensors_of.append(ones)
    product = torch.einsum(f"{','.join(terms)}->{left}", *tensors_of)
    for factor in sentence.factors:
        product = product if isinstance(factor, Read) else product * factor
    product = torch.where(is_placed, product, 0)
    start = seed if seed is not None and sentence.is_added else product.new_zeros(shape)
    if not places:
        return start + product
    return start.index_put([place.broadcast_to(product.shape) for place in places], product, accumulate=True)


def _names(read: Read) -> Iterator[str]:
    for index in read.indices:
        if isinstance(index, Read):
            yield from _names(index)
        elif isinstance(index, str):
            yield index


def _note_extents(
    read: Read, tensors: Mapping[str, Tensor], extents: dict[str, int], shape: Position | None = None
) -> None:
    if shape is None:
        shape = tuple(tensors[read.name].shape) if read.name in tensors else None
    for dim, index in enumerate(read.indices):
        if isinstance(index, Read):
            _note_extents(index, tensors, extents)
        elif isinstance(index, str) and shape is not None:
            extents.setdefault(index, shape[dim])


def _aligned(value: Tensor, axes: Sequence[str], onto: Sequence[str]) -> Tensor:
    """A tensor over `axes` as one that broadcasts over `onto`."""
    order = [axes.index(name) for name in onto if name in axes]
    value = value.permute(order)
    for dim, name in enumerate(onto):
        value = value if name in axes else value.unsqueeze(dim)
    return value


def _position(
    index: str | int | Read, tensors: Mapping[str, Tensor], extents: Mapping[str, int], device: torch.device
) -> tuple[Tensor, list[str]]:
    if isinstance(index, Read):
        return _gathered(index, tensors, extents)
    if isinstance(index, str):
        return torch.arange(extents[index], device=device), [index]
    return torch.tensor(index, device=device), []


def _gathered(read: Read, tensors: Mapping[str, Tensor], extents: Mapping[str, int]) -> tuple[Tensor, list[str]]:
    """The values of a read over its own index names; where one of its indices is missing, 0 or again -1."""
    tensor, axes = tensors[read.name], list(dict.fromkeys(_names(read)))
    if not read.indices:
        return tensor, axes
    places = [_aligned(*_position(index, tensors, extents, tensor.device), axes) for index in read.indices]
    is_missing = torch.zeros([1] * len(axes), dtype=torch.bool, device=tensor.device)
    for place in places:
        is_missing = is_missing | (place < 0)
    value = tensor[tuple(place.clamp_min(0).long() for place in places)]
    return torch.where(is_missing, 0 if tensor.is_floating_point() else -1, value), axes
