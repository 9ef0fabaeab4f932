"""Triton's interpreter without what it does again and again; kernels compute the same.

`make test-interpreter` spends most of its time there. Every launch, and every call of a function of the language, looks
through all names of the language for those to be replaced, and every conversion of a dtype builds the table that it
looks in. Every value has a type and a shape of its own, whose sizes are wrapped, unwrapped and checked anew, also where
two operands have the same ones. Two operands of an operation are converted and filled up to one shape, which numpy does
by itself; what type each gets depends on their types alone. Each kernel's file is read token by token to find where the
kernel ends. All of this is looked up or made once here.
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


def _interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language that needs no semantics from its caller."""
    function = getattr(member, "__wrapped__", member)  # which would look whether it was given them
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _patch_builtin(owner: Any, _: Any, scope: Any) -> None:
    for name in _builtin_names(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            scope.set_attr(owner, name, _interpreted(member))


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


def _unwrap_if_constexpr_of(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = frozenset({bool, int, float, str, type(None), tl.tensor, tl.dtype})

    def unwrap_if_constexpr(value: Any) -> Any:
        if value.__class__ is tl.constexpr:
            return value.value
        return value if value.__class__ in plain else original(value)

    return unwrap_if_constexpr


def _dtype_equals_of(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def equals(self: Any, other: Any) -> bool:
        return self is other or original(self, other)

    return equals


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
        shape = tuple(type.shape.values) if type.__class__ is tl.block_type else ()
        known = made.get(shape)
        if known is None:
            original(self, handle, type)
            made[shape] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known

    return init


def _operands_of(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Operands of one operation, with the types that they are converted to; those of less numbers numpy repeats itself.

    Types are kept for pairs of types of which neither needs another element type, constants for numbers beside a type.
    """
    types: dict[tuple[object, ...], tuple[Any, Any] | None] = {}
    constants: dict[tuple[object, ...], Any] = {}

    def widened(self: Any, value: Any, type: Any) -> Any:
        return value if value.type is type or value.type.name == type.name else self.tensor(value.handle, type)

    def operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        if named or lhs.__class__ is not tl.tensor:
            return original(self, lhs, rhs, *flags, **named)
        if rhs.__class__ is not tl.tensor:
            return beside_a_number(self, lhs, rhs, flags)
        key = lhs.type.name, rhs.type.name, flags
        if key not in types:
            found = original(self, lhs, rhs, *flags)
            is_kept = all([given.dtype.name == made.dtype.name for given, made in zip((lhs, rhs), found)])
            types[key] = (found[0].type, found[1].type) if is_kept else None
        known = types[key]
        if known is None:
            return original(self, lhs, rhs, *flags)
        return widened(self, lhs, known[0]), widened(self, rhs, known[1])

    def beside_a_number(self: Any, lhs: Any, number: Any, flags: tuple[Any, ...]) -> tuple[Any, Any]:
        if number.__class__ not in (bool, int, float) or (number.__class__ is float and number == 0):  # as -0 does
            return original(self, lhs, number, *flags)
        key = number, number.__class__, lhs.type.name, flags
        constant = constants.get(key)
        if constant is None:
            left, right = original(self, lhs, number, *flags)
            if left is not lhs:
                return left, right
            handle = interpreter.TensorHandle(right.handle.data.reshape(-1)[:1].copy(), right.handle.dtype)
            constant = constants[key] = self.tensor(handle, right.type)
        return lhs, constant

    return operands


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
    functions, waiting = list[ast.FunctionDef](), [ast.parse(text).body]
    for body in waiting:
        functions += [node for node in body if isinstance(node, ast.FunctionDef)]
        waiting += [node.body for node in body if isinstance(getattr(node, "body", None), list)]
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
    return self._compile_and_exec(self.ast_transformer.visit(ast.Module([function], [])))


def _visit_assign_of(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def visit_assign(self: Any, node: Any) -> Any:
        """The nodes that are new get the place of the old one, so that nobody has to look for them."""
        value, changed = node.value, original(self, node)
        for new in (changed.value, changed.value.func, changed.value.func.value, *changed.value.args[1:]):
            ast.copy_location(new, value)
        return changed

    return visit_assign


def install() -> None:
    """In this process; overflow checks of every index, two thirds of the interpreter's time, are left out too."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang_of(interpreter._patch_lang)
    interpreter._get_np_dtype = _get_np_dtype
    tl.core._unwrap_if_constexpr = _unwrap_if_constexpr_of(tl.core._unwrap_if_constexpr)
    tl.dtype.__eq__ = _dtype_equals_of(tl.dtype.__eq__)
    tl.block_type.__init__ = _block_type_init_of(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor_init_of(tl.tensor.__init__)
    semantic = type(interpreter.interpreter_semantic)
    semantic.binary_op_type_checking_impl = _operands_of(semantic.binary_op_type_checking_impl)
    semantic.broadcast_impl_value = _broadcast_of(semantic.broadcast_impl_value)
    interpreter.FunctionRewriter.rewrite_ast = _rewrite_ast
    transformer = interpreter.ASTTransformer
    transformer.visit_Assign = _visit_assign_of(transformer.visit_Assign)
