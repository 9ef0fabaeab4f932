"""The invariants of the formats, and the sentences that say which one is broken."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from .errors import FormatError
from .torch_state import is_batched, is_compiling, undifferentiated

Sizes = tuple[int, ...]
VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COORD_DTYPES = (torch.int32, torch.int64)
IF_COMPLEX = "multiply by the real and by the imaginary part"  # what to do with a matrix of complex values


def integer_sizes(name: str, value: Any) -> Sizes:
    """Return sizes as integers, from any kind of whole numbers; raise FormatError for anything else."""
    try:
        sizes = tuple(int(size) for size in value)
        is_whole = all(size == part for size, part in zip(sizes, value))
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        shown = list(value) if isinstance(value, (tuple, list)) else value
        raise FormatError(f"{name} is {shown}; it holds a whole number for each dimension")
    return sizes


def check_shape(shape: Sizes) -> None:
    if not shape:
        raise FormatError("shape is []; a sparse format has at least one dimension")
    for dim, size in enumerate(shape):
        if size < 0:
            raise FormatError(f"shape[{dim}] is {size}; a size is at least 0")


def normal_dim(name: str, dim: int, shape: Sizes) -> int:
    """Return `dim` counted from the front; raise FormatError if there is no such dimension."""
    ndim = len(shape)
    try:
        dim = index(dim)
    except TypeError:
        raise FormatError(f"{name} is {dim!r}; choose from {-ndim} to {ndim - 1}") from None
    if not -ndim <= dim < ndim:
        raise FormatError(f"{name} is {dim} but shape is {list(shape)}; choose from {-ndim} to {ndim - 1}")
    return dim % ndim


def check_block_size(kind: str, is_blocked: bool, block_size: Sizes | None, shape: Sizes) -> None:
    if not is_blocked:
        if block_size is not None:
            raise FormatError(f"{kind} has no blocks, so it takes no block_size; use BlockCOO or BlockGroupCOO")
        return
    if block_size is None:
        raise FormatError(f"{kind} needs block_size, a size for each dimension of shape {list(shape)}")
    if len(block_size) != len(shape):
        raise FormatError(
            f"block_size is {list(block_size)} but shape is {list(shape)}; give a size for each dimension"
        )
    for dim, size in enumerate(block_size):
        if size < 1:
            raise FormatError(f"block_size[{dim}] is {size}; a block is at least 1 wide")
    if any(block > size > 0 for block, size in zip(block_size, shape)):  # along a size of 0 there are no blocks
        noun = "matrix" if len(shape) == 2 else "tensor"
        raise FormatError(
            f"block_size is {list(block_size)} but shape is {list(shape)}; a block can't be larger than the {noun}"
        )


def check_group_size(kind: str, is_grouped: bool, group_size: int | None, shape: Sizes) -> None:
    if group_size is None:
        return
    if not is_grouped:
        raise FormatError(f"{kind} has no group size to choose; leave group_size out, or use GroupCOO or BlockGroupCOO")
    try:
        is_empty = index(group_size) < 1
    except TypeError:
        raise FormatError(f"group_size is {group_size!r}; give a whole number, or None to have one chosen") from None
    if is_empty:
        raise FormatError(f"group_size is {group_size}; a group holds at least one entry")
    if len(shape) == 1 and group_size > 1:
        raise FormatError(f"group_size is {group_size} but shape is {list(shape)}; a group of a vector holds one entry")


def check_dtype(name: str, values: Tensor) -> None:
    if values.dtype not in VALUE_DTYPES:
        raise FormatError(f"{name} is {values.dtype}; values are {_either(VALUE_DTYPES)}")


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        remedy = "from_numpy" if kind == "ndarray" else "tensor"
        raise FormatError(f"{name} is of type {kind}; pass torch.{remedy}({name})")
    if value.is_nested:
        raise FormatError(f"{name} is a nested tensor; pass {name}.to_padded_tensor(0)")


def pattern_part(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of coordinates without what a transform that differentiates wraps it in.

    Raises FormatError for one that vmap batches.
    """
    if is_compiling():
        return tensor
    tensor = undifferentiated(tensor)
    if is_batched(tensor):
        raise FormatError(
            f"{name} is batched by torch.func.vmap, but a format has one pattern for all examples; make the format "
            "outside and batch its values, A.with_values(values), or write index tensors into the statement"
        )
    return tensor


