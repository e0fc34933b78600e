"""Judge an ended launch: did its batch size fit?"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

from batchfinder.errors import BatchTooSmallError, UserCodeError
from batchfinder.launching.host_memory import HOST, shortage_in
from batchfinder.launching.record import Record, TrainingProcess
from batchfinder.probing.devices.oom import classify_text
from batchfinder.probing.devices.oom_table import Tier
from batchfinder.probing.too_small import NEEDS_MORE_THAN_ONE, too_small
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import VARIED_NOTE, Outcome, Probe

# What torchrun and torch.multiprocessing print when a rank was killed.
_KILLED = re.compile(r"exitcode *: -9\b|terminated with signal SIGKILL")
_SIGKILL = -9

# What says that one example is too few: a layer, TRL's KTOTrainer, and Stable-Baselines3's PPO.
_TOO_FEW = (NEEDS_MORE_THAN_ONE, "batch size must be > 1", "`batch_size` must be greater than 1")

# A script that raises in training with one example runs with as many as this, if the number is the
# reason: the five best of its predictions, or examples beside each other, need more than one.
SEVERAL = 8

# On the CPU, two sizes that differ by less than this share cannot be distinguished: the peaks of a
# Transformer and of an MLP were 1 % and 5 % off the line through other launches. So if one of them
# fails, both do. An answer 0.3 % below a failure ran out of memory in one of four trainings.
CLOSE = 0.02

# The number by which a script wants to divide the size, as that of TRL's num_generations.
_DIVISOR = re.compile(r"divisible by[^\d\n]*(\d+)")

# LightningCLI without a logger, for example, overwrites no config.yaml of an earlier run.
_IN_THE_WAY = (
    "{scratch} for its output folder: an earlier launch trained at this size, and left something "
    "that is in the way"
)

# A DataLoader's error for a size of 0, which a script gets that divides 1 by its ranks.
_NO_EXAMPLE = "but got batch_size=0"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a launch, as a probe, with further facts about it.

    Attributes:
        probe: the launch as a probe.
        is_certain: False if the launch has to be repeated before it is believed.
        ended_by_itself: True if the script ended before it had run all steps.
        too_small: the error if a layer or the script needs more examples; else None.
        raised_in_training: True if the script raised once it had made its optimizer.
        last_words: the last output of a failed script.
    """

    probe: Probe
    is_certain: bool = True
    ended_by_itself: bool = False
    too_small: BatchTooSmallError | None = None
    raised_in_training: bool = False
    last_words: str = ""

    def within(self, budget_bytes: int) -> Verdict:
        """Return this verdict; as out of memory if the launch held more than a budget."""
        if not self.probe.fits or (self.probe.peak_reserved_bytes or 0) <= budget_bytes:
            return self
        return replace(self, probe=replace(self.probe, outcome=Outcome.OOM, note=VARIED_NOTE))

    @property
    def is_error(self) -> bool:
        """True if the script failed for another reason than memory, or too few examples."""
        return self.probe.outcome is Outcome.FAILED and self.too_small is None

    @property
    def failed_at_once(self) -> bool:
        """True if the script failed so before it had ended a step."""
        return self.is_error and self.probe.steps <= 1

    @property
    def least(self) -> int:
        """The size to try instead if this one may have too few examples; 0 if it does not."""
        if self.too_small:
            return self.probe.batch_size + 1
        may_be_too_small = self.is_error and self.raised_in_training
        return SEVERAL if may_be_too_small and not _sizes_named(self.last_words) else 0

    def error(self, *, trained_before: bool = False) -> UserCodeError:
        """Return the error for a failure that is not about memory."""
        said = f"{self.last_words.rstrip()}\n".lstrip()
        advice = _IN_THE_WAY if trained_before else _advice_on(said)
        return UserCodeError(
            f"the script failed at batch size {self.probe.batch_size}, not for lack of memory: "
            f"{self.probe.note.rstrip('.')}. Try {advice}",
            "" if said.strip() in self.probe.note else said,
        )


def judge(
    record: Record, exit_status: int | None, output: str, hung: str, step: str = "training step"
) -> Verdict:
    """Judge a launch by its reports, and by the last lines that the command printed.

    The exit status is None if the command was ended, or killed what supervised it. ``hung`` says
    why it was ended as hung, and ``step`` is the name of a counted step, for messages.
    """
    if record.out_of_memory is not None:
        return Verdict(_probe(record, Outcome.OOM, record.out_of_memory["text"]))
    if hung:
        return Verdict(_probe(record, Outcome.FAILED, hung), last_words=output)
    if record.is_over:
        objections = (trainer.watch.objection() for trainer in record.trainers.values())
        note = next(filter(None, objections), "")
        return Verdict(_probe(record, Outcome.OOM if note else Outcome.FITS, note))
    told = f"{output}\n{record.raised['traceback'] if record.raised else ''}"
    if shortage := shortage_in(told):
        return Verdict(_probe(record, Outcome.OOM, shortage))
    failure = classify_text(told)
    if failure is not None and failure.tier is Tier.CERTAIN:
        return Verdict(_probe(record, Outcome.OOM, failure.reason))
    if exit_status == 0:
        if record.steps:
            return Verdict(_probe(record, Outcome.FITS, ""), ended_by_itself=True)
        note = f"the script ended without a {step}, perhaps for too little data"
        return Verdict(_probe(record, Outcome.FAILED, note), last_words=output)
    if exit_status == _SIGKILL or _KILLED.search(told):
        note = f"{HOST}, most likely: a process was killed"
        return Verdict(_probe(record, Outcome.OOM, note), is_certain=False)
    if record.doubtful or (failure is not None and failure.tier is Tier.PROBABLE):
        note = failure.reason if failure is not None else record.doubtful
        return Verdict(_probe(record, Outcome.OOM, note), is_certain=False)
    last_words = record.raised["traceback"] if record.raised else output.rstrip()
    said = record.raised["error"] if record.raised else last_line(output)
    note = failure.reason if failure is not None else said
    ended = _ending(exit_status)
    probe = _probe(record, Outcome.FAILED, f"{ended}: {note}" if note else ended)
    is_too_small = any(each in told for each in _TOO_FEW)
    return Verdict(
        probe,
        too_small=too_small(record.batch_size) if is_too_small else None,
        raised_in_training=record.raised is not None and record.raised["has_optimizer"],
        last_words=last_words,
    )


