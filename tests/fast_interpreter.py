"""Triton's interpreter without what it does again and again; kernels compute the same.

`make test-interpreter` spends most of its time there. Every launch, and every call of a function of the language, looks
through all names of the language for those to be replaced, and every conversion of a dtype builds the table that it
looks in. Every value has a type and a shape of its own, whose sizes are wrapped, unwrapped and checked anew, also where
two operands have the same ones. Each kernel's file is read token by token to find where the kernel ends. All of this is
looked up or made once here.
"""

from __future__ import annotations

import ast
import inspect
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


def _broadcast_of(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not (left.is_block() and right.is_block()):
            return original(self, lhs, rhs) if left.is_block() or right.is_block() else (lhs, rhs)
        shapes = left.shape.values, right.shape.values
        if shapes[0] == shapes[1]:
            return lhs, rhs
        shape = [b if a == 1 else a for a, b in zip(*shapes)]
        if len(shapes[0]) != len(shapes[1]) or any([b not in (1, n) for b, n in zip(shapes[1], shape)]):
            return original(self, lhs, rhs)
        return tuple([value if own == shape else widened(self, value, shape) for value, own in zip((lhs, rhs), shapes)])

    def widened(self: Any, value: Any, shape: list[int]) -> Any:
        made = tl.block_type(value.type.scalar, shape)
        return self.tensor(self.builder.create_broadcast(value.handle, shape), made)

    return broadcast


@cache
def _functions(text: str) -> dict[int, ast.FunctionDef]:
    """The functions of a file by the line in which each begins, the first of its decorators if it has some."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {min([node.lineno, *[own.lineno for own in node.decorator_list]]): node for node in functions}


def _rewrite_ast(self: Any) -> Any:
    """In the place of a method of Triton's, which reads a function's lines again and counts them anew."""
    try:
        lines, start = inspect.findsource(self.fn)
    except OSError:
        return self.fn
    function = _functions("".join(lines))[start + 1]
    function.decorator_list = []
    self.filename = self.fn.__code__.co_filename
    changed = self.ast_transformer.visit(ast.Module([function], []))
    return self._compile_and_exec(ast.fix_missing_locations(changed))


def install() -> None:
    """In this process; overflow checks of every index, two thirds of the interpreter's time, are left out too."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang_of(interpreter._patch_lang)
    interpreter._get_np_dtype = _get_np_dtype
    tl.block_type.__init__ = _block_type_init_of(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor_init_of(tl.tensor.__init__)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _broadcast_of(semantic.broadcast_impl_value)
    interpreter.FunctionRewriter.rewrite_ast = _rewrite_ast
