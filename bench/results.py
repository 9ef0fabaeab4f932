"""A results file, as pytest-benchmark writes it, read into rows; what ours and a peer make of the same case."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path
from typing import Any, TypeGuard

from .case import OURS, in_tf32, is_ours, is_tf32, ours_beside
from .machine import slug
from .row_file import SUFFIX, as_results, commit_of

__all__ = [
    "BASELINES",
    "CORE",
    "TITLES",
    "ResultsError",
    "Row",
    "Run",
    "against",
    "bases",
    "better",
    "called_ratio",
    "contradiction",
    "crossover",
    "is_alike",
    "is_positive",
    "load",
    "merge",
]

# the paper's order, then ours; an experiment that is not named here comes last
TITLES = {
    "structured_spmm": "Block SpMM against sparsity",
    "unstructured_spmm": "`spmm` over graphs",
    "conversion": "Converting a CSR tensor, once",
    "sampled_graph": "Graphs that are sampled anew at each step",
    "linear": "`BlockSparseLinear`",
    "linear_training": "`BlockSparseLinear`, forward and backward",
    "convolution": "Convolution over rooms and scans",
    "kernel_map": "Kernel maps of new clouds",
    "tensor_product": "Fully connected tensor product",
    "tensor_product_training": "Fully connected tensor product, gradients",
    "equivariant": "Tensor products of models in use",
    "equivariant_training": "Tensor products of models in use, gradients",
    "shared_product": "Tensor product with shared weights",
    "ablation": "What each idea brings",
    "group_size": "Time against group size",
    "cost": "Before the first result",
    "backward": "Forward and backward",
    "unet": "A sparse U-Net, forward and backward",
    "compiled_steps": "Training steps, ordinary and by `torch.compile`",
    "mixture_of_experts": "A mixture of experts in one line",
    "graph_attention": "Graph attention in four lines",
    "statements": "Statements at sizes drawn from a seed",
    "scaling": "SpMM against the number of entries",
    "host": "Host time of one call",
    "memory": "Memory",
    "roof": "What the machine can do",
}
# what speed-ups are over, the first that ran
BASELINES = {
    "structured_spmm": ("dense",),
    "unstructured_spmm": ("torch.sparse",),
    "convolution": ("spconv", "torch, one matmul a tap"),
    "kernel_map": ("spconv",),
    "unet": ("spconv", "torch, one matmul a tap"),
    "tensor_product": ("e3nn",),
    "tensor_product_training": ("e3nn",),
    "equivariant": ("e3nn",),
    "equivariant_training": ("e3nn",),
    "shared_product": ("torch.matmul",),
    "ablation": ("COO",),
    "scaling": ("torch.sparse",),
}


# How many times a call's own time its work on the device may take. It is a part of the call, so more than the noise
# between two measurements means that one of the two is wrong; of 902 rows of an H200 one is above, the next is at 1.09.
MOST_ON_DEVICE = 1.1
CORE = ("torch", "triton")  # what all rows depend on; other packages are peers, or of those


class ResultsError(ValueError):
    """A file that is no results file, or not one that can be used so."""


@dataclass(frozen=True)
class Row:
    """One provider on one case; less is better whatever the unit."""

    number: int
    experiment: str
    case: str
    provider: str
    value: float  # device time where there is a device, else wall time; or what was noted, in `unit`
    low: float  # the same, at the 20th percentile or the least: what noise disturbs least
    unit: str = "ms"
    x: float | None = None
    wall_ms: float | None = None
    queued_ms: float | None = None  # one eager call among several, on a GPU
    queued_low: float | None = None
    ours_ms: float | None = None  # our eager call, timed in turns with this peer's
    ours_low: float | None = None
    cold_ms: float | None = None
    error: float | None = None
    flops: float = 0.0
    traffic: float = 0.0
    timing: str = ""  # graph, queue or wall
    commit: str = "unknown"  # that was measured
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether it can be compared or drawn: zero, an infinity and NaN are no measurements."""
        return is_positive(self.value)

    def is_comparable(self, other: Row) -> bool:
        return self.unit == other.unit and self.is_sound and other.is_sound

    @property
    def series(self) -> str:
        return str(self.facts.get("series", ""))

    @property
    def peak_mib(self) -> float | None:
        """What the call needed beyond its operands, where it was measured."""
        peak = self.facts.get("peak_mib")
        return float(peak) if isinstance(peak, int | float) else None


