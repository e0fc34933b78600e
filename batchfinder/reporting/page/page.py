"""The page: a head with its style sheet, then the sections of each result."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from batchfinder.errors import UsageError
from batchfinder.reporting.page.sections import sections_of
from batchfinder.results.version import SCHEMA_VERSION, VERSION

ELSEWHERE = ". Try a page in another folder, such as report.html"
SAVED = ". Try batchfinder find TARGET --json > result.json"


def check_report(file: str | None) -> None:
    """Check that a page can be written, before the work that it will show; None: no page.

    Raises:
        UsageError: the name does not end in .html, or no file can be written there.
    """
    if file is None:
        return
    path = Path(file)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"a report is a page, so {file} must end in .html. Try report.html")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {folder}. Try mkdir -p {folder}")
    if path.exists():
        if not (path.is_file() and os.access(path, os.W_OK)):
            raise UsageError(f"cannot write {file}: it is no file to write to{ELSEWHERE}")
        return
    try:
        TemporaryFile(dir=folder).close()  # without a name, so that it never shows
    except OSError as error:
        raise UsageError(f"cannot write {file}: {folder} takes no new files{ELSEWHERE}") from error


def read_results(files: Sequence[str]) -> list[dict[str, Any]]:
    """Read the JSON objects that ``--json`` printed.

    Raises:
        UsageError: a file cannot be read, or holds no result.
    """
    results = []
    for file in files:
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
            is_newer = data["schema_version"] > SCHEMA_VERSION
            if not is_newer:
                sections_of(data)
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror or error}{SAVED}") from error
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"{file} is no result of batchfinder{SAVED}") from error
        if is_newer:
            raise UsageError(f"{file} is from a newer batchfinder. Try it with that version")
        results.append(data)
    return results


def write_page(results: Sequence[dict[str, Any]], file: str) -> None:
    """Write one page about all results, JSON objects as ``--json`` prints them.

    Raises:
        UsageError: the file cannot be written.
    """
    path, page = Path(file), page_of(results)
    was_there = path.exists()
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        if not was_there:
            path.unlink(missing_ok=True)  # half a page
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error


def page_of(results: Sequence[dict[str, Any]]) -> str:
    """Return the page as HTML text. It needs no network and runs no script."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = "batchfinder report"
    sections = "\n".join(section for result in results for section in sections_of(result))
    made = f"batchfinder {VERSION}, {datetime.now():%Y-%m-%d %H:%M}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>\n{style}</style></head>\n"
        f"<body><header><h1>{title}</h1><p>{escape(made)}</p></header>\n"
        f"<main>\n{sections}\n</main></body></html>\n"
    )
