"""An equivariant potential with forces, on generated molecules: `python examples/potential.py --steps 60`.

Clusters of three kinds of atoms have the energy of a made-up potential of bonds and angles. The network learns energies
and forces from 48 molecules and is judged by others: its forces are minus the gradient of its energy, so training
differentiates twice. On a GPU it is timed beside e3nn's products; `pip install 'insum_ops[e3nn]'` brings e3nn.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from e3nn import o3
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from insum_ops.nn import TensorProduct

ATOMS, KINDS, CHANNELS, RADIAL, CUTOFF = 8, 3, 16, 8, 3.0
HARMONICS, SCALARS = "0e + 1o + 2e", f"{CHANNELS}x0e"
FEATURES = f"{CHANNELS}x0e + {CHANNELS}x1o + {CHANNELS}x2e"
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


class PlainProduct(o3.TensorProduct):
    """e3nn's product along edges: a message for each, in memory, then added up."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, *, src: Tensor, dst: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.irreps_out.dim).index_add(0, dst, super().forward(x[src], y, weight))


def true_energy(kind: Tensor, position: Tensor) -> Tensor:
    """Morse bonds whose length depends on the kinds, and angles that like a cosine of -1/3; [molecules]."""
    away = position.unsqueeze(1) - position.unsqueeze(2) + 10 * torch.eye(ATOMS, device=kind.device).unsqueeze(-1)
    distance = away.norm(dim=-1)  # [molecules, ATOMS, ATOMS]; an atom is far from itself
    length = 1 + 0.1 * (kind.unsqueeze(1) + kind.unsqueeze(2))
    bonds = ((1 - (2 * (length - distance)).exp()) ** 2 - 1).sum((1, 2)) / 2
    near, unit = (-((distance / 1.3) ** 4)).exp(), away / distance.unsqueeze(-1)
    return bonds + torch.einsum("mij,mik,mijk->m", near, near, (unit @ unit.mT + 1 / 3) ** 2)


def molecules(count: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kinds [count, ATOMS], positions [count, ATOMS, 3], energies [count] and forces [count, ATOMS, 3]."""
    grid = 1.2 * torch.cartesian_prod(*[torch.arange(2.0)] * 3)  # [ATOMS, 3]
    position = (grid + 0.12 * torch.randn(count, ATOMS, 3)).to(device).requires_grad_()
    kind = torch.randint(KINDS, (count, ATOMS)).to(device)
    energy = true_energy(kind, position)
    return kind, position.detach(), energy.detach(), -torch.autograd.grad(energy.sum(), position)[0]


class Potential(nn.Module):
    """Energies [molecules] and forces [molecules, ATOMS, 3], by two tensor products with neighbours' directions."""

    def __init__(self, product: type[nn.Module] = TensorProduct) -> None:
        super().__init__()
        spread = [(0, L, L, "uvu", True) for L in range(3)]  # scalars to scalars, vectors and L = 2
        gather = [(L, L, 0, "uvu", True) for L in range(3)]  # and back to scalars
        self.spread = product(SCALARS, HARMONICS, FEATURES, spread, shared_weights=False)
        self.gather = product(FEATURES, HARMONICS, SCALARS, gather, shared_weights=False)
        self.kinds = nn.Embedding(KINDS, CHANNELS)
        weights = self.spread.weight_numel + self.gather.weight_numel
        self.radial = nn.Sequential(nn.Linear(RADIAL, 32), nn.SiLU(), nn.Linear(32, weights))
        self.readout = nn.Sequential(nn.Linear(3 * CHANNELS, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, kind: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        position = position.detach().requires_grad_()
        each = ATOMS * torch.arange(len(kind)).view(-1, 1)  # all pairs of atoms, for each molecule
        src, dst = ((1 - torch.eye(ATOMS)).nonzero().T.unsqueeze(1) + each).flatten(1).to(kind.device)
        x, rows = self.kinds(kind.flatten()), position.flatten(0, 1)
        edge = rows[src] - rows[dst]
        distance = edge.norm(dim=1, keepdim=True)
        y = o3.spherical_harmonics(HARMONICS, edge, normalize=True, normalization="component")
        waves = torch.sin(distance * torch.arange(1, RADIAL + 1).to(edge) * torch.pi / CUTOFF) / distance
        fade = (1 - (distance / CUTOFF).clamp(max=1) ** 2) ** 2
        weight = (self.radial(waves) * fade).split([self.spread.weight_numel, self.gather.weight_numel], 1)
        near = self.spread(x, y, weight[0], src=src, dst=dst) / ATOMS**0.5
        far = self.gather(near, y, weight[1], src=src, dst=dst) / ATOMS**0.5
        energy = self.readout(torch.cat([x, near[:, :CHANNELS], far], 1)).view_as(kind).sum(1)
        return energy, -torch.autograd.grad(energy.sum(), position, create_graph=self.training)[0]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, kind: Tensor, position: Tensor, *wanted: Tensor) -> None:
    off = [learned - true for learned, true in zip(model.train()(kind, position), wanted)]  # energies, forces
    optimizer.zero_grad()
    ((off[0] / ATOMS).square().mean() + off[1].square().mean()).backward()
    optimizer.step()


def speed(step: partial[None]) -> float:
    return 1 / Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median


def main(argv: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    seen, (kind, position, energy, force) = molecules(48, options.device), molecules(48, options.device)
    model, twin = Potential().to(options.device), Potential(PlainProduct).to(options.device)
    ours, plain = (partial(step, one, torch.optim.Adam(one.parameters(), 0.01), *seen) for one in (model, twin))
    for _ in range(options.steps):
        ours()
    learned_energy, learned_force = (learned.detach() for learned in model.eval()(kind, position))
    error, zero = (float(off.abs().mean()) for off in (learned_force - force, force))
    print(f"mean error of unseen forces: {error:.2f} (always zero: {zero:.2f})")
    off, mean = ((other - energy).abs().mean() for other in (learned_energy, seen[2].mean()))
    print(f"mean error of unseen energies: {off:.2f} (always the mean: {mean:.2f})")
    turn = o3.rand_matrix().to(position)
    change = model(kind, position @ turn.T)[1] - learned_force @ turn.T
    print(f"forces of turned molecules differ from turned forces by {change.abs().amax().item():.0e}")
    if options.device == "cuda":
        print(f"{speed(ours):.0f} training steps per second; with e3nn's products {speed(plain):.0f}")
    return error, zero


if __name__ == "__main__":
    main()
