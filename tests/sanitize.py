"""Kernels on a GPU under NVIDIA's compute-sanitizer, and repeated where it sees no race: `make sanitize`.

    python tests/sanitize.py                      everything
    python tests/sanitize.py --tools memcheck     one tool alone; also racecheck, initcheck
    python tests/sanitize.py works                the kernels as they are, under no tool
    python tests/sanitize.py plant memcheck       a kernel with a fault that this tool must report
    python tests/sanitize.py repeat               the comparison of repeated runs alone

memcheck sees what is read or written out of bounds in device memory: `PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each
tensor an allocation of its own, and padding keeps them apart. racecheck sees races between threads in shared memory. No
tool sees races between programs in device memory: there the same calls are made again and again, and what must be
deterministic is compared bit by bit. A tool is believed only if it reports a fault that was planted for it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import triton
import triton.language as tl
from golden_cases import GOLDEN, Golden
from statements import DEVICE, random_values
from torch import Tensor

from insum_ops import insum, nn, sddmm, spmm
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.runtime.launch import Launcher
from insum_ops.formats import BlockGroupCOO, GroupCOO, kernel_map
from insum_ops.formats.sparse_format import SparseFormat

TOOLS = ("memcheck", "racecheck")  # as `make sanitize` runs them; initcheck may complain of torch's own kernels
FOUND = 99  # the exit status of a tool that has something to report
TIMEOUT = 900  # seconds for each run of a tool
REPEATS = 20
# what partial sums that meet in any order may differ by, in units of the last place of the largest element
LOOSE = 16

HALF, SINGLE = torch.float16, torch.float32


# faults, each for the tool that must find it


@triton.jit
def overrun(out_ptr, source_ptr, index_ptr, BLOCK: tl.constexpr):
    """One of the positions is past the end of source."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(source_ptr + tl.load(index_ptr + at)))


@triton.jit
def copied(out_ptr, source_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(source_ptr + at) + 1)


SHARED_RACE = """
extern "C" __global__ void shared_race(float* out) {
    __shared__ float held[64];
    held[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = held[63 - threadIdx.x];
}
"""


def plant_memcheck() -> None:
    index = torch.tensor([0, 5, 2, 6], device="cuda")
    overrun[(1,)](torch.zeros(4, device="cuda"), torch.ones(6, device="cuda"), index, 4)


def plant_racecheck() -> None:
    kernel = torch.cuda._compile_kernel(SHARED_RACE, "shared_race")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[torch.zeros(64, device="cuda")])


def plant_initcheck() -> None:
    copied[(1,)](torch.zeros(64, device="cuda"), torch.empty(64, device="cuda"), 64)


PLANTS = {"memcheck": plant_memcheck, "racecheck": plant_racecheck, "initcheck": plant_initcheck}


# what is run


@dataclass(frozen=True)
class Work:
    """Calls that make tensors; whether they make the same bits each time."""

    name: str
    run: Callable[[], Sequence[Tensor]]
    is_exact: bool


