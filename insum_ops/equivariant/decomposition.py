"""A whole tensor product: which statements, over which slots, with which part of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import ON_CHIP_EXTENT, followed, has_kernels, outside_modes, outside_transforms
from ..formats import GroupCOO
from ..formats.torch_state import is_compiling, is_grad_enabled, is_transformed, is_watched
from ..functional import insum
from ..lru_cache import LRUCache
from .choice import fastest_way
from .clebsch_gordan import Irreps
from .in_place import SCATTER
from .paths import Instruction
from .product_function import evaluate_product
from .shared_weights import shared_term
from .single_channel import with_single_channels
from .slots import Slots, check_layout, flat_slots, make_order, make_slots
from .sparse_scalars import ScalarTerm, scalar_term
from .species import species_term
from .table_terms import ColumnTerm, TableTerm, by_column, with_tables
from .terms import ChannelTerm, Key, channel_term, path_key, path_term
from .weight_slices import Term, Terms

__all__ = ["Decomposition", "decompose", "takes_one_hot"]

LAYOUTS = 64  # of a product's tensors that are kept, each with a plan for every statement and its gradients
MOST_COMPONENTS = ON_CHIP_EXTENT  # of a slot that paths scatter into: as many as one program holds on chip


class MeasuredColumns(NamedTuple):
    """Milliseconds of a product whose kernel finds columns by tables, and of one whose columns were put in order."""

    lmax: int
    channels: int
    by_column: float
    in_order: float


# One H200 (torch 2.11, triton 3.6), 10,000 samples in full float32, `python -m bench.path_tables`. Gradients read such
# columns more often, so they never do.
MEASURED_COLUMNS = (
    MeasuredColumns(1, 16, by_column=0.027, in_order=0.034),
    MeasuredColumns(1, 32, by_column=0.054, in_order=0.065),
    MeasuredColumns(1, 64, by_column=0.163, in_order=0.193),
    MeasuredColumns(2, 16, by_column=0.117, in_order=0.113),
    MeasuredColumns(2, 32, by_column=0.230, in_order=0.189),
    MeasuredColumns(2, 64, by_column=0.603, in_order=0.625),
    MeasuredColumns(3, 16, by_column=0.225, in_order=0.219),
    MeasuredColumns(3, 32, by_column=0.441, in_order=0.363),
    MeasuredColumns(3, 64, by_column=1.258, in_order=1.181),
)
# Components of blocks whose columns kernels find one by one, each by a load of its own: those of the largest lmax at
# which that was measured to take less with every number of channels. Wider blocks are put in order before and after.
SLOWER = {row.lmax for row in MEASURED_COLUMNS if row.by_column > row.in_order}
WIDEST = max(2 * row.lmax + 1 for row in MEASURED_COLUMNS if row.lmax not in SLOWER)
# Ways to a product that nobody differentiates: columns found by a kernel that holds the coefficients, or that reads
# tables; or columns put in order first.
WAYS = {True: "columns, coefficients held", False: "columns, tables in memory"}
IN_ORDER = "columns in order"
LEAST_CHANNELS = 4  # shorter common pieces of unequal multiplicities make too long a table


@dataclass(frozen=True)
class Decomposition:
    """z = sum over paths of weight * x (x) y, on two-dimensional tensors that are known to fit."""

    slots: tuple[Slots, Slots | None, Slots]  # of in1, in2 (None: read as it is) and out
    channels: ChannelTerm | None
    shared: Terms  # one statement for each kind of path
    scalars: tuple[ScalarTerm, ...]  # what `shared` is for a sparse second input
    each: Terms  # weights of their own for each sample
    # What takes the place of `each` where kernels run and nothing learns: its tables name columns. By whether a kernel
    # holds the coefficients, which depends on the device.
    flat: Mapping[bool, Decomposition] = field(default_factory=dict)
    # by layouts of tensors
    memory: LRUCache[Any] = field(default_factory=partial(LRUCache, LAYOUTS), repr=False, compare=False)

    def __call__(
        self,
        x: Tensor,  # [b, in1.dim]; [n, in1.dim] with src
        y: Tensor | GroupCOO,  # [b, in2.dim], or [b] positions of the one that is 1
        weight: Tensor | None,  # [weight_numel] or [b, weight_numel]
        src: Tensor | None = None,  # [b]
        dst: Tensor | None = None,  # [b]
        num_rows: int = 0,  # of z with dst
    ) -> Tensor:
        if not isinstance(y, Tensor):
            return self.with_sparse(x, y, weight)
        num_rows = y.shape[0] if dst is None else num_rows
        flat = self.faster_flat(x, y, weight, src, dst, num_rows) if self.flat else None
        if flat is not None:
            return flat(x, y, weight, src, dst, num_rows)
        return self.in_order(x, y, weight, src, dst, num_rows)

    def in_order(
        self, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None, num_rows: int
    ) -> Tensor:
        """Return the product with columns put in order first, where a term wants them so."""
        if self.channels is None and y.dim() == 2 and not (y.requires_grad and len(self.work(weight).terms) == 1):
            # A second input that learns may be a potential's, whose forces are differentiated again: one statement has
            # such gradients at hand, where `evaluate_product` would have to run the statement again.
            z = evaluate_product(self, (x, y, weight, src, dst), num_rows)
            if z is not None:
                return z
        return self.composed(x, y, weight, src, dst, num_rows)

    def takes(self, x: Tensor, y: Tensor, weight: Tensor | None) -> bool:
        """Whether a decomposition over columns can run: a kernel, weights for each sample, and no gradients wanted."""
        if weight is None or weight.dim() != 2 or y.dim() != 2 or is_transformed() or not has_kernels(x.device):
            return False
        (term,) = self.each.terms
        assert isinstance(term, ColumnTerm)
        if not term.is_on(x.device, x.dtype):
            return False
        return not (is_grad_enabled() and (x.requires_grad or y.requires_grad or weight.requires_grad))

    def faster_flat(
        self, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None, num_rows: int
    ) -> Decomposition | None:
        """Return the decomposition over columns that is the fastest for tensors like these, or None for `in_order`."""
        guess = self.flat_on(x.device)
        if is_watched():
            return guess if guess is not None and guess.takes(x, y, weight) else None
        if weight is None or not next(iter(self.flat.values())).takes(x, y, weight):
            return None
        ways: dict[str, Decomposition | None] = {WAYS[is_held]: flat for is_held, flat in self.flat.items()}
        if False not in self.flat:  # the columns of wide blocks are put in order for tables
            ways[IN_ORDER] = None
        tensors = {"x": x, "y": y, "weight": weight, **({} if src is None else {"src": src})}
        names = sorted(ways, key=lambda name: ways[name] is not guess)
        run = lambda name: (ways[name] or self.in_order)(x, y, weight, src, dst, num_rows)
        return ways[fastest_way(self.memory, ("columns", self.each.terms[0].key[1]), names, run, tensors)]

    def flat_on(self, device: torch.device) -> Decomposition | None:
        """Guess the fastest decomposition whose tables name columns, None where columns are put in order first."""
        if not self.flat:
            return None
        (term,) = self.each.terms
        assert isinstance(term, TableTerm)
        return self.flat.get(term.tables.is_held("Z", torch.float32, device))

    def work(self, weight: Tensor | None) -> Terms:
        """Return the terms for shared weights, or for weights of each sample."""
        return self.shared if weight is None or weight.dim() == 1 else self.each

    def prepare(self, weight: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        """Copy what `composed` reads to a device: a tracer may be the first to run it, and can't make copies."""
        for slots in self.slots:
            if slots is not None and slots.order is not None:
                slots.order.on(device)
        if self.channels is not None:
            self.channels.prepare(device, dtype)
        work = self.work(weight)
        if work.order is not None:
            work.order.on(device)
        for term in work.terms:
            term.prepare(device, dtype)
        flat = self.flat_on(device)
        if flat is not None and work is self.each:
            flat.prepare(weight, device, dtype)

    def composed(
        self, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None, num_rows: int
    ) -> Tensor:
        """Return the product as a composition of `insum` calls, each of which autograd differentiates by itself."""
        first, second, out = self.slots
        num_products = y.shape[0]
        if is_compiling():
            x, y, weight = followed(x), followed(y), followed(weight)
        if self.channels is not None:
            # rows that edges gather or scatter are fewer than edges, and are put in order before or after
            reads = src is None and self.channels.takes_columns("X", x, weight)
            writes = dst is None and self.channels.takes_columns("Z", x, weight)
            X = x if reads else first.split(x)[0]
            Y = y if second is None else second.split(y)[0]
            rows = (num_rows, out.sizes[0]) if writes else out.shape(num_rows, 0)
            Z = self.channels(X, Y, weight, rows, src, dst, reads)
            return Z if writes else out.join([Z])
        Xs = first.split(x)
        Ys = [] if y.dim() == 1 or second is None else second.split(y)
        Zs: list[Tensor | None] = [None] * len(out.widths)
        work = self.work(weight)
        for term, W in zip(work.terms, work.parts(weight)):
            at1, at2, at3 = term.key[3]
            size = out.shape(num_products, at3)
            Zs[at3] = term(Xs[at1], Ys[at2] if Ys else y, W, Zs[at3], size, src)
        return out.join([_finished(Z, x, num_rows, out, at, dst) for at, Z in enumerate(Zs)])

    def with_sparse(self, x: Tensor, y: GroupCOO, weight: Tensor | None) -> Tensor:
        """Return the product where y, of scalars, is in a sparse format grouped by its columns."""
        first, _, out = self.slots
        Xs, num_rows = first.split(x), y.shape[0]
        Zs: list[Tensor | None] = [None] * len(out.widths)
        for term, scalars, W in zip(self.shared.terms, self.scalars, self.shared.parts(weight)):
            at1, _, at3 = term.key[3]
            assert W is not None
            Zs[at3] = scalars(Xs[at1], y, W, Zs[at3], (num_rows, out.counts[at3], out.widths[at3]))
        return out.join([_finished(Z, x, num_rows, out, at, None) for at, Z in enumerate(Zs)])


