"""Text -> `Statement`, with Python's `ast`. The only file that looks at characters."""

from __future__ import annotations

import ast
import keyword
import math
import re
import sys
from dataclasses import replace
from functools import lru_cache

from .errors import ParseError
from .ir import Access, Const, Index, Number, Statement, Var
from .other_notations import other_notation

__all__ = ["parse"]

LONGEST = 10_000  # characters: what is longer is no statement, and could exhaust the stack of Python's parser
DEEPEST = 100  # brackets inside brackets
EXACT = 2**53  # below it an integer is a float too

_LANGUAGE = "a statement reads C[i,...] += A[i,...] * B[...]"
_INDEX = "an index is a name, an integer or an access such as AK[p,q]"
_PARENTHESES = "parentheses are not in the language (a full reduction is written C[()])"
_COMMA = "commas stand between indices only; factors are joined by '*'"
_REDUCTIONS = ("max", "min")
_PRODUCTS = "factors are joined by '*' alone"
_OPERATIONS: dict[type[ast.operator], str] = {
    ast.Add: "for a sum, pass the first result to a second call, whose += adds to it",
    ast.Sub: "for a difference, pass the first result to a second call, with += and a factor of -1",
    ast.Div: "for a quotient, pass the reciprocals of the divisor",
    ast.Pow: "for a power, write the factor several times",
    ast.MatMult: "the indices say what is summed over",
}
_FUNCTIONS = {
    "sum": "a product alone is summed over indices that the output lacks",
    "mean": "for a mean, sum with one over the number of terms as a factor",
}
_TOKEN = re.compile(r"[^\W\d]\w*|\.?\d[\w.]*(?:(?<=[eE])[+-]\d+)?|\+=|\S")
_SIGNS = frozenset("[],*=()-") | {"+="}


def parse(text: str) -> Statement:
    """Return the statement that `text` spells; raise ParseError if it spells none.

    >>> print(parse("C[AM[p],n]+=AV[p,q]*B[AK[p,q],n]"))
    C[AM[p],n] += AV[p,q] * B[AK[p,q],n]
    """
    if not isinstance(text, str):
        raise _not_text(text)
    return _parse(text)


def _not_text(value: object) -> ParseError:
    """Return the error for an expression that is not a string, such as a layer that was passed for its statement."""
    expr = getattr(value, "EXPR", None)
    remedy = _LANGUAGE if expr is None else f"pass its EXPR, which is {expr}"
    return ParseError(f"the expression is of type {type(value).__name__}, not a string; {remedy}")


@lru_cache(maxsize=1024)
def _parse(text: str) -> Statement:
    text = text.strip()
    if not text:
        raise ParseError(f"the expression is empty; {_LANGUAGE}")
    if len(text.splitlines()) > 1:
        raise ParseError("the expression spans several lines; write one statement on one line")
    if len(text) > LONGEST:
        raise ParseError(f"the expression has {len(text)} characters; at most {LONGEST} are read")
    return _Parser(text).statement()


