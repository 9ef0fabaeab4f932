"""How a statement may be split over the ranks of a mesh, derived from its text; nothing here communicates.

Ranks of one mesh dimension share the work along one index. A tensor that has this index is split along that dimension,
all others are whole on each rank. If the index stands on the left outside of any indirection, so is the output split;
otherwise each rank holds a part of every sum, or a maximum over its share. A dimension that is indirected into has an
access in the place of an index, so it is never split: positions stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..compiler import Statement, Var, parse

__all__ = ["Split", "bytes_moved", "cheapest", "cheapest_split", "spelled", "splits_of"]

STATEMENTS = 1024  # whose splits are kept
WHOLE, SUM = Replicate(), Partial("sum")


@dataclass(frozen=True)
class Split:
    """One way to share a statement among the ranks of one mesh dimension.

    Args:
        index: the index along which it is split; None if no index is.
        inputs: the placement that each tensor must have, the output that `+=` starts from included.
        output: the placement of the result; `Partial("max")` says that each rank has a maximum over its share.

    Example:
        >>> from insum_ops.distributed import splits_of
        >>> split = splits_of("C[i] += A[i,k] * B[k]")[2]
        >>> split.index, split.inputs["A"].dim
        ('k', 1)
        >>> print(split)
        along k: C Partial(sum), A Shard(1), B Shard(0) -> Partial(sum)
    """

    index: str | None
    inputs: Mapping[str, Placement]
    output: Placement

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {spelled(placement)}" for name, placement in self.inputs.items())
        return (
            f"{'along no index' if self.index is None else f'along {self.index}'}: {inputs} -> {spelled(self.output)}"
        )


def spelled(placement: Placement) -> str:
    """Return a placement in torch's words, which are not the same in all of its versions."""
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    return f"Partial({placement.reduce_op})" if type(placement) is Partial else type(placement).__name__.lstrip("_")


@lru_cache(maxsize=STATEMENTS)
def splits_of(expr: str) -> tuple[Split, ...]:
    """Return every way to share a statement among the ranks of one mesh dimension, the one that shares nothing first.

    A given output of `+=` that meets partial sums is one of the parts: `Partial`, so that it counts once.

    Args:
        expr: the statement, as `insum` takes it, over tensors; a format's own statement is what `explain` shows.

    Returns:
        A `Split` for no index, then one for each index that can be split, in the order of the text, then one for each
        factor that may itself be a partial sum, since a sum of products is linear in each factor.

    Raises:
        ParseError: `expr` is not a statement of this language.

    Example:
        >>> from insum_ops.distributed import splits_of
        >>> for split in splits_of("C[I[p],n] += B[p,n]"):
        ...     print(split)
        along no index: C Replicate, I Replicate, B Replicate -> Replicate
        along p: C Partial(sum), I Shard(0), B Shard(0) -> Partial(sum)
        along n: C Shard(1), I Replicate, B Shard(1) -> Shard(1)
        along no index: C Partial(sum), I Replicate, B Partial(sum) -> Partial(sum)
    """
    statement = parse(expr)
    along = [_along(statement, name) for name in statement.names]
    return (_whole(statement, WHOLE), *[split for split in along if split is not None], *_linear(statement))


def _along(statement: Statement, name: str) -> Split | None:
    """Return the split along one index; None if a tensor has it in several dimensions, or in other ones elsewhere."""
    dims: dict[str, int | None] = {}
    for access in statement.reads:
        places = _places(access.indices, name)
        dim = places[0] if places else None
        if len(places) > 1 or dims.setdefault(access.name, dim) != dim:
            return None
    places, output = _places(statement.output.indices, name), statement.output.name
    if len(places) > 1 or all(dim is None for dim in dims.values()):
        return None
    if output in dims and dims[output] != (places[0] if places else -1):  # a factor that is the output as well
        return None
    result = Shard(places[0]) if places else Partial("sum" if statement.is_sum else statement.reduction)
    cuts = {key: WHOLE if dim is None else Shard(dim) for key, dim in dims.items()}
    inputs = {key: cuts[key] for key in statement.tensor_names}
    return Split(name, {output: _start(statement, result), **inputs}, result)


