"""A generated kernel as data: its config, the settings that it obeys, its source and how to call it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch

__all__ = ["ALIGNED", "NUMBERS", "Config", "Flags", "Kernel", "Parameter"]

NUMBERS = ("extent", "stride", "copy")  # parameters that are no tensors
ALIGNED = 16  # elements or bytes: what Triton's launcher asks of a number, and the most that one load takes


@dataclass(frozen=True)
class Config:
    """The choices of tuning for one schedule."""

    blocks: tuple[tuple[str, int], ...]  # of each tile axis
    num_warps: int = 4
    num_stages: int = 2
    swap: bool = False  # columns of the output on the rows' side of the dot
    reverse: bool = False  # the order of programs over the output
    parts: int = 1  # programs that share one sum, each with a part of its longest loop
    rows: int = 1  # that a program owns, one after another
    longest_first: bool = False  # rows with the most groups come first, so that programs end together
    copies: int = 1  # of the output, among which programs are divided; a second kernel sums them
    run: int = 1  # values that a program takes in turn of the index name of a schedule's runs
    is_aligned: bool = False  # what a warp stores at once begins where its length divides the output's memory
    evicts: bool = False  # results are the first to leave the cache, which has no room for all
    is_ahead: bool = False  # a walk loads the positions of the next entries before it adds up those that it has

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.blocks)

    def block(self, name: str) -> int:
        return dict(self.blocks)[name]

    @property
    def options(self) -> dict[str, int | bool]:
        """The choices beside tiles, warps and stages, by their names."""
        return {each.name.removeprefix("is_"): getattr(self, each.name) for each in fields(self)[3:]}

    @property
    def kind(self) -> tuple[bool, ...]:
        """The choices that decide which lines a kernel has, without sizes."""
        return tuple(value > 1 if type(value) is int else bool(value) for value in self.options.values())

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.blocks]
        words += [f"warps={self.num_warps}", f"stages={self.num_stages}"]
        for name, value in self.options.items():
            if value is True:
                words.append(name.replace("_", " "))
            elif value > 1:
                words.append(f"{name}={value}")
        return " ".join(words)


@dataclass(frozen=True)
class Flags:
    """Settings outside the statement that change the code."""

    precision: str = "ieee"  # of a float32 dot: ieee, tf32 or tf32x3
    sum_dtype: torch.dtype | None = None  # the type in which partial sums meet in memory; None: the result's
    interpreted: bool = False
    lazy: bool = True
    padded: frozenset[str] | None = None  # index tensors that may hold -1; None: all of them
    strides_vary: bool = False  # from call to call, as lengths do, so that nothing is known of them
    wants_winners: bool = False  # a max or min also stores where each of its winners is
    warp_width: int = 32  # threads of a warp of the GPU that runs it, 64 on AMD's
    is_wide: bool = False  # lengths and addresses may need 64 bits, whatever those of the example need

    def __str__(self) -> str:
        padded = "all" if self.padded is None else ",".join(sorted(self.padded))
        more = f"{' winners' if self.wants_winners else ''}{' wide' if self.is_wide else ''}"
        return f"{self.precision} sums={self.sum_dtype} lazy={self.lazy} padded={padded}{more}"


@dataclass(frozen=True)
class Parameter:
    """An argument of the kernel: a tensor, an extent or a stride."""

    kind: str  # tensor, output, winners, seed, pointers, is_shared, order, extent, stride, copy (elements of one)
    name: str = ""
    dim: int = 0


@dataclass(frozen=True)
class Kernel:
    """Source and how to call it."""

    source: str
    name: str
    parameters: tuple[Parameter, ...]
    grid: tuple[tuple[str, int], ...]  # index name and how many of its values one program takes
    num_warps: int
    num_stages: int
    parts: int = 1  # programs for each of the grid's
    copies: int = 1  # of the output, one behind the other

    @cached_property
    def numbers(self) -> tuple[Parameter, ...]:
        """The parameters that are no tensors; they stand after those that are."""
        return tuple(parameter for parameter in self.parameters if parameter.kind in NUMBERS)
