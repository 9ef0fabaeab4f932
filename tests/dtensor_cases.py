"""What tests/distributed/test_dtensors.py runs on four ranks: statements over DTensors against the loop nest."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import LoopNest
from statements import IS_THOROUGH, Case, random_values, statements
from tolerances import TOLERANCE, bound
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from insum_ops import insum
from insum_ops.compiler import InsumError
from insum_ops.distributed import SplitSpMM, unchecked_calls
from insum_ops.distributed.rules import spelled
from insum_ops.formats import BlockCOO, FormatError, GroupCOO

EXAMPLES = 300 if IS_THOROUGH else 8
SPMM = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
RANDOM = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # on a machine with other work
)


def split(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """A tensor as a DTensor; of a partial one the first of n ranks has n times it, the others minus it."""
    tensor = tensor.detach()
    whole: list[Placement] = [Replicate() if place.is_partial() else place for place in placements]
    local = distribute_tensor(tensor.contiguous(), mesh, whole).to_local()
    for dim, place in enumerate(placements):
        if place.is_partial():
            ranks = mesh.size(dim)
            local = local * (ranks if mesh.get_local_rank(dim) == 0 else -1)
    shape, stride = tensor.shape, torch.empty(tensor.shape).stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def placements_of(tensor: Tensor, mesh: DeviceMesh, draw: random.Random) -> list[Placement]:
    choices = [Replicate(), *[Shard(dim) for dim in range(tensor.ndim)]]
    if tensor.is_floating_point():
        choices.append(Partial("sum"))
    return [draw.choice(choices) for _ in range(mesh.ndim)]


def assert_within(actual: Tensor, expected: Tensor, limit: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    error = (actual.double() - expected).abs()
    assert bool((error <= limit).all()), f"{what}: wrong by {error.max()}, where {limit.max()} is allowed"


def check(case: Case, mesh: DeviceMesh, seed: int) -> None:
    """Value and gradients over DTensors equal the loop nest's, whatever the placements."""
    draw, nest = random.Random(seed), LoopNest(case.expr, case.tensors, case.size)
    operands = {
        name: split(tensor, mesh, placements_of(tensor, mesh, draw)).requires_grad_(tensor.is_floating_point())
        for name, tensor in case.tensors.items()
    }
    shown = {name: operand.placements for name, operand in operands.items()}
    what = f"{case.expr} over {shown}, size {case.size}"
    result = insum(case.expr, size=case.size, **operands)
    expected = nest.result()
    # parts of a partial factor are as large as it is, times the ranks
    slack = 4 * mesh.size() ** 2
    assert isinstance(result, DTensor), what
    limit = bound(torch.float64, expected.magnitude, expected.terms, expected.factors)
    assert_within(result.full_tensor().detach(), expected.value, slack * limit, what)
    if not result.requires_grad:
        return
    upstream = random_values(nest.shape, torch.float64, torch.Generator().manual_seed(6))
    wanted = nest.gradients(upstream)
    names = [name for name in operands if name in wanted]
    given_grad = distribute_tensor(upstream, mesh, [Replicate()] * mesh.ndim)
    grads = torch.autograd.grad(result, [operands[name] for name in names], given_grad, allow_unused=True)
    for name, grad in zip(names, grads):
        own = wanted[name]
        if grad is not None:
            limit = bound(torch.float64, own.magnitude, own.terms, own.factors)
            assert_within(grad.full_tensor(), own.value, slack * limit, f"d{name} of {what}")


def random_statements_on_four_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,))

    @RANDOM
    @given(statements((torch.float64,)), st.integers(0, 2**31))
    def test(case: Case, seed: int) -> None:
        check(case, mesh, seed)

    test()


def random_statements_on_two_by_two_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    @RANDOM
    @given(statements((torch.float64,)), st.integers(0, 2**31))
    def test(case: Case, seed: int) -> None:
        check(case, mesh, seed)

    test()


def random_extremes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))

    @RANDOM
    @given(statements((torch.float64,), reductions=("max", "min"), is_whole=True), st.integers(0, 2**31))
    def test(case: Case, seed: int) -> None:
        check(case, mesh, seed)

    test()


def spmm_operands() -> dict[str, Tensor]:
    AK = torch.randint(-1, 5, (10, 2))
    return {"AM": torch.randint(7, (10,)), "AK": AK, "AV": torch.randn(10, 2), "B": torch.randn(5, 4)}


