from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from training.frameworks.trainers import Trainer, opened

from batchfinder import TrainingSetup
from batchfinder.errors import StepError, UsageError
from batchfinder.training.placement import move_to_device
from batchfinder.training.setup import OptimizerOfModel
from batchfinder.training.step import TrainingStep
from batchfinder.training.user_traceback import error_line

CPU = torch.device("cpu")
BATCH = torch.randn(3, 4), torch.tensor([0, 1, 1])


def step_of(model: nn.Module | None = None, **options: Any) -> TrainingStep:
    how = {
        name: options.pop(name)
        for name in ("precision", "compiled", "accumulate")
        if name in options
    }
    return TrainingStep(TrainingSetup(model or nn.Linear(4, 2), **options), CPU, **how)


def run(step: TrainingStep, batch: Any = BATCH, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        step.forward_backward(batch)
    step.optimizer_step()


def test_a_step_is_the_one_that_a_loop_of_ones_own_takes() -> None:
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    step = step_of(model, optimizer=lambda params: Adam(params, lr=0.1))
    optimizer = Adam(twin.parameters(), lr=0.1)
    for _ in range(3):
        run(step)
        torch.autograd.backward(nn.functional.cross_entropy(twin(BATCH[0]), BATCH[1]))
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert step.warnings == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_module_and_the_states_of_an_optimizer_follow_the_model(fused: bool) -> None:
    model = nn.Linear(4, 2)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(2)).eval()
    optimizer = Adam(model.parameters(), fused=fused)
    run(step_of(model, optimizer=optimizer))
    move_to_device(TrainingSetup(model, None, weighted, optimizer), torch.device("meta"))
    for state in optimizer.state.values():
        assert state["exp_avg"].is_meta
        # A fused kernel reads the counters where it runs; the others keep them on the host.
        assert state["step"].is_meta == fused
    assert weighted.weight is not None
    assert weighted.weight.is_meta
    assert weighted.training


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(StepError, match=r"on the meta device.*to_empty.*estimate` takes it"):
        step_of(nn.Linear(4, 2, device="meta"))


def test_micro_batches_add_up_their_gradients() -> None:
    model = nn.Linear(4, 2)
    step = step_of(model)
    step.forward_backward(BATCH)
    assert model.weight.grad is not None
    once = model.weight.grad.clone()
    step.forward_backward(BATCH)
    torch.testing.assert_close(model.weight.grad, 2 * once)


def test_after_the_optimizer_step_the_gradients_are_gone() -> None:
    model = nn.Linear(4, 2)
    run(step_of(model))
    assert model.weight.grad is None


def test_release_lets_go_of_batch_output_and_gradients() -> None:
    model = nn.Linear(4, 2)
    step = step_of(model)
    batch = torch.randn(3, 4)
    kept = weakref.ref(batch)
    step.forward_backward(batch)
    del batch
    assert kept() is not None
    step.release()
    gc.collect()
    assert kept() is None
    assert model.weight.grad is None


def test_the_model_is_trained_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout()).eval()
    step_of(model)
    assert [module.training for module in model.modules()] == [True, True, True]


