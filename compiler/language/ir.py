"""Statements as data: `C[AM[p],n] += AV[p,q] * B[AK[p,q],n]` as frozen trees; `str()` gives the text back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Union

__all__ = ["Access", "Const", "Index", "Number", "Pointing", "Statement", "Var", "renamed", "substituted", "walk"]


@dataclass(frozen=True)
class Var:
    """An index name."""

    name: str
    at: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Const:
    """A fixed position, `A[0,i]`."""

    value: int
    at: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Access:
    """`NAME[index, ...]`: as a factor it reads a value, as an index it is an indirection."""

    name: str
    indices: tuple[Index, ...]
    at: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.indices)) or '()'}]"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Index names in order of first appearance, those inside indirections included."""
        names: dict[str, None] = {}
        for index in self.indices:
            if isinstance(index, Var):
                names[index.name] = None
            elif isinstance(index, Access):
                names.update(dict.fromkeys(index.names))
        return tuple(names)

    @cached_property
    def indirections(self) -> tuple[Access, ...]:
        """The accesses that stand directly as an index of this one."""
        return tuple(index for index in self.indices if isinstance(index, Access))

    @property
    def is_indirect(self) -> bool:
        return bool(self.indirections)


@dataclass(frozen=True)
class Number:
    """A literal factor."""

    value: float
    at: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return repr(self.value)


Index = Union[Var, Const, Access]  # noqa: UP007 - evaluated before the classes exist on Python 3.10


class Pointing(NamedTuple):
    """Index tensor `name` holds positions in dimension `dim` of the tensor `into`, which may be the output."""

    name: str
    into: str
    dim: int
    at: int
    is_output: bool


@dataclass(frozen=True)
class Statement:
    """`output op factor * factor * ...`: products that meet in one element are added, or compete in a max or min."""

    output: Access
    factors: tuple[Access | Number, ...]
    op: str = "+="
    reduction: str = "sum"  # or max or min, which are written `C[i] = max(A[i,k] * B[k])`
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        product = " * ".join(map(str, self.factors))
        return f"{self.output} {self.op} {product if self.is_sum else f'{self.reduction}({product})'}"

    @property
    def is_sum(self) -> bool:
        return self.reduction == "sum"

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """The factors that read a tensor, in order."""
        return tuple(factor for factor in self.factors if isinstance(factor, Access))

    @cached_property
    def scale(self) -> float:
        """The product of the literal factors."""
        product = 1
        for factor in self.factors:
            if isinstance(factor, Number):
                product = product * factor.value  # type: ignore[assignment]
        return product

    @cached_property
    def index_accesses(self) -> tuple[Access, ...]:
        """Every access that stands as an index anywhere, each once, innermost first."""
        accesses: dict[Access, None] = {}
        for root in (self.output, *self.accesses):
            for access in walk(root):
                if access is not root:
                    accesses[access] = None
        return tuple(accesses)

    @cached_property
    def index_names(self) -> tuple[str, ...]:
        """Every tensor that holds positions."""
        return tuple(dict.fromkeys(access.name for access in self.index_accesses))

    @cached_property
    def reads(self) -> tuple[Access, ...]:
        """Every access but the output itself, each once: factors, then what points into the output, innermost first."""
        roots = (*self.accesses, *self.output.indirections)
        return tuple(dict.fromkeys(access for root in roots for access in walk(root)))

    @cached_property
    def pointings(self) -> tuple[Pointing, ...]:
        """Which index tensor points into what, the output's first."""
        return tuple(
            Pointing(index.name, access.name, dim, index.at, access is self.output)
            for root in (self.output, *self.accesses)
            for access in walk(root)
            for dim, index in enumerate(access.indices)
            if isinstance(index, Access)
        )

    @cached_property
    def scatter_dim(self) -> int:
        """The first dimension of the output that is scattered to, 0 where none is."""
        return next((dim for dim, index in enumerate(self.output.indices) if isinstance(index, Access)), 0)

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Every tensor the right side and the indirections read, in order of first appearance."""
        names: dict[str, None] = {}
        for access in walk(self.output):
            if access is not self.output:
                names[access.name] = None
        for root in self.accesses:
            names.update(dict.fromkeys(access.name for access in walk(root)))
        return tuple(names)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every index name, the output's first."""
        names = dict.fromkeys(self.output.names)
        for access in self.accesses:
            names.update(dict.fromkeys(access.names))
        return tuple(names)

    @cached_property
    def free(self) -> tuple[str, ...]:
        """Index names on the left: each combination of them is written (or scattered) on its own."""
        return self.output.names

    @cached_property
    def summed(self) -> tuple[str, ...]:
        """Index names that only the right side has."""
        return tuple(name for name in self.names if name not in self.free)

    @cached_property
    def direct(self) -> tuple[str, ...]:
        """Index names that stand on the left outside any indirection: an output element tells their values."""
        return tuple(dict.fromkeys(index.name for index in self.output.indices if isinstance(index, Var)))

    @cached_property
    def reduced(self) -> tuple[str, ...]:
        """Index names whose values meet in one output element."""
        return tuple(name for name in self.names if name not in self.direct)


def walk(access: Access) -> Iterator[Access]:
    """Yield the access and every access inside it, innermost first."""
    for index in access.indices:
        if isinstance(index, Access):
            yield from walk(index)
    yield access


def substituted(access: Access, swap: Mapping[Index, Index]) -> Access:
    """Return an access with other indices in the place of some, at any depth.

    >>> str(substituted(Access("B", (Access("AK", (Var("p"),)), Var("n"))), {Var("p"): Const(0)}))
    'B[AK[0],n]'
    """

    def index(item: Index) -> Index:
        if item in swap:
            return swap[item]
        return substituted(item, swap) if isinstance(item, Access) else item

    return replace(access, indices=tuple(map(index, access.indices)))


def renamed(statement: Statement, names: Mapping[str, str], tensors: Mapping[str, str]) -> Statement:
    """Return a statement with other names for some of its indices, and for some of the tensors that it reads.

    >>> product = Statement(Access("C", (Var("i"),)), (Access("A", (Var("i"), Var("k"))), Access("B", (Var("k"),))))
    >>> str(renamed(product, {"k": "k_2"}, {"B": "D"}))
    'C[i] += A[i,k_2] * D[k_2]'
    """

    def index(item: Index) -> Index:
        if isinstance(item, Var):
            return replace(item, name=names.get(item.name, item.name))
        return access(item) if isinstance(item, Access) else item

    def access(item: Access) -> Access:
        return replace(item, name=tensors.get(item.name, item.name), indices=tuple(map(index, item.indices)))

    output = replace(statement.output, indices=tuple(map(index, statement.output.indices)))
    factors = tuple([access(factor) if isinstance(factor, Access) else factor for factor in statement.factors])
    return replace(statement, output=output, factors=factors, text="")
