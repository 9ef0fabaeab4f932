"""Cells that do not go through, and why: limits of torch's own, and what is ours to mend.

A cell that goes through after all fails its test until it is taken out of here.
"""

from __future__ import annotations

SPARSE = "torch traces no sparse tensor."

LIMITS: dict[tuple[str, str], str] = {
    (f"{function} of a {layout} tensor", column): SPARSE
    for function in ("spmm", "sddmm")
    for layout in ("coo", "csr")
    for column in ("compile cold", "dynamic", "export dynamic", "AOTI")
}

NOT_YET: dict[tuple[str, str], str] = {}
