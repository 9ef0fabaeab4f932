"""Two runs of the same kind of machine: has ours lost ground against a peer, or rows that it had?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path

from .case import OURS, is_ours
from .machine import slug
from .results import CORE, ResultsError, Row, Run, bases, is_alike, load

__all__ = ["THRESHOLD", "Change", "changes", "changes_of_ours", "compare", "stored_run"]

# A ratio to a peer may shrink by this factor. CPU: `make bench` twice on two cores under load: 52 ratios differed
# by 1.03 times in the median, two by more than 1.5, the worst by 1.85. GPU: 118 ratios on an H200, measured again some
# changes later: 1.03 times in the median, the worst shrank by 1.17, where cuBLAS was faster and ours the same.
THRESHOLD = {"gpu": 1.2, "cpu": 2.0}
STORED = Path(__file__).parent / "results"
Key = tuple[str, str, str, str]  # experiment, case, ours or a variant of it, peer


@dataclass(frozen=True)
class Change:
    """One case beside one peer: how many times ours was the better before, and is now."""

    experiment: str
    case: str
    ours: str
    peer: str
    before: float
    now: float

    @property
    def loss(self) -> float:
        return self.before / self.now

    def __str__(self) -> str:
        variant = "" if self.ours == OURS else f"{self.ours} "
        against = f"{self.experiment}: {self.case}, {variant}against {self.peer}"
        return f"{against}: {self.before:.2f}x before, {self.now:.2f}x now, {self.loss:.2f} times worse"


def stored_run(run: Run) -> Path:
    """Where the stored run for a machine like this one is."""
    return STORED / f"{slug(dict(run.machine))}.json"


def changes(before: Run, now: Run) -> list[Change]:
    """Every pair of ours and a peer that both runs have on the same basis, in the order of the new run."""
    known, found = _ratios(before), []
    for key, ratios in _ratios(now).items():
        shared = [basis for basis in ratios if basis in known.get(key, {})]
        if shared:  # a graph's replay then and calls now: calls of both
            found.append(Change(*key, known[key][shared[0]], ratios[shared[0]]))
    return found


def _ratios(run: Run) -> dict[Key, dict[str, float]]:
    """By the least times, which noise disturbs least; notes such as bytes count too."""
    found = {}
    for experiment in run.experiments:
        for providers in run.cases(experiment):
            for own in filter(is_ours, providers):
                ours = providers[own]
                for peer, row in providers.items():
                    if not is_ours(peer) and is_alike(own, peer, providers) and row.is_comparable(ours):
                        found[experiment, row.case, own, peer] = bases(ours, row, is_low=True)
    return found


def changes_of_ours(before: Run, now: Run) -> list[Change]:
    """Ours beside peers that the new run lacks: against a stored time a ratio changes only as ours does.

    So ours is compared with itself, by replay where both runs have one, whatever the peer was timed by: calls of two
    runs differ by what else their hosts did. That needs the same machine, torch and Triton.
    """
    for name in CORE:
        versions = [dict(run.machine.get("packages", {})).get(name) for run in (before, now)]  # type: ignore[call-overload]
        if versions[0] != versions[1]:
            raise ResultsError(f"{name} was {versions[0]} and is {versions[1]}: measure the peers again")
    then, there = (
        {(row.experiment, row.case, row.provider): row for row in run.rows if row.is_sound} for run in (before, now)
    )
    found = []
    for (experiment, case, own, peer), ratios in _ratios(before).items():
        was, ours = then[experiment, case, own], there.get((experiment, case, own))
        if ours is None or not ratios or (experiment, case, peer) in there:
            continue
        gain = next(iter(bases(ours, was, is_low=True).values()), None)
        if gain is not None:
            ratio = next(iter(ratios.values()))
            found.append(Change(experiment, case, own, peer, ratio, ratio * gain))
    return found


def _of_its_seeds(before: Run, now: Run) -> Run:
    """The stored run without cases whose sizes are of a seed that the new run has none of."""
    seeds = {row.facts.get("seed") for row in now.rows} | {None}
    return replace(before, rows=tuple(row for row in before.rows if row.facts.get("seed") in seeds))


def compare(
    path: Path, stored: Path | None = None, threshold: float | None = None, has_stored_peers: bool = False
) -> int:
    """Print what changed; 1 if a ratio shrank by more than the threshold, or a row of ours is gone or has no time.

    If `has_stored_peers`, peers that did not run have the times of the stored run.
    """
    if threshold is not None and not 1 < threshold < inf:
        raise ResultsError(f"the threshold is {threshold:g}; how many times worse a ratio may get is a number above 1")
    now = load(path)
    stored = stored_run(now) if stored is None else stored
    if not stored.exists():
        raise ResultsError(f"there is no stored run at {stored}; keep one: cp {path} {stored}")
    before = load(stored)
    kinds = slug(dict(before.machine)), slug(dict(now.machine))
    if kinds[0] != kinds[1]:
        raise ResultsError(f"{stored} is of {kinds[0]} and {path} of {kinds[1]}; compare runs of one kind of machine")
    allowed = threshold or THRESHOLD["cpu" if kinds[1].startswith("cpu-") else "gpu"]
    before = _of_its_seeds(before, now)
    found = changes(before, now)
    if has_stored_peers:
        found += changes_of_ours(before, now)
    failures = [*_gone(before, now), *_without_time(now)]
    if not found and not failures:
        raise ResultsError(f"{stored} and {path} share no case with a peer; run the same cases")
    worse = sorted((change for change in found if change.loss > allowed), key=lambda change: -change.loss)
    better = sum(change.loss < 1 / allowed for change in found)
    for line in (*failures, *(f"worse  {change}" for change in worse), *_aside(before, now, found)):
        print(line)
    print(f"{len(found)} ratios to peers: {len(worse)} worse and {better} better by more than {allowed:g} times")
    return 1 if worse or failures else 0


def _gone(before: Run, now: Run) -> Iterator[str]:
    """Rows of ours that the stored run has and the new one lacks, of experiments that were run."""
    for experiment in _measured(before, now):
        cases, there = _cases(before, experiment), _cases(now, experiment)
        lost = {case: [own for own in cases[case] if is_ours(own) and own not in there.get(case, {})] for case in cases}
        if any(lost.values()) and not cases.keys() & there.keys():
            yield (
                f"gone   {experiment}: all {len(cases)} cases; the new run has others ({next(iter(cases))} before, "
                f"{next(iter(there))} now): compare runs of the same INSUM_DATA, or both of generated inputs"
            )
            continue
        for case, providers in lost.items():
            if providers:
                yield f"gone   {experiment}: {case}, {', '.join(providers) if case in there else 'the whole case'}"


def _without_time(now: Run) -> Iterator[str]:
    """Rows of ours that say nothing; no memory at all is a figure, no time at all is none."""
    for row in now.rows:
        figures = row.value, row.low
        is_figure = all(map(isfinite, figures)) and (min(figures) > 0 or row.unit == "MiB")
        if is_ours(row.provider) and not is_figure:
            worst = next((figure for figure in figures if not isfinite(figure)), min(figures))
            yield f"failed {row.experiment}: {row.case}, {row.provider}: {worst:g} {row.unit} is no measurement"


def _aside(before: Run, now: Run, found: Sequence[Change]) -> Iterator[str]:
    """What was not compared and is no failure: cases of others alone, peers that did not run, other experiments."""
    measured = _measured(before, now)
    for experiment in measured:
        cases, there = _cases(before, experiment), _cases(now, experiment)
        for case in cases:
            if case not in there and not any(map(is_ours, cases[case])):
                yield f"gone   {experiment}: {case}, which has no row of ours"
    compared = {(change.experiment, change.case, change.ours, change.peer) for change in found}
    left = [key for key in _ratios(before) if key[0] in measured and key not in compared]
    if left:
        peers = ", ".join(dict.fromkeys(peer for *_, peer in left))
        yield f"{_counted(len(left), 'stored ratio')} not compared, to {peers}"
    absent = [name for name in before.experiments if name not in measured]
    if absent:
        count = sum(len(_cases(before, name)) for name in absent)
        yield f"{_counted(count, 'stored case')} of {_counted(len(absent), 'experiment')} not run"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _measured(before: Run, now: Run) -> list[str]:
    return [experiment for experiment in before.experiments if experiment in now.experiments]


def _cases(run: Run, experiment: str) -> dict[str, dict[str, Row]]:
    return {next(iter(providers.values())).case: providers for providers in run.cases(experiment)}
