"""What tests/distributed/test_parallel_conv.py runs on several ranks: convolutions whose channels are split."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from dtensor_cases import message
from ranks import device
from statements import IS_THOROUGH
from tolerances import TOLERANCE
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from insum_ops import sparse_conv3d
from insum_ops.distributed import (
    ColumnParallel,
    RowParallel,
    load_whole_optimizer_state_dict,
    load_whole_state_dict,
    whole_optimizer_state_dict,
    whole_state_dict,
)
from insum_ops.distributed.split_convolutions import IS_TWICE_DIFFERENTIABLE
from insum_ops.formats import kernel_map
from insum_ops.nn import SparseConv2d, SparseConvTensor, SparseInverseConv2d, SparseSequential, SubMConv2d

DTYPE = torch.float64
SIDE, VOXELS = 6, 15


def line() -> DeviceMesh:
    return init_device_mesh(device(), (distributed.get_world_size(),))


def cloud(channels: int, seed: int = 0) -> SparseConvTensor:
    draws = torch.Generator().manual_seed(seed)
    cells = torch.randperm(SIDE * SIDE, generator=draws)[:VOXELS]
    indices = torch.stack([0 * cells, cells // SIDE, cells % SIDE], 1)
    features = torch.randn(VOXELS, channels, dtype=DTYPE, generator=draws)
    return SparseConvTensor(features.to(device()), indices.to(device()), [SIDE, SIDE], 1)


def in_dense(x: SparseConvTensor, features: Tensor, weight: Tensor, at: Tensor, **options: Any) -> Tensor:
    """A dense convolution, at the voxels `at`."""
    grid = features.new_zeros(1, SIDE, SIDE, features.shape[1])
    grid = grid.index_put(tuple(x.indices.T), features).movedim(-1, 1)
    out = nn.functional.conv2d(grid, weight.movedim(-1, 1), **options).movedim(1, -1)
    return out[tuple(at.T.long())]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def near(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(whole(value), expected, **TOLERANCE[DTYPE])


class Tanh(nn.Module):
    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        return x.replace_feature(x.features.tanh())


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    layers = SubMConv2d(3, 8, 3), Tanh(), SubMConv2d(8, 5, 3)
    return nn.Sequential(*layers).to(device(), DTYPE)


def pair_in_dense(x: SparseConvTensor, features: Tensor, model: nn.Sequential) -> Tensor:
    for layer in (model[0], model[2]):
        features = in_dense(x, features, layer.weight, x.indices, bias=layer.bias, padding=1)
        features = features.tanh() if layer is model[0] else features
    return features


def the_pair_equals_the_whole() -> list[int]:
    """Column- then row-parallel; the first rank's weights count."""
    x, alone = cloud(3), pair()
    model = deepcopy(alone)
    if distributed.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.zero_()
    parallelize_module(model, line(), {"0": ColumnParallel(), "2": RowParallel()})
    features, plain = (x.features.clone().requires_grad_() for _ in range(2))
    y, expected = model(x.replace_feature(features)).features, pair_in_dense(x, plain, alone)
    near(y, expected)
    for value in (y, expected):
        value.square().sum().backward()
    near(features.grad, plain.grad)
    for (name, own), other in zip(model.named_parameters(), alone.parameters()):
        assert isinstance(own, DTensor), name
        near(own.grad, other.grad)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (model, alone)]
    for optimizer in optimizers:
        optimizer.step()
    states = whole_state_dict(model), whole_optimizer_state_dict(model, optimizers[0])
    load_whole_state_dict(model, states[0])
    load_whole_optimizer_state_dict(model, optimizers[0], states[1])
    for name, parameter in alone.named_parameters():
        near(states[0][name], parameter.detach())
        near(model.get_parameter(name), parameter.detach())
        for key, value in optimizers[1].state[parameter].items():
            torch.testing.assert_close(states[1]["state"][name][key], value, **TOLERANCE[DTYPE])
            again = optimizers[0].state[model.get_parameter(name)][key]
            assert isinstance(again, DTensor) == (key != "step"), key
            torch.testing.assert_close(whole(again), value, **TOLERANCE[DTYPE])
    return [own.to_local().numel() for own in model.parameters()]


