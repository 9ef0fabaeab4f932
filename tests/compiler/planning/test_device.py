"""The description of a GPU: what is read of one, what is assumed without one, and what rules make of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import APPLICATIONS, Application, positions, problem, values

from insum_ops.compiler.planning.block_rows import (
    MEASURED_ROWS,
    MeasuredRows,
    blocks_side_by_side,
    may_be_listed,
    rows_of_a_set,
)
from insum_ops.compiler.planning.device import (
    A10,
    A100,
    B200,
    DEVICES,
    H200,
    L40S,
    MI300X,
    T4,
    Device,
    described_as,
    device_of,
    from_properties,
)
from insum_ops.compiler.tuning.footprint import shared_bytes
from insum_ops.compiler.tuning.problem import Problem, candidates
from insum_ops.formats.facts import OwnedRows
from insum_ops.formats.row_order import order_rows

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
KIB = 1024


def properties(**given: Any) -> SimpleNamespace:
    """What torch tells of an H100."""
    own = {"name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 114, "warp_size": 32}
    own |= {"shared_memory_per_block_optin": 227 * KIB, "shared_memory_per_multiprocessor": 228 * KIB}
    own |= {"regs_per_multiprocessor": 65536, "L2_cache_size": 50 * KIB**2}
    own |= {"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    return SimpleNamespace(**{**own, **given})


def test_a_gpu_is_read_from_what_torch_tells() -> None:
    read = from_properties(properties())
    assert (read.name, read.architecture, read.multiprocessors) == ("NVIDIA H100", "sm_90", 114)
    assert (read.shared_per_block, read.shared_per_multiprocessor) == (227 * KIB, 228 * KIB)
    assert read.bandwidth == pytest.approx(3.35e12, rel=0.01)
    assert read.tensor_core(torch.bfloat16) == "wgmma"
    assert read.wave == 128


def test_what_torch_does_not_tell_is_as_on_others_of_its_kind() -> None:
    bare = SimpleNamespace(name="some A100", major=8, minor=0, multi_processor_count=98)
    assert from_properties(bare) == replace(A100, name="some A100", multiprocessors=98)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"major": 8, "minor": 7}, A10),
        ({"major": 10, "minor": 3}, B200),
        ({"major": 12, "minor": 0}, L40S),
        ({"major": 7, "minor": 5}, T4),
        ({"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, MI300X),
        ({"major": 9, "minor": 5, "gcnArchName": "gfx950"}, MI300X),
    ],
)
def test_an_unknown_gpu_has_the_tensor_cores_of_its_nearest_kin(given: dict[str, Any], expected: Device) -> None:
    assert from_properties(properties(**given)).tensor_cores == expected.tensor_cores


def test_the_l2_of_all_dies_counts() -> None:
    told = properties(gcnArchName="gfx942", L2_cache_size=4 * KIB**2)
    assert from_properties(told).l2_bytes == 32 * KIB**2


def test_without_a_gpu_plans_are_for_an_h200() -> None:
    assert device_of(CPU) is H200
    with described_as(A10):
        assert device_of(CPU) is A10
        with described_as(MI300X):
            assert device_of(torch.device("meta")) is MI300X
        assert device_of(CPU) is A10
    assert device_of(CPU) is H200


def test_other_threads_plan_for_the_gpu_that_they_run_on() -> None:
    """A generator's version is worked out for one GPU while statements are planned for the one that is there."""
    with ThreadPoolExecutor(1) as other, described_as(A10):
        assert other.submit(device_of, CPU).result() is H200
        assert device_of(CPU) is A10


def test_a_wave_is_the_nearest_power_of_two() -> None:
    waves = {name: device.wave for name, device in DEVICES.items()}
    assert waves == {"sm_75": 32, "sm_80": 128, "sm_86": 64, "sm_89": 128, "sm_90": 128, "sm_100": 128, "gfx942": 256}
    assert replace(H200, multiprocessors=1).wave == 1


def test_a_call_takes_the_host_longer_with_every_operation() -> None:
    assert [round(H200.host_milliseconds(count), 3) for count in (1, 2, 5)] == [0.015, 0.025, 0.055]


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.architecture)
@pytest.mark.parametrize("application", APPLICATIONS.values(), ids=APPLICATIONS)
def test_what_does_not_fit_the_shared_memory_of_its_device_comes_last(application: Application, device: Device) -> None:
    with described_as(device):
        assert_what_fits_comes_first(application.problem(), device)


def assert_what_fits_comes_first(own: Problem, device: Device) -> None:
    for _, ways in groupby(candidates(own), key=lambda way: id(way.schedule)):
        configs = [(way.schedule, way.config) for way in ways]
        fits = [shared_bytes(*each, device, own.flags.precision) <= device.shared_per_block for each in configs]
        assert fits[0]
        assert fits == sorted(fits, reverse=True)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.architecture)
