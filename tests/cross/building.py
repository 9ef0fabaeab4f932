"""Compiles generated kernels for GPUs that need not be there, and reads what the assembler made of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from insum_ops.compiler.codegen import Parameter
from insum_ops.compiler.runtime.launch import Launcher, load, refusing
from insum_ops.compiler.tuning.problem import Candidate, Problem

__all__ = ["SHARED_MEMORY", "Built", "assembled", "build", "compile_for", "compile_launcher"]

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# bytes that one program may have, by the GPU: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"; the LDS of a CDNA3 compute unit
SHARED_MEMORY: dict[int | str, int] = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    "gfx942": 64 * 1024,
}
ALIGNED = 16  # bytes or elements: what Triton's launcher tells the compiler about pointers and strides
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Built:
    """A kernel as one GPU would run it."""

    registers: int
    stack: int  # bytes a thread keeps in memory because it ran out of registers
    shared_memory: int  # bytes
    tensor_core_ops: int
    cubin: bytes = field(repr=False)

    @property
    def spills(self) -> int:
        """Loads from and stores to the stack. Without one there are none: disassembling takes longer than building."""
        return self.stack and len(re.findall(r"\b(?:LDL|STL)\b", self.sass))

    @property
    def sass(self) -> str:
        """The machine's instructions."""
        return _run("nvdisasm", "-c", cubin=self.cubin)

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.stack} B stack, {self.shared_memory} B shared memory"


def _run(tool: str, option: str, cubin: bytes) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / tool), option, file.name]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def compile_for(target: int | str, problem: Problem, candidate: Candidate) -> Any:
    """What Triton would build at the first launch on a GPU of this kind, from shapes and strides alone.

    A kernel that it can't build is refused in the library's own words, by the function that launchers are built with.
    """
    launcher = problem.launcher(candidate)
    with refusing(problem.bound.statement, launcher.kernel):
        return compile_launcher(target, launcher, problem.bound.dtypes)


def compile_launcher(target: int | str, launcher: Launcher, dtypes: Mapping[str, torch.dtype]) -> Any:
    """What Triton would build for a launcher whose kernel reads tensors of these types."""
    parameters = launcher.kernel.parameters
    numbers = parameters[len(parameters) - len(launcher.numbers) :]
    values = dict(zip(numbers, launcher.numbers))
    types = tuple(_type(parameter, launcher, dtypes, values.get(parameter)) for parameter in parameters)
    aligned = tuple(
        at
        for at, parameter in enumerate(parameters)
        if parameter.kind != "extent" and values.get(parameter, ALIGNED) % ALIGNED == 0
    )
    options = launcher.kernel.num_warps, launcher.kernel.num_stages
    return _compile(launcher.kernel.source, launcher.kernel.name, types, aligned, options, target)


@cache
def _compile(
    source: str,
    name: str,
    types: tuple[str, ...],
    aligned: tuple[int, ...],
    options: tuple[int, int],
    target: int | str,
) -> Any:
    function = load(source, name)
    warps, stages = options
    return triton.compile(
        ASTSource(
            fn=function,
            signature=dict(zip(function.arg_names, types)),
            constexprs={(at,): 1 for at, kind in enumerate(types) if kind == "constexpr"},
            attrs={(at,): [["tt.divisibility", ALIGNED]] for at in aligned},
        ),
        target=GPUTarget("cuda", target, 32) if isinstance(target, int) else GPUTarget("hip", target, 64),
        options={"num_warps": warps, "num_stages": stages},
    )


def build(problem: Problem, candidate: Candidate, sm: int) -> Built:
    """A kernel for one of NVIDIA's GPUs, with what the assembler says of it."""
    return assembled(compile_for(sm, problem, candidate))


def assembled(kernel: Any) -> Built:
    """What the assembler says of a kernel that was compiled for one of NVIDIA's GPUs."""
    cubin, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
    usage = dict(re.findall(r"(\w+):(\d+)", _run("cuobjdump", "-res-usage", cubin)))
    return Built(
        int(usage["REG"]),
        int(usage["STACK"]),
        kernel.metadata.shared,
        len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", ptx)),
        cubin,
    )


def _type(parameter: Parameter, launcher: Launcher, dtypes: Mapping[str, torch.dtype], value: int | None) -> str:
    if value is not None:
        if parameter.kind == "stride" and value == 1:
            return "constexpr"
        return "i32" if value < 2**31 else "i64"
    facts = {"pointers": torch.int32, "order": torch.int32, "is_shared": torch.bool}
    facts |= {"output": launcher.sum_dtype, "seed": launcher.bound.dtype}
    facts["winners"] = launcher.bound.winner_dtype
    return POINTERS[facts.get(parameter.kind) or dtypes[parameter.name]]
