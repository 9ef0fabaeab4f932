"""What tests/distributed/test_replicas.py runs on several ranks: layers that DDP is to make the same everywhere."""

from __future__ import annotations

import torch
from dtensor_cases import message
from ranks import device
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from insum_ops.distributed import check_replicas
from insum_ops.nn import BlockSparseLinear, SpMM


def other_patterns_become_the_first_ranks() -> tuple[list[list[int]], float]:
    """A layer that was not used yet takes the pattern together with the weights."""
    torch.manual_seed(distributed.get_rank())
    model = nn.Sequential(BlockSparseLinear(16, 16, block_size=4, density=0.3), nn.Linear(16, 2)).to(device())
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(5)
    y = wrapped(torch.randn(3, 16, device=device()))
    y.square().mean().backward()
    return model[0].coords.tolist(), float(y.sum())


def kinds_of_buffers() -> dict[str, torch.Tensor]:
    """They differ between ranks in one number, or in its imaginary part."""
    value = float(distributed.get_rank())
    return {
        "complex": torch.complex(torch.ones(2), torch.full((2,), value)),
        "8-bit": torch.full((2,), value).to(torch.float8_e4m3fn),
    }


def mistakes() -> dict[str, str]:
    rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (distributed.get_world_size(),))
    torch.manual_seed(0)
    sparse = torch.eye(4) if rank != 1 else torch.ones(4, 4)
    sizes = BlockSparseLinear(16, 16, block_size=4, density=0.5 if rank != 1 else 0.75)
    torch.manual_seed(rank)
    layers = {
        "another matrix": SpMM(sparse.to_sparse()),
        "a pattern of another size": sizes,
        "another pattern": BlockSparseLinear(16, 16, block_size=4, density=0.3, bias=False),
        "other parameters": nn.Linear(4, 4 if rank != 1 else 5),
        "more parameters": nn.Linear(4, 4, bias=rank != 1),
    }
    check_replicas(nn.Linear(4, 4), mesh)
    for kind, buffer in kinds_of_buffers().items():
        layers[f"{kind} numbers"] = nn.Module()
        layers[f"{kind} numbers"].register_buffer("b", buffer)
    for without_numbers in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        model = nn.Module()
        model.register_buffer("b", without_numbers)
        check_replicas(model, mesh)
    return {name: message(lambda layer=layer: check_replicas(layer, mesh)) for name, layer in layers.items()}


NAMES = ["other_patterns_become_the_first_ranks", "mistakes"]
