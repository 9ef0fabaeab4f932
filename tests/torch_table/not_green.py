"""Cells that do not go through, and why: limits of torch's own, and what is ours to mend.

Each limit has a test of torch alone in test_torch_limits.py. A cell that goes through after all fails its test until it
is taken out of here.
"""

from __future__ import annotations

Cell = tuple[str, str]


def _cells(names: list[str], columns: list[str], reason: str) -> dict[Cell, str]:
    return {(name, column): reason for name in names for column in columns}


COO, CSR = (["spmm of a coo tensor", "sddmm of a coo tensor"], ["spmm of a csr tensor", "sddmm of a csr tensor"])
STRIDED = ["nn.SparseConv3d, given cloud", "nn.SparseConv3d, given voxels"]
VOXELS = ["nn.SubMConv3d, given voxels", "nn.SparseConv3d, given voxels"]

LIMITS: dict[Cell, str] = {
    **_cells([*COO, *CSR], ["compile cold", "dynamic"], "torch.compile takes no sparse tensor into a graph."),
    **_cells([*COO, *CSR], ["export dynamic"], "torch.export saves no sparse tensor."),
    **_cells([*COO, *CSR], ["AOTI", "AOTI on a GPU"], "AOTInductor packages no sparse tensor."),
    **_cells([COO[1], CSR[1]], ["functorch"], "torch.func.vmap makes no sparse tensor, and the result is one."),
    **_cells([COO[1], CSR[1]], ["make_fx"], "make_fx has no gradient through a sparse tensor that is made dense."),
    **_cells(
        [CSR[1]],
        ["capture"],
        "A CUDA graph holds no gradient through a CSR tensor that is made dense; one through its `values()` it does.",
    ),
    **_cells(CSR, ["pickle"], "copy.deepcopy fails for a CSR tensor."),
    **_cells([COO[1], CSR[1]], ["TP", "DTensor"], "A DTensor is never sparse, and the result is."),
    **_cells(
        VOXELS, ["capture"], "A CUDA graph reads nothing back, and how many outputs there are depends on the voxels."
    ),
}

NOT_YET: dict[Cell, str] = {}
