"""Let a script end its epoch early, so that its validation is seen too. Imports no batchfinder.

The driver asks for it once all steps have run. Until it ends the script:

- a loader that has begun an epoch ends it; others, as that of the validation, give a few batches;
- Trainers that validate every N steps do so after the next one;
- whoever is about to write a file, or to start a program, waits: nothing of the user's changes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

# The batches that a loader gives once the epoch has ended: the first two show what each adds to
# the memory that the validation keeps, and a third confirms it.
MOST_BATCHES = 3

# What Python tells its audit hooks before it changes files or starts programs, apart from "open".
CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
}

# Folders in which files may change, beside that of the launch: devices and caches.
FREE = ("/dev/", "/proc/", f"{Path.home()}/.cache/", f"{Path.home()}/.triton/")


class EpochEnd:
    """End the epoch of this process, and report its validation.

    Args:
        torch: the PyTorch module.
        order: the order of the launch. ``epoch_ends`` is a file that appears once all steps ran.
        report: ``report(event, **facts)``.
        memory: reads the memory.

    Attributes:
        has_begun: True once the epoch has to end.
    """

    def __init__(self, torch: ModuleType, order: dict[str, Any], report: Any, memory: Any) -> None:
        self._torch: Any = torch
        self._asked = Path(order["epoch_ends"])
        self._report, self._memory = report, memory
        variables = "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"
        caches = [f"{os.environ[name]}/" for name in variables if os.environ.get(name)]
        self._free = (f"{self._asked.parent}/", *FREE, *caches)
        self.has_begun = False
        self._unused: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._told: set[bool] = set()
        self._process, self._started = 0, time.time()

    def install(self) -> None:
        """Watch loaders, and what saves files without Python's knowledge."""
        loader = self._torch.utils.data.DataLoader
        created, begun = loader.__init__, loader.__iter__

        @functools.wraps(created)
        def create(loader: Any, *arguments: Any, **keywords: Any) -> None:
            created(loader, *arguments, **keywords)
            self._unused.add(loader)

        @functools.wraps(begun)
        def begin(loader: Any) -> Any:
            self._unused.discard(loader)
            iterator = begun(loader)
            if self.has_begun:
                self._given[iterator] = 0
            return iterator

        loader.__init__, loader.__iter__ = create, begin
        self._wait_before(self._torch, "save")

    def begin_if_asked(self) -> bool:
        """End the epoch if the driver has asked for it, and return True then."""
        if not self.has_begun and self._asked.exists():
            self.has_begun, self._process = True, os.getpid()
            self._memory.reset()
            self._end_loaders()
            _validate_now()
            if "safetensors.torch" in sys.modules:  # it writes files in Rust
                self._wait_before(sys.modules["safetensors.torch"], "serialize_file")
            sys.addaudithook(self._hear)
        return self.has_begun

    def step(self) -> None:
        """Report a step that follows the end of the epoch."""
        held = self._held()
        self._report("step_after", unused_loaders=len(self._unused), held=held)

    def validate(self, *, has_trained: bool) -> None:
        """Report a forward pass of a validation; before the epoch ends, only the first one."""
        if self.has_begun or has_trained not in self._told:
            self._told.add(has_trained)
            peak = self._memory.peaks()[0]
            facts = {"has_trained": has_trained, "is_after": self.has_begun}
            self._report("validated", allocated=peak, **facts)

    def _held(self) -> int:
        """Return the bytes that tensors hold on a CUDA device now; 0 on the CPU."""
        index = self._memory.index
        return 0 if index is None else int(self._torch.cuda.memory_allocated(index))

    def _end_loaders(self) -> None:
        iterator = self._torch.utils.data.dataloader._BaseDataLoaderIter
        following = iterator.__next__

        def follow(iterator: Any) -> Any:
            given = self._given.get(iterator, MOST_BATCHES)
            if iterator in self._given:
                facts = {"held": self._held(), "batches": _length(iterator)}
                self._report("batch_after", given=given, **facts)
            if given >= MOST_BATCHES:
                raise StopIteration
            self._given[iterator] = given + 1
            return following(iterator)

        iterator.__next__ = follow

    def _wait_before(self, owner: Any, name: str) -> None:
        """Let a function that saves wait once the epoch has ended."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def waiting(*arguments: Any, **keywords: Any) -> Any:
            for path in filter(_is_path, [*arguments[1:], *keywords.values()]):
                if self.has_begun:
                    self._wait_with(path)
            return original(*arguments, **keywords)

        setattr(owner, name, waiting)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Wait before Python changes a file of the user's, or starts a program."""
        changes = event in CHANGES
        if event == "open":
            changes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        # pathlib would be slow: this hears all that Python does.
        is_known = event == "os.mkdir" and os.path.isdir(arguments[0])  # noqa: PTH112 - as above
        if changes and _is_path(arguments[0]) and not is_known:
            self._wait_with(arguments[0])

    def _wait_with(self, path: Any) -> None:
        """Wait until the launch ends, unless the file may change. Workers of a loader go on."""
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - as above
        if whole.startswith(self._free) or "__pycache__" in whole or os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):
            if os.stat(whole).st_mtime >= self._started:  # noqa: PTH116 - as above
                return  # such as a log that this launch writes
        self._report("would_write")
        while True:
            self._report.pause()


def _length(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except (TypeError, NotImplementedError):  # a stream has none
        return None


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, bytes, os.PathLike))


def _validate_now() -> None:
    """Let Trainers that validate after a number of steps do so after the next one."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if loops := sys.modules.get(f"{name}.loops.training_epoch_loop"):
            loop = loops._TrainingEpochLoop
            loop._should_check_val_fx = lambda self, *_: self._should_check_val_epoch()
    if flow := sys.modules.get("transformers.trainer_callback"):
        ended = flow.DefaultFlowCallback.on_step_end

        def end_step(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
            control = ended(self, args, state, control, **more)
            control.should_evaluate = args.eval_strategy != "no"
            return control

        flow.DefaultFlowCallback.on_step_end = end_step
