"""Block-sparse linear layers: `Y[t,o] += X[t,i] * W[o,i]` with W in blocks, of which only the stored ones are trained.

patterns       which blocks are stored: drawn at random, by norm, or given
state          patterns in a state_dict, and why one does not fit
remap          what moves along when a pattern changes: optimizer states, hooks
weight_format  a weight as a format, as long as neither it nor its pattern has changed
product        the layer's product as one step of autograd
layer          `BlockSparseLinear`
load           `load_patterns_`: the patterns of a checkpoint, before its values
fused_encoder  torch's transformer encoders are made to call the layer
pretrained     which modules are Hugging Face's
huggingface    save_pretrained and from_pretrained; imported where transformers is
sparsify       `sparsify`: a model's linear layers, pruned and replaced
"""

from .layer import BlockSparseLinear
from .load import load_patterns_
from .sparsify import LayerReport, Sparsified, sparsify

__all__ = ["BlockSparseLinear", "LayerReport", "Sparsified", "load_patterns_", "sparsify"]
