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


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 4), (4, 1)])
def test_a_checkpoint_loads_on_another_number_of_ranks(saved_by, loaded_by, tmp_path):
    where = {"CHECKPOINTS": str(tmp_path)}
    assert not failures(on_ranks("checkpoint_cases", saved_by, checkpoint_cases.SAVE, **where))
    assert not failures(on_ranks("checkpoint_cases", loaded_by, checkpoint_cases.LOAD, **where))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_without_patterns_is_refused(tmp_path):
    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(OperandError) as caught:
        saved_patterns(tmp_path, "net.")
    assert str(caught.value) == (
        f"no pattern whose name starts with 'net.' is in {tmp_path}; pass what stands before the names of the model's "
        "state there, such as 'model.weight'"
    )
