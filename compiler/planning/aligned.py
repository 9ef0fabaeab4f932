"""A product over copies of its operands whose rows begin at whole vectors, the rest of each row zero.

Neither torch's fast products nor asynchronous copies of a kernel read rows of 2,041 numbers in half precision: each
begins at another place of 16 bytes. `C[m,n] += A[m,k] * B[k,n]` is then evaluated over copies with 2,048 numbers to a
row, and of its result the columns that belong to it are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod

from ..binding import Bound
from ..language import Access, Index, Number, Statement, Var, fresh_name
from .device import Device
from .movement import VECTOR_BYTES
from .split import has_matrices

__all__ = ["KNOWN_DIVISOR", "Aligned", "AlignedCopy", "aligned"]

# The most times longer that a product takes over rows that are not aligned, measured for float16 with 2,041 and 5,255
# numbers to a row on an H200, by torch and by kernels of ours (dense-matmul of `make suite`).
MOST_LOSS = 4
# of rows and strides in elements: what Triton knows about the numbers that kernels are given
KNOWN_DIVISOR = 16


@dataclass(frozen=True)
class AlignedCopy:
    """The statement that copies one operand, in the order of its memory, and what it reads and makes."""

    statement: Statement
    source: str
    tables: tuple[str, ...]  # of positions, which are -1 past the end of a dimension
    size: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the copy."""
        return self.statement.output.name


@dataclass(frozen=True)
class Aligned:
    """The statements of a product over aligned copies."""

    copies: tuple[AlignedCopy, ...]
    tables: Mapping[str, tuple[int, int]]  # (positions that exist, all positions) of each table
    product: Statement
    size: tuple[int, ...]  # of the product
    last: Statement | None  # makes the output of the part of the product that belongs to it; None if all of it does
    gain: float  # the estimated time without copies over that with them

    @property
    def numbers_held(self) -> int:
        """How many numbers lie in copies, and in the product if it is one."""
        return sum(prod(copy.size) for copy in self.copies) + (prod(self.size) if self.last is not None else 0)


def aligned(
    bound: Bound, strides: Mapping[str, tuple[int, ...]], device: Device, uses_tensor_cores: bool
) -> Aligned | None:
    """Return a product over aligned copies of its operands; None if they are aligned or nothing is gained.

    A name is padded if an operand or the output lies along it in memory. If it is summed, every factor must have it:
    what is padded is then a product of zeros, while 0 times a factor without the name would be NaN where that is
    infinite. Names inside indirections stay as they are.

    >>> import torch
    >>> from insum_ops.compiler.binding import bind
    >>> from insum_ops.compiler.language import parse
    >>> from insum_ops.compiler.planning.device import H200
    >>> A = torch.empty(4001, 2041, dtype=torch.float16, device="meta")
    >>> B = torch.empty(2041, 4096, dtype=torch.float16, device="meta")
    >>> bound = bind(parse("C[m,n] += A[m,k] * B[k,n]"), dict(A=A, B=B))
    >>> way = aligned(bound, dict(A=A.stride(), B=B.stride()), H200, True)
    >>> for copy in way.copies: print(copy.statement, copy.size)
    A_[a,b] = A[a,K[b]] (4001, 2048)
    B_[a,b] = B[K[a],b] (2048, 4096)
    >>> print(way.product)
    C[m,n] += A_[m,k] * B_[k,n]
    """
    statement = bound.statement
    if not uses_tensor_cores or not statement.is_sum or bound.is_empty or not _has_products(statement):
        return None
    padded = _padded(bound, strides)
    narrows = any(isinstance(index, Var) and index.name in padded for index in statement.output.indices)
    if not padded or (bound.is_seeded and narrows and bound.dtype.itemsize == 2):  # which would be rounded twice
        return None
    taken = {*statement.tensor_names, statement.output.name}
    tables = {name: fresh_name(name.upper(), taken) for name in padded}
    taken |= {*tables.values()}
    copies, factors = dict[Access, tuple[AlignedCopy, Access]](), list[Access | Number]()
    for factor in statement.factors:
        if isinstance(factor, Access) and not {*tables}.isdisjoint(_direct(factor)):
            if factor not in copies:
                copies[factor] = _copied(factor, bound, strides, padded, tables, taken)
            factors.append(copies[factor][1])
        else:
            factors.append(factor)
    product = replace(statement, factors=tuple(factors), text="")
    size = tuple(padded.get(str(index), length) for index, length in zip(statement.output.indices, bound.size))
    last = None
    if narrows:
        output = replace(statement.output, indices=tuple(map(Var, _letters(size))))
        wide = replace(output, name=fresh_name("T", taken))
        product = replace(product, output=replace(statement.output, name=wide.name), op="+=")
        last = Statement(output, (wide,), statement.op)
    positions = {tables[name]: (bound.extents[name], padded[name]) for name in padded}
    way = Aligned(tuple([copy for copy, _ in copies.values()]), positions, product, size, last, 0.0)
    gain = _gain(bound, device, way, padded)
    return replace(way, gain=gain) if gain > 1 else None


