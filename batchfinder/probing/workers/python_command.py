"""How a new Python process is started that runs a module of ours."""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = str(Path(__file__).parents[3])


def python_command(module: str) -> list[str]:
    """The command that runs the ``main()`` of a module.

    Unlike ``python -m module`` it does so wherever batchfinder lies, installed or not, and files of
    the current folder do not stand in for modules of the same name.

    Args:
        module: by its full name.

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
