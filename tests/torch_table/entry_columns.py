"""The columns of the table that one process fills: what of torch an entry point goes through.

Each is a function that raises if it does not go through. This file as a program fills the cells of one row: it reads
the names of columns, one on a line, and answers each with a line of JSON, the text of what was raised or "".
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from entry_cases import CASES, DEVICE, SIZES, EntryCase
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recompute

N, OTHER = 7, 13
CLOSE = dict(rtol=1e-4, atol=1e-4)
HALF = dict(rtol=5e-2, atol=5e-2)
SECONDS = 300  # for a process that loads what another has saved


class NotHere(Exception):
    """A cell that this machine can't fill: it has no GPU, or a package is not installed."""


def close(value: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(value, expected, **(tolerance or CLOSE))


def copies(inputs: tuple[Any, ...], wants_grad: Sequence[int]) -> tuple[Any, ...]:
    """The inputs as tensors of their own, some of which want a gradient."""
    return tuple(
        x.detach().clone().requires_grad_(at in wants_grad) if isinstance(x, Tensor) else x
        for at, x in enumerate(inputs)
    )


def trained(call: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...], case: EntryCase) -> Any:
    """The value of a step, and the gradients of inputs and parameters."""
    given = copies(inputs, case.wants_grad)
    module.zero_grad()
    value = call(*given)
    value.square().sum().backward()
    own = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return value.detach(), [given[at].grad for at in case.wants_grad], own


def _compiled(case: EntryCase, trains: bool, sizes: Sequence[int], most_graphs: int, backend: str) -> None:
    """Compile without a call before, and compare every size with eager calls, which come after."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    module = case.make()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    if trains:
        pairs = [(trained(compiled, module, case.at(n), case), n) for n in sizes]
        for value, n in pairs:
            close(value, trained(module, module, case.at(n), case))
    else:
        with torch.no_grad():
            pairs = [(compiled(*case.at(n)), n) for n in sizes]
            for value, n in pairs:
                close(value, module(*case.at(n)))
    assert counter.frame_count <= most_graphs, f"{counter.frame_count} graphs"


def compile_cold(case: EntryCase) -> None:
    """The first call of a process is compiled, `fullgraph=True`: a training step by Inductor, then inference."""
    _compiled(case, True, (N,), 1, "inductor")
    _compiled(case, False, (N,), 1, "aot_eager")


def dynamic(case: EntryCase) -> None:
    """Five sizes, 1 and primes among them, with at most two graphs, in inference and in training."""
    _compiled(case, False, SIZES, 2, "aot_eager")
    _compiled(case, True, SIZES, 2, "aot_eager")


def exported(case: EntryCase) -> tuple[nn.Module, Any]:
    """The module, and its program with dynamic dimensions."""
    module = case.make()
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
import insum_ops
program, inputs, values = sys.argv[1:]
with torch.no_grad():
    module = torch.export.load(program).module()
    for given, value in zip(torch.load(inputs, weights_only=False), torch.load(values, weights_only=False)):
        torch.testing.assert_close(module(*given), value, rtol=1e-4, atol=1e-4)
"""
PACKAGED = """
import sys, torch
package, inputs, values = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
for given, value in zip(torch.load(inputs), torch.load(values)):
    torch.testing.assert_close(loaded(*given), value, rtol=1e-4, atol=1e-4)
assert "insum_ops" not in sys.modules
"""


def _checked_elsewhere(
    script: str, module: nn.Module, case: EntryCase, folder: Path, package: Path, flat: bool = False
) -> None:
    """Run what was saved in a new process, at two sizes, and compare with this one's values."""
    inputs = [case.at(n) for n in (N, OTHER)]
    with torch.no_grad():
        values = [module(*given) for given in inputs]
    if flat:  # a format goes to a package as the tensors that it holds
        inputs = [tuple(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)) for given in inputs]
    torch.save(inputs, folder / "inputs")
    torch.save(values, folder / "values")
    command = [sys.executable, "-c", script, package, folder / "inputs", folder / "values"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]


