"""A fixed Triton kernel, launched with little between the call and the GPU: what Triton would look up is cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import FormatError
from .guard import is_real, may_keep
from .torch_state import INTERPRETED, OLDEST_GPU

try:
    import triton
except ImportError:  # not on Linux, say: torch's operations do what kernels would
    triton = None

__all__ = ["FixedKernel", "compiles_for", "runs_kernels"]

SEVERAL_GPUS = torch.cuda.device_count() > 1
INT32 = 2**31

Runner = Callable[..., None]

_young: dict[torch.device, bool] = {}  # not functools.cache, about which a tracer warns


def compiles_for(device: torch.device) -> bool:
    """Return whether Triton compiles for a GPU, asked once for each."""
    if device.type != "cuda" or triton is None:
        return False
    is_young = _young.get(device)
    if is_young is None:
        is_young = _young[device] = torch.cuda.get_device_capability(device) >= OLDEST_GPU
    return is_young


def runs_kernels(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors: their GPU runs them, and nobody traces or transforms the call."""
    return compiles_for(tensors[0].device) and may_keep(*tensors)


class FixedKernel:
    """A kernel whose parameters are tensors, then whole numbers from 0 on, then constants, in this order.

    `refusal` is the error for tensors without memory; "" if callers make sure that there are none.
    """

    def __init__(self, function: Any, num_warps: int = 4, refusal: str = "") -> None:
        self.function, self.num_warps, self.refusal = function, num_warps, refusal
        self.runners: dict[object, Runner] = {}
        self.specialised: tuple[int, ...] | None = None  # which of the numbers Triton compiles for

    def __call__(
        self, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...]
    ) -> None:
        if self.refusal and not all([is_real(tensor) for tensor in tensors]):
            raise FormatError(self.refusal)
        if INTERPRETED:
            self.function[grid](*tensors, *numbers, *constants)
            return
        device = tensors[0].device.index
        pointers = [tensor.data_ptr() for tensor in tensors]
        if SEVERAL_GPUS and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.runner(pointers, tensors, numbers, constants)(*grid, *pointers, *numbers, *constants)
        else:
            self.runner(pointers, tensors, numbers, constants)(*grid, *pointers, *numbers, *constants)

    def load(self, tensors: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...]) -> None:
        """Load the kernel that a call would launch: none can be loaded while a CUDA graph is captured."""
        if not INTERPRETED:
            self.runner([tensor.data_ptr() for tensor in tensors], tensors, numbers, constants)

    def runner(
        self, pointers: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...]
    ) -> Runner:
        """Return what launches the kernel for arguments like these on their device, which is the current one."""
        key = self.key(tensors[0].device.index, pointers, tensors, numbers, constants)
        return self.runners.get(key) or self.compiled(key, tensors, numbers, constants)

    def key(
        self,
        device: int | None,
        pointers: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        constants: tuple[Any, ...],
    ) -> object:
        """Return all that Triton compiles a kernel for: two calls with equal keys run the same machine code."""
        if self.specialised is None:
            self.specialised = _specialised(self.function, len(tensors), len(numbers))
        bits = 0
        for pointer in pointers:
            bits |= pointer
        unaligned = tuple([pointer & 15 > 0 for pointer in pointers]) if bits & 15 else ()
        wide = tuple([number >= INT32 for number in numbers]) if max(numbers) >= INT32 else ()
        kinds = [1 if numbers[at] == 1 else numbers[at] % 16 == 0 and 16 for at in self.specialised]
        return constants, device, unaligned, wide, *kinds, *[tensor.dtype for tensor in tensors]

    def compiled(
        self, key: object, tensors: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...]
    ) -> Runner:
        """Return the kernel compiled for arguments like these and loaded onto their device; it is cached by `key`."""
        binary = self.function.warmup(*tensors, *numbers, *constants, grid=(1, 1), num_warps=self.num_warps)
        binary[(1, 1, 1)]  # loads it onto the device
        run, function, metadata = binary.run, binary.function, binary.packed_metadata
        stream_of, device = triton.runtime.driver.active.get_current_stream, tensors[0].device.index

        def launch(width: int, height: int, *arguments: object) -> None:
            run(width, height, 1, stream_of(device), function, metadata, None, None, None, *arguments)

        launch.compiled = binary  # type: ignore[attr-defined]  # freeing it would unload the kernel
        self.runners[key] = launch
        return launch


def _specialised(function: Any, tensors: int, numbers: int) -> tuple[int, ...]:
    """Return the numbers that are not in `do_not_specialize`: whether they are 1 or divided by 16 is compiled in."""
    parameters = function.params[tensors : tensors + numbers]
    return tuple(at for at, parameter in enumerate(parameters) if not parameter.do_not_specialize)
