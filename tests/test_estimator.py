from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from marks import FSDP
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchfinder.errors import BatchFinderWarning, SampleError, StepError, UsageError
from batchfinder.estimator import estimate_max_batch, estimate_on_gpus, estimate_peak_memory
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.result import Status
from batchfinder.simulation.gpus import find_gpu, unnamed_gpu
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.simulation.tracing.step_trace import STEPS, TRACED_SIZES
from batchfinder.training.setup import TrainingSetup
from batchfinder.units import GIB, MIB

SAMPLE = (torch.randn(3, 256), torch.randint(0, 10, (3,)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))


def mean(output: Tensor, _batch: object) -> Tensor:
    return output.mean()


def test_the_answer_fits_and_the_next_one_does_not() -> None:
    estimate = estimate_max_batch(mlp(), SAMPLE, gpu="t4", headroom=0)

    answer = estimate.batch_size
    assert estimate.result.status is Status.FOUND
    assert estimate.low <= answer <= estimate.high
    assert str(estimate).startswith(f"batch size {answer} ({estimate.low} to {estimate.high} are")
    for batch_size, fits in ((answer, True), (answer + 1, False)):
        assert estimate_peak_memory(mlp(), SAMPLE, batch_size=batch_size, gpu="t4").fits is fits


def test_both_estimates_emit_their_warnings() -> None:
    model, sample = nn.Linear(256, 4), torch.randn(2, 256)
    with pytest.warns(BatchFinderWarning, match="the mean of the model's outputs") as of_peak:
        peak = estimate_peak_memory(model, sample, batch_size=8, gpu="t4")
    with pytest.warns(BatchFinderWarning, match="the mean of the model's outputs") as of_largest:
        estimate_max_batch(model, sample, gpu="t4", max_batch_size=8)

    assert [str(warning.message) for warning in of_peak] == list(peak.warnings)
    for warned in (of_peak, of_largest):
        assert {warning.filename for warning in warned} == {__file__}


@pytest.mark.parametrize("expandable", [False, True])
def test_the_peak_of_a_size_that_does_not_fit_is_what_it_would_need(expandable: bool) -> None:
    t4 = find_gpu("t4")
    model = nn.Sequential(nn.Linear(256, 5000), nn.ReLU(), nn.Linear(5000, 10))
    small, large = (
        estimate_peak_memory(
            model,
            SAMPLE,
            batch_size=400_001,
            gpu=replace(t4, total_bytes=gib * GIB),
            expandable_segments=expandable,
        )
        for gib in (16, 64)
    )
    assert not small.fits
    assert large.fits
    assert small.peak_bytes == large.peak_bytes


def test_estimates_are_repeatable_and_restore_the_random_state() -> None:
    model, own = mlp(), random.Random(3)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        own.random()
        x, labels = batch
        times = random.choice([1, 2, 3]) * int(np.random.choice([1, 2, 3]))
        return nn.functional.cross_entropy(model(x.repeat(times, 1)), labels.repeat(times))

    def made(batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 256), torch.randint(0, 10, (batch_size,))

    def drawn() -> tuple[float, ...]:
        return random.random(), np.random.rand(), torch.rand(()).item(), own.random()

    answers = set()
    for seed in (1, 2, 3):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state(), own.getstate()
        expected = drawn()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        own.setstate(states[3])
        answers.add(
            estimate_max_batch(model, make_batch=made, step=step, gpu="t4", max_batch_size=10**6)
            .result.probes[0]
            .peak_allocated_bytes
        )
        assert drawn() == expected
    assert len(answers) == 1


def test_the_terms_of_the_peak_add_up() -> None:
    model = mlp()
    parameters = sum(4 * p.numel() for p in model.parameters())

    peak = estimate_peak_memory(model, SAMPLE, batch_size=1000, gpu="a100", optimizer="adam")

    terms = peak.explanation.terms
    assert parameters <= terms["parameters"] <= parameters + 4 * 512
    assert terms["optimizer states"] >= 2 * parameters
    assert 1000 * 1024 * 4 <= terms["activations"] <= 1000 * (1024 + 256) * 8
    assert sum(terms.values()) == peak.peak_bytes
    assert str(peak).startswith("batch size 1000 fits on A100")


