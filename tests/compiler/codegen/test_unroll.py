"""Statements over known tables: numbers in the source, one load for each position, and the same values as ever."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from problems import positions, problem, told_apart, values
from reference import LoopNest
from statements import DEVICE
from tolerances import assert_matches

from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.planning import rules
from insum_ops.compiler.tuning.problem import candidates
from insum_ops.formats import ELL
from insum_ops.formats.facts import ConstantTables
from insum_ops.functional import insum, insum_pinned

STORED = "Z[b,i,u] += CGV[i,r] * X[b,CGJ[i,r],u] * Y[b,CGK[i,r]]"
ADDED = "Z[DST[b],i,u] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]]"
SUMMED = "dY[b,k] += CGV[k,r] * X[b,CGJ[k,r],u] * dZ[b,CGI[k,r],u]"
NO_PADDING = Flags(padded=frozenset())


def tables(rows="i"):
    """Three rows: two entries, one and a place without any, none at all."""
    J, other = torch.tensor([[1, 0], [2, -1], [-1, -1]]), torch.tensor([[0, 1], [1, -1], [-1, -1]])
    V = torch.tensor([[0.5, -2.0], [1.5, 0.0], [0.0, 0.0]])
    return {"CGV": V, "CGJ": J, "CGK" if rows == "i" else "CGI": other}


def own_problem(expr=STORED, batch=1000, channels=64, fixed=None, flags=NO_PADDING, dtype=torch.float32):
    fixed = tables("k" if expr == SUMMED else "i") if fixed is None else fixed
    moving = {"X": values(batch, 3, channels, dtype=dtype)}
    if expr == SUMMED:
        moving["dZ"] = values(batch, 2, channels, dtype=dtype)
    else:
        moving["Y"] = values(batch, 2, dtype=dtype)
    moving |= {"SRC": positions(batch), "DST": positions(batch)} if expr == ADDED else {}
    meta = {name: values(*t.shape, dtype=dtype) if name == "CGV" else positions(*t.shape) for name, t in fixed.items()}
    size = (batch, 3) if expr == SUMMED else (batch, 3, channels)
    return problem(expr, {**moving, **meta}, size, ConstantTables.of(fixed), flags)


def unrolled(own):
    return [way for way in candidates(own) if way.schedule.tables]


def test_the_source_has_a_product_for_each_entry():
    own = own_problem()
    way = candidates(own)[0]
    source = own.launcher(way).kernel.source
    body = source[source.index("    pid = ") :]
    assert (
        body
        == """\
    pid = tl.program_id(0)
    i_b = pid
    i_u = tl.arange(0, 64)
    v_X_0 = tl.load(X_ptr + i_b * stride_X_0 + 1 * stride_X_1 + i_u)
    v_Y_1 = tl.load(Y_ptr + i_b * stride_Y_0)
    v_X_2 = tl.load(X_ptr + i_b * stride_X_0 + i_u)
    v_Y_3 = tl.load(Y_ptr + i_b * stride_Y_0 + 1)
    v_X_4 = tl.load(X_ptr + i_b * stride_X_0 + 2 * stride_X_1 + i_u)
    acc = v_X_0 * (v_Y_1 * 0.5)
    acc += v_X_2 * (v_Y_3 * -2.0)
    tl.store(ptr_of_output + i_b * stride__0 + i_u, acc)
    acc = v_X_4 * (v_Y_3 * 1.5)
    tl.store(ptr_of_output + i_b * stride__0 + 1 * stride__1 + i_u, acc)
    acc = tl.zeros((64,), tl.float32)
    tl.store(ptr_of_output + i_b * stride__0 + 2 * stride__1 + i_u, acc)
