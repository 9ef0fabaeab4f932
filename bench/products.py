"""Tensor products at ten sizes that nobody chose, drawn from a seed, beside e3nn, cuequivariance and OpenEquivariance.

    python -m bench.products --seed 1          # on a GPU: builds kernels on all cores, then times one by one
    python -m bench.products --seed 1 --list   # the sizes alone

Six are fully connected, with weights for each sample or for all, in tf32; four are channelwise (uvu), in full float32,
alone and along edges. Each process has a case: it builds what peers need, waits, and is timed when nothing else runs.
Kernels of ours are built meanwhile by other processes, and chosen anew from Triton's cache with the GPU to itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from .case import DEVICE, LIMIT, LIMIT_TF32, OURS, PEER_FAILURES
from .equivariant import COMPILED, OPEN_EQUIVARIANCE, OWN_LAYOUT, Operands, Product, make, precision
from .harness import check, geomean, table
from .roofs import Roofs, floor_ms, roofs
from .statement_times import timed
from .workload import Work

__all__ = ["FORCES", "FORWARD", "GRADIENTS", "Row", "draw", "passes", "providers", "work_of"]

FORWARD, GRADIENTS, FORCES = "forward", "gradients", "forces"
CASES, CHANNELWISE = 10, 4
# bytes at most: of the weights, and of what e3nn multiplies before it sums, which it has in memory
MOST_WEIGHTS, MOST_PRODUCTS = 3 * 2**30, 2**30
SAMPLES, EDGES = (1_000, 60_000), (8_000, 60_000)
NEIGHBOURS = 20  # edges of a node
ONLY = "INSUM_BENCH_ONLY"
PREPARING = 0.6  # of the time that is given, at most
READY, END = "ready\n", "end\n"


@dataclass(frozen=True)
class Row:
    """One case and pass: microseconds on the device by provider, or why a provider has none."""

    case: str
    pass_: str
    floor: float
    us: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """Microseconds of the fastest peer that takes e3nn's layout."""
        peers = [us for provider, us in self.us.items() if provider not in (OURS, OWN_LAYOUT)]
        return min(peers, default=math.nan)

    @property
    def ratio(self) -> float:
        return self.best / self.us.get(OURS, math.nan)

    @property
    def share(self) -> float:
        return self.floor / self.us.get(OURS, math.nan)


def draw(seed: int) -> list[Product]:
    """Ten products: the same for the same seed, on every machine.

    >>> [product.mode for product in draw(0)].count("uvu")
    4
    """
    source = random.Random(f"products {seed}")
    connected = [_connected(source, number) for number in range(CASES - CHANNELWISE)]
    return [*connected, *(_channelwise(source, number) for number in range(CHANNELWISE))]


def _channels(source: random.Random, low: int = 20, high: int = 112) -> int:
    """A number of channels that is no power of two; one of four is odd."""
    while True:
        drawn = source.randint(low, high)
        drawn = drawn | 1 if source.random() < 0.25 else drawn - drawn % 4
        if low <= drawn and drawn & (drawn - 1):
            return drawn


def _irreps(multiplicities: list[int]) -> str:
    return " + ".join(f"{mul}x{degree}{'eo'[degree % 2]}" for degree, mul in enumerate(multiplicities))


def _batch(source: random.Random, ends: tuple[int, int]) -> int:
    return round(math.exp(source.uniform(*map(math.log, ends))))


