"""A prober that launches a training script; see ``batchfinder.search.prober.Prober``."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from batchfinder.errors import TargetError
from batchfinder.launching.conclusion import concluded, overruled
from batchfinder.launching.launch import Launch
from batchfinder.launching.options import RunOptions, choose_kind, cpu_memory, make_order
from batchfinder.launching.record import Record, budget_left
from batchfinder.launching.size_check import (
    Honored,
    SizesSeen,
    lengths_warning,
    remark_on,
)
from batchfinder.launching.start_time import StartTime
from batchfinder.launching.template import Template, not_started
from batchfinder.launching.verdict import Verdict, judge, limiting, quoted, refute_close
from batchfinder.launching.watching import NO_PYTHON, Patience, watch, watch_epoch_end
from batchfinder.probing.place import may_expand
from batchfinder.probing.ranks.job import sharing
from batchfinder.probing.steadiness import SETTLING_STEPS, with_room
from batchfinder.probing.too_small import SizesThatRun
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import BatchSizeResult
from batchfinder.results.version import VERSION
from batchfinder.search.bounds import Bounds
from batchfinder.search.head_start import HeadStart
from batchfinder.search.plan import VARIED_ROOM, Prices
from batchfinder.search.prober import Recording
from batchfinder.simulation.recordings.guess import head_start_of


class LaunchProber:
    """Try sizes by launching a script. The first launch shows the device.

    Every launch runs the steps of a confirmation, so a size is launched once.

    Args:
        template: the command.
        options: the options of all launches.
        bounds: the sizes that the search may try.
        prices: the costs of the search's moves. Each launch corrects the cost of a launch.
        first: the size of the first launch; None for the smallest, which is next if it fails.

    Attributes:
        template: the command, with the variables that choose the device.
        launched: the probe of each launch, in order.
        saved: files that scripts saved before their last step.
        processes: the number of processes on this machine that train together.

    Raises:
        BatchFinderError: the first launch shows that no search can succeed.
    """

    def __init__(
        self,
        template: Template,
        options: RunOptions,
        bounds: Bounds,
        prices: Prices,
        *,
        first: int | None = None,
    ) -> None:
        self._options, self._bounds = options, bounds
        self._start_time = StartTime(prices)
        self._device_type, environment = choose_kind(options.device)
        self.template = replace(template, environment={**environment, **template.environment})
        self.capacity_bytes: int | None = None
        self.used_by_others_bytes: int | None = None
        self._patience = Patience(options)
        self._verdicts: dict[int, Verdict] = {}
        remark = template.remark_on_accumulation()
        self._warnings: dict[str, str] = {"accumulation": remark} if remark else {}
        self._sizes, self._lengths_differ = SizesSeen(), False
        self._most_examples: int | None = None
        self.launched, self.saved = list[Probe](), list[str]()
        self.seconds_by_part: dict[str, float] = {}
        self.recordings: dict[int, Recording] | None = {}
        self.processes, self.budget_bytes = 1, 0
        self.versions: dict[str, str] = {"batchfinder": VERSION}
        self.device = self._device_type
        if self._device_type == "cpu":
            self._limit_cpu()
        self._start(first or bounds.first)

    @property
    def room(self) -> float:
        """The fraction of the budget kept free for other lengths. CPUs are watched longer."""
        return VARIED_ROOM if self._lengths_differ and self._device_type == "cuda" else 0.0

    @property
    def is_repeatable(self) -> bool:
        return self._device_type != "cpu"

    @property
    def may_expand(self) -> bool:
        return may_expand(self.device) and "anew" not in self._warnings  # a replay has one phase

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings.values())

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        if batch_size not in self._verdicts and not self._is_beyond_data(batch_size):
            self._try(batch_size)
        if self._is_beyond_data(batch_size):
            most = self._most_examples
            note = f"a step never has more than {most} examples"
            return Probe(batch_size, Outcome.FAILED, 0, 0.0, note=note, most_examples=most)
        verdict = self._verdicts[batch_size]
        if verdict.too_small:
            raise verdict.too_small
        probe = verdict.probe
        if probe.fits:
            return probe
        # Every launch is a confirmation, so a failure in a later step refutes no probe.
        probe = replace(probe, steps=min(1, probe.steps))
        return probe if self.is_repeatable else refute_close(self._verdicts, probe)

    def settle(self, batch_size: int) -> None:
        """If no other launch shows whether the script used a size, launch a smaller one too."""
        if Honored.UNKNOWN.value in self._warnings and self._verdicts[batch_size].probe.fits:
            examples = self._sizes.examples
            # Not the half itself: all factors of it are the size's. Odd, to show a rounding.
            half = ((examples if examples > 1 else batch_size) // 2 + 1) | 1
            self._try(max(1, min(half, batch_size - 1)))
            seen = self._sizes.again(batch_size, self.processes)
            self._believe(batch_size, seen, self._sizes.examples)

    def _is_beyond_data(self, size: int) -> bool:
        return self._most_examples is not None and size > self._most_examples

    def head_start(self) -> HeadStart | None:
        """Return a head start that replays recorded launches; None for the CPU, which has none.

        Every launch shows all requests for memory that one at the answer will make.
        """
        if self._device_type == "cpu":
            return None
        return head_start_of(self, self._options.steps, may_flush=SETTLING_STEPS)

    def close(self) -> None:
        pass  # each launch ends before the next begins

    def conclude(self, result: BatchSizeResult) -> BatchSizeResult:
        """Return the search's result as that of the launches, with what to warn of."""
        launched = overruled(self.launched, result.probes)
        result = concluded(result, launched, has_all_data=self._most_examples is not None)
        return replace(result, is_divided=Honored.DIVIDED.value in self._warnings)

    def _start(self, size: int) -> None:
        """Learn from a first launch which device and how many processes train, and the budget."""
        size, verdict, record = self._launch_first(size)
        facts = next((t.facts for t in record.trainers.values()), record.out_of_memory or {})
        trains_on = str(facts.get("device", self.device))
        kind = trains_on.partition(":")[0]
        if kind != self._device_type:
            if self._options.device is not None or kind not in ("cpu", "cuda"):
                raise TargetError(
                    f"the script trains on {kind}, not on {self._device_type}. "
                    "Try the script's own option for the device"
                )
            self._device_type, self.budget_bytes = kind, 0
            if kind == "cpu":
                self._limit_cpu()
            self._start(size)
            return
        self.device, self.processes = trains_on, record.processes
        self.versions |= {k: facts[k] for k in ("python", "torch", "cuda", "hip") if facts.get(k)}
        if verdict.probe.fits and (remark := self.template.remark_on_ranks(self.processes)):
            self._warnings["ranks"] = remark
        if kind == "cpu" and self.processes > 1:
            self._limit_cpu()
            self.device = f"{self.processes} x {sharing(trains_on, self.processes)}"
        elif kind == "cuda" and "budget_bytes" in facts:
            all_facts = [trainer.facts for trainer in record.trainers.values()] or [facts]
            budgets = [budget_left(facts, self._options.headroom) for facts in all_facts]
            self.budget_bytes = min(budgets)
            least = all_facts[budgets.index(self.budget_bytes)]
            self.capacity_bytes = least["capacity_bytes"]
            self.used_by_others_bytes = least["used_by_others_bytes"]
        if verdict.within(self.budget_bytes) is not verdict:
            return  # the search launches it again, with this budget
        self._note(size, verdict, record)

    def _launch_first(self, size: int) -> tuple[int, Verdict, Record]:
        """Launch a size; if it fails, the smallest, or a larger one if the script needs more."""
        verdict, record = self._launch(size)
        if size > self._bounds.first and not verdict.probe.fits:
            size = self._bounds.first
            verdict, record = self._launch(size)
        larger = self._bounds.after(max(size, verdict.least - 1))
        if not verdict.least or larger > self._bounds.last:
            return size, verdict, record
        instead, record_instead = self._launch(larger)
        if verdict.is_error:
            if not instead.probe.fits:
                return size, verdict, record
            found = SizesThatRun(larger, (size,), verdict.probe.note)
            self._warnings["too small"] = found.note
            verdict = replace(verdict, too_small=found.error())
        self._verdicts[size] = verdict
        return larger, instead, record_instead

    def _try(self, size: int) -> None:
        verdict, record = self._launch(size)
        if not verdict.is_certain:
            verdict, record = self._launch(size)
        if verdict.failed_at_once and record.most_examples is None:
            self._launch_again()
        self._note(size, verdict, record)

    def _launch_again(self) -> None:
        """Give up if the smallest size fails now too: a file of an earlier launch is in the way."""
        fits = [size for size, verdict in self._verdicts.items() if verdict.probe.fits]
        if not fits or any(verdict.failed_at_once for verdict in self._verdicts.values()):
            return
        if (again := self._launch(min(fits))[0]).failed_at_once:
            raise again.error(trained_before=True)

    def _launch(self, size: int) -> tuple[Verdict, Record]:
        options, is_cpu = self._options, self._device_type == "cpu"
        known = self.budget_bytes or None
        cpu_budget, cuda_budget = (known, None) if is_cpu else (None, known)
        record = Record(
            size,
            steps=options.steps,
            headroom=options.headroom,
            cpu_budget_bytes=cpu_budget,
            batches_vary=self._lengths_differ,
        )
        order = make_order(options, cpu_budget, cuda_budget)
        launch = Launch(self.template, size, order, options.steps, show_output=options.show_output)
        with closing(launch):
            hung = watch(launch, record, options.steps, self._patience)
            if record.shows_epoch_end and options.mode == "train":
                watch_epoch_end(launch, record)
        self.saved += [path for path in record.saved if not launch.owns(path)]
        if launch.start_error:
            raise not_started(self.template.arguments[0], launch.start_error)
        if not record.is_alive:
            raise TargetError(f"{NO_PYTHON}{quoted(launch.output)}")
        if record.hook_failure:
            raise TargetError(f"the hook failed in the script: {record.hook_failure}")
        verdict = judge(record, launch.exit_status, launch.output, hung, options.step)
        self._patience.learn(record)
        return verdict, record

    def _note(self, size: int, verdict: Verdict, record: Record) -> None:
        """Record a launch: its start time, the batch size that it really had, and its warnings."""
        if record.lengths_differ and not self._lengths_differ:
            self._lengths_differ = True
            if self.room:
                self.budget_bytes = with_room(self.budget_bytes)
                verdict = verdict.within(self.budget_bytes)
            self._warnings["lengths"] = lengths_warning(self.room, self.template.environment)
        probe = verdict.probe
        if probe.fits:
            self._warnings.pop("validation", None)
            self._warnings |= record.remarks(self.budget_bytes)
            seen = self._sizes.note(size, record.shapes, self.processes, record.elements)
            self._believe(size, seen, self._sizes.examples)
            if seen is Honored.CAPPED:  # it shows what the size that it really had needs
                size = self._sizes.examples
                probe = replace(probe, batch_size=size, samples=size * probe.steps)
                verdict = replace(verdict, probe=probe)
            self._start_time.note(probe, record, self.budget_bytes)
            if (recording := limiting(record).recording) and self.recordings is not None:
                self.recordings[size] = recording._replace(lengths_differ=self._lengths_differ)
        elif not record.steps and record.most_examples is not None:
            self._believe(size, Honored.CAPPED, record.most_examples)
        elif verdict.is_error and not any(launched.fits for launched in self.launched):
            raise verdict.error()
        if probe.fits and verdict.ended_by_itself:
            self._warnings["short"] = (
                f"at batch size {size} the script ended by itself in step {probe.steps}, "
                "too early to show the peak of later ones. Try more epochs or more data"
            )
        self._verdicts[size] = verdict
        self.launched.append(verdict.probe)

    def _believe(self, size: int, seen: Honored, examples: int) -> None:
        """Warn, or give up, if a launch shows that the script did not use the size as given."""
        text = remark_on(seen, size, examples, self.processes, self._bounds.multiple_of)
        self._warnings.pop(Honored.UNKNOWN.value, None)
        if seen is Honored.IGNORED:
            raise TargetError(text)
        if seen is Honored.CAPPED:
            self._most_examples = examples
        if text:
            self._warnings[seen.value] = text

    def _limit_cpu(self) -> None:
        memory, self.budget_bytes = cpu_memory(self._options, self.processes)
        self.capacity_bytes = memory.capacity_bytes
        self.used_by_others_bytes = memory.used_by_others_bytes
