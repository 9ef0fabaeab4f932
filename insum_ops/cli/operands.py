"""Operands for a statement from shapes on a command line: random values, positions that fit, formats of a density."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log1p, prod
from typing import Any

import torch
from torch import Tensor

from insum_ops import formats
from insum_ops.cli.errors import CommandError
from insum_ops.close_names import close_name, with_article
from insum_ops.compiler import Access, Statement, Var, parse, walk

__all__ = ["FORMATS", "Operands", "Requested", "Sparse"]

Shape = tuple[int, ...]
FORMATS = ("COO", "ELL", "GroupCOO", "BlockCOO", "BlockGroupCOO")
VALUE_TYPES = ("float16", "bfloat16", "float32", "float64")
INDEX_TYPES = ("int32", "int64")
DENSITY = 0.1
BLOCK = 32  # along both dimensions of a matrix
POSITION = 8  # bytes of a coordinate while a format is made


@dataclass(frozen=True)
class Sparse:
    """A format of the command line, `GroupCOO:0.05` or `BlockGroupCOO:0.1:32x32`."""

    kind: str
    density: float = DENSITY
    block: Shape | None = None

    @classmethod
    def read(cls, text: str) -> Sparse:
        kind, *rest = text.split(":")
        if kind not in FORMATS:
            raise CommandError(f"{kind!r} is no format; {_closest(kind, FORMATS)}there are {', '.join(FORMATS)}")
        if len(rest) > 2:
            raise CommandError(f"{text!r} has too many parts; write FORMAT:DENSITY:BLOCK, as in {kind}:0.05")
        density = _density(rest[0]) if rest else DENSITY
        block = _shape(rest[1]) if len(rest) > 1 else None
        if block is not None and not kind.startswith("Block"):
            raise CommandError(f"{kind} has no blocks, but {text!r} gives a block size; take Block{kind}")
        return cls(kind, density, block)

    def entries(self, shape: Shape) -> int:
        """How many positions are drawn so that about the share `density` of all is among them."""
        every = prod(self._grid(shape))
        return every if self.density == 1 else ceil(-every * log1p(-self.density))

    def make(self, name: str, shape: Shape, dtype: torch.dtype, random: torch.Generator) -> Any:
        """The format, with random entries, or blocks, at random places."""
        grid, device = self._grid(shape), random.device
        count = self.entries(shape)
        drawn = torch.randint(max(prod(grid), 1), (count,), generator=random, device=device)
        places = torch.arange(prod(grid), device=device) if self.density == 1 else drawn.unique()
        coords = torch.stack(torch.unravel_index(places, grid)) if grid else places.new_zeros(0, len(places))
        options: dict[str, Any] = {}
        if self.kind.startswith("Block"):
            options["block_size"] = block = self._block(shape)
            inside = torch.stack(torch.meshgrid(*[torch.arange(b, device=device) for b in block], indexing="ij"))
            coords = (coords * coords.new_tensor(block)[:, None])[:, :, None] + inside.flatten(1)[:, None]
            coords = coords.flatten(1)
            coords = coords[:, (coords < coords.new_tensor(shape)[:, None]).all(0)]
        values = torch.randn(coords.shape[1], generator=random, device=device, dtype=torch.float32).to(dtype)
        if not shape:
            kind = with_article(self.kind)
            raise CommandError(f"{name} has no dimensions, so it can't be {kind}; leave its --format out")
        return getattr(formats, self.kind).from_coo(coords, values, shape, **options)

    def _block(self, shape: Shape) -> Shape:
        block = self.block or (BLOCK,) * len(shape)
        if len(block) != len(shape):
            raise CommandError(
                f"a block of {_times(block)} has {len(block)} dimensions, but the tensor of {_times(shape)} has "
                f"{len(shape)}; give one number for each"
            )
        return block

    def _grid(self, shape: Shape) -> Shape:
        if not self.kind.startswith("Block"):
            return shape
        return tuple(-(-size // block) for size, block in zip(shape, self._block(shape), strict=True))


@dataclass(frozen=True)
class Requested:
    """What a command line says of a statement's operands: shapes, types and formats by name."""

    text: str
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # "" is that of values, " " that of positions
    sparse: Mapping[str, Sparse] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, shapes: Sequence[str], dtypes: Sequence[str], sparse: Sequence[str]) -> Requested:
        """From the texts of the options: `B=64x128`, `float16` or `B=float16`, `A=GroupCOO:0.05`."""
        types = {}
        for each in dtypes:
            name, is_named, dtype = each.rpartition("=")
            if dtype not in (*VALUE_TYPES, *INDEX_TYPES):
                choices = ", ".join((*VALUE_TYPES, *INDEX_TYPES))
                raise CommandError(f"{dtype!r} is no dtype of an operand; there are {choices}")
            types[name if is_named else " " * (dtype in INDEX_TYPES)] = getattr(torch, dtype)
        return cls(
            text,
            {name: _shape(value) for name, value in _pairs("--shape", "B=64x128", shapes)},
            types,
            {name: Sparse.read(value) for name, value in _pairs("--format", "A=GroupCOO:0.05", sparse)},
        )

    @cached_property
    def statement(self) -> Statement:
        return parse(self.text)

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Every access of the statement, the output's first."""
        roots = self.statement.output, *self.statement.accesses
        return tuple(access for root in roots for access in (root, *(a for a in walk(root) if a is not root)))

    @cached_property
    def extents(self) -> dict[str, int]:
        """What is known of each index: given by its name, or read off the shape of a tensor that it indexes."""
        extents = {name: shape[0] for name, shape in self.shapes.items() if name in self.statement.names}
        for access in self.accesses:
            for index, size in zip(access.indices, self.shapes.get(access.name, ())):
                if isinstance(index, Var):
                    extents.setdefault(index.name, size)
        return extents

    def shape_of(self, name: str) -> Shape:
        """The given shape of a tensor, or that which follows from the extents of its indices."""
        if name in self.shapes:
            return self.shapes[name]
        accesses = [access for access in self.accesses if access.name == name]
        shape = []
        for dim, index in enumerate(accesses[0].indices):
            names = [str(a.indices[dim]) for a in accesses if len(a.indices) > dim]
            lengths = [self.extents[each] for each in names if each in self.extents]
            if not lengths:
                raise CommandError(self._unknown(accesses[0], dim, isinstance(index, Var)))
            shape.append(lengths[0])
        return tuple(shape)

    def check_names(self) -> None:
        """Refuse a name that is neither a tensor nor, for a shape, an index of the statement."""
        tensors = [access.name for access in self.accesses]
        for option, names, known in (
            ("--shape", self.shapes, [*tensors, *self.statement.names]),
            ("--dtype", [name for name in self.dtypes if name.strip()], tensors),
            ("--format", self.sparse, [a.name for a in self.statement.accesses]),
        ):
            for name in names:
                if name not in known:
                    listed = ", ".join(dict.fromkeys(known))
                    raise CommandError(f"{option} names {name}, which {self.statement} has not; it has {listed}")
        for name in self.shapes:
            if name not in tensors and len(self.shapes[name]) != 1:
                raise CommandError(f"{name} is an index and has one extent, but {_times(self.shapes[name])} is given")

    def make(self, device: torch.device, seed: int = 0) -> Operands:
        """Draw the operands on a device; the same seed draws the same ones."""
        self.check_names()
        output, positions = self.statement.output.name, self.statement.index_names
        size = self.shape_of(output) if output in self.shapes or self.statement.output.is_indirect else None
        shapes = {name: self.shape_of(name) for name in self.statement.tensor_names}
        _check_memory(sum(self._bytes(name, shape) for name, shape in shapes.items()), device)
        random = torch.Generator(device).manual_seed(seed)
        tensors: dict[str, Any] = {}
        for name, shape in shapes.items():
            if name in positions:
                if name in self.sparse:
                    raise CommandError(f"{name} holds positions, so it can't be {with_article(self.sparse[name].kind)}")
                tensors[name] = self._positions(name, shape, shapes | {output: size or ()}, random)
            elif name in self.sparse:
                tensors[name] = self.sparse[name].make(name, shape, self._dtype(name), random)
            else:
                tensors[name] = torch.randn(shape, generator=random, device=device).to(self._dtype(name))
        return Operands(self.statement, tensors, size)

    def _positions(self, name: str, shape: Shape, shapes: Mapping[str, Shape], random: torch.Generator) -> Tensor:
        """Positions in every dimension that the tensor points into; none (-1) where one of them is empty."""
        ends = [
            shapes[pointing.into][pointing.dim]
            for pointing in self.statement.pointings
            if pointing.name == name and pointing.dim < len(shapes[pointing.into])
        ]
        end, dtype = min(ends, default=1), self._dtype(name)
        if end == 0:
            return torch.full(shape, -1, dtype=dtype, device=random.device)
        return torch.randint(end, shape, generator=random, device=random.device).to(dtype)

    def _dtype(self, name: str) -> torch.dtype:
        is_position = name in self.statement.index_names
        default = torch.int64 if is_position else torch.float32
        return self.dtypes.get(name, self.dtypes.get(" " if is_position else "", default))

    def _bytes(self, name: str, shape: Shape) -> int:
        if name not in self.sparse:
            return prod(shape) * self._dtype(name).itemsize
        sparse = self.sparse[name]
        inside = prod(sparse._block(shape)) if sparse.kind.startswith("Block") else 1
        return sparse.entries(shape) * inside * (POSITION * len(shape) + self._dtype(name).itemsize)

    def _unknown(self, access: Access, dim: int, is_index: bool) -> str:
        """What to say where no shape tells the length of a tensor's dimension."""
        index = access.indices[dim]
        example = "x".join(
            str(self.extents.get(str(index), 64)) if at != dim else "64" for at, index in enumerate(access.indices)
        )
        if is_index:
            return (
                f"no shape tells the extent of {index} in {access}; give one, as in --shape {index}=64 or "
                f"--shape {access.name}={example}"
            )
        return (
            f"the length of dimension {dim} of {access.name} does not follow from {access}, where {index} stands; "
            f"give it, as in --shape {access.name}={example}"
        )


