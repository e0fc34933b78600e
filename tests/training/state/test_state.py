"""After a search, the user's state is the same as before, to the byte."""

from __future__ import annotations

import collections
import hashlib
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, SequentialLR, StepLR

from batchfinder.errors import DeviceError, StepError
from batchfinder.training.state.process_settings import host_numbers
from batchfinder.training.state.snapshot import preserved_state


class Everything(nn.Module):
    """BatchNorm, dropout, tied and frozen weights, all kinds of buffers, parts in eval mode."""

    saved: Tensor
    unsaved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.quiet = nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(6)).eval()
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.register_buffer("expanded", torch.arange(3.0).expand(4, 3))
        self.calls = 0
        self.history: list[Tensor] = []
        self.cache: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(inputs)
        self.cache = inputs * 2
        self.saved.add_(1)
        self.unsaved = self.unsaved + 1
        hidden = self.dropout(self.norm(self.first(inputs)))
        output: Tensor = self.tied(self.quiet(self.frozen(hidden)))
        return output


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values inside an object, in order, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            for path, leaf in leaves(item):
                yield f"{id(key) if isinstance(key, Tensor) else key}.{path}", leaf
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            for path, leaf in leaves(item):
                yield f"{index}.{path}", leaf
    else:
        yield "", value


def checksum(*objects: Any) -> str:
    """Hash all state: identities, bytes, devices, flags, gradients, modes, random states."""
    digest = hashlib.sha256()
    for item in objects:
        state: Any = vars(item)
        if isinstance(item, nn.Module):
            state = {name: vars(module) for name, module in item.named_modules()}
        for path, leaf in leaves(state):
            digest.update(path.encode())
            for part in (leaf, leaf.grad if isinstance(leaf, Tensor) and leaf.is_leaf else None):
                if not isinstance(part, Tensor):
                    digest.update(repr(part).encode())
                    continue
                digest.update(repr((id(part), part.data_ptr(), part.device)).encode())
                digest.update(repr((part.requires_grad, part.shape, part.stride())).encode())
                digest.update(
                    part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
    digest.update(repr((random.getstate(), np.random.get_state())).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def capturable_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), amsgrad=True)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw, capturable_adam])
@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
def test_training_leaves_no_trace(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], steps_before: int
) -> None:
    model = Everything()
    optimizer = make_optimizer(model)
    train(model, optimizer, steps_before)
    before = checksum(model, optimizer)
    with preserved_state(model, optimizer):
        train(model, optimizer)
        assert checksum(model, optimizer) != before
    assert checksum(model, optimizer) == before
    assert bool(optimizer.state) == bool(steps_before)
    assert model.tied.weight is model.first.weight


@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
def test_start_over_leaves_no_trace(steps_before: int) -> None:
    model = Everything()
    optimizer = adamw(model)
    train(model, optimizer, steps_before)
    model(torch.randn(8, 6)).sum().backward()
    before = checksum(model, optimizer)
    with preserved_state(model, optimizer) as state:
        entered = checksum(model, optimizer)
        for _ in range(2):
            train(model, optimizer)
            state.start_over()
            assert checksum(model, optimizer) == entered
        train(model, optimizer)
    assert checksum(model, optimizer) == before


def test_a_fresh_optimizer_is_reset_and_trains_as_new() -> None:
    def run(searched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Everything()
        optimizer = adamw(model)
        if searched:
            with preserved_state(model, optimizer):
                train(model, optimizer)
            assert not optimizer.state
        train(model, optimizer)
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, run(searched=True), run(searched=False)))


def test_existing_optimizer_states_keep_their_tensors() -> None:
    model = Everything()
    optimizer = sgd(model)
    train(model, optimizer)
    momentum = optimizer.state[model.first.weight]["momentum_buffer"]
    values = momentum.clone()
    with preserved_state(model, optimizer):
        optimizer.state.clear()
        train(model, optimizer)
    assert optimizer.state[model.first.weight]["momentum_buffer"] is momentum
    assert torch.equal(momentum, values)


def test_parameters_outside_the_model_are_restored_with_the_optimizer() -> None:
    head = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([head], lr=1.0)
    with preserved_state(nn.Linear(1, 1), optimizer):
        loss: Any = head.sum()
        loss.backward()
        optimizer.step()
        assert head[0] == 0
    assert head.tolist() == [1, 1, 1]
    assert head.grad is None


