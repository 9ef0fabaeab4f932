"""The torch program that runs: what `lower` means, in the operations that take the least.

Several indirections become one. On a CPU sums by row read row offsets, and vectors are multiplied each by its matrix.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ..language import Access, Const, Index, Var
from .extremes import Competing
from .gathers import VIEWS, Value
from .products import Products
from .rows import chosen_rows, row_sums, weighted_row_sums
from .vectors import vectors_times_matrices

__all__ = ["Faster", "direct_names", "names_of"]


class Faster(Products):
    """The graph of one bound statement in faster operations than those that say what it means."""

    @property
    def is_on_cpu(self) -> bool:
        return self.bound.device.type == "cpu"

    # products

    def is_elementwise(self, operands: list[Value], axes: tuple[str, ...]) -> bool:
        """Return True if one operand scales the other entry by entry, and the two are no vectors times matrices."""
        small, large = sorted((set(operand.axes) for operand in operands), key=len)
        return super().is_elementwise(operands, axes) and not (small - set(axes) and large - small)

    def batch_product(
        self, left: Value, right: Value, batch: list[str], rows: list[str], columns: list[str], summed: list[str]
    ) -> fx.Node:
        """Return a product of batches of matrices; on a CPU many vectors have their own way, each times a matrix."""
        if not self.is_on_cpu or bool(rows) == bool(columns):
            return super().batch_product(left, right, batch, rows, columns, summed)
        matrices, vector = (left, right) if rows else (right, left)
        shape = (batch, rows, summed) if rows else (batch, summed, columns)
        vectors = self.in_groups(vector, batch, summed)
        return self.call(vectors_times_matrices, vectors, self.in_groups(matrices, *shape), bool(rows))

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

    def makes_memory(self, node: fx.Node) -> bool:
        """Return whether a value lies in memory of its own."""
        while node.target in VIEWS:
            node = node.all_input_nodes[0]  # after it come lengths
        own = (torch.mm, torch.mv, torch.bmm, torch.dot, vectors_times_matrices, chosen_rows, operator.getitem)
        return node.target in own or super().makes_memory(node)

    # reads

    def chosen(
        self, node: fx.Node, dim: int, access: Access, index: Index
    ) -> tuple[fx.Node, Value, frozenset[fx.Node]]:
        """Return what an index chooses along a dimension; on a CPU what a -1 hides is overwritten where it lies."""
        is_factor = self.bound.statement.is_sum and access in self.bound.statement.accesses
        if not isinstance(index, Access) or not index.indices or index.is_indirect or index.name not in self.padded:
            return super().chosen(node, dim, access, index)
        if not self.is_on_cpu or not is_factor:
            return super().chosen(node, dim, access, index)
        position, mask = self.gather(index), self.mask(index)
        return self.call(chosen_rows, node, dim, self.flat(position)), position, frozenset({mask.node})

    def read_jointly(self, node: fx.Node, access: Access, indices: list[Index], indirect_dims: list[int]) -> Value:
        """Return a tensor's elements at positions in several dimensions, as positions in those dimensions together.

        A tensor of which less is read than it holds is left as it is, since it may have to be copied for that.
        """
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

    # sums by row

    def total(self) -> fx.Node:
        """Return the statement's sums, by row offsets if it has that form."""
        rows = self.rows_by_offsets() if self.is_on_cpu else None
        return super().total() if rows is None else rows

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
            if len(others) <= 1 and self.is_row_sum(rows, others):
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
        table = self.tensors[rows.name]
        if len(columns) > 1:
            table = self.call(torch.flatten, table, 1)
        scales = [self.permute(self.gather(access), tuple(map(str, index.indices))) for access in weights]
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
        if dims == [0] and places and columns and not set(places) & set(columns):
            return self.rows_added(result, places, columns)
        if len(dims) < len(indices):
            return super().scatter(result)
        joint, positions = self.broadcast(indices)
        source = self.permute(Value(self.hide(result, self.masks(self.bound.statement.output)), result.axes), joint)
        position = self.joined(positions, self.size)
        flat = [self.call(torch.reshape, node, (-1,)) for node in (self.start(), position, source)]
        total = self.call(torch.Tensor.scatter_add_, flat[0], 0, flat[1], flat[2])  # for numbers the fastest
        return total if len(indices) == 1 else self.call(torch.reshape, total, self.size)

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


def names_of(indices: Sequence[Index]) -> tuple[str, ...] | None:
    """Return the names that indices are; None if one is no name, or stands twice."""
    names = tuple(index.name for index in indices if isinstance(index, Var))
    return names if len(set(names)) == len(indices) else None


def direct_names(access: Index) -> tuple[str, ...] | None:
    """Return the names by which an access reads a tensor as it lies; None if it does not."""
    return names_of(access.indices) if isinstance(access, Access) else None
