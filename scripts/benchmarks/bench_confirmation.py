"""Benchmark of the confirmation: whether the sizes it lets pass on the CPU are those that go on.

    python scripts/benchmarks/bench_confirmation.py  # about 20 minutes on one core
    python scripts/benchmarks/bench_confirmation.py --replay  # with recorded peaks; seconds

Records the peak of every step of trainings without a limit, each size in several processes. Under
sixty limits the rule then sees the first steps of one: where it accepts the size, every step of
another one must stay within the limit, as the user trains in another process too. Writes
scripts/results/confirmation_cpu.json, and ends with a table of the rule as it is and of ones that
watch for fewer or more steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

from parts.case import RESULTS, ROOT, markdown_table, save

from batchfinder.probing import steadiness
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.probing.devices.device import Peaks
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.session import ProbeSession
from batchfinder.training.loading import load_setup
from batchfinder.training.sample import BatchMaker
from batchfinder.units import GIB, MIB

RESULT_FILE = RESULTS / "confirmation_cpu.json"
STEPS = 40
PROCESSES = 2
NO_LIMIT = 20 * GIB
SIZES = {
    "vit": (120, 340, 772),
    "gpt": (150, 330),
    "mlp": (300, 600, 1900),
    "lstm": (1080,),
    "unet": (100,),
    "resnet": (770,),
}

# The limits that are judged: the highest peak of the training takes from 80 to 109.5 % of them.
SHARES = [percent / 1000 for percent in range(800, 1100, 5)]
HEADROOMS = (0.05, 0.0)
CONFIRM_STEPS = 3
MOST_STEPS = (8, 10, 12, 14, 20)


class RecordingDevice(CpuDevice):
    """A CPU that keeps the highest peak of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.of_steps: list[int] = []
        self._highest = 0

    def peaks(self) -> Peaks:
        """As the CPU's, and noted."""
        peaks = super().peaks()
        self._highest = max(self._highest, peaks.reserved_bytes)
        return peaks

    def end_step(self) -> None:
        """Begin with the next step."""
        self.of_steps.append(self._highest)
        self._highest = 0


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a rule on all recordings under all limits.

    Attributes:
        headroom: the share of the limit that the budget leaves free.
        most_steps: the most steps that the rule watches.
        judged: the number of trainings that it judged.
        accepted: the number that it let pass.
        died: the accepted ones whose training needed more than the limit.
        refused_needlessly: the refused ones whose training stays within the budget.
        steps_of_accepted: the mean number of steps that it watched of the accepted ones.
        steps_of_refused: the mean number of steps that it watched of the refused ones.
    """

    headroom: float
    most_steps: int
    judged: int
    accepted: int
    died: int
    refused_needlessly: int
    steps_of_accepted: float
    steps_of_refused: float


def main() -> None:
    """Record, unless told not to, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replay", action="store_true", help="judge what was recorded before")
    if parser.parse_args().replay:
        results = json.loads(RESULT_FILE.read_text())
    else:
        cases = [(family, size) for family, sizes in SIZES.items() for size in sizes] * PROCESSES
        # Each in a process of its own, with a heap that nothing has used before.
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            recordings = pool.starmap(record, cases, chunksize=1)
        results = {"versions": versions(), "recordings": recordings}
    pairs = pairs_of_processes(results["recordings"])
    verdicts = [
        verdicts_of(pairs, headroom, most_steps)
        for headroom in HEADROOMS
        for most_steps in MOST_STEPS
    ]
    save(RESULT_FILE, results | {"rules": [asdict(verdict) for verdict in verdicts]})
    rows = [list(map(str, asdict(verdict).values())) for verdict in verdicts]
    header = [name.replace("_", " ") for name in asdict(verdicts[0])]
    print(markdown_table(header, rows))


def record(family: str, batch_size: int) -> dict[str, Any]:
    """The peaks of a training's first steps, in MiB."""
    target = str(ROOT / f"scripts/examples/train_{family}.py:build_model")
    setup, _ = load_setup(target, {}, sample=None, input_spec=None, optimizer=None)
    device = RecordingDevice()
    session = ProbeSession(
        setup,
        BatchMaker(setup.sample, make_batch=setup.make_batch),
        device,
        NO_LIMIT,
        ProbeOptions(device="cpu", confirm_steps=STEPS),
        on_step=device.end_step,
    )
    with device.limited_to(NO_LIMIT):
        session.probe(batch_size, confirm=True)
    peaks = [round(peak / MIB) for peak in device.of_steps]
    print(family, batch_size, *peaks, flush=True)
    return {"family": family, "batch_size": batch_size, "peaks_mib": peaks}


def pairs_of_processes(
    recordings: Sequence[Mapping[str, Any]],
) -> list[tuple[list[int], list[int]]]:
    """The peaks of each two processes that trained the same, in bytes, in both orders."""
    of_case = defaultdict(list)
    for row in recordings:
        peaks = [MIB * peak for peak in row["peaks_mib"]]
        of_case[row["family"], row["batch_size"]].append(peaks)
    return [pair for processes in of_case.values() for pair in permutations(processes, 2)]


def verdicts_of(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], headroom: float, most_steps: int
) -> Verdicts:
    """Judge every recording under each limit by a rule that watches ``most_steps``.

    Args:
        pairs: the peaks of the process that confirms, and of the one that trains.
        headroom: the share of the limit that the budget leaves free.
        most_steps: that the rule watches.
    """
    accepted = died = needless = steps = all_steps = 0
    for peaks, of_training in pairs:
        for share in SHARES:
            limit = max(of_training) / share
            budget = int((1 - headroom) * limit)
            watched, passes = confirm(peaks, budget, limit - budget, most_steps)
            accepted += passes
            steps += watched * passes
            all_steps += watched
            died += passes and max(of_training) > limit
            needless += not passes and max(of_training) <= budget
    judged = len(pairs) * len(SHARES)
    of_accepted = round(steps / accepted, 2)
    of_refused = round((all_steps - steps) / (judged - accepted), 2)
    return Verdicts(headroom, most_steps, judged, accepted, died, needless, of_accepted, of_refused)


def confirm(
    peaks: Sequence[int], budget: int, headroom_bytes: float, most_steps: int
) -> tuple[int, bool]:
    """How many steps a confirmation watches, and whether it lets the size pass."""
    steadiness.MAX_WANDERING_STEPS = most_steps
    watch = steadiness.PeakWatch(
        budget, least_steps=CONFIRM_STEPS, peaks_wander=True, headroom_bytes=headroom_bytes
    )
    for watched, peak in enumerate(peaks, 1):
        if peak > budget:
            return watched, False
        watch.note(peak)
        if watch.is_over or watched == watch.most_steps:
            return watched, not watch.objection()
    raise AssertionError("a recording is shorter than a confirmation")


if __name__ == "__main__":
    main()