"""
    )
    assert str(way) == "store unrolled u=64 warps=2 stages=1"
    assert way.choices["unrolled"]


def test_the_schedule_says_so():
    way = candidates(own_problem())[0]
    assert str(way.schedule).splitlines() == [
        "scatter: store, product: multiply-add",
        "index         extent  role",
        "b               1000  grid",
        "u                 64  tile",
        "i                  3  unrolled",
        "r                  2  unrolled",
    ]
    assert way.schedule.covers_output


@pytest.mark.parametrize("expr", [STORED, ADDED, SUMMED], ids=["stored", "added", "summed"])
def test_everything_is_loaded_once_and_before_the_first_store(expr):
    own = own_problem(expr)
    for way in unrolled(own):
        source = own.launcher(way).kernel.source
        loads = re.findall(r"tl\.load\((.*)\)", source)
        assert len(loads) == len(set(loads))
        writes = [source.index(text) for text in ("tl.store", "tl.atomic_add") if text in source]
        assert source.rindex("tl.load") < min(writes)
        assert "CG" not in source[source.index("pid = ") :]


def test_a_sum_over_channels_is_one_number():
    own = own_problem(SUMMED, channels=48)
    (way, *_) = unrolled(own)
    source = own.launcher(way).kernel.source
    assert way.schedule.roles["u"] == "step"
    assert source.count("acc = tl.sum(acc, 0)") == 3
    assert "i_u < extent_u" in source


def test_few_warps_for_few_channels():
    assert [way.config.num_warps for way in unrolled(own_problem(channels=16))] == [1]
    assert [way.config.num_warps for way in unrolled(own_problem(channels=128))] == [4, 2, 1]
    blocks = [way.config.blocks for way in unrolled(own_problem(channels=1000))]
    assert set(blocks) == {(("u", 256),)}


def test_numbers_are_part_of_what_is_remembered():
    fixed = tables()
    other = {**fixed, "CGV": fixed["CGV"] * 2}
    one, two = own_problem(fixed=fixed), own_problem(fixed=other)
    assert one.key != two.key
    assert one.signature != two.signature
    assert own_problem(fixed=tables()).key == one.key


def left_problem(expr, size, extra=()):
    fixed = tables()
    meta = {
        name: values(*t.shape, dtype=torch.float32) if name == "CGV" else positions(*t.shape)
        for name, t in fixed.items()
    }
    given = {"X": values(1000, 3, 64, dtype=torch.float32), "Y": values(1000, 2, dtype=torch.float32), **dict(extra)}
    read = {name: tensor for name, tensor in {**given, **meta}.items() if f"{name}[" in expr}
    return problem(expr, read, size, ConstantTables.of(fixed), NO_PADDING)


LEFT = {
    "a largest": ("Z[b,i,u] = max(CGV[i,r] * X[b,CGJ[i,r],u] * Y[b,CGK[i,r]])", (1000, 3, 64), ()),
    "batches are summed": ("Z[i,u] += CGV[i,r] * X[b,CGJ[i,r],u] * Y[b,CGK[i,r]]", (3, 64), ()),
    "two are summed": (
        "Z[b,i] += CGV[i,r] * X[b,CGJ[i,r],u] * Y[b,CGK[i,r]] * Q[t]",
        (1000, 3),
        [("Q", values(64, dtype=torch.float32))],
    ),
    "a table is not read": ("Z[b,i,u] += CGV[i,r] * X[b,CGJ[i,r],u]", (1000, 3, 64), ()),
    "a table says where to": ("Z[b,CGK[i,r],u] += CGV[i,r] * X[b,CGJ[i,r],u]", (1000, 2, 64), ()),
}


@pytest.mark.parametrize("why", LEFT)
def test_other_statements_are_left_to_other_schedules(why):
    own = left_problem(*LEFT[why])
    assert candidates(own)
    assert not unrolled(own)


def test_without_the_fact_nothing_is_known():
    assert not unrolled(replace(own_problem(), fact=None))


def test_many_entries_and_wide_sums_are_left_too(monkeypatch):
    monkeypatch.setattr(rules, "MOST_ENTRIES", 2)
    assert not unrolled(own_problem())
    monkeypatch.setattr(rules, "MOST_ENTRIES", 3)
    assert unrolled(own_problem())
    monkeypatch.setattr(rules, "LARGEST_TILE", 32)
    assert not unrolled(own_problem(SUMMED))
    assert unrolled(own_problem(STORED))


MIXED = {
    "Z": ("Z[b,i,w] += CGV[i,r] * X[b,CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u,w]", "ju,k,luw->iw"),
    "X": ("X[b,j,u] += CGV[j,r] * Z[b,CGI[j,r],w] * Y[b,CGK[j,r]] * W[b,CGL[j,r],u,w]", "iw,k,luw->ju"),
    "Y": ("Y[b,k] += CGV[k,r] * Z[b,CGI[k,r],w] * X[b,CGJ[k,r],u] * W[b,CGL[k,r],u,w]", "iw,ju,luw->k"),
    "W": ("W[b,l,u,w] += CGV[l,r] * Z[b,CGI[l,r],w] * X[b,CGJ[l,r],u] * Y[b,CGK[l,r]]", "iw,ju,k->luw"),
}
COUNTS = {"Z": 3, "X": 2, "Y": 2, "W": 2}


def mixed_tables(made):
    """Six entries, two of them for one row and one path, and a row of Z that nothing leads to."""
    entries = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1], [2, 0, 1, 1], [2, 1, 1, 1], [0, 0, 1, 1]]).T
    numbers = torch.tensor([0.5, -2.0, 1.5, 3.0, -1.0, 0.25])
    form = ELL.from_coo(entries, numbers, tuple(COUNTS.values()), group_dim=0).regroup(list(COUNTS).index(made))
    places = {f"CG{letter}": at for letter, at in zip("IJKL", form.coords) if at is not None}
    return {"CGV": form.values, **places}


def mixed_shapes(batch, u, w):
    return {"Z": (batch, 3, w), "X": (batch, 2, u), "Y": (batch, 2), "W": (batch, 2, u, w)}


def mixed_problem(made, batch=1000, u=16, w=32):
    fixed, shapes = mixed_tables(made), mixed_shapes(batch, u, w)
    moving = {name: values(*size, dtype=torch.float32) for name, size in shapes.items() if name != made}
    meta = {
        name: values(*t.shape, dtype=torch.float32) if name == "CGV" else positions(*t.shape)
        for name, t in fixed.items()
    }
    return problem(MIXED[made][0], {**moving, **meta}, shapes[made], ConstantTables.of(fixed), NO_PADDING)


def test_tiles_are_loaded_once_and_summed_when_their_row_is_complete():
    own = mixed_problem("Z", u=16, w=16)
    way = candidates(own)[0]
    source = own.launcher(way).kernel.source
    body = source[source.index("    v_W") :]
    assert (
        body
        == """\
    v_W_2 = tl.load(W_ptr + i_b * stride_W_0 + i_u[:, None] * stride_W_2 + i_w[None, :])
    v_W_4 = tl.load(W_ptr + i_b * stride_W_0 + 1 * stride_W_1 + i_u[:, None] * stride_W_2 + i_w[None, :])
    acc_0 = v_W_2 * (v_X_0 * (v_Y_1 * 0.5) + v_X_5 * (v_Y_3 * -2.0))[:, None]
    acc_0 += v_W_4 * (v_X_0 * (v_Y_3 * 0.25) + v_X_5 * (v_Y_1 * 1.5))[:, None]
    row_6 = tl.sum(acc_0, 0)
    acc_2 = v_W_4 * (v_X_0 * (v_Y_3 * 3.0) + v_X_5 * (v_Y_3 * -1.0))[:, None]
    row_7 = tl.sum(acc_2, 0)
    acc = row_6
    tl.store(ptr_of_output + i_b * stride__0 + i_w, acc)
    acc = tl.zeros((16,), tl.float32)
    tl.store(ptr_of_output + i_b * stride__0 + 1 * stride__1 + i_w, acc)
    acc = row_7
    tl.store(ptr_of_output + i_b * stride__0 + 2 * stride__1 + i_w, acc)
