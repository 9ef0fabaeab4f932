"""Runs of functions, recorded and made into plans, in surroundings that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from insum_ops.compiler.binding import LengthClass
from insum_ops.compiler.runtime.generalise import generalised
from insum_ops.compiler.runtime.launch import misaligned
from insum_ops.compiler.runtime.plan import Plan, Services, plan_of
from insum_ops.compiler.runtime.plan_steps import Steps
from insum_ops.compiler.runtime.recording import Recording

__all__ = ["Function", "Surroundings", "assert_same", "joined", "plan_for", "recorded"]

Function = Callable[..., Any]


class Surroundings:
    """What a replay asks at run time, as a test says."""

    def __init__(self, is_interpreted: bool = True, has_several_devices: bool = False) -> None:
        self.is_capturing, self.rounds, self.device, self.precision = False, True, 0, "ieee"
        self.services = Services(
            is_interpreted,
            has_several_devices,
            lambda: self.is_capturing,
            lambda *indices, ordered=(): [(int(index.min()), int(index.max())) for index in indices],
            lambda index: bool((index[1:] >= index[:-1]).all()),
            lambda name, address, cached, *_: f"({cached} := None)",  # none is known
            lambda dtype: self.rounds,
            lambda: self.precision,
            torch.get_default_dtype,
            lambda: False,
            misaligned,
            lambda device: lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device),
            lambda: self.device,
        )


def recorded(function: Function, *tensors: Tensor, owned: Sequence[Tensor] = ()) -> Steps:
    with Recording(tensors) as recording:
        result = function(*tensors)
    stated = recording.result(result)
    assert not recording.refusal
    return Steps.of(recording, stated, owned)


def plan_for(function: Function, *tensors: Tensor, services: Services | None = None) -> Plan:
    plan = plan_of(recorded(function, *tensors), services or Surroundings().services)
    assert plan is not None
    return plan


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert isinstance(found, (tuple, list))
        for part, right in zip(found, expected, strict=True):
            assert_same(part, right)
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(found, expected)
    else:
        assert found == expected


def joined(function: Function, one: Sequence[Tensor], other: Sequence[Tensor], services: Services | None = None) -> Any:
    """Return the plan of all calls that two calls stand for, None if there is none."""
    lengths = [[len(tensor) for tensor in tensors] for tensors in (one, other)]
    classes = [LengthClass(0, 2**28, 1)] * len(one)
    found = generalised(recorded(function, *one), recorded(function, *other), *lengths, classes)
    return None if found is None else plan_of(found[0], services or Surroundings().services, found[1])
