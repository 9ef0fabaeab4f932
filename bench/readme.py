"""Figures of README and the documentation, written from a results file: marked blocks, so that they can't disagree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from configparser import ConfigParser
from math import ceil, floor
from pathlib import Path

from .case import OURS
from .generate import GENERATED, SMALL
from .glance import Group, Pair, groups
from .harness import geomean
from .headlines import headlines
from .paper import FLEX_GEMM_MS, REPORTED
from .picture import PICTURES, picture
from .results import TITLES, ResultsError, Run, crossover
from .suite_text import suite_lines, suite_rows
from .suite_times import EXPERIMENT as SUITE

__all__ = ["BEGIN", "CURVES", "END", "TARGETS", "block", "pictures_block", "rewrite", "write", "write_pictures"]

# written without a library: README has one where it is the strongest peer, the report has them all
PLAIN = (
    "torch, one matmul a tap",
    "torch, one matmul an expert",
    "torch, gather and index_add",
    "gather, multiply, scatter",
)
NAMES = {"PyG": "PyTorch Geometric"}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TARGETS = (Path("README.md"), Path("docs/measured/index.md"))  # the files that have such blocks
SKIPPED = (
    "roof",
    "group_size",
    "conversion",
    "cost",
    "host",
    "memory",
    SUITE,
)  # no speed-up over a peer, or told apart
EDGES = ("32x32", "64x64", "128x128")
DENSITIES = (1.0, 0.5, 0.3, 0.1, 0.05, 0.01)
# the series of a curve and its points, as the cases measure them on a GPU: what a run lacks of it is said
CURVES = {
    "structured_spmm": (EDGES, (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95)),
    "linear": ((*EDGES, *(f"{edge}, bfloat16" for edge in EDGES)), DENSITIES),
    "linear_training": ((*EDGES, *(f"{edge}, bfloat16" for edge in EDGES)), DENSITIES),
}
ON_CURVES = ("dense", "TorchBSR")  # the peers of every point
INPUTS = ("unstructured_spmm", "conversion", "convolution", "kernel_map")  # experiments whose cases begin with a name
READ = {"NVIDIA H200": 4.3}  # TB/s that reading alone reaches


def rewrite(text: str, run: Run, source: str) -> str:
    """The text with what is between each pair of marks made anew, which are named as the makers are here."""
    makers: dict[str, Callable[[], str]] = {
        "measured": lambda: block(run, source),
        "headlines": lambda: headlines(run, source),
        "picture": pictures_block,
        "suite": lambda: suite_lines(run),
        "suite, all": lambda: suite_rows(run),
    }
    found = 0
    for name, make in makers.items():
        begin, end = (mark.replace("measured", name) for mark in (BEGIN, END))
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        blocks = len(pattern.findall(text))
        if blocks > 1:
            raise ResultsError(f"the text has {blocks} blocks between {begin} and {end}, and may have one")
        if blocks:
            before, after = pattern.split(text)
            text, found = f"{before}{begin}\n{make()}\n{end}{after}", found + 1
    if not found:
        raise ResultsError(f"the text needs one block between {BEGIN} and {END}, each on a line of its own")
    return text


def pictures_block() -> str:
    """README's picture in light and dark, by the address that setup.cfg's `[readme] images` gives: relative without."""
    settings = ConfigParser()
    settings.read("setup.cfg")
    address = settings.get("readme", "images", fallback="").strip()
    light, dark = (f"{address}{path}" for path in PICTURES.values())
    words = "A sparse matrix product as a statement, the Triton kernel it becomes, and its time beside other libraries'"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img width="900" alt="{words}" src="{light}"></picture>'
    )


def block(run: Run, source: str) -> str:
    """The machine, a table of ours, the paper and peers, what comes before the first result, and where others win."""
    rows = [*_speedups(run), *_noted(run)]
    table = ["| what | against | device | as called | the paper, on an RTX 3090 |", "|---|---|---|---|---|"]
    table += [f"| {' | '.join(row)} |" for row in rows]
    parts = [_headline(run, source), *_lacking(run), "\n".join(table), *_commits(run), *_losses(run), *_floor(run)]
    return "\n\n".join(parts)


def _headline(run: Run, source: str) -> str:
    machine, packages = run.machine, dict(run.machine.get("packages", {}))  # type: ignore[call-overload]
    gpu = str(machine.get("gpu", "none"))
    place = f"{gpu}, driver {machine.get('driver')}" if gpu != "none" else f"{machine.get('cpu')}, no GPU"
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages)
    known = tuple(run.commits) or ("unknown",)
    commits = f"commit {_described(known[0])}" if len(known) == 1 else "the commits that are listed below the table"
    times = "Wall times" if gpu == "none" else "Times"
    return (
        f"Measured on {place}, {versions}, {run.date}, at {commits}. {times} are medians. {_commands(run)} "
        f"`python -m bench readme {source}` writes this block."
    )


def _described(commit: str) -> str:
    """A commit in words: a run may have had changes that no commit holds."""
    return commit.replace(", changed", " with uncommitted changes")


def _commands(run: Run) -> str:
    """What made the rows: inputs that are not generated come from a folder, compiled e3nn has to be asked for."""
    generated = {*GENERATED, *SMALL, "generated-room", "generated-scan"}
    named = {row.case.split(", ")[0] for experiment in INPUTS for row in run.of(experiment)}
    words = ["INSUM_DATA=folder"] if named - generated else []
    words += ["INSUM_BENCH_COMPILED=1"] if any(row.provider == "e3nn compiled" for row in run.rows) else []
    made = f"`{' '.join([*words, 'make bench'])}` measures them"
    made += "; the folder holds the graphs and clouds that the report names" if named - generated else ""
    return made + (". `python -m bench merge` joins runs." if len(run.commits) > 1 else ".")


def _lacking(run: Run) -> list[str]:
    """The points of curves that this run has not, where it has others of the experiment."""
    parts = []
    for experiment in run.experiments if run.machine.get("gpu", "none") != "none" else ():
        if experiment not in CURVES:
            continue
        every, points = CURVES[experiment]
        pairs = [pair for group in groups(run, experiment) if group.peer == ON_CURVES[0] for pair in group.pairs]
        for series in every:
            lacks = _without(points, [pair.ours.x for pair in pairs if pair.ours.series == series])
            if lacks:
                where = "everything" if len(lacks) == len(points) else ", ".join(f"{x:.0%}" for x in lacks)
                parts.append(f"{TITLES[experiment]}, {series}: {where}")
    return [f"**Not measured yet**, so that their series are shorter: {'; '.join(parts)}."] if parts else []


def _without(points: Sequence[float], known: Sequence[float | None]) -> list[float]:
    return [x for x in points if x not in known]


def _commits(run: Run) -> list[str]:
    """Where several commits were measured, what was at each, the latest first."""
    if len(run.commits) == 1:
        return []
    parts = (
        f"{_described(commit)}: {' · '.join(TITLES.get(name, name) for name in experiments)}"
        for commit, experiments in reversed(run.commits.items())
    )
    return [f"Measured at {'; '.join(parts)}. A case and its peers are of one run."]


Points = list[tuple[float | None, float]]  # where a case lies on its experiment's axis, and its speed-up


def _speedups(run: Run) -> Iterator[tuple[str, str, str, str, str]]:
    is_gpu = run.machine.get("gpu", "none") != "none"
    for experiment in run.experiments:
        if experiment in SKIPPED:
            continue
        found = groups(run, experiment)
        for group in found:
            if group.peer in PLAIN and not _is_strongest(group, found):
                continue
            title = ", ".join(filter(None, (TITLES.get(experiment, experiment), group.series, group.variant)))
            device: Points = [(pair.ours.x, pair.device) for pair in group.pairs if pair.device is not None]
            called: Points = [(pair.ours.x, pair.called) for pair in group.pairs if pair.called is not None]
            points = CURVES[experiment][1] if is_gpu and experiment in CURVES and group.peer in ON_CURVES else ()
            cells = _summary(device, group.peer, points), _summary(called, group.peer, points)
            yield title, NAMES.get(group.peer, group.peer), *cells, group.paper
        yield from _elsewhere(run, experiment)


def _is_strongest(plain: Group, found: Sequence[Group]) -> bool:
    """Whether no library's is as fast, on the cases that both have."""
    beside = [
        group
        for group in found
        if (group.series, group.variant) == (plain.series, plain.variant) and group.peer not in PLAIN
    ]
    return all(_over(plain, group) < 1 for group in beside)


