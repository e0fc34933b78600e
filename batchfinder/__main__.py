"""``python -m batchfinder`` is ``batchfinder``."""

from batchfinder.cli import main

main()
