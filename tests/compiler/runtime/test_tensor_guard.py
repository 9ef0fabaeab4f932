"""Guards of torch: tensors like others are recognised, and any that a kernel could not take for them is not."""

from __future__ import annotations

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from torch.autograd import forward_ad

from insum_ops.compiler.runtime import tensor_guard
from insum_ops.compiler.runtime.tensor_guard import layout_guard

pytestmark = [
    pytest.mark.cpu,
    SPARSE_WARNINGS,
    pytest.mark.skipif(not tensor_guard._tells_apart(), reason="this torch has no such guards"),
]


def drawn(*shape):
    return torch.randn(shape)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 4), (2, 3, 4)])
def test_tensors_like_the_first_are_recognised(shape):
    guard = layout_guard([drawn(*shape), drawn(2)])
    for _ in range(3):
        assert guard(drawn(*shape), drawn(2))
    with torch.no_grad():
        assert guard(drawn(*shape), drawn(2))


UNLIKE = {
    "narrower": lambda: drawn(5, 3),
    "longer": lambda: drawn(6, 4),
    "flat": lambda: drawn(20),
    "of three dimensions": lambda: drawn(5, 4, 1),
    "transposed": lambda: drawn(4, 5).T,
    "with gaps": lambda: drawn(5, 8)[:, :4],
    "double": lambda: drawn(5, 4).double(),
    "half": lambda: drawn(5, 4).half(),
    "elsewhere": lambda: drawn(5, 4).to("meta"),
    "sparse": lambda: drawn(5, 4).to_sparse(),
    "sparse rows": lambda: drawn(5, 4).to_sparse_csr(),
    "negated": lambda: torch._neg_view(drawn(5, 4)),
    "parameter": lambda: torch.nn.Parameter(drawn(5, 4)),
    "wants a gradient": lambda: drawn(5, 4).requires_grad_(),
    "subclass": lambda: drawn(5, 4).as_subclass(Marked),
    "list": lambda: [[0.0]],
    "none": lambda: None,
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_any_other_is_not(kind):
    other = UNLIKE[kind]()
    assert layout_guard([drawn(5, 4)])(other) is False
    assert layout_guard([drawn(2), drawn(5, 4)])(drawn(2), other) is False


@pytest.mark.parametrize("kind", [kind for kind in UNLIKE if kind != "longer"])
def test_where_any_length_is_accepted_nothing_else_is(kind):
    guard = layout_guard([drawn(2), drawn(5, 4)], {1})
    assert guard(drawn(2), drawn(5, 4))
    assert all([guard(drawn(2), drawn(length, 4)) for length in (0, 1, 6, 1000)])
    assert not guard(drawn(3), drawn(5, 4))
    assert guard(drawn(2), UNLIKE[kind]()) is False


def test_strides_that_could_be_a_negated_tensors_are_told_from_one():
    values = torch.complex(drawn(5, 4), drawn(5, 4))
    guard = layout_guard([values.imag])
    assert guard(values.clone().imag)
    assert values.conj().imag.stride() == values.imag.stride()
    assert not guard(values.conj().imag)


def test_one_tensor_in_two_places_is_never_recognised():
    B = drawn(5, 4)
    assert layout_guard([B, B]) is None
    guard = layout_guard([B, drawn(5, 4)])
    assert guard(drawn(5, 4), B)
    assert not guard(B, B)


def test_who_casts_or_transforms_is_seen_too():
    guard, B, seen = layout_guard([drawn(5, 4)]), drawn(5, 4), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not guard(B)
        assert not guard(drawn(5, 4))

    def look(given):
        seen.append(guard(B))
        return given.sum()

    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize, torch.func.jacrev, torch.func.jacfwd):
        transform(look)(B)
    torch.func.jvp(look, (B,), (B,))
    torch.func.vjp(look, B)
    torch.func.vmap(torch.func.grad(look))(B)
    with torch.inference_mode():
        seen.append(guard(drawn(5, 4)))
    assert seen == [False] * 9
    with forward_ad.dual_level():
        assert guard(B)  # which is why `is_free` asks about those
    assert guard(B)


def test_a_torch_whose_guards_miss_something_is_not_asked(monkeypatch):
    original = tensor_guard._guard
    for miss in (lambda *given: True, lambda *given: False):
        monkeypatch.setattr(tensor_guard, "_guard", lambda *given, miss=miss: miss)
        assert not tensor_guard._tells_apart()
    monkeypatch.setattr(tensor_guard, "_guard", original)
    assert tensor_guard._tells_apart()


@pytest.mark.parametrize("kind", [TypeError, RuntimeError])
def test_a_torch_whose_guards_are_made_otherwise_is_not_asked(monkeypatch, kind):
    def refuse(*given):
        raise kind("other arguments")

    monkeypatch.setattr(tensor_guard, "_guard", refuse)
    assert not tensor_guard._tells_apart()


def test_a_torch_without_guards_is_not_asked(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert not tensor_guard._tells_apart()
    monkeypatch.setattr(tensor_guard, "_tells_apart", lambda: False)
    monkeypatch.setattr(tensor_guard._Trial, "has_passed", False)
    assert layout_guard([drawn(2)]) is None


def test_the_first_question_may_come_in_any_mode():
    with torch.inference_mode(), torch.no_grad():
        assert tensor_guard._tells_apart()
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            assert tensor_guard._tells_apart()
    finally:
        torch.set_default_dtype(before)


def test_guards_that_failed_a_trial_are_tried_again(monkeypatch):
    monkeypatch.setattr(tensor_guard._Trial, "has_passed", False)
    monkeypatch.setattr(tensor_guard._Trial, "count", 0)
    answers = iter([False, True])
    monkeypatch.setattr(tensor_guard, "_tells_apart", lambda: next(answers))
    found = [tensor_guard.layout_guard([torch.zeros(2)]) is not None for _ in range(3)]
    assert found == [False, True, True]
