"""How a statement with a format in it is evaluated, worked out once for all formats of a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from ...formats.torch_state import asked_once, is_compiling, is_dynamo, modes
from ..language import parse
from .bind import Meta, TensorLike, bind
from .rewrite import sparse_factor
from .sparse_protocol import Kind, Recipe, SparseFormat, best_group_dim, is_sparse, recipe

__all__ = ["recipe_for", "suited_group_dim"]

Operand = Any  # a Tensor or a SparseFormat


def _is_not_plain(tensor: Tensor) -> bool:
    """Return True for a tensor that is not plainly dense; a tracer can't be asked, and gets False."""
    return not is_compiling() and (tensor.layout is not torch.strided or tensor.is_nested)


def recipe_for(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, dense: Mapping[str, Operand]
) -> Recipe:
    """Return how to evaluate a statement in which `form` stands as `name`; raise InsumError if it does not fit."""
    is_not_plain = [isinstance(o, Tensor) and _is_not_plain(o) for o in dense.values()]
    if any(is_not_plain):
        bind(parse(expr), {name: form, **dense}, size)  # says what is wrong with it
    others = [(key, _numbers(o.shape), o.dtype, o.device, is_sparse(o)) for key, o in dense.items()]
    return Recipe(*_recipe(expr, None if size is None else _numbers(size), name, Kind.of(form), tuple(others)))


def _numbers(size: Sequence[int]) -> tuple[int, ...]:
    """Return `size` as plain integers.

    A recipe is for one size, so a tracer that has met several must trace each of them instead of a symbolic one.
    """
    return tuple([index(extent) for extent in size]) if is_dynamo() else tuple(size)


def _new_recipe(expr: str, size: Any, name: str, kind: Any, others: Any) -> tuple[Any, ...]:
    """Return the fields of the recipe; `kind` are those of the format's `Kind`, `others` describe the other tensors."""
    statement, sparse_kind = parse(expr), Kind(*kind)
    tensors: dict[str, TensorLike] = {key: Meta(shape, dtype, device) for key, shape, dtype, device, _ in others}
    bound = bind(statement, {name: sparse_kind, **tensors}, size)
    sparse = [name, *(key for key, _, _, _, is_also_sparse in others if is_also_sparse)]
    return recipe(bound, sparse_factor(statement, sparse), sparse_kind)


_cached_recipe = lru_cache(maxsize=256)(_new_recipe)


@asked_once
def _recipe(*key: Any) -> tuple[Any, ...]:
    """Return the fields of a recipe, worked out once for its arguments; a tracer's hold sizes that are no keys."""
    return _new_recipe(*key) if is_compiling() or modes() else _cached_recipe(*key)


@lru_cache(maxsize=256)
def _cached_group_dim(expr: str, sparse: tuple[str, ...], group_dim: int, has_groups: bool) -> int:
    statement = parse(expr)
    accesses = [access for access in statement.accesses if access.name in sparse]
    if len(sparse) != 1 or len(accesses) != 1:
        return group_dim  # a mistake, of which the recipe will say more
    return best_group_dim(statement, accesses[0], group_dim, has_groups)


@asked_once
def suited_group_dim(expr: str, sparse: tuple[str, ...], group_dim: int, has_groups: bool) -> int:
    """Return the dimension along which the format of a statement is best grouped.

    A tracer can be told to call a plain function, and not one that keeps its results.

    Args:
        expr: the statement, in which the format stands.
        sparse: the names of the operands that are formats; of several the recipe refuses all but one.
        group_dim: the dimension that the first of them is grouped along.
        has_groups: whether p counts its groups; False if p is the row itself.
    """
    return _cached_group_dim(expr, sparse, group_dim, has_groups)
