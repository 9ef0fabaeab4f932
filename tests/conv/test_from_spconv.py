"""Models and weights of other libraries. Stand-ins have spconv's attributes and compute what it computes."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from enum import Enum

import pytest
import torch
from tolerances import assert_matches

from insum_ops import nn
from insum_ops.compiler.language.errors import OperandError, ShapeError, UnsupportedError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Convolution(torch.nn.Module):
    """The attributes by which spconv's layers are told."""

    def __init__(self, ndim, channels, kernel_size, bias=True, indice_key=None, **options):
        super().__init__()
        self.ndim, self.in_channels, self.out_channels = ndim, *channels
        self.kernel_size, self.indice_key = [kernel_size] * ndim, indice_key
        self.stride, self.padding, self.dilation = (
            [options.get(k, d)] * ndim for k, d in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        self.subm, self.inverse, self.transposed = (options.get(k, False) for k in ("subm", "inverse", "transposed"))
        self.weight = torch.nn.Parameter(torch.randn(channels[1], *self.kernel_size, channels[0]))
        self.bias = torch.nn.Parameter(torch.randn(channels[1])) if bias else None


class SparseMaxPool3d(torch.nn.Module):
    ndim, kernel_size, stride, padding, dilation, indice_key, subm = (
        3,
        [2] * 3,
        [2] * 3,
        [0] * 3,
        [1] * 3,
        "pool",
        False,
    )


class SparseSequential(torch.nn.Sequential):
    pass


class SparseBatchNorm(torch.nn.BatchNorm1d):
    pass


class ToDense(torch.nn.Module):
    __module__ = "spconv.pytorch.modules"


class SparseIdentity(torch.nn.Identity):
    __module__ = "spconv.pytorch.modules"


class JoinTable(torch.nn.Module):
    __module__ = "spconv.pytorch.tables"


class SparseModule(torch.nn.Module):
    __module__ = "spconv.pytorch.modules"


class Residual(SparseModule):
    """A block as models built on spconv write it: it takes the tensor, and its norm the features."""

    def __init__(self, channels):
        super().__init__()
        self.conv = Convolution(3, (channels, channels), 3, subm=True, bias=False, indice_key="a")
        self.norm, self.act = SparseBatchNorm(channels), torch.nn.ReLU()

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y.replace_feature(self.act(y.features + x.features))


def cloud(channels=4):
    indices = (torch.rand(2, 4, 5, 6) < 0.4).nonzero().int()
    return nn.SparseConvTensor(torch.randn(len(indices), channels), indices, [4, 5, 6], 2)


def test_a_whole_model_is_converted():
    block = SparseSequential(
        OrderedDict(
            conv=Convolution(3, (4, 8), 3, subm=True, stride=2, padding=1, indice_key="a"),
            norm=SparseBatchNorm(8),
            act=torch.nn.ReLU(),
            down=Convolution(3, (8, 8), 3, bias=False, stride=2, padding=1, indice_key="b"),
            up=Convolution(3, (8, 4), 3, inverse=True, indice_key="b"),
        )
    )
    model = torch.nn.Module()
    model.block, model.head = (
        block,
        torch.nn.ModuleList([Convolution(3, (4, 2), 2, transposed=True, stride=2), SparseMaxPool3d(), ToDense()]),
    )
    block.norm.eval()
    converted = nn.from_spconv(model)
    kinds = [type(module).__name__ for module in converted.modules()]
    assert kinds == [
        *("Module", "SparseSequential", "SubMConv3d", "SparseBatchNorm", "ReLU", "SparseConv3d", "SparseInverseConv3d"),
        *("ModuleList", "SparseConvTranspose3d", "SparseMaxPool3d", "ToDense"),
    ]
    assert not converted.block.norm.training
    assert isinstance(model.block, SparseSequential), "the model itself stays as it was"
    for name, tensor in model.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor)
    x = converted.block(cloud())
    assert x.features.shape[1] == 4
    assert converted.head[1](converted.head[0](x)).features.shape[1] == 2