def test_so_do_the_widest_tiles_of_float64(device: Device) -> None:
    own = problem("C[i,j] += A[i,k] * B[k,j]", {name: values(512, 512, dtype=torch.float64) for name in "AB"})
    with described_as(device):
        assert_what_fits_comes_first(own, device)


def test_smaller_gpus_take_fewer_stages_of_the_same_tiles() -> None:
    def first(device: Device) -> Any:
        with described_as(device):
            return candidates(APPLICATIONS["block_spmm_owner"].problem())[0].config

    large = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(4096, 4096), "B": values(4096, 4096)})
    with described_as(A10):
        small = candidates(large)
    stages, fewer = (
        {way.config.blocks: way.config.num_stages for way in ways} for ways in (candidates(replace(large)), small)
    )
    assert fewer.keys() <= stages.keys()
    assert all(fewer[tile] <= stages[tile] for tile in fewer)
    assert fewer != {tile: stages[tile] for tile in fewer}
    assert first(H200) == first(A100)


def rows_per_program(device: Device) -> set[int]:
    tensors = {"AM": positions(64, 2), "AT": positions(700), "AS": positions(700, 2), "AK": positions(700)}
    tensors |= {"AV": values(900, 32, 32), "B": values(128, 32, 4096)}
    own: Problem = problem(
        "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]", tensors, (128, 32, 4096), OwnedRows("AM", "AT")
    )
    with described_as(device):
        return {way.config.rows for way in candidates(own)}


def test_fewer_multiprocessors_have_more_rows_each() -> None:
    assert rows_per_program(H200) == {1, 4}
    assert rows_per_program(replace(H200, multiprocessors=66)) == {1, 8}
    assert rows_per_program(replace(H200, multiprocessors=600)) == {1}


@pytest.mark.parametrize(("multiprocessors", "is_shared"), [(132, True), (1, False)])
def test_programs_share_a_sum_where_results_do_not_fill_the_gpu(multiprocessors: int, is_shared: bool) -> None:
    own = problem("dW[u,w] += T[b,u] * dZ[b,w]", {"T": values(5000, 64), "dZ": values(5000, 64)})
    with described_as(replace(H200, multiprocessors=multiprocessors)):
        assert any(way.schedule.is_shared for way in candidates(own)) == is_shared


def test_rows_are_listed_where_their_programs_fill_the_gpu() -> None:
    for device in (A10, H200):
        assert [rows_of_a_set(block, torch.float16, device) for block in (16, 32, 64, 128, 256)] == [0, 2, 0, 1, 1]
    assert rows_of_a_set(32, torch.float32, H200) == 0
    assert rows_of_a_set(32, torch.bfloat16, replace(H200, tensor_cores=())) == 0
    assert may_be_listed(2, sets=64, columns=2000, results=4096 * 1024, device=H200)
    assert not may_be_listed(2, sets=64, columns=2000, results=4096 * 512, device=H200)
    assert may_be_listed(2, sets=64, columns=2000, results=4096 * 512, device=A10)
    assert not may_be_listed(2, sets=64, columns=500, results=4096 * 1024, device=H200)
    assert not may_be_listed(2, sets=64, columns=2000, results=4096 * 1024, device=H200, shared=0.1)
    assert not may_be_listed(1, sets=32, columns=500, results=4096 * 1024, device=H200)


@pytest.mark.parametrize("row", MEASURED_ROWS, ids=lambda row: f"{row.block} {row.density} {row.columns}")
def test_rows_are_listed_where_that_was_measured_to_take_less(row: MeasuredRows) -> None:
    edge, width = 4096 // row.block, rows_of_a_set(row.block, torch.float16, H200)
    rows, columns = (torch.rand(edge, edge, generator=torch.Generator().manual_seed(0)) < row.density).nonzero().T
    found = order_rows(rows, columns, (edge, edge), width)
    listed = may_be_listed(width, edge // width, len(found.sets), 4096 * row.columns, H200, found.shared)
    assert listed == (row.listed < row.as_they_are)


def test_blocks_stand_beside_each_other_where_their_groups_fill_the_gpu() -> None:
    def together(edge: int, blocks: int, rows: int, device: Device = H200, itemsize: int = 2) -> int:
        return blocks_side_by_side((edge, edge), itemsize, blocks, rows, device)

    assert (together(32, 4000, 128), together(32, 410, 64)) == (8, 4)
    assert together(64, 410, 64) == 4
    assert together(64, 380, 64) == 0
    assert together(64, 380, 64, A10) == 4
    assert together(128, 4000, 64) == together(64, 4000, 64, itemsize=4) == 0
    assert together(32, 100, 64, replace(H200, multiprocessors=1)) == 0  # fewer than three a row
