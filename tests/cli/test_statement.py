"""`explain` and `tune` of the command line: shapes become operands that fit, and what does not fit is told in words."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from children import in_child

import insum_ops
from insum_ops import insum
from insum_ops.__main__ import main
from insum_ops.cli import operands as operands_module
from insum_ops.cli import statement as statement_module
from insum_ops.cli.operands import Requested

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
MATMUL = "C[m,n] += A[m,k] * B[k,n]"
SPMM = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"


def made(text, shapes=(), dtypes=(), formats=(), seed=0):
    return Requested.read(text, shapes, dtypes, formats).make(CPU, seed)


def test_index_tensors_are_found_by_where_they_stand_and_point_inside():
    operands = made(SPMM, ["AV=100x4", "B=7x16", "C=5x16"])
    assert {name: tuple(t.shape) for name, t in operands.tensors.items()} == {
        "AM": (100,),
        "AV": (100, 4),
        "AK": (100, 4),
        "B": (7, 16),
    }
    AM, AK = operands.tensors["AM"], operands.tensors["AK"]
    assert (AM.dtype, AK.dtype) == (torch.int64, torch.int64)
    assert sorted(AM.unique().tolist()) == list(range(5))
    assert sorted(AK.unique().tolist()) == list(range(7))
    assert insum(SPMM, size=operands.size, **operands.tensors).shape == (5, 16)


def test_an_index_tensor_that_points_at_two_tensors_fits_the_shorter():
    operands = made("C[p] += A[I[p]] * B[I[p]]", ["p=200", "A=9", "B=3"])
    assert int(operands.tensors["I"].max()) == 2


def test_nested_positions_point_into_the_index_tensor():
    operands = made("C[p] += A[I[J[p]]]", ["p=300", "I=4", "A=50"])
    assert int(operands.tensors["J"].max()) == 3
    assert 3 < int(operands.tensors["I"].max()) < 50


def test_positions_in_an_empty_dimension_are_none():
    assert made("C[p] += A[I[p]]", ["p=3", "A=0"]).tensors["I"].tolist() == [-1, -1, -1]


def test_extents_of_indices_tell_the_shapes():
    operands = made(MATMUL, ["m=3", "k=5", "n=2"])
    assert {name: tuple(t.shape) for name, t in operands.tensors.items()} == {"A": (3, 5), "B": (5, 2)}
    assert operands.size is None


def test_dtypes_are_of_all_values_all_positions_or_one_tensor():
    tensors = made(SPMM, ["AV=10x4", "B=7x16", "C=5x16"], ["float16", "int32", "B=float64"]).tensors
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "AM": torch.int32,
        "AV": torch.float16,
        "AK": torch.int32,
        "B": torch.float64,
    }


def test_a_seed_draws_the_same_operands_again():
    first, again, other = (made(MATMUL, ["m=3", "k=5", "n=2"], seed=seed).tensors["A"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["COO", "ELL", "GroupCOO", "BlockCOO", "BlockGroupCOO"])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.6, 1.0])
def test_a_format_stores_about_the_share_that_is_asked_for(name, density):
    block = ":16x16" if name.startswith("Block") else ""
    A = made(MATMUL, ["A=640x640", "n=2"], formats=[f"A={name}:{density}{block}"]).tensors["A"]
    assert type(A).__name__ == name
    share = (A.to_dense() != 0).double().mean().item()
    assert abs(share - density) <= (0.05 if block else 0.01)


def test_blocks_need_not_divide_the_shape():
    A = made(MATMUL, ["A=50x70", "n=2"], formats=["A=BlockGroupCOO:1:32x32"]).tensors["A"]
    assert tuple(A.shape) == (50, 70)
    assert bool((A.to_dense() != 0).all())


def test_a_format_of_three_dimensions_fits_a_statement():
    text = "Out[x,m] += Map[x,y,z] * In[y,c] * Weight[z,c,m]"
    operands = made(text, ["Map=60x60x27", "c=8", "m=4"], formats=["Map=GroupCOO:0.02"])
    assert insum(text, **operands.tensors).shape == (60, 4)


def test_explain_prints_operands_statement_graph_schedule_and_source(capsys):
    assert main(["explain", MATMUL, "--shape", "A=512x512", "n=64", "--format", "A=GroupCOO:0.05"]) == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "operands, random, on cpu",
        "planned for",
        "statement",
        "rewritten",
        "extents",
        "FX program",
        "schedule",
        "default config",
        "Triton source",
    ]
    assert "    A  float32  512 x 512  GroupCOO: " in printed
    assert "    B  float32  512 x 64   dense\n" in printed
    assert "    NVIDIA H200, sm_90; there is no GPU here, and --gpu names another to plan for\n" in printed
    assert "    C[AM[p],n] += AV[p,q] * B[AK[p,q],n]\n" in printed
    assert "    @triton.jit" in printed


def test_explain_says_into_what_positions_point(capsys):
    assert main(["explain", SPMM, "--shape", "AV=100x4", "B=7x16", "--shape", "C=5x16", "--gpu", "sm_80"]) == 0
    printed = capsys.readouterr().out
    assert "    AM  int64    100      positions in dimension 0 of C\n" in printed
    assert "    AK  int64    100 x 4  positions in dimension 0 of B\n" in printed
    assert "planned for\n    NVIDIA A100, sm_80\n" in printed


def test_tune_without_a_gpu_says_what_it_would_need(capsys):
    assert main(["tune", MATMUL, "--shape", "A=1024x1024", "n=256", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        "insum_ops tune: error: tune times kernels, which needs a GPU that torch can use and 5.0 MiB of its memory for "
        "these operands, but they are on cpu; run it on a machine with one, or see the kernel that a GPU would run by "
        "`explain` with the same arguments\n"
    )


def test_tune_passes_the_operands_on(capsys, monkeypatch):
    given = []
    monkeypatch.setattr(statement_module, "tune", lambda text, **rest: given.append((text, rest)) or "a table")
    operands = made(MATMUL, ["m=3", "k=5", "n=2"])
    monkeypatch.setattr(Requested, "make", lambda self, device, seed: operands)
    requested = Requested.read(MATMUL, ["m=3", "k=5", "n=2"], [], [])
    assert statement_module.tune_statement(requested, torch.device("cuda"), is_full=True) == 0
    assert given == [(MATMUL, {"size": None, "full": True, **operands.tensors})]
    assert "\n\na table\n\nthe first is kept in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "B"], "--shape takes NAME=VALUE, as in --shape B=64x128, but 'B' was given"),
        (["--shape", "B=64,128"], "'64,128' is no shape; write numbers with an x between them, as in 64x128"),
        (["--shape", "B=-1x2"], "'-1x2' is no shape; write numbers with an x between them, as in 64x128"),
        (["--shape", "D=3"], f"--shape names D, which {MATMUL} has not; it has C, A, B, m, n, k"),
        (["--shape", "n=3x4"], "n is an index and has one extent, but 3 x 4 is given"),
        (
            ["--shape", "A=3x4"],
            "no shape tells the extent of n in B[k,n]; give one, as in --shape n=64 or --shape B=4x64",
        ),
        (
            ["--dtype", "int8"],
            "'int8' is no dtype of an operand; there are float16, bfloat16, float32, float64, int32, int64",
        ),
        (["--dtype", "D=float16"], f"--dtype names D, which {MATMUL} has not; it has C, A, B"),
        (
            ["--format", "A=CSR:0.1"],
            "'CSR' is no format; there are COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO",
        ),
        (
            ["--format", "A=groupcoo"],
            "'groupcoo' is no format; did you mean GroupCOO? there are COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO",
        ),
        (["--format", "A=COO:5"], "'5' is no density; give the share of entries that are stored, from 0 to 1"),
        (["--format", "A=COO:x"], "'x' is no density; give the share of entries that are stored, from 0 to 1"),
        (["--format", "A=COO:0.1:32x32"], "COO has no blocks, but 'COO:0.1:32x32' gives a block size; take BlockCOO"),
        (
            ["--format", "A=COO:0.1:1:1"],
            "'COO:0.1:1:1' has too many parts; write FORMAT:DENSITY:BLOCK, as in COO:0.05",
        ),
        (["--format", "C=COO"], f"--format names C, which {MATMUL} has not; it has A, B"),
        (
            ["--shape", "m=64", "k=64", "n=64", "--format", "A=BlockCOO:0.1:32"],
            "a block of 32 has 1 dimensions, but the tensor of 64 x 64 has 2; give one number for each",
        ),
        (
            ["--gpu", "sm_80", "--device", "cpu"],
            "--gpu plans for a GPU that need not be there, and --device for the one that is; give one",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(arguments, message, capsys):
    assert main(["explain", MATMUL, *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.err, printed.out) == (f"insum_ops explain: error: {message}\n", "")


def test_a_scattered_output_has_to_be_given(capsys):
    assert main(["explain", SPMM, "--shape", "AV=10x4", "B=7x16"]) == 2
    assert capsys.readouterr().err == (
        "insum_ops explain: error: the length of dimension 0 of C does not follow from C[AM[p],n], where AM[p] stands; "
        "give it, as in --shape C=64x16\n"
    )


def test_positions_are_no_format(capsys):
    assert main(["explain", "C[p] += A[I[p]] * I[p]", "--shape", "p=3", "A=2", "--format", "I=COO"]) == 2
    assert capsys.readouterr().err == "insum_ops explain: error: I holds positions, so it can't be a COO\n"


def test_what_is_wrong_with_a_statement_is_shown_with_a_caret(capsys):
    assert main(["explain", "C[m,n] += A[m,k", "--shape", "m=2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("insum_ops explain: error: ")
    assert lines[1] == "    C[m,n] += A[m,k"
    assert lines[2].endswith("^")


def test_shapes_that_do_not_fit_are_told_as_insum_tells_them(capsys):
    assert main(["explain", MATMUL, "--shape", "A=3x4", "B=5x6"]) == 2
    with pytest.raises(insum_ops.compiler.ShapeError) as error:
        insum(MATMUL, A=torch.ones(3, 4), B=torch.ones(5, 6))
    assert capsys.readouterr().err == f"insum_ops explain: error: {error.value}\n"


def test_operands_larger_than_the_memory_are_refused_before_they_are_made(capsys, monkeypatch):
    pages = {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 2**11}
    monkeypatch.setattr(operands_module.os, "sysconf", pages.__getitem__)
    assert main(["explain", "C[i] += A[i,k]", "--shape", "i=1000000", "k=1000000", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        "insum_ops explain: error: these operands take 3725.3 GiB, and cpu has 1.0 GiB for them; give smaller shapes, "
        "or a lower density\n"
    )


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"insum_ops {insum_ops.__version__}, torch {torch.__version__}\n"


def test_a_reader_that_stops_early_sees_no_traceback():
    def write_to_nobody():
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as sys.stdout:
            assert main(["explain", MATMUL, "--shape", "m=64", "k=64", "n=64"]) == 141
            print("what Python writes at its end")

    in_child(write_to_nobody)


def test_an_interrupt_ends_without_a_traceback(capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("insum_ops.__main__.explain_statement", interrupted)
    assert main(["explain", MATMUL]) == 130
    assert capsys.readouterr().err == "interrupted\n"