def _over(group: Group, other: Group) -> float:
    """How many times as large the ratios of a group are as another's, on the cases of both; 1 where there are none."""
    cases = {pair.ours.case: pair for pair in other.pairs}
    shared = [(pair, cases[pair.ours.case]) for pair in group.pairs if pair.ours.case in cases]
    ratios = [_ratio(mine, theirs) for mine, theirs in shared]
    return geomean(ratios) if ratios else 1.0


def _ratio(mine: Pair, theirs: Pair) -> float:
    if mine.device is not None and theirs.device is not None:
        return mine.device / theirs.device
    return (mine.called or mine.worst) / (theirs.called or theirs.worst)


def _elsewhere(run: Run, experiment: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Over times of another run, by device time: what has no package to run here."""
    rows = [row for row in run.of(experiment) if row.provider == OURS and FLEX_GEMM_MS in row.facts]
    points: Points = [(None, float(str(row.facts[FLEX_GEMM_MS])) / row.value) for row in rows]
    if points:
        title = ", ".join(filter(None, (TITLES.get(experiment, experiment), rows[0].series)))
        yield title, "FlexGEMM, in another run", _summary(points, "", ()), "", ""


def _summary(points: Points, peer: str, every: Sequence[float]) -> str:
    """In words; `every` is where a curve should have points."""
    lacks = _without(every, [x for x, _ in points]) if points else []
    rest = f"; {len(lacks)} of {len(every)} not measured" if lacks else ""
    ratios = [ratio for _, ratio in points]
    if len(ratios) < 2:
        at = f" at {points[0][0]:.0%}" if lacks and points[0][0] is not None else ""
        return f"{ratios[0]:.2f}x{at}{rest}" if ratios else ""
    curve = sorted((x, ratio) for x, ratio in points if x is not None)
    if peer == "dense" and len(curve) == len(points):  # against sparsity or density
        ends = f"{curve[0][1]:.2f}x at {curve[0][0]:.0%} to {curve[-1][1]:.2f}x at {curve[-1][0]:.0%}"
        if curve[0][1] > curve[-1][1]:
            pays = crossover([(-x, ratio) for x, ratio in curve])
            return f"{ends}; {'never pays' if pays is None else f'pays up to {floor(-_percent(pays))}%'}{rest}"
        pays = crossover(curve)
        return f"{ends}; {'never pays' if pays is None else f'pays from {ceil(_percent(pays))}% on'}{rest}"
    return f"{geomean(ratios):.2f}x geomean, least {min(ratios):.2f}x, of {len(ratios)}{rest}"


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


def _losses(run: Run) -> list[str]:
    """A table of the cases in which ours is the slower, by device time or as called."""
    rows = []
    for experiment in run.experiments:
        for group in groups(run, experiment) if experiment != SUITE else ():
            behind = [pair for pair in group.pairs if pair.is_timed and round(pair.worst, 2) < 1]
            if behind:
                cells = (_least(group, kind) for kind in ("device", "called"))
                rows.append((_which(group, behind), NAMES.get(group.peer, group.peer), *cells))
    if not rows:
        return []
    table = ["| where others win | against | device | as called |", "|---|---|---|---|"]
    return ["\n".join([*table, *(f"| {' | '.join(row)} |" for row in rows)])]


def _which(group: Group, behind: Sequence[Pair]) -> str:
    title = ", ".join(filter(None, (TITLES.get(group.experiment, group.experiment), group.variant)))
    if len(behind) == len(group.pairs) > 1:
        return ", ".join(filter(None, (title, group.series, "every case")))
    return f"{title}: {'; '.join(pair.ours.case for pair in behind)}"


def _least(group: Group, kind: str) -> str:
    """The ratios below 1, or, where all are above, what they are."""
    ratios = sorted(group.ratios(kind))
    below = [ratio for ratio in ratios if round(ratio, 2) < 1]
    if not ratios:
        return ""
    shown = below or ratios
    span = f"{shown[0]:.2f}x" if len(shown) == 1 else f"{shown[0]:.2f}x to {shown[-1]:.2f}x"
    return f"{span}, {len(below)} of {len(ratios)}" if below else f"none: {span}"


def _floor(run: Run) -> list[str]:
    """How near the products with a weight for each sample come to what reading the weights takes."""
    speed = READ.get(str(run.machine.get("gpu")))
    ours = {row.case: row for row in run.of("tensor_product") if row.provider == f"{OURS} tf32"}
    compiled = [row for row in run.of("tensor_product") if row.provider == "e3nn compiled" and row.case in ours]
    wide = [row for case, row in ours.items() if case.endswith(", 64 channels")]
    if speed is None or not compiled or not wide:
        return []
    least = lambda row: row.traffic / speed / 1e9  # ms
    shares = " / ".join(f"{least(row) / row.value:.0%}" for row in wide)
    best = geomean([row.value / least(ours[row.case]) for row in compiled])
    now = geomean([row.value / ours[row.case].value for row in compiled])
    where = " / ".join(row.case.split(",")[0] for row in wide)
    return [
        f"Weights of each sample are read once. In tf32 at {speed} TB/s the memory alone would take {shares} of the "
        f"device's time at {where} and 64 channels. Were every row at that floor, tf32 would be {best:.1f}x as fast as "
        f"compiled e3nn on the device; it is {now:.1f}x."
    ]


def write(results: Path, target: Path, run: Run, is_check: bool) -> int:
    """Rewrite a file, or say whether it agrees already."""
    before = target.read_text(encoding="utf-8")
    after = rewrite(before, run, results.as_posix())
    if is_check:
        print(f"{target} {'agrees' if before == after else 'disagrees'} with {results}")
        return 0 if before == after else 1
    target.write_text(after, encoding="utf-8")
    return 0


def write_pictures(results: Path, run: Run, is_check: bool) -> int:
    """Draw README's picture in both styles, or say whether the files agree already."""
    wrong = 0
    for style, name in PICTURES.items():
        path, drawn = Path(name), picture(run, style)
        if not is_check:
            path.write_text(drawn, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != drawn:
            print(f"{path} disagrees with {results}")
            wrong = 1
    return wrong
