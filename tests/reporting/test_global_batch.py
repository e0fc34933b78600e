"""A plan for a global batch size, as people read and paste it."""

from __future__ import annotations

import math

from batchfinder.reporting.global_batch import noise_line, plan_lines
from batchfinder.results.accumulation import plan_accumulation
from batchfinder.results.noise_scale import NoiseScale


def test_an_exact_plan_keeps_the_learning_rate_and_can_be_pasted() -> None:
    lines = plan_lines(plan_accumulation(4096, 1041), verbose=True)
    assert lines[1] == "Keep the learning rate: the global batch size stays the same."
    assert lines[-1] == (
        "    TrainingArguments(per_device_train_batch_size=1024, gradient_accumulation_steps=4)"
    )
    to_paste = [line for line in lines[2:] if line.startswith("    ")]
    names = [line for line in lines[2:] if line not in to_paste]
    assert names == ["  PyTorch:", "  Accelerate:", "  Lightning:", "  Transformers:"]
    for line in to_paste:
        compile(line.strip(), "pasted", "exec")


def test_a_plan_without_accumulation_divides_no_loss() -> None:
    lines = plan_lines(plan_accumulation(64, 64), verbose=True)
    assert lines[2:5] == ["  PyTorch:", "    DataLoader(..., batch_size=64)", "  Accelerate:"]


def test_another_global_batch_scales_the_learning_rate() -> None:
    lines = plan_lines(plan_accumulation(100, 64, world_size=8))
    assert "by 0.96 with SGD" in lines[1] or "by 1.04 with SGD" in lines[1]


def test_the_noise_scale_has_its_interval_and_its_limits() -> None:
    drawn = "at the weights the target returns, by 8 draws of 8 and 128 examples"
    limits = "It grows during training (arXiv:1812.06162)."
    assert noise_line(NoiseScale(150.2, 124.0, 189.0, 8, 128, 8)) == (
        "Noise scale: more than about 150 examples per optimizer step stop helping (124 to 189), "
        f"{drawn}. {limits}"
    )
    unbounded = NoiseScale(900.0, 300.0, math.inf, 8, 128, 8)
    assert "(300 or more)" in noise_line(unbounded)
    unknown = NoiseScale(math.inf, 2000.0, math.inf, 8, 128, 8)
    assert noise_line(unknown) == (
        f"Noise scale: above 2,000 examples per optimizer step, {drawn}. {limits}"
    )
