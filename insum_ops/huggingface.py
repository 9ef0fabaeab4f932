"""Hugging Face: with this imported, `from_pretrained` reads models that `sparsify` made and `save_pretrained` saved."""

from .linear.huggingface import BlockSparseConfig, BlockSparseQuantizer, attach_

__all__ = ["BlockSparseConfig", "BlockSparseQuantizer", "attach_"]
