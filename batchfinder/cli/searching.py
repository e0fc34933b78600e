"""Search on the command line: show progress, handle signals, report even if cut short."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

from batchfinder.cli.exiting import FOUND, NOTHING_FITS, TIME_IS_UP, terminated_as_ctrl_c
from batchfinder.errors import BatchFinderError, TimeLimitError
from batchfinder.probing.place import prices_for
from batchfinder.reporting.progress import TerminalReporter
from batchfinder.results.probe import Probe
from batchfinder.results.remembered import Remembered
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.search.bounds import Bounds
from batchfinder.search.conclusion import conclude, stopped_early
from batchfinder.search.deadline import Deadline
from batchfinder.search.head_start import HeadStart
from batchfinder.search.plan import Prices
from batchfinder.search.prober import Prober
from batchfinder.search.run import run_search

# The alarm rings at this share of the time limit, because ending the processes needs some time.
ALARM = 0.95

P = TypeVar("P", bound=Prober)


def search_in_terminal(
    make_prober: Callable[[], P],
    reporter: TerminalReporter,
    report: Callable[[P, BatchSizeResult], None],
    *,
    headroom: float,
    bounds: Bounds,
    show_probe: Callable[[P, Probe], None],
    make_head_start: Callable[[P], HeadStart | None] = lambda _: None,
    prices: Prices | None = None,
    deadline: Deadline | None = None,
    measures_throughput: bool = False,
    recall: Callable[[P], Remembered | None] = lambda _: None,
    room: Callable[[P], float] = lambda _: 0.0,
    is_limited: bool = True,
) -> int:
    """Search and report the result, even if it is cut short; return the exit status.

    The prober is closed at the end, and ``report`` called once. ``recall`` finds the answer of an
    earlier search; ``room`` is the further fraction kept free because batches differ in length;
    ``is_limited`` is False if the user set no limit on the memory.

    Raises:
        TimeLimitError: no size was confirmed in time.
        BatchFinderError: the search cannot be made, or has failed.
    """
    seconds = None if deadline is None else ALARM * deadline.seconds_left()
    probes: list[Probe] = []
    with terminated_as_ctrl_c(seconds) as why:
        try:
            with closing(make_prober()) as prober:
                reporter.start(prober, headroom, room(prober), is_limited=is_limited)
                started = time.monotonic()

                def on_probe(probe: Probe) -> None:
                    probes.append(probe)
                    show_probe(prober, probe)

                try:
                    result = run_search(
                        prober,
                        bounds,
                        on_probing=reporter.probing,
                        on_probe=on_probe,
                        head_start=make_head_start(prober),
                        prices=prices or prices_for(prober),
                        deadline=deadline,
                        measures_throughput=measures_throughput,
                        remembered=recall(prober),
                    )
                except (KeyboardInterrupt, BatchFinderError) as end:
                    status = _status_after(end, probes, is_late=why[-1] == TIME_IS_UP)
                    if status is not None:
                        # A second signal must not lose what has been found.
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)
                        finding, spent = stopped_early(probes, status), time.monotonic() - started
                        report(prober, conclude(prober, probes, finding, spent, prober.warnings))
                    if status is Status.TIME_LIMIT:
                        return FOUND
                    raise
        except KeyboardInterrupt:
            if deadline is not None and why[-1] == TIME_IS_UP:
                raise TimeLimitError(deadline.seconds) from None
            return why[-1]
        report(prober, result)
    return NOTHING_FITS if result.status is Status.NOTHING_FITS else FOUND


def _status_after(end: BaseException, probes: Sequence[Probe], *, is_late: bool) -> Status | None:
    """Return the status of a search that was cut short; None if it has nothing to report."""
    if isinstance(end, BatchFinderError):
        return Status.FAILED if probes else None
    if not is_late:
        return Status.INTERRUPTED
    return Status.TIME_LIMIT if stopped_early(probes, Status.TIME_LIMIT).answer else None