@dataclass(frozen=True)
class Operands:
    """Random operands of a statement."""

    statement: Statement
    tensors: Mapping[str, Any]
    size: Shape | None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._memory())

    def __str__(self) -> str:
        rows = [(name, *self._described(name, operand)) for name, operand in self.tensors.items()]
        widths = [max(map(len, column)) for column in zip(*rows)] if rows else []
        return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows)

    def _memory(self) -> Iterator[Tensor]:
        for operand in self.tensors.values():
            yield from (operand,) if isinstance(operand, Tensor) else _tensors(operand)

    def _described(self, name: str, operand: Any) -> tuple[str, str, str]:
        shape = _times(tuple(operand.shape)) or "one number"
        if not isinstance(operand, Tensor):
            inner = "" if operand.block_size is None else f", blocks of {_times(operand.block_size)}"
            count = f"{operand.nnz:,} nonzeros, groups of {operand.group_size}{inner}"
            return str(operand.values.dtype).removeprefix("torch."), shape, f"{type(operand).__name__}: {count}"
        into = [f"dimension {p.dim} of {p.into}" for p in dict.fromkeys(self.statement.pointings) if p.name == name]
        what = f"positions in {' and '.join(dict.fromkeys(into))}" if into else "dense"
        return str(operand.dtype).removeprefix("torch."), shape, what