def test_equal_layers_are_explained_together() -> None:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)]
    estimate = estimate_max_batch(nn.Sequential(*layers), SAMPLE[0], gpu="t4", loss_fn=mean)

    # The last one's activation is the model's output.
    assert estimate.explanation.top_modules == (("*.1", 2 * 4 * 256),)


def test_model_optimizer_and_sample_stay_as_they_were() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())

    estimate_max_batch(model, SAMPLE, gpu="t4", optimizer=optimizer, max_batch_size=64)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert optimizer.defaults["foreach"] is optimizer.param_groups[0]["foreach"] is None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam", "rmsprop"])
def test_every_precision_and_optimizer_runs(precision: str, optimizer: str) -> None:
    estimate = estimate_max_batch(
        mlp(), SAMPLE, gpu="h100", precision=precision, optimizer=optimizer, max_batch_size=8
    )
    assert (estimate.batch_size, estimate.result.status) == (8, Status.CAPPED)


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast")  # PyTorch 2.4 calls it itself
def test_checkpointing_saves_memory() -> None:
    class Block(nn.Module):
        def __init__(self, keep: bool) -> None:
            super().__init__()
            self.keep = keep
            self.inner = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256))

        def forward(self, x: Tensor) -> Tensor:
            if self.keep:
                return self.inner(x)  # type: ignore[no-any-return]
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    sample = (torch.randn(2, 256), torch.randn(2, 256))
    plain, saving = (
        estimate_max_batch(
            nn.Sequential(*[Block(keep) for _ in range(4)]), sample, gpu=unnamed_gpu(4 * GIB)
        ).batch_size
        for keep in (True, False)
    )
    assert saving > 2 * plain


def test_accumulation_keeps_gradients_alive() -> None:
    peaks = [
        estimate_peak_memory(
            nn.Sequential(nn.Linear(256, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 10)),
            SAMPLE,
            batch_size=8,
            gpu="t4",
            accumulate=accumulate,
            optimizer="sgd",
        ).peak_allocated_bytes
        for accumulate in (False, True)
    ]
    assert peaks[1] > peaks[0] + 32 * MIB


def test_nothing_fits() -> None:
    model = nn.Linear(20000, 20000, device="meta")
    sample = (torch.randn(2, 20000), torch.randn(2, 20000))

    estimate = estimate_max_batch(model, sample, gpu=unnamed_gpu(3 * GIB))

    assert (estimate.batch_size, estimate.result.status) == (0, Status.NOTHING_FITS)
    assert estimate.result.next_failure is not None
    json.dumps(estimate.to_dict(), allow_nan=False)