class _Parser:
    """Walks Python's tree of one line, refusing every node that is not in the language."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_TOKEN.finditer(text))

    def statement(self) -> Statement:
        """Return the statement; raise the ParseError of the first part that is not in the language."""
        self.refuse_depth()
        notation_problem = other_notation(self.text)
        if notation_problem is not None:
            raise self.error(notation_problem, 0)
        self.refuse_keywords()
        try:
            body = ast.parse(self.text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.diagnose(error) from None
        if len(body) != 1:
            if body:
                problem = "expected one statement; a call evaluates one, and the next call takes its result by name"
                raise self.error(problem, self.column(body[1]))
            raise self.error(f"expected one statement; {_LANGUAGE}", 0)
        node = body[0]
        if isinstance(node, ast.AugAssign):
            if not isinstance(node.op, ast.Add):
                at = self.sign_after(node.target)
                left, right = self.text[:at].rstrip(), self.text[at + 2 :].lstrip()
                remedy = f"; to subtract, write {left} += -1 * {right}" * isinstance(node.op, ast.Sub)
                raise self.error(f"only '=' and '+=' assign{remedy}", at)
            target: ast.expr = node.target
            op = "+="
        elif isinstance(node, ast.Assign):
            if len(node.targets) != 1:
                raise self.error("one output per statement", self.column(node.targets[1]))
            target, op = node.targets[0], "="
        else:
            raise self.error(f"not an assignment; {_LANGUAGE}", 0)
        if isinstance(target, ast.Tuple) and len(target.elts) > 1:
            raise self.error("one output per statement", self.column(target.elts[1]))
        if not isinstance(target, ast.Subscript):
            raise self.error(
                "the output needs its indices, such as C[i,j] (a full reduction is written C[()])",
                self.column(target),
            )
        product, reduction = self.reduction(node.value)
        if reduction != "sum" and op == "+=":
            raise self.error(f"{reduction} has no sum to start from; write =", self.sign_after(target))
        statement = Statement(self.access(target), self.factors(product), op, reduction, self.text)
        self.refuse_ghosts()
        return statement

    def reduction(self, node: ast.expr) -> tuple[ast.expr, str]:
        """Return the product inside `max( )` or `min( )` and that name; any other right side comes back with "sum"."""
        name = _called(node)
        if not isinstance(node, ast.Call) or name is None:
            return node, "sum"
        if len(node.args) > 1:
            at, bound = self.sign_after(node.args[0]), self.number(node.args[1])
            opposite = {"max": "min", "min": "max"}[name]
            remedy = (
                f"torch.{name}imum compares two tensors"
                if bound is None
                else f"torch.clamp(..., {opposite}={bound}) bounds the result"
            )
            problem = f"{name} is taken of one product, over the indices that the output lacks"
            raise self.error(f"{problem}; {remedy}", at)
        if len(node.args) != 1 or node.keywords:
            raise self.error(f"{name} stands around the factors, such as {name}(A[i,k] * B[k])", self.column(node))
        return node.args[0], name

    def factors(self, node: ast.expr) -> tuple[Access | Number, ...]:
        factors: list[Access | Number] = []
        while isinstance(node, ast.BinOp):  # a * b * c is (a * b) * c
            if not isinstance(node.op, ast.Mult):
                remedy = _OPERATIONS.get(type(node.op))
                problem = _PRODUCTS if remedy is None else f"{_PRODUCTS}; {remedy}"
                raise self.error(problem, self.sign_after(node.left))
            factors.insert(0, self.factor(node.right))
            node = node.left
        return self.representable((self.factor(node), *factors))

    def factor(self, node: ast.expr) -> Access | Number:
        if isinstance(node, ast.Subscript):
            return self.access(node)
        number = self.number(node)
        if number is not None:
            return Number(number, self.column(node))
        if isinstance(node, ast.Name):
            raise self.error(
                f"'{node.id}' needs indices, such as {node.id}[i]; a scalar tensor is {node.id}[()], "
                "and a number stands in the text itself",
                self.column(node),
            )
        if isinstance(node, ast.UnaryOp):
            raise self.error("only a number has a sign; multiply by -1 instead", self.column(node))
        if isinstance(node, ast.BinOp):
            raise self.error(_PARENTHESES, self.column(node) - 1)
        if isinstance(node, ast.Tuple):
            raise self.error(_COMMA, self.sign_after(node.elts[0]) if node.elts else self.column(node))
        name = _called(node)
        if name is not None:
            problem = f"{name} stands once, around all factors, such as C[i] = {name}(2 * A[i,k])"
            raise self.error(problem, self.column(node))
        if isinstance(node, ast.Call):
            raise self.error(_call_problem(node), self.column(node))
        raise self.error("a factor is an access such as A[i,j] or a real number", self.column(node))

    def access(self, node: ast.Subscript) -> Access:
        if not isinstance(node.value, ast.Name):
            raise self.error(_indexed_problem(node), self.column(node.value))
        name, inside = node.value.id, node.slice
        items = inside.elts if isinstance(inside, ast.Tuple) else [inside]
        return Access(name, tuple(self.index(item) for item in items), self.column(node))

    def index(self, node: ast.expr) -> Index:
        if isinstance(node, ast.Name):
            return Var(node.id, self.column(node))
        if isinstance(node, ast.Subscript):
            return self.access(node)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Const(node.value, self.column(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            raise self.error(
                "a constant index counts from the start, 0 or larger; the last one is the size minus 1",
                self.column(node),
            )
        if isinstance(node, ast.BinOp):
            raise self.error(
                "an index has no arithmetic; put the computed positions in an index tensor",
                self.sign_after(node.left),
            )
        if isinstance(node, ast.Slice):
            raise self.error(
                "an index is not a slice; name the index and it runs over the whole dimension",
                self.column(node),
            )
        if isinstance(node, ast.Constant) and node.value is ...:
            raise self.error("'...' is not in the language; name every dimension", self.column(node))
        raise self.error(_INDEX, self.column(node))

    def number(self, node: ast.expr) -> float | None:
        """Return the real number that the node spells, with its sign; None if it is not a number."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.number(node.operand) if isinstance(node.operand, ast.Constant) else None
            return None if value is None else -value
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value  # type: ignore[return-value]
        return None

    def representable(self, factors: tuple[Access | Number, ...]) -> tuple[Access | Number, ...]:
        """Return the factors, with their numbers as floats if the product of the integers is too large for torch.

        Raises ParseError if the product is too large for a float as well.
        """
        product: float = 1
        for factor in factors:
            if isinstance(factor, Number):
                product = product * factor.value if abs(factor.value) <= sys.float_info.max else math.inf
                if not abs(product) <= sys.float_info.max:
                    raise self.error("the product of the numbers is too large for a float", factor.at)
        if abs(product) < EXACT:
            return factors
        return tuple(
            replace(factor, value=float(factor.value)) if isinstance(factor, Number) else factor for factor in factors
        )

    def refuse_depth(self) -> None:
        depth = 0
        for token in self.tokens:
            depth += {"[": 1, "]": -1}.get(token[0], 0)
            if depth > DEEPEST:
                raise self.error(f"brackets are nested more than {DEEPEST} deep", token.start())

    def refuse_keywords(self) -> None:
        for token in self.tokens:
            if keyword.iskeyword(token[0]):
                raise self.error(f"'{token[0]}' is a Python keyword, not a name; call it something else", token.start())

    def refuse_ghosts(self) -> None:
        """Refuse what Python's tree does not keep: comments, trailing commas, semicolons and needless parentheses."""
        for before, token in zip([None, *self.tokens], self.tokens):
            if token[0] in "#;\\":
                raise self.error(f"{token[0]!r} is not in the language; {_LANGUAGE}", token.start())
            if token[0] == "]" and before is not None and before[0] == ",":
                raise self.error("a comma with no index after it", before.start())
            if token[0] == ")" and before is not None and before[0] == ",":
                raise self.error(_COMMA, before.start())
            if token[0] == "(" and not self.is_unit(token) and not self.opens_reduction(token):
                raise self.error(_PARENTHESES, token.start())

    def is_unit(self, token: re.Match[str]) -> bool:
        """Return True if `token` opens the `()` of `C[()]`."""
        before, after = self.text[: token.start()].rstrip(), self.text[token.end() :]
        return before.endswith("[") and re.match(r"\s*\)\s*\]", after) is not None

    def opens_reduction(self, token: re.Match[str]) -> bool:
        """Return True if `token` opens the `max(` or `min(` that follows the assignment."""
        before = [earlier[0] for earlier in self.tokens[: self.tokens.index(token)]]
        *_, assignment, name = [None, None, *before]
        return name in _REDUCTIONS and assignment in ("=", "+=")

    def diagnose(self, error: Exception) -> ParseError:
        """Return the error, in the language's own terms, of a line that Python's parser refused with `error`."""
        if isinstance(error, (RecursionError, MemoryError)):
            return ParseError("the expression has too many operators in a row to be read")
        opened: list[str] = []
        before, is_assigned = "", False
        reduction = ""  # the `max(` that is not closed yet
        for token in self.tokens:
            sign, at = token[0], token.start()
            is_closing = sign == ")" and bool(reduction) and before != "("
            problem = None if is_closing else self.problem(before, token, opened)
            if problem is not None:
                return self.error(problem, at)
            if (sign in ("*", "+=", "=") or is_closing) and opened:
                return self.error(f"expected ']' to close {opened[-1]}", len(self.text[:at].rstrip()))
            if sign in ("+=", "="):
                if is_assigned:
                    return self.error("one assignment per statement", at)
                is_assigned = True
            if sign == "[":
                opened.append(f"{before}[")
            elif sign == "]":
                opened.pop()
            elif sign == "(" and self.opens_reduction(token):
                reduction = f"{before}("
            elif is_closing:
                reduction = ""
            before = sign
        end = len(self.text)
        if opened:
            return self.error(f"expected ']' to close {opened[-1]}", end)
        if reduction and before != "*":
            return self.error(f"expected ')' to close {reduction}", end)
        if before in ("*", "+=", "="):
            return self.error(f"nothing follows '{before}'; {_LANGUAGE}", end)
        at = (getattr(error, "offset", None) or 1) - 1
        return self.error(f"not in the language; {_LANGUAGE}", min(at, end))

    def problem(self, before: str, token: re.Match[str], opened: list[str]) -> str | None:
        """Return what is wrong with a token that follows the token `before`, None if the two show nothing wrong."""
        sign = token[0]
        if re.match(r"\.?\d", sign):
            return _number_problem(sign) or _adjacent(before, sign)
        if sign.isidentifier():
            return _adjacent(before, sign)
        if sign == ">" and before == "-":
            product, _, output = self.text.partition("->")
            return f"the output stands on the left, as in {output.strip()} += {product.strip()}"
        if sign not in _SIGNS:
            return f"{sign!r} is not in the language; {_LANGUAGE}"
        if sign == "[":
            return None if before.isidentifier() else _INDEX if opened else "only a tensor's name can be indexed"
        if sign == "," and not opened:
            return _COMMA
        if sign == "]" and not opened:
            return "']' closes nothing"
        if sign == "]" and before == "[":
            return "empty brackets; a full reduction is written C[()]"
        is_opening = sign == "(" and not self.is_unit(token) and not self.opens_reduction(token)
        if is_opening and before.isidentifier() and before not in _REDUCTIONS:
            inside, closed, _ = self.text[token.end() :].partition(")")
            return _brackets(f"{before}[{inside}]") if closed else _brackets(f"{before}[i]")
        if is_opening or (sign == ")" and before != "("):
            return _PARENTHESES
        if sign in ("]", ",", "*", "+=", "=") and before in ("", "[", ",", "*", "+=", "=", "-"):
            return f"'{sign}' has nothing before it" if not before else f"'{sign}' can't follow '{before}'"
        return None

    def sign_after(self, node: ast.expr) -> int:
        """Return the column of the operator that follows `node`."""
        start = self.characters(node.end_col_offset or 0)
        return start + len(self.text[start:]) - len(self.text[start:].lstrip(" )"))

    def column(self, node: ast.expr | ast.stmt) -> int:
        return self.characters(node.col_offset)

    def characters(self, offset: int) -> int:
        """Return the column of a byte offset: `ast` counts UTF-8 bytes, and a caret stands under a character."""
        return len(self.text.encode()[:offset].decode(errors="ignore"))

    def error(self, problem: str, at: int) -> ParseError:
        return ParseError(problem, self.text, at)


