"""The vertices of a PLY file, text or binary: any line ends, lists among properties, other elements before them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["PlyError", "vertices"]

TYPES = {
    **dict(char="i1", int8="i1", uchar="u1", uint8="u1", short="i2", int16="i2", ushort="u2", uint16="u2"),
    **dict(int="i4", int32="i4", uint="u4", uint32="u4", float="f4", float32="f4", double="f8", float64="f8"),
}
LETTERS = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "f4": "f", "f8": "d"}  # of struct
ORDER = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
AXES = ("x", "y", "z")


class PlyError(ValueError):
    """What is wrong with a file, to be said after its name."""


@dataclass(frozen=True)
class Property:
    name: str
    kind: str  # of a number, or of a list's items
    count: str = ""  # of a list's length; a number has none


@dataclass(frozen=True)
class Element:
    name: str
    count: int
    properties: tuple[Property, ...]

    @property
    def has_lists(self) -> bool:
        return any(own.count for own in self.properties)


def vertices(data: bytes) -> np.ndarray:
    """x, y and z of every vertex, [n, 3]."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    words, body = _split(data)
    formats = [" ".join(line[1:2]) for line in words if line[:1] == ["format"]]
    if len(formats) != 1 or formats[0] not in ORDER:
        raise PlyError(f"is in format {', '.join(formats) or 'none'}; PLY knows {', '.join(ORDER)}")
    before, vertex = _elements(words)
    try:
        if formats[0] == "ascii":
            return _from_text(body, before, vertex)
        return _from_bytes(body, ORDER[formats[0]], before, vertex)
    except (IndexError, struct.error):
        raise PlyError(f"announces {vertex.count} vertices and is cut short") from None


def _split(data: bytes) -> tuple[list[list[str]], bytes]:
    """The words of the header's lines, and what follows; a body may begin with what looks like a line's end."""
    first = re.match(rb"ply[ \t]*(\r?\n|\r)", data)
    last = rb"\rend_header[ \t]*\r" if first and first[1] == b"\r" else rb"\nend_header[ \t]*\r?\n"
    end = re.search(last, data)
    if first is None or end is None:
        raise PlyError("is no PLY file; it must begin with ply and have an end_header")
    return [line.split() for line in data[: end.start()].decode("ascii", "replace").splitlines()], data[end.end() :]


def _elements(words: Sequence[Sequence[str]]) -> tuple[list[Element], Element]:
    """The elements before the vertices, and the vertices."""
    at = [number for number, line in enumerate(words) if line[:1] == ["element"]]
    found: list[Element] = []
    for start, stop in zip(at, [*at[1:], len(words)]):
        name, count = " ".join(words[start][1:2]), " ".join(words[start][2:])
        if not count.isdecimal():
            what = "vertices" if name == "vertex" else f"of {name or 'an element without a name'}"
            raise PlyError(f"announces {count or 'no number of'} {what}; it must be a whole number")
        own = tuple(_property(line[1:]) for line in words[start:stop] if line[:1] == ["property"])
        element = Element(name, int(count), own)
        if name == "vertex":
            _check(element)
            return found, element
        found.append(element)
    raise PlyError("has no vertices; a cloud's are an element vertex")


def _property(words: Sequence[str]) -> Property:
    if len(words) == 2 and words[0] in TYPES:
        return Property(words[1], TYPES[words[0]])
    if len(words) == 4 and words[0] == "list" and words[2] in TYPES and TYPES.get(words[1], "f")[0] in "iu":
        return Property(words[3], TYPES[words[2]], TYPES[words[1]])
    raise PlyError(f"has a property {' '.join(words) or 'without a name'}; PLY names a type and it")


def _check(vertex: Element) -> None:
    names, numbers = [own.name for own in vertex.properties], {own.name for own in vertex.properties if not own.count}
    if not set(AXES) <= numbers or len(set(names)) < len(names):
        listed = ", ".join(names) or "nothing"
        raise PlyError(f"has vertices of {listed}; x, y and z are needed, each once and a number")


def _from_text(body: bytes, before: Sequence[Element], vertex: Element) -> np.ndarray:
    """One line for each of an element."""
    first = sum(element.count for element in before if element.properties)
    lines = [line.split() for line in body.decode("ascii", "replace").splitlines() if line.strip()]
    rows = lines[first : first + vertex.count]
    if len(rows) < vertex.count:
        raise PlyError(f"announces {vertex.count} vertices and is cut short")
    least = len(vertex.properties)
    fewest = min(map(len, rows), default=least)
    if fewest < least:
        raise PlyError(f"has a line of {fewest} numbers; a vertex has {least} properties")
    try:
        if vertex.has_lists:
            points = [[row[at] for at in _places(row, vertex)] for row in rows]
        else:
            places = [[own.name for own in vertex.properties].index(axis) for axis in AXES]
            points = [[row[at] for at in places] for row in rows]
        return np.array(points, dtype=np.float64).reshape(-1, 3)
    except ValueError as error:
        raise PlyError(f"holds something that is no number: {error}") from None


def _places(row: Sequence[str], vertex: Element) -> list[int]:
    """Where x, y and z are in a line: after as many words as the lists before them have."""
    at, places = 0, {}
    for own in vertex.properties:
        places[own.name] = at
        at += 1 + (_length(int(row[at])) if own.count else 0)
    return [places[axis] for axis in AXES]


def _length(count: int) -> int:
    if count < 0:
        raise PlyError(f"has a list of {count} items")
    return count


def _from_bytes(body: bytes, order: str, before: Sequence[Element], vertex: Element) -> np.ndarray:
    at = 0
    for element in before:
        at = _end(body, order, element, at)
    if vertex.has_lists:
        points = [[values[axis] for axis in AXES] for values, _ in _walk(body, order, vertex, at)]
        return np.array(points, dtype=np.float64).reshape(-1, 3)
    dtype = _record(order, vertex)
    if len(body) - at < vertex.count * dtype.itemsize:
        raise PlyError(f"announces {vertex.count} vertices and is cut short")
    records = np.frombuffer(body, dtype, vertex.count, at)
    return np.stack([records[axis] for axis in AXES], 1)


def _record(order: str, element: Element) -> np.dtype:
    return np.dtype([(own.name, order + own.kind) for own in element.properties])


def _end(body: bytes, order: str, element: Element, at: int) -> int:
    if not element.has_lists:
        size = struct.calcsize(order + "".join(LETTERS[own.kind] for own in element.properties))
        return at + element.count * size
    return max((end for _, end in _walk(body, order, element, at)), default=at)


def _walk(body: bytes, order: str, element: Element, at: int) -> Iterator[tuple[dict[str, float], int]]:
    """The numbers of one after another, by name, and where the next begins; lists are stepped over."""
    readers = [(own, struct.Struct(order + LETTERS[own.count or own.kind])) for own in element.properties]
    sizes = {own.name: np.dtype(own.kind).itemsize for own in element.properties}
    for _ in range(element.count):
        values: dict[str, float] = {}
        for own, reader in readers:
            (values[own.name],) = reader.unpack_from(body, at)
            at += reader.size
            if own.count:
                at += sizes[own.name] * _length(int(values[own.name]))
        if at > len(body):
            raise IndexError(at)
        yield values, at
