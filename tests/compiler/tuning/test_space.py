"""Which configs are tried: each fits its schedule, and there are a handful unless more are asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problems import APPLICATIONS, positions, problem, values

from insum_ops.compiler.binding.shape_class import power_of_two
from insum_ops.compiler.planning.device import A10, H200, MI300X, Device, described_as
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.schedule import Schedule
from insum_ops.compiler.tuning.measured import MEASURED_TILES, MeasuredTiles, measured_points
from insum_ops.compiler.tuning.problem import candidates
from insum_ops.compiler.tuning.space import configs
from insum_ops.compiler.tuning.traits import Traits
from insum_ops.formats.facts import OwnedRows

pytestmark = pytest.mark.cpu


def scheduled(name: str) -> tuple[Schedule, ...]:
    application = APPLICATIONS[name]
    own = application.problem()
    return schedules(own.bound, own.strides, application.strategy, application.fact)


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (1000, 1024)])
def test_power_of_two(n: int, expected: int) -> None:
    assert power_of_two(n) == expected


@pytest.mark.parametrize("full", [False, True], ids=["default", "full"])
@pytest.mark.parametrize("name", APPLICATIONS)
def test_every_tile_axis_has_a_block_that_triton_accepts(name: str, full: bool) -> None:
    for schedule in scheduled(name):
        for config in configs(schedule, full):
            blocks = dict(config.blocks)
            assert set(blocks) == set(schedule.axes)
            assert all(block == power_of_two(block) for block in blocks.values())
            assert not schedule.uses_dot or min(blocks.values()) >= (2 if schedule.has_table else 16)
            assert config.num_warps == power_of_two(config.num_warps) <= 8


@pytest.mark.parametrize(
    ("expr", "tensors", "strategy"),
    [
        ("Y[i,j] = X[i,j]", {"X": values(30, 7)}, "store"),
        ("Y[k,j,i] = X[i,j,k]", {"X": values(30, 7, 90)}, "store"),
        ("Y[i] += X[i,i,j]", {"X": values(300, 300, 3)}, "store"),
        ("Y[G[p],c] += X[p,c]", {"X": values(700, 3), "G": positions(700)}, "atomic"),
        ("Y[()] += X[()] * X[()]", {"X": values()}, "store"),
    ],
)
def test_a_full_search_of_what_moves_data_has_tiles_of_an_element_at_least(
    expr: str, tensors: dict[str, torch.Tensor], strategy: str
) -> None:
    own = problem(expr, tensors, (90, 3) if strategy == "atomic" else None)
    for schedule in schedules(own.bound, own.strides, strategy):
        blocks = [block for config in configs(schedule, full=True) for _, block in config.blocks]
        assert all(block == power_of_two(block) for block in blocks)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_a_handful_unless_more_are_asked_for(name: str) -> None:
    for schedule in scheduled(name):
        few, many = configs(schedule), configs(schedule, full=True)
        assert 1 <= len(few) <= 10
        assert {*few} <= {*many}
        assert len(set(few)) == len(few)
        assert len(set(many)) == len(many)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_a_full_search_starts_as_another_and_has_every_kind_of_product(name: str) -> None:
    own = APPLICATIONS[name].problem()
    few, many = candidates(own), candidates(own, full=True)
    assert many[0] == few[0]
    assert {str(way.choices) for way in few} <= {str(way.choices) for way in many}
    products = {way.schedule.uses_dot for way in many}
    assert False in products
    # a dot takes two factors that share a summed axis, and a max takes none
    assert (True in products) == (True in {way.schedule.uses_dot for way in few})


def test_rules_order_dots_and_multiply_adds_and_hide_neither() -> None:
    def products(full: bool) -> list[bool]:
        own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(3, 300), "B": values(300, 300)})
        return list(dict.fromkeys(way.schedule.uses_dot for way in candidates(own, full)))

    assert products(full=False) == [False]  # three rows of sixteen
    assert products(full=True) == [False, True]


def test_a_full_search_shares_sums_that_need_not_be() -> None:
    own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(256, 250), "B": values(250, 256)})
    assert not any(way.schedule.is_shared for way in candidates(own))
    assert any(way.schedule.is_shared for way in candidates(own, full=True))
    strict = candidates(replace(own, deterministic=True), full=True)
    assert all(
        way.schedule.has_copies and way.config.copies == way.config.parts for way in strict if way.config.parts > 1
    )


@pytest.mark.parametrize("name", APPLICATIONS)
def test_choices_tell_the_candidates_of_a_full_search_apart(name: str) -> None:
    texts = [str(way.choices) for way in candidates(APPLICATIONS[name].problem(), full=True)]
    assert len(set(texts)) == len(texts)


def test_a_full_search_has_neighbours_however_wide_they_are() -> None:
    """Blocks of 128, which rules would take one by one."""
    tensors = {"AM": positions(300), "AK": positions(300, 8), "dY": values(512, 40, 128), "X": values(512, 50, 128)}
    own = problem("dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]", tensors)
    assert all(way.schedule.merged is None for way in candidates(own))
    assert any(way.schedule.merged is not None for way in candidates(own, full=True))


def test_a_full_search_takes_rows_of_a_set_one_by_one_too() -> None:
    own = APPLICATIONS["block_spmm_together"].problem()
    assert all(way.schedule.holds_set for way in candidates(own))
    assert not all(way.schedule.holds_set for way in candidates(own, full=True))


def test_a_full_search_has_other_tiles_for_a_dot() -> None:
    own = problem("C[b,i,j] += A[b,i,k] * B[k,j]", {"A": values(64, 64, 64), "B": values(64, 64)})
    assert len({way.schedule.names("tile") for way in candidates(own)}) == 1
    assert len({way.schedule.names("tile") for way in candidates(own, full=True) if way.schedule.uses_dot}) > 1


def test_a_full_search_has_several_summands_at_once_however_few() -> None:
    own = problem("C[i,j] += A[i,k,j]", {"A": values(300, 4, 300)})
    assert not any(way.schedule.names("step") for way in candidates(own))
    assert any(way.schedule.names("step") for way in candidates(own, full=True))


def test_a_full_search_adds_atomically_whatever_is_known_of_rows() -> None:
    own = APPLICATIONS["group_spmm_owner"].problem()
    assert "atomic" not in {way.schedule.strategy for way in candidates(own)}
    assert "atomic" in {way.schedule.strategy for way in candidates(own, full=True)}
    ordered = replace(own, deterministic=True)
    assert {way.schedule.strategy for way in candidates(ordered, full=True)} == {"owner"}


def test_rows_are_owned_in_turn_where_there_are_more_than_cores() -> None:
    def rows(sets: int, columns: int) -> set[int]:
        tensors = {"AM": positions(sets, 2), "AT": positions(700), "AS": positions(700, 2), "AK": positions(700)}
        tensors |= {"AV": values(900, 32, 32), "B": values(128, 32, columns)}
        expr = "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]"
        own = problem(expr, tensors, (2 * sets, 32, columns), OwnedRows("AM", "AT"))
        (schedule,) = schedules(own.bound, own.strides, "owner", own.fact)
        found = configs(schedule, has_order=True)
        assert all(config.longest_first == (config.rows == 1) for config in found)
        return {config.rows for config in found}

    assert rows(64, 4096) == {1, 4}
    assert rows(48, 4096) == {1, 4}
    assert rows(64, 1024) == {1}
    assert rows(512, 4096) == {1, 8}


def test_rows_of_blocks_are_tried_with_the_longest_first() -> None:
    (schedule,) = scheduled("block_spmm_owner")
    some = configs(schedule, has_order=True)
    assert {config.longest_first for config in some} == {False, True}
    assert {config for config in some if not config.longest_first} == set(configs(schedule))
    assert not any(config.longest_first for config in configs(schedule))
    for name in ("group_spmm_owner", "convolution_atomic"):
        assert not any(config.longest_first for way in scheduled(name) for config in configs(way, has_order=True))


def test_blocks_are_no_longer_than_extents_need() -> None:
    (schedule,) = scheduled("block_spmm_owner")
    assert all(config.block("bm") == 32 and config.block("bk") == 32 for config in configs(schedule))


def widths(Q: int, dtype: torch.dtype = torch.float16, edge: int = 32) -> list[int]:
    indices = {"AM": positions(300), "AK": positions(300, Q)}
    tensors = {**indices, "dY": values(512, 40, edge, dtype=dtype), "X": values(512, 50, edge, dtype=dtype)}
    own = problem("dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]", tensors)
    wide, _ = schedules(own.bound, own.strides, "store")
    found = configs(wide)
    assert all(config.swap == (edge == 32) and config.block("o") == edge for config in found)
    return sorted({config.block("c") for config in found}, reverse=True)


def test_neighbours_side_by_side_are_the_rows_of_a_dot_as_far_as_they_go() -> None:
    assert widths(8) == widths(16) == [256, 128, 64]
    assert widths(4) == [128, 64, 32]
    assert widths(3) == [128, 64, 32]
    assert widths(8, torch.float32) == [128, 64, 32]
    assert widths(8, torch.float64) == [64, 32, 16]


def test_a_tile_of_64_has_rows_enough_and_its_neighbours_are_columns() -> None:
    assert widths(4, edge=64) == widths(8, edge=64) == [256, 128]
    assert widths(2, edge=64) == [128, 64]


@pytest.mark.parametrize(
    "expr", ["C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]", "C[n,AM[p],i] += B[n,AK[p],j] * AV[p,i,j]"]
)
def test_blocks_of_64_by_many_columns_get_tiles_that_fill_a_warp_group(expr: str) -> None:
    shape = (50, 64, 4096) if "B[AK" in expr else (4096, 50, 64)
    tensors = {"AM": positions(300), "AK": positions(300), "AV": values(300, 64, 64), "B": values(*shape)}
    size = (40, 64, 4096) if "B[AK" in expr else (4096, 40, 64)
    own = problem(expr, tensors, size)
    found = [config for way in schedules(own.bound, own.strides, "atomic") for config in configs(way)]
    assert any(config.block("n") == 256 and config.block("i") == 64 and config.num_warps == 4 for config in found)


def test_every_part_of_a_sum_of_a_fixed_length_has_summands() -> None:
    middle = problem("Y[i,k] += X[i,j,k]", {"X": values(39, 3175, 25)})
    shared = [way.config for way in candidates(middle) if way.config.parts > 1]
    turns = [-(-3175 // config.block("j")) for config in shared]
    assert shared
    assert all((config.parts - 1) * -(-own // config.parts) < own for config, own in zip(shared, turns))
    columns = problem("Y[j] += X[i,j]", {"X": values(3175, 25)})  # whose config serves other lengths as well
    parts = {way.config.parts for way in candidates(columns)}
    assert parts == {power_of_two(part) for part in parts}


def test_rows_of_one_program_share_what_they_read_of_a_vector() -> None:
    """Where rows are so long that a program could have one alone, which reads the vector as often as there are rows."""
    for expr, is_shared in (("y[i] += A[i,j] * x[j]", True), ("y[i] += A[i,j] * A[i,j]", False)):
        own = problem(expr, {"A": values(2317, 3401), **({"x": values(3401)} if is_shared else {})})
        heights = {way.config.block("i") for way in candidates(own)}
        assert (1 not in heights) == is_shared


def test_a_shared_sum_is_cut_into_as_many_parts_as_keep_a_gpu_busy() -> None:
    def parts(rows: int) -> set[int]:
        own = problem("dW[u,w] += T[b,u] * dZ[b,w]", {"T": values(rows, 64), "dZ": values(rows, 64)})
        shared, *_ = schedules(own.bound, own.strides, "store")
        found = configs(shared)
        assert all(config.parts * 4 * config.block("b") <= power_of_two(rows) for config in found)
        return {config.parts for config in found}

    assert parts(50_000) == parts(40_000) == {128, 256}  # tuned configs are remembered by powers of two
    assert max(parts(500_000)) == 512
    assert max(parts(2048)) <= 8


@pytest.mark.parametrize("device", [A10, H200, MI300X], ids=lambda device: device.architecture)
@pytest.mark.parametrize(
    ("expr", "sizes", "size"),
    [
        ("Y[m,n] += A[m,k] * B[k,n]", {"A": (600, 100_000), "B": (100_000, 300)}, None),
        ("Y[m,n] += A[k,m] * B[k,n]", {"A": (4096, 4096), "B": (4096, 4096)}, None),
        ("Y[b,m,n] += A[b,m,k] * B[b,k,n]", {"A": (70, 9, 100_000), "B": (70, 100_000, 300)}, None),
        ("Y[i,i] += A[i,k]", {"A": (4096, 4096)}, (4096, 4096)),
        ("Y[i,5] += A[i,k]", {"A": (7, 100_000)}, (7, 10_000_000)),
        ("Y[i,5] = max(A[i,k])", {"A": (7, 100_000)}, (7, 10_000_000)),
        ("Y[j] += A[i,j]", {"A": (1_000_000, 70)}, None),
    ],
)
def test_the_cache_has_room_for_all_copies_of_an_output(
    expr: str, sizes: dict[str, tuple[int, ...]], size: tuple[int, ...] | None, device: Device
) -> None:
    """Of an output that is not covered a copy may be far larger than its sums."""
    with described_as(device):
        own = problem(expr, {name: values(*shape, dtype=torch.float64) for name, shape in sizes.items()}, size)
        ways = candidates(own, full=device is A10)
    assert ways
    copies = [way.config.copies for way in ways if way.schedule.has_copies]
    assert all(count * math.prod(own.bound.size) * 8 <= device.l2_bytes for count in copies)
    assert min(copies, default=2) > 1


def test_a_scatter_that_reads_stretches_of_memory_has_copies() -> None:
    tensors = {"E": positions(1000), "T": values(5000, 1000), "Z": values(5000, 64)}
    own = problem("Y[E[e],w] += T[b,e] * Z[b,w]", tensors, (5, 64))
    ways = [way for way in candidates(own) if way.schedule.has_copies]
    assert ways
    assert min(way.config.copies for way in ways) > 1


def test_one_config_where_there_is_no_tile() -> None:
    own = problem("C[()] = A[()] * B[()]", {"A": values(), "B": values()})
    (schedule,) = schedules(own.bound, own.strides, "store")
    (config,) = configs(schedule)
    assert config.blocks == ()


def test_single_precision_takes_shallower_steps() -> None:
    def depth(dtype: torch.dtype) -> int:
        A, B = values(512, 512, dtype=dtype), values(512, 512, dtype=dtype)
        own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": A, "B": B})
        schedule, *_ = schedules(own.bound, own.strides, "store")
        return configs(schedule)[0].block("k")

    assert depth(torch.float32) == depth(torch.float16) // 2


def test_a_config_prints_in_one_line() -> None:
    (schedule,) = scheduled("block_spmm_owner")
    assert str(configs(schedule)[0]) == "bm=32 n=256 bk=32 warps=4 stages=6 swap reverse"


def test_a_tables_axes_are_as_short_as_they_are() -> None:
    """All but those that a dot sums: it is at least 16 deep."""
    (schedule,) = scheduled("tensor_product_tables")
    assert schedule.has_table
    for config in configs(schedule):
        assert [config.block(name) for name in "ijkw"] == [8, 8, 8, 32]
    tables = {"T": values(23, 8, 8, 8), "Y": values(4000, 23, 8)}
    tables |= dict.fromkeys("XD", values(4000, 23, 8, 64))
    own = problem("W[b,p,u,w] += T[p,i,j,k] * X[b,p,j,u] * Y[b,p,k] * D[b,p,i,w]", tables)
    (outer,) = schedules(own.bound, own.strides, "store")
    for config in configs(outer):
        assert sorted(config.block(name) for name in "ijk") == [8, 8, 16]


@pytest.mark.parametrize(("tokens", "tile"), [(256, 64), (4096, 128)])
def test_few_tokens_have_short_tiles_first_which_give_every_core_a_program(tokens: int, tile: int) -> None:
    tensors = {"WO": positions(300), "WI": positions(300), "WV": values(300, 128, 128), "X": values(tokens, 32, 128)}
    expr = "Y[t,WO[p],bo] += X[t,WI[p],bi] * WV[p,bo,bi]"
    own = problem(expr, tensors, (tokens, 32, 128), OwnedRows("WO", "", is_whole=True))
    assert candidates(own)[0].config.block("t") == tile
    # a program that held one row of blocks on chip would read the blocks of all rows
    assert {way.schedule.strategy for way in candidates(own)} == {"owner", "atomic"}


@pytest.mark.parametrize(
    ("expr", "tensors", "size"),
    [
        ("Y[p,c] = X[G[p],c]", {"X": values(900, 33), "G": positions(700)}, None),
        ("Y[G[p],c] += X[p,c]", {"X": values(700, 64), "G": positions(700)}, (90, 64)),
        ("Y[i,j] = X[i,j]", {"X": values(300, 500)}, None),
        ("Y[j,i] = X[i,j]", {"X": values(300, 500)}, None),
    ],
)
def test_choices_tell_the_candidates_of_a_statement_that_moves_data_apart(
    expr: str, tensors: dict[str, torch.Tensor], size: tuple[int, ...] | None
) -> None:
    """The same tile may take rows, or whatever lies in memory."""
    ways = candidates(problem(expr, tensors, size), full=True)
    assert len({str(way.choices) for way in ways}) == len(ways)
    assert len({str(way) for way in ways}) == len(ways)


@pytest.mark.parametrize("measured", MEASURED_TILES, ids=lambda own: f"{own.graph}-{own.columns}-{own.itemsize}")
def test_tiles_over_gathered_rows_are_among_the_best_that_were_measured(measured: MeasuredTiles) -> None:
    warp = 32 * 16 // measured.itemsize  # elements of a vector to each thread
    own = Traits("plain", widest=measured.columns, used=warp, is_walk=measured.is_walk, is_even=measured.is_even)
    tiles = [(point.narrow * point.wide / (warp * point.warps), point.warps) for point in measured_points(own)]
    times = [measured.by_tile[tile] for tile in tiles if tile in measured.by_tile]
    assert min(times) == min(measured.by_tile.values())
    assert times[0] <= 1.65 * min(times)  # what is taken untimed
