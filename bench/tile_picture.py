"""A schedule as two drawings: what each index is to a program, and the tile of the output that one program makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, prod

from insum_ops.compiler.codegen import Config
from insum_ops.compiler.planning import Schedule

__all__ = ["ROLES", "programs", "roles_picture", "tile_picture"]

# what a role means, in words that stand beside the name of an index
ROLES = {
    "grid": "one value to a program",
    "tile": "a block of values to a program",
    "step": "a loop over blocks, inside the program",
    "loop": "a loop over single values, inside the program",
    "segment": "a loop over the groups of the program's rows",
    "merged": "side by side with another on one axis",
    "unrolled": "written out in the source",
}
WIDTH = 336  # pixels: what a narrow phone has
MOST_CELLS = 12  # that are drawn of an index


def programs(schedule: Schedule, config: Config) -> int:
    """How many programs are launched.

    Each takes one value of a grid index and a block of a tile index; sums that are shared have several programs, and
    rows in turn have fewer.
    """
    taken = [_count(schedule, config, name) for name in schedule.names("grid", "tile")]
    return ceil(prod(taken) * config.parts / config.rows)


def _count(schedule: Schedule, config: Config, name: str) -> int:
    return ceil(schedule.extents[name] / _block(config, name))


def _block(config: Config, name: str) -> int:
    return dict(config.blocks).get(name, 1)


def roles_picture(schedule: Schedule, config: Config) -> str:
    """A lane for each index: its extent cut into what one program, or one turn of a loop, takes."""
    parts, y = [], 4
    for name, role in schedule.roles.items():
        parts += _lane(schedule, config, name, role, y)
        y += 58
    title = "Role of each index: " + ", ".join(f"{name} is {role}" for name, role in schedule.roles.items())
    return _svg(WIDTH, y, title, parts)


def _lane(schedule: Schedule, config: Config, name: str, role: str, y: int) -> Iterator[str]:
    block, extent = _block(config, name), schedule.extents[name]
    cells = max(1, ceil(extent / block))
    drawn = min(cells, MOST_CELLS)
    is_inside = role not in ("grid", "tile")
    taken = range(drawn) if is_inside else range(min(drawn, 3) - 1, min(drawn, 3))
    if role == "segment":  # of which a program has those of its rows
        taken = range(min(2, drawn - 1), min(5, drawn))
    size = f"{extent:,} in blocks of {block:,}" if block > 1 and role in ("tile", "step") else f"{extent:,}"
    yield f'<text x="0" y="{y + 12}" class="index role-{role}">{escape(name)}</text>'
    yield f'<text x="34" y="{y + 12}"><tspan class="role-{role}">{role}</tspan>, {size}</text>'
    wide = (WIDTH - 34 - 6) / drawn
    for at in range(drawn):
        is_cut = drawn < cells and at == drawn - 2
        if is_cut:  # what is left out
            x = 34 + at * wide + wide / 2
            yield f'<text x="{x:.1f}" y="{y + 32}" text-anchor="middle" class="soft">...</text>'
            continue
        kind = f"on role-{role}" if at in taken else "off"
        yield f'<rect x="{34 + at * wide:.1f}" y="{y + 20}" width="{wide - 2:.1f}" height="16" rx="2" class="{kind}"/>'
    if is_inside:
        start, x = 34 + taken[0] * wide, 34 + (taken[-1] + 1) * wide - 10
        yield f'<path d="M{start:.1f} {y + 44}H{x:.1f}" class="arrow role-{role}"/>'
        yield f'<path d="M{x:.1f} {y + 40}l8 4l-8 4z" class="head role-{role}"/>'


def tile_picture(schedule: Schedule, config: Config) -> str:
    """The output, or the products that are scattered into it, in tiles; beside one what a turn of the loop reads."""
    tiles = list(schedule.names("tile"))[-2:]
    rows, columns = tiles if len(tiles) == 2 else ("", tiles[0] if tiles else "")
    steps = [name for name in schedule.names("step") if _block(config, name) > 1]
    depth = steps[0] if steps else ""
    high, wide = (_cells(schedule, config, name) for name in (rows, columns))
    deep = 44 if depth else 0
    left, top, right, bottom = deep + 78, deep + 30, WIDTH - 8, deep + 30 + (40 if not rows else 150)
    cell_h, cell_w = (bottom - top) / high, (right - left) / wide
    at_row, at_col = min(1, high - 1), min(2, wide - 1)
    y, x = top + at_row * cell_h, left + at_col * cell_w
    output = schedule.output.name
    parts = [f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" class="off"/>']
    for row in range(high):
        for col in range(wide):
            place = f'x="{left + col * cell_w:.1f}" y="{top + row * cell_h:.1f}"'
            is_taken = (row, col) == (at_row, at_col)
            kind = "on role-tile" if is_taken else "line"
            parts.append(f'<rect {place} width="{cell_w:.1f}" height="{cell_h:.1f}" class="{kind}"/>')
    if depth:
        block = _block(config, depth)
        if rows:
            parts.append(f'<rect x="78" y="{y:.1f}" width="34" height="{cell_h:.1f}" class="on role-step"/>')
            parts.append(_text(95, y - 5, f"{depth} {block}", "role-step", "middle"))
        parts.append(f'<rect x="{x:.1f}" y="30" width="{cell_w:.1f}" height="34" class="on role-step"/>')
        parts.append(_text(x - 6, 51, f"{depth} {block}", "role-step", "end"))
    if rows:
        parts.append(_text(70, y + cell_h / 2 + 4, f"{rows} {_block(config, rows):,}", "role-tile", "end"))
    if columns:
        middle = min(max(x + cell_w / 2, 60), WIDTH - 40)
        parts.append(_text(middle, 20, f"{columns} {_block(config, columns):,}", "role-tile", "middle"))
    shape = [f"{schedule.extents[name]:,} {name}" for name in (rows, columns) if name]
    grid = schedule.names("grid")
    each = f", for each {', '.join(grid)}" if grid else ""
    where = [access.name for access in schedule.output.indirections]
    made = "products" if where else output
    parts.append(_text(right, bottom + 18, f"{made}: {' x '.join(shape)}{each}", "soft", "end"))
    if where:  # what is made is not where it goes
        bottom += 18
        parts.append(_text(right, bottom + 18, f"added to {output} where {', '.join(where)} says", "soft", "end"))
    words = " by ".join(f"{_block(config, name)} of {name}" for name in (rows, columns) if name)
    return _svg(WIDTH, bottom + 26, f"A program makes a tile of {made}: {words or 'one element'}", parts)


def _cells(schedule: Schedule, config: Config, name: str) -> int:
    """How many tiles are drawn along an axis: all of a few, five for many."""
    return min(_count(schedule, config, name), 5) if name else 1


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: float, title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" role="img"'
    return f'{head} aria-label="{escape(title)}">{"".join(parts)}</svg>'
