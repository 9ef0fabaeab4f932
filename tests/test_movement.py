"""Statements that move data, with every tile that tuning tries, against plain torch."""

import pytest
import torch
from problems import problem, told_apart
from statements import DEVICE, IS_INTERPRETED

from insum_ops.compiler.codegen import Flags
from insum_ops.compiler.tuning.problem import candidates
from insum_ops.formats.facts import OwnedRows

pytestmark = pytest.mark.kernels

SINGLE, HALF = torch.float32, torch.float16


def draw(*size, dtype=SINGLE):
    return torch.randn(*size).to(dtype).to(DEVICE)


def positions(high, *size, low=0):
    return torch.randint(low, high, size, dtype=torch.int32, device=DEVICE)


def gathered(X, G):
    return X[G.clamp(min=0)] * (G >= 0)[:, None]


def messages(A, X, T, U, rows):
    return X.new_zeros(rows, *X.shape[1:]).index_add_(0, T, A[:, :, None] * X[U])


CASES = {
    "transpose": ("Y[j,i] = X[i,j]", dict(X=draw(37, 71)), None, lambda X: X.T),
    "seeded": ("Y[j,i] += X[i,j]", dict(X=draw(37, 35), Y=draw(35, 37)), None, lambda X, Y: X.T + Y),
    "reversed": ("Y[k,j,i] = X[i,j,k]", dict(X=draw(33, 5, 35)), None, lambda X: X.permute(2, 1, 0)),
    "long last": ("Y[k,j,i] = X[i,j,k]", dict(X=draw(35, 5, 65)), None, lambda X: X.permute(2, 1, 0)),
    "heads": ("Y[b,n,h,d] = X[b,h,n,d]", dict(X=draw(2, 3, 5, 37, dtype=HALF)), None, lambda X: X.transpose(1, 2)),
    "strided": ("Y[p,c] = X[p,c]", dict(X=draw(35, 80)[:, ::2]), None, lambda X: X),
    "expanded": ("Y[p,c] = X[p,c]", dict(X=draw(1, 37).expand(35, 37)), None, lambda X: X),
    "padded rows": ("Y[p,c] = X[G[p],c]", dict(X=draw(9, 33), G=positions(9, 70, low=-1)), None, gathered),
    "even rows": (
        "Y[p,c] = X[G[p],c]",
        dict(X=draw(9, 40, dtype=HALF), G=positions(9, 70)),
        None,
        lambda X, G: X[G],
    ),
    "columns": ("Y[c,p] = X[G[p],c]", dict(X=draw(9, 33), G=positions(9, 70)), None, lambda X, G: X[G].T),
    "scattered": (
        "Y[G[p],c] += 2 * X[p,c]",
        dict(X=draw(70, 33), G=positions(9, 70)),
        (9, 33),
        lambda X, G: X.new_zeros(9, 33).index_add_(0, G, 2 * X),
    ),
    "outer": (
        "Y[b,i,j] = A[b,i] * B[b,j]",
        dict(A=draw(7, 5, dtype=HALF), B=draw(7, 35, dtype=HALF)),
        None,
        lambda A, B: A[:, :, None] * B[:, None],
    ),
    "scores": (
        "S[e,h] += Q[T[e],h,d] * K[U[e],h,d]",
        dict(Q=draw(9, 3, 5), K=draw(9, 3, 5), T=positions(9, 70), U=positions(9, 70)),
        None,
        lambda Q, K, T, U: (Q[T] * K[U]).sum(-1),
    ),
    "messages": (
        "Y[T[e],h,d] += A[e,h] * X[U[e],h,d]",
        dict(A=draw(70, 3), X=draw(9, 3, 11), T=positions(9, 70), U=positions(9, 70)),
        (9, 3, 11),
        lambda A, X, T, U: messages(A, X, T, U, 9),
    ),
    "one of some": ("Y[a,b,c] = X[a,b,c]", dict(X=draw(5, 1, 33)), None, lambda X: X),
}


@pytest.mark.parametrize("name", CASES)
def test_every_tile_moves_the_same(name):
    expr, tensors, size, plain = CASES[name]
    padded = frozenset(
        name for name, tensor in tensors.items() if not tensor.is_floating_point() and (tensor < 0).any()
    )
    own = problem(expr, tensors, size, flags=Flags(padded=padded, interpreted=IS_INTERPRETED))
    want, tried = plain(**tensors), told_apart(candidates(own))
    assert any(way.schedule.form for way in tried)
    for way in tried:
        got = own.launcher(way)(list(tensors.values()), None)
        torch.testing.assert_close(got, want, rtol=1e-3 if want.dtype == HALF else 1e-5, atol=1e-5, msg=str(way))


def test_owned_rows_hold_short_names_side_by_side():
    T = positions(9, 70).sort()[0].to(torch.int32)
    tensors = dict(A=draw(70, 3), X=draw(9, 3, 11), T=T, U=positions(9, 70))
    pointers = torch.searchsorted(T, torch.arange(10, dtype=torch.int32, device=DEVICE), out_int32=True)
    fact = OwnedRows("T", "", pointers)
    flags = Flags(padded=frozenset(), interpreted=IS_INTERPRETED)
    own = problem("Y[T[e],h,d] += A[e,h] * X[U[e],h,d]", tensors, (9, 3, 11), fact, flags)
    ways = [way for way in candidates(own) if way.schedule.strategy == "owner"]
    assert ways[0].schedule.names("tile") == ("r", "h_d")
    for way in ways[:2]:
        got = own.launcher(way)(list(tensors.values()), fact)
        torch.testing.assert_close(got, messages(*tensors.values(), 9), rtol=1e-5, atol=1e-5, msg=str(way))
