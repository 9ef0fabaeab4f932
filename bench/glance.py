"""What a reader of the report sees first: ours beside each peer and the paper, and every case that ours loses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .case import OURS
from .paper import REPORTED
from .results import Row, Run, against, called_ratio

__all__ = ["Group", "Pair", "every_pair", "groups", "pairs"]


@dataclass(frozen=True)
class Pair:
    """Ours and a peer on one case: how many times ours is the better, by device time and as called."""

    ours: Row
    peer: Row
    device: float | None  # where both were captured in a CUDA graph
    called: float | None  # eager calls, wall times, or what was noted

    @property
    def is_timed(self) -> bool:
        return self.ours.unit != "MiB"

    @property
    def worst(self) -> float:
        return min(ratio for ratio in (self.device, self.called) if ratio is not None)


@dataclass
class Group:
    """One series of an experiment beside one peer."""

    experiment: str
    series: str
    variant: str  # of ours, "" for ours itself
    peer: str
    pairs: list[Pair] = field(default_factory=list)

    @property
    def paper(self) -> str:
        """What the paper reports of it."""
        return "" if self.variant else REPORTED.get((self.experiment, self.series, self.peer), "")

    def ratios(self, kind: str) -> list[float]:
        return [ratio for ratio in (getattr(pair, kind) for pair in self.pairs) if ratio is not None]


def pairs(run: Run, experiment: str, provider: str = OURS) -> Iterator[Pair]:
    """Every comparison with ours, or with a variant of ours, that the run has."""
    for ours, peer, ratio in run.ratios(experiment, provider):
        is_captured = ours.timing == peer.timing == "graph"
        called = called_ratio(ours, peer)
        yield Pair(ours, peer, ratio if is_captured else None, ratio if called is None and not is_captured else called)


def every_pair(run: Run, experiment: str) -> Iterator[Pair]:
    """Every comparison with ours and with variants of ours, in the order of the rows."""
    for provider in run.variants(experiment):
        yield from pairs(run, experiment, provider)


def groups(run: Run, experiment: str) -> list[Group]:
    """The comparisons of an experiment by variant, series and peer, in the order of the rows."""
    found: dict[tuple[str, str, str], Group] = {}
    for pair in every_pair(run, experiment):
        variant = pair.ours.provider.removeprefix(OURS).strip(", ")
        series, peer = pair.ours.series, against(pair.ours, pair.peer)
        group = Group(experiment, series, variant, peer)
        found.setdefault((variant, series, peer), group).pairs.append(pair)
    return list(found.values())
