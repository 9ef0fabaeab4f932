"""Small models that clients train, each step's gradients beside the same model in plain torch and float64.

    python tests/fuzz_models.py --steps 20 --seed 0 --jobs 2

At each step a model has another cloud, graph or molecule, and something else may change: which parameters learn,
whether the step is checkpointed, accumulated, evaluated in between, copied, cast, compiled by nobody. The weights of
the model are copied into its reference before each step, so that an error shows where it is made.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from random import Random
from typing import Any

import torch
from statements import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from insum_ops import insum, spmm
from insum_ops import nn as sparse

ERRORS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def differ(name: str, actual: Tensor | None, expected: Tensor | None, limit: float) -> Iterator[str]:
    """Yield a sentence if two tensors differ by more than a share of the larger ones' size."""
    if (actual is None) != (expected is None):
        yield f"{name}: {'no gradient' if actual is None else 'a gradient that is not wanted'}"
        return
    if actual is None or expected is None:
        return
    actual, expected = actual.detach(), expected.detach()
    actual = (actual.to_dense() if actual.layout != torch.strided else actual).double()
    expected = expected.to_dense() if expected.layout != torch.strided else expected
    if actual.shape != expected.shape:
        yield f"{name}: {list(actual.shape)} and not {list(expected.shape)}"
        return
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-30) if expected.numel() else torch.zeros(())
    if not bool(error <= limit) and bool((actual - expected).norm() > limit * 1e-3):
        yield f"{name} is off by {float(error):.3g} of its norm {float(expected.norm()):.3g}, allowed {limit:.3g}"


class UNet(nn.Module):
    """Blocks over one map, a strided convolution and its inverse, as a client of spconv writes them."""

    def __init__(self, channels: int, wide: int, with_bias: bool, groups: int) -> None:
        super().__init__()
        own: dict[str, Any] = {"bias": with_bias}
        self.first = sparse.SubMConv3d(3, channels, 3, indice_key="fine", **own)
        self.second = sparse.SubMConv3d(channels, channels, 3, indice_key="fine", groups=groups, **own)
        self.down = sparse.SparseConv3d(channels, wide, 3, 2, 1, indice_key="down", **own)
        self.deep = sparse.SubMConv3d(wide, wide, 3, indice_key="coarse", **own)
        self.deeper = sparse.SubMConv3d(wide, wide, 3, indice_key="coarse", **own)
        self.up = sparse.SparseInverseConv3d(wide, channels, 3, indice_key="down", **own)
        self.last = sparse.SubMConv3d(channels, 4, 1, **own)

    def forward(self, x: sparse.SparseConvTensor, checkpointed: bool = False) -> Any:
        x = self.first(x)
        x = self.second(x.replace_feature(x.features.relu()))
        low = self.down(x.replace_feature(x.features.relu()))
        low = self.deep(low.replace_feature(low.features.relu()))
        if checkpointed:
            block = lambda f: self.deeper(low.replace_feature(f.relu())).features
            low = low.replace_feature(checkpoint(block, low.features, use_reentrant=False))
        else:
            low = self.deeper(low.replace_feature(low.features.relu()))
        y = self.up(low.replace_feature(low.features.relu()))
        y = y.replace_feature(y.features + x.features)
        return self.last(y).features, low.indices


