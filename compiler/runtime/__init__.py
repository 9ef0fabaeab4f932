"""Kernels loaded and launched, calls recorded as launch plans and replayed, index ranges checked.

A file imports only from those above it.

    cache_folder  the folder of what outlives a process, and the files in it
    calls         what a call of a statement depends on, read off its arguments
    enqueue       A loaded kernel -> a function that puts it on the current stream
    recording     one run of a function, noted step by step
    tensor_guard  whether tensors are laid out like others, asked in one call
    launch        triton source -> loaded kernel -> one launch, with as little as possible between the call and the GP
    plan          A launch plan
    ranges        index values against the dimensions they point into, read once per tensor and remembered
    tracing       what a call does about torch's state, as `formats.torch_state` reads it
    plan_cache    which plan a call has
    tensor_views  what a tensor may carry besides its memory
"""

from .cache_folder import cache_dir, cache_size, remove_abandoned, replace_file, warn_damaged, warn_unusable
from .calls import PLAIN_CALLS, arguments
from .launch import INTERPRETED, TRITON_VERSION, Launcher, launcher, on_device, reason_of
from .plan import EPOCH
from .plan_cache import planned
from .ranges import check_ranges, remember_range, remember_segments, remembered_range, segment_lengths
from .recording import active, paused
from .tensor_views import as_memory, as_traced, cast_operands, owned, resolved
from .tracing import followed, outside_transforms

__all__ = [
    "EPOCH",
    "INTERPRETED",
    "PLAIN_CALLS",
    "TRITON_VERSION",
    "Launcher",
    "active",
    "arguments",
    "as_memory",
    "as_traced",
    "cache_dir",
    "cache_size",
    "cast_operands",
    "check_ranges",
    "followed",
    "launcher",
    "on_device",
    "outside_transforms",
    "owned",
    "paused",
    "planned",
    "reason_of",
    "remember_range",
    "remember_segments",
    "remembered_range",
    "remove_abandoned",
    "replace_file",
    "resolved",
    "segment_lengths",
    "warn_damaged",
    "warn_unusable",
]
