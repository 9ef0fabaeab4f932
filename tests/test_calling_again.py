"""An entry point that was called before gives, after anything has changed, what one gives that was never called.

`CHANGES` is the table: what happens between two calls, and to which entry points it can happen. Each law makes one
entry point with the same numbers twice. The fresh one meets the change at its first call; the warm one is called
before, and again after. Results, gradients and refusals of both are the same. What the package keeps for the whole
process is forgotten in between, so that neither can take from the other.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from entry_points import ENTRY_POINTS, EntryPoint
from process_caches import forget
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE, IS_INTERPRETED
from tolerances import TOLERANCE
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from insum_ops import insum
from insum_ops.formats import GroupCOO

pytestmark = [SPARSE_WARNINGS, pytest.mark.every_route]

Inputs = Sequence[Tensor]
Outcome = list[Any]  # tensors, None where there is no gradient, and words: of a refusal, or of what was seen

RAW = ("insum gather", "insum scatter", "insum max")
FORMATS = (
    *("insum min", "insum by columns", "insum COO", "insum ELL", "insum GroupCOO", "insum BlockCOO"),
    *("insum BlockGroupCOO", "spmm sum", "spmm mean", "spmm max"),
)
VALUES = ("spmm COO values", "spmm ELL values", "spmm GroupCOO values", "spmm BlockCOO values")
GRAPHS = ("spmm edges", "spmm edges of several sizes")
TORCH = ("spmm torch CSR", "spmm torch COO")
LINEAR = ("SpMM", "BlockSparseLinear")
CONVOLUTIONS = ("SubMConv3d", "SubMConv3d groups", "SparseConv3d and back", "SparseConvTranspose3d")
POOLS = ("SparseMaxPool3d", "SparseAvgPool3d")
PRODUCTS = (
    *("tensor product, shared weights", "tensor product, weights of each", "tensor product along edges"),
    *("tensor product, one-hot", "tensor product, channel by channel"),
)
ALL = tuple(ENTRY_POINTS)
SOME = (  # one of each kind
    *(*RAW, "insum by columns", "insum GroupCOO", "spmm BlockCOO values", "spmm max", *TORCH, "spmm edges", "sddmm"),
    *(*LINEAR, "SubMConv3d", "SparseConv3d and back", "SparseAvgPool3d"),
    *("tensor product, shared weights", "tensor product along edges", "tensor product, channel by channel"),
)
FEW = (
    *("insum gather", "insum GroupCOO", "spmm GroupCOO values", "spmm torch CSR", "sddmm", *LINEAR, "SubMConv3d"),
    *("tensor product, shared weights", "tensor product along edges"),
)
# What is run by Triton's interpreter: all changes to calls that it takes a tenth of a second for, and some to others.
INTERPRETED: dict[str, Sequence[str] | None] = {
    **dict.fromkeys(("insum gather", "insum scatter")),
    "insum max": ("nothing", "inputs transposed", "positions to padding and back in place", "results", "sizes"),
    "insum GroupCOO": (
        *("other inputs", "inputs at an odd address", "inputs with the negative bit", "coordinates in place and back"),
        *("coordinates by .data", "values by .data", "copies", "deaths"),
    ),
    "spmm torch CSR": ("inputs in place", "values in place", "deterministic algorithms"),
}
LEARNED = (*LINEAR, *CONVOLUTIONS)  # with weights


def make(name: str, dtype: torch.dtype = torch.float32) -> EntryPoint:
    return ENTRY_POINTS[name](dtype)


def weights(entry: EntryPoint) -> list[Tensor]:
    """The parameters that the entry point has now, which may not be those that it began with."""
    return list(entry.owner.parameters()) if isinstance(entry.owner, torch.nn.Module) else list(entry.parameters)


def learning(given: Inputs) -> list[Tensor]:
    """Leaves over the same memory, in the same layout."""
    return [tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor for tensor in given]


def upstream_of(result: Tensor) -> Tensor:
    return torch.linspace(-1, 1, result.numel(), dtype=result.dtype, device=result.device).view(result.shape)


def refusal(error: Exception) -> Outcome:
    return [f"{type(error).__name__}: {error}"]


def or_refused(happens: Callable[[EntryPoint], Outcome]) -> Callable[[EntryPoint], Outcome]:
    def asked(entry: EntryPoint) -> Outcome:
        try:
            return happens(entry)
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            return refusal(error)

    return asked


def gradients(entry: EntryPoint, learns: Sequence[Tensor], upstream: Callable[[Tensor], Tensor]) -> Outcome:
    result = entry.function(*learns)
    asked = [tensor for tensor in (*learns, *weights(entry)) if tensor.requires_grad]
    return [result, *torch.autograd.grad(result, asked, upstream(result), allow_unused=True)]


def outcome(entry: EntryPoint, given: Inputs) -> Outcome:
    """The result without gradients, then with gradients of all that can have one; or the words of the refusal."""
    try:
        with torch.no_grad():
            plain = entry.function(*given)
        return [plain, *gradients(entry, learning(given), upstream_of)]
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        return refusal(error)


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Bit by bit, but on a GPU, where sums may meet in any order."""
    assert len(found) == len(expected), (found, expected)
    for part, right in zip(found, expected):
        if not isinstance(part, Tensor) or not isinstance(right, Tensor):
            assert part is None if right is None else part == right, (part, right)
            continue
        assert (type(part), part.dtype, part.shape) == (type(right), right.dtype, right.shape)
        assert part.requires_grad == right.requires_grad
        assert part.is_inference() == right.is_inference()
        is_exact = part.device.type == "cpu" or not part.is_floating_point()
        limits = dict(rtol=0.0, atol=0.0) if is_exact else dict(TOLERANCE[part.dtype])
        if not is_exact and part.layout is torch.strided:
            limits["atol"] *= max(1.0, _largest(right))  # a sum is rounded as its summands are
        if part.layout is torch.sparse_coo:  # the sum of two gradients may list their entries one after the other
            part, right = part.detach().coalesce(), right.detach().coalesce()
        torch.testing.assert_close(part.detach(), right.detach(), equal_nan=True, **limits)


