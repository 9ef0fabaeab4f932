"""Statements over DTensors, on four processes over gloo."""

from __future__ import annotations

import dtensor_cases
import pytest
from ranks import failures, on_ranks

pytestmark = pytest.mark.cpu

REMEDY = "pass the same one on every rank, or a DTensor that says how it is split"


def test_four_ranks_compute_as_one():
    """One test for all cases, so that no more than four processes are started, whoever runs it."""
    results = on_ranks("dtensor_cases", 4, dtensor_cases.NAMES)
    assert not failures(results)
    for placements in results["placements_follow_the_statement"]:
        assert placements == {
            "groups": "Partial(sum)",
            "columns": "Shard(1)",
            "gathered": "Shard(1)",
            "groups, B split": "Partial(sum)",
            "whole": "Replicate",
        }
    for rank, messages in enumerate(results["mistakes"]):
        assert messages == {
            "a pattern that differs": "AK is not the same on all ranks: rank 2 holds another than rank 0, and on this "
            f"rank, {rank}, it is [10, 2] torch.int64; {REMEDY}",
            "a plain parameter": f"AV asks for a gradient but is no DTensor, unlike B, so that rank {rank} would have "
            "only its own part of that gradient; pass torch.distributed.tensor.distribute_tensor(AV, B.device_mesh)",
            "two meshes": "B and AV are DTensors on two meshes, of the shapes [4] and [2, 2], says rank "
            f"{rank}; distribute both on one mesh",
            "a strange placement": f"B is placed as StridedShard on rank {rank}, which a statement can't keep; "
            "redistribute it to Shard, Replicate or Partial first",
        }
