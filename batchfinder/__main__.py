"""The entry point of the ``batchfinder`` command, and of ``python -m batchfinder``."""

from __future__ import annotations

import gc
import signal


def main() -> None:
    """Run the command line."""
    # Ctrl-C during the imports ends the process silently: no command has begun yet.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # until a command runs: collections make imports a quarter slower
    from batchfinder.cli.app import run

    run()


if __name__ == "__main__":
    main()