def _connected(source: random.Random, number: int) -> Product:
    """A fully connected product: every second one with weights for all samples, every third one uneven."""
    lmax, is_shared, is_uneven = 1 + number % 3, number % 2 == 1, number % 3 == 2
    channels = _channels(source, high=112 if lmax < 3 else 64)
    muls = [max(4, channels >> degree if is_uneven else channels) for degree in range(lmax + 1)]
    first = _irreps(muls)
    out = _irreps([_channels(source) for _ in muls] if is_uneven else muls)
    second = _irreps([1] * (lmax + 1))
    batch = _batch(source, SAMPLES)
    weights = 4 * sum(mul for mul in muls) ** 2
    products = 4 * sum(mul * (2 * degree + 1) for degree, mul in enumerate(muls)) * (lmax + 1) ** 2
    batch = min(batch, MOST_PRODUCTS // products, batch if is_shared else MOST_WEIGHTS // weights)
    kind = "weights for all" if is_shared else "weights for each"
    return Product(f"{kind}: {first} x {second} -> {out}, {batch}", first, second, out, batch, is_shared=is_shared)


def _channelwise(source: random.Random, number: int) -> Product:
    """A channelwise product: every second one along edges, one of both parities, one with uneven multiplicities."""
    has_edges, is_both, is_uneven = number % 2 == 1, number == 2, number == 3
    lmax, harmonics = 1 + number % 2, source.randint(1, 3)
    channels = _channels(source, high=48 if is_both else 112)
    if is_uneven:
        channels -= channels % 4
    muls = [channels // 2 if is_uneven and degree else channels for degree in range(lmax + 1)]
    first, second = _irreps(muls), _irreps([1] * (harmonics + 1))
    if is_both:
        first = " + ".join(f"{channels}x{degree}{parity}" for degree in range(lmax + 1) for parity in "eo")
    kept = " + ".join(f"{degree}{parity}" for degree in range(lmax + 1) for parity in "eo") if is_both else second
    edges = _batch(source, EDGES)
    nodes = edges // NEIGHBOURS if has_edges else 0
    where = f"{nodes} nodes" if has_edges else "no nodes"
    name = f"uvu: {first} x {second} to {kept}, {edges} edges, {where}"
    return Product(name, first, second, kept, edges, "uvu", nodes=nodes)


def passes(product: Product) -> tuple[str, ...]:
    return (FORWARD, GRADIENTS, FORCES) if product.mode == "uvu" else (FORWARD, GRADIENTS)


def providers(product: Product, pass_: str) -> tuple[str, ...]:
    """Who computes a case: the peers of its field; compiled e3nn for fully connected products forward alone.

    `INSUM_BENCH_ONLY`, names separated by semicolons, leaves out the peers that it does not name.
    """
    known = ["e3nn", "cuequivariance"]
    if product.mode == "uvu":
        known += [OWN_LAYOUT, OPEN_EQUIVARIANCE]
    elif pass_ == FORWARD:
        known.append("e3nn compiled")
    only = os.environ.get(ONLY)
    return OURS, *(name for name in known if only is None or name in only.split(";"))


def work_of(given: Operands, pass_: str) -> Work:
    """What must be read, written and multiplied at least: a pass backward reads all once more and writes gradients."""
    traffic = 4.0 * (given.X.numel() + given.Y.numel() + given.W.numel() + given.upstream.numel())
    times = {FORWARD: 1, GRADIENTS: 3, FORCES: 6}[pass_]
    bytes_ = traffic * {FORWARD: 1, GRADIENTS: 2, FORCES: 4}[pass_]
    return Work(bytes_, 0.0, given.flops * times)


def _call(given: Operands, provider: str, pass_: str) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    layer = given.layer(provider)
    if pass_ == FORWARD:
        return torch.no_grad()(lambda: layer(given.X, given.Y, given.W))
    leaves = given.leaves()
    return lambda: given.differentiated(layer, leaves, given.upstream, pass_ == FORCES)


def _expected(given: Operands, provider: str, pass_: str) -> Tensor | tuple[Tensor, ...]:
    layer, leaves = given.reference(provider), given.leaves(torch.float64, given.checked)
    if pass_ == FORWARD:
        with torch.no_grad():
            return layer(*leaves)
    return given.differentiated(layer, leaves, given.upstream[given.checked].double(), pass_ == FORCES)


def _checked(given: Operands, call: Callable[[], Any], expected: Any, limit: float) -> None:
    found = call()
    several = found if isinstance(found, tuple) else (found,)
    check(
        [own if own.shape == wanted.shape else own[given.checked] for own, wanted in zip(several, _several(expected))],
        _several(expected),
        limit,
    )


def _several(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _limit(product: Product, pass_: str) -> float:
    if product.mode == "uvw":
        return LIMIT_TF32
    return LIMIT[torch.float32] * (1 if pass_ == FORWARD else 4)


def _prepared(given: Operands, pass_: str, row: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The peers' calls, each made, checked and called; whatever is wrong or can't run leaves its reason instead."""
    ready: dict[str, Callable[[], Any]] = {}
    for provider in providers(given.product, pass_):
        if provider == OURS:
            continue
        try:
            call = _call(given, provider, pass_)
            if provider == OWN_LAYOUT:
                call()  # its values are those of the same kernels in e3nn's layout
            else:
                _checked(given, call, _expected(given, provider, pass_), _limit(given.product, pass_))
            ready[provider] = call
        except (*PEER_FAILURES, pytest.skip.Exception) as error:
            row["failures"][provider] = f"{type(error).__name__}: {error}"[:200]
        _release()
    return ready


def _release() -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def _time(row: dict[str, Any], provider: str, call: Callable[[], Any]) -> None:
    """Add the microseconds of a call to a row, with a note where the host may have held it up.

    Forces of 96 channels along 60,000 edges seemed to take an H200 923 us where kernels took 425 and a graph 447.
    """
    times = timed(call)
    row["us"][provider] = 1e3 * float(times["device_ms"])
    if times["timing"] != "graph":
        row["failures"][provider] = "no graph captured it: timed among queued calls, which the host may hold up"


def run_case(product: Product, wait: Callable[[], Roofs]) -> Iterator[Row]:
    """Prepare the peers of one case, wait for the machine's roofs, then time ours and them."""
    torch.manual_seed(0)
    with precision("high" if product.mode == "uvw" else "highest"):
        given = make(product)
        rows: dict[str, dict[str, Any]] = {name: {"us": {}, "failures": {}} for name in passes(product)}
        ready = {name: _prepared(given, name, row) for name, row in rows.items()}
        expected = {name: _expected(given, OURS, name) for name in rows}
        _release()
        machine = wait()
        for name, row in rows.items():
            yield _timed_row(given, name, row, ready[name], expected[name], machine)


def _timed_row(
    given: Operands,
    pass_: str,
    row: dict[str, Any],
    ready: Mapping[str, Callable[[], Any]],
    expected: Any,
    machine: Roofs,
) -> Row:
    limit = _limit(given.product, pass_)
    try:
        call = _call(given, OURS, pass_)
        _checked(given, call, expected, limit)
        _time(row, OURS, call)
    except PEER_FAILURES as error:
        row["failures"][OURS] = f"{type(error).__name__}: {error}"[:300]
    for provider, peer in ready.items():
        try:
            _time(row, provider, peer)
        except PEER_FAILURES as error:
            row["failures"][provider] = f"{type(error).__name__}: {error}"[:200]
    floor = 1e3 * floor_ms(work_of(given, pass_), machine)
    return Row(given.product.name, pass_, floor, **row)


def build(product: Product) -> None:
    """Call ours once in every pass, so that its kernels lie in Triton's cache."""
    torch.manual_seed(0)
    with precision("high" if product.mode == "uvw" else "highest"):
        given = make(product)
        for pass_ in passes(product):
            _call(given, OURS, pass_)()


def summary(rows: list[Row], seed: int) -> list[str]:
    """A table of all rows, microseconds, and what it comes to."""
    names = ("e3nn", "e3nn compiled", "cuequivariance", OWN_LAYOUT, OPEN_EQUIVARIANCE)
    header = ("pass", "ours", "best", "ratio", "floor", "share", "e3nn", "compiled", "cue", "cue own", "OEQ", "case")
    lines = [
        (
            *(row.pass_, row.us.get(OURS, math.nan), row.best, row.ratio, row.floor, row.share),
            *(row.us.get(name, "") for name in names),
            row.case,
        )
        for row in rows
    ]
    text = table(f"tensor products, seed {seed}, microseconds on {DEVICE}", header, lines).split("\n")
    for pass_ in (FORWARD, GRADIENTS, FORCES):
        for kind, least in (("weights", 2.0), ("uvu", 1.1)):
            ratios = [row.ratio for row in rows if row.pass_ == pass_ and row.case.startswith(kind) and row.ratio > 0]
            if ratios:
                behind = sum(ratio < least for ratio in ratios)
                figures = f"{geomean(ratios):.2f}x as geometric mean, least {min(ratios):.2f}x, {behind} below {least}x"
                text.append(f"{kind} {pass_}: {len(ratios)} cases, {figures}")
    for row in rows:
        text += [f"{row.pass_} {row.case}: {name}: {why}" for name, why in row.failures.items()]
    return text


class Worker:
    """A process for one case, whose lines are read as they come."""

    def __init__(self, seed: int, number: int, role: str, folder: Path) -> None:
        threads = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1", COMPILED: "1"}
        caches = {"INSUM_CACHE_DIR": f"{folder}/{role}{number}", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, "-m", "bench.products", "--seed", str(seed), "--case", str(number), "--role", role]
        with open(folder / f"{role}{number}.log", "w") as log:
            pipe, environment = subprocess.PIPE, {**os.environ, **threads, **caches}
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)
        self.lines: Queue[str] = Queue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(END)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def answers(self, last: str, until: float) -> list[str]:
        """What the process prints until the line `last`, its end, or the time `until`."""
        found = []
        while (left := until - time.perf_counter()) > 0:
            with suppress(Empty):
                line = self.lines.get(timeout=left)
                if line in (last, END):
                    break
                found.append(line)
        return found

    def finish(self, until: float) -> int | None:
        """Its status, None if it had to be ended."""
        try:
            return self.process.wait(max(0.1, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None


def measure_all(
    seed: int, seconds: float, chosen: list[int], out: Path | None = None, keep: Path | None = None
) -> list[Row]:
    """Prepare all cases at once, then time one after the other; nothing begins after `seconds`.

    Rows are written to `out` as they come; `keep` is a folder for caches and logs, which are dropped without one.
    """
    start, rows = time.perf_counter(), list[Row]()
    spent = lambda: f"{time.perf_counter() - start:.0f} s"
    with tempfile.TemporaryDirectory() as dropped:
        folder = keep or Path(dropped)
        folder.mkdir(parents=True, exist_ok=True)
        workers = {number: Worker(seed, number, "measure", folder) for number in chosen}
        builders = [Worker(seed, number, "build", folder) for number in chosen]
        until = start + PREPARING * seconds
        states = [builder.finish(until) for builder in builders]
        print(f"built {states} at {spent()}", flush=True)
        for worker in workers.values():
            worker.answers(READY, until)
        print(f"peers ready at {spent()}", flush=True)
        with precision("high"):
            machine = json.dumps(asdict(roofs(torch.float32)))
        print(machine)
        for number, worker in workers.items():
            worker.say(machine)
            rows += [Row(**json.loads(line)) for line in worker.answers(END, start + seconds) if line.startswith("{")]
            worker.process.kill()
            print(f"case {number} at {spent()}", flush=True)
            if out is not None:
                out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.products", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=600, help="after which no case begins")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of those to be measured; all by default")
    parser.add_argument("--out", type=Path, help="a JSON file of all rows")
    parser.add_argument("--keep", type=Path, help="a folder for kernels and what tuning found")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("build", "measure"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    products = draw(given.seed)
    if given.list:
        print("\n".join(f"{number}: {product.name}" for number, product in enumerate(products)))
    elif given.role == "build":
        build(products[given.case])
    elif given.role == "measure":
        say = partial(print, flush=True)

        def wait() -> Roofs:
            say(READY, end="")
            return Roofs(**json.loads(sys.stdin.readline()))

        for row in run_case(products[given.case], wait):
            say(json.dumps(asdict(row)))
        say(END, end="")
    else:
        chosen = list(range(CASES)) if given.cases is None else given.cases
        rows = measure_all(given.seed, given.seconds, chosen, given.out, given.keep)
        print("\n".join(summary(rows, given.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
