"""Convolutions whose first call is compiled: maps of voxels that nobody has seen, made inside of one graph."""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from profiled import sorts
from short_clouds import BATCH, SHAPE, cloud, expected_of, strided, submanifold
from statements import DEVICE, IS_THOROUGH
from tolerances import assert_matches
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from insum_ops import nn, sparse_conv3d
from insum_ops.compiler.language.errors import OperandError
from insum_ops.formats import FormatError, kernel_map

pytestmark = [
    pytest.mark.cpu,
    # torch's own, while it traces
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

SIZES = (1, 7, 13, 18, 5)
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _cold():
    torch.manual_seed(0)
    torch._dynamo.reset()


def compiled(call, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(call, fullgraph=True, backend=counter), counter


def assert_trains_alike(y, expected, leaves):
    assert_matches(y, expected)
    upstream = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(made, leaves, upstream) for made in (y, expected))):
        assert_matches(one, other)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(submanifold, {}, id="submanifold"),
        pytest.param(submanifold, dict(groups=2), id="groups"),
        pytest.param(submanifold, dict(groups=4, bias=False), id="depthwise"),
        pytest.param(strided, {}, id="strided"),
    ],
)
def test_five_sizes_share_two_graphs_and_train(make, options):
    layer = make(**options)
    call, counter = compiled(layer)
    for voxels in SIZES:
        x = cloud(voxels=voxels)
        y = call(x)
        assert_trains_alike(y.features, expected_of(layer, x, y), [x.features, *layer.parameters()])
        assert torch.equal(y.indices, layer(x).indices)
    assert counter.frame_count == 2


def grown(layer, x, y):
    """The features of y = layer(x), an inverse or transposed convolution."""
    batch, position = x.indices.long().T
    dense = torch.zeros(BATCH, x.spatial_shape[0], x.features.shape[1], dtype=torch.float64)
    dense = dense.index_put((batch, position), x.features).movedim(-1, 1)
    made = functional.conv_transpose1d(dense, layer.weight.permute(2, 0, 1), layer.bias, 2, output_padding=1)
    batch, position = y.indices.long().T
    return made.movedim(1, -1)[batch, position]


def test_a_transposed_convolution_is_compiled_at_five_sizes():
    layer = nn.SparseConvTranspose1d(4, 3, 2, 2, output_padding=1).double()
    call, counter = compiled(layer)
    for voxels in SIZES:
        x = cloud(voxels=voxels)
        y = call(x)
        assert_trains_alike(y.features, grown(layer, x, y), [x.features, *layer.parameters()])
    assert counter.frame_count == 2


class Hourglass(nn.SparseModule):
    """Two convolutions share each key: of a submanifold, and of what goes down and comes back."""

    def __init__(self):
        super().__init__()
        self.first = nn.SubMConv1d(4, 4, 3, indice_key="own").double()
        self.down = nn.SparseConv1d(4, 6, 2, 2, indice_key="down").double()
        self.low = nn.SubMConv1d(6, 6, 3, indice_key="low").double()
        self.up = nn.SparseInverseConv1d(6, 4, 2, indice_key="down").double()
        self.last = nn.SubMConv1d(8, 2, 3, indice_key="own").double()

    def forward(self, x):
        high = self.first(x)
        low = self.low(self.down(high))
        up = self.up(low.replace_feature(low.features.relu()))
        return self.last(up.replace_feature(torch.cat([high.features, up.features], 1)))


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if IS_THOROUGH else [])])
def test_convolutions_share_keys_in_one_graph(is_warm, backend):
    model = Hourglass()
    call, counter = compiled(model, backend)
    for voxels in SIZES:
        x = cloud(voxels=voxels)
        if is_warm:
            model(x)
        y, expected = call(x), model(nn.SparseConvTensor(x.features, x.indices.clone(), SHAPE, BATCH))
        assert_trains_alike(y.features, expected.features, [x.features, *model.parameters()])
        assert torch.equal(y.indices, x.indices)
        assert set(y.indice_dict) == {"own", "down", "low"}
        assert is_warm or not x.indice_dict  # the input stays as it was
    assert counter.frame_count == 2


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_a_warm_compiled_call_asks_for_no_fields_of_dataclasses(is_made_inside):
    # those of torch 2.11 did, in Python, of each frozen dataclass that was left a default
    model, x = Hourglass(), cloud()

    def features(values, indices):
        given = nn.SparseConvTensor(values, indices, SHAPE, BATCH) if is_made_inside else x.replace_feature(values)
        return model(given).features

    call, counter = compiled(features)
    for _ in range(2):
        call(x.features, x.indices)
    entered = set()
    sys.setprofile(lambda frame, *_: entered.add(frame.f_code.co_filename))
    try:
        y = call(x.features, x.indices)
    finally:
        sys.setprofile(None)
    assert_matches(y, model(x).features)
    assert counter.frame_count == 1
    assert dataclasses.__file__ not in entered


