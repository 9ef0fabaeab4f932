"""The columns of the table: what of torch an entry point goes through, each a function that raises if it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from entry_cases import CASES, SIZES, EntryCase
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

N = 7
CLOSE = dict(rtol=1e-4, atol=1e-4)


def _copies(inputs: tuple[Any, ...], wants_grad: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(
        x.detach().clone().requires_grad_(at in wants_grad) if isinstance(x, Tensor) else x
        for at, x in enumerate(inputs)
    )


def _close(value: Any, expected: Any) -> None:
    torch.testing.assert_close(value, expected, **CLOSE)


def _twin(module: nn.Module) -> nn.Module:
    """The same module, for the eager reference: called after, so that the compiled call is cold."""
    return module


def _trained(call: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...], case: EntryCase) -> Any:
    given = _copies(inputs, case.wants_grad)
    module.zero_grad()
    value = call(*given)
    value.square().sum().backward()
    grads = [given[at].grad for at in case.wants_grad] + [
        p.grad.clone() for p in module.parameters() if p.grad is not None
    ]
    return value.detach(), grads


def _compiled(
    case: EntryCase, trains: bool, sizes: tuple[int, ...], most_graphs: int, backend: str = "aot_eager"
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.config.error_on_recompile = False
    counter = CompileCounterWithBackend(backend)
    module = case.module()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    if not trains:
        with torch.no_grad():
            pairs = [(compiled(*case.at(n)), n) for n in sizes]
            for value, n in pairs:
                _close(value, module(*case.at(n)))
    else:
        pairs = [(_trained(compiled, module, case.at(n), case), n) for n in sizes]
        for value, n in pairs:
            _close(value, _trained(module, module, case.at(n), case))
    assert counter.frame_count <= most_graphs, f"{counter.frame_count} graphs"


def inference(case: EntryCase) -> None:
    """First call compiled, fullgraph, without gradients."""
    _compiled(case, False, (N,), 1)


def training(case: EntryCase) -> None:
    """First call compiled, fullgraph, with gradients."""
    _compiled(case, True, (N,), 1)


def sizes(case: EntryCase) -> None:
    """Five sizes, at most two graphs."""
    _compiled(case, False, SIZES, 2)


def training_sizes(case: EntryCase) -> None:
    """Five sizes with gradients, at most two graphs."""
    _compiled(case, True, SIZES, 2)


def inductor(case: EntryCase) -> None:
    """As training, by Inductor."""
    _compiled(case, True, (N,), 1, "inductor")


def _exported(case: EntryCase) -> tuple[nn.Module, Any]:
    module = case.module()
    shapes = tuple(
        dict.fromkeys(dims, torch.export.Dim.AUTO)
        if isinstance(x, Tensor)
        else [dict.fromkeys(dims, torch.export.Dim.AUTO) or None] * len(tree_leaves(x))
        for x, dims in zip(case.at(N), case.varying)
    )
    with torch.no_grad():
        program = torch.export.export(
            module, case.at(N), dynamic_shapes=({"inputs": shapes} if type(module).__name__ == "Calls" else shapes)
        )
    return module, program


LOADED = """
import sys, torch
{imports}
program, inputs, values = sys.argv[1:]
with torch.no_grad():
    module = torch.export.load(program).module()
    for given, value in zip(torch.load(inputs, weights_only=False), torch.load(values, weights_only=False)):
        torch.testing.assert_close(module(*given), value, rtol=1e-4, atol=1e-4)
"""


def _checked_elsewhere(script: str, module: nn.Module, case: EntryCase, folder: Path, package: Path) -> None:
    inputs = [case.at(n) for n in (N, 13)]
    with torch.no_grad():
        values = [module(*given) for given in inputs]
    torch.save(inputs, folder / "inputs")
    torch.save(values, folder / "values")
    done = subprocess.run(
        [sys.executable, "-c", script, package, folder / "inputs", folder / "values"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def export(case: EntryCase) -> None:
    """torch.export with dynamic dimensions, saved and loaded in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        module, program = _exported(case)
        path = Path(folder, "program.pt2")
        torch.export.save(program, path)
        _checked_elsewhere(LOADED.format(imports="import insum_ops"), module, case, Path(folder), path)


PACKAGED = """
import sys, torch
package, inputs, values = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
for given, value in zip(torch.load(inputs), torch.load(values)):
    torch.testing.assert_close(loaded(*given), value, rtol=1e-4, atol=1e-4)
assert "insum_ops" not in sys.modules
"""


def aoti(case: EntryCase) -> None:
    """An AOTInductor package with dynamic dimensions, run in a process that never imports insum_ops."""
    with tempfile.TemporaryDirectory() as folder:
        module, program = _exported(case)
        path = Path(folder, "package.pt2")
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        _checked_elsewhere(PACKAGED, module, case, Path(folder), path)


def make_fx(case: EntryCase) -> None:
    """make_fx with symbolic sizes and autograd.grad inside, run at another size."""
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    module = case.module()

    def forces(*inputs: Any) -> Any:
        inputs = tuple(x.requires_grad_() if at in case.wants_grad else x for at, x in enumerate(inputs))
        value = module(*inputs)
        return value, *torch.autograd.grad(value.square().sum(), [inputs[at] for at in case.wants_grad])

    traced = trace(forces, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*_copies(case.at(N), ()))
    for n in (N, 13):
        _close(traced(*_copies(case.at(n), ())), forces(*_copies(case.at(n), ())))


def functorch(case: EntryCase) -> None:
    """vmap of grad over the first input."""
    module = case.module()
    first, *others = case.at(N)
    loss = lambda x: module(x, *others).square().sum()
    batch = torch.stack([first, first + 1])
    grads = torch.func.vmap(torch.func.grad(loss))(batch)
    for x, grad in zip(batch, grads):
        x = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(x), x)
        _close(grad, expected)


COLUMNS = dict(
    inference=inference,
    training=training,
    sizes=sizes,
    training_sizes=training_sizes,
    inductor=inductor,
    export=export,
    aoti=aoti,
    make_fx=make_fx,
    functorch=functorch,
)

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    COLUMNS[sys.argv[2]](CASES[sys.argv[1]])
