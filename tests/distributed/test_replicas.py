"""Layers that differ between ranks, under DDP and before it."""

from __future__ import annotations

import pytest
import replica_cases
from ranks import failures, on_ranks

pytestmark = pytest.mark.cpu


def test_what_ddp_would_overwrite_is_refused_on_every_rank():
    results = on_ranks("replica_cases", 2, replica_cases.NAMES)
    assert not failures(results)
    first, second = results["other_patterns_become_the_first_ranks"]
    assert first == second
    remedy = "seed all ranks alike before the model is made, or load one state on all of them"
    for rank, messages in enumerate(results["mistakes"]):
        differs = f"is not the same on all ranks: rank 1 holds another than rank 0, and on this rank, {rank}, it is"
        assert messages == {
            "another matrix": f"AK {differs} [4, {(1, 4)[rank]}] torch.int32; {remedy}",
            "a pattern of another size": f"coords {differs} [2, {(8, 12)[rank]}] torch.int32; {remedy}",
            "another pattern": f"coords {differs} [2, 5] torch.int32; {remedy}",
            "complex numbers": f"b {differs} [2] torch.complex64; {remedy}",
            "8-bit numbers": f"b {differs} [2] torch.float8_e4m3fn; {remedy}",
            "other parameters": "weight is [4, 4] torch.float32 on rank 0 but [5, 4] torch.float32 on rank 1; make the "
            "model of the same sizes on every rank",
            "more parameters": "rank 0 compares weight, bias with the others but rank 1 weight, says rank "
            f"{rank}; pass the same kinds of tensors on every rank",
        }
