"""Mistakes as a new user makes them, written down from README.md alone, and the page that shows what each gets.

    python tests/mistakes.py    writes docs/use/mistakes.md, which tests/test_mistakes.py compares

Whoever comes from torch.einsum, torch.sparse, PyTorch Geometric, spconv, e3nn or einops would write these lines. The
lines that turned out to run stay in the table too.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parent.parent / "docs" / "use" / "mistakes.md"
PACKAGE = ("insum_ops", "formats", "compiler")

SETUP = """
import numpy, scipy.sparse, torch
from torch import nn
import insum_ops
from insum_ops import explain, formats, insum, sddmm, spmm, tune
from insum_ops.formats import COO, ELL, BlockCOO, GroupCOO
from insum_ops.nn import BlockSparseLinear, FullyConnectedTensorProduct, SpMM, TensorProduct, from_e3nn, sparsify
from insum_ops.nn import SparseConv3d, SparseConvTensor, SparseInverseConv3d, SparseSequential, SubMConv2d, SubMConv3d
from insum_ops.nn import from_spconv

a, b = torch.rand(3), torch.rand(3)
dense = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0], [6.0, 0.0, 7.0]])
B = torch.rand(3, 2)
A = GroupCOO.from_dense(dense, group_size=2)
edge_index = torch.tensor([[1, 0, 2], [0, 2, 2]])
linear = nn.Linear(64, 32)
layer = BlockSparseLinear(64, 32, block_size=16, density=0.5)
indices = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[8, 8, 8], batch_size=2)
conv = SubMConv3d(16, 32, 3)
tp = FullyConnectedTensorProduct("4x0e + 4x1o", "0e + 1o", "4x0e + 4x1o", shared_weights=False)
"""


@dataclass(frozen=True)
class Mistake:
    """A line of code, what is wrong with it in a few words, and what was meant or works instead."""

    area: str
    name: str
    code: str
    meant: str
    is_torchs: bool = False  # torch refuses it, in words that may change with its version

    def __str__(self) -> str:
        return f"{self.area}: {self.name}"


@dataclass(frozen=True)
class Outcome:
    """What came of a line: the error's class and words, and the frames between the line and the error; "" if it ran."""

    error: str = ""
    words: str = ""
    frames: tuple[str, ...] = ()  # the files, below the line itself


