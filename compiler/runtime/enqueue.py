"""A loaded kernel -> a function that puts it on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["LaunchCall", "Runner", "enqueue"]

Runner = Callable[[int, Sequence[Any]], None]  # of a number of programs, and a kernel's pointers and numbers


class LaunchCall(NamedTuple):
    """`function(programs, 1, 1, stream_of(device), *fixed, *arguments)`, by which a kernel is put on a stream."""

    function: Callable[..., None]
    stream_of: Callable[[Any], int]
    device: int | None
    fixed: tuple[Any, ...]
    is_packed: bool  # the arguments are one of the function's

    def __call__(self, programs: int, arguments: Sequence[Any]) -> None:
        passed = (arguments,) if self.is_packed else arguments
        self.function(programs, 1, 1, self.stream_of(self.device), *self.fixed, *passed)


def enqueue(compiled: Any, device: int | None, stream_of: Callable[[Any], int], version: str) -> Runner:
    """Return a function that puts `compiled` on the current stream of a device, in Triton of this version.

    Triton's launcher is a Python object around one C function, for which it finds the memory that a kernel asks for.
    A kernel that asks for none goes straight to that function, in the versions of Triton whose arguments are below.
    A launch plan makes the call of that function its own line: the attribute `call` says how.
    """
    run, kernel, metadata = compiled.run, compiled.function, compiled.packed_metadata
    launcher_version = version.rpartition(".")[0] if type(run).__name__ == "CudaLauncher" else ""
    function, is_packed = run, False
    fixed: tuple[Any, ...] = (kernel, metadata, None, None, None)
    if launcher_version in ("3.6", "3.7") and run.global_scratch_size == run.profile_scratch_size == 0:
        function, kinds = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
        # the five Nones: what hooks are told, the hooks before and after, and a kernel's memory, of two kinds
        if launcher_version == "3.7":
            described = run.arg_annotations, run.kernel_signature
            fixed, is_packed = (kernel, *kinds, metadata, None, None, None, None, None, *described), True
        else:
            fixed = kernel, *kinds, None, None, metadata, None, None, None
    call = LaunchCall(function, stream_of, device, fixed, is_packed)

    def launch(programs: int, arguments: Sequence[Any]) -> None:
        call(programs, arguments)

    launch.call = call  # type: ignore[attr-defined]
    launch.compiled = compiled  # type: ignore[attr-defined]  # freeing it would unload the kernel
    return launch
