"""Let a script end its epoch early, so that its validation is seen too. Imports no batchfinder.

The driver asks for it once all steps have run. Until it ends the script:

- a loader that has given batches ends its epoch; others, as that of the validation, give a few;
- Trainers that validate every N steps do so after the next one;
- none of the user's files changes, see ``files.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

# The batches that a loader gives once the epoch has ended: the first two show what each adds to
# the memory that the validation keeps, and a third confirms it.
MOST_BATCHES = 3


class EpochEnd:
    """End the epoch of this process, and report its validation.

    Attributes:
        has_begun: True once the epoch has to end.
    """

    def __init__(
        self,
        torch: ModuleType,
        order: dict[str, Any],
        report: Any,
        memory: Any,
        files: Any,
        requests: Any,
    ) -> None:
        self._torch: Any = torch
        self._asked = Path(order["folder"], "epoch_ends")  # it appears once all steps ran
        self._report, self._memory, self._files = report, memory, files
        self._requests = requests
        self.has_begun = self._has_validated = False
        self._passes = 0  # of the validation
        self._unused: weakref.WeakSet[Any] = weakref.WeakSet()
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._told: set[bool] = set()

    def install(self) -> None:
        """Watch loaders, and files."""
        loaders = self._torch.utils.data.DataLoader
        begun = loaders.__iter__

        @functools.wraps(begun)
        def begin(loader: Any) -> Any:
            self._unused.discard(loader)
            iterator = begun(loader)
            # With persistent workers it is that of the last epoch.
            self._begun.discard(iterator)
            self._given.pop(iterator, None)
            return iterator

        loaders.__iter__ = begin
        self._watch_iterators()
        self._files.install()

    def note(self, loader: Any, *arguments: Any, **keywords: Any) -> None:
        """Note a new loader, and report one that gives no batch, as it drops those not full."""
        self._unused.add(loader)
        with contextlib.suppress(Exception):  # many data sets have no length
            examples, size = len(loader.sampler), loader.batch_size
            if loader.drop_last and examples < size:
                self._report("too_few", examples=examples, batch_size=size)

    def begin_if_asked(self) -> bool:
        """End the epoch if the driver has asked for it, and return True then."""
        if not self.has_begun and self._asked.exists():
            self.has_begun = True
            self._memory.reset()
            _validate_now()
            self._files.keep()
            atexit.register(self._end_validation)  # in the last epoch, no step follows
            self._report("epoch_ended", unused_loaders=len(self._unused))
        return self.has_begun

    def step(self) -> None:
        """Report a step that follows the end of the epoch."""
        self._end_validation()
        facts = {"unused_loaders": len(self._unused), "held": self._held()}
        self._report("step_after", **facts, **self._memory.peaks())

    def validate(self, *, has_trained: bool) -> None:
        """Report a forward pass of a validation; before the epoch ends, only the first one."""
        self._has_validated |= self.has_begun
        if not self._memory.facts:
            return  # it is not known yet what trains, and on which device
        if self.has_begun or has_trained not in self._told:
            self._told.add(has_trained)
            facts = {"has_trained": has_trained, "is_after": self.has_begun}
            # The peaks since the epoch ended, or before that, since the last step.
            self._report("validated", **facts, **self._memory.peaks())
            if self.has_begun:
                self._passes += 1
                self._memory.reset()  # a script may copy what it keeps, after each pass

    def train_anew(self) -> None:
        """Note a new optimizer; report one made after the epoch ended: what it makes comes once."""
        self._files.note_savers()
        if self.has_begun:
            self._requests.forget_validation()
            self._report("trains_anew")

    def _end_validation(self) -> None:
        if self._has_validated:
            self._requests.end_validation()

    def _held(self) -> int:
        """Return the bytes that tensors hold on a CUDA device now; 0 on the CPU."""
        index = self._memory.index
        return 0 if index is None else int(self._torch.cuda.memory_allocated(index))

    def _watch_iterators(self) -> None:
        """Let the iterators of loaders end once the epoch has to."""
        iterator = self._torch.utils.data.dataloader._BaseDataLoaderIter
        following = iterator.__next__

        @functools.wraps(following)
        def follow(iterator: Any) -> Any:
            if not self.has_begun:
                self._begun.add(iterator)
                return following(iterator)
            if iterator in self._begun:
                raise StopIteration
            given = self._given.get(iterator, 0)
            facts = {"held": self._held(), "batches": _length(iterator), "passes": self._passes}
            facts |= {"given": given, "unused_loaders": len(self._unused)}
            self._report("batch_after", **facts, **self._memory.peaks())
            if given >= MOST_BATCHES:
                raise StopIteration
            self._given[iterator] = given + 1
            return following(iterator)

        iterator.__next__ = follow


def _length(iterator: Any) -> float | None:
    """Return the batches of a loader; a last one that is not full is a part of one."""
    try:
        length: float = len(iterator)
    except (TypeError, NotImplementedError):  # a stream has none
        return None
    with contextlib.suppress(Exception):  # samplers of other kinds
        batches = iterator._index_sampler
        if not batches.drop_last:
            return min(length, len(batches.sampler) / int(batches.batch_size))
    return length


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