def test_a_part_that_its_owner_keeps_from_training_stays_so() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2).eval())
    step_of(model)
    assert not model[1].training


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_precision(precision: str, dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        seen.append(output.dtype)
        return output.float().sum()

    step = step_of(precision=precision, loss_fn=loss_fn)
    run(step)
    run(step)
    assert seen == [dtype, dtype]
    assert all(p.dtype is torch.float32 for p in step.setup.model.parameters())
    assert {len(state) for state in step.optimizer.state.values()} == {3}


def test_fp16_makes_the_optimizers_states_even_if_the_gradients_overflow() -> None:
    step = step_of(precision="fp16", loss_fn=lambda output, batch: output.float().sum() * 1e38)
    run(step)
    assert len(step.optimizer.state) == 2


def test_a_loss_function_gets_output_and_batch() -> None:
    seen = []

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        seen.append((tuple(output.shape), batch is BATCH))
        return output.mean()

    run(step_of(loss_fn=loss_fn))
    assert seen == [((3, 2), True)]


def test_a_step_of_the_users_own_replaces_forward_pass_and_loss() -> None:
    model = nn.Linear(4, 2)
    seen = []

    def own_step(module: nn.Module, batch: Any) -> Tensor:
        seen.append((module is model, batch is BATCH))
        loss: Tensor = module(batch[0]).square().sum()
        return loss

    run(step_of(model, step=own_step))
    assert seen == [(True, True)]


def test_an_optimizer_instance_is_the_one_that_steps() -> None:
    model = nn.Linear(4, 2)
    mine = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = step_of(model, optimizer=mine)
    run(step)
    assert step.optimizer is mine
    assert len(mine.state) == 2


def test_an_optimizer_that_demands_a_closure_is_refused_with_a_way_out() -> None:
    model = nn.Linear(4, 2)
    own = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for spec in (torch.optim.LBFGS, own, OptimizerOfModel(lambda _: own, "the module")):
        with pytest.raises(StepError, match=r"LBFGS demands a closure.*let step"):
            run(step_of(model, optimizer=spec))

    def train(model: nn.Module, batch: Any) -> None:
        def closure() -> Tensor:
            own.zero_grad()
            loss: Tensor = model(batch[0]).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        own.step(closure)  # type: ignore[no-untyped-call]

    before = model.weight.clone()
    step = step_of(model, step=train, optimizer=own)
    run(step)
    assert not torch.equal(model.weight, before)
    assert not step.warnings


def test_a_mapping_goes_in_as_keywords_and_its_loss_comes_out() -> None:
    class Net(nn.Linear):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(inputs)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    step = step_of(Net(4, 2))
    run(step, {"inputs": BATCH[0], "labels": BATCH[1]})
    assert step.warnings == []


def test_a_loss_that_nobody_would_train_with_is_told_once() -> None:
    step = step_of()
    run(step, BATCH[0])
    run(step, BATCH[0])
    (warning,) = step.warnings
    assert warning.startswith("the loss is the mean of the model's outputs")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_a_warning(value: float) -> None:
    step = step_of(loss_fn=lambda output, batch: output.sum() * value)
    run(step)
    step.check_loss()
    (warning,) = step.warnings
    assert warning.startswith("the loss is ")
    assert "The measured memory is valid" in warning


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda output, batch: None,
            "loss_fn gave an object of type NoneType as the loss, not a tensor",
        ),
        (lambda output, batch: output, r"loss_fn gave a loss of shape \(3, 2\); reduce it"),
        (lambda output, batch: output.sum().detach(), "nothing to train; look for torch.no_grad"),
    ],
    ids=["None", "not reduced", "detached"],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        run(step_of(loss_fn=loss))


class Stateless(Optimizer):
    """Keeps no states. May demand a closure, as SAM does."""

    def __init__(self, parameters: Any, *, demands: bool = False) -> None:
        super().__init__(parameters, {})
        self.demands = demands

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move against the gradients."""
        if self.demands:
            assert closure is not None
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.data.sub_(parameter.grad)


def test_an_optimizer_that_asserts_a_closure_is_refused_with_a_way_out() -> None:
    with pytest.raises(StepError, match=r"Stateless demands a closure.*let step"):
        run(step_of(optimizer=lambda parameters: Stateless(parameters, demands=True)))


@pytest.mark.parametrize(("steps", "remarks"), [(True, 0), (False, 1)])
def test_an_optimizer_without_states_has_made_a_step_if_it_was_called(
    steps: bool, remarks: int
) -> None:
    own = Stateless((model := nn.Linear(4, 2)).parameters())

    def alone(model: nn.Module, batch: Any) -> None:
        torch.autograd.backward(model(batch[0]).sum())
        if steps:
            own.step()

    step = step_of(model, step=alone)
    run(step)
    step.check_optimizers()
    assert ["Stateless, which the step reaches, made no" in text for text in step.warnings] == (
        [True] * remarks
    )


def test_a_step_that_runs_the_backward_pass_is_told_what_to_return() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).exp().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(StepError, match="If step trains by itself, try return None; else return"):
        run(step_of(step=step))


def test_a_state_that_keeps_the_graph_of_the_step_before_is_to_be_detached() -> None:
    state = [torch.zeros(())]

    def loss(output: Tensor, batch: Any) -> Tensor:
        state[0] = (output * state[0]).sum() + output.exp().sum()
        return state[0]

    with pytest.raises(StepError, match=r"kept from an earlier step, as .* RNN, detach\(\) it"):
        run(step_of(loss_fn=loss), micro_batches=2)


def test_a_step_may_train_a_part_with_an_optimizer_of_its_own() -> None:
    """As a GAN's: the discriminator inside the step, the generator after it."""
    model = nn.ModuleDict({"generator": nn.Linear(4, 4), "judge": nn.Linear(4, 1)})
    own = Adam(model["judge"].parameters())

    def step(model: nn.ModuleDict, batch: Any) -> Tensor:
        made = model["generator"](batch[0])
        own.zero_grad()
        torch.autograd.backward(model["judge"](made.detach()).exp().mean())
        own.step()
        loss: Tensor = -model["judge"](made).mean()
        return loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(step_of(model, step=step, optimizer=Adam(model["generator"].parameters())))
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name])


