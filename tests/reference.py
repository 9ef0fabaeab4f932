"""What a statement means, as a loop nest over Python floats: plain, slow, independent of the package."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Read:
    """`name[index, ...]`, each index a name, an integer or another `Read`."""

    name: str
    indices: tuple[str | int | Read, ...]

    @property
    def inner(self) -> list[Read]:
        return [index for index in self.indices if isinstance(index, Read)]


@dataclass(frozen=True)
class Sentence:
    output: Read
    is_added: bool  # '+=' and not '='
    factors: tuple[Read | float, ...]
    reduction: str = "sum"


@dataclass(frozen=True)
class Sum:
    """A float64 result, with what is needed to say how exact a computed one has to be."""

    value: Tensor
    magnitude: Tensor  # the same sum over absolute values
    terms: int  # the most products that any element is a sum of
    factors: int
    dtype: torch.dtype


Position = tuple[int, ...]
Term = tuple[Position, list[Position | None]]


def read_sentence(expr: str) -> Sentence:
    """Python's own grammar covers the language; only legal statements come here, so nothing is checked."""
    node: Any = ast.parse(expr.strip()).body[0]
    is_added = isinstance(node, ast.AugAssign)
    target = node.target if is_added else node.targets[0]
    factors: list[Read | float] = []
    reduction, product = "sum", node.value
    if isinstance(product, ast.Call):
        reduction, (product,) = product.func.id, product.args
    pending = [product]
    while pending:
        factor = pending.pop()
        if isinstance(factor, ast.BinOp):
            pending += [factor.right, factor.left]
        elif isinstance(factor, ast.Subscript):
            factors.append(_read(factor))
        else:
            factors.append(float(ast.literal_eval(factor)))
    return Sentence(_read(target), is_added, tuple(factors), reduction)


def _read(node: Any) -> Read:
    inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return Read(node.value.id, tuple(_index(item) for item in inside))


def _index(node: Any) -> str | int | Read:
    if isinstance(node, ast.Name):
        return node.id
    return _read(node) if isinstance(node, ast.Subscript) else int(node.value)


