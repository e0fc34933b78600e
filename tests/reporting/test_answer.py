from __future__ import annotations

from dataclasses import replace

import pytest
from reporting.fake_search import OOM_NOTE, PROBES, RESULT, result

from batchfinder.reporting.advice import levers
from batchfinder.reporting.answer import details, headline
from batchfinder.results.memory_model import MemoryModel, Phase, PhaseModel
from batchfinder.results.probe import IN_VALIDATION, Outcome, Probe
from batchfinder.results.result import BatchSizeResult, NextFailure, Status
from batchfinder.units import GIB, MIB


def model(fixed: float, per_sample: float, worst_residual: float = 0.0) -> MemoryModel:
    return MemoryModel({Phase.FORWARD_BACKWARD: PhaseModel(fixed, per_sample, worst_residual)})


def nothing_fits(
    reason: str, allocated: int | None = None, phases: dict[Phase, int] | None = None
) -> BatchSizeResult:
    probe = Probe(
        1,
        Outcome.OOM,
        steps=1,
        seconds=0.4,
        peak_allocated_bytes=allocated,
        phase_peak_bytes=phases or {},
        note=reason,
    )
    return result(
        batch_size=0,
        status=Status.NOTHING_FITS,
        budget_bytes=8 * GIB,
        probes=(probe,),
        memory_model=None,
        next_failure=NextFailure(1, Outcome.OOM, reason),
        confirmed_steps=0,
        seconds=0.4,
    )


def test_found() -> None:
    assert headline(RESULT) == [
        "Max batch size 1042",
        "2.9 GiB fixed + 126.8 MiB per sample",
        "5 probes, 8.42 s",
    ]
    assert details(RESULT) == ["Batch size 1043 runs out of memory."]


def test_thrashing_is_called_slow() -> None:
    reason = "runs only by flushing the allocator's cache after its first steps"
    probe = Probe(1043, Outcome.OOM, steps=2, seconds=9.0, allocation_retries=3, note=reason)
    failure = NextFailure(1043, Outcome.OOM, reason)
    found = result(probes=(*PROBES, probe), next_failure=failure)
    assert details(found) == [f"Batch size 1043 {reason}, which is slow."]


def test_steps_that_fit_but_not_for_longer_are_not_called_slow() -> None:
    reason = "its steps fit, but run out of memory when replayed in the allocator for longer"
    probe = Probe(1043, Outcome.OOM, steps=3, seconds=9.0, allocation_retries=2, note=reason)
    found = result(probes=(*PROBES, probe), next_failure=NextFailure(1043, Outcome.OOM, reason))
    assert details(found) == [f"Batch size 1043 runs out of memory: {reason}"]


def test_capped_says_that_nothing_larger_was_tried() -> None:
    capped = result(status=Status.CAPPED, next_failure=None)
    assert headline(capped)[0] == "Max batch size 1042"
    assert details(capped) == ["It is the largest size allowed; nothing larger was tried."]


def test_the_limiting_rank_is_named_if_there_is_one() -> None:
    probe = Probe(
        8,
        Outcome.FITS,
        steps=3,
        seconds=1.0,
        confirmed=True,
        rank_peak_bytes=(3 * GIB, 2 * GIB),
        limiting_rank=1,
    )
    failed = Probe(9, Outcome.OOM, steps=1, seconds=1.0, note="out of memory", limiting_rank=1)
    peaks = "Peak memory by rank: 3.0 GiB, 2.0 GiB. Each rank has this batch size: 16 in all."
    capped = result(batch_size=8, status=Status.CAPPED, probes=(probe,), next_failure=None)
    stopped = replace(capped, status=Status.INTERRUPTED)
    assert details(capped)[-1] == details(stopped)[-1] == f"2 ranks. {peaks}"
    failure = NextFailure(9, Outcome.OOM, "out of memory")
    found = result(batch_size=8, probes=(probe, failed), next_failure=failure)
    assert details(found)[-1] == f"Rank 1 of 2 failed first at batch size 9. {peaks}"
    shared = details(replace(found, is_divided=True))[-1]
    assert shared.endswith("3.0 GiB, 2.0 GiB. They share this batch size: each has 4.")


@pytest.mark.parametrize(
    ("status", "batch_size", "steps", "verdict"),
    [
        (Status.INTERRUPTED, 512, 0, "Stopped. Largest size that ran: 512 (not confirmed)"),
        (Status.INTERRUPTED, 0, 0, "Stopped. No batch size ran"),
        (Status.FAILED, 512, 0, "Stopped by an error. Largest size that ran: 512 (not confirmed)"),
        (
            Status.FAILED,
            512,
            3,
            "Stopped by an error. Largest size that ran: 512 (confirmed by 3 steps)",
        ),
        (Status.FAILED, 0, 0, "Stopped by an error. No batch size ran"),
    ],
)
def test_stopped_early(status: Status, batch_size: int, steps: int, verdict: str) -> None:
    stopped = result(status=status, batch_size=batch_size, confirmed_steps=steps)
    assert headline(stopped)[0] == verdict


def test_stopped_before_the_first_probe_ended() -> None:
    stopped = result(
        status=Status.INTERRUPTED, batch_size=0, probes=(), memory_model=None, next_failure=None
    )
    assert headline(stopped) == ["Stopped. No batch size ran", "0 probes, 8.42 s"]
    assert details(stopped) == []


def test_nothing_fits_says_how_much_is_missing_and_what_to_try() -> None:
    nothing = nothing_fits(OOM_NOTE, allocated=7 * GIB)
    assert headline(nothing) == [
        "Nothing fits: batch size 1 needs more than 8.0 GiB",
        "1 probe, 400 ms",
    ]
    assert details(nothing) == [
        "It needs at least 204.8 MiB more than the budget. It held 7.0 GiB and requested 1.2 GiB "
        "more.",
        levers(1),
    ]