def test_blocks_of_a_model_get_the_tensor_and_other_modules_its_features():
    blocks = SparseSequential(
        Residual(4), torch.nn.Linear(4, 8), SparseSequential(Residual(8)), SparseIdentity()
    ).eval()
    converted = nn.from_spconv(blocks)
    x = cloud()
    expected = x.replace_feature(x.features)
    for block, layer in ((converted[0], None), (converted[2][0], converted[1])):
        assert type(block) is Residual
        if layer is not None:
            expected = expected.replace_feature(layer(expected.features))
        y = torch.nn.functional.batch_norm(
            block.conv(expected).features, block.norm.running_mean, block.norm.running_var
        )
        expected = expected.replace_feature(torch.relu(y + expected.features))
    for model in (converted, pickle.loads(pickle.dumps(converted)), nn.from_spconv(converted)):
        assert_matches(model(x).features.detach(), expected.features.detach().double())
    assert isinstance(converted[3], nn.SparseIdentity)


@pytest.mark.parametrize("make", [lambda: nn.SparseBatchNorm(4), nn.SparseReLU])
def test_modules_of_features_take_the_tensor_too(make):
    x, module = cloud(), make()
    expected = torch.nn.Module.__call__(module, x.features)
    assert torch.equal(module(x).features, expected)
    assert torch.equal(nn.SparseSequential(module)(x).features, expected)
    assert list(nn.SparseBatchNorm(4).state_dict()) == list(torch.nn.BatchNorm1d(4).state_dict())


def test_what_is_frozen_stays_frozen():
    source = Convolution(2, (4, 8), 3, subm=True)
    source.weight.requires_grad_(False)
    layer = nn.from_spconv(source.half())
    assert isinstance(layer, nn.SubMConv2d)
    assert [p.requires_grad for p in (layer.weight, layer.bias)] == [False, True]
    assert layer.weight.dtype == torch.float16
    assert nn.from_spconv(layer).weight.shape == layer.weight.shape


@pytest.mark.cpu
def test_what_is_shared_stays_shared():
    act, conv = torch.nn.ReLU(), Convolution(3, (4, 4), 3, subm=True)
    tied = Convolution(3, (4, 4), 3, subm=True, bias=False)
    tied.weight = conv.weight
    model = torch.nn.Module()
    model.row, model.again = SparseSequential(conv, act, conv, act, tied), conv
    model.norm = model.same = SparseBatchNorm(4)
    converted = nn.from_spconv(model)
    assert [type(layer).__name__ for layer in converted.row] == ["SubMConv3d", "ReLU"] * 2 + ["SubMConv3d"]
    assert converted.row[0] is converted.row[2] is converted.again
    assert converted.row[4].weight is converted.again.weight
    assert type(converted.norm) is nn.SparseBatchNorm
    assert converted.same is converted.norm
    assert conv.weight is not converted.again.weight, "the model itself stays as it was"
    assert len(list(converted.parameters())) == len(list(model.parameters()))
    x, first = cloud(), converted.again
    expected = x
    for _ in range(2):
        expected = expected.replace_feature(first(expected).features.relu())
    torch.testing.assert_close(converted.row(x).features, converted.row[4](expected).features)


def subclassed(layer):
    """A class of the model's own, defined in another package, that changes what the layer computes."""

    def doubled(self, x):
        return 2 * x

    kind = type(layer)
    kind.forward = doubled  # as of a layer that computes
    layer.__class__ = type("Scaled", (kind,), {"__module__": "model", "forward": doubled})


def quantized(layer):
    layer.act_type = Activation.ReLU


class Activation(Enum):
    None_, ReLU = 0, 1


