"""One self-contained page of a run: figures, each with a link to its rows, and every row, the losing ones too."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape as escaped
from math import log
from pathlib import Path

from .bars import slug
from .case import OURS, is_ours, ours_beside
from .drawing import STYLES, Plot, png
from .glance import Group, Pair, every_pair, groups, pairs
from .harness import geomean
from .paper import REPORTED
from .plots import plots
from .results import TITLES, Row, Run, better

__all__ = ["page", "report"]

CSS = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
UNITS = {"us": ", in µs of the host", "MiB": ", in MiB", "s": ", in seconds"}  # of what was noted instead of timed
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def report(run: Run, folder: Path) -> Path:
    """Write the page and the plots into a folder; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {plot: {style: png(plot, style) for style in STYLES} for plot in plots(run)}
    for plot, images in drawn.items():
        (folder / f"{plot.name}.png").write_bytes(images["light"])
        (folder / f"{plot.name}-dark.png").write_bytes(images["dark"])
    path = folder / "report.html"
    path.write_text(page(run, drawn), encoding="utf-8")
    return path


def page(run: Run, drawn: dict[Plot, dict[str, bytes]]) -> str:
    """The whole page, with its images inside; it asks for nothing from anywhere."""
    body = [*_head(run), *_glance(run), *_losses(run)]
    body.append('<div class="all">')
    for experiment in run.experiments:
        body += _figures(run, {plot: images for plot, images in drawn.items() if plot.experiment == experiment})
    body += ["</div>", *_how(run)]
    for experiment in run.experiments:
        body += _rows(run, experiment)
    title = "insum_ops: benchmarks"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>',
            f'<link rel="icon" href="data:,"/><title>{title}</title><style>{CSS}</style></head><body>',
            *body,
            "</body></html>",
            "",
        ]
    )


def _head(run: Run) -> Iterator[str]:
    """What was measured, on what, and how it went, in numbers that can't be missed."""
    machine, known = run.machine, [pair for name in run.experiments for pair in every_pair(run, name)]
    packages = dict(machine.get("packages", {}))  # type: ignore[call-overload]
    place = machine.get("cpu") if machine.get("gpu", "none") == "none" else machine["gpu"]
    versions = "".join(f", {name} {packages[name]}" for name in ("torch", "triton") if name in packages)
    yield "<h1>insum_ops beside its peers</h1>"
    where = f"<b>{escape(str(place))}</b>{escape(f'{versions}, {run.date}')}"
    yield f'<p class="lead">{where}. Above 1 ours is faster.</p>'
    if not known:
        return
    yield from _overview(run)
    yield f"<p>{_told(run, known)}</p>"
    yield '<ul class="verdict">'
    for kind, words in (("device", "by device time"), ("called", "as called, with Python")):
        ratios = _ratios(known, kind)
        if ratios:
            wins = sum(ratio >= 1 for ratio in ratios)
            yield f"<li><b>{wins} of {len(ratios)}</b>are no slower {words}</li>"
    losing = len(_behind(run))
    yield f'<li><b{_mark(0 if losing else 1)}>{losing}</b><a href="#losses">cases where ours is behind</a></li>'
    yield f'<li><b>{len(run.rows)}</b><a href="#rows">rows; results checked, then timed</a></li></ul>'


def _ratios(known: Sequence[Pair], kind: str) -> list[float]:
    """Ours itself over every peer, on one basis, where times were compared."""
    timed = (pair for pair in known if pair.is_timed and pair.ours.provider == OURS)
    return [ratio for ratio in (getattr(pair, kind) for pair in timed) if ratio is not None]


def _told(run: Run, known: Sequence[Pair]) -> str:
    """How it went on the whole, where ours is furthest ahead and where furthest behind, in sentences."""
    kind, words = ("device", "by time on the GPU") if _ratios(known, "device") else ("called", "by the time of a call")
    ratios = _ratios(known, kind)
    if not ratios:
        return "No times were compared."
    share = 100 * sum(ratio >= 1 for ratio in ratios) / len(ratios)
    text = (
        f"This run compares ours with other implementations of the same operators {len(ratios)} times {words}: ours is "
        f"no slower in {share:.0f} % of them, and {_times(geomean(ratios))} as fast in the geometric mean."
    )
    worst = _behind(run)[:1]
    for pair in worst:
        title = _words(TITLES.get(pair.ours.experiment, pair.ours.experiment))
        text += (
            f' It is furthest behind {escape(pair.peer.provider)} in <a href="#row-{pair.peer.number}">'
            f"{escape(pair.ours.case)}</a> ({title}): {_times(pair.worst)}."
        )
    return text


