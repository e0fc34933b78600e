"""The faults of what stands around a search: its memory, its page, studies, watching, the guard."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator

from faults import ONCE, REFERENCE, Fault

from batchfinder.results.cache import FILE

FIND = ("find",)
HANG = {"stage": "forward", "deed": "hang", "at": 2, "once": ONCE}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command_faults(reference: int) -> Iterator[Fault]:
    """Yield every fault of these.

    Args:
        reference: the answer of the search without a fault.
    """
    yield from _cache()
    yield from _report()
    yield from _sweep()
    yield from _compare(reference)
    yield from _check()
    yield from _watch()
    yield from _guard()
    yield from _trainer()


def _in_shell(before: str, last: str = 'exec "$@"') -> tuple[str, ...]:
    return ("sh", "-c", f"{before}; {last}", "sh")


def _in_mounts(before: str, last: str = 'exec "$@"') -> tuple[str, ...]:
    return ("unshare", "--mount", *_in_shell(before, last))


def _cache() -> Iterator[Fault]:
    """Yield broken caches. The search has to end as it does without a cache."""
    fault = functools.partial(Fault, "remembered answers", command=FIND)
    folder = 'mkdir -p "$BATCHFINDER_CACHE"'
    file = f'"$BATCHFINDER_CACHE/{FILE}"'
    sql = f'{sys.executable} -c "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); %s" {file}'
    newer = "c.execute('CREATE TABLE answers (key, a, b)')"
    locked = "c.execute('BEGIN EXCLUSIVE'); sys.stdin.close(); import time; time.sleep(40)"
    twice = '"$@" > /dev/null && exec "$@"'
    rows = "c.execute('UPDATE answers SET result = ?', ['%s']); c.commit()"
    yield fault("second search", wrapper=_in_shell(folder, twice))
    yield fault("no database", wrapper=_in_shell(f"{folder}; echo not a database at all > {file}"))
    yield fault("empty file", wrapper=_in_shell(f"{folder}; : > {file}"))
    cut = f'"$@" > /dev/null; truncate -s 5000 {file}'
    yield fault("cut off", wrapper=_in_shell(cut))
    overwritten = f'"$@" > /dev/null; dd if=/dev/zero of={file} bs=1000 seek=5 count=4 conv=notrunc'
    yield fault("overwritten in part", wrapper=_in_shell(f"{overwritten} 2> /dev/null"))
    for name, row in (("no answer", "{}"), ("no object", "[1]"), ("no JSON", "{")):
        yield fault(f"row is {name}", wrapper=_in_shell(f'"$@" > /dev/null; {sql % (rows % row)}'))
    yield fault("columns of another version", wrapper=_in_shell(f"{folder}; {sql % newer}"))
    yield fault(
        "locked all the time",
        wrapper=_in_shell(f"{folder}; {sql % locked} & sleep 1"),
    )
    yield fault("folder in its place", wrapper=_in_shell(f"mkdir -p {file}"))
    yield fault("file in place of its folder", wrapper=_in_shell(': > "$BATCHFINDER_CACHE"'))
    yield fault("name too long", environment={"BATCHFINDER_CACHE": "x" * 300})
    tmpfs = f'{folder}; mount -t tmpfs -o size=16k none "$BATCHFINDER_CACHE"'
    full = 'head -c 16k /dev/zero > "$BATCHFINDER_CACHE/full" 2> /dev/null'
    yield fault("full disk", wrapper=_in_mounts(f"{tmpfs}; {full}"))
    yield fault(
        "read-only disk", wrapper=_in_mounts(f'{tmpfs}; mount -o remount,ro "$BATCHFINDER_CACHE"')
    )
    journal = f'"$@" > /dev/null; head -c 600 /dev/urandom > {file[:-1]}-journal"'
    yield fault("killed while writing", wrapper=_in_shell(journal))


def _report() -> Iterator[Fault]:
    fault = functools.partial(Fault, "report", answers=None, error=True)
    to = lambda file: f'exec "$@" --report {file}'  # noqa: E731
    yield fault(
        "name of a folder",
        wrapper=_in_shell('mkdir "$TMPDIR/../x.html"', to('"$TMPDIR/../x.html"')),
    )
    yield fault("in no folder", options=("--report", "none/x.html"))
    yield fault("no page", options=("--report", "x.txt"))
    tmpfs = "mkdir ../disk && mount -t tmpfs -o size=8k none ../disk"
    full = "head -c 8k /dev/zero > ../disk/full 2> /dev/null"
    read_only = "mount -o remount,ro ../disk"
    yield fault("read-only disk", wrapper=_in_mounts(f"{tmpfs}; {read_only}", to("../disk/x.html")))
    full_disk = _in_mounts(f"{tmpfs}; {full}", to("../disk/x.html > /dev/null"))
    yield fault("full disk", wrapper=full_disk)


def _sweep() -> Iterator[Fault]:
    """Yield faults at some values of a sweep. The last value works and has its usual answer."""
    fault = functools.partial(Fault, "sweep", command=("sweep", "--over", "at=1,99"))
    for deed in ("raise", "kill", "oom", "os_exit", "sys_exit"):
        yield fault(f"one value: {deed}", {"stage": "forward", "deed": deed})
    yield fault(
        "one value: raise while loading",
        {"deed": "raise"},
        command=("sweep", "--over", "stage=load,none"),
    )
    alike = fault(
        "every value: raise",
        {"stage": "forward", "deed": "raise"},
        None,
        error=True,
        command=("sweep", "--over", "at=1,2"),
    )
    yield alike
    for number in SIGNALS:
        yield fault(
            f"{number.name} in the middle",
            HANG,
            None,
            command=("sweep", "--over", "chance=0,1"),
            send=number,
        )
    yield fault(
        "kill -9 of a worker", HANG, command=("sweep", "--over", "chance=0,1"), kill="worker"
    )


def _compare(reference: int) -> Iterator[Fault]:
    fault = functools.partial(
        Fault, "compare", command=("compare", "--measure", "--strategy", "bf16")
    )
    yield fault(
        "out of memory at the answer",
        {"stage": "loss", "deed": "oom", "at": reference},
        (reference - 1,) * 2,
    )
    yield fault("an exception", {"stage": "loss", "deed": "raise"}, None, error=True)
    yield fault("kill -9 of a worker", HANG, kill="worker")
    for number in SIGNALS:
        yield fault(f"{number.name} in the middle", HANG, None, send=number)


def _check() -> Iterator[Fault]:
    fault = functools.partial(
        Fault, "check", answers=(3, 3), command=("check", "--batch-size", "3")
    )
    yield fault("an exception", {"stage": "loss", "deed": "raise"}, answers=None, error=True)
    yield fault(
        "os._exit while loading", {"stage": "load", "deed": "os_exit"}, answers=None, error=True
    )
    yield fault("kill -9 of a worker", HANG, kill="worker")
    for number in SIGNALS:
        yield fault(f"{number.name} in the middle", HANG, answers=None, send=number)


def _watch() -> Iterator[Fault]:
    """Our own search is what is watched."""
    watch = (sys.executable, "-m", "batchfinder", "watch", "--every", "0.2", "--")
    fault = functools.partial(Fault, "watch", wrapper=watch)
    yield fault("a search")
    yield fault("an exception", {"stage": "loss", "deed": "raise"}, None, error=True)
    yield fault("kill -9 of a worker", HANG, kill="worker")
    yield fault("SIGTERM in the middle", HANG, (0, REFERENCE), send=signal.SIGTERM)


def _guard() -> Iterator[Fault]:
    """Steps on batches of 8 examples; the answer is the size of the parts at the end."""
    fault = functools.partial(Fault, "guard", api="guard")
    for stage in ("forward", "loss", "backward"):
        yield fault(f"out of memory, {stage}", {"stage": stage, "deed": "oom", "at": 3}, (2, 2))
        again = {"stage": stage, "deed": "oom", "at": 4, "nth": 2}
        yield fault(f"out of memory in the second part, {stage}", again, (2, 2))
        yield fault(
            f"one example does not fit, {stage}", {"stage": stage, "deed": "oom"}, None, True
        )
        yield fault(
            f"an exception, {stage}", {"stage": stage, "deed": "raise", "at": 8}, None, True
        )
    yield fault("out of memory, optimizer", {"stage": "optimizer", "deed": "oom"}, None, True)
    yield fault("an exception, optimizer", {"stage": "optimizer", "deed": "raise"}, None, True)


def _trainer() -> Iterator[Fault]:
    fault = functools.partial(Fault, "set_max_batch", api="trainer")
    for stage in ("forward", "backward"):
        for deed in ("oom", "kill"):
            yield fault(f"{deed}, {stage}", {"stage": stage, "deed": deed, "at": 5}, (4, 4))
        yield fault(
            f"an exception, {stage}", {"stage": stage, "deed": "raise", "at": 5}, None, True
        )
    yield fault("nothing fits", {"stage": "forward", "deed": "oom"}, (0, 0))
    yield fault("Ctrl-C", HANG, None, error=True, send=signal.SIGINT)
