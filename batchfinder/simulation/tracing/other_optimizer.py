"""Traces of a step that differs from a traced one in its optimizer only."""

from __future__ import annotations

from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.kernels.attention import ComputeCapability
from batchfinder.simulation.trace.alignment import NotGeneralError, with_optimizer_of
from batchfinder.simulation.trace.trace import GeneralTrace
from batchfinder.simulation.tracing.cluster import Cluster
from batchfinder.simulation.tracing.step_trace import TRACED_SIZES, StepTraces
from batchfinder.training.setup import TrainingSetup


class OtherOptimizer(StepTraces):
    """The traces of a setup's step, built from traces of the same step with another optimizer.

    Args:
        setup: what to train.
        options: options of the steps.
        capability: compute capability of the GPU to simulate.
        cluster: the job in which the GPU is one rank.
        like: traces of the same step with another optimizer.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        options: ProbeOptions,
        capability: ComputeCapability,
        cluster: Cluster | None,
        like: StepTraces,
    ) -> None:
        super().__init__(setup, options, capability, cluster)
        self._like: StepTraces | None = like

    def hold_at(self, batch_size: int) -> bool:
        """Check the trace at a large size. Only the part that both optimizers share can fail."""
        return self._like.hold_at(batch_size) if self._like else super().hold_at(batch_size)

    def _aligned(self) -> GeneralTrace:
        if self._like is not None:
            try:
                known = self._like.at(TRACED_SIZES[0])
                return with_optimizer_of(known, self._at(known.example.batch_size))
            except NotGeneralError:
                self._like = None
        return super()._aligned()