# what the first picture shows: whole applications, no conversions, ablations or costs
HEADLINES = (
    *("structured_spmm", "unstructured_spmm", "linear", "convolution", "tensor_product", "equivariant"),
    *("unet", "mixture_of_experts", "graph_attention"),
)


def _overview(run: Run) -> Iterator[str]:
    """A bar for each application: the geometric mean of its speed-ups over the peer that comes closest."""
    closest = {name: found for name in HEADLINES if (found := _closest(run, name)) is not None}
    if not closest:
        return
    low = min(0.5, *(ratio for _, ratio in closest.values()))
    high = max(2.0, *(ratio for _, ratio in closest.values()))
    one = 100 * log(1 / low) / log(high / low)
    lines = [f"{TITLES[name].replace('`', '')}: {ratio:.2f} over {peer}" for name, (peer, ratio) in closest.items()]
    yield f'<div class="overview" role="img" aria-label="{escape("Speed-up. " + "; ".join(lines))}">'
    for name, (peer, ratio) in closest.items():
        end = 100 * log(ratio / low) / log(high / low)
        left, width = min(one, end), max(abs(end - one), 0.4)
        kind = "behind" if ratio < 1 else "ahead"
        yield f'<div class="name">{_words(TITLES[name])} <span class="soft">over {escape(peer)}</span></div>'
        yield f'<div class="track"><i style="left:{one:.1f}%"></i>'
        yield f'<b class="{kind}" style="left:{left:.1f}%;width:{width:.1f}%"></b></div>'
        yield f'<div class="ratio"><b{_mark(ratio)}>{ratio:.2f}x</b></div>'
    yield '</div><p class="soft">Times faster than the peer that comes closest, geometric mean over its cases; '
    yield "the thin line is 1, the scale is logarithmic.</p>"


def _closest(run: Run, experiment: str) -> tuple[str, float] | None:
    """The peer over which ours gains least, of those with half as many cases as any, and how much that is."""
    found: dict[str, list[float]] = {}
    for pair in pairs(run, experiment):
        ratio = pair.device if pair.device is not None else pair.called
        if pair.is_timed and ratio is not None:
            found.setdefault(pair.peer.provider, []).append(ratio)
    most = max(map(len, found.values()), default=0)
    means = {peer: geomean(ratios) for peer, ratios in found.items() if 2 * len(ratios) >= most}
    return min(means.items(), key=lambda item: item[1]) if means else None


def _glance(run: Run) -> Iterator[str]:
    """Ours beside peers and the paper, a line for each series of an experiment and peer."""
    found = {experiment: groups(run, experiment) for experiment in run.experiments}
    kinds = [kind for kind in ("device", "called") if any(g.ratios(kind) for some in found.values() for g in some)]
    heads = {"device": "device", "called": "as called"}
    yield '<h2 id="glance">At a glance</h2><table class="glance"><tr><th>ours over</th>'
    yield "".join(f'<th class="number">{heads[kind]}</th>' for kind in kinds) + "</tr>"
    for experiment, some in found.items():
        costs = run.of("cost") if experiment == "cost" else ()
        if some or costs:
            link = f'<a href="#{_anchor(run, experiment)}">{_words(TITLES.get(experiment, experiment))}</a>'
            yield f'<tr><th colspan="{1 + len(kinds)}">{link}</th></tr>'
        for group in some:
            name = ", ".join(filter(None, (group.series, group.variant)))
            what = f"<b>{escape(group.peer)}</b>{', ' * bool(name)}{escape(name)}"
            unit = UNITS.get(group.pairs[0].ours.unit, "")
            what += f"<small>{len(group.pairs)} case{'s' * (len(group.pairs) > 1)}{unit}</small>{_paper(group.paper)}"
            yield f"<tr><td>{what}</td>{''.join(_summary(group, kind) for kind in kinds)}</tr>"
        for row in costs:
            what = f"{escape(row.case)}{_paper(REPORTED.get(('cost', '', row.case), ''))}"
            value = f'<td class="number" colspan="{max(len(kinds), 1)}">{row.value:.3g} {escape(row.unit)}</td>'
            yield f"<tr><td>{what}</td>{value}</tr>"
    yield "</table>"


