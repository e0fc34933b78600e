"""Fake CPU tensors choose the same kernels as CUDA tensors."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from batchfinder.simulation.gpus import find_gpu
from batchfinder.simulation.kernels.attention import (
    FAMILIES,
    AttentionBackend,
    choose_backend,
    efficient_backward,
)
from batchfinder.simulation.kernels.matrix_products import workspace_bytes
from batchfinder.simulation.kernels.workspaces import CudaWorkspaces
from batchfinder.simulation.trace.trace import Kind, Stage, Storage
from batchfinder.simulation.tracing.autocast import OFF_WARNING, cuda_autocast_on_cpu
from batchfinder.simulation.tracing.fake import fake_batch, fake_cuda
from batchfinder.simulation.tracing.tracker import StorageTracker


def traced(module: nn.Module, *inputs: torch.Tensor) -> list[Storage]:
    """Return the storages of one forward and backward pass."""
    with StorageTracker(1, module) as tracker:
        tracker.begin_step()
        module(*inputs).sum().backward()
    return tracker.trace.storages


def test_autocast_runs_normalizations_in_fp32_and_products_in_half() -> None:
    with fake_cuda((8, 0)), torch.autocast("cpu", torch.float16):
        half = torch.ones(4, 8, dtype=torch.float16)
        dtypes = [
            F.linear(half.float(), torch.ones(8, 8)).dtype,
            F.layer_norm(half, [8]).dtype,
            F.softmax(half, -1).dtype,
            half.sum().dtype,
            half.pow(2).dtype,
            F.gelu(half).dtype,
        ]

    fp16, fp32 = torch.float16, torch.float32
    assert dtypes == [fp16, fp32, fp32, fp32, fp32, fp16]


def test_upsampling_runs_in_fp32_since_pytorch_2() -> None:
    dtypes = []
    for version in ((1, 12), (2, 0)):
        with fake_cuda((8, 0), torch_version=version), torch.autocast("cpu", torch.float16):
            image = torch.ones(1, 1, 2, 2, dtype=torch.float16)
            dtypes.append(F.interpolate(image, scale_factor=2).dtype)
    assert dtypes == [torch.float16, torch.float32]


def test_the_policy_ends_with_the_simulation() -> None:
    with fake_cuda((8, 0)):
        pass
    with torch.autocast("cpu", torch.bfloat16):
        assert F.softmax(torch.ones(2, 2, dtype=torch.bfloat16), -1).dtype == torch.bfloat16


def test_dropout_keeps_one_byte_per_element() -> None:
    with fake_cuda((8, 0)):
        storages = traced(nn.Dropout(0.5), torch.ones(1000, requires_grad=True))
    assert [s.size_bytes for s in storages if s.stage is Stage.FORWARD][:2] == [1000, 4000]


def test_gradients_of_a_tensor_used_twice_add_up_in_place() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2.0
            return x.exp() + x.sin()

    with fake_cuda((8, 0)):
        storages = traced(Twice(), torch.ones(1000, requires_grad=True))
    backward = [s.size_bytes for s in storages if s.stage is Stage.BACKWARD]
    # Gradients of exp, of cos and its product, and of the factor 2; none for their sum.
    assert backward.count(4000) == 4


def test_storages_know_their_module_kind_and_line() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    with fake_cuda((8, 0)):
        fake = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
        with StorageTracker(1, fake) as tracker:
            for parameter in fake.parameters():
                tracker.track(parameter, Kind.PARAMETER)
            tracker.begin_step()
            fake(torch.ones(2, 8)).sum().backward()
    storages = tracker.trace.storages
    assert [s.kind for s in storages[:2]] == [Kind.PARAMETER] * 2
    assert {s.module for s in storages if s.kind is Kind.ACTIVATION} >= {"1"}
    assert all(__file__ in s.line for s in storages if s.stage is Stage.FORWARD)
    assert len(list(model.parameters())) == 2


@pytest.mark.parametrize(
    ("dtype", "capability", "has_mask", "head_size", "backend"),
    [
        (torch.float16, (8, 0), False, 64, "flash"),
        (torch.bfloat16, (9, 0), False, 80, "flash"),
        (torch.float16, (7, 0), False, 64, "efficient"),
        (torch.bfloat16, (7, 5), False, 64, "math"),
        (torch.float32, (8, 6), False, 64, "efficient"),
        (torch.float16, (8, 6), True, 64, "efficient"),
        (torch.float16, (8, 6), True, 65, "math"),
        (torch.float16, (8, 6), False, 512, "efficient"),
        (torch.float64, (8, 0), False, 64, "math"),
    ],
)
def test_attention_backend(
    dtype: torch.dtype, capability: tuple[int, int], has_mask: bool, head_size: int, backend: str
) -> None:
    query = torch.empty(1, 2, 16, head_size, dtype=dtype, device="meta")
    chosen = choose_backend(query, query, query, has_mask=has_mask, capability=capability)
    assert chosen is AttentionBackend(backend)


def test_fused_attention_keeps_no_scores() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    largest = []
    for dtype in (torch.float16, torch.float64):
        with fake_cuda((8, 0)):
            x = torch.ones(1, 1, 2048, 64, dtype=dtype, requires_grad=True)
            largest.append(max(s.size_bytes for s in traced(Attention(), x)))
    assert largest == [2048 * 64 * 2, 2048 * 2048 * 8]


@pytest.mark.parametrize(
    ("dtype", "alike"), [("float32", {(5, 0), (7, 0), (8, 0)}), ("float16", {(8, 0)})]
)
def test_gpus_with_the_same_attention_share_traces(dtype: str, alike: set[tuple[int, int]]) -> None:
    families = set(FAMILIES)
    with fake_cuda((8, 6), alike=families):
        x = torch.ones(1, 2, 16, 64, dtype=getattr(torch, dtype))
        F.scaled_dot_product_attention(x, x, x)
    assert families == alike


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("kind", "layers", "bidirectional", "reserve"),
    [
        # The size that cuDNN requested: https://github.com/pytorch/pytorch/issues/2895.
        (nn.LSTM, 4, False, 736_000_000),
        (nn.GRU, 4, False, 864_000_000),
        (nn.LSTM, 1, True, 320_000_000),
    ],
)
def test_recurrent_layers_keep_a_reserve_in_fp32(
    kind: Any, layers: int, bidirectional: bool, reserve: int, autocast: bool
) -> None:
    with fake_cuda((8, 6)), torch.autocast("cpu", torch.float16, enabled=autocast):
        layer = kind(123, 320, layers, bidirectional=bidirectional)
        storages = traced(Output(layer), torch.ones(250, 100, 123))
    assert max(s.size_bytes for s in storages) == reserve


class Output(nn.Module):
    """A recurrent layer without its state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


