"""Random legal statements with their tensors: `statements()` is the strategy of every property test."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from reference import Position
from tolerances import DTYPES
from torch import Tensor

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

DEVICE = os.environ.get("INSUM_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_THOROUGH = os.environ.get("INSUM_TESTS") == "thorough"  # `make test-thorough`

# The largest extent when a statement has that many index names: the loop nest stays below 700 points.
LARGEST = {1: 6, 2: 6, 3: 6, 4: 4, 5: 3}
LARGEST_INTERPRETED = {1: 6, 2: 5, 3: 4, 4: 3, 5: 2}
DEEPEST = 3

# Among them what generated code uses itself; a tensor and an index may share a name.
TENSOR_NAMES = (
    *(
        "A",
        "B",
        "C",
        "D",
        "E",
        "F",
        "AV",
        "AK",
        "B_",
        "Weight",
        "long_name_2",
        "x0",
        "_",
        "__a",
        "i",
        "n",
        "p",
    ),
    *("tl", "acc", "range", "mask", "pid", "BLOCK_N", "stride_A0"),
)
INDEX_NAMES = (
    "i",
    "j",
    "k",
    "n",
    "p",
    "q",
    "row",
    "col3",
    "_x",
    "tl",
    "acc",
    "range",
    "offs",
    "A",
    "pid",
    "N",
    "sum",
)


def examples(plain: int, interpreted: int) -> int:
    """How many examples a thorough test draws, or a quarter of them.

    The interpreter needs about 15 ms for each program of a kernel, a GPU compiles it.
    """
    if DEVICE.startswith("cuda"):
        return max(plain // 4, interpreted)
    many = interpreted if IS_INTERPRETED else plain
    return many if IS_THOROUGH else max(many // 4, 3)


LAYOUTS = ("contiguous", "contiguous", "transposed", "strided", "expanded")


def base_shape(layout: str, shape: Position) -> Position:
    """The shape of the memory that a tensor of `shape` is a view of."""
    if layout == "transposed":
        return shape[::-1]
    if layout == "strided" and shape:
        return (*shape[:-1], 2 * shape[-1] + 1)
    return (min(shape[0], 1), *shape[1:]) if layout == "expanded" and shape else shape


def view(layout: str, base: Tensor, shape: Position) -> Tensor:
    """The tensor of `shape` that lies in `base`, which has `base_shape(layout, shape)`."""
    if layout == "transposed":
        return base.permute(tuple(range(len(shape)))[::-1])
    if layout == "strided" and shape:
        return base[..., 1::2]
    return base.expand(shape)


@dataclass(frozen=True)
class Operand:
    """A tensor as contiguous memory and the view of it that is passed."""

    base: Tensor
    layout: str
    shape: Position

    @property
    def tensor(self) -> Tensor:
        return view(self.layout, self.base, self.shape)


@dataclass(frozen=True)
class Case:
    """One call: an expression, its operands by name and `size=`."""

    expr: str
    operands: dict[str, Operand]
    size: Position | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: operand.tensor for name, operand in self.operands.items()}

    @property
    def value_names(self) -> list[str]:
        return [name for name, operand in self.operands.items() if operand.base.is_floating_point()]

    def with_bases(self, bases: Mapping[str, Tensor]) -> Case:
        operands = {
            name: replace(operand, base=bases[name]) if name in bases else operand
            for name, operand in self.operands.items()
        }
        return replace(self, operands=operands)

    def poisoned(self, touched: Mapping[str, set[Position]], poison: float) -> Case:
        """The same call with `poison` wherever no product reads: it must not make a difference."""
        bases = {}
        for name, places in touched.items():
            operand = self.operands[name]
            is_touched = torch.zeros(operand.base.shape, dtype=torch.bool)
            seen = view(operand.layout, is_touched, operand.shape)
            for place in places:
                seen[place] = True
            bases[name] = operand.base.masked_fill(~is_touched.to(operand.base.device), poison)
        return self.with_bases(bases)


@dataclass
class _Author:
    """Writes one statement, inventing tensors as it goes."""

    draw: Callable[[Any], Any]
    extents: dict[str, int]
    tensor_names: list[str]
    is_distinct: bool  # no tensor occurs twice
    shapes: dict[str, Position] = field(default_factory=dict)
    targets: dict[str, int] = field(default_factory=dict)  # an index tensor holds positions below its target
    known: set[str] = field(default_factory=set)  # index names whose extent a tensor tells

    def chance(self, percent: int) -> bool:
        return bool(self.draw(st.integers(0, 99)) >= 100 - percent)

    def factor(self) -> str:
        reusable = [] if self.is_distinct else [name for name in self.shapes if name not in self.targets]
        if reusable and self.chance(25):
            name = self.draw(st.sampled_from(reusable))
            return self.spell(name, [self.fitting_index(extent, 0) for extent in self.shapes[name]])
        if self.chance(4):
            return self.invent([], depth=0)
        return self.invent(self.indices(self.draw(st.integers(1, 4)), 0), depth=0)

    def indices(self, count: int, depth: int) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for _ in range(count):
            found.append(
                self.free_index(depth, [name for name in self.extents if (name, self.extents[name]) not in found])
            )
        return found

    def free_index(self, depth: int, unused: Sequence[str]) -> tuple[str, int]:
        """An index and the extent that its dimension then has; mostly not a diagonal."""
        if depth < DEEPEST and self.chance(22):
            extent = 0 if self.chance(2) else self.draw(st.integers(1, 5))
            return self.indirection(extent, depth), extent
        if self.chance(8):
            constant = self.draw(st.integers(0, 2))
            return str(constant), constant + self.draw(st.integers(1, 2))
        name = self.draw(st.sampled_from(unused if unused and self.chance(80) else list(self.extents)))
        return name, self.extents[name]

    def fitting_index(self, extent: int, depth: int) -> tuple[str, int]:
        """An index for a dimension whose extent is settled."""
        names = [name for name, own in self.extents.items() if own == extent]
        if names and self.chance(70):
            return self.draw(st.sampled_from(names)), extent
        if extent > 0 and (depth == DEEPEST or self.chance(40)):
            return str(self.draw(st.integers(0, extent - 1))), extent
        return self.indirection(extent, depth), extent

    def indirection(self, extent: int, depth: int) -> str:
        reusable = [] if self.is_distinct else [name for name, target in self.targets.items() if target <= extent]
        if reusable and self.chance(25):
            name = self.draw(st.sampled_from(reusable))
            if depth + 1 < DEEPEST or 0 not in self.shapes[name]:
                return self.spell(name, [self.fitting_index(n, depth + 1) for n in self.shapes[name]])
        return self.invent(self.indices(self.draw(st.sampled_from((1, 1, 1, 2, 3))), depth + 1), depth + 1, extent)

    def invent(self, indices: Sequence[tuple[str, int]], depth: int, target: int | None = None) -> str:
        name = self.tensor_names.pop()
        self.shapes[name] = tuple(extent for _, extent in indices)
        if depth > 0:
            assert target is not None
            self.targets[name] = target
        return self.spell(name, indices)

    def spell(self, name: str, indices: Sequence[tuple[str, int]]) -> str:
        self.known |= {text for text, _ in indices if text in self.extents}
        return f"{name}[{','.join(text for text, _ in indices) or '()'}]"


@st.composite
def statements(
    draw: Any,
    dtypes: Sequence[torch.dtype] = DTYPES,
    is_plain: bool = False,
    missing: Sequence[Sequence[float]] = ((0.0,), (0.0, 0.1, 0.3), (0.1, 0.4, 1.0)),
    largest: Mapping[int, int] = LARGEST_INTERPRETED if IS_INTERPRETED else LARGEST,
    reductions: Sequence[str] = ("sum",),
    is_whole: bool = False,
) -> Case:
    """A legal call.

    `is_plain`: no tensor occurs twice, none is a seed or a view. `missing`: the shares of -1 that the index
    tensors of one call choose from. `is_whole`: values are small integers, so that products are exact and often equal.
    """
    count = draw(st.sampled_from((1, 2, 2, 3, 3, 3, 4, 4, 5)))
    names = draw(st.lists(st.sampled_from(INDEX_NAMES), min_size=count, max_size=count, unique=True))
    extents = {name: draw(st.integers(1, largest[count])) for name in names}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensor_names = [TENSOR_NAMES[k] for k in torch.randperm(len(TENSOR_NAMES), generator=generator).tolist()]
    author = _Author(draw, extents, tensor_names, is_plain)
    if author.chance(6):
        extents[draw(st.sampled_from(names))] = 0
    shares = draw(st.sampled_from(missing))
    output = author.tensor_names.pop()
    factors = [author.factor() for _ in range(draw(st.sampled_from((1, 1, 2, 2, 2, 3, 3, 4))))]
    numbers = draw(st.lists(st.sampled_from(("2", "0.5", "-1.25", "3", "1e-1")), max_size=1))
    is_number_only = not is_plain and author.chance(3)
    if is_number_only:
        factors, numbers = [], draw(st.sampled_from((["2"], ["0.5", "-3"])))
        author = replace(author, shapes={}, targets={}, known=set())

    known = set(author.known)
    indices = author.indices(draw(st.sampled_from((0, 1, 1, 2, 2, 2, 3, 4))), 0)
    shape = tuple(extent for _, extent in indices)
    is_derivable = bool(factors) and all(text in known | author.known for text, _ in indices)
    left = f"{output}[{','.join(text for text, _ in indices) or '()'}]"
    reduction = draw(st.sampled_from(reductions)) if reductions != ("sum",) else "sum"
    op = "=" if reduction != "sum" else "+=" if is_number_only else draw(st.sampled_from(("+=", "=")))
    ways = ["size"] if is_plain else ["seed"] if is_number_only else ["seed", "size"]
    way = draw(st.sampled_from([*ways, *["derived"] * is_derivable]))
    right = draw(st.permutations([*factors, *numbers])) if factors else numbers
    star, space = draw(st.sampled_from((" * ", "*"))), draw(st.sampled_from((" ", "")))

    if way == "seed":
        author.shapes[output] = shape
    operands = {}
    for name, own_shape in author.shapes.items():
        layout = "contiguous" if is_plain else draw(st.sampled_from(LAYOUTS))
        memory = base_shape(layout, own_shape)
        if name in author.targets:
            share = draw(st.sampled_from(shares))
            dtype = draw(st.sampled_from((torch.int32, torch.int64)))
            base = random_index(memory, author.targets[name], share, generator).to(dtype)
        else:
            base = random_values(memory, draw(st.sampled_from(dtypes)), generator)
            base = (3 * base).round() if is_whole else base
        operands[name] = Operand(base.to(DEVICE), layout, own_shape)
    product = star.join(right) if reduction == "sum" else f"{reduction}({star.join(right)})"
    expr = f"{left}{space}{op}{space}{product}"
    return Case(expr, operands, shape if way == "size" else None)


def random_index(shape: Position, target: int, missing: float, generator: torch.Generator) -> Tensor:
    """Positions below `target`, the share `missing` of them negative; some repeat, some are never named."""
    values = torch.randint(0, max(target, 1), shape, generator=generator)
    is_missing = torch.rand(shape, generator=generator) < (missing if target > 0 else 2.0)
    return torch.where(is_missing, -torch.randint(1, 4, shape, generator=generator), values)


def random_values(shape: Position, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Between -1 and 1, with all the digits that `dtype` has."""
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1).to(dtype)


def block_sizes(A: Tensor) -> tuple[int, ...]:
    """2 along each dimension, 1 where there is no more."""
    return tuple(1 if size == 1 else 2 for size in A.shape)


# Every format from a dense tensor, grouped along one dimension. The blocks need not divide the shapes.
FORMATS: dict[str, Callable[[Tensor, int], Any]] = {
    "COO": lambda A, group_dim: COO.from_dense(A, group_dim=group_dim),
    "ELL": lambda A, group_dim: ELL.from_dense(A, group_dim=group_dim),
    "GroupCOO": lambda A, group_dim: GroupCOO.from_dense(A, group_dim=group_dim),
    "GroupCOO of 2": lambda A, group_dim: GroupCOO.from_dense(A, group_dim=group_dim, group_size=2),
    "BlockCOO": lambda A, group_dim: BlockCOO.from_dense(A, group_dim=group_dim, block_size=block_sizes(A)),
    "BlockGroupCOO": lambda A, group_dim: BlockGroupCOO.from_dense(A, group_dim=group_dim, block_size=block_sizes(A)),
    "BlockGroupCOO of 2": lambda A, group_dim: BlockGroupCOO.from_dense(
        A, group_dim=group_dim, group_size=2, block_size=block_sizes(A)
    ),
}
