"""Statement and tensors -> extents, size and dtype, and the full text of every message."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import pytest
import torch
from messages import messages
from torch import Tensor

from insum_ops.compiler.binding.bind import Bound, Pointed, bind, row_major
from insum_ops.compiler.language.errors import IndexRangeError, InsumError, OperandError, ShapeError
from insum_ops.compiler.language.parse import parse
from insum_ops.formats import COO, GroupCOO

pytestmark = pytest.mark.cpu


def values(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def index(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def bound(expr: str, size: Any = None, **tensors: Any) -> Bound:
    return bind(parse(expr), tensors, size)


def refusal(expr: str, kind: type[InsumError], **tensors: Any) -> str:
    with pytest.raises(InsumError) as caught:
        bound(expr, **tensors)
    assert type(caught.value) is kind
    return str(caught.value)


def test_extents_and_size_of_a_gather_and_scatter() -> None:
    found = bound(
        "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
        AM=index(5),
        AK=index(5, 2, dtype=torch.int32),
        AV=values(5, 2),
        B=values(7, 3),
        size=(4, 3),
    )
    assert found.extents == {"p": 5, "q": 2, "n": 3}
    assert found.size == (4, 3)
    assert found.shapes == {"AM": (5,), "AK": (5, 2), "AV": (5, 2), "B": (7, 3)}
    assert found.dtypes["AK"] == torch.int32
    assert found.device == torch.device("cpu")
    assert not found.is_seeded
    assert found.pointed == (Pointed("AM", "C", 0, 4, 2), Pointed("AK", "B", 0, 7, 26))


@pytest.mark.parametrize(
    ("expr", "shapes", "size", "expected"),
    [
        ("C[i,j] = A[j,i]", {"A": (2, 3)}, None, (3, 2)),
        ("C[i,i] = A[i]", {"A": (3,)}, None, (3, 3)),
        ("C[()] += A[i]", {"A": (3,)}, None, ()),
        ("C[2,i] += A[i]", {"A": (3,)}, (4, 3), (4, 3)),
        ("C[i,j] += A[i]", {"A": (3,)}, (3, 5), (3, 5)),
        ("C[i,j] += A[i]", {"A": (3,), "C": (3, 5)}, None, (3, 5)),
        ("C[i,j] = A[i]", {"A": (3,), "C": (3, 5)}, (3, 5), (3, 5)),
        ("C[i] += A[i]", {"A": (0,)}, torch.Size([0]), (0,)),
        ("C[i] = 1", {"C": (3,)}, None, (3,)),
    ],
)
def test_where_the_size_comes_from(expr: str, shapes: Any, size: Any, expected: tuple[int, ...]) -> None:
    assert bound(expr, size, **{name: values(*shape) for name, shape in shapes.items()}).size == expected


def test_a_seed_is_a_given_output_that_is_added_to() -> None:
    A, C = values(3, dtype=torch.float16), values(3, dtype=torch.float64)
    assert bound("C[i] += A[i]", A=A, C=C).is_seeded
    assert bound("C[i] += A[i]", A=A, C=C).dtype == torch.float64
    assert not bound("C[i] = A[i]", A=A, C=C).is_seeded
    assert bound("C[i] = A[i]", A=A, C=C).dtype == torch.float16
    assert bound("C[i] = 2", C=C).dtype == torch.float64


def test_half_precision_is_computed_in_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert bound("C[i] = A[i]", A=values(3, dtype=dtype)).compute_dtype == torch.float32
    assert bound("C[i] = A[i]", A=values(3, dtype=torch.float64)).compute_dtype == torch.float64
    mixed = bound("C[i] = A[i] * B[i]", A=values(3, dtype=torch.float16), B=values(3, dtype=torch.bfloat16))
    assert mixed.dtype == torch.float32


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 1), torch.int32),
        ((2**16, 2**15 - 1), torch.int32),
        ((2**16, 2**15), torch.int64),
        ((1, 2**31 - 1), torch.int32),
        ((2**31, 1), torch.int64),
    ],
)
def test_winners_are_counted_over_what_is_reduced(shape: tuple[int, int], expected: torch.dtype) -> None:
    assert bound("C[i] = max(A[i,j,k])", A=values(3, *shape, device="meta")).winner_dtype == expected


def test_nothing_is_summed_where_an_index_runs_over_or_points_into_nothing() -> None:
    assert bound("C[i] = A[i,j]", A=values(3, 0)).is_empty
    assert bound("C[i] = A[E[i]]", A=values(0), E=index(3)).is_empty
    assert bound("C[E[i]] = A[i]", A=values(3), E=index(3), size=(0,)).is_empty
    assert not bound("C[i] = A[i]", A=values(3)).is_empty


def test_a_format_binds_like_the_tensor_it_stands_for() -> None:
    A = GroupCOO.from_dense(torch.eye(3, 4, dtype=torch.float16))
    found = bound("C[m,n] += A[m,k] * B[k,n]", A=A, B=values(4, 5))
    assert found.size == (3, 5)
    assert found.extents == {"m": 3, "k": 4, "n": 5}
    assert found.dtype == torch.float32


def test_tensors_without_data_will_do() -> None:
    assert bound("C[i] = A[i]", A=values(3, device="meta")).device == torch.device("meta")


@pytest.mark.parametrize("size", [(), (3,), (0,), (4, 5), (4, 0, 3), (2, 3, 0), (0, 0, 2, 7), (1, 1)])
def test_row_major_strides_are_those_of_a_new_tensor(size: tuple[int, ...]) -> None:
    assert row_major(size) == torch.empty(size).stride()


def test_without_a_factor_or_an_output_the_dtype_is_the_default() -> None:
    assert bound("C[I[i]] = 1", (4,), I=index(3)).dtype == torch.get_default_dtype()


STATEMENTS = {  # with what each dimension of each tensor tells: an index name, a length it must pass, or nothing
    "C[i] += A[i,k] * B[k]": {"A": "ik", "B": "k", "C": "i"},
    "C[I[p],n] += A[p] * B[J[p,q],n]": {"I": "p", "A": "p", "J": "pq", "B": " n", "C": " n"},
    "C[I[J[p]],1] = max(A[p,p])": {"I": " ", "J": "p", "A": "pp", "C": " 1"},
    "C[i,j] = A[i,0] * B[j]": {"A": "i0", "B": "j", "C": "ij"},
    "C[i,i] = 1": {"C": "ii"},
}


@pytest.mark.parametrize("expr", STATEMENTS)
def test_lengths_fit_or_are_refused(expr: str) -> None:
    """Each name has one length and constants are inside, for every choice of lengths 0 to 2."""
    tells = STATEMENTS[expr]
    letters = "".join(tells.values())
    for lengths in islice(product(range(3), repeat=len(letters)), 0, None, 1 if len(letters) < 6 else 11):
        rest, known, fits = iter(lengths), dict[str, set[int]](), True
        shapes = {name: tuple(islice(rest, len(dims))) for name, dims in tells.items()}
        for letter, length in zip(letters, lengths):
            fits = fits and not (letter.isdigit() and int(letter) >= length)
            known.setdefault(letter, set()).add(length)
        fits = fits and all(len(found) == 1 for letter, found in known.items() if letter.isalpha())
        tensors = {name: (index if name in "IJ" else values)(*shape) for name, shape in shapes.items()}
        size = shapes["C"]
        if tells.keys() - {"C"}:
            del tensors["C"]
        try:
            found = bound(expr, size, **tensors)
        except InsumError:
            assert not fits
        else:
            assert fits
            assert found.extents == {letter: min(lengths) for letter, lengths in known.items() if letter.isalpha()}
            assert found.is_empty == (0 in lengths)


A, B, C, I = values(3, 4), values(4), values(5), index(4)  # noqa: E741 - the names of the statements below
META = values(4, device="meta")
SPARSE = GroupCOO.from_dense(torch.eye(3, 4))

MISTAKES: list[tuple[type[InsumError], dict[str, Any], str]] = [
    (
        OperandError,
        {"A": A},
        """
