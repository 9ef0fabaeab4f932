"""Patterns: masks [out_blocks, in_blocks] of the stored blocks of a weight, drawn at random or by the blocks' norms."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from operator import index

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..compiler import OperandError, ShapeError
from ..formats.check import COORD_DTYPES, VALUE_DTYPES

__all__ = [
    "block_grid",
    "block_norms",
    "check_block_size",
    "check_density",
    "check_dtype",
    "check_features",
    "check_generator",
    "check_mask",
    "check_threshold",
    "inside",
    "inside_grid",
    "is_pattern",
    "largest",
    "num_blocks",
    "random_mask",
    "row_bounds",
    "uniform",
    "weight_and_bias",
]

Pair = tuple[int, int]


def check_features(name: str, value: int) -> int:
    """Return a number of features; refuse what is no whole number of at least 1."""
    size = _whole(value)
    if size is None or size < 1:
        raise ShapeError(f"{name} is {value!r}; give a whole number of at least 1")
    return size


def check_block_size(block_size: int | Sequence[int], shape: Pair) -> Pair:
    """Return a block size (out, in); refuse one that is larger than a weight of this shape."""
    pair = tuple(block_size) if isinstance(block_size, (list, tuple, torch.Size)) else (block_size, block_size)
    sizes = [size for size in map(_whole, pair) if size is not None and size > 0]
    if len(pair) != 2 or len(sizes) != 2:
        raise ShapeError(f"block_size is {block_size!r}; give a whole number of at least 1, or two of them (out, in)")
    if sizes[0] > shape[0] or sizes[1] > shape[1]:
        raise ShapeError(
            f"block_size is {tuple(sizes)} but the weight is {list(shape)}; a block can't be larger than the matrix"
        )
    return sizes[0], sizes[1]


def check_density(density: float) -> float:
    """Return a density; refuse what is no number above 0 and up to 1."""
    if not _is_number(density) or not 0 < density <= 1:
        raise OperandError(f"density is {density!r}; give a number above 0 and up to 1, the share of blocks to keep")
    return float(density)


def check_threshold(threshold: float | None) -> float:
    """Return a threshold; refuse what is no number of at least 0."""
    if threshold is None or not _is_number(threshold) or not threshold >= 0:
        raise OperandError(f"threshold is {threshold!r}; give a number of at least 0, which a kept norm exceeds")
    return float(threshold)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that a weight can't have."""
    if dtype not in VALUE_DTYPES:
        *first, last = map(str, VALUE_DTYPES)
        raise OperandError(f"{name} is {dtype}; a weight is {', '.join(first)} or {last}")


def check_generator(generator: object) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        kind = type(generator).__name__
        raise OperandError(f"generator is of type {kind}; give a torch.Generator, as torch.Generator().manual_seed(0)")


def check_mask(name: str, mask: Tensor, grid: Pair, device: torch.device) -> None:
    """Refuse what is no bool tensor with an element for each block, on the layer's device.

    A layer on the meta device takes it from any other: its blocks are counted, and their values come later.
    """
    if not isinstance(mask, Tensor):
        raise OperandError(f"{name} is of type {type(mask).__name__}; give a bool tensor {list(grid)}, one per block")
    if mask.dtype != torch.bool:
        raise OperandError(f"{name} is {mask.dtype}; give torch.bool, as in {name}={name} != 0")
    if tuple(mask.shape) != grid:
        raise ShapeError(f"{name} is {list(mask.shape)} but the blocks are {list(grid)}; give one bool per block")
    if mask.device != device and device.type != "meta":
        raise OperandError(f"{name} is on {mask.device} but the layer is on {device}; move one with .to()")
    if mask.is_meta:
        raise OperandError(f"{name} is on the meta device, where it has no values; give one on another device")


