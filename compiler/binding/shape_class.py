"""Lengths that vary from call to call: what a kernel may know of them, so that one kernel serves many."""

from __future__ import annotations

from ...formats.facts import SHORT_LENGTH

__all__ = ["SHORT_LENGTH", "bucket", "fact_class", "known_divisor", "power_of_two", "shape_class", "undivided"]

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


def shape_class(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[object, ...]:
    """Return what a kernel may know of a shape and its strides; tensors of one class run by the same kernel.

    A long first dimension counts by its power of two and by what is known to divide it.

    >>> shape_class((1000, 4), (4, 1)) == shape_class((999, 4), (4, 1)), shape_class((48, 4), (4, 1))
    (True, ((48, 4), (4, 1)))
    """
    length, span = shape[0] if shape else 0, 0
    if length <= SHORT_LENGTH:
        return shape, strides
    for size, stride in zip(shape, strides):
        span += (size - 1) * stride
    if span >= NEAR:
        return shape, strides
    return bucket(length), known_divisor(length), shape[1:], strides


def undivided(length_class: tuple[object, ...]) -> tuple[object, ...]:
    """Return the shape class of lengths that nothing divides: a kernel for it serves the given class too.

    >>> undivided(shape_class((1024, 4), (4, 1))) == shape_class((999, 4), (4, 1)), undivided(((48, 4), (4, 1)))
    (True, ((48, 4), (4, 1)))
    """
    if len(length_class) == 2:  # a short length, or a fact's, of which no kernel knows a divisor
        return length_class
    power, _, *rest = length_class
    return power, 1, *rest


def fact_class(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[object, ...]:
    """Return what a launch plan may know of a fact's tensor: no kernel is built on how long it is, but it may be empty.

    >>> fact_class((1000,), (1,)) == fact_class((16,), (1,)), fact_class((0,), (1,))
    (True, (False, (1,)))
    """
    return (shape, strides) if shape[0] >= NEAR else (shape[0] > 0, strides)
