"""Lengths that vary from call to call: what a kernel may know of them, so that one kernel serves many."""

from __future__ import annotations

from typing import NamedTuple

from ...formats.facts import SHORT_LENGTH

__all__ = [
    "SHORT_LENGTH",
    "LengthClass",
    "bucket",
    "fact_length_class",
    "known_divisor",
    "length_class",
    "power_of_two",
    "shape_class",
]

DIVISORS = (1024, 128, 16)  # the longest block; the longest that most kernels take; the shortest side of a dot
NEAR = 2**28  # elements, above which bytes may pass what 32 bits count


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def bucket(n: int) -> int:
    """Return the power of two not below n, for extents that vary from call to call: 0, 1, 3, 5 -> 0, 1, 4, 8."""
    return 1 << (n - 1).bit_length() if n else 0


def known_divisor(length: int) -> int:
    """Return the divisor that a kernel's source may assume of a length that varies; a short length is its own.

    There are few answers, so that lengths which change from call to call need few sources: with every power of two
    there would be a new combination, and a kernel to compile, every other time.

    >>> [known_divisor(length) for length in (48, 1000, 10_000, 4608, 4096)]
    [48, 1, 16, 128, 1024]
    """
    if length <= SHORT_LENGTH:
        return length
    return next((divisor for divisor in DIVISORS if length % divisor == 0), 1)


class LengthClass(NamedTuple):
    """What a kernel may know of a length that varies: that it lies from `least` to `most`, and what divides it.

    A kernel for lengths that nothing divides serves those that something divides too.
    """

    least: int
    most: int
    divisor: int


def length_class(shape: tuple[int, ...], strides: tuple[int, ...]) -> LengthClass | None:
    """Return what a kernel may know of a tensor's first dimension; None if of a short or far one it may know all.

    A long one counts by its power of two, by what is known to divide it, and by whether addresses need 64 bits.

    >>> length_class((1000, 4), (4, 1)), length_class((48, 4), (4, 1)), length_class((2**28, 4), (4, 1))
    (LengthClass(least=513, most=1024, divisor=1), None, None)
    """
    length = shape[0] if shape else 0
    if length <= SHORT_LENGTH:
        return None
    room = NEAR - 1
    for size, stride in zip(shape[1:], strides[1:]):
        room -= (size - 1) * stride
    most = power = bucket(length)
    if strides[0]:
        most = min(power, room // strides[0] + 1)
    if room < 0 or length > most:
        return None
    return LengthClass(max(power // 2, SHORT_LENGTH) + 1, most, known_divisor(length))


def fact_length_class(length: int) -> LengthClass | None:
    """Return what a launch plan may know of how long a fact's tensor is: no kernel is built on it, but it may be empty.

    >>> fact_length_class(1000) == fact_length_class(16), fact_length_class(0)
    (True, None)
    """
    return LengthClass(1, NEAR - 1, 1) if 0 < length < NEAR else None


def shape_class(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[object, ...]:
    """Return what a kernel may know of a shape and its strides; tensors of one class run by the same kernel.

    >>> shape_class((1000, 4), (4, 1)) == shape_class((999, 4), (4, 1)), shape_class((48, 4), (4, 1))
    (True, ((48, 4), (4, 1)))
    """
    length = length_class(shape, strides)
    return (shape, strides) if length is None else (length, shape[1:], strides)
