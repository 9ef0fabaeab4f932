"""Kernels of several statements over constant tables compile for every GPU, and keep their tiles in registers."""

from __future__ import annotations

import pytest
import torch
from building import SHARED_MEMORY, assembled, compile_launcher
from statements import IS_INTERPRETED, IS_THOROUGH

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.planning.device import DEVICES, Device, described_as
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.tuning import JointProblem, SummedProblem, joint_problem, summed_problem
from insum_ops.formats.facts import ConstantTables

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="a process that interprets kernels can't compile them: run `make test-cross`"
)

SAMPLES, ROWS, COLUMNS = 30_000, 12, 92
CHANNELS = (48, 24, 12, 6)  # of the first input's blocks, each with a statement
TEXT = "Z[b,i,w] += CGV{0}[i,r{0}] * X{0}[b,CGJ{0}[i,r{0}],u{0}] * Y[b,CGK{0}[i,r{0}]] * W{0}[b,u{0},w]"
TARGETS = (80, 86, 89, 90, 100, "gfx942")


def description(target: int | str) -> Device:
    return DEVICES[f"sm_{target}" if isinstance(target, int) else target]


def assert_builds(target: int | str, own: JointProblem) -> None:
    """Assert that every config fits a GPU, and for sm_90 that its threads keep their tiles in registers."""
    dtypes = {name: dtype for part in own.problems for name, dtype in part.bound.dtypes.items()}
    with described_as(description(target)):
        for config in own.configs:
            built = compile_launcher(target, own.launcher(config).kernel, dtypes)
            assert built.metadata.shared <= SHARED_MEMORY[target]
            if target == 90:
                assert assembled(built).stack == 0


def problem(target: int | str, channels: tuple[int, ...]) -> SummedProblem:
    parts, generator = [], torch.Generator().manual_seed(0)
    for number, length in enumerate(channels):
        components = 2 * number + 1
        known = {
            f"CGV{number}": torch.rand(ROWS, 3, generator=generator),
            f"CGJ{number}": torch.randint(0, components, (ROWS, 3), generator=generator).int(),
            f"CGK{number}": torch.randint(0, 16, (ROWS, 3), generator=generator).int(),
        }
        tensors = {name: table.to("meta") for name, table in known.items()}
        shapes = {f"X{number}": (components, length), "Y": (16,), f"W{number}": (length, COLUMNS)}
        tensors |= {name: torch.empty(SAMPLES, *shape, device="meta") for name, shape in shapes.items()}
        bound = bind(parse(TEXT.format(number)), tensors, (SAMPLES, ROWS, COLUMNS))
        parts.append(problem_for(bound, tensors, ConstantTables.of(known)))
    with described_as(description(target)):
        found = summed_problem(parts)
        assert found is not None
        assert found.configs
    return found


@pytest.mark.parametrize("target", TARGETS if IS_THOROUGH else (90, "gfx942"))
@pytest.mark.parametrize("channels", [CHANNELS, (108,)], ids=["several", "one"])
def test_a_sum_of_statements_compiles(target, channels):
    """And one statement alone: whatever the number of channels, a loop walks them in blocks."""
    assert_builds(target, problem(target, channels))


GRADIENTS = {  # of a product whose weights have all names of its statement: its statement, and what that reads
    "X": ("X[b,j,u] += CGVX[j,r] * Z[b,CGIX[j,r],w] * Y[b,CGKX[j,r]] * W[b,u,w]", ("Z", "Y", "W")),
    "Y": ("Y[b,k] += CGVY[k,r] * Z[b,CGIY[k,r],w] * X[b,CGJY[k,r],u] * W[b,u,w]", ("Z", "X", "W")),
    "W": ("W[b,u,w] += CGVW[r] * Z[b,CGIW[r],w] * X[b,CGJW[r],u] * Y[b,CGKW[r]]", ("Z", "X", "Y")),
}
COMPONENTS, ENTRIES = 4, 2


def gradients(target: int | str, channels: int) -> JointProblem:
    generator, parts = torch.Generator().manual_seed(0), []
    shapes = {"X": (COMPONENTS, channels), "Y": (COMPONENTS,), "Z": (COMPONENTS, channels), "W": (channels, channels)}
    for name, (text, read) in GRADIENTS.items():
        rows = (ENTRIES,) if name == "W" else (COMPONENTS, ENTRIES)
        letters = {"X": "IK", "Y": "IJ", "W": "IJK"}[name]
        known = {
            f"CG{letter}{name}": torch.randint(0, COMPONENTS, rows, generator=generator).int() for letter in letters
        }
        known[f"CGV{name}"] = torch.rand(rows, generator=generator)
        tensors = {table: numbers.to("meta") for table, numbers in known.items()}
        tensors |= {other: torch.empty(SAMPLES, *shapes[other], device="meta") for other in read}
        bound = bind(parse(text), tensors, (SAMPLES, *shapes[name]))
        parts.append(problem_for(bound, tensors, ConstantTables.of(known)))
    with described_as(description(target)):
        found = joint_problem(parts)
        assert found is not None
        assert found.configs
    return found


@pytest.mark.parametrize("channels", [44, 108])
@pytest.mark.parametrize("target", TARGETS if IS_THOROUGH else (90, "gfx942"))
def test_gradients_that_share_a_kernel_compile(target, channels):
    """Those of any number of channels: the sum over all weights, of Y, is cut into parts."""
    assert_builds(target, gradients(target, channels))
