"""What was measured elsewhere: a column or a fact beside ours, no peer on this machine."""

from __future__ import annotations

__all__ = ["FLEX_GEMM", "FLEX_GEMM_MS", "REPORTED"]

# the paper, on one RTX 3090: (experiment, series, peer) -> its result
REPORTED = {
    ("structured_spmm", "32x32", "dense"): "pays from 25 % sparsity on",
    ("structured_spmm", "32x32", "TorchBSR"): "equal or better at every sparsity",
    ("unstructured_spmm", "float32, N = 128", "torch.sparse"): "1.20x on average, 14 graphs",
    ("unstructured_spmm", "float16, N = 128", "torch.sparse"): "1.18x on average",
    ("convolution", "float16", "spconv"): "faster than both of TorchSparse's algorithms, 7 rooms",
    ("tensor_product", "", "e3nn"): "2.3x to 8.3x",
    ("tensor_product", "", "cuequivariance"): "2.6x to 8.3x",
    ("ablation", "", "COO"): "groups 8x, blocks 20x, fusion 2.6x more",
    ("cost", "", "compile"): "9.9 s",
    ("cost", "", "tune"): "4.9 s",
    ("cost", "", "convert"): "0.55 ms",
    ("cost", "", "run"): "0.47 ms",
}
# FlexGEMM at the best of its algorithms, device time in ms of an earlier run on an H200, torch 2.11, triton 3.6:
# float16, submanifolds 3^3 over voxels of 5 cm, by (cloud, channels)
FLEX_GEMM = {
    ("s3dis_room", 32): 0.022,
    ("s3dis_room", 64): 0.046,
    ("s3dis_room", 128): 0.143,
    ("kitti_000000", 32): 0.022,
    ("kitti_000000", 64): 0.048,
    ("kitti_000000", 128): 0.133,
    ("spconv_benchmark", 32): 0.035,
    ("spconv_benchmark", 64): 0.073,
    ("spconv_benchmark", 128): 0.186,
}
FLEX_GEMM_MS = "FlexGEMM in another run on an H200, device ms"  # a fact of the cases that have one