def _places(indices: Sequence[object], name: str) -> list[int]:
    return [dim for dim, index in enumerate(indices) if isinstance(index, Var) and index.name == name]


def _whole(statement: Statement, result: Placement) -> Split:
    inputs: dict[str, Placement] = dict.fromkeys(statement.tensor_names, WHOLE)
    return Split(None, {statement.output.name: _start(statement, result), **inputs}, result)


def _linear(statement: Statement) -> list[Split]:
    """Return the splits in which one factor is a partial sum and all other tensors are whole."""
    names = [access.name for access in statement.accesses]
    others = {*statement.index_names, statement.output.name}
    whole = _whole(statement, SUM)
    return [
        Split(None, {**whole.inputs, name: SUM}, SUM)
        for name in names
        if statement.is_sum and names.count(name) == 1 and name not in others
    ]


def _start(statement: Statement, result: Placement) -> Placement:
    """Return the placement of the output tensor that is given: where `=` stands it only says the size."""
    return result if isinstance(result, Shard) or (result == SUM and statement.op == "+=") else WHOLE


def bytes_moved(source: Placement, target: Placement, nbytes: int, ranks: int) -> float:
    """Return the bytes that each rank sends to bring a tensor from one placement to another, along one mesh dimension.

    Args:
        source: the placement that the tensor has.
        target: the placement that it gets.
        nbytes: size of the whole tensor.
        ranks: how many ranks share it.

    Returns:
        The bytes, by ring algorithms: an all-gather or a reduce-scatter sends all but a rank's own share, an all-reduce
        does both, an all-to-all sends all but its own part of its share.

    Example:
        >>> from torch.distributed.tensor import Partial, Replicate, Shard
        >>> from insum_ops.distributed import bytes_moved
        >>> bytes_moved(Shard(0), Replicate(), 400, 4), bytes_moved(Partial(), Replicate(), 400, 4)
        (300.0, 600.0)
        >>> bytes_moved(Replicate(), Shard(0), 400, 4), bytes_moved(Shard(0), Shard(1), 400, 4)
        (0.0, 75.0)
    """
    once = nbytes * (ranks - 1) / ranks
    if source == target or source.is_replicate():
        return 0.0
    if source.is_partial():
        return once if target.is_shard() else 2 * once
    return once / ranks if target.is_shard() else once


def cheapest_split(
    expr: str, placements: Mapping[str, Placement], nbytes: Mapping[str, int], ranks: int, partial: bool = True
) -> Split:
    """Return the split whose inputs cost the fewest bytes to bring about, along one mesh dimension.

    Of equal ones that wins which changes the fewest placements, then one whose result is no partial sum.

    Args:
        expr: the statement, over tensors.
        placements: of each tensor along this mesh dimension, by its name.
        nbytes: size of each whole tensor, by its name.
        ranks: how many ranks the mesh dimension has.
        partial: whether results of which each rank has a part are allowed.

    Returns:
        One of `splits_of(expr)`.

    Raises:
        ParseError: `expr` is not a statement of this language.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from insum_ops.distributed import cheapest_split
        >>> print(cheapest_split("C[i] += A[i,k] * B[k]", {"A": Shard(1), "B": Replicate()}, {"A": 8, "B": 4}, 2))
        along k: C Partial(sum), A Shard(1), B Shard(0) -> Partial(sum)
    """

    splits = [split for split in splits_of(expr) if partial or not split.output.is_partial()]
    return cheapest(splits, placements, nbytes, ranks)


def cheapest(
    splits: Sequence[Split], placements: Mapping[str, Placement], nbytes: Mapping[str, int], ranks: int
) -> Split:
    """Return the split among these that `cheapest_split` would choose."""

    def cost(split: Split) -> tuple[float, int, bool]:
        pairs = [(placements[name], split.inputs[name], name) for name in placements]
        moved = sum(bytes_moved(source, target, nbytes[name], ranks) for source, target, name in pairs)
        return moved, sum(source != target for source, target, _ in pairs), split.output.is_partial()

    return min(splits, key=cost)