def check_has_numbers(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise FormatError(f"{name} is on the meta device, where it lists no entries; give it memory and numbers first")


def check_entries(coords: Tensor, values: Tensor, grid: Sizes, block_size: Sizes) -> None:
    """Raise FormatError unless `coords` [ndim, E] and `values` [E, *block_size] fit each other and the grid's shape."""
    check_dtype("values", values)
    if coords.dtype.is_floating_point or coords.dtype.is_complex or coords.dtype == torch.bool:
        raise FormatError(f"coords is {coords.dtype}; coordinates are integers")
    if coords.ndim != 2 or len(coords) != len(grid):
        raise FormatError(f"coords is {list(coords.shape)}; it must be [{len(grid)}, nnz], a row for each dimension")
    expected = [coords.shape[1], *block_size]
    if list(values.shape) != expected:
        raise FormatError(
            f"values is {list(values.shape)} but coords is {list(coords.shape)}; values must be {expected}"
        )
    _check_device("coords", coords, values)
    check_has_numbers("coords", coords)


def check_inside(coords: Tensor, grid: Sizes) -> None:
    """Raise FormatError if a coordinate [ndim, E] lies outside the grid."""
    if coords.shape[1] == 0:
        return
    lowest, highest = torch.stack([*coords.aminmax(dim=1)]).tolist()
    for dim, size in enumerate(grid):
        if lowest[dim] < 0 or highest[dim] >= size:
            entry = int(((coords[dim] < 0) | (coords[dim] >= size)).nonzero()[0])
            raise FormatError(
                f"coords[{dim}, {entry}] is {int(coords[dim, entry])}; "
                f"along dimension {dim} it is at least 0 and less than {size}"
            )


def check_values(values: Tensor, expected: Tensor) -> None:
    """Raise FormatError unless `values` can take the place of those that a format has."""
    check_tensor("values", values)
    check_dtype("values", values)
    if values.shape != expected.shape:
        raise FormatError(f"values is {list(values.shape)} but the pattern holds {list(expected.shape)}")
    if values.device != expected.device:
        raise FormatError(f"values is on {values.device} but the pattern is on {expected.device}; move one with .to()")


def check_parts(
    kind: str,
    coords: tuple[Tensor | None, ...],
    values: Tensor,
    rows: int | None,
    group_dim: int,
    block_size: Sizes,
    value_axes: tuple[str, ...],
) -> None:
    """Raise FormatError unless coordinates and values have the shapes, dtypes and device of the format `kind`.

    No data is read. `rows` is the number of rows if the row is p itself, None if the format stores it.
    """
    check_tensor("values", values)
    check_dtype("values", values)
    extents = values.shape[: len(value_axes)]
    if len(extents) < len(value_axes) or values.shape[len(value_axes) :] != block_size:
        axes = ", ".join([*value_axes, *map(str, block_size)]).upper()
        raise FormatError(f"values is {list(values.shape)}; in {kind} it must be [{axes}]")
    if rows is not None and rows != extents[0]:
        raise FormatError(
            f"values is {list(values.shape)}; in {kind} p is one of the {rows} rows of dimension {group_dim}"
        )
    if extents[1:] == (0,) and rows is None:
        raise FormatError(f"values is {list(values.shape)}; a group holds at least one entry")
    if len(coords) == 1 and extents[1:] not in ((), (1,)):
        raise FormatError(f"values is {list(values.shape)}; a group of a vector holds one entry")
    for dim, coord in enumerate(coords):
        is_stored = rows is None or dim != group_dim
        if coord is None:
            if is_stored:
                raise FormatError(f"coords[{dim}] is None, but {kind} stores this coordinate")
            continue
        if not is_stored:
            raise FormatError(f"coords[{dim}] is a tensor, but in {kind} the row is p itself; pass None")
        check_tensor(f"coords[{dim}]", coord)
        if coord.dtype not in COORD_DTYPES:
            raise FormatError(f"coords[{dim}] is {coord.dtype}; coordinates are {_either(COORD_DTYPES)}")
        expected = extents[:1] if dim == group_dim else extents
        if coord.shape != expected:
            raise FormatError(
                f"coords[{dim}] is {list(coord.shape)} but values is {list(values.shape)}; it must be {list(expected)}"
            )
        _check_device(f"coords[{dim}]", coord, values)


def check_coords(coords: tuple[Tensor | None, ...], grid: Sizes, group_dim: int, can_pad: bool) -> int:
    """Return how many slots are padding.

    Raises FormatError unless coordinates lie in the grid, rows ascend and padding is -1 in all coordinates.
    """
    stored = {dim: coord for dim, coord in enumerate(coords) if coord is not None}
    padded = [dim for dim in stored if dim != group_dim] if can_pad else []
    tests: list[tuple[str, int, Tensor]] = []  # problem, dimension, where it is
    for dim, coord in stored.items():
        lowest = -1 if dim in padded else 0
        tests.append(("outside", dim, (coord < lowest) | (coord.long() >= grid[dim])))
    if group_dim in stored:
        tests.append(("descends", group_dim, stored[group_dim][1:] < stored[group_dim][:-1]))
    for dim in padded[1:]:
        tests.append(("differs", dim, (stored[dim] < 0) != (stored[padded[0]] < 0)))

    counts = [where.sum() for _, _, where in tests] + [(stored[dim] < 0).sum() for dim in padded[:1]]
    totals = torch.stack(counts).tolist() if counts else []  # the one wait for the device
    for (problem, dim, where), count in zip(tests, totals, strict=False):
        if count:
            at = where.nonzero()[0].tolist()
            raise FormatError(_explain(problem, dim, at, stored, padded, grid))
    return totals[-1] if padded else 0


def _explain(problem: str, dim: int, at: list[int], stored: dict[int, Tensor], padded: list[int], grid: Sizes) -> str:
    """Return what is wrong with a coordinate, at which place of its tensor."""
    value = int(stored[dim][tuple(at)])
    if problem == "descends":
        at, before, value = [at[0] + 1], value, int(stored[dim][at[0] + 1])
        return f"coords[{dim}]{at} is {value} after {before}; it must ascend: from_coo sorts"
    if problem == "differs":
        first_value = int(stored[padded[0]][tuple(at)])
        return f"coords[{padded[0]}]{at} is {first_value} but coords[{dim}]{at} is {value}; padding is -1 in both"
    lowest = "-1 for padding, or at least 0" if dim in padded else "at least 0"
    return f"coords[{dim}]{at} is {value}; along dimension {dim} it is {lowest} and less than {grid[dim]}"


def _check_device(name: str, tensor: Tensor, values: Tensor) -> None:
    if tensor.device != values.device:
        raise FormatError(f"{name} is on {tensor.device} but values is on {values.device}; move one with .to()")


def _either(dtypes: Sequence[torch.dtype]) -> str:
    *first, last = map(str, dtypes)
    return f"{', '.join(first)} or {last}"