def _finished(Z: Tensor | None, x: Tensor, num_rows: int, out: Slots, at: int, dst: Tensor | None) -> Tensor:
    """Return a slot of the output: zeros where no path leads, the rows added up by `dst` where there is one."""
    size = out.shape(num_rows, at)
    if Z is None:
        return x.new_zeros(size)
    return Z if dst is None else insum(SCATTER[int(out.is_flat)].text, DST=dst, M=Z, size=size)


@lru_cache(maxsize=256)
def decompose(
    in1: Irreps, in2: Irreps, out: Irreps, instructions: tuple[Instruction, ...], layout: str
) -> Decomposition | None:
    """Return the decomposition for these paths, or None if no path has any product in it.

    A caller that torch traces calls `decompose.__wrapped__`, so that nothing traced is kept.
    """
    check_layout(layout)
    with torch.device("cpu"), outside_modes(), outside_transforms():  # its tables are kept, for any device
        return _decompose((in1, in2, out), instructions, layout)


def _decompose(
    irreps: tuple[Irreps, Irreps, Irreps], instructions: tuple[Instruction, ...], layout: str
) -> Decomposition | None:
    """Return what `decompose` returns, for irreps of in1, in2 and out."""
    in1, in2, out = irreps
    paths = [path for path in instructions if 0 not in path.path_shape]
    if not paths:
        return None
    width = _common_channels(paths, irreps)
    if width:
        is_uvu = paths[0].connection_mode == "uvu"
        cut = (
            make_slots(in1, layout, width),
            None if is_uvu else make_slots(in2, layout, width),
            make_slots(out, layout, width),
        )
        return Decomposition(cut, channel_term(paths, irreps, cut), Terms((), None), (), Terms((), None))
    slots = (make_slots(in1, layout), make_slots(in2, layout), make_slots(out, layout, most=MOST_COMPONENTS))
    scalars = _scalar_terms(paths, irreps, slots) if takes_one_hot(in2, paths) else ()
    per_sample = _terms(paths, irreps, slots, False)
    flat = {is_held: _decompose_flat(irreps, slots, per_sample, is_held) for is_held in (False, True)}
    by_columns = {is_held: decomposition for is_held, decomposition in flat.items() if decomposition is not None}
    return Decomposition(slots, None, _terms(paths, irreps, slots, True), scalars, per_sample, by_columns)