def assert_near(found: Outcome, expected: Outcome) -> None:
    for part, right in zip(found, expected, strict=True):
        if isinstance(part, Tensor):
            torch.testing.assert_close(part.detach(), right.detach(), **TOLERANCE[part.dtype])


@dataclass(frozen=True)
class Change:
    happens: Callable[[EntryPoint], Outcome]  # the change and a call after it, or a call in other surroundings
    names: Sequence[str]
    dtype: torch.dtype = torch.float32
    lasts: bool = False  # calls after it with the first inputs are other calls than those before it
    keeps_numbers: bool = False  # the outcome is what it was before, but for the order of sums


CHANGES: dict[str, Change] = {}


def mapped(how: Callable[[Tensor], Tensor]) -> Callable[[EntryPoint], Outcome]:
    """A call with all inputs of floating point in another form."""
    return lambda entry: outcome(entry, [how(x) if x.is_floating_point() else x for x in entry.of(0)])


def each_mapped(how: Callable[[Tensor], Tensor]) -> Callable[[EntryPoint], Outcome]:
    """Calls in which one input after the other is in another form."""

    def happens(entry: EntryPoint) -> Outcome:
        found = []
        for at, tensor in enumerate(entry.of(0)):
            given = list(entry.of(0))
            if tensor.is_floating_point():
                given[at] = how(tensor)
                found += outcome(entry, given)
        return found

    return happens


# Another memory, another layout, another dtype.


def transposed(x: Tensor) -> Tensor:
    order = tuple(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def unaligned(x: Tensor) -> Tensor:
    """In memory that begins one element after an aligned address."""
    return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape)


def spread(x: Tensor) -> Tensor:
    """Every second element of memory that is NaN elsewhere."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def within(x: Tensor) -> Tensor:
    """Rows and columns of a larger tensor that is NaN elsewhere."""
    larger = x.new_full([extent + 3 for extent in x.shape], torch.nan)
    inner = larger[tuple(slice(2, 2 + extent) for extent in x.shape)]
    return inner.copy_(x)


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def negated(x: Tensor) -> Tensor:
    """The same numbers, in memory that holds their negatives."""
    return torch._neg_view(-x)


LAYOUTS = {
    "in other memory": Tensor.clone,
    "transposed": transposed,
    "at an odd address": unaligned,
    "spread out": spread,
    "within a larger tensor": within,
    "with the negative bit": negated,
}
for _name, _how in LAYOUTS.items():
    CHANGES[f"inputs {_name}"] = Change(mapped(_how), SOME, keeps_numbers=True)
CHANGES["inputs transposed, one after the other"] = Change(
    each_mapped(transposed), (*VALUES, "insum scatter", *PRODUCTS)
)
CHANGES["inputs expanded"] = Change(mapped(expanded), SOME)
for _dtype in (torch.float16, torch.bfloat16, torch.float64):
    CHANGES[f"inputs of {_dtype}"] = Change(mapped(partial(Tensor.to, dtype=_dtype)), FEW)
CHANGES["nothing"] = Change(lambda entry: outcome(entry, entry.of(0)), ALL, keeps_numbers=True)
CHANGES["other inputs"] = Change(lambda entry: outcome(entry, entry.of(2)), ALL)
CHANGES["inputs of another caller"] = Change(
    lambda entry: outcome(entry, entry.of(1)), (*RAW, *GRAPHS, *CONVOLUTIONS, *POOLS, *PRODUCTS)
)


class Marked(Tensor):
    """A subclass of torch's, which sees every operation upon it."""


