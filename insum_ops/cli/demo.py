"""The paper's four applications, each one statement: checked, timed beside plain torch, trained through."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.benchmark import Timer

from insum_ops.cli.progress import progress, say
from insum_ops.compiler import device_of
from insum_ops.formats import BlockGroupCOO, GroupCOO
from insum_ops.functional import explain, insum

__all__ = ["Application", "Outcome", "applications", "demo", "examine"]

TOLERANCE = 1e-5  # fp32 sums of at most a few thousand products, relative to the largest element
STEPS = 5
REPEATS = 5  # timings of each, of which the best counts
SECONDS = 0.1  # of each timing
ON_A_CPU = """\
A CPU is the reference route: it runs each statement as a few torch operations, whose purpose is a
right result and not speed. On a GPU the same line becomes one fused Triton kernel, tuned at its
first call, and this demo then shows its speed beside plain torch and beside the memory's bandwidth."""
ON_A_GPU = """\
Each statement is one fused Triton kernel, tuned at its first call. The floor is the time in which
the memory's bandwidth would pass every operand and the result once. Times are of whole calls from
Python, so that small problems wait for the host."""


@dataclass(frozen=True)
class Application:
    """One statement and its operands, beside two other ways to compute the same thing."""

    title: str
    statement: str
    operands: dict[str, Tensor | GroupCOO | BlockGroupCOO]
    trained: str  # the operand that the training steps move
    reference: Callable[[], Tensor]  # dense, float64, shares nothing with the statement
    plain: Callable[[], Tensor]  # how it is written without insum_ops
    plain_name: str

    @property
    def weights(self) -> Tensor:
        """The trained operand's numbers."""
        operand = self.operands[self.trained]
        return operand if isinstance(operand, Tensor) else operand.values

    def run(self, weights: Tensor | None = None) -> Tensor:
        """The statement, with other numbers in the trained operand if `weights` are given."""
        operand = self.operands[self.trained]
        if weights is not None:
            operand = weights if isinstance(operand, Tensor) else operand.with_values(weights)
        return insum(self.statement, size=None, **{**self.operands, self.trained: operand})


@dataclass(frozen=True)
class Outcome:
    """What one application showed."""

    title: str
    error: float  # largest difference from the reference, relative to its largest element
    seconds: float
    plain_name: str
    plain_seconds: float
    losses: tuple[float, ...]  # before the first step, then after each
    floor_seconds: float | None = None  # on a GPU, every byte passed once; None on a CPU

    @property
    def speedup(self) -> float:
        """How many times as long plain torch takes."""
        return self.plain_seconds / self.seconds

    @property
    def verdict(self) -> str:
        if not self.error <= TOLERANCE:
            return "wrong"
        is_falling = all(after < before for before, after in itertools.pairwise(self.losses))
        return "ok" if is_falling else "not learning"


