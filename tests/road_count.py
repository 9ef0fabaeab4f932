"""How much of the package there is, and in how many places one thing is done, read off its source.

`python tests/road_count.py` prints a table: files, lines and floors of each folder; the places that ask whether a
tensor has changed; the places that read torch's state; and which of the warm roads, on which a call seen before has
been run, are still there.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from textwrap import fill

from test_layering import FOLDERS, MODULES, NAMES, Module

CHANGE_CHECKS = {"_version", "data_ptr"}
TORCH_STATE = {
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype"),
    *("get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "get_default_dtype"),
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("get_deterministic_debug_mode", "get_float32_matmul_precision", "fp32_precision", "allow_tf32"),
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    *("_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction"),
    *("_len_torch_dispatch_stack", "_len_torch_function_stack", "_get_dispatch_mode", "peek_interpreter_stack"),
    *("is_functorch_wrapped_tensor", "_is_functional_tensor", "retrieve_current_functorch_interpreter"),
    *("retrieve_all_functorch_interpreters", "get_interpreter_stack", "_current_level", "_is_fwd_grad_enabled"),
    *("is_compiling", "is_tracing"),
    *("is_current_stream_capturing", "_cuda_isCurrentStreamCapturing"),
}
# The ways that a call like one before could take: a name in a module, or a module that is one whole.
ROADS = (
    ("compiler.autograd", "recall"),
    ("compiler.express", "again"),
    ("compiler.express", "lane"),
    ("compiler.ready_call", "PlainCall"),
    ("compiler.ready_call", "SparseCall"),
    ("compiler.ready_call", "Standing"),
    ("compiler.pipeline", "run_alike"),
    ("functional", "insum_once"),
    ("functional", "insum_beside"),
    ("functional", "insum_owned"),
    ("nn.linear_product", "known_product"),
    ("matmul", "_again"),
    ("sparse_conv", "_pinned"),
    ("equivariant.steps", ""),
    ("equivariant.format_steps", ""),
    ("equivariant.whole", ""),
    ("equivariant.node", ""),
)
BY_NAME = {module.name: module for module in MODULES}


def folder_of(module: Module) -> str:
    """The folder of a module: `insum_ops` has only what is in neither of the others."""
    return max(
        (folder for folder, package in FOLDERS.items() if f"{module.name}.".startswith(f"{package}.")), key=_deep
    )


def _deep(folder: str) -> int:
    return len(FOLDERS[folder])


@cache
def floors(name: str, folder: str) -> int:
    """How many modules of a folder the longest chain of imports has that starts at one of them."""
    below = {i.module for i in BY_NAME[name].imports if i.is_at_run_time and i.module in NAMES} - {name}
    return 1 + max((floors(other, folder) for other in below if folder_of(BY_NAME[other]) == folder), default=0)


def reads(module: Module, names: set[str]) -> int:
    """How often a module reads an attribute, or a name, that is one of `names`."""
    found = 0
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            is_modules = node.attr == "_version" and ast.unparse(node.value) in ("self", "nn.Module")  # of a checkpoint
            found += node.attr in names and isinstance(node.ctx, ast.Load) and not is_modules
        elif isinstance(node, ast.alias):
            found += node.name in names
    return found


def defines(module: Module | None, name: str) -> bool:
    """Whether a module is there and has a function or class of that name somewhere; without a name: is there."""
    if module is None or not name:
        return module is not None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and node.name == name for node in ast.walk(module.tree))


def by_file(count: Callable[[Module], int]) -> Counter[str]:
    counted = {module.name.removeprefix("insum_ops."): count(module) for module in MODULES}
    return Counter({name: number for name, number in counted.items() if number})


def _print_places(title: str, places: Mapping[str, int]) -> None:
    print(f"\n{title}: {sum(places.values())} places in {len(places)} files")
    ordered = sorted(places.items(), key=lambda item: (-item[1], item[0]))
    print(
        fill(
            ", ".join(f"{name} {number}" for name, number in ordered), 110, initial_indent="  ", subsequent_indent="  "
        )
    )


def main() -> None:
    print(f"{'folder':12}{'files':>6}{'lines':>8}{'floors':>8}")
    for folder in sorted(FOLDERS):
        inside = [module for module in MODULES if folder_of(module) == folder]
        lines = sum(len(module.path.read_text(encoding="utf-8").splitlines()) for module in inside)
        highest = max(floors(module.name, folder) for module in inside)
        print(f"{folder + '/':12}{len(inside):6}{lines:8}{highest:8}")
    _print_places("change checks (_version, data_ptr)", by_file(lambda module: reads(module, CHANGE_CHECKS)))
    _print_places("readers of torch's state", by_file(lambda module: reads(module, TORCH_STATE)))
    standing = {road: defines(BY_NAME.get(f"insum_ops.{road[0]}"), road[1]) for road in ROADS}
    print(f"\nwarm roads: {sum(standing.values())} of {len(ROADS)}")
    for (module, name), is_there in standing.items():
        print(f"  {'there' if is_there else 'gone ':5}  {module}{'.' if name else ''}{name}")


if __name__ == "__main__":
    main()
