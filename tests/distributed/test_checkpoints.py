"""Distributed checkpoints, saved by some ranks and loaded by another number of them."""

from __future__ import annotations

import checkpoint_cases
import pytest
import torch
from ranks import failures, on_ranks
from torch.distributed import checkpoint

from insum_ops.compiler import OperandError
from insum_ops.distributed import saved_patterns

pytestmark = pytest.mark.cpu


def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path):
    """Two ranks save; four load that, train a model that FSDP shards over split layers, and save; one loads that."""
    saves, loads, trains = checkpoint_cases.SAVE, checkpoint_cases.LOAD, "fsdp_over_split_layers_trains_as_alone"
    for ranks, names in ((2, saves), (4, [*loads, trains, *saves]), (1, loads)):
        results = on_ranks("checkpoint_cases", ranks, names, CHECKPOINTS=str(tmp_path))
        assert not failures(results)
        for rank, messages in enumerate(results.get("own_parts_are_refused", ())):
            assert messages == expected_messages(rank, ranks)
        for rank, message in enumerate(results.get(trains, ())):
            assert message == own_blocks("weight", rank)


REMEDY = (
    "save whole_state_dict(model, sharded=True) of insum_ops.distributed, with whole_optimizer_state_dict for the "
    "optimizer, and load them with load_whole_state_dict and load_whole_optimizer_state_dict"
)


def own_blocks(name, rank):
    return (
        f"{name} holds only the blocks of rank {rank} of a layer that is split over ranks, and a checkpoint would hold "
        f"no others; {REMEDY}"
    )


def expected_messages(rank, ranks):
    ours = "[['0.bias', '0.weight', '2.bias', '2.weight']]"
    says = f"says rank {rank}"
    messages = {
        "a parameter of another model": f"optimizer holds a parameter [2] that is not among the model's, {says}; pass "
        "the model that it trains",
        "LBFGS": f"on rank {rank}, optimizer is LBFGS, whose state spans all parameters; leave it out and make a new "
        "one",
        "other groups": f"the state_dict has the groups [['0.weight']], but the optimizer has {ours}, {says}; pass "
        "what whole_optimizer_state_dict returned for a model of the same layers",
        "other blocks": f"exp_avg of 0.weight in the state_dict has 12 blocks, but the layer has 2, {says}; load the "
        "model's state by load_whole_state_dict first",
    }
    return messages if ranks == 1 else {"save": own_blocks("0.bias", rank), **messages}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_without_patterns_is_refused(tmp_path):
    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(OperandError) as caught:
        saved_patterns(tmp_path, "net.")
    assert str(caught.value) == (
        f"no pattern whose name starts with 'net.' is in {tmp_path}; pass what stands before the names of the model's "
        "state there, such as 'model.weight'"
    )
