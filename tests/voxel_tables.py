"""What tests of tables of neighbours share: any table, a table's makers, memory that nobody wrote to."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from statements import DEVICE

from insum_ops.formats.voxels import map_tables
from insum_ops.formats.voxels import sort as voxel_sort


def makers(kernels):
    """Each test by sorting and, where they run, by kernels."""
    own = [pytest.param(voxel_sort, id="sort"), pytest.param(kernels, id="kernels", marks=pytest.mark.kernels)]
    return pytest.mark.parametrize("maker", own)


@contextmanager
def by_sorting():
    """Maps are made as on a CPU without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(map_tables, "maker", lambda indices: voxel_sort)
        yield


def table_of(rows, volume, share):
    """Any voxels at all: which they are makes no difference."""
    found = torch.randint(0, 1000, (rows, volume), dtype=torch.int32)
    return torch.where(torch.rand(rows, volume) < share, found, -1).to(DEVICE)


@pytest.fixture(autouse=True)
def wrong_numbers_in_fresh_memory(monkeypatch):
    """An element that no kernel wrote is found."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=make, **options: make(*args, **options).fill_(-77))
