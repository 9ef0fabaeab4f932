"""The device model: a GPU as data, by which rules know how many programs fill it and how much a tile may hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log2
from typing import Any

import torch

__all__ = [
    "A10",
    "A100",
    "B200",
    "DEVICES",
    "H100",
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
    "NVIDIA A100",
    "sm_80",
    108,
    163 * KIB,
    164 * KIB,
    65536,
    40 * MIB,
    2.0e12,
    2.9e12,
    0.18e12,
    _tensor_cores("mma", WIDE_MMA),
)
A10 = Device(
    "NVIDIA A10", "sm_86", 72, 99 * KIB, 100 * KIB, 65536, 6 * MIB, 0.6e12, 1.7e12, 0.43e12, _tensor_cores("mma")
)
L40S = Device(
    "NVIDIA L40S", "sm_89", 142, 99 * KIB, 100 * KIB, 65536, 96 * MIB, 0.86e12, 2.5e12, 0.64e12, _tensor_cores("mma")
)
H200 = Device(
    "NVIDIA H200",
    "sm_90",
    132,
    227 * KIB,
    228 * KIB,
    65536,
    50 * MIB,
    4.8e12,
    7.5e12,
    0.508e12,
    _tensor_cores("wgmma", WIDE_MMA),
)
H100 = replace(H200, name="NVIDIA H100", bandwidth=3.35e12)
B200 = Device(
    "NVIDIA B200",
    "sm_100",
    148,
    227 * KIB,
    228 * KIB,
    65536,
    126 * MIB,
    8.0e12,
    15e12,
    0.54e12,
    _tensor_cores("tcgen05", WIDE_MMA),
)
MI300X = Device(
    "AMD Instinct MI300X",
    "gfx942",
    304,
    64 * KIB,
    64 * KIB,
    131072,
    32 * MIB,
    5.3e12,
    4.3e12,
    0.54e12,
    _tensor_cores("mfma", (torch.float64, "mfma")),
    warp_width=64,
    sector_bytes=64,
)
# Turing, the oldest that Triton compiles for, has tensor cores for float16 alone
T4 = Device(
    "NVIDIA T4", "sm_75", 40, 64 * KIB, 64 * KIB, 65536, 4 * MIB, 0.32e12, 1.6e12, 0.2e12, ((torch.float16, "mma"),)
)
DEVICES = {device.architecture: device for device in (T4, A100, A10, L40S, H200, B200, MI300X)}
DEFAULT = H200  # what plans without a GPU are for: golden kernels, the interpreter

_described: list[Device] = []  # in place of whatever is there, the innermost last


def device_of(device: torch.device) -> Device:
    """Return the GPU behind a torch device, read once; an H200 for a CPU, where kernels are interpreted."""
    if _described:
        return _described[-1]
    return _read(device) if device.type == "cuda" else DEFAULT


# a tracer asks once and keeps the answer
setattr(device_of, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker


@contextmanager
def described_as(device: Device) -> Iterator[Device]:
    """Plan for this GPU, whatever is there, until the block ends.

    Plans are cached by their tensors alone, before and inside the block: this is for looking at what would be planned
    elsewhere, and for tests whose small tensors stand for large ones.
    """
    _described.append(device)
    try:
        yield device
    finally:
        _described.pop()


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