def _decompose_flat(
    irreps: tuple[Irreps, Irreps, Irreps], slots: tuple[Slots, Slots, Slots], per_sample: Terms, is_held: bool
) -> Decomposition | None:
    """Return a decomposition for columns that are out of order, if one term over tables reads all of x and writes z.

    `is_held` asks for a kernel whose source holds the coefficients. The result is None if there is no such kernel, or
    if putting the columns in order first is faster.
    """
    first, second, out = slots
    if not (len(per_sample.terms) == len(first.widths) == len(out.widths) == 1):
        return None
    (tabled,) = per_sample.terms
    if not isinstance(tabled, TableTerm):
        return None
    tables = tabled.tables
    if (tables.known if is_held else tables.in_memory) is None:
        return None
    reads, writes = (
        slot.order is not None and (is_held or max(ir.dim for mul, ir in blocks if mul) <= WIDEST)
        for blocks, slot in ((irreps[0], first), (irreps[2], out))
    )
    if not reads and not writes:
        return None
    term = by_column(tabled, first if reads else None, out if writes else None, is_held)
    columns = flat_slots(first.sizes[0]) if reads else first, second, flat_slots(out.sizes[0]) if writes else out
    return Decomposition(columns, None, Terms((), None), (), Terms((term,), per_sample.order))


