"""The host's memory during a launch."""

from __future__ import annotations

import os

import pytest

from batchfinder.launching import host_memory
from batchfinder.launching.host_memory import HostWatch

GIB = 1024**3


def test_a_launch_ends_before_the_host_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10 * GIB]
    monkeypatch.setattr(host_memory, "host_memory", lambda: (20 * GIB, free[0]))
    monkeypatch.setattr(host_memory, "LOOK_SECONDS", 0)
    watch = HostWatch(lambda: [os.getpid()])
    assert watch.shortage() == ""
    free[0] = GIB // 2
    assert "512.0 MiB of 20.0 GiB were left" in watch.shortage()
    assert "used 0 B, and" not in watch.shortage()  # also before a first step


def test_memory_that_was_short_before_the_launch_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "host_memory", lambda: (20 * GIB, GIB // 2))
    assert HostWatch(list).shortage() == ""
