"""Inputs of the same statistics as the real ones: sizes, degrees and skew of graphs, surfaces of rooms and scans."""

from __future__ import annotations

from functools import partial

import numpy as np

from .data import Pattern, from_edges

__all__ = ["GENERATED", "SMALL", "bipartite", "communities", "graph", "room", "scan"]


def graph(nodes: int, degree: float, skew: float, seed: int = 0) -> Pattern:
    """A random pattern whose row counts follow a power law: `skew` 0 is even, 0.5 and above has hubs."""
    generator = np.random.default_rng(seed)
    weight = (1.0 - generator.random(nodes)) ** -skew
    counts = np.minimum(generator.poisson(weight / weight.mean() * degree), nodes)
    rows = np.repeat(np.arange(nodes), counts)
    return from_edges(rows, generator.integers(0, nodes, len(rows)), (nodes, nodes))


def communities(count: int, size: int, degree: float, seed: int = 0) -> Pattern:
    """Many small graphs side by side, as in DD, PROTEINS and sets of molecules: edges stay near the diagonal."""
    generator = np.random.default_rng(seed)
    nodes = count * size
    rows = np.repeat(np.arange(nodes), generator.poisson(degree, nodes))
    columns = rows // size * size + generator.integers(0, size, len(rows))
    return from_edges(rows, columns, (nodes, nodes))


def bipartite(rows: int, columns: int, degree: float, skew: float, seed: int = 0) -> Pattern:
    """Users and items: rows and columns are two kinds of nodes."""
    generator = np.random.default_rng(seed)
    weight = (1.0 - generator.random(rows)) ** -skew
    counts = np.minimum(generator.poisson(weight / weight.mean() * degree), columns)
    at = np.repeat(np.arange(rows), counts)
    popular = (generator.random(len(at)) ** 2 * columns).astype(np.int64)
    return from_edges(at, popular, (rows, columns))


# in the order of the graphs of the TC-GNN sets that they stand for, from small to large
GENERATED = {
    "citations-2k": partial(graph, 2_700, 4, 0.3),
    "citations-20k": partial(graph, 20_000, 4.5, 0.4),
    "proteins-43k": partial(communities, 1_100, 39, 3.7),
    "hubs-60k": partial(graph, 60_000, 2.3, 0.8),
    "social-10k": partial(graph, 10_000, 65, 0.6),
    "dense-4k": partial(graph, 4_200, 500, 0.2),
    "users-items": partial(bipartite, 30_000, 41_000, 27, 0.5),
}
SMALL = ("citations-2k", "citations-20k", "proteins-43k", "hubs-60k")  # for a run on a CPU


def room(points: int = 400_000, seed: int = 0) -> np.ndarray:
    """An office of 8 x 6 x 3 metres, walls and furniture, sampled evenly on its surfaces; [n, 3]."""
    generator = np.random.default_rng(seed)
    boxes = [((0.0, 0.0, 0.0), (8.0, 6.0, 3.0)), ((1, 1, 0), (2.6, 1.8, 0.75)), ((4, 1, 0), (5.6, 1.8, 0.75))]
    boxes += [((6.8, 0.2, 0), (7.8, 0.6, 2)), ((3, 4, 0), (5, 5, 0.75))]
    areas = [2 * (a * b + b * c + a * c) for a, b, c in ((np.subtract(high, low)) for low, high in boxes)]
    counts = np.ceil(points * np.array(areas) / sum(areas)).astype(int)
    surfaces = [_box(generator, np.array(low), np.array(high), n) for (low, high), n in zip(boxes, counts)]
    return np.concatenate(surfaces)[:points].astype(np.float32)


def _box(generator: np.random.Generator, low: np.ndarray, high: np.ndarray, points: int) -> np.ndarray:
    extent = high - low
    areas = np.array([extent[1] * extent[2], extent[0] * extent[2], extent[0] * extent[1]])
    axis = generator.choice(3, points, p=areas / areas.sum())
    on_box = generator.random((points, 3))
    on_box[np.arange(points), axis] = generator.integers(0, 2, points)
    return np.asarray(low + on_box * extent)


def scan(points: int = 120_000, seed: int = 0) -> np.ndarray:
    """A street as a turning laser of 64 beams sees it: rings that thin out with the distance; [n, 3]."""
    generator = np.random.default_rng(seed)
    beams, height = 64, 1.73
    down = np.deg2rad(np.linspace(-24.8, 2.0, beams))[generator.integers(0, beams, points)]
    around = generator.random(points) * 2 * np.pi
    to_ground = np.where(down < -0.01, height / np.tan(np.maximum(-down, 0.01)), 80.0)
    to_wall = 12.0 / np.maximum(np.abs(np.sin(around)), 0.1) + generator.normal(0, 0.3, points)
    distance = np.minimum(to_ground, to_wall)
    flat = np.stack([distance * np.cos(around), distance * np.sin(around), distance * np.tan(down)], 1)
    return flat.astype(np.float32)
