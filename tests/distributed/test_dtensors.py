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
        assert messages == expected_messages(rank)
    *_, elsewhere, _ = results["a_rank_that_is_not_in_the_mesh"]
    assert elsewhere == (
        "rank 2 is not in the mesh, which has the ranks 0, 1, 3; make the mesh over it too, or let the others call "
        "alone"
    )


def expected_messages(rank):
    """Most are the same sentence on every rank, about the one that is wrong; what `insum` refuses has its caret."""
    own = "" if rank == 2 else "on rank 2, "  # said before `insum` has looked whether it is over ranks
    same, differs = "call the same one on every rank", "is not the same on all ranks: rank"
    here = f"and on this rank, {rank}, it is"
    statement = f"the statement is '{dtensor_cases.SPMM}' with size=[7, 4] on rank 0 but"
    at = lambda place, text=dtensor_cases.SPMM: f"\n    {text}\n    {' ' * place}^"
    twice = "C[AM[p],n] += 2 * AV[p,q] * B[AK[p,q],n]"
    kinds = "distribute the same tensor with the same placements on every rank"
    return {
        "a pattern that differs": f"AK {differs} 2 holds another than rank 0, {here} [10, 2] torch.int64; {REMEDY}",
        "a plain parameter": "AV asks for a gradient but is no DTensor, unlike B, so that rank 2 would have only its "
        "own part of that gradient; pass torch.distributed.tensor.distribute_tensor(AV, B.device_mesh)",
        "two meshes": "B and AV are DTensors on two meshes, of the shapes [4] and [2, 2], says rank "
        f"{rank}; distribute both on one mesh",
        "a strange placement": "B is placed as StridedShard on rank 2, which a statement can't keep; redistribute it "
        "to Shard, Replicate or Partial first",
        "another placement": "B is [5, 4] torch.float32 in Replicate on rank 0 but [5, 4] torch.float32 in Shard(1) on "
        f"rank 2; {kinds}",
        "another kind": f"AM is [10] torch.int64 on rank 0 but [10] torch.int64 in Shard(0) on rank 2; {kinds}"
        if rank == 2
        else f"AM {differs} 2 holds another than rank 0, {here} [10] torch.int64; {REMEDY}",
        "a position out of range": "on rank 2, AK[0,0] is 8, outside B dimension 0, which has size 5; a negative "
        f"position means no entry{at(26)}",
        "another statement": f"{statement} '{twice}' with size=[7, 4] on rank 2; {same}",
        "another size": f"{statement} '{dtensor_cases.SPMM}' with size=[8, 4] on rank 2; {same}",
        "a size that is none": "on rank 2, size has 1 dimension [7] but C has 2 indices here; give one per dimension"
        + at(0),
        "no name": f"on rank 2, no tensor was given for AV; pass it as AV=...{at(14)}",
        "no statement": f"{own}']' closes nothing{at(36, dtensor_cases.SPMM + ']')}",
        "a format that is none": f"{own}A is of type str; pass a torch.Tensor or a format of insum_ops.formats"
        f"{at(10, 'C[m,n] += A[m,k] * B[k,n]')}",
        "a change in place": f"AK {differs} 1, 2, 3 hold others than rank 0, {here} [10, 2] torch.int64; {REMEDY}",
    }
