"""The emitted source: what it says for the paper's statements, and what it leaves out where it can.

`INSUM_UPDATE_GOLDEN=1 pytest tests/compiler/codegen/test_codegen.py` rewrites `tests/golden/`: read the diff first.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from problems import APPLICATIONS, GROUP_SPMM, Application, positions, problem, values
from torch import Tensor

from insum_ops import close_names, identity_cache, lru_cache
from insum_ops.compiler.binding import power_of_two
from insum_ops.compiler.codegen import Config, Flags, Kernel, emit
from insum_ops.compiler.codegen.loops import MEASURED_ENTRIES, MeasuredEntries, entries_at_once
from insum_ops.compiler.planning.device import A10, described_as
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.tuning import problem as problem_module
from insum_ops.compiler.tuning.problem import Candidate, Problem, candidates
from insum_ops.compiler.tuning.tuning_file import clear_cache
from insum_ops.formats.facts import OwnedRows

pytestmark = pytest.mark.cpu

GOLDEN = Path(__file__).parents[2] / "golden"
NO_PADDING = Flags(padded=frozenset())


def emitted(application: Application, flags: Flags | None = None) -> Kernel:
    own = application.problem(flags)
    schedule, *_ = schedules(own.bound, own.strides, application.strategy, application.fact)
    blocks = tuple(zip(schedule.axes, application.blocks, strict=True))
    return emit(schedule, own.strides, Config(blocks, 4, 3, rows=application.rows), own.flags)


def first(own: Problem) -> str:
    """The source of the most promising candidate."""
    return own.launcher(candidates(own)[0]).kernel.source


def every(own: Problem) -> list[str]:
    return [own.launcher(candidate).kernel.source for candidate in candidates(own)]


def of_every_kind(own: Problem) -> Iterable[Candidate]:
    """Candidates whose kernels differ in more than sizes."""
    return {(id(way.schedule), way.config.kind): way for way in own.tried}.values()


def spmm(nnz: int = 3000, rows: int = 2000, wide: int = 128, flags: Flags = NO_PADDING, **options: Any) -> Problem:
    tensors = {"AM": positions(nnz), "AK": positions(nnz, 8), "AV": values(nnz, 8), "B": values(rows, wide)}
    return problem(GROUP_SPMM, tensors, (rows, wide), flags=flags, **options)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_source_of_a_statement_of_the_paper(name: str) -> None:
    source, path = emitted(APPLICATIONS[name]).source, GOLDEN / f"{name}.py.txt"
    if os.environ.get("INSUM_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    assert source == path.read_text()


@pytest.mark.parametrize("swap", [False, True])
def test_sums_over_short_axes_are_never_over_the_middle_one(swap: bool) -> None:
    """Triton makes `tl.sum(a[:, :, None] * b[None, :, :], 1)` a dot in tf32, whatever precision was asked for."""
    own = APPLICATIONS["tensor_product_tables"].problem()
    way = next(way for way in candidates(own) if way.config.swap == swap)
    sums = re.findall(r"tl\.sum\(.*, (\d)\)", own.launcher(way).kernel.source)
    assert sums == ["2", "2" if swap else "0"]


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.py.txt" for name in APPLICATIONS}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_emitting_is_a_pure_function(name: str) -> None:
    assert emitted(APPLICATIONS[name]) == emitted(APPLICATIONS[name])


@pytest.mark.parametrize("name", APPLICATIONS)
def test_eager_and_lazy_sources_differ(name: str) -> None:
    lazy = emitted(APPLICATIONS[name], NO_PADDING).source
    eager = emitted(APPLICATIONS[name], replace(NO_PADDING, lazy=False)).source
    assert lazy != eager
    assert "tl.reshape" not in lazy
    assert "tl.trans" not in lazy
    assert ("tl.reshape" in eager) == APPLICATIONS[name].uses_dot


def test_neighbours_side_by_side_share_a_load_of_the_other_side() -> None:
    source = emitted(APPLICATIONS["block_gradient_store_once"]).source
    assert "i_q = i_c // 32" in source
    assert "i_bk = i_c % 32" in source
    assert re.search(r"v_dC_\d+ = tl.load\(.*i_bm\[:, None\]\)\n", source)
    assert re.search(r"tl.store\(.* mask=has_AS_\d+\[None, :\]\)", source)
    assert "extent_q" not in source


def test_a_last_tile_of_neighbours_is_bounded_once() -> None:
    tensors = {"AM": positions(300), "AK": positions(300, 3), "dY": values(512, 40, 32), "X": values(512, 50, 32)}
    own = problem("dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]", tensors, flags=NO_PADDING)
    way = schedules(own.bound, own.strides, "store")[0]
    source = emit(way, own.strides, Config((("o", 32), ("t", 64), ("c", 64))), NO_PADDING).source
    (bound,) = re.findall(r"(in_c_\d+) = i_c < extent_c", source)
    loads = [line for line in source.splitlines() if bound in line]
    assert len(loads) == 4  # itself, AK, X and the store
    assert "in_q" not in source


def test_a_tile_is_known_by_its_program_and_stored_once() -> None:
    """Which tile a tap belongs to is never read, and its rows' positions are read before the loop."""
    for flags, is_compared in ((None, True), (NO_PADDING, False)):
        source = emitted(APPLICATIONS["convolution_tiled"], flags).source
        assert "TILE_ptr" not in source
        assert "atomic" not in source
        assert ("has_ROW" in source) == is_compared
        lines = source.splitlines()
        (loop,) = (at for at, line in enumerate(lines) if line.lstrip().startswith("for "))
        assert [at < loop for at, line in enumerate(lines) if "tl.load(ROW_ptr" in line] == [True]
        assert sum("tl.store(" in line for line in lines) == 1


