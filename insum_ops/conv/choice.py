"""The choice of the fastest form of a convolution over a map that lasts, and of the size of its groups or tiles.

The forms are timed once for each layer shape, over the map at hand, and the choice is remembered as tuned configs are.
On a CPU the table is timed against groups of one size.
The form that the rules name comes first, and the others are not tried where the device needs no longer for it than the
host for the call: over the 3,500 voxels of `examples/unet.py` other forms took half of the time before its first steps
and no part of any step. Until a map has proved that it lasts, and where nothing may be timed, the rules of forms.py
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import (
    INTERPRETED,
    Key,
    bucket,
    choice_key,
    fastest,
    host_milliseconds,
    on_device,
    paused,
    tuning_mode,
)
from ..formats.torch_state import is_deterministic, is_free
from ..formats.voxels.kernel_map import MOST_TAPS, KernelMap
from ..functional import insum_pinned
from .forms import (
    GROUP_SIZE,
    GROUP_SIZE_OF_SUMS,
    GROUPED,
    STATIONARY,
    TILE_SIZE,
    TILED,
    WEIGHT_GRADIENT,
    Form,
    form_of,
    lasts,
    settings_of,
)
from .operands import drop, has, operands_of

__all__ = ["Way", "may_choose", "way_of", "way_of_sums"]

# Sizes that are timed after a form has won at the size that the rules take; those of a full search are every other one.
# On one H200 other groups were up to 1.25 times as fast in full float32 and drew elsewhere; other tiles drew but for 16
# channels in tf32 (1.1), and short sums never won, see `cost.MEASURED_SUMS`.
OTHER_SIZES = {GROUPED: (GROUP_SIZE // 2, GROUP_SIZE * 2)}
FULL_SIZES = {
    **OTHER_SIZES,
    TILED: (TILE_SIZE // 2, TILE_SIZE * 2),
    WEIGHT_GRADIENT: (GROUP_SIZE_OF_SUMS // 4,),
}
SIZES_OF_SUMS = GROUP_SIZE_OF_SUMS, GROUP_SIZE_OF_SUMS * 4

Mark = tuple[Any, ...]


class Way(NamedTuple):
    """A form and the size of its groups or tiles; a table has none."""

    form: Form
    size: int = 0

    @property
    def name(self) -> str:
        """The name by which the tuning cache remembers it."""
        return "table" if self.form == STATIONARY else f"{'tiles' if self.form == TILED else 'groups'} of {self.size}"


def may_choose(features: Tensor) -> bool:
    """Whether convolutions of such features may be timed: unless tuning is off or a result must not vary."""
    if INTERPRETED or not (features.is_cuda or features.is_cpu) or is_deterministic():
        return False
    return tuning_mode() != "off"


def way_of(features: Tensor, Weight: Tensor, kernel_map: KernelMap, kind: int, shape: tuple[int, ...]) -> Way | None:
    """Return the fastest way to a result of `shape`, which is timed unless it is cached.

    None if it is not cached and can't be timed now.
    """
    mark = _mark("way", features, Weight.shape)
    cached: Way | None = kernel_map.memory.get(mark)
    if cached is not None or not _may_time(features, kernel_map):
        return cached
    first = [Way(STATIONARY), Way(GROUPED, GROUP_SIZE)]
    if kernel_map.volume <= MOST_TAPS and not _is_cpu(features.device):  # which has no kernel that keeps a tile on chip
        first.insert(1, Way(TILED, TILE_SIZE))
    channels = 1 if Weight.ndim == 2 else max(Weight.shape[-2:])
    likely = form_of(kernel_map, channels, features.dtype, features.device)
    first.sort(key=lambda way: way.form != likely)
    In = features if len(shape) == 2 else features.unflatten(1, (shape[1], -1))
    tensors = {"In": In.detach(), "Weight": Weight.detach()}
    return _fastest(first, tensors, kernel_map, kind, shape, mark)


def way_of_sums(In: Tensor, dOut: Tensor, kernel_map: KernelMap, kind: int, shape: tuple[int, ...]) -> tuple[Way, bool]:
    """Return the groups that a weight's gradient of `shape` sums, timed if it may be, and whether that is settled."""
    mark = _mark("sums", In, shape)
    way: Way | None = kernel_map.memory.get(mark)
    if way is None and not _is_cpu(In.device) and _may_time(In, kernel_map):
        ways = [Way(WEIGHT_GRADIENT, size) for size in SIZES_OF_SUMS]
        tensors = {"In": In.detach(), "dOut": dOut.detach()}
        way = _fastest(ways, tensors, kernel_map, kind, shape, mark)
    if way is not None:
        return way, True
    return Way(WEIGHT_GRADIENT, GROUP_SIZE_OF_SUMS), _is_cpu(In.device) or not may_choose(In)