def export_dynamic(case: EntryCase) -> None:
    """torch.export with dynamic dimensions, saved and loaded in a new process; an export that is trained."""
    with tempfile.TemporaryDirectory() as folder:
        module, program = exported(case)
        path = Path(folder, "program.pt2")
        torch.export.save(program, path)
        _checked_elsewhere(LOADED, module, case, Path(folder), path)
    learning = torch.export.export(module, copies(case.at(N), case.wants_grad)).module()
    close(trained(learning, learning, case.at(N), case), trained(module, module, case.at(N), case))


def packaged(case: EntryCase, path: Path) -> nn.Module:
    """Write an AOTInductor package with dynamic dimensions; return the module."""
    module, program = exported(case)
    # precompiled headers gain nothing for a machine's first package, or for several at once
    options = {"aot_inductor.precompile_headers": DEVICE == "cpu" and os.environ.get("INSUM_TESTS") == "torch"}
    if DEVICE == "cuda":
        # kernels are timed on the example's numbers, since among zeros a voxel is given twice, which fails an assertion
        options["triton.autotune_at_compile_time"] = False
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    return module


def aoti(case: EntryCase) -> None:
    """An AOTInductor package with dynamic dimensions, run in a process that never imports insum_ops."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "package.pt2")
        module = packaged(case, path)
        has_formats = any(not isinstance(x, Tensor) for x in case.at(N))
        script = (
            PACKAGED if not has_formats else PACKAGED.replace("loaded(*given)", "loaded.loader.run(list(given))[0]")
        )
        _checked_elsewhere(script, module, case, Path(folder), path, has_formats)


class _Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).sum(0)


@cache
def runs_packages() -> bool:
    """Whether a package of torch's own operations runs here."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        x, path = torch.ones(3, 2, device=DEVICE), Path(folder, "package.pt2")
        torch._inductor.aoti_compile_and_package(torch.export.export(_Plain(), (x,)), package_path=str(path))
        torch.save([(x,)], Path(folder, "inputs"))
        torch.save([(x + 1).sum(0)], Path(folder, "values"))
        command = [sys.executable, "-c", PACKAGED, path, Path(folder, "inputs"), Path(folder, "values")]
        return subprocess.run(command, capture_output=True, timeout=SECONDS).returncode == 0


NO_PACKAGES = (
    "a package of torch's own operations does not run here either; CXX may name a compiler that links libstdc++ into it"
)


def aoti_on_gpu(case: EntryCase) -> None:
    """The same on a GPU: the package holds the emitted kernels."""
    if DEVICE != "cuda":
        raise NotHere("needs a GPU")
    try:
        aoti(case)
    except AssertionError:
        if runs_packages():
            raise
        raise NotHere(NO_PACKAGES) from None


def make_fx(case: EntryCase) -> None:
    """make_fx with symbolic sizes and autograd.grad inside, run at another size."""
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    module = case.make()

    def forces(*inputs: Any) -> Any:
        inputs = tuple(x.requires_grad_() if at in case.wants_grad else x for at, x in enumerate(inputs))
        value = module(*inputs)
        return value, *torch.autograd.grad(value.square().sum(), [inputs[at] for at in case.wants_grad])

    traced = trace(forces, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*copies(case.at(N), ()))
    for n in (N, OTHER):
        close(traced(*copies(case.at(n), ())), forces(*copies(case.at(n), ())))


def functorch(case: EntryCase) -> None:
    """vmap of grad over the first input."""
    module = case.make()
    first, *others = case.at(N)
    loss = lambda x: module(x, *others).square().sum()
    batch = torch.stack([first, first + 1])
    grads = torch.func.vmap(torch.func.grad(loss))(batch)
    for x, grad in zip(batch, grads):
        x = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(x), x)
        close(grad, expected)


def autocast(case: EntryCase) -> None:
    """A training step in bfloat16 under autocast, beside one in float32; parameters and inputs stay float32."""
    module = case.make()
    value, grads, own = trained(module, module, case.at(N), case)
    with torch.autocast(DEVICE, torch.bfloat16):
        half, half_grads, half_own = trained(module, module, case.at(N), case)
    for grad in (*half_grads, *half_own):
        assert grad.dtype is torch.float32, f"a gradient is {grad.dtype}"
    scale = max(1.0, float(value.abs().max()))
    close(half.float() / scale, value / scale, **HALF)
    for grad, expected in zip((*half_grads, *half_own), (*grads, *own)):
        largest = max(1.0, float(expected.abs().max()))
        close(grad / largest, expected / largest, **HALF)