def seeded(start: Tensor) -> list[str]:
    application = APPLICATIONS["convolution_tiled"]
    tensors = {**application.tensors, "Out": start}
    own = problem(application.expr, tensors, None, application.fact, Flags(padded=application.padded))
    return [line.strip() for line in first(own).splitlines()]


def test_the_bias_that_tiles_start_from_is_one_row() -> None:
    """It is on its way while the products are summed."""
    source = seeded(values(96).expand(10000, 96))
    (loaded,) = (line for line in source if "ptr_of_seed +" in line)
    assert re.fullmatch(
        r"seed_\d+ = tl\.load\(ptr_of_seed \+ i_m, mask=in_m_\d+, other=0\.0\)\.to\(tl\.float32\)", loaded
    )
    (loop,) = (line for line in source if line.startswith("for "))
    assert source.index(loaded) < source.index(loop)
    assert f"acc += {loaded.split()[0]}[None, :]" in source


def test_one_number_that_tiles_start_from_is_one_number() -> None:
    source = seeded(values(1).expand(10000, 96))
    assert any(re.fullmatch(r"seed_\d+ = tl\.load\(ptr_of_seed\)\.to\(tl\.float32\)", line) for line in source)


def test_a_whole_tile_of_starts_is_loaded_when_it_is_needed() -> None:
    source = seeded(values(10000, 96))
    (loaded,) = (line for line in source if "ptr_of_seed +" in line)
    assert "has_ROW" in loaded
    (loop,) = (line for line in source if line.startswith("for "))
    assert source.index(loaded) > source.index(loop)


def test_programs_that_share_a_sum_take_a_part_of_its_longest_loop() -> None:
    own = problem("dW[u,w] += T[b,i,u] * dZ[b,i,w]", {"T": values(9000, 3, 64), "dZ": values(9000, 3, 64)})
    way = schedules(own.bound, own.strides, "store")[0]
    kernel = emit(way, own.strides, Config(tuple((axis, 64) for axis in way.axes), 4, 3, parts=8), NO_PADDING)
    assert kernel.parts == 8
    assert kernel.source.count("part = pid % 8") == 1
    assert "share_0 = tl.cdiv(extent_b, 512) * 64" in kernel.source
    assert "in range(part * share_0, tl.minimum((part + 1) * share_0, extent_b), 64)" in kernel.source
    assert "tl.atomic_add" in kernel.source


@pytest.mark.parametrize("name", APPLICATIONS)
def test_arguments_are_the_parameters_in_order(name: str) -> None:
    kernel = emitted(APPLICATIONS[name])
    (function,) = (node for node in ast.parse(kernel.source).body if isinstance(node, ast.FunctionDef))
    names = [argument.arg for argument in function.args.args]
    assert len(names) == len(set(names)) == len(kernel.parameters)


# names