def test_recurrent_layers_transpose_batch_first_inputs() -> None:
    """cuDNN needs a copy, since it reads all examples of one time step after another."""
    counts = []
    for batch_first in (False, True):
        with fake_cuda((8, 6)):
            layer = nn.LSTM(17, 32, batch_first=batch_first)
            storages = traced(Output(layer), torch.ones(8, 8, 17))
        counts.append(sum(s.size_bytes == 8 * 8 * 17 * 4 for s in storages))
    assert counts[1] == counts[0] + 2


def test_without_cudnn_autocast_casts_an_lstm_for_every_time_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with fake_cuda((8, 6)), torch.autocast("cpu", torch.bfloat16):
        layer = nn.LSTM(17, 33, batch_first=True)
        cast = sizes_of(traced(Output(layer), torch.ones(4, 10, 17)), Stage.FORWARD)
        deep = nn.LSTM(17, 33, num_layers=2, bidirectional=True, dropout=0.1, bias=False)
        output, states = deep(torch.ones(10, 4, 17))
    assert cast.count(4 * 33 * 17 * 2) == cast.count(4 * 33 * 33 * 2) == 10
    assert output.shape == (10, 4, 66)
    assert [state.shape for state in states] == [(4, 4, 33), (4, 4, 33)]


def sizes_of(storages: list[Storage], stage: Stage) -> list[int]:
    return [storage.size_bytes for storage in storages if storage.stage is stage]