no tensor was given for B; pass it as B=...
    C[i] += A[i,k] * B[k]
                     ^
""",
    ),
    (
        OperandError,
        {"A": B, "size": (3,)},
        """
no tensor was given for AM; pass it as AM=...
    C[AM[p]] += A[p]
      ^
""",
    ),
    (
        OperandError,
        {"A": B},
        """
no tensor was given for size; size=... gives the output's size, so rename it
    C[i] += A[i] * size[i]
                   ^
""",
    ),
    (
        OperandError,
        {"size": (3,)},
        """
no tensor tells dtype and device; pass the output as C=...
    C[i] = 1
    ^
""",
    ),
    (
        OperandError,
        {"A": B, "C": I, "size": (4,)},
        """
C is both an index and the output; rename one of them
    C[C[p]] += A[p]
      ^
""",
    ),
    (
        OperandError,
        {"A": B, "I": B},
        """
I is an index, so it must be int32 or int64, not float32; convert it with I.long()
    C[i] = A[I[i]]
             ^
""",
    ),
    (
        OperandError,
        {"A": B, "I": torch.ones(4, dtype=torch.bool)},
        """
I is an index, so it must be int32 or int64, not bool; pass the positions where it is True, as I.nonzero().squeeze(1)
    C[I[i]] = A[i]
      ^