def _paper(reported: str) -> str:
    return f"<small>the paper, on an RTX 3090: {escape(reported)}</small>" if reported else ""


def _summary(group: Group, kind: str) -> str:
    """The mean of a group, and beneath it the least."""
    ratios = group.ratios(kind)
    if not ratios:
        return "<td></td>"
    cell = _times(geomean(ratios))
    if len(ratios) > 1:
        least = min(ratios)
        cell += f"<small{_mark(least)}>least {least:.2f}x</small>"
    return f'<td class="number">{cell}</td>'


SHOWN = 8  # of what ours loses; the rest is a click away


def _losses(run: Run) -> Iterator[str]:
    """Each case in which a peer is faster, or smaller, the worst first."""
    losing = _behind(run)
    yield '<section id="losses"><h2>Where ours is behind</h2>'
    if not losing:
        yield "<p>Nowhere, in what this run compares.</p></section>"
        return
    yield _losing(losing[:SHOWN])
    if losing[SHOWN:]:
        yield f"<details><summary>{len(losing) - SHOWN} more</summary>{_losing(losing[SHOWN:])}</details>"
    yield "</section>"


def _behind(run: Run) -> list[Pair]:
    """Where a peer is ahead of ours or of a variant of ours, the worst first."""
    known = (pair for experiment in run.experiments for pair in every_pair(run, experiment))
    return sorted((pair for pair in known if pair.worst < 1), key=lambda pair: pair.worst)


def _losing(some: Sequence[Pair]) -> str:
    lines = [
        '<table class="glance"><tr><th>case</th><th class="number">device</th><th class="number">as called</th></tr>'
    ]
    for pair in some:
        title = _words(TITLES.get(pair.ours.experiment, pair.ours.experiment))
        what = f'<a href="#row-{pair.peer.number}">{escape(pair.ours.case)}</a>'
        variant = "" if pair.ours.provider == OURS else f"{escape(pair.ours.provider)} "
        what += f"<small>{title}, {variant}over {escape(pair.peer.provider)}</small>"
        ratios = "".join(
            f'<td class="number">{"" if ratio is None else _times(ratio)}</td>' for ratio in (pair.device, pair.called)
        )
        lines.append(f"<tr><td>{what}</td>{ratios}</tr>")
    return "".join([*lines, "</table>"])


def _figures(run: Run, drawn: dict[Plot, dict[str, bytes]]) -> Iterator[str]:
    """The figures of one experiment, each with links to the rows behind it."""
    if not drawn:
        return
    experiment = next(iter(drawn)).experiment
    title = TITLES.get(experiment, experiment)
    many = ' class="many"' * (len(drawn) > 1)
    yield f'<section{many}><h2>{_words(title)}</h2><div class="figures">'
    for plot, images in drawn.items():
        light, dark = (f"data:image/png;base64,{b64encode(images[style]).decode()}" for style in ("light", "dark"))
        own = plot.title.removeprefix(title.replace("`", "")).removeprefix(", ")
        yield f'<figure id="{plot.name}">{f"<h3>{escape(own)}</h3>" * bool(own)}<picture>'
        yield f'<source media="(prefers-color-scheme: dark)" srcset="{dark}"/>'
        yield f'<img alt="{escape(f"{plot.title}. {plot.caption}")}" src="{light}"/></picture>'
        links = [f'<a href="#{_anchor(run, plot.experiment)}">The rows behind it.</a>']
        links += [f'<a href="#{_anchor(run, name)}">{_words(TITLES.get(name, name))}.</a>' for name in plot.others]
        yield f"<figcaption>{escape(plot.caption)} {' '.join(links)}</figcaption></figure>"
    yield "</div></section>"


