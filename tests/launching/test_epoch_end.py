"""What reports of a launch say about the end of an epoch."""

from __future__ import annotations

import pytest

from batchfinder.launching.epoch_end import EpochEnd
from batchfinder.launching.record import Record

MIB = 1024**2


def validated(pid: int = 1) -> dict[str, object]:
    facts = {"has_trained": True, "is_after": True, "allocated": MIB, "reserved": 2 * MIB}
    return {"event": "validated", "pid": pid, **facts}


def step_after(pid: int = 1) -> dict[str, object]:
    return {"event": "step_after", "pid": pid, "unused_loaders": 0, "held": MIB}


def batch_after(given: int, held: int, batches: float | None) -> dict[str, object]:
    facts = {"given": given, "held": held, "batches": batches, "passes": given, "allocated": held}
    return {"event": "batch_after", "pid": 1, **facts}


def test_it_is_over_once_every_process_has_trained_on() -> None:
    end = EpochEnd()
    for report in (step_after(), validated(), step_after(), validated(2)):
        end.add(report)
    assert not end.is_over(2)
    end.add(step_after(2))
    assert end.is_over(2)


def test_without_a_validation_it_is_over_after_three_steps() -> None:
    end = EpochEnd()
    for _ in range(2):
        end.add(step_after())
    assert not end.is_over(1)
    end.add(step_after())
    assert end.is_over(1)
    assert end.remark(MIB, "") == ""


def test_what_follows_the_steps_counts_in_the_peaks_of_the_launch() -> None:
    end = EpochEnd(has_begun=True)
    end.add(validated())
    end.add({**step_after(), "allocated": 3 * MIB, "reserved": 4 * MIB})
    assert (end.validation_peak_bytes, end.allocated_bytes, end.reserved_bytes) == (
        MIB,
        3 * MIB,
        4 * MIB,
    )


def test_it_is_over_before_a_file_is_written() -> None:
    end = EpochEnd()
    end.add({"event": "would_write", "pid": 1})
    assert end.is_over(2)


@pytest.mark.parametrize(
    ("has_begun", "error", "warns"),
    [
        (True, "KeyError: 'labels'", True),
        (False, "KeyError: 'labels'", False),  # the launch failed, and its verdict says why
        (True, "StopIteration", False),  # that the hook raised, in a loop of `next(batches)`
    ],
)
def test_an_error_after_the_steps_is_named(has_begun: bool, error: str, warns: bool) -> None:
    record = Record(8, steps=3, headroom=0.05, cpu_budget_bytes=None)
    record.epoch_end.has_begun = has_begun
    record.add({"event": "raised", "pid": 1, "error": error, "traceback": "", "has_optimizer": 1})
    assert any(f"failed: {error}" in text for text in record.remarks(MIB).values()) is warns


@pytest.mark.parametrize(("unused", "warns"), [(1, True), (0, False)])
def test_a_validation_that_did_not_come_in_time_is_named(unused: int, warns: bool) -> None:
    end = EpochEnd()
    end.add({"event": "epoch_ended", "pid": 1, "unused_loaders": 1})
    held = {"given": 0, "held": MIB, "batches": 9}
    end.add({"event": "batch_after", "pid": 1, "unused_loaders": unused, **held})
    assert end.remark(MIB, "")
    end.add({**step_after(), "unused_loaders": unused})
    assert bool(end.remark(MIB, "")) is warns


@pytest.mark.parametrize(("batches", "warns"), [(100, True), (50, False), (None, False)])
def test_a_validation_that_keeps_its_outputs_is_said_to_outgrow_the_device(
    batches: int | None, warns: bool
) -> None:
    end = EpochEnd()
    end.add(validated())
    for given in range(4):
        held = (30 + given) * MIB
        end.add(batch_after(given, held, batches))
    assert (
        end.remark(80 * MIB, "").startswith("each batch of the validation leaves 1.0 MiB") is warns
    )


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("batches", "warns"), [(4.5, True), (3.4, False)])
def test_a_validation_that_joins_its_outputs_needs_them_twice(
    ahead: int, batches: float, warns: bool
) -> None:
    end = EpochEnd()
    end.add(validated())
    for given in range(4):
        passed = max(0, given - ahead)  # Accelerate draws a batch ahead
        held = passed * 10 * MIB
        end.add({**batch_after(given, held, batches), "passes": passed, "allocated": 2 * held})
    assert bool(end.remark(80 * MIB, "")) is warns


def test_memory_that_does_not_grow_each_time_is_no_warning() -> None:
    end = EpochEnd()
    end.add(validated())
    for given, held in enumerate((10, 30, 30, 40)):
        end.add(batch_after(given, held * MIB, 10**6))
    assert end.remark(80 * MIB, "") == ""


@pytest.mark.parametrize(("budget_bytes", "warns"), [(4 * MIB, False), (2 * MIB, True)])
def test_a_model_evaluated_before_its_first_step_must_fit_beside_the_states(
    budget_bytes: int, warns: bool
) -> None:
    end = EpochEnd()
    end.add({**validated(), "has_trained": False, "is_after": False, "allocated": 2 * MIB})
    end.add(step_after())
    assert end.remark(budget_bytes, "").startswith("the script seems to have a validation") is warns
