from __future__ import annotations

import copy
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from batchfinder import OOMGuard
from batchfinder.errors import BatchFinderWarning, DeviceError, UsageError
from batchfinder.integrations.split_batch import split_batch

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:a batch of .* ran out of memory")


class Small(nn.Module):
    """A model in float64 that runs out of memory above a number of examples."""

    def __init__(self, fits: int, where: str = "forward") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.fits = fits
        self.where = where
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        y: Tensor = self.layers(x)
        if len(x) > self.fits:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            y.register_hook(run_out)  # type: ignore[no-untyped-call]
        return y


def run_out(_: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: out of memory")


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return (
        torch.randn(size, 3, generator=generator, dtype=torch.float64),
        torch.randn(size, 2, generator=generator, dtype=torch.float64),
    )


def trained(model: nn.Module, batch: Any) -> list[Tensor]:
    """The parameters after one plain step on the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("size", "fits"), [(8, 8), (8, 4), (13, 3), (7, 1), (64, 5)])
def test_a_split_step_trains_as_the_whole_batch_does(where: str, size: int, fits: int) -> None:
    model = Small(fits, where)
    plain = copy.deepcopy(model)
    plain.fits = size
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard.step(batch_of(size))
    for ours, theirs in zip(model.parameters(), trained(plain, batch_of(size)), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-12)
    assert guard.batch_size is None if fits >= size else 1 <= (guard.batch_size or 0) <= fits


def test_a_loop_may_scale_clip_and_step_by_itself() -> None:
    model = Small(3)
    plain = copy.deepcopy(model)
    plain.fits = 10
    x, y = batch_of(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    guard = OOMGuard(
        model, optimizer, lambda out, batch: scaler.scale(nn.functional.mse_loss(out, batch[1]))
    )

    with pytest.warns(BatchFinderWarning, match="in parts of 3") as told:
        scaled = guard.backward((x, y))
    scaler.unscale_(optimizer)
    loss = nn.functional.mse_loss(plain(x), y)
    loss.backward()  # type: ignore[no-untyped-call]

    assert told[0].filename == __file__
    torch.testing.assert_close(scaled, 1024 * loss.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)  # the optimizer's step is the caller's


def test_the_first_split_is_told_once() -> None:
    model = Small(4)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(guard) == "<OOMGuard: Small, whole batches in one forward pass>"
    with pytest.warns(BatchFinderWarning, match="a batch of 10 .* in parts of 3: slower") as told:
        guard.step(batch_of(10))
    assert repr(guard) == "<OOMGuard: Small, at most 3 examples in one forward pass>"
    assert told[0].filename == __file__  # the user's own line
    assert "if the loss is a mean over examples, not tokens. Try" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.step(batch_of(20))
        model.fits = 2
        guard.step(batch_of(20))
        OOMGuard(model, guard.optimizer, batch_size=2).step(batch_of(10))


def test_an_error_in_the_middle_of_accumulation_drops_the_parts_before_it() -> None:
    model = Small(100)
    plain = copy.deepcopy(model)
    calls: list[int] = []

    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(len(output))
        if len(calls) == 3:  # the third of four parts
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.mse_loss(output, batch[1])

    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch_size=4)
    loss = guard.step(batch_of(16))
    assert calls == [4] * 3 + [2] * 8
    expected = nn.functional.mse_loss(plain(batch_of(16)[0]), batch_of(16)[1])
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), trained(plain, batch_of(16)), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-12)


def test_the_size_that_worked_is_kept_and_grows_again_after_quiet_steps() -> None:
    model = Small(4)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.0), grow_after=3)
    for _ in range(4):
        guard.step(batch_of(8))
    # Whole, halved; kept for three steps; then 8 is tried again, fails, and the wait doubles.
    assert model.seen == [8, 4, 4, *[4, 4] * 2, 8, 4, 4]
    model.seen.clear()
    for _ in range(5):
        guard.step(batch_of(8))
    assert model.seen == [4, 4] * 5
    model.fits = 8
    guard.step(batch_of(8))
    guard.step(batch_of(8))
    assert model.seen[-1] == 8


def test_one_example_that_does_not_fit_is_one_clear_error() -> None:
    model = Small(0)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(DeviceError, match=r"not even one example of sample\[0\] \[4, 3\]"):
        guard.step(batch_of(4))
    assert model.seen == [4, 2, 1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors_of_the_users_own_are_raised_as_they_are() -> None:
    model = Small(8)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        guard.step((torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4, 2)))
    assert model.seen == [4]


def test_an_optimizer_without_room_is_not_repeated() -> None:
    model = Small(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def no_room(*_: Any) -> None:
        run_out(torch.zeros(()))

    optimizer.register_step_pre_hook(no_room)
    with pytest.raises(DeviceError, match="a smaller batch does not help"):
        OOMGuard(model, optimizer).step(batch_of(4))
    assert model.seen == [4]


def test_states_that_an_optimizer_only_began_to_make_are_gone() -> None:
    model = Small(8)
    optimizer = torch.optim.Adam(model.parameters())
    guard = OOMGuard(model, optimizer)
    made = []

    def no_room(tensor: Tensor, **options: Any) -> Tensor:
        made.append(torch.zeros(tensor.shape, dtype=tensor.dtype))
        return run_out(tensor) if len(made) == 2 else made[-1]

    with (
        mock.patch("torch.zeros_like", no_room),
        pytest.raises(DeviceError, match="some parameters may have been updated"),
    ):
        guard.step(batch_of(4))
    assert len(made) == 2
    assert not optimizer.state
    guard.step(batch_of(4))
    assert all("exp_avg_sq" in state for state in optimizer.state.values())


def test_hooks_that_see_parts_are_named_and_updates_in_the_backward_pass_refused() -> None:
    model = Small(2)
    weight: Any = next(model.parameters())
    clips = weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(BatchFinderWarning, match="Hooks of parameters see the gradients of a part"):
        guard.step(batch_of(4))
    clips.remove()
    weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(UsageError, match=r"has a hook that acts within the backward pass"):
        OOMGuard(model, guard.optimizer)


def test_lists_with_an_entry_for_each_example_are_split() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4, dtype=torch.float64)
            self.seen: list[tuple[int, list[str]]] = []

        def forward(self, images: list[Tensor], targets: list[dict[str, Any]]) -> Tensor:
            self.seen.append((len(images), [target["name"] for target in targets]))
            if len(images) > 2:
                run_out(images[0])
            boxes = zip(images, (target["boxes"] for target in targets), strict=True)
            losses = [
                (self.head(x.mean((1, 2))) - each.mean(0)).square().mean() for x, each in boxes
            ]
            return torch.stack(losses).mean()

    images = [torch.rand(3, 8 + index, 8, dtype=torch.float64) for index in range(3)]
    targets = [
        {"boxes": torch.rand(1 + index, 4, dtype=torch.float64), "name": name}
        for index, name in enumerate("abc")
    ]
    model = Detector()
    with pytest.warns(BatchFinderWarning, match="a batch of 3 ran out of memory.* parts of 2"):
        OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1)).backward((images, targets))
    assert model.seen == [(3, ["a", "b", "c"]), (1, ["a"]), (2, ["b", "c"])]
    (weight,) = torch.autograd.grad(
        torch.stack([model([i], [t]) for i, t in zip(images, targets, strict=True)]).mean(),
        [model.head.weight],
    )
    torch.testing.assert_close(model.head.weight.grad, weight)


def test_a_batch_that_cannot_be_split_is_one_clear_error() -> None:
    model = Small(1)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(DeviceError, match=r"cannot be split, as its tensors disagree about its"):
        guard.step((batch_of(4)[0], torch.zeros(3, 2)))


def test_buffers_forget_a_failed_pass() -> None:
    class Counting(nn.Module):
        steps: Tensor
        mean: Tensor
        codes: Tensor
        shown: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
            self.head = Small(4)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("codes", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("shown", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("mask", torch.ones(3, dtype=torch.float64))
            self.register_buffer("graph", torch.eye(3).to_sparse())
            self.register_buffer("none", None)

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            self.mean.lerp_(x.mean(0), 0.5)
            self.codes.data.lerp_(x.mean(0), 0.5)
            self.shown = self.shown + x.mean(0)
            y: Tensor = self.head(self.norm(x) * self.mask)
            return y

    model = Counting()
    twin = copy.deepcopy(model)
    guard, whole = (
        OOMGuard(each, torch.optim.SGD(each.parameters(), lr=0.1), batch_size=size)
        for each, size in ((model, None), (twin, 4))
    )
    for _ in range(2):
        guard.batch_size = None  # each step fails first, as a whole
        batch = batch_of(8)
        guard.step(batch)
        whole.step(batch)
    assert model.steps == 4
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_a_model_that_cannot_train_on_parts_is_told_that_there_are_parts() -> None:
    class Stateful(Small):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) < 4:
                raise RuntimeError("expected a state of 4 examples")
            return super().forward(x)

    model = Stateful(3)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        pytest.warns(BatchFinderWarning, match="a batch of 4 ran out of memory.* in parts of 2"),
        pytest.raises(RuntimeError, match="expected a state of 4 examples"),
    ):
        guard.step(batch_of(4))


def test_what_each_part_has_whole_is_named() -> None:
    class Named(Small):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch["x"])

    model = Named(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OOMGuard(model, optimizer, lambda output, batch: output.square().mean())
    packed = nn.utils.rnn.pack_sequence([torch.ones(size) for size in (4, 3, 2, 1)])
    whole = r"Each part has all of sample\['n'\], a list of 4, sample\['p'\], a PackedSequence"
    with pytest.warns(BatchFinderWarning, match=whole):
        guard.step({"x": batch_of(4)[0], "n": [1, 2, 3, 4], "p": packed})


def test_statistics_of_batch_norm_forget_the_failed_try_and_the_user_is_warned_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.head = Small(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.norm(x.float()).double())
            return y

    model = Normed()
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(BatchFinderWarning, match="BatchNorm"):
        guard.step(batch_of(8))
    assert model.norm.num_batches_tracked == 2  # two parts; not the whole batch that failed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.step(batch_of(8))


def test_nothing_of_a_failed_step_is_kept() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert not any(reference() is not None for reference in outputs)
        if len(output) > 4:
            outputs.append(weakref.ref(output))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.mse_loss(output, batch[1])

    model = Small(100)
    gc.disable()
    try:
        OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn).step(batch_of(8))
    finally:
        gc.enable()
    assert len(outputs) == 1


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60))
def test_parts_are_the_batch_in_order_and_of_nearly_equal_size(examples: int, size: int) -> None:
    x = torch.arange(examples)
    batch: dict[str, Any] = {"x": x, "y": x[:, None], "mask": torch.ones(2, 2)}
    batch["text"] = ["a"] * examples
    parts = list(split_batch(batch, size))
    assert torch.equal(torch.cat([part["x"] for part, _ in parts]), x)
    assert sum(share for _, share in parts) == pytest.approx(1)
    sizes = [len(part["x"]) for part, _ in parts]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert [len(part["text"]) for part, _ in parts] == sizes


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"grow_after": 0}, {"batch_size": 2.5}])
def test_numbers_below_one_and_fractions_are_refused(wrong: dict[str, Any]) -> None:
    model = Small(8)
    with pytest.raises(UsageError, match=r"must be (at least 1, not 0|a whole number, not 2\.5)"):
        OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), **wrong)


def test_gradients_of_a_failed_pass_are_cleared_for_every_optimizer_of_the_model() -> None:
    model = Small(8)
    plain = copy.deepcopy(model)
    first, last = (torch.optim.SGD(model.layers[i].parameters(), lr=0.1) for i in (0, 2))

    def no_room_between(_: nn.Module, __: Any, y: Tensor) -> None:
        if len(y) > 4:
            y.register_hook(run_out)  # type: ignore[no-untyped-call]

    model.layers[0].register_forward_hook(no_room_between)
    OOMGuard(model, first).backward(batch_of(8))
    first.step()
    last.step()
    for ours, theirs in zip(model.parameters(), trained(plain, batch_of(8)), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-12)


def test_a_part_too_small_for_batch_norm_is_one_clear_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Small(2).float())
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(DeviceError, match=r"no split of .*\[5, 3\].* too few for BatchNorm"):
        guard.step(tuple(part.float() for part in batch_of(5)))
    with pytest.raises(ValueError, match="Expected more than 1 value"):  # no part, but all of it
        guard.step(tuple(part.float() for part in batch_of(1)))
