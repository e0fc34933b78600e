"""The examples in docstrings: users read them, so what they show has to be true."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import batchfinder

ROOT = Path(batchfinder.__file__).parent
RUNS = re.compile(r"^ +>>> (?!.*doctest: \+SKIP)", re.MULTILINE)
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted(ROOT.rglob("*.py"))
    if RUNS.search(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_happens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert tried
    assert not failed, capsys.readouterr().out
