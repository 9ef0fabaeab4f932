"""Several `torch.fx` graphs as one, in which what they do alike is done once.

The gradients of a statement read the same factors at the same positions: their rows are gathered, made float32 and
multiplied once, in one program.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .faster import overwrite
from .gathers import VIEWS

__all__ = ["Joint"]

FACTORIES = (torch.zeros, torch.zeros_like, torch.full, torch.Tensor.new_full)  # of memory that is written to


class Joint:
    """A graph under construction that returns what several graphs do; arguments of one name are one argument."""

    def __init__(self, names: Sequence[Hashable]) -> None:
        self.graph = fx.Graph()
        self.arguments = {name: self.graph.placeholder(f"argument{at}") for at, name in enumerate(names)}
        self.results: list[fx.Node] = []
        self.entry_products: dict[fx.Node, list[fx.Node]] = {}
        self.seen: dict[Hashable, fx.Node] = {}

    def add(self, own: fx.Graph, names: Sequence[Hashable], products: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
        """Add a graph, whose arguments have these names in order; `products` of entries may overwrite operands."""
        own_nodes, order, written = dict[fx.Node, fx.Node](), iter(names), _written(own)
        for node in own.nodes:
            if node.op == "placeholder":
                own_nodes[node] = self.arguments[next(order)]
            elif node.op == "output":
                self.results.append(own_nodes[node.all_input_nodes[0]])
            else:
                own_nodes[node] = self.added(node, own_nodes, is_shared=node not in written)
        for product, operands in products.items():
            if product in own_nodes:
                self.entry_products[own_nodes[product]] = [own_nodes[operand] for operand in operands]

    def added(self, node: fx.Node, own_nodes: Mapping[fx.Node, fx.Node], is_shared: bool) -> fx.Node:
        """Return a copy of a node, or the one that does the same already."""
        args = fx.node.map_arg(node.args, own_nodes.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, own_nodes.__getitem__)
        key = node.op, node.target, _hashable(args), _hashable(kwargs)
        if is_shared and key in self.seen:
            return self.seen[key]
        copy = self.graph.create_node(node.op, node.target, args, kwargs)
        if is_shared:
            self.seen[key] = copy
        return copy

    def finished(self) -> fx.Graph:
        """Return the complete graph, whose results share no memory."""
        owners = set[fx.Node]()
        for at, result in enumerate(self.results):
            owner = result
            while owner.op != "placeholder" and (owner.target in VIEWS or owner.target in ("to", "contiguous")):
                owner = owner.all_input_nodes[0]
            if owner in owners:
                self.results[at] = self.graph.call_method("clone", (result,))
            owners.add(owner)
        self.graph.output(tuple(self.results))
        overwrite(self.entry_products)
        self.graph.lint()
        return self.graph


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that write to memory, and those whose memory they may write to."""
    found = set[fx.Node]()
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_new = node.target in FACTORIES or name in ("new_full", "clone") or node.kwargs.get("copy")
        if is_new or "_." in f"{name}.":
            found.add(node)
            owner = node.all_input_nodes[0] if node.all_input_nodes and not is_new else None
            while owner is not None and owner.op != "placeholder":
                found.add(owner)
                owner = owner.all_input_nodes[0] if owner.target in VIEWS else None
    return found


def _hashable(value: Any) -> Hashable:
    """Return what equals another value's only if both are alike, numbers of other types told apart."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(each)) for key, each in value.items())
    return type(value), value