@dataclass(frozen=True)
class Run:
    """Every row of one run, and the machine it ran on."""

    rows: tuple[Row, ...]
    machine: Mapping[str, object]
    commit: Mapping[str, object]
    date: str

    @property
    def commits(self) -> dict[str, tuple[str, ...]]:
        """The experiments of each commit that was measured, the latest last."""
        known = dict.fromkeys(row.commit for row in self.rows)
        return {
            commit: tuple(dict.fromkeys(row.experiment for row in self.rows if row.commit == commit))
            for commit in known
        }

    @property
    def experiments(self) -> tuple[str, ...]:
        present = dict.fromkeys(row.experiment for row in self.rows)
        return tuple(sorted(present, key=lambda name: [*TITLES, name].index(name)))

    def of(self, experiment: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.experiment == experiment)

    def cases(self, experiment: str) -> Iterator[dict[str, Row]]:
        """For each case, its rows by provider."""
        for name in dict.fromkeys(row.case for row in self.of(experiment)):
            yield {row.provider: row for row in self.of(experiment) if row.case == name}

    def ratios(self, experiment: str, provider: str = OURS) -> Iterator[tuple[Row, Row, float]]:
        """Ours or a variant of ours, a peer, and how many times ours is the better, for each pair on the same case.

        By device time where both were captured; a peer that can't be is compared as both are called. Ours in tf32 is
        compared with peers in tf32, and with those in full float32 that did not run so.
        """
        for providers in self.cases(experiment):
            ours = providers.get(provider)
            for name, row in providers.items():
                is_peer = not is_ours(name) and is_alike(provider, name, providers)
                if ours is not None and is_peer and row.is_comparable(ours):
                    yield ours, row, better(ours, row)

    def variants(self, experiment: str) -> tuple[str, ...]:
        """Ours, and what else of ours ran."""
        return tuple(dict.fromkeys(row.provider for row in self.of(experiment) if is_ours(row.provider)))

    def baseline(self, experiment: str) -> str | None:
        """The provider that speed-ups of an experiment are over."""
        ran = list(dict.fromkeys(row.provider for row in self.of(experiment) if not is_ours(row.provider)))
        for name in (*BASELINES.get(experiment, ()), *ran):
            if name in ran:
                return name
        return None


def is_alike(ours: str, peer: str, ran: Container[str]) -> bool:
    """Whether the precision of a peer is that of ours, or as near to it as the peer ran."""
    if is_tf32(peer):
        return is_tf32(ours)
    return not (is_tf32(ours) and in_tf32(peer) in ran)


def against(ours: Row, peer: Row) -> str:
    """What a table calls the peer: its name, and its precision where ours has another."""
    is_unlike = is_tf32(ours.provider) and not is_tf32(peer.provider)
    return f"{peer.provider}, in full float32" if is_unlike else peer.provider


def is_positive(value: float | None) -> TypeGuard[float]:
    """
    >>> [is_positive(value) for value in (1.0, 0.0, float("nan"), float("inf"), None)]
    [True, False, False, False, False]
    """
    return value is not None and 0 < value < inf


def contradiction(device_ms: float | None, called_ms: float | None) -> str | None:
    """What is wrong with a row whose work on the device takes clearly longer than the calls that do it; None: nothing.

    >>> contradiction(1.05, 1.0), contradiction(0.1, 1.0), contradiction(3.1, None)
    (None, None, None)
    >>> contradiction(3.1, 2.0)
    'took 3.1 ms on the device and 2 ms as called, which can not be both'
    """
    if not is_positive(device_ms) or not is_positive(called_ms) or device_ms <= MOST_ON_DEVICE * called_ms:
        return None
    return f"took {device_ms:.4g} ms on the device and {called_ms:.4g} ms as called, which can not be both"