HOSTILE = (
    *("tl", "triton", "range", "acc", "pid", "turn", "out_ptr", "A_ptr"),
    *("ptr_of_output", "insum_kernel", "extent_p", "i_p", "start_p"),
)


def assigned(source: str) -> list[str]:
    """Everything the kernel gives a name to, once each time that it does; some change in place."""
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    found = [argument.arg for argument in function.args.args]
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
    in_place = ("acc", "held", "pid", "place", "found")
    return [name for name in found if name not in in_place and not name.startswith("ahead_")]


def assert_no_clash(source: str) -> None:
    names = assigned(source)
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
    assert not {"tl", "triton", "range", "float", "insum_kernel"} & set(names)


@pytest.mark.parametrize("name", HOSTILE)
def test_tensors_and_indices_may_bear_the_names_of_the_kernel(name: str) -> None:
    for expr in (
        f"C[E[{name}],n] += V[{name}] * B[F[{name}],n]",
        f"C[{name}[p],n] += V[p] * B[F[p],n]",
        f"C[E[p],{name}] += V[p] * B[F[p],{name}]",
        f"C[E[p],n] += {name}[p] * B[F[p],n]",
        f"{name}[E[p],n] += V[p] * B[F[p],n]",
        f"C[E[p],n] = max({name}[p] * B[F[p],n])",
    ):
        shapes = {"E": positions(99), "F": positions(99), "V": values(99), "B": values(50, 40)}
        if f"{name}[p]" in expr.partition("=")[0]:
            shapes[name] = shapes.pop("E")
        elif f"{name}[p] *" in expr:
            shapes[name] = shapes.pop("V")
        for flags in (Flags(), Flags(wants_winners=True)) if "max" in expr else (Flags(),):
            own = problem(expr, shapes, (30, 40), fact=OwnedRows("E") if "max" in expr else None, flags=flags)
            for way in of_every_kind(own):
                assert_no_clash(own.launcher(way).kernel.source)


@pytest.mark.parametrize(
    "expr",
    [
        "C[x_ptr] = i_x[x_ptr]",
        "C[x_ptr,x_ptr_] = A[x_ptr,x_ptr_]",
        "C[x_ptr] = extent_x[x_ptr]",
        "C[é,ue9] = A[é,ue9]",
        "C[i] = A[i] * A_[i] * stride_A[i] * ptr_of_A[i]",
    ],
)
def test_names_that_look_like_one_another_stay_apart(expr: str) -> None:
    names = re.findall(r"(\w+)\[", expr.partition("=")[2])
    dims = expr.partition("=")[0].count(",") + 1
    for source in every(problem(expr, {name: values(*(33,) * dims) for name in names})):
        assert_no_clash(source)
        assert source.isascii()


def names_out_of_scope(block: list[ast.stmt], known: set[str]) -> Iterator[str]:
    """What is read before it has a value, or outside the loop or `if` in which it got one; `known` grows meanwhile."""
    for statement in block:
        inner = getattr(statement, "body", [])
        own = [part for part in ast.iter_child_nodes(statement) if part not in inner]
        names = [node for part in own for node in ast.walk(part) if isinstance(node, ast.Name)]
        reads = {name.id for name in names if isinstance(name.ctx, ast.Load)}
        writes = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        yield from reads - known
        if isinstance(statement, ast.AugAssign):
            yield from writes - known
        if inner:
            yield from names_out_of_scope(inner, known | writes)
        else:
            known |= writes


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", APPLICATIONS)
def test_what_a_loop_defines_ends_with_it(name: str, lazy: bool) -> None:
    """Triton's compiler refuses a kernel that reads it afterwards; its interpreter does not notice."""
    own = APPLICATIONS[name].problem()
    flags = replace(own.flags, lazy=lazy)
    ways = {way.config.kind: (way.schedule, way.config) for way in own.ways}.values()
    kernels = [emitted(APPLICATIONS[name], flags), *(emit(way, own.strides, config, flags) for way, config in ways)]
    for kernel in kernels:
        (function,) = (node for node in ast.parse(kernel.source).body if isinstance(node, ast.FunctionDef))
        known = {"tl", "range", "float", *(argument.arg for argument in function.args.args)}
        assert not list(names_out_of_scope(function.body, known)), kernel.source


# how many kernels there are