def test_gradients_are_the_same_tensors_with_the_same_values() -> None:
    model = Everything()
    optimizer = sgd(model)
    model(torch.randn(8, 6)).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    before = checksum(model, optimizer)
    with preserved_state(model, optimizer):
        assert all(parameter.grad is None for parameter in model.parameters())
        train(model, optimizer)
    assert checksum(model, optimizer) == before
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
    assert model.frozen.weight.grad is None


def test_shared_gradients_keep_their_values() -> None:
    model = nn.Linear(2, 2)
    bucket = torch.arange(6.0)
    model.weight.grad, model.bias.grad = bucket[:4].view(2, 2), bucket[4:]
    with preserved_state(model):
        bucket.zero_()
    assert bucket.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.bias.grad.data_ptr() == bucket[4:].data_ptr()


def test_sparse_gradients_are_restored() -> None:
    model = nn.Embedding(10, 2, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    dense = grad.to_dense()
    with preserved_state(model):
        grad.mul_(2)
        model(torch.tensor([3])).sum().backward()
    assert model.weight.grad is grad
    assert torch.equal(grad.to_dense(), dense)


def test_the_random_stream_is_unchanged() -> None:
    def draw(searched: bool) -> tuple[float, float, list[float]]:
        model = nn.Linear(1, 1)
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        if searched:
            with preserved_state(model):
                random.random()
                np.random.rand()
                nn.Dropout(0.5)(torch.ones(100))
        return random.random(), np.random.rand(), nn.Dropout(0.5)(torch.ones(9)).tolist()

    assert draw(searched=True) == draw(searched=False)


@pytest.mark.parametrize("has_numpy", [True, False])
def test_a_number_drawn_on_the_host_is_noticed(
    has_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[Callable[[], object]] = [random.random, lambda: torch.rand(1)]
    if has_numpy:
        draws.append(np.random.rand)
    else:
        monkeypatch.delitem(sys.modules, "numpy")
        monkeypatch.setattr(Tensor, "numpy", None)  # it fails without the package
    for draw in draws:
        before = host_numbers()
        assert host_numbers() == before
        draw()
        assert host_numbers() != before


def test_a_generator_of_the_model_is_restored() -> None:
    model = nn.Linear(1, 1)
    generator = torch.Generator().manual_seed(3)
    vars(model)["generator"] = generator
    with preserved_state(model):
        torch.rand(5, generator=generator)
    assert torch.equal(
        torch.rand(5, generator=generator),
        torch.rand(5, generator=torch.Generator().manual_seed(3)),
    )


@pytest.mark.parametrize("used", [False, True])
def test_the_scaler_is_restored(used: bool) -> None:
    model = nn.Linear(6, 6)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)

    def step() -> None:
        scaler.scale(model(torch.randn(2, 6)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    if used:
        step()
    before = checksum(model, optimizer, scaler)
    with preserved_state(model, optimizer, scaler):
        step()
        scaler.scale(model(torch.randn(2, 6)).sum()).backward()
        scaler.unscale_(optimizer)
        assert checksum(model, optimizer, scaler) != before
    assert checksum(model, optimizer, scaler) == before
    assert scaler.get_scale() == (131072.0 if used else 65536.0)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # PyTorch 2.4 gives it to itself
def test_schedulers_are_restored_with_their_optimizers() -> None:
    model = Everything()
    optimizer = torch.optim.SGD(
        [
            {"params": model.first.parameters(), "lr": 0.5},
            {"params": model.norm.parameters(), "lr": 0.1},
        ],
        momentum=0.9,
    )
    schedulers = [StepLR(optimizer, 1), OneCycleLR(optimizer, [1.0, 2.0], total_steps=20)]
    scheduler = SequentialLR(optimizer, schedulers, [2])
    before = checksum(model, optimizer, scheduler, *schedulers)
    rates = [group["lr"] for group in optimizer.param_groups]
    with preserved_state(model, scheduler, None):
        for _ in range(4):
            train(model, optimizer, 1)
            scheduler.step()
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 1.0})
    assert checksum(model, optimizer, scheduler, *schedulers) == before
    assert [group["lr"] for group in optimizer.param_groups] == rates


class SetOnce(type):
    """A metaclass whose classes refuse to reset attributes."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name in vars(cls):
            raise AttributeError(f"{name} is set only once")
        super().__setattr__(name, value)


class Registry(metaclass=SetOnce):
    """A model that remembers the largest batch."""

    seen: int


def test_a_failure_does_not_prevent_the_rest() -> None:
    model = Everything()
    optimizer = adamw(model)
    Registry.seen = 0
    before = checksum(model, optimizer)

    def search() -> None:
        with preserved_state(model, optimizer, lambda: Registry.seen):
            train(model, optimizer)
            type.__setattr__(Registry, "seen", 8)

    with pytest.raises(DeviceError, match="seen is set only once"):
        search()
    assert checksum(model, optimizer) == before


@pytest.mark.parametrize("error", [RuntimeError("in the middle"), KeyboardInterrupt()])
def test_state_is_restored_after_an_error(error: BaseException) -> None:
    model = Everything()
    optimizer = adamw(model)
    train(model, optimizer)
    before = checksum(model, optimizer)

    def search() -> None:
        with preserved_state(model, optimizer):
            train(model, optimizer)
            optimizer.zero_grad()
            model(torch.randn(8, 6)).sum().backward()
            raise error

    with pytest.raises(type(error)):
        search()
    assert checksum(model, optimizer) == before


def test_modes_and_flags_of_parameters_are_restored() -> None:
    model = Everything()
    before = checksum(model)
    with preserved_state(model):
        model.train()
        model.frozen.requires_grad_(True)
        model.first.requires_grad_(False)
    assert checksum(model) == before
    assert [model.training, model.quiet.training, model.quiet[0].training] == [True, False, False]


def test_hooks_of_parameters_are_restored() -> None:
    model: Any = nn.Linear(2, 1)
    called = []
    kept = model.weight.register_post_accumulate_grad_hook(lambda _: called.append("kept"))

    with preserved_state(model):
        kept.remove()
        model.weight.register_hook(lambda _: called.append("new"))
        model.bias.register_post_accumulate_grad_hook(lambda _: called.append("new"))
        model(torch.ones(1, 2)).sum().backward()
        assert called == ["new", "new"]
    called.clear()
    model(torch.ones(1, 2)).sum().backward()

    assert called == ["kept"]


def test_replaced_added_and_removed_members_are_restored() -> None:
    model = Everything()
    names = [name for name, _ in model.named_parameters()]
    before = checksum(model)
    with preserved_state(model):
        model.first.weight = nn.Parameter(torch.ones(6, 6))
        model.extra = nn.Linear(2, 2)
        del model.norm
        model.norm = nn.BatchNorm1d(6)
        del model.saved
        model.register_forward_hook(lambda *_: None)
    assert checksum(model) == before
    assert [name for name, _ in model.named_parameters()] == names


def test_counters_of_a_module_are_restored() -> None:
    model = nn.Linear(2, 1)
    model.seen = collections.Counter(steps=3)  # type: ignore[assignment]
    with preserved_state(model):
        model.seen.update(["steps", "epochs"])  # type: ignore[operator,union-attr]
    assert model.seen == {"steps": 3}


def test_moved_tensors_are_restored() -> None:
    # Module._apply treats a change of dtype like a change of device.
    model = Everything()
    flat = torch.arange(84.0)
    model.first.weight.data, model.frozen.weight.data = flat[:36].view(6, 6), flat[36:72].view(6, 6)
    before = checksum(model)
    with preserved_state(model):
        model.double()
        assert model.first.weight.data_ptr() != flat.data_ptr()
        flat.zero_()
    assert checksum(model) == before
    assert model.first.weight.data_ptr() == flat.data_ptr()


def test_swapped_parameters_are_restored() -> None:
    model = nn.Linear(2, 2)
    values = model.weight.detach().clone()
    with preserved_state(model):
        swap: Any = torch.utils.swap_tensors
        swap(model.weight, nn.Parameter(torch.zeros(5)))
    assert torch.equal(model.weight, values)


def test_a_freed_storage_is_restored() -> None:
    # Fully sharded training does this to parameters that are not in use.
    buffer = torch.arange(4.0)
    model = nn.Module()
    model.register_buffer("buffer", buffer)
    with preserved_state(model):
        buffer.untyped_storage().resize_(0)
    assert buffer.tolist() == [0, 1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool]),
    shape=st.lists(st.integers(0, 4), max_size=3),
    bits=st.binary(min_size=512, max_size=512),
)
def test_every_kind_of_tensor_is_restored_bit_for_bit(
    dtype: torch.dtype, shape: list[int], bits: bytes
) -> None:
    if dtype is torch.bool:
        bits = bytes(bit & 1 for bit in bits)
    count = torch.Size(shape).numel()
    tensor = (
        torch.frombuffer(bytearray(bits), dtype=dtype, count=count).view(shape)
        if count
        else (torch.empty(shape, dtype=dtype))
    )  # NaN payloads and all
    model = nn.Module()
    model.register_buffer("buffer", tensor.t() if tensor.dim() == 2 else tensor)
    before = checksum(model)
    with preserved_state(model):
        tensor.fill_(1)
    assert checksum(model) == before


def test_read_only_memory_that_did_not_change_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    np.arange(1024, dtype=np.float32).tofile(path)
    model = nn.Module()
    # A write to a shared mapping would reach the file.
    model.register_buffer("mapped", torch.from_file(str(path), shared=True, size=1024))
    stamp = path.stat().st_mtime_ns
    with preserved_state(model):
        pass
    assert path.stat().st_mtime_ns == stamp
    assert np.array_equal(np.fromfile(path, dtype=np.float32), np.arange(1024))


def test_meta_and_inference_tensors_are_left_alone() -> None:
    with torch.inference_mode():
        made_there = torch.ones(2)
    model = nn.Linear(3, 3, device="meta")
    vars(model)["constant"] = made_there
    weight = model.weight
    with preserved_state(model):
        vars(model)["constant"] = None
    assert model.weight is weight
    assert vars(model)["constant"] is made_there


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_quantized_tensors_are_restored() -> None:
    model = nn.Module()
    vars(model)["weight"] = quantized = torch.quantize_per_tensor(
        torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8
    )
    with preserved_state(model):
        quantized.copy_(torch.tensor([5.0, 5.0]))
    assert quantized.dequantize().tolist() == [1.0, 2.0]


def test_lazy_parameters_are_refused_with_advice() -> None:
    with (
        pytest.raises(StepError, match="Try running one batch through it"),
        preserved_state(nn.LazyLinear(3)),
    ):
        pass


def test_cyclic_and_deep_structures_end() -> None:
    model = nn.Linear(1, 1)
    chain: list[Any] = []
    vars(model)["chain"] = chain
    vars(model)["itself"] = {"model": model}
    for _ in range(5000):
        chain.append([])
        chain = chain[0]
    end = torch.zeros(1)
    chain.append(end)
    with preserved_state(model):
        end.fill_(1)
    assert end.item() == 0


def test_switches_of_the_process_are_restored() -> None:
    def switches() -> list[Any]:
        return [
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
            torch.get_default_device(),
            torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        ]

    before = switches()
    with preserved_state():
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not before[5]
        torch.backends.cudnn.deterministic = not before[6]
        torch.backends.cudnn.allow_tf32 = not before[7]
        torch.set_default_device("meta")
        torch.backends.cuda.enable_flash_sdp(not before[10])
        assert all(now != was for now, was in zip(switches(), before, strict=True))
    assert switches() == before


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch before 2.9")
def test_the_newer_precision_switches_are_restored() -> None:
    convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    with preserved_state():
        convolution.fp32_precision = "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        # The older switches cannot be read at this point.
        with preserved_state():
            convolution.fp32_precision = "tf32"
        assert convolution.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 is True


class Wrapper(Tensor):
    """A wrapper subclass that runs a callback whenever it is copied into."""

    on_copy: Callable[[], None]

    def __tensor_flatten__(self) -> None:
        """Marks a wrapper."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        self.on_copy()
        return super().copy_(source, non_blocking)


def with_wrapper(on_copy: Callable[[], None]) -> tuple[Everything, Wrapper]:
    model = Everything()
    wrapper = torch.zeros(3).as_subclass(Wrapper)
    wrapper.on_copy = on_copy
    model.register_buffer("wrapper", wrapper)
    return model, wrapper


def test_wrapper_tensors_are_restored() -> None:
    model, wrapper = with_wrapper(lambda: None)
    with preserved_state(model):
        wrapper.fill_(1)
    assert model.wrapper is wrapper
    assert wrapper.tolist() == [0, 0, 0]


def test_a_second_ctrl_c_waits_until_everything_is_restored() -> None:
    model, wrapper = with_wrapper(lambda: signal.raise_signal(signal.SIGINT))
    optimizer = adamw(model)
    train(model, optimizer)
    before = checksum(model, optimizer)

    def search() -> None:
        with preserved_state(model, optimizer):
            train(model, optimizer)
            wrapper.fill_(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert checksum(model, optimizer) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_failures_are_reported_after_the_rest_is_restored() -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    model, _ = with_wrapper(broken)
    optimizer = adamw(model)
    train(model, optimizer)
    before = checksum(model, optimizer)
    with (
        pytest.raises(DeviceError, match=r"^not all .*encountered\)\. Try .* checkpoint .*$"),
        preserved_state(model, optimizer),
    ):
        train(model, optimizer)
    assert checksum(model, optimizer) == before


def test_it_works_outside_the_main_thread() -> None:
    model = nn.Linear(2, 2)
    before = checksum(model)

    def search() -> None:
        with preserved_state(model):
            model.weight.data.zero_()

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert checksum(model) == before


def test_nested_snapshots_are_restored_in_order() -> None:
    model = Everything()
    optimizer = adamw(model)
    before = checksum(model, optimizer)
    with preserved_state(model, optimizer):
        train(model, optimizer)
        optimizer.zero_grad()
        between = checksum(model, optimizer)
        with preserved_state(model, optimizer):
            train(model, optimizer)
        assert checksum(model, optimizer) == between
    assert checksum(model, optimizer) == before


COUNTS = {"steps": 0}
LAST: Tensor | None = None


def test_objects_reached_by_functions_are_restored() -> None:
    """A GAN's discriminator with its optimizer, an EMA in a dict, counters, rebound names."""
    model, judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(judge.parameters())
    average = {name: value.clone() for name, value in model.state_dict().items()}
    steps = 0

    def step(model: nn.Module, batch: Tensor) -> None:
        nonlocal steps
        global LAST
        steps += 1
        COUNTS["steps"] += 1
        LAST = model(batch)
        torch.autograd.backward(judge(LAST.detach()).sum())
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name] = average[name] + value

    def all_of_it() -> str:
        rest = SimpleNamespace(average=average, steps=steps, counts=COUNTS, last=LAST)
        return checksum(model, judge, optimizer, rest)

    before = all_of_it()
    with preserved_state(model, step):
        step(model, torch.randn(2, 4))
        assert steps == COUNTS["steps"] == 1
        assert all_of_it() != before
    assert all_of_it() == before


TABLES: dict[int, Tensor] = {}


class Positioned(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + TABLES.setdefault(len(inputs), torch.ones(1))


def test_objects_reached_by_methods_of_modules_are_restored() -> None:
    TABLES[2] = table = torch.zeros(1)
    model = nn.Sequential(Positioned())

    with preserved_state(model):
        model(torch.ones(3))
        TABLES[2].fill_(1)

    assert list(TABLES) == [2]
    assert TABLES[2] is table
    assert not table.any()


def test_the_object_of_a_method_is_restored() -> None:
    class Loop:
        def __init__(self) -> None:
            self.steps = 0
            self.seen: list[Tensor] = []

        def step(self, model: nn.Module, batch: Tensor) -> None:
            self.steps += 1
            self.seen.append(model(batch))
            self.last = batch

    loop = Loop()
    with preserved_state(loop.step):
        loop.step(nn.Linear(4, 4), torch.randn(2, 4))
        assert loop.steps == len(loop.seen) == 1
    assert vars(loop) == {"steps": 0, "seen": []}


class Counter(dict[str, int]):
    """A dict with a slot, a class attribute, and its own way to set items."""

    __slots__ = ("empty", "steps")
    of_all = 0

    def __init__(self) -> None:
        self.steps = 0


def test_slots_classes_and_derived_containers_are_restored() -> None:
    counter, items = Counter(), [1, 2]

    def step() -> None:
        global NEW
        NEW = items  # type: ignore[name-defined]
        Counter.of_all += 1
        Counter.new = 1  # type: ignore[attr-defined]
        counter["item"] = counter.steps = counter.empty = 1  # type: ignore[attr-defined]

    with preserved_state(step):
        step()
    assert (counter, counter.steps, Counter.of_all) == ({}, 0, 0)
    assert not hasattr(counter, "empty")
    assert not hasattr(Counter, "new")
    assert "NEW" not in globals()


def test_optimizers_reached_by_hooks_are_restored() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    hook: Any = lambda parameter: optimizer.step()  # noqa: E731
    model.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    with preserved_state(model):
        torch.autograd.backward(model(torch.randn(2, 4)).sum())
        assert optimizer.state
    assert not optimizer.state


def test_generators_of_a_loop_are_restored() -> None:
    own, old, new = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)
    first = random.Random(1).random(), np.random.RandomState(1).rand()

    def step() -> tuple[float, float, float]:
        return own.random(), float(old.rand()), float(new.random())

    with preserved_state(step):
        numbers = step()
    assert step() == numbers == (*first, numbers[2])
