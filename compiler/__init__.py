"""Statements to kernels: the compiler, as the layers see it. `pipeline` is where to begin reading."""

from .autograd import gradients_of, one_by_one, run_plain
from .binding import INDEX_DTYPES, bind, bucket, check_pattern, is_sparse, pattern_of, power_of_two
from .explain import Explanation, Tuning, explanation_of, tuning_of
from .in_place import run_in_place
from .language import IndexRangeError, OperandError, ShapeError, UnsupportedError, parse, terms, walk
from .pipeline import evaluate
from .planning import LARGEST_TILE, MOST_ENTRIES, ON_CHIP_EXTENT, SHORT, Device, device_of
from .prepared import has_kernels, refuse_freed
from .runtime import (
    INTERPRETED,
    TRITON_VERSION,
    active,
    cache_dir,
    cache_size,
    followed,
    on_device,
    outside_transforms,
    owned,
    paused,
    planned,
    remember_range,
    remember_segments,
    remembered_range,
)
from .tuning import Key, device_name, fastest, generator_version, host_milliseconds, tuning_mode

__all__ = [
    "INDEX_DTYPES",
    "INTERPRETED",
    "LARGEST_TILE",
    "MOST_ENTRIES",
    "ON_CHIP_EXTENT",
    "SHORT",
    "TRITON_VERSION",
    "Device",
    "Explanation",
    "IndexRangeError",
    "Key",
    "OperandError",
    "ShapeError",
    "Tuning",
    "UnsupportedError",
    "active",
    "bind",
    "bucket",
    "cache_dir",
    "cache_size",
    "check_pattern",
    "device_name",
    "device_of",
    "evaluate",
    "explanation_of",
    "fastest",
    "followed",
    "generator_version",
    "gradients_of",
    "has_kernels",
    "host_milliseconds",
    "is_sparse",
    "on_device",
    "one_by_one",
    "outside_transforms",
    "owned",
    "parse",
    "pattern_of",
    "paused",
    "planned",
    "power_of_two",
    "refuse_freed",
    "remember_range",
    "remember_segments",
    "remembered_range",
    "run_in_place",
    "run_plain",
    "terms",
    "tuning_mode",
    "tuning_of",
    "walk",
]
