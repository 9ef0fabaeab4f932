"""Patterns that torch has written over, as averages of models do: refused, or computed with as they are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from statements import DEVICE
from test_changed import dense_of, made, other_columns, other_rows
from tolerances import assert_matches
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from insum_ops import nn, spmm
from insum_ops.compiler.language.errors import OperandError
from insum_ops.formats import COO, ELL, BlockCOO, GroupCOO
from insum_ops.formats.errors import FormatError

pytestmark = pytest.mark.cpu  # version counters and sizes of caches are the same everywhere

MATRIX = (
    "AM and AK were overwritten with other coordinates than the layer was made with, as an average over buffers leaves "
    "them; give it others with load_state_dict, and average without them, as AveragedModel does with use_buffers=False"
)
BLOCKS = (
    "coords was overwritten with another pattern than the one that the blocks of weight belong to, as an average over "
    "buffers leaves it; give the layer another with set_pattern_(mask) or load_state_dict, and average without it, as "
    "AveragedModel does with use_buffers=False"
)
NONSENSE = (
    "coords does not list blocks of a [6, 6] grid in ascending order, as after to_empty(), which fills nothing in, or "
    "an average over buffers; call reset_parameters(), set_pattern_(mask) or load a state_dict, and average without "
    "coords"
)
AVERAGES = {
    "mean": dict,
    "moving": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "moving one by one": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    "floats alone": lambda: {"avg_fn": lambda own, new, _: 0.9 * own + 0.1 * new if own.is_floating_point() else new},
}
every_average = pytest.mark.parametrize("average", AVERAGES)


def matrix(kind=GroupCOO, trainable=True, size=8):
    return nn.SpMM(made(kind, size).to(torch.float64), trainable=trainable)


def linear(seed=0, **options):
    torch.manual_seed(seed)
    return nn.BlockSparseLinear(24, 24, 4, 0.4, dtype=torch.float64, device=DEVICE, **options)


def dense_linear(layer):
    dense = torch.zeros(24, 24, dtype=torch.float64, device=DEVICE)
    for (row, column), block in zip(layer.coords.T.tolist(), layer.weight.detach()):
        dense[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = block
    return dense


def assert_multiplies(layer, dense):
    """Values and gradients are those of a dense matrix."""
    B = torch.randn(dense.shape[1], 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    C = layer(B)
    assert_matches(C, dense @ B)
    assert_matches(torch.autograd.grad(C.sum(), B)[0], dense.sum(0)[:, None].expand(-1, 3))


def assert_is_linear(layer, dense):
    x = torch.randn(5, 24, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y = layer(x)
    assert_matches(y, x @ dense.T + layer.bias)
    assert_matches(torch.autograd.grad(y.sum(), x)[0], dense.sum(0).expand(5, 24))


def refusal(layer, x):
    """Why a layer does not compute; "" if it does."""
    try:
        layer(x)
    except (FormatError, OperandError) as error:
        return str(error)
    return ""


def is_refused(layer, size, words):
    """Whether the layer refuses to compute; it then does so again, and refuses to be saved."""
    x = torch.randn(size, size, dtype=torch.float64, device=DEVICE)
    if not refusal(layer, x):
        return False
    for use in (lambda: layer(x), layer.state_dict, lambda: copy.deepcopy(layer)(x), lambda: moved(layer)(x)):
        with pytest.raises((FormatError, OperandError)) as caught:
            use()
        assert str(caught.value) == words
    return True


def moved(layer):
    """As `.to()` moves it to another device."""
    return layer._apply(torch.clone)


@pytest.mark.sampled
@every_average
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    ("trainable", "use_buffers"),
    [(True, False), (True, True), (False, True)],  # torch's means are of something
)
@pytest.mark.parametrize("kind", [GroupCOO, COO, BlockCOO, ELL])
def test_an_averaged_matrix_is_right_or_refused(kind, trainable, use_buffers, is_warm, average):
    layer = matrix(kind, trainable, 24)
    if is_warm:
        assert_multiplies(layer, dense_of(layer.A))
    twin = AveragedModel(layer, use_buffers=use_buffers, **AVERAGES[average]())
    refused, pattern = False, [part.clone() for part in (layer.AM, layer.AK) if part is not None]
    for _ in range(4):
        with torch.no_grad():
            layer.AV.mul_(0.5)
        twin.update_parameters(layer)
        own = [part for part in (twin.module.AM, twin.module.AK) if part is not None]
        is_whole = all(map(torch.equal, own, pattern))
        refused = is_refused(twin.module, 24, MATRIX)
        assert refused != is_whole
        if not refused:
            parts = (layer.A.coords, twin.module.AV, layer.A.shape)
            assert_multiplies(twin, dense_of(kind(*parts, block_size=layer.A.block_size)))
    assert refused == (use_buffers and average.startswith("moving"))  # which rounds 0.9 * 7 + 0.1 * 7 down to 6
    twin.module.load_state_dict(layer.state_dict())
    assert_multiplies(twin, dense_of(layer.A))


@every_average
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_linear_layer_is_right_or_refused(use_buffers, is_warm, average):
    layer = linear()
    if is_warm:
        assert_is_linear(layer, dense_linear(layer))
    twin = AveragedModel(layer, use_buffers=use_buffers, **AVERAGES[average]())
    refused = False
    for _ in range(4):
        with torch.no_grad():
            layer.weight.mul_(0.5)
        twin.update_parameters(layer)
        is_whole = torch.equal(twin.module.coords, layer.coords)
        is_nonsense = refusal(twin.module, torch.zeros(1, 24, dtype=torch.float64, device=DEVICE)) == NONSENSE
        refused = is_nonsense or is_refused(twin.module, 24, BLOCKS)
        assert refused != is_whole
        if not refused:
            assert_is_linear(twin.module, dense_linear(twin.module))
    assert refused == (use_buffers and average.startswith("moving"))
    twin.module.load_state_dict(layer.state_dict())
    assert_is_linear(twin.module, dense_linear(layer))


def test_an_average_does_not_take_over_a_pattern_that_changed_in_training():
    """Its blocks are those of two patterns by then."""
    layer = linear()
    twin = AveragedModel(layer)
    twin.update_parameters(layer)
    layer.set_pattern_(layer.mask.roll(1, 1))
    assert_is_linear(layer, dense_linear(layer))
    twin.update_parameters(layer)
    assert is_refused(twin.module, 24, BLOCKS)
    again = AveragedModel(layer)
    again.update_parameters(layer)
    assert_is_linear(again.module, dense_linear(layer))


WRITES = {
    "copy": lambda old, new: old.copy_(new),
    "detached": lambda old, new: old.detach().copy_(new),
    "indexed": lambda old, new: old.__setitem__(..., new),
    "add": lambda old, new: old.add_(new - old),
    "foreach": lambda old, new: torch._foreach_add_([old], [new - old]),
    "foreach copy": lambda old, new: torch._foreach_copy_([old], [new]),
    "out": lambda old, new: torch.add(new, 0, out=old),
    "masked": lambda old, new: old.masked_scatter_(torch.ones_like(old, dtype=torch.bool), new),
    "view": lambda old, new: old.view(-1).copy_(new.reshape(-1)),
    "data": lambda old, new: setattr(old, "data", new.clone()),
    "set": lambda old, new: old.set_(new.clone()),
}
every_write = pytest.mark.parametrize("write", WRITES)


@every_write
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_layers_coordinates_are_refused_however_they_were_overwritten(write, is_warm):
    layer = matrix()
    dense, rows, columns = dense_of(layer.A), other_rows(layer.A), other_columns(layer.A)
    if is_warm:
        assert_multiplies(layer, dense)
    for name, new in (("AM", rows), ("AK", columns)):
        old = getattr(layer, name).clone()
        WRITES[write](getattr(layer, name), new)
        assert is_refused(layer, 8, MATRIX)
        getattr(layer, name).copy_(old)
        assert_multiplies(layer, dense)


@every_write
def test_a_layers_blocks_are_refused_however_they_were_overwritten(write):
    layer = linear()
    dense, coords = dense_linear(layer), layer.coords.clone()
    assert_is_linear(layer, dense)
    WRITES[write](layer.coords, layer.mask.roll(1, 1).nonzero().T.int())
    assert is_refused(layer, 24, BLOCKS)
    with pytest.raises(OperandError) as caught:
        layer.set_pattern_(layer.mask)
    assert str(caught.value) == BLOCKS
    layer.coords.copy_(coords)
    assert_is_linear(layer, dense)


def test_a_layers_blocks_are_refused_where_some_were_cut_off_at_their_address():
    layer = linear()
    dense, coords = dense_linear(layer), layer.coords.data
    assert_is_linear(layer, dense)
    layer.coords.data = coords[:, :-1]
    assert is_refused(layer, 24, BLOCKS)
    layer.coords.data = coords
    assert_is_linear(layer, dense)


@every_write
@pytest.mark.parametrize("kind", [GroupCOO, COO, BlockCOO])
def test_a_format_is_computed_with_as_it_is_however_it_was_overwritten(kind, write):
    """In a module too, which holds it and lists its coordinates among its buffers."""
    A = made(kind).to(torch.float64)
    holder = torch.nn.Module()
    for name, part in (("rows", A.coords[0]), ("columns", A.coords[1])):
        holder.register_buffer(name, part)
    holder.A, B = A, torch.randn(8, 3, dtype=torch.float64, device=DEVICE)
    assert_matches(spmm(A, B), dense_of(A) @ B)
    WRITES[write](holder.rows, other_rows(A))
    WRITES[write](holder.columns, other_columns(A))
    for one in (A, copy.deepcopy(holder).A):
        assert_matches(spmm(one, B), dense_of(one) @ B)
    holder.rows[-1] = 0
    with pytest.raises(FormatError, match=r"it must ascend: from_coo sorts$"):
        spmm(A, B)


def test_a_copy_and_a_file_know_what_was_overwritten():
    for layer, name, size, words in ((matrix(), "AK", 8, MATRIX), (linear(), "coords", 24, BLOCKS)):
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
            own = getattr(twin, name)
            if name == "coords":
                own.copy_(twin.mask.roll(1, 1).nonzero().T)
            else:
                own.copy_(other_columns(layer.A))
            assert is_refused(twin, size, words)
            assert is_refused(copy.deepcopy(twin), size, words)


def test_tensors_that_are_assigned_are_taken():
    layer, blocks = matrix(), linear()
    layer.AK = other_columns(layer.A)
    assert_multiplies(layer, dense_of(GroupCOO((layer.AM, layer.AK), layer.AV, (8, 8))))
    blocks(torch.zeros(1, 24, dtype=torch.float64, device=DEVICE))
    blocks.coords = blocks.mask.roll(1, 1).nonzero().T.int().contiguous()
    assert_is_linear(blocks, dense_linear(blocks))


def test_a_layer_that_was_not_used_yet_may_be_overwritten_whole():
    """As DistributedDataParallel does when it is made, with what the first process has."""
    first, second = linear(0), linear(1)
    assert not torch.equal(first.coords, second.coords)
    with torch.no_grad():
        for old, new in zip((*second.parameters(), *second.buffers()), (*first.parameters(), *first.buffers())):
            old.copy_(new)
    assert_is_linear(second, dense_linear(first))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_convolutions_and_products_are_those_of_averaged_weights(use_buffers):
    """Both are linear in their weights, and have no pattern among their buffers."""
    x = nn.SparseConvTensor(
        torch.randn(4, 2, dtype=torch.float64, device=DEVICE),
        torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1], [0, 3, 3, 3]], dtype=torch.int32, device=DEVICE),
        [4, 4, 4],
        1,
    )
    conv = torch.nn.Conv3d(2, 3, 3, padding=1, dtype=torch.float64, device=DEVICE)
    layer = nn.SubMConv3d(2, 3, 3).double().to(DEVICE)
    twin = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=use_buffers)
    for _ in range(3):
        with torch.no_grad():
            layer.weight.add_(torch.randn_like(layer.weight))
        twin.update_parameters(layer)
        with torch.no_grad():
            conv.weight.copy_(twin.module.weight.movedim(-1, 1)), conv.bias.copy_(twin.module.bias)
        batch, *at = x.indices.long().T
        assert_matches(twin(x).features, conv(x.dense())[batch, :, at[0], at[1], at[2]])


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_tensor_products_are_averages_of_products(use_buffers):
    pytest.importorskip("e3nn", reason="e3nn is an extra")
    product = nn.FullyConnectedTensorProduct("4x0e + 4x1o", "0e + 1o", "4x0e + 2x1o").double().to(DEVICE)
    twin = AveragedModel(product, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=use_buffers)
    x, y = (torch.randn(3, size, dtype=torch.float64, device=DEVICE) for size in (16, 4))
    expected = None
    for _ in range(3):
        with torch.no_grad():
            product.weight.add_(torch.randn_like(product.weight))
        twin.update_parameters(product)
        expected = product(x, y) if expected is None else 0.75 * expected + 0.25 * product(x, y)
        assert_matches(twin(x, y), expected)