def better(ours: Row, peer: Row) -> float:
    """How many times ours is the better: by device times, or by eager calls where one of the two was not captured."""
    known = bases(ours, peer)
    return next(iter(known.values())) if known else peer.value / ours.value


def bases(ours: Row, peer: Row, is_low: bool = False) -> dict[str, float]:
    """How many times ours is the better, on each basis that both have; what to go by comes first.

    Eager calls that were timed in turns come before calls that were timed apart, even where nothing was captured.
    """
    found: dict[str, tuple[float | None, float | None]] = {}
    theirs, own = (peer.low, ours.low) if is_low else (peer.value, ours.value)
    is_timed_alike = (ours.timing, ours.unit) == (peer.timing, peer.unit)
    if is_timed_alike and ours.timing != "queue":
        found[ours.timing or ours.unit] = theirs, own
    queued, apart = (peer.queued_low, ours.queued_low) if is_low else (peer.queued_ms, ours.queued_ms)
    if ours.provider == ours_beside(peer.provider):
        found["in turns"] = queued, peer.ours_low if is_low else peer.ours_ms
    found["apart"] = queued, apart
    if is_timed_alike and ours.timing == "queue":
        found["queue"] = theirs, own
    return {basis: peers / mine for basis, (peers, mine) in found.items() if is_positive(peers) and is_positive(mine)}


def called_ratio(ours: Row, peer: Row, is_low: bool = False) -> float | None:
    """How many times ours is the better as both are called, in turns where they were timed so; None: not measured."""
    known = bases(ours, peer, is_low)
    return known.get("in turns", known.get("apart"))


def load(path: Path) -> Run:
    """Read a results file; one with a row whose times contradict each other is refused."""
    data = _read(path)
    try:
        commit = commit_of(data)
        rows = tuple(_row(number, entry, commit) for number, entry in enumerate(data["benchmarks"], 1))
    except KeyError as error:
        raise ResultsError(f"{path} is no results file of this benchmark: {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{path} is no results file of this benchmark: a row of it can't be read: {error}") from None
    for row in rows:
        problem = contradiction(row.value, row.queued_ms) if row.timing == "graph" else None
        if problem is not None:
            what = f"{row.experiment}: {row.case}, {row.provider} {problem}"
            raise ResultsError(f"{path} can't be used: {what}; measure the case again, or take the row out")
    machine = {**data["machine_info"], "packages": data["machine_info"].get("packages") or {}}
    return Run(rows, machine, data["commit_info"], data["datetime"][:10])


# what a file must hold, with its kind in Python's words and in JSON's
HELD = {
    "benchmarks": (list, "a list"),
    "machine_info": (dict, "an object"),
    "commit_info": (dict, "an object"),
    "datetime": (str, "a text"),
}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = as_results(path) if path.suffix == SUFFIX else json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultsError(f"{path} does not exist; make it: make bench") from None
    except OSError as error:
        raise ResultsError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ResultsError(f"{path} is no results file of this benchmark: it holds {_shown(data)}, not an object")
    for name, (kind, words) in HELD.items():
        if name not in data:
            raise ResultsError(f"{path} is no results file of this benchmark: '{name}' is missing")
        if not isinstance(data[name], kind):
            given = _shown(data[name])
            raise ResultsError(f"{path} is no results file of this benchmark: '{name}' is {given}, not {words}")
    return data


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 20 else f"{text[:20]}..."


