"""Random statements and their gradients, built for GPUs that need not be there: what no interpreter can see.

    python tests/cross/fuzz.py --kernels 2000 --seed 0 --jobs 2

Every candidate of a statement is built for sm_90, those of some statements for another GPU instead. A kernel counts as
built only if its shared memory fits the GPU. Compilers may abort or hang, so kernels are built in processes of their
own: one that dies is a finding, which names the statement and the config, and another one goes on after it.

The exit status is 1 where a process died or hung, or where nothing is left to run a statement on one of NVIDIA's GPUs.
What an AMD GPU can't do is counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where `statements` and `problems` are

import hypothesis
import torch
from building import SHARED_MEMORY, compile_for
from hypothesis import HealthCheck, Phase, given
from problems import APPLICATIONS
from statements import LAYOUTS, Case, base_shape, statements, view

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.language.differentiate import terms, winners
from insum_ops.compiler.language.errors import InsumError, UnsupportedError
from insum_ops.compiler.language.ir import Const, Statement, Var, walk
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.runtime.launch import reason_of
from insum_ops.compiler.tuning.problem import Problem, candidates
from insum_ops.formats.facts import ConstantTables, Fact, WrittenOnce

MAIN_TARGET = 90
OTHER_TARGETS: tuple[int | str, ...] = (80, "gfx942", 100, 89)
OTHERS_EACH = 5  # of as many jobs one is for another GPU, in turn
HUNG = 300.0  # seconds for one kernel
TOLD_EACH = 50  # statements
# a few values; a power of two and one more than a tile; several tiles, whole and not
SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 65, 128, 130, 256, 300)
LONG = (1000, 4096, 5000, 70_000)  # of a first dimension, which varies from call to call
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float32, torch.float64)
LARGEST_TENSOR = 2**40  # elements: no GPU holds more, and torch does not count them
MOST_NUMBERS = 48  # of tables that a source may hold
PATTERNS = (  # that random statements seldom have: dots of every kind, sums that programs share, chains, maxima
    "C[i,j] += A[i,k] * B[k,j]",
    "C[b,i,j] += A[b,i,k] * B[b,k,j]",
    "D[i,l] += A[i,j] * B[j,k] * C[k,l]",
    "C[i] += A[i,k] * B[k]",
    "C[i,j] += A[i,E[k]] * B[k,j]",
    "C[M[p],n] += A[p] * B[K[p],n]",
    "C[m,n] += A[p,m] * B[K[p],n]",
    "C[m,n] = max(A[m,k] * B[k,n])",
    "C[M[p],n] = min(A[p,q] * B[K[p,q],n])",
    "C[Z[p],c,m] += A[MX[p,q],c] * B[MY[p,q],m]",
    "C[b,w] += W[u,v,w] * X[b,u] * Y[b,v]",
)


@dataclass(frozen=True)
class Tensor:
    """A tensor without memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: torch.Tensor) -> Tensor:
        return Tensor(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))

    @property
    def meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype), device="meta")


@dataclass(frozen=True)
class Sample:
    """A statement over tensors that have a shape and nothing else, with all that decides which kernels it has."""

    expr: str
    tensors: Mapping[str, Tensor]
    size: tuple[int, ...]
    fact: str = ""  # as text, since a sample is written to a file
    padded: tuple[str, ...] | None = None
    precision: str = "ieee"
    sum_dtype: str | None = None
    wants_winners: bool = False
    deterministic: bool = False
    tables: Mapping[str, Any] = field(default_factory=dict)  # the numbers of index tensors that never change

    @staticmethod
    def read(content: dict[str, Any]) -> Sample:
        tensors = {
            name: Tensor(tuple(own["shape"]), tuple(own["stride"]), own["dtype"])
            for name, own in content["tensors"].items()
        }
        padded = None if content["padded"] is None else tuple(content["padded"])
        return Sample(**{**content, "tensors": tensors, "size": tuple(content["size"]), "padded": padded})

    @property
    def problem(self) -> Problem:
        given = {name: tensor.meta for name, tensor in self.tensors.items()}
        bound = bind(parse(self.expr), given, self.size)
        fact = ConstantTables(self.tables) if self.tables else Fact.from_text(self.fact, [])
        flags = Flags(
            self.precision,
            None if self.sum_dtype is None else getattr(torch, self.sum_dtype),
            padded=None if self.padded is None else frozenset(self.padded),
            wants_winners=self.wants_winners,
        )
        return replace(problem_for(bound, given, fact), flags=flags, deterministic=self.deterministic)

    def __str__(self) -> str:
        tensors = ", ".join(f"{name} {t.dtype}{list(t.shape)} by {list(t.stride)}" for name, t in self.tensors.items())
        rest = {key: value for key, value in asdict(self).items() if key not in ("expr", "tensors") and value}
        return f"{self.expr}\n    {tensors}\n    {rest}"


