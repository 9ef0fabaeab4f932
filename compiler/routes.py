"""Which route a statement over plain tensors takes: torch's own operations, several smaller statements, or one kernel.

Where tuning is on, the routes that a statement has are timed against each other and the choice is kept as tuned configs
are, so that no statement is slower than plain torch. Where nothing may be timed, an estimate of work and bytes decides
between one kernel and several statements.

Routes are ranked by what they take of the device. The host's time is hidden as soon as calls are queued or captured in
a graph, and an estimate of it chose one kernel of 0.020 ms where torch's product takes 0.007; it decides between routes
that the device finds equally good.

A route that torch offers is missing here for one of two reasons: `torch.bincount` reads its largest number back, which
no captured graph can; a sparse factor made dense would multiply what is absent by 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.facts import Fact
from ..formats.torch_state import HALF, is_capturing, may_round_sums, uses_tensor_cores
from ..lru_cache import LRUCache
from .binding import Bound
from .planning import Split, device_of, split
from .prepared import PreparedStatement, Runner
from .reference import numbers_held, sums_in_float32
from .runtime import INTERPRETED, Launcher, on_device, paused
from .tuning import NEAR, fastest, floor_milliseconds, host_milliseconds, tuning_mode

__all__ = ["CLEAR", "KERNEL", "STATEMENTS", "TORCH", "chosen_route", "fastest_route", "split_of"]

KERNEL, STATEMENTS, TORCH = "one kernel", "several statements", "torch operations"
CLEAR = 2.0  # times faster by an estimate that knows neither tiles nor caches: then nothing slower is timed
SHARE = 0.25  # of a GPU's free memory: what torch operations may take for one statement
CHOICES = 2048

Maker = Callable[[float], Runner]  # is given the least milliseconds of the routes that were timed before


class _Choice(NamedTuple):
    route: str
    parts: Split | None


@dataclass(frozen=True)
class _Call:
    """A statement and its tensors, and what there is to evaluate it."""

    statement: PreparedStatement
    variant: Any
    tensors: list[Tensor]
    fact: Fact | None
    run: Callable[..., Any]  # evaluates a statement over plain tensors
    kernel: Maker  # the runner of this one as one kernel
    parts: Split | None


_choices: LRUCache[_Choice] = LRUCache(CHOICES)  # by what statements have in common that one kernel runs


def fastest_route(
    statement: PreparedStatement,
    variant: Any,
    tensors: list[Tensor],
    fact: Fact | None,
    run: Callable[..., Any],
    kernel: Maker,
    times: dict[str, float] | None = None,
) -> Runner:
    """Return the runner that evaluates a statement over tensors like these the fastest.

    `run` evaluates a statement over plain tensors; `kernel` returns the runner of this one as one kernel, of which it
    need not try many if another route takes so many milliseconds that none can take fewer. If `times` is a dictionary,
    all routes are timed anew, and it is filled with their milliseconds.
    """
    key = statement.kernel_key(variant, fact)
    choice = _choices.get(key)
    parts = _split_of(statement, variant, fact) if choice is None else choice.parts
    call = _Call(statement, variant, tensors, fact, run, kernel, parts)
    if INTERPRETED or tuning_mode() == "off" or (tensors and tensors[0].is_cuda and is_capturing()):
        return _untimed(call)(0.0)
    if choice is not None and times is None:
        return (ROUTES[choice.route](call) or _untimed(call))(0.0)
    makers = {route: maker for route, make in ROUTES.items() if (maker := make(call)) is not None}
    route = next(iter(makers)) if len(makers) == 1 else _timed(call, makers, times)
    _choices[key] = _Choice(route, parts)
    return makers[route](0.0)


def chosen_route(statement: PreparedStatement, variant: Any, fact: Fact | None) -> str | None:
    """Return the route that was timed to be the fastest for statements like this one; None if none was timed."""
    choice = _choices.get(statement.kernel_key(variant, fact))
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


def _split_of(statement: PreparedStatement, variant: Any, fact: Fact | None) -> Split | None:
    """Return the smaller statements of a sum; None too where a fact is known, which is one about the whole."""
    return split_of(statement.bound, statement.padding(variant)) if fact is None and statement.is_sum else None


# the routes: each returns what makes its runner, or None where a statement does not have it


def _torch(call: _Call) -> Maker | None:
    bound = call.statement.bound
    if not _fits_in_memory(bound, call.statement.wants_winners):
        return None
    return lambda _: call.statement.graph(call.variant, sums_in_half=_sums_in_half(bound))


def _statements(call: _Call) -> Maker | None:
    parts = call.parts
    return None if parts is None else lambda _: _in_turn(call.statement, parts, call.run)


def _kernel(call: _Call) -> Maker | None:
    return None if call.parts is not None and call.parts.gain > CLEAR else call.kernel


# in the order in which they are timed: first what needs no kernel built, so that few are built where none can win
ROUTES: Mapping[str, Callable[[_Call], Maker | None]] = {TORCH: _torch, STATEMENTS: _statements, KERNEL: _kernel}


def _untimed(call: _Call) -> Maker:
    """Return the route that is taken where nothing may be timed."""
    return _kernel(call) or _statements(call) or call.kernel  # one of the first two always is


def _in_turn(statement: PreparedStatement, parts: Split, run: Callable[..., Any]) -> Runner:
    """Return what evaluates the smaller statements one after the other; a tensor on the way lives until it is read."""
    *first, last = parts.steps
    size, names = statement.bound.size, statement.names
    output = last.output.name
    reads = [list(step.tensor_names) for step in parts.steps]
    if statement.bound.is_seeded and output not in reads[-1]:
        reads[-1].append(output)
    texts = [(str(step), ",".join(read)) for step, read in zip(parts.steps, reads)]

    def runner(tensors: list[Tensor], fact: object = None) -> Tensor:
        named = dict(zip(names, tensors))
        for step, (text, joined), inner, read in zip(first, texts, parts.sizes, reads):
            named[step.output.name] = run(text, joined, inner, [named[name] for name in read], None, False)
            for name in read:
                if name not in names:  # made by an earlier step, and read by this one alone
                    del named[name]
        return run(*texts[-1], size, [named[name] for name in reads[-1]], None, False)  # type: ignore[no-any-return]

    return runner


def _timed(call: _Call, makers: Mapping[str, Maker], times: dict[str, float] | None) -> str:
    """Return the route that takes the least, measured now unless it is remembered."""
    statement, fact = call.statement, call.fact
    bound = statement.bound
    device, is_new, times = device_of(bound.device), times is not None, {} if times is None else times

    floor = floor_milliseconds(bound, device, uses_tensor_cores(bound.dtype))

    def start(name: str) -> tuple[Callable[[], object], float] | None:
        least = min(times.values(), default=0.0)
        if 0 < NEAR * least <= floor and not is_new:
            return None  # there is nothing left to win
        runner = makers[name](least)
        if isinstance(runner, Launcher):
            host = host_milliseconds(bound.device, runner.preparation, runner.is_wide)
        else:
            host = device.host_milliseconds(len(bound.statement.accesses))  # an operation for each factor, about
        return lambda: runner(call.tensors, fact), host

    problem = statement.problem(call.tensors, fact)
    key = replace(problem.key, statement=f"route of {problem.key.statement}")
    with on_device(bound.device), paused(), torch.no_grad():  # none of it is a part of the call
        return fastest(key, list(makers), list(makers), {}, start, times, is_new)


def _fits_in_memory(bound: Bound, wants_winners: bool) -> bool:
    """Return whether the torch operations of a statement take no more than their share of a GPU's free memory."""
    if bound.device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(bound.device)
    return numbers_held(bound, wants_winners) * bound.compute_dtype.itemsize <= SHARE * free


def _sums_in_half(bound: Bound) -> bool:
    """Return whether torch's operations may take half precision as it is, under the rules that kernels obey.

    A matrix product sums in float32 and rounds once by itself. What lies between several products, and results that
    meet where they are scattered, are rounded in half precision, which is for torch's flags to allow.
    """
    statement = bound.statement
    if bound.dtype not in HALF or bound.is_seeded or not statement.is_sum or not sums_in_float32(bound):
        return False
    return may_round_sums(bound.dtype) or (len(statement.accesses) == 2 and not statement.output.is_indirect)
