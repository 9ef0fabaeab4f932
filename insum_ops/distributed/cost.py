"""What a step over a graph that is split over ranks costs on paper: bytes, memory and time of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..compiler import OperandError

__all__ = ["GraphCost", "graph_cost", "random_cut"]

INDEX, POSITION = 4, 8  # bytes of a coordinate of a format, and of a row number that is kept to be sent


@dataclass(frozen=True)
class GraphCost:
    """What one rank needs for a forward and backward pass through some products with `SplitSpMM`.

    Args:
        bytes_sent: to other ranks: rows of B there, and what comes back as their gradients.
        memory: bytes of the matrix and of what each product takes, gathers, receives and returns.
        seconds: time of the products and of what they wait for; a model, not a measurement.

    Example:
        >>> from insum_ops.distributed import GraphCost
        >>> GraphCost(bytes_sent=80, memory=400, seconds=1e-6).bytes_sent
        80
    """

    bytes_sent: int
    memory: int
    seconds: float


def graph_cost(
    rows: int,
    received: int,
    sent: int,
    entries: int,
    widths: Sequence[int],
    *,
    groups: int | None = None,
    itemsize: int = 4,
    link: float = 50e9,
    memory_bandwidth: float = 4.8e12,
) -> GraphCost:
    """Return what one rank needs for a step: products of these widths, and their gradients.

    A row of B that is received costs its width once there, and once back for its gradient. The time is the longer of
    what the links and what the memory take for the own columns, then what the memory takes for the rest; every entry
    of A is taken to read its row of B from memory, and each way to take as long as the other.

    Args:
        rows: this rank's rows of A, B and C.
        received: rows of B that come from other ranks, `SplitSpMM.rows_received`.
        sent: rows of B that go to other ranks, `SplitSpMM.rows_sent`.
        entries: stored entries of this rank's rows of A, with a format's padding.
        widths: the width of B in each product.
        groups: groups of the format; None if each row has one.
        itemsize: bytes of a value.
        link: bytes a second that a rank sends; the default is InfiniBand NDR, 400 Gb/s for each GPU.
        memory_bandwidth: bytes a second of its memory; the default is that of an H200.

    Returns:
        A `GraphCost`. Bytes and memory are exact, as far as the numbers passed in are; the time is a model.

    Raises:
        OperandError: a count is negative.

    Example:
        >>> from insum_ops.distributed import graph_cost
        >>> graph_cost(rows=10, received=3, sent=2, entries=40, widths=[4], groups=10).bytes_sent
        80
    """
    for name, count in {"rows": rows, "received": received, "sent": sent, "entries": entries}.items():
        if count < 0:
            raise OperandError(f"{name} is {count}; pass how many there are, 0 or more")
    width = sum(widths) * itemsize
    matrix = (rows if groups is None else groups) * INDEX + entries * (INDEX + itemsize) + sent * POSITION
    products = (2 * rows + sent + received) * width
    share = received / max(rows + received, 1)  # of the entries that wait for rows to come
    travel = max(sent, received) * width / link
    multiply = (entries * (INDEX + itemsize) * len(widths) + entries * width + rows * width) / memory_bandwidth
    seconds = 2 * (max(travel, (1 - share) * multiply) + share * multiply)
    return GraphCost((sent + received) * width, matrix + products, seconds)


def random_cut(nodes: int, degree: float, ranks: int) -> int:
    """Return how many rows a rank receives if nodes are dealt out at random: the expectation for equal degrees.

    Args:
        nodes: nodes of the whole graph.
        degree: edges to each node, on average.
        ranks: ranks that share the nodes.

    Returns:
        The rows: a node of another rank is needed unless all of its edges lead elsewhere. Unequal degrees need fewer.

    Raises:
        OperandError: `ranks` is below 1.

    Example:
        >>> from insum_ops.distributed import random_cut
        >>> random_cut(1000, 4.0, 1), random_cut(1000, 4.0, 4)
        (0, 513)
    """
    if ranks < 1:
        raise OperandError(f"ranks is {ranks}; pass at least 1")
    is_needed: float = 1 - (1 - 1 / ranks) ** degree
    return round(nodes * (1 - 1 / ranks) * is_needed)
