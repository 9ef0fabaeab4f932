"""What the formats raise."""

__all__ = ["FormatError"]


class FormatError(ValueError):
    """Tensors, sizes or options that do not make up the sparse format or kernel map asked for.

    It is a `ValueError`; the message says what is wrong, with the values, and what to do.

    Example:
        >>> import torch
        >>> from insum_ops.formats import COO, FormatError
        >>> try:
        ...     COO.from_dense(torch.eye(2), group_size=3)
        ... except FormatError as error:
        ...     print(error)
        COO has no group size to choose; leave group_size out, or use GroupCOO or BlockGroupCOO
    """
