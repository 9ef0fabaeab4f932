"""Do the tests bite? Changes one thing at a time in a stage of the compiler, and runs that stage's tests on it.

    python tests/mutants.py                             every file; fails below 85 % killed, or for a new survivor
    python tests/mutants.py compiler/language/parse.py  one file; -f "run|sum_dtype": the functions of such names

The changes are mutmut's (a sign, a number, a word, an argument left out, ...), here also in decorated functions and at
the top level, which mutmut itself leaves out. A mutant in a function is that function's code replaced in a fork of a
process that has already collected the tests; only the tests that reach the function run, the quickest first, until one
fails. What survives, and whatever is changed outside functions, is then tried from the start: in a fork that imports
the package with the changed file. `tests/mutants.md` says why a mutant survives.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

import hypothesis
import libcst as cst
import numpy  # noqa: F401 - here and below: imported once, before the forks
import opt_einsum  # noqa: F401
import pytest
import torch
import triton  # noqa: F401
from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parent.parent
REASONS = ROOT / "tests" / "mutants.md"
LEAST = 85  # percent
SCHEDULES = ("schedule", "strategies", "shared_sums", "dots", "neighbours", "unrolled_tables")
TESTS = {  # the stage's own, then those of what reads its results
    "compiler/language/parse.py": ("parse", "ir"),
    "compiler/binding/rewrite.py": ("rewrite", "formats"),
    "compiler/language/differentiate.py": ("differentiate", "rewrite", "batch"),
    "compiler/binding/bind.py": ("bind", *SCHEDULES),
    "compiler/binding/bind_errors.py": ("bind",),
    "compiler/reference/first.py": ("faster",),
    "compiler/reference/shared.py": ("faster",),
    "compiler/planning/scatter.py": ("scatter", *SCHEDULES, "codegen", "space"),
    "compiler/planning/schedule.py": (*SCHEDULES, "codegen", "space", "unroll"),
    "compiler/planning/rules.py": (*SCHEDULES, "codegen", "space", "unroll"),
}
REWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis, which is imported before the forks
QUIET = ("-qx", "--tb=no", "--no-header", "-pno:cacheprovider", "-pno:xdist", "-W", REWRITTEN)
CONTROL = -1  # the number of the mutant that is the file as it is, which must survive
MEMORY = 8 << 30  # bytes that a mutant which never ends may take
UNCALLED = ("len", "isinstance")  # mutmut leaves these alone: None as an argument only raises


@dataclass(frozen=True)
class Mutant:
    """A file with one change; `path` are the class and function that it lies in."""

    file: str
    path: tuple[str, ...]
    source: str
    diff: str

    @property
    def key(self) -> tuple[str, str]:
        return self.file, f"@@ {'.'.join(self.path) or 'top level'}\n{self.diff}"


class _Changes(cst.CSTVisitor):
    """Every change of mutmut's operators: (node, changed node, what is around it, outermost first)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, tuple[cst.CSTNode, ...]]] = []
        self.around: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_alone(node):
            return False
        if isinstance(node, cst.Assert):
            node.test.visit(self)
            return False
        if isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.SimpleStatementLine)):
            self.around.append(node)
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                self.found += [(node, changed, tuple(self.around)) for changed in operator(node)]
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self.around and self.around[-1] is original_node:
            self.around.pop()


def _is_left_alone(node: cst.CSTNode) -> bool:
    """What no test can or should notice: types, decorators, exported names."""
    if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
        return True
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        return node.func.value in UNCALLED
    if isinstance(node, cst.Assign):
        names = [target.target.value for target in node.targets if isinstance(target.target, cst.Name)]
        return "__all__" in names
    return False


