"""README's few figures and its picture's block, written from a results file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .glance import Group, Pair, groups
from .harness import geomean
from .results import Run

__all__ = ["HEADLINES", "Headline", "group_of", "headlines", "wins_of_others"]


@dataclass(frozen=True)
class Headline:
    """One series of an experiment beside one peer, in a reader's words."""

    what: str
    against: str
    experiment: str
    series: str
    peer: str
    module: str  # of bench/cases
    x: float | None = None  # one point of a curve

    def pairs(self, run: Run) -> list[Pair]:
        group = group_of(run, self.experiment, self.series, self.peer)
        return [pair for pair in group.pairs if self.x is None or pair.ours.x == self.x] if group else []


HEADLINES = (
    Headline(
        "`spmm` over graphs, float32, 128 columns",
        "torch.sparse (cuSPARSE)",
        "unstructured_spmm",
        "float32, N = 128",
        "torch.sparse",
        "test_unstructured_spmm.py",
    ),
    Headline(
        "`BlockSparseLinear`, float16, 10 % of 64 x 64 blocks",
        "`nn.Linear` (cuBLAS)",
        "linear",
        "64x64",
        "dense",
        "test_block_sparse_linear.py",
        0.1,
    ),
    Headline(
        "`SubMConv3d` over rooms and scans, float16",
        "spconv",
        "convolution",
        "float16",
        "spconv",
        "test_convolution.py",
    ),
    Headline(
        "a sparse U-Net's training step, another cloud each time",
        "spconv",
        "unet",
        "other sizes each time",
        "spconv",
        "test_unet.py",
    ),
    Headline(
        "`FullyConnectedTensorProduct`, float32",
        "e3nn",
        "tensor_product",
        "",
        "e3nn",
        "test_tensor_product.py",
    ),
    Headline(
        "tensor products of published models, with gradients",
        "cuequivariance",
        "equivariant_training",
        "",
        "cuequivariance",
        "test_equivariant*.py",
    ),
)


def group_of(run: Run, experiment: str, series: str, peer: str) -> Group | None:
    """Ours itself beside a peer, or None where the run has no such rows."""
    found = (group for group in groups(run, experiment) if not group.variant)
    return next((group for group in found if (group.series, group.peer) == (series, peer)), None)


def headlines(run: Run, source: str) -> str:
    """A table of six figures, the command of each, and three lines on where others are faster."""
    rows = [
        f"| {own.what} | {own.against} | {_span(own.pairs(run))} | `{own.module}` |"
        for own in HEADLINES
        if own.pairs(run)
    ]
    gpu, packages = run.machine.get("gpu", "none"), dict(run.machine.get("packages", {}))  # type: ignore[call-overload]
    place = f"{gpu if gpu != 'none' else run.machine.get('cpu')}, torch {packages.get('torch')}"
    parts = [
        f"Times faster than the other library on one {place}: geometric mean, then the least and the most. "
        "`make bench CASES=bench/cases/FILE` measures a row.",
        "\n".join(["| what | against | times faster | `FILE` |", "|---|---|---|---|", *rows]),
    ]
    others = [f"- {line}" for line in wins_of_others(run)]
    if others:
        parts.append("\n".join(["Where others are faster:", "", *others]))
    return "\n\n".join([*parts, f"`python -m bench readme {source}` writes this block."])


def _ratios(pairs: list[Pair]) -> list[float]:
    """By device time where both sides have one, else as called."""
    found = [pair.called if pair.device is None else pair.device for pair in pairs]
    return [ratio for ratio in found if ratio is not None]


def _span(pairs: list[Pair]) -> str:
    ratios = _ratios(pairs)
    if len(ratios) == 1:
        return f"**{ratios[0]:.2f}x**"
    return f"**{geomean(ratios):.2f}x** ({min(ratios):.2f}x to {max(ratios):.2f}x, {len(ratios)} cases)"


def wins_of_others(run: Run) -> Iterator[str]:
    """Lines with the least ratios of the run, each left out where it has no such rows."""
    dense = group_of(run, "linear", "32x32", "dense")
    bsr = group_of(run, "linear", "64x64", "TorchBSR")
    if dense and bsr:
        worst, behind = min(_ratios(dense.pairs)), [ratio for ratio in _ratios(bsr.pairs) if round(ratio, 2) < 1]
        line = (
            f"Weights that are mostly dense: cuBLAS, ours is {worst:.2f}x at its slowest (32 x 32 blocks, all stored)"
        )
        if behind:
            line += f"; at 64 x 64 blocks torch's BSR kernel leads in {len(behind)} of {len(bsr.pairs)}, by device time"
        yield f"{line}."
    mace = group_of(run, "equivariant_training", "", "cuequivariance")
    shared = group_of(run, "shared_product", "the layer, ieee", "torch.matmul")
    if mace and shared:
        behind = [ratio for ratio in _ratios(mace.pairs) if round(ratio, 2) < 1]
        yield (
            f"Tensor products: cuequivariance leads in {len(behind)} of {len(_ratios(mace.pairs))} above; with weights "
            f"that all samples share, ours is {min(_ratios(shared.pairs)):.2f}x the matrix products alone in cuBLAS."
        )
    host = group_of(run, "host", "", "torch.mm")
    if host:
        yield (
            f"Small calls: a statement takes the host up to {1 / min(_ratios(host.pairs)):.1f} times as long as "
            "`torch.mm`, and work of a few microseconds on the device waits for that."
        )
