"""Sparse convolutions: `Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`, and other statements over the same kernel map.

cost            how long each statement would take over a map, estimated from the map, the layer and the GPU
forms           the statements, and which of them a new map takes
operands        a kernel map as the statements read it
choice          the fastest of them over a map that lasts
weight_views    a weight as the statements read it
operators       torch operators for a convolution and its gradients, as tracers see them
functional      `sparse_conv3d`, and what all layers call
operator_calls  what the operators compute where they run
voxels          the voxels of a batch of grids, and the kernel maps that are kept with them
saved_maps      maps that a tensor keeps under keys
tensor          `SparseConvTensor`
torch_registry  what torch is told about it: pytrees, batches, files
convolution     what all convolution layers share
layers          the layers by dimension and kind
pooling         largest and mean over the same maps
sequential      containers and pointwise layers
weight_layouts  other libraries' weights
from_spconv     spconv's layers, and checkpoints of them
"""

from . import operator_calls
from .functional import sparse_conv3d
from .torch_registry import joined

__all__ = ["joined", "sparse_conv3d"]

del operator_calls  # imported for what it registers
