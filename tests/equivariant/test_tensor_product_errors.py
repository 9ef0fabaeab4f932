"""Every message of a tensor product, in full."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from insum_ops import tensor_product  # noqa: E402
from insum_ops.compiler.language.errors import IndexRangeError, InsumError  # noqa: E402
from insum_ops.formats import GroupCOO  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct  # noqa: E402

pytestmark = pytest.mark.usefixtures("in_float64")


def message(error: type, text: str):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


IRREPS = ("2x0e + 2x1o", "0e + 1o", "2x0e + 2x1o")
LINES = dict(zip(("irreps_in1", "irreps_in2", "irreps_out"), IRREPS))


class Irreps:
    """Those of another library, which print as e3nn's do."""

    __module__ = "cuequivariance.group_theory"

    def __repr__(self) -> str:
        return "4x0e"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            dict(irreps_in1="2x0q"),
            "irreps_in1 is '2x0q', which e3nn can't read as irreps; "
            "write multiplicities, degrees and parities, as in '16x0e + 8x1o'",
        ),
        (
            dict(irreps_in2=Irreps()),
            "irreps_in2 is 4x0e, which e3nn can't read as irreps; "
            "it is cuequivariance's Irreps, so pass str(irreps_in2)",
        ),
        (dict(layout="mul"), "layout is 'mul'; choose one of 'mul_ir', 'ir_mul'"),
        (
            dict(irrep_normalization="norms"),
            "irrep_normalization is 'norms'; choose one of 'component', 'norm', 'none'",
        ),
        (
            dict(path_normalization="paths"),
            "path_normalization is 'paths'; choose one of 'element', 'path', 'none'",
        ),
        (
            dict(in1_var=[1.0]),
            "in1_var holds 1 numbers but its irreps 2x0e+2x1o have 2; give one each",
        ),
        (dict(in2_var=1.0), "in2_var is 1.0; give a number for each of its irreps 1x0e+1x1o"),
        (dict(in1_var=[1.0, -1.0]), "in1_var holds -1.0; a variance is a number of 0 or more"),
        (dict(out_var=[1.0, "much"]), "out_var holds 'much'; a variance is a number of 0 or more"),
        (
            dict(internal_weights=True, shared_weights=False),
            "internal_weights is True but shared_weights is False; "
            "share them, or pass the weights of each sample to forward",
        ),
    ],
)
def test_wrong_options(options, text):
    with message(InsumError, text):
        FullyConnectedTensorProduct(**{**LINES, **options})


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            (0, 0, 0),
            "instruction 0 has 3 fields; give (i_in1, i_in2, i_out, mode, has_weight) and perhaps a path weight",
        ),
        ((0, 2, 0, "uvw", True), "instruction 0 names block 2 of irreps_in2, which has 2: 1x0e+1x1o"),
        (
            (0, 0, 0, "uvu<v", True),
            "instruction 0 has connection mode 'uvu<v'; choose one of 'uvw', 'uvu', 'uvv', 'uuw', 'uuu', 'uvuv'",
        ),
        (
            (0, 0, 0, "uvw", False),
            "instruction 0 has mode 'uvw' without weights; give it weights, or take mode 'uvu' or 'uuu'",
        ),
        (
            (0, 0, 0, "uvw", True, -1.0),
            "instruction 0 has path weight -1.0, but its root is taken; give one of 0 or more",
        ),
        (
            (0, 0, 0, "uvw", True, float("nan")),
            "instruction 0 has path weight nan, but its root is taken; give one of 0 or more",
        ),
        (
            (0, 0, 0, "uvw", True, "much"),
            "instruction 0 has path weight much, but its root is taken; give one of 0 or more",
        ),
        (
            3,
            "instruction 0 is of type int; give (i_in1, i_in2, i_out, mode, has_weight) and perhaps a path weight",
        ),
        ((0, 0, 1, "uvw", True), "instruction 0 takes 0e x 0e to 1o, but that product holds 0e only"),
        ((0, 0, 0, "uuw", False), "instruction 0 has mode 'uuw', which multiplicities 2 x 1 -> 2 do not fit"),
        ((0, 0, 0, "uuu", True), "instruction 0 has mode 'uuu', which multiplicities 2 x 1 -> 2 do not fit"),
    ],
)
def test_wrong_instructions(path, text):
    with message(InsumError, text):
        TensorProduct(*IRREPS, [path])
    with message(InsumError, text):
        tensor_product(torch.ones(3, 8), torch.ones(3, 4), instructions=[path], **LINES)


