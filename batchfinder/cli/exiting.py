"""Run a command, let signals end it, and exit with its status. Only ``app.run`` exits too."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NoReturn

import click

from batchfinder.errors import BatchFinderError, RankError, UsageError, UserCodeError
from batchfinder.probing.ranks.job import Job

# Where a word is an option's name, and not an ordinary word.
_ALONE = "(?:^|(?<=the option ))"

# The exit statuses of commands; ``errors.py`` has those of errors, 1 and 2.
FOUND = 0
NOTHING_FITS = 3
CTRL_C = 130  # 128 and the number of the signal, as shells have it
TERMINATED = 143  # likewise
TIME_IS_UP = 124  # as the command timeout has it; seen only inside a search


def exit_with(command: str, **options: Any) -> NoReturn:
    """Run a command and exit with its status, or with one line that says what is wrong.

    Its function, ``file:function`` below ``cli``, is imported only now, because ``--help`` must be
    fast. It returns the exit status, or None for 0.
    """
    # PyTorch's warning that NumPy is missing: nothing here needs it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        if "target" in options and "make_prober" not in options:
            from batchfinder.training.user_module import check_target

            check_target(options["target"])  # before PyTorch, which takes seconds to import
        ranks = Job.from_environment().world_size
        if ranks > 1 and "device" in options and "strategy" not in options:
            raise UsageError(
                f"this is one of {ranks} ranks, which would all use the same device. Only find "
                "takes ranks. Try the command without torchrun"
            )
        function = resolve_name(f"batchfinder.cli.{command}")
        if not gc.isenabled():  # by main(), for the imports: what they made is no garbage
            gc.freeze()
            gc.enable()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by main()
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(function(**options))
    except KeyboardInterrupt:  # before the command had anything to report
        sys.exit(CTRL_C)
    except BatchFinderError as error:
        if isinstance(error, UserCodeError):
            click.echo(error.user_traceback, err=True, nl=False)
        is_ours = isinstance(error, (RankError, UsageError))  # others may quote the user's code
        told = as_typed(str(error)) if is_ours else error
        click.echo(f"Error: {told}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno == errno.EPIPE:  # a reader such as `head` closed the pipe: click handles it
            raise
        _end_output()
        click.echo(
            f"Error: the system refused a request ({error.strerror or error}). "
            "Check for a full disk, or a limit on files or processes",
            err=True,
        )
        sys.exit(1)


def as_typed(message: str) -> str:
    """Return a message with the command's options as the user types them, not as Python names.

    A name of one word is an ordinary word too, so it counts as an option only at the beginning, or
    after "the option". A placeholder or a keyword argument is none.
    """
    context = click.get_current_context(silent=True)
    for option in context.command.params if context else ():
        place = r"(?<![\w{(.])" if "_" in (name := option.name or "") else _ALONE
        if isinstance(option, click.Option) and name:
            message = re.sub(rf"{place}{name}\b(?![-=}}])", option.opts[0], message)
    return message


@contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """Let Ctrl-C end the process at once. An import of PyTorch would abort at it, or ignore it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_output() -> None:
    """Discard unwritten output, or Python reports it once more on exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def terminated_as_ctrl_c(seconds: float | None = None) -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP end the search like Ctrl-C. Restore the handlers.

    Schedulers send SIGTERM, a closed terminal SIGHUP. Under nohup, SIGHUP stays ignored. A time
    limit in seconds ends the search in the same way. Yields a list whose last item is the exit
    status for a KeyboardInterrupt.
    """
    exit_status = [CTRL_C]
    causes = {signal.SIGTERM: TERMINATED}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        causes[signal.SIGHUP] = TERMINATED
    if hasattr(signal, "setitimer"):
        causes[signal.SIGALRM] = TIME_IS_UP

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        exit_status.append(causes[signal.Signals(signal_number)])
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *causes)}
    for number in causes:
        signal.signal(number, interrupt)
    try:
        if seconds is not None:
            _set_alarm(max(seconds, 0.001))
        yield exit_status
    finally:
        _set_alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
