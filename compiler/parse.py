"""Text -> `Statement`, with Python's `ast`. The only file that looks at characters."""

from __future__ import annotations

import ast
import keyword
import re
from functools import lru_cache

from .errors import ParseError
from .ir import Access, Const, Index, Number, Statement, Var

__all__ = ["parse"]

_LANGUAGE = "a statement reads C[i,...] += A[i,...] * B[...]"
_TOKEN = re.compile(r"[^\W\d]\w*|\d[\w.]*|\.\d\w*|\+=|\S")


@lru_cache(maxsize=4096)
def parse(text: str) -> Statement:
    """The statement that `text` spells.

    >>> print(parse("C[AM[p],n]+=AV[p,q]*B[AK[p,q],n]"))
    C[AM[p],n] += AV[p,q] * B[AK[p,q],n]
    """
    if not isinstance(text, str):
        raise ParseError(f"the expression is a {type(text).__name__}, not a string; {_LANGUAGE}")
    if not text.strip():
        raise ParseError(f"the expression is empty; {_LANGUAGE}")
    if len(text.splitlines()) > 1:
        raise ParseError("the expression spans several lines; write one statement on one line")
    return _Parser(text).statement()


class _Parser:
    """Walks Python's tree of one line, refusing every node that is not in the language."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.source = text.lstrip()
        self.shift = len(text) - len(self.source)

    def statement(self) -> Statement:
        try:
            body = ast.parse(self.source).body
        except (SyntaxError, ValueError) as error:
            raise self.diagnose(error) from None
        self.refuse_keywords()
        if len(body) != 1:
            at = self.column(body[1]) if len(body) > 1 else 0
            raise self.error(f"expected one statement; {_LANGUAGE}", at)
        node = body[0]
        if isinstance(node, ast.AugAssign):
            if not isinstance(node.op, ast.Add):
                at = self.find("=", self.end(node.target)) - 1
                raise self.error("only '=' and '+=' assign; multiplying or subtracting into a tensor is not in the language", at)
            target, op = node.target, "+="
        elif isinstance(node, ast.Assign):
            if len(node.targets) != 1:
                raise self.error("one output per statement", self.column(node.targets[1]))
            target, op = node.targets[0], "="
        else:
            raise self.error(f"not an assignment; {_LANGUAGE}", self.column(node))
        if not isinstance(target, ast.Subscript):
            raise self.error(
                "the output needs its indices, such as C[i,j] (a full reduction is written C[()])", self.column(target)
            )
        statement = Statement(self.access(target), tuple(self.factors(node.value)), op, self.text)
        self.refuse_ghosts()
        return statement

    def factors(self, node: ast.expr) -> list[Access | Number]:
        if isinstance(node, ast.BinOp):
            if not isinstance(node.op, ast.Mult):
                raise self.error(
                    "factors are joined by '*' alone; sums, quotients and powers are separate statements",
                    self.operator(node),
                )
            return [*self.factors(node.left), *self.factors(node.right)]
        if isinstance(node, ast.Subscript):
            return [self.access(node)]
        number = self.number(node)
        if number is not None:
            return [Number(number, self.column(node))]
        if isinstance(node, ast.Name):
            raise self.error(f"'{node.id}' needs indices, such as {node.id}[i]; a scalar tensor is {node.id}[()]", self.column(node))
        raise self.error("a factor is an access such as A[i,j] or a number", self.column(node))

    def access(self, node: ast.Subscript) -> Access:
        if not isinstance(node.value, ast.Name):
            raise self.error("only a tensor's name can be indexed", self.column(node.value))
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
            raise self.error("a constant index counts from the start, 0 or larger", self.column(node))
        if isinstance(node, ast.BinOp):
            raise self.error("an index has no arithmetic; put the computed positions in an index tensor", self.operator(node))
        if isinstance(node, ast.Slice):
            raise self.error("an index is not a slice; name the index and it runs over the whole dimension", self.column(node))
        raise self.error("an index is a name, an integer or an access such as AK[p,q]", self.column(node))

    def number(self, node: ast.expr) -> float | None:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.number(node.operand) if isinstance(node.operand, ast.Constant) else None
            return None if value is None else -value
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value  # type: ignore[return-value]
        return None

    def refuse_keywords(self) -> None:
        for token in _TOKEN.finditer(self.source):
            if keyword.iskeyword(token[0]):
                raise self.keyword_error(token)

    def refuse_ghosts(self) -> None:
        """What Python's tree forgets: comments, trailing commas, semicolons and needless parentheses."""
        tokens = list(_TOKEN.finditer(self.source))
        for before, token in zip([None, *tokens], tokens):
            if token[0] in "#;\\":
                raise self.error(f"{token[0]!r} is not in the language", self.shift + token.start())
            if token[0] == "]" and before is not None and before[0] == ",":
                raise self.error("a comma with no index after it", self.shift + before.start())
            if token[0] == "(" and not self.is_unit(token.start()):
                raise self.error("parentheses are not in the language (a full reduction is written C[()])", self.shift + token.start())

    def is_unit(self, start: int) -> bool:
        return re.fullmatch(r".*\[\s*", self.source[:start]) is not None and re.match(r"\(\s*\)\s*\]", self.source[start:]) is not None

    def diagnose(self, error: SyntaxError | ValueError) -> ParseError:
        """Python could not read the line: say why in the language's own terms."""
        opened: list[tuple[str, int]] = []
        previous: re.Match[str] | None = None
        for token in _TOKEN.finditer(self.source):
            if keyword.iskeyword(token[0]):
                return self.keyword_error(token)
            if token[0] == "[":
                name = previous[0] if previous is not None and previous[0].isidentifier() else ""
                if previous is not None and previous[0] in ("[", ","):
                    return self.error("an index is a name, an integer or an access such as AK[p,q]", self.shift + token.start())
                opened.append((f"{name}[", token.start()))
            elif token[0] == "]":
                if previous is not None and previous[0] == "[":
                    return self.error("empty brackets; a full reduction is written C[()]", self.shift + token.start())
                if not opened:
                    return self.error("']' closes nothing", self.shift + token.start())
                opened.pop()
            elif token[0] in ("*", "+=", "=") and opened:
                break
            previous = token
        if opened:
            at = self.unclosed_at()
            return self.error(f"expected ']' to close {opened[-1][0]}", at)
        offset = getattr(error, "offset", None) or 1
        at = min(self.shift + self.characters(offset - 1, is_bytes=False), self.shift + len(self.source.rstrip()))
        return self.error(f"not in the language; {_LANGUAGE}", at)

    def unclosed_at(self) -> int:
        """Where the missing ']' belongs: before an operator met inside brackets, else at the end."""
        depth = 0
        for token in _TOKEN.finditer(self.source):
            depth += {"[": 1, "]": -1}.get(token[0], 0)
            if token[0] in ("*", "+=", "=") and depth > 0:
                return self.shift + len(self.source[: token.start()].rstrip())
        return self.shift + len(self.source.rstrip())

    def keyword_error(self, token: re.Match[str]) -> ParseError:
        return self.error(f"'{token[0]}' is a Python keyword, not a name; call it something else", self.shift + token.start())

    def operator(self, node: ast.BinOp) -> int:
        """Where a binary operator's sign stands."""
        start = self.end(node.left)
        return start + len(self.text[start:]) - len(self.text[start:].lstrip(" )"))

    def find(self, sign: str, start: int) -> int:
        return self.text.index(sign, start)

    def column(self, node: ast.AST) -> int:
        return self.shift + self.characters(getattr(node, "col_offset", 0))

    def end(self, node: ast.expr) -> int:
        return self.shift + self.characters(node.end_col_offset or 0)

    def characters(self, offset: int, is_bytes: bool = True) -> int:
        """`ast` counts UTF-8 bytes; people count characters."""
        return len(self.source.encode()[:offset].decode(errors="ignore")) if is_bytes else offset

    def error(self, problem: str, at: int) -> ParseError:
        return ParseError(problem, self.text, at)