def _no_tensor(entry: EntryPoint) -> Outcome:
    """Something that is no tensor in each input's place."""
    found: Outcome = []
    for at in range(len(entry.of(0))):
        given: list[Any] = list(entry.of(0))
        given[at] = [[1.0]]
        found += or_refused(lambda entry, given=given: [entry.function(*given)])(entry)
    return found


CHANGES["inputs of a subclass"] = Change(mapped(lambda x: x.as_subclass(Marked)), FEW, keeps_numbers=True)
CHANGES["inputs of a row more"] = Change(
    mapped(lambda x: torch.cat([x, x[:1]])), [name for name in SOME if not name.startswith(("SubM", "Sparse"))]
)
CHANGES["inputs that are no tensors"] = Change(_no_tensor, ("insum gather", "insum GroupCOO", *TORCH, "sddmm", *LINEAR))


@torch.no_grad()
def _in_place(entry: EntryPoint) -> Outcome:
    for tensor in entry.of(0):
        if tensor.is_floating_point():
            tensor.mul_(-2).add_(0.5)
    with torch.enable_grad():
        return outcome(entry, entry.of(0))


def _by_data(entry: EntryPoint) -> Outcome:
    for tensor in entry.of(0):
        if tensor.is_floating_point():
            tensor.data = transposed(tensor * 2)
    return outcome(entry, entry.of(0))


CHANGES["inputs in place"] = Change(_in_place, ALL, lasts=True)
CHANGES["inputs by .data"] = Change(_by_data, SOME, lasts=True)


# Another size.

SIZES: dict[str, dict[str, Sequence[tuple[int, int]]]] = {  # dimensions of inputs that have one size
    "insum gather": {"positions": [(1, 0)], "rows": [(0, 0)], "columns": [(0, 1)]},
    "insum scatter": {"positions": [(1, 0), (2, 0)], "columns": [(0, 1), (1, 1)]},
    "insum max": {"positions": [(1, 0)], "columns": [(0, 1)]},
    **{
        name: {"columns": [(0, 1)]} for name in ("insum GroupCOO", "insum by columns", "insum BlockCOO", *TORCH, "SpMM")
    },
    **{name: {"columns": [(1, 1)]} for name in ("spmm GroupCOO values", "spmm ELL values", "spmm edges")},
    "spmm mean": {"batch": [(0, 0)], "columns": [(0, 2)]},
    "sddmm": {"columns": [(0, 1), (1, 1)]},
    "BlockSparseLinear": {"batch": [(0, 0)], "rows": [(0, 1)], "features": [(0, 2)]},
    "tensor product, shared weights": {"rows": [(0, 0), (1, 0)]},
    "tensor product, weights of each": {"rows": [(0, 0), (1, 0), (2, 0)]},
    "tensor product, one-hot": {"rows": [(0, 0), (1, 0)]},
    "tensor product along edges": {"edges": [(1, 0), (2, 0), (3, 0), (4, 0)]},
    "tensor product, channel by channel": {"rows": [(0, 0), (1, 0), (2, 0)]},
}


def resized(given: Inputs, places: Iterable[tuple[int, int]], size: int) -> list[Tensor]:
    found = list(given)
    for at, dim in places:
        tensor = found[at]
        found[at] = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return found


def _of_sizes(sizes: Sequence[int]) -> Callable[[EntryPoint, str], Outcome]:
    return lambda entry, name: [
        part
        for places in SIZES[name].values()
        for size in sizes
        for part in outcome(entry, resized(entry.of(0), places, size))
    ]


# Positions.


def positions_of(entry: EntryPoint) -> list[Tensor]:
    return [tensor for tensor in entry.of(0) if not tensor.is_floating_point()]


def after_positions(change: Callable[[Tensor], object], then: Callable[[Tensor], object] | None = None) -> Any:
    """A call after positions have changed, and one after they have changed once more."""

    def happens(entry: EntryPoint) -> Outcome:
        found = []
        for step in (change, then):
            if step is not None:
                for at in positions_of(entry):
                    step(at)
                found += outcome(entry, entry.of(0))
        return found

    return happens


