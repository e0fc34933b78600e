"""Traces of a step whose forward and backward passes are those of a traced one."""

from __future__ import annotations

from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.kernels.attention import ComputeCapability
from batchfinder.simulation.trace.alignment import NotGeneralError, alike
from batchfinder.simulation.trace.trace import GeneralTrace
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.simulation.tracing.step_trace import STEPS, TRACED_SIZES, StepTraces
from batchfinder.training.setup import TrainingSetup


class SamePasses(StepTraces):
    """The traces of a setup's step, built from traces of a step with the same passes.

    Both may differ in their optimizer, and in whether they accumulate gradients. If the passes turn
    out to differ, the step is traced by itself.
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
        """Check the trace at a large size. Only the passes can fail, which both steps share."""
        if self._like is None or self._general is None:
            return super().hold_at(batch_size)
        if not (self._like.hold_at(batch_size) and self._like.are_general):
            self._general, self.are_general = None, False
        return self.are_general

    def _aligned(self) -> GeneralTrace:
        if self._like is not None:
            known = self._like.at(TRACED_SIZES[0])
            try:
                if self._like.are_general:
                    return alike(known, self._at(known.example.batch_size, STEPS))
            except NotGeneralError:
                pass
            self._like = None
        return super()._aligned()
