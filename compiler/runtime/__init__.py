"""Kernels loaded and launched, calls recorded as launch plans and replayed, index ranges checked.

A file imports only from those above it.

    cache_folder  the folder of what outlives a process, and the files in it
    calls         what a call of a statement depends on, read off its arguments
    enqueue       a loaded kernel to a function that puts it on the current stream
    recording     one run of a function, noted step by step
    tensor_guard  whether tensors are laid out like others, asked in one call that may leave out lengths
    launch        Triton source to a loaded kernel, and its launch
    copies        the sum of copies of an output, as a kernel of its own
    joint         the launch of a kernel with several outputs
    plan_steps    the steps of a recorded run that its result depends on
    generalise    two recorded runs to the steps of all calls that differ in lengths alone
    plan          these steps to a launch plan: guards, then a line for each step
    range_kernel  the kernel that reads the range of an index tensor
    ranges        index values against the dimensions they point into, read once per tensor and remembered
    group_kernels  the kernels that put positions into tiles of equal value
    group_tables  the positions of an index tensor in tiles of equal value, remembered with the tensor
    tracing       what a call does about torch's state: leave transforms, follow a tracer
    plan_cache    `replayed` and `planned`: a call replayed from its plan, or run and recorded
    tensor_views  operands as kernels and tracers take them: cast, with signs applied, no views
"""

from .cache_folder import cache_dir, cache_size, remove_abandoned, replace_file, warn_damaged, warn_unusable
from .calls import PLAIN_CALLS, integers, plan_arguments, unchecked
from .copies import sum_of_copies
from .group_tables import GroupTables, group_tables, new_group_tables, note_use, was_used
from .joint import JointLauncher, joint_launcher
from .launch import INTERPRETED, TRITON_VERSION, Launcher, launcher, load, on_device, reason_of
from .plan import EPOCH
from .plan_cache import CacheOwner, keep_learning, planned, replayed
from .ranges import (
    ascends,
    check_ranges,
    read_ranges,
    remember_coordinates,
    remember_range,
    remember_segments,
    remembered_range,
    remembered_ranges,
    segment_lengths,
)
from .recording import active, is_for_graph, paused
from .tensor_views import as_memory, as_traced, cast_operands, owned, resolved
from .tracing import followed, outside_modes, outside_transforms

__all__ = [
    "EPOCH",
    "INTERPRETED",
    "PLAIN_CALLS",
    "TRITON_VERSION",
    "CacheOwner",
    "GroupTables",
    "JointLauncher",
    "Launcher",
    "active",
    "as_memory",
    "as_traced",
    "ascends",
    "cache_dir",
    "cache_size",
    "cast_operands",
    "check_ranges",
    "followed",
    "group_tables",
    "integers",
    "is_for_graph",
    "joint_launcher",
    "keep_learning",
    "launcher",
    "load",
    "new_group_tables",
    "note_use",
    "on_device",
    "outside_modes",
    "outside_transforms",
    "owned",
    "paused",
    "plan_arguments",
    "planned",
    "read_ranges",
    "reason_of",
    "remember_coordinates",
    "remember_range",
    "remember_segments",
    "remembered_range",
    "remembered_ranges",
    "remove_abandoned",
    "replace_file",
    "replayed",
    "resolved",
    "segment_lengths",
    "sum_of_copies",
    "unchecked",
    "warn_damaged",
    "warn_unusable",
    "was_used",
]
