"""The statements that a convolution over a kernel map may be, and which of them it is.

The rules hold for maps that are new, and where nothing may be timed; choice.py times forms over maps that last.
"""

from __future__ import annotations

import torch

from ..compiler import device_of
from ..formats.torch_state import (
    HALF,
    deterministic_flag,
    is_deterministic,
    may_round_sums,
    rounds_float32,
    uses_tensor_cores,
)
from ..formats.voxels.kernel_map import MOST_TAPS, KernelMap
from .cost import MEASURED_SUMS, Work, grouping_milliseconds, milliseconds

__all__ = [
    "BIAS_GRADIENT",
    "GROUPED",
    "GROUP_SIZE",
    "GROUP_SIZE_OF_PARTS",
    "GROUP_SIZE_OF_SUMS",
    "GROUP_SUMS",
    "STATIONARY",
    "TAP_SUMS",
    "TILED",
    "TILE_SIZE",
    "WEIGHT_GRADIENT",
    "Form",
    "Settings",
    "awaited",
    "form_of",
    "is_due",
    "lasts",
    "settings_of",
]

Form = tuple[str, str, str]  # channels: dense, in groups, one by one
Settings = tuple[torch.dtype, bool, bool]

STATIONARY: Form = (
    "Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]",
    "Out[x,g,m] += In[NBR[x,z],g,c] * Weight[z,g,c,m]",
    "Out[x,g] += In[NBR[x,z],g] * Weight[z,g]",
)
GROUPED: Form = (
    "Out[MAPX[p,q],m] += In[MAPY[p,q],c] * Weight[MAPZ[p],c,m]",
    "Out[MAPX[p,q],g,m] += In[MAPY[p,q],g,c] * Weight[MAPZ[p],g,c,m]",
    "Out[MAPX[p,q],g] += In[MAPY[p,q],g] * Weight[MAPZ[p],g]",
)
TILED: Form = (
    "Out[ROW[TILE[p],q],m] += In[NBR[p,q],c] * Weight[TAP[p],c,m]",
    "Out[ROW[TILE[p],q],g,m] += In[NBR[p,q],g,c] * Weight[TAP[p],g,c,m]",
    "Out[ROW[TILE[p],q],g] += In[NBR[p,q],g] * Weight[TAP[p],g]",
)
# a weight's gradient, in the order in which the weight lies, so that it is no copy of what a kernel has summed
WEIGHT_GRADIENT: Form = (
    "dWeight[m,MAPZ[p],c] += In[MAPY[p,q],c] * dOut[MAPX[p,q],m]",
    "dWeight[g,m,MAPZ[p],c] += In[MAPY[p,q],g,c] * dOut[MAPX[p,q],g,m]",
    "dWeight[g,MAPZ[p]] += In[MAPY[p,q],g] * dOut[MAPX[p,q],g]",
)
BIAS_GRADIENT = "dBias[m] += dOut[x,m]"
# the weight's gradient in two statements, neither of which scatters: deterministic
GROUP_SUMS: Form = (
    "Part[p,m,c] += In[MAPY[p,q],c] * dOut[MAPX[p,q],m]",
    "Part[p,g,m,c] += In[MAPY[p,q],g,c] * dOut[MAPX[p,q],g,m]",
    "Part[p,g] += In[MAPY[p,q],g] * dOut[MAPX[p,q],g]",
)
TAP_SUMS: Form = (
    "dWeight[m,z,c] += Part[MAPP[z,s],m,c]",
    "dWeight[g,m,z,c] += Part[MAPP[z,s],g,m,c]",
    "dWeight[g,z] += Part[MAPP[z,s],g]",
)

# Sizes of groups and tiles with which tuning starts: as many rows as the longest tile of a dot has, see
# `compiler/tuning/measured.py`. `choice.py` times others over maps that last.
GROUP_SIZE = 128
TILE_SIZE = 128
# A weight's gradient adds one tile for each group, so groups are long. One size for all layers over a new map, since a
# second one is made in more time than it saves: the one that loses the least wherever it was measured.
GROUP_SIZE_OF_SUMS = min(
    MEASURED_SUMS[0].by_size,
    key=lambda size: max(row.by_size[size] / min(row.by_size.values()) for row in MEASURED_SUMS),
)
GROUP_SIZE_OF_PARTS = 4096  # and longer still where each tile is kept until the last sum; no measured choice