def mutants_of(file: str) -> list[Mutant]:
    """Each change that gives another program."""
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    wrapper = MetadataWrapper(cst.parse_module(text))
    places = wrapper.resolve(WhitespaceInclusivePositionProvider)
    changes, found = _Changes(), dict[str, Mutant]()
    wrapper.module.visit(changes)
    for node, changed, around in changes.found:
        inside = around[-1]  # the smallest piece of whole lines
        first = places[inside].start.line - 1
        old = wrapper.module.code_for_node(inside).splitlines()
        new = wrapper.module.code_for_node(inside.deep_replace(node, changed)).splitlines()
        while old and new and old[0] == new[0]:
            old, new, first = old[1:], new[1:], first + 1
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        replaced = lines[first : first + len(old)]
        assert [line.strip() for line in replaced] == [line.strip() for line in old], (file, old, replaced)
        indent = " " * (len(replaced[0]) - len(old[0])) if old else ""
        added = [indent + line for line in new]
        source = "\n".join([*lines[:first], *added, *lines[first + len(old) :], ""])
        if source in found or source == text:
            continue
        with suppress(SyntaxError):
            compile(source, file, "exec", dont_inherit=True)
            diff = "\n".join([*("-" + line for line in replaced), *("+" + line for line in added)])
            found[source] = Mutant(file, _names(around), source, diff)
    return list(found.values())


def _names(around: Iterable[cst.CSTNode]) -> tuple[str, ...]:
    """Down to the outermost function: what is inside it is part of its code."""
    names = []
    for node in around:
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            names.append(node.name.value)
        if isinstance(node, cst.FunctionDef):
            break
    return tuple(names)


def module_name(file: str) -> str:
    return "insum_ops." + file.removesuffix(".py").replace("/", ".")


def _function(module: ModuleType, path: Iterable[str]) -> FunctionType | None:
    """The function of that name, without its decorators."""
    found: object = module
    for name in path:
        found = vars(found).get(name)
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "func", found)  # of a cached property
    found = getattr(found, "__func__", found)  # of a static method
    found = getattr(found, "__wrapped__", found)
    return found if isinstance(found, FunctionType) else None


def _code(source: str, file: str, path: Iterable[str]) -> CodeType | None:
    """The code of the function of that name."""
    code: CodeType | None = compile(source, str(ROOT / file), "exec", dont_inherit=True)
    for name in path:
        inside = code.co_consts if code is not None else ()
        code = next((part for part in inside if isinstance(part, CodeType) and part.co_name == name), None)
    return code


