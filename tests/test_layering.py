"""The arrows of CONTRIBUTING.md, read off the imports: data flows one way, nothing hides in a function."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent
FOLDERS = {"insum_ops": "insum_ops", "formats": "insum_ops.formats", "compiler": "insum_ops.compiler"}
WITHOUT_TORCH = {
    *(
        f"insum_ops.compiler.language.{name}"
        for name in ("errors", "ir", "other_notations", "parse", "differentiate", "batch")
    ),
    "insum_ops.compiler.binding.rewrite",
}
# the files that turn text into code: text that codegen, torch.fx and plans wrote
LOADS_SOURCE = {
    "insum_ops.compiler.runtime.launch",
    "insum_ops.compiler.reference.code",
    "insum_ops.compiler.runtime.plan",
}
# which hold the caches of all folders, and which finds close matches for the names of all: they import none of them
LEAVES = ("insum_ops.lru_cache", "insum_ops.identity_cache", "insum_ops.close_names")
# the only parts of formats that the compiler imports
SHARED = tuple([f"insum_ops.formats.{name}" for name in ("guard", "facts", "fixed_kernel", "parts", "torch_state")])
ROOMS = tuple(
    f"insum_ops.compiler.{name}"
    for name in ("language", "binding", "reference", "planning", "codegen", "runtime", "tuning", "routes", "autograd")
)  # stages of the compiler: others see what their `__init__` offers
# By what a module would ask torch itself whether a tensor has changed, and what torch is doing around a call.
CHANGE_CHECKS = {"_version", "data_ptr"}
TORCH_STATE = {
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype"),
    *("get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "get_default_dtype", "_is_any_autocast_enabled"),
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("get_deterministic_debug_mode", "_get_deterministic_algorithms"),
    *("get_float32_matmul_precision", "fp32_precision", "_get_fp32_precision_getter", "allow_tf32"),
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    *("_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction"),
    *("_len_torch_dispatch_stack", "_len_torch_function_stack", "_get_dispatch_mode", "peek_interpreter_stack"),
    *("is_functorch_wrapped_tensor", "_is_functional_tensor", "retrieve_current_functorch_interpreter"),
    *("retrieve_all_functorch_interpreters", "get_interpreter_stack", "_current_level", "_is_fwd_grad_enabled"),
    *("is_compiling", "is_tracing"),
    *("is_current_stream_capturing", "_cuda_isCurrentStreamCapturing"),
}
# The one module that asks whether a tensor has changed, and the one that asks what torch is doing.
CHANGE_READERS = {"insum_ops.formats.guard"}
PASSES_ADDRESSES = {
    "insum_ops.compiler.runtime.launch",
    "insum_ops.formats.fixed_kernel",
}  # to kernels, as their arguments
STATE_READERS = {"insum_ops.formats.torch_state"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and whether it happens at run time."""

    module: str
    line: int
    is_at_run_time: bool
    is_in_function: bool


@dataclass(frozen=True)
class Module:
    path: Path
    name: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports(self.tree, is_at_run_time=True, is_in_function=False))

    def _imports(self, node: ast.AST, is_at_run_time: bool, is_in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, is_at_run_time, is_in_function)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    module = self._absolute(child, alias.name)
                    yield Import(module, child.lineno, is_at_run_time, is_in_function)
            else:
                is_guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from self._imports(child, is_at_run_time and not is_guard, is_in_function or is_function)

    def _absolute(self, node: ast.ImportFrom, imported: str) -> str:
        """`from .ir import Access` in insum_ops.compiler.language.parse -> insum_ops.compiler.language.ir."""
        base = node.module or ""
        if node.level:
            package = self.name.split(".") if self.path.stem == "__init__" else self.name.split(".")[:-1]
            parents = package[: len(package) - node.level + 1]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        submodule = f"{base}.{imported}"
        return submodule if submodule in NAMES and imported not in offered(base) else base


def _modules() -> Iterator[tuple[Path, str]]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield path, ".".join([package, *(part for part in parts if part != "__init__")])