def block_grid(shape: Pair, block_size: Pair) -> Pair:
    """Return how many blocks cover each side.

    >>> block_grid((100, 64), (32, 32))
    (4, 2)
    """
    return -(-shape[0] // block_size[0]), -(-shape[1] // block_size[1])


def num_blocks(density: float, grid: Pair) -> int:
    """Return the whole number of blocks that is nearest to a share of them, at least one."""
    return max(1, round(density * grid[0] * grid[1]))


def random_mask(grid: Pair, density: float, allow_empty_rows: bool, generator: torch.Generator | None) -> Tensor:
    """Return a random mask of `num_blocks` blocks, with one in every row unless `allow_empty_rows`.

    A seed gives one mask, whatever the device of the layer.

    >>> random_mask((2, 4), 0.25, False, torch.Generator().manual_seed(0)).sum(1).tolist()
    [1, 1]
    """
    device = "cpu" if generator is None else generator.device
    scores = torch.rand(grid, generator=generator, device=device)
    count = num_blocks(density, grid)
    if not allow_empty_rows:
        scores.scatter_(1, scores.argmax(1, keepdim=True), 2.0)  # above every other score
        count = max(count, grid[0])
    return largest(scores, count)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` highest scores; of equal ones the first."""
    order = scores.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[order[:count]] = True
    return mask.view(scores.shape)


def block_norms(blocks: Tensor) -> Tensor:
    """Return the Frobenius norm of each block [..., bo, bi], in float32 at least: half precision would overflow."""
    wide = torch.promote_types(blocks.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(blocks.detach(), dim=(-2, -1), dtype=wide)
    return norms


def weight_and_bias(dense: nn.Linear | Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a Linear's weight and bias, or the caller's; refuse those that do not fit each other."""
    if isinstance(dense, nn.Linear):
        if any(map(is_lazy, dense.parameters())):
            raise OperandError("dense is a LazyLinear without values before its first call; call it once")
        if bias is not None:
            raise OperandError("bias goes with a weight, but dense is a Linear, which brings its own; leave bias out")
        weight, bias = dense.weight.detach(), dense.bias
    elif isinstance(dense, Tensor):
        weight = dense.detach()
    else:
        raise OperandError(f"dense is of type {type(dense).__name__}; give a torch.nn.Linear or its weight [out, in]")
    if weight.layout is not torch.strided:
        raise OperandError(f"dense is a {weight.layout} tensor; give a dense one, as in dense.to_dense()")
    if weight.is_meta:
        raise OperandError("dense is on the meta device, where it has no values; give it memory and values first")
    if weight.ndim != 2:
        raise ShapeError(f"dense is {list(weight.shape)}; give a weight [out, in]")
    check_dtype("dense", weight.dtype)
    if bias is None:
        return weight, None
    if not isinstance(bias, Tensor):
        raise OperandError(f"bias is of type {type(bias).__name__}; give a tensor [out], or leave it out")
    if tuple(bias.shape) != (len(weight),):
        raise ShapeError(f"bias is {list(bias.shape)} but dense is {list(weight.shape)}; give one number per output")
    if (bias.dtype, bias.device) != (weight.dtype, weight.device):
        raise OperandError(
            f"bias is {bias.dtype} on {bias.device} but dense is {weight.dtype} on {weight.device}; move one with .to()"
        )
    return weight, bias.detach()


def inside(coords: Tensor, block_size: Pair, shape: Pair) -> Tensor:
    """Return which elements of the blocks at `coords` [2, P] lie in the matrix: bool [P, *block_size] or [1, 1, 1]."""
    if shape[0] % block_size[0] == 0 and shape[1] % block_size[1] == 0:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=coords.device)
    first, second = (
        (coords[side].long() * block_size[side])[:, None] + torch.arange(block_size[side], device=coords.device)
        for side in (0, 1)
    )
    return (first < shape[0])[:, :, None] & (second < shape[1])[:, None, :]


def inside_grid(coords: Tensor, grid: Pair) -> Tensor:
    """Return which of the blocks at `coords` [2, P] lie in the grid: bool [P]."""
    return ((coords >= 0) & (coords < coords.new_tensor(grid)[:, None])).all(0)


def is_pattern(coords: Tensor, grid: Pair) -> bool:
    """Whether `coords` lists blocks of this grid row by row, none twice; uninitialised memory hardly ever does."""
    if coords.ndim != 2 or len(coords) != 2 or coords.dtype not in COORD_DTYPES:
        return False
    rows, columns = coords.long()
    is_right = torch.cat([inside_grid(coords, grid), (rows * grid[1] + columns).diff() > 0])
    return torch.equal(is_right, torch.ones_like(is_right))  # not `bool`, of which a compiler warns


def row_bounds(coords: Tensor, grid: Pair, width: int, in_features: int) -> Tensor:
    """Return 1 / sqrt(the inputs that each block row reads) [out_blocks], 0 where it reads none."""
    widths = torch.full((grid[1],), width, device=coords.device)
    widths[-1] = in_features - (grid[1] - 1) * width
    inputs = widths.new_zeros(grid[0]).index_add_(0, coords[0].long(), widths[coords[1].long()])
    return torch.where(inputs > 0, inputs.double().rsqrt(), 0.0)


def uniform(limits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return numbers drawn uniformly from -limits to limits, on the generator's device and then moved."""
    device = limits.device if generator is None else generator.device
    drawn = torch.empty(limits.shape, dtype=limits.dtype, device=device).uniform_(-1, 1, generator=generator)
    return drawn.to(limits.device) * limits


def _is_number(value: object) -> bool:
    """Whether a value is a real number, numpy's included, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(value: object) -> int | None:
    """Return a value as an int, or None if it is no whole number."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
