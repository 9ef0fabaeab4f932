"""Statements over several GPUs, on torch.distributed. Import this and `insum` takes DTensors.

A file imports only from those above it.

    rules      how a statement may be split, and which way costs least
    agreement  checks that end alike on every rank
    dtensors   `insum` over DTensors
"""

from . import dtensors
from .rules import Split, bytes_moved, cheapest_split, splits_of

__all__ = ["Split", "bytes_moved", "cheapest_split", "splits_of"]

del dtensors  # imported for what it registers