def single_layers_equal_the_whole() -> None:
    kinds: list[tuple[Any, Any, dict[str, Any]]] = [
        (ColumnParallel(gather_output=True), SubMConv2d(4, 8, 3), {"padding": 1}),
        (ColumnParallel(gather_output=True), SubMConv2d(4, 8, 3, groups=4), {"padding": 1, "groups": 4}),
        (ColumnParallel(gather_output=True), SubMConv2d(4, 4, 3, groups=4), {"padding": 1, "groups": 4}),
        (ColumnParallel(gather_output=True), SparseConv2d(4, 8, 3, 2, 1, bias=False), {"padding": 1, "stride": 2}),
        (RowParallel(split_input=False), SparseConv2d(4, 3, 3, 2, 1), {"padding": 1, "stride": 2}),
    ]
    for style, alone, options in kinds:
        alone = alone.to(device(), DTYPE)
        layer = parallelize_module(deepcopy(alone), line(), style)
        x = cloud(4)
        features, plain = (x.features.clone().requires_grad_() for _ in range(2))
        y = layer(x.replace_feature(features))
        expected = in_dense(x, plain, alone.weight, y.indices, bias=alone.bias, **options)
        near(y.features, expected)
        upstream = torch.randn(expected.shape, dtype=DTYPE, device=device())
        y.features.backward(upstream)
        expected.backward(upstream)
        near(features.grad, plain.grad)
        for own, other in zip(layer.parameters(), alone.parameters()):
            near(own.grad, other.grad)


def an_inverse_undoes_a_split_layer() -> None:
    torch.manual_seed(1)
    alone = SparseSequential(
        SparseConv2d(4, 8, 2, 2, indice_key="down"), SparseInverseConv2d(8, 4, 2, indice_key="down")
    ).to(device(), DTYPE)
    model = parallelize_module(deepcopy(alone), line(), {"0": ColumnParallel(), "1": RowParallel()})
    near(model(cloud(4)).features, alone(cloud(4)).features.detach())


def placed(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """A DTensor; parts of a partial sum differ between ranks."""
    split = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(tensor.detach(), mesh, split).to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            parts = mesh.size(dim) * (mesh.size(dim) + 1) / 2
            local = local * (mesh.get_local_rank(dim) + 1) / parts
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride).requires_grad_()


WHOLE, SUM = Replicate(), Partial()
PLACED: list[tuple[list[Placement], list[Placement], list[Placement]]] = [
    ([WHOLE], [Shard(0)], [Shard(0)]),
    ([Shard(1)], [Shard(3)], [WHOLE]),
    ([Shard(1)], [Shard(0)], [WHOLE]),
    ([Shard(0)], [WHOLE], [WHOLE]),
    ([Shard(0)], [Shard(3)], [Shard(0)]),
    ([WHOLE], [Shard(1)], [WHOLE]),
    ([SUM], [WHOLE], [SUM]),
    ([WHOLE], [SUM], [WHOLE]),
]
# channels, outputs and groups: two of sizes that ranks divide, two that they don't, one of each in groups
SIZES = ((4, 8, 1), (3, 5, 1), (4, 8, 4), (6, 4, 2))
ON_A_GRID: list[tuple[list[Placement], list[Placement], list[Placement]]] = [
    ([WHOLE, Shard(1)], [Shard(0), Shard(3)], [Shard(0), WHOLE]),
    ([Shard(1), Shard(1)], [Shard(3), Shard(3)], [WHOLE, WHOLE]),
    ([Shard(0), SUM], [WHOLE, WHOLE], [WHOLE, WHOLE]),
]


