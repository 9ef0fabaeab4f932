"""Contractions of two factors as one matrix product, a sum or a product of entries.

torch.einsum would work that out anew at every call, and takes every product for one of batches, of which Inductor has
none whose size depends on data.
"""

from __future__ import annotations

import torch
from torch import fx

from .gathers import Value
from .lower import Lowering

__all__ = ["Products"]


class Products(Lowering):
    """The graph of one bound statement whose contractions are products of matrices."""

    def pair(self, operands: list[Value], axes: tuple[str, ...]) -> Value:
        """Return one or two operands contracted to `axes`: first each is summed over what nobody else has."""
        wanted = [
            set(axes).union(*(other.axes for j, other in enumerate(operands) if j != i)) for i in range(len(operands))
        ]
        operands = [self.summed_to(operand, names) for operand, names in zip(operands, wanted)]
        if len(operands) == 1:
            return Value(self.permute(operands[0], axes), axes)
        left, right = operands
        if set(left.axes) | set(right.axes) == set(axes) or self.is_elementwise(operands, axes):
            return super().pair(operands, axes)
        return self.matrix_product(left, right, axes)

    def summed_to(self, operand: Value, names: set[str]) -> Value:
        """Return an operand summed over all of its axes that are not among `names`."""
        dims = tuple(dim for dim, name in enumerate(operand.axes) if name not in names)
        if not dims:
            return operand
        kept_axes = tuple(name for name in operand.axes if name in names)
        return Value(self.summed(operand.node, dims), kept_axes)

    def matrix_product(self, left: Value, right: Value, axes: tuple[str, ...]) -> Value:
        """Return two operands contracted by one product of vectors, matrices or batches of matrices."""
        shared = set(left.axes) & set(right.axes)
        rows, columns = ([name for name in each.axes if name not in shared] for each in (left, right))
        if self.is_turned(left, right, rows, columns, axes):
            left, right, rows, columns = right, left, columns, rows
        longest = left if len(left.axes) >= len(right.axes) else right
        batch = [name for name in axes if name in shared]
        summed = [name for name in longest.axes if name in shared and name not in axes]
        if batch:
            total = self.batch_product(left, right, batch, rows, columns, summed)
        elif rows and columns:
            total = self.call(torch.mm, self.in_groups(left, rows, summed), self.in_groups(right, summed, columns))
        elif rows:
            total = self.call(torch.mv, self.in_groups(left, rows, summed), self.in_groups(right, summed))
        elif columns:  # the gradient of a matrix that `mv` is given transposed would be transposed too
            total = self.call(torch.mm, self.in_groups(left, [], summed), self.in_groups(right, summed, columns))
            total = self.call(torch.reshape, total, (-1,))
        else:
            total = self.call(torch.dot, self.in_groups(left, summed), self.in_groups(right, summed))
        order = (*batch, *rows, *columns)
        lengths = [group for group in (batch, rows, columns) if group or batch]
        if any(len(group) != 1 for group in lengths):
            total = self.call(torch.reshape, total, self.sizes(order))
        return Value(self.permute(Value(total, order), axes), axes)

    def batch_product(
        self, left: Value, right: Value, batch: list[str], rows: list[str], columns: list[str], summed: list[str]
    ) -> fx.Node:
        """Return a product of batches of matrices."""
        first, second = self.in_groups(left, batch, rows, summed), self.in_groups(right, batch, summed, columns)
        return self.call(torch.bmm, first, second)

    @staticmethod
    def is_turned(left: Value, right: Value, rows: list[str], columns: list[str], axes: tuple[str, ...]) -> bool:
        """Return True if two operands have to trade places so that nothing is transposed, before or after a product."""
        if rows and columns:
            return axes.index(columns[0]) < axes.index(rows[0])
        if rows:  # matrices as they lie are on the left of vectors if what is summed comes last
            return left.axes[-1] in rows
        return bool(columns) and right.axes[-1] not in columns

    def in_groups(self, value: Value, *groups: list[str]) -> fx.Node:
        """Return a value with one dimension for each group of its axes, of length 1 for a group without any."""
        node = self.permute(value, tuple(name for group in groups for name in group))
        if all(len(group) == 1 for group in groups):
            return node
        return self.call(torch.reshape, node, tuple(self.product(self.sizes(tuple(group))) for group in groups))

    def contiguous(self, node: fx.Node) -> fx.Node:
        """Return a value laid out row by row in memory of its own, as torch's products of matrices are at once."""
        return node if node.target in (torch.mm, torch.mv, torch.bmm, torch.dot) else super().contiguous(node)
