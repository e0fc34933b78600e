"""Trace the steps of a training setup, for every batch size."""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.kernels.attention import FAMILIES, ComputeCapability, kernel_family
from batchfinder.simulation.kernels.workspaces import CudaWorkspaces
from batchfinder.simulation.trace.alignment import (
    NotGeneralError,
    NotInLineError,
    align,
    alike,
    check_lines,
    first_step,
)
from batchfinder.simulation.trace.curve import Curve
from batchfinder.simulation.trace.repeats import Repeats
from batchfinder.simulation.trace.trace import GeneralTrace, Kind, Trace
from batchfinder.simulation.tracing.caches import Caches
from batchfinder.simulation.tracing.data_parallel import Cluster, resizes_tracked
from batchfinder.simulation.tracing.fake import fake_batch, fake_cuda, fake_setup, with_carried
from batchfinder.simulation.tracing.one_step import on_device, run_step, states_on_device
from batchfinder.simulation.tracing.operators import ValuesFollowed
from batchfinder.simulation.tracing.refusal import explained, names_of
from batchfinder.simulation.tracing.tracker import StorageTracker
from batchfinder.simulation.tracing.wrappers import remarks_on_wrappers
from batchfinder.simulation.values.known import MOST_ELEMENTS
from batchfinder.training.modes.forward_step import STEP_OF_MODE
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.anatomy import tensors_of
from batchfinder.training.state.process_settings import repeatable
from batchfinder.training.state.reach import methods_of, reachable
from batchfinder.training.state.undo import contents_kept

# Sizes traced: small, as the batch needs host memory; even, as some models split it in half.
TRACED_SIZES = (4, 8)
# A forward pass at this size checks that the traces are linear.
CHECKED_SIZE = 32
# Parabolas need one more size, and a check by a whole step, since gradients may be nonlinear too.
# 12 is not a power of two, so that padding to powers of two does not look linear.
FURTHER_SIZES = (12, 32)
# The answer is checked too, since a step that splits its batch has one chunk at a small size.
# Batches from make_batch use host memory: up to this size only.
MOST_CHECKED = 1024
# Where a step loops over its examples, up to the size at which they add this many events to two
# steps: tracing the forward pass then takes seconds, or 43 s of CPU for a Qwen2.5-VL of 3 B.
MOST_EVENTS = 2**15
STEPS = 2  # the first allocates the optimizer's states, the second is the steady state