def placed(mesh: DeviceMesh, operands: Mapping[str, Tensor], **placements: Placement) -> dict[str, DTensor]:
    return {name: distribute_tensor(operand, mesh, [placements[name]]) for name, operand in operands.items()}


def placements_follow_the_statement() -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (4,)), {}
    operands = spmm_operands()
    groups = dict.fromkeys(("AM", "AK", "AV"), Shard(0))
    whole = dict.fromkeys(("AM", "AK", "AV"), Replicate())
    for name, where in {
        "groups": {**groups, "B": Replicate()},
        "columns": {**whole, "B": Shard(1)},
        "gathered": {**whole, "B": Shard(0)},
        "groups, B split": {**groups, "B": Shard(0)},
        "whole": {**whole, "B": Replicate()},
    }.items():
        found[name] = spelled(insum(SPMM, size=(7, 4), **placed(mesh, operands, **where)).placements[0])
    return found


def a_start_counts_once() -> None:
    """Small numbers beside 1e30: a start that is cut in parts, or added four times, would show."""
    mesh = init_device_mesh("cpu", (4,))
    operands = spmm_operands()
    split_operands = placed(mesh, operands, AM=Shard(0), AK=Shard(0), AV=Shard(0), B=Replicate())
    C = torch.randint(9, (7, 4)).double()
    expected = LoopNest(SPMM, {**operands, "C": C}).result().value
    for start in (Replicate(), Shard(0), Shard(1)):
        result = insum(SPMM, C=distribute_tensor(C, mesh, [start]), **split_operands)
        assert result.placements == (Partial("sum"),)
        torch.testing.assert_close(result.full_tensor(), expected, **TOLERANCE[torch.float32])


def a_max_that_no_rank_reaches_is_zero() -> None:
    """And one that a single rank reaches is its value, below zero or NaN."""
    mesh = init_device_mesh("cpu", (4,))
    rows, values = torch.tensor([0, 1, 2, 2]), torch.tensor([-3.0, -4.0, torch.nan, 5.0])
    rows, values = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (rows, values))
    for reduction in ("max", "min"):
        result = insum(f"C[I[p]] = {reduction}(A[p])", I=rows, A=values, size=(4,)).full_tensor()
        torch.testing.assert_close(result, torch.tensor([-3.0, -4.0, torch.nan, 0.0]), equal_nan=True)


def parts_of_positions_are_added_up_first() -> None:
    """What each rank has of them may be out of range."""
    mesh, rank = init_device_mesh("cpu", (4,)), distributed.get_rank()
    rows, A = torch.tensor([0, 2, 1, 3, -1]), torch.arange(5.0)
    for op, parts in {"sum": rows * (4 if rank == 0 else -1), "min": rows + 10 * (rank != 1)}.items():
        placed_rows = DTensor.from_local(parts, mesh, [Partial(op)], run_check=False)
        result = insum("C[I[p]] += A[p]", I=placed_rows, A=A, size=(4,)).full_tensor()
        assert result.tolist() == [0, 2, 1, 3]


def formats_are_whole_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (4,))
    dense = torch.randn(8, 6, dtype=torch.float64) * (torch.rand(8, 6) < 0.4)
    B = torch.randn(6, 5, dtype=torch.float64)
    upstream = torch.randn(8, 5, dtype=torch.float64)
    for form in (GroupCOO.from_dense(dense), BlockCOO.from_dense(dense, block_size=(2, 2))):
        for place in (Shard(1), Shard(0), Replicate()):
            split_B = distribute_tensor(B, mesh, [place]).requires_grad_()
            C = insum("C[m,n] += A[m,k] * B[k,n]", A=form, B=split_B)
            if place == Shard(1):
                assert C.placements == (Shard(1),)
            torch.testing.assert_close(C.full_tensor(), dense @ B)
            C.backward(distribute_tensor(upstream, mesh, [Replicate()]))
            torch.testing.assert_close(split_B.grad.full_tensor(), dense.T @ upstream)


def trained_by_compiled_steps() -> None:
    mesh = init_device_mesh("cpu", (4,))
    operands = spmm_operands()
    split_operands = placed(mesh, operands, AM=Shard(0), AK=Shard(0), AV=Shard(0), B=Replicate())

    def loss(**tensors: Tensor) -> Tensor:
        return insum(SPMM, size=(7, 4), **tensors).redistribute(placements=[Replicate()]).square().sum()

    for names in (["B"], ["AV", "B"]):  # one gradient, and several, which are one operator to a tracer
        leaves = [split_operands[name].requires_grad_() for name in names]
        compiled = torch.compile(loss, backend="aot_eager")
        found = [torch.autograd.grad(call(**split_operands), leaves) for call in (loss, compiled)]
        for expected, actual in zip(*found):
            torch.testing.assert_close(actual.full_tensor(), expected.full_tensor())


