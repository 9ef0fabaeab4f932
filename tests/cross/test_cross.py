"""Every statement that ships compiles for A100, A10, L4, H100 and B200, uses tensor cores and stays within its memory.

Each is built for one of them, or, where tests are thorough, for all. Needs no GPU, but a process in which Triton does
not interpret.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from building import SHARED_MEMORY, compile_for
from statements import IS_INTERPRETED, IS_THOROUGH

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.language.differentiate import terms
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.planning.device import DEVICES, described_as
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.tuning.footprint import shared_bytes
from insum_ops.compiler.tuning.problem import Candidate, Problem, candidates
from insum_ops.equivariant.channels import APART, MIXED, statement
from insum_ops.equivariant.path_tables import TEXTS, product_texts
from insum_ops.formats import ELL
from insum_ops.formats.facts import ConstantTables, Fact, OwnedRows, WrittenOnce

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="a process that interprets kernels can't compile them: run `make test-cross`"
)

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
TILES = OwnedRows("ROW", "TILE")


@dataclass(frozen=True)
class Case:
    """A statement of a shipped layer at a size it is used at."""

    name: str
    expr: str
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor, the output's among them
    dtype: torch.dtype
    fact: Fact | None = None  # without tensors
    padded: frozenset[str] = frozenset()  # the index tensors that hold a -1
    sum_dtype: torch.dtype | None = None
    precision: str = "ieee"
    wants_winners: bool = False

    def gradient(self, wrt: str, fact: Fact | None = None) -> Case:
        ((expr, upstream, _),) = terms(self.expr, wrt)
        output, upstream_of = parse(expr).output.name, parse(self.expr).output.name
        shapes = {**self.shapes, upstream: self.shapes[upstream_of], output: self.shapes[wrt]}
        return replace(self, name=f"{self.name} {output}", expr=expr, shapes=shapes, fact=fact)

    @property
    def problem(self) -> Problem:
        statement = parse(self.expr)
        indices = {access.name for access in statement.index_accesses}
        tensors = {
            name: torch.empty(self.shapes[name], dtype=torch.int32 if name in indices else self.dtype, device="meta")
            for name in statement.tensor_names
        }
        bound = bind(statement, tensors, self.shapes[statement.output.name])
        flags = Flags(self.precision, self.sum_dtype, padded=self.padded, wants_winners=self.wants_winners)
        return replace(problem_for(bound, tensors, self.fact), flags=flags, deterministic=False)

    @property
    def has_tensor_cores(self) -> bool:
        """A product in full float32 is multiply-adds on every GPU."""
        return self.dtype != SINGLE or self.precision != "ieee"

    def __str__(self) -> str:
        sums = f" summed in {str(self.sum_dtype)[6:]}" if self.sum_dtype is not None else ""
        precision = f" {self.precision}" if self.dtype == SINGLE else ""
        return f"{self.name} {str(self.dtype)[6:]}{sums}{precision}{' with winners' if self.wants_winners else ''}"


def group_spmm(dtype: torch.dtype) -> Case:
    shapes = {"AM": (90_000,), "AK": (90_000, 8), "AV": (90_000, 8), "B": (40_000, 128), "C": (40_000, 128)}
    expr = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
    return Case("GroupCOO SpMM", expr, shapes, dtype, OwnedRows("AM"), frozenset({"AK"}))


def group_max(dtype: torch.dtype, wants_winners: bool) -> Case:
    expr = "C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])"
    return replace(group_spmm(dtype), name="GroupCOO max", expr=expr, wants_winners=wants_winners)


def group_max_gradient(wrt: str) -> Case:
    """Of a max the winners' places are index tensors, which hold a -1 where a row is empty."""
    case = group_max(SINGLE, False)
    case = replace(case, shapes={**case.shapes, "P": case.shapes["C"], "Q": case.shapes["C"]})
    return replace(case.gradient(wrt), padded=frozenset({"AK", "P", "Q"}))


def block_spmm(edge: int) -> Case:
    P, R = 1600, 4096 // edge
    shapes = {"AM": (P,), "AK": (P,), "AV": (P, edge, edge), "B": (R, edge, 4096), "C": (R, edge, 4096)}
    expr = "C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]"
    return Case(f"BlockCOO SpMM {edge}", expr, shapes, HALF, OwnedRows("AM"))