SET = "; convert first, then set {} again"
CHANGES = {
    "forward": (lambda layer: setattr(layer, "forward", abs), "has forward of its own, which would be lost" + SET),
    "private": (
        lambda layer: setattr(layer, "_conv_forward", abs),
        "has _conv_forward of its own, which would be lost" + SET,
    ),
    "attribute": (lambda layer: setattr(layer, "note", 3), "has note of its own, which would be lost" + SET),
    "buffer": (
        lambda layer: layer.register_buffer("mean", torch.ones(1)),
        "has mean of its own, which would be lost" + SET,
    ),
    "adapter": (
        lambda layer: layer.add_module("lora", torch.nn.Linear(1, 1)),
        "has lora of its own, which would be lost" + SET,
    ),
    "state": (
        lambda layer: layer.register_state_dict_post_hook(lambda *_: None),
        "has hooks, which would be lost; remove them, convert, and register them again",
    ),
    "weight norm": (
        lambda layer: torch.nn.utils.parametrizations.weight_norm(layer),
        "has a parametrization of weight, which would be lost; remove it with "
        "torch.nn.utils.parametrize.remove_parametrizations, or convert first",
    ),
    "compiled": (lambda layer: layer.compile(), "is compiled, which would be lost; convert first, then compile"),
    "subclass": (
        subclassed,
        "is a Scaled, which overrides forward of its base class; derive it from insum_ops.nn's layer instead",
    ),
    "activation": (
        quantized,
        "has the activation ReLU fused into it, which would be lost; put it after the layer instead",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_layer_that_was_changed_is_refused(kind):
    class Layer(Convolution):
        def _conv_forward(self):
            """As spconv's have one."""

    change, words = CHANGES[kind]
    model = torch.nn.Sequential(Layer(3, (4, 8), 3, subm=True), torch.nn.ReLU())
    model[0].act_type = Activation.None_
    nn.from_spconv(model)
    change(model[0])
    with pytest.raises(UnsupportedError) as caught:
        nn.from_spconv(model)
    assert str(caught.value) == f"0 {words.format('it')}"


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_an_old_weight_norm_is_refused():
    model = torch.nn.utils.weight_norm(Convolution(3, (4, 8), 3, subm=True))
    with pytest.raises(UnsupportedError) as caught:
        nn.from_spconv(model)
    assert str(caught.value) == (
        "the module has hooks, which would be lost; remove them, convert, and register them again"
    )


def test_what_stands_around_layers_is_refused_where_it_would_be_lost():
    inner = SparseSequential(Convolution(3, (4, 8), 3, subm=True))
    inner.forward = abs
    pool = SparseMaxPool3d()
    pool.note = 3
    wrapped = torch.nn.ModuleDict({"conv": torch.compile(Convolution(3, (4, 8), 3, subm=True))})
    for model, words in (
        (torch.nn.Sequential(inner), "0 has forward of its own, which would be lost" + SET),
        (pool, "the module has note of its own, which would be lost" + SET),
        (wrapped, "conv is compiled, which would be lost; convert first, then compile"),
        (torch.compile(SparseSequential()), "_orig_mod is compiled, which would be lost; convert first, then compile"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            nn.from_spconv(model)
        assert str(caught.value) == words.format("it")


def test_hooks_on_parameters_are_refused_since_a_copy_has_none():
    model = torch.nn.Sequential(Convolution(3, (4, 8), 3, subm=True), torch.nn.Linear(8, 8))
    model[1].weight.register_hook(lambda grad: 0 * grad)
    with pytest.raises(UnsupportedError) as caught:
        nn.from_spconv(model)
    assert str(caught.value) == (
        "1.weight has hooks, which a copy would not have; remove them, convert, and register them again"
    )


def test_a_weight_of_the_old_layout_that_is_shared_stays_shared():
    convs = [Convolution(3, (4, 8), 3, subm=True, bias=False) for _ in range(2)]
    older = torch.nn.Parameter(torch.randn(3, 3, 3, 4, 8), requires_grad=False)
    convs[0].weight = convs[1].weight = older
    first, second = nn.from_spconv(torch.nn.ModuleList(convs))
    assert first.weight is second.weight
    assert torch.equal(first.weight, older.movedim(-1, 0))
    assert not first.weight.requires_grad


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_are_not_lost(kind):
    """Where a module is replaced; one that becomes ours, or stays, keeps them."""
    model = torch.nn.Sequential(Convolution(3, (4, 8), 3, subm=True), SparseBatchNorm(8), torch.nn.ReLU())
    for kept in model[1:]:
        getattr(kept, f"register_{kind}_hook")(lambda *given: None)
    converted = nn.from_spconv(model)
    assert all(any(getattr(own, hooks) for hooks in HOOKS) for own in converted[1:])
    getattr(model[0], f"register_{kind}_hook")(lambda *given: None)
    with pytest.raises(UnsupportedError) as caught:
        nn.from_spconv(model)
    assert str(caught.value) == "0 has hooks, which would be lost; remove them, convert, and register them again"


def test_a_layer_without_a_counterpart_is_named():
    with pytest.raises(UnsupportedError) as caught:
        nn.from_spconv(torch.nn.Sequential(torch.nn.Sequential(JoinTable())))
    assert str(caught.value) == "0.0 is spconv's JoinTable, which has no counterpart here; replace it by hand first"
    with pytest.raises(UnsupportedError) as caught:
        nn.from_spconv(JoinTable())
    assert str(caught.value) == (
        "the module is spconv's JoinTable, which has no counterpart here; replace it by hand first"
    )


def test_a_pointwise_weight_is_read_as_spconv_reads_it():
    x, weight = cloud(), torch.randn(8, 1, 1, 1, 4)
    for layer in (nn.SubMConv3d(4, 8, 1, bias=False), nn.SparseConv3d(4, 8, 1, bias=False)):
        layer.load_state_dict({"weight": weight})
        assert torch.equal(layer(x).features, x.features @ weight.view(4, 8))
        assert_matches(layer(x).features, x.features.double() @ layer.kernel.double().view(8, 4).T)
        assert torch.equal(layer.state_dict()["weight"], weight)


@pytest.mark.parametrize("kernel", [1, 2, (3, 1, 2)])
def test_weights_of_the_old_layout_load(kernel):
    layer = nn.SparseConv3d(4, 8, kernel)
    older = torch.randn(*layer.kernel_size, 4, 8)
    layer.load_state_dict({"weight": older, "bias": torch.zeros(8), "max_num_voxels_during_training": torch.ones(1)})
    assert torch.equal(layer.kernel, older.movedim(-1, 0))


@pytest.fixture
def mmdet3d(monkeypatch):
    """Its way with spconv: a loader, set on the base class, that permutes all tensors saved before version 2."""

    def load(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            found = state_dict.get(prefix + name)
            if own is None or found is None:
                missing += [prefix + name] if own is not None and strict else []
                continue
            if local_metadata.get("version") != 2:
                found = found.movedim(-1, 0)
            if found.shape != own.shape:
                errors.append(f"size mismatch for {prefix + name}")
            else:
                own.data.copy_(found)

    monkeypatch.setattr(nn.SparseModule, "_load_from_state_dict", load, raising=False)
    monkeypatch.setattr(nn.SparseModule, "_version", 2)


@pytest.mark.cpu
@pytest.mark.parametrize(("channels", "kernel"), [((4, 8), 3), ((3, 3), 3), ((2, 5), 1), ((5, 5), (1, 3, 2))], ids=str)
@pytest.mark.parametrize("make", [nn.SparseConv3d, nn.SubMConv3d])
@pytest.mark.usefixtures("mmdet3d")
def test_checkpoints_load_where_a_framework_reads_older_ones_too(make, channels, kernel):
    if make is nn.SubMConv3d and isinstance(kernel, tuple):
        kernel = (1, 3, 5)
    model = nn.SparseSequential(make(*channels, kernel), torch.nn.BatchNorm1d(channels[1]))
    taps, x = model[0].kernel_size, cloud(channels[0])
    older = OrderedDict(
        {**model.state_dict(), "0.weight": torch.randn(*taps, *channels), "0.bias": torch.randn(channels[1])}
    )
    for version in ({"0": {"version": 1}}, {}, None):  # of nn.Module, of none, and a dict without versions
        if version is not None:
            older._metadata = version
        else:
            older = dict(older)
        model.load_state_dict(older)
        assert torch.equal(model[0].kernel, older["0.weight"].movedim(-1, 0))
        assert torch.equal(model[0].bias, older["0.bias"])
    newer = model.state_dict()  # of version 2 now
    assert newer._metadata["0"]["version"] == 2
    other = nn.SparseSequential(make(*channels, kernel), torch.nn.BatchNorm1d(channels[1]))
    other.load_state_dict(newer)
    assert torch.equal(other[0].kernel, model[0].kernel)
    assert torch.equal(other.eval()(x).features, model.eval()(x).features)


def test_a_state_of_a_whole_model_loads_and_a_wrong_one_does_not():
    model = nn.SparseSequential(nn.SubMConv3d(4, 8, 3), torch.nn.BatchNorm1d(8), nn.SubMConv3d(8, 4, 1))
    state = {name: torch.randn_like(t.float()).to(t.dtype) for name, t in model.state_dict().items()}
    older = {name: t.movedim(0, -1) if name == "0.weight" else t for name, t in state.items()}
    model.load_state_dict(older)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert older["0.weight"].shape == (3, 3, 3, 4, 8), "what was passed in stays as it was"
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**state, "0.weight": torch.ones(8, 3, 3, 3, 5)})


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_dense_weights_convert(kernel, groups):
    x = cloud()
    dense = torch.nn.Conv3d(4, 6, kernel, groups=groups)
    layer = nn.SparseConv3d(4, 6, kernel, groups=groups)
    layer.load_kernel(nn.weight_from_conv(dense.weight))
    layer.load_state_dict({**layer.state_dict(), "bias": dense.bias})
    y = layer(x)
    batch, *position = y.indices.long().T
    expected = torch.nn.Conv3d.double(dense)(x.dense().double()).movedim(1, -1)[(batch, *position)]
    assert_matches(y.features, expected)

    dense = torch.nn.ConvTranspose3d(4, 6, kernel, stride=2, groups=groups, bias=False)
    layer = nn.SparseConvTranspose3d(4, 6, kernel, stride=2, groups=groups, bias=False)
    layer.load_kernel(nn.weight_from_conv_transpose(dense.weight, groups))
    y = layer(x)
    batch, *position = y.indices.long().T
    expected = dense.double()(x.dense().double()).movedim(1, -1)[(batch, *position)]
    assert_matches(y.features, expected)


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (1, 3, 5), (2, 2, 2), (2, 3, 1), (1, 1, 1)], ids=str)
def test_kernels_of_other_libraries_convert_tap_by_tap(kernel_size):
    a, b, c = kernel_size
    kernel = torch.randn(a * b * c, 4, 6)
    minkowski, torchsparse = (
        nn.weight_from_minkowski(kernel, kernel_size),
        nn.weight_from_torchsparse(kernel, kernel_size),
    )
    is_odd = a * b * c % 2
    for i in range(a):
        for j in range(b):
            for k in range(c):
                first_fastest, last_fastest = kernel[(k * b + j) * a + i], kernel[(i * b + j) * c + k]
                assert torch.equal(minkowski[:, i, j, k], first_fastest.T)
                assert torch.equal(torchsparse[:, i, j, k], (first_fastest if is_odd else last_fastest).T)
    if kernel_size == (1, 1, 1):
        assert torch.equal(nn.weight_from_torchsparse(kernel[0], kernel_size), torchsparse)


MISTAKES = [
    (
        lambda: nn.weight_from_minkowski(torch.ones(9, 4, 6), (3, 3, 3)),
        "kernel is [9, 4, 6] but kernel_size is [3, 3, 3], which has 27 taps; it must be [taps, in, out]",
    ),
    (
        lambda: nn.weight_from_torchsparse(torch.ones(27, 4, 6), 3),
        "kernel_size is 3; give a size for each axis, [3] * 3 in space",
    ),
    (
        lambda: nn.weight_from_conv(torch.ones(9, 4)),
        "weight is [9, 4]; a dense convolution's has channels and at least one axis",
    ),
    (
        lambda: nn.weight_from_conv_transpose(torch.ones(9, 4, 3), 2),
        "weight has 9 input channels and groups is 2; groups must divide them",
    ),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_named(call, message):
    with pytest.raises(ShapeError) as caught:
        call()
    assert str(caught.value) == message


from_spconv = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # spconv's own, on newer torch


@pytest.fixture
def spconv(monkeypatch):
    """The library itself, on a CPU: its backward asks for a CUDA stream there too."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        pytest.skip("spconv's CPU scatter races with more threads")
    library = pytest.importorskip("spconv.pytorch", reason="no spconv here")
    monkeypatch.setattr(library.ops, "get_current_stream", lambda: 0)
    return library


@from_spconv
def test_a_network_of_spconv_gives_the_same_numbers(spconv):
    source = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3, indice_key="a"),
        spconv.SubMConv3d(8, 8, 1),
        spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="b"),
        spconv.SparseInverseConv3d(8, 4, 3, indice_key="b"),
    )
    x = cloud()
    theirs = source(spconv.SparseConvTensor(x.features, x.indices.contiguous(), x.spatial_shape, 2)).dense()
    with torch.no_grad():
        assert_matches(nn.from_spconv(source)(x).dense(), theirs.double())


@from_spconv
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ("SubMConv3d", dict(kernel_size=3)),
        ("SubMConv3d", dict(kernel_size=5)),
        ("SubMConv3d", dict(kernel_size=(3, 1, 3))),
        ("SubMConv3d", dict(kernel_size=3, dilation=2)),
        ("SparseConv3d", dict(kernel_size=2, stride=2)),
        ("SparseConv3d", dict(kernel_size=3, stride=2, padding=1)),
        ("SparseConv3d", dict(kernel_size=3, stride=1, padding=1)),
        ("SparseConv3d", dict(kernel_size=(1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))),
        ("SparseConvTranspose3d", dict(kernel_size=2, stride=2)),
        ("SparseConvTranspose3d", dict(kernel_size=3, stride=2, padding=1)),
    ],
    ids=str,
)
def test_a_layer_of_spconv_with_its_state_gives_the_same_numbers(spconv, layer, options):
    """Values and gradients; outputs are compared densely, since spconv's rows come in no order."""
    theirs = getattr(spconv, layer)(4, 8, **options)
    ours = getattr(nn, layer)(4, 8, **options)
    ours.load_state_dict(theirs.state_dict())
    x = cloud()
    found = []
    for library, module in ((spconv, theirs), (nn, ours)):
        features = x.features.detach().clone().requires_grad_()
        y = module(library.SparseConvTensor(features, x.indices.contiguous(), x.spatial_shape, 2)).dense()
        loss = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
        found.append([y, *torch.autograd.grad(loss, [features, *module.parameters()])])
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours.named_parameters()]
    for expected, actual in zip(*found, strict=True):
        assert_matches(actual, expected.double())


def test_what_is_no_model_is_named():
    with pytest.raises(OperandError) as caught:
        nn.from_spconv(3)
    assert str(caught.value) == "module is of type int; pass a torch.nn.Module"