def _has_products(statement: Statement) -> bool:
    """Return whether matrices are multiplied, also those that an index tensor picks for each row."""
    kept, summed = {*statement.free}, {*statement.summed}
    pairs = [(left, right) for left in statement.accesses for right in statement.accesses if left is not right]
    return has_matrices(statement) or any(
        left.is_indirect and {*left.names} & {*right.names} & summed and (_direct(left) - {*right.names}) & kept
        for left, right in pairs
    )


def _padded(bound: Bound, strides: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the names along which operands lie in memory that are to be longer, with their new lengths."""
    statement, vector = bound.statement, VECTOR_BYTES // bound.dtype.itemsize
    inside = {name for access in statement.index_accesses for name in access.names}
    along = {str(statement.output.indices[-1])} if statement.output.indices else set[str]()
    for access in statement.accesses:
        steps = strides[access.name]
        along |= {str(index) for index, step in zip(access.indices, steps) if step == 1 and isinstance(index, Var)}
    lengths = dict[str, int]()
    for name in sorted(along & {*bound.extents} - inside):
        extent = bound.extents[name]
        factors = [name in _direct(access) for access in statement.accesses]
        may_pad = all(factors) if name in statement.summed else any(factors) and name in _direct(statement.output)
        if may_pad and extent % vector:
            lengths[name] = -(-extent // KNOWN_DIVISOR) * KNOWN_DIVISOR
    return lengths


def _copied(
    access: Access,
    bound: Bound,
    strides: Mapping[str, tuple[int, ...]],
    padded: Mapping[str, int],
    tables: Mapping[str, str],
    taken: set[str],
) -> tuple[AlignedCopy, Access]:
    """Return the copy of an operand, whose dimensions are in the order of its memory, and the access that reads it."""
    shape, steps = bound.shapes[access.name], strides[access.name]
    order = sorted(range(len(shape)), key=lambda dim: -steps[dim])
    name = fresh_name(f"{access.name}_", taken)
    taken.add(name)
    letters = _letters(shape)
    reads: list[Index] = []
    for dim, index in enumerate(access.indices):
        letter = Var(letters[order.index(dim)])
        is_padded = isinstance(index, Var) and index.name in padded
        reads.append(Access(tables[str(index)], (letter,)) if is_padded else letter)
    size = tuple(padded.get(str(access.indices[dim]), shape[dim]) for dim in order)
    own = tuple(dict.fromkeys(index.name for index in reads if isinstance(index, Access)))
    output = Access(name, tuple(map(Var, letters)))
    copy = AlignedCopy(Statement(output, (replace(access, indices=tuple(reads)),), "="), access.name, own, size)
    return copy, Access(name, tuple(access.indices[dim] for dim in order))


def _gain(bound: Bound, device: Device, way: Aligned, padded: Mapping[str, int]) -> float:
    """Return the estimated time of a product over its operands as they lie over that with aligned copies of them."""
    itemsize, names = bound.dtype.itemsize, bound.statement.names
    common = min(gcd(VECTOR_BYTES, bound.extents[name] * itemsize) for name in padded)
    growth = prod(padded.get(name, 1) / (bound.extents[name] if name in padded else 1) for name in names)
    numbers = prod(bound.size) + sum(prod(bound.shapes[access.name]) for access in bound.statement.accesses)
    work = 2 * prod(bound.extents[name] for name in names)
    seconds = max(work / device.flops(itemsize), numbers * itemsize / device.bandwidth)
    copied = [2 * prod(copy.size) for copy in way.copies] + ([2 * prod(way.size)] if way.last is not None else [])
    copying = sum(numbers * itemsize / device.bandwidth + device.launch_gap for numbers in copied)
    return min(MOST_LOSS, VECTOR_BYTES // common) * seconds / (growth * seconds + copying)


def _direct(access: Access) -> set[str]:
    """Return the names that stand in an access outside any indirection."""
    return {index.name for index in access.indices if isinstance(index, Var)}


def _letters(shape: tuple[int, ...]) -> list[str]:
    """Return an index name for each dimension."""
    return [chr(ord("a") + dim) for dim in range(len(shape))]