def samples(seed: int, count: int) -> Iterator[Sample]:
    """Statements and their gradients, the same ones for the same seed and hypothesis."""
    random = Random(seed)
    drawn: list[Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        derandomize=False,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(statements(FLOATS, reductions=("sum", "sum", "sum", "sum", "max", "min")))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    random.shuffle(drawn)  # hypothesis begins with simple ones, and varies some that it has drawn
    seen = set()
    for case in drawn:
        expr, fact = case.expr, ""
        dtypes = {name: operand.base.dtype for name, operand in case.operands.items()}
        layouts = {name: operand.layout for name, operand in case.operands.items()}
        if random.random() < 0.45:
            shipped = random.choice([*APPLICATIONS.values(), *PATTERNS])
            expr, fact = (shipped, "") if isinstance(shipped, str) else (shipped.expr, str(shipped.fact or ""))
            dtypes, layouts = {}, {}
        elif expr in seen:
            continue
        seen.add(expr)
        made = _enlarged(expr, fact, dtypes, layouts, random)
        if made is not None:
            yield made
            yield from _gradients(made, random)


def _enlarged(
    expr: str, fact: str, dtypes: Mapping[str, torch.dtype], layouts: Mapping[str, str], random: Random
) -> Sample | None:
    """A statement at sizes that make its kernels interesting."""
    statement = parse(expr)
    shapes = _sizes(statement, random)
    size = shapes.pop("")
    if statement.output.name in shapes and statement.output.name not in dtypes:
        return None
    if max(map(math.prod, shapes.values()), default=0) > LARGEST_TENSOR:
        return None
    one = random.choice(FLOATS)
    is_mixed = random.random() < 0.15 and bool(dtypes)
    tensors = {}
    for name, shape in shapes.items():
        is_index = name in statement.index_names
        dtype = random.choice((torch.int32, torch.int64)) if is_index else dtypes[name] if is_mixed else one
        layout = layouts.get(name) or random.choice((*["contiguous"] * 9, *LAYOUTS))
        base = torch.empty(base_shape(layout, shape), dtype=dtype, device="meta")
        tensors[name] = Tensor.of(view(layout, base, shape))
    return _with_settings(Sample(expr, tensors, size, fact), random)


def _sizes(statement: Statement, random: Random, chosen: dict[object, int] | None = None) -> dict[str, tuple[int, ...]]:
    """A shape of every tensor, the output's under "": dimensions that one index runs over are equally long.

    `chosen` holds lengths that are settled; those that are drawn are added to it.
    """
    group: dict[object, object] = {}

    def find(one: object) -> object:
        while group.setdefault(one, one) != one:
            one = group[one]
        return one

    seeded, least = statement.output.name, Counter[object]()
    is_first, ranks = set(), {}
    roots = (statement.output, *statement.accesses)
    for access in [access for root in roots for access in walk(root)]:
        name = "" if access is statement.output else access.name
        ranks[name] = len(access.indices)
        for dim, index in enumerate(access.indices):
            place = find((name, dim))
            if isinstance(index, Var):
                group[place] = find(index.name)
            elif isinstance(index, Const):
                least[(name, dim)] = max(least[(name, dim)], index.value + 1)
            if dim == 0:
                is_first.add((name, dim))
    needed: dict[object, int] = {}
    long_ones = {find(place) for place in is_first}
    for place, value in least.items():
        needed[find(place)] = max(needed.get(find(place), 1), value)
    chosen = {} if chosen is None else chosen
    shapes = {}
    for name, rank in ranks.items():
        shape = []
        for dim in range(rank):
            root = find((name, dim))
            if root not in chosen:
                menu = LONG if root in long_ones and random.random() < 0.2 else SIZES
                chosen[root] = max(random.choice(menu), needed.get(root, 1))
            shape.append(chosen[root])
        shapes[name] = tuple(shape)
    if seeded in shapes:
        shapes[seeded] = shapes[""]
    return shapes


def _with_settings(sample: Sample, random: Random) -> Sample:
    """The same under settings and facts that it may have."""
    statement = parse(sample.expr)
    dtypes = {tensor.dtype for tensor in sample.tensors.values()}
    indices = statement.index_names
    fact, scattered = sample.fact, statement.output.indirections
    if not fact and len(scattered) == 1 and len(scattered[0].indices) == 1 and isinstance(scattered[0].indices[0], Var):
        fact = random.choice(("", scattered[0].name, scattered[0].name, str(WrittenOnce(scattered[0].name))))
    small = {name: sample.tensors[name].shape for name in indices if name in sample.tensors}
    tables: dict[str, Any] = {}
    is_small = bool(small) and all(0 < torch.Size(shape).numel() <= MOST_NUMBERS for shape in small.values())
    if is_small and not fact and random.random() < 0.5:
        limits = _limits(sample)
        tables = {name: _numbers(shape, limits[name], random) for name, shape in small.items()}
    return replace(
        sample,
        fact=fact,
        padded=None if random.random() < 0.1 else tuple(name for name in indices if random.random() < 0.4),
        precision=random.choice(("ieee", "tf32", "tf32x3")) if "float32" in dtypes else "ieee",
        sum_dtype="float32" if dtypes & {"float16", "bfloat16"} and random.random() < 0.5 else None,
        wants_winners=not statement.is_sum and random.random() < 0.5,
        deterministic=random.random() < 0.12,
        tables=tables,
    )


def _limits(sample: Sample) -> dict[str, int]:
    """Below which positions in each index tensor lie."""
    found: dict[str, int] = {}
    for pointing in parse(sample.expr).pointings:
        shape = sample.size if pointing.is_output else sample.tensors[pointing.into].shape
        found[pointing.name] = min(found.get(pointing.name, shape[pointing.dim]), shape[pointing.dim])
    return found


def _numbers(shape: tuple[int, ...], limit: int, random: Random) -> Any:
    if not shape:
        return random.randrange(limit)
    return [_numbers(shape[1:], limit, random) for _ in range(shape[0])]


def _gradients(sample: Sample, random: Random) -> Iterator[Sample]:
    """Of each factor, where it stands first."""
    statement = parse(sample.expr)
    if statement.output.name in sample.tensors:
        return  # what sums start from has a gradient without a kernel
    places, ones = ((), "") if statement.is_sum or not statement.reduced else winners(sample.expr)
    factors = dict.fromkeys(factor.name for factor in statement.accesses)
    for name in factors:
        (expr, upstream, _), *_ = terms(sample.expr, name)
        derived = parse(expr)
        dtype = sample.tensors[name].dtype
        known_tensors = {**sample.tensors, upstream: _contiguous(sample.size, dtype)}
        for winner, tensor, dim in places:
            known_tensors[winner] = _contiguous(sample.size, "int64")
            known_tensors.setdefault(ones, _contiguous((sample.tensors[tensor].shape[dim],), dtype))
        tensors = {key: known_tensors[key] for key in derived.tensor_names}
        yield _with_settings(Sample(expr, tensors, sample.tensors[name].shape), random)


def _contiguous(shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor.of(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))


@dataclass(frozen=True)
class Job:
    """The first `count` candidates of a statement, to be built for one GPU from number `start` on."""

    number: int
    sample: Sample
    target: int | str
    count: int
    is_whole: bool  # these are all its candidates
    start: int = 0


def jobs(seed: int, kernels: int, most: int = 1000) -> Iterator[Job]:
    """As many as make `kernels` of them, up to `most` of a statement; the same ones for the same seed."""
    number = turn = 0
    for again in range(1000):
        for sample in samples(seed + 1_000_003 * again, max(20, kernels // 8)):
            try:
                problem = sample.problem
                ways = 0 if problem.bound.is_empty else len(candidates(problem))
            except InsumError:  # mixed dtypes, or shapes, that are refused in words
                continue
            if not ways:
                continue
            target: int | str = MAIN_TARGET
            if number % OTHERS_EACH == OTHERS_EACH - 1:
                target, turn = OTHER_TARGETS[turn % len(OTHER_TARGETS)], turn + 1
            count = min(ways, most, kernels)
            yield Job(number, sample, target, count, count == ways)
            number, kernels = number + 1, kernels - count
            if not kernels:
                return


@dataclass
class Report:
    """What came of the jobs."""

    statements: int = 0
    gradients: int = 0
    built: Counter[str] = field(default_factory=Counter)  # by target
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by target and reason
    alive: Counter[int] = field(default_factory=Counter)  # kernels that were built, by the job's number
    dead: list[str] = field(default_factory=list)
    left_without: list[str] = field(default_factory=list)  # statements of which nothing could be built
    without_on_amd: int = 0

    def finish(self, job: Job) -> None:
        self.statements += 1
        self.gradients += job.sample.expr.startswith("d")  # no other output's name does
        if not self.statements % TOLD_EACH:
            print(f"{self.statements} statements, {self.kernels} kernels so far", flush=True)
        if job.is_whole and not self.alive[job.number]:
            if isinstance(job.target, int):
                self.left_without.append(f"nothing runs on {_name(job.target)}: {job.sample}")
            else:
                self.without_on_amd += 1

    @property
    def kernels(self) -> int:
        return sum(self.built.values()) + sum(self.refused.values()) + len(self.dead)

    @property
    def is_sound(self) -> bool:
        return not (self.dead or self.left_without)

    def __str__(self) -> str:
        built = ", ".join(f"{count} {target}" for target, count in sorted(self.built.items()))
        reasons = ", ".join(f"{count} {target} {why}" for (target, why), count in sorted(self.refused.items()))
        on_amd = f", {self.without_on_amd} without any kernel on gfx942" if self.without_on_amd else ""
        return (
            f"{self.statements} statements, {self.gradients} of them gradients, {self.kernels} kernels: "
            f"{sum(self.built.values())} built ({built}), {sum(self.refused.values())} refused ({reasons or 'none'}), "
            f"{len(self.dead)} dead workers, {len(self.left_without)} statements without any kernel{on_amd}"
        )


def _name(target: int | str) -> str:
    return f"sm_{target}" if isinstance(target, int) else target


def run(todo: Iterable[Job], workers: int) -> Report:
    """Build them all, in as many processes."""
    report, turn = Report(), threading.Lock()
    pending: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in todo:
        pending.put(job)
    with tempfile.TemporaryDirectory(prefix="insum-fuzz-") as folder:

        def work(number: int) -> None:
            worker = None
            while True:
                try:
                    job: Job | None = pending.get_nowait()
                except queue.Empty:
                    break
                while job is not None:
                    worker = worker or Worker(Path(folder) / str(number))
                    job = worker.build(job, report, turn)
                    worker = worker if worker.process.returncode is None else None
            if worker is not None:
                worker.close()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return report


class Worker:
    """A process that builds kernels, one after another."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "stderr"
        caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "INSUM_CACHE_DIR": str(folder / "insum")}
        environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, __file__, "--worker"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def build(self, job: Job, report: Report, turn: threading.Lock) -> Job | None:
        """None: it is done; else the process died, and what is left of the job."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        begun: dict[str, Any] = {"at": job.start, "way": "before the first candidate"}
        clock = threading.Timer(HUNG, self.process.kill)
        clock.start()
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            event = json.loads(line)
            clock.cancel()
            with turn:
                if event["what"] == "done":
                    report.finish(job)
                    return None
                if event["what"] == "built":
                    report.built[_name(job.target)] += 1
                    report.alive[job.number] += 1
                elif event["what"] == "refused":
                    report.refused[_name(job.target), event["why"]] += 1
                    print(
                        f"refused for {_name(job.target)}, {event['why']}: {begun['way']} of {job.sample}", flush=True
                    )
            if event["what"] == "begin":
                begun = event
            clock = threading.Timer(HUNG, self.process.kill)
            clock.start()
        is_hung = not clock.is_alive()
        clock.cancel()
        status = self.close()
        told = self.log.read_text()[-2000:]
        why = f"hung for {HUNG:.0f} s" if is_hung else f"died with status {status}"
        with turn:
            report.dead.append(f"{why} on {_name(job.target)}: {begun['way']} of {job.sample}\n{told}")
            if begun["at"] + 1 >= job.count:
                report.finish(job)
        return replace(job, start=begun["at"] + 1) if begun["at"] + 1 < job.count else None

    def close(self) -> int:
        """The status with which the process ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


def work() -> None:
    """Read jobs, build their kernels and tell of each: what a worker process does."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer

    def tell(**event: object) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    for line in sys.stdin:
        content = json.loads(line)
        job = Job(**{**content, "sample": Sample.read(content["sample"])})
        problem = job.sample.problem
        for at, way in enumerate(candidates(problem)[: job.count]):
            if at < job.start:
                continue
            tell(what="begin", at=at, way=str(way))
            try:
                shared = compile_for(job.target, problem, way).metadata.shared
            except UnsupportedError as error:
                tell(what="refused", why=re.sub(r"\d+", "#", reason_of(error.__cause__ or error)))
                continue
            is_fitting = shared <= SHARED_MEMORY[job.target]
            tell(what="built") if is_fitting else tell(what="refused", why="too much shared memory")
        tell(what="done")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    start = time.perf_counter()
    report = run(jobs(options.seed, options.kernels), options.jobs)
    for finding in (*report.dead, *report.left_without):
        print(finding)
    print(f"{report}; seed {options.seed}, {time.perf_counter() - start:.0f} s")
    return 0 if report.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
