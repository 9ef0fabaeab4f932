"""Triton's interpreter without what it does again and again; kernels compute the same.

`make test-interpreter` spends most of its time there. Every launch, and every call of a function of the language, looks
through all names of the language for those to be replaced, and every conversion of a dtype builds the table that it
looks in. Every value has a type and a shape of its own, whose sizes are wrapped, unwrapped and checked anew. All of
this is looked up or made once here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

__all__ = ["install"]


@cache
def _builtin_names(owner: Any) -> tuple[str, ...]:
    """Asked for the first time before anything is replaced."""
    return tuple([name for name in dir(owner) if tl.core.is_builtin(getattr(owner, name, None))])


def _patch_builtin(owner: Any, *rest: Any) -> None:
    for name in _builtin_names(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, *rest)


def _patch_lang_of(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton replaces what its own functions use at each call of one of them, and for good."""
    is_replaced = False

    def patch_lang(function: Any) -> Any:
        nonlocal is_replaced
        if function.__module__ != tl.standard.__name__:
            return original(function)
        scope = interpreter._LangPatchScope() if is_replaced else original(function)
        is_replaced = True
        return scope

    return patch_lang


_scalar_dtype = cache(interpreter._get_np_dtype)


def _get_np_dtype(dtype: Any) -> Any:
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else _scalar_dtype(element)


def _block_type_init_of(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    made: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if not all([extent.__class__ is int for extent in shape]):
            return original(self, element_ty, shape)
        known = made.get(tuple(shape))
        if known is None:
            original(self, element_ty, shape)
            made[tuple(shape)] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty, (self.shape, self.numel, text) = element_ty, known
            self.name = f"<{text}, {element_ty}>"

    return init


def _tensor_init_of(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    made: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        known = made.get(shape)
        if known is None:
            original(self, handle, type)
            made[shape] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known

    return init


def install() -> None:
    """In this process; overflow checks of every index, two thirds of the interpreter's time, are left out too."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang_of(interpreter._patch_lang)
    interpreter._get_np_dtype = _get_np_dtype
    tl.block_type.__init__ = _block_type_init_of(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor_init_of(tl.tensor.__init__)