""",
    ),
    (
        OperandError,
        {"A": B, "B": B, "J": I, "I": I.byte()},
        """
I is an index, so it must be int32 or int64, not uint8; convert it with I.long()
    C[i] = A[i] * B[J[I[i]]]
                      ^
""",
    ),
    (
        OperandError,
        {"A": torch.ones(4, dtype=torch.bool), "B": B},
        """
A holds values, so it must be float16, bfloat16, float32 or float64, not bool; convert it with A.float()
    C[i] = B[i] * A[i]
                  ^
""",
    ),
    (
        OperandError,
        {"A": I},
        """
A holds values, so it must be float16, bfloat16, float32 or float64, not int64; convert it with A.float()
    C[i] = A[i]
           ^
""",
    ),
    (
        OperandError,
        {"A": values(4, dtype=torch.complex64)},
        """
A holds values, so it must be float16, bfloat16, float32 or float64, not complex64; view it as real
    C[i] = A[i]
           ^
""",
    ),
    (
        OperandError,
        {"A": B, "C": I},
        """
C holds values, so it must be float16, bfloat16, float32 or float64, not int64; convert it with C.float()
    C[i] += A[i]
    ^
""",
    ),
    (
        OperandError,
        {"A": A.to_sparse(), "B": values(4, 2)},
        """
A is a torch.sparse_coo tensor; pass insum_ops.formats.COO.from_torch(A), or another format
    C[m,n] += A[m,k] * B[k,n]
              ^
""",
    ),
    (
        OperandError,
        {"A": B, "B": META},
        """
A is on cpu but B is on meta; move them to one device
    C[i] = A[i] * B[i]
                  ^
""",
    ),
    (
        OperandError,
        {"A": SPARSE, "B": META},
        """
A is on cpu but B is on meta; move them to one device
    C[m] += A[m,k] * B[k]
                     ^
""",
    ),
    (
        ShapeError,
        {"A": A},
        """
A has 2 dimensions [3, 4] but 1 index here; give one per dimension
    C[i] += A[i]
            ^
""",
    ),
    (
        ShapeError,
        {"A": values(), "B": B},
        """
A has 0 dimensions [] but 1 index here; give one per dimension
    C[i] += B[i] * A[i]
                   ^
""",
    ),
    (
        ShapeError,
        {"A": B, "I": I},
        """
I has 1 dimension [4] but 2 indices here; give one per dimension
    C[i] += A[I[i,j]]
              ^
""",
    ),
    (
        ShapeError,
        {"A": A, "C": C},
        """
C has 1 dimension [5] but 2 indices here; give one per dimension
    C[i,j] += A[i,j]
    ^
""",
    ),
    (
        ShapeError,
        {"A": A, "size": (3,)},
        """
size has 1 dimension [3] but C has 2 indices here; give one per dimension
    C[i,j] += A[i,j]
    ^
""",
    ),
    (
        ShapeError,
        {"A": SPARSE},
        """
A has 2 dimensions [3, 4] but 3 indices here; give one per dimension
    C[m,n] += A[m,k,n]
              ^
""",
    ),
    (
        ShapeError,
        {"A": A, "B": C},
        """
