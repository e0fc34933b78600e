"""The entry point of the ``batchfinder`` command, and of ``python -m batchfinder``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    # Until a command has begun there is nothing to tell: Ctrl-C ends all this without a word.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from batchfinder.cli.app import run

    run()


if __name__ == "__main__":
    main()
