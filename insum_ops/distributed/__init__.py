"""Statements over several GPUs, on torch.distributed. Import this and `insum` takes DTensors.

A file imports only from those above it.

    rules               how a statement may be split, and which way costs least
    agreement           checks that end alike on every rank
    replicas            models that must be the same on every rank, as for DDP
    placed              DTensors and plain tensors of one call
    dtensors            `insum` over DTensors
    convolutions        sparse convolutions over DTensors
    fsdp                patterns that change under `fully_shard`
    tuning              ranks that take the same configs
    own_part            what a state_dict has of a split layer
    split_layers        a `BlockSparseLinear` of which each rank has some blocks
    split_convolutions  a convolution of which each rank has some channels
    linear              styles for `parallelize_module` that split these
    cost                what a step over a split graph costs on paper
    rows                `SplitSpMM`: a sparse matrix whose rows are split over ranks
    split_models        the split layers of a model, and what they train
    whole               the state of all of these as it is without ranks
    whole_optimizers    the state of their optimizers likewise
    clipping            their gradients, clipped by the norm of all
"""

from . import convolutions, dtensors, fsdp
from .agreement import unchecked_calls
from .clipping import clip_grad_norm_
from .cost import GraphCost, graph_cost, random_cut
from .linear import ColumnParallel, RowParallel, balanced_order
from .replicas import check_replicas
from .rows import SplitSpMM
from .rules import Split, bytes_moved, cheapest_split, splits_of
from .tuning import share_tuning
from .whole import load_whole_state_dict, saved_patterns, whole_state_dict
from .whole_optimizers import load_whole_optimizer_state_dict, whole_optimizer_state_dict

__all__ = [
    "ColumnParallel",
    "GraphCost",
    "RowParallel",
    "Split",
    "SplitSpMM",
    "balanced_order",
    "bytes_moved",
    "cheapest_split",
    "check_replicas",
    "clip_grad_norm_",
    "graph_cost",
    "load_whole_optimizer_state_dict",
    "load_whole_state_dict",
    "random_cut",
    "saved_patterns",
    "share_tuning",
    "splits_of",
    "unchecked_calls",
    "whole_optimizer_state_dict",
    "whole_state_dict",
]

del convolutions, dtensors, fsdp  # imported for what they register
