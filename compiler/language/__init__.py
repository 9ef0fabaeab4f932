"""Text to statements: parsed, differentiated, batched. Nothing here knows of tensors.

A file imports only from those above it.

    ir               statements as data
    errors           what the compiler says when it is handed something it will not run
    other_notations  what einsum's and einops' texts are in this language
    parse            text to a `Statement`, with Python's `ast`
    differentiate    the gradient of a statement is a statement
    batch            a batch of statements is a statement
"""

from .batch import batched
from .differentiate import Term, fresh_name, gradient, tangent_terms, terms, winners
from .errors import (
    IndexRangeError,
    InsumError,
    OperandError,
    SettingError,
    ShapeError,
    UnsupportedError,
    on_problem,
    shortened,
)
from .ir import Access, Const, Index, Number, Statement, Var, renamed, substituted, walk
from .parse import parse

__all__ = [
    "Access",
    "Const",
    "Index",
    "IndexRangeError",
    "InsumError",
    "Number",
    "OperandError",
    "SettingError",
    "ShapeError",
    "Statement",
    "Term",
    "UnsupportedError",
    "Var",
    "batched",
    "fresh_name",
    "gradient",
    "on_problem",
    "parse",
    "renamed",
    "shortened",
    "substituted",
    "tangent_terms",
    "terms",
    "walk",
    "winners",
]
