"""The device model: a GPU as data, by which rules know how many programs fill it and how much a tile may hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log2
from typing import Any

import torch

from ...formats.torch_state import asked_once

__all__ = [
    "A10",
    "A100",
    "B200",
    "DEVICES",
    "H200",
    "L40S",
    "MI300X",
    "Device",
    "described_as",
    "device_of",
    "line_of",
]

KIB, MIB = 2**10, 2**20
HALF_TYPES = (torch.float16, torch.bfloat16)
# The fewest rows that four warps multiply at once: an mma or mfma of each has 16, a wgmma or tcgen05.mma of all has 64
# (the shapes of these instructions in NVIDIA's PTX ISA and AMD's CDNA 3 ISA).
DOT_ROWS = {"mma": 4 * 16, "mfma": 4 * 16, "wgmma": 64, "tcgen05": 64}
TENSOR_CORE_TYPES = (*HALF_TYPES, torch.float32)  # float32 as tf32, where a caller allows it


@dataclass(frozen=True)
class Device:
    """One GPU, as far as planning needs to know it.

    >>> H200.tensor_core(torch.float16), A100.tensor_core(torch.float16), A10.tensor_core(torch.float64)
    ('wgmma', 'mma', None)
    >>> H200.wave, A100.wave, A10.wave
    (128, 128, 64)
    """

    name: str
    architecture: str  # sm_90, gfx942
    multiprocessors: int  # compute units of an AMD GPU
    shared_per_block: int  # bytes that one program may have
    shared_per_multiprocessor: int  # bytes that the programs of one multiprocessor have together
    registers: int  # of 32 bits, of a multiprocessor
    l2_bytes: int
    bandwidth: float  # bytes per second of its memory
    tensor_flops: float  # per second, of one multiprocessor's tensor cores in half precision, of dense operands
    vector_flops: float  # per second, of one multiprocessor's other cores in float32
    tensor_cores: tuple[tuple[torch.dtype, str], ...]  # the instruction by the type it multiplies
    warp_width: int = 32  # threads
    sector_bytes: int = 32  # that memory hands out for one element of them
    threads: int = 2048  # that a multiprocessor runs at once
    programs: int = 32  # that it runs at once, however short they are
    thread_registers: int = 255  # that one thread may have
    # Estimates, of which the ranks of measured times are all that was compared (`python -m bench rank`), on one H200.
    latency: float = 0.7e-6  # seconds from a load to its number
    read_rate: float = 64 * 1.7e9  # bytes per second that one multiprocessor may read: 64 in a clock
    start_rate: float = 1.6e9  # programs per second that begin: see `MOVED_ROWS` of compiler/tuning/measured.py
    # Seconds of an addition at a line of memory: 5.6 million numbers into 773 places took an H200 0.617 ms.
    line_addition: float = 2.6e-9
    # Seconds of the device between two launches of a stream; estimated, not measured. A memset that takes no longer
    # than this is worth less than the launches that would save it.
    launch_gap: float = 1.75e-6
    # Milliseconds of the host for a call, and for each operation that it puts on the stream. On an H200's host a call
    # of spmm took 0.015 with one launch and 0.025 with a memset before (`make bench CASES=bench/cases/test_host.py`).
    host_call: float = 0.005
    host_launch: float = 0.010

    def tensor_core(self, dtype: torch.dtype) -> str | None:
        """Return the instruction that multiplies tiles of a type, mma, wgmma, tcgen05 or mfma, or None."""
        return dict(self.tensor_cores).get(dtype)

    @cached_property
    def wave(self) -> int:
        """The number of programs that give each multiprocessor one, as the nearest power of two.

        Tuned configs are remembered by the powers of two of lengths, so programs are counted in powers of two as well.
        """
        return 1 << max(round(log2(self.multiprocessors)), 0)

    @property
    def register_bytes(self) -> int:
        """The bytes of all registers of a multiprocessor."""
        return 4 * self.registers

    @property
    def room_for_copies(self) -> float:
        """The bytes that copies of an output may fill: an eighth of the L2 cache."""
        return self.l2_bytes / 8

    def dot_rows(self, dtype: torch.dtype) -> int:
        """Return how many rows four warps multiply at once by tensor cores, 0 without; fewer leave some warps idle.

        >>> H200.dot_rows(torch.float16), A10.dot_rows(torch.float64)
        (64, 0)
        """
        return DOT_ROWS.get(self.tensor_core(dtype) or "", 0)

    def products_per_number(self, itemsize: int) -> float:
        """Return how many multiply-adds in float32 the GPU makes in the time in which it reads one number.

        >>> [round(device.products_per_number(4)) for device in (A100, H200, MI300X)]
        [19, 28, 62]
        """
        return self.multiprocessors * self.vector_flops / 2 * itemsize / self.bandwidth

    def flops(self, itemsize: int) -> float:
        """Return the operations per second of all tensor cores, which take as many bytes whatever the type's width.

        >>> f"{H200.flops(2):.3g} {H200.flops(4):.3g}"
        '9.9e+14 4.95e+14'
        """
        return self.multiprocessors * self.tensor_flops * 2 / itemsize

    def resident(self, threads: int, registers: float, shared: int = 0) -> int:
        """Return how many programs a multiprocessor runs at once, at least one.

        Each has so many threads with so many registers each, and so many bytes of shared memory.

        >>> H200.resident(128, 40), H200.resident(128, 128), H200.resident(128, 128, 100 * KIB)
        (12, 4, 2)
        """
        room = self.shared_per_multiprocessor // shared if shared else self.programs
        return max(1, int(min(self.programs, self.threads // threads, self.registers // (threads * registers), room)))

    def host_milliseconds(self, operations: int) -> float:
        """Return how long a call of so many operations keeps the host busy; tiny problems wait for that."""
        return self.host_call + self.host_launch * operations


def line_of(itemsize: int) -> int:
    """Return the elements of the 128 bytes that all banks of shared memory hold side by side, at least 32.

    A dot's tile up to this wide is made wider by neighbours, which share what the other side loads: 64 x 64 blocks in
    float16 gain 1.2 times (`make bench CASES=bench/cases/test_block_sparse_linear.py`); wider types were not measured.

    >>> [line_of(itemsize) for itemsize in (2, 4, 8)]
    [64, 32, 32]
    """
    return max(128 // itemsize, 32)


def _tensor_cores(instruction: str, *others: tuple[torch.dtype, str]) -> tuple[tuple[torch.dtype, str], ...]:
    return (*((dtype, instruction) for dtype in TENSOR_CORE_TYPES), *others)


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the data sheets for
# multiprocessors, L2, bandwidth and operations per second. AMD: CDNA 3 white paper; the LDS of a compute unit, and the
# L2 of all eight dies.
WIDE_MMA = (torch.float64, "mma")
A100 = Device(
    name="NVIDIA A100",
    architecture="sm_80",
    multiprocessors=108,
    shared_per_block=163 * KIB,
    shared_per_multiprocessor=164 * KIB,
    registers=65536,
    l2_bytes=40 * MIB,
    bandwidth=2.0e12,
    tensor_flops=2.9e12,
    vector_flops=0.18e12,
    tensor_cores=_tensor_cores("mma", WIDE_MMA),
)
A10 = Device(
    name="NVIDIA A10",
    architecture="sm_86",
    multiprocessors=72,
    shared_per_block=99 * KIB,
    shared_per_multiprocessor=100 * KIB,
    registers=65536,
    l2_bytes=6 * MIB,
    bandwidth=0.6e12,
    tensor_flops=1.7e12,
    vector_flops=0.43e12,
    tensor_cores=_tensor_cores("mma"),
    threads=1536,
    programs=16,
)
L40S = Device(
    name="NVIDIA L40S",
    architecture="sm_89",
    multiprocessors=142,
    shared_per_block=99 * KIB,
    shared_per_multiprocessor=100 * KIB,
    registers=65536,
    l2_bytes=96 * MIB,
    bandwidth=0.86e12,
    tensor_flops=2.5e12,
    vector_flops=0.64e12,
    tensor_cores=_tensor_cores("mma"),
    threads=1536,
    programs=24,
)
H200 = Device(
    name="NVIDIA H200",
    architecture="sm_90",
    multiprocessors=132,
    shared_per_block=227 * KIB,
    shared_per_multiprocessor=228 * KIB,
    registers=65536,
    l2_bytes=50 * MIB,
    bandwidth=4.8e12,
    tensor_flops=7.5e12,
    vector_flops=0.508e12,
    tensor_cores=_tensor_cores("wgmma", WIDE_MMA),
)
B200 = Device(
    name="NVIDIA B200",
    architecture="sm_100",
    multiprocessors=148,
    shared_per_block=227 * KIB,
    shared_per_multiprocessor=228 * KIB,
    registers=65536,
    l2_bytes=126 * MIB,
    bandwidth=8.0e12,
    tensor_flops=15e12,
    vector_flops=0.54e12,
    tensor_cores=_tensor_cores("tcgen05", WIDE_MMA),
)
MI300X = Device(
    name="AMD Instinct MI300X",
    architecture="gfx942",
    multiprocessors=304,
    shared_per_block=64 * KIB,
    shared_per_multiprocessor=64 * KIB,
    registers=131072,
    l2_bytes=32 * MIB,
    bandwidth=5.3e12,
    tensor_flops=4.3e12,
    vector_flops=0.54e12,
    tensor_cores=_tensor_cores("mfma", (torch.float64, "mfma")),
    warp_width=64,
    sector_bytes=64,
    thread_registers=512,
)
# Turing, the oldest that Triton compiles for, has tensor cores for float16 alone
T4 = Device(
    name="NVIDIA T4",
    architecture="sm_75",
    multiprocessors=40,
    shared_per_block=64 * KIB,
    shared_per_multiprocessor=64 * KIB,
    registers=65536,
    l2_bytes=4 * MIB,
    bandwidth=0.32e12,
    tensor_flops=1.6e12,
    vector_flops=0.2e12,
    tensor_cores=((torch.float16, "mma"),),
    threads=1024,
    programs=16,
)
DEVICES = {device.architecture: device for device in (T4, A100, A10, L40S, H200, B200, MI300X)}
DEFAULT = H200  # what plans without a GPU are for: golden kernels, the interpreter

# in place of whatever is there; of one thread: others go on planning for the GPU that they run on
_described: ContextVar[Device | None] = ContextVar("described", default=None)


@asked_once
def device_of(device: torch.device) -> Device:
    """Return the GPU behind a torch device, read once; an H200 for a CPU, where kernels are interpreted."""
    described = _described.get()
    if described is not None:
        return described
    return _read(device) if device.type == "cuda" else DEFAULT


@contextmanager
def described_as(device: Device) -> Iterator[Device]:
    """Plan for this GPU, whatever is there, until the block ends, in the thread that runs it.

    Plans are cached by their tensors alone, before and inside the block: this is for looking at what would be planned
    elsewhere, and for tests whose small tensors stand for large ones.
    """
    before = _described.set(device)
    try:
        yield device
    finally:
        _described.reset(before)


@cache
def _read(device: torch.device) -> Device:
    return from_properties(torch.cuda.get_device_properties(device))


def from_properties(properties: Any) -> Device:
    """Return a description from torch's properties of a GPU; the rest is that of the nearest known GPU."""
    nearest = _nearest(properties)

    def read(field: str, default: int) -> int:
        return int(getattr(properties, field, 0) or default)

    return replace(
        nearest,
        name=properties.name,
        architecture=_architecture(properties),
        multiprocessors=read("multi_processor_count", nearest.multiprocessors),
        shared_per_block=read("shared_memory_per_block_optin", nearest.shared_per_block),
        shared_per_multiprocessor=read("shared_memory_per_multiprocessor", nearest.shared_per_multiprocessor),
        registers=read("regs_per_multiprocessor", nearest.registers),
        l2_bytes=max(read("L2_cache_size", 0), nearest.l2_bytes if nearest is MI300X else 0) or nearest.l2_bytes,
        bandwidth=_bandwidth(properties) or nearest.bandwidth,
        warp_width=read("warp_size", nearest.warp_width),
        threads=read("max_threads_per_multi_processor", nearest.threads),
    )


