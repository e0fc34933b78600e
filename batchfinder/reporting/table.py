"""The table of probes: one row per probe, with as many columns as fit the terminal."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from rich.text import Text

from batchfinder.reporting.wording import allocator_request_bytes, one_line
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe, without_place
from batchfinder.units import count, format_bytes, format_seconds

BLOCKS = " ▏▎▍▌▋▊▉█"

_INDENT = 2
_GAP = 2
_SIZE = len("batch size")
_PEAK = len("peak memory")
_STEP = 6
_BAR_MOST = 20
_BAR_LEAST = 8
_SHORT_OUTCOME = len("failed")
_LONG_OUTCOME = len("fits, confirmed by 3 steps")

_STYLES = {Outcome.FITS: "green", Outcome.OOM: "red", Outcome.FAILED: "yellow"}
_WORDS = {Outcome.FITS: "fits", Outcome.OOM: "OOM", Outcome.FAILED: "failed"}
PHASES = {
    Phase.FORWARD: "forward",
    Phase.FORWARD_BACKWARD: "forward/backward",
    Phase.OPTIMIZER_STEP: "optimizer step",
    Phase.VALIDATION: "validation",
}


@dataclass(frozen=True)
class ProbeTable:
    """Formatter for the rows of a table of probes.

    A narrow terminal drops the bar first, then the step time, then the peak. The batch size and
    the outcome always stay; text that does not fit is wrapped below them.

    Attributes:
        budget_bytes: the value of a full bar.
        width: columns of the terminal; None for no terminal: no bar, no wrapping.
        has_blocks: True if the terminal can show block characters; otherwise bars use ``#``.
        verbose: add the peaks of the phases below each row.

    Example:
        >>> probe = Probe(16, Outcome.FITS, steps=1, seconds=0.1)
        >>> print(ProbeTable(budget_bytes=1024, width=40).row(probe))
                  16               fits
    """

    budget_bytes: int
    width: int | None = None
    has_blocks: bool = True
    verbose: bool = False

    @property
    def bar_width(self) -> int:
        """Width of the bar in columns; 0 if there is no room for it."""
        if self.width is None:
            return 0
        room = self.width - self._outcome_column(_PEAK, _STEP) - _LONG_OUTCOME - _GAP
        return min(room, _BAR_MOST) if room >= _BAR_LEAST else 0

    def header(self) -> Text:
        """Return the names of the columns."""
        return Text(self._columns("batch size", "peak memory", "", "step").rstrip(), style="dim")

    def error_row(self, batch_size: int) -> Text:
        """Return the row of a size whose steps raised an error."""
        return Text(self._columns(str(batch_size), "", "", "") + " " * _GAP + "error")

    def row(self, probe: Probe) -> Text:
        """Return the row of one probe: one line, or several if its text is long."""
        peak = probe.peak_bytes if probe.fits else None
        seconds = probe.step_seconds if probe.fits else None
        columns = self._columns(
            str(probe.batch_size),
            "" if peak is None else format_bytes(peak),
            "" if peak is None else self._bar(peak),
            "" if seconds is None else format_seconds(seconds),
        )
        word = _WORDS[probe.outcome]
        first, *below = self._wrap(word, self._outcome(probe), len(columns) + _GAP)
        row = Text(columns + " " * _GAP)
        row.append(first[: len(word)], style=_STYLES[probe.outcome]).append(first[len(word) :])
        if self.verbose:
            below += self._wrap_below(_phases(probe))
        for line in below:
            row.append("\n" + line, style="dim")
        return row

    def _has_room_for(self, *columns: int) -> bool:
        room = self._outcome_column(*columns) + _SHORT_OUTCOME
        return self.width is None or room <= self.width

    def _outcome_column(self, *columns: int) -> int:
        return _INDENT + _SIZE + sum(_GAP + column for column in columns) + _GAP

    def _columns(self, size: str, peak: str, bar: str, step: str) -> str:
        columns = [size.rjust(_SIZE)]
        if self._has_room_for(_PEAK):
            columns.append(peak.rjust(_PEAK))
        if self.bar_width:
            columns.append(bar.ljust(self.bar_width))
        if self._has_room_for(_PEAK, _STEP):
            columns.append(step.rjust(_STEP))
        return " " * _INDENT + (" " * _GAP).join(columns)

    def _bar(self, peak: int) -> str:
        share = min(peak / self.budget_bytes, 1.0)
        if not self.has_blocks:
            return "#" * max(1, int(share * self.bar_width))
        full, eighths = divmod(max(1, int(share * self.bar_width * 8)), 8)
        return BLOCKS[8] * full + BLOCKS[eighths].strip()

    def _outcome(self, probe: Probe) -> str:
        text = _WORDS[probe.outcome]
        if probe.confirmed:
            steps = count(probe.steps, "step")
            steps += " with validation" if Phase.VALIDATION in probe.phase_peak_bytes else ""
            text += f", confirmed by {steps}" if probe.fits else " when confirming"
        note, is_in_validation = without_place(one_line(probe.note))
        text += " in the validation" if is_in_validation else ""
        # The allocator's long message adds little to "OOM"; only --verbose shows it.
        is_plain_oom = probe.outcome is Outcome.OOM and allocator_request_bytes(note) is not None
        return f"{text}: {note}" if note and (self.verbose or not is_plain_oom) else text

    def _wrap(self, word: str, text: str, column: int) -> list[str]:
        """Wrap the text beside the columns, or below them if it would take over two lines."""
        if self.width is None:
            return [text]
        beside = textwrap.wrap(text, max(self.width - column, 1), break_on_hyphens=False)
        if len(beside) > 2 or not beside[0].startswith(word):
            return [word, *self._wrap_below(text[len(word) :].lstrip(",: "))]
        return [beside[0], *(" " * column + line for line in beside[1:])]

    def _wrap_below(self, text: str) -> list[str]:
        if self.width is None:
            return [" " * (_INDENT + _SIZE + _GAP) + text]
        is_wide = self._has_room_for(_PEAK, _STEP)
        indent = " " * (_INDENT + _SIZE + _GAP if is_wide else 2 * _INDENT)
        return textwrap.wrap(
            text,
            # Some terminals report a width of 0.
            max(self.width, len(indent) + 1),
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )


def _phases(probe: Probe) -> str:
    peaks = [f"{PHASES[phase]} {format_bytes(n)}" for phase, n in probe.phase_peak_bytes.items()]
    cost = f"{count(probe.steps, 'step')} in {format_seconds(probe.seconds)}"
    return ", ".join([*peaks, cost])