def test_gradients_live_on_until_a_step_clears_them() -> None:
    model = nn.Linear(4, 2)
    optimizer = Adam(model.parameters())
    alive: list[bool] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        alive.append(next(model.parameters()).grad is not None)
        optimizer.zero_grad()
        return loss

    ours = step_of(model, step=step, optimizer=optimizer)
    run(ours)
    run(ours)
    assert alive == [False, True]
    assert not ours.late_gradient_bytes  # they are measured, so nothing needs a warning


def test_a_loss_of_one_number_in_a_list_is_a_loss() -> None:
    run(step_of(loss_fn=lambda output, batch: output.sum().reshape(1)))


def test_an_unknown_precision() -> None:
    with pytest.raises(UsageError, match="precision is fp32, bf16 or fp16, not 'fp8'"):
        step_of(precision="fp8")


def test_the_users_error_comes_out_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        run(step_of(), torch.ones(2, 5))
    line = error_line(raised.value)
    assert "raised while the step ran on sample [2, 5]. If the sample is one example" in line
    assert "make_batch" not in line


def test_an_error_of_shapes_names_a_part_that_did_not_grow_with_the_batch() -> None:
    patches = TrainingSetup(nn.Linear(4, 4), step=lambda model, x: (model(x[0]) - x[1]).sum())
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        run(TrainingStep(patches, CPU), (torch.ones(2, 4), torch.ones(8, 4)))
    assert "sample[1] [8, 4]. If the sample is one example" in error_line(raised.value)
    assert "parts of another size should grow, give make_batch" in error_line(raised.value)


def test_a_transformers_model_trains_on_its_own_batch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    tokens = torch.randint(11, (2, 8))
    batch = transformers.BatchEncoding({"input_ids": tokens, "labels": tokens})
    step = step_of(transformers.GPT2LMHeadModel(config))
    run(step, batch)
    assert step.warnings == []


@pytest.mark.parametrize("steps", [1, 3])
def test_a_trainer_has_all_micro_batches_of_a_step_on_the_device(steps: int) -> None:
    class Ahead(Trainer):
        def get_batch_samples(self, batches: Any, count: int) -> tuple[list[Any], Any]:
            return [next(batches) for _ in range(count)], None

        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: None = None) -> Any:
            return super().compute_loss(model, inputs)

    setup, _ = opened(Ahead(gradient_accumulation_steps=steps))
    step = TrainingStep(setup, CPU)
    alive: list[weakref.ref[Any]] = []

    class Batch(dict[str, Any]): ...

    def next_batch() -> Batch:
        batch = Batch(setup.sample)
        alive.append(weakref.ref(batch))
        return batch

    for _ in range(2):
        for micro_batch in step.fetch(next_batch):
            step.forward_backward(micro_batch)
            assert sum(ref() is not None for ref in alive) == steps
        step.optimizer_step()
        del micro_batch
    assert len(alive) == 2 * steps
    step.release()
    assert not any(ref() for ref in alive)


