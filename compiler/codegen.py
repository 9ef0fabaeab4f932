"""(`Schedule`, config) -> Triton source: a pure function from data to text.

Lazy broadcasting: every emitted value knows which tile axes it varies over, and an axis is inserted (`[:, None]`) only
where values over different axes meet. With `lazy=False` every index is born with all axes and operands of a dot are
reshaped, as TorchInductor does; it exists to be measured.
"""

from __future__ import annotations

from .frame import Frame
from .kernel import Config, Flags, Kernel
from .rows import Rows
from .schedule import Schedule, Strides

__all__ = ["emit"]


def emit(schedule: Schedule, strides: Strides, config: Config, flags: Flags | None = None) -> Kernel:
    """The kernel that runs `schedule` with `config`."""
    kind = Frame if config.rows == 1 else Rows
    return kind(schedule, strides, config, flags or Flags()).kernel()
