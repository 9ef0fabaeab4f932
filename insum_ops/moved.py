"""Where the modules of version 0.1.0 are now: a pickle names a class by its module, and finds it by this table."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

__all__ = ["know_moved_modules"]

MOVED = {  # below insum_ops
    "equivariant.format_steps": "equivariant.term_statements",
    "equivariant.kinds": "equivariant.species",
    "equivariant.node": "equivariant.product_function",
    "equivariant.pieces": "equivariant.weight_slices",
    "equivariant.plan": "equivariant.decomposition",
    "equivariant.scalars": "equivariant.sparse_scalars",
    "equivariant.shared": "equivariant.shared_weights",
    "equivariant.singles": "equivariant.single_channel",
    "equivariant.steps": "equivariant.term_statements",
    "equivariant.tables": "equivariant.table_terms",
    "equivariant.whole": "equivariant.in_place",
    "formats.along": "formats.regrouped_view",
    "formats.geometry": "formats.voxels.geometry",
    "formats.kernel_map": "formats.voxels.kernel_map",
    "formats.known": "formats.pattern_cache",
    "formats.launches": "formats.fixed_kernel",
    "formats.map_tables": "formats.voxels.map_tables",
    "formats.pairs": "formats.row_matching",
    "formats.stamp": "formats.guard",
    "formats.voxel_grid": "formats.voxels.grid",
    "formats.voxel_hash": "formats.voxels.hash_table",
    "formats.voxel_kernels": "formats.voxels.kernels",
    "formats.voxel_pair_kernels": "formats.voxels.pair_kernels",
    "formats.voxel_pairs": "formats.voxels.pairs",
    "formats.voxel_sort": "formats.voxels.sort",
    "formats.voxel_tile_kernels": "formats.voxels.tile_kernels",
    "formats.voxel_tiles": "formats.voxels.tiles",
    "formats.walks": "formats.row_order",
    "nn.block_sparse_linear": "linear.layer",
    "nn.from_e3nn": "equivariant.from_e3nn",
    "nn.from_spconv": "conv.from_spconv",
    "nn.fused_encoder": "linear.fused_encoder",
    "nn.known_weight": "linear.weight_format",
    "nn.linear_product": "linear.product",
    "nn.load": "linear.load",
    "nn.patterns": "linear.patterns",
    "nn.remap": "linear.remap",
    "nn.sparse_conv": "conv.layers",
    "nn.sparse_conv_tensor": "conv.tensor",
    "nn.sparse_convolution": "conv.convolution",
    "nn.sparse_pool": "conv.pooling",
    "nn.sparse_sequential": "conv.sequential",
    "nn.sparsify": "linear.sparsify",
    "nn.spmm": "matmul.layer",
    "nn.state": "linear.state",
    "nn.swap_losses": "models.swap_losses",
    "nn.tensor_product": "equivariant.layers",
    "nn.weight_layouts": "conv.weight_layouts",
}


RENAMED = {"KnownWeight": "WeightFormat", "TensorPlan": "Decomposition"}


class _Moved(ModuleType):
    """A module under its old name, whose attributes are those of the new one, which is imported when one is asked."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        current = import_module(f"insum_ops.{MOVED[self.__name__.removeprefix('insum_ops.')]}")
        return getattr(current, RENAMED.get(name, name))


def know_moved_modules() -> None:
    """Let the old names be known as imported: an import would put the module in the place of a function of its name."""
    for old in MOVED:
        sys.modules.setdefault(f"insum_ops.{old}", _Moved(f"insum_ops.{old}"))
