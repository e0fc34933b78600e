"""One verdict out of what each rank saw: the worst, whoever it comes from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.errors import (
    BatchFinderError,
    BatchTooSmallError,
    RankError,
    StepError,
    UserCodeError,
    WorkerDiedError,
    WorkerGarbledError,
    WorkerHungError,
    WorkerReleasedError,
)
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.notes import Notes
from batchfinder.probing.place import Place
from batchfinder.probing.ranks.consensus import RankedProber, check_none_raised, consensus
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe

GOOD = Outcome.FITS
CLOSED_BY_PEER = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:54150: Connection reset by peer"
)


def attempt(outcome: Outcome = GOOD, peak: int = 10, *, is_believed: bool = True) -> Attempt:
    peaks = {Phase.FORWARD_BACKWARD: peak} if outcome is GOOD else {}
    probe = Probe(
        8, outcome, 1, 0.5, 8, peak / 10, phase_peak_bytes=peaks, note="" if peaks else "why"
    )
    return Attempt(probe, is_believed, is_reusable=outcome is GOOD)


def lost() -> Attempt:
    return Attempt.of_error(WorkerReleasedError())


def judged(*attempts: Attempt, budgets: tuple[int, ...] = ()) -> Attempt:
    return consensus(attempts, budgets or (100,) * len(attempts), 8, confirm=False)


@given(st.lists(st.sampled_from(Outcome), min_size=1, max_size=9))
def test_the_worst_outcome_decides(outcomes: list[Outcome]) -> None:
    common = judged(*map(attempt, outcomes))
    order = [Outcome.FITS, Outcome.OOM, Outcome.FAILED]
    assert common.probe.outcome is max(outcomes, key=order.index)
    assert common.probe.limiting_rank is not None
    assert outcomes[common.probe.limiting_rank] is common.probe.outcome
    assert common.is_reusable == (set(outcomes) == {Outcome.FITS})


def test_of_those_that_fit_the_one_with_the_least_room_limits() -> None:
    probe = judged(
        attempt(peak=30), attempt(peak=20), attempt(peak=25), budgets=(100, 80, 90)
    ).probe
    assert probe.limiting_rank == 1
    assert probe.phase_peak_bytes == {Phase.FORWARD_BACKWARD: 20}
    assert probe.rank_peak_bytes == (30, 20, 25)
    assert probe.step_seconds == 3.0


def test_of_those_that_run_out_the_one_with_the_least_room_limits() -> None:
    fuller = attempt(Outcome.OOM)
    fuller = replace(fuller, probe=replace(fuller.probe, peak_allocated_bytes=90))
    assert judged(attempt(Outcome.OOM), fuller).probe.limiting_rank == 1


def test_ranks_that_were_cut_off_have_no_say() -> None:
    common = judged(lost(), attempt(Outcome.OOM), lost())
    assert (common.probe.outcome, common.probe.note) == (Outcome.OOM, "rank 1: why")
    assert common.probe.rank_peak_bytes == (None, None, None)
    assert common.is_believed


def test_a_certain_failure_makes_an_uncertain_one_certain() -> None:
    oom = attempt(Outcome.OOM, is_believed=False)
    assert not judged(attempt(), oom).is_believed
    assert judged(oom, attempt(Outcome.OOM)).is_believed
    assert not judged(attempt(Outcome.OOM), attempt(Outcome.FAILED, is_believed=False)).is_believed


def test_ranks_that_lose_each_other_for_no_reason_are_to_try_again() -> None:
    common = judged(Attempt.of_error(UserCodeError(CLOSED_BY_PEER)), attempt())
    assert (common.probe.outcome, common.is_believed) == (Outcome.FAILED, False)
    assert common.probe.note == f"the ranks lost each other: {CLOSED_BY_PEER}"


@pytest.mark.parametrize(
    "text",
    [
        CLOSED_BY_PEER,
        "RuntimeError: Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] no",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:3690, remote process exited or "
        "there was a network error, NCCL version 2.27.5",
    ],
)
def test_what_another_ranks_end_looks_like(text: str) -> None:
    assert Attempt.of_error(UserCodeError(text)).lost == text


@pytest.mark.parametrize(
    "text", ["ValueError: no such width", "RuntimeError: peer review was closed by the author"]
)
def test_what_is_the_users_own(text: str) -> None:
    assert not Attempt.of_error(UserCodeError(text)).lost


def test_the_least_budget_that_the_first_steps_left_a_rank_counts() -> None:
    prober = RankedProber()
    prober.notes, prober._budgets = Notes(), [100, 90]
    prober.settle(Place("2 x paper", 1000, 0, 90, is_repeatable=True, versions={}))
    said = [replace(attempt(), budget_bytes=each).to_dict() for each in (80, None)]
    prober._consensus(json.loads(json.dumps(said)), 8, confirm=False)
    assert (prober._budgets, prober.budget_bytes) == ([80, 90], 80)


def test_an_error_of_one_rank_is_named_and_one_of_all_is_not() -> None:
    bad = Attempt.of_error(StepError("no loss"))
    with pytest.raises(StepError, match=r"^on rank 1: no loss$"):
        check_none_raised([None, bad])
    with pytest.raises(StepError, match=r"^no loss$"):
        check_none_raised([Attempt.of_error(StepError("no loss")) for _ in range(2)])


@pytest.mark.parametrize(
    "error",
    [
        UserCodeError("ValueError: no", "Traceback ..."),
        BatchTooSmallError("2"),
        RankError("gone"),
        WorkerGarbledError("no JSON"),
        WorkerHungError(8),
        WorkerDiedError(-9, ""),
    ],
)
def test_attempts_go_through_json(error: BatchFinderError) -> None:
    for before in (attempt(), attempt(Outcome.OOM), lost(), Attempt.of_error(error)):
        after = Attempt.from_dict(json.loads(json.dumps(before.to_dict())))
        assert replace(after, error=None) == replace(before, error=None)
        assert (type(after.error), str(after.error)) == (type(before.error), str(before.error))
        assert getattr(after.error, "user_traceback", "") == getattr(
            before.error, "user_traceback", ""
        )