def message(call: Any) -> str:
    """What a call raises; every rank must raise it."""
    try:
        call()
    except (InsumError, FormatError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def mistakes() -> dict[str, str]:
    """Each on one rank alone where that can be; all ranks say the same."""
    mesh, rank = init_device_mesh("cpu", (4,)), distributed.get_rank()
    other, is_odd = init_device_mesh("cpu", (2, 2)), distributed.get_rank() == 2
    operands = spmm_operands()
    B = distribute_tensor(operands["B"], mesh, [Replicate()])
    plain = {name: operands[name] for name in ("AM", "AK", "AV")}
    differs = {**plain, "AK": plain["AK"].flip(0) if is_odd else plain["AK"]}
    trained = {**plain, "AV": plain["AV"].clone().requires_grad_(is_odd)}
    elsewhere = distribute_tensor(operands["AV"], other, [Replicate(), Replicate()])
    strided = [_StridedShard(0, split_factor=2)]
    strange = DTensor.from_local(operands["B"], mesh, strided, run_check=False, shape=(20, 4), stride=(4, 1))
    split_B = distribute_tensor(operands["B"], mesh, [Shard(1)])
    split = {name: distribute_tensor(operand, mesh, [Shard(0)]) for name, operand in plain.items()}
    local = split["AK"].to_local()
    wrong = DTensor.from_local(
        local + 9 if is_odd else local, mesh, [Shard(0)], run_check=False, shape=(10, 2), stride=(2, 1)
    )
    text = SPMM.replace("AV[p,q] * ", "2 * AV[p,q] * ") if is_odd else SPMM
    some = {name: operand for name, operand in plain.items() if name != "AV" or not is_odd}
    call = lambda expr=SPMM, size=(7, 4), **tensors: message(lambda: insum(expr, size=size, **tensors))
    found = {
        "a pattern that differs": call(B=B, **differs),
        "a plain parameter": call(B=B, **trained),
        "two meshes": call(B=B, **{**plain, "AV": elsewhere}),
        "a strange placement": call(B=strange if is_odd else B, **plain),
        "another placement": call(B=split_B if is_odd else B, **plain),
        "another kind": call(B=B, **(split if is_odd else plain)),
        "a position out of range": call(B=B, **{**split, "AK": wrong}),
        "another statement": call(text, B=B, **plain),
        "another size": call(size=(8, 4) if is_odd else (7, 4), B=B, **plain),
        "a size that is none": call(size=(7,) if is_odd else (7, 4), B=B, **plain),
        "no name": call(B=B, **some),
        "no statement": call(SPMM + "]" if is_odd else SPMM, B=B, **plain),
        "a format that is none": call("C[m,n] += A[m,k] * B[k,n]", None, A="A" if is_odd else torch.ones(7, 5), B=B),
    }
    plain["AK"][0, 0] = rank  # known to be the same before
    found["a change in place"] = call(B=B, **plain)
    insum(SPMM, size=(7, 4), B=B, **split)  # all ranks have come to the same place
    with unchecked_calls():
        insum(SPMM, size=(7, 4), B=B, **split)
    return found


def a_rank_that_is_not_in_the_mesh() -> str:
    """It is refused at once; the others go on without it."""
    mesh = DeviceMesh("cpu", [0, 1, 3])
    x = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    if distributed.get_rank() == 2:
        elsewhere = message(lambda: SplitSpMM(torch.eye(3).to_sparse(), mesh))
        assert message(lambda: insum("C[i] += A[i]", A=x)) == elsewhere
        return elsewhere
    insum("C[i] += A[i]", A=x)
    A = torch.eye(3).to_sparse()
    SplitSpMM.from_graph(A, torch.tensor([0, 1, 2]), mesh)(torch.ones(1, 2))
    return ""


NAMES = [
    "random_statements_on_four_ranks",
    "random_statements_on_two_by_two_ranks",
    "random_extremes",
    "placements_follow_the_statement",
    "a_start_counts_once",
    "a_max_that_no_rank_reaches_is_zero",
    "parts_of_positions_are_added_up_first",
    "formats_are_whole_on_every_rank",
    "mistakes",
    "a_rank_that_is_not_in_the_mesh",
    *(["trained_by_compiled_steps"] if IS_THOROUGH else []),  # 5 s on each rank
]
