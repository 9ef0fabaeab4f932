"""What the paper reports for the same experiments, on one RTX 3090: a column beside ours, no peer on this machine."""

from __future__ import annotations

__all__ = ["REPORTED"]

# (experiment, series, peer) -> its result
REPORTED = {
    ("structured_spmm", "32x32", "dense"): "pays from 25 % sparsity on",
    ("structured_spmm", "32x32", "TorchBSR"): "equal or better at every sparsity",
    ("unstructured_spmm", "float32, N = 128", "torch.sparse"): "1.20x on average, 14 graphs",
    ("unstructured_spmm", "float16, N = 128", "torch.sparse"): "1.18x on average",
    ("convolution", "128 channels", "TorchSparse"): "faster than both its algorithms, 7 rooms",
    ("tensor_product", "", "e3nn"): "2.3x to 8.3x",
    ("tensor_product", "", "cuequivariance"): "2.6x to 8.3x",
    ("ablation", "", "COO"): "groups 8x, blocks 20x, fusion 2.6x more",
    ("cost", "", "compile"): "9.9 s",
    ("cost", "", "tune"): "4.9 s",
    ("cost", "", "convert"): "0.55 ms",
    ("cost", "", "run"): "0.47 ms",
}
