"""A training script that misbehaves as it is asked to; ``run_faults.py`` runs it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

# Above this size the deeds that depend on it are done.
LIMIT = 2
WORKERS = 12


def main() -> None:
    """Train, and do the deed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--deed", default="")
    parser.add_argument("--scratch", type=Path, default=Path())
    options = parser.parse_args()
    deed, size = options.deed, options.batch_size
    if deed.endswith(" when large"):
        deed = deed.removesuffix(" when large") if size > LIMIT else ""
    BEFORE.get(deed, lambda: None)()
    if deed == "train in a thread":
        thread = threading.Thread(target=train, args=(size, deed, options.scratch))
        thread.start()
        thread.join()
    else:
        train(size, deed, options.scratch)


def hang() -> None:
    """Start a process in a session of its own, and never train."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)


def take_signals(handler: Any) -> None:
    """Handle every signal that ends a script."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


def empty_temporary_folder() -> None:
    """Remove what the launch was given, except what its driver reads."""
    for path in Path(os.environ["TMPDIR"]).parent.iterdir():
        if path.name not in ("reports", "allowed"):
            subprocess.run(["rm", "-rf", path], check=False)


def interrupt() -> None:
    """Raise what Ctrl-C does."""
    raise KeyboardInterrupt


def write_garbage() -> None:
    """Write to every file that is open."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            os.write(int(path.name), b"not JSON at all\n")


BEFORE: dict[str, Callable[[], object]] = {
    "kill itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": hang,
    "flood": lambda: [sys.stdout.write("x" * 100_000) for _ in range(2000)],
    "flood of lines": lambda: print("line\n" * 2_000_000),
    "binary output": lambda: os.write(1, bytes(range(256)) * 1000),
    "ignore signals": lambda: take_signals(signal.SIG_IGN),
    "handle signals": lambda: take_signals(lambda *_: time.sleep(60)),
    "daemons": lambda: [
        subprocess.Popen(["setsid", "sleep", "600"], start_new_session=True) for _ in range(5)
    ],
    "close descriptors": lambda: os.closerange(0, 256),
    "exit at once": lambda: sys.exit(0),
    "interrupt itself": interrupt,
    "read input": input,
    "empty the temporary folder": empty_temporary_folder,
    "write garbage": write_garbage,
    "kill its supervisor": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "other folder": lambda: os.chdir("/"),
}
"""What comes before training."""


def train(size: int, deed: str, scratch: Path) -> None:
    """Train on noise."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(size * 300, 8))
    workers = WORKERS if deed == "loader workers" else 0
    start = spawn_more if workers else None
    for i, (batch,) in enumerate(DataLoader(data, size, num_workers=workers, worker_init_fn=start)):
        try:
            if deed == "swallow errors":
                torch.empty(2**44)
        except RuntimeError:
            continue
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if deed == "save":
            torch.save(model.state_dict(), scratch / f"{i}.pt")
        elif deed == "exit after a step":
            os._exit(0)
        elif deed == "die after a step":
            os._exit(9)
    validate(model, data, deed)


def validate(model: torch.nn.Module, data: TensorDataset, deed: str) -> None:
    """Validate after the epoch, and save the weights in the user's folder."""
    with torch.no_grad():
        for (batch,) in DataLoader(data, 2):
            model.eval()(batch)
            if deed == "hang in the validation":
                time.sleep(600)
            elif deed == "die in the validation":
                os._exit(9)
    # A script that swallows its errors ends without a step, so it is not stopped before this.
    if deed != "swallow errors":
        Path("after.pt").write_bytes(b"weights")


def spawn_more(number: int) -> None:
    """Start processes from a worker of a loader, in sessions of their own."""
    for _ in range(3):
        subprocess.Popen(["sleep", "600"], start_new_session=True)


if __name__ == "__main__":
    main()
