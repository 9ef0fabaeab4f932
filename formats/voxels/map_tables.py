"""A kernel map in the forms that statements read, each made once: a table, pairs in groups, outputs in tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..device_kernels import compiles_for
from ..facts import SHORT_LENGTH
from ..guard import may_keep
from ..row_facts import longest_first
from ..torch_state import INTERPRETED
from . import sort as voxel_sort

try:
    from . import hash_table as voxel_hash
except ImportError:  # no Triton, not on Linux: sorting does it
    voxel_hash = None  # type: ignore[assignment]

__all__ = ["GroupedMap", "Tables", "TiledMap", "maker"]


@dataclass(frozen=True, eq=False)
class GroupedMap:
    """`Out[MAPX[p,q],m] += In[MAPY[p,q],c] * Weight[MAPZ[p],c,m]`: pairs of voxels in groups of one tap each.

    `KernelMap.grouped` makes it, for a convolution as one statement of `insum`.

    Args:
        MAPX: output voxel of each pair [P, Q], int32; padding is -1.
        MAPY: input voxel of each pair [P, Q], int32; padding is -1.
        MAPZ: tap of each group [P], int32, ascending.

    Example:
        >>> import torch
        >>> from insum_ops import insum
        >>> from insum_ops.formats import kernel_map
        >>> line = kernel_map(torch.tensor([[0, 4], [0, 5], [0, 0]]), [6], batch_size=1, kernel_size=3)
        >>> groups = line.grouped(group_size=2)
        >>> groups.MAPX.tolist(), groups.MAPY.tolist(), groups.MAPZ.tolist()
        ([[1, -1], [0, 1], [2, -1], [0, -1]], [[0, -1], [0, 1], [2, -1], [1, -1]], [0, 1, 1, 2])
        >>> In, Weight = torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([[[2.0]], [[3.0]], [[4.0]]])
        >>> expr = "Out[MAPX[p,q],m] += In[MAPY[p,q],c] * Weight[MAPZ[p],c,m]"
        >>> insum(expr, size=(3, 1), In=In, Weight=Weight, **vars(groups))
        tensor([[ 43.],
                [ 32.],
                [300.]])
    """

    MAPX: Tensor  # [P, Q]  int32: output voxel of each pair; padding is -1
    MAPY: Tensor  # [P, Q]  int32: input voxel of each pair; padding is -1
    MAPZ: Tensor  # [P]     int32: tap of each group, ascending

    def by_tap(self, volume: int) -> Tensor:
        """Return the groups of each tap, MAPP[z,s] [V, S], int32, padded with -1; those that hold no pair are left out.

        It reads from the device how many groups the tap with the most has.

        Args:
            volume: how many taps the kernel has, V.

        Returns:
            int32 [V, S], with S the most groups that a tap has.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5], [0, 0]]), [6], batch_size=1, kernel_size=3)
            >>> line.grouped(group_size=2).by_tap(line.volume).tolist()
            [[0, -1], [1, 2], [3, -1]]
        """
        count, device = len(self.MAPZ), self.MAPZ.device
        taps = torch.arange(volume + 1, dtype=torch.int32, device=device)
        first = torch.searchsorted(self.MAPZ, taps, out_int32=True)
        first = torch.minimum(first, (self.MAPX[:, 0] >= 0).sum(dtype=torch.int32))
        most = int(first.diff().max()) if count else 0
        groups = first[:-1, None] + torch.arange(most, dtype=torch.int32, device=device)
        return torch.where(groups < first[1:, None], groups, -1)


@dataclass(frozen=True, eq=False)
class TiledMap:
    """`Out[ROW[TILE[p],q],m] += In[NBR[p,q],c] * Weight[TAP[p],c,m]`: outputs that need the same taps side by side.

    ROW holds every output once, those of a tile in a row of its own. p counts the taps that a tile needs: of all
    rows times all taps a third or less, where a cloud is a surface.
    """

    ROW: Tensor  # [T, Q]  int32: output voxels of each tile; a last tile that is not full ends in -1
    TILE: Tensor  # [P]     int32, ascending
    NBR: Tensor  # [P, Q]  int32: input voxel of each row, -1 where it has none
    TAP: Tensor  # [P]     int32
    pointers: Tensor  # [T+1]   int32: tile t has the taps pointers[t] to pointers[t+1] - 1
    order: Tensor  # [T]     int32: the tiles, those with the most taps first


@dataclass(eq=False)
class Tables:
    """The forms of a map that were made so far, by side: 0 gathers for its outputs, 1 for its inputs."""

    rows: tuple[int, int]
    is_symmetric: bool  # a submanifold: x sees y by tap z exactly if y sees x by the opposite tap
    neighbours: list[Tensor | None]
    num_pairs: int | None = None
    counts: tuple[Tensor, list[int]] | None = None  # of side 0; the tensor's first row is the list: pairs of each tap
    grouped: dict[tuple[int, ...], GroupedMap] = field(default_factory=dict)  # by side, group size and multiple
    tiled: dict[tuple[int, ...], TiledMap] = field(default_factory=dict)  # by side and tile size
    uses: list[int] = field(default_factory=lambda: [0, 0])  # by side; a submanifold's all count for side 0
    kind: str = "subm"  # of side 0

    def of(self, side: int) -> Tensor:
        """Return the table of neighbours of a side, made from the other side's and kept if it is not there yet."""
        table = self.neighbours[side]
        if table is None:
            table = self.swapped(side)
            if may_keep(table):
                self.neighbours[side] = table
        return table

    def parts(self, kind: str) -> dict[tuple[int, ...], Any]:
        """Return the "groups" or the "tiles" that were made, by side, size and what else they were asked by."""
        return self.tiled if kind == "tiles" else self.grouped

    @torch.inference_mode(False)  # what is kept must be good for training too
    def swapped(self, side: int) -> Tensor:
        """Return the table of a side, made from that of the other."""
        opposite = self.of(1 - side)
        return opposite.flip(1) if self.is_symmetric else maker(opposite).swap(opposite, self.rows[side])

    @torch.inference_mode(False)
    def count(self) -> tuple[Tensor, list[int]]:
        """Return the pairs of each tap, read from the device once: groups of any size need no other read."""
        cached = self.counts
        if cached is None:
            table = self.of(0)
            counts = maker(table).count(table)
            cached = counts, counts[0].tolist()
            if may_keep(counts):
                self.counts = cached
        return cached

    @torch.inference_mode(False)
    def group(self, group_size: int, multiple_of: int) -> GroupedMap:
        """Return the pairs of side 0 in groups with one tap each, whose number is a multiple if it is short."""
        table, (counts, per_tap) = self.of(0), self.count()
        if may_keep():
            self.num_pairs = sum(per_tap)
        groups = sum(-(-pairs // group_size) for pairs in per_tap)
        if groups <= SHORT_LENGTH:
            groups = -(-groups // multiple_of) * multiple_of
        return GroupedMap(*maker(table).group(table, counts, groups, group_size))

    @torch.inference_mode(False)
    def tile(self, side: int, rarity: tuple[int, ...], tile_size: int) -> TiledMap:
        """Return the rows of a side in tiles that need the same taps; `rarity` ranks the taps for sorting."""
        table = self.of(side)
        ROW, TILE, NBR, TAP, pointers = maker(table).tile(table, rarity, tile_size)
        return TiledMap(ROW, TILE, NBR, TAP, pointers, longest_first(pointers))


def maker(tensor: Tensor):  # type: ignore[no-untyped-def]
    """Return the module that finds and groups neighbours on this device."""
    has_kernels = INTERPRETED or compiles_for(tensor.device)
    return voxel_hash if voxel_hash is not None and has_kernels else voxel_sort