def _how(run: Run) -> Iterator[str]:
    """How to read the rows, and all that they depend on."""
    machine = run.machine
    packages = dict(machine.get("packages", {}))  # type: ignore[call-overload]
    facts = [f"GPU {machine.get('gpu')}", f"driver {machine.get('driver')}", f"CPU {machine.get('cpu')}"]
    facts += [f"{name} {version}" for name, version in packages.items()]
    facts += [f"Python {machine.get('python')}", run.date, f"commit {', '.join(run.commits)}"]
    yield '<section id="rows"><h2>Every row</h2>'
    yield (
        "<p>Where a row has an error, its result was checked against float64 before it was timed; conversions, costs "
        "before the first result, host times, memory and roofs were measured without a check. Tuning and warm-up are "
        "not in the times. On "
        "a GPU times are of the device, by CUDA-graph replay; <i>queued</i> is one eager call among several, which is "
        "what <i>as called</i> compares, <i>wall</i> one alone and its end, <i>cold</i> starts with an empty L2. Where "
        "a peer can't be captured, queued calls of both are compared. What is red is slower than the peer.</p>"
    )
    known = [pair.peer.provider for name in run.experiments for pair in every_pair(run, name)]
    if known:
        yield f'<p class="soft">Compared with: {escape("; ".join(dict.fromkeys(known)))}.</p>'
    yield f'<p class="soft">{escape(" · ".join(facts))}</p></section>'


def _rows(run: Run, experiment: str) -> Iterator[str]:
    yield f'<section id="{_anchor(run, experiment)}"><h2>{_words(TITLES.get(experiment, experiment))}: rows</h2>'
    yield '<div class="wide"><table><tr><th>case</th><th>provider</th><th>result</th><th>ours is better</th>'
    columns = ("queued, ms", "wall, ms", "cold, ms", "peak, MiB", "error", "timed by", "facts")
    yield "".join(f"<th>{name}</th>" for name in columns) + "</tr>"
    for providers in run.cases(experiment):
        case, *_ = (row.case for row in providers.values())
        for row in run.of(experiment):
            if row.case == case:  # all of them: a provider may have measured a case twice
                yield _row(row, providers.get(ours_beside(row.provider)))
    yield "</table></div></section>"


def _row(row: Row, ours: Row | None) -> str:
    is_peer = ours is not None and not is_ours(row.provider) and row.is_comparable(ours)
    ratio = _ratio(better(ours, row)) if is_peer and ours is not None else "<td></td>"
    result = f"<td>{row.value:.4g} {escape(row.unit)}</td>"
    if not row.is_sound:
        result = f'<td class="loses">{row.value:.4g} {escape(row.unit)}, not compared</td>'
    cells = f"<td>{escape(row.case)}</td><td>{escape(row.provider)}</td>{result}{ratio}"
    times = (row.queued_ms, row.wall_ms, row.cold_ms, row.peak_mib)
    cells += "".join(f"<td>{_number(time)}</td>" for time in times) + f"<td>{_number(row.error, '.1e')}</td>"
    facts = "; ".join(f"{name}: {value}" for name, value in row.facts.items() if name != "series")
    return f'<tr id="row-{row.number}">{cells}<td>{escape(row.timing)}</td><td>{escape(facts)}</td></tr>'


def _anchor(run: Run, experiment: str) -> str:
    """Where an experiment's rows are; a name that is no word gets a number, for another may have its letters."""
    if re.fullmatch(r"\w+", experiment, re.ASCII):
        return f"rows-{experiment}"
    return f"rows-{slug(experiment)}-{run.experiments.index(experiment)}"


def escape(text: str) -> str:
    """Text for the page, with a sign for what no page may hold."""
    return escaped(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", text))


def _ratio(value: float) -> str:
    return f"<td{_mark(value)}>{value:.2f}x</td>"


def _times(value: float) -> str:
    return f"<b{_mark(value)}>{value:.2f}x</b>"


def _mark(value: float) -> str:
    return ' class="loses"' if value < 1 else ""


def _words(text: str) -> str:
    """Text for the page, code between backquotes."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)
