"""A model of e3nn's, converted: the same numbers, the same parameters, and a table of what became of each product."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import nn

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from tolerances import TOLERANCE  # noqa: E402

from insum_ops.compiler.language.errors import OperandError  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct, from_e3nn  # noqa: E402

IRREPS = ("4x0e + 4x1o", "0e + 1o", "4x0e + 2x1o")


pytestmark = pytest.mark.usefixtures("in_float64")


class Own(o3.FullyConnectedTensorProduct):
    """A user's class, whose forward could do anything."""


class Model(nn.Module):
    """A convolution with weights of each edge, a self-connection, an elementwise product."""

    def __init__(self) -> None:
        super().__init__()
        irreps, paths = "4x0e + 4x1o", [(0, 1, 1, "uvu", True), (1, 1, 0, "uvu", True)]
        self.conv = o3.TensorProduct(irreps, "0e + 1o", irreps, paths, shared_weights=False)
        self.layers = nn.ModuleList([o3.FullyConnectedTensorProduct(irreps, "3x0e", irreps), o3.Linear("4x0e", "4x0e")])
        self.tied = self.layers[0]
        self.norm = o3.ElementwiseTensorProduct("4x0e + 4x1o", "4x0e + 4x1o", ["0e"])

    def forward(self, x, y, weight, kinds):
        z = self.conv(x, y, weight) + self.layers[0](x, kinds)
        return self.norm(self.tied(z, kinds), z)


def test_a_model_keeps_its_numbers_and_its_parameters():
    model = Model()
    x, y, weight = torch.randn(5, 16), torch.randn(5, 4), torch.randn(5, model.conv.weight_numel)
    kinds = nn.functional.one_hot(torch.tensor([0, 2, 1, 1, 0]), 3).double()
    expected = model(x, y, weight, kinds)
    parameters = dict(model.named_parameters())
    state = model.state_dict()
    conversion = from_e3nn(model)
    assert conversion.model is model
    torch.testing.assert_close(model(x, y, weight, kinds), expected, **TOLERANCE[torch.float64])
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert type(model.conv) is TensorProduct
    assert type(model.layers[0]) is FullyConnectedTensorProduct
    assert model.tied is model.layers[0]
    model.load_state_dict(state)
    assert [row.name for row in conversion.replaced] == ["conv", "layers.0", "tied", "norm"]
    assert conversion.left == ()


def test_a_single_product_is_returned_converted():
    theirs = o3.FullyConnectedTensorProduct(*IRREPS).eval()
    conversion = from_e3nn(theirs)
    ours = conversion.model
    assert type(ours) is FullyConnectedTensorProduct
    assert not ours.training
    assert ours.weight is theirs.weight
    assert ours.output_mask is theirs.output_mask
    x, y = torch.randn(3, 16), torch.randn(3, 4)
    torch.testing.assert_close(ours(x, y), theirs(x, y), **TOLERANCE[torch.float64])
    assert str(conversion) == (
        "1 replaced, 0 left\n(itself)  replaced  "
        "FullyConnectedTensorProduct(4x0e+4x1o x 1x0e+1x1o -> 4x0e+2x1o | 48 paths | 48 weights)"
    )


def test_conversion_draws_no_random_numbers():
    theirs = o3.FullyConnectedTensorProduct(*IRREPS)
    before = torch.get_rng_state()
    from_e3nn(theirs)
    assert torch.equal(torch.get_rng_state(), before)


def test_full_products_and_unusual_options():
    full = o3.FullTensorProduct("2x0e + 1o", "2x1o")
    x, y = torch.randn(3, full.irreps_in1.dim), torch.randn(3, full.irreps_in2.dim)
    torch.testing.assert_close(from_e3nn(full).model(x, y), full(x, y), **TOLERANCE[torch.float64])
    odd = o3.FullyConnectedTensorProduct(*IRREPS, "norm", "path", in1_var=[2.0, 3.0], internal_weights=False)
    x, y, weight = torch.randn(3, 16), torch.randn(3, 4), torch.randn(odd.weight_numel)
    torch.testing.assert_close(from_e3nn(odd).model(x, y, weight), odd(x, y, weight), **TOLERANCE[torch.float64])


def test_what_is_left_says_why():
    hooked = o3.FullyConnectedTensorProduct(*IRREPS)
    hooked.register_forward_hook(lambda *_: None)
    strange = o3.TensorProduct("2x0e", "2x0e", "1x0e", [(0, 0, 0, "uvu<v", False)])
    model = nn.ModuleDict(
        {"own": Own(*IRREPS), "hooked": hooked, "strange": strange, "square": o3.TensorSquare("2x0e")}
    )
    before = copy.copy(model._modules)
    conversion = from_e3nn(model)
    assert model._modules == before
    assert conversion.replaced == ()
    assert {row.name: row.reason for row in conversion.left} == {
        "own": "Own is a class of its own, whose forward may differ",
        "hooked": "has hooks, which would be lost; remove them, convert, and register them again",
        "strange": "connection mode uvu<v is not supported",
        "square": "TensorSquare is a class of its own, whose forward may differ",
    }
    assert str(conversion).splitlines()[:2] == [
        "0 replaced, 4 left",
        "own      left: Own is a class of its own, whose forward may differ"
        "                            Own(4x0e+4x1o x 1x0e+1x1o -> 4x0e+2x1o | 48 paths | 48 weights)",
    ]


