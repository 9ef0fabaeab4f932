"""Inputs of the same statistics as the real ones: sizes, degrees and skew of graphs, surfaces of rooms and scans.

What stands for what, and what the real graph has: its rows, the mean of their degrees, how widely these vary (their
deviation over the mean) and the largest. Next to no row is empty: 21 of REDDIT-BINARY, 5 of PROTEINS.

| generated | stands for | rows | mean | variation | largest |
|---|---|---:|---:|---:|---:|
| citations-2k | cora | 2,708 | 3.9 | 1.34 | 168 |
| citations-20k | pubmed | 19,717 | 4.5 | 1.65 | 171 |
| proteins-43k | PROTEINS | 43,471 | 3.7 | 0.31 | 25 |
| proteins-335k | DD | 334,925 | 5.0 | 0.33 | 19 |
| hubs-859k, hubs-86k on a CPU | REDDIT-BINARY | 859,254 | 2.3 | 8.92 | 3,062 |
| social-10k | blogcatalog3 | 10,312 | 64.8 | 2.74 | 3,992 |
| social-19k | fb-Cornell5 | 18,660 | 84.8 | 1.01 | 3,156 |
| dense-4k | ogbl-ddi | 4,267 | 500.5 | 0.84 | 2,234 |
| users-items | gowalla-bip | 70,839 | 22.9 | 1.53 | 1,415 |

Clouds, by pairs of a convolution 3^3 for each voxel, at 2 and at 5 cm:

| generated | stands for | voxels at 5 cm | pairs at 2 cm | pairs at 5 cm |
|---|---|---:|---:|---:|
| generated-room | s3dis_room | 65,667 | 8.70 | 10.30 |
| generated-scan | kitti_000000 | 79,943 | 2.22 | 4.97 |

What is generated keeps to these within a fifth. Columns are drawn by the same degrees, and near the row where the
real graph is many small ones; the pattern is not symmetric.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .data import Pattern, from_edges

__all__ = ["GENERATED", "SMALL", "graph", "room", "scan", "wired"]

# of the rows, by degree, and the degrees there; in between, logarithms are interpolated
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.997, 0.999, 0.9997, 0.9999, 1.0)
DEGREES = {
    "cora": (1, 1, 2, 3, 5, 7, 12, 19, 34, 65, 78, 168, 168),
    "pubmed": (1, 1, 1, 2, 4, 12, 23, 35, 52, 69, 88, 131, 171),
    "PROTEINS": (1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 11, 15, 25),
    "DD": (1, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 19),
    "REDDIT-BINARY": (1, 1, 1, 1, 2, 3, 7, 12, 26, 135, 365, 1067, 3062),
    "blogcatalog3": (1, 4, 8, 21, 56, 136, 340, 701, 1677, 2535, 2976, 3925, 3992),
    "fb-Cornell5": (1, 8, 27, 64, 119, 186, 264, 343, 453, 583, 963, 1938, 3156),
    "ogbl-ddi": (1, 10, 109, 446, 770, 1107, 1362, 1632, 1895, 2091, 2219, 2234, 2234),
    "gowalla-bip": (1, 8, 10, 13, 23, 43, 89, 159, 274, 417, 628, 894, 1415),
}
TURNS = 40  # of drawing, 15 at most for the graphs below; of few nodes a row may not find as many as it should have
BY_DEGREE = 4  # turns in which columns are drawn by their degrees: a row of many would not find the last ones so


def graph(nodes: int, degree: float, skew: float, seed: int = 0) -> Pattern:
    """A random pattern whose row counts follow a power law: `skew` 0 is even, 0.5 and above has hubs."""
    generator = np.random.default_rng(seed)
    weight = (1.0 - generator.random(nodes)) ** -skew
    counts = np.minimum(generator.poisson(weight / weight.mean() * degree), nodes)
    rows = np.repeat(np.arange(nodes), counts)
    return from_edges(rows, generator.integers(0, nodes, len(rows)), (nodes, nodes))


def wired(like: str, nodes: int, reach: float | None = None, is_bipartite: bool = False, seed: int = 0) -> Pattern:
    """A pattern whose rows have the degrees of a real graph, each column once in a row.

    Columns are drawn by their degrees: from all, from those about `reach` rows away (or as far as a row has entries),
    or from the other of two kinds of nodes.
    """
    generator = np.random.default_rng(seed)
    degrees = generator.permutation(_degrees(DEGREES[like], nodes))
    ends = np.repeat(np.arange(nodes), degrees)  # of edges, row after row
    first, half = np.cumsum(degrees) - degrees, len(ends) // 2
    keys, missing = np.empty(0, np.int64), degrees
    for turn in range(TURNS):
        rows = np.repeat(np.arange(nodes), missing)
        anywhere = generator.random(len(rows))
        at = first[rows] + (anywhere * degrees[rows]).astype(np.int64)
        if reach is not None:
            scale = np.maximum(reach * len(ends) / nodes, degrees[rows]) * 2.0**turn
            at = at + np.clip(generator.standard_cauchy(len(rows)) * scale, -1e15, 1e15).astype(np.int64)
            columns = ends[at % len(ends)]
        elif is_bipartite:
            columns = ends[(anywhere * half).astype(np.int64) + np.where(at < half, half, 0)]
        elif turn < BY_DEGREE:
            columns = ends[(anywhere * len(ends)).astype(np.int64)]
        else:
            columns = (anywhere * nodes).astype(np.int64)
        keys = np.sort(np.concatenate([keys, rows * nodes + columns]))
        keys = keys[np.diff(keys, prepend=-1) > 0]
        missing = degrees - np.bincount(keys // nodes, minlength=nodes)
        if not missing.any():
            break
    return from_edges(keys // nodes, keys % nodes, (nodes, nodes))


def _degrees(known: tuple[int, ...], nodes: int) -> np.ndarray:
    shares = (np.arange(nodes) + 0.5) / nodes
    shares[-1] = 1.0  # the largest is there, however few there are
    return np.rint(np.exp(np.interp(shares, SHARES, np.log(known)))).astype(np.int64)


# in the order of the graphs that they stand for, from small to large; the names say what a row of the results is
GENERATED: dict[str, Callable[[], Pattern]] = {
    "citations-2k": partial(wired, "cora", 2_708),
    "citations-20k": partial(wired, "pubmed", 19_717),
    "proteins-43k": partial(wired, "PROTEINS", 43_471, reach=5),
    "proteins-335k": partial(wired, "DD", 334_925, reach=10),
    "hubs-859k": partial(wired, "REDDIT-BINARY", 859_254, reach=150),
    "social-10k": partial(wired, "blogcatalog3", 10_312),
    "social-19k": partial(wired, "fb-Cornell5", 18_660),
    "dense-4k": partial(wired, "ogbl-ddi", 4_267),
    "users-items": partial(wired, "gowalla-bip", 70_839, is_bipartite=True),
}
# for a run on a CPU
SMALL: dict[str, Callable[[], Pattern]] = {
    **{name: GENERATED[name] for name in ("citations-2k", "citations-20k", "proteins-43k")},
    "hubs-86k": partial(wired, "REDDIT-BINARY", 85_925, reach=150),
}


def room(points: int = 737_000, seed: int = 0) -> np.ndarray:
    """An office of 5.8 x 6 x 3.1 metres, walls and furniture, sampled evenly on its surfaces; [n, 3]."""
    generator = np.random.default_rng(seed)
    boxes = [((0.0, 0.0, 0.0), (5.8, 6.0, 3.1)), ((1, 1, 0), (2.6, 1.8, 0.75)), ((3.6, 1, 0), (5.2, 1.8, 0.75))]
    boxes += [((3, 4, 0), (5, 5, 0.75))]
    boxes += [((0.1, 2.2, 0.4 * shelf), (0.4, 4.6, 0.4 * shelf + 0.3)) for shelf in range(5)]
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


def scan(points: int = 115_000, seed: int = 0) -> np.ndarray:
    """A street as a turning laser of 64 beams sees it: rings that thin out with the distance; [n, 3]."""
    generator = np.random.default_rng(seed)
    beams, height, near, far = 64, 1.73, 6.0, 14.0  # metres: of the laser, and to the walls on its two sides
    each = -(-points // beams)
    down = np.repeat(np.deg2rad(np.linspace(-24.8, 2.0, beams)), each)[:points]
    around = np.tile(np.arange(each) * 2 * np.pi / each, beams)[:points]
    to_ground = np.where(down < -0.01, height / np.tan(np.maximum(-down, 0.01)), 80.0)
    to_wall = np.where(np.sin(around) > 0, near, far) / np.maximum(np.abs(np.sin(around)), 0.1)
    distance = np.minimum(to_ground, to_wall) + generator.normal(0, 0.01, points)
    flat = np.stack([distance * np.cos(around), distance * np.sin(around), distance * np.tan(down)], 1)
    return flat.astype(np.float32)
