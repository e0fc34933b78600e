"""``batchfinder watch``: the memory of one training while it runs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

import click

from batchfinder.cli.exiting import TERMINATED, terminated_as_ctrl_c
from batchfinder.cli.output import live_line
from batchfinder.errors import UsageError
from batchfinder.launching.cache_flushes import Flushes, counted_flushes
from batchfinder.launching.launch import await_end
from batchfinder.launching.memory_in_use import Gpus, Usage, read_usage
from batchfinder.launching.template import not_started
from batchfinder.units import check_seconds, format_bytes, format_seconds


def watch_training(
    command_line: Sequence[str], *, pid: int | None, every: float, as_json: bool
) -> int:
    """Run ``batchfinder watch`` and return the exit status, that of the command if there is one."""
    if (pid is None) == (not command_line):
        raise UsageError(
            "watch a process or a command. Try --pid 1234, or batchfinder watch -- python train.py"
        )
    check_seconds("--every", every, usual=1)
    gpus = Gpus()
    if gpus.missing:
        click.echo(f"Note: {gpus.missing}", err=True)
    with (
        terminated_as_ctrl_c() as why,
        counted_flushes() as counted,
        _watched(command_line, pid, counted) as (watched, process),
    ):
        highest = _follow(watched, gpus, process, counted, every, as_json=as_json)
        if process and why[-1] == TERMINATED:
            process.terminate()  # Ctrl-C reaches the command too, but this signal may not
    if highest is None and process is None:
        raise UsageError(
            f"there is no process {pid}, or it belongs to another user. "
            "Try pgrep -af python, which lists those that run"
        )
    if highest and not as_json:
        click.echo(f"Peak: {highest}", err=True)
    if process is None:
        return TERMINATED if why[-1] == TERMINATED else 0
    status = process.returncode
    return 128 - status if status < 0 else status


@contextmanager
def _watched(
    command_line: Sequence[str], pid: int | None, counted: Flushes
) -> Iterator[tuple[int, subprocess.Popen[bytes] | None]]:
    if pid is not None:
        yield pid, None
        return
    try:
        process = subprocess.Popen([*command_line], env=counted.environment)
    except OSError as error:
        raise not_started(command_line[0], error.strerror or str(error)) from None
    try:
        yield process.pid, process
    finally:
        await_end(process)


def _follow(
    pid: int,
    gpus: Gpus,
    process: subprocess.Popen[bytes] | None,
    counted: Flushes,
    every: float,
    *,
    as_json: bool,
) -> str | None:
    """Show the memory until the process ends. Return the peaks; None if there is no process."""
    started = time.monotonic()
    peak_host, peak_gpus = 0, dict[str, int]()
    # After Ctrl-C, report what was seen so far.
    with live_line() as show, suppress(KeyboardInterrupt):
        while (usage := read_usage(pid, gpus)) is not None:
            peak_host = max(peak_host, usage.host_bytes)
            for gpu in usage.gpus:
                held = gpu.others_bytes if gpu.process_bytes is None else gpu.process_bytes
                peak_gpus[gpu.name] = max(peak_gpus.get(gpu.name, 0), held)
            seconds, flushes = time.monotonic() - started, counted.read()
            if as_json:
                facts = {"seconds": round(seconds, 3), **asdict(usage)}
                print(json.dumps({**facts, "allocation_retries": flushes}), flush=True)
            else:
                show(_line(usage, flushes, seconds))
            _wait(process, every)
    if not peak_host:
        return None
    gpu_peaks = (f"GPU {name} {format_bytes(most)}" for name, most in peak_gpus.items())
    return ", ".join(
        [*gpu_peaks, f"host {format_bytes(peak_host)}", *_flushes_in_words(counted.read())]
    )


def _flushes_in_words(flushes: int | None) -> list[str]:
    return [] if flushes is None else [f"allocator retries: {flushes}"]


def _wait(process: subprocess.Popen[bytes] | None, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        (process.wait if process else time.sleep)(seconds)


def _line(usage: Usage, flushes: int | None, seconds: float) -> str:
    parts = [format_seconds(seconds)]
    for gpu in usage.gpus:
        total = format_bytes(gpu.total_bytes)
        if gpu.process_bytes is None:
            parts.append(f"GPU {gpu.name}: {format_bytes(gpu.others_bytes)} of {total} used")
        else:
            own, others = format_bytes(gpu.process_bytes), format_bytes(gpu.others_bytes)
            parts.append(f"GPU {gpu.name}: {own} of {total}, {others} by others")
    processes = f" in {usage.processes} processes" if usage.processes > 1 else ""
    parts.append(f"host: {format_bytes(usage.host_bytes)}{processes}")
    return "  ".join([*parts, *_flushes_in_words(flushes)])
