"""Patterns that change in training under FSDP2, on two processes."""

from __future__ import annotations

import pytest
import sharded_linear_cases
from ranks import failures, on_ranks

pytestmark = pytest.mark.cpu

DIFFERS = "mask is not the same on all ranks: rank 1 holds another than rank 0, and on this rank"


def test_patterns_change_as_in_one_process():
    results = on_ranks("sharded_linear_cases", 2, sharded_linear_cases.NAMES)
    assert not failures(results)
    assert results["half_precision_stays_after_a_change"] == ["torch.bfloat16 torch.float32 torch.float32"] * 2
    for rank, messages in enumerate(results["mistakes"]):
        alike = "change the pattern alike on every rank"
        assert messages == {
            "a mask that differs": f"{DIFFERS}, {rank}, it is [8, 3] torch.bool; {alike}",
            "a mask of another shape": "on rank 1, mask is [7, 3] but the blocks are [8, 3]; give one bool per block",
            "densities": f"density is 0.5 on rank 0 but 0.25 on rank 1; {alike}",
            "no block": f"on rank {rank}, the pattern leaves no block here, but fully_shard trains no empty parameter; "
            "keep one block or more on each rank",
            "an optimizer": "on rank 1, optimizer does not hold this layer's weight; pass the one that trains it",
            "in a pass": f"the layer is in a pass of FSDP on rank {rank}; change its pattern between training steps",
        }