def test_fifty_numbers_of_groups_need_two_kernels() -> None:
    """The number of groups is an argument: only whether the last tile is full changes the source."""
    for fact in (None, OwnedRows("AM")):
        sources = {first(spmm(nnz, fact=fact)) for nnz in range(3000, 3050)}
        assert len(sources) <= 2


def test_fifty_batch_sizes_need_two_kernels() -> None:
    def attention(batch: int) -> Problem:
        tensors = {"A": values(batch, 64, 32), "B": values(batch, 32, 48)}
        return problem("C[b,i,j] += A[b,i,k] * B[b,k,j]", tensors)

    assert len({first(attention(batch)) for batch in range(64, 114)}) <= 2


# masks


def test_an_extent_that_its_blocks_divide_has_no_bound() -> None:
    def matmul(m: int, n: int, k: int) -> str:
        return first(problem("C[m,n] += A[m,k] * B[k,n]", {"A": values(m, k), "B": values(k, n)}))

    assert "mask" not in matmul(256, 256, 128)
    for extents, name in (((250, 256, 128), "m"), ((256, 250, 128), "n"), ((256, 256, 120), "k")):
        bounds = re.findall(r"(\w+) < extent_\w+", matmul(*extents))
        assert bounds == [f"i_{name}"]


@pytest.mark.parametrize(("columns", "divisor"), [(5544, 8), (5543, 1), (5540, 4), (5536, 16)])
def test_a_bound_says_what_divides_a_length_that_another_dimension_fixes(columns: int, divisor: int) -> None:
    """Columns are the first dimension of their sums, and the second of the matrix: whole vectors of them are loaded."""
    source = first(problem("Y[j] += X[i,j]", {"X": values(8064, columns)}))
    assert f"< extent_j{f' // {divisor} * {divisor}' if divisor > 1 else ''}\n" in source


def test_an_index_tensor_without_padding_is_not_compared() -> None:
    assert ">= 0" not in first(spmm())
    for padded in ({"AK"}, {"AM"}, {"AM", "AK"}):
        source = first(spmm(flags=Flags(padded=frozenset(padded))))
        assert set(re.findall(r"at_(\w+)_\d+ >= 0", source)) == padded
    assert set(re.findall(r"at_(\w+)_\d+ >= 0", first(spmm(flags=Flags())))) == {"AM", "AK"}


def test_what_points_through_padding_is_compared_too() -> None:
    tensors = {"A": values(40), "E": positions(50), "F": positions(60)}
    source = first(problem("C[p] = A[E[F[p]]]", tensors, flags=Flags(padded=frozenset({"F"}))))
    assert set(re.findall(r"at_(\w+)_\d+ >= 0", source)) == {"E", "F"}


# addresses


@pytest.mark.parametrize(("rows", "is_wide"), [(2**24 - 1, False), (2**24 + 1, True)])
def test_positions_are_64_bits_wide_only_in_tensors_over_2_gib(rows: int, is_wide: bool) -> None:
    """Half precision, 64 columns: 2**24 rows are 2**31 bytes."""
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": values(rows, 64)}
    source = first(problem(GROUP_SPMM, tensors, (500, 64), flags=NO_PADDING))
    casts = [line.split(" = ")[0].strip() for line in source.splitlines() if "tl.int64" in line]
    assert [re.sub(r"_\d+$", "", name) for name in casts] == (["v_B"] if is_wide else [])


@pytest.mark.parametrize(
    "expr", ["C[i] = A[i] * B[i]", "C[()] += A[i] * B[i]", "C[E[i]] += A[i] * B[i]", "C[j] += A[i] * B[i] * D[j]"]
)
def test_an_index_that_32_bits_do_not_count_has_64(expr: str) -> None:
    """From the program's number on: a product of 32 bits would be wrong before it is cast."""
    tensors = {"A": values(2**31 - 8), "B": values(2**31 - 8)}
    tensors |= {"E": positions(2**31 - 8)} if "E" in expr else {}
    tensors |= {"D": values(4)} if "D" in expr else {}
    for source in every(problem(expr, tensors, (100,) if "E" in expr else None, flags=NO_PADDING)):
        lines = [line for line in source.splitlines() if re.search(r"i_i = .*arange|in range\(|end_\d+ = ", line)]
        assert any("tl.int64" in line for line in lines), source


