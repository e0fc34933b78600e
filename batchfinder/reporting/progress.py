"""A search in the terminal: progress on stderr, then the answer on stdout."""

from __future__ import annotations

import math

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from batchfinder.errors import TimeLimitError
from batchfinder.reporting.answer import details, headline
from batchfinder.reporting.chart import memory_lines
from batchfinder.reporting.table import BLOCKS, ProbeTable
from batchfinder.reporting.wording import label, one_line
from batchfinder.results.accumulation import AccumulationPlan
from batchfinder.results.probe import Probe
from batchfinder.results.result import BatchSizeResult
from batchfinder.search.prober import Prober
from batchfinder.units import GIB, format_bytes

# On a CPU, a step that fills more than this takes minutes.
_QUICK_BYTES = 4 * GIB

# Gaps between the parts of a line.
_WIDE, _NARROW = " " * 5, " " * 3


class TerminalReporter:
    """Reporter that shows a search in a terminal or a log.

    A terminal gets a table that fits its width and a live line for the running probe. Pipes and
    files get plain lines, one per probe, without wrapping, colors or control codes. ``NO_COLOR``
    is respected, and characters that the encoding lacks are replaced.

    As a context manager, it restores the terminal however the search ends.

    Args:
        quiet: show only the first line of the answer.
        verbose: add the peaks of each phase and the allocator's messages.
        progress: destination of progress and warnings. Default: stderr.
        output: destination of the answer. Default: stdout.

    Example:
        >>> with TerminalReporter() as reporter:  # doctest: +SKIP
        ...     reporter.start(prober, headroom=0.05)
        ...     reporter.probing(1)
        ...     reporter.probe(prober.probe(1))
        >>> reporter.answer(result)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        progress: Console | None = None,
        output: Console | None = None,
    ) -> None:
        self._progress = progress or Console(stderr=True)
        self._output = output or Console()
        self._quiet = quiet
        self._verbose = verbose
        self._table: ProbeTable | None = None
        self._live: Live | None = None
        self._tried: int | None = None

    def __enter__(self) -> TerminalReporter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        failed = isinstance(error, Exception) and not isinstance(error, TimeLimitError)
        if failed and self._table is not None and self._tried is not None:
            self._end_live()
            self._say(self._table.error_row(self._tried))
        self.finish()

    def start(
        self, prober: Prober, headroom: float, room: float = 0.0, *, is_limited: bool = True
    ) -> None:
        """Show the device of a prober and its memory, as far as it is known.

        ``headroom`` is the fraction of memory kept free, and ``room`` a further one because batches
        differ in length. Of a slow device, say how to limit its memory, unless ``is_limited``.
        """
        facts = []
        if prober.capacity_bytes is not None:
            facts.append(format_bytes(prober.capacity_bytes))
        if prober.used_by_others_bytes:
            facts.append(f"{format_bytes(prober.used_by_others_bytes)} used by others")
        kept = f"{headroom * 100:.3g}% headroom"
        kept += f", {room:.0%} more as lengths differ" if room else ""
        facts.append(f"budget {format_bytes(prober.budget_bytes)} ({kept})")
        self._table = ProbeTable(
            prober.budget_bytes,
            width=self._progress.width if self._progress.is_terminal else None,
            has_blocks=_can_show(BLOCKS, self._progress),
            verbose=self._verbose,
        )
        self._say(
            _side_by_side([one_line(prober.device), ", ".join(facts)], self._progress, _NARROW)
        )
        if not is_limited and prober.device == "cpu" and prober.budget_bytes > _QUICK_BYTES:
            self._say(Text("A step that fills this takes minutes. Try --memory-limit 2GiB."))
        self._space()
        self._say(self._table.header())

    def probing(self, batch_size: int, confirm: bool = False) -> None:
        """Show the batch size being tried, until :meth:`probe` or :meth:`finish`."""
        self._end_live()
        self._tried = batch_size
        if self._quiet or not self._progress.is_interactive:
            return
        has_blocks = _can_show("…⠋", self._progress)
        dots = "…" if has_blocks else "..."
        text = f"{'confirming' if confirm else 'trying'} {batch_size} {dots}"
        spinner = Spinner("dots" if has_blocks else "line", Text(text, style="dim"))
        self._live = Live(spinner, console=self._progress, transient=True)
        self._live.start(refresh=True)

    def probe(self, probe: Probe) -> None:
        """Show the row of a finished probe. :meth:`start` comes before it."""
        assert self._table is not None
        self._end_live()
        self._tried = None
        self._say(self._table.row(probe))

    def finish(self) -> None:
        """End the live line and close the table. Safe to call twice."""
        self._end_live()
        if self._table is not None:
            self._space()
        self._table = None

    def answer(
        self, result: BatchSizeResult, plan: AccumulationPlan | None = None, *, chart: bool = False
    ) -> None:
        """Show the warnings, then the answer, and below it a chart if asked for."""
        self.finish()
        for warning in result.warnings:
            self._say(Text.assemble((label(warning), "yellow"), one_line(warning)))
        if result.warnings:
            self._space()
        parts = headline(result)
        line = _side_by_side(parts, self._output, _WIDE, _NARROW)
        line.stylize("bold", 0, len(parts[0]))
        _print(self._output, line)
        lines = details(result, plan, verbose=self._verbose)
        if self._quiet:
            lines = [str(plan)] if plan else []  # the user asked for the plan
        if chart:
            width = self._output.width if self._output.is_terminal else 72
            lines += memory_lines(result, width, has_blocks=_can_show("●", self._output))
        for text in lines:
            _print(self._output, Text(text))

    def _say(self, text: Text) -> None:
        if not self._quiet:
            _print(self._progress, text)

    def _space(self) -> None:
        # Blank lines help in a terminal and only disturb a log.
        if self._progress.is_terminal:
            self._say(Text())

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _side_by_side(parts: list[str], console: Console, *gaps: str) -> Text:
    """Join the parts with the widest gap that fits on one line, else one part per line."""
    width = console.width if console.is_terminal else math.inf
    lines = (gap.join(parts) for gap in gaps)
    return Text(next((line for line in lines if len(line) <= width), "\n".join(parts)))


def _print(console: Console, text: Text) -> None:
    if not _can_show(text.plain, console):
        plain = text.plain.encode(console.encoding, "backslashreplace").decode(console.encoding)
        text = Text(plain)
    # Without a terminal, rich only guesses the width, so nothing is wrapped.
    console.print(text, soft_wrap=not console.is_terminal, highlight=False)


def _can_show(text: str, console: Console) -> bool:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True
