"""The runner of a product over aligned copies of its operands; see `planning/aligned.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...formats.facts import Fact
from ...formats.torch_state import is_captured, uses_tensor_cores
from ...lru_cache import LRUCache
from ..binding import kernel_strides
from ..language import Statement
from ..planning import Aligned, AlignedCopy, aligned, device_of
from ..runtime import active, paused, remember_range
from .grouped import Kernel, by_kernel
from .prepared import PreparedStatement

__all__ = ["AlignedRunner", "aligned_of"]

TABLES = 256  # kept, of some kB each

_tables: LRUCache[Tensor] = LRUCache(TABLES)  # by the positions that exist, all of them, and the device


def aligned_of(statement: PreparedStatement, tensors: list[Tensor]) -> Aligned | None:
    """Return the statements of a product over aligned copies of these tensors; None if they gain nothing."""
    bound = statement.bound
    strides = kernel_strides(bound, {name: tensor.stride() for name, tensor in zip(statement.names, tensors)})
    return aligned(bound, strides, device_of(bound.device), uses_tensor_cores(bound.dtype))


@dataclass(eq=False)
class AlignedRunner:
    """Copies operands, evaluates a product over the copies by its fastest route, and keeps what belongs to its result.

    `run` evaluates a statement over plain tensors; `kernel` returns the runner of one as one kernel.
    """

    statement: PreparedStatement
    way: Aligned
    run: Callable[..., Any]
    kernel: Kernel
    tables: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Make the tables of positions, outside any call that is recorded or captured later."""
        device = self.statement.bound.device
        self.tables = {name: _positions(*lengths, device) for name, lengths in self.way.tables.items()}

    @property
    def launches(self) -> int:
        """How many operations are put on the stream, if the product is one."""
        return len(self.way.copies) + 1 + (self.way.last is not None)

    def __call__(self, tensors: list[Tensor], fact: Fact | None = None) -> Tensor:
        way, named = self.way, dict(zip(self.statement.names, tensors))
        product = way.product
        for copy in way.copies:
            named[copy.name] = self._copied(copy, named[copy.source])
        names = [*product.tensor_names]
        if self.statement.bound.is_seeded and way.last is None:
            names.append(product.output.name)
        passed = [named[name] for name in names]
        result: Tensor = self.run(str(product), ",".join(names), way.size, passed, None, False)
        if way.last is None:
            return result
        size = self.statement.bound.size
        seed = [self.statement.bound.statement.output.name] if self.statement.bound.is_seeded else []
        sources = [result[tuple([slice(0, length) for length in size])], *[named[name] for name in seed]]
        return self._moved(way.last, [*way.last.tensor_names, *seed], sources, size)

    def _copied(self, copy: AlignedCopy, source: Tensor) -> Tensor:
        """Return the aligned copy of an operand; a launch plan makes it once for all gradients that read it."""
        names, tensors = [copy.source, *copy.tables], [source, *[self.tables[name] for name in copy.tables]]
        recording = active()
        if recording is not None:
            recording.constants += tensors[1:]
        if recording is None or not recording.is_input(source):
            return self._moved(copy.statement, names, tensors, copy.size)
        key = str(copy.statement), copy.size, *map(id, tensors)
        if key not in recording.copies:
            recording.copies[key] = self._moved(copy.statement, names, tensors, copy.size)
        return recording.copies[key]

    def _moved(self, statement: Statement, names: list[str], tensors: list[Tensor], size: tuple[int, ...]) -> Tensor:
        """Return what a statement copies, by one kernel: torch copies rows of odd lengths in half the speed."""
        return by_kernel(self.kernel, str(statement), names, size, tensors)  # type: ignore[return-value]


def _positions(count: int, length: int, device: torch.device) -> Tensor:
    """Return the positions from 0 to `count`, and -1 after them up to `length`."""
    key = count, length, device
    table = _tables.get(key)
    if table is None:
        with paused(), torch.inference_mode(False):  # it is no part of a call, and serves those to come
            positions = torch.arange(length, dtype=torch.int32, device="cpu")
            positions[count:] = -1
            table = positions.to(device)  # which waits for it: other streams read it too
            remember_range(table, -1 if count < length else 0, count - 1)
        if not is_captured(device):
            _tables[key] = table
    return table