def fuse_scatter(product):
    """As MACE does: `forward` gathers nodes, multiplies, and adds up over the edges of each node."""
    multiply = product.forward

    def fused(self, x, y, src, dst):
        return x.new_zeros(len(x), self.irreps_out.dim).index_add(0, dst, multiply(x[src], y))

    product.forward = MethodType(fused, product)


CHANGES = {
    "fused": (fuse_scatter, "has forward of its own, which would be lost; convert first, then set it again"),
    "doubled": (
        lambda tp: setattr(tp, "right", lambda y: 2 * y),
        "has right of its own, which would be lost; convert first, then set it again",
    ),
    "private": (
        lambda tp: setattr(tp, "_get_weights", lambda weight: weight),
        "has _get_weights of its own, which would be lost; convert first, then set it again",
    ),
    "attributes": (
        lambda tp: vars(tp).update(scale=2, note=""),
        "has note, scale of its own, which would be lost; convert first, then set them again",
    ),
    "buffer": (
        lambda tp: tp.register_buffer("mean", torch.ones(1)),
        "has mean of its own, which would be lost; convert first, then set it again",
    ),
    "adapter": (
        lambda tp: tp.add_module("lora", nn.Linear(2, 2)),
        "has lora of its own, which would be lost; convert first, then set it again",
    ),
    "state": (
        lambda tp: tp.register_state_dict_post_hook(lambda *_: None),
        "has hooks, which would be lost; remove them, convert, and register them again",
    ),
    "parametrized": (
        lambda tp: nn.utils.parametrize.register_parametrization(tp, "weight", nn.Tanh()),
        "has a parametrization of weight, which would be lost; remove it with "
        "torch.nn.utils.parametrize.remove_parametrizations, or convert first",
    ),
    "compiled": (lambda tp: tp.compile(), "is compiled, which would be lost; convert first, then compile"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_product_that_was_changed_is_left_as_it_is(kind):
    change, reason = CHANGES[kind]
    product = o3.FullyConnectedTensorProduct(*IRREPS)
    change(product)
    model = nn.ModuleList([product])
    conversion = from_e3nn(model)
    assert [row.reason for row in conversion.left] == [reason]
    assert model[0] is product


def test_a_product_whose_scatter_was_fused_keeps_its_values():
    product, x, y = o3.FullyConnectedTensorProduct(*IRREPS), torch.randn(3, 16), torch.randn(5, 4)
    src, dst = torch.tensor([0, 1, 2, 2, 0]), torch.tensor([1, 1, 0, 2, 0])
    expected = torch.zeros(3, product.irreps_out.dim).index_add(0, dst, product(x[src], y))
    fuse_scatter(product)
    model = nn.ModuleList([product])
    from_e3nn(model)
    torch.testing.assert_close(model[0](x, y, src, dst), expected, **TOLERANCE[torch.float64])


def test_a_product_that_was_wrapped_by_compile_is_left():
    model = nn.ModuleList([torch.compile(o3.FullyConnectedTensorProduct(*IRREPS))])
    (row,) = from_e3nn(model).left
    assert row.name == "0._orig_mod"
    assert row.reason == "is compiled, which would be lost; convert first, then compile"


def test_what_is_trained_tied_hooked_and_in_which_mode_stays():
    first, second = (o3.FullyConnectedTensorProduct(*IRREPS).float() for _ in range(2))
    second.weight = first.weight
    second.eval()
    first.output_mask.mul_(2)
    first.weight.register_hook(lambda grad: 3 * grad)
    first.weight.decays = 0.5
    frozen = o3.FullyConnectedTensorProduct(*IRREPS).requires_grad_(False)
    model = nn.ModuleList([first, second, frozen])
    x, y = torch.randn(3, 16).float(), torch.randn(3, 4).float()
    (expected,) = torch.autograd.grad((first(x, y) + second(x, y)).sum(), first.weight)
    assert from_e3nn(model).left == ()
    assert model[0].weight is model[1].weight is first.weight
    assert [own.training for own in model] == [True, False, True]
    assert model[0].weight.dtype == model[0].output_mask.dtype == torch.float32
    assert model[0].output_mask is first.output_mask
    assert model[0].weight.decays == 0.5
    assert not model[2].weight.requires_grad
    (actual,) = torch.autograd.grad((model[0](x, y) + model[1](x, y)).sum(), first.weight)
    torch.testing.assert_close(actual, expected, **TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_product_is_left():
    class Scripted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    Scripted.__name__ = "FullyConnectedTensorProduct"
    conversion = from_e3nn(nn.ModuleList([torch.jit.script(Scripted())]))
    (row,) = conversion.left
    assert row.reason == "compiled by TorchScript; convert the model before it is compiled"


def test_a_model_without_products_and_no_model():
    assert str(from_e3nn(nn.Linear(2, 2))) == "0 replaced, 0 left"
    with pytest.raises(OperandError, match=r"^model is of type str; pass a torch.nn.Module$"):
        from_e3nn("model")