def merge(paths: Sequence[Path], target: Path) -> None:
    """Join runs of several experiments on one machine into one file.

    A case that two of them have is the later one's as a whole, with its peers or without: ratios are of one run.
    """
    whole: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        load(path)  # refuses what is no results file
        data = _read(path)
        whole = whole or data
        packages = _joined(paths[0], whole["machine_info"], path, data["machine_info"])
        whole["machine_info"] = {**whole["machine_info"], "packages": packages}
        commit = commit_of(data)
        added = {entry["fullname"]: _kept(entry, commit) for entry in data["benchmarks"]}
        renewed = {_case(row) for row in added.values()}
        rows = {**{name: row for name, row in rows.items() if _case(row) not in renewed}, **added}
        whole.update(commit_info=data["commit_info"], datetime=data["datetime"])
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows.values())
    head = json.dumps({**whole, "benchmarks": []})
    try:
        target.write_text(head.replace('"benchmarks": []', f'"benchmarks": [\n{lines}\n]'), encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{target} can't be written: {error.strerror}") from None


def _joined(first: Path, mine: Mapping[str, Any], path: Path, theirs: Mapping[str, Any]) -> dict[str, str]:
    """The packages of runs so far and of one more; a peer may be of one run alone, torch and Triton are of all.

    How many threads torch had on the host tells runs apart on a CPU, and not those of a GPU: one that several processes
    share has one.
    """
    aside = {"packages": None, **({} if slug(dict(mine)).startswith("cpu-") else {"threads": None})}
    if {**mine, **aside} != {**theirs, **aside}:
        raise ResultsError(f"{path} and {first} differ in machine_info; join runs of one machine")
    before, more = mine.get("packages") or {}, theirs.get("packages") or {}
    for name in dict.fromkeys((*CORE, *before, *more)):
        is_of_both = name in before and name in more
        if before.get(name) != more.get(name) and (is_of_both or name in CORE):
            versions = f"{more.get(name, 'none')} in {path} and {before.get(name, 'none')} in {first}"
            raise ResultsError(f"{name} is {versions}; join runs of the same versions")
    return {**before, **more}


def _case(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["extra_info"]["experiment"], row["extra_info"]["case"]


def _kept(entry: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """A row without what nobody reads, its times to six digits: a stored run is to stay small."""
    info = {name: _short(value) for name, value in entry["extra_info"].items()}
    info.setdefault("commit", commit)
    stats = {name: _short(entry["stats"][name]) for name in ("min", "median", "rounds") if name in entry["stats"]}
    return {"fullname": entry["fullname"], "extra_info": info, "stats": stats}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _row(number: int, entry: Mapping[str, dict[str, Any]], commit: str) -> Row:
    info, stats = entry["extra_info"], entry["stats"]
    wall = _figure(stats["median"]) * 1e3
    if "value" in info:
        value, low, unit = info["value"], info["value"], info["unit"]
        timing, wall_ms = info.get("timing", ""), None
    elif "device_ms" in info:
        value, low, unit, timing, wall_ms = info["device_ms"], info["device_p20"], "ms", info["timing"], wall
    else:
        value, low, unit, timing, wall_ms = wall, _figure(stats["min"]) * 1e3, "ms", "wall", wall
    return Row(
        number,
        info["experiment"],
        info["case"],
        info["provider"],
        _figure(value),
        _figure(low),
        unit,
        info["x"],
        wall_ms,
        info.get("queued_ms"),
        info.get("queued_p20"),
        info.get("ours_ms"),
        info.get("ours_p20"),
        info.get("cold_ms"),
        info.get("error"),
        info["flops"] or 0.0,
        info["traffic"] or 0.0,
        timing,
        info.get("commit", commit),
        dict(info["facts"] or {}),
    )


def _figure(value: float | None) -> float:
    """A number of a file; what is null was not measured, and its row stays."""
    return nan if value is None else float(value)


def crossover(points: Sequence[tuple[float, float]]) -> float | None:
    """Where a speed-up first reaches 1 and stays there, between the points; None: it never does.

    >>> crossover([(0.0, 0.5), (0.5, 0.9), (0.9, 3.0)]) == 0.5 + 0.4 * 0.1 / 2.1
    True
    >>> crossover([(0.0, 1.5), (0.5, 2.0)]), crossover([(0.0, 0.5)])
    (0.0, None)
    """
    ordered = sorted(points)
    if not ordered or ordered[-1][1] < 1:
        return None
    at = max((number for number, (_, speed) in enumerate(ordered) if speed < 1), default=None)
    if at is None:
        return ordered[0][0]
    (x0, y0), (x1, y1) = ordered[at], ordered[at + 1]
    return x0 + (x1 - x0) * ((1 - y0) / (y1 - y0))