index k is 4 in A dimension 1 but 5 in B dimension 0; they must agree
    C[i] += A[i,k] * B[k]
                       ^
""",
    ),
    (
        ShapeError,
        {"A": SPARSE, "B": C},
        """
index k is 4 in A dimension 1 but 5 in B dimension 0; they must agree
    C[i] += A[i,k] * B[k]
                       ^
""",
    ),
    (
        ShapeError,
        {"A": A},
        """
index i is 3 in A dimension 0 but 4 in A dimension 1; they must agree
    C[i] += A[i,i]
                ^
""",
    ),
    (
        ShapeError,
        {"A": B, "C": C},
        """
index i is 4 in A dimension 0 but 5 in C dimension 0; they must agree
    C[i] = A[i]
      ^
""",
    ),
    (
        ShapeError,
        {"A": B, "size": (3,)},
        """
index i is 4 in A dimension 0 but 3 in size dimension 0; they must agree
    C[i] = A[i]
      ^
""",
    ),
    (
        IndexRangeError,
        {"A": A},
        """
index 4 is outside A dimension 1, which has size 4
    C[i] += A[i,4]
                ^
""",
    ),
    (
        IndexRangeError,
        {"A": B, "size": (3,)},
        """
index 9 is outside C dimension 0, which has size 3
    C[9] += A[i]
      ^
""",
    ),
    (
        ShapeError,
        {"A": B, "I": I, "C": C, "size": (4,)},
        """
C is [5] but size is [4]; give one of them
    C[I[i]] += A[i]
    ^
""",
    ),
    (
        ShapeError,
        {"A": B, "I": I},
        """
the size of C dimension 1 is unknown: index I[i] does not tell it; pass C=... or size=(...)
    C[i,I[i]] += A[i]
        ^
""",
    ),
    (
        ShapeError,
        {"A": B},
        """
the size of C dimension 0 is unknown: index 0 does not tell it; pass C=... or size=(...)
    C[0] += A[i]
      ^
""",
    ),
    (
        ShapeError,
        {"A": B},
        """
the size of C dimension 1 is unknown: index j does not tell it; pass C=... or size=(...)
    C[i,j] += A[i]
        ^