# Convolutions over a map after which it is taken to last, so that time spent on it pays. It says how maps are used, not
# how fast a GPU is: a step of training a small U-Net uses a map nine times, forward and backward, and then has another
# cloud. Sorting rows into tiles takes about 0.15 ms, which calls over a room get back after 17 of them at 64 channels
# and after 5 at 128.
PAYS_AFTER = 32


def form_of(kernel_map: KernelMap, channels: int, dtype: torch.dtype, device: torch.device) -> Form:
    """Return the form of a convolution over a map, by rule.

    Outputs gather their inputs, each by itself or in tiles that need the same taps, or pairs add to their outputs.
    """
    if is_deterministic():  # from the first call on, since forms round differently
        return TILED if device.type == "cuda" and kernel_map.volume <= MOST_TAPS else STATIONARY
    # multiply-adds spend as much on an absent pair as on a present one, so pairs alone are visited: at 64 channels in
    # full float32 a room whose table is 38 % full took an H200 0.33 ms in groups, 0.39 in tiles, 0.75 over the table
    if device.type == "cpu" or not uses_tensor_cores(dtype):
        return GROUPED
    if kernel_map.volume <= MOST_TAPS and tiles_pay(kernel_map):
        return TILED
    return GROUPED if groups_pay(kernel_map, channels, dtype, device) else STATIONARY


def tiles_pay(kernel_map: KernelMap) -> bool:
    """Whether the map has tiles, or has been used so often that they are worth making, and they can be made now."""
    return kernel_map.has_tiles(TILE_SIZE) or lasts(kernel_map)


def groups_pay(kernel_map: KernelMap, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one convolution in groups takes less than over the table, with what it takes to make them.

    How many pairs there are is read from the device, unless groups would not pay if there were as few as can be.
    """
    is_made = GROUP_SIZE in kernel_map.memory
    if not is_made and kernel_map.is_captured:
        return False
    gpu, lengths = device_of(device), (kernel_map.num_inputs, kernel_map.num_outputs, kernel_map.volume)
    sum_itemsize = dtype.itemsize if dtype in HALF and may_round_sums(dtype) else max(dtype.itemsize, 4)
    work = Work(*lengths, channels, dtype.itemsize, sum_itemsize)
    limit = milliseconds("table", work, 0, gpu) - (0.0 if is_made else grouping_milliseconds(gpu))
    fewest = kernel_map.num_outputs  # each has an input
    if not kernel_map.is_counted and milliseconds("groups", work, fewest, gpu) >= limit:
        return False
    return milliseconds("groups", work, kernel_map.num_pairs, gpu) < limit


def lasts(kernel_map: KernelMap) -> bool:
    """Whether the map has been used so often that time spent on it pays, and can be spent now."""
    return kernel_map.uses >= PAYS_AFTER and not kernel_map.is_captured


def awaited(form: Form, kernel_map: KernelMap) -> str:
    """Return "tiles" if the table is used only until tiles pay, so that uses of the map are counted; else ""."""
    is_settled = kernel_map.volume > MOST_TAPS or is_deterministic()
    return "" if form != STATIONARY or is_settled else "tiles"


def is_due(what: str, kernel_map: KernelMap) -> bool:
    """Whether what was `awaited` pays by now: "tiles", or "ways", which is timing all forms."""
    return tiles_pay(kernel_map) if what == "tiles" else lasts(kernel_map)


def settings_of(dtype: torch.dtype) -> Settings:
    """Return the settings of torch that the choice of a form depends on for a dtype."""
    setting = may_round_sums(dtype) if dtype in HALF else dtype == torch.float32 and rounds_float32()
    return dtype, deterministic_flag(), setting