def every_placement_gives_the_same() -> None:
    """Values and gradients; each placement at one size without groups and at one with them, or at all of them."""
    ranks = distributed.get_world_size()
    grid = init_device_mesh(device(), (2, ranks // 2))
    x = cloud(1)
    over = kernel_map(x.indices, [SIDE, SIDE], 1, kernel_size=3)
    for number, (channels, outputs, groups) in enumerate(SIZES):
        torch.manual_seed(0)
        tensors = [torch.randn(VOXELS, channels), torch.randn(outputs, 3, 3, channels // groups), torch.randn(outputs)]
        plain = [tensor.to(device(), DTYPE).requires_grad_() for tensor in tensors]
        expected = in_dense(x, plain[0], plain[1], x.indices, bias=plain[2], padding=1, groups=groups)
        upstream = torch.randn(expected.shape, dtype=DTYPE).to(device())
        grads = torch.autograd.grad(expected, plain, upstream)
        for mesh, cases in ((line(), PLACED), (grid, ON_A_GRID)):
            for case in cases if IS_THOROUGH else cases[number % 2 :: 2]:
                given = [placed(tensor, mesh, own) for tensor, own in zip(plain, case)]
                out = sparse_conv3d(given[0], given[1], over, given[2], groups)
                near(out, expected.detach())
                dout = distribute_tensor(upstream, mesh, [WHOLE] * mesh.ndim)
                for grad, other in zip(torch.autograd.grad(out, given, dout), grads):
                    near(grad, other)


def gradients_of_gradients() -> None:
    x, mesh = cloud(1), line()
    over = kernel_map(x.indices, [SIDE, SIDE], 1, kernel_size=3)
    torch.manual_seed(0)
    plain = [torch.randn(VOXELS, 4, dtype=DTYPE).to(device()), torch.randn(4, 3, 3, 4, dtype=DTYPE).to(device())]

    def second(features: Tensor, weight: Tensor, convolve: Any) -> tuple[Tensor, ...]:
        tensors = features, weight
        first = torch.autograd.grad(convolve(*tensors).pow(3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), tensors)

    own = [placed(tensor, mesh, [Shard(dim)]) for tensor, dim in zip(plain, (1, 3))]
    for grad, other in zip(
        second(*own, lambda features, weight: sparse_conv3d(features, weight, over)),
        second(
            *[tensor.requires_grad_() for tensor in plain],
            lambda features, weight: in_dense(x, features, weight, x.indices, padding=1),
        ),
    ):
        near(grad, other)

    alone = pair()
    model = parallelize_module(deepcopy(alone), line(), {"0": ColumnParallel(), "2": RowParallel()})
    x, found = cloud(3), []
    features = x.features.clone().requires_grad_()
    if not IS_TWICE_DIFFERENTIABLE:
        says = message(
            lambda: torch.autograd.grad(model(x.replace_feature(features)).features.sum(), features, create_graph=True)
        )
        assert says == (
            f"gradients of gradients of a split convolution need torch 2.13 or newer, and this is {torch.__version__}: "
            "keep the layer whole, or leave create_graph=True out"
        )
        return
    for value in (model(x.replace_feature(features)).features, pair_in_dense(x, features, alone)):
        (grad,) = torch.autograd.grad(value.pow(3).sum(), features, create_graph=True)
        found.append((grad.detach(), *torch.autograd.grad(grad.square().sum(), features)))
    for own, other in zip(*found):
        near(own, other)


def fsdp_over_split_layers_trains_as_alone() -> None:
    """Data parallel by channels parallel; each pair of ranks that share a layer has inputs of its own."""
    mesh = init_device_mesh(device(), (2, distributed.get_world_size() // 2), mesh_dim_names=("data", "model"))
    alone = pair()
    model = parallelize_module(deepcopy(alone), mesh["model"], {"0": ColumnParallel(), "2": RowParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (alone, model)]
    for step in range(3):
        clouds = [cloud(3, seed=2 * step + own) for own in range(2)]
        losses = [alone(own).features.square().mean() for own in clouds]
        own_loss = model(clouds[mesh.get_local_rank("data")]).features.square().mean()
        near(own_loss, losses[mesh.get_local_rank("data")])
        for loss, optimizer in ((sum(losses) / 2, optimizers[0]), (own_loss, optimizers[1])):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for own, other in zip(model.parameters(), alone.parameters()):
        near(own, other.detach())


def mistakes() -> dict[str, str]:
    mesh, is_odd, x = line(), distributed.get_rank() == 1, cloud(4)
    row = lambda: parallelize_module(SubMConv2d(16, 8, 3).double(), mesh, RowParallel())
    layer = row()

    def split(module: nn.Module, style: ColumnParallel | RowParallel) -> str:
        return message(lambda: parallelize_module(module, mesh, style))

    indices = distribute_tensor(x.indices, mesh, [Shard(0)])
    over = kernel_map(x.indices, [SIDE, SIDE], 1, kernel_size=3)
    weight = distribute_tensor(torch.ones(8, 3, 3, 4, dtype=DTYPE), mesh, [Shard(0)])
    found = {
        "channels": split(SubMConv2d(16, 6, 3), ColumnParallel()),
        "input channels": split(SubMConv2d(6, 8, 3), RowParallel()),
        "groups": split(SubMConv2d(12, 12, 3, groups=6), ColumnParallel()),
        "groups by rows": split(SubMConv2d(8, 8, 3, groups=4), RowParallel()),
        "a kernel of 1": split(SubMConv2d(8, 8, 1), ColumnParallel()),
        "an order": split(SubMConv2d(8, 8, 3), ColumnParallel(torch.arange(8))),
        "twice": split(row(), RowParallel()),
        "other layers": split(SubMConv2d(8, 16 if is_odd else 8, 3), RowParallel()),
        "split voxels": message(lambda: SparseConvTensor(x.features, indices, [SIDE, SIDE], 1)),
        "other voxels": message(lambda: layer(cloud(4, seed=int(is_odd)))),
        "features of another width": message(lambda: layer(cloud(5 if is_odd else 4))),
        "no cloud": message(lambda: layer(x.features if is_odd else x)),
        "a plain tensor with a gradient": message(lambda: sparse_conv3d(x.features.requires_grad_(), weight, over)),
        "features of another length": message(lambda: sparse_conv3d(x.features[int(is_odd) :].detach(), weight, over)),
    }
    layer(x.replace_feature(x.features.detach()))  # all ranks have come to the same place
    return found


NAMES = [
    "the_pair_equals_the_whole",
    "single_layers_equal_the_whole",
    "an_inverse_undoes_a_split_layer",
    "every_placement_gives_the_same",
    "gradients_of_gradients",
    "fsdp_over_split_layers_trains_as_alone",
    "mistakes",
]
