"""Layers, each of which holds one statement."""

from .block_sparse_linear import BlockSparseLinear
from .load import load_patterns_
from .sparsify import LayerReport, Sparsified, sparsify
from .spmm import SpMM

__all__ = ["BlockSparseLinear", "LayerReport", "SpMM", "Sparsified", "load_patterns_", "sparsify"]