"""
    )
    assert str(way) == "store unrolled u=16 w=16 warps=1 stages=4"


@pytest.mark.parametrize(
    ("made", "roles"),
    [
        ("Z", {"u": "step", "w": "tile"}),
        ("X", {"u": "tile", "w": "step"}),
        ("Y", {"u": "step", "w": "step"}),
        ("W", {"u": "tile", "w": "tile"}),
    ],
)
def test_channels_that_mix_are_two_axes(made, roles):
    own = mixed_problem(made)
    for way in candidates(own):  # no other way would do
        assert way.schedule.tables
        assert {name: way.schedule.roles[name] for name in "uw"} == roles
        source = own.launcher(way).kernel.source
        loads = re.findall(r"tl\.load\((.*)\)", source)
        assert len(loads) == len(set(loads))
        assert source.rindex("tl.load") < source.index("tl.store")


def test_one_channel_is_no_axis():
    for way in candidates(mixed_problem("Z", u=1, w=64)):
        assert dict(way.config.blocks)["u"] == 1


def test_a_line_of_positions_is_an_axis_and_anything_else_is_not():
    expr = "Z[b,ROW[i,u]] += CGV[i,r] * X[b,CGJ[i,r,u]]"
    fixed = {
        "CGV": torch.tensor([[1.0, 2.0], [3.0, 0.0]]),
        "ROW": torch.tensor([[0, 2, 4], [1, 3, 5]]),  # every place once
        "CGJ": torch.tensor([[[0, 1, 2], [5, 4, 3]], [[0, 2, 4], [-1, -1, -1]]]),
    }

    def ways(**changed):
        tables = {**fixed, **changed}
        meta = {
            name: values(*t.shape, dtype=torch.float32) if name == "CGV" else positions(*t.shape)
            for name, t in tables.items()
        }
        own = problem(
            expr, {"X": values(1000, 6, dtype=torch.float32), **meta}, (1000, 6), ConstantTables.of(tables), NO_PADDING
        )
        return own, candidates(own)

    own, found = ways()
    assert found[0].schedule.strategy == "store-once"
    source = own.launcher(found[0]).kernel.source
    assert "tl.load(X_ptr + i_b * (stride_X_0 // 2 * 2) + (5 + i_u * -1), mask=in_u_0, other=0.0)" in source
    assert source.count("tl.store") == 1  # of both rows, whose elements lie between each other
    assert "(i_u[:, None] * 2 + " in source
    bent = fixed["CGJ"].clone()
    bent[0, 0] = torch.tensor([0, 1, 5])
    assert not any(way.schedule.tables for way in ways(CGJ=bent)[1])
    twice = torch.tensor([[0, 2, 4], [1, 3, 4]])
    assert not any(way.schedule.tables or way.schedule.strategy == "store-once" for way in ways(ROW=twice)[1])


kernels = pytest.mark.kernels


def given_tensors(expr, dtype, channels=5):
    fixed = tables("k" if expr == SUMMED else "i")
    fixed = {name: table.to(DEVICE, dtype if name == "CGV" else torch.int32) for name, table in fixed.items()}
    draw = lambda *size: torch.randn(*size, dtype=torch.float64).to(dtype).to(DEVICE)
    moving = {"X": draw(4, 3, channels)}
    moving |= {"dZ": draw(4, 2, channels)} if expr == SUMMED else {"Y": draw(4, 2)}
    if expr == ADDED:
        moving["SRC"] = torch.tensor([0, 3, -1, 3], device=DEVICE)
        moving["DST"] = torch.tensor([1, 1, 0, -1], device=DEVICE)
    return fixed, moving, (4, 3) if expr == SUMMED else (4, 3, channels)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("expr", [STORED, ADDED, SUMMED], ids=["stored", "added", "summed"])
def test_values(expr, dtype, monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    fixed, moving, size = given_tensors(expr, dtype)
    fact = ConstantTables.of(fixed)
    memory = {}
    expected = one_by_one(expr, widened(moving, fixed), size)
    for _ in range(3):
        assert_matches(insum_pinned(memory, expr, fixed, size, fact, **moving), expected)


def widened(moving, fixed):
    both = {**moving, **fixed}.items()
    return {name: tensor.double().cpu() if tensor.is_floating_point() else tensor.cpu() for name, tensor in both}


def one_by_one(expr, wide, size):
    """Entry by entry, in plain loops."""
    total = torch.zeros(size, dtype=torch.float64)
    first = wide["CGV"]
    for row in range(first.shape[0]):
        for at in range(first.shape[1]):
            j = int(wide["CGJ"][row, at])
            if j < 0:
                continue
            for b in range(len(wide.get("Y", wide["X"]))):
                if expr == SUMMED:
                    other = wide["dZ"][b, int(wide["CGI"][row, at])]
                    total[b, row] += first[row, at] * (wide["X"][b, j] * other).sum()
                    continue
                source, place = (int(wide[name][b]) if name in wide else b for name in ("SRC", "DST"))
                if source >= 0 and place >= 0:
                    total[place, row] += first[row, at] * wide["X"][source, j] * wide["Y"][b, int(wide["CGK"][row, at])]
    return total


@kernels
@pytest.mark.sampled("u", "w")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("u", "w"), [(16, 5), (1, 7), (3, 1), (20, 40)])
@pytest.mark.parametrize("made", MIXED)
def test_values_of_channels_that_mix(made, u, w, dtype, monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    fixed = {name: t.to(DEVICE, dtype if name == "CGV" else torch.int32) for name, t in mixed_tables(made).items()}
    shapes = mixed_shapes(3, u, w)
    draw = lambda size: torch.randn(size, dtype=torch.float64).to(dtype).to(DEVICE)
    moving = {name: draw(size) for name, size in shapes.items() if name != made}
    expr, subscripts = MIXED[made]
    dense = torch.zeros(tuple(COUNTS.values()), dtype=torch.float64)
    dense[0, 0, 0, 0], dense[0, 1, 1, 0], dense[0, 1, 0, 1], dense[0, 0, 1, 1] = 0.5, -2, 1.5, 0.25
    dense[2, 0, 1, 1], dense[2, 1, 1, 1] = 3, -1
    operands, out = subscripts.split("->")
    batched = ",".join(f"b{own}" for own in operands.split(","))
    expected = torch.einsum(f"ijkl,{batched}->b{out}", dense, *[tensor.double().cpu() for tensor in moving.values()])
    memory, fact = {}, ConstantTables.of(fixed)
    for _ in range(2):
        assert_matches(insum_pinned(memory, expr, fixed, shapes[made], fact, **moving), expected)
    start = draw(shapes[made])
    found = insum_pinned(memory, expr, fixed, shapes[made], fact, **moving, **{made: start})
    assert_matches(found, start.double().cpu() + expected)


@kernels
@pytest.mark.parametrize("made", ["Z", "X", "Y"])
def test_values_of_sums_in_turns(made):
    """The summed channels, 24 or 20, are walked in blocks that are shorter, some of which are not full."""
    shapes = mixed_shapes(3, 24, 20)
    fixed = {name: t.to(DEVICE) for name, t in mixed_tables(made).items()}
    moving = {name: torch.randn(size).to(DEVICE) for name, size in shapes.items() if name != made}
    given = {**moving, **fixed}
    flags = Flags(padded=frozenset(), interpreted=DEVICE == "cpu")
    own = problem(MIXED[made][0], given, shapes[made], ConstantTables.of(fixed), flags)
    expected = LoopNest(MIXED[made][0], {name: t.cpu() for name, t in given.items()}, shapes[made]).result().value
    tried = [way for way in told_apart(unrolled(own)) if _takes_turns(way.schedule, way.config)]
    uneven = tried[0]
    blocks = tuple((name, 16 if name in uneven.schedule.names("step") else size) for name, size in uneven.config.blocks)
    for way in (*tried, replace(uneven, config=replace(uneven.config, blocks=blocks))):
        assert_matches(own.launcher(way)(list(given.values()), None), expected)


def _takes_turns(schedule, config):
    return any(config.block(name) < schedule.extents[name] for name in schedule.names("step"))


@pytest.mark.parametrize(("rows", "entries", "may_walk"), [(4, 4, True), (16, 25, False)])
def test_only_few_rows_and_entries_are_walked_in_turns(rows, entries, may_walk):
    """A thread has a tile for each row: with 16 and hundreds of entries it would spill, so a tile has all channels."""
    J = torch.randint(0, rows, (rows, entries), generator=torch.Generator().manual_seed(0))
    fixed = {"CGV": torch.ones(rows, entries), "CGJ": J, "CGK": J, "CGL": J}
    meta = {name: values(rows, entries) if name == "CGV" else positions(rows, entries) for name in fixed}
    moving = {"X": values(9, rows, 33), "Y": values(9, rows), "W": values(9, rows, 33, 33)}
    own = problem(MIXED["Z"][0], {**moving, **meta}, (9, rows, 33), ConstantTables.of(fixed), NO_PADDING)
    assert any(_takes_turns(way.schedule, way.config) for way in unrolled(own)) == may_walk


@kernels
def test_what_has_no_entry_hides_what_others_hold(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    fixed, moving, size = given_tensors(ADDED, torch.float32)
    moving["Y"][2:] = float("nan")  # of edges without a source, or without a target
    found = insum_pinned({}, ADDED, fixed, size, ConstantTables.of(fixed), **moving)
    assert found.isfinite().all()


@kernels
def test_it_starts_from_what_is_there(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    fixed, moving, size = given_tensors(STORED, torch.float32)
    start = torch.randn(size).to(DEVICE)
    wide = widened(moving, fixed)
    found = insum_pinned({}, STORED, fixed, size, ConstantTables.of(fixed), Z=start, **moving)
    assert_matches(found, start.double().cpu() + one_by_one(STORED, wide, size))
    assert_matches(insum(STORED, size=size, **moving, **fixed), one_by_one(STORED, wide, size))


V, J = torch.tensor([[0.5, -2.0], [1.5, 0.25]]), torch.tensor([[1, 0], [2, 1]])
ROW = torch.tensor([[0, 2, 4], [1, 3, 5]])
NEAR = {
    "rows met several times": ("Z[b,ROW[TILE[p]]] += X[b,p]", {"ROW": [2, 0, 1]}, {"TILE": [0, 1, 1, 2, 0]}, (4, 3)),
    "a column of rows": ("Z[b,ROW[i,0]] += CGV[i,r] * X[b,CGJ[i,r]]", {"CGV": V, "CGJ": J, "ROW": ROW}, {}, (4, 6)),
    "a diagonal of rows": (
        "Z[b,ROW[i,i]] += CGV[i,r] * X[b,CGJ[i,r]]",
        {"CGV": V, "CGJ": J, "ROW": [[0, 2], [1, 3]]},
        {},
        (4, 4),
    ),
    "a line that ends below 0": (
        "Z[b,i] += CGV[i,r] * X[b,CGJ[i,r,u]] * Q[b,u]",
        {"CGV": V, "CGJ": [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [1, 0, -1]]]},
        {},
        (4, 2),
    ),
    "a line that begins below 0": (
        "Z[b,i] += CGV[i,r] * X[b,CGJ[i,r,u]] * Q[b,u]",
        {"CGV": V, "CGJ": [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [-1, 0, 1]]]},
        {},
        (4, 2),
    ),
    "a line of one number": (
        "Z[b,i,u] += CGV[i,r] * X[b,CGJ[i,r,u]] * Q[b,u]",
        {"CGV": V, "CGJ": [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [4, 4, 4]]]},
        {},
        (4, 2, 3),
    ),
    "a line in a tile": (
        "Z[b,i,w] += CGV[i,r] * X[b,CGJ[i,r,u],w] * Q[b,u]",
        {"CGV": V, "CGJ": [[[0, 3, 6], [1, 4, 7]], [[2, 5, 8], [0, 1, 2]]]},
        {},
        (4, 2, 5),
    ),
    "rows in a tile": (
        "Z[b,ROW[i,u],w] += CGV[i,r] * X[b,CGJ[i,r],u,w]",
        {"CGV": V, "CGJ": J, "ROW": ROW},
        {},
        (4, 6, 5),
    ),
    "two factors with both axes": (
        "Z[b,i,w] += CGV[i,r] * X[b,CGJ[i,r],u,w] * S[b,u,w]",
        {"CGV": V, "CGJ": J},
        {},
        (4, 2, 5),
    ),
    "two factors with both axes, at positions": (
        "Z[b,i] += CGV[i,r] * X[b,CGJ[i,r],u,w] * T[b,CGK[i,r],u,w]",
        {"CGV": V, "CGJ": J, "CGK": [[1, 1], [0, 1]]},
        {},
        (4, 2),
    ),
    "positions that are not known": (
        "Z[b,i,u] += CGV[i,r] * X[b,CGJ[i,r],P[i],u]",
        {"CGV": V, "CGJ": J},
        {"P": [1, 0]},
        (4, 2, 5),
    ),
    "positions of known ones": (
        "Z[b,i,u] += CGV[i,r] * X[b,P[CGJ[i,r]],u]",
        {"CGV": V, "CGJ": J},
        {"P": [1, 2, 0]},
        (4, 2, 5),
    ),
    "rows that are not known": (
        "Z[b,P[i],u] += CGV[i,r] * X[b,CGJ[i,r],u]",
        {"CGV": V, "CGJ": J},
        {"P": [1, 1]},
        (4, 2, 5),
    ),
    "known columns of known parts": (
        "Z[b,ROW[i,u]] += CGV[i,r] * X[b,COL[CGJ[i,r],u]]",
        {"CGV": V, "CGJ": [[1, -1], [2, 1]], "ROW": ROW, "COL": [[0, 3, 6], [1, 4, 7], [2, 5, 8]]},
        {},
        (4, 6),
    ),
    "columns of known parts that are no line": (
        "Z[b,ROW[i,u]] += CGV[i,r] * X[b,COL[CGJ[i,r],u]]",
        {"CGV": V, "CGJ": J, "ROW": ROW, "COL": [[0, 3, 6], [1, 4, 7], [2, 8, 5]]},
        {},
        (4, 6),
    ),
    "a row between others and rows that lie backwards": (
        "Z[b,ROW[i,u]] += CGV[i,r] * X[b,CGJ[i,r]]",
        {
            "CGV": [[0.5], [1.5], [0.25], [2.0], [3.0]],
            "CGJ": [[0], [1], [2], [0], [1]],
            "ROW": [[1, 4, 7], [0, 3, 6], [2, 5, 8], [11, 10, 9], [14, 13, 12]],
        },
        {},
        (4, 15),
    ),
    "no axis": ("Z[i] += CGV[i,r] * X[CGJ[i,r]]", {"CGV": V, "CGJ": J}, {}, (2,)),
    "nothing but a table": ("Z[i] += CGV[i,r]", {"CGV": V}, {}, (2,)),
    "a table over two axes": (
        "Z[b,i,w] += CGV[i,r] * X[b,CGJ[i,r,u,w]] * Q[b,u,w]",
        {"CGV": V, "CGJ": torch.arange(16).view(2, 2, 2, 2)},
        {},
        (4, 2, 2),
    ),
}
SIZES = {
    "X[b,p]": (4, 5),
    "X[b,CGJ[i,r]]": (4, 3),
    "X[b,COL[CGJ[i,r],u]]": (4, 9),
    "X[b,CGJ[i,r,u]]": (4, 9),
    "X[b,CGJ[i,r,u],w]": (4, 9, 5),
    "X[b,CGJ[i,r],u,w]": (4, 3, 3, 5),
    "X[b,CGJ[i,r],P[i],u]": (4, 3, 2, 5),
    "X[b,P[CGJ[i,r]],u]": (4, 3, 5),
    "X[b,CGJ[i,r],u]": (4, 3, 5),
    "X[CGJ[i,r]]": (3,),
    "X[b,CGJ[i,r,u,w]]": (4, 16),
    "Q[b,u]": (4, 3),
    "S[b,u,w]": (4, 3, 5),
    "T[b,CGK[i,r],u,w]": (4, 2, 3, 5),
    "Q[b,u,w]": (4, 2, 2),
}


@kernels
@pytest.mark.parametrize("why", NEAR)
def test_values_of_statements_that_are_near(why, monkeypatch):
    """Unrolled or left to other schedules."""
    monkeypatch.setenv("INSUM_TUNE", "off")
    expr, tables_of_it, moving, size = NEAR[why]
    fixed = {name: torch.as_tensor(table) for name, table in tables_of_it.items()}
    fixed = {name: t.to(DEVICE, torch.float32 if name == "CGV" else torch.int32) for name, t in fixed.items()}
    given = {name: torch.tensor(places, dtype=torch.int32, device=DEVICE) for name, places in moving.items()}
    factors = expr.split("= ")[1].split(" * ")
    given |= {factor[0]: torch.randn(SIZES[factor]).to(DEVICE) for factor in factors if factor in SIZES}
    expected = LoopNest(expr, {name: t.cpu() for name, t in {**given, **fixed}.items()}, size).result().value
    torch.use_deterministic_algorithms(True)  # which fills what was never written with nan
    try:
        found = insum_pinned({}, expr, fixed, size, ConstantTables.of(fixed), **given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_matches(found, expected)


@kernels
def test_numbers_may_be_infinite(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    fixed, moving, size = given_tensors(STORED, torch.float32)
    fixed["CGV"][0, 0] = float("inf")
    found = insum_pinned({}, STORED, fixed, size, ConstantTables.of(fixed), **moving)
    assert not found[:, 0].isfinite().any()
    assert found[:, 1:].isfinite().all()


def runs(own):
    return [way for way in unrolled(own) if way.config.run > 1]


def test_neighbours_of_one_place_are_added_up_before_memory():
    own = own_problem(ADDED)
    (way, *_) = runs(own)
    source = own.launcher(way).kernel.source
    body = source[source.index("    pid = ") :]
    assert (
        body
        == """\
    pid = tl.program_id(0)
    first_row = tl.minimum(extent_b, 0) + (pid) * 8
    past_row = tl.minimum(first_row + 8, extent_b)
    i_u = tl.arange(0, 64)
    acc_0 = tl.zeros((64,), tl.float32)
    acc_1 = tl.zeros((64,), tl.float32)
    held = tl.full((), -1, tl.int32)
    for last in range(first_row, past_row):
        i_b_0 = last
        at_DST_1 = tl.load(DST_ptr + i_b_0)
        at_SRC_2 = tl.load(SRC_ptr + i_b_0)
        v_X_3 = tl.load(X_ptr + at_SRC_2 * 192 + 1 * 64 + i_u)
        v_Y_4 = tl.load(Y_ptr + i_b_0 * 2)
        v_X_5 = tl.load(X_ptr + at_SRC_2 * 192 + i_u)
        v_Y_6 = tl.load(Y_ptr + i_b_0 * 2 + 1)
        v_X_7 = tl.load(X_ptr + at_SRC_2 * 192 + 2 * 64 + i_u)
        if at_DST_1 != held:
            is_held_8 = held >= 0
            tl.atomic_add(ptr_of_output + held * stride__0 + i_u, acc_0, mask=is_held_8, sem="relaxed")
            tl.atomic_add(ptr_of_output + held * stride__0 + 1 * stride__1 + i_u, acc_1, mask=is_held_8, sem="relaxed")
            acc_0 = tl.zeros((64,), tl.float32)
            acc_1 = tl.zeros((64,), tl.float32)
            held = at_DST_1
        acc_0 += v_X_3 * (v_Y_4 * 0.5)
        acc_0 += v_X_5 * (v_Y_6 * -2.0)
        acc_1 += v_X_7 * (v_Y_6 * 1.5)
    is_held_9 = held >= 0
    tl.atomic_add(ptr_of_output + held * stride__0 + i_u, acc_0, mask=is_held_9, sem="relaxed")
    tl.atomic_add(ptr_of_output + held * stride__0 + 1 * stride__1 + i_u, acc_1, mask=is_held_9, sem="relaxed")