def test_nothing_fits_uses_phase_peaks_without_allocated_bytes() -> None:
    nothing = nothing_fits(OOM_NOTE, phases={Phase.FORWARD_BACKWARD: 8 * GIB})
    assert details(nothing)[0].startswith("It needs at least 1.2 GiB more than the budget")


def test_nothing_fits_because_of_fragmentation_claims_no_shortage() -> None:
    assert details(nothing_fits(OOM_NOTE, allocated=6 * GIB)) == [
        "It held 6.0 GiB and requested 1.2 GiB more.",
        levers(1),
    ]


@pytest.mark.parametrize(
    ("reason", "lines"),
    [
        ("killed by SIGKILL", ["Why: killed by SIGKILL", levers(1)]),
        (OOM_NOTE, [f"Why: {OOM_NOTE}", levers(1)]),
        ("out of memory", [levers(1)]),
    ],
)
def test_nothing_fits_without_readings(reason: str, lines: list[str]) -> None:
    assert details(nothing_fits(reason)) == lines


def test_the_levers_are_named() -> None:
    for lever in ("--precision", "--optimizer", "checkpointing", "--memory-limit"):
        assert lever in levers(1)
    assert "your script's options" in levers(1)  # `run` has no option for precision or optimizer
    # Below a batch of one example there is nothing to accumulate.
    assert "accumulation" in levers(2)
    assert "accumulation" not in levers(1)


def test_a_validation_that_does_not_fit_needs_smaller_batches() -> None:
    nothing = replace(nothing_fits(f"{IN_VALIDATION}{OOM_NOTE}"), eval_batch_size=512)
    assert details(nothing) == [
        "Its validation, with batches of 512, runs out of memory. "
        "Try a smaller one (`find --mode eval` finds the largest)."
    ]
    (trainers,) = details(nothing_fits(f"{IN_VALIDATION}{OOM_NOTE}"))
    assert "eval_accumulation_steps=1" in trainers
    assert headline(nothing)[0].startswith("Nothing fits: batch size 1 with its validation needs")


@pytest.mark.parametrize(
    ("fitted", "formula"),
    [
        (model(3 * GIB, 2 * MIB), "3.0 GiB fixed + 2.0 MiB per sample"),
        (model(3 * GIB, 0), "3.0 GiB at any batch size"),
        (model(-GIB, 2 * MIB), "2.0 MiB per sample"),
        (model(3 * GIB, 2 * MIB, 0.2), "roughly 3.0 GiB fixed + 2.0 MiB per sample"),
    ],
)
def test_the_memory_model_in_words(fitted: MemoryModel, formula: str) -> None:
    assert headline(result(memory_model=fitted))[1] == formula


def test_a_nonlinear_model_comes_with_a_caution() -> None:
    bent = result(memory_model=model(3 * GIB, 2 * MIB, 0.123))
    assert details(bent, verbose=True)[1] == (
        "Note: memory does not grow linearly here (readings are up to 12% off the line). Search "
        "again for another limit."
    )
    assert len(details(bent)) == 1


@pytest.mark.parametrize(
    ("outcome", "reason", "verbose", "line"),
    [
        (Outcome.OOM, "out of memory", True, "Batch size 1043 runs out of memory."),
        (Outcome.OOM, OOM_NOTE, False, "Batch size 1043 runs out of memory."),
        (Outcome.OOM, OOM_NOTE, True, f"Batch size 1043 runs out of memory: {OOM_NOTE}"),
        (
            Outcome.OOM,
            "memory still grew after 10 steps",
            False,
            "Batch size 1043 runs out of memory: memory still grew after 10 steps",
        ),
        (
            Outcome.FAILED,
            "killed by\nSIGABRT",
            False,
            "Batch size 1043 failed for a reason other than memory: killed by SIGABRT",
        ),
    ],
)
def test_the_next_failure_and_why(outcome: Outcome, reason: str, verbose: bool, line: str) -> None:
    failed = result(next_failure=NextFailure(1043, outcome, reason))
    assert details(failed, verbose=verbose)[0] == line


def test_memory_in_pieces_is_named() -> None:
    note = (
        "CUDA out of memory. Tried to allocate 5.75 GiB. GPU 0 has a total capacity of 24.00 GiB "
        "of which 6.23 GiB is free. Of the allocated memory 11.75 GiB is allocated by PyTorch, "
        "with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 5.50 GiB is reserved "
        "by PyTorch but unallocated."
    )
    budgets = {22 * GIB: ": tensors held 11.8 GiB, and 5.5 GiB more was", 16 * GIB: "."}
    for budget_bytes, why in budgets.items():
        failure = NextFailure(1043, Outcome.OOM, note)
        (line,) = details(result(next_failure=failure, budget_bytes=budget_bytes))
        assert line.startswith(f"Batch size 1043 runs out of memory{why}")


def test_the_accumulation_plan_is_added() -> None:
    assert details(RESULT, RESULT.accumulation_plan(4096)) == [
        "Batch size 1043 runs out of memory.",
        "Global batch 4096 = 1024 per device x 4 accumulation steps",
    ]


def test_verbose_adds_the_cost() -> None:
    last = details(RESULT, verbose=True)[-1]
    assert last == "The search cost as much as 5.0 steps at the size found."


def test_a_validation_batch_size_says_what_it_holds_for() -> None:
    told = " ".join(details(result(mode="eval")))
    assert "It holds after small training steps" in told
    assert f"find --eval-batch-size {RESULT.batch_size}." in told
    assert "small training steps" not in " ".join(details(result(mode="inference")))
