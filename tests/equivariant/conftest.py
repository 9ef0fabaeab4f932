"""Tensor products as on a GPU, on every machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from insum_ops.equivariant import layers, path_tables, table_terms
from insum_ops.equivariant.decomposition import decompose


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels' statements where no kernel runs too, as torch operations; nothing is known before."""
    decompose.cache_clear()
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("insum_ops.equivariant.") and module is not layers  # which are made on a CPU
        if is_ours and hasattr(module, "has_kernels"):
            monkeypatch.setattr(module, "has_kernels", lambda device: True)
    yield
    decompose.cache_clear()


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read coefficients from tables, none has them in its source."""
    for name in path_tables.HELD_PARTS:
        monkeypatch.setitem(path_tables.HELD_PARTS, name, 0)
    monkeypatch.setattr(table_terms, "LARGEST_TILE", 0)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """e3nn rounds its coefficients to the default dtype, even for a module that is made double afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def nothing_is_known() -> Iterator[None]:
    """No decomposition was made before, and none is left behind."""
    decompose.cache_clear()
    torch.manual_seed(0)
    yield
    decompose.cache_clear()
