"""README's figures, written from a results file: a marked block, so that text and file can't disagree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil, floor
from pathlib import Path

from .case import OURS
from .harness import geomean
from .paper import FLEX_GEMM_MS, REPORTED
from .results import TITLES, ResultsError, Run, against, called_ratio, crossover

__all__ = ["BEGIN", "END", "block", "rewrite"]

# written without a library: the report has them, README the libraries
PLAIN = (
    "torch, one matmul a tap",
    "torch, one matmul an expert",
    "torch, gather and index_add",
    "gather, multiply, scatter",
    "PyG",
)
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SKIPPED = ("roof", "group_size", "conversion", "cost", "host", "memory")  # not a speed-up over a peer


def rewrite(text: str, run: Run, source: str) -> str:
    """README's text with the block between the marks made anew."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ResultsError(f"the text needs one block between {BEGIN} and {END}, each on a line of its own")
    return pattern.sub(lambda _: f"{BEGIN}\n{block(run, source)}\n{END}", text)


def block(run: Run, source: str) -> str:
    """The machine, a table of ours, the paper and peers, and what comes before the first result."""
    rows = [*_speedups(run), *_noted(run)]
    table = ["| what | against | device | as called | the paper, on an RTX 3090 |", "|---|---|---|---|---|"]
    table += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([_headline(run, source), "", *table, *_commits(run)])


def _headline(run: Run, source: str) -> str:
    machine, packages = run.machine, dict(run.machine.get("packages", {}))  # type: ignore[call-overload]
    gpu = str(machine.get("gpu", "none"))
    place = f"{gpu}, driver {machine.get('driver')}" if gpu != "none" else f"{machine.get('cpu')}, no GPU"
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages)
    known = tuple(reversed(run.commits)) or ("unknown",)
    commits = f"commit{'s' * (len(known) > 1)} {', '.join(known)}"
    how = "wall time"
    if gpu != "none":
        how = "`device` is time by CUDA-graph replay, `as called` that of one call among many, Python included"
    return (
        f"{place}, {versions}, {run.date}, {commits}; {how}; medians, values checked first, peers in the same "
        "run. "
        f"`make bench` measures, `python -m bench readme {source}` writes this table."
    )


def _commits(run: Run) -> list[str]:
    """Where several commits were measured, what was at each, the latest first."""
    if len(run.commits) == 1:
        return []
    parts = (
        f"{commit}: {' · '.join(TITLES.get(name, name) for name in experiments)}"
        for commit, experiments in reversed(run.commits.items())
    )
    return ["", f"Measured at {'; '.join(parts)}. A case and its peers are of one run."]


Points = list[tuple[float | None, float]]  # where a case lies on its experiment's axis, and its speed-up


def _speedups(run: Run) -> Iterator[tuple[str, str, str, str, str]]:
    for experiment in run.experiments:
        if experiment in SKIPPED:
            continue
        found: dict[tuple[str, str, str], tuple[Points, Points]] = {}
        for variant in run.variants(experiment):
            for ours, peer, ratio in run.ratios(experiment, variant):
                if peer.provider in PLAIN:
                    continue
                device, called = found.setdefault((variant, ours.series, against(ours, peer)), ([], []))
                if ours.timing == peer.timing != "queue":
                    device.append((ours.x, ratio))
                as_called = called_ratio(ours, peer)
                if as_called is not None:
                    called.append((ours.x, as_called))
        for (variant, series, peer_name), (device, called) in found.items():
            own = variant.removeprefix(OURS).strip(", ")
            title = ", ".join(filter(None, (TITLES.get(experiment, experiment), series, own)))
            reported = REPORTED.get((experiment, series, peer_name), "") if not own else ""
            yield title, peer_name, _summary(device, peer_name), _summary(called, peer_name), reported
        yield from _elsewhere(run, experiment)


def _elsewhere(run: Run, experiment: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Over times of another run, by device time: what has no package to run here."""
    rows = [row for row in run.of(experiment) if row.provider == OURS and FLEX_GEMM_MS in row.facts]
    points: Points = [(None, float(str(row.facts[FLEX_GEMM_MS])) / row.value) for row in rows]
    if points:
        title = ", ".join(filter(None, (TITLES.get(experiment, experiment), rows[0].series)))
        yield title, "FlexGEMM, in another run", _summary(points, ""), "", ""


def _summary(points: Points, peer: str) -> str:
    ratios = [ratio for _, ratio in points]
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}x" if ratios else ""
    curve = sorted((x, ratio) for x, ratio in points if x is not None)
    if peer == "dense" and len(curve) == len(points):  # against sparsity or density
        ends = f"{curve[0][1]:.2f}x at {curve[0][0]:.0%} to {curve[-1][1]:.2f}x at {curve[-1][0]:.0%}"
        if curve[0][1] > curve[-1][1]:
            pays = crossover([(-x, ratio) for x, ratio in curve])
            return f"{ends}; {'never pays' if pays is None else f'pays up to {floor(-_percent(pays))}%'}"
        pays = crossover(curve)
        return f"{ends}; {'never pays' if pays is None else f'pays from {ceil(_percent(pays))}% on'}"
    return f"{geomean(ratios):.2f}x geomean, least {min(ratios):.2f}x, of {len(ratios)}"


def _percent(share: float) -> float:
    """Not a hair beside a whole number; what pays is rounded to where it does."""
    return round(100 * share, 6)


def _noted(run: Run) -> Iterator[tuple[str, str, str, str, str]]:
    for row in run.of("cost"):
        reported = REPORTED.get(("cost", "", row.case), "")
        yield f"{TITLES['cost']}: {row.case}", "", "", f"{row.value:.3g} {row.unit}", reported
    conversions = [row.value for row in run.of("conversion")]
    if conversions:
        yield TITLES["conversion"], "", "", f"{min(conversions):.2g} to {max(conversions):.2g} ms", ""
    for providers in run.cases("host"):
        if OURS in providers:
            ours = providers[OURS]
            peers = ", ".join(f"{p}: {row.value:.0f} µs" for p, row in providers.items() if p != OURS)
            yield f"{TITLES['host']}: {ours.case}", peers, "", f"{ours.value:.0f} µs", ""


def write(results: Path, readme: Path, run: Run, is_check: bool) -> int:
    """Rewrite a file, or say whether it agrees already."""
    before = readme.read_text(encoding="utf-8")
    after = rewrite(before, run, results.as_posix())
    if is_check:
        print(f"{readme} {'agrees' if before == after else 'disagrees'} with {results}")
        return 0 if before == after else 1
    readme.write_text(after, encoding="utf-8")
    return 0
