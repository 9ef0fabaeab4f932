"""A sparse format in a statement -> the indirect statement of that format.

`C[m,n] += A[m,k] * B[k,n]` with A in GroupCOO becomes `C[AM[p],n] += AV[p,q] * B[AK[p,q],n]`: every `m` and
`k` in the statement is replaced by the coordinate that the format stores for it. Blocked formats also split
the dimensions that `m` and `k` index, so that `B[k,n]` becomes `B[AK[p,q],bk,n]`. Works on names alone; no
tensor is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..language import Access, Index, Number, OperandError, Statement, UnsupportedError, Var, fresh_name

__all__ = ["Rewritten", "Shape", "View", "rewrite", "sparse_factor"]


@dataclass(frozen=True)
class Shape:
    """What rewriting needs to know of a format: which coordinates it stores and over which of its axes."""

    value_axes: tuple[str, ...]  # ("p",) or ("p","q")
    coord_axes: tuple[tuple[str, ...], ...]  # per dimension
    is_stored: tuple[bool, ...]  # False: the dimension is the axis itself (ELL's rows)
    is_blocked: bool
    has_padding: bool
    is_partial: tuple[bool, ...]  # per dimension: the last block is not full
    is_read_through: bool = False  # values are listed in another order, and found through positions
    in_sets: int | None = None  # the dimension whose coordinates are those of sets: over q of the set that p is in


@dataclass(frozen=True)
class View:
    """The tensor `of`, with some of its dimensions split into blocks: (its dimension, the format's)."""

    of: str
    splits: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rewritten:
    """The indirect statement and where its new tensors come from."""

    statement: Statement
    values: str  # the name of the format's values
    source: str  # the name of their positions, "" where they need none
    sets: str  # the name of which set each p is in, "" where there are none
    coords: tuple[str | None, ...]  # the name of each dimension's coordinates; None: not in the statement
    ones: dict[str, int]  # tensors of ones, each as long as this dimension of the format
    views: dict[str, View]  # every other tensor of the statement, the output included


def sparse_factor(statement: Statement, sparse: Iterable[str]) -> Access:
    """Return the one factor that reads a sparse format.

    Raises:
        OperandError: the output or an index is sparse.
        UnsupportedError: there are several sparse factors.
    """
    names, output = set(sparse), statement.output
    if output.name in names:
        problem = f"{output.name} is the output, which can't be sparse; pass {output.name}.to_dense()"
        problem += ", or use insum_ops.sddmm for products at its entries alone"
        raise OperandError(problem, statement.text, output.at)
    for access in statement.index_accesses:
        if access.name in names:
            problem = f"{access.name} is an index here, which can't be sparse; pass an int32 or int64 tensor"
            raise OperandError(problem, statement.text, access.at)
    accesses = [access for access in statement.accesses if access.name in names]
    if len(accesses) != 1:
        first, second = accesses[:2]
        if first.name != second.name:
            both, remedy = f"{first.name} and {second.name}", f"pass {second.name}={second.name}.to_dense()"
        else:
            dense = fresh_name(f"{first.name}D", {*statement.tensor_names, output.name})
            both, remedy = f"{first.name} twice", f"name one of them {dense} and pass {dense}={first.name}.to_dense()"
        problem = f"one sparse factor per statement, but it has {both}; {remedy}"
        raise UnsupportedError(problem, statement.text, second.at)
    return accesses[0]


def rewrite(statement: Statement, target: Access, form: Shape) -> Rewritten:
    """Replace the sparse factor `target`, stored as `form` says, by its values and coordinates."""
    names = _index_names(statement, target)
    if not statement.is_sum:
        _refuse_partial(statement, target, names, form)
    taken = {*statement.tensor_names, statement.output.name}
    axes = _fresh_axes(form, statement.names)
    values = fresh_name(f"{target.name}V", taken)
    taken.add(values)

    replaced: dict[str, Index] = {}
    stored: list[str | None] = []
    blocks: dict[str, Var] = {}
    sets = "" if form.in_sets is None else fresh_name(f"{target.name}T", taken)
    taken.add(sets)
    for dim, name in enumerate(names):
        if form.is_stored[dim]:
            coordinate = fresh_name(f"{target.name}{name.upper()}", taken)
            taken.add(coordinate)
            positions: list[Index] = [Var(axes[axis]) for axis in form.coord_axes[dim]]
            if dim == form.in_sets:
                positions[0] = Access(sets, (positions[0],))
            replaced[name] = Access(coordinate, tuple(positions))
            stored.append(coordinate)
        else:
            replaced[name] = Var(axes[form.coord_axes[dim][0]])
            stored.append(None)
        if form.is_blocked:
            names_in_use = (*statement.names, *axes.values(), *map(str, blocks.values()))
            blocks[name] = Var(fresh_name(f"b{name}", names_in_use))

    places: tuple[Index, ...] = tuple(Var(axes[a]) for a in form.value_axes)
    source = fresh_name(f"{target.name}S", taken) if form.is_read_through else ""
    taken.add(source)
    value = Access(values, (Access(source, places), *blocks.values()) if source else (*places, *blocks.values()))
    swap = _Swap(replaced, blocks, {name: dim for dim, name in enumerate(names)}, taken)
    output = swap.access(statement.output)
    factors: list[Access | Number] = []
    for factor in statement.factors:
        factors.append(value if factor is target else swap.access(factor) if isinstance(factor, Access) else factor)

    # a coordinate that nothing else mentions must still hide its padding: multiply by ones read through it
    ones: dict[str, int] = {}
    for dim, name in enumerate(names):
        if stored[dim] is None or name in swap.used:
            continue
        must_hide = form.has_padding and form.coord_axes[dim] == form.value_axes
        if form.is_partial[dim] or (must_hide and not _hides_padding(names, form, swap.used)):
            label = fresh_name(f"{target.name}1", taken)
            taken.add(label)
            block = (blocks[name],) if name in blocks else ()
            factors.append(Access(label, (replaced[name], *block)))
            ones[label] = dim
            swap.used.add(name)
        else:
            stored[dim] = None
    written = Statement(output, tuple(factors), statement.op, statement.reduction)
    return Rewritten(written, values, source, sets, tuple(stored), ones, swap.views)


def _hides_padding(names: Sequence[str], form: Shape, used: set[str]) -> bool:
    """Return True if the rewritten statement reads some coordinate that is -1 wherever there is padding."""
    return any(
        name in used and form.is_stored[dim] and form.coord_axes[dim] == form.value_axes
        for dim, name in enumerate(names)
    )


def _index_names(statement: Statement, target: Access) -> list[str]:
    """Return the index names of the sparse factor; raise UnsupportedError unless they are different names."""
    names: list[str] = []
    for index in target.indices:
        is_name = isinstance(index, Var)
        if is_name and str(index) not in names:
            names.append(str(index))
            continue
        must = f"differ, but {index} stands twice" if is_name else f"be names, but {index} is not"
        problem = f"{target.name} is sparse, so its indices must {must}; make it dense with to_dense()"
        raise UnsupportedError(problem, statement.text, index.at)
    return names


def _refuse_partial(statement: Statement, target: Access, names: Sequence[str], form: Shape) -> None:
    """Raise UnsupportedError if `max` or `min` reduces over a last block that is not full.

    Zeros fill such a block: they add nothing to a sum, but 0 may be the largest or smallest of all products.
    """
    for dim, name in enumerate(names):
        if form.is_partial[dim] and name not in statement.direct:
            problem = (
                f"{statement.reduction} runs over {name}, but the last block of {target.name} dimension {dim} is not "
                "full; choose a block_size that divides the shape"
            )
            raise UnsupportedError(problem, statement.text, target.indices[dim].at)


def _fresh_axes(form: Shape, taken: Sequence[str]) -> dict[str, str]:
    """Return the index name of each axis of the values; axes are single letters, so their new names can't collide."""
    return {axis: fresh_name(axis, taken) for axis in form.value_axes}


@dataclass
class _Swap:
    """Replaces index names by coordinates in an access, noting which dimensions are split into blocks."""

    replaced: dict[str, Index]
    blocks: dict[str, Var]
    dims: dict[str, int]
    taken: set[str]
    used: set[str] = field(default_factory=set)
    views: dict[str, View] = field(default_factory=dict)

    def access(self, access: Access) -> Access:
        """Return `access` with its index names replaced, also inside indirections."""
        indices: list[Index] = []
        splits: list[tuple[int, int]] = []
        for dim, index in enumerate(access.indices):
            if isinstance(index, Access):
                indices.append(self.access(index))
            elif isinstance(index, Var) and index.name in self.replaced:
                self.used.add(index.name)
                indices.append(self.replaced[index.name])
                if self.blocks:
                    splits.append((dim, self.dims[index.name]))
                    indices.append(self.blocks[index.name])
            else:
                indices.append(index)
        return Access(self.view(View(access.name, tuple(splits))), tuple(indices))

    def view(self, view: View) -> str:
        """Return the name of a view: its tensor's own, or a new one if that stands with other dimensions split too."""
        for name, earlier in self.views.items():
            if earlier == view:
                return name
        name = view.of if view.of not in self.views else fresh_name(f"{view.of}_", self.taken)
        self.taken.add(name)
        self.views[name] = view
        return name
