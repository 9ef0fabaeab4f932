"""A loaded kernel -> a function that puts it on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Runner", "enqueue"]

Runner = Callable[[int, Sequence[Any]], None]  # of a number of programs, and a kernel's pointers and numbers


def enqueue(compiled: Any, device: int | None, stream_of: Callable[[Any], int], version: str) -> Runner:
    """Return a function that puts `compiled` on the current stream of a device, in Triton of this version.

    Triton's launcher is a Python object around one C function, for which it finds the memory that a kernel asks for.
    A kernel that asks for none goes straight to that function, in the versions of Triton whose arguments are below.
    """
    run, kernel, metadata = compiled.run, compiled.function, compiled.packed_metadata
    launcher_version = version.rpartition(".")[0] if type(run).__name__ == "CudaLauncher" else ""
    if launcher_version in ("3.6", "3.7") and run.global_scratch_size == run.profile_scratch_size == 0:
        direct, coop, pdl = run.launch, run.launch_cooperative_grid, run.launch_pdl
    else:
        launcher_version = ""

    # the five Nones: what hooks are told, the hooks before and after, and a kernel's memory, of two kinds
    if launcher_version == "3.7":
        notes, types = run.arg_annotations, run.kernel_signature

        def launch(programs: int, args: Sequence[Any]) -> None:
            stream = stream_of(device)
            direct(
                programs, 1, 1, stream, kernel, coop, pdl, metadata, None, None, None, None, None, notes, types, args
            )

    elif launcher_version == "3.6":

        def launch(programs: int, args: Sequence[Any]) -> None:
            stream = stream_of(device)
            direct(programs, 1, 1, stream, kernel, coop, pdl, None, None, metadata, None, None, None, *args)

    else:

        def launch(programs: int, args: Sequence[Any]) -> None:
            run(programs, 1, 1, stream_of(device), kernel, metadata, None, None, None, *args)

    launch.compiled = compiled  # type: ignore[attr-defined]  # freeing it would unload the kernel
    return launch
