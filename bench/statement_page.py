"""One self-contained page of twenty statements, each shown as the compiler's stages make a kernel of it."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from inspect import getsource
from itertools import groupby
from pathlib import Path
from typing import Any

from insum_ops import explain
from insum_ops.compiler import Explanation
from insum_ops.compiler.planning.device import H200, described_as

from .case import OURS
from .statement_times import COMPILED, PROVIDERS, STORED, TORCH, stored_times
from .statements import EXAMPLES, Draw, Example, Given
from .tile_picture import ROLES, programs, roles_picture, tile_picture

__all__ = ["statement_page"]

HERE = Path(__file__).parent
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
TITLE = "From a statement to a kernel"
COMMAND = "python -m bench time-statements"


@dataclass(frozen=True)
class Shown:
    """A statement with all that the page says of it."""

    example: Example
    given: Given
    stages: Explanation
    times: Mapping[str, Mapping[str, Any]]  # by provider


def statement_page(target: Path, times: Path | None = None) -> Path:
    """Write the page and return its path.

    Plans are made for an H200 whatever machine this is. `times` is a file of `time_statements`; by default it is the
    first one that is stored, and without any the page says that nothing was measured.

    Raises:
        ResultsError: if `times` is no such file.
    """
    source = times or next(iter(sorted(STORED.glob("*.json"))), None)
    measured = None if source is None else stored_times(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_page([_shown(example, measured) for example in EXAMPLES], measured), encoding="utf-8")
    return target


def _shown(example: Example, measured: Mapping[str, Any] | None) -> Shown:
    given = example.make(Draw(is_blank=True))
    with described_as(H200):
        stages = explain(example.expr, size=given.size, **given.operands)
    rows = measured["rows"] if measured else ()
    return Shown(example, given, stages, {row["provider"]: row for row in rows if row["statement"] == example.name})


def _page(each: list[Shown], measured: Mapping[str, Any] | None) -> str:
    css, script = ((HERE / f"statement_page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>',
            f'<link rel="icon" href="data:,"/><title>insum_ops: {TITLE.lower()}</title>',
            f"<style>{css}</style></head><body>",
            '<a class="skip" href="#main">Skip to the statement</a>',
            f"<header><div><h1>{TITLE}</h1>",
            "<p>One line in, one fused GPU kernel out. Choose a statement and follow it through the compiler.</p>",
            '</div><button id="theme" type="button">Theme: automatic</button></header>',
            '<div class="columns">',
            *_menu(each),
            '<main id="main" tabindex="-1">',
            *(line for shown in each for line in _article(shown, measured)),
            "</main></div>",
            "<footer>Made from the compiler itself by <code>python -m bench statements</code>; ",
            f"plans are for an {H200.name}.</footer>",
            f"<script>{script}</script></body></html>",
            "",
        ]
    )


def _menu(each: list[Shown]) -> Iterator[str]:
    """A list of links beside the page, and one control for a narrow screen."""
    families = [(family, list(some)) for family, some in groupby(each, lambda shown: shown.example.family)]
    yield '<nav aria-label="Statements"><div class="pick"><label for="pick">Statement</label><select id="pick">'
    for family, some in families:
        yield f'<optgroup label="{escape(family)}">'
        yield from (f'<option value="{one.example.name}">{escape(one.example.title)}</option>' for one in some)
        yield "</optgroup>"
    yield '</select><button type="button" id="previous" aria-label="Previous statement">&larr;</button>'
    yield '<button type="button" id="next" aria-label="Next statement">&rarr;</button></div><div class="list">'
    for family, some in families:
        yield f"<h2>{escape(family)}</h2><ul>"
        yield from (f'<li><a href="#{one.example.name}">{escape(one.example.title)}</a></li>' for one in some)
        yield "</ul>"
    yield "</div></nav>"


def _article(shown: Shown, measured: Mapping[str, Any] | None) -> Iterator[str]:
    example, stages = shown.example, shown.stages
    sections = stages.sections
    roles = dict(stages.schedule.roles) if stages.schedule is not None else {}
    yield f'<article id="{example.name}"><h2>{escape(example.title)}</h2><p class="about">{escape(example.about)}</p>'
    yield from _stage(1, "Statement", "What is written, with the tensors that it names.")
    yield f"{_statement(sections['statement'], roles)}{_operands(shown)}</section>"
    if stages.rewritten is not None:
        yield from _stage(2, "Rewritten", "The sparse format is gone: its index tensors and its values took its place.")
        yield f"{_statement(sections['rewritten'], roles)}</section>"
    else:
        yield from _stage(2, "Rewritten", "No tensor here is a sparse format, so the statement stays as it is.")
        yield "</section>"
    yield from _stage(
        3, "FX program", "The meaning, as torch operations. A CPU runs this, and every kernel is tested against it."
    )
    yield f"{_code(sections['FX program'], 'FX program')}</section>"
    if stages.schedule is None or stages.config is None or stages.source is None:
        yield from _stage(4, "Schedule", f"There is no kernel: {stages.why_no_kernel}.")
        yield "</section>"
    else:
        yield from _stage(4, "Schedule", _schedule_words(shown))
        yield '<div class="pictures">'
        yield f"<figure>{roles_picture(stages.schedule, stages.config)}"
        yield "<figcaption>What each index is to a program.</figcaption></figure>"
        reads = " and, in another colour, what a turn of its loop reads" if stages.schedule.names("step") else ""
        yield f"<figure>{tile_picture(stages.schedule, stages.config)}"
        yield f"<figcaption>The tile that one program makes{reads}."
        yield f"</figcaption></figure></div>{_legend(roles)}</section>"
        lines = sections["Triton source"].count("\n") + 1
        yield from _stage(
            5,
            "Triton source",
            f"One kernel of {lines} lines, in the tiles that are ranked first; tuning on a GPU tries others.",
        )
        yield f"{_code(sections['Triton source'], 'Triton source', roles)}</section>"
    yield from _stage(6, "Measured", "Time on the device, of the same operands; shorter is better.")
    yield from _bars(shown, measured)
    yield "</section></article>"


def _stage(number: int, title: str, words: str) -> Iterator[str]:
    yield f'<section class="stage"><h3><span class="step" aria-hidden="true">{number}</span>{title}</h3>'
    yield f"<p>{escape(words)}</p>"


def _schedule_words(shown: Shown) -> str:
    schedule, config = shown.stages.schedule, shown.stages.config
    assert schedule is not None
    assert config is not None
    product = (
        "tl.dot, on tensor cores"
        if schedule.uses_dot
        else "multiply and add"
        if schedule.is_sum
        else "multiply and compare"
    )
    count = programs(schedule, config)
    stored = {
        "store": "each result is stored once",
        "store-once": "each result is stored once",
        "owner": "a program owns the rows that it adds up, so nothing is atomic",
        "store-or-atomic": "rows of one group are stored, others are added atomically",
        "atomic": "results are added to memory atomically",
        "on-chip": "the sums stay on the chip until they are complete",
    }
    scatter = stored.get(schedule.strategy, schedule.strategy)
    return (
        f"{count:,} programs of {config.num_warps} warps. Product: {product}. Scatter: {schedule.strategy}, {scatter}."
    )


def _operands(shown: Shown) -> str:
    """A line for each tensor or format: its name, its kind and its shape."""
    rows = []
    for name, operand in shown.given.operands.items():
        kind = type(operand).__name__ if hasattr(operand, "coords") else str(operand.dtype).removeprefix("torch.")
        shape = " x ".join(f"{extent:,}" for extent in operand.shape)
        rows.append(f"<tr><th scope='row'><code>{escape(name)}</code></th><td>{kind}</td><td>{shape}</td></tr>")
    head = "<tr><th scope='col'>tensor</th><th scope='col'>kind</th><th scope='col'>size</th></tr>"
    return f'<table class="operands">{head}{"".join(rows)}</table>'


def _legend(roles: Mapping[str, str]) -> str:
    kinds = [role for role in ROLES if role in roles.values()]
    items = "".join(f'<li><b class="role-{role}">{role}</b> {escape(ROLES[role])}</li>' for role in kinds)
    return f'<ul class="legend">{items}</ul>'


def _bars(shown: Shown, measured: Mapping[str, Any] | None) -> Iterator[str]:
    known = {name: row for name, row in shown.times.items() if "device_ms" in row}
    if measured is None or OURS not in known:
        yield f'<p class="none">Not measured. On a GPU: <code>{COMMAND}</code></p>'
        return
    slowest, ours = max(row["device_ms"] for row in known.values()), known[OURS]["device_ms"]
    functions = {TORCH: shown.example.eager or shown.example.plain, COMPILED: shown.example.plain}
    yield '<ul class="bars">'
    for provider in PROVIDERS:
        row = shown.times.get(provider)
        if row is None:
            continue
        kind = "ours" if provider == OURS else "peer"
        name = provider if provider == OURS else f"{provider}, <code>{functions[provider].__name__}</code>"
        if "device_ms" not in row:
            yield f'<li><span class="who">{name}</span><span class="what">failed: {escape(row["failure"])}</span></li>'
            continue
        ratio = "" if provider == OURS else f", {row['device_ms'] / ours:.2f}x ours"
        queued = ", as called: it can't be captured" if row.get("timing") == "queue" else ""
        share = max(100 * row["device_ms"] / slowest, 0.5)
        time = f"{_milliseconds(row['device_ms'])}{ratio}{queued}"
        yield f'<li><span class="who">{name}</span><span class="what">{time}</span>'
        yield f'<span class="bar {kind}" style="width:{share:.1f}%"></span></li>'
    yield "</ul>"
    machine = measured["machine"]
    versions = machine.get("packages", {})
    packages = "".join(f"{name} {versions[name]}, " for name in ("torch", "triton") if name in versions)
    told = f"{machine['gpu']}, {packages}{measured['date']}, commit {measured['commit']}"
    config, route = shown.times[OURS].get("config"), shown.times[OURS].get("route")
    tuned = f" Tuning chose {config} ({shown.times[OURS].get('scatter')})." if config else ""
    tuned = f" Timed against the kernel, {route} were faster, and that is what runs." if route else tuned
    yield f'<p class="soft">{escape(told)}. Median of CUDA-graph replays; results were checked against float64 '
    yield f"before.{escape(tuned)} By <code>{COMMAND}</code>.</p>"
    for function in dict.fromkeys(functions.values()):
        yield f"<details><summary><code>{function.__name__}</code>: the torch that was timed</summary>"
        yield f"{_code(getsource(function), function.__name__)}</details>"


def _milliseconds(value: float) -> str:
    return f"{value:.3f} ms" if value < 1 else f"{value:.2f} ms"


# Colours of code.


def _statement(text: str, roles: Mapping[str, str]) -> str:
    """A statement; each index in the colour of its role, and marked so that all its places can light up together."""

    def coloured(match: re.Match[str]) -> str:
        name, is_call = match[0], text[match.end() : match.end() + 1]
        if is_call == "(":
            return f'<span class="k">{name}</span>'
        if is_call == "[":
            return f'<span class="t">{name}</span>'
        return _index(name, roles)

    body = re.sub(r"[A-Za-z_]\w*", coloured, text)
    return f'<pre class="statement" tabindex="0" role="region" aria-label="Statement">{body}</pre>'


def _index(name: str, roles: Mapping[str, str]) -> str:
    role = f" role-{roles[name]}" if name in roles else ""
    return f'<span class="i{role}" data-index="{escape(name)}">{escape(name)}</span>'


def _code(text: str, label: str, roles: Mapping[str, str] | None = None) -> str:
    """Python with colours; an index of the schedule has that of its role wherever the source has `i_name`."""
    lines = text.strip("\n").splitlines()
    marks: list[list[tuple[int, int, str]]] = [[] for _ in lines]
    before = ""
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        kind = _kind(token, before, roles or {})
        if token.string.strip():
            before = token.string
        if kind and token.start[0] == token.end[0]:
            marks[token.start[0] - 1].append((token.start[1], token.end[1], kind))
    body = "\n".join(_marked(line, own) for line, own in zip(lines, marks))
    return f'<pre class="code" tabindex="0" role="region" aria-label="{escape(label)}">{body}</pre>'


def _kind(token: tokenize.TokenInfo, before: str, roles: Mapping[str, str]) -> str:
    if token.type == tokenize.COMMENT:
        return "c"
    if token.type == tokenize.STRING:
        return "s"
    if token.type == tokenize.NUMBER:
        return "n"
    if token.type != tokenize.NAME:
        return ""
    if keyword.iskeyword(token.string):
        return "k"
    index = token.string.removeprefix("i_")
    if index != token.string and index in roles:
        return f"i role-{roles[index]}"
    return "f" if before in ("def", ".") else ""


def _marked(line: str, marks: list[tuple[int, int, str]]) -> str:
    parts, at = [], 0
    for start, end, kind in marks:
        parts.append(escape(line[at:start]))
        name = line[start:end]
        index = f' data-index="{name.removeprefix("i_")}"' if kind.startswith("i ") else ""
        parts.append(f'<span class="{kind}"{index}>{escape(name)}</span>')
        at = end
    return "".join([*parts, escape(line[at:])])