def _tensors(operand: Any) -> Iterator[Tensor]:
    yield operand.values
    yield from (coordinate for coordinate in operand.coords if coordinate is not None)


def _pairs(option: str, example: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name.isidentifier() or not value:
            raise CommandError(f"{option} takes NAME=VALUE, as in {option} {example}, but {text!r} was given")
        yield name, value


def _shape(text: str) -> Shape:
    """`64x128` as numbers."""
    if re.fullmatch(r"\d{1,18}(x\d{1,18})*", text, re.ASCII) is None:
        raise CommandError(f"{text!r} is no shape; write numbers with an x between them, as in 64x128")
    return tuple(map(int, text.split("x")))


def _density(text: str) -> float:
    try:
        density = float(text)
    except ValueError:
        density = -1.0
    if not 0 <= density <= 1:
        raise CommandError(f"{text!r} is no density; give the share of entries that are stored, from 0 to 1")
    return density


def _check_memory(needed: int, device: torch.device) -> None:
    """Refuse operands that the device has no memory for, before a system that lends more than it has ends us."""
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    else:
        return
    if needed > there:
        raise CommandError(
            f"these operands take {needed / 2**30:.1f} GiB, and {device} has {there / 2**30:.1f} GiB for them; give "
            "smaller shapes, or a lower density"
        )


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _closest(name: str, known: Sequence[str]) -> str:
    close = close_name(name, known)
    return "" if close is None else f"did you mean {close}? "