def _set(value: int) -> Callable[[Tensor], object]:
    return lambda at: at[len(at) // 2].fill_(value)


def _set_data(value: int) -> Callable[[Tensor], object]:
    def change(at: Tensor) -> None:
        other = at.flip(0)
        other[len(at) // 2] = value
        at.data = other

    return change


INDEXED = (*RAW, "tensor product along edges", "tensor product, one-hot")
POSITIONS = {
    "in place": after_positions(lambda at: at.copy_(at.flip(0).clamp(min=1)), _set(0)),
    "to padding and back in place": after_positions(_set(-1), _set(1)),
    "out of range and back in place": after_positions(_set(99), _set(1)),
    "below -1 and back in place": after_positions(_set(-2), _set(1)),
    "by .data": after_positions(_set_data(0), _set_data(2)),
    "to padding and back by .data": after_positions(_set_data(-1), _set_data(1)),
    "out of range and back by .data": after_positions(_set_data(99), _set_data(1)),
}
for _name, _happens in POSITIONS.items():
    CHANGES[f"positions {_name}"] = Change(_happens, INDEXED, lasts=True)


def other_positions(value: int) -> Callable[[EntryPoint], Outcome]:
    def changed(x: Tensor) -> Tensor:
        return x if x.is_floating_point() else torch.cat([x.new_tensor([value]), x[1:]])

    return lambda entry: outcome(entry, [changed(x) for x in entry.of(0)])


CHANGES["other positions with padding"] = Change(other_positions(-1), INDEXED)
CHANGES["other positions out of range"] = Change(other_positions(99), INDEXED)
CHANGES["positions of int32"] = Change(
    lambda entry: outcome(entry, [x if x.is_floating_point() else x.int() for x in entry.of(0)]),
    INDEXED,
    keeps_numbers=True,
)


# What an owner holds: coordinates, values, weights.


def coordinates(entry: EntryPoint) -> list[Tensor]:
    """The tensors of positions that the owner holds."""
    owner = entry.owner
    if isinstance(owner, Tensor):
        if owner.layout is torch.sparse_csr:
            return [owner.col_indices()]
        return [owner._indices()[1]] if owner.is_sparse else [owner]
    if isinstance(owner, torch.nn.Module):
        clouds = getattr(owner, "clouds", None)
        held = [cloud.indices for cloud in clouds] if clouds is not None else list(owner.buffers())
        return [tensor for tensor in held if not tensor.is_floating_point()]
    return [owner.coords[1 - owner.group_dim]]


def after(change: Callable[[EntryPoint], object]) -> Callable[[EntryPoint], Outcome]:
    """A call after something of the owner has changed."""

    def happens(entry: EntryPoint) -> Outcome:
        with torch.no_grad():
            change(entry)
        return outcome(entry, entry.of(0))

    return happens


def mirrored(at: Tensor) -> Tensor:
    """Other positions in the same range, that of each column if they are voxels; padding stays."""
    return torch.where(at < 0, at, at.amax(0) - at if at.dim() == 2 and at.shape[1] == 4 else at.max() - at)


def out_of_range(at: Tensor) -> Tensor:
    return torch.where(at == at.max(), 99, at)


def back_and_forth(change: Callable[[Tensor], Tensor]) -> Callable[[EntryPoint], Outcome]:
    """A call after coordinates have changed in place, and one after they are what they were."""

    def happens(entry: EntryPoint) -> Outcome:
        before = [at.clone() for at in coordinates(entry)]
        found = after(lambda entry: [at.copy_(change(at)) for at in coordinates(entry)])(entry)
        # A sparse gradient has the index tensors of its tensor, as torch's own have, and those are written to next.
        is_sparse = lambda part: isinstance(part, Tensor) and part.layout is not torch.strided
        found = [part.clone() if is_sparse(part) else part for part in found]
        return found + after(lambda entry: [at.copy_(was) for at, was in zip(coordinates(entry), before)])(entry)

    return happens


def _coordinates_by_data(entry: EntryPoint) -> None:
    for at in coordinates(entry):
        at.data = mirrored(at)


# An `indice_key` is refused once its voxels have changed, so a layer that saves one is not among them.
HOLDERS = (*FORMATS, *VALUES, *GRAPHS, *TORCH, "sddmm", *LINEAR, "SubMConv3d", "SparseConvTranspose3d", *POOLS)
CHANGES["coordinates in place and back"] = Change(back_and_forth(mirrored), HOLDERS)
CHANGES["coordinates out of range and back"] = Change(
    back_and_forth(out_of_range),
    ("insum COO", "insum GroupCOO", "insum by columns", "spmm GroupCOO values", "spmm edges", "sddmm", *LINEAR),
)
CHANGES["coordinates by .data"] = Change(
    after(_coordinates_by_data),
    (*FORMATS, "spmm GroupCOO values", *GRAPHS, "sddmm", *LINEAR, "SubMConv3d", "SparseConvTranspose3d"),
    lasts=True,
)


def values_of(entry: EntryPoint) -> list[Tensor]:
    owner = entry.owner
    if isinstance(owner, torch.nn.Module):
        return list(owner.parameters())
    if isinstance(owner, Tensor):
        return [owner._values() if owner.is_sparse else owner.values()]
    return [owner.values]


def _values_by_data(entry: EntryPoint) -> None:
    for tensor in values_of(entry):
        tensor.data = transposed(tensor.data * 2)


def _values_cast(dtype: torch.dtype) -> Callable[[EntryPoint], Outcome]:
    def happens(entry: EntryPoint) -> Outcome:
        for tensor in values_of(entry):
            tensor.data = tensor.data.to(dtype)
        return outcome(entry, [x.to(dtype) if x.is_floating_point() else x for x in entry.of(0)])

    return happens


CHANGES["values in place"] = Change(
    after(lambda entry: [x.mul_(-2) for x in values_of(entry)]), (*FORMATS, *TORCH, *LEARNED), lasts=True
)
CHANGES["values by .data"] = Change(
    after(_values_by_data), ("insum COO", "insum GroupCOO", "insum BlockCOO", "spmm max", *LEARNED), lasts=True
)
CHANGES["values of float64 by .data"] = Change(
    _values_cast(torch.float64), ("insum COO", "insum GroupCOO", *LEARNED), lasts=True
)


def _replaced(entry: EntryPoint) -> None:
    for module in entry.owner.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach() * 2 - 1))