class StepTraces:
    """The traces of a setup's training step, each made once.

    Copies without data are traced, so the user's model, optimizer and sample are not changed.

    Traces ``like`` of a step with the same passes save time. That step may differ in its optimizer,
    and in whether it accumulates gradients. If the passes turn out to differ, they are not used.
    Other traces of the same model may have noted the ``caches`` of all code before.

    Attributes:
        are_general: False once a few traces turn out not to predict other sizes.
        warnings: problems that the user should act on.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        options: ProbeOptions,
        capability: ComputeCapability,
        cluster: Cluster | None = None,
        like: StepTraces | None = None,
        caches: Caches | None = None,
    ) -> None:
        self.warnings = remarks_on_wrappers(setup.model)
        self._setup = setup
        self._options = options
        self._capability = capability
        self._alike = set(FAMILIES)
        self._cluster = cluster
        self._like = like
        with self._repeatable():
            self._batches = BatchMaker.of(setup, options.batch_dim)
        self.warnings += self._batches.warnings
        self._general: GeneralTrace | None = None
        self.are_general = True
        self._held_at = 0
        self._caches = caches or Caches(setup.model)
        self._at = functools.cache(self._trace)
        self._repeats: Repeats | None = None
        self._repeated = functools.lru_cache(maxsize=4)(self._lengthened)

    def at(self, batch_size: int) -> GeneralTrace:
        """Return a trace that holds at a batch size, and at every other size if possible.

        Raises:
            Exception: StepError or BatchTooSmallError, or whatever the user's code raises.
        """
        general = self._of_every_size()
        if general is not None:
            return general
        return self._repeated(batch_size)

    def _lengthened(self, batch_size: int) -> GeneralTrace:
        """Return the trace at one size: that of a smaller one with longer loops, or its own."""
        trace = None
        if self._repeats is not None and batch_size >= TRACED_SIZES[0]:
            with suppress(NotGeneralError):
                trace = self._repeats.at(batch_size)
        trace = trace or self._at(batch_size, STEPS)
        return GeneralTrace(trace, [tuple(map(Curve, s.amounts)) for s in trace.storages])

    def upper_bound(self, capacity_bytes: int) -> int | None:
        """Return an upper bound of the sizes that fit; None if the traces do not tell one."""
        general = self._of_every_size()
        return general.upper_bound(capacity_bytes) if general is not None else None

    def _of_every_size(self) -> GeneralTrace | None:
        if self._general is None and self.are_general:
            try:
                self._general = self._aligned()
            except NotGeneralError as error:
                self.are_general = False
                with suppress(NotGeneralError):
                    if not isinstance(error, NotInLineError):  # whose passes are the same
                        self._repeats = Repeats(*(self._at(size, STEPS) for size in TRACED_SIZES))
                if self._repeats is None:
                    self._give_up(error)
        return self._general

    def hold_at(self, batch_size: int) -> bool:
        """Check the trace at a large size; return False if every size now needs its own trace."""
        if self._general is None and self._repeats is None:
            return True
        # Of steps with the same passes, only the passes can fail, which both share.
        if self._general is not None and self._like is not None:
            if not (self._like.hold_at(batch_size) and self._like.are_general):
                self._general, self.are_general = None, False
            return self.are_general
        # At sizes below the traced ones, such as 1, a step may need fewer copies, but not more.
        if batch_size < TRACED_SIZES[0]:
            return True
        size = batch_size if self.makes_own_batches else min(batch_size, MOST_CHECKED)
        if self._repeats is not None:  # a line goes through any two sizes, so it needs a third
            most = MOST_EVENTS // self._repeats.events_per_sample
            size = max(min(size, most), FURTHER_SIZES[0])
        if size > self._held_at:
            try:
                check_lines(self.at(size), self._trace(size, 0))
            except NotInLineError as error:
                self._give_up(error)
                return False
            self._held_at = size
        return True

    def _give_up(self, error: NotGeneralError) -> None:
        self._general = self._repeats = None
        self.are_general = False
        self._repeated.cache_clear()
        self._warn(f"{error}; every batch size is traced separately, which takes longer")

    def _aligned(self) -> GeneralTrace:
        """Return the trace at every size. Its steps mostly differ in their optimizer only."""
        if self._like is not None:
            known = self._like.at(TRACED_SIZES[0])
            if self._like.are_general:
                with suppress(NotGeneralError):
                    return alike(known, self._at(known.example.batch_size, STEPS))
            self._like = None
        lines = self._lines(1)
        try:
            return alike(lines, self._at(TRACED_SIZES[1], STEPS))
        except NotGeneralError:
            return self._lines(STEPS)

    def _lines(self, steps: int) -> GeneralTrace:
        large = self._at(TRACED_SIZES[1], STEPS)
        traces = [self._at(TRACED_SIZES[0], steps), first_step(large) if steps == 1 else large]
        try:
            lines = align(*traces)
            if lines.has_offsets:  # a curve may also go through two points
                check_lines(lines, self._trace(CHECKED_SIZE, 0))
        except NotInLineError:
            return align(*traces, *(self._at(size, steps) for size in FURTHER_SIZES))
        return lines

    @property
    def makes_own_batches(self) -> bool:
        """True if large batches need no host memory, unlike those of ``make_batch``."""
        return self._batches.batch_size is not None

    def hold_for(self, capability: ComputeCapability) -> bool:
        """Return True if a GPU runs the same kernels."""
        return kernel_family(capability) in self._alike

    def _trace(self, batch_size: int, steps: int) -> Trace:
        """Trace some steps; 0: a forward pass only."""
        model = self._setup.model
        joined = self._cluster.joined() if self._cluster else nullcontext()
        self._caches.note()
        try:
            with self._repeatable(), contents_kept(reachable(methods_of(model))), joined as mesh:
                trace, survivors = self._trace_of(batch_size, mesh, steps)
        except BaseException:
            self._caches.forget_fakes()
            raise
        self._caches.forget_survivors(survivors)
        return trace

    def _repeatable(self) -> AbstractContextManager[None]:
        return repeatable(reachable([*self._setup.functions, self._setup.make_batch]))

    def _trace_of(
        self, batch_size: int, mesh: Any, steps: int
    ) -> tuple[Trace, list[weakref.ref[Any]]]:
        cluster = self._cluster
        # Values of larger tensors are never read.
        batch = self._batches.make(batch_size, MOST_ELEMENTS)
        names: dict[int, str] = {}
        precision = self._options.precision
        fake = fake_cuda(self._capability, alike=self._alike, warn=self._warn)
        with fake as mode, explained(names):
            setup, held = fake_setup(self._setup, mode)
            names.update(names_of(setup))
            buckets: list[torch.Tensor] = []
            if cluster is not None:
                setup = cluster.spread(setup, mesh, precision)
                buckets = cluster.buckets(setup.model)
                precision = "fp32" if cluster.is_sharded else precision
            # An optimizer may compute tables.
            with ValuesFollowed():  # type: ignore[no-untyped-call]
                step = STEP_OF_MODE[self._options.mode](
                    setup,
                    torch.device("cpu"),
                    precision=precision,
                    accumulate=self._options.accumulate,
                    batch_dim=self._options.batch_dim,
                    is_sharded=cluster is not None and cluster.strategy != "ddp",
                    eval_batch_size=self._options.eval_batch_size,
                )
            workspaces = CudaWorkspaces(
                self._capability, self._alike, benchmark=torch.backends.cudnn.benchmark
            )
            tracker = StorageTracker(batch_size, setup.model, workspaces, names)
            host_batch = fake_batch(batch, mode)
            validated = step.eval_batch_size
            eval_batches = step.eval_batches or self._batches
            with no_dispatch():  # real tensors, whose values are known
                to_validate = validated and eval_batches.make(validated)
                two = self._options.mode == "eval" and self._batches.make(2)
            evaluated, small = (fake_batch(made, mode) for made in (to_validate, two))
            with tracker, resizes_tracked(tracker) if cluster else nullcontext():
                for tensor in with_carried([*tensors_of(setup.model), *held]):
                    tracker.track(tensor, Kind.PARAMETER)
                for bucket in buckets:
                    tracker.track(bucket, Kind.GRADIENT)
                for state in states_on_device(step.optimizer):
                    tracker.track(state, Kind.OPTIMIZER_STATE)
                step.begin(batch_size, lambda: on_device(small, tracker), is_first=True)
                for _ in range(steps):
                    tracker.begin_step()
                    run_step(step, host_batch, evaluated, tracker)
                    if cluster is not None and not step.keeps_gradients:
                        setup.model.zero_grad(set_to_none=True)  # the optimizer may have a part
                if not steps:
                    tracker.begin_step()
                    step.forward(on_device(host_batch, tracker))
                survivors = tracker.made_by_steps()
        if steps:
            step.check_optimizers()
        self._warn(*step.warnings, *sorted(workspaces.warnings))
        return tracker.trace, survivors

    def _warn(self, *warnings: str) -> None:
        self.warnings = list(dict.fromkeys([*self.warnings, *warnings]))
