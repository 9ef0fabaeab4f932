"""Sparse tensors as plain tensors of coordinates and values, for statements to index."""

from .block_coo import BlockCOO
from .block_group_coo import BlockGroupCOO
from .coo import COO
from .ell import ELL
from .errors import FormatError
from .group_coo import GroupCOO
from .group_size import group_size
from .voxels.kernel_map import GroupedMap, KernelMap, kernel_map

__all__ = [
    "COO",
    "ELL",
    "BlockCOO",
    "BlockGroupCOO",
    "FormatError",
    "GroupCOO",
    "GroupedMap",
    "KernelMap",
    "group_size",
    "kernel_map",
]