def _ending(exit_status: int | None) -> str:
    if exit_status is None:
        return "the process that supervised it was killed"
    return f"died of signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"


def last_line(text: str) -> str:
    """Return the last line that is not empty, without the space around it."""
    return text.rstrip().rpartition("\n")[2].strip()


def quoted(output: str) -> str:
    """Return what a script printed last, as the end of a sentence."""
    last = last_line(output)
    return f"; it printed last: {last}" if last else ""


def limiting(record: Record) -> TrainingProcess:
    """Return the process that needs the most memory. At least one has run a step."""
    return max(record.trainers.values(), key=_peak)


def _probe(record: Record, outcome: Outcome, note: str) -> Probe:
    """Return the probe of a launch, with the readings of the process that limits it."""
    trainers = sorted(record.trainers.values(), key=lambda trainer: int(trainer.facts["rank"]))
    seconds = time.monotonic() - record.started
    steps = min((len(trainer.peaks) for trainer in trainers), default=0)
    fits = outcome is Outcome.FITS
    steps += not fits
    worst = limiting(record) if trainers else None
    several = record.processes > 1 and bool(trainers)
    failed, after = record.out_of_memory or {}, record.epoch_end
    allocated = [failed.get("allocated", 0), after.allocated_bytes]
    reserved = [failed.get("reserved", 0), after.reserved_bytes]
    if worst:
        allocated.append(worst.allocated)
        reserved.append(_peak(worst))
    phases = dict(worst.phases) if worst else {}
    if after.validation_peak_bytes:
        phases[Phase.VALIDATION] = after.validation_peak_bytes
    rank = failed.get("rank", worst.facts["rank"] if worst else None)
    return Probe(
        record.batch_size,
        outcome,
        steps=steps,
        seconds=seconds,
        samples=record.batch_size * steps,
        step_seconds=worst.step_seconds if worst else None,
        peak_allocated_bytes=max(allocated) or None,
        peak_reserved_bytes=max(reserved) or None,
        outside_bytes=(worst and worst.facts.get("outside")) or None,
        phase_peak_bytes=phases,
        allocation_retries=max((trainer.retries for trainer in trainers), default=0),
        confirmed=fits,
        note=note,
        rank_peak_bytes=tuple(map(_peak, trainers)) if several else (),
        limiting_rank=rank if several else None,
        steps_differ=record.lengths_differ,
    )


def _peak(trainer: TrainingProcess) -> int:
    return max(trainer.peaks)


def refute_close(verdicts: dict[int, Verdict], failed: Probe) -> Probe:
    """Return a failure under the smallest size that is too close to be told from it.

    In the verdicts so far, by size, all such sizes become failures.
    """
    size = failed.batch_size
    fits = [each for each, verdict in verdicts.items() if verdict.probe.fits]
    close = [each for each in fits if each < size <= (1 + CLOSE) * each]
    if not close or failed.outcome is not Outcome.OOM:
        return failed
    note = f"a launch at {size} ran out, and memory differs by more from run to run"
    verdicts |= {each: Verdict(replace(failed, batch_size=each, note=note)) for each in close}
    return verdicts[min(close)].probe


def _sizes_named(said: str) -> str:
    """Return the option for sizes that a script asks for with these last words; "" if for none."""
    if found := _DIVISOR.search(said):
        return f"--multiple-of {found[1]}, for sizes that it can divide"
    if "divisible" in said or _NO_EXAMPLE in said:
        return "--multiple-of with the number of ranks, for sizes that they can share"
    if "be even" in said:  # timm's Mixup
        return "--multiple-of 2, for an even number of examples"
    return ""


def _advice_on(said: str) -> str:
    """Return what to try after a script failed with these last words."""
    if named := _sizes_named(said):
        return named
    if "unrecognized arguments" in said or "No such option" in said:  # argparse's and click's
        return "the command by itself. Options of batchfinder belong before the command"
    if "batch" in last_line(said).lower():  # "effective batch size should be at least 16"
        return "--min-batch-size with a size that the script accepts, or the command by itself"
    return "the command by itself"