def test_a_plain_loop_keeps_each_value_until_the_next_takes_its_place() -> None:
    """The order of a loop at module level, which runs beside it and says the same."""
    made: list[list[weakref.ref[Any]]] = []
    seen: list[tuple[str, int, int, int]] = []

    class Batch(dict[str, Any]): ...

    def look(moment: str) -> None:
        alive = [sum(ref() is not None for ref in kind) for kind in made]
        seen.append((moment, alive[0], alive[1], alive[2]))

    class Net(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            look("forward")
            output = super().forward(inputs)
            made[1].append(weakref.ref(output))
            return output

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        look("loss")
        loss = output.square().mean()
        made[2].append(weakref.ref(loss))
        return loss

    def next_batch() -> Batch:
        look("fetch")
        batch = Batch(inputs=torch.ones(3, 4))
        made[0].append(weakref.ref(batch))
        return batch

    model = Net(4, 2)
    step = step_of(model, loss_fn=loss_fn)
    made[:] = [[], [], []]
    for _ in range(3):
        for micro_batch in step.fetch(next_batch):
            step.forward_backward(micro_batch)
            del micro_batch
        look("optimizer")
        step.optimizer_step()
    by_us = seen[:]
    step.release()

    made[:], seen[:] = [[], [], []], []
    names: dict[str, Any] = {
        "model": model, "next_batch": next_batch, "loss_fn": loss_fn, "look": look,
        "optimizer": SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    exec(
        """
for _ in range(3):
    batch = next_batch()
    output = model(**batch)
    loss = loss_fn(output, batch)
    loss.backward()
    look("optimizer")
    optimizer.step()
    optimizer.zero_grad()
""",
        names,
    )
    assert by_us == seen
    assert [moment for moment in seen if moment[0] == "forward"][1:] == [("forward", 1, 1, 1)] * 2
    assert ("loss", 1, 1, 1) in seen


def test_what_a_step_of_the_users_returns_lives_on_and_may_carry_the_loss() -> None:
    outputs: list[weakref.ref[Any]] = []

    def step(model: nn.Module, batch: Any) -> Any:
        assert all(ref() is None for ref in outputs[:-1])
        assert not outputs or outputs[-1]() is not None
        logits = model(batch[0])
        outputs.append(weakref.ref(logits))
        return {"loss": logits.square().mean(), "logits": logits}

    by_user = step_of(step=step)
    for _ in range(3):
        run(by_user)
    by_user.release()
    assert outputs[-1]() is None


@pytest.mark.parametrize(("is_first", "held"), [(True, 0), (False, 7 * 2 * 4)])
def test_a_step_that_goes_on_has_an_old_output_of_its_own_size(is_first: bool, held: int) -> None:
    found: list[int] = []

    def block_bytes() -> int:
        tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
        return sum(tensor.numel() for tensor in tensors if tensor.dtype is torch.uint8)

    class Net(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            found.append(block_bytes())
            return super().forward(inputs)

    step = step_of(Net(4, 2), loss_fn=lambda output, batch: output.sum())
    before = block_bytes()
    step.begin(3, tuple, is_first=True)
    run(step, torch.ones(3, 4))
    step.release()
    step.begin(7, tuple, is_first=is_first)
    run(step, torch.ones(7, 4))
    step.release()
    assert [count - before for count in found] == [0, held]


def test_a_step_may_train_by_itself() -> None:
    """All of it, as loops do that need more than one pass or optimizer."""
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    own = Adam(model.parameters(), lr=0.1)

    def alone(model: nn.Module, batch: Any) -> None:
        own.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
        own.step()

    seen: list[str] = []
    by_itself = step_of(model, step=alone)
    by_us = step_of(twin, optimizer=Adam(twin.parameters(), lr=0.1))
    for _ in range(3):
        by_itself.forward_backward(BATCH, lambda: seen.append("after forward"))
        by_itself.optimizer_step()
        run(by_us)
    by_itself.check_loss()
    by_itself.check_optimizers()

    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert by_itself.trains_itself
    assert seen == []  # where the forward pass ends, nobody knows
    assert by_itself.warnings == []


def test_an_optimizer_of_another_model_is_told() -> None:
    model, other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.Linear(4, 2)
    for of, said in ((other, 1), (model, 0), (model[1], 0)):
        step = step_of(model, optimizer=SGD(of.parameters(), lr=0.1))
        run(step)
        step.check_optimizers()
        assert [
            text for text in step.warnings if "SGD, holds no parameter of the model" in text
        ] == (step.warnings)
        assert len(step.warnings) == said


def test_an_optimizer_given_beside_a_step_that_trains_by_itself_is_not_used() -> None:
    own = Adam((model := nn.Linear(4, 2)).parameters())

    def alone(model: nn.Module, batch: Any) -> None:
        torch.autograd.backward(model(batch[0]).sum())
        own.step()

    for optimizer, said in (("sgd", 1), (own, 0), (None, 0)):
        step = step_of(model, step=alone, optimizer=optimizer)
        run(step)
        assert len([warning for warning in step.warnings if "is not used" in warning]) == said


@pytest.mark.parametrize(
    ("options", "added"),
    [({"precision": "bf16"}, "precision bf16"), ({"accumulate": True}, "gradient accumulation")],
)
def test_to_a_step_that_trains_by_itself_nothing_can_be_added(
    options: dict[str, Any], added: str
) -> None:
    with pytest.raises(StepError, match=f"step returned None.*{added} cannot be added"):
        run(step_of(step=lambda model, batch: None, **options))


def test_a_scaler_of_the_users_skips_no_first_step() -> None:
    """A skipped step would leave its optimizer without the states that later steps allocate."""
    scaler = torch.amp.GradScaler("cpu")
    own = Adam((model := nn.Linear(4, 3)).parameters())

    def alone(model: nn.Module, batch: Any) -> None:
        loss = model(batch[0]).sum() * 1e36  # times the usual scale of 65536 it overflows
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(own)
        scaler.update()

    run(step_of(model, step=alone))
    assert own.state
