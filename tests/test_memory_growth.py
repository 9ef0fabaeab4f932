"""Memory stays flat however many sizes come: a new cloud, graph or batch at each step leaves nothing behind."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from process_caches import caches
from statements import IS_INTERPRETED, IS_THOROUGH
from tolerances import TOLERANCE
from torch import Tensor, nn

from insum_ops import insum, spmm
from insum_ops import nn as layers
from insum_ops.formats import GroupCOO
from insum_ops.lru_cache import LRUCache
from insum_ops.nn import BlockSparseLinear, SparseConv3d, SparseConvTensor, SparseInverseConv3d, SubMConv3d

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(IS_INTERPRETED, reason="hundreds of steps, of which each is slow there"),
]

WARM_UP = 16  # steps, after which the smallest caches are full, and runs that wait for one of other lengths are there
STEPS = 5  # of a window
SPMM = "C[I[p],n] += V[p] * B[J[p],n]"

Step = Callable[[int], Tensor]  # of training on so many voxels, edges, nodes or tokens: its result


def cloud(voxels: int, channels: int) -> SparseConvTensor:
    size = 16
    generator = torch.Generator().manual_seed(voxels)
    keys = torch.randperm(size**3, generator=generator)[:voxels]
    indices = torch.stack([torch.zeros_like(keys), keys // size**2, keys // size % size, keys % size], 1).int()
    return SparseConvTensor(torch.randn(voxels, channels, generator=generator), indices, [size] * 3, 1)


def convolution() -> Step:
    layer = SubMConv3d(2, 2, 3)

    def step(voxels: int) -> Tensor:
        result: Tensor = layer(cloud(voxels, 2)).features
        result.sum().backward()
        return result.detach()

    return step


def u_net() -> Step:
    model = nn.Sequential(
        SubMConv3d(3, 3, 3, indice_key="fine"),
        SparseConv3d(3, 4, 2, stride=2, indice_key="down"),
        SparseInverseConv3d(4, 3, 2, indice_key="down"),
        SubMConv3d(3, 3, 3, indice_key="fine"),
    )

    def step(voxels: int) -> Tensor:
        result: Tensor = model(cloud(voxels, 3)).features
        result.sum().backward()
        return result.detach()

    return step


def graph(edges: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(edges)
    edge_index = torch.randint(0, 40, (2, edges), generator=generator)
    return edge_index, torch.randn(edges, generator=generator).requires_grad_(), torch.randn(40, 3, generator=generator)


def spmm_of_edges() -> Step:
    def step(edges: int) -> Tensor:
        edge_index, weights, x = graph(edges)
        result = spmm((edge_index, weights, 40), x.requires_grad_())
        result.sum().backward()
        return result.detach()

    return step


def spmm_of_torch_sparse() -> Step:
    def step(nodes: int) -> Tensor:
        generator = torch.Generator().manual_seed(nodes)
        entries = torch.randint(0, nodes, (2, 300), generator=generator)
        A = torch.sparse_coo_tensor(
            entries, torch.randn(300, generator=generator), (nodes, nodes), check_invariants=True
        ).coalesce()
        x = torch.randn(nodes, 3, generator=generator)
        result = spmm(A.requires_grad_(), x.requires_grad_())
        result.sum().backward()
        return result.detach()

    return step


def spmm_of_a_format() -> Step:
    A = GroupCOO.from_dense(torch.eye(12))

    def step(columns: int) -> Tensor:
        B = torch.randn(12, columns, generator=torch.Generator().manual_seed(columns)).requires_grad_()
        result = spmm(A, B)
        result.sum().backward()
        return result.detach()

    return step


def statement() -> Step:
    def step(entries: int) -> Tensor:
        (rows, columns), V, B = graph(entries)
        result = insum(SPMM, I=rows, J=columns, V=V, B=B.requires_grad_(), size=(40, 3))
        result.sum().backward()
        return result.detach()

    return step


def maximum() -> Step:
    def step(entries: int) -> Tensor:
        (rows, columns), V, B = graph(entries)
        text = "C[I[p],n] = max(V[p] * B[J[p],n])"
        result = insum(text, I=rows, J=columns, V=V, B=B.requires_grad_(), size=(40, 3))
        result.sum().backward()
        return result.detach()

    return step


def block_sparse_linear() -> Step:
    layer = BlockSparseLinear(32, 32, block_size=(16, 16), density=0.5)

    def step(tokens: int) -> Tensor:
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens)).requires_grad_()
        result: Tensor = layer(x)
        result.sum().backward()
        return result.detach()

    return step


def tensor_product() -> Step:
    pytest.importorskip("e3nn")
    paths = [(0, 1, 1, "uvu", True), (1, 1, 0, "uvu", True)]
    layer = layers.TensorProduct(
        "4x0e+4x1o", "1x0e+1x1o", "4x0e+4x1o", paths, shared_weights=False, internal_weights=False
    )

    def step(edges: int) -> Tensor:
        generator = torch.Generator().manual_seed(edges)
        src, dst = torch.randint(0, 40, (2, edges), generator=generator)
        shapes = (40, 16), (edges, 4), (edges, layer.weight_numel)
        x, y, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
        result: Tensor = layer(x, y, weight, src=src, dst=dst, num_nodes=40)
        result.sum().backward()
        return result.detach()

    return step


def shared_tensor_product() -> Step:
    pytest.importorskip("e3nn")
    layer = layers.FullyConnectedTensorProduct("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o")

    def step(rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        x, y = (torch.randn(rows, width, generator=generator).requires_grad_() for width in (8, 4))
        result: Tensor = layer(x, y)
        result.sum().backward()
        return result.detach()

    return step


def sizes() -> Iterator[int]:
    """Ever other ones; odd and of one power of two, as far as that, so that what is kept by it does not count."""
    return count(513, 2)


ENTRIES: list[Callable[[], Step]] = [u_net, spmm_of_edges, statement, block_sparse_linear, tensor_product]
if IS_THOROUGH:
    ENTRIES += [convolution, shared_tensor_product, spmm_of_torch_sparse, spmm_of_a_format, maximum]


@pytest.fixture
def _smallest_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every cache forgets after three entries, and objects that were there before are not counted."""
    make, limits = LRUCache.__init__, [(cache, cache.limit) for cache in caches()]

    def smallest(cache: LRUCache[object], limit: int) -> None:
        make(cache, 3)

    monkeypatch.setattr(LRUCache, "__init__", smallest)
    for cache, limit in limits:
        cache.clear()
        smallest(cache, limit)
    gc.collect()
    gc.freeze()
    yield
    for cache, limit in limits:
        cache.clear()
        make(cache, limit)


