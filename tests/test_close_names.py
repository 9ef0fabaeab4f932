"""A name that is not there is answered with what it may have meant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import insum_ops
from insum_ops import formats, nn
from insum_ops.close_names import close_name

pytestmark = pytest.mark.cpu


def words(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("spm", "spmm"), ("SPMM", "spmm"), ("insun", "insum"), ("sddm", "sddmm"), ("unrelated", None), ("", None)],
)
def test_a_close_name_is_found_in_any_case(name: str, expected: str | None) -> None:
    assert close_name(name, ["insum", "sddmm", "spmm"]) == expected
    assert close_name(name, []) is None


def test_an_attribute_of_a_module() -> None:
    assert words(AttributeError, lambda: insum_ops.spm) == "insum_ops has no spm; did you mean spmm?"
    assert words(AttributeError, lambda: nn.SubMConv3D) == "insum_ops.nn has no SubMConv3D; did you mean SubMConv3d?"
    assert (
        words(AttributeError, lambda: formats.GroupCoo) == "insum_ops.formats has no GroupCoo; did you mean GroupCOO?"
    )
    assert words(AttributeError, lambda: insum_ops.SparseConv3d) == (
        "insum_ops has no SparseConv3d; use insum_ops.nn.SparseConv3d"
    )
    assert (
        words(AttributeError, lambda: insum_ops.groupcoo) == "insum_ops has no groupcoo; use insum_ops.formats.GroupCOO"
    )


def test_a_name_of_another_library_gets_what_to_write_instead() -> None:
    for name, remedy in {
        "ConvAlgo": "no algo: layers take the argument and ignore it",
        "AddTable": "a + b",
        "JoinTable": "a.replace_feature(torch.cat([a.features, b.features], 1))",
        "SparseGlobalMaxPool": "insum('Out[G[n],c] = max(In[n,c])', In=x.features, G=x.indices[:, 0], size=...)",
        "FullTensorProduct": "from_e3nn(o3.FullTensorProduct(...)).model",
    }.items():
        assert words(AttributeError, partial(getattr, nn, name)) == f"insum_ops.nn has no {name}; use {remedy}"
    assert words(AttributeError, lambda: insum_ops.SparseTensor) == (
        "insum_ops has no SparseTensor; use a torch sparse tensor, or the edges (edge_index, edge_weight), as spmm "
        "takes them"
    )
    assert words(AttributeError, lambda: insum_ops.sampled_addmm) == (
        "insum_ops has no sampled_addmm; use sddmm(A, X, Y), which is X @ Y.T at the entries of A"
    )


def test_an_import_of_a_name() -> None:
    def layer() -> None:
        from insum_ops import SpMM  # noqa: F401

    def convolution() -> None:
        from insum_ops.nn import Conv3d  # noqa: F401

    def format_() -> None:
        from insum_ops.formats import CSR  # noqa: F401

    assert words(ImportError, layer) == "insum_ops has no SpMM; use insum_ops.nn.SpMM"
    assert words(ImportError, convolution) == (
        "insum_ops.nn has no Conv3d; use SparseConv3d, or SubMConv3d, which keeps the voxels"
    )
    assert words(ImportError, format_) == (
        "insum_ops.formats has no CSR; use GroupCOO.from_torch(A), which takes torch's CSR tensors"
    )


def test_where_no_name_is_close_the_module_says_what_it_offers() -> None:
    assert words(AttributeError, lambda: insum_ops.unrelated) == (
        "insum_ops has no unrelated; it offers Insum, explain, insum, sddmm, sparse_conv3d, spmm, tensor_product, "
        "tune, nn and formats"
    )
    assert words(AttributeError, lambda: nn.unrelated) == (
        "insum_ops.nn has no unrelated; dir(insum_ops.nn) lists what there is"
    )
    assert words(AttributeError, lambda: formats.unrelated) == (
        "insum_ops.formats has no unrelated; it offers COO, ELL, BlockCOO, BlockGroupCOO, FormatError, GroupCOO, "
        "GroupedMap, KernelMap, group_size, kernel_map"
    )


def test_python_adds_no_guess_of_its_own() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = insum_ops.spm
    assert caught.value.name is None


def test_private_names_are_not_guessed_at() -> None:
    assert words(AttributeError, lambda: insum_ops._spmm) == "insum_ops has no _spmm"
    assert not hasattr(insum_ops, "__wrapped__")