def test_a_warm_compiled_step_of_ours_calls_no_wrapper_and_no_operator_of_torch():
    # an operator of ours that calls one through torch's dispatcher, or turns Dynamo off, takes several times as long
    model, x = Hourglass(), cloud()
    call, _ = compiled(lambda values: model(x.replace_feature(values)).features)
    step = lambda: call(x.features).sum().backward()
    for _ in range(6):
        step()
    slow = [f"{os.sep}{name}" for name in ("_compile.py", "_ops.py", "eval_frame.py")]
    is_ours = lambda file: any([file.startswith(str(ROOT / name)) for name in ("insum_ops", "formats", "compiler")])
    entered = set()

    def note(frame, event, _):
        inner, outer = frame.f_code, frame.f_back and frame.f_back.f_code
        if event == "call" and outer and is_ours(outer.co_filename) and inner.co_filename.endswith(tuple(slow)):
            entered.add((outer.co_name, inner.co_filename))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert entered == set()


def test_the_gradients_of_a_compiled_convolution_are_one_operator():
    layer, x = submanifold(), cloud()
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    call = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    leaves = [x.features, *layer.parameters()]
    assert_trains_alike(call(x).features, expected_of(layer, x, x), leaves)
    assert [name for name in graphs[1] if "getitem" not in name] == ["insum_ops.voxel_convolution_gradients.default"]
    layer.weight.requires_grad_(False)  # and one that is fixed
    assert_trains_alike(call(x).features, expected_of(layer, x, x), [x.features, layer.bias])


def test_what_a_compiled_call_has_saved_serves_others():
    down = nn.SparseConv1d(4, 6, 2, 2, indice_key="down").double()
    up = nn.SparseInverseConv1d(6, 4, 2, indice_key="down").double()
    x = cloud()
    expected = up(down(x))
    y = compiled(down)[0](x)
    for call in (compiled(up)[0], up):
        z = call(y)
        assert_matches(z.features, grown(up, y, z))
        assert_matches(z.features, expected.features)
    assert y.find_indice_pair("down").kernel_map.kind == "strided"


@pytest.mark.parametrize("is_inference", [False, True])
def test_compiled_layers_share_a_map(is_inference):
    """As others do."""
    first, second = submanifold(), submanifold()
    layers = lambda x: second(first(x))
    call, _ = compiled(layers)
    with torch.inference_mode(is_inference):
        x = cloud()
        assert_matches(call(x).features, expected_of(second, x.replace_feature(expected_of(first, x, x)), x))
        assert sorts(partial(call, cloud())) == sorts(partial(layers, cloud())) > 0


def test_maps_over_reached_voxels_are_made_once():
    """An operator returns another copy of them in every step."""
    model, deeper, x = Hourglass(), nn.SparseConv1d(2, 2, 2, 2).double(), cloud()
    lower = nn.SparseConv1d(6, 2, 2, 2).double()
    call, _ = compiled(lambda x: (deeper(model(x)).features, lower(model.low(model.down(x))).features))
    results = []

    def step(x):
        results.append(call(x))
        sum(value.sum() for value in results[-1]).backward()

    for _ in range(2):  # an index tensor that comes again is sorted once
        step(x)
    assert [sorts(partial(step, given)) > 0 for given in (x, x, cloud())] == [False, False, True]
    for values in results[1:4]:
        for value, first in zip(values, results[0]):
            assert_matches(value, first)


def test_a_known_map_is_used_again_until_the_voxels_change():
    layer, x = submanifold(), cloud()
    call, _ = compiled(lambda features, indices: layer(nn.SparseConvTensor(features, indices, SHAPE, BATCH)).features)
    for _ in range(2):
        y = nn.SparseConvTensor(x.features, x.indices.clone(), SHAPE, BATCH)
        assert_matches(call(x.features, x.indices), expected_of(layer, y, y))
        x.indices[:, 1] = (x.indices[:, 1] + 1) % SHAPE[0]


