"""Tensor products as on a GPU, on every machine."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator

import pytest
import torch
from statements import DEVICE

from insum_ops.equivariant import layers, path_tables, table_terms
from insum_ops.equivariant.decomposition import decompose

LARGEST_DEGREE = 4


@pytest.fixture(autouse=True, scope="session")
def known_coefficients() -> None:
    """e3nn has made its coefficients on a CPU, and keeps them: where a GPU is the default device it may fail to.

    With torch 2.11 an einsum of them then had tensors of both devices.
    """
    if DEVICE == "cuda" and importlib.util.find_spec("e3nn"):
        from e3nn import o3

        with torch.device("cpu"):
            for l1, l2 in itertools.product(range(LARGEST_DEGREE + 1), repeat=2):
                for l3 in range(abs(l1 - l2), min(l1 + l2, LARGEST_DEGREE) + 1):
                    o3.wigner_3j(l1, l2, l3)


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
    monkeypatch.setattr(path_tables, "HELD_ENTRIES", 0)
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