def rows_together(is_layer: bool) -> Case:
    P, R = 3000, 128
    indices: dict[str, tuple[int, ...]] = {"AM": (R // 2, 2), "AT": (P,), "AS": (P, 2), "AK": (P,)}
    if is_layer:
        shapes = {**indices, "AV": (4900, 32, 32), "B": (4096, R, 32), "C": (4096, R, 32)}
        expr = "C[n,AM[AT[p],q],i] += B[n,AK[p],j] * AV[AS[p,q],i,j]"
    else:
        shapes = {**indices, "AV": (4900, 32, 32), "B": (R, 32, 4096), "C": (R, 32, 4096)}
        expr = "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]"
    name = f"rows together{', the layer' if is_layer else ''}"
    return Case(name, expr, shapes, HALF, OwnedRows("AM", "AT"), padded=frozenset({"AS"}))


def rows_in_turn(is_layer: bool) -> Case:
    P, R, edge = 200, 32, 128
    indices: dict[str, tuple[int, ...]] = {"AM": (R,), "AT": (P,), "AS": (P,), "AK": (P,)}
    if is_layer:
        shapes = {**indices, "AV": (P, edge, edge), "B": (4096, R, edge), "C": (4096, R, edge)}
        expr = "C[n,AM[AT[p]],i] += B[n,AK[p],j] * AV[AS[p],i,j]"
    else:
        shapes = {**indices, "AV": (P, edge, edge), "B": (R, edge, 4096), "C": (R, edge, 4096)}
        expr = "C[AM[AT[p]],i,n] += AV[AS[p],i,j] * B[AK[p],j,n]"
    name = f"rows in turn{', the layer' if is_layer else ''}"
    return Case(name, expr, shapes, HALF, OwnedRows("AM", "AT"), padded=frozenset())


def neighbour_gradient(edge: int = 32) -> Case:
    """The gradient of narrow blocks, several of a row in one tile; each is written to its own place."""
    P, Q, T, R = 640, 256 // edge, 4096, 4096 // edge
    shapes = {"AS": (P, Q), "AM": (P,), "AK": (P, Q)}
    shapes |= {"dY": (T, R, edge), "X": (T, R, edge), "dW": (4900, edge, edge)}
    expr = "dW[AS[p,q],o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]"
    return Case(f"BlockCOO dW {edge}", expr, shapes, HALF, WrittenOnce("AS"), frozenset({"AS", "AK"}))


def grouped_gradient(dtype: torch.dtype) -> Case:
    case = neighbour_gradient()
    shapes = {**case.shapes, "dW": (640, 8, 32, 32)}
    expr = "dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]"
    return Case("BlockGroupCOO dW", expr, shapes, dtype, padded=frozenset({"AK"}))


def convolution(channels: int, dtype: torch.dtype, sum_dtype: torch.dtype | None = None) -> Case:
    P, X = 5300, 65_663
    shapes = {"MX": (P, 128), "MY": (P, 128), "MZ": (P,)}
    shapes |= {"In": (X, channels), "Out": (X, channels), "W": (27, channels, channels)}
    expr = "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]"
    padded = frozenset({"MX", "MY"})
    return Case(f"convolution {channels}", expr, shapes, dtype, padded=padded, sum_dtype=sum_dtype)


def tiled_convolution(channels: int) -> Case:
    """Tiles of 128 outputs, of 27 taps some ten each."""
    P, X = 5300, 65_663
    shapes = {"ROW": (513, 128), "TILE": (P,), "NBR": (P, 128), "TAP": (P,)}
    shapes |= {"In": (X, channels), "Out": (X, channels), "Weight": (27, channels, channels)}
    expr = "Out[ROW[TILE[p],q],m] += In[NBR[p,q],c] * Weight[TAP[p],c,m]"
    return Case(f"tiled convolution {channels}", expr, shapes, HALF, TILES, frozenset({"ROW", "NBR"}))


def tensor_product(precision: str) -> Case:
    """lmax 2: 9 components, and 11 paths of up to 25 coefficients, padded to 32."""
    shapes = dict.fromkeys(("CGI", "CGJ", "CGK", "CGV"), (11, 32))
    shapes |= {"X": (10_000, 9, 32), "Y": (10_000, 9), "Z": (10_000, 9, 32), "W": (10_000, 11, 32, 32)}
    expr = "Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,p,u,w]"
    padded = frozenset({"CGI", "CGJ", "CGK"})
    return Case("tensor product", expr, shapes, SINGLE, padded=padded, precision=precision)


def tensor_tables(precision: str, channels: int) -> tuple[Case, ...]:
    """lmax 3: 16 components in 4 blocks, and 23 paths with their coefficients in tables; the product, dY and dW."""
    B, P = 10_000, 23
    wide = (B, 16, channels)
    shapes = {"ROW": (4, 8), "TILE": (P,), "CGL": (P,), **dict.fromkeys(("CGI", "CGJ", "CGK"), (P, 8))}
    shapes |= {"CG": (P, 8, 8, 8), "X": wide, "Y": (B, 16), "Z": wide, "W": (B, P, channels, channels)}
    shapes |= {"dZ": wide, "dY": shapes["Y"], "dW": shapes["W"]}
    forward = Case(
        f"tensor tables {channels}", TEXTS.product[0], shapes, SINGLE, TILES, frozenset({"ROW"}), precision=precision
    )
    others = [("dY", TEXTS.dY[0]), ("dW", TEXTS.dW[0])]
    gradients = [replace(forward, name=f"{forward.name} {name}", expr=expr, fact=None) for name, expr in others]
    return (forward, *(replace(case, padded=frozenset()) for case in gradients))


def tensor_columns(precision: str, channels: int) -> Case:
    """lmax 1: 4 components in 2 blocks, 4 paths, tables of columns."""
    B, P = 10_000, 4
    wide = (B, 4 * channels)
    shapes = {"ROW": (2, 4, channels), "TILE": (P,), "CGL": (P,), "CGJ": (P, 4, channels), "CGK": (P, 4)}
    shapes |= {"CG": (P, 4, 4, 4), "X": wide, "Y": (B, 4), "Z": wide, "W": (B, P, channels, channels)}
    text, _ = product_texts(reads_columns=True, writes_columns=True)
    name, padded = f"tensor columns {channels}", frozenset({"ROW"})
    return Case(name, text, shapes, SINGLE, TILES, padded, precision=precision)


def channelwise() -> Iterator[Case]:
    """About as many coefficients as MACE's largest layer has, as numbers in the source: the product and dY."""
    batch, channels = 20_000, 128
    draw = torch.Generator().manual_seed(0)
    counts = {"Z": 50, "X": 9, "Y": 16, "W": 12}
    moving = {name: (batch, count, *([channels] if name != "Y" else [])) for name, count in counts.items()}
    for made in "ZY":
        size = counts[made], 200 // counts[made]
        tables = {"CGV": torch.randn(size, generator=draw)}
        for name, letter in zip(counts, "IJKL"):
            if name != made:
                tables[f"CG{letter}"] = torch.randint(0, counts[name], size, generator=draw)
        shapes = {**moving, **{name: tuple(table.shape) for name, table in tables.items()}}
        yield Case(
            f"channelwise {made}", statement(made, APART, False, False), shapes, SINGLE, ConstantTables.of(tables)
        )


def mixed(channels: int) -> Iterator[Case]:
    """Channels that mix, over coefficients as numbers: as at lmax 2 paths lead from block to block, with a few each."""
    batch, blocks = 10_000, (range(1), range(1, 4), range(4, 9))
    counts = {"Z": 9, "X": 9, "Y": 9, "W": 11}
    paths = [
        (a, b, c)
        for a, b, c in itertools.product(range(3), repeat=3)
        if abs(a - b) <= c <= a + b and not (a + b + c) % 2
    ]
    draw = torch.Generator().manual_seed(0)
    entries = [
        (*place, number)
        for number, path in enumerate(paths)
        for at, place in enumerate(itertools.product(*(blocks[degree] for degree in path)))
        if at == 0 or float(torch.rand((), generator=draw)) < 0.2
    ]
    moving = {name: (batch, count) for name, count in counts.items()}
    moving = {name: (*size, *[channels] * len(own)) for (name, size), own in zip(moving.items(), MIXED)}
    numbers = torch.randn(len(entries), generator=draw)
    coefficients = ELL.from_coo(torch.tensor(entries).T, numbers, tuple(counts.values()), group_dim=0)
    for dim, made in enumerate(counts):
        form = coefficients.regroup(dim)
        tables = {f"CG{letter}": at for letter, at in zip("IJKL", form.coords) if at is not None}
        tables["CGV"] = form.values
        shapes = {**moving, **{name: tuple(table.shape) for name, table in tables.items()}}
        yield Case(
            f"mixed {made} {channels}", statement(made, MIXED, False, False), shapes, SINGLE, ConstantTables.of(tables)
        )


def shared_weights(precision: str) -> Case:
    """The gradient of weights that 10,000 rows share: programs share its sums."""
    shapes = {"T": (10_000, 9, 64), "dZ": (10_000, 9, 64), "dW": (64, 64)}
    return Case("shared weights", "dW[u,w] += T[b,i,u] * dZ[b,i,w]", shapes, SINGLE, precision=precision)


def cases() -> Iterator[Case]:
    """Gradients as autograd takes them; B's of a GroupCOO product is the forward kernel on the regrouped pattern."""
    for precision in ("ieee", "tf32"):
        forward = tensor_product(precision)
        yield from (forward, *map(forward.gradient, "XYW"), shared_weights(precision))
        yield from tensor_tables(precision, 64)
        yield tensor_tables(precision, 16)[0]
        yield tensor_columns(precision, 32)
    yield from channelwise()
    yield from (*mixed(16), *mixed(32))
    for edge in (128, 64, 32):
        forward = block_spmm(edge)
        yield from (forward, forward.gradient("B", fact=OwnedRows("AK")), forward.gradient("AV"))
    yield from map(rows_together, (False, True))
    yield from map(rows_in_turn, (False, True))
    yield from (neighbour_gradient(), neighbour_gradient(64), grouped_gradient(HALF), grouped_gradient(SINGLE))
    for channels in (128, 32):
        forward = convolution(channels, HALF)
        yield from (forward, convolution(channels, BRAIN), convolution(channels, HALF, SINGLE))
        yield from (forward.gradient("In"), forward.gradient("W"))
    yield from map(tiled_convolution, (64, 128))
    for dtype in (SINGLE, HALF):
        forward = group_spmm(dtype)
        yield from (forward, forward.gradient("AV"))
    for dtype in (SINGLE, HALF, torch.float64):
        yield from (group_max(dtype, wants_winners) for wants_winners in (False, True))
    yield from map(group_max_gradient, ("AV", "B"))


def some_of(every: Sequence[Case]) -> list[Case]:
    """Every statement, and every dtype and precision, at one size; all cases where tests are thorough."""
    if IS_THOROUGH:
        return list(every)
    statements = {(case.expr, case.wants_winners): case for case in every}
    numbers = {(case.dtype, case.precision, case.sum_dtype): case for case in every}
    return [case for case in every if case in statements.values() or case in numbers.values()]


CASES = some_of(list(cases()))


def chosen(problem: Problem, count: int) -> list[Candidate]:
    """The first `count` configs, and with several of them the first of every other strategy."""
    ways = candidates(problem)
    found = list(ways[:count])
    for way in ways if count > 1 else ():
        if way.schedule.strategy not in [other.schedule.strategy for other in found]:
            found.append(way)
    return found


def check(case: Case, sm: int, count: int, build: Callable) -> None:
    problem = case.problem
    built = [(way, build(problem, way, sm)) for way in chosen(problem, count)]
    report = "\n".join(f"{way}: {kernel}" for way, kernel in built)
    for way, kernel in built:
        if way.schedule.uses_dot:
            assert kernel.tensor_core_ops > 0 or not case.has_tensor_cores, f"{way} uses no tensor core\n{report}"
            reckoned = shared_bytes(way.schedule, way.config, DEVICES[f"sm_{sm}"], problem.flags.precision)
            reckoned *= 1 if case.sum_dtype is None else 2  # it takes the result to be stored in its own dtype
            assert kernel.shared_memory <= reckoned, f"{reckoned} B of shared memory were reckoned with\n{report}"
    assert min(kernel.shared_memory for _, kernel in built) <= SHARED_MEMORY[sm], report
    if sm == 90:
        (_, first), *_ = built
        assert first.stack == first.spills == 0, f"the first config spills {first.spills} times\n{report}"
        assert 2 * sum(kernel.stack == 0 for _, kernel in built) >= len(built), f"most configs spill\n{report}"


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sm", [90, 80, 86, 89, 100])
def test_every_gpu_runs_the_first_configs(case, sm, build):
    with described_as(DEVICES[f"sm_{sm}"]):
        check(case, sm, 2 if IS_THOROUGH and sm == 90 else 1, build)


@pytest.mark.parametrize("case", [neighbour_gradient(), grouped_gradient(HALF)], ids=str)
def test_neighbours_in_one_tile_are_loaded_16_bytes_at_a_time(case, build):
    """The compiler sees that a position is the same for all columns of a block, and that these lie side by side."""
    problem = case.problem
    for way in candidates(problem)[: 3 if IS_THOROUGH else 1]:
        assert way.schedule.merged is not None
        sass = build(problem, way, 90).sass
        copies = re.findall(r"\bLDGSTS\S*", sass)
        assert copies
        assert all(".128" in copy for copy in copies)
        assert all(".128" in store for store in re.findall(r"\bSTG\S*", sass))
        assert "HGMMA" in sass


@pytest.mark.parametrize("case", [rows_together(False), rows_in_turn(True)], ids=str)
def test_loads_of_the_next_row_are_on_their_way_while_one_is_stored(case, build):
    """One loop for all rows of a program, whose dots wait for all others only where a row ends."""
    problem = case.problem
    ways = [way for way in candidates(problem) if way.config.rows > 1]
    assert ways
    for way in ways if IS_THOROUGH else ways[:1]:
        kernel = build(problem, way, 90)
        assert kernel.stack == kernel.spills == 0
        assert kernel.shared_memory <= SHARED_MEMORY[90]
        loop = kernel.sass[kernel.sass.index("HGMMA") :]
        copies, stores = loop.index("LDGSTS"), loop.index("STG")
        assert loop.index("gsb0, 0x1") < copies < loop.index("gsb0, 0x0") < stores


def test_one_program_may_own_all_rows(build):
    """Of a few rows and very many columns."""
    shapes = {"AM": (2, 2), "AT": (30,), "AS": (30, 2), "AK": (30,), "AV": (40, 32, 32)}
    expr = "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]"
    wide = {"B": (16, 32, 2**17), "C": (4, 32, 2**17)}
    problem = Case("few rows", expr, {**shapes, **wide}, HALF, OwnedRows("AM", "AT"), padded=frozenset({"AS"})).problem
    way = next(way for way in candidates(problem) if way.config.rows > 1)
    assert "first_row = 0" in problem.launcher(way).kernel.source
    assert "HGMMA" in build(problem, way, 90).sass


@pytest.mark.sampled
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("channels", [64, 128])
def test_tiles_of_outputs_are_summed_in_registers_and_stored(channels, sm, build):
    problem = tiled_convolution(channels).problem
    ways = candidates(problem)
    assert {way.schedule.strategy for way in ways} == {"owner"}
    for way in ways[: 2 if IS_THOROUGH else 1]:
        kernel = build(problem, way, sm)
        assert kernel.tensor_core_ops > 0, str(way)
        assert kernel.stack == kernel.spills == 0, f"{way}: {kernel}"
        assert not re.search(r"\b(?:ATOM|ATOMG|RED|REDG)\b", kernel.sass)


def test_blackwell_sums_up_what_may_be_no_number(build):
    problem = rows_together(True).problem
    way = candidates(problem)[-1]
    assert "if total" in problem.launcher(way).kernel.source
    assert build(problem, way, 100).tensor_core_ops > 0


def test_what_triton_can_not_build_is_refused_in_words(build):
    """Two of this gradient's kernels end in Triton's TritonGPURemoveLayoutConversions, in 3.6 and 3.7."""
    k, j, n = 2, 17, 4
    expr = "dA0[I0[k,k]] += dOUT[I5[j]] * A1[k] * A2[k,I2[I1[j]],I4[k,I3[k]]]"
    values = {"dOUT": (n,), "A1": (k,), "A2": (k, n, n)}
    indices = {"I0": (k, k), "I5": (j,), "I2": (n,), "I1": (j,), "I4": (k, n), "I3": (k,)}
    tensors = {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in values.items()}
    tensors |= {name: torch.empty(shape, dtype=torch.int64, device="meta") for name, shape in indices.items()}
    problem = problem_for(bind(parse(expr), tensors, (n,)), tensors, padded=frozenset({"I1", "I2", "I3", "I4"}))
    ways, refused = candidates(problem), []
    for way in ways:
        try:
            build(problem, way, 90)
        except UnsupportedError as error:
            refused.append(str(error))
    assert len(refused) < len(ways)
    start = f"the kernel of {expr} could not be built (RuntimeError: PassManager::run failed); its source is in "
    assert all(message.startswith(start) and "\n" not in message for message in refused), refused


def moved(expr: str, shapes: Mapping[str, tuple[int, ...]], wanted: Callable[[Candidate], bool]) -> str:
    """Triton's own code of the first wanted candidate of a statement that moves float32."""
    own = Case("moved", expr, shapes, SINGLE).problem
    return str(compile_for(90, own, next(way for way in candidates(own) if wanted(way))).asm["ttgir"])


def test_sums_of_neighbours_are_added_as_they_were_loaded():
    shapes = {"X": (90_000, 77), "G": (90_000,), "Y": (4_000, 77)}
    code = moved("Y[G[p],c] += X[p,c]", shapes, lambda way: way.config.run > 1)
    assert "convert_layout" not in code
    assert "sizePerThread = [1]," in code


def test_threads_lie_along_columns_that_go_round():
    shapes = {"A": (2_695,), "B": (2_609,), "Y": (2_695, 2_609)}
    code = moved("Y[i,j] = A[i] * B[j]", shapes, lambda way: way.config.is_aligned)
    assert re.findall(r"threadsPerWarp = (\[\d+, \d+\])", code) == ["[1, 32]"]