def _loaded(entry: EntryPoint) -> None:
    entry.owner.load_state_dict(
        {name: x * 2 if x.is_floating_point() else x for name, x in entry.owner.state_dict().items()}
    )


def _cast(*dtypes: torch.dtype) -> Callable[[EntryPoint], Outcome]:
    """Calls of a layer in one dtype after the other."""

    def happens(entry: EntryPoint) -> Outcome:
        found = []
        for dtype in dtypes:
            entry.owner.to(dtype)
            found += outcome(entry, [x.to(dtype) if x.is_floating_point() else x for x in entry.of(0)])
        return found

    return happens


def _frozen(entry: EntryPoint) -> None:
    for parameter in entry.owner.parameters():
        parameter.requires_grad_(False)


CHANGES["weights replaced"] = Change(after(_replaced), LEARNED, lasts=True)
CHANGES["weights loaded"] = Change(after(_loaded), LEARNED, lasts=True)
CHANGES["weights frozen"] = Change(after(_frozen), LEARNED, lasts=True)
CHANGES["weights halved and widened"] = Change(after(lambda entry: entry.owner.half().float()), LEARNED, lasts=True)
CHANGES["another pattern of a layer"] = Change(
    after(lambda entry: entry.owner.set_pattern_(torch.ones(4, 3, device=DEVICE).tril().bool())),
    ("BlockSparseLinear",),
    lasts=True,
)
CHANGES["layers of other dtypes in turn"] = Change(
    _cast(torch.float64, torch.bfloat16, torch.float64, torch.float16, torch.float32), LEARNED, lasts=True
)


# Settings of torch.


@contextmanager
def setting(get: Callable[[], Any], change: Callable[[Any], object], value: object) -> Iterator[None]:
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


def flag(name: str) -> Callable[[], AbstractContextManager[None]]:
    matmul = torch.backends.cuda.matmul
    return lambda: setting(lambda: getattr(matmul, name), lambda value: setattr(matmul, name, value), True)


def precision(value: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def deterministic() -> AbstractContextManager[None]:
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def within_setting(around: Callable[[], AbstractContextManager[Any]]) -> Callable[[EntryPoint], Outcome]:
    def happens(entry: EntryPoint) -> Outcome:
        with around():
            return outcome(entry, entry.of(0))

    return happens


AUTOCAST = lambda: torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16)
CHANGES["precision high"] = Change(within_setting(precision("high")), FEW)
CHANGES["precision medium"] = Change(within_setting(precision("medium")), FEW)
CHANGES["deterministic algorithms"] = Change(within_setting(deterministic), SOME, keeps_numbers=True)
CHANGES["reduced precision of fp16"] = Change(
    within_setting(flag("allow_fp16_reduced_precision_reduction")), FEW, torch.float16
)
CHANGES["reduced precision of bf16"] = Change(
    within_setting(flag("allow_bf16_reduced_precision_reduction")), FEW, torch.bfloat16
)
CHANGES["autocast"] = Change(within_setting(AUTOCAST), SOME)


# Modes, transforms, and other ways to ask for a result.


def called(around: Callable[[], AbstractContextManager[Any]]) -> Callable[[EntryPoint], Outcome]:
    """One call with leaves, in a mode."""

    def happens(entry: EntryPoint) -> Outcome:
        with around():
            return [entry.function(*learning(entry.of(0)))]

    return happens


@contextmanager
def enabled_within_no_grad() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad():
        yield


def in_inference_mode(entry: EntryPoint) -> Outcome:
    with torch.inference_mode():
        return [entry.function(*entry.of(0))]


def of_inference_tensors(entry: EntryPoint) -> Outcome:
    """Calls with tensors that count no versions, before and after a change in place."""
    with torch.inference_mode():
        given = [tensor.clone() for tensor in entry.of(0)]
        found = [entry.function(*given) for _ in range(2)]
        for tensor in given:
            tensor.mul_(2) if tensor.is_floating_point() else tensor.copy_(tensor.flip(0).clamp(min=0))
        found.append(entry.function(*given))
    with torch.no_grad():
        return [*found, entry.function(*given)]


