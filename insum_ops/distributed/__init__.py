"""Statements over several GPUs, on torch.distributed. Import this and `insum` takes DTensors.

A file imports only from those above it.

    rules      how a statement may be split, and which way costs least
    agreement  checks that end alike on every rank
    dtensors   `insum` over DTensors
    tuning     ranks that take the same configs
    linear     `BlockSparseLinear` over ranks: styles for `parallelize_module`
    cost       what a step over a split graph costs on paper
    rows       `SplitSpMM`: a sparse matrix whose rows are split over ranks
"""

from . import dtensors
from .cost import GraphCost, graph_cost, random_cut
from .linear import ColumnParallel, RowParallel, balanced_order, whole_state_dict
from .rows import SplitSpMM
from .rules import Split, bytes_moved, cheapest_split, splits_of
from .tuning import share_tuning

__all__ = [
    "ColumnParallel",
    "GraphCost",
    "RowParallel",
    "Split",
    "SplitSpMM",
    "balanced_order",
    "bytes_moved",
    "cheapest_split",
    "graph_cost",
    "random_cut",
    "share_tuning",
    "splits_of",
    "whole_state_dict",
]

del dtensors  # imported for what it registers