def test_a_large_output_is_addressed_with_64_bits() -> None:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": values(500, 64)}
    source = first(problem(GROUP_SPMM, tensors, (2**25, 64), flags=NO_PADDING))
    (line,) = (line for line in source.splitlines() if "tl.int64" in line)
    assert "tl.atomic_add" in line


def test_a_large_expanded_tensor_is_small() -> None:
    B = values(1, 64).expand(2**25, 64)
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": B}
    assert "tl.int64" not in first(problem(GROUP_SPMM, tensors, (500, 64), flags=NO_PADDING))


# max and min


def extremum(expr: str, wants_winners: bool = False, padded: frozenset[str] = frozenset(), **tensors: Any) -> str:
    return first(problem(expr, tensors, flags=Flags(padded=padded, wants_winners=wants_winners)))


def test_winners_are_stored_only_when_they_are_wanted() -> None:
    A, B = values(64, 32), values(32, 64)
    plain = extremum("C[i,j] = max(A[i,k] * B[k,j])", A=A, B=B)
    assert "place" not in plain
    assert "ptr_of_winners" not in plain
    won = extremum("C[i,j] = max(A[i,k] * B[k,j])", True, A=A, B=B)
    assert "tl.store(ptr_of_winners" in won
    assert "tl.int64" not in won


def test_every_element_is_known_to_have_a_product_where_nothing_is_missing() -> None:
    A, E = values(64, 32), positions(64, 32)
    assert "found" not in extremum("C[i] = max(A[i,k])", A=A)
    assert "found" not in extremum("C[i] = max(A[E[i,k],k])", A=A, E=E)
    assert "found" in extremum("C[i] = max(A[E[i,k],k])", padded=frozenset({"E"}), A=A, E=E)


def test_ties_are_compared_by_position_only_where_loops_meet_them_out_of_order() -> None:
    A = values(64, 9, 40)
    assert "< place)" not in extremum("C[k] = max(A[k,i,j])", True, A=A)
    long = values(64, 9, 20_000).transpose(1, 2)
    assert "< place)" in extremum("C[k] = max(A[k,j,i] * B[i])", True, A=long, B=values(9))


def test_a_number_is_multiplied_before_products_are_compared() -> None:
    source = extremum("C[i] = max(-2 * A[i,k])", A=values(64, 32))
    assert source.index("tl.full((), -2.0, tl.float32)") < source.index("tl.maximum")


# types


def test_half_precision_meets_in_memory_as_it_was_told() -> None:
    narrow, wide = first(spmm()), first(spmm(flags=replace(NO_PADDING, sum_dtype=torch.float32)))
    assert "acc.to(tl.float16)" in narrow
    assert "acc.to(tl.float16)" not in wide


@pytest.mark.parametrize("row", MEASURED_ENTRIES, ids=lambda row: f"{row.columns} columns, {row.is_one_piece}")
def test_as_many_entries_are_loaded_at_once_as_were_measured_to_be_best(row: MeasuredEntries) -> None:
    each = power_of_two(row.columns) // 32 * row.itemsize
    assert entries_at_once(each, row.is_one_piece) == min(row.by_count, key=row.by_count.__getitem__)


def test_wider_warps_load_more_entries_at_once() -> None:
    tensors = {"AM": positions(900), "AK": positions(900), "AV": values(900), "B": values(2000, 256)}

    def turns(warp_width: int) -> str:
        flags = replace(NO_PADDING, warp_width=warp_width)
        own = problem("C[AM[p],n] += AV[p] * B[AK[p],n]", tensors, (200, 256), OwnedRows("AM"), flags)
        (schedule, *_) = schedules(own.bound, own.strides, "owner", own.fact)
        config = Config(tuple((axis, 256 if axis == "n" else 1) for axis in schedule.axes), num_warps=1)
        source = emit(schedule, own.strides, config, flags).source
        return next(line.strip() for line in source.splitlines() if line.strip().startswith("for "))

    assert turns(32) == "for start in range(first_0, last_1, 4):"
    assert turns(64) == "for start in range(first_0, last_1, 8):"


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_precision_of_a_float32_dot(precision: str) -> None:
    A, B = values(256, 64, dtype=torch.float32), values(64, 256, dtype=torch.float32)
    source = first(problem("C[m,n] += A[m,k] * B[k,n]", {"A": A, "B": B}, flags=Flags(precision=precision)))
    assert f'input_precision="{precision}"' in source