def test_blocks_may_be_named_by_any_integer():
    paths = [(np.int64(1), torch.tensor(0), 1, "uvw", True)]
    assert TensorProduct(*IRREPS, paths).instructions == TensorProduct(*IRREPS, [(1, 0, 1, "uvw", True)]).instructions


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        ((3, 7), (3, 4), "x is [3, 7], but irreps_in1 2x0e+2x1o has dimension 8; its last dimension must be 8"),
        ((), (3, 4), "x is [], but irreps_in1 2x0e+2x1o has dimension 8; its last dimension must be 8"),
        ((3, 8), (3, 5), "y is [3, 5], but irreps_in2 1x0e+1x1o has dimension 4; its last dimension must be 4"),
        (
            (3, 8),
            (2, 4),
            "leading dimensions must broadcast, but x has [3], y [2] and weight []; make them agree or 1",
        ),
    ],
)
def test_wrong_shapes(x, y, text):
    with message(InsumError, text):
        FullyConnectedTensorProduct(*IRREPS)(torch.ones(x), torch.ones(y))


@pytest.mark.cpu
def test_wrong_kinds_of_inputs():
    ours, x, y = FullyConnectedTensorProduct(*IRREPS), torch.ones(3, 8), torch.ones(3, 4)
    with message(InsumError, "x is float32 but y is float64; convert them to one dtype"):
        ours(x.float(), y)
    with message(InsumError, "x is float32 but weight is float64; convert them to one dtype"):
        ours(x.float(), y.float())
    with message(InsumError, "x is float32 but y is float64; convert them to one dtype"):
        ours.to("meta")(x.float().to("meta"), y.to("meta"))
    with message(InsumError, "x is on cpu but y is on meta; move them to one device"):
        ours(x, y.to("meta"))
    text = (
        "y is int64, the positions of a one-hot second input, but irreps_in2 is 1x0e+1x1o; "
        "only one block of scalars in fully connected paths can be one-hot"
    )
    with message(InsumError, text):
        ours(x, torch.ones(3, dtype=torch.long))
    one_hot = FullyConnectedTensorProduct("8x0e", "3x0e", "2x0e")
    with message(InsumError, "x is on cpu but y is on meta; move them to one device"):
        one_hot(x, torch.ones(3, dtype=torch.long, device="meta"))
    text = "weight is [3, 16], but shared weights are [16]; for weights of each sample pass shared_weights=False"
    with message(InsumError, text):
        ours(x, y, torch.ones(3, 16))
    with message(InsumError, "weight holds 1 tensors but 4 paths have weights; give one each"):
        ours(x, y, [torch.ones(2, 1, 2)])
    text = "weight[1] is [2, 1, 3], but the weights of its path are [..., 2, 1, 2] or [..., 4]"
    with message(InsumError, text):
        ours(x, y, [torch.ones(2, 1, 2), torch.ones(2, 1, 3), *torch.ones(2, 2, 1, 2)])
    with message(InsumError, "weight[0] is of type list; pass a torch.Tensor"):
        ours(x, y, [[1.0]] * 4)
    with message(InsumError, "weight is of type str; pass a torch.Tensor, or one for each path"):
        ours(x, y, "ones")
    with message(InsumError, "x is of type list; pass a torch.Tensor"):
        ours(x.tolist(), y)
    with message(InsumError, "weight is of type list; pass a torch.Tensor"):
        tensor_product(x, y, [1.0], **LINES)


def test_wrong_positions_of_a_one_hot_input():
    one_hot, x = FullyConnectedTensorProduct("8x0e", "3x0e", "2x0e"), torch.ones(4, 8)
    kinds = torch.tensor([0, 2, 1, 1])
    for wrong in (kinds.to(torch.uint8), kinds.bool(), kinds.cfloat()):
        name = str(wrong.dtype).removeprefix("torch.")
        text = f"y is {name}; rows are floating point, positions of a one-hot second input int32 or int64"
        with message(InsumError, text):
            one_hot(x, wrong)
    # where there are as many samples as kinds these would be positions of a shape that broadcasts
    text = (
        "y is int64 [3, 3], a row of 3x0e for each row of x, but integers are the positions of its ones; "
        "pass y.to(x.dtype), or the positions y.argmax(-1)"
    )
    with message(InsumError, text):
        one_hot(x[:3], torch.nn.functional.one_hot(kinds[:3], 3))
    for shape, where in (((4,), "1"), ((2, 2), "0,1"), ((4, 1), "1,0")):
        with message(IndexRangeError, f"y[{where}] is 3, but irreps_in2 3x0e has 3 kinds; they count from 0"):
            one_hot(x.view(*shape, 8), torch.tensor([0, 3, 1, 1]).view(shape))
    with message(IndexRangeError, "y[()] is 3, but irreps_in2 3x0e has 3 kinds; they count from 0"):
        one_hot(x, torch.tensor(3))


def test_wrong_weights_of_each_sample():
    ours = FullyConnectedTensorProduct(*IRREPS, shared_weights=False)
    x, y = torch.ones(3, 8), torch.ones(3, 4)
    with message(InsumError, "no weight was given and internal_weights is False; pass weight [..., 16]"):
        ours(x, y)
    text = (
        "weight is [16], but weights of each sample are [..., 16]; for weights shared by all pass shared_weights=True"
    )
    with message(InsumError, text):
        ours(x, y, torch.ones(16))
    text = "weight is [3, 15], but the paths have 16 weights; its last dimension must be 16"
    with message(InsumError, text):
        ours(x, y, torch.ones(3, 15))
    with message(InsumError, "no weight was given; pass one of 16 numbers"):
        tensor_product(x, y, **LINES)
    with message(InsumError, "instruction 0 has no weights"):
        TensorProduct(*IRREPS, [(0, 0, 0, "uvu", False)]).weight_view_for_instruction(0)


