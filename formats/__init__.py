"""Sparse tensors as plain tensors of coordinates and values, for statements to index."""

from ..close_names import refuser
from .block_coo import BlockCOO
from .block_group_coo import BlockGroupCOO
from .coo import COO
from .ell import ELL
from .errors import FormatError
from .group_coo import GroupCOO
from .group_size import group_size
from .torch_registry import register
from .voxels.kernel_map import GroupedMap, KernelMap
from .voxels.map_building import kernel_map

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

register(COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO)

__getattr__ = refuser(
    "insum_ops.formats",
    __all__,
    {
        "CSR": "GroupCOO.from_torch(A), which takes torch's CSR tensors",
        "CSC": "GroupCOO.from_torch(A, group_dim=1), which takes torch's CSC tensors",
        "BSR": "BlockGroupCOO.from_torch(A), which takes torch's BSR tensors",
    },
    f"it offers {', '.join(__all__)}",
)
