"""A program that uses insum_ops and says of what types things are: type checkers read it, and nothing runs it."""

import torch
from torch import Tensor
from typing_extensions import assert_type

from insum_ops import explain, insum, sddmm, spmm, tensor_product
from insum_ops.formats import COO, BlockCOO, GroupCOO
from insum_ops.nn import (
    BlockSparseLinear,
    FullyConnectedTensorProduct,
    SparseBatchNorm,
    SparseConvTensor,
    SparseMaxPool3d,
    Sparsified,
    SpMM,
    SubMConv3d,
    TensorProduct,
    ToDense,
    sparsify,
)

x = torch.ones(3, 3)
A = GroupCOO.from_dense(x)
assert_type(A, GroupCOO)
assert_type(A.half(), GroupCOO)
assert_type(A.to("cpu"), GroupCOO)
assert_type(A.with_values(A.values), GroupCOO)
assert_type(A.to_torch(), Tensor)
assert_type(COO.from_torch(x.to_sparse()), COO)
assert_type(BlockCOO.from_dense(x, block_size=(3, 3)), BlockCOO)

assert_type(insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=x), Tensor)
assert_type(str(explain("C[m,n] += A[m,k] * B[k,n]", A=A, B=x)), str)
assert_type(spmm(A, x, reduce="max"), Tensor)
assert_type(sddmm(A, x, x), GroupCOO)
assert_type(sddmm((x, None), x, x), Tensor)
spmm(A, x, reduce="maximum")  # type: ignore[arg-type]

layer = BlockSparseLinear(32, 32)
assert_type(layer(x), Tensor)
assert_type(BlockSparseLinear.from_dense(x, 3, 1.0), BlockSparseLinear)
layer("x")  # type: ignore[arg-type]
layer.set_pattern_(layer.mask, init="ones")  # type: ignore[arg-type]
assert_type(sparsify(torch.nn.Linear(3, 3)), Sparsified)
assert_type(SpMM(A)(x, "mean"), Tensor)
SpMM(A)(x, reduce="median")  # type: ignore[arg-type]

voxels = SparseConvTensor(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int32), [8, 8, 8], 1)
assert_type(SubMConv3d(4, 4, 3)(voxels), SparseConvTensor)
assert_type(SparseMaxPool3d(2)(voxels), SparseConvTensor)
assert_type(SparseBatchNorm(4)(voxels), SparseConvTensor)
assert_type(SparseBatchNorm(4)(x), Tensor)
assert_type(ToDense()(voxels), Tensor)
assert_type(voxels.half(), SparseConvTensor)
SubMConv3d(4, 4, 3)(x)  # type: ignore[arg-type]

product = FullyConnectedTensorProduct("1x0e", "1x0e", "1x0e", irrep_normalization="norm", layout="ir_mul")
assert_type(product(x, x), Tensor)
assert_type(TensorProduct("1x0e", "1x0e", "1x0e", [(0, 0, 0, "uvw", True)], layout="ir_mul")(x, x), Tensor)
assert_type(tensor_product(x, x, irreps_in1="1x0e", irreps_in2="1x0e", irreps_out="1x0e"), Tensor)
TensorProduct("1x0e", "1x0e", "1x0e", [], layout="mul")  # type: ignore[arg-type]
TensorProduct("1x0e", "1x0e", "1x0e", [], path_normalization="paths")  # type: ignore[arg-type]