def test_reading_a_value_is_an_error_with_its_location() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(256, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y * 2 if y.sum().item() > 0 else y

    model = nn.Sequential(nn.Identity(), Reads())
    with pytest.raises(
        StepError, match=r"the step reads a value of a tensor .* in 1 at .*test_estimator"
    ):
        estimate_max_batch(model, SAMPLE, gpu="t4")


def test_gpus_with_the_same_kernels_share_their_traces() -> None:
    """A model without attention uses the same kernels on every GPU."""
    calls = itertools.count()  # which an estimate does not put back, as it does variables

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            next(calls)
            return super().forward(x)

    gpus = [find_gpu(name) for name in ("t4", "rtx3090", "h100")]
    together = estimate_on_gpus(TrainingSetup(Counts(256, 10), SAMPLE), gpus, ProbeOptions())
    at_the_answers = len({estimate.batch_size for estimate in together})
    one_step_each_and_a_second = len(TRACED_SIZES) + STEPS - 1
    assert next(calls) == one_step_each_and_a_second + at_the_answers
    apart = [estimate_max_batch(nn.Linear(256, 10), SAMPLE, gpu=gpu) for gpu in gpus]
    assert [e.batch_size for e in together] == [e.batch_size for e in apart]


def test_the_slope_counts_what_is_alive_at_the_peak() -> None:
    estimate = estimate_max_batch(mlp(), SAMPLE, gpu="t4", optimizer="sgd")

    model = estimate.result.memory_model
    assert model is not None
    # Inputs and labels, the hidden layer before and after ReLU, and the gradient of it.
    assert model.per_sample_bytes == pytest.approx(256 * 4 + 8 + 3 * 1024 * 4, rel=0.02)
    peak = max(p.peak_reserved_bytes or 0 for p in estimate.result.probes if p.fits)
    assert model.peak_bytes(estimate.batch_size) == pytest.approx(peak)


def test_the_search_for_the_next_gpu_starts_near_the_last_answer() -> None:
    gpus = [find_gpu(name) for name in ("rtx3090", "rtx4090")]

    first, second = estimate_on_gpus(TrainingSetup(mlp(), SAMPLE), gpus, ProbeOptions())

    # How many probes follow depends on the holes in the allocator, which differ.
    begun = [
        estimate.result.probes[0].batch_size / estimate.batch_size for estimate in (first, second)
    ]
    assert abs(begun[1] - 1) < 0.01 < abs(begun[0] - 1)


def test_unknown_gpu() -> None:
    with pytest.raises(UsageError, match="did you mean RTX 3090"):
        estimate_max_batch(mlp(), SAMPLE, gpu="rtx 309")


def test_invalid_models_and_samples() -> None:
    with pytest.raises(
        UsageError, match=r"the model is an object of type str; it must be a torch.nn.Module"
    ):
        estimate_max_batch("model", SAMPLE, gpu="t4")  # type: ignore[arg-type]
    with pytest.raises(SampleError, match="there is no example batch"):
        estimate_max_batch(mlp(), gpu="t4")


@pytest.mark.parametrize("extra_rows", [0, 16])
def test_memory_that_grows_with_the_square_of_the_batch(extra_rows: int) -> None:
    """The traced sizes show only a small deviation from a line."""
    queue = torch.zeros(extra_rows, 256)

    def similarities(output: Tensor, batch: Tensor) -> Tensor:
        rows = torch.cat([output, queue])
        return (rows @ rows.T).logsumexp(1).mean()

    model, sample = nn.Linear(256, 256), torch.randn(3, 256)
    gpu = replace(unnamed_gpu(2 * GIB), overhead_bytes=0)
    estimate = estimate_max_batch(model, sample, loss_fn=similarities, gpu=gpu)

    answer = estimate.batch_size
    assert 2 * 4 * answer**2 < 2 * GIB < 8 * 4 * answer**2
    assert not any("traced by itself" in warning for warning in estimate.result.warnings)
    # 5 % more memory, 2 % less: half as many examples.
    assert 0.97 * answer < estimate.low < 0.98 * answer
    assert 1.008 * answer < estimate.high < 1.012 * answer


def test_no_huge_batch_is_made_if_every_size_is_traced() -> None:
    sizes = []

    def make_batch(batch_size: int) -> list[Tensor]:
        sizes.append(batch_size)
        return [torch.zeros(256) for _ in range(batch_size)]

    def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss: Tensor = sum(model(x).expand(1 << 18).exp().sum() for x in batch)
        return loss

    gpu = replace(unnamed_gpu(40 * MIB), overhead_bytes=0)
    estimate = estimate_max_batch(nn.Linear(256, 1), make_batch=make_batch, step=step, gpu=gpu)

    assert 0 < estimate.batch_size < 32
    assert max(sizes) <= 16 * estimate.batch_size


def test_sizes_may_be_numpy_integers_but_not_fractions() -> None:
    sizes: dict[str, Any] = {"max_batch_size": np.int64(64), "multiple_of": np.int32(8)}
    estimate = estimate_max_batch(mlp(), SAMPLE, gpu="t4", **sizes)
    assert json.loads(json.dumps(estimate.to_dict()))["batch_size"] == 64
    with pytest.raises(UsageError, match=r"maximum batch size must be a whole number, not 2\.5"):
        estimate_max_batch(mlp(), SAMPLE, gpu="t4", max_batch_size=2.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"batch_size must be a whole number, not 2\.5"):
        estimate_peak_memory(mlp(), SAMPLE, batch_size=2.5, gpu="t4")  # type: ignore[arg-type]


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(StepError, match=r"without a shape, .*Try running one batch through it"):
        estimate_max_batch(nn.LazyLinear(10), SAMPLE, gpu="t4")


def test_a_step_may_train_with_its_own_optimizer() -> None:
    """It needs the memory of a built-in optimizer, and the user's model is not trained."""
    model = mlp()
    own = torch.optim.Adam(model.parameters())
    before = copy.deepcopy(model.state_dict())

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        torch.autograd.backward(loss)
        own.step()
        own.zero_grad()

    by_itself = estimate_peak_memory(model, SAMPLE, step=step, batch_size=64, gpu="t4")
    by_us = estimate_peak_memory(model, SAMPLE, optimizer="adam", batch_size=64, gpu="t4")

    # A loop keeps the output and the loss of the step before a little longer than a function.
    kept = 64 * 10 * 4 + 512
    assert 0 <= by_us.peak_allocated_bytes - by_itself.peak_allocated_bytes <= kept
    assert by_itself.warnings == ()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not own.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_models_of_a_step_are_counted() -> None:
    model, teacher = mlp(), nn.Linear(1000, 2560)
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
            assert teacher.weight.numel()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    held = sum(value.nbytes for value in [*average.values(), *teacher.parameters()])
    alone = estimate_peak_memory(model, SAMPLE, batch_size=64, gpu="t4")
    beside = estimate_peak_memory(model, SAMPLE, step=step, batch_size=64, gpu="t4")

    assert beside.peak_allocated_bytes - alone.peak_allocated_bytes == pytest.approx(held, rel=0.01)


def test_an_optimizer_that_never_steps_is_named() -> None:
    """Otherwise the estimate would lack its states."""
    own = torch.optim.AdamW(mlp().parameters())

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        own.zero_grad()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    estimate = estimate_peak_memory(mlp(), SAMPLE, step=step, batch_size=64, gpu="t4")
    assert ["AdamW" in warning and "made no step" in warning for warning in estimate.warnings] == [
        True
    ]


def test_a_step_with_an_optimizer_out_of_reach_cannot_be_simulated() -> None:
    """It would train the original model, not its copy without data."""
    model = mlp()

    @functools.cache
    def own() -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    own()

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        own().step()
        loss: Tensor = model(batch[0]).sum()
        return loss

    with pytest.raises(StepError, match=r"Adam .*made it for the original.*batchfinder find"):
        estimate_max_batch(model, SAMPLE, step=step, gpu="t4")


def test_a_step_whose_passes_depend_on_values_cannot_be_simulated() -> None:
    own = torch.optim.LBFGS((model := mlp()).parameters())

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        def closure() -> Tensor:
            own.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            torch.autograd.backward(loss)
            return loss

        own.step(closure)  # type: ignore[no-untyped-call]

    with pytest.raises(StepError, match=r"the step reads a value of a tensor.*batchfinder find"):
        estimate_max_batch(model, SAMPLE, step=step, gpu="t4")


class Held:
    teacher = nn.Linear(256, 10)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), Held.teacher(batch[0]))

    with pytest.raises(StepError, match=r"the step uses a Linear.*batchfinder find"):
        estimate_max_batch(mlp(), SAMPLE, step=step, gpu="t4")
    assert Held.teacher.weight.grad is None


