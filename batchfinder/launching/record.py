"""The reports of one launch: processes that train, the memory of each step, and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from batchfinder.launching.epoch_end import ANEW, EpochEnd
from batchfinder.launching.size_check import lengths_in
from batchfinder.probing.devices.allocator.recorded_step import in_use_after_steps
from batchfinder.probing.place import lowered
from batchfinder.probing.steadiness import SETTLING_STEPS, PeakWatch, left_behind
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import LEAK_WARNING
from batchfinder.search.prober import Recording

# If batches differ in length, a launch trains on for as long as it took to start, but not beyond
# this many steps, to see more lengths. A fine-tuning of 27 texts a batch, of which one in ten
# batches holds a text of the full length, was confirmed by 5 steps, and ran out of memory in its
# 48th, with all of the headroom. Only running out counts in these steps, not a flush.
LENGTHS_STEPS = 50


@dataclass
class TrainingProcess:
    """One process that trains.

    Attributes:
        watch: decides when its peaks are steady.
        facts: its last report.
        shapes: the shapes of its model's inputs in the last step.
        lengths_differ: True once its batches differed in more than the number of examples.
        peaks: the peak of each of its steps, in bytes.
        allocated: the most bytes that its tensors held.
        phases: the highest peak of each phase, in bytes.
        recording: what it has requested from CUDA's allocator; None if that is unknown.
        seconds: the duration of each of its steps.
        retries: how often the last step flushed the allocator's cache; 0 for the first step.
    """

    watch: PeakWatch
    facts: dict[str, Any] = field(default_factory=dict)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    lengths_differ: bool = False
    peaks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    allocated: int = 0
    phases: dict[Phase, int] = field(default_factory=dict)
    retries: int = 0
    recording: Recording | None = None

    def note(self, report: dict[str, Any]) -> None:
        """Record one more step."""
        # Where a script accumulates, no model runs between the reading after a backward pass and
        # the one after the optimizer's step.
        inputs = {tuple(shape) for shape in report["shapes"]}
        shapes, self.shapes = self.shapes, inputs or self.shapes
        if self.peaks and shapes != self.shapes:
            before, after = lengths_in(shapes), lengths_in(self.shapes)
            # A model that only some steps run, as for a penalty, changes no length.
            self.lengths_differ |= not (before <= after or after <= before)
            self.watch.expect_variation(lengths_differ=self.lengths_differ)
        self.facts = report
        # The first step may flush memory that start-up left in the cache. Where gradients are
        # accumulated, they first meet the optimizer's states in the third reading.
        is_early = not self.peaks or (len(self.peaks) == 2 and report.get("steps") == 1)
        self.retries = 0 if is_early else report["retries"]
        self.peaks.append(report["reserved"])
        if len(self.peaks) == 2 and report.get("tries_kernels"):  # in workspaces, in the first step
            self.allocated, self.phases = 0, {}
        self.seconds.append(report["seconds"])
        self.allocated = max(self.allocated, report["allocated"])
        for name, peak in report["phases"].items():
            self.phases[Phase(name)] = max(peak, self.phases.get(Phase(name), 0))
        if not (self.lengths_differ and self.watch.is_over):
            self.watch.note(report["reserved"], self.retries)

    @property
    def step_seconds(self) -> float:
        """The median duration of its steps after the first: the last of an epoch may be short."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def leaks(self) -> bool:
        """True if each step left more memory in use, as requests to CUDA's allocator show."""
        if self.recording is None or self.lengths_differ:
            return False
        return left_behind([*in_use_after_steps(self.recording)]) > 0

    @property
    def is_over(self) -> bool:
        """True once its peaks are steady, or enough steps have run."""
        return self.watch.is_over or len(self.peaks) >= self.watch.most_steps


def budget_left(facts: Mapping[str, Any], headroom: float) -> int:
    """Return the budget of a process on CUDA after its last report."""
    before = int(facts["outside_before"])
    return lowered(facts["budget_bytes"], facts.get("outside", before) - before, headroom)