def _mark(word: str, features: Tensor, shape: Sequence[int]) -> Mark:
    """Return the key under which a map keeps the fastest way for a layer shape."""
    return word, *settings_of(features.dtype), *shape


def _is_cpu(device: torch.device) -> bool:
    """Whether a call is done when it returns, and the size of groups says nothing: entries are taken one by one."""
    return device.type == "cpu"


def _may_time(features: Tensor, kernel_map: KernelMap) -> bool:
    """Whether the forms may be timed over this map now."""
    return may_choose(features) and lasts(kernel_map) and kernel_map.num_outputs > 0 and is_free()


@torch.inference_mode(False)  # operands that are made here are kept, and training reads them too
@torch.no_grad()
def _fastest(
    first: Sequence[Way],
    tensors: dict[str, Tensor],
    kernel_map: KernelMap,
    kind: int,
    shape: tuple[int, ...],
    mark: Mark,
) -> Way:
    """Return the fastest of `first` and of their other sizes, and keep it with the map under `mark`.

    Groups and tiles that were made for timing alone are dropped.
    """
    device = kernel_map.indices.device
    is_cpu = _is_cpu(device)
    sizes = {} if is_cpu else FULL_SIZES if tuning_mode() == "full" else OTHER_SIZES
    others = {way.name: [Way(way.form, size).name for size in sizes.get(way.form, ())] for way in first}
    candidates = [*first, *[Way(way.form, size) for way in first for size in FULL_SIZES.get(way.form, ())]]
    ways = {way.name: way for way in candidates}
    present = {way for way in ways.values() if has(kernel_map, *way)}

    enough = 0.0 if is_cpu or tuning_mode() == "full" else host_milliseconds(device, "")

    def start(name: str) -> tuple[Callable[[], object], float]:
        form, size = ways[name]
        operands, fact = operands_of(kernel_map, form, size)
        memory: dict[Any, Any] = {}
        adds = fact is None and form not in (STATIONARY, TILED)
        host = 0.0 if is_cpu else host_milliseconds(device, "zero" if adds else "")
        return lambda: insum_pinned(memory, form[kind], operands, shape, fact, **tensors), host

    key = _key(first, tensors, kernel_map, kind, mark)
    with on_device(device), paused():  # a launch plan of the caller must not record the timed launches
        names, vary = [way.name for way in first], lambda best, times: others.get(best, ())
        name = fastest(key, ways, names, start, is_waited_for=is_cpu, enough=enough, others=vary)
    best = kernel_map.memory[mark] = ways[name]
    for way in ways.values():
        if way != best and way not in present:
            drop(kernel_map, *way)
    return best


def _key(ways: Sequence[Way], tensors: dict[str, Tensor], kernel_map: KernelMap, kind: int, mark: Mark) -> Key:
    """Return the tuning key of a layer shape; lengths that vary from cloud to cloud count by their power of two."""
    lengths = {"inputs": kernel_map.num_inputs, "outputs": kernel_map.num_outputs, "pairs": kernel_map.num_pairs}
    word, dtype, is_deterministic, setting, *shape = mark
    sizes = [*[(name, bucket(n)) for name, n in lengths.items()], *[(str(at), n) for at, n in enumerate(shape)]]
    text = "; ".join(sorted({way.form[kind] for way in ways}))
    return choice_key(text, tensors, sizes, f"{word} {dtype} {setting}", is_deterministic)
