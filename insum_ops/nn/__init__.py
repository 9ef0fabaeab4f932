"""Layers, each of which holds one statement or a few."""

from .block_sparse_linear import BlockSparseLinear
from .from_e3nn import Conversion, from_e3nn
from .load import load_patterns_
from .sparsify import LayerReport, Sparsified, sparsify
from .spmm import SpMM
from .tensor_product import FullyConnectedTensorProduct, TensorProduct

__all__ = [
    "BlockSparseLinear",
    "Conversion",
    "FullyConnectedTensorProduct",
    "LayerReport",
    "SpMM",
    "Sparsified",
    "TensorProduct",
    "from_e3nn",
    "load_patterns_",
    "sparsify",
]