""",
    ),
]


@pytest.mark.parametrize(("kind", "tensors", "text"), MISTAKES, ids=[text.split("\n")[1] for *_, text in MISTAKES])
def test_message(kind: type[InsumError], tensors: dict[str, Any], text: str) -> None:
    ((expr, expected),) = messages(text)
    assert refusal(expr, kind, **tensors) == expected


def test_a_tensor_that_is_not_used_has_no_place() -> None:
    unused = "D was given but the expression does not use it; it uses A, B, C, I"
    assert refusal("C[I[i]] += A[i] * B[i]", OperandError, A=B, B=B, I=I, D=B, size=(3,)) == unused
    assert refusal("C[I[i]] += A[i] * B[i]", OperandError, A=B, B=B, I=I, D=SPARSE, size=(3,)) == unused


def test_a_tensor_with_a_name_close_to_that_of_one_that_is_missing() -> None:
    problem = "no tensor was given for B; b was given, which the expression does not use; pass it as B=..."
    expected = f"{problem}\n    C[i] += A[i] * B[i]\n                   ^"
    assert refusal("C[i] += A[i] * B[i]", OperandError, A=B, b=B) == expected
    assert refusal("C[i] += A[i] * B[i]", OperandError, A=B, D=B, b=B) == expected
    far = "no tensor was given for B; pass it as B=...\n    C[i] += A[i] * B[i]\n                   ^"
    assert refusal("C[i] += A[i] * B[i]", OperandError, A=B, other=B) == far
    assert refusal("C[i] += A[i] * B[i]", OperandError, A=B) == far


def test_the_output_is_not_given_as_out() -> None:
    expected = "out was given but the expression does not use it; pass the output as C=..."
    assert refusal("C[i] += A[i]", OperandError, A=B, out=B) == expected
    assert bound("C[i] += out[i]", out=B).size == (4,)


def test_a_mask_of_several_dimensions_as_an_index() -> None:
    problem = (
        "M is an index, so it must be int32 or int64, not bool; pass the positions where it is True, as M.nonzero()"
    )
    mask = torch.ones(3, 3, dtype=torch.bool)
    expected = f"{problem}\n    C[i,j] = A[M[i,j]]\n               ^"
    assert refusal("C[i,j] = A[M[i,j]]", OperandError, A=B, M=mask) == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_coordinates_in_the_place_of_values(dtype: torch.dtype) -> None:
    problem = (
        f"A holds values, so it must be float16, bfloat16, float32 or float64, not {str(dtype)[6:]}; convert it with"
    )
    place = "    C[i] = A[i,j]\n           ^"
    remedy = "A.float(), or if it lists coordinates, pass formats.COO.from_coo(A, values, shape)"
    assert refusal("C[i] = A[i,j]", OperandError, A=index(2, 5, dtype=dtype)) == f"{problem} {remedy}\n{place}"
    assert refusal("C[i] = A[i,j]", OperandError, A=index(5, 2, dtype=dtype)) == f"{problem} A.float()\n{place}"
    place = "    C[i] = A[i]\n           ^"
    assert refusal("C[i] = A[i]", OperandError, A=index(2, dtype=dtype)) == f"{problem} A.float()\n{place}"


def test_a_size_has_no_place() -> None:
    expected = "size must hold integers of 0 or more, but it is"
    assert refusal("C[I[i]] += A[i]", ShapeError, A=B, I=I, size=(-1,)) == f"{expected} [-1]"
    assert refusal("C[I[i]] += A[i]", ShapeError, A=B, I=I, size=(2.5,)) == f"{expected} [2.5]"


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (torch.sparse_coo, "COO"),
        (torch.sparse_csr, "GroupCOO"),
        (torch.sparse_csc, "GroupCOO"),
        (torch.sparse_bsr, "BlockGroupCOO"),
        (torch.sparse_bsc, "BlockGroupCOO"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_torchs_sparse_tensors_become_formats(layout: torch.layout, name: str) -> None:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    sparse = torch.eye(4).to_sparse(layout=layout, blocksize=blocks)
    problem = f"A is a {layout} tensor; pass insum_ops.formats.{name}.from_torch(A), or another format"
    assert refusal("C[i,j] = A[i,j]", OperandError, A=sparse) == f"{problem}\n    C[i,j] = A[i,j]\n             ^"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without it")
def test_tensors_before_one_of_another_layout_may_be_anything() -> None:
    for first in (values(3, 3), COO.from_dense(torch.eye(3))):
        text = refusal("C[i,j] += A[i,k] * B[k,j]", OperandError, A=first, B=torch.eye(3).to_sparse())
        assert text.splitlines()[0] == (
            "B is a torch.sparse_coo tensor; pass insum_ops.formats.COO.from_torch(B), or another format"
        )


def test_a_size_of_nothing_is_a_size() -> None:
    text = refusal("C[i] = A[i]", ShapeError, A=values(3), size=(0,))
    assert text.splitlines()[0] == "index i is 3 in A dimension 0 but 0 in size dimension 0; they must agree"


def test_any_other_layout() -> None:
    problem = "A is a torch._mkldnn tensor; pass A.to_dense()"
    assert refusal("C[i] = A[i]", OperandError, A=B.to_mkldnn()) == f"{problem}\n    C[i] = A[i]\n           ^"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    problem = "A is quantized; pass A.dequantize()"
    assert refusal("C[i] = A[i]", OperandError, A=quantized) == f"{problem}\n    C[i] = A[i]\n           ^"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    problem = "A is a nested tensor; pass A.to_padded_tensor(0)"
    assert refusal("C[i,j] = A[i,j]", OperandError, A=nested) == f"{problem}\n    C[i,j] = A[i,j]\n             ^"


def test_the_first_of_several_mistakes_is_told() -> None:
    assert refusal("C[i] = A[i] * B[i]", OperandError, A=I, D=I).startswith("no tensor was given for B")


def test_a_format_as_an_index_is_left_to_rewriting() -> None:
    found = bound("C[i] = B[A[i,k]]", A=COO.from_dense(torch.eye(3)), B=B)
    assert found.extents == {"i": 3, "k": 3}