class LoopNest:
    """Every product of one statement over one set of tensors.

    A negative index value means that the whole product does not exist: `terms` leaves it out, and what only
    such products would have read is not in `touched`. Products are walked in the order of a loop nest whose loops
    stand in the order in which the text first names them, the output's first.
    """

    def __init__(self, expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None = None) -> None:
        self.sentence = read_sentence(expr)
        self.tensors = tensors
        self.data = {name: _array(tensor) for name, tensor in tensors.items()}
        self.reads = [factor for factor in self.sentence.factors if isinstance(factor, Read)]
        self.scale = math.prod(factor for factor in self.sentence.factors if not isinstance(factor, Read))
        self.extents: dict[str, int] = {}
        for read in self.reads:
            self._note_extents(read, tuple(tensors[read.name].shape))
        seed = tensors.get(self.sentence.output.name)
        shape = size if seed is None else tuple(seed.shape)
        self._note_extents(self.sentence.output, None if shape is None else tuple(shape))
        if shape is None:
            shape = [self.extents[index] for index in self.sentence.output.indices if isinstance(index, str)]
        self.shape = tuple(shape)
        order = dict.fromkeys(name for read in (self.sentence.output, *self.reads) for name in _names(read))
        self.extents = {name: self.extents[name] for name in order}
        self.terms: list[Term] = list(self._walk())

    def _note_extents(self, read: Read, shape: Position | None) -> None:
        for dim, index in enumerate(read.indices):
            if isinstance(index, Read):
                self._note_extents(index, tuple(self.tensors[index.name].shape))
            elif isinstance(index, str) and shape is not None:
                assert self.extents.setdefault(index, shape[dim]) == shape[dim]

    def _points(self) -> Iterator[dict[str, int]]:
        for point in itertools.product(*(range(extent) for extent in self.extents.values())):
            yield dict(zip(self.extents, point, strict=True))

    def _walk(self) -> Iterator[Term]:
        for at in self._points():
            output = self._locate(self.sentence.output, at)
            places = [self._locate(read, at) for read in self.reads]
            if output is not None and None not in places:
                yield output, places

    def _locate(self, read: Read, at: Mapping[str, int]) -> Position | None:
        position = []
        for index in read.indices:
            if isinstance(index, Read):
                inner = self._locate(index, at)
                value = -1 if inner is None else int(self.data[index.name][inner])
            else:
                value = at[index] if isinstance(index, str) else index
            if value < 0:
                return None
            position.append(value)
        return tuple(position)

    @property
    def dtype(self) -> torch.dtype:
        """torch's promotion over the factors, and over the seed where there is one."""
        dtypes = [self.tensors[read.name].dtype for read in self.reads]
        seed = self.tensors.get(self.sentence.output.name)
        if seed is not None and (self.sentence.is_added or not dtypes):
            dtypes.append(seed.dtype)
        found = dtypes[0]
        for dtype in dtypes[1:]:
            found = torch.promote_types(found, dtype)
        return found

    @property
    def touched(self) -> dict[str, set[Position]]:
        """The elements of each tensor of values that some product reads; all of a seed."""
        found: dict[str, set[Position]] = {read.name: set() for read in self.reads}
        for _, places in self.terms:
            for read, place in zip(self.reads, places, strict=True):
                assert place is not None
                found[read.name].add(place)
        seed = self.tensors.get(self.sentence.output.name)
        if seed is not None:
            everything = set(itertools.product(*(range(n) for n in seed.shape)))
            found.setdefault(self.sentence.output.name, set())
            found[self.sentence.output.name] |= everything if self.sentence.is_added else set()
        return found

    def result(self) -> Sum:
        """The statement's value."""
        value, magnitude = (
            torch.zeros(self.shape, dtype=torch.float64),
            torch.zeros(self.shape, dtype=torch.float64),
        )
        seed = self.tensors.get(self.sentence.output.name)
        if seed is not None and self.sentence.is_added:
            value += seed.detach().cpu().double()
            magnitude += value.abs()
        products = [(output, self._product(places)) for output, places in self.terms]
        if self.sentence.reduction != "sum":
            for (output, _), product in zip(self.terms, products, strict=True):
                magnitude[output] = max(abs(product[1]), float(magnitude[output]))
            for at in self.winners().values():
                value[products[at][0]] = products[at][1]
            return Sum(value, magnitude, 1, len(self.sentence.factors), self.dtype)
        counts = self._accumulate(value, magnitude, products)
        return Sum(value, magnitude, counts + 1, len(self.sentence.factors), self.dtype)

    def winners(self) -> dict[Position, int]:
        """For each output element that is reached, the number of the term that wins: the first NaN, else the best."""
        found: dict[Position, tuple[int, float]] = {}
        for at, (output, places) in enumerate(self.terms):
            product = self._product(places)
            if output not in found or self._beats(product, found[output][1]):
                found[output] = at, product
        return {output: at for output, (at, _) in found.items()}

    def _beats(self, product: float, best: float) -> bool:
        if math.isnan(product) or math.isnan(best):
            return not math.isnan(best)
        return product > best if self.sentence.reduction == "max" else product < best

    def gradients(self, upstream: Tensor) -> dict[str, Sum]:
        """d (result * upstream).sum() / d tensor for every tensor of values, summed over its places."""
        grad = _array(upstream)
        found = {}
        terms = self.terms
        if self.sentence.reduction != "sum":
            terms = [self.terms[at] for at in self.winners().values()]
        for name in self.touched:
            tensor = self.tensors[name]
            value = torch.zeros(tensor.shape, dtype=torch.float64)
            magnitude = torch.zeros(tensor.shape, dtype=torch.float64)
            seeds = 0
            if name == self.sentence.output.name and self.sentence.is_added:
                value += upstream.detach().cpu().double()
                magnitude += value.abs()
                seeds = 1
            products = [
                (place, grad[output] * self._product(places, without=k))
                for output, places in terms
                for k, (read, place) in enumerate(zip(self.reads, places, strict=True))
                if read.name == name and place is not None
            ]
            counts = self._accumulate(value, magnitude, products)
            found[name] = Sum(value, magnitude, counts + seeds, len(self.sentence.factors) + 1, tensor.dtype)
        return found

    def _product(self, places: Sequence[Position | None], without: int | None = None) -> float:
        product = 1.0
        for k, (read, place) in enumerate(zip(self.reads, places, strict=True)):
            if k != without:
                product *= float(self.data[read.name][place])
        return product * float(self.scale)

    @staticmethod
    def _accumulate(value: Tensor, magnitude: Tensor, products: list[tuple[Position, float]]) -> int:
        counts: dict[Position, int] = {}
        values, magnitudes = value.numpy(), magnitude.numpy()
        for position, product in products:
            values[position] += product
            magnitudes[position] += abs(product)
            counts[position] = counts.get(position, 0) + 1
        return max(counts.values(), default=0)


def _names(read: Read) -> Iterator[str]:
    """Index names from left to right."""
    for index in read.indices:
        if isinstance(index, Read):
            yield from _names(index)
        elif isinstance(index, str):
            yield index


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.dtype.is_floating_point else tensor).numpy()


def positions(sparse: Any) -> Tensor:
    """Where each stored value of a sparse format lies in the flattened dense tensor; -1 for padding.

    Has the shape of `sparse.values`. Reads nothing but the format's description of itself.
    """
    axes, extents = sparse.value_axes, sparse.values.shape[: len(sparse.value_axes)]
    block = sparse.block_size or (1,) * len(sparse.shape)
    flat = torch.zeros((*extents, *block), dtype=torch.int64)
    is_entry = torch.ones((*extents, *block), dtype=torch.bool)
    for dim, size in enumerate(sparse.shape):
        own_axes = sparse.coord_axes[dim]
        coords = sparse.coords[dim]
        coords = torch.arange(extents[0]) if coords is None else coords.detach().cpu().long()
        view = [extents[a] if axis in own_axes else 1 for a, axis in enumerate(axes)] + [1] * len(block)
        offsets = torch.arange(block[dim]).view([block[d] if d == dim else 1 for d in range(len(block))])
        coords = coords.reshape(view)
        place = coords * block[dim] + offsets
        is_entry &= (coords >= 0) & (place < size)
        flat = flat * size + place
    return torch.where(is_entry, flat, -1).reshape(sparse.values.shape)


def dense(sparse: Any) -> Tensor:
    """The float64 dense tensor that a sparse format stands for; repeated positions add."""
    place = positions(sparse).flatten()
    values = sparse.values.detach().cpu().double().flatten()[place >= 0]
    return (
        torch.zeros(math.prod(sparse.shape), dtype=torch.float64)
        .index_add(0, place[place >= 0], values)
        .view(sparse.shape)
    )
