"""What torch is told about formats: how they are taken apart, that files may hold them, that none are collated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from .parts import register_format
from .pattern_cache import PatternCache
from .sparse_format import SparseFormat

__all__ = ["register"]

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Context:
    """All of a format but its tensors; the cache of its pattern does not count in a comparison."""

    kind: type[SparseFormat]
    shape: Sizes
    group_dim: int
    block_size: Sizes | None
    stored: tuple[int, ...]  # the dimensions that have coordinates
    cache: PatternCache | None = field(default=None, compare=False, repr=False)  # None: read from a file


def register(*kinds: type[SparseFormat]) -> None:
    """Make formats nodes of torch's pytrees, let `torch.load(weights_only=True)` read them, refuse to collate them."""
    for kind in kinds:
        pytree.register_pytree_node(
            kind,
            _flatten,
            _unflatten,
            serialized_type_name=f"insum_ops.formats.{kind.__name__}",
            to_dumpable_context=_to_file,
            from_dumpable_context=partial(_from_file, kind),
            flatten_with_keys_fn=_flatten_with_keys,
        )
        register_format(kind)
        default_collate_fn_map[kind] = _refuse_to_collate
    torch.serialization.add_safe_globals(list(kinds))


def _flatten(form: SparseFormat) -> tuple[list[Any], _Context]:
    stored = tuple(dim for dim, coord in enumerate(form.coords) if coord is not None)
    context = _Context(type(form), form.shape, form.group_dim, form.block_size, stored, form._pattern_cache)
    return [form.values, *(form.coords[dim] for dim in stored)], context


def _flatten_with_keys(form: SparseFormat) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    leaves, context = _flatten(form)
    names = ["values", *(f"coords_{dim}" for dim in context.stored)]
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves)], context


def _unflatten(leaves: Iterable[Any], context: _Context) -> SparseFormat:
    """Return a format of leaves, which are not checked: a leaf may be whatever a function made of a tensor."""
    values, *stored = leaves
    by_dim = dict(zip(context.stored, stored))
    coords = tuple(by_dim.get(dim) for dim in range(len(context.shape)))
    return context.kind._of_parts(coords, values, context.shape, context.group_dim, context.block_size, context.cache)


def _to_file(context: _Context) -> list[Any]:
    """Return what JSON can hold of a context."""
    return [context.shape, context.group_dim, context.block_size, context.stored]


def _from_file(kind: type[SparseFormat], saved: list[Any]) -> _Context:
    shape, group_dim, block_size, stored = saved
    return _Context(kind, tuple(shape), group_dim, None if block_size is None else tuple(block_size), tuple(stored))


def _refuse_to_collate(batch: list[SparseFormat], **_: object) -> NoReturn:
    """Refuse to stack formats, whose patterns differ from sample to sample."""
    name = type(batch[0]).__name__
    raise TypeError(
        f"a batch of {name} is not stacked, since each has a pattern of its own; pass collate_fn=list to the "
        "DataLoader, or a collate_fn that joins them, such as into one matrix with all of them on its diagonal"
    )
