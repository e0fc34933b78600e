"""Steps that reach more than the model, and steps that train by themselves, as loops run them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu.models import DEVICE, LIMIT, needs_cuda, wide_model, wide_sample
from torch import Tensor, nn

from batchfinder import estimate_peak_memory, find_max_batch

pytestmark = needs_cuda

BATCH_SIZE = 512
Step = Callable[[nn.Module, Tensor], Tensor | None]


def network(width: int = 1024) -> nn.Sequential:
    layers = [nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 256)).to(DEVICE)


def adversarial() -> tuple[nn.Module, Step]:
    """Two networks, two optimizers."""
    generator, discriminator = network(), network(2048)
    optimizer = torch.optim.Adam(generator.parameters())
    its_optimizer = torch.optim.Adam(discriminator.parameters())

    def step(model: nn.Module, real: Tensor) -> None:
        fake = model(torch.randn_like(real))
        its_loss = discriminator(fake.detach()).mean() - discriminator(real).mean()
        its_optimizer.zero_grad()
        its_loss.backward()
        its_optimizer.step()
        loss = -discriminator(fake).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return generator, step


def averaged() -> tuple[nn.Module, Step]:
    """An EMA copy in a dict, and a teacher that gives the targets."""
    model, teacher = network(), network(512).eval().requires_grad_(False)
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            targets = teacher(batch)
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
        return nn.functional.mse_loss(model(batch), targets)

    return model, step


def in_lower_precision() -> tuple[nn.Module, Step]:
    """Autocast, clipped gradients and a scheduler by hand."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def step(model: nn.Module, batch: Tensor) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    return model, step


def of_features() -> tuple[nn.Module, Step]:
    """What hooks keep is compared with a teacher's, and a decorated function updates that."""
    model, teacher = network(), network().requires_grad_(False)
    features: dict[str, Tensor] = {}
    model[2].register_forward_hook(lambda _, args, output: features.update(own=output))
    teacher[2].register_forward_hook(lambda _, args, output: features.update(its=output))

    @torch.no_grad()
    def taught(batch: Tensor) -> None:
        for ours, its in zip(model.parameters(), teacher.parameters(), strict=True):
            its.lerp_(ours, 0.1)
        teacher(batch)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        taught(batch)
        output = model(batch)
        loss = nn.functional.mse_loss(features["own"], features["its"])
        return loss + nn.functional.mse_loss(output, batch)

    return model, step


def updated_in_the_backward_pass() -> tuple[nn.Module, Step]:
    """An optimizer for each parameter, run by its hook."""
    model = network()
    optimizers = {one: torch.optim.Adam([one]) for one in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for one in optimizers:
        one.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

    def step(model: nn.Module, batch: Tensor) -> None:
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]

    return model, step


class Sharpness:
    """Two passes for each step, as sharpness-aware minimization makes them."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.steps = 0

    def step(self, model: nn.Module, batch: Tensor) -> None:
        self.steps += 1
        nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            old = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=0.05)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), old, strict=True):
                parameter.copy_(value)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sharpness_aware() -> tuple[nn.Module, Step]:
    loop = Sharpness()
    return loop.model, loop.step


@pytest.mark.parametrize(
    "build",
    [
        adversarial, averaged, in_lower_precision, sharpness_aware, of_features,
        updated_in_the_backward_pass,
    ],
)  # fmt: skip
def test_a_loop_takes_the_memory_that_was_found_and_estimated(
    build: Callable[[], tuple[nn.Module, Step]],
) -> None:
    model, step = build()
    # The loop calls the step, so the step's variables end with it.
    check_peaks(model, lambda model, batch: step(model, batch), lambda: peak_of_loop(model, step))
    for parameter in model.parameters():
        # Through these, PyTorch keeps what a hook holds for ever, and other tests measure it.
        (parameter._post_accumulate_grad_hooks or {}).clear()


def test_the_variables_of_a_step_live_on_as_those_of_a_loop() -> None:
    model, teacher = network(), network(512).requires_grad_(False)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            targets = teacher(batch)
        outputs = model(batch)
        difference: Tensor = outputs - targets
        return difference.square().mean()

    def peak_of_its_lines() -> int:
        optimizer = torch.optim.AdamW(model.parameters())
        batch: Any = None
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats(DEVICE)
            batch = torch.randn(BATCH_SIZE, 256).to(DEVICE)
            with torch.no_grad():
                targets = teacher(batch)
            outputs = model(batch)
            difference = outputs - targets
            loss = difference.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated(DEVICE)

    check_peaks(model, step, peak_of_its_lines)


def check_peaks(model: nn.Module, step: Step, peak: Callable[[], int]) -> None:
    """Check that a search and an estimate have the peak of a loop."""
    estimate = estimate_peak_memory(
        model, torch.randn(2, 256), step=step, batch_size=BATCH_SIZE, gpu="h200"
    )
    result = find_max_batch(
        model, torch.randn(2, 256), step=step, device=DEVICE,
        min_batch_size=BATCH_SIZE, max_batch_size=BATCH_SIZE,
    )  # fmt: skip
    measured = peak()
    assert result.warnings == ()
    assert result.probes[-1].peak_allocated_bytes == pytest.approx(measured, rel=0.001)
    assert estimate.peak_allocated_bytes == pytest.approx(measured, rel=0.001)


def peak_of_loop(model: nn.Module, step: Step) -> int:
    """The peak of a loop that keeps a step's batch and loss into the next, as at module level."""
    optimizer = torch.optim.AdamW(model.parameters())
    batch: Any = None
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(DEVICE)
        batch = torch.randn(BATCH_SIZE, 256).to(DEVICE)
        loss = step(model, batch)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(DEVICE)


def test_what_a_step_reaches_is_moved_with_the_model_and_comes_back() -> None:
    model, teacher = network().cpu(), network().cpu().eval()
    twin = copy.deepcopy(teacher.state_dict())
    places = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        places.append(next(teacher.parameters()).device.type)
        return nn.functional.mse_loss(model(batch), teacher(batch))

    find_max_batch(model, torch.randn(2, 256), step=step, device=DEVICE, max_batch_size=4)
    assert places == []  # what a step noted is undone too
    assert all(value.device.type == "cpu" for value in teacher.state_dict().values())
    torch.testing.assert_close(teacher.state_dict(), twin, rtol=0, atol=0)
    assert not teacher.training


@pytest.mark.parametrize("at_least", [1, 4])
def test_a_kernel_that_the_device_lacks_is_no_lack_of_memory(at_least: int) -> None:
    """As those of convolutions in bf16 on a T4. Of larger sizes, a convolution got no workspace."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) >= at_least:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    asked = partial(find_max_batch, wide_model(), wide_sample(), step=step, memory_limit=LIMIT)
    if at_least == 1:
        with pytest.raises(RuntimeError, match="unable to find an engine"):
            asked()
    else:
        assert asked().batch_size == at_least - 1