def capture(case: EntryCase) -> None:
    """A whole training step captured in a CUDA graph and replayed with other numbers."""
    if DEVICE != "cuda":
        raise NotHere("needs a GPU")
    module = case.make()
    given = copies(case.at(N), case.wants_grad)
    wanted = [given[at] for at in case.wants_grad] + [p for p in module.parameters() if p.requires_grad]
    step = lambda: torch.autograd.grad(module(*given).square().sum(), wanted)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    with torch.no_grad():
        for at in case.wants_grad:
            given[at].mul_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    close([grad.clone() for grad in grads], list(step()))


def checkpoint(case: EntryCase) -> None:
    """Activation checkpointing of both kinds; state_dict by torch.save, read with weights_only=True; torch's DCP."""
    module = case.make()
    expected = trained(module, module, case.at(N), case)
    for is_reentrant in (False, True):
        again = partial(recompute, module, use_reentrant=is_reentrant)
        close(trained(again, module, case.at(N), case), expected)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = case.make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    close(other(*case.at(N)), expected[0])
    _distributed_checkpoint(module, other)
    close(other(*case.at(N)), expected[0])


def _distributed_checkpoint(module: nn.Module, other: nn.Module) -> None:
    from torch.distributed import checkpoint as dcp

    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = module.state_dict()
    if not any(isinstance(value, Tensor) for value in state.values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        loaded = other.state_dict()
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        other.load_state_dict(loaded)


def pickled(case: EntryCase) -> None:
    """pickle, deepcopy and torch.save of the module after a call, and of its inputs."""
    module = case.make()
    value = module(*case.at(N))
    if type(module).__name__ == "Calls":  # a lambda of the tests, which no pickle takes
        held, module.call = module.call, None
    else:
        held = None
    for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        if held is not None:
            again.call = held
        close(again(*pickle.loads(pickle.dumps(case.at(N)))), value)
        close(again(*copy.deepcopy(case.at(N))), value)


def hugging_face(case: EntryCase) -> None:
    """A PreTrainedModel that holds the module, saved by save_pretrained and read by from_pretrained."""
    try:
        import transformers
    except ImportError:
        raise NotHere("needs transformers") from None

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = case.module()
            self.scale = nn.Parameter(torch.ones(()))
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

        def forward(self, *inputs: Any) -> Any:
            return self.layer(*inputs) * self.scale

    torch.manual_seed(0)
    model = Model(transformers.PretrainedConfig()).to(DEVICE)
    value = model(*case.at(N))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        torch.manual_seed(1)
        again = Model.from_pretrained(folder).to(DEVICE)
    assert again.state_dict().keys() == model.state_dict().keys()
    close(again(*case.at(N)), value)


COLUMNS: dict[str, Callable[[EntryCase], None]] = {
    "compile cold": compile_cold,  # first, while the process has called nothing
    "dynamic": dynamic,
    "export dynamic": export_dynamic,
    "AOTI": aoti,
    "AOTI on a GPU": aoti_on_gpu,
    "make_fx": make_fx,
    "functorch": functorch,
    "autocast": autocast,
    "capture": capture,
    "checkpoint": checkpoint,
    "pickle": pickled,
    "HF": hugging_face,
}
OF_GPUS = ("AOTI on a GPU", "capture")  # what `make test-torch` runs where there is one


def outcome(name: str, column: str) -> tuple[str, str]:
    """What a cell gave: "passed", "failed" or "not here", and why."""
    try:
        COLUMNS[column](CASES[name])
    except NotHere as reason:
        return "not here", str(reason)
    except Exception:
        return "failed", traceback.format_exc()
    return "passed", ""


def main(name: str) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            print(json.dumps(outcome(name, line.strip())), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