class Record:
    """The reports of all processes of one launch.

    Args:
        batch_size: the batch size that the script was given.
        steps: the least number of steps in each process.
        headroom: the fraction of the memory kept free.
        cpu_budget_bytes: the budget on the CPU, in bytes; None if CUDA trains and reports its own.
        batches_vary: True if batches of earlier launches differed in length.

    Attributes:
        trainers: the processes that train, by their process id.
        shapes: the shapes of their models' inputs.
        elements: the most elements that the inputs of a step had.
        most_examples: the largest batch size for which the data set has enough examples, if a
            loader had too few; else None.
        saved: files that the script saved before its last step.
        is_alive: True once the hook has entered a process.
        out_of_memory: the first report of an out-of-memory error; None if there is none.
        raised: the first report of an error that the script did not catch; None if there is none.
        doubtful: the text of an error that may be an out-of-memory error; "" if there is none.
        hook_failure: why the hook could not watch a process; "" if it could.
        heard: the time of the last report, by ``time.monotonic()``.
        longest_silence: the longest wait for a report, in seconds.
        start_seconds: seconds from the start to the end of the first step; None before that.
        epoch_end: what followed once all steps had run.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        steps: int,
        headroom: float,
        cpu_budget_bytes: int | None,
        batches_vary: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self._least_steps, self._headroom = steps, headroom
        self._cpu_budget_bytes = cpu_budget_bytes
        self._batches_vary = batches_vary
        self.trainers: dict[int, TrainingProcess] = {}
        self._recordings: dict[int, Recording] = {}
        self.shapes: set[tuple[int, ...]] = set()
        self.elements = 0
        self.most_examples: int | None = None
        self.saved: list[str] = []
        self.is_alive = False
        self.out_of_memory: dict[str, Any] | None = None
        self.raised: dict[str, Any] | None = None
        self.doubtful = self.hook_failure = ""
        self.started = self.heard = time.monotonic()
        self.longest_silence = 0.0
        self.start_seconds: float | None = None
        self.epoch_end = EpochEnd()

    @property
    def processes(self) -> int:
        """The number of processes on this machine that train together."""
        told = [int(trainer.facts["processes"]) for trainer in self.trainers.values()]
        return max([1, len(told), *told])

    @property
    def lengths_differ(self) -> bool:
        """True if batches differed in length, or in another dimension but the first."""
        return any(trainer.lengths_differ for trainer in self.trainers.values())

    @property
    def steps(self) -> int:
        """The number of steps that every process has ended; 0 until all have ended one."""
        if len(self.trainers) < self.processes:
            return 0
        return min(len(trainer.peaks) for trainer in self.trainers.values()) if self.trainers else 0

    @property
    def is_level(self) -> bool:
        """True if every process has ended the same number of steps."""
        return len({len(trainer.peaks) for trainer in self.trainers.values()}) == 1

    @property
    def is_over(self) -> bool:
        """True once the launch has shown all the steps that it can."""
        if self.out_of_memory or self.hook_failure:
            return True
        is_over = self.steps > 0 and all(trainer.is_over for trainer in self.trainers.values())
        return is_over and not self._sees_more_lengths

    @property
    def _sees_more_lengths(self) -> bool:
        """True while more steps are worth their time, because their batches differ in length."""
        if not self.lengths_differ or self._objects or self.steps >= LENGTHS_STEPS:
            return False
        spent = max(sum(trainer.seconds[1:]) for trainer in self.trainers.values())
        return spent < (self.start_seconds or 0.0)

    @property
    def _objects(self) -> bool:
        return any(trainer.watch.objection() for trainer in self.trainers.values())

    def remarks(self, budget_bytes: int) -> dict[str, str]:
        """Return what to warn of after a launch that fits, by kind."""
        leaks = any(trainer.leaks for trainer in self.trainers.values())
        found = {
            "validation": self.epoch_end.remark(budget_bytes, (self.raised or {}).get("error", "")),
            "leak": LEAK_WARNING if leaks else "",
            "anew": ANEW if self.epoch_end.trains_anew else "",
        }
        return {kind: text for kind, text in found.items() if text}

    @property
    def shows_epoch_end(self) -> bool:
        """True if its steps fit. If one among them evaluated a model, it may be a teacher."""
        ended = self.out_of_memory or self.hook_failure or self._objects
        return self.is_over and not ended

    def add(self, report: dict[str, Any]) -> None:
        """Record one report."""
        now = time.monotonic()
        self.longest_silence = max(self.longest_silence, now - self.heard)
        self.heard, self.is_alive = now, True
        event = report["event"]
        if event == "step":
            self._add_step(report)
        elif event == "recording":  # comes before the report of the step that ends it
            fields = {name: report[name] for name in Recording._fields if name in report}
            self._recordings[report["pid"]] = Recording(**fields)
            if trainer := self.trainers.get(report["pid"]):
                trainer.recording = self._recordings[report["pid"]]
        elif event == "out_of_memory":
            text = self.epoch_end.place_of(report) + report["text"]
            self.out_of_memory = self.out_of_memory or {**report, "text": text}
        elif event == "raised":
            self.raised = self.raised or report
        elif event == "doubtful":
            self.doubtful = report["text"]
        elif event == "too_few":
            self.most_examples = self.batch_size * report["examples"] // report["batch_size"]
        elif event == "saved":
            self.saved.append(report["path"])
        elif event == "hook_failed":
            self.hook_failure = report["text"]
        else:
            self.epoch_end.add(report)

    def _add_step(self, report: dict[str, Any]) -> None:
        if self.start_seconds is None:
            self.start_seconds = self.heard - self.started
        self.shapes |= {tuple(shape) for shape in report["shapes"]}
        self.elements = max(self.elements, report["elements"])
        trainer = self.trainers.get(report["pid"])
        if trainer is None:
            budget = report.get("budget_bytes") or self._cpu_budget_bytes or report["reserved"]
            watch = PeakWatch(
                budget,
                least_steps=self._least_steps,
                peaks_wander=report["device"] == "cpu",
                headroom_bytes=budget * self._headroom / (1 - self._headroom),
                batches_vary=self._batches_vary,
                may_flush=SETTLING_STEPS,
            )
            trainer = self.trainers[report["pid"]] = TrainingProcess(watch)
        trainer.note(report)
        trainer.recording = self._recordings.get(report["pid"])
