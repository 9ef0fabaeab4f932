"""The whole kernel: the program's place in the grid, then one of five bodies, then the head with its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..planning import Dot, Schedule, Strides
from . import nan_recheck
from .argreduce import write_extremum
from .broadcast import Value
from .grid import place_program
from .kernel import NUMBERS, Config, Flags, Kernel
from .loads import load_available
from .loops import define_single_steps, innermost
from .persistent import write_persistent_rows
from .products import add_product, zeros
from .runs import write_runs
from .scope import Scope
from .spec import KernelSpec
from .stores import early_seed, load_shared, store_sum
from .unrolled import write_unrolled, write_unrolled_sum

__all__ = ["emit", "emit_joint", "emit_summed"]


def emit(schedule: Schedule, strides: Strides, config: Config, flags: Flags | None = None) -> Kernel:
    """Return the kernel that runs `schedule` with `config`."""
    scope = Scope(KernelSpec.of(schedule, strides, config, flags or Flags()))
    grid = place_program(scope)
    define_single_steps(scope)
    load_available(scope)
    if config.rows > 1:
        write_persistent_rows(scope)
    elif schedule.run:
        write_runs(scope)
    elif schedule.tables:
        write_unrolled(scope)
    elif schedule.is_sum:
        _write_sum(scope)
    else:
        write_extremum(scope)
    return _assemble([scope], grid)


def emit_joint(
    schedules: Sequence[Schedule], strides: Sequence[Strides], config: Config, flags: Sequence[Flags]
) -> Kernel:
    """Return one kernel for the statements of `joint_schedules`: what several of them read is loaded once.

    `strides` and `flags` are those of each statement. An output has the number of its statement for a name.
    """
    own = enumerate(zip(schedules, strides, flags))
    specs = [KernelSpec.of(schedule, stride, config, flag, str(at)) for at, (schedule, stride, flag) in own]
    scope = Scope(specs[0], loaded={})
    grid = place_program(scope)
    define_single_steps(scope)
    scopes = [replace(scope.child(indent=0), spec=spec) for spec in specs]
    for statement in scopes:
        load_available(statement)
    if config.run > 1:
        write_runs(*scopes)
    elif schedules[0].tables:
        write_unrolled(*scopes)
    else:
        for statement in scopes:
            _write_sum(statement)
    return _assemble(scopes, grid)


def emit_summed(
    schedules: Sequence[Schedule], strides: Sequence[Strides], config: Config, flags: Sequence[Flags]
) -> Kernel:
    """Return the kernel that adds up the statements of `summed_schedules`, whose results are stored once.

    `config` has the blocks of all of them, and `strides` and `flags` are those of each statement.
    """
    specs = [
        KernelSpec.of(schedule, stride, replace(config, blocks=_own_blocks(config, schedule)), flag)
        for schedule, stride, flag in zip(schedules, strides, flags)
    ]
    scope = Scope(specs[0])
    grid = place_program(scope)
    scopes = [replace(scope.child(indent=0), spec=spec) for spec in specs]
    for statement in scopes:
        define_single_steps(statement)
        load_available(statement)
    write_unrolled_sum(*scopes)
    return _assemble(scopes, grid)


def _own_blocks(config: Config, schedule: Schedule) -> tuple[tuple[str, int], ...]:
    return tuple((name, config.block(name)) for name in schedule.axes)


def _write_sum(scope: Scope) -> None:
    """Write the loops of a program that sums one tile, and the store of its sums."""
    spec, has_loops = scope.spec, bool(scope.spec.loops)
    acc = Value("acc", spec.result_axes)
    seed, shared = early_seed(scope, acc.axes) if has_loops else None, load_shared(scope)
    if has_loops:
        scope.line(f"acc = {zeros(spec, acc.axes)}")
    body = scope
    for body in innermost(scope):
        add_product(body, acc, has_loops)
    result = spec.tile.result("acc", acc.axes)
    if has_loops and isinstance(spec.schedule.tree, Dot) and result != "acc":
        scope.line(f"acc = {result}")
    store_sum(scope, acc, seed, shared)
    if nan_recheck.is_needed(body):  # after the store, so that the check overlaps it
        nan_recheck.recheck_tile(scope, acc)


def _assemble(scopes: Sequence[Scope], grid: tuple[tuple[str, int], ...]) -> Kernel:
    """Return the source with its head, and how to call it."""
    scope, spec, parameters = scopes[0], scopes[0].spec, scopes[0].symbols.parameters
    ordered = sorted(parameters, key=lambda parameter: parameter.kind in NUMBERS)
    varying = NUMBERS if spec.flags.strides_vary else ("extent", "copy")
    lengths = [parameters[parameter] for parameter in ordered if parameter.kind in varying]
    name = "insum_kernel"
    head = [
        "import triton",
        "import triton.language as tl",
        "",
        "",
        f"@triton.jit(do_not_specialize={lengths!r})",
        f"def {name}({', '.join(parameters[parameter] for parameter in ordered)}):",
        *[line for statement in scopes for line in _described(statement.spec.schedule)],
        f"    # {spec.config}",
    ]
    return Kernel(
        "\n".join([*map(_ascii, head), *scope.lines, ""]),
        name,
        tuple(ordered),
        grid,
        spec.config.num_warps,
        spec.config.num_stages,
        spec.config.parts,
        spec.config.copies,
    )


def _described(schedule: Schedule) -> tuple[str, str]:
    """Return the comments that say which statement a kernel computes, and how it stores the result."""
    return f"    # {schedule.bound.statement}", f"    # {schedule.strategy}: {_scheduled_statement(schedule)}"


def _scheduled_statement(schedule: Schedule) -> str:
    """Return the statement as the scatter strategy has rewritten it."""
    statement = schedule.bound.statement
    product = " * ".join(map(str, schedule.factors)) or str(statement.scale)
    if not statement.is_sum:
        product = f"{statement.reduction}({product})"
    return f"{schedule.output} {statement.op} {product}"


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
