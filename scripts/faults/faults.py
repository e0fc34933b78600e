"""The faults of the fault matrix: what goes wrong, and which endings are right.

An ending is right if it is an answer in the range given, or one clear error where an error is
allowed; what else must hold of every ending is in ``matrix.py``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchfinder.units import MIB

REFERENCE = -1
"""Stands for the answer of the search without a fault."""

ROOM_BYTES = 770 * MIB
"""What a fault's search has to train in, beside what a process holds before it trains; a sample
takes 96 MiB, and next to a multiple of that the answer would hang on some KiB."""

ONCE = "@once"
"""Stands for a file that marks that the deed has been done."""


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
        arguments: of ``targets.build``.
        answers: the smallest and the largest right answer; None: none is right.
        error: whether one clear error is right too.
        options: further options of the command.
        environment: variables to set; None: to remove.
        wrapper: the command that runs ours.
        redirect: how the shell redirects our streams.
        send: a signal for the command once the deed has been done; the answer so far is then right.
        kill: "worker": kill the process that did the deed; "fork server": the one it came from.
        hog_bytes: another process takes so much once the deed has been done.
        api: "in_process": a search in one process, with the state compared; "loading":
            workers with little patience while they load; "": the command line.
        patience_seconds: what has not ended within this time has not survived.
        after_seconds: send the signal so long after the start instead.
    """

    group: str
    name: str
    arguments: Mapping[str, str | int | float] = field(default_factory=dict)
    answers: tuple[int, int] | None = (REFERENCE, REFERENCE)
    error: bool = False
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


def all_faults(reference: int) -> list[Fault]:
    """Every fault.

    Args:
        reference: the answer of the search without a fault; thresholds follow it.
    """
    return [
        *_out_of_memory(reference),
        *_in_process(reference),
        *_deaths(reference),
        *_user_code(),
        *_environments(),
        *_signals(reference),
    ]


STAGES = ("batch", "copy", "forward", "loss", "backward", "optimizer")


def _out_of_memory(reference: int) -> list[Fault]:
    group = "out of memory"
    faults = [Fault(group, "while loading", {"stage": "load", "deed": "oom"}, None, error=True)]
    for stage in STAGES:
        deed = {"stage": stage, "deed": "oom"}
        below = (reference - 1, reference - 1)
        faults += [
            Fault(group, f"{stage}, at every size", deed, (0, 0)),
            Fault(group, f"{stage}, at the answer", {**deed, "at": reference}, below),
        ]
    late = {"stage": "backward", "deed": "oom", "at": reference, "nth": 3}
    faults.append(Fault(group, "only when confirming", late, (reference - 1, reference - 1)))
    for chance in (0.1, 0.3):
        # No size is safe then: one that is too small is all that can be asked for.
        deed = {"stage": "forward", "deed": "oom", "chance": chance}
        faults.append(Fault(group, f"forward, in {chance:.0%} of all steps", deed, (0, reference)))
    once = {"stage": "forward", "deed": "pause", "at": 2, "once": ONCE}
    hog = 512 * 2**20
    faults.append(
        Fault(group, "another process takes half the limit, and gives it back", once, hog_bytes=hog)
    )
    return faults


def _in_process(reference: int) -> list[Fault]:
    group = "in the user's process"
    faults = []
    for stage in ("forward", "backward", "loss", "optimizer"):
        deed = {"stage": stage, "deed": "oom", "at": 2}
        faults.append(Fault(group, f"out of memory, {stage}", deed, (1, 1), api="in_process"))
        failing = {"stage": stage, "deed": "raise", "at": 2}
        faults.append(
            Fault(group, f"an exception, {stage}", failing, None, error=True, api="in_process")
        )
    for deed in ("seed", "default_dtype", "default_device", "no_grad"):
        once = {"stage": "optimizer", "deed": deed, "at": 2}
        faults.append(
            Fault(group, f"changes: {deed}", once, (1, reference), error=True, api="in_process")
        )
    stopped = {"stage": "backward", "deed": "pause", "at": 2, "once": ONCE}
    faults.append(
        Fault(group, "Ctrl-C", stopped, None, error=True, api="in_process", send=signal.SIGINT)
    )
    return faults


