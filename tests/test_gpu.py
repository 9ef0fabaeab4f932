"""What only a GPU can show: capture, determinism, streams, huge tensors, what is compiled how often."""

import time

import pytest
import torch

import insum_ops
from insum_ops import insum, nn, spmm
from insum_ops.compiler.language.errors import IndexRangeError
from insum_ops.compiler.tuning import clock
from insum_ops.formats import BlockGroupCOO, GroupCOO

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SPMM = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
CONV = "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]"


@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")


def graph(rows=500, columns=400, density=0.05, dtype=torch.float32):
    dense = torch.randn(rows, columns, device="cuda", dtype=dtype)
    return dense * (torch.rand(rows, columns, device="cuda") < density)


def convolution(groups=40, voxels=300, channels=32, dtype=torch.float16):
    return {
        "MX": torch.randint(-1, voxels, (groups, 32), device="cuda"),
        "MY": torch.randint(-1, voxels, (groups, 32), device="cuda"),
        "MZ": torch.randint(0, 5, (groups,), device="cuda"),
        "In": torch.randn(voxels, channels, device="cuda", dtype=dtype),
        "W": torch.randn(5, channels, channels, device="cuda", dtype=dtype),
    }


def convolved(tensors, voxels):
    """The convolution in float64, by plain torch."""
    products = tensors["In"][tensors["MY"].clamp_min(0)].double() @ tensors["W"][tensors["MZ"]].double()
    products[(tensors["MX"] < 0) | (tensors["MY"] < 0)] = 0
    out = torch.zeros(voxels, products.shape[-1], device=products.device, dtype=torch.float64)
    return out.index_add_(0, tensors["MX"].clamp_min(0).flatten(), products.flatten(0, 1))


def relative_error(actual, expected):
    expected = expected.detach()
    return float((actual.detach().double() - expected).norm() / expected.norm())