def values(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return random_values(shape, dtype, torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def with_gradients(call: Callable[..., Tensor], *leaves: Tensor, parameters: Iterable[Tensor] = ()) -> list[Tensor]:
    """The result, and the gradients of leaves and of parameters."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    result = call(*leaves)
    return [result.detach(), *torch.autograd.grad(result, (*leaves, *parameters), torch.ones_like(result))]


def golden_works() -> Iterator[Work]:
    """The golden kernels in their own tiles and in small ones, and the way that is taken where nothing is tuned."""
    for name in GOLDEN:
        golden = Golden(name, HALF, 17)
        is_exact = "atomic" not in golden.application.strategy
        for at, launcher in enumerate(golden.in_tiles(warps=8)):
            if is_built(golden, launcher):
                yield Work(f"{name} {at}", partial(golden.run, launcher), is_exact)
        for launcher in golden.in_candidates(1):
            is_exact = "atomic" not in launcher.schedule.strategy and launcher.kernel.parts == 1
            if is_built(golden, launcher):
                yield Work(f"{name} as chosen", partial(golden.run, launcher), is_exact)


def is_built(golden: Golden, launcher: Launcher) -> bool:
    """Whether the GPU has room for the tiles; it says so if not."""
    try:
        launcher.build(golden.tensors, golden.fact)
    except UnsupportedError as error:
        print(error)
        return False
    return True


def matrix(rows: int, columns: int, density: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return values(rows, columns, dtype=dtype) * (torch.rand(rows, columns, generator=generator) < density).to(DEVICE)


def matrix_works(rows: int, wide: int) -> Iterator[Work]:
    for dtype in (HALF, SINGLE):
        sparse = GroupCOO.from_dense(matrix(rows, rows - 3, 0.1, dtype))
        blocks = BlockGroupCOO.from_dense(matrix(rows, rows - 3, 0.02, dtype), block_size=(16, 16))
        B, X = values(rows - 3, wide, dtype=dtype), values(rows, wide, dtype=dtype)
        kind = str(dtype)[6:]
        for A, label in ((sparse, "groups"), (blocks, "blocks")):
            yield Work(f"spmm of {label} {kind}", partial(with_gradients, partial(_product, A), A.values, B), False)
        yield Work(f"spmm max {kind}", partial(_largest, sparse, B), True)
        yield Work(f"sddmm {kind}", partial(with_gradients, partial(_sampled, sparse), X, B), False)


def _product(A: SparseFormat, own: Tensor, B: Tensor) -> Tensor:
    return spmm(A.with_values(own), B)


def _largest(A: SparseFormat, B: Tensor) -> list[Tensor]:
    return [spmm(A, B, reduce="max")]


def _sampled(pattern: SparseFormat, X: Tensor, Y: Tensor) -> Tensor:
    return sddmm(pattern, X, Y).values  # type: ignore[no-any-return]


def layer_works(features: int, side: int, channels: int) -> Iterator[Work]:
    generator = torch.Generator().manual_seed(1)
    layer = nn.BlockSparseLinear(features, features, 32, 0.3, generator=generator).to(DEVICE, HALF)
    run = partial(with_gradients, layer, values(37, features), parameters=[layer.weight, layer.bias])
    yield Work("BlockSparseLinear", run, False)

    indices = (torch.rand(2, side, side, side, generator=generator) < 0.3).nonzero().int().to(DEVICE)
    for kind, options in ((nn.SubMConv3d, {}), (nn.SparseConv3d, {"stride": 2, "padding": 1})):
        conv = kind(channels, channels + 3, 3, **options).to(DEVICE, HALF)
        call = partial(_convolved, conv, indices, side)
        own = values(len(indices), channels)
        yield Work(kind.__name__, partial(with_gradients, call, own, parameters=[conv.weight, conv.bias]), False)
    for kind, *sizes in (("subm", 3, 1, 0), ("strided", 3, 2, 1), ("transposed", 2, 2, 0)):
        yield Work(f"voxel map, {kind}", partial(_mapped, indices, side, kind, sizes), True)

    places = torch.randint(-1, 40, (300,), generator=generator).to(DEVICE)
    scatter = partial(_scattered, places)
    yield Work("statement", partial(with_gradients, scatter, values(300, 19, dtype=SINGLE)), False)


def tensor_product_works() -> Iterator[Work]:
    if find_spec("e3nn") is None:
        print("no tensor products: e3nn is not installed")
        return
    irreps = "16x0e + 16x1o", "0e + 1o", "16x0e + 16x1o"
    product = nn.FullyConnectedTensorProduct(*irreps, shared_weights=True, internal_weights=False).to(DEVICE)
    shapes = (29, product.irreps_in1.dim), (29, product.irreps_in2.dim), (product.weight_numel,)
    for dtype in (HALF, SINGLE):
        leaves = [values(*shape, dtype=dtype) for shape in shapes]
        yield Work(f"tensor product {str(dtype)[6:]}", partial(with_gradients, product, *leaves), False)


def _scattered(places: Tensor, X: Tensor) -> Tensor:
    return insum("C[E[p],n] += X[p,n]", E=places, X=X, size=(40, 19))


def _convolved(conv: nn.SubMConv3d | nn.SparseConv3d, indices: Tensor, side: int, features: Tensor) -> Tensor:
    return conv(nn.SparseConvTensor(features, indices, [side] * 3, 2)).features  # type: ignore[no-any-return]


def _mapped(indices: Tensor, side: int, kind: str, sizes: list[int]) -> list[Tensor]:
    """All tables of a map that is made anew."""
    made = kernel_map(indices.clone(), [side] * 3, 2, *sizes, kind=kind)
    tables = [part for held in (made.grouped(32), made.tiled(32)) for part in vars(held).values()]
    tables = [part for part in tables if isinstance(part, Tensor)]
    return [made.out_indices, made.neighbours, made.inverse.neighbours, *tables]


def works() -> Iterator[Work]:
    """What the tools look at: small, with odd sizes and with padding."""
    yield from golden_works()
    yield from matrix_works(77, 33)
    yield from layer_works(160, 6, 19)
    yield from tensor_product_works()


def larger_works() -> Iterator[Work]:
    """With enough programs for some of them to meet."""
    yield from matrix_works(1501, 129)
    yield from layer_works(1024, 20, 32)


# repeated runs


def differences(work: Work, repeats: int = REPEATS) -> str:
    """What differs between runs that should be equal; "" if nothing does."""
    first = work.run()
    for number in range(1, repeats):
        for at, (one, other) in enumerate(zip(first, work.run(), strict=True)):
            if work.is_exact or not one.is_floating_point():
                is_same = torch.equal(one, other)
            else:
                largest = one.abs().max() if one.numel() else one.new_zeros(())
                is_same = bool(((one - other).abs() <= LOOSE * torch.finfo(one.dtype).eps * largest).all())
            if not is_same:
                return f"{work.name}: tensor {at} of run {number} is not that of run 0"
    return ""


def repeat() -> int:
    """How many works were not the same each time; under deterministic algorithms every one must be, bit by bit."""
    found, count = [], 0
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic, warn_only=True)
        for make in (works, larger_works):
            for work in make():
                is_exact = work.is_exact or (is_deterministic and not work.name.startswith(tuple(GOLDEN)))
                found.append(differences(Work(work.name, work.run, is_exact)))
                count += 1
    torch.use_deterministic_algorithms(False)
    wrong = [text for text in found if text]
    print("\n".join([*wrong, f"repeat: {count} works, {REPEATS} runs each, {len(wrong)} of them differ"]))
    return len(wrong)


# the tools


def sanitizer() -> str | None:
    """compute-sanitizer on the PATH, or in the CUDA toolkit that CUDA_HOME names."""
    folders = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)] + ["/usr/local/cuda"]
    places = [Path(folder, part, "compute-sanitizer") for folder in folders for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next(
        (str(place) for place in places if os.access(place, os.X_OK)), None
    )


def under(tool: str, program: str, *arguments: str) -> tuple[int, str]:
    """The exit status and the output of this file, run under a tool."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    # torch and Triton ask CUDA what it may not know, and go on
    options += ["--padding", "4096", "--report-api-errors", "no"] if tool == "memcheck" else []
    own = [sys.executable, str(Path(__file__).resolve()), *arguments]
    try:
        done = subprocess.run([program, *options, *own], capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return -1, f"{tool} took longer than {TIMEOUT} s"
    return done.returncode, done.stdout + done.stderr


def check(tool: str, program: str) -> bool:
    """A tool finds what was planted for it, and nothing in the works."""
    status, output = under(tool, program, "plant", tool)
    if status != FOUND:
        print(
            f"{output[-4000:]}\n{tool}: did not report the planted fault (exit status {status}), so it is not believed"
        )
        return False
    status, output = under(tool, program, "works")
    if status != 0:
        print(f"{output[-8000:]}\n{tool}: reports a fault (exit status {status})")
        return False
    print(f"{tool}: reports the planted fault, and nothing in {output.strip().splitlines()[-1]}")
    return True


def run_all(tools: tuple[str, ...]) -> int:
    program = sanitizer()
    if program is None:
        print("nothing was checked: compute-sanitizer is neither on the PATH nor in the CUDA toolkit of CUDA_HOME")
        return 1
    if not torch.cuda.is_available():
        print("nothing was checked: there is no GPU")
        return 1
    is_sound = repeat() == 0  # first, so that every kernel is compiled before a tool slows it down
    for tool in tools:
        is_sound = check(tool, program) and is_sound
    print("sanitize: sound" if is_sound else "sanitize: not sound")
    return 0 if is_sound else 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="kernels under compute-sanitizer, and repeated runs compared")
    parser.add_argument("command", nargs="?", choices=["all", "works", "plant", "repeat"], default="all")
    parser.add_argument("tool", nargs="?", choices=list(PLANTS), help="whose fault is planted")
    parser.add_argument("--tools", nargs="+", choices=list(PLANTS), default=list(TOOLS))
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    if given.command == "all":
        return run_all(tuple(given.tools))
    if given.command == "plant":
        PLANTS[given.tool]()
        torch.cuda.synchronize()
    elif given.command == "repeat":
        return 1 if repeat() else 0
    else:
        count = 0
        for work in works():
            work.run()
            count += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"{count} works")
    return 0


if __name__ == "__main__":
    # each tensor is an allocation of its own; nothing is timed; sums of cuBLAS can be deterministic
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    os.environ.setdefault("INSUM_TUNE", "off")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main(sys.argv[1:]))