def floats_of(entry: EntryPoint) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    """The inputs of floating point, and the function of them alone."""
    given = entry.of(0)
    places = [at for at, tensor in enumerate(given) if tensor.is_floating_point()]

    def function(*floats: Tensor) -> Tensor:
        full = list(given)
        for at, tensor in zip(places, floats):
            full[at] = tensor
        return entry.function(*full)

    return tuple(given[at] for at in places), function


def differentiated(entry: EntryPoint) -> Outcome:
    floats, function = floats_of(entry)

    def loss(*given: Tensor) -> Tensor:
        result = function(*given)
        return (result * upstream_of(result)).sum()

    return list(torch.func.grad(loss, tuple(range(len(floats))))(*floats))


def batched(entry: EntryPoint) -> Outcome:
    floats, function = floats_of(entry)
    return [torch.func.vmap(function)(*[torch.stack([tensor, 2 * tensor]) for tensor in floats]).detach()]


def pushed(entry: EntryPoint) -> Outcome:
    floats, function = floats_of(entry)
    return [part.detach() for part in torch.func.jvp(function, floats, tuple(upstream_of(x) for x in floats))]


def dual(entry: EntryPoint) -> Outcome:
    floats, function = floats_of(entry)
    with forward_ad.dual_level():
        result = function(*[forward_ad.make_dual(tensor, upstream_of(tensor)) for tensor in floats])
        return [part if part is None else part.detach().clone() for part in forward_ad.unpack_dual(result)]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def counted(entry: EntryPoint) -> Outcome:
    """The outcome, and the package's operators that a mode sees on the way."""
    with Counting() as mode:
        found = outcome(entry, entry.of(0))
    return [*found, sorted(name for name in mode.seen if name.startswith("insum_ops"))]


def hooked(entry: EntryPoint) -> Outcome:
    """Gradients by tensors that hooks have packed and unpacked."""
    with saved_tensors_hooks(lambda x: x.detach().cpu(), lambda x: x.to(DEVICE)):
        return gradients(entry, learning(entry.of(0)), upstream_of)


def twice_differentiated(entry: EntryPoint) -> Outcome:
    learns = learning(entry.of(0))
    result = entry.function(*learns)
    asked = [tensor for tensor in (*learns, *weights(entry)) if tensor.requires_grad]
    firsts = torch.autograd.grad(result.square().sum(), asked, create_graph=True, allow_unused=True)
    total = sum([first.square().sum() for first in firsts if first is not None])
    return [first if first is None else first.detach() for first in firsts] + list(
        torch.autograd.grad(total, asked, allow_unused=True)
    )