def test_voxels_that_changed_since_they_were_reached_are_refused():
    down = nn.SparseConv1d(4, 6, 2, 2, indice_key="down").double()
    x = cloud()
    down(x)
    x.indices[:, 1] = (x.indices[:, 1] + 1) % SHAPE[0]
    x.indices[0] = x.indices[0] * 0 + torch.tensor([0, 11])
    with pytest.raises(FormatError, match=r"^the indices of voxels were changed in place since a convolution made or"):
        compiled(down)[0](nn.SparseConvTensor(x.features, x.indices, SHAPE, BATCH, indice_dict=x.indice_dict))


@pytest.mark.parametrize("pool", [nn.SparseMaxPool1d, nn.SparseAvgPool1d])
def test_pooling_is_compiled_at_five_sizes(pool):
    layer = pool(2)
    call, counter = compiled(layer)
    for voxels in SIZES:
        x = cloud(voxels=voxels)
        expected = layer(nn.SparseConvTensor(x.features, x.indices, SHAPE, BATCH)).features
        assert_trains_alike(call(x).features, expected, [x.features])
    assert counter.frame_count == 2


def test_a_dense_grid_is_made_in_the_graph():
    model, x = nn.SparseSequential(strided(), nn.ToDense()), cloud()
    assert_matches(compiled(model)[0](x), model(x))


def test_branches_that_lead_to_the_same_voxels_are_added():
    one, other, x = strided(), strided(), cloud()
    call, _ = compiled(lambda x: one(x) + other(x))
    y = call(x)
    assert_matches(y.features, expected_of(one, x, y) + expected_of(other, x, y))


def test_a_sum_over_other_voxels_is_refused_when_it_runs():
    call, _ = compiled(lambda x, y: (x + y).features)
    x, y = cloud(), cloud()
    with pytest.raises(OperandError, match=r"^the two tensors lie on different voxels; bring them to the same ones"):
        call(x, y)
    assert_matches(call(x, nn.SparseConvTensor(y.features, x.indices.clone(), SHAPE, BATCH)), x.features + y.features)


def test_an_inverse_over_other_voxels_is_refused_when_it_runs():
    down = nn.SparseConv1d(4, 6, 2, 2, indice_key="down").double()
    up = nn.SparseInverseConv1d(6, 4, 2, indice_key="down").double()
    y = down(cloud())
    elsewhere = lambda x: up(nn.SparseConvTensor(x.features, x.indices.flip(0), [6], BATCH, indice_dict=x.indice_dict))
    with pytest.raises(OperandError, match=r"^indice_key 'down' leads back from other voxels than this inverse got; b"):
        compiled(elsewhere)[0](y)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda indices: indices.index_copy(0, torch.tensor([1]), indices[:1]),
            r"^indices\[0\] and indices\[1\] are b",
        ),
        (lambda indices: indices + 12, r"^indices\[0\] is .* whose batch index \d+ is outside batch_size 2"),
    ],
)
def test_wrong_voxels_are_refused_in_a_compiled_call(fault, message):
    x = cloud()
    call, _ = compiled(submanifold())
    with pytest.raises(FormatError, match=message):
        call(nn.SparseConvTensor(x.features, fault(x.indices), SHAPE, BATCH))


def test_a_graph_breaks_where_its_sizes_are_not_captured():
    model, x = Hourglass(), cloud()
    assert_matches(torch.compile(model, backend="aot_eager")(x).features, model(x).features)


@pytest.mark.parametrize("kind", ["subm", "strided"])
def test_a_compiled_convolution_has_gradients_of_gradients(kind):
    indices = cloud(voxels=5).indices
    weight = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    features = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    product = lambda features, weight: sparse_conv3d(
        features, weight, kernel_map(indices, SHAPE, BATCH, 3, 1 if kind == "subm" else 2, 1, kind=kind)
    )
    call = torch.compile(product, fullgraph=True, backend="eager")
    assert torch.autograd.gradcheck(call, (features, weight))
    assert torch.autograd.gradgradcheck(call, (features, weight))


def test_a_transform_inside_a_compiled_function_is_followed():
    layer, x = submanifold(), cloud()
    loss = lambda features: layer(x.replace_feature(features)).features.square().sum()
    is_whole = torch.__version__ >= "2.11"  # an older one leaves the gradient uncompiled
    call = torch.compile(torch.func.grad(loss), fullgraph=is_whole, backend="aot_eager")
    (expected,) = torch.autograd.grad(expected_of(layer, x, x).square().sum(), x.features)
    assert_matches(call(x.features.detach()), expected)