def _called(node: ast.expr) -> str | None:
    """Return "max" or "min" if the node calls that function, None otherwise."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REDUCTIONS
    return node.func.id if is_call else None  # type: ignore[attr-defined]


def _call_problem(node: ast.Call) -> str:
    """Return what is wrong with a call that stands as a factor: parentheses for brackets, or a function."""
    function = ast.unparse(node.func)
    if node.args and all(isinstance(argument, ast.Name) for argument in node.args):
        return _brackets(f"{function}[{','.join(map(ast.unparse, node.args))}]")
    remedy = _FUNCTIONS.get(function, f"call {function} on a tensor before or on the result after")
    return f"max and min are the only functions; {remedy}"


def _indexed_problem(node: ast.Subscript) -> str:
    """Return what is wrong with an access to something other than a name, mostly one bracket for each index."""
    indices: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Subscript):
        items = inner.slice.elts if isinstance(inner.slice, ast.Tuple) else [inner.slice]
        indices[:0] = map(ast.unparse, items)
        inner = inner.value
    if isinstance(inner, ast.Name) and isinstance(node.value, ast.Subscript):
        return f"all indices of a tensor stand in one pair of brackets, as in {inner.id}[{','.join(indices)}]"
    return "only a tensor's name can be indexed"


def _brackets(access: str) -> str:
    return f"indices stand in square brackets, as in {access}"


def _number_problem(digits: str) -> str | None:
    """Return why `digits` can't be a factor, None if it can."""
    try:
        value = int(digits, 0) if digits[:2].lower() in ("0b", "0o", "0x") else float(digits)
    except ValueError:
        return f"'{digits}' is not a number"
    return None if math.isfinite(value) else "the number is too large for a float"


def _adjacent(before: str, word: str) -> str | None:
    """Return what is wrong if `word`, a name or a number, follows a complete operand; None if it does not."""
    if before == "]":
        return f"'{word}' can't follow ']'; factors are joined by '*'"
    return f"'{word}' can't follow '{before}'" if before[:1].isalnum() or before.isidentifier() else None
