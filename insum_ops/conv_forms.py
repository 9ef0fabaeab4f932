"""The statements that a convolution over a kernel map may be, and which of them it is."""

from __future__ import annotations

import torch

from .formats.kernel_map import MOST_TAPS, KernelMap
from .formats.torch_state import is_compiling, is_deterministic, may_round_sums, uses_tensor_cores

__all__ = [
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
WEIGHT_GRADIENT: Form = (
    "dWeight[MAPZ[p],c,m] += In[MAPY[p,q],c] * dOut[MAPX[p,q],m]",
    "dWeight[MAPZ[p],g,c,m] += In[MAPY[p,q],g,c] * dOut[MAPX[p,q],g,m]",
    "dWeight[MAPZ[p],g] += In[MAPY[p,q],g] * dOut[MAPX[p,q],g]",
)
# the same in two steps, neither of which scatters: deterministic
GROUP_SUMS: Form = (
    "Part[p,c,m] += In[MAPY[p,q],c] * dOut[MAPX[p,q],m]",
    "Part[p,g,c,m] += In[MAPY[p,q],g,c] * dOut[MAPX[p,q],g,m]",
    "Part[p,g] += In[MAPY[p,q],g] * dOut[MAPX[p,q],g]",
)
TAP_SUMS: Form = (
    "dWeight[z,c,m] += Part[MAPP[z,s],c,m]",
    "dWeight[z,g,c,m] += Part[MAPP[z,s],g,c,m]",
    "dWeight[z,g] += Part[MAPP[z,s],g]",
)
HALF = (torch.float16, torch.bfloat16)

# These rules hold for maps that are new, and where nothing may be timed; conv_choice.py times the forms over maps that
# last. One H200, 3^3 submanifolds at 5 cm, 64 / 256 channels, milliseconds on the device. float16, a room of 65,667
# voxels whose table is 38 % full: tiles .023 / .22, a table .040 / .37, groups .041 / .32, which add in float16. A scan
# of 79,943 voxels, 18 % full: tiles .023 / .18, a table .047 / .46, groups .027 / .18. Where sums must not be rounded
# on the way, and in tf32 but for gradients of features, tiles win by more. Multiply-adds spend as much on an absent
# pair as on a present one: in full float32 the room took .33 in groups, .39 in tiles, .75 in a table at 64 channels.
STATIONARY_CHANNELS = 128
FULL_ENOUGH = 0.25  # of a table's entries
GROUP_SIZE = 128
TILE_SIZE = 128
# A weight's gradient adds one tile for each group, so groups are long. On the same room at 64 / 256 channels groups of
# 512 took .029 / .31 in float16 and .068 / .82 in tf32, groups of 2048 .027 / .26 and .098 / .87; of 128 .044 / .53 and
# .074 / 1.12. One size for all layers over a new map: a second one is made in more time than it saves.
GROUP_SIZE_OF_SUMS = 512
GROUP_SIZE_OF_PARTS = 4096  # and longer still where each tile is kept until the last sum; no measured choice

# The table is there once a map is, its rows must be sorted into tiles: about .15 ms for the smaller room, of which a
# call gets back .009 at 64 channels and .03 at 128. Tiles pay after 17 calls or 5, but only for maps that last: in a
# step of training a small U-Net uses a map nine times, forward and backward, and then has another cloud. Reckoned from
# these figures, not measured.
PAYS_AFTER = 32  # convolutions over a map
# Groups need another kernel and a wait for the host of about .07 ms, of which a call on a scan gets back .01 to .02 up
# to this many channels: they wait as tiles do. Reckoned from these figures too.
FEW_CHANNELS = 64


def form_of(kernel_map: KernelMap, channels: int, dtype: torch.dtype, device: torch.device) -> Form:
    """Whether outputs gather their inputs, alone or in tiles that need the same taps, or pairs add to their outputs."""
    if is_deterministic():  # from the first call on, since forms round differently
        return TILED if device.type == "cuda" and kernel_map.volume <= MOST_TAPS else STATIONARY
    if device.type == "cpu" or not uses_tensor_cores(dtype):  # pairs alone are visited, whatever is absent
        return GROUPED
    is_exact = dtype not in HALF or not may_round_sums(dtype)
    if kernel_map.volume > MOST_TAPS:
        return STATIONARY if (is_exact or channels <= STATIONARY_CHANNELS) and _is_full(kernel_map) else GROUPED
    if tiles_pay(kernel_map):
        return TILED
    may_group = not is_exact and (channels > FEW_CHANNELS or GROUP_SIZE in kernel_map.memory)
    return GROUPED if may_group and not _is_full(kernel_map) else STATIONARY


def tiles_pay(kernel_map: KernelMap) -> bool:
    """Whether the map has tiles, or has been used so often that they are worth making, and they can be made now."""
    return kernel_map.has_tiles(TILE_SIZE) or lasts(kernel_map)


def lasts(kernel_map: KernelMap) -> bool:
    """Whether the map has been used so often that time spent on it pays, and can be spent now."""
    if is_compiling():  # before the uses are read: a tracer would trace anew for each number
        return False
    return kernel_map.uses >= PAYS_AFTER and not kernel_map.is_captured


def awaited(form: Form, kernel_map: KernelMap) -> str:
    """What a table stands in for, "tiles", until they pay: such uses of a map are counted. "": nothing."""
    is_settled = kernel_map.volume > MOST_TAPS or is_deterministic()
    return "" if form != STATIONARY or is_settled else "tiles"


def is_due(what: str, kernel_map: KernelMap) -> bool:
    """Whether what was `awaited` pays by now; "ways": to time all of them."""
    return tiles_pay(kernel_map) if what == "tiles" else lasts(kernel_map)


def settings_of(dtype: torch.dtype) -> Settings:
    """All that a call depends on, beside its features and its map with the uses of that."""
    setting = may_round_sums(dtype) if dtype in HALF else uses_tensor_cores(dtype)
    return dtype, is_deterministic(), setting


def _is_full(kernel_map: KernelMap) -> bool:
    """May read from the device how many pairs there are; full as well is what can't be grouped now."""
    if is_compiling() and GROUP_SIZE not in kernel_map.memory:
        return True
    if not kernel_map.is_counted and kernel_map.is_captured:
        return True
    return kernel_map.num_pairs >= FULL_ENOUGH * kernel_map.num_outputs * kernel_map.volume
