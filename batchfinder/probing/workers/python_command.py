"""The command for a new Python process that runs a module of batchfinder."""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = str(Path(__file__).parents[3])


def python_command(module: str) -> list[str]:
    """Return the command that runs the ``main()`` of a module.

    Unlike ``python -m module``, it works from any folder, even if batchfinder is not installed.
    Files in the current folder do not shadow modules of the same name.

    Args:
        module: the full name of the module.

    Example:
        >>> python_command("batchfinder.probing.workers.child")[1]
        '-c'
    """
    code = (
        "import sys\n"
        "sys.path[:1] == [''] and sys.path.pop(0)\n"
        f"{_FOLDER!r} in sys.path or sys.path.append({_FOLDER!r})\n"
        f"from {module} import main\n"
        "main()"
    )
    return [sys.executable, "-c", code]
