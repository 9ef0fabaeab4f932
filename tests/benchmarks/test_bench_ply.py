"""PLY files that are legal and seldom seen: other line ends, lists at vertices, vertices after other elements."""

from __future__ import annotations

import gzip
import re
import struct

import pytest

from bench.data import DataError, load_cloud

pytestmark = pytest.mark.cpu

XYZ = "property float x\nproperty float y\nproperty float z\n"
TWO = f"element vertex 2\n{XYZ}"
FACES = "element face 2\nproperty list uchar int vertex_indices\nproperty uchar flag\n"
CAMERA = "element camera 1\nproperty float a\nproperty double b\n"
LISTED = "element vertex 2\nproperty list uchar short before\nproperty float x\nproperty list int uchar between\n"
LISTED += "property float y\nproperty float z\n"
POINTS = [[1, 2, 3], [4, 5, 6.5]]
BINARY = {"<": "binary_little_endian", ">": "binary_big_endian"}


def header(form: str, elements: str, end: str = "\n") -> bytes:
    return f"ply\nformat {form} 1.0\n{elements}end_header\n".replace("\n", end).encode()


def read(path, content: bytes) -> list[list[float]]:
    path.write_bytes(content)
    return load_cloud(path).tolist()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=repr)
def test_lines_may_end_in_any_way(tmp_path, end):
    text = header("ascii", TWO, end) + f"1 2 3{end}4 5 6.5{end}".encode()
    assert read(tmp_path / "a.ply", text) == POINTS
    assert read(tmp_path / "A.PLY.GZ", gzip.compress(text, mtime=0)) == POINTS
    assert read(tmp_path / "a.ply", b"\xef\xbb\xbf" + text) == POINTS


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=repr)
def test_a_binary_body_may_begin_with_what_ends_a_line(tmp_path, end):
    integers = TWO.replace("float", "int")
    body = struct.pack("<6i", 10, 2, 3, 13, 5, 6)
    assert body[:1] == b"\n"
    assert read(tmp_path / "a.ply", header(BINARY["<"], integers, end) + body) == [[10, 2, 3], [13, 5, 6]]


@pytest.mark.parametrize("order", BINARY)
def test_lists_at_vertices_are_stepped_over(tmp_path, order):
    body = b"".join(
        struct.pack(f"{order}B{len(before)}hfi{len(between)}Bff", len(before), *before, x, len(between), *between, y, z)
        for (x, y, z), before, between in zip(POINTS, ([7, 8], []), ([], [9]))
    )
    assert read(tmp_path / "a.ply", header(BINARY[order], LISTED) + body) == POINTS
    text = b"2 7 8 1 0 2 3\n0 4 1 9 5 6.5\n"
    assert read(tmp_path / "a.ply", header("ascii", LISTED) + text) == POINTS


@pytest.mark.parametrize("order", BINARY)
def test_vertices_may_come_after_other_elements(tmp_path, order):
    body = struct.pack(f"{order}fd", 1, 2) + struct.pack(f"{order}B3iBBB", 3, 0, 1, 0, 9, 0, 9)
    body += b"".join(struct.pack(f"{order}3f", *point) for point in POINTS)
    assert read(tmp_path / "a.ply", header(BINARY[order], CAMERA + FACES + TWO) + body) == POINTS
    text = b"0.5 1.5\n3 0 1 0 9\n0 9\n1 2 3\n4 5 6.5\n"
    assert read(tmp_path / "a.ply", header("ascii", CAMERA + FACES + TWO) + text) == POINTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(BINARY["<"], FACES + TWO) + b"\x03", "a.ply announces 2 vertices and is cut short"),
        (header(BINARY["<"], LISTED) + b"\x03\x00", "a.ply announces 2 vertices and is cut short"),
        (header(BINARY["<"], LISTED) + struct.pack("<Bfi", 0, 1, 99), "a.ply announces 2 vertices and is cut short"),
        (header(BINARY["<"], LISTED) + struct.pack("<Bfi", 0, 1, -1), "a.ply has a list of -1 items"),
        (header("ascii", LISTED) + b"9 0 1 0 2 3\n0 4 0 5 6\n", "a.ply announces 2 vertices and is cut short"),
        (
            header("ascii", TWO.replace("float x", "list float int x")),
            "a.ply has a property list float int x; PLY names a type and it",
        ),
        (
            header("ascii", TWO.replace("float x", "list uchar int x")),
            "a.ply has vertices of x, y, z; x, y and z are needed, each once and a number",
        ),
        (header("ascii", "element face x\n" + TWO), "a.ply announces x of face; it must be a whole number"),
    ],
)
def test_what_is_damaged_is_refused(tmp_path, content, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        read(tmp_path / "a.ply", content)