"""
    )
    assert way.choices["run"] == 8


def test_only_what_is_scattered_along_one_index_has_runs():
    assert not runs(own_problem(STORED))
    assert not runs(own_problem(SUMMED))
    assert all(way.schedule.roles["b"] == "grid" for way in runs(own_problem(ADDED)))


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "one", "padded", "absent", "empty"])
def test_sums_of_neighbours_are_those_of_all_entries(kind, dtype):
    expr = ADDED.replace("CGV", "2 * CGV")
    batch, nodes, channels = 0 if kind == "empty" else 37, 6, 5
    fixed = {name: table.to(DEVICE, dtype if name == "CGV" else torch.int32) for name, table in tables().items()}
    draw = lambda *size: torch.randn(*size, dtype=torch.float64).to(dtype).to(DEVICE)
    SRC, DST = torch.randint(nodes - 1, (2, batch), dtype=torch.int32, device=DEVICE)
    DST = {"one": DST * 0 + 3, "unsorted": DST, "absent": DST * 0 - 1}.get(kind, DST.sort().values)
    moving = {"X": draw(nodes, 3, channels), "Y": draw(batch, 2), "SRC": SRC, "DST": DST}
    if kind == "padded":  # within a run too, with NaN in what is not there
        DST[5::7], SRC[3::6] = -1, -1
        moving["Y"][3::6] = torch.nan
        moving["X"][nodes - 1] = torch.nan
    padded = frozenset(name for name in ("SRC", "DST") if bool((moving[name] < 0).any()))
    flags = Flags(padded=padded, interpreted=DEVICE == "cpu")
    given = {**moving, **fixed}
    own = problem(expr, given, (nodes, 3, channels), ConstantTables.of(fixed), flags)
    wide = widened(moving, fixed)
    wide["Y"] = torch.where((wide["SRC"] < 0)[:, None], 0.0, wide["Y"])
    expected = 2 * one_by_one(ADDED, wide, (nodes, 3, channels))
    tried = told_apart(runs(own))
    assert len(tried) > 1
    for way in tried:
        assert_matches(own.launcher(way)(list(given.values()), None), expected)


def test_several_elements_are_added_at_once_where_the_strides_allow_it():
    own = own_problem(ADDED, channels=68)
    for way in unrolled(own):
        launcher = own.launcher(way)
        assert "(stride__0 // 4 * 4)" in launcher.kernel.source
        assert launcher.placed((400, 72, 1)) is not None
        assert launcher.placed((402, 72, 1)) is None
    for way in unrolled(own_problem(STORED, channels=68)):  # which may be written to any part of a larger tensor
        assert "stride__0 // " not in own_problem(STORED, channels=68).launcher(way).kernel.source
