"""Two runs of the same kind of machine: has ours lost ground against a peer?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .case import OURS, is_ours
from .machine import slug
from .results import ResultsError, Row, Run, better, load

__all__ = ["THRESHOLD", "Change", "changes", "compare", "stored_run"]

# A ratio to a peer may shrink by this factor. CPU: `make bench` twice on two cores under load: 52 ratios differed
# by 1.03 times in the median, two by more than 1.5, the worst by 1.85. GPU: a choice, not measured from run to run.
THRESHOLD = {"gpu": 1.15, "cpu": 2.0}
STORED = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Change:
    """One case beside one peer: how many times ours was the better before, and is now."""

    experiment: str
    case: str
    peer: str
    before: float
    now: float

    @property
    def loss(self) -> float:
        return self.before / self.now

    def __str__(self) -> str:
        against = f"{self.experiment}: {self.case}, against {self.peer}"
        return f"{against}: {self.before:.2f}x before, {self.now:.2f}x now, {self.loss:.2f} times worse"


def stored_run(run: Run) -> Path:
    """Where the stored run for a machine like this one is."""
    return STORED / f"{slug(dict(run.machine))}.json"


def changes(before: Run, now: Run) -> list[Change]:
    """Every pair of ours and a peer that both runs have, in the order of the new run."""
    known = _ratios(before)
    return [Change(*key, known[key], ratio) for key, ratio in _ratios(now).items() if key in known]


def _ratios(run: Run) -> dict[tuple[str, str, str], float]:
    """By the least times, which noise disturbs least; notes such as bytes count too."""
    found = {}
    for experiment in run.experiments:
        for providers in run.cases(experiment):
            ours = providers.get(OURS)
            for peer, row in providers.items():
                if ours is not None and _is_comparable(ours, row):
                    found[experiment, row.case, peer] = better(ours, row, is_low=True)
    return found


def _is_comparable(ours: Row, peer: Row) -> bool:
    return not is_ours(peer.provider) and ours.unit == peer.unit and ours.low > 0 and peer.low > 0


def compare(path: Path, stored: Path | None = None, threshold: float | None = None) -> int:
    """Print what changed; 1 if a ratio shrank by more than the threshold."""
    now = load(path)
    stored = stored_run(now) if stored is None else stored
    if not stored.exists():
        raise ResultsError(f"there is no stored run at {stored}; keep one: cp {path} {stored}")
    before = load(stored)
    kinds = slug(dict(before.machine)), slug(dict(now.machine))
    if kinds[0] != kinds[1]:
        raise ResultsError(f"{stored} is of {kinds[0]} and {path} of {kinds[1]}; compare runs of one kind of machine")
    allowed = threshold or THRESHOLD["cpu" if kinds[1].startswith("cpu-") else "gpu"]
    found = changes(before, now)
    if not found:
        raise ResultsError(f"{stored} and {path} share no case with a peer; run the same cases")
    worse = sorted((change for change in found if change.loss > allowed), key=lambda change: -change.loss)
    better = sum(change.loss < 1 / allowed for change in found)
    for change in worse:
        print(f"worse  {change}")
    print(f"{len(found)} ratios to peers: {len(worse)} worse and {better} better by more than {allowed:g} times")
    return 1 if worse else 0
