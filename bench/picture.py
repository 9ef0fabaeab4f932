"""README's picture: a statement, the kernel that it becomes, and a bar beside each peer, as SVG in light and dark."""

from __future__ import annotations

from html import escape

import torch

from insum_ops import explain
from insum_ops.compiler.planning.device import H200, described_as
from insum_ops.formats import GroupCOO

from .harness import geomean
from .headlines import group_of
from .results import ResultsError, Run

__all__ = ["PICTURES", "picture"]

STATEMENT = "C[m,n] += A[m,k] * B[k,n]"
STYLES = {
    "light": dict(text="#1f2328", dim="#59636e", panel="#f6f8fa", edge="#d1d9e0", ours="#00796b", peer="#b6bec7"),
    "dark": dict(text="#f0f6fc", dim="#9198a1", panel="#151b23", edge="#3d444d", ours="#26a69a", peer="#59636e"),
}
PICTURES = {"light": "docs/assets/statement.svg", "dark": "docs/assets/statement-dark.svg"}
WIDTH, HEIGHT, LINE, COLUMNS = 900, 282, 16, 55
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"


def kernel() -> tuple[str, list[str]]:
    """The statement over the format's tensors, and the loop of its kernel as a GPU runs it."""
    rows = torch.arange(256).repeat_interleave(8)
    A = GroupCOO.from_coo(
        torch.stack((rows, torch.arange(8).repeat(256) * 32)), torch.ones(2048), (256, 256), group_size=8
    )
    with described_as(H200):
        explanation = explain(STATEMENT, A=A, B=torch.ones(256, 128))
    if explanation.source is None:
        raise ResultsError(f"{STATEMENT} has no kernel to show: {explanation.why_no_kernel}")
    lines = [line[4:] for line in explanation.source.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("acc ="))
    return str(explanation.rewritten), [line for line in lines[first:] if line]


def picture(run: Run, style: str) -> str:
    """The SVG of one style."""
    colour = STYLES[style]
    rewritten, lines = kernel()

    def text(
        x: int, y: int, words: str, fill: str = "text", size: int = 12, font: str = MONO, weight: int = 400
    ) -> str:
        return (
            f'<text x="{x}" y="{y}" fill="{colour[fill]}" font-size="{size}" font-family="{font}" '
            f'font-weight="{weight}" xml:space="preserve">{escape(words)}</text>'
        )

    def panel(x: int, width: int, title: str) -> str:
        paint = f'fill="{colour["panel"]}" stroke="{colour["edge"]}"'
        box = f'<rect x="{x}" y="34" width="{width}" height="{HEIGHT - 44}" rx="6" {paint}/>'
        return text(x, 22, title, size=14, font=SANS, weight=600) + box

    def said(x: int, y: int, words: str) -> str:
        return text(x, y, words, "dim", 12, SANS)

    parts = [panel(8, 262, "You write one statement"), panel(286, 386, "It runs as one Triton kernel")]
    parts += [text(20, 60, "insum("), text(20, 76, f'  "{STATEMENT}",'), text(20, 92, "  A=A, B=B)")]
    parts += [said(20, 122, "A is sparse (GroupCOO), B is dense;"), said(20, 138, "k is summed over.")]
    parts += [
        said(20, 170, "The format of A turns it into"),
        *(text(20, 190 + 16 * n, t) for n, t in enumerate(_halves(rewritten))),
    ]
    parts += [said(20, 234, "gather B's rows, multiply,"), said(20, 250, "add up, store each row of C once.")]
    for number, line in enumerate(lines[: (HEIGHT - 50) // LINE]):
        shown = line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"
        parts.append(text(296, 54 + LINE * number, shown, size=11))
    parts += [panel(688, 204, "Time beside the peers"), *_bars(run, text, said, colour)]
    label = escape(f"{STATEMENT} as one generated Triton kernel, with its time beside other libraries'")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _halves(statement: str) -> tuple[str, str]:
    left, right = statement.split(" += ")
    return f"{left} +=", f"  {right}"


def _bars(run, text, said, colour) -> list[str]:  # type: ignore[no-untyped-def]
    times = {"insum_ops": 1.0}
    for name, peer in (("torch.sparse", "torch.sparse"), ("PyTorch Geometric", "PyG")):
        group = group_of(run, "unstructured_spmm", "float32, N = 128", peer)
        if group is None or not group.ratios("device"):
            raise ResultsError(f"the run has no device times of spmm beside {peer}, which the picture shows")
        times[name], cases = geomean(group.ratios("device")), len(group.pairs)
    longest, parts = max(times.values()), []
    for number, (name, time) in enumerate(times.items()):
        top = 62 + 50 * number
        fill = colour["ours" if name == "insum_ops" else "peer"]
        parts.append(text(700, top - 6, name, font=SANS, weight=600 if name == "insum_ops" else 400))
        parts.append(f'<rect x="700" y="{top}" width="{130 * time / longest:.1f}" height="18" rx="2" fill="{fill}"/>')
        parts.append(text(round(706 + 130 * time / longest), top + 14, f"{time:.2f}x", font=SANS))
    notes = (
        f"{cases} graphs, float32, N = 128",
        f"{run.machine.get('gpu')}; geometric mean",
        "of device times; less is better",
    )
    return parts + [said(700, 214 + 16 * number, words) for number, words in enumerate(notes)]