def _architecture(properties: Any) -> str:
    """Return the architecture: `sm_90`, or `gfx942` of `gfx942:sramecc+:xnack-`."""
    amd = str(getattr(properties, "gcnArchName", ""))
    return amd.partition(":")[0] if amd.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def _nearest(properties: Any) -> Device:
    """Return the description of the same architecture, or of the newest of those that came before it."""
    architecture = _architecture(properties)
    if architecture in DEVICES:
        return DEVICES[architecture]
    if architecture.startswith("gfx"):
        return MI300X
    capability = 10 * properties.major + properties.minor
    older = [(int(name[3:]), device) for name, device in DEVICES.items() if name.startswith("sm_")]
    fitting = [(number, device) for number, device in older if number <= capability]
    nearest = max(fitting or older[:1], key=lambda pair: pair[0])[1]
    # consumer Blackwell (sm_120) multiplies as Ampere does, in as little shared memory as Ada
    return L40S if properties.major == 12 else nearest


def _bandwidth(properties: Any) -> float:
    """Return the bytes per second of two transfers per clock over the whole bus; 0 if torch does not say."""
    kilohertz, bits = (getattr(properties, field, 0) or 0 for field in ("memory_clock_rate", "memory_bus_width"))
    return 2.0 * kilohertz * 1e3 * bits / 8