def structured_spmm(random: torch.Generator, size: int, columns: int = 256) -> Application:
    """C = A B, where A consists of 32 x 32 blocks, 90 % of them zero."""
    kept = torch.rand(size // 32, size // 32, generator=random, device=random.device) < 0.1
    A = _normal(random, size, size) * kept.repeat_interleave(32, 0).repeat_interleave(32, 1)
    B = _normal(random, size, columns)
    return Application(
        title="structured SpMM",
        statement="C[m,n] += A[m,k] * B[k,n]",
        operands={"A": BlockGroupCOO.from_dense(A, block_size=(32, 32)), "B": B},
        trained="A",
        reference=lambda: A.double() @ B.double(),
        plain=lambda: A @ B,
        plain_name="dense matmul",
    )


def unstructured_spmm(random: torch.Generator, size: int, degree: int = 8) -> Application:
    """C = A B, where A is the adjacency matrix of a random graph: few nodes have most of the edges."""
    edges = degree * size
    heads = (size * torch.rand(edges, generator=random, device=random.device) ** 3).long()
    tails = torch.randint(size, (edges,), generator=random, device=random.device)
    A = torch.zeros(size, size, device=random.device).index_put((heads, tails), _normal(random, edges))
    B = _normal(random, size, 64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        csr = A.to_sparse_csr()
    return Application(
        title="unstructured SpMM",
        statement="C[m,n] += A[m,k] * B[k,n]",
        operands={"A": GroupCOO.from_dense(A), "B": B},
        trained="A",
        reference=lambda: A.double() @ B.double(),
        plain=lambda: torch.sparse.mm(csr, B),
        plain_name="torch.sparse.mm",
    )


def point_cloud_convolution(random: torch.Generator, size: int) -> Application:
    """A 3 x 3 x 3 convolution, 32 -> 32 channels, over the occupied voxels of a room."""
    room = _room(size, random.device)
    i, j, k = room.nonzero().T
    pairs = _kernel_map(room)
    In, Weight = _normal(random, len(i), 32), _normal(random, 27, 32, 32)
    Map = GroupCOO.from_coo(pairs, torch.ones_like(pairs[0], dtype=In.dtype), (len(i), len(i), 27), group_dim=2)
    by_offset = [pairs[:2, pairs[2] == offset] for offset in range(27)]

    def dense_convolution() -> Tensor:
        volume = torch.zeros(32, *room.shape, dtype=torch.float64, device=room.device)
        volume[:, i, j, k] = In.double().T
        kernel = Weight.double().reshape(3, 3, 3, 32, 32).permute(4, 3, 0, 1, 2)
        return functional.conv3d(volume, kernel, padding=1)[:, i, j, k].T

    def loop_over_offsets() -> Tensor:
        Out = torch.zeros_like(In)
        for weight, (x, y) in zip(Weight, by_offset, strict=True):
            Out.index_add_(0, x, In[y] @ weight)
        return Out

    return Application(
        title="point-cloud convolution",
        statement="Out[x,m] += Map[x,y,z] * In[y,c] * Weight[z,c,m]",
        operands={"Map": Map, "In": In, "Weight": Weight},
        trained="Weight",
        reference=dense_convolution,
        plain=loop_over_offsets,
        plain_name="loop over 27 offsets",
    )


def tensor_product(random: torch.Generator, size: int) -> Application:
    """(scalar, vector) times (scalar, vector), 16 -> 16 channels; each sample has weights of its own."""
    coefficients = clebsch_gordan().to(random.device)
    X, Y = _normal(random, size, 4, 16), _normal(random, size, 4)
    W = _normal(random, size, 5, 16, 16)
    equation = "ijkl,bju,bk,bluw->biw"
    return Application(
        title="equivariant product",
        statement="Z[b,i,w] += CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[b,l,u,w]",
        operands={"CG": GroupCOO.from_dense(coefficients, group_dim=3), "X": X, "Y": Y, "W": W},
        trained="W",
        reference=lambda: torch.einsum(equation, coefficients.double(), X.double(), Y.double(), W.double()),
        plain=lambda: torch.einsum(equation, coefficients, X, Y, W),
        plain_name="torch.einsum, dense",
    )


def clebsch_gordan() -> Tensor:
    """[4, 4, 4, 5]: the five products of (scalar, vector) with (scalar, vector), each of norm 1.

    The last dimension counts them: scalar * scalar, scalar * vector, vector * scalar, dot, cross.
    """
    coefficients = torch.zeros(4, 4, 4, 5)
    coefficients[0, 0, 0, 0] = 1
    for a in (1, 2, 3):
        coefficients[a, 0, a, 1] = coefficients[a, a, 0, 2] = coefficients[0, a, a, 3] = 3**-0.5
    for a, b, c in ((1, 2, 3), (2, 3, 1), (3, 1, 2)):
        coefficients[a, b, c, 4], coefficients[a, c, b, 4] = 6**-0.5, -(6**-0.5)
    return coefficients


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device)


def _room(size: int, device: torch.device) -> Tensor:
    """[size, size, size / 2]: which voxels are occupied: a floor, four walls and a table top."""
    room = torch.zeros(size, size, size // 2, dtype=torch.bool, device=device)
    room[:, :, 0] = room[0] = room[-1] = room[:, 0] = room[:, -1] = True
    room[size // 4 : size // 2, size // 3 : 2 * size // 3, size // 6] = True
    return room


def _kernel_map(room: Tensor) -> Tensor:
    """[3, pairs]: (output voxel, input voxel, offset) wherever both voxels are occupied."""
    voxels = room.nonzero()
    count = torch.arange(len(voxels), device=room.device)
    number = torch.full([extent + 2 for extent in room.shape], -1, device=room.device)  # a margin of empty voxels
    number[tuple(voxels.T + 1)] = count
    pairs = []
    for offset, step in enumerate(itertools.product(range(3), repeat=3)):
        neighbour = number[tuple(voxels.T + voxels.new_tensor(step)[:, None])]
        is_pair = neighbour >= 0
        pairs.append(torch.stack([count, neighbour, torch.full_like(count, offset)])[:, is_pair])
    return torch.cat(pairs, dim=1)


def applications(device: torch.device, is_quick: bool = False) -> Iterator[Application]:
    """The four, one at a time, larger on a GPU; the same numbers on every run."""
    random = torch.Generator(device).manual_seed(0)
    is_large = device.type == "cuda" and not is_quick
    yield structured_spmm(random, 256 if is_quick else 1024) if not is_large else structured_spmm(random, 4096, 1024)
    yield unstructured_spmm(random, 256 if is_quick else 2048) if not is_large else unstructured_spmm(random, 8192, 64)
    yield point_cloud_convolution(random, 12 if is_quick else 96 if is_large else 32)
    yield tensor_product(random, 64 if is_quick else 10_000 if is_large else 1024)


def examine(application: Application, is_quick: bool = False) -> Outcome:
    """Check, then time, then train."""
    expected = application.reference()
    with torch.no_grad():
        result = application.run()
        difference = result.double() - expected
        seconds = _best_seconds(application.run, is_quick)
        plain_seconds = _best_seconds(application.plain, is_quick)
    return Outcome(
        title=application.title,
        error=(difference.abs().max() / expected.abs().max()).item(),
        seconds=seconds,
        plain_name=application.plain_name,
        plain_seconds=plain_seconds,
        losses=tuple(_train(application, expected.float())),
        floor_seconds=_floor_seconds(application, result) if result.is_cuda else None,
    )


def _best_seconds(run: Callable[[], Tensor], is_quick: bool) -> float:
    """Of several timings the best: whatever else the machine does makes a timing longer and never shorter."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    times = [timer.blocked_autorange(min_run_time=0.01 if is_quick else SECONDS) for _ in range(REPEATS)]
    return min(time for timing in times for time in timing.times)


def _floor_seconds(application: Application, result: Tensor) -> float:
    """How long the memory of the result's device takes to pass each operand and the result once."""
    passed: list[Tensor | None] = [result]
    for operand in application.operands.values():
        passed += [operand] if isinstance(operand, Tensor) else [operand.values, *operand.coords]
    size = sum(tensor.numel() * tensor.element_size() for tensor in passed if tensor is not None)
    return size / device_of(result.device).bandwidth


def _train(application: Application, target: Tensor) -> Iterator[float]:
    """Start from zero weights and move them towards those that gave the target; the first loss is 1."""
    weights = torch.zeros_like(application.weights, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1)
    for step in range(STEPS + 1):
        loss = (application.run(weights) - target).square().mean() / target.square().mean()
        yield loss.item()
        if step < STEPS:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def demo(device: torch.device, is_quick: bool = False) -> int:
    """Go through the four applications; the exit status is 1 if one of them fails a check."""
    started = time.perf_counter()
    print(f"Four sparse operators, one line each, on {_machine(device)}.\n")
    print(ON_A_GPU if device.type == "cuda" else ON_A_CPU)
    outcomes = []
    for number, application in enumerate(progress(applications(device, is_quick), "demo", 4), start=1):
        lines = [f"\n{number}. {application.title}\n\n     {application.statement}"]
        lines.append(f"     {explain(application.statement, size=None, **application.operands).rewritten}\n")
        lines += [f"   {name:<8}{_description(operand)}" for name, operand in application.operands.items()]
        outcome = examine(application, is_quick)
        outcomes.append(outcome)
        say("\n".join([*lines, *_findings(application, outcome)]))
    print(f"\n{table(outcomes)}\n")
    if sys.stdout.isatty():
        print(f"{bars(outcomes, shutil.get_terminal_size().columns)}\n")
    failed = [outcome.title for outcome in outcomes if outcome.verdict != "ok"]
    verdict = f"failed: {', '.join(failed)}" if failed else "all checks passed"
    print(f"{verdict}, {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


def _findings(application: Application, outcome: Outcome) -> Iterator[str]:
    yield f"   check   {outcome.error:.0e} away from dense float64, {TOLERANCE:.0e} allowed"
    times = _milliseconds(outcome.seconds), _milliseconds(outcome.plain_seconds)
    yield f"   time    {times[0]}; {outcome.plain_name}: {times[1]}; the best of several"
    if outcome.floor_seconds is not None:
        floor = f"the floor is {_milliseconds(outcome.floor_seconds)}, {_share(outcome)} of the time"
        yield f"   speed   {outcome.speedup:.1f} times that of plain torch; {floor}"
    losses = " ".join(f"{loss:.2f}" for loss in outcome.losses)
    yield f"   train   {application.trained} from zero; loss {losses}"


def bars(outcomes: Sequence[Outcome], width: int) -> str:
    """The times as bars of plain characters, a pair to each application, the longer one as long as there is room."""
    lines = []
    room = max(width - max(len(outcome.title) for outcome in outcomes) - len("  insum    12345.67 ms"), 8)
    for outcome in outcomes:
        longest = max(outcome.seconds, outcome.plain_seconds)
        for title, name, seconds in (
            (outcome.title, "insum", outcome.seconds),
            ("", "torch", outcome.plain_seconds),
        ):
            bar = "#" * max(round(room * seconds / longest), 1)
            wide = max(len(outcome.title) for outcome in outcomes)
            lines.append(f"{title:<{wide}}  {name}  {bar} {_milliseconds(seconds)}")
    return "\n".join(lines)


def table(outcomes: Sequence[Outcome]) -> str:
    """One row per application."""
    is_on_gpu = any(outcome.floor_seconds is not None for outcome in outcomes)
    rows = [("", "error", "insum", "plain torch", "", *(("speed-up", "floor") if is_on_gpu else ()), "loss", "")]
    for outcome in outcomes:
        rows.append(
            (
                outcome.title,
                f"{outcome.error:.0e}",
                _milliseconds(outcome.seconds),
                _milliseconds(outcome.plain_seconds),
                outcome.plain_name,
                *((f"{outcome.speedup:.1f}x", _share(outcome)) if is_on_gpu else ()),
                f"{outcome.losses[0]:.2f} -> {outcome.losses[-1]:.2f}",
                outcome.verdict,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, "<>>><>>><" if is_on_gpu else "<>>><><", widths, strict=True)
        lines.append("  ".join(f"{cell:{align}{width}}" for cell, align, width in cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _description(operand: Tensor | GroupCOO | BlockGroupCOO) -> str:
    shape = " x ".join(map(str, operand.shape))
    if isinstance(operand, Tensor):
        return f"{shape}, dense"
    blocks = "" if operand.block_size is None else f", blocks {' x '.join(map(str, operand.block_size))}"
    return f"{shape}, {type(operand).__name__}: {operand.nnz} nonzeros, groups of {operand.group_size}{blocks}"


def _share(outcome: Outcome) -> str:
    """How much of the time the floor is; 100 % would be a kernel that reads and writes each byte once."""
    return "" if outcome.floor_seconds is None else f"{outcome.floor_seconds / outcome.seconds:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e3 * seconds:.3f} ms"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} with {torch.get_num_threads()} threads"
