"""The gradient of a statement is a statement: a factor and the output trade places.

Of products that compete in `max` or `min`, only the winner has a gradient. Where it was is known after the forward, so
every index name that the products differ in becomes an index tensor read at the output's position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from .ir import Access, Index, Number, Statement, Var, substituted, walk
from .parse import parse

__all__ = [
    "Term", "Winners", "fresh_name", "gradient", "tangent", "tangent_terms", "terms", "upstream_name", "winners",
]  # fmt: skip


def fresh_name(wanted: str, taken: Iterable[str]) -> str:
    """Return `wanted`, or `wanted_`, `wanted__` and so on: the first of them that is not in `taken`."""
    names = set(taken)
    while wanted in names:
        wanted += "_"
    return wanted


def upstream_name(statement: Statement) -> str:
    """Return the name that the gradient of the output has in the statement's gradients."""
    return fresh_name(f"d{statement.output.name}", statement.tensor_names)


def gradient(statement: Statement, wrt: int) -> Statement:
    """Return the statement that accumulates d loss / d factors[wrt]; factors[wrt] must be an access.

    For `C[AM[p],n] += AV[p,q] * B[AK[p,q],n]` and factor 1 it is `dB[AK[p,q],n] += dC[AM[p],n] * AV[p,q]`. With `max`
    and the winners' places P and Q it is `dB[AK[P[i,n],Q[i,n]],n] += dC[i,n] * AV[P[i,n],Q[i,n]]`.
    """
    target = statement.factors[wrt]
    assert isinstance(target, Access), "a number has no gradient"
    others = statement.factors[:wrt] + statement.factors[wrt + 1 :]
    upstream = replace(statement.output, name=upstream_name(statement))
    taken = {*statement.tensor_names, upstream.name}
    if statement.is_sum or not statement.reduced:  # without names to reduce no products compete
        return Statement(replace(target, name=fresh_name(f"d{target.name}", taken)), (upstream, *others))
    won = Winners(statement)  # its names are in capitals, or `ones`: none of them is d or t and a name
    target = won.place(replace(target, name=fresh_name(f"d{target.name}", taken)))
    others = tuple(won.place(factor) if isinstance(factor, Access) else factor for factor in others)
    derived = Statement(target, (replace(upstream, indices=won.output), *others))
    return derived if won.is_seen(derived) else replace(derived, factors=(*derived.factors, won.one))


def tangent(statement: Statement, wrt: int) -> Statement:
    """Return the statement of the output's tangent, in which the tangent of factors[wrt] stands in its place.

    For `C[i] += A[i,k] * B[k]` and factor 1 it is `tC[i] += A[i,k] * tB[k]`, and with `max` and the winners' places K
    it is `tC[i] += A[i,K[i]] * tB[K[i]]`.
    """
    target = statement.factors[wrt]
    assert isinstance(target, Access), "a number has no tangent"
    taken = {*statement.tensor_names, statement.output.name}
    renamed = replace(target, name=fresh_name(f"t{target.name}", taken))
    factors = (*statement.factors[:wrt], renamed, *statement.factors[wrt + 1 :])
    name = fresh_name(f"t{statement.output.name}", {*taken, renamed.name})
    if statement.is_sum or not statement.reduced:
        return Statement(replace(statement.output, name=name), factors)
    won = Winners(statement)
    placed = tuple(won.place(factor) if isinstance(factor, Access) else factor for factor in factors)
    derived = Statement(Access(name, won.output), placed)
    return derived if won.is_seen(derived) else replace(derived, factors=(*derived.factors, won.one))


@dataclass(frozen=True)
class Winners:
    """The names by which the gradients of a `max` or `min` say where the winning products are."""

    statement: Statement

    @cached_property
    def output(self) -> tuple[Index, ...]:
        """The output's indices, with a new index name in the place of each indirection."""
        taken, indices = set(self.statement.names), list[Index]()
        for index in self.statement.output.indices:
            if isinstance(index, Access):
                index = Var(fresh_name("i", taken))
                taken.add(index.name)
            indices.append(index)
        return tuple(indices)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """For each name that is reduced, the tensor that holds its value in the winning product."""
        statement, winner_names = self.statement, dict[str, str]()
        taken = {*statement.tensor_names, statement.output.name, upstream_name(statement)}
        for name in statement.reduced:
            winner_names[name] = fresh_name(name.upper(), (*taken, *winner_names.values()))
        return winner_names

    @cached_property
    def ones(self) -> str:
        """The name of a tensor of ones, read at the first winner by a gradient that reads no other winner.

        A winner is -1 where no product reached the output, and reading there gives 0.
        """
        taken = (*self.statement.tensor_names, self.statement.output.name, *self.names.values())
        return fresh_name("ones", (*taken, upstream_name(self.statement)))

    @property
    def one(self) -> Access:
        """The factor that reads `ones` at the winning product."""
        return Access(self.ones, (self.winner(self.statement.reduced[0]),))

    def winner(self, name: str) -> Access:
        """Return the access that reads the value of the reduced name `name` in the winning product."""
        return Access(self.names[name], self.output)

    def place(self, access: Access) -> Access:
        """Return `access` as the winning product reads it: each reduced name is replaced by its winner."""
        return substituted(access, {Var(name): self.winner(name) for name in self.names})

    def is_seen(self, derived: Statement) -> bool:
        """Return True if `derived` reads a winner, whose -1 masks the elements that no product reached."""
        return not set(derived.tensor_names).isdisjoint(self.names.values())

    @property
    def extents(self) -> tuple[tuple[str, int], ...]:
        """For each name that is reduced, a tensor and the dimension of it that the name runs over."""
        dims: dict[str, tuple[str, int]] = {}
        for root in (*self.statement.output.indirections, *self.statement.accesses):
            for access in walk(root):
                for dim, index in enumerate(access.indices):
                    if isinstance(index, Var):
                        dims.setdefault(index.name, (access.name, dim))
        return tuple(dims[name] for name in self.statement.reduced)


