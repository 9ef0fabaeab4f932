"""Shared memory as it is reckoned before a kernel is built is no less than what the compiler takes."""

from __future__ import annotations

import pytest
from building import compile_for
from problems import APPLICATIONS
from statements import IS_INTERPRETED

from insum_ops.compiler.planning.device import DEVICES, described_as
from insum_ops.compiler.planning.footprint import shared_bytes
from insum_ops.compiler.problem import candidates

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="a process that interprets kernels can't compile them: run `make test-cross`"
)
DOTS = [name for name, application in APPLICATIONS.items() if application.uses_dot]


@pytest.mark.sampled
@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("sm", [86, 90, 80, 89, 100])
def test_the_first_config_fits_every_gpu(name: str, sm: int) -> None:
    device = DEVICES[f"sm_{sm}"]
    with described_as(device):
        own = APPLICATIONS[name].problem()
        way = candidates(own)[0]
        taken = compile_for(sm, own, way).metadata.shared
        assert taken <= shared_bytes(way.schedule, way.config, device, own.flags.precision)
    assert taken <= device.shared_per_block
