"""Pictures of one matrix in each format, as SVG, drawn from the tensors that the format holds."""

from __future__ import annotations

from html import escape

import torch

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

MATRIX = torch.tensor(
    [
        [1.0, 2.0, 0.0, 0.0, 5.0, 0.0],
        [3.0, 4.0, 0.0, 0.0, 0.0, 6.0],
        [0.0, 0.0, 7.0, 8.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 9.0, 0.0, 0.0],
    ]
)
FORMATS = {
    "COO": lambda: COO.from_dense(MATRIX),
    "GroupCOO": lambda: GroupCOO.from_dense(MATRIX, group_size=2),
    "ELL": lambda: ELL.from_dense(MATRIX),
    "BlockCOO": lambda: BlockCOO.from_dense(MATRIX, block_size=(2, 2)),
    "BlockGroupCOO": lambda: BlockGroupCOO.from_dense(MATRIX, block_size=(2, 2), group_size=2),
}
CELL, GAP, TOP = 22, 26, 24


def picture(name: str) -> str:
    """The matrix and, to its right, the tensors AM, AK and AV of the format: a row for each p."""
    tensors = FORMATS[name]()
    block = tensors.block_size or (1, 1)
    parts, left, bottom = [_label(0, "A")], 0, TOP + CELL * len(MATRIX)
    for m, row in enumerate(MATRIX.tolist()):
        parts += [_cell(left + CELL * k, TOP + CELL * m, value) for k, value in enumerate(row)]
    left += CELL * MATRIX.shape[1] + GAP
    step = CELL * block[0] + (4 if block != (1, 1) else 0)
    for part in ("AM", "AK"):
        positions = getattr(tensors, part, None)
        if positions is None:
            continue
        grid = positions.reshape(len(positions), -1)
        parts.append(_label(left, part))
        for p, row in enumerate(grid.tolist()):
            parts += [_position(left + CELL * q, TOP + step * p, position) for q, position in enumerate(row)]
        left += CELL * grid.shape[1] + GAP
    values = tensors.AV.detach()
    values = values.reshape(len(values), -1, *block)
    absent = tensors.AK.reshape(len(values), -1) < 0
    parts.append(_label(left, "AV"))
    for p, q, i, j in torch.cartesian_prod(*map(torch.arange, values.shape)).tolist():
        x, y = left + (CELL * block[1] + (4 if block != (1, 1) else 0)) * q + CELL * j, TOP + step * p + CELL * i
        parts.append(_padding(x, y) if absent[p, q] else _cell(x, y, values[p, q, i, j].item()))
    right = left + (CELL * block[1] + 4) * values.shape[1]
    bottom = max(bottom, TOP + step * len(values))
    words = escape(f"A 4 x 6 matrix, and the tensors that {name} stores of it")
    return (
        f'<svg class="format" viewBox="-1 0 {right + 2} {bottom + 2}" width="{right + 2}" height="{bottom + 2}" '
        f'role="img" aria-label="{words}">{"".join(parts)}</svg>'
    )


def _label(x: int, name: str) -> str:
    return f'<text class="name" x="{x}" y="15">{name}</text>'


def _box(x: int, y: int, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>'


def _words(x: int, y: int, kind: str, words: str) -> str:
    return f'<text class="{kind}" x="{x + CELL // 2}" y="{y + 16}">{words}</text>'


def _cell(x: int, y: int, value: float) -> str:
    """A value on a filled ground; an empty box for a zero."""
    return _box(x, y, "entry") + _words(x, y, "value", f"{value:g}") if value else _box(x, y, "empty")


def _position(x: int, y: int, position: int) -> str:
    return _padding(x, y, "-1") if position < 0 else _box(x, y, "empty") + _words(x, y, "cell", str(position))


def _padding(x: int, y: int, words: str = "") -> str:
    return _box(x, y, "pad") + (_words(x, y, "cell", words) if words else "")
