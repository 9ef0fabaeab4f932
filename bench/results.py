"""A results file, as pytest-benchmark writes it, read into rows; what ours and a peer make of the same case."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .case import OURS, is_ours

__all__ = ["BASELINES", "TITLES", "ResultsError", "Row", "Run", "better", "called_ratio", "crossover", "load", "merge"]

# the paper's order, then ours; an experiment that is not named here comes last
TITLES = {
    "structured_spmm": "Block SpMM against sparsity",
    "unstructured_spmm": "`spmm` over graphs",
    "conversion": "Converting a CSR tensor, once",
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
    "mixture_of_experts": "A mixture of experts in one line",
    "graph_attention": "Graph attention in four lines",
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
    def series(self) -> str:
        return str(self.facts.get("series", ""))

    @property
    def peak_mib(self) -> float | None:
        """What the call needed beyond its operands, where it was measured."""
        peak = self.facts.get("peak_mib")
        return None if peak is None else float(str(peak))


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

        By device time where both were captured; a peer that can't be is compared as both are called.
        """
        for providers in self.cases(experiment):
            ours = providers.get(provider)
            for name, row in providers.items():
                if ours is not None and not is_ours(name) and row.unit == ours.unit and ours.value > 0:
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


def better(ours: Row, peer: Row, is_low: bool = False) -> float:
    """How many times ours is the better: by device times, or by eager calls where one of the two was not captured."""
    if ours.timing != peer.timing:
        called = called_ratio(ours, peer, is_low)
        if called is not None:
            return called
    return peer.low / ours.low if is_low else peer.value / ours.value


def called_ratio(ours: Row, peer: Row, is_low: bool = False) -> float | None:
    """How many times ours is the better as both are called, in turns where they were timed so; None: not measured."""
    theirs, own = (peer.queued_low, ours.queued_low) if is_low else (peer.queued_ms, ours.queued_ms)
    in_turns = peer.ours_low if is_low else peer.ours_ms
    own = in_turns if in_turns and ours.provider == OURS else own
    return theirs / own if theirs and own else None


def load(path: Path) -> Run:
    """Read a results file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ResultsError(f"{path} does not exist; make it: make bench") from None
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from None
    try:
        entries, commit = data["benchmarks"], _commit(data)
        rows = tuple(_row(number, entry, commit) for number, entry in enumerate(entries, 1))
        return Run(rows, data["machine_info"], data["commit_info"], str(data["datetime"])[:10])
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{path} is no results file of this benchmark: {error} is missing") from None


def merge(paths: Sequence[Path], target: Path) -> None:
    """Join runs of several experiments on one machine into one file.

    A row that two of them have is the later one's, and what a case has of another commit goes with it: ratios are of
    one run.
    """
    whole: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        load(path)  # refuses what is no results file
        data = json.loads(path.read_text())
        whole = whole or data
        mine, theirs = whole["machine_info"], data["machine_info"]
        packages = {
            **mine.get("packages", {}),
            **theirs.get("packages", {}),
        }  # peers of one run alone
        whole["machine_info"], data["machine_info"] = {**mine, "packages": packages}, {**theirs, "packages": packages}
        if data["machine_info"] != whole["machine_info"]:
            raise ResultsError(f"{path} and {paths[0]} differ in machine_info; join runs of one machine")
        commit = _commit(data)
        added = {entry["fullname"]: _kept(entry, commit) for entry in data["benchmarks"]}
        renewed = {_case(row): row["extra_info"]["commit"] for row in added.values()}
        stays = lambda row: renewed.get(_case(row)) in (None, row["extra_info"]["commit"])
        rows = {**{name: row for name, row in rows.items() if stays(row)}, **added}
        whole.update(commit_info=data["commit_info"], datetime=data["datetime"])
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows.values())
    head = json.dumps({**whole, "benchmarks": []})
    target.write_text(head.replace('"benchmarks": []', f'"benchmarks": [\n{lines}\n]'))


def _commit(data: Mapping[str, Any]) -> str:
    known = data["commit_info"]
    return str(known.get("id") or "unknown")[:7] + (", changed" if known.get("dirty") else "")


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
    wall = stats["median"] * 1e3
    if "value" in info:
        value, low, unit, timing, wall_ms = info["value"], info["value"], info["unit"], "", None
    elif "device_ms" in info:
        value, low, unit, timing, wall_ms = info["device_ms"], info["device_p20"], "ms", info["timing"], wall
    else:
        value, low, unit, timing, wall_ms = wall, stats["min"] * 1e3, "ms", "wall", wall
    return Row(
        number,
        info["experiment"],
        info["case"],
        info["provider"],
        value,
        low,
        unit,
        info["x"],
        wall_ms,
        info.get("queued_ms"),
        info.get("queued_p20"),
        info.get("ours_ms"),
        info.get("ours_p20"),
        info.get("cold_ms"),
        info.get("error"),
        info["flops"],
        info["traffic"],
        timing,
        info.get("commit", commit),
        info["facts"],
    )


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
