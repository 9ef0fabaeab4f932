"""A golden kernel takes no more shared memory than is reckoned before it is built, and none has a stack."""

from __future__ import annotations

import pytest
from building import build
from problems import APPLICATIONS
from statements import IS_INTERPRETED, IS_THOROUGH

from insum_ops.compiler.planning.device import DEVICES, described_as
from insum_ops.compiler.tuning.footprint import shared_bytes
from insum_ops.compiler.tuning.problem import candidates

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="a process that interprets kernels can't compile them: run `make test-cross`"
)
SPILLS = pytest.mark.xfail(reason="its first config spills 218 times", run=IS_THOROUGH)  # which takes longest
GOLDEN = [pytest.param(name, marks=SPILLS if name == "gather_matmul_scatter" else ()) for name in APPLICATIONS]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_first_config_of_a_golden_statement_has_room_on_hopper(name: str) -> None:
    device = DEVICES["sm_90"]
    with described_as(device):
        own = APPLICATIONS[name].problem()
        way = candidates(own)[0]
        built = build(own, way, 90)
        if way.schedule.uses_dot:
            assert built.shared_memory <= shared_bytes(way.schedule, way.config, device, own.flags.precision)
    assert built.shared_memory <= device.shared_per_block
    assert built.stack == built.spills == 0, str(built)
