"""What the formats raise."""

__all__ = ["FormatError"]


class FormatError(ValueError):
    """Tensors, sizes or options that do not make up the sparse format asked for."""