def test_float64_is_summed_in_float64() -> None:
    A, B = values(256, 64, dtype=torch.float64), values(64, 256, dtype=torch.float64)
    for source in every(problem("C[m,n] += A[m,k] * B[k,n]", {"A": A, "B": B})):
        assert "tl.float32" not in source


@contextmanager
def called_functions() -> Iterator[set[CodeType]]:
    """The compiler's own functions that are called meanwhile, once it is over.

    But those of statements, which keep what was asked of them before.
    """
    found: set[CodeType] = set()
    compiler = Path(problem_module.__file__).parents[1]
    folder, language = os.path.join(compiler, ""), os.path.join(compiler, "language", "")
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code))
    try:
        yield found
    finally:
        sys.setprofile(None)
        files = {code: code.co_filename for code in found}
        found -= {code for code, file in files.items() if not file.startswith(folder) or file.startswith(language)}


def test_a_generator_version_knows_of_every_function_that_emits() -> None:
    """Whoever teaches the generator something new adds an exemplar of it, or users keep configs tuned for the old."""
    problems = [application.problem() for application in APPLICATIONS.values()]
    with called_functions() as known:
        problem_module.emitted_version()
    with called_functions() as needed:
        for own in problems:
            for way in of_every_kind(own):
                emit(way.schedule, own.strides, way.config, own.flags)
    assert len(needed) > 100
    assert needed <= known


def version_in(package: str, folder: Path) -> str:
    """As another process knows it, in which hashes differ."""
    code = f"from {package}.compiler.tuning import generator_version; print(generator_version())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_generator_version_is_the_same_in_every_process_though_files_move(tmp_path: Path) -> None:
    """The package has another name, the generator's folder too, and every file one more comment."""
    for name in ("compiler", "formats"):
        shutil.copytree(Path(problem_module.__file__).parents[2] / name, tmp_path / "moved" / name)
    for leaf in (lru_cache, identity_cache, close_names):
        shutil.copy(Path(leaf.__file__), tmp_path / "moved")
    compiler = tmp_path / "moved" / "compiler"
    (compiler / "codegen").rename(compiler / "kernel_text")
    for file in compiler.rglob("*.py"):
        text = file.read_text().replace("from .codegen import", "from .kernel_text import")
        text = text.replace("from ..codegen import", "from ..kernel_text import")
        file.write_text(text + "\n# moved\n")
    assert version_in("moved", tmp_path) == problem_module.generator_version()


def test_a_change_of_what_is_emitted_is_another_generator_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before, own = problem_module.emitted_version(), APPLICATIONS["group_spmm_owner"].problem()
    emitted = problem_module.emit

    def other(*given: Any) -> Kernel:
        made = emitted(*given)
        return replace(made, source=made.source.replace("tl.load(", "tl.load( "))

    monkeypatch.setattr(problem_module, "emit", other)
    assert problem_module.emitted_version() != before
    monkeypatch.setattr(problem_module, "generator_version", lambda: "one")
    key = replace(own).key
    monkeypatch.setattr(problem_module, "generator_version", lambda: "another")
    assert replace(own).key != key


def test_a_generator_version_is_the_same_whatever_gpu_is_planned_for() -> None:
    with described_as(A10):
        assert problem_module.emitted_version() == problem_module.generator_version()


def test_a_generator_version_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "one.py"
    monkeypatch.setattr(problem_module, "GENERATOR", (tmp_path / "source",))
    versions = []
    for text, emitted in (("a", "1" * 16), ("a", "2" * 16), ("b", "3" * 16), ("a", "4" * 16)):
        file.write_text(text)
        monkeypatch.setattr(problem_module, "emitted_version", lambda emitted=emitted: emitted)
        versions.append(problem_module.generator_version.__wrapped__())
    assert [version[0] for version in versions] == ["1", "1", "3", "1"]
    for kept in (tmp_path / "cache" / "generator").iterdir():
        kept.write_text("cut")  # as a full disk leaves it
    assert problem_module.generator_version.__wrapped__() == "4" * 16
    assert clear_cache() == 2


def test_another_choice_of_candidates_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    own, configs = APPLICATIONS["group_spmm_owner"].problem(), problem_module.configs
    key = own.key
    monkeypatch.setattr(problem_module, "configs", lambda *given: configs(*given)[:-1])
    assert replace(own).key != key
