"""Sparse times dense: `C[m,n] += A[m,k] * B[k,n]` with A a format, a torch sparse tensor or a graph's edges.

listed        entries as they are listed, the format of a pattern that is young
arrange       listed entries to the format that holds them, and the gather that brings their values along
torch_sparse  torch's sparse tensors as formats, worked out once per tensor
edges         a graph's edge_index and edge_weight as a format
operands      whatever stands for the matrix, as a format
functional    `spmm` and `sddmm`
layer         `SpMM`
"""

from .functional import sddmm, spmm
from .layer import SpMM

__all__ = ["SpMM", "sddmm", "spmm"]
