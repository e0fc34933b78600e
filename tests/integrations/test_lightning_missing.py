from __future__ import annotations

import importlib.util
import sys

import pytest

from batchfinder.errors import UsageError


def test_without_lightning_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "lightning" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"Try pip install lightning"):
        importlib.import_module("batchfinder.integrations.lightning")