def _deaths(reference: int) -> list[Fault]:
    group = "death and hang"
    faults = [
        Fault(
            group,
            "kill -9 while loading",
            {"stage": "load", "deed": "hang", "once": ONCE},
            None,
            error=True,
            kill="worker",
        )
    ]
    for stage in STAGES:
        hang = {"stage": stage, "deed": "hang", "at": 2, "once": ONCE}
        faults.append(Fault(group, f"kill -9 in a probe, {stage}", hang, kill="worker"))
    late = {"stage": "forward", "deed": "hang", "nth": 3, "at": 2, "once": ONCE}
    faults.append(Fault(group, "kill -9 when confirming", late, kill="worker"))
    pause = {"stage": "forward", "deed": "pause", "at": 2, "once": ONCE}
    faults.append(Fault(group, "kill -9 of the fork server", pause, kill="fork server"))
    for deed in ("kill", "segfault", "abort", "complain_and_abort", "real_time_signal", "os_exit"):
        at = {"stage": "forward", "deed": deed, "at": 3}
        faults.append(Fault(group, f"{deed} at 3", at, (2, 2)))
    every = {"stage": "forward", "deed": "real_time_signal"}
    faults += [
        Fault(group, "real-time signal at every size", every, None, error=True),
        Fault(
            group,
            "hang at 3",
            {"stage": "backward", "deed": "hang", "at": 3},
            (2, 2),
            options=("--probe-timeout", "8"),
        ),
        Fault(
            group,
            "hang at 3, with a child process",
            {"stage": "forward", "deed": "leave_a_child_and_hang", "at": 3},
            (2, 2),
            options=("--probe-timeout", "8"),
        ),
        Fault(
            group,
            "death that leaves a child process",
            {"stage": "forward", "deed": "leave_children", "at": 3},
            (2, 2),
        ),
        Fault(
            group,
            "hang while loading",
            {"stage": "load", "deed": "hang"},
            None,
            error=True,
            api="loading",
        ),
        Fault(group, "os._exit while loading", {"stage": "load", "deed": "os_exit"}, None, True),
        Fault(group, "sys.exit while loading", {"stage": "load", "deed": "sys_exit"}, None, True),
        Fault(group, "sys.exit in a step", {"stage": "loss", "deed": "sys_exit"}, None, True),
        Fault(group, "writes to our pipes", {"stage": "loss", "deed": "write_garbage"}, None, True),
        Fault(group, "closes our pipes", {"stage": "loss", "deed": "close_everything"}, None, True),
    ]
    return faults


def _user_code() -> list[Fault]:
    group = "user's code"
    deeds = "garbage print fork threads change_folder seed default_dtype change_the_process"
    faults = [
        Fault(group, f"{deed}, {stage}", {"stage": stage, "deed": deed})
        for deed in deeds.split()
        for stage in ("load", "backward")
    ]
    faults += [
        Fault(
            group,
            f"default device meta, {stage}",
            {"stage": stage, "deed": "default_device"},
            error=True,
        )
        for stage in ("load", "backward")
    ]
    failing = {"stage": "forward", "deed": "raise", "at": 3}
    faults.append(Fault(group, "an exception at 3", failing, None, error=True))
    return faults


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
    group = "signals"
    stages = {
        "while loading": {"stage": "load", "deed": "hang"},
        "in the first probe": {"stage": "forward", "deed": "hang"},
        "in a later probe": {"stage": "backward", "deed": "hang", "at": 2},
        "when confirming": {"stage": "optimizer", "deed": "hang", "at": 2, "nth": 3},
    }
    faults = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for name, deed in stages.items():
            arguments = {**deed, "once": ONCE}
            faults.append(
                Fault(group, f"{number.name} {name}", arguments, (0, reference), send=number)
            )
    faults += [
        Fault(
            group,
            f"SIGINT {seconds} s after the start",
            answers=(0, reference),
            send=signal.SIGINT,
            after_seconds=seconds,
        )
        for seconds in (0.15, 0.4, 0.8, 1.6)
    ]
    killed = {"stage": "forward", "deed": "hang", "at": 2, "once": ONCE}
    faults.append(Fault(group, "SIGKILL of ours", killed, None, error=True, send=signal.SIGKILL))
    return faults