# (the tensor of winners, a tensor and the dimension of it that tells the extent) for each reduced name; ones' name
WinnerNames = tuple[tuple[tuple[str, str, int], ...], str]


@lru_cache(maxsize=1024)
def winners(expr: str) -> WinnerNames:
    """Return the names of the winners' tensors in the gradients of a `max` or `min`, as plain data.

    That of the ones is empty if no gradient or tangent reads them.

    >>> winners("C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])")
    ((('P', 'AM', 0), ('Q', 'AV', 1)), '')
    >>> winners("C[AM[p],n] = max(B[n])")
    ((('P', 'AM', 0),), 'ones')
    """
    won = Winners(parse(expr))
    names = won.statement.tensor_names
    derived = [each for name in names for find in (terms, tangent_terms) for each in find(expr, name)]
    sources = tuple((name, *extent) for name, extent in zip(won.names.values(), won.extents))
    return sources, won.ones if any(won.ones in read for *_, read in derived) else ""


Term = tuple[str, str, tuple[str, ...]]  # gradient expression, the upstream's name in it, the other tensors it reads


@lru_cache(maxsize=1024)
def terms(expr: str, name: str) -> tuple[Term, ...]:
    """Return the gradient of tensor `name` as expressions to be added up, one for each factor that reads it.

    >>> terms("C[i] += A[i,k] * B[k]", "B")
    (('dB[k] += dC[i] * A[i,k]', 'dC', ('A',)),)
    >>> terms("C[i] = max(A[i,k] * B[k])", "B")
    (('dB[K[i]] += dC[i] * A[i,K[i]]', 'dC', ('K', 'A')),)
    >>> terms("Y[()] += X[i,j] * X[i,j]", "X")
    (('dX[i,j] += dY[()] * X[i,j] * 2', 'dY', ('X',)),)
    """
    statement = parse(expr)
    upstream = upstream_name(statement)
    places = [at for at, factor in enumerate(statement.factors) if isinstance(factor, Access) and factor.name == name]
    derived = _added_up([gradient(statement, at) for at in places])
    return tuple((str(each), upstream, tuple(key for key in each.tensor_names if key != upstream)) for each in derived)


@lru_cache(maxsize=1024)
def tangent_terms(expr: str, name: str) -> tuple[Term, ...]:
    """Return the output's tangent with respect to tensor `name` as expressions to be added up.

    Each comes with the name that the tensor's tangent has in it.

    >>> tangent_terms("C[i] += A[i,k] * B[k]", "B")
    (('tC[i] += A[i,k] * tB[k]', 'tB', ('A',)),)
    """
    statement = parse(expr)
    places = [at for at, factor in enumerate(statement.factors) if isinstance(factor, Access) and factor.name == name]
    tangent_name = fresh_name(f"t{name}", {*statement.tensor_names, statement.output.name})
    derived = _added_up([tangent(statement, at) for at in places])
    return tuple(
        (str(each), tangent_name, tuple(key for key in each.tensor_names if key != tangent_name)) for each in derived
    )


def _added_up(statements: Sequence[Statement]) -> list[Statement]:
    """Return statements with the same sum, those that are equal but for the names of indices as one with a number.

    A square has two gradients that are the same, and so has `X[i,j] * X[j,i]`.
    """
    counts = dict[object, tuple[Statement, int]]()
    for statement in statements:
        names = {name: str(number) for number, name in enumerate(statement.names)}
        key = _renamed(statement.output, names), *sorted(_renamed(factor, names) for factor in statement.factors)
        first, count = counts.get(key, (statement, 0))
        counts[key] = first, count + 1
    return [
        each if count == 1 else replace(each, factors=(*each.factors, Number(count))) for each, count in counts.values()
    ]


def _renamed(item: Access | Index | Number, names: Mapping[str, str]) -> str:
    """Return the text of a part of a statement with other names for indices."""
    if isinstance(item, Access):
        return f"{item.name}[{','.join(_renamed(index, names) for index in item.indices)}]"
    return f"'{names[item.name]}" if isinstance(item, Var) else str(item)
