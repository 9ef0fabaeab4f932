"""One self-contained page of a run: figures, each with a link to its rows, and every row, the losing ones too."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from html import escape
from pathlib import Path

from .case import OURS, is_ours
from .harness import geomean
from .plots import STYLES, Plot, plots, png
from .results import TITLES, Row, Run, better

__all__ = ["page", "report"]

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1b1b; --soft: #666; --line: #d9d9d9;
  --loses: #b3261e; --link: #0b57d0 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e6e6e6; --soft: #a0a4ab; --line: #3a3d44; --loses: #ff8a80; --link: #8ab4f8 } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem } a { color: var(--link) }
figure { margin: 1.5rem 0 } img { display: block; width: 100%; max-width: 46rem; height: auto }
figcaption, .soft { color: var(--soft); font-size: .9rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
th:nth-child(10), td:nth-child(10) { text-align: left }
.loses { color: var(--loses) } tr:target, section:target h2 { outline: 2px solid var(--link) }
"""
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
    body = [*_head(run), *_summary(run)]
    for plot, images in drawn.items():
        body += _figure(plot, images)
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
    machine = run.machine
    packages = dict(machine.get("packages", {}))  # type: ignore[call-overload]
    facts = [f"GPU {machine.get('gpu')}", f"driver {machine.get('driver')}", f"CPU {machine.get('cpu')}"]
    facts += [f"{name} {version}" for name, version in packages.items()]
    facts += [f"Python {machine.get('python')}", run.date, f"commit {', '.join(run.commits)}"]
    yield "<h1>insum_ops beside its peers</h1>"
    yield f'<p class="soft">{escape(" · ".join(facts))}</p>'
    yield (
        '<p class="soft">Every result was checked against float64 before it was timed; tuning and warm-up are not in '
        "the times. On a GPU times are of the device, by CUDA-graph replay; <i>queued</i> is one eager call among "
        "several, <i>wall</i> one alone and its end, <i>cold</i> starts with an empty L2. Where a peer can't be "
        "captured, queued calls of both are compared. Rows in red are slower than the peer.</p>"
    )


def _summary(run: Run) -> Iterator[str]:
    yield '<h2>At a glance</h2><div class="wide"><table>'
    yield "<tr><th>experiment</th><th>against</th><th>cases</th><th>geomean</th><th>least</th><th>most</th></tr>"
    for experiment in run.experiments:
        found: dict[str, list[float]] = {}
        for _, peer, ratio in run.ratios(experiment):
            found.setdefault(peer.provider, []).append(ratio)
        for peer_name, ratios in found.items():
            name = escape(TITLES.get(experiment, experiment))
            cells = "".join(_ratio(value) for value in (geomean(ratios), min(ratios), max(ratios)))
            link = f'<a href="#rows-{experiment}">{name}</a>'
            yield f"<tr><td>{link}</td><td>{escape(peer_name)}</td><td>{len(ratios)}</td>{cells}</tr>"
    yield "</table></div>"


def _figure(plot: Plot, images: dict[str, bytes]) -> Iterator[str]:
    light, dark = (f"data:image/png;base64,{b64encode(images[style]).decode()}" for style in ("light", "dark"))
    yield f'<figure id="{plot.name}"><h2>{escape(plot.title)}</h2><picture>'
    yield f'<source media="(prefers-color-scheme: dark)" srcset="{dark}"/>'
    yield f'<img alt="{escape(plot.caption)}" src="{light}"/></picture>'
    link = f'<a href="#rows-{plot.experiment}">The rows behind it.</a>'
    yield f"<figcaption>{escape(plot.caption)} {link}</figcaption></figure>"


def _rows(run: Run, experiment: str) -> Iterator[str]:
    yield f'<section id="rows-{experiment}"><h2>{escape(TITLES.get(experiment, experiment))}: rows</h2>'
    yield '<div class="wide"><table><tr><th>case</th><th>provider</th><th>result</th><th>ours is better</th>'
    columns = ("queued, ms", "wall, ms", "cold, ms", "peak, MiB", "error", "timed by", "facts")
    yield "".join(f"<th>{name}</th>" for name in columns) + "</tr>"
    for providers in run.cases(experiment):
        ours = providers.get(OURS)
        for row in providers.values():
            yield _row(row, ours)
    yield "</table></div></section>"


def _row(row: Row, ours: Row | None) -> str:
    is_peer = ours is not None and not is_ours(row.provider) and ours.unit == row.unit and ours.value > 0
    ratio = _ratio(better(ours, row)) if is_peer and ours is not None else "<td></td>"
    cells = f"<td>{escape(row.case)}</td><td>{escape(row.provider)}</td><td>{row.value:.4g} {row.unit}</td>{ratio}"
    times = (row.queued_ms, row.wall_ms, row.cold_ms, row.peak_mib)
    cells += "".join(f"<td>{_number(time)}</td>" for time in times) + f"<td>{_number(row.error, '.1e')}</td>"
    facts = "; ".join(f"{name}: {value}" for name, value in row.facts.items() if name != "series")
    return f'<tr id="row-{row.number}">{cells}<td>{row.timing}</td><td>{escape(facts)}</td></tr>'


def _ratio(value: float) -> str:
    return f"<td{' class=' + chr(34) + 'loses' + chr(34) if value < 1 else ''}>{value:.2f}x</td>"


def _number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)