def takes_one_hot(in2: Irreps, paths: Sequence[Instruction]) -> bool:
    """Whether each column of the second input is a kind, with a weight matrix of its own for each path."""
    return len(in2) == 1 and in2[0].ir.l == 0 and all(path.connection_mode == "uvw" for path in paths)


def _common_channels(paths: Sequence[Instruction], irreps: Sequence[Irreps]) -> int:
    """Return how many channels every block is a multiple of, or 0 if channels mix or too few are common."""
    modes = {path.connection_mode for path in paths}
    if modes not in ({"uvu"}, {"uuu"}) or len({path.has_weight for path in paths}) != 1:
        return 0
    is_uvu = "uvu" in modes
    if is_uvu and any(irreps[1][path.i_in2].mul != 1 for path in paths):
        return 0
    muls = [mul for side_irreps in (irreps[::2] if is_uvu else irreps) for mul, _ in side_irreps if mul]
    common = gcd(*muls)
    return common if common >= LEAST_CHANNELS or len(set(muls)) == 1 else 0


def _terms(paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots], is_shared: bool) -> Terms:
    """Return terms for the weighted paths, then for the rest.

    Weighted paths are in runs as their weights lie, or in classes of one key, for which weights are brought together.
    That costs nothing where weights are shared. The weights of each sample are the larger part of what is read: they
    are moved only where results would otherwise be added to in memory so often that that takes longer.
    """
    keys = [path_key(path, irreps, slots) for path in paths]
    weighted = [at for at, path in enumerate(paths) if path.has_weight]
    plain = [at for at, path in enumerate(paths) if not path.has_weight]
    numels = [prod(path.path_shape) if path.has_weight else 0 for path in paths]
    starts = [0, *accumulate(numels)]
    in_classes = sorted(weighted, key=keys.__getitem__)
    sizes = [width * count for width, count in zip(slots[2].widths, slots[2].counts)]
    moved = _added([keys[at] for at in in_classes], sizes) + 2 * sum(numels)
    if is_shared or moved < _added([keys[at] for at in weighted], sizes):
        weighted = in_classes
    plain.sort(key=keys.__getitem__)
    runs = chain(groupby(weighted, keys.__getitem__), groupby(plain, keys.__getitem__))
    is_species = takes_one_hot(irreps[1], paths)
    terms: list[Term] = []
    for key, run in runs:
        run_paths = [paths[at] for at in run]
        if is_shared and key[0] == "uvw":
            terms.append((species_term if is_species else shared_term)(key, run_paths, irreps, slots))
        else:
            term = path_term(key, run_paths, irreps, slots)
            tabled = term if is_shared else with_tables(term, run_paths, irreps, slots)
            is_plain = tabled is term and not is_shared
            terms.append(with_single_channels(term, run_paths, irreps, slots) if is_plain else tabled)
    order = torch.cat([torch.arange(starts[at], starts[at] + numels[at]) for at in (*weighted, *plain)])
    return Terms(tuple(terms), make_order(order))


def _added(keys: Sequence[Key], sizes: Sequence[int]) -> int:
    """Count the numbers that pass through memory for each sample because statements add to what others computed.

    A statement is a run of equal keys. One that is not the first of its slot reads and writes the slot once more.
    """
    slots = [key[3][2] for key, _ in groupby(keys)]
    return sum(2 * sizes[slot] for at, slot in enumerate(slots) if slot in slots[:at])


def _scalar_terms(
    paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]
) -> tuple[ScalarTerm, ...]:
    """Return the terms for a sparse second input, in the order of the shared terms."""
    key = lambda path: path_key(path, irreps, slots)
    return tuple(
        scalar_term(muls, places, list(run), irreps, slots)
        for (_, muls, _, places), run in groupby(sorted(paths, key=key), key)
    )
