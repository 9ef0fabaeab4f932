"""The tests of ranks over NCCL, with a GPU for each rank; where there is one GPU, with one rank."""

from __future__ import annotations

import pytest
import torch
from ranks import failures, on_ranks

CASES = {
    "parallel_linear_cases": [
        "the_pair_equals_the_whole",
        "single_layers_equal_the_whole",
        "patterns_change_in_training_as_in_the_whole",
        "a_state_loads_into_a_split_model",
    ],
    "parallel_conv_cases": [
        "the_pair_equals_the_whole",
        "single_layers_equal_the_whole",
        "an_inverse_undoes_a_split_layer",
        "gradients_of_gradients",
    ],
    "sharded_linear_cases": ["patterns_change_under_fsdp_as_alone", "half_precision_stays_after_a_change"],
    "graph_cases": [
        "products_equal_the_whole_one",
        "gradients_of_gradients",
        "trained_values_equal_the_whole",
        "a_layer_of_trained_values_converts",
        "losses",
        "the_example_learns",
    ],
    "expert_cases": ["experts_equal_one_process", "the_example_learns"],
    "replica_cases": ["other_patterns_become_the_first_ranks"],
}


def need_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"NCCL on {count} GPUs was not run: there are {torch.cuda.device_count()} here")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("module", list(CASES))
def test_ranks_over_nccl_compute_as_one(module, world):
    need_gpus(world)
    assert not failures(on_ranks(module, world, CASES[module], backend="nccl", INSUM_TUNE="off"))


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (2, 4), (4, 1)])
def test_a_checkpoint_loads_over_nccl(saved_by, loaded_by, tmp_path):
    need_gpus(max(saved_by, loaded_by))
    where = {"CHECKPOINTS": str(tmp_path), "INSUM_TUNE": "off"}
    for world, names in (
        (saved_by, ["save_under_fsdp", "save_split", "save_graph"]),
        (loaded_by, ["load_under_fsdp", "load_split", "load_graph"]),
    ):
        assert not failures(on_ranks("checkpoint_cases", world, names, backend="nccl", **where))
