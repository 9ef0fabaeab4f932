"""einsum's and einops' texts -> what to write in this language, for the message that refuses them."""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["other_notation"]

TENSORS = "ABDEFGH"  # C is the output
_TEXT = re.compile(r"[A-Za-z0-9_\s,.()]*(?:->[A-Za-z0-9_\s.()]*)?")
_TERM = re.compile(r"[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*|")


def other_notation(text: str) -> str | None:
    """Return what to write instead of a text of einsum's or einops', None if it is neither.

    >>> other_notation("ij,jk->ik")
    "this is einsum's notation; write C[i,k] += A[i,j] * B[j,k] and pass each tensor by its name"
    """
    if not _TEXT.fullmatch(text) or not ("->" in text or "," in text or re.fullmatch("[a-z]{1,3}", text)):
        return None
    if "..." in text:
        return "this is einsum's notation; name every dimension that '...' stands for, as in C[b,i] += A[b,i]"
    if "->" in text and ("(" in text or ")" in text):
        return "this is einops' notation; a statement does not reshape, so reshape the tensor with torch first"
    inputs, arrow, output = text.partition("->")
    terms = [term.strip() for term in inputs.split(",")]
    if len(terms) > len(TENSORS) or not all(map(_TERM.fullmatch, [*terms, output.strip()])):
        return None
    is_spaced = any(re.search(r"\s", term) for term in [*terms, output.strip()])
    read = str.split if is_spaced else list  # einops' indices are words, einsum's letters
    indices = [read(term) for term in terms]
    if arrow:
        left = read(output.strip())
    else:  # einsum's rule: what stands once, in alphabetical order
        counts = Counter(index for names in indices for index in names)
        left = sorted(index for index, count in counts.items() if count == 1)
    factors = " * ".join(map(_access, TENSORS, indices))
    whose = "einops'" if is_spaced else "einsum's"
    return f"this is {whose} notation; write {_access('C', left)} += {factors} and pass each tensor by its name"


def _access(tensor: str, indices: list[str]) -> str:
    return f"{tensor}[{','.join(indices) or '()'}]"
