"""The faults: what goes wrong, and which endings are right.

An ending is right if it is an answer in the given range, or one clear error where an error is
allowed. ``ending.py`` has what must hold for every ending.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchfinder.units import MIB

REFERENCE = -1
"""The answer of the search without a fault."""

ROOM_BYTES = 800 * MIB
"""Memory to train in, beside what a process holds before it trains. A sample uses 96 MiB. From 771
to 820 MiB the answer is 7, with 1 thread or 2, in a worker or in this process; 770 gave 6 or 7."""

ONCE = "@once"
"""A file that marks that the deed was done."""

SHORT = (
    "out of memory: forward, at every size",
    "in the user's process: out of memory, backward",
    "in the user's process: an exception, optimizer",
    "death and hang: kill at 3",
)
"""One of each kind that takes little time."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        group: its kind, for the table.
        name: what goes wrong.
        arguments: arguments of ``targets.build``.
        answers: the smallest and the largest right answer; None: no answer is right.
        error: whether one clear error is right too.
        command: the command of ours, with its options.
        options: further options of the command.
        environment: variables to set; None: to remove.
        wrapper: the command that runs ours.
        redirect: how the shell redirects our streams.
        send: a signal for the command after the deed; the answer so far is then right.
        kill: "worker": kill the process that did the deed; "host": the process it was forked from.
        hog_bytes: memory that another process allocates after the deed.
        api: "in_process": a search in one process, with the state compared; "loading": workers
            with little patience while they load; "guard": steps of an OOMGuard, compared with those
            without a fault; "trainer": ``set_max_batch`` on a Trainer; "run": a foreign script; "":
            the command line.
        patience_seconds: a search that has not ended by then has not survived.
        after_seconds: send the signal this long after the start instead.
    """

    group: str
    name: str
    arguments: Mapping[str, str | int | float] = field(default_factory=dict)
    answers: tuple[int, int] | None = (REFERENCE, REFERENCE)
    error: bool = False
    command: tuple[str, ...] = ("find", "--no-cache")
    options: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    redirect: str = ""
    send: signal.Signals | None = None
    kill: str = ""
    hog_bytes: int = 0
    api: str = ""
    patience_seconds: float = 150
    after_seconds: float = 0.0


STAGES = ("batch", "copy", "forward", "loss", "backward", "optimizer")


def all_faults(reference: int) -> list[Fault]:
    """Return every fault.

    Args:
        reference: the answer of the search without a fault; thresholds follow it.
    """
    return [
        *_out_of_memory(reference),
        *_in_process(reference),
        *_deaths(),
        *_user_code(),
        *_environments(),
        *_signals(reference),
    ]


def _at(stage: str, deed: str, **more: int | float | str) -> dict[str, str | int | float]:
    return {"stage": stage, "deed": deed, **more}


def _out_of_memory(reference: int) -> list[Fault]:
    group, below = "out of memory", (reference - 1, reference - 1)
    pause = _at("forward", "pause", at=2, once=ONCE)
    hog = "another process takes half the limit, and gives it back"
    return [
        Fault(group, "while loading", _at("load", "oom"), None, error=True),
        *(Fault(group, f"{stage}, at every size", _at(stage, "oom"), (0, 0)) for stage in STAGES),
        *(
            Fault(group, f"{stage}, at the answer", _at(stage, "oom", at=reference), below)
            for stage in STAGES
        ),
        Fault(group, "only when confirming", _at("backward", "oom", at=reference, nth=3), below),
        # No size is safe here, so a size that is too small is right.
        *(
            Fault(
                group,
                f"forward, in {chance:.0%} of all steps",
                _at("forward", "oom", chance=chance),
                (0, reference),
            )
            for chance in (0.1, 0.3)
        ),
        Fault(group, hog, pause, hog_bytes=512 * MIB),
    ]


def _in_process(reference: int) -> list[Fault]:
    group, api = "in the user's process", "in_process"
    stages = ("forward", "backward", "loss", "optimizer")
    changes = ("seed", "default_dtype", "default_device", "no_grad")
    pause = _at("backward", "pause", at=2, once=ONCE)
    return [
        *(
            Fault(group, f"out of memory, {stage}", _at(stage, "oom", at=2), (1, 1), api=api)
            for stage in stages
        ),
        *(
            Fault(group, f"an exception, {stage}", _at(stage, "raise", at=2), None, True, api=api)
            for stage in stages
        ),
        *(
            Fault(
                group,
                f"changes: {deed}",
                _at("optimizer", deed, at=2),
                (1, reference),
                error=True,
                api=api,
            )
            for deed in changes
        ),
        Fault(group, "Ctrl-C", pause, None, error=True, api=api, send=signal.SIGINT),
    ]


def _deaths() -> list[Fault]:
    group, two = "death and hang", (2, 2)
    deaths = ("kill", "segfault", "abort", "complain_and_abort", "real_time_signal", "os_exit")
    hang_at_load = _at("load", "hang", once=ONCE)
    late = _at("forward", "hang", nth=3, at=2, once=ONCE)
    pause = _at("forward", "pause", at=2, once=ONCE)
    impatient = ("--probe-timeout", "8")
    family = _at("forward", "leave_a_child_and_hang", at=3)
    orphan = _at("forward", "leave_children", at=3)
    return [
        Fault(group, "kill -9 while loading", hang_at_load, None, error=True, kill="worker"),
        *(
            Fault(
                group,
                f"kill -9 in a probe, {stage}",
                _at(stage, "hang", at=2, once=ONCE),
                kill="worker",
            )
            for stage in STAGES
        ),
        Fault(group, "kill -9 when confirming", late, kill="worker"),
        Fault(group, "kill -9 of the host of workers", pause, kill="host"),
        *(Fault(group, f"{deed} at 3", _at("forward", deed, at=3), two) for deed in deaths),
        Fault(
            group,
            "real-time signal at every size",
            _at("forward", "real_time_signal"),
            None,
            error=True,
        ),
        Fault(group, "hang at 3", _at("backward", "hang", at=3), two, options=impatient),
        Fault(group, "hang at 3, with a child process", family, two, options=impatient),
        Fault(group, "death that leaves a child process", orphan, two),
        Fault(group, "hang while loading", _at("load", "hang"), None, error=True, api="loading"),
        Fault(group, "os._exit while loading", _at("load", "os_exit"), None, error=True),
        Fault(group, "sys.exit while loading", _at("load", "sys_exit"), None, error=True),
        Fault(group, "sys.exit in a step", _at("loss", "sys_exit"), None, error=True),
        Fault(group, "writes to our pipes", _at("loss", "write_garbage"), None, error=True),
        Fault(group, "closes our pipes", _at("loss", "close_everything"), None, error=True),
    ]


def _user_code() -> list[Fault]:
    group, stages = "user's code", ("load", "backward")
    deeds = "garbage print fork threads change_folder seed default_dtype change_the_process"
    return [
        *(
            Fault(group, f"{deed}, {stage}", _at(stage, deed))
            for deed in deeds.split()
            for stage in stages
        ),
        *(
            Fault(group, f"default device meta, {stage}", _at(stage, "default_device"), error=True)
            for stage in stages
        ),
        Fault(group, "an exception at 3", _at("forward", "raise", at=3), None, error=True),
    ]


def _environments() -> list[Fault]:
    group = "environment"
    in_mounts = ("unshare", "--mount", "sh", "-c")
    then_run = 'exec "$@"'
    width = {"COLUMNS": "20", "TERM": "xterm"}
    return [
        Fault(group, "locale C", environment={"LC_ALL": "C", "PYTHONUTF8": "0"}),
        Fault(group, "no HOME", environment={"HOME": None}),
        Fault(
            group,
            "read-only home and temporary folder",
            wrapper=(
                *in_mounts,
                'mount --bind "$HOME" "$HOME" && mount -o remount,ro,bind "$HOME" '
                '&& mount --bind "$TMPDIR" "$TMPDIR" && mount -o remount,ro,bind "$TMPDIR" && '
                + then_run,
                "sh",
            ),
        ),
        Fault(
            group,
            "no file may be written",
            error=True,  # PyTorch needs a folder for temporary files
            wrapper=("sh", "-c", f"ulimit -f 0; {then_run}", "sh"),
        ),
        Fault(
            group,
            "no /proc",
            answers=None,
            error=True,
            wrapper=(*in_mounts, f"mount -t tmpfs none /proc && {then_run}", "sh"),
        ),
        Fault(group, "answer to a full disk", answers=None, error=True, redirect=">/dev/full"),
        Fault(group, "answer to a reader that is gone", answers=None, error=True, redirect="|true"),
        Fault(group, "closed standard input", redirect="<&-"),
        Fault(group, "closed standard output", redirect=">&-"),
        Fault(group, "closed standard error", redirect="2>&-"),
        Fault(
            group,
            "terminal of 20 columns",
            environment=width,
            wrapper=("sh", "-c", 'exec script -qec "$*" /dev/null', "sh"),
        ),
        Fault(
            group,
            "compiled",
            options=("--compile", "--memory-limit", "3GiB", "--max-batch-size", "4"),
            answers=(4, 4),
            patience_seconds=900,
        ),
    ]


def _signals(reference: int) -> list[Fault]:
    group, so_far = "signals", (0, reference)
    stages = {
        "while loading": _at("load", "hang"),
        "in the first probe": _at("forward", "hang"),
        "in a later probe": _at("backward", "hang", at=2),
        "when confirming": _at("optimizer", "hang", at=2, nth=3),
    }
    killed = _at("forward", "hang", at=2, once=ONCE)
    return [
        *(
            Fault(group, f"{number.name} {name}", {**deed, "once": ONCE}, so_far, send=number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            for name, deed in stages.items()
        ),
        *(
            Fault(
                group,
                f"SIGINT {seconds} s after the start",
                answers=so_far,
                send=signal.SIGINT,
                after_seconds=seconds,
            )
            for seconds in (0.15, 0.4, 0.8, 1.6)
        ),
        Fault(group, "SIGKILL of ours", killed, None, error=True, send=signal.SIGKILL),
    ]
