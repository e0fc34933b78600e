"""From a training setup to the trace of its steps at every batch size."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer

from batchfinder.errors import BatchTooSmallError, StepError
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.attention import ComputeCapability
from batchfinder.simulation.cluster import Cluster, resizes_told
from batchfinder.simulation.fake import fake_copy, fake_cuda
from batchfinder.simulation.trace import AffineTrace, Kind, NotAffineError, Trace, align
from batchfinder.simulation.tracker import StorageTracker, is_user_code
from batchfinder.simulation.workspaces import CudaWorkspaces
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.step import TrainingStep
from batchfinder.training.tree import named_tensors

# Small, for sizes cost nothing here but host memory for the batch; even, for what halves a batch.
TRACED_SIZES = (4, 8)
STEPS = 2  # the first allocates the optimizer's states, the second is the steady state

_UNFAKEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_USE_FIND = "this step cannot be simulated; `batchfinder find` runs it on the device itself"


class StepTraces:
    """The traces of a setup's training step; each is made once.

    The user's model, optimizer and sample stay as they are: copies without data are traced.

    Args:
        setup: what to train.
        options: of the steps: precision, accumulation, batch dimension.
        capability: of the GPU whose kernels are imitated.
        cluster: whose rank trains; None: a single GPU.

    Attributes:
        is_affine: False once two traces were seen not to tell the others.
        warnings: what the user should know.

    Raises:
        SampleError, StepError, UsageError: as the parts of the setup do.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        options: ProbeOptions,
        capability: ComputeCapability,
        cluster: Cluster | None = None,
    ) -> None:
        self.warnings: list[str] = []
        self._setup = setup
        self._options = options
        self._capability = capability
        self._cluster = cluster
        self._batches = BatchMaker(
            setup.sample, make_batch=setup.make_batch, batch_dim=options.batch_dim
        )
        self._affine: AffineTrace | None = None
        self.is_affine = True
        self._at = functools.cache(self._trace)

    def at(self, batch_size: int) -> AffineTrace:
        """A trace that holds at a batch size, and at every other one where that is possible.

        Raises:
            StepError: the step cannot run without data.
            BatchTooSmallError: a layer needs more examples.
            Exception: what the user's own code raised.
        """
        if self._affine is None and self.is_affine:
            try:
                self._affine = align(*(self._at(size) for size in TRACED_SIZES))
            except NotAffineError as error:
                self.is_affine = False
                self.warnings.append(
                    f"{error}; every batch size is traced by itself, which takes longer"
                )
        if self._affine is not None:
            return self._affine
        trace = self._at(batch_size)
        sizes = [float(storage.size_bytes) for storage in trace.storages]
        return AffineTrace(trace, sizes, [0.0] * len(sizes))

    def _trace(self, batch_size: int) -> Trace:
        if self._cluster is None:
            return self._trace_of(batch_size, None, None)
        with self._cluster.joined() as mesh:
            return self._trace_of(batch_size, self._cluster, mesh)

    def _trace_of(self, batch_size: int, cluster: Cluster | None, mesh: Any) -> Trace:
        batch = self._batches.make(batch_size)
        names: dict[int, str] = {}
        precision = self._options.precision
        with fake_cuda(self._capability) as mode, _explained(names):
            setup = _fake_setup(self._setup, mode)
            names.update((id(module), name) for name, module in setup.model.named_modules())
            buckets: list[torch.Tensor] = []
            if cluster is not None:
                setup = cluster.spread(setup, mesh, precision)
                buckets = cluster.buckets(setup.model)
                precision = "fp32" if cluster.is_sharded else precision
            step = TrainingStep(
                setup, torch.device("cpu"), precision=precision, batch_dim=self._options.batch_dim
            )
            _choose_as_cuda(step.optimizer)
            workspaces = CudaWorkspaces(benchmark=torch.backends.cudnn.benchmark)
            tracker = StorageTracker(batch_size, setup.model, workspaces)
            with tracker, resizes_told(tracker) if cluster else nullcontext():
                for tensor in [*setup.model.parameters(), *setup.model.buffers()]:
                    tracker.track(tensor, Kind.PARAMETER)
                for bucket in buckets:
                    tracker.track(bucket, Kind.GRADIENT)
                for _ in range(STEPS):
                    tracker.begin_step()
                    for _ in range(2 if self._options.accumulate else 1):
                        step.forward_backward(_on_device(batch, mode, tracker))
                    step.optimizer_step()
                    setup.model.zero_grad(set_to_none=True)  # an optimizer may have but a part
        self.warnings += [warning for warning in step.warnings if warning not in self.warnings]
        return tracker.trace


def _fake_setup(setup: TrainingSetup, mode: FakeTensorMode) -> TrainingSetup:
    """A copy of model and optimizer without data; functions are shared."""
    owned = isinstance(setup.optimizer, Optimizer)
    pair = (setup.model, setup.optimizer if owned else None)
    try:
        model, optimizer = fake_copy(pair, mode, setup.model)
    except (TypeError, RuntimeError) as error:
        raise StepError(f"the model cannot be copied ({error}): {_USE_FIND}") from error
    return dataclasses.replace(
        setup, model=model, optimizer=optimizer if owned else setup.optimizer
    )


def _choose_as_cuda(optimizer: Optimizer) -> None:
    """Let an optimizer without a choice of its own work on all parameters at once, as on CUDA.

    https://docs.pytorch.org/docs/stable/optim.html#algorithms
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _on_device(batch: Any, mode: FakeTensorMode, tracker: StorageTracker) -> Any:
    fake = fake_copy(batch, mode)
    for _, tensor in named_tensors(fake):
        tracker.track(tensor, Kind.INPUT)
    return fake


@contextmanager
def _explained(names: dict[int, str]) -> Iterator[None]:
    """Say where and why a step cannot run on tensors without data.

    Args:
        names: of the modules that will run, by their id.
    """
    try:
        yield
    except _UNFAKEABLE as error:
        raise StepError(f"{_reason(error)}{_place(error, names)}: {_USE_FIND}") from error
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise BatchTooSmallError(str(error)) from error
        raise
    except (RuntimeError, AssertionError) as error:
        if "no fake impl" in str(error):
            raise StepError(
                f"a custom operator{_place(error, names)} says nothing of its output's shape "
                f"(register_fake): {_USE_FIND}"
            ) from error
        # A tensor on "cuda" beside ours, or a build without CUDA.
        if not any(text in str(error) for text in ("CUDA", "cuda")):
            raise
        raise StepError(
            f'"cuda" is named in the model or the step{_place(error, names)}, and the GPU '
            "is simulated on the CPU; take the device from a tensor, as x.device"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, DataDependentOutputException):
        return "a value of a tensor is read (.item(), bool(), a comparison in an if)"
    if isinstance(error, DynamicOutputShapeException):
        return "the shape of a result depends on the data (nonzero, unique, a boolean mask)"
    operator = str(getattr(error, "func", error)).splitlines()[0]
    return f"{operator} says nothing of its output's shape"


def _place(error: BaseException, names: dict[int, str]) -> str:
    """Where in the user's code: the innermost module and line."""
    module = line = ""
    for frame in _frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = names.get(id(owner)) or module or type(owner).__name__
        if is_user_code(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{_line_of(error, frame)}"
    parts = [part for part in (module and f"in {module}", line and f"at {line}") if part]
    return f" {' '.join(parts)}" if parts else ""


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _line_of(error: BaseException, frame: FrameType) -> int:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame is not frame:
        traceback = traceback.tb_next
    return traceback.tb_lineno if traceback is not None else frame.f_lineno
