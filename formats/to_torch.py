"""Formats -> torch's own sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..close_names import with_article
from .convert import block_grid
from .errors import FormatError

if TYPE_CHECKING:
    from .sparse_format import SparseFormat

__all__ = ["torch_sparse"]

# by whether values are blocks and by the dimension of the groups: what torch has for a matrix
LAYOUTS = {
    (False, 0): torch.sparse_csr,
    (False, 1): torch.sparse_csc,
    (True, 0): torch.sparse_bsr,
    (True, 1): torch.sparse_bsc,
}
MAKERS: dict[torch.layout, Callable[..., Tensor]] = {
    torch.sparse_csr: torch.sparse_csr_tensor,
    torch.sparse_csc: torch.sparse_csc_tensor,
    torch.sparse_bsr: torch.sparse_bsr_tensor,
    torch.sparse_bsc: torch.sparse_bsc_tensor,
}


def torch_sparse(form: SparseFormat, layout: torch.layout | None, coords: Tensor, values: Tensor) -> Tensor:
    """Return entries, sorted with the group dimension first, as a torch sparse tensor of a format's shape."""
    is_blocked, is_matrix = form.block_size is not None, form.ndim == 2
    natural = LAYOUTS[is_blocked, form.group_dim] if is_matrix else None if is_blocked else torch.sparse_coo
    layout = natural if layout is None else layout
    name = type(form).__name__
    if layout is None:
        raise FormatError(
            f"torch has no blocks of {form.ndim} dimensions, as in {form!r}; use A.to_dense().to_sparse()"
        )
    if layout is torch.sparse_coo and not is_blocked:
        is_sorted = form.group_dim == 0
        return torch.sparse_coo_tensor(
            coords, values, form.shape, device=values.device, is_coalesced=is_sorted, check_invariants=False
        )
    if layout != natural:
        offered = f"{natural}" if is_blocked or not is_matrix else f"{natural} or torch.sparse_coo"
        raise FormatError(
            f"{with_article(name)} grouped along dimension {form.group_dim} makes {offered}, not {layout}; "
            "use A.regroup(...) first, or convert the result"
        )
    if is_blocked and any(size % block for size, block in zip(form.shape, form.block_size or ())):
        raise FormatError(
            f"torch's blocks must divide the shape, but shape is {list(form.shape)} and block_size "
            f"{list(form.block_size or ())}; use A.to_dense().to_sparse()"
        )
    rows, columns = coords[form.group_dim], coords[1 - form.group_dim]
    counts = torch.bincount(rows, minlength=block_grid(form.shape, form.block_size)[form.group_dim])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    parts = starts, columns.contiguous(), values
    return MAKERS[layout](*parts, form.shape, device=values.device, check_invariants=False)