def test_cross_entropy_of_half_logits_keeps_them_in_half_and_reads_them_in_fp32() -> None:
    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(logits, torch.zeros(10, dtype=torch.long))

    with fake_cuda((9, 0)):
        logits = torch.ones(10, 100, dtype=torch.bfloat16, requires_grad=True)
        storages = traced(Loss(), logits)
    # The logarithms, in the dtype of the logits, and their copy for the loss.
    assert [size for size in sizes_of(storages, Stage.FORWARD) if size > 1000] == [2000, 4000]


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax])
def test_one_kernel_reads_half_scores_and_writes_them_in_fp32(softmax: Any) -> None:
    class Scores(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return softmax(x, -1, dtype=torch.float32)

    with fake_cuda((8, 0)):
        storages = traced(Scores(), torch.ones(10, 100, dtype=torch.float16, requires_grad=True))

    # The scores, their sum and its gradient.
    assert sizes_of(storages, Stage.FORWARD) == [4000, 4, 4]
    assert sizes_of(storages, Stage.BACKWARD)[-1] == 2000


def test_gradients_of_a_weight_used_twice_add_up_in_a_third_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(100, 16))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(F.embedding(ids, self.weight), self.weight)

    with fake_cuda((9, 0)):
        storages = traced(Tied(), torch.zeros(8, dtype=torch.long))
    assert sizes_of(storages, Stage.BACKWARD).count(6400) == 3


def test_the_bias_of_a_linear_layer_is_added_in_place() -> None:
    with fake_cuda((9, 0)):
        storages = traced(nn.Linear(8, 16), torch.ones(4, 3, 8).transpose(0, 1))
    assert sizes_of(storages, Stage.FORWARD).count(4 * 3 * 16 * 4) == 1


def with_workspaces(module: nn.Module, *inputs: torch.Tensor) -> list[int]:
    """Return the sizes of the workspaces in both passes."""
    workspaces = CudaWorkspaces((9, 0), set())
    with StorageTracker(1, module, workspaces) as tracker:
        tracker.begin_step()
        module(*inputs).sum().backward()
    storages = tracker.trace.storages
    sizes = [storage.size_bytes for storage in storages if storage.kind is Kind.WORKSPACE]
    return [size for size in sizes if size]


def test_workspaces_know_the_line_of_the_users_code() -> None:
    convolution = nn.Conv2d(8, 8, 3)
    with StorageTracker(1, convolution, CudaWorkspaces((9, 0), set())) as tracker:
        tracker.begin_step()
        convolution(torch.ones(2, 8, 64, 64)).sum().backward()
    lines = {s.line for s in tracker.trace.storages if s.kind is Kind.WORKSPACE}
    assert lines
    assert all(__file__ in line for line in lines)


def test_counting_needs_a_copy_in_the_dtype_of_the_count() -> None:
    class Share(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x > 0).sum()

    with fake_cuda((9, 0)):
        assert with_workspaces(Share(), torch.ones(10, 10, requires_grad=True)) == [800]


@pytest.mark.parametrize(
    ("dtype", "workspaces"),
    [
        # The requests to PyTorch's own allocator: gradient times output, its row sums twice, and
        # the tiles of the query's gradient; or the row sums and the query's gradient.
        (torch.float32, [1605632, 25088, 25088, 2099200]),
        (torch.bfloat16, [32768, 2097152]),
    ],
)
def test_workspaces_of_attention_backward(dtype: torch.dtype, workspaces: list[int]) -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = x.transpose(1, 2)
            return F.scaled_dot_product_attention(query, query, query).transpose(1, 2).exp()

    with fake_cuda((9, 0)):
        x = torch.ones(8, 196, 4, 64, dtype=dtype, requires_grad=True)
        assert with_workspaces(Attention(), x) == workspaces


@pytest.mark.parametrize(
    ("dtype", "head_size", "lengths", "capability", "floats"),
    [
        (torch.float32, 32, (100, 100), (9, 0), 8200),
        (torch.float32, 96, (257, 128), (8, 0), 49176),
        (torch.float32, 128, (128, 128), (7, 5), 16400),
        (torch.float32, 64, (128, 128), (6, 1), 0),
        (torch.float16, 128, (257, 128), (8, 0), 49164),
        (torch.float16, 128, (257, 128), (7, 0), 49176),
        (torch.float16, 160, (128, 300), (9, 0), 188428),
        (torch.float16, 256, (512, 512), (6, 1), 163968),
    ],
)
def test_tiles_of_the_memory_efficient_kernel(
    dtype: torch.dtype,
    head_size: int,
    lengths: tuple[int, int],
    capability: tuple[int, int],
    floats: int,
) -> None:
    query, key = (torch.empty(2, 3, n, head_size, dtype=dtype, device="meta") for n in lengths)
    assert efficient_backward(query, key, capability).bytes_of(2 * 3) == 2 * 3 * 4 * floats