def test_optimizers_in_hooks_are_counted_without_gradients() -> None:
    def peak(is_run_by_hooks: bool) -> int:
        model = mlp()
        optimizers: dict[Any, Any] = {one: torch.optim.Adam([one]) for one in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            torch.autograd.backward(loss)
            for parameter in () if is_run_by_hooks else optimizers:
                update(parameter)

        for parameter in optimizers if is_run_by_hooks else ():
            parameter.register_post_accumulate_grad_hook(update)
        estimate = estimate_peak_memory(model, SAMPLE, step=step, batch_size=4, gpu="t4")
        assert not any(optimizer.state for optimizer in optimizers.values())
        return estimate.peak_allocated_bytes

    states = 2 * sum(parameter.nbytes for parameter in mlp().parameters())
    assert states < peak(True) < peak(False)


@pytest.mark.parametrize("strategy", ["zero1", FSDP])
def test_a_complete_training_step_is_not_sharded(strategy: str) -> None:
    own = torch.optim.SGD((model := mlp()).parameters())

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        torch.autograd.backward(model(batch[0]).sum())
        own.step()

    with pytest.raises(StepError, match=r"returned None.*sharding cannot be added"):
        estimate_on_gpus(
            TrainingSetup(model, SAMPLE, step=step), [find_gpu("t4")], ProbeOptions(),
            cluster=Cluster(strategy, world_size=2),
        )  # fmt: skip
