"""insum_ops: a sparse operator is one line, `C[AM[p],n] += AV[p,q] * B[AK[p,q],n]`."""

from importlib import metadata
from pathlib import Path

# In a checkout formats/ and compiler/ lie beside this folder, not in it (`package_dir` in setup.cfg). Unless insum_ops
# is installed editable, Python would find neither them nor those of the installed package, which this folder hides.
if not Path(__file__).with_name("compiler").is_dir():
    __path__ = [*__path__, str(Path(__file__).parents[1])]

try:
    __version__ = metadata.version("insum_ops")
except metadata.PackageNotFoundError:  # a checkout that is on the path, but not installed
    __version__ = "0+unknown"

from . import formats, nn
from .close_names import refuser
from .conv.functional import sparse_conv3d
from .equivariant import tensor_product
from .functional import Insum, explain, insum, tune
from .matmul.functional import sddmm, spmm
from .moved import know_moved_modules

__all__ = ["Insum", "explain", "insum", "sddmm", "sparse_conv3d", "spmm", "tensor_product", "tune"]

know_moved_modules()

__getattr__ = refuser(
    "insum_ops",
    [*__all__, "formats", "nn"],
    {
        **{name: f"insum_ops.nn.{name}" for name in nn.__all__},
        **{name: f"insum_ops.formats.{name}" for name in formats.__all__},
        "einsum": "insum, with statements such as C[i,k] += A[i,j] * B[j,k]",
        "scatter": "insum, with statements such as Out[G[e],c] += X[e,c] or Out[G[e],c] = max(X[e,c])",
        "segment_csr": "insum, with a statement such as Out[G[e],c] += X[e,c] and the row of each entry in G",
        "edge_softmax": "insum, with the statements of examples/graph_attention.py",
        "sampled_addmm": "sddmm(A, X, Y), which is X @ Y.T at the entries of A",
        "SparseTensor": "a torch sparse tensor, or the edges (edge_index, edge_weight), as spmm takes them",
    },
    f"it offers {', '.join(__all__)}, nn and formats",
)