class _InPlace:
    """A plugin that collects the tests once, and then runs them once for each mutant, in a fork."""

    def __init__(self, file: str, mutants: Sequence[Mutant], jobs: int, is_told: Callable[[int, bool], None]) -> None:
        self.file, self.mutants, self.jobs, self.is_told = file, mutants, jobs, is_told
        self.failed = False
        self.why = ""  # of the last failure

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        _never_shrink()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        self.why = report.longreprtext if report.failed else self.why

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        module = sys.modules[module_name(self.file)]
        text = (ROOT / self.file).read_text()
        functions = {mutant.path: _function(module, mutant.path) for mutant in self.mutants}
        whole = {path: _code(text, self.file, path) for path in functions}
        codes = {function.__code__: path for path, function in functions.items() if function is not None}
        reached: dict[tuple[str, ...], list[tuple[float, pytest.Item]]] = {}
        for item in session.items:
            seconds, paths = self.profiled(item, codes)
            for path in paths:
                reached.setdefault(path, []).append((seconds, item))
        if self.failed:
            raise SystemExit(f"{self.file}: its tests fail as it is")
        tasks = [(CONTROL, functools.partial(self.is_control_failed, session.items), 600.0)]
        for at, mutant in enumerate(self.mutants):
            function, code = functions[mutant.path], _code(mutant.source, self.file, mutant.path)
            if function is None or code is None or code == whole[mutant.path]:
                continue  # not in the function's own code: tried from the start
            tests = sorted(reached.get(mutant.path, ()), key=lambda timed: timed[0])
            task = functools.partial(self.is_killed, function, code, [item for _, item in tests])
            tasks.append((at, task, 10 + 5 * sum(seconds for seconds, _ in tests)))
        gc.collect()
        gc.freeze()
        forked(tasks, self.jobs, self.is_told)
        return True

    def profiled(self, item: pytest.Item, codes: dict[CodeType, tuple[str, ...]]) -> tuple[float, set[tuple[str, ...]]]:
        """How long a test takes, and which of the functions it calls."""
        found: set[tuple[str, ...]] = set()

        def profile(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code in codes:
                found.add(codes[frame.f_code])

        _forget()
        start = time.process_time()
        sys.setprofile(profile)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        sys.setprofile(None)
        return time.process_time() - start, found

    def is_killed(self, function: FunctionType, code: CodeType, items: Sequence[pytest.Item]) -> bool:
        function.__code__ = code
        return self.is_failed(items)

    def is_failed(self, items: Iterable[pytest.Item]) -> bool:
        _forget()
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                return True
        return False

    def is_control_failed(self, items: Iterable[pytest.Item]) -> bool:
        """Whether a test fails in a fork though the file is as it is: it says which, since nothing else would."""
        for item in items:
            if self.is_failed([item]):
                print(f"\n{item.nodeid} fails in a process that ran it before\n{self.why}", file=sys.stderr, flush=True)
                return True
        return False


def _forget() -> None:
    """Drop what the package remembers of calls before: kernels, plans, answers of its functions."""
    caches = vars(sys.modules["insum_ops.lru_cache"])["LRUCache"]  # not imported above: a mutant may be of any module
    for name, module in list(sys.modules.items()):
        if name.startswith("insum_ops"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
                elif isinstance(value, caches):
                    value.clear()


def _never_shrink() -> None:
    """That a test fails is enough; the shortest example is not looked for."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", hypothesis.settings.get_profile("insum"), phases=phases, max_examples=25
    )
    hypothesis.settings.load_profile("mutants")


class _Changed(importlib.machinery.SourceFileLoader):
    """Imports a file as a mutant has it."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.name = mutant, module_name(mutant.file)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        loader = _Changed(name, str(ROOT / self.mutant.file), self.mutant.source)
        return importlib.util.spec_from_file_location(name, loader.path, loader=loader)


class _Shortly:
    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        _never_shrink()


def is_killed_from_the_start(mutant: Mutant, tests: Sequence[str]) -> bool:
    sys.meta_path.insert(0, _Finder(mutant))
    return pytest.main([*QUIET, *tests], plugins=[_Shortly()]) != 0


def tests_of(file: str) -> list[str]:
    """Those of the stage, the examples in its docstrings, and the others."""
    own, *others = [str(path) for name in TESTS[file] for path in Path("tests").rglob(f"test_{name}.py")]
    return [own, f"tests/test_readme.py::test_the_docstring_examples_run[{module_name(file)}]", *others]


def forked(
    tasks: Iterable[tuple[int, Callable[[], bool], float]], jobs: int, tell: Callable[[int, bool], None]
) -> None:
    """Run (number, task, seconds it may take) each in a fork; a task that does not return has killed its mutant."""
    running: dict[int, int] = {}

    def wait() -> None:
        pid, status = os.wait()
        tell(running.pop(pid), status != 0)

    for number, task, seconds in tasks:
        if len(running) >= jobs:
            wait()
        pid = os.fork()
        if not pid:
            _run(task, seconds)
        running[pid] = number
    while running:
        wait()


def _run(task: Callable[[], bool], seconds: float) -> None:
    """In a fork: leave with 1 if the task says so, with 0 if it does not; anything else ends it otherwise."""
    status = 2
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        most = int(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        signal.alarm(20 * most)  # waits for nothing for ever
        status = int(task())
    finally:
        os._exit(status)


def survivors(file: str, mutants: Sequence[Mutant], jobs: int, is_quick: bool = False) -> list[Mutant]:
    """The mutants that no test notices; quickly: of those in functions, without trying them from the start."""
    start, results = time.time(), dict[int, bool]()

    def in_place(write: int) -> None:
        def tell(number: int, is_killed: bool) -> None:
            os.write(write, (json.dumps([number, is_killed]) + "\n").encode())

        os.dup2(2, 1)  # what pytest tells is no part of the table
        plugin = _InPlace(file, mutants, jobs, tell)
        status = pytest.main([*QUIET, *tests_of(file)], plugins=[plugin])
        os._exit(int(status))

    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        in_place(write)
    os.close(write)
    with open(read) as lines:
        for line in lines:
            number, is_killed = json.loads(line)
            results[number] = is_killed
            _progress(file, len(results), len(mutants), start)
    if os.waitpid(pid, 0)[1] or results.pop(CONTROL, True):
        raise SystemExit(f"{file}: its tests fail as it is")
    if is_quick:
        return [mutant for number, mutant in enumerate(mutants) if not results.get(number, True)]
    left = [number for number in range(len(mutants)) if not results.get(number)]
    begun, whole = time.time(), Mutant(file, (), (ROOT / file).read_text(), "")

    def tell(number: int, is_killed: bool) -> None:
        if number == CONTROL and is_killed:
            raise SystemExit(f"{file}: its tests fail as it is, in a process that imports it by itself")
        results[number] = is_killed
        _progress(f"{file} again", [CONTROL, *left].index(number), len(left), begun)

    def tests(number: int) -> list[str]:
        """All where none was tried yet; else the file's own, which may hold what was made when they were collected."""
        return tests_of(file)[: 2 if number in results else None]

    tried = {CONTROL: whole, **{at: mutants[at] for at in left}}
    tasks = [(at, functools.partial(is_killed_from_the_start, each, tests(at)), 300.0) for at, each in tried.items()]
    forked(tasks, jobs, tell)
    return [mutant for number, mutant in enumerate(mutants) if not results[number]]


def _progress(what: str, done: int, of: int, start: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{what}: {done} of {of}, {time.time() - start:.0f} s", end="\033[K\r", file=sys.stderr, flush=True)


def known_reasons() -> Counter[tuple[str, str]]:
    """The survivors that the list gives a reason for."""
    found: Counter[tuple[str, str]] = Counter()
    file, text = "", REASONS.read_text() if REASONS.exists() else ""
    for heading, block in re.findall(r"^## (\S+)$|^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        file = heading or file
        found.update((file, entry.strip("\n")) for entry in re.split(r"\n(?=@@ )", block) if entry.strip())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", default=list(TESTS), help="such as compiler/binding/bind.py; all without it"
    )
    parser.add_argument(
        "-f", "--function", default="", help="only functions in whose names this regular expression is found"
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("-q", "--quick", action="store_true", help="in place only: some that survive would be killed")
    options = parser.parse_args()
    os.environ["INSUM_TESTS"] = "thorough"  # every case of every table
    os.environ["INSUM_TEST_DEVICE"] = "cpu"  # a GPU would want more memory than a mutant may take
    torch.set_num_threads(1)
    os.chdir(ROOT)
    is_well, listed = True, known_reasons()
    print(f"{'file':28}{'mutants':>8}{'killed':>8}{'survived':>10}{'percent':>9}", flush=True)
    for file in options.files:
        mutants = [mutant for mutant in mutants_of(file) if re.search(options.function, ".".join(mutant.path))]
        left = survivors(file, mutants, options.jobs, options.quick)
        percent = 100 * (1 - len(left) / max(len(mutants), 1))
        print(f"{file:28}{len(mutants):8}{len(mutants) - len(left):8}{len(left):10}{percent:9.1f}", flush=True)
        reasons = Counter({key: count for key, count in listed.items() if key[0] == file})
        new = []
        for mutant in left:
            if reasons[mutant.key]:
                reasons[mutant.key] -= 1
            else:
                new.append(mutant)
        if new:
            print(f"new survivors, without a reason in {REASONS.relative_to(ROOT)}:")
            print("\n".join(mutant.key[1] for mutant in new), flush=True)
        gone = [] if options.function else list(reasons.elements())
        if gone:
            print("listed there, but killed or gone:")
            print("\n".join(key[1] for key in gone), flush=True)
        is_well &= percent >= LEAST and not new
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