# Floats per head, by the number of heads; read from PyTorch 2.11 on the counting runtime of
# scripts/counting_cuda.
@pytest.mark.parametrize(("heads", "floats"), [(8, 786_560), (64, 458_880), (512, 327_808)])
def test_more_heads_mean_fewer_splits_of_the_keys(heads: int, floats: int) -> None:
    query = torch.empty(1, heads, 512, 512, dtype=torch.bfloat16, device="meta")
    assert efficient_backward(query, query, (9, 0)).bytes_of(heads) == heads * 4 * floats


def test_is_autocast_enabled_answers_for_cuda() -> None:
    def answers() -> list[object]:
        return [
            torch.is_autocast_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
        ]

    before = answers()
    with fake_cuda((9, 0)):
        assert answers() == before == [False, False, torch.float16]
        with torch.autocast("cuda", torch.bfloat16):
            assert answers() == [True, True, torch.bfloat16]
            with torch.autocast("cuda", enabled=False):
                assert answers()[:2] == [False, False]
    assert answers() == before


@pytest.mark.parametrize("is_remembered", [True, False])
def test_an_autocast_made_before_the_step(is_remembered: bool) -> None:
    """It may be at the top of a script, or around a forward method."""
    told: list[str] = []
    with cuda_autocast_on_cpu() if is_remembered else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch finds no CUDA
        context = torch.autocast("cuda", torch.bfloat16)
    device = context.device
    with fake_cuda((9, 0), warn=told.append), context:
        dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    is_on = is_remembered or torch.cuda.is_available()
    assert dtype is (torch.bfloat16 if is_on else torch.float32)
    assert told == ([] if is_on else [OFF_WARNING])
    assert context.device == device


def test_a_step_may_print_its_numbers() -> None:
    length = torch.tensor(7)
    with fake_cuda((9, 0)) as mode:
        loss, known = torch.ones(3, 3).mean(), fake_batch(length, mode)
        assert f"{loss:.2f} {loss.long():d} {known:03d}" == "0.00 0 007"
        with pytest.raises(TypeError, match="unsupported format string"):
            f"{torch.ones(3):.2f}"


class Products(nn.Module):
    """Matrix products in the forward pass, with a bias or without, and in the backward pass."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8, bias), nn.Linear(8, 8, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


# Read from PyTorch 2.11 to 2.13 on the counting runtime of scripts/counting_cuda, as below.
@pytest.mark.parametrize(
    ("bias", "torch_version", "cublas", "cublaslt"),
    [(True, (2, 13), 2, 0), (True, (2, 12), 2, 0), (True, (2, 11), 2, 1), (False, (2, 11), 2, 0)],
)
def test_each_thread_that_multiplies_keeps_a_workspace(
    bias: bool, torch_version: tuple[int, int], cublas: int, cublaslt: int
) -> None:
    gpu = find_gpu("h200")
    workspaces = CudaWorkspaces(gpu.compute_capability, set(), torch_version=torch_version)
    model = Products(bias)
    with fake_cuda((9, 0)), StorageTracker(1, model, workspaces) as tracker:
        for _ in range(2):
            tracker.begin_step()
            model(torch.ones(4, 8)).sum().backward()
    trace = tracker.trace
    ended = {~event for event in trace.events if event < 0}
    kept = [s for i, s in enumerate(trace.storages) if s.kind is Kind.WORKSPACE and i not in ended]
    sizes = [s.rule.bytes_of(*s.amounts, gpu) if s.rule else s.size_bytes for s in kept]
    assert sorted(sizes) == [2**20] * cublaslt + [32 * 2**20] * cublas


@pytest.mark.parametrize(
    ("name", "in_2_11", "in_2_12"),
    [
        ("V100 16GB", 8_519_680, 8_519_680),
        ("RTX 4090", 8_519_680, 8_519_680),
        ("H200", 32 * 2**20, 32 * 2**20),
        ("B200", 8_519_680, 32 * 2**20),
        ("RTX 5090", 8_519_680, 32 * 2**20),
    ],
)
def test_size_of_a_workspace(name: str, in_2_11: int, in_2_12: int) -> None:
    gpu = find_gpu(name)
    assert workspace_bytes(gpu, (2, 11)) == in_2_11
    assert workspace_bytes(gpu, (2, 12)) == in_2_12


def test_a_step_without_matrix_products_keeps_no_workspace() -> None:
    with fake_cuda((9, 0)):
        assert with_workspaces(nn.Tanh(), torch.ones(4, 8, requires_grad=True)) == []
