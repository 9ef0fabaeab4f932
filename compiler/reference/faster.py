"""The torch program that runs: what `lower` means, in the operations that take the least.

Several indirections become one. On a CPU sums by row read row offsets, and vectors are multiplied each by its matrix.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..binding import Bound, example_of
from ..language import Access, Const, Index, Var
from .extremes import Competing
from .gathers import VIEWS, Value
from .products import Products
from .rows import chosen_rows, row_products, row_sums, weighted_row_sums

__all__ = ["USUAL", "Faster", "Way", "direct_names", "names_of", "overwrite", "short_names"]


class Way(NamedTuple):
    """How a CPU evaluates a statement where it has a choice: the clock says which way is the fastest.

    Without `by_rows` a program is of torch's own operations, which torch can differentiate to any order.
    """

    by_rows: bool = True  # sums by row offsets, products by groups; else rows are gathered and added as they come
    in_groups: bool = False  # products by groups where an estimate does not say that it saves time
    by_entries: bool = False  # batches of vectors or small matrices as products of entries; else as a batched product
    in_half: bool = False  # half precision is left to one product of torch's, which sums in float32 by itself
    multiplies_first: bool = False  # factors are multiplied at all positions, before they are gathered
    puts: bool = False  # slices are added up by `index_put_`; else by `index_add_`, which waits for memory more often


USUAL = Way()
NEW = (torch.index_select, torch.gather, torch.mul, torch.where, chosen_rows)  # make memory of their own
SHORT = 32  # values of a name along which matrices are small
AT_ONCE = 1 << 18  # products of entries that are made before they are summed: they stay in a processor's cache


class Faster(Products):
    """The graph of one bound statement in faster operations than those that say what it means."""

    def __init__(
        self,
        bound: Bound,
        padded: frozenset[str],
        takes_lengths: bool = False,
        compute_dtype: torch.dtype | None = None,
        way: Way = USUAL,
    ) -> None:
        super().__init__(bound, padded, takes_lengths, compute_dtype)
        self.makers += (chosen_rows, row_products, matrix_products, operator.getitem)
        self.way = way
        self.choices = set[str]()  # fields of the way that the graph depends on
        self.entry_products: dict[fx.Node, list[fx.Node]] = {}  # of entries, and which of their operands have as many

    @property
    def is_on_cpu(self) -> bool:
        return self.bound.device.type == "cpu"

    def takes(self, choice: str) -> bool:
        """Return whether the way makes this choice, on which the graph depends from now on."""
        if not self.is_on_cpu:
            return False
        self.choices.add(choice)
        return bool(getattr(self.way, choice))

    def permute(self, value: Value, axes: tuple[str, ...]) -> fx.Node:
        """Return a value with its axes in this order; what is turned twice is turned at once."""
        node: Any = value.node
        order = tuple(map(value.axes.index, axes))
        if node.target is torch.permute:
            node, first = node.args
            order = tuple(first[dim] for dim in order)
        is_turned = order != tuple(range(len(order)))
        return self.call(torch.permute, node, order) if is_turned else node

    # products

    def multiplied(self, operands: Sequence[Value], axes: tuple[str, ...]) -> fx.Node:
        """Return the products of operands entry by entry, over all of their axes."""
        product = super().multiplied(operands, axes)
        if self.is_on_cpu and self.way.by_rows:  # torch differentiates nothing that is overwritten
            has_all = [len(operand.axes) == len(axes) for operand in operands]
            self.entry_products[product] = [node for node, whole in zip(product.all_input_nodes, has_all) if whole]
        return product

    def summed_along(self, node: fx.Node, axes: tuple[str, ...], dims: tuple[int, ...]) -> fx.Node:
        """Return products of entries summed over some dimensions; a few along the last one by a product with ones.

        Torch takes over twice as long to sum a few at a time: 26,173 by 5 in 0.39 ms, and not 0.15 (`timeit`).
        """
        is_few = dims == (len(axes) - 1,) and axes[-1] in short_names(self.bound) and len(axes) > 1
        is_wide = self.compute_dtype.itemsize > 2
        if not (is_few and is_wide and self.is_on_cpu and self.way.by_rows):
            return super().summed_along(node, axes, dims)
        length = self.lengths[axes[-1]]
        ones = self.call(torch.ones, (length,), dtype=self.compute_dtype, device=self.bound.device)
        total = self.call(torch.mv, self.call(torch.reshape, node, (-1, length)), ones)
        return total if len(axes) == 2 else self.call(torch.reshape, total, self.sizes(axes[:-1]))

    def is_elementwise(self, operands: list[Value], axes: tuple[str, ...]) -> bool:
        """Return True if one operand scales the other entry by entry, and the two are no vectors times matrices."""
        small, large = sorted((set(operand.axes) for operand in operands), key=len)
        return super().is_elementwise(operands, axes) and not (small - set(axes) and large - small)

    def contract(self) -> Value:
        """Return the product of the factors; that of rows which index tensors choose, without gathered rows."""
        accesses = self.bound.statement.accesses
        if self.is_on_cpu and len(accesses) == 2:
            for rows, others in (accesses, accesses[::-1]):
                if self.is_row_product(rows, others) and self.takes("by_rows"):
                    return self.scaled(self.row_product(rows, others))
        return super().contract()

    def is_row_product(self, rows: Access, others: Access) -> bool:
        """Return whether rows are multiplied by others and summed, one product for each position of their index."""
        index, other = rows.indices[0] if rows.indices else None, others.indices[0] if others.indices else None
        if not isinstance(index, Access) or not isinstance(other, Access) or index.name in self.padded:
            return False
        owners, places, summed = direct_names(index), direct_names(other), names_of(rows.indices[1:])
        if not owners or not places or not summed or names_of(others.indices[1:]) != summed:
            return False
        has_one_dtype = all(self.bound.dtypes[access.name] == self.compute_dtype for access in (rows, others))
        is_sampled = set(places) == set(self.bound.statement.free) and not set(places) & set(summed)
        return has_one_dtype and is_sampled and places[: len(owners)] == owners

    def row_product(self, rows: Access, others: Access) -> Value:
        """Return products of rows, for factors of that form."""
        index, other = rows.indices[0], others.indices[0]
        assert isinstance(index, Access)
        assert isinstance(other, Access)
        tables = [self.tensors[access.name] for access in (rows, others)]
        if len(rows.indices) > 2:
            tables = [self.call(torch.flatten, table, 1) for table in tables]
        places = tuple(map(str, other.indices))
        positions = self.tensors[index.name], tables[1], self.tensors[other.name], other.name in self.padded
        product = self.call(row_products, tables[0], *positions)
        return Value(self.call(torch.reshape, product, self.sizes(places)) if len(places) > 1 else product, places)

    def batch_product(
        self, left: Value, right: Value, batch: list[str], rows: list[str], columns: list[str], summed: list[str]
    ) -> fx.Node:
        """Return a product of batches of matrices; that of vectors and matrices may be one of entries, then summed.

        A batched product calls a routine for each matrix, which for a small one takes longer than its numbers do.
        """
        is_wide = self.compute_dtype.itemsize > 2  # products of entries would be rounded before they are summed
        is_small = self.way.by_rows and {*rows, *summed, *columns} <= short_names(self.bound)
        is_small = is_small and max(len(rows), len(summed), len(columns)) == 1
        is_vector = bool(rows) != bool(columns)
        if not is_wide or not (is_vector or (rows and is_small)) or not self.takes("by_entries"):
            return super().batch_product(left, right, batch, rows, columns, summed)
        if not is_vector:
            matrices = self.in_groups(left, batch, rows, summed), self.in_groups(right, batch, summed, columns)
            return self.call(matrix_products, *matrices)
        groups = (batch, rows, summed) if rows else (batch, summed, columns)
        factors = [
            self.in_groups(each, *[[name for name in group if name in each.axes] for group in groups])
            for each in (left, right)
        ]
        return self.call(torch.sum, self.call(torch.mul, *factors), groups.index(summed))

    def best_inside(self, products: Competing) -> Competing:
        """Return the best of the products; along one dimension torch finds the first winner as well."""
        axes, inner, reduced = products.value.axes, self.bound.statement.summed, self.bound.statement.reduced
        is_hidden = products.place is None or products.entries is not None
        if is_hidden or len(inner) != 1 or inner != reduced or inner[0] not in axes:
            return super().best_inside(products)
        dim = axes.index(inner[0])
        pair = self.call(torch.max if self.is_max else torch.min, products.value.node, dim)
        best, place = (self.call(operator.getitem, pair, at) for at in range(2))
        kept_axes = axes[:dim] + axes[dim + 1 :]
        winner = self.call(torch.Tensor.to, place, self.bound.winner_dtype)
        return Competing(Value(best, kept_axes), None, Value(winner, kept_axes))

    @property
    def starts_at_worst(self) -> bool:
        """Whether scattered products compete with a number that all of them beat or equal, and not with nothing.

        A CPU looks in the latter case for the first product of each element: 5,587 by 9 in 0.68 ms, and not 0.42.
        """
        return self.is_on_cpu

    # reads

    def gather(self, access: Access) -> Value:
        """Return the access over its index names."""
        if access not in self.gathered and self.is_widened(access):
            self.gathered[access] = replace(self.read(self.widened_table(access), access), is_wide=True)
        return super().gather(access)

    def is_widened(self, access: Access) -> bool:
        """Return whether a factor is made float32 before its rows are gathered: of them there are more on a CPU.

        A processor may take ten times longer to convert a number than to move it.
        """
        dtype = self.bound.dtypes[access.name]
        is_half = dtype.is_floating_point and dtype.itemsize < self.compute_dtype.itemsize  # positions stay integers
        return self.is_on_cpu and is_half and access in self.large_gathers and access.is_indirect

    def widened_table(self, access: Access) -> fx.Node:
        return self.call(torch.Tensor.to, self.tensors[access.name], self.compute_dtype)

    def chosen(
        self, node: fx.Node, dim: int, access: Access, index: Index
    ) -> tuple[fx.Node, Value, frozenset[fx.Node]]:
        """Return what an index chooses along a dimension; on a CPU what a -1 hides is overwritten where it lies."""
        is_factor = self.bound.statement.is_sum and access in self.bound.statement.accesses
        if not isinstance(index, Access) or not index.indices or index.is_indirect or index.name not in self.padded:
            return super().chosen(node, dim, access, index)
        if not is_factor or not self.takes("by_rows"):
            return super().chosen(node, dim, access, index)
        position, mask = self.gather(index), self.mask(index)
        return self.call(chosen_rows, node, dim, self.flat(position)), position, frozenset({mask.node})

    def read_jointly(self, node: fx.Node, access: Access, indices: list[Index], indirect_dims: list[int]) -> Value:
        """Return a tensor's elements at positions in several dimensions, as positions in those dimensions together.

        A tensor of which less is read than it holds is left as it is, since it may have to be copied for that. Where
        one index tensor says which element is read of each row, as in `N[i,K[i,c]]`, rows are told by where they lie.
        """
        sent = [dim for dim, index in enumerate(indices) if isinstance(index, Access)]
        names = names_of([index for index in indices if not isinstance(index, Access)])
        if self.is_on_cpu and len(sent) == 1 and names and len(indirect_dims) == len(indices):
            return self.read_along(node, sent[0], self.position(indices[sent[0]]), names)
        first, last = indirect_dims[0], indirect_dims[-1]
        if access not in self.large_gathers or indirect_dims != list(range(first, last + 1)):
            return super().read_jointly(node, access, indices, indirect_dims)
        joint, positions = self.broadcast([indices[dim] for dim in indirect_dims])
        sizes = [self.call(torch.Tensor.size, node, dim) for dim in indirect_dims]
        flat = self.flat(Value(self.joined(positions, sizes), joint))
        node = self.call(torch.index_select, self.call(torch.flatten, node, first, last), first, flat)
        node = self.spread(node, first, joint)
        names = tuple(map(str, indices))
        return Value(node, names[:first] + joint + names[last + 1 :])

    def read_along(self, node: fx.Node, dim: int, position: Value, names: tuple[str, ...]) -> Value:
        """Return a tensor's elements at positions along one dimension, over names that index all its other ones."""
        others = tuple(name for name in position.axes if name not in names)
        axes = (*names[:dim], *others, *names[dim:])
        groups = [[name] for name in names]
        place = self.as_int64(self.in_groups(position, *groups[:dim], [*others], *groups[dim:]))
        chosen = self.call(torch.gather, node, dim, place)
        return Value(chosen if len(others) == 1 else self.call(torch.reshape, chosen, self.sizes(axes)), axes)

    # sums by row

    def total(self) -> fx.Node:
        """Return the statement's sums, by row offsets if it has that form."""
        rows = self.rows_by_offsets() if self.is_on_cpu else None
        return super().total() if rows is None else rows

    def weighted_rows(self) -> Value | None:
        """Return the sums of weighted rows by torch's own operation, which it does not differentiate twice."""
        return super().weighted_rows() if not self.is_on_cpu or self.way.by_rows else None

    def rows_by_offsets(self) -> fx.Node | None:
        """Return `C[AM[p],n] += AV[p,q] * B[AK[p,q],n]`, or with p itself as the row, without all gathered rows.

        The result is None for a statement that is not of this form.
        """
        statement = self.bound.statement
        if any(dtype != self.bound.dtype for name, dtype in self.bound.dtypes.items() if name in self.value_names):
            return None
        if self.bound.is_seeded and self.bound.dtype != self.compute_dtype:
            return None
        for rows in statement.accesses:
            others = [access for access in statement.accesses if access is not rows]
            if len(others) <= 1 and self.is_row_sum(rows, others) and self.takes("by_rows"):
                return self.row_sum(rows, others)
        return None

    @property
    def value_names(self) -> set[str]:
        seed = [self.bound.statement.output.name] if self.bound.is_seeded else []
        return {access.name for access in self.bound.statement.accesses} | set(seed)

    def is_row_sum(self, rows: Access, weights: list[Access]) -> bool:
        """Return whether rows that an index tensor chooses are summed, each times one weight if there are any."""
        output = self.bound.statement.output
        if not isinstance(rows.indices[0] if rows.indices else None, Access):
            return False
        places, columns = direct_names(rows.indices[0]), names_of(rows.indices[1:])
        if not places or not columns or set(places) & set(columns):
            return False
        if any(sorted(direct_names(access) or ()) != sorted(places) for access in weights):
            return False
        kept = output.indices[: len(output.indices) - len(columns)]
        if names_of(output.indices[len(kept) :]) != columns:
            return False
        is_scattered = len(kept) == 1 and isinstance(kept[0], Access)
        owners = direct_names(kept[0]) if is_scattered else names_of(kept)
        return (
            owners is not None
            and bool(owners)
            and places[: len(owners)] == owners
            and len(places) >= len(owners) + (not is_scattered)
        )

    def row_sum(self, rows: Access, weights: list[Access]) -> fx.Node:
        """Return the sums of weighted rows, for a statement of that form."""
        statement, index = self.bound.statement, rows.indices[0]
        columns = names_of(rows.indices[1:])
        assert isinstance(index, Access)
        assert columns is not None
        is_wide = self.is_widened(rows)
        table = self.widened_table(rows) if is_wide else self.tensors[rows.name]
        if len(columns) > 1:
            table = self.call(torch.flatten, table, 1)
        scales = [self.permute(self.gather(access), tuple(map(str, index.indices))) for access in weights]
        if is_wide:
            scales = [self.call(torch.Tensor.to, scale, self.compute_dtype) for scale in scales]
        owner = statement.output.indices[0]
        is_padded = index.name in self.padded
        if isinstance(owner, Access):
            owners, num_rows = self.tensors[owner.name], self.size[0]
            is_padded = is_padded or owner.name in self.padded
        else:
            owners, num_rows = None, self.product(self.size[: -len(columns)])
        places = self.tensors[index.name]
        total = self.call(weighted_row_sums, table, places, scales[0] if scales else None, owners, num_rows, is_padded)
        if len(self.size) != 2:
            total = self.call(torch.reshape, total, self.size)
        total = self.scaled(Value(total, ())).node
        return self.call(torch.add, self.start(), total) if self.bound.is_seeded else total

    # scatter

    def scatter(self, result: Value) -> fx.Node:
        """Return the start with the result added at the positions on the left."""
        indices = self.bound.statement.output.indices
        dims = self.indirect_dims(indices)
        if len(dims) == 2 and all(isinstance(index, Var) for index in indices):
            return self.on_diagonals(result)
        if not dims or not self.is_on_cpu or any(isinstance(indices[dim], Const) for dim in dims):
            return super().scatter(result)
        places, columns = direct_names(indices[0]), names_of(indices[1:])
        is_by_row = dims == [0] and places and columns and not set(places) & set(columns)
        if is_by_row and places and columns and self.takes("by_rows"):
            return self.rows_added(result, places, columns)
        if len(dims) < len(indices):
            return super().scatter(result)
        joint, positions = self.broadcast(indices)
        source = self.permute(Value(self.hide(result, self.masks(self.bound.statement.output)), result.axes), joint)
        place, numbers = (self.flat(Value(node, joint)) for node in (self.joined(positions, self.size), source))
        if self.bound.is_seeded:
            start = self.call(torch.reshape, self.start(), (-1,))
        else:
            count = self.product(self.size)
            start = self.call(torch.zeros, (count,), dtype=self.compute_dtype, device=self.bound.device)
        if self.takes("by_rows"):  # `scatter_add_` is the fastest for numbers, and its gradient the slowest
            total = self.call(torch.Tensor.scatter_add_, start, 0, place, numbers)
        else:
            total = self.added(start, 0, place, numbers)
        return total if len(indices) == 1 else self.call(torch.reshape, total, self.size)

    def added(self, start: fx.Node, dim: int, positions: fx.Node, source: fx.Node) -> fx.Node:
        """Return a start with slices of a source added along a dimension, by one of two operations of torch."""
        if self.is_on_cpu:  # torch adds slices at int32 positions one by one, up to 28 times slower
            positions = self.as_int64(positions)
        if not self.takes("puts"):
            return super().added(start, dim, positions, source)
        return self.call(torch.ops.aten.index_put_.default, start, [None] * dim + [positions], source, True)

    def rows_added(self, result: Value, places: tuple[str, ...], columns: tuple[str, ...]) -> fx.Node:
        """Return a result summed by the rows that one index tensor sends it to."""
        index = self.bound.statement.output.indices[0]
        assert isinstance(index, Access)
        values = self.in_groups(result, list(places), list(columns))
        owner = self.tensors[index.name], self.size[0], index.name in self.padded
        total = self.call(row_sums, values, *owner)
        if len(columns) > 1:
            total = self.call(torch.reshape, total, self.size)
        return self.call(torch.add, self.start(), total) if self.bound.is_seeded else total

    def on_diagonals(self, result: Value) -> fx.Node:
        """Return a result on the diagonal of the two dimensions that one name indexes."""
        names = tuple(map(str, self.bound.statement.output.indices))
        twice = next(name for name in names if names.count(name) > 1)
        first, second = (dim for dim, name in enumerate(names) if name == twice)
        last = self.permute(result, (*(name for name in names if name != twice), twice))
        total = self.call(torch.diag_embed, last, 0, first, second)
        return self.call(torch.add, self.start(), total) if self.bound.is_seeded else total