def backward_twice(entry: EntryPoint) -> Outcome:
    learns = learning(entry.of(0))
    result = entry.function(*learns)
    asked = [tensor for tensor in (*learns, *weights(entry)) if tensor.requires_grad]
    first = torch.autograd.grad(result, asked, upstream_of(result), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(result, asked, upstream_of(result), allow_unused=True)
    assert_same(list(second), list(first))
    try:
        torch.autograd.grad(result, asked, upstream_of(result), allow_unused=True)
    except RuntimeError as error:
        return [*first, *refusal(error)]
    return list(first)


def backward_after_a_change(entry: EntryPoint) -> Outcome:
    """Each input alone is changed between a call and its backward: refused, or the gradients of the call."""
    found: Outcome = []
    expected = gradients(entry, learning(entry.of(0)), upstream_of)[1:]
    words = "has been modified by an inplace operation"
    for at in range(len(entry.of(0))):
        learns = learning([tensor.clone() for tensor in entry.of(0)])
        result = entry.function(*learns)
        asked = [tensor for tensor in (*learns, *weights(entry)) if tensor.requires_grad]
        with torch.no_grad():
            learns[at].mul_(2)
        try:
            grads = torch.autograd.grad(result, asked, upstream_of(result), allow_unused=True)
        except RuntimeError as error:
            found += refusal(error)
        else:
            assert_same(list(grads), expected)
    assert all([words in refused for refused in found])
    return found


def one_after_the_other(entry: EntryPoint) -> Outcome:
    """Gradients of each input and each weight alone."""
    found: Outcome = []
    own = weights(entry)
    asks = [tensor.requires_grad for tensor in own]
    try:
        for wanted in range(len(entry.of(0)) + len(own)):
            given = [tensor.detach() for tensor in entry.of(0)]
            for at, tensor in enumerate((*given, *own)):
                if tensor.is_floating_point():
                    tensor.requires_grad_(at == wanted)
            if any(tensor.requires_grad for tensor in (*given, *own)):
                found += gradients(entry, given, upstream_of)
    finally:
        for tensor, is_asked in zip(own, asks):
            tensor.requires_grad_(is_asked)
    return found


def with_upstream(form: Callable[[Tensor], Tensor]) -> Callable[[EntryPoint], Outcome]:
    return lambda entry: gradients(entry, learning(entry.of(0)), lambda result: form(upstream_of(result)))


CHANGES["no_grad"] = Change(called(torch.no_grad), SOME)
CHANGES["enable_grad within no_grad"] = Change(called(enabled_within_no_grad), FEW)
CHANGES["inference_mode"] = Change(in_inference_mode, SOME)
CHANGES["inference tensors"] = Change(of_inference_tensors, SOME)
CHANGES["gradients of one after the other"] = Change(one_after_the_other, SOME)
CHANGES["func.grad"] = Change(or_refused(differentiated), SOME)
CHANGES["vmap"] = Change(or_refused(batched), SOME)
CHANGES["jvp"] = Change(or_refused(pushed), SOME)
CHANGES["dual numbers"] = Change(or_refused(dual), FEW)
CHANGES["a mode that counts"] = Change(counted, SOME)
CHANGES["saved-tensor hooks"] = Change(hooked, SOME)
CHANGES["double backward"] = Change(or_refused(twice_differentiated), SOME)
CHANGES["backward twice"] = Change(backward_twice, SOME)
CHANGES["backward after a change in place"] = Change(backward_after_a_change, SOME)
CHANGES["upstream transposed"] = Change(with_upstream(transposed), SOME)
CHANGES["upstream expanded"] = Change(
    with_upstream(lambda upstream: upstream.new_full((), 0.5).expand(upstream.shape)), SOME
)
CHANGES["upstream with the negative bit"] = Change(with_upstream(negated), FEW)

WARMING = 3  # calls after which the next is replayed from a launch plan


def is_run(name: str, change: str) -> bool:
    if not IS_INTERPRETED:
        return True
    changes = INTERPRETED.get(name, ())
    return changes is None or change in changes


def every(names: Iterable[str], change: str) -> list[Any]:
    """The parameters of a law: those entry points of its that there are."""
    there = [name for name in names if name in ENTRY_POINTS and is_run(name, change)]  # e3nn is an extra
    return [pytest.param(name, change, id=f"{name}: {change}") for name in there]


def law(names: Iterable[str], change: str) -> Any:
    """A test of its own with one entry point after the other."""
    return pytest.mark.parametrize("name", [case.values[0] for case in every(names, change)])


@pytest.mark.sampled(times=1 if IS_INTERPRETED else 2)
@pytest.mark.parametrize(
    ("name", "change"), [case for change, law in CHANGES.items() for case in every(law.names, change)]
)
def test_a_change_between_two_calls_is_seen(name, change):
    law = CHANGES[change]
    forget()
    expected = law.happens(make(name, law.dtype))
    forget()
    warm = make(name, law.dtype)
    first = outcome(warm, warm.of(0))
    for _ in range(WARMING - 1):
        assert_same(outcome(warm, warm.of(0)), first)
    assert_same(law.happens(warm), expected)
    if law.keeps_numbers:
        assert_near(expected, first)
    if not law.lasts:
        assert_same(law.happens(warm), expected)
        assert_same(outcome(warm, warm.of(0)), first)


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(9, 3), (1, 0, 6)], ids=["more or less", "one or none"])
@law(SIZES, "sizes")
def test_other_sizes_are_other_calls(name, sizes):
    happens = _of_sizes(sizes)
    forget()
    expected = happens(make(name), name)
    forget()
    warm = make(name)
    first = [outcome(warm, warm.of(0)) for _ in range(WARMING)][-1]
    for _ in range(2):
        assert_same(happens(warm, name), expected)
        assert_same(outcome(warm, warm.of(0)), first)


def warmed(name: str, dtype: torch.dtype = torch.float32) -> tuple[EntryPoint, Outcome]:
    """An entry point that has a launch plan, and what it gave."""
    entry = make(name, dtype)
    return entry, [outcome(entry, entry.of(0)) for _ in range(WARMING)][-1]


