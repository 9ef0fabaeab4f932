"""(`Schedule`, config) -> Triton source: a pure function from data to text.

Lazy broadcasting: every emitted value knows which tile axes it varies over, and an axis is inserted (`[:, None]`) only
where values over different axes meet. With `lazy=False` every index is born with all axes and operands of a dot are
reshaped, as TorchInductor does; it exists to be measured.

A kernel is written by plain functions over a `Scope`, the text so far and what is defined in it. `body.emit` chooses
among them: read it first. The files in the order of their imports:

    kernel       as data: a config, the settings outside a statement, a kernel's source and parameters
    broadcast    how values over different tile axes meet
    spec         what a kernel is written from
    scope        where the next line goes, and what is defined there
    loads        positions, factors, masks and addresses
    products     tiles multiplied and summed
    grid         which values of the grid's indices a program takes
    stores       sums to the output
    loops        what a program loops over
    argreduce    `max` and `min`, and where their winners are
    nan_recheck  sums of merged rows that are no number, taken again
    persistent   several rows to a program, one after another in one loop
    unrolled     constant tables as straight-line code
    runs         a scatter that adds up neighbours of one position first
    body         the whole kernel
"""

from .body import emit, emit_joint, emit_summed
from .kernel import ALIGNED, NUMBERS, Config, Flags, Kernel, Parameter

__all__ = ["ALIGNED", "NUMBERS", "Config", "Flags", "Kernel", "Parameter", "emit", "emit_joint", "emit_summed"]
