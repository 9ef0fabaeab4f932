"""How a convolution's coarse and fine cells lie: fine = coarse * stride - padding + dilation * tap, on each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd, prod
from operator import index
from typing import Any, NamedTuple

from ..errors import FormatError

__all__ = ["Geometry", "MapLayout", "per_axis"]

Sizes = tuple[int, ...]


def per_axis(name: str, value: int | Sequence[int], ndim: int, least: int) -> Sizes:
    """Return a size for each axis, from one number for all or one for each.

    Raises FormatError if there are more or fewer, or one is no integer or below `least`.
    """
    if type(value) is int and value >= least:
        return (value,) * ndim
    sizes_or_one: Any = value
    is_many = isinstance(sizes_or_one, Iterable) and getattr(sizes_or_one, "ndim", 1) > 0  # a tensor may be one number
    sizes = tuple(sizes_or_one) if is_many else (sizes_or_one,) * ndim
    if len(sizes) != ndim:
        raise FormatError(f"{name} is {list(sizes)} but there are {ndim} axes; give one number, or one for each axis")
    try:
        integers = tuple(index(size) for size in sizes)  # numpy's too
    except TypeError:
        raise FormatError(f"{name} is {list(sizes)}; it must hold integers") from None
    if min(integers) < least:
        raise FormatError(f"{name} is {list(integers)}; each number is at least {least}")
    return integers


class MapLayout(NamedTuple):
    """All that a kernel map depends on, but for the voxels: its kind and its sizes on each axis."""

    kind: str
    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    output_padding: Sizes


@dataclass(frozen=True)
class Geometry:
    """Kernel size, stride, padding and dilation of each axis; taps are counted with the last axis fastest."""

    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes

    @cached_property
    def volume(self) -> int:
        """How many taps there are."""
        return prod(self.kernel_size)

    def axis(self, axis: int) -> tuple[int, int, int, int]:
        return self.kernel_size[axis], self.stride[axis], self.padding[axis], self.dilation[axis]

    @cached_property
    def axes(self) -> tuple[tuple[int, int, int, int], ...]:
        return self._each()

    def _each(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return the four numbers of each axis; a tracer can't follow a cached property, which has a lock."""
        return tuple([self.axis(axis) for axis in range(len(self.kernel_size))])

    @cached_property
    def extent(self) -> int:
        """A bound on the distance between two taps, on any axis."""
        return max(dilation * kernel for kernel, _, _, dilation in self.axes)

    @cached_property
    def reached(self) -> int:
        """The most coarse cells that one fine cell belongs to."""
        return prod(-(-kernel * gcd(stride, dilation) // stride) for kernel, stride, _, dilation in self.axes)

    @cached_property
    def rarity(self) -> Sizes:
        """The rank of each tap, from the centre outwards: on surfaces far taps meet a voxel less often."""
        taps = list(product(*map(range, self.kernel_size)))
        far = [sum(abs(2 * at - size + 1) for at, size in zip(tap, self.kernel_size)) for tap in taps]
        order = sorted(range(len(taps)), key=lambda tap: (far[tap], tap))
        return tuple(sorted(range(len(taps)), key=order.__getitem__))

    def coarse_shape(self, fine: Sizes) -> Sizes:
        """Return the shape of the grid that `nn.Conv3d` makes of one of this shape."""
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, (k, s, p, d) in zip(fine, self._each()))

    def fine_shape(self, coarse: Sizes, output_padding: Sizes) -> Sizes:
        """Return the shape of the grid that `nn.ConvTranspose3d` makes of one of this shape."""
        sizes = zip(coarse, self._each(), output_padding)
        return tuple((n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, (k, s, p, d), extra in sizes)
