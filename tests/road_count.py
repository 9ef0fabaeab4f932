"""How much of the package there is, and in how many places one thing is done, read off its source.

`python tests/road_count.py` prints a table: files, lines and floors of each folder, rooms above rooms; the places that
ask whether a tensor has changed, and apart from them those that pass addresses to kernels; the places that read torch's
state; and who goes the warm road, on which a call like an earlier one is run.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from textwrap import fill

from test_layering import CHANGE_CHECKS, FOLDERS, MODULES, NAMES, PASSES_ADDRESSES, TORCH_STATE, Module, reads

ROAD = "planned"  # compiler/runtime/plan_cache.py: replays what was recorded of an earlier call
BY_NAME = {module.name: module for module in MODULES}


def folder_of(module: Module) -> str:
    """The folder of a module: `insum_ops` has only what is in neither of the others."""
    return max(
        (folder for folder, package in FOLDERS.items() if f"{module.name}.".startswith(f"{package}.")), key=_deep
    )


def _deep(folder: str) -> int:
    return len(FOLDERS[folder])


def room_of(name: str) -> str:
    """The innermost folder of the three that a module lies in; a module beside these folders is a room itself."""
    parts = name.split(".")
    folder = ".".join(parts[:-1]) if BY_NAME[name].path.stem != "__init__" else name
    return folder if folder not in FOLDERS.values() else name


@cache
def floors(room: str) -> int:
    """How many rooms the longest chain of imports has that starts at one of them and stays in its part of the tree."""
    folder = folder_of(BY_NAME[room])
    inside = [module for module in MODULES if room_of(module.name) == room]
    imported = {i.module for module in inside for i in module.imports if i.is_at_run_time and i.module in NAMES}
    below = {room_of(name) for name in imported} - {room}
    return 1 + max((floors(other) for other in below if folder_of(BY_NAME[other]) == folder), default=0)


def passed_addresses(module: Module) -> int:
    """How many addresses a module reads to pass them to a kernel, which is no check for a change."""
    return reads(module.tree, {"data_ptr"}) if module.name in PASSES_ADDRESSES else 0


def change_checks(module: Module) -> int:
    """How often a module reads a version or an address otherwise."""
    return reads(module.tree, CHANGE_CHECKS) - passed_addresses(module)


def calls(module: Module, name: str) -> int:
    """How often a module calls a function by that name."""
    return sum(isinstance(node, ast.Call) and ast.unparse(node.func) == name for node in ast.walk(module.tree))


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
        highest = max(floors(room_of(module.name)) for module in inside if module.name not in FOLDERS.values())
        print(f"{folder + '/':12}{len(inside):6}{lines:8}{highest:8}")
    _print_places("change checks (_version, data_ptr)", by_file(change_checks))
    _print_places("addresses passed to kernels (data_ptr)", by_file(passed_addresses))
    _print_places("readers of torch's state", by_file(lambda module: reads(module.tree, TORCH_STATE)))
    _print_places(f"the warm road, `{ROAD}`, is called", by_file(lambda module: calls(module, ROAD)))


if __name__ == "__main__":
    main()
