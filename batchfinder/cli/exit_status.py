"""The exit statuses of commands; ``errors.py`` has those of errors, 1 and 2."""

from __future__ import annotations

FOUND = 0
NOTHING_FITS = 3
CTRL_C = 130  # 128 and the number of the signal, as shells have it
TERMINATED = 143  # likewise
TIME_IS_UP = 124  # as the command timeout has it; seen only inside a search