def test_calls_can_be_captured_in_a_graph_and_replayed_on_new_values():
    A = GroupCOO.from_dense(graph())
    B = torch.randn(400, 64, device="cuda")
    insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
    capture = torch.cuda.CUDAGraph()
    with torch.cuda.graph(capture):
        C = insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
    B.normal_()
    capture.replay()
    torch.testing.assert_close(C, (A.to_dense().double() @ B.double()).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("has_edges", [False, True])
def test_a_graph_reads_entries_as_listed_after_they_were_converted(has_edges):
    dense = graph()
    rows, columns = dense.nonzero().T
    A = (torch.stack([columns, rows]), dense[rows, columns], (400, 500)) if has_edges else dense.to_sparse_csr()
    B = torch.randn(400, 64, device="cuda")
    spmm(A, B)
    capture = torch.cuda.CUDAGraph()
    with torch.cuda.graph(capture):
        C = spmm(A, B)
    for _ in range(6):
        spmm(A, B)
    memory = [torch.zeros(2, len(rows), dtype=torch.int64, device="cuda") for _ in range(64)]  # what was given back
    B.normal_()
    capture.replay()
    torch.testing.assert_close(C, (dense.double() @ B.double()).float(), rtol=1e-5, atol=1e-4)
    del memory


def largest(dense, B):
    """max over the stored k of A[m,k] * B[k,n] in float64, by plain torch; 0 where nothing is stored."""
    products = torch.where((dense != 0)[:, :, None], dense.double()[:, :, None] * B.double()[None], -torch.inf)
    best = products.amax(1)
    return torch.where(best == -torch.inf, 0, best)


@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_a_maximum_and_its_gradients(dtype, is_tuned, monkeypatch, tmp_path):
    if is_tuned:
        monkeypatch.setenv("INSUM_TUNE", "default")
        monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    dense = graph(80, 60, 0.2, dtype)
    dense[7] = 0
    A = GroupCOO.from_dense(dense, group_size=4)
    values = A.values.clone().requires_grad_()
    B = torch.randn(60, 40, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(80, 40, device="cuda", dtype=dtype)
    C = insum("C[m,n] = max(A[m,k] * B[k,n])", A=A.with_values(values), B=B)
    dvalues, dB = torch.autograd.grad(C, (values, B), upstream)

    a, b = dense.double().requires_grad_(), B.detach().double().requires_grad_()
    expected = largest(a, b)
    da, db = torch.autograd.grad(expected, (a, b), upstream.double())
    assert relative_error(C, expected) < (1e-3 if dtype == torch.float16 else 1e-6)
    if dtype != torch.float16:  # whose products are often equal, and amax shares a gradient among them
        assert relative_error(dB, db) < 1e-6
        assert relative_error(A.with_values(dvalues).to_dense(), da) < 1e-6
    with torch.no_grad():
        assert torch.equal(insum("C[m,n] = max(A[m,k] * B[k,n])", A=A, B=B), C)


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_rivals_without_a_format_compete_in_torch(reduction, is_deterministic):
    E, X = torch.randint(-1, 50, (1000,), device="cuda"), torch.randn(1000, 30, device="cuda")
    X[3], E[3] = torch.nan, 5
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        leaf = X.clone().requires_grad_()
        Y = insum(f"Y[E[p],c] = {reduction}(X[p,c])", E=E, X=leaf, size=(60, 30))
        (grad,) = torch.autograd.grad(Y.nan_to_num().sum(), leaf)
    finally:
        torch.use_deterministic_algorithms(False)
    assert Y[5].isnan().all()
    assert (Y[50:] == 0).all()
    for row in range(5):
        rivals = X[row == E]
        assert torch.equal(Y[row], getattr(torch, f"a{reduction}")(rivals, 0) if len(rivals) else 0 * Y[row])
    assert int((grad != 0).sum()) == 30 * (len(E[E >= 0].unique()) - 1)  # nan_to_num lets none through to row 5


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_layer_of_few_rows_can_be_captured(rows, monkeypatch):
    """What is faster on the device alone may be another kernel, which adds to a copy of the bias."""
    monkeypatch.delenv("INSUM_TUNE")
    layer = nn.BlockSparseLinear(1024, 1024, 32, 0.3, device="cuda", dtype=torch.float16)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        for _ in range(3):
            expected = layer(x)
        capture = torch.cuda.CUDAGraph()
        with torch.cuda.graph(capture):
            found = layer(x)
    capture.replay()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_a_maximum_and_its_gradients_can_be_captured():
    A = GroupCOO.from_dense(graph())
    B = torch.randn(400, 64, device="cuda", requires_grad=True)

    def step():
        C = insum("C[m,n] = max(A[m,k] * B[k,n])", A=A, B=B)
        return C, torch.autograd.grad(C.square().sum(), B)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    capture = torch.cuda.CUDAGraph()
    with torch.cuda.graph(capture):
        C, dB = step()
    with torch.no_grad():
        B.normal_()
    capture.replay()
    b = B.detach().double().requires_grad_()
    expected = largest(A.to_dense(), b)
    assert relative_error(C, expected) < 1e-6
    assert relative_error(dB, torch.autograd.grad(expected.square().sum(), b)[0]) < 1e-5


def test_a_statement_first_met_during_capture_takes_a_default_config(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "default")
    tensors = convolution()
    capture = torch.cuda.CUDAGraph()
    with torch.cuda.graph(capture):
        Out = insum(CONV, size=(300, 32), **tensors)
    capture.replay()
    assert relative_error(Out, convolved(tensors, 300)) < 3e-4


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Tuning is on, and nothing is known yet."""
    monkeypatch.setenv("INSUM_TUNE", "default")
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_tuning_without_memory_for_every_candidate_still_answers(tuned):
    """Sums in float32 take three times the memory of an output in float16, and there is room for one and a half."""
    dense, B = graph(2**16, 64, dtype=torch.float16), torch.randn(64, 1024, device="cuda", dtype=torch.float16)
    A, expected = GroupCOO.from_dense(dense), (dense.double() @ B.double()).float().cpu()
    output = 2 * expected.numel()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 1.5 * output
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        C = insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert relative_error(C.cpu(), expected.double()) < 1e-3


@pytest.mark.parametrize("is_interrupt", [False, True])
def test_a_capture_that_fails_leaves_torch_as_it_was(is_interrupt):
    """While candidates are timed there may be too little memory, or an interrupt."""
    x, before = torch.ones(1000, device="cuda"), torch.cuda.current_stream()

    def fail():
        x.mul(2)
        if torch.cuda.is_current_stream_capturing():
            if is_interrupt:
                raise KeyboardInterrupt
            torch.empty(2**50, dtype=torch.uint8, device="cuda")

    with pytest.raises(KeyboardInterrupt if is_interrupt else RuntimeError) as caught:
        clock.device_milliseconds(fail, float("inf"))
    assert clock.is_out_of_memory(caught.value) is not is_interrupt
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
    assert float(x.sum()) == 1000
    assert torch.isfinite(torch.randn(8, device="cuda")).all()  # and the random numbers go on
    assert clock.device_milliseconds(lambda: x.mul(2), float("inf")) > 0


def test_a_busy_host_does_not_end_a_timing():
    x = torch.ones(1000, device="cuda")

    def call():
        time.sleep(2e-3)
        return x.mul(2)

    assert clock.device_milliseconds(call, hopeless=0.01) < 0.05


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["off", "default"])
@pytest.mark.parametrize("device", ["cuda:1", "cuda:0"])
def test_tensors_may_be_on_a_device_that_is_not_the_current_one(device, mode, tuned, monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", mode)
    dense, numbers = graph().to(device), torch.randn(400 * 64 + 1, device=device)
    A, values = GroupCOO.from_dense(dense), torch.randn(500, 64, device=device)
    for B in (numbers[:-1].view(400, 64), numbers[1:].view(400, 64)):  # the second is not aligned
        B = B.detach().requires_grad_()
        for _ in range(3):  # measured, remembered, by the shortest way
            C = insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
            assert C.device == torch.device(device)
            assert relative_error(C, dense.double() @ B.detach().double()) < 1e-5
        (dB,) = torch.autograd.grad(C, B, values)
        assert relative_error(dB, dense.double().T @ values.double()) < 1e-5
        with torch.no_grad():
            for _ in range(3):
                C = insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
                assert relative_error(C, dense.double() @ B.double()) < 1e-5

    indices = torch.nn.functional.pad((torch.rand(16, 16, 16) < 0.3).nonzero().int(), (1, 0))
    layer, features = nn.SubMConv3d(32, 48, 3), torch.randn(len(indices), 32)
    expected = layer(nn.SparseConvTensor(features, indices, [16, 16, 16], 1)).features
    layer.to(device)
    x = nn.SparseConvTensor(features.to(device), indices.to(device), [16, 16, 16], 1)
    for _ in range(4):  # by rules, then by the fastest form
        assert relative_error(layer(x).features.cpu(), expected.double()) < 1e-5
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("with_facts", [True, False])
def test_deterministic_mode_is_bitwise_equal_over_runs(with_facts):
    torch.use_deterministic_algorithms(True)
    try:
        if with_facts:
            A, B = GroupCOO.from_dense(graph(density=0.3), group_size=4), torch.randn(400, 64, device="cuda")
            runs = [insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B) for _ in range(20)]
        else:
            tensors = convolution()
            runs = [insum(CONV, size=(300, 32), **tensors) for _ in range(20)]
        assert all(torch.equal(runs[0], run) for run in runs[1:])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_deterministic_convolution_layer_is_bitwise_equal_over_runs():
    """Maps, values and gradients: every run makes its own map of the same voxels."""
    indices = torch.nn.functional.pad((torch.rand(16, 16, 16, device="cuda") < 0.3).nonzero().int(), (1, 0))
    layer = nn.SubMConv3d(32, 48, 3).half().cuda()
    features = torch.randn(len(indices), 32, device="cuda", dtype=torch.float16, requires_grad=True)
    upstream = torch.randn(len(indices), 48, device="cuda", dtype=torch.float16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(20):
            y = layer(nn.SparseConvTensor(features, indices.clone(), [16, 16, 16], 1)).features
            runs.append((y.detach(), *torch.autograd.grad(y, (features, *layer.parameters()), upstream)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run))


def test_an_index_out_of_range_raises_and_touches_nothing():
    tensors = convolution()
    tensors["MY"][3, 4] = 300
    with pytest.raises(IndexRangeError, match=r"MY\[3,4\] is 300, outside In dimension 0, which has size 300"):
        insum(CONV, size=(300, 32), **tensors)


def test_half_precision_sums_follow_torchs_flag():
    voxels = 1200  # each adds some fifty products: with many more, copies of the output would hold sums in float32
    tensors = convolution(groups=2000, voxels=voxels)
    expected = convolved(tensors, voxels)
    matmul = torch.backends.cuda.matmul
    errors = {}
    for flag in (True, False):
        matmul.allow_fp16_reduced_precision_reduction = flag
        errors[flag] = relative_error(insum(CONV, size=(voxels, 32), **tensors), expected)
    assert errors[False] < 3e-4 < errors[True]


def test_many_lengths_compile_few_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    B = torch.randn(64, 32, device="cuda")
    for nnz in range(100, 150):
        AM, AK = (torch.randint(64, (nnz,), device="cuda") for _ in range(2))
        expr = "C[AM[p],n] += 3.1416 * AV[p] * B[AK[p],n]"  # of which no other test has a kernel
        insum(expr, AM=AM, AK=AK, AV=torch.randn(nnz, device="cuda"), B=B, size=(64, 32))
    # of any length, of multiples of 16, whose loads may be wide, and of whole tiles, which need no masks
    assert 1 <= len(list((tmp_path / "kernels").glob("*.py"))) <= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11's own, while it traces an autograd.Function
def test_compiles_without_a_graph_break_and_trains():
    tensors = convolution(dtype=torch.float32)
    maps = {k: v for k, v in tensors.items() if not v.is_floating_point()}

    @torch.compile(fullgraph=True)
    def layer(In, W):
        return torch.relu(insum(CONV, In=In, W=W, size=(300, 32), **maps)).square().sum()

    grads = []
    for call in (layer, layer.__wrapped__ if hasattr(layer, "__wrapped__") else layer._torchdynamo_orig_callable):
        leaves = [tensors[name].clone().requires_grad_() for name in ("In", "W")]
        call(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    for compiled, eager in zip(*grads):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-3)


def test_other_streams_and_views():
    stream = torch.cuda.Stream()
    B = torch.randn(64, 400, device="cuda").T[:, ::2]
    A = GroupCOO.from_dense(graph())
    with torch.cuda.stream(stream):
        C = insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
    stream.synchronize()
    torch.testing.assert_close(C, (A.to_dense().double() @ B.double()).float(), rtol=1e-5, atol=1e-4)
    odd = torch.randn(400 * 64 + 1, device="cuda")[1:].view(400, 64)
    C = insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=odd)
    torch.testing.assert_close(C, (A.to_dense().double() @ odd.double()).float(), rtol=1e-5, atol=1e-4)


def test_gathers_from_and_scatters_into_more_than_2_to_the_31_elements():
    rows = 2**25 + 3
    big = torch.zeros(rows, 80, device="cuda", dtype=torch.float16)
    assert big.numel() > 2**31
    at = torch.tensor([0, 7, rows - 1, rows - 2, 2**24], device="cuda")
    big[at] = torch.randn(5, 80, device="cuda", dtype=torch.float16)
    read = insum("C[p,n] = B[I[p],n]", B=big, I=at)
    assert torch.equal(read, big[at])
    written = insum("C[I[p],n] += B[p,n]", B=read, I=at.flip(0), size=tuple(big.shape))
    assert torch.equal(written[at.flip(0)], read)
    assert int((written != 0).any(1).sum()) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_training_a_block_sparse_layer_matches_its_dense_twin(dtype):
    W = graph(128, 96, 1.0, dtype) * (torch.rand(8, 6, device="cuda") < 0.4).repeat_interleave(16, 0).repeat_interleave(
        16, 1
    )
    A = BlockGroupCOO.from_dense(W, block_size=(16, 16))
    values = A.values.clone().requires_grad_()
    x = torch.randn(96, 40, device="cuda", dtype=dtype, requires_grad=True)
    y = insum("Y[m,n] += A[m,k] * X[k,n]", A=A.with_values(values), X=x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    tolerance = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
    dense = W.double()

    def close(actual, expected):
        assert relative_error(actual, expected) < tolerance

    close(y.detach(), dense @ x.detach().double())
    close(x.grad, dense.T @ upstream.double())
    expected = BlockGroupCOO.from_dense(
        upstream.double() @ x.detach().double().T * (dense != 0), block_size=(16, 16)
    ).to_dense()
    close(A.with_values(values.grad).to_dense(), expected)


def test_tune_returns_times_best_first(tmp_path, monkeypatch):
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    found = insum_ops.tune(CONV, size=(300, 32), **convolution())
    times = [timing.milliseconds for timing in found.timings if timing.milliseconds is not None]
    assert times == sorted(times)
    assert len(times) >= 3
    assert list((tmp_path / "tuning").glob("*.json"))
