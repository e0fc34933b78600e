"""Settings for all tests: profiles of Hypothesis (usual and nightly), and Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings
from warm import WarmPython

from batchfinder.probing.workers.fork import ASKS_WITHOUT_DRIVER

# Tests have no deadline, because a busy machine is not a failure.
# pytest-xdist tells its workers the width of the terminal. It would narrow the tables.
os.environ.pop("COLUMNS", None)

settings.register_profile("usual", deadline=None, max_examples=50)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("usual")

# Waiting threads sleep. Spinning takes a fifth of a search's CPU time if two tests share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Shells start background jobs with Ctrl-C ignored, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_no_garbage() -> None:
    """Let no collection look at what was imported or made before: it takes most of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the user's remembered answers out of the tests, and the tests' out of each other."""
    folder = tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("BATCHFINDER_CACHE", str(folder))


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers with PyTorch imported already."""

    def start(command: list[str]) -> WarmPython:
        return WarmPython(*command[1:], new_session=True, **ASKS_WITHOUT_DRIVER)

    monkeypatch.setattr("batchfinder.probing.workers.process.start_python", start)


@pytest.fixture(autouse=True)
def _no_module_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules that a test wrote and imported: the next one may use their names."""
    before = set(sys.modules)
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if sys.modules[name] is None:  # a test that hides a package
            continue
        # Not getattr, which would load a lazy module.
        attributes = object.__getattribute__(sys.modules[name], "__dict__")
        if str(attributes.get("__file__")).startswith(written):
            del sys.modules[name]