@pytest.mark.xfail(torch.__version__ < (2, 12), strict=True, reason="it loses what a checkpoint returns")
def test_a_checkpoint_inside_a_compiled_function_takes_a_sparse_tensor():
    layer, x = submanifold(), cloud()
    call, _ = compiled(lambda x: checkpoint(layer, x, use_reentrant=False))
    assert_trains_alike(call(x).features, expected_of(layer, x, x), [x.features, *layer.parameters()])


def test_autocast_is_followed():
    layer, x = submanifold().float(), cloud()
    x = x.replace_feature(x.features.detach().float())
    call, _ = compiled(layer)
    with torch.autocast(DEVICE, torch.bfloat16):
        y, expected = call(x), layer(x)
    assert y.features.dtype == expected.features.dtype == torch.bfloat16
    assert_matches(y.features, expected.features.double())


def test_torch_finds_nothing_wrong_with_the_operators():
    indices, grid = cloud(voxels=5).indices, [BATCH, *SHAPE, 6]
    operators, over = torch.ops.insum_ops, (indices, indices, "subm;3;1;1;1", [BATCH, *SHAPE, *SHAPE])
    features, weight = torch.randn(5, 4, requires_grad=True), torch.randn(6, 3, 4, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    torch.library.opcheck(operators.convolved_voxels.default, (features, weight, bias, *over, 1, 0, False))
    upstream = torch.randn(5, 6)
    for wanted in ([True, True], [False, True], [True, False], [True, True, True], [False, True, True]):
        gradients = (upstream, features, weight, *over, 1, 0, False, wanted)
        torch.library.opcheck(operators.voxel_convolution_gradients.default, gradients)
    torch.library.opcheck(operators.neighbours.default, (*over, 0))
    torch.library.opcheck(operators.checked_voxels.default, (indices, [BATCH, *SHAPE]))
    torch.library.opcheck(operators.same_rows.default, (indices, indices.clone(), "they differ"))
    static = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operators.reached_voxels.default, (indices, "strided;2;2;0;1", grid), test_utils=static)


def test_flops_of_the_operators_are_counted():
    x, weight = cloud(), torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    over = (x.indices, x.indices, "subm;3;1;1;1", [BATCH, *SHAPE, *SHAPE], 1, 0)
    with FlopCounterMode(display=False) as counter:
        torch.ops.insum_ops.convolved_voxels(x.features, weight, None, *over, False).sum().backward()
    batch, position = x.indices.long().T
    pairs = (batch[:, None] == batch) & ((position[:, None] - position).abs() <= 1)
    assert counter.get_total_flops() == 3 * 2 * int(pairs.sum()) * 4 * 5  # of the value and of two gradients


@pytest.mark.xfail(strict=True, raises=torch._dynamo.exc.UserError, reason="batch_norm asks how many rows there are")
@pytest.mark.parametrize("trains", [False, True])
def test_torch_itself_normalises_no_batch_of_a_size_that_depends_on_data(trains):
    norm = torch.nn.BatchNorm1d(4).train(trains)
    torch.compile(lambda x: norm(x[x[:, 0] > 0]), fullgraph=True, backend="eager")(torch.randn(9, 4))


@pytest.mark.parametrize("trains", [False, True])
def test_a_batch_is_normalised_once_torch_is_told_that_it_has_rows(trains):
    layer, norm, x = strided(), torch.nn.BatchNorm1d(4).double().train(trains), cloud()

    def call(x):
        y = layer(x)
        torch._check(y.features.shape[0] > 1)
        return norm(y.features)

    assert_matches(compiled(call)[0](x), norm(expected_of(layer, x, layer(x))) if not trains else call(x))


class OverVoxels(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, features, indices):
        y = self.layer(nn.SparseConvTensor(features, indices, SHAPE, BATCH))
        return y.features, y.indices


def test_an_exported_convolution_makes_its_maps_with_torch_alone():
    layer, lengths = Hourglass(), {0: torch.export.Dim.AUTO}
    x = cloud(voxels=7)
    with torch.no_grad():
        program = torch.export.export(
            OverVoxels(layer), (x.features, x.indices), dynamic_shapes=(lengths, lengths), strict=False
        )
    assert not [node for node in program.graph.nodes if "insum_ops" in str(node.target)]
    for voxels in (7, 13, 18, 5):
        x = cloud(voxels=voxels)
        y, indices = program.module()(x.features, x.indices)
        expected = layer(x)
        assert torch.equal(indices, expected.indices)
        assert_matches(y, expected.features.detach())
    x.indices[1] = x.indices[0]
    with pytest.raises(RuntimeError, match=r"a voxel is given twice or lies outside spatial_shape \[12\]"):
        program.module()(x.features, x.indices)
