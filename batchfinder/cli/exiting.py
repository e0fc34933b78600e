"""Run a command and exit with its status. No other file of ``cli`` does, but for ``app.run``."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import warnings
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any, NoReturn

import click

from batchfinder.errors import BatchFinderError, UserCodeError

# The exit statuses of commands; ``errors.py`` has those of errors, 1 and 2.
FOUND = 0
NOTHING_FITS = 3
CTRL_C = 130  # 128 and the number of the signal, as shells have it
TERMINATED = 143  # likewise
TIME_IS_UP = 124  # as the command timeout has it; seen only inside a search


def exit_with(command: str, **options: Any) -> NoReturn:
    """Run a command and exit with its status, or with one line that says what is wrong.

    Args:
        command: the function, as ``file:function`` below ``cli``. It is imported only now, because
            ``--help`` must be fast. It returns the exit status, or None for 0.
        options: the options of the function.
    """
    # PyTorch's warning that NumPy is missing: nothing here needs it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        if "target" in options and "make_prober" not in options:
            from batchfinder.training.user_module import check_target

            check_target(options["target"])  # before PyTorch, which takes seconds to import
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
        click.echo(f"Error: {error}", err=True)
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


def _end_output() -> None:
    """Discard unwritten output, or Python reports it once more on exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
