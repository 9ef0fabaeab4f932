"""A statement and its operands to a bound one: extents, dtypes, formats rewritten away, errors in the user's names.

A file imports only from those above it.

    contraction_path  the order in which factors are contracted, for the least work
    layouts           in which order tensors on the way have their dimensions, so that few are copied
    bind_errors       why tensors do not fit a statement, in words
    rewrite           a sparse format in a statement to the indirect statement of that format
    shape_class       what a kernel may know of lengths that vary from call to call
    bind              a statement and tensors to a `Bound` one: extents, dtypes, size
    sparse_protocol   what a format must offer, and what a statement with one reads of it
    recipes           how a statement with a format in it is evaluated, worked out once for all formats of a kind
"""

from .bind import Bound, Kinds, Meta, Pointed, bind, kernel_strides, kinds_of, row_major, sized
from .bind_errors import INDEX_DTYPES
from .contraction_path import contraction_path, example_of
from .layouts import laid_out
from .recipes import recipe_for, suited_group_dim
from .rewrite import sparse_factor
from .shape_class import (
    SHORT_LENGTH,
    LengthClass,
    bucket,
    fact_length_class,
    known_divisor,
    length_class,
    power_of_two,
    shape_class,
)
from .sparse_protocol import (
    Kind,
    Recipe,
    SparseFormat,
    best_group_dim,
    check_pattern,
    is_sparse,
    pattern_of,
    recipe,
    whole_along,
)

__all__ = [
    "INDEX_DTYPES",
    "SHORT_LENGTH",
    "Bound",
    "Kind",
    "Kinds",
    "LengthClass",
    "Meta",
    "Pointed",
    "Recipe",
    "SparseFormat",
    "best_group_dim",
    "bind",
    "bucket",
    "check_pattern",
    "contraction_path",
    "example_of",
    "fact_length_class",
    "is_sparse",
    "kernel_strides",
    "kinds_of",
    "known_divisor",
    "laid_out",
    "length_class",
    "pattern_of",
    "power_of_two",
    "recipe",
    "recipe_for",
    "row_major",
    "shape_class",
    "sized",
    "sparse_factor",
    "suited_group_dim",
    "whole_along",
]
