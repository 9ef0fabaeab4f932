"""Times by which tensor products guess between coefficients in a kernel's source and tables in memory.

    python -m bench.path_tables

For each of Z, dX, dY and dW of a fully connected product with weights of their own for each sample: milliseconds on the
device by a kernel that holds the coefficients, and by tables. Then the product over columns that a kernel finds by
tables, and over columns that are put in order first. `MEASURED_HELD` in insum_ops/equivariant/path_tables.py and
`MEASURED_COLUMNS` in insum_ops/equivariant/decomposition.py are such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import triton

from insum_ops.equivariant import decomposition
from insum_ops.equivariant.path_tables import PathTables
from insum_ops.equivariant.table_terms import TableTerm
from insum_ops.nn import FullyConnectedTensorProduct

from .equivariant import natural
from .machine import machine

SAMPLES = 10_000
LMAX = (1, 2, 3)
CHANNELS = (16, 32, 64)
PADDED = (24, 40, 48, 80, 96)  # of tables alone: no power of two


@contextmanager
def held(is_held: bool) -> Iterator[None]:
    """Kernels hold the coefficients of everything, or of nothing; nothing else is timed."""
    other = decomposition.WAYS[not is_held]
    choose = lambda memory, what, ways, *rest: next(way for way in ways if way != other)
    with (
        patch.object(PathTables, "takes_held", lambda *arguments: is_held),
        patch.object(decomposition, "fastest_way", choose),
    ):
        yield


def milliseconds(call: Callable[[], object]) -> float:
    call()  # compiles and tunes
    return float(triton.testing.do_bench_cudagraph(call, rep=50))


def main() -> None:
    print(machine())
    for lmax in LMAX:
        for channels in sorted((*CHANNELS, *PADDED)):
            _print_held(lmax, channels)
    for lmax in LMAX:
        for channels in CHANNELS:
            _print_columns(lmax, channels)


def _layer(lmax: int, channels: int) -> FullyConnectedTensorProduct:
    decomposition.decompose.cache_clear()
    irreps = natural(lmax, channels)
    return FullyConnectedTensorProduct(irreps, natural(lmax, 1), irreps, shared_weights=False, internal_weights=False)


@torch.no_grad()
def _print_held(lmax: int, channels: int) -> None:
    (term,) = _layer(lmax, channels)._product.decomposition.each.terms
    assert isinstance(term, TableTerm)
    tables = term.tables
    tensors = {name: torch.randn(SAMPLES, *shape, device="cuda") for name, shape in tables.shapes.items()}
    for name in "ZXYW":
        others = {other: tensors[other] for other in ("Z", "X", "Y", "W") if other != name}
        times = []
        for is_held in (True, False):
            with held(is_held):
                times.append(milliseconds(lambda others=others, name=name: tables.run(name, others)))
        print(f"{name} lmax {lmax} {channels:3} channels: held {times[0]:.4f}, by tables {times[1]:.4f}", flush=True)


@torch.no_grad()
def _print_columns(lmax: int, channels: int) -> None:
    times = []
    for widest in (2 * lmax + 1, 0):
        with held(False), patch.object(decomposition, "WIDEST", widest):
            layer = _layer(lmax, channels).cuda()
            x, y = (torch.randn(SAMPLES, own.dim, device="cuda") for own in (layer.irreps_in1, layer.irreps_in2))
            weight = torch.randn(SAMPLES, layer.weight_numel, device="cuda")
            times.append(milliseconds(lambda layer=layer, x=x, y=y, weight=weight: layer(x, y, weight)))
    print(f"columns lmax {lmax} {channels:3} channels: by column {times[0]:.4f}, in order {times[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