@cache
def offered(package: str) -> frozenset[str]:
    """What a package offers by its `__all__`: a function may have the name of the module that it comes from."""
    for path, name in _modules():
        if name == package and path.stem == "__init__":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    return frozenset(ast.literal_eval(node.value))
    return frozenset()


NAMES = {name for _, name in _modules()}
MODULES = tuple(Module(path, name) for path, name in _modules())


def every_module(law: Callable[[Module], None]) -> Callable[[], None]:
    """A test that a law holds in each module; those in which it does not are named."""

    @wraps(law, assigned=("__doc__", "__module__"))
    def test() -> None:
        broken = {}
        for module in MODULES:
            try:
                law(module)
            except AssertionError as error:
                broken[module.name] = str(error)
        assert not broken, "\n".join(f"{name}: {error}" for name, error in broken.items())

    del test.__wrapped__  # pytest would ask it for its parameters
    return test


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def reads(tree: ast.AST, names: set[str]) -> int:
    """How often a module reads an attribute, or imports a name, that is one of `names`; of torch, not of our reader."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_modules = node.attr == "_version" and ast.unparse(node.value) in ("self", "nn.Module")  # of a checkpoint
            found += node.attr in names and isinstance(node.ctx, ast.Load) and not is_modules
        elif isinstance(node, ast.ImportFrom):
            is_ours = (node.module or "").split(".")[-1] in ("guard", "torch_state")
            found += 0 if is_ours else sum(alias.name in names for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            found += any(isinstance(given, ast.Constant) and given.value in names for given in node.args)
    return found


def test_the_walk_sees_all_three_folders():
    for package in FOLDERS.values():
        assert sum(_is_in(name, package) for name in NAMES) > 1


@every_module
def test_formats_and_compiler_import_only_themselves(module):
    for package in ("insum_ops.formats", "insum_ops.compiler"):
        if _is_in(module.name, package):
            inside = (package, *LEAVES, *SHARED)
            outside = [
                i
                for i in module.imports
                if _is_in(i.module, "insum_ops") and not any(_is_in(i.module, p) for p in inside)
            ]
            assert not outside, f"{package} stands on its own"


def test_what_all_folders_import_imports_nothing_of_the_project():
    leaves = [module for module in MODULES if module.name in LEAVES]
    assert len(leaves) == len(LEAVES)
    assert not [i for module in leaves for i in module.imports if _is_in(i.module, "insum_ops")]


def test_no_import_goes_round_in_a_circle():
    graph = {
        module.name: {i.module for i in module.imports if i.is_at_run_time and i.module in NAMES} - {module.name}
        for module in MODULES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ["insum_ops.distributed", "insum_ops.equivariant", *ROOMS])
def test_a_package_lists_its_files_in_the_order_of_their_imports(package):
    by_name = {module.name: module for module in MODULES}
    listed = re.findall(r"^ {4}(\w+)  ", ast.get_docstring(by_name[package].tree) or "", re.MULTILINE)
    names = [f"{package}.{name}" for name in listed]
    assert sorted([package, *names]) == sorted(name for name in NAMES if _is_in(name, package))
    for at, name in enumerate(names):
        assert {i.module for i in by_name[name].imports if _is_in(i.module, package)} <= set(names[:at]), name


@every_module
def test_a_stage_is_entered_by_what_it_offers(module):
    for room in ROOMS:
        if not _is_in(module.name, room):
            assert not [i for i in module.imports if i.module.startswith(f"{room}.")]


@every_module
def test_layers_import_what_the_compiler_offers(module):
    if not any(_is_in(module.name, package) for package in ("insum_ops.formats", "insum_ops.compiler")):
        assert not [i for i in module.imports if i.module.startswith("insum_ops.compiler.")]


@every_module
def test_formats_and_compiler_import_relatively(module):
    """So that a folder can move; what `python -m insum_ops` runs imports as its readers do."""
    if not any(_is_in(module.name, package) for package in ("insum_ops.formats", "insum_ops.compiler")):
        return
    for node in ast.walk(module.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not [name for name in names if _is_in(name, "insum_ops")], f"line {node.lineno}"


@every_module
def test_the_front_of_the_compiler_needs_no_torch(module):
    if module.name in WITHOUT_TORCH:
        reached, pending = set(), [module.name]
        by_name = {m.name: m for m in MODULES}
        while pending:
            imports = {i.module for i in by_name[pending.pop()].imports if i.is_at_run_time}
            assert not any(_is_in(name, "torch") for name in imports)
            pending += [name for name in imports if name in NAMES and name not in reached]
            reached |= imports


@every_module
def test_one_module_asks_whether_a_tensor_has_changed(module):
    names = CHANGE_CHECKS - {"data_ptr"} if module.name in PASSES_ADDRESSES else CHANGE_CHECKS
    assert module.name in CHANGE_READERS or not reads(module.tree, names), "formats.guard does"


@every_module
def test_one_module_asks_what_torch_is_doing(module):
    assert module.name in STATE_READERS or not reads(module.tree, TORCH_STATE), "formats.torch_state does"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x._version != 3", 1),
        ("x.storage().data_ptr()", 1),
        ("ask = x.data_ptr", 1),
        ("getattr(x, '_version')", 1),
        ("from torch.compiler import is_compiling", 1),
        ("torch.compiler.is_compiling()", 1),
        ("from .torch_state import is_compiling\nis_compiling()", 0),
        ("self._version", 0),
    ],
)
def test_the_walk_sees_who_asks_torch(source, expected):
    assert reads(ast.parse(source), CHANGE_CHECKS | TORCH_STATE) == expected


@every_module
def test_no_import_hides_inside_a_function(module):
    assert not [i for i in module.imports if i.is_in_function]


@every_module
def test_no_module_is_a_drawer_for_everything(module):
    assert module.path.stem not in FORBIDDEN_NAMES


@every_module
def test_no_handler_catches_everything(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"everything"}
            assert not caught & {"everything", "Exception", "BaseException"}, f"line {node.lineno}"


@every_module
def test_text_never_becomes_code(module):
    if module.name in LOADS_SOURCE:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}, f"line {node.lineno}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", [Import("torch", 1, True, False)]),
        ("def f():\n    import torch", [Import("torch", 2, True, True)]),
        ("if TYPE_CHECKING:\n    from torch import Tensor", [Import("torch", 2, False, False)]),
        ("from .explain import Tuning", [Import("insum_ops.compiler.explain", 1, True, False)]),
        ("from . import explain", [Import("insum_ops.compiler.explain", 1, True, False)]),
        ("from .binding import bind", [Import("insum_ops.compiler.binding", 1, True, False)]),
        ("from ..formats import COO", [Import("insum_ops.formats", 1, True, False)]),
    ],
)
def test_the_walk_reads_every_kind_of_import(source, expected, tmp_path):
    path = tmp_path / "new.py"
    path.write_text(source)
    assert list(Module(path, "insum_ops.compiler.new").imports) == expected


@pytest.mark.parametrize(
    ("file", "name", "source", "expected"),
    [
        ("new.py", "insum_ops.compiler.codegen.new", "from .scope import Scope", "insum_ops.compiler.codegen.scope"),
        ("new.py", "insum_ops.compiler.codegen.new", "from . import scope", "insum_ops.compiler.codegen.scope"),
        (
            "new.py",
            "insum_ops.compiler.codegen.new",
            "from ..language.ir import Access",
            "insum_ops.compiler.language.ir",
        ),
        ("__init__.py", "insum_ops.compiler.codegen", "from .scope import Scope", "insum_ops.compiler.codegen.scope"),
        ("new.py", "insum_ops.compiler.new", "from .codegen import emit", "insum_ops.compiler.codegen"),
    ],
)
def test_the_walk_reads_imports_of_packages_inside_packages(file, name, source, expected, tmp_path):
    path = tmp_path / file
    path.write_text(source)
    assert [i.module for i in Module(path, name).imports] == [expected]
