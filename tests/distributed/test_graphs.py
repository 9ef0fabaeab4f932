"""A sparse matrix whose rows are split over ranks: products, gradients, training, and what moves."""

from __future__ import annotations

from pathlib import Path

import graph_cases
import pytest
import torch
from ranks import failures, on_ranks
from tolerances import TOLERANCE

from insum_ops.compiler import OperandError
from insum_ops.distributed import graph_cost, random_cut

pytestmark = pytest.mark.cpu

RANKS = 4


def test_two_ranks_cost_what_is_on_paper():
    assert not failures(on_ranks("graph_cases", 2, ["products_equal_the_whole_one"]))


def test_ranks_train_as_one_and_move_no_row_too_many():
    results = on_ranks("graph_cases", RANKS, graph_cases.NAMES)
    assert not failures(results)
    for good, random in results["the_example_learns"]:
        assert good[-1] < 0.7 * good[0]
        torch.testing.assert_close(random, good, **TOLERANCE[torch.float32])
    for losses in results["losses"]:
        whole = torch.tensor(losses["whole"], dtype=torch.float64)
        for partition in ("good", "random"):
            found = torch.tensor(losses[partition], dtype=torch.float64)
            torch.testing.assert_close(found, whole, **TOLERANCE[torch.float64])
    row = graph_cases.WIDTH * 8
    moved = dict.fromkeys(("good", "random"), 0)
    for found in results["products_equal_the_whole_one"]:
        for partition, (nbytes, sent, received) in found.items():
            assert nbytes == row * (sent + received)  # rows there, their gradients back
            moved[partition] += nbytes
    assert moved["good"] < 0.3 * moved["random"]
    assert results["a_layer_of_trained_values_converts"] == ["torch.float32"] * RANKS
    for rank, messages in enumerate(results["mistakes"]):
        assert messages == expected_messages(rank)


def expected_messages(rank):
    """Most are the same sentence on every rank, about the one that is wrong."""
    kinds = (
        "a format of insum_ops.formats, a torch sparse tensor, a scipy sparse array or (edge_index, edge_weight, size)"
    )
    of_B = "B is 3 columns of torch.float32 on rank 0 but"
    of_rows = "pass rows of one width and dtype on every rank"
    return {
        "owners that differ": "owner is not the same on all ranks: rank 1 holds another than rank 0, and on this rank, "
        f"{rank}, it is [8] torch.int64; compute it on one rank and broadcast it",
        "a rank that is not there": "owner names ranks 1 to 4, but the mesh has ranks 0 to 3, says rank 1; number them "
        "within the mesh",
        "a graph that differs": "A's list of values is not the same on all ranks: rank 1 holds another than rank 0, "
        f"and on this rank, {rank}, it is [8] torch.float32; pass the same graph on every rank",
        "no graph": f"on rank 1, A is of type str; pass {kinds}",
        "columns": "A has 7 columns on rank 0, but the ranks hold [2, 2, 2, 2] rows of B, 8 in all, says rank "
        f"{rank}; give each rank its rows of A with a column for every row of B",
        "two dimensions": f"mesh has 2 dimensions, says rank {rank}; pass one of them, as in mesh['rows']",
        "a length": "A is [8, 8] and owner [7] on rank 1; pass a square matrix, and a rank for each of its rows",
        "no matrix": f"on rank 1, A is of type int; pass {kinds}",
        "rows": "rows is -1 on rank 1; pass how many rows of B it holds, or leave it out",
        "dtypes of A": "the dtype of A is torch.float32 on rank 0 but torch.float64 on rank 1; convert it on one of "
        "them with .to()",
        "trained on one rank": "trainable is False on rank 0 but True on rank 1; train the values on all ranks, or on "
        "none",
        "rows of B": "B is [3, 3] on rank 1, which holds 2 of its rows; pass [2, N]",
        "columns of B": f"{of_B} 4 columns of torch.float32 on rank 1; {of_rows}",
        "a dtype of B": f"{of_B} 3 columns of torch.float64 on rank 1; {of_rows}",
        "a transform": f"SplitSpMM runs under Grad of torch.func on rank {rank}, which follows no exchange between "
        "ranks; call it outside of transforms, and differentiate it by torch.autograd",
        "values that one rank holds fixed": "values is trained on rank 0 but not trained on rank 1; train them on all "
        "ranks, or on none",
        "fractions": "owner is of torch.float32 on rank 1; pass a tensor of whole numbers",
        "a list": f"owner is of type list on rank {rank}; pass a tensor of whole numbers",
        "a DTensor": f"B is of type DTensor on rank {rank}; pass B.to_local(), a tensor [2, N]",
        "no B": "B is of type NoneType on rank 1; pass a tensor [2, N]",
        "other entries": "entries in the state_dict lists 5 places, not those of the 64 entries of A, says rank "
        f"{rank}; make the layer of the same matrix",
    }


@pytest.mark.parametrize(
    ("ranks", "partition", "cells"),
    [
        (8, "random", "83.2 M | 456 GB | 497 GiB | 1.2 s"),
        (8, "good", "20.2 M | 111 GB | 175 GiB | 0.39 s"),
        (64, "random", "22.4 M | 122 GB | 123 GiB | 2.5 s"),
        (64, "good", "2.5 M | 14 GB | 22 GiB | 0.29 s"),
        (1024, "random", "1.57 M | 8.6 GB | 8.6 GiB | 0.17 s"),
        (1024, "good", "0.16 M | 0.86 GB | 1.4 GiB | 0.018 s"),
    ],
)
def test_the_page_shows_what_the_function_returns(ranks, partition, cells):
    nodes, edges = 111_059_956, 1_615_685_872
    cut = random_cut(nodes, edges / nodes, ranks)
    cut = cut if partition == "random" else edges // ranks // 10
    cost = graph_cost(nodes // ranks, cut, cut, edges // ranks, [256, 256, 172], link=450e9 if ranks == 8 else 50e9)
    digits = lambda number, count: f"{number:.{count}f}"
    shown = [cell.split() for cell in cells.split(" | ")]
    for (text, _), value in zip(shown, (cut / 1e6, cost.bytes_sent / 1e9, cost.memory / 2**30, cost.seconds)):
        assert digits(value, len(text.partition(".")[2])) == text
    page = (Path(__file__).parents[2] / "docs" / "use" / "many-gpus.md").read_text()
    assert f"| {ranks:,} | {partition} | {cells} |" in page


@pytest.mark.parametrize("name", ["rows", "received", "sent", "entries"])
def test_costs_are_of_counts(name):
    counts = {"rows": 1, "received": 1, "sent": 1, "entries": 1, name: -1}
    with pytest.raises(OperandError, match=f"^{name} is -1; pass how many there are, 0 or more$"):
        graph_cost(**counts, widths=[1])


def test_some_rank_must_own_the_nodes():
    with pytest.raises(OperandError, match=r"^ranks is 0; pass at least 1$"):
        random_cut(10, 2.0, 0)