def outcome_of(mistake: Mistake) -> Outcome:
    """Run a line after the setup, in a namespace of its own."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(SETUP, names)
    try:
        exec(compile(mistake.code, "<line>", "exec"), names)
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        after = len(files) - files[::-1].index("<line>")  # a lambda of the line may stand further down than the line
        return Outcome(type(error).__name__, str(error), tuple(files[after:]))
    return Outcome()


def page() -> str:
    """The table as a page: each line with the words that it gets."""
    return "".join(_page_lines())


def _page_lines() -> Iterator[str]:
    yield (
        "# Mistakes and what they get\n\n"
        "<!-- Written by `python tests/mistakes.py`; tests/test_mistakes.py compares it. -->\n\n"
        "These lines were written down from the README alone, as someone would write them who comes from\n"
        "torch.einsum, torch.sparse, PyTorch Geometric, spconv, e3nn or einops. Each stands with what was meant or\n"
        "works instead, and with the error that it gets. A wrong call computes nothing. The traceback ends at your\n"
        "own line; `INSUM_TRACEBACK=full` in the environment shows the frames inside the package too.\n\n"
        "All lines follow this:\n\n"
        f"```python\n{SETUP.strip()}\n```\n"
    )
    for area, mistakes in groupby(MISTAKES, key=lambda mistake: mistake.area):
        yield f"\n## {area[0].upper()}{area[1:]}\n"
        for mistake in mistakes:
            found = outcome_of(mistake)
            yield f"\n**{mistake.name}**: {mistake.meant}.\n\n"
            yield f"```python3\n{mistake.code}\n```\n"  # not `python`: pages' blocks of that name are run
            if not found.error:
                yield "\nThis line runs.\n"
            elif mistake.is_torchs:
                yield f"\n`{found.error}`, in torch's own words.\n"
            else:
                yield f"\n```text\n{found.error}: {found.words}\n```\n".replace("\t", "    ")


MISTAKES = (
    Mistake(
        "statements",
        "positional operands",
        'insum("C[i,j] += A[i,k] * B[k,j]", dense, B)',
        "every tensor is passed by its name: `A=dense, B=B`",
    ),
    Mistake("statements", "einsum's notation", 'insum("ij,jk->ik", A=dense, B=B)', "`C[i,k] += A[i,j] * B[j,k]`"),
    Mistake(
        "statements",
        "einsum's call",
        'insum("ij,jk->ik", dense, B)',
        "`C[i,k] += A[i,j] * B[j,k]`, and every tensor by its name",
    ),
    Mistake("statements", "einsum's implicit output", 'insum("ii", A=dense)', "the trace: `C[()] += A[i,i]`"),
    Mistake("statements", "einops' notation", 'insum("i k, k j -> i j", A=dense, B=B)', "`C[i,j] += A[i,k] * B[k,j]`"),
    Mistake(
        "statements",
        "einops' rearrange",
        'insum("b (h w) -> b h w", A=dense)',
        "a view, which no statement makes: `A.unflatten(1, (h, w))`",
    ),
    Mistake(
        "statements",
        "einsum's ellipsis",
        'insum("C[...,j] += A[...,k] * B[k,j]", A=dense, B=B)',
        "an index for each dimension: `C[i,j] += A[i,k] * B[k,j]`",
    ),
    Mistake(
        "statements",
        "relu by max",
        'insum("C[i] = max(A[i], 0)", A=a)',
        "`insum(...).relu()` or `torch.clamp`; `max` compares the products that meet in one element",
    ),
    Mistake(
        "statements", "maximum of two tensors", 'insum("C[i] = max(A[i], B[i])", A=a, B=b)', "`torch.maximum(a, b)`"
    ),
    Mistake(
        "statements",
        "max with +=",
        'insum("C[i] += max(A[i,j])", A=dense)',
        "the largest of each row: `C[i] = max(A[i,j])`",
    ),
    Mistake(
        "statements",
        "sum as a function",
        'insum("C[i] = sum(A[i,j])", A=dense)',
        "the sum of each row: `C[i] = A[i,j]`",
    ),
    Mistake(
        "statements",
        "mean as a function",
        'insum("C[i] = mean(A[i,j])", A=dense)',
        "the mean of each row: `C[i] = 0.3333 * A[i,j]`, or a division afterwards",
    ),
    Mistake("statements", "exp of a factor", 'insum("C[i] += exp(A[i])", A=a)', "`A=a.exp()`"),
    Mistake(
        "statements",
        "a sum of two accesses",
        'insum("C[i] = A[i] + B[i]", A=a, B=b)',
        "`a + b`, or `C[i] += B[i]` with the first result as `C`",
    ),
    Mistake(
        "statements",
        "a difference",
        'insum("C[i] = A[i] - B[i]", A=a, B=b)',
        "`a - b`, or `C[i] += -1 * B[i]` with the first result as `C`",
    ),
    Mistake("statements", "a quotient", 'insum("C[i] = A[i] / B[i]", A=a, B=b)', "`B=1 / b`, and `*`"),
    Mistake("statements", "a power", 'insum("C[i] = A[i]**2", A=a)', "`A[i] * A[i]`"),
    Mistake(
        "statements",
        "matmul's sign",
        'insum("C[i,j] += A[i,k] @ B[k,j]", A=dense, B=B)',
        "`*`: that k is summed follows from its absence on the left",
    ),
    Mistake(
        "statements", "no sign between factors", 'insum("C[i,j] += A[i,k] B[k,j]", A=dense, B=B)', "`*` between them"
    ),
    Mistake("statements", "-=", 'insum("C[i] -= A[i]", C=a, A=b)', "`C[i] += -1 * A[i]`"),
    Mistake(
        "statements",
        "parentheses for brackets",
        'insum("C(i,j) += A(i,k) * B(k,j)", A=dense, B=B)',
        "`C[i,j] += A[i,k] * B[k,j]`",
    ),
    Mistake("statements", "one bracket for each index", 'insum("C[i] += A[i][j]", A=dense)', "`A[i,j]`"),
    Mistake("statements", "a slice", 'insum("C[i] += A[i,:]", A=dense)', "an index name: `A[i,j]`"),
    Mistake("statements", "the last column", 'insum("C[i] += A[i,-1]", A=dense)', "its position: `A[i,2]`"),
    Mistake(
        "statements",
        "strided index",
        'insum("C[i] += A[2*i]", A=a)',
        "positions in a tensor: `A[I[i]]` with `I=torch.arange(0, 3, 2)`",
    ),
    Mistake("statements", "empty brackets", 'insum("C[] += A[i]", A=a)', "`C[()] += A[i]`"),
    Mistake("statements", "no output index", 'insum("C += A[i]", A=a)', "`C[()] += A[i]`"),
    Mistake("statements", "no left side", 'insum("A[i,k] * B[k,j]", A=dense, B=B)', "`C[i,j] += A[i,k] * B[k,j]`"),
    Mistake(
        "statements", "an arrow", 'insum("A[i,k] * B[k,j] -> C[i,j]", A=dense, B=B)', "`C[i,j] += A[i,k] * B[k,j]`"
    ),
    Mistake("statements", "a bracket left open", 'insum("C[i] += A[i", A=a)', "`A[i]`"),
    Mistake("statements", "two statements", 'insum("T[i] += A[i,j]; C[i] = T[i]", A=dense)', "two calls"),
    Mistake(
        "statements",
        "a scalar by name",
        'insum("C[i] += alpha * A[i]", alpha=2.0, A=a)',
        "`2.0 * A[i]`, or `alpha[()]` with a tensor of no dimensions",
    ),
    Mistake("statements", "no text", "insum(dense, B)", "the statement comes first"),
    Mistake("statements", "empty text", 'insum("", A=a)', "a statement"),
    Mistake("statements", "an operand left out", 'insum("C[i,j] += A[i,k] * B[k,j]", A=dense)', "`B=B`"),
    Mistake("statements", "an operand too many", 'insum("C[i] += A[i]", A=a, B=b)', "no `B`"),
    Mistake(
        "statements", "a name in the wrong case", 'insum("C[i,j] += A[i,k] * B[k,j]", a=dense, b=B)', "`A=dense, B=B`"
    ),
    Mistake("statements", "too few indices", 'insum("C[i] += A[i]", A=dense)', "`A[i,j]`"),
    Mistake(
        "statements",
        "sizes that differ",
        'insum("C[i,j] += A[i,k] * B[j,k]", A=dense, B=torch.rand(2, 4))',
        "a `k` of one size",
    ),
    Mistake(
        "statements",
        "a position out of range",
        'insum("C[p] = A[I[p]]", A=a, I=torch.tensor([0, 3]))',
        "positions below 3",
    ),
    Mistake(
        "statements",
        "a bool mask as index",
        'insum("C[p] = A[M[p]]", A=a, M=torch.tensor([True, False, True]))',
        "the positions where it is True: `M=mask.nonzero().squeeze(1)`",
    ),
    Mistake("statements", "a float index", 'insum("C[p] = A[I[p]]", A=a, I=torch.tensor([0.0, 2.0]))', "`I.long()`"),
    Mistake(
        "statements",
        "a scatter without a size",
        'insum("C[I[p]] += A[p]", A=a, I=torch.tensor([0, 2, 2]))',
        "`size=(3,)`",
    ),
    Mistake(
        "statements",
        "a size of another rank",
        'insum("C[I[p]] += A[p]", A=a, I=torch.tensor([0, 2, 2]), size=(3, 2))',
        "`size=(3,)`",
    ),
    Mistake(
        "statements",
        "an output of another shape",
        'insum("C[i,j] += A[i,k] * B[k,j]", C=torch.zeros(2, 3), A=dense, B=B)',
        "an output of shape [3, 2]",
    ),
    Mistake(
        "statements",
        "out=",
        'insum("C[i] += A[i]", A=a, out=torch.zeros(3))',
        "`C=torch.zeros(3)`; the result is a new tensor in any case",
    ),
    Mistake("statements", "an output index from nowhere", 'insum("C[i,j] += A[i]", A=a)', "`size=(3, n)`, or no `j`"),
    Mistake(
        "statements",
        "an index of nothing but the output, with size",
        'insum("C[i,j] = A[i]", A=a, size=(3, 4))',
        "a broadcast, which a size makes possible",
    ),
    Mistake("operands", "integers as values", 'insum("C[i] += A[i]", A=torch.arange(3))', "`A.float()`"),
    Mistake(
        "operands",
        "complex values",
        'insum("C[i] += A[i]", A=torch.ones(3, dtype=torch.complex64))',
        "real and imaginary parts as a dimension: `torch.view_as_real`",
    ),
    Mistake("operands", "a numpy array", 'insum("C[i] += A[i,j]", A=numpy.ones((3, 3)))', "`torch.from_numpy`"),
    Mistake("operands", "a list", 'insum("C[i] += A[i]", A=[1.0, 2.0])', "`torch.tensor`"),
    Mistake(
        "operands",
        "a torch sparse tensor in a statement",
        'insum("C[m,n] += A[m,k] * B[k,n]", A=dense.to_sparse(), B=B)',
        "a format, or `spmm`",
    ),
    Mistake(
        "operands",
        "a CSR tensor in a statement",
        'insum("C[m,n] += A[m,k] * B[k,n]", A=dense.to_sparse_csr(), B=B)',
        "a format, or `spmm`",
    ),
    Mistake(
        "operands",
        "a scipy matrix in a statement",
        'insum("C[m,n] += A[m,k] * B[k,n]", A=scipy.sparse.csr_array(dense.numpy()), B=B)',
        "a format, or `spmm`",
    ),
    Mistake(
        "operands",
        "an edge_index in a statement",
        'insum("C[m,n] += A[m,k] * B[k,n]", A=edge_index, B=B)',
        "`spmm((edge_index, None), B)`, or a format",
    ),
    Mistake("operands", "two devices", 'insum("C[i,j] += A[i,k] * B[k,j]", A=dense, B=B.to("meta"))', "one device"),
    Mistake("operands", "two sparse factors", 'insum("C[m,n] += A[m,k] * D[k,n]", A=A, D=A)', "one of them dense"),
    Mistake(
        "operands",
        "the sparse factor twice",
        'insum("C[m,n] += A[m,k] * A[k,n]", A=A)',
        "one of them dense, under a name of its own",
    ),
    Mistake(
        "operands",
        "a sparse output",
        'insum("A[m,k] += X[m,n] * Y[n,k]", A=A, X=B, Y=B.T)',
        "`sddmm(A, B, B)`, or a dense output",
    ),
    Mistake("operands", "a format as index", 'insum("C[p] = a[A[p]]", a=a, A=A)', "an index tensor"),
    Mistake("operands", "a format with an index too few", 'insum("C[m] += A[m]", A=A)', "`A[m,k]`"),
    Mistake("operands", "a gradient of a format", "A.requires_grad_()", "`A.with_values(A.values.requires_grad_())`"),
    Mistake("formats", "A @ B", "A @ B", "`spmm(A, B)`"),
    Mistake("formats", "B @ A", "B.T @ A", "`C[m,n] += B[m,k] * A[k,n]`"),
    Mistake("formats", "A[0]", "A[0]", "`A.to_dense()[0]`"),
    Mistake("formats", "A * 2", "A * 2", "`A.with_values(A.values * 2)`"),
    Mistake("formats", "A + A", "A + A", "`A.with_values(A.values + A.values)`, or a sum of dense ones"),
    Mistake("formats", "A.T", "A.T", "the transpose"),
    Mistake("formats", "len(A)", "len(A)", "`A.shape[0]`"),
    Mistake("formats", "scipy's todense", "A.todense()", "`A.to_dense()`"),
    Mistake("formats", "torch.mm of a format", "torch.mm(A, B)", "`spmm(A, B)`", is_torchs=True),
    Mistake("formats", "torch.sparse.mm of a format", "torch.sparse.mm(A, B)", "`spmm(A, B)`", is_torchs=True),
    Mistake("formats", "a format as a Parameter", "nn.Parameter(A)", "`SpMM(A, trainable=True)`"),
    Mistake("formats", "the class called with a dense matrix", "GroupCOO(dense)", "`GroupCOO.from_dense(dense)`"),
    Mistake("formats", "from_dense of a sparse tensor", "GroupCOO.from_dense(dense.to_sparse())", "`from_torch`"),
    Mistake("formats", "from_dense of a numpy array", "GroupCOO.from_dense(dense.numpy())", "`torch.from_numpy` first"),
    Mistake("formats", "from_torch of a dense tensor", "COO.from_torch(dense)", "`from_dense`"),
    Mistake("formats", "from_scipy of a tensor", "COO.from_scipy(dense)", "`from_dense`"),
    Mistake("formats", "a group size of 0", "GroupCOO.from_dense(dense, group_size=0)", "1 or more, or None"),
    Mistake("formats", "a group dimension that is not there", "GroupCOO.from_dense(dense, group_dim=2)", "0 or 1"),
    Mistake("formats", "blocks without a size", "BlockCOO.from_dense(dense)", "`block_size=(2, 2)`"),
    Mistake(
        "formats",
        "from_coo as torch.sparse_coo_tensor",
        "COO.from_coo(edge_index, torch.ones(3), (3, 3))",
        "coordinates [2, E], values and a shape, as torch takes them",
    ),
    Mistake(
        "formats", "from_coo with values first", "COO.from_coo(torch.ones(3), edge_index, (3, 3))", "coordinates first"
    ),
    Mistake("formats", "from_coo out of range", "COO.from_coo(edge_index, torch.ones(3), (2, 2))", "a shape of [3, 3]"),
    Mistake(
        "formats",
        "with_values of another shape",
        "A.with_values(torch.ones(3))",
        "values of the shape that `A.values` has",
    ),
    Mistake(
        "formats",
        "a format that is not there",
        "from insum_ops.formats import CSR",
        "`GroupCOO`, which takes torch's CSR tensors",
    ),
    Mistake("formats", "a format in the wrong case", "formats.GroupCoo", "`GroupCOO`"),
    Mistake("spmm and sddmm", "a bare edge_index", "spmm(edge_index, B)", "`spmm((edge_index, None), B)`"),
    Mistake("spmm and sddmm", "a dense matrix", "spmm(dense, B)", "`dense @ B`, or a format"),
    Mistake("spmm and sddmm", "the arguments swapped", "spmm(B, dense.to_sparse())", "`spmm(A, B)`"),
    Mistake("spmm and sddmm", "another K", "spmm(A, torch.rand(4, 2))", "3 rows, as many as A has columns"),
    Mistake("spmm and sddmm", "an integer B", "spmm(A, torch.ones(3, 2, dtype=torch.long))", "`B.float()`"),
    Mistake("spmm and sddmm", "a numpy B", "spmm(A, numpy.ones((3, 2)))", "`torch.from_numpy(B)`"),
    Mistake("spmm and sddmm", "reduce='add'", 'spmm(A, B, reduce="add")', '`reduce="sum"`'),
    Mistake(
        "spmm and sddmm",
        "edge pairs by rows",
        "spmm((torch.tensor([[1, 0], [0, 2], [2, 2], [2, 1]]), None), B)",
        "`edge_index.T`",
    ),
    Mistake("spmm and sddmm", "edge_index in float", "spmm((edge_index.float(), None), B)", "`edge_index.long()`"),
    Mistake("spmm and sddmm", "a weight for each node", "spmm((edge_index, torch.ones(4)), B)", "one for each edge"),
    Mistake("spmm and sddmm", "a node beyond B", "spmm((edge_index, None), B[:2])", "a row of B for each node"),
    Mistake("spmm and sddmm", "the graph in four", "spmm((edge_index, None, 3, 3), B)", "`(edge_index, None, (3, 3))`"),
    Mistake(
        "spmm and sddmm",
        "edge_index and weight not in a tuple",
        "spmm(edge_index, torch.ones(3), B)",
        "`spmm((edge_index, weight), B)`",
    ),
    Mistake(
        "spmm and sddmm",
        "torch_sparse's five arguments",
        "spmm(edge_index, torch.ones(3), 3, 3, B)",
        "`spmm((index.flip(0), value, (n, m)), B)`",
    ),
    Mistake("spmm and sddmm", "two dtypes", "spmm(A, B.double())", "the type that torch promotes both to"),
    Mistake(
        "spmm and sddmm", "sddmm of a dense mask", "sddmm(dense != 0, B, B)", "`GroupCOO.from_dense(mask.float())`"
    ),
    Mistake("spmm and sddmm", "sddmm with matmul's shapes", "sddmm(A, B, B.T)", "Y by rows: `sddmm(A, B, B)`"),
    Mistake("spmm and sddmm", "SpMM without a matrix", "SpMM()", "`SpMM(A)`"),
    Mistake("spmm and sddmm", "SpMM called like spmm", "SpMM(A)(A, B)", "`SpMM(A)(B)`"),
    Mistake("spmm and sddmm", "SpMM of sizes as nn.Linear", "SpMM(3, 2)", "`SpMM(A)`"),
    Mistake("spmm and sddmm", "spm", "insum_ops.spm", "`spmm`"),
    Mistake(
        "spmm and sddmm",
        "a layer from the wrong module",
        "from insum_ops import SpMM",
        "`from insum_ops.nn import SpMM`",
    ),
    Mistake("spmm and sddmm", "einsum from insum_ops", "from insum_ops import einsum", "`insum`"),
    Mistake("linear layers", "no block size", "BlockSparseLinear(64, 32)", "blocks of 32 x 32, the default"),
    Mistake(
        "linear layers", "a density in percent", "BlockSparseLinear(64, 32, block_size=16, density=50)", "`density=0.5`"
    ),
    Mistake(
        "linear layers", "a block of no size", "BlockSparseLinear(64, 32, block_size=0, density=0.5)", "`block_size=16`"
    ),
    Mistake("linear layers", "another number of features", "layer(torch.rand(4, 32))", "64 features"),
    Mistake("linear layers", "another dtype", "layer(torch.rand(4, 64).half())", "`layer.half()`, or autocast"),
    Mistake(
        "linear layers",
        "from_dense of a weight",
        "BlockSparseLinear.from_dense(linear.weight, 16, density=0.5)",
        "a matrix or the layer",
    ),
    Mistake(
        "linear layers",
        "from_dense without a density",
        "BlockSparseLinear.from_dense(linear, 16)",
        "`density=0.5` or `threshold=...`",
    ),
    Mistake(
        "linear layers", "a mask for each element", "layer.set_pattern_(torch.rand(32, 64) > 0.5)", "one for each block"
    ),
    Mistake("linear layers", "a mask of numbers", "layer.set_pattern_(torch.rand(2, 4))", "a bool mask"),
    Mistake(
        "linear layers",
        "sparsify of a Linear",
        "sparsify(linear, block_size=16, density=0.5)",
        "the layer itself may be the model",
    ),
    Mistake("linear layers", "sparsify without a density", "sparsify(nn.Sequential(linear))", "the defaults"),
    Mistake(
        "linear layers",
        "blocks larger than the layer",
        "BlockSparseLinear(64, 32, block_size=128, density=0.5)",
        "smaller blocks",
    ),
    Mistake(
        "linear layers",
        "a checkpoint of another pattern",
        "layer.load_state_dict(BlockSparseLinear(64, 32, block_size=16, density=0.25).state_dict())",
        "`load_patterns_(layer, state_dict)` first",
    ),
    Mistake(
        "linear layers",
        "a checkpoint of nn.Linear",
        "layer.load_state_dict(linear.state_dict())",
        "`BlockSparseLinear.from_dense(linear, ...)`",
    ),
    Mistake("convolution", "no kernel size", "SubMConv3d(16, 32)", "`SubMConv3d(16, 32, 3)`"),
    Mistake("convolution", "no arguments", "SubMConv3d()", "`SubMConv3d(16, 32, 3)`"),
    Mistake("convolution", "SubMConv3D", "insum_ops.nn.SubMConv3D", "`SubMConv3d`"),
    Mistake("convolution", "Conv3d", "from insum_ops.nn import Conv3d", "`SparseConv3d` or `SubMConv3d`"),
    Mistake("convolution", "nn.Sequential", "nn.Sequential(SubMConv3d(16, 32, 3), nn.ReLU())(x)", "`SparseSequential`"),
    Mistake(
        "convolution",
        "a batch norm of a sparse tensor",
        "nn.BatchNorm1d(16)(x)",
        "`x.replace_feature(norm(x.features))`, or `SparseSequential`",
    ),
    Mistake("convolution", "torch.relu of a sparse tensor", "torch.relu(x)", "`x.replace_feature(x.features.relu())`"),
    Mistake("convolution", "x.relu()", "x.relu()", "`x.replace_feature(x.features.relu())`"),
    Mistake("convolution", "features as the input", "conv(x.features)", "the `SparseConvTensor`"),
    Mistake(
        "convolution",
        "a dense grid as the input",
        "conv(torch.rand(2, 16, 8, 8, 8))",
        "a `SparseConvTensor` of its occupied voxels",
    ),
    Mistake("convolution", "another number of channels", "SubMConv3d(8, 32, 3)(x)", "16 channels"),
    Mistake("convolution", "2-d layer, 3-d voxels", "SubMConv2d(16, 32, 3)(x)", "`SubMConv3d`"),
    Mistake(
        "convolution",
        "float coordinates",
        "SparseConvTensor(torch.ones(3, 16), indices.float(), [8, 8, 8], 2)",
        "`indices.int()`",
    ),
    Mistake(
        "convolution",
        "coordinates without the batch",
        "SparseConvTensor(torch.ones(3, 16), indices[:, 1:], [8, 8, 8], 2)",
        "the batch index as column 0",
    ),
    Mistake(
        "convolution",
        "fewer features than voxels",
        "SparseConvTensor(torch.ones(2, 16), indices, [8, 8, 8], 2)",
        "a row for each voxel",
    ),
    Mistake(
        "convolution",
        "a voxel outside the grid",
        "conv(SparseConvTensor(torch.ones(3, 16), indices, [4, 4, 4], 2))",
        "a larger `spatial_shape`",
    ),
    Mistake(
        "convolution",
        "a batch index outside",
        "conv(SparseConvTensor(torch.ones(3, 16), indices, [8, 8, 8], 1))",
        "`batch_size=2`",
    ),
    Mistake(
        "convolution",
        "a voxel twice",
        "conv(SparseConvTensor(torch.ones(3, 16), indices[[0, 0, 1]], [8, 8, 8], 2))",
        "each voxel once",
    ),
    Mistake(
        "convolution",
        "a voxel outside, kernel 1",
        "SubMConv3d(16, 32, 1)(SparseConvTensor(torch.ones(3, 16), indices, [4, 4, 4], 2))",
        "a larger `spatial_shape`",
    ),
    Mistake(
        "convolution", "no batch size", "SparseConvTensor(torch.ones(3, 16), indices, [8, 8, 8])", "`batch_size=2`"
    ),
    Mistake("convolution", "an int for the shape", "SparseConvTensor(torch.ones(3, 16), indices, 8, 2)", "`[8, 8, 8]`"),
    Mistake("convolution", "an inverse without its key", "SparseInverseConv3d(16, 32, 2)(x)", '`indice_key="down"`'),
    Mistake(
        "convolution",
        "an inverse of an unknown key",
        'SparseInverseConv3d(16, 32, 2, indice_key="down")(x)',
        "the key of the convolution to undo",
    ),
    Mistake("convolution", "a submanifold layer with stride", "SubMConv3d(16, 32, 3, stride=2)", "`SparseConv3d`"),
    Mistake("convolution", "groups that do not divide", "SubMConv3d(16, 32, 3, groups=3)", "a divisor of 16 and 32"),
    Mistake(
        "convolution",
        "one key, two kernels",
        'SparseSequential(SubMConv3d(16, 16, 3, indice_key="a"), SubMConv3d(16, 16, 5, indice_key="a"))(x)',
        "two keys",
    ),
    Mistake("convolution", "from_spconv of a number", "from_spconv(3)", "a model"),
    Mistake(
        "convolution",
        "sum of two sparse tensors of other voxels",
        "conv(x) + SparseConv3d(16, 32, 2, stride=2)(x)",
        "tensors on the same voxels",
    ),
    Mistake(
        "tensor products",
        "no output irreps",
        'FullyConnectedTensorProduct("4x0e", "0e")',
        '`"4x0e"` as the third argument',
    ),
    Mistake(
        "tensor products", "irreps with a typing error", 'FullyConnectedTensorProduct("4x0g", "0e", "4x0e")', '`"4x0e"`'
    ),
    Mistake("tensor products", "irreps as a number", "FullyConnectedTensorProduct(16, 4, 16)", '`"16x0e"`'),
    Mistake("tensor products", "no weights", "tp(torch.rand(5, 16), torch.rand(5, 4))", "`weight`, for each sample"),
    Mistake(
        "tensor products",
        "another width of x",
        "tp(torch.rand(5, 12), torch.rand(5, 4), torch.rand(5, tp.weight_numel))",
        "16 columns",
    ),
    Mistake(
        "tensor products",
        "weights of another number",
        "tp(torch.rand(5, 16), torch.rand(5, 4), torch.rand(5, 7))",
        "`tp.weight_numel` columns",
    ),
    Mistake(
        "tensor products",
        "two batch sizes",
        "tp(torch.rand(5, 16), torch.rand(6, 4), torch.rand(5, tp.weight_numel))",
        "one number of samples",
    ),
    Mistake(
        "tensor products",
        "src without dst",
        "tp(torch.rand(5, 16), torch.rand(5, 4), torch.rand(5, tp.weight_numel), src=torch.tensor([0, 1, 2]))",
        "`dst` too",
    ),
    Mistake(
        "tensor products",
        "src beyond the nodes",
        "tp(torch.rand(2, 16), torch.rand(3, 4), torch.rand(3, tp.weight_numel), src=edge_index[0], dst=edge_index[1])",
        "positions below 2",
    ),
    Mistake(
        "tensor products",
        "a mode that is not there",
        'TensorProduct("4x0e", "4x0e", "4x0e", [(0, 0, 0, "uuv", True)])',
        '`"uvw"` or another of the six modes',
    ),
    Mistake(
        "tensor products",
        "TensorProduct without instructions",
        'TensorProduct("4x0e", "0e", "4x0e")',
        "`FullyConnectedTensorProduct`",
    ),
    Mistake("tensor products", "from_e3nn of a number", "from_e3nn(3)", "a model"),
    Mistake(
        "tensor products",
        "e3nn's name for another product",
        "from insum_ops.nn import ElementwiseTensorProduct",
        '`TensorProduct` with instructions of the mode `"uuu"`',
    ),
    Mistake(
        "explain and tune",
        "explain without operands",
        'explain("C[i,j] += A[i,k] * B[k,j]")',
        "tensors, on the meta device if need be",
    ),
    Mistake(
        "explain and tune",
        "explain with shapes",
        'explain("C[i,j] += A[i,k] * B[k,j]", A=(3, 3), B=(3, 2))',
        '`A=torch.empty(3, 3, device="meta")`',
    ),
    Mistake("explain and tune", "tune on a CPU", 'tune("C[i,j] += A[i,k] * B[k,j]", A=dense, B=B)', "CUDA tensors"),
    Mistake(
        "explain and tune",
        "explain positional",
        'explain("C[i,j] += A[i,k] * B[k,j]", dense, B)',
        "every tensor by its name",
    ),
    Mistake(
        "explain and tune", "explain of a layer", "explain(layer)", "`explain(layer.EXPR, X=x, W=layer.as_format())`"
    ),
    Mistake(
        "gradients and modes",
        "vmap over a format",
        "torch.func.vmap(lambda A: spmm(A, B))(A)",
        "over values: `A.with_values(values)` inside",
        is_torchs=True,
    ),
    Mistake(
        "gradients and modes",
        "grad of a format",
        "torch.func.grad(lambda A: spmm(A, B).sum())(A)",
        "of values: `A.with_values(values)` inside",
        is_torchs=True,
    ),
    Mistake(
        "gradients and modes",
        "a gradient of an index tensor",
        'torch.autograd.grad(insum("C[p] = A[I[p]]", A=a.requires_grad_(), I=edge_index[0]).sum(), edge_index)',
        "positions have no gradient",
        is_torchs=True,
    ),
    Mistake(
        "gradients and modes",
        "jit script",
        "torch.jit.script(layer)",
        "`torch.compile` or `torch.export`",
    ),
)

if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