def dense_unet(
    weights: Mapping[str, Tensor],
    features: Tensor,
    fine: Tensor,
    coarse: Tensor,
    shape: list[int],
    batch: int,
    groups: int,
) -> Tensor:
    """The same over the dense grid, read where there are voxels."""

    def spread(values: Tensor, at: Tensor, sizes: list[int]) -> Tensor:
        grid = torch.zeros(batch, *sizes, values.shape[1], dtype=values.dtype, device=values.device)
        return grid.index_put(tuple(at.long().T), values).movedim(-1, 1)

    def read(grid: Tensor, at: Tensor) -> Tensor:
        return grid.movedim(1, -1)[tuple(at.long().T)]

    def conv(
        name: str, values: Tensor, at: Tensor, sizes: list[int], onto: Tensor, stride: int = 1, own: int = 1
    ) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        pad = weight.shape[1] // 2
        return read(F.conv3d(spread(values, at, sizes), weight.movedim(-1, 1), bias, stride, pad, groups=own), onto)

    x = conv("first", features, fine, shape, fine)
    x = conv("second", x.relu(), fine, shape, fine, own=groups)
    low = conv("down", x.relu(), fine, shape, coarse, 2)
    sizes = [-(-size // 2) for size in shape]
    low = conv("deep", low.relu(), coarse, sizes, coarse)
    low = conv("deeper", low.relu(), coarse, sizes, coarse)
    weight, bias = weights["up.weight"], weights.get("up.bias")
    grid = F.conv_transpose3d(spread(low.relu(), coarse, sizes), weight.permute(4, 0, 1, 2, 3), bias, 2, 1, 1)
    y = read(grid, fine) + x
    weight, bias = weights["last.weight"], weights.get("last.bias")
    out = y @ weight.view(weight.shape[-1], -1)  # spconv's order of memory where the kernel is 1
    return out if bias is None else out + bias


def clouds(random: Random, steps: int, device: str) -> Iterator[tuple[Tensor, list[int], int]]:
    """Coordinates of a cloud for each step: as many voxels as before, or others."""
    count = random.choice((90, 500, 1500))
    for _ in range(steps):
        kind = random.random()
        count = (
            count
            if kind < 0.3
            else max(2, int(count * random.uniform(0.7, 1.4)))
            if kind < 0.95
            else random.choice((1, 3, 64))
        )
        batch, side = 2, 16 if count < 2000 else 24
        shape = [side, side + 2, side]
        every = batch * shape[0] * shape[1] * shape[2]
        count = min(count, every // 2)
        place = torch.randperm(every, generator=torch.Generator().manual_seed(random.randrange(2**31)))[:count]
        parts = []
        for size in (*shape[::-1], batch):
            parts.append(place % size)
            place = place // size
        yield torch.stack(parts[::-1], 1).int().to(device), shape, batch


def train_unet(random: Random, steps: int) -> Iterator[str]:
    groups = random.choice((1, 1, 2))
    channels, wide = random.choice(((8, 12), (16, 24), (10, 17), (32, 48), (64, 64)))
    dtype = random.choice(
        (torch.float32, torch.float32, torch.float16, torch.float64)
        if DEVICE != "cpu"
        else (torch.float32, torch.float64)
    )
    is_amp = dtype == torch.float16
    model = UNet(channels, wide, random.random() < 0.6, groups).to(DEVICE)
    model = model if is_amp else model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    limit = ERRORS[dtype] * (4 if is_amp else 1)
    cloud_of = clouds(random, steps * 3, DEVICE)
    for step in range(steps):
        told = f"step {step}"
        for parameter in model.parameters():
            parameter.requires_grad_(not (step % 6 == 4 and random.random() < 0.4))
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        told += f" frozen {frozen}" if frozen else ""
        if step % 7 == 5:
            model = copy.deepcopy(model)
            optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
            told += " copied"
        is_deterministic = random.random() < 0.15
        torch.use_deterministic_algorithms(is_deterministic)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        optimizer.zero_grad(set_to_none=random.random() < 0.7)
        expected_grads: dict[str, Tensor] = {}
        try:
            for _ in range(random.choice((1, 1, 2))):
                indices, shape, batch = next(cloud_of)
                count = len(indices)
                given = torch.randn(count, 3, device=DEVICE, dtype=torch.float32 if is_amp else dtype)
                if is_amp:
                    given = given.half().float()
                upstream = torch.randn(count, 4, device=DEVICE, dtype=torch.float64)
                is_input_learning = random.random() < 0.3
                mode = random.choice((torch.no_grad, torch.inference_mode, None, None, None))
                settings = f"{mode and mode.__name__}, deterministic {is_deterministic}"
                told_now = f"{told} {count} voxels, {settings}, input learns {is_input_learning}"
                features = given.clone().requires_grad_(is_input_learning and mode is None)
                is_checkpointed = random.random() < 0.25 and mode is None
                told_now += " checkpointed" if is_checkpointed else ""
                cast: Any = torch.autocast(DEVICE.partition(":")[0], dtype=torch.float16) if is_amp else nullcontext()
                with (mode or torch.enable_grad)(), cast:
                    x = sparse.SparseConvTensor(features, indices, shape, batch)
                    out, coarse = model(x, is_checkpointed)
                wide_weights = {
                    n: p.detach().double().requires_grad_(p.requires_grad) for n, p in model.named_parameters()
                }
                wide_features = given.double().requires_grad_(features.requires_grad)
                torch.use_deterministic_algorithms(False)
                expected = dense_unet(wide_weights, wide_features, indices, coarse.clone(), shape, batch, groups)
                torch.use_deterministic_algorithms(is_deterministic)
                for problem in differ("value", out, expected.detach(), limit):
                    yield f"{told_now}: {problem}"
                if mode is not None or not out.requires_grad:
                    continue
                scale = 1.0
                (out.double() * upstream).sum().mul(scale).backward()
                torch.use_deterministic_algorithms(False)
                (expected * upstream).sum().backward()
                torch.use_deterministic_algorithms(is_deterministic)
                for n, p in wide_weights.items():
                    if p.grad is not None:
                        expected_grads[n] = expected_grads.get(n, 0) + p.grad
                for problem in differ("features' gradient", features.grad, wide_features.grad, 2 * limit):
                    yield f"{told_now}: {problem}"
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    for problem in differ(
                        name,
                        parameter.grad,
                        expected_grads.get(
                            name, torch.zeros_like(parameter).double() if parameter.grad is not None else None
                        ),
                        3 * limit,
                    ):
                        yield f"{told_now}: gradient of {problem}"
        finally:
            torch.use_deterministic_algorithms(False)
        for parameter in model.parameters():  # of clipped length
            if parameter.grad is not None:
                parameter.grad.mul_(1e-2 / parameter.grad.norm().clamp_min(1e-6))
        optimizer.step()


def train_gcn(random: Random, steps: int) -> Iterator[str]:
    dtype = (
        random.choice((torch.float32, torch.float64, torch.float32, torch.float16))
        if DEVICE != "cpu"
        else torch.float32
    )
    limit = ERRORS[dtype]
    inner, reduce = random.choice((7, 16, 33, 64)), random.choice(("sum", "mean", "max"))
    W = [torch.randn(5, inner, device=DEVICE), torch.randn(inner, 3, device=DEVICE)]
    W = [(w / 4).to(dtype).requires_grad_() for w in W]
    nodes, edges = random.choice((50, 1000, 3000)), 4
    # a matrix whose values learn, written to after each step
    layout = random.choice(("coo", "csr", "values"))
    fixed = 40
    crow = torch.arange(0, 3 * fixed + 1, 3, device=DEVICE)
    col = torch.stack([torch.randperm(fixed)[:3].sort().values for _ in range(fixed)]).flatten().to(DEVICE)
    row = torch.arange(fixed, device=DEVICE).repeat_interleave(3)
    values = torch.randn(3 * fixed, device=DEVICE).to(dtype)
    learned: Any = None
    if layout == "coo":
        learned = torch.sparse_coo_tensor(
            torch.stack([row, col]), values, (fixed, fixed), is_coalesced=True
        ).requires_grad_()
    elif layout == "csr":
        learned = torch.sparse_csr_tensor(crow, col, values, (fixed, fixed)).requires_grad_()
    else:
        learned = values.clone().requires_grad_()

    def take(step: int) -> Iterator[str]:
        nonlocal nodes
        kind = random.random()
        nodes = nodes if kind < 0.4 else max(3, int(nodes * random.uniform(0.7, 1.4)))
        count = nodes * edges + (0 if kind < 0.2 else random.randrange(nodes))
        edge_index = torch.randint(0, nodes, (2, count), device=DEVICE)
        order = random.choice(("plain", "by target", "by source"))
        if order != "plain":
            edge_index = edge_index[:, edge_index[1 if order == "by target" else 0].argsort()]
        weight = None if random.random() < 0.3 else torch.rand(count, device=DEVICE).to(dtype)
        is_weight_learning = weight is not None and random.random() < 0.5
        x = torch.randn(nodes, 5, device=DEVICE).to(dtype)
        graph = f"{nodes} nodes, {count} edges {order}, weights {weight is not None} learn {is_weight_learning}"
        told = f"step {step} {layout} {reduce} {dtype}, {graph}"

        def forward(
            x: Tensor,
            W: list[Tensor],
            weight: Any,
            multiply: Callable[..., Tensor],
            sparse_part: Callable[[Tensor], Tensor],
        ) -> Tensor:
            h = multiply(x @ W[0], weight, "sum").relu()
            h = multiply(h @ W[1], weight, reduce)
            return torch.cat(
                [
                    h.flatten(),
                    sparse_part(h[:fixed] if len(h) >= fixed else F.pad(h, (0, 0, 0, fixed - len(h)))).flatten(),
                ]
            )

        own_weight = weight.clone().requires_grad_() if is_weight_learning else weight
        multiply = lambda h, w, how: spmm((edge_index, w), h, how)
        if layout == "values":
            part = lambda h: spmm(
                torch.sparse_coo_tensor(torch.stack([row, col]), learned, (fixed, fixed), is_coalesced=True), h
            )
        else:
            part = lambda h: spmm(learned, h)
        out = forward(x, W, own_weight, multiply, part)
        upstream = torch.randn(out.shape, device=DEVICE).to(dtype)
        leaves = [*W, learned, *([own_weight] if is_weight_learning else [])]
        grads = torch.autograd.grad(out, leaves, upstream)

        wide_W = [w.detach().double().requires_grad_() for w in W]
        wide_weight = None if weight is None else weight.double().requires_grad_(is_weight_learning)
        present = (
            learned.detach()._values()
            if layout == "coo"
            else learned.detach().values()
            if layout == "csr"
            else learned.detach()
        ).double()
        matrix = (
            torch.zeros(fixed, fixed, device=DEVICE, dtype=torch.float64)
            .index_put((row, col), present)
            .requires_grad_()
        )

        def plain(h: Tensor, w: Any, how: str) -> Tensor:
            source, target = edge_index
            messages = h[source] if w is None else h[source] * w[:, None]
            if how == "max":
                made = torch.full((nodes, h.shape[1]), -torch.inf, dtype=h.dtype, device=DEVICE)
                made = made.scatter_reduce(0, target[:, None].expand_as(messages), messages, "amax")
                return torch.where(made.isinf(), 0.0, made)
            total = torch.zeros(nodes, h.shape[1], dtype=h.dtype, device=DEVICE).index_add(0, target, messages)
            return total if how == "sum" else total / torch.bincount(target, minlength=nodes).clamp_min(1)[:, None]

        expected = forward(x.double(), wide_W, wide_weight, plain, lambda h: matrix @ h)
        wide_leaves = [*wide_W, matrix, *([wide_weight] if is_weight_learning else [])]
        wide_grads = list(torch.autograd.grad(expected, wide_leaves, upstream.double()))
        if layout == "values":
            wide_grads[2] = wide_grads[2][row, col]
        else:
            mask = torch.zeros_like(matrix).index_put((row, col), torch.ones((), device=DEVICE, dtype=torch.float64))
            wide_grads[2] = wide_grads[2] * mask
        loose = 4 * limit if dtype != torch.float16 else 0.03
        yield from (f"{told}: {problem}" for problem in differ("value", out.detach(), expected.detach(), loose))
        if not (reduce == "max" and dtype == torch.float16):  # other winners
            for name, one, other in zip(("W0", "W1", "matrix", "weight"), grads, wide_grads):
                yield from (
                    f"{told}: gradient of {problem}" for problem in differ(name, one.detach(), other, 3 * loose)
                )
        with torch.no_grad():
            for w, grad in zip(W, grads):
                w.sub_(1e-3 * grad / grad.norm().clamp_min(1e-3))
            grad = grads[2]
            if layout == "coo":
                learned._values().sub_(1e-2 * grad.coalesce()._values() / (1 + grad._values().norm()))
                if step % 3 == 2:  # behind torch's count of versions, as a loaded checkpoint writes
                    learned.copy_(
                        torch.sparse_coo_tensor(
                            learned._indices().clone(), learned._values() * 0.5, learned.shape, is_coalesced=True
                        )
                    )
            elif layout == "csr":
                learned.values().sub_(1e-2 * grad.values() / (1 + grad.values().norm()))
            else:
                learned.sub_(1e-2 * grad / (1 + grad.norm()))

    for step in range(steps):
        yield from take(step)


def train_edges(random: Random, steps: int) -> Iterator[str]:
    dtype = random.choice((torch.float32, torch.float64, torch.float32))
    limit = ERRORS[dtype] * 10
    is_table = random.random() < 0.5
    channels, first, second, third = (
        random.choice((4, 17, 32, 68)),
        random.choice((1, 3, 4, 9)),
        random.choice((1, 3, 4)),
        random.choice((1, 4, 9)),
    )
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    G = torch.randn(third, first, second, generator=generator) * (
        torch.rand(third, first, second, generator=generator) < 0.4
    )
    if not bool(G.any()):
        G[0, 0, 0] = 1.0
    Z, rows, J = (part.int().to(DEVICE) for part in G.nonzero().T)
    V = G[G != 0].to(DEVICE, dtype)
    L = torch.randint(0, 3, (len(V),), generator=generator).int().to(DEVICE)
    G = G.to(DEVICE, dtype)
    radial = [torch.randn(6, 3 * channels, generator=generator).to(DEVICE, dtype).div(3).requires_grad_()]
    atoms = random.choice((20, 300, 900))
    expand = torch.linspace(0.2, 2.0, 6, device=DEVICE, dtype=dtype)
    mix = torch.randn(second, 3, generator=generator).to(DEVICE, dtype)

    def take(step: int) -> Iterator[str]:
        nonlocal atoms
        kind = random.random()
        atoms = atoms if kind < 0.4 else max(3, int(atoms * random.uniform(0.7, 1.4)))
        edges = atoms * 6 + (0 if kind < 0.2 else random.randrange(atoms))
        pair = torch.randint(0, atoms, (2, edges), device=DEVICE)
        order = random.choice(("plain", "by target", "by target"))
        if order == "by target":
            pair = pair[:, pair[0].argsort()]
        target, source = pair[0].contiguous(), pair[1].contiguous()
        place = torch.randn(atoms, 3, device=DEVICE, dtype=dtype)
        X = torch.randn(atoms, first, channels, device=DEVICE, dtype=dtype)
        is_feature_learning = random.random() < 0.5
        product = f"{first}x{second}->{third} of {channels}, table {is_table}, {dtype}"
        told = f"step {step} {product}, {atoms} atoms, {edges} edges {order}, features learn {is_feature_learning}"
        weights = torch.randn(atoms, third, channels, device=DEVICE, dtype=dtype)
        force_weights = torch.randn(atoms, 3, device=DEVICE, dtype=dtype)

        def loss_of(
            place: Tensor, X: Tensor, radial: Tensor, product: Callable[..., Tensor], one: torch.dtype
        ) -> tuple[Tensor, Tensor]:
            vector = place[target.long()] - place[source.long()] + 0.1
            length = vector.norm(dim=1, keepdim=True)
            R = ((-((length - expand.to(one)) ** 2)).exp() @ radial).view(-1, 3, channels)
            Y = torch.tanh(vector @ mix.to(one).T)
            node = product(X, Y, R)
            energy = (node * weights.to(one)).sum() + (node**2).sum() * 0.1
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
            return energy, (force * force_weights.to(one)).sum() + 0.3 * energy

        if is_table:
            text = "Out[M[e],Z[p],u] += V[p] * X[K[e],I[p],u] * Y[e,J[p]] * R[e,L[p],u]"
            own = lambda X, Y, R: insum(
                text, M=target, Z=Z, V=V, X=X, K=source, I=rows, Y=Y, J=J, R=R, L=L, size=(atoms, third, channels)
            )
            select = torch.zeros(len(V), 3, device=DEVICE, dtype=torch.float64)
            select[torch.arange(len(V)), L.long()] = 1

            def plain(X: Tensor, Y: Tensor, R: Tensor) -> Tensor:
                each = V.double()[:, None] * X[source][:, rows.long()] * Y[:, J.long()][..., None] * R[:, L.long()]
                flat = torch.zeros(atoms * third, channels, dtype=X.dtype, device=DEVICE)
                at = (target[:, None] * third + Z.long()).flatten()
                return flat.index_add(0, at, each.flatten(0, 1)).view(atoms, third, channels)

        else:
            text = "Out[M[e],k,u] += G[k,i,j] * X[K[e],i,u] * Y[e,j] * R[e,u]"
            own = lambda X, Y, R: insum(
                text, M=target, G=G, X=X, K=source, Y=Y, R=R[:, 1], size=(atoms, third, channels)
            )

            def plain(X: Tensor, Y: Tensor, R: Tensor) -> Tensor:
                each = torch.einsum("kij,eiu,ej,eu->eku", G.double(), X[source], Y, R[:, 1])
                return torch.zeros(atoms, third, channels, dtype=X.dtype, device=DEVICE).index_add(0, target, each)

        leaves = [place.clone().requires_grad_(), X.clone().requires_grad_(is_feature_learning), radial[0]]
        energy, loss = loss_of(*leaves, own, dtype)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        random.shuffle(asked)
        grads = dict(zip(map(id, asked), torch.autograd.grad(loss, asked)))
        wide = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
        wide_energy, wide_loss = loss_of(*wide, plain, torch.float64)
        wide_grads = torch.autograd.grad(wide_loss, [leaf for leaf in wide if leaf.requires_grad])
        yield from (
            f"{told}: {p}" for p in differ("energy", energy.detach()[None], wide_energy.detach()[None], limit * 30)
        )
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        for leaf, other in zip(learning, wide_grads):
            name = ("place", "features", "radial")[next(at for at, one in enumerate(leaves) if one is leaf)]
            yield from (f"{told}: gradient of {p}" for p in differ(name, grads[id(leaf)], other, 3 * limit))
        with torch.no_grad():
            grad = grads[id(radial[0])]
            radial[0].sub_(1e-3 * grad / grad.norm().clamp_min(1e-6))

    for step in range(steps):
        yield from take(step)


CLIENTS = {"unet": train_unet, "gcn": train_gcn, "edges": train_edges}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--client", choices=CLIENTS)
    options = parser.parse_args()
    if options.client:
        torch.manual_seed(options.seed)
        begun, count = time.time(), 0
        try:
            for problem in CLIENTS[options.client](Random(options.seed), options.steps):
                print(f"[{options.client} seed {options.seed}] {problem}", flush=True)
                count += 1
                if count > 5:
                    break
        except Exception:
            print(
                f"[{options.client} seed {options.seed}] raised\n"
                + "\n".join(traceback.format_exc().splitlines()[-16:]),
                flush=True,
            )
            count += 1
        print(f"[{options.client} seed {options.seed}] {count} problems in {time.time() - begun:.0f} s", flush=True)
        return min(count, 1)
    processes = []
    for job in range(options.jobs):
        client = [*CLIENTS][job % len(CLIENTS)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "INSUM_TUNE": ("off", "default")[job // len(CLIENTS) % 2]}
        command = [
            sys.executable,
            __file__,
            "--client",
            client,
            "--seed",
            str(options.seed + job),
            "--steps",
            str(options.steps),
        ]
        processes.append((command, subprocess.Popen(command, env=variables)))
    end, failed = time.time() + options.seconds, 0
    for command, process in processes:
        try:
            failed += process.wait(max(0.1, end - time.time())) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"not done in time: {' '.join(command[2:])}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
