"""A plan for a global batch size, as people read and paste it."""

from __future__ import annotations

from batchfinder.reporting.plan import plan_lines
from batchfinder.results.accumulation import plan_accumulation


def test_an_exact_plan_keeps_the_learning_rate_and_can_be_pasted() -> None:
    lines = plan_lines(plan_accumulation(4096, 1041), verbose=True)
    assert lines[1] == "Keep the learning rate: the global batch size stays the same."
    assert lines[-1] == (
        "  Transformers: TrainingArguments(per_device_train_batch_size=1024, "
        "gradient_accumulation_steps=4)"
    )
    assert [line.split(":")[0].strip() for line in lines[2:]] == [
        "PyTorch",
        "Accelerate",
        "Lightning",
        "Transformers",
    ]


def test_another_global_batch_scales_the_learning_rate() -> None:
    lines = plan_lines(plan_accumulation(100, 64, world_size=8))
    assert "by 0.96 with SGD" in lines[1] or "by 1.04 with SGD" in lines[1]