def least_objects(step: Step, size: Iterator[int]) -> int:
    """The least number of objects that is there after one of some steps: caches fill, and forget many at once."""
    counts = []
    for _ in range(STEPS):
        step(next(size))
        gc.collect()
        counts.append(len(gc.get_objects()))
    return min(counts)


@pytest.mark.usefixtures("_smallest_caches")
@pytest.mark.parametrize("make", ENTRIES)
def test_new_sizes_at_every_step_leave_nothing_behind(
    make: Callable[[], Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    step, size = make(), sizes()
    first = step(511)
    for _ in range(WARM_UP):
        step(next(size))
    before = least_objects(step, size)
    assert least_objects(step, size) - before < STEPS, "a step leaves an object behind"
    for _ in range(3):  # what was forgotten meanwhile is made again, and kept
        torch.testing.assert_close(step(511), first, **TOLERANCE[torch.float32])
    remembered, put = [], LRUCache.__setitem__

    def put_for_ever(cache: LRUCache[object], key: object, value: object) -> None:
        remembered.append((key, value))
        put(cache, key, value)

    monkeypatch.setattr(LRUCache, "__setitem__", put_for_ever)
    before = least_objects(step, size)
    assert least_objects(step, size) - before > 3 * STEPS, "caches that never forget would not be noticed"


def test_new_statements_leave_no_text_behind() -> None:
    """As a factor that changes from step to step makes them: torch.fx never forgets the text of a GraphModule."""
    A = torch.rand(3)
    insum("C[i] += 2 * A[i]", A=A)
    before = len(linecache.cache)
    for number in range(20):
        torch.testing.assert_close(insum(f"C[i] += {number}.5 * A[i]", A=A), (number + 0.5) * A)
    assert len(linecache.cache) == before


def test_many_shapes_in_turn_are_right_though_most_are_forgotten_between() -> None:
    lengths = [*range(1, 400), *range(1, 400, 7)]
    for entries in lengths:
        (rows, columns), V, B = graph(entries)
        dense = torch.zeros(40, 40).index_put((rows, columns), V.detach(), accumulate=True) @ B
        found = insum(SPMM, I=rows, J=columns, V=V, B=B, size=(40, 3))
        torch.testing.assert_close(found, dense, **TOLERANCE[torch.float32])