@law(SOME, "fake tensors")
def test_a_warm_call_with_fake_tensors_gives_fake_ones_and_leaves_nothing_behind(name):
    entry, first = warmed(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = entry.function(*[mode.from_tensor(tensor) for tensor in entry.of(0)])
    assert isinstance(result, FakeTensor)
    assert (result.dtype, result.shape, result.device) == (first[0].dtype, first[0].shape, first[0].device)
    for _ in range(2):
        assert_same(outcome(entry, entry.of(0)), first)


@law(ALL, "results")
def test_results_are_the_callers_own(name):
    """Whoever writes into a result changes no later one, and no input."""
    entry, first = warmed(name)
    given = [tensor.clone() for tensor in entry.of(0)]
    for _ in range(2):
        for part in (entry.function(*entry.of(0)).detach(), *outcome(entry, entry.of(0))):
            if part is not None:
                with torch.no_grad():
                    part.fill_(torch.nan) if part.layout is torch.strided else part._values().fill_(torch.nan)
    assert_same(list(entry.of(0)), given)
    assert_same(outcome(entry, entry.of(0)), first)


@law(ALL, "views")
def test_a_result_with_a_gradient_is_no_view(name):
    """Torch refuses to let views that a step of autograd has made be changed in place."""
    entry, first = warmed(name)
    for _ in range(2):
        learns = learning(entry.of(0))
        result = entry.function(*learns)
        assert result._base is None
        result.mul_(2)
        asked = [tensor for tensor in (*learns, *weights(entry)) if tensor.requires_grad]
        grads = torch.autograd.grad(result, asked, upstream_of(result) / 2, allow_unused=True)
        assert_same(list(grads), first[2:])


def _parts(owner: Any) -> list[Any]:
    """What can be asked whether it is alive: an owner, and tensors of its."""
    if isinstance(owner, torch.nn.Module):
        return [owner, *owner.parameters(), *owner.buffers(), *getattr(owner, "clouds", ())]
    if owner is None or isinstance(owner, Tensor):
        return [] if owner is None else [owner]
    return [owner, owner.values, *[coord for coord in owner.coords if coord is not None]]


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@law(ALL, "deaths")
def test_what_was_called_dies_with_its_last_name(name):
    """Nothing that is kept of calls holds an owner, an input or a result, not even in a circle."""
    entry, first = warmed(name)
    entry.run(1)
    alive = [ref(part) for part in (*_parts(entry.owner), *entry.of(0), *entry.of(1), *first) if part is not None]
    with without_collector():
        del entry, first
        assert [part() for part in alive if part() is not None] == []


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda owner: pickle.loads(pickle.dumps(owner)),
}
COPIED = (*FORMATS, *VALUES, "sddmm", *LINEAR, *CONVOLUTIONS, *POOLS, *PRODUCTS)


@pytest.mark.sampled
@pytest.mark.parametrize("copied", COPIES)
@law(COPIED, "copies")
def test_a_copy_of_what_was_called_gives_the_same(name, copied):
    entry, first = warmed(name)
    twin = entry.with_owner(COPIES[copied](entry.owner))
    for _ in range(2):
        assert_same(outcome(twin, twin.of(0)), first)
    assert_same(outcome(entry, entry.of(0)), first)


def test_numbers_have_the_default_dtype_of_each_call():
    places = torch.tensor([2, 0], device=DEVICE)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64, torch.float16):
        with setting(torch.get_default_dtype, torch.set_default_dtype, dtype):
            result = insum("C[I[i]] += 2", I=places, size=(3,))
        assert result.dtype == dtype
        assert result.tolist() == [2, 0, 2]


def test_one_tensor_in_two_places_is_two_operands():
    x, y = (torch.randn(4, 4, dtype=torch.float64, device=DEVICE).requires_grad_() for _ in range(2))
    for left, right in ((x, y), (x, y), (x, x), (y, y), (x, x), (y, x), (x, y)):
        product = insum("C[m,n] += A[m,k] * B[k,n]", A=left, B=right)
        torch.testing.assert_close(product, left @ right, **TOLERANCE[torch.float64])
        found = torch.autograd.grad(product, (x, y), upstream_of(product), allow_unused=True)
        expected = torch.autograd.grad(left @ right, (x, y), upstream_of(product), allow_unused=True)
        for part, wanted in zip(found, expected):
            assert (part is None) == (wanted is None)
            if part is not None:
                torch.testing.assert_close(part, wanted, **TOLERANCE[torch.float64])


def test_later_calls_follow_the_weights_of_a_product_over_a_table():
    """Groups of the table are padded, and sums are added into the result, which no launch plan may leave out."""
    table = torch.zeros(4, 4, 4, 5, device=DEVICE)  # scalars and vectors: times a scalar, inner and outer product
    table[0, 0, 0, 0] = 1.0
    for at, other, third in ((1, 2, 3), (2, 3, 1), (3, 1, 2)):
        table[at, 0, at, 1] = table[at, at, 0, 2] = table[0, at, at, 3] = table[at, other, third, 4] = 1.0
        table[at, third, other, 4] = -1.0
    rows = 12 if IS_INTERPRETED else 100
    X, Y = torch.randn(rows, 4, 16, device=DEVICE), torch.randn(rows, 4, device=DEVICE)
    CG, W = GroupCOO.from_dense(table, group_dim=3), torch.empty(rows, 5, 16, 16, device=DEVICE)
    for call in range(6):
        W.normal_()
        found = insum("Z[b,i,w] += CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[b,l,u,w]", CG=CG, X=X, Y=Y, W=W)
        wanted = torch.einsum("ijkl,bju,bk,bluw->biw", *[each.double() for each in (table, X, Y, W)])
        torch.testing.assert_close(found.double(), wanted, **TOLERANCE[found.dtype], msg=f"call {call}")
