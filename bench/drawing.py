"""One figure as an image, light or dark: its size, its letters, its colours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

__all__ = [
    "LEGEND_LINE",
    "LOSES",
    "SMALL",
    "STYLES",
    "TALLEST",
    "WIDTH",
    "Plot",
    "colour",
    "decades",
    "literal",
    "logarithmic",
    "marker",
    "one",
    "png",
]

WIDTH = 3.6  # inches: letters of SMALL points are 11 pixels high in 357, and a page narrower than that scrolls a plot
TALLEST = 6.0  # inches: what a screen shows at once, or little more
LEGEND_LINE = 0.16  # inches
DPI = 180
COLOURS_KEPT = 64  # of an image
SMALL = 8.0
# Okabe and Ito's colours, which colour-blind readers tell apart; ours is always the first
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999", "#f0e442")
MARKERS = ("o", "^", "s")  # one for each round of the colours
STYLES = {"light": ("#ffffff", "#1b1b1b", "#d9d9d9"), "dark": ("#16181c", "#e6e6e6", "#3a3d44")}
LOSES = "#e5484d"  # red enough on either paper


@dataclass(frozen=True)
class Plot:
    """One figure, the experiment whose rows it shows, and what draws it."""

    name: str
    experiment: str
    title: str
    caption: str
    height: float
    draw: Callable[[Figure], None]
    others: tuple[str, ...] = ()  # further experiments whose rows it shows


def png(plot: Plot, style: str) -> bytes:
    """The plot as an image, in a light or a dark style."""
    paper, ink, grid = STYLES[style]
    settings: dict[Any, Any] = {
        "font.size": SMALL,
        "text.color": ink,
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": grid,
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "legend.frameon": False,
        "legend.fontsize": SMALL,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, plot.height), dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        plot.draw(figure)
        canvas.draw()
        image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    # a few hundred colours are in it, most of them edges of letters: 64 of them take a quarter of the bytes. An octree
    # keeps those of few points, which a median cut gives to their neighbours
    file = BytesIO()
    few = image.convert("RGB").quantize(COLOURS_KEPT, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette, corner = few.getpalette() or [], 3 * int(few.getpixel((0, 0)))  # type: ignore[arg-type]
    palette[corner : corner + 3] = (int(paper[at : at + 2], 16) for at in (1, 3, 5))  # the paper exactly as the page's
    few.putpalette(palette)
    few.save(file, "png", optimize=True)
    return file.getvalue()


def colour(name: str, names: Sequence[str]) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def marker(name: str, names: Sequence[str]) -> str:
    """What tells points apart whose colours are the same."""
    return MARKERS[names.index(name) // len(COLOURS) % len(MARKERS)]


def literal(name: str) -> str:
    r"""A name as letters: between two dollars matplotlib would read a formula.

    >>> literal("a $b$")
    'a \\$b\\$'
    """
    return name.replace("$", r"\$")


def logarithmic(axis: Axis, labelled: Sequence[int] = (1, 2, 5)) -> None:
    """Few decades, so that 2 and 5 are worth a label, unless told otherwise, and powers of ten no exponent."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(10, labelled))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def decades(axes: Axes) -> None:
    """Both axes over so many decades that only powers of ten are worth a label."""
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())


def one(axes: Axes, vertical: bool = False) -> None:
    """Where ours and a peer are equal."""
    line = axes.axvline if vertical else axes.axhline
    line(1, lw=1, ls="--", color=matplotlib.rcParams["text.color"])