def test_wrong_edges():
    ours = FullyConnectedTensorProduct(*IRREPS)
    x, y, at = torch.ones(3, 8), torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
    with message(InsumError, "dst is missing; edges need src and dst, a product of rows neither"):
        ours(x, y, src=at)
    with message(InsumError, "src is missing; edges need src and dst, a product of rows neither"):
        ours(x, y, num_nodes=3)
    text = "edges need as many rows of src, dst, y, but they are src [3], dst [4], y [4, 4]"
    with message(InsumError, text):
        ours(x, y, src=at[:3], dst=at)
    for wrong in (-1, 2.5):
        with message(InsumError, f"num_nodes is {wrong}; give a whole number of at least 0"):
            ours(x, y, src=at, dst=at, num_nodes=wrong)
    with message(InsumError, "x is [1, 3, 8]; with src and dst it has one row for each node"):
        ours(x[None], y, src=at, dst=at)
    with message(IndexRangeError, "src[0] is 3, but x has 3 nodes; they count from 0"):
        ours(x, y, src=at + 3, dst=at)
    with message(IndexRangeError, "dst[3] is 2, but there are 2 nodes; they count from 0"):
        ours(x, y, src=at, dst=at + torch.tensor([0, 1, 0, 2]), num_nodes=2)
    with message(InsumError, "src is float64; positions are int32 or int64"):
        ours(x, y, src=at.double(), dst=at)
    with message(InsumError, "dst is int8; positions are int32 or int64"):
        ours(x, y, src=at, dst=at.to(torch.int8))
    with message(InsumError, "dst is of type list; pass a torch.Tensor"):
        ours(x, y, src=at, dst=[0, 0, 0, 0])
    for same in (2, np.int64(2), torch.tensor(2)):
        assert ours(x, y, src=at, dst=at, num_nodes=same).shape == (2, 8)


def test_no_path_is_all_zeros_and_says_so():
    text = "no path leads from 2x0e x 2x1o to 3x2e; the output is always zero"
    with pytest.warns(UserWarning, match=re.escape(text)):
        ours = FullyConnectedTensorProduct("2x0e", "2x1o", "3x2e")
    assert torch.equal(ours(torch.ones(4, 2), torch.ones(4, 6)), torch.zeros(4, 15))
    none = torch.zeros(2, dtype=torch.long)
    assert ours(torch.ones(4, 2), torch.ones(2, 6), src=none, dst=none).shape == (4, 15)


def test_the_old_name_of_a_normalisation():
    with pytest.warns(DeprecationWarning, match=r"^normalization is deprecated; pass irrep_normalization$"):
        ours = TensorProduct(*IRREPS, [(0, 0, 0, "uvw", True)], normalization="norm")
    assert (
        ours.instructions == TensorProduct(*IRREPS, [(0, 0, 0, "uvw", True)], irrep_normalization="norm").instructions
    )


def test_wrong_formats():
    ours = FullyConnectedTensorProduct("2x0e", "3x0e", "2x0e")
    form = GroupCOO.from_dense(torch.ones(4, 3))
    text = "y is of type list; pass a torch.Tensor or a GroupCOO"
    with message(InsumError, text):
        ours(torch.ones(4, 2), [1])
    text = "x is [5, 2] and y [4, 3], but a sparse y is [rows of x, 3] for irreps_in2 3x0e"
    with message(InsumError, text):
        ours(torch.ones(5, 2), form)
    text = (
        "y is a GroupCOO, but that is for one block of scalars in fully connected paths, without edges, "
        "with weights shared by all rows; pass y.to_dense()"
    )
    with message(InsumError, text):
        FullyConnectedTensorProduct("2x0e", "1x1o", "2x1o")(torch.ones(4, 2), form)
    with message(InsumError, "x is float32 but y is float64; convert them to one dtype"):
        ours(torch.ones(4, 2).float(), form)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_inputs_that_are_not_dense() -> None:
    product = FullyConnectedTensorProduct("3x0e", "0e", "3x0e")
    x, y = torch.eye(3), torch.ones(3, 1)
    with message(InsumError, "x is a torch.sparse_coo tensor; pass a dense one, as x.to_dense()"):
        product(x.to_sparse(), y)
    with message(InsumError, "y is a torch.sparse_coo tensor; pass a dense one, as y.to_dense()"):
        product(x, y.to_sparse())
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
        with message(InsumError, "x is a nested tensor; pass a padded one, as x.to_padded_tensor(0.0)"):
            product(nested, y)