def overwrite(products: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Let products of entries overwrite operands of their size that nothing else reads, in a graph that is complete.

    New memory costs more than a product does: the system clears each page of it when it is first written to.
    """
    for product, operands in products.items():
        spare = next(filter(is_spare, operands), None)
        if spare is not None and len(product.args) == 2:
            other = product.args[1] if product.args[0] is spare else product.args[0]
            product.op, product.target, product.args = "call_method", "mul_", (spare, other)


def is_spare(node: fx.Node) -> bool:
    """Return whether a value lies in memory that was made for it, and one operation alone reads it."""
    while _is_read_once(node) and (node.target in VIEWS or node.target == "to"):
        node = node.all_input_nodes[0]  # after it come lengths
    return _is_read_once(node) and (node.target in NEW or node.target == "mul_")


def _is_read_once(node: fx.Node) -> bool:
    return len(node.users) == 1 and node.op != "placeholder"  # whose target is the name of the caller's tensor


def short_names(bound: Bound) -> frozenset[str]:
    """Return the names of which there are so few values that products of matrices along them may be by entries."""
    return frozenset(name for name, extent in bound.extents.items() if example_of(extent) <= SHORT)


def matrix_products(left: Tensor, right: Tensor) -> Tensor:
    """Return products of batches of matrices, a few at a time as products of their entries, which are then summed."""
    step = max(1, AT_ONCE // max(1, left.shape[1] * right.shape[1] * right.shape[2]))
    parts = zip(left.unsqueeze(3).split(step), right.unsqueeze(1).split(step))
    return torch.cat([(one * other).sum(2) for one, other in parts])


def names_of(indices: Sequence[Index]) -> tuple[str, ...] | None:
    """Return the names that indices are; None if one is no name, or stands twice."""
    names = tuple(index.name for index in indices if isinstance(index, Var))
    return names if len(set(names)) == len(indices) else None


def direct_names(access: Index) -> tuple[str, ...] | None:
    """Return the names by which an access reads a tensor as it lies; None if it does not."""
    return names_of(access.indices) if isinstance(access, Access) else None
