"""Layers, each of which holds one statement or a few."""

from ..close_names import refuser
from ..conv.convolution import SparseConvolution, SparseModule
from ..conv.from_spconv import from_spconv
from ..conv.layers import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
)
from ..conv.pooling import (
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseAvgPool4d,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
)
from ..conv.sequential import SparseBatchNorm, SparseIdentity, SparseReLU, SparseSequential, ToDense
from ..conv.tensor import SparseConvTensor
from ..conv.weight_layouts import (
    weight_from_conv,
    weight_from_conv_transpose,
    weight_from_minkowski,
    weight_from_torchsparse,
)
from ..equivariant.from_e3nn import Conversion, from_e3nn
from ..equivariant.layers import FullyConnectedTensorProduct, TensorProduct
from ..linear.layer import BlockSparseLinear
from ..linear.load import load_patterns_
from ..linear.sparsify import LayerReport, Sparsified, sparsify
from ..matmul.layer import SpMM

__all__ = [
    "BlockSparseLinear",
    "Conversion",
    "FullyConnectedTensorProduct",
    "LayerReport",
    "SpMM",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseBatchNorm",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTensor",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseIdentity",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "Sparsified",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "TensorProduct",
    "ToDense",
    "from_e3nn",
    "from_spconv",
    "load_patterns_",
    "sparsify",
    "weight_from_conv",
    "weight_from_conv_transpose",
    "weight_from_minkowski",
    "weight_from_torchsparse",
]

__getattr__ = refuser(
    "insum_ops.nn",
    __all__,
    {
        **{f"Conv{n}d": f"SparseConv{n}d, or SubMConv{n}d, which keeps the voxels" for n in (1, 2, 3)},
        "Linear": "BlockSparseLinear, or torch.nn.Linear where nothing is sparse",
        "Sequential": "SparseSequential",
        "ElementwiseTensorProduct": "TensorProduct, with instructions of the mode 'uuu'",
        "FullTensorProduct": "from_e3nn(o3.FullTensorProduct(...)).model",
        "TensorSquare": "e3nn's own: it has no counterpart here",
        "ChannelWiseTensorProduct": "TensorProduct, with instructions of the mode 'uvu'",
        "SymmetricContraction": "MACE's or cuequivariance's own: it has no counterpart here",
        "Identity": "SparseIdentity",
        "ConvAlgo": "no algo: layers take the argument and ignore it",
        "AddTable": "a + b",
        "ConcatTable": "[branch(x) for branch in branches]",
        "JoinTable": "a.replace_feature(torch.cat([a.features, b.features], 1))",
        "RemoveGrid": "nothing in its place: no grid is kept",
        "SparseGlobalMaxPool": "insum('Out[G[n],c] = max(In[n,c])', In=x.features, G=x.indices[:, 0], size=...)",
        "SparseGlobalAvgPool": "insum('Out[G[n],c] += In[n,c]', ...), G=x.indices[:, 0], over the voxels of each",
    },
    "dir(insum_ops.nn) lists what there is",
)
