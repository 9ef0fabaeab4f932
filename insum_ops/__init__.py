"""insum_ops: a sparse operator is one line, `C[AM[p],n] += AV[p,q] * B[AK[p,q],n]`."""

from .equivariant import tensor_product
from .functional import Insum, explain, insum, tune
from .matmul import sddmm, spmm
from .sparse_conv import sparse_conv3d

__all__ = ["Insum", "explain", "insum", "sddmm", "sparse_conv3d", "spmm", "tensor_product", "tune"]
