"""Which route a statement over plain tensors takes: one kernel, several smaller statements, or torch's own operations.

Where tuning is on, the routes that a statement has are timed against each other and the choice is kept as tuned configs
are, so that no statement is slower than plain torch. Where nothing may be timed, an estimate of work and bytes decides
between one kernel and several statements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.facts import Fact
from ..formats.torch_state import HALF, is_capturing, may_round_sums, uses_tensor_cores
from ..lru_cache import LRUCache
from .binding import Bound
from .planning import Split, device_of, split
from .prepared import PreparedStatement, Runner
from .runtime import INTERPRETED, Launcher, on_device, paused
from .tuning import fastest, host_milliseconds, tuning_mode

__all__ = ["CLEAR", "KERNEL", "STATEMENTS", "TORCH", "chosen_route", "fastest_route", "split_of"]

KERNEL, STATEMENTS, TORCH = "one kernel", "several statements", "torch operations"
CLEAR = 2.0  # times faster by an estimate that knows neither tiles nor caches: then nothing slower is timed
SHARE = 0.25  # of a GPU's free memory: what torch operations may take for one statement
CHOICES = 2048

Makers = Mapping[str, Callable[[], Runner]]


class _Choice(NamedTuple):
    route: str
    parts: Split | None


_choices: LRUCache[_Choice] = LRUCache(CHOICES)  # by what statements have in common that one kernel runs


def fastest_route(
    statement: PreparedStatement,
    variant: Any,
    tensors: list[Tensor],
    fact: Fact | None,
    run: Callable[..., Any],
    kernel: Callable[[], Runner],
    times: dict[str, float] | None = None,
) -> Runner:
    """Return the runner that evaluates a statement over tensors like these the fastest.

    `run` evaluates a statement over plain tensors; `kernel` returns the runner of this one as one kernel. Maxima, and
    sums over the rows of a format, about which there is a fact, always take a kernel. If `times` is a dictionary, all
    routes are timed anew, and it is filled with their milliseconds.
    """
    if fact is not None or not statement.is_sum:
        return kernel()
    key = statement.kernel_key(variant, None)
    choice = _choices.get(key)
    parts = split_of(statement.bound, statement.padding(variant)) if choice is None else choice.parts
    makers: dict[str, Callable[[], Runner]] = {KERNEL: kernel}
    if parts is not None:
        makers[STATEMENTS] = lambda: _in_turn(statement, parts, run)
        if parts.gain > CLEAR:
            del makers[KERNEL]
    untimed = next(iter(makers))
    if INTERPRETED or tuning_mode() == "off" or (tensors[0].is_cuda and is_capturing()):
        return makers[untimed]()
    timed = choice if times is None else None
    if (timed is None or timed.route == TORCH) and _fits_in_memory(statement.bound):  # which asks the device
        makers[TORCH] = lambda: statement.graph(variant, sums_in_half=_sums_in_half(statement.bound))
    if timed is None:
        route = untimed if len(makers) == 1 else _timed(statement, tensors, makers, times)
        timed = _choices[key] = _Choice(route, parts)
    return makers.get(timed.route, makers[untimed])()


def chosen_route(statement: PreparedStatement, variant: Any) -> str | None:
    """Return the route that was timed to be the fastest for statements like this one; None if none was timed."""
    choice = _choices.get(statement.kernel_key(variant, None))
    return None if choice is None else choice.route


def split_of(bound: Bound, padded: Collection[str]) -> Split | None:
    """Return the smaller statements by which a sum may be evaluated; None if one kernel takes no longer.

    A statement stays whole where an index tensor is padded: a product that is absent contributes nothing, while a
    tensor on the way would hold a 0 for it, and 0 times NaN is NaN. Tensors on the way round half precision, as those
    of torch.einsum do, so that it stays whole too where torch may not round partial sums.
    """
    if padded or (bound.dtype in HALF and not may_round_sums(bound.dtype)):
        return None
    return split(bound, device_of(bound.device), uses_tensor_cores(bound.dtype))


def _in_turn(statement: PreparedStatement, parts: Split, run: Callable[..., Any]) -> Runner:
    """Return what evaluates the smaller statements one after the other; a tensor on the way lives until it is read."""
    *first, last = parts.steps
    extents, size, names = statement.bound.extents, statement.bound.size, statement.names
    output = last.output.name
    reads = [list(step.tensor_names) for step in parts.steps]
    if statement.bound.is_seeded and output not in reads[-1]:
        reads[-1].append(output)
    texts = [(str(step), ",".join(read)) for step, read in zip(parts.steps, reads)]
    sizes = [tuple(extents[str(index)] for index in step.output.indices) for step in first]

    def runner(tensors: list[Tensor], fact: object = None) -> Tensor:
        named = dict(zip(names, tensors))
        for step, (text, joined), inner, read in zip(first, texts, sizes, reads):
            named[step.output.name] = run(text, joined, inner, [named[name] for name in read], None, False)
            for name in read:
                if name not in names:  # made by an earlier step, and read by this one alone
                    del named[name]
        return run(*texts[-1], size, [named[name] for name in reads[-1]], None, False)  # type: ignore[no-any-return]

    return runner


def _timed(statement: PreparedStatement, tensors: list[Tensor], makers: Makers, times: dict[str, float] | None) -> str:
    """Return the route that takes the least, measured now unless it is remembered."""
    bound = statement.bound
    device = device_of(bound.device)

    def start(name: str) -> tuple[Callable[[], object], float]:
        runner = makers[name]()
        if isinstance(runner, Launcher):
            host = host_milliseconds(bound.device, runner.preparation, runner.is_wide)
        else:
            host = device.host_milliseconds(len(bound.statement.accesses))  # an operation for each factor, about
        return lambda: runner(tensors, None), host

    problem = statement.problem(tensors, None)
    key = replace(problem.key, statement=f"route of {problem.key.statement}")
    with on_device(bound.device), paused(), torch.no_grad():  # none of it is a part of the call
        return fastest(key, list(makers), list(makers), {}, start, times)


def _fits_in_memory(bound: Bound) -> bool:
    """Return whether the torch operations of a statement take no more than their share: what they gather and make."""
    if bound.device.type != "cuda":
        return False
    statement, extents = bound.statement, bound.extents
    gathered = [access.names for access in statement.accesses if access.is_indirect]
    numbers = sum(prod(extents[name] for name in names) for names in (*gathered, statement.free))
    itemsize = bound.compute_dtype.itemsize
    operands = sum(prod(shape) for shape in bound.shapes.values())  # half precision is made float32
    free, _ = torch.cuda.mem_get_info(bound.device)
    return (2 * numbers + operands) * itemsize <= SHARE * free


def _sums_in_half(bound: Bound) -> bool:
    """Return whether torch's operations may take half precision as it is, under the rules that kernels obey.

    A matrix product sums in float32 and rounds once by itself. Where the results are scattered they meet in half
    precision, which is for torch's flags to allow. Products of entries, of any other statement, would be rounded
    before they are summed.
    """
    statement = bound.statement
    if bound.dtype not in HALF or len(statement.accesses) != 2 or bound.is_seeded:
        return False
    small, large = sorted((set(access.names) for access in statement.accesses), key=len)
    is_matrix_product = not small <= large or not statement.summed
    return is_matrix_product and (not statement.output.is_indirect or may_round_sums(bound.dtype))
