"""One fault met from Python, without the command line; prints one JSON object.

    python scripts/faults/in_process.py in_process '{"stage": "loss", "deed": "oom", "at": 2}'

``in_process`` searches in this process and tells what was not as before; ``loading`` loads the
setup in a worker, with little patience; ``guard`` takes steps that survive it;
``trainer`` sets the batch size of a Trainer.
"""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from faults import ROOM_BYTES
from search_here import search_here
from targets import Fault, Faulty, FaultySGD, build_setup

from batchfinder import OOMGuard, TrainingSetup, set_max_batch
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.probing.workers.supervisor import Supervisor

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from training.frameworks.trainers import Texts, Trainer

LOADING_SECONDS = 15.0
NO_FAULT = {"stage": "none", "deed": ""}
EXAMPLES = 8
GUARDED_STEPS = 3
TARGET = f"{Path(__file__).parent}/targets.py:build"


def main() -> None:
    """Meet the fault."""
    how, arguments = sys.argv[1], json.loads(sys.argv[2])
    report: dict[str, Any] = {"batch_size": None, "error": "", "changed": []}
    try:
        MEET[how](report, arguments)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told, whatever it is
        report["error"] = f"{type(error).__name__}: {error}"
    torch.set_default_device("cpu")
    print(json.dumps(report))


def search_in_process(report: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Search with an optimizer that has states already, and compare all that there was."""
    fault = Fault(**arguments)
    setup = build_setup(fault)
    optimizer = FaultySGD(setup.model.parameters(), fault)
    setup = dataclasses.replace(setup, optimizer=optimizer)
    step, make_batch = setup.step, setup.make_batch
    assert step is not None
    assert make_batch is not None
    step(setup.model, make_batch(1)).backward()  # at 1, where no fault of these is
    optimizer.step()
    before = state_of(setup)
    try:
        result = search_here(setup, memory_limit=CpuDevice().held_bytes() + ROOM_BYTES)
        report["batch_size"] = result.batch_size
    finally:
        after = state_of(setup)
        report["changed"] = [name for name in before if not same(before[name], after[name])]


def state_of(setup: TrainingSetup) -> dict[str, Any]:
    """All that a search in this process could change."""
    parameters = list(setup.model.parameters())
    assert isinstance(setup.optimizer, torch.optim.Optimizer)
    defaults = {
        "default_dtype": torch.get_default_dtype(),
        "default_device": str(torch.get_default_device()),
    }
    with torch.device("cpu"):
        return defaults | {
            "model": {k: v.clone() for k, v in setup.model.state_dict().items()},
            "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
            "optimizer": [
                value.clone() for s in setup.optimizer.state.values() for value in s.values()
            ],
            "training": [module.training for module in setup.model.modules()],
            "random": random.getstate(),
            "torch_random": torch.get_rng_state(),
            "grad_mode": torch.is_grad_enabled(),
            "folder": str(Path.cwd()),
            "limit": resource.getrlimit(resource.RLIMIT_DATA),
            "threads": threading.active_count(),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        }


def same(one: Any, other: Any) -> bool:
    """Whether two of these are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def load_in_a_worker(report: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Load the setup in a worker."""
    source = SetupSource(TARGET, arguments)
    options = ProbeOptions(device="cpu", memory_limit=2**30)
    launch = lambda: WorkerProcess(show_output=False)  # noqa: E731
    worker = ProcessWorker(launch, source, loading_timeout_seconds=LOADING_SECONDS)
    Supervisor(worker, options).close()


def guarded_steps(report: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Take steps, and compare the model after each with one that met no fault."""
    guard, reference = (guarded(Fault(**each)) for each in (arguments, NO_FAULT))
    rows = torch.randn(EXAMPLES, 12)
    trained = lambda: {k: v.clone() for k, v in guard.model.state_dict().items()}  # noqa: E731
    expected = trained()
    try:
        for _ in range(GUARDED_STEPS):
            guard.step(rows)
            reference.step(rows)
            expected = reference.model.state_dict()
        report["batch_size"] = guard.batch_size
    finally:
        now = trained()
        report["changed"] = [k for k in now if not torch.allclose(now[k], expected[k])]


def guarded(fault: Fault) -> OOMGuard:
    """Return a guard of a model whose output is the same in parts.

    In double precision, because the bias is so near zero that sums in another order change it.
    """
    model = Faulty(fault).eval().double()
    model.register_forward_pre_hook(lambda _, inputs: fault.begin(len(inputs[0])))

    def loss_fn(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        fault.reach("loss")
        return output.square().mean()

    return OOMGuard(model, FaultySGD(model.parameters(), fault), loss_fn)


def set_in_a_trainer(report: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Set the batch size of a Trainer, and compare all else that it has."""
    fault = Fault(**arguments)
    trainer: Any = Trainer(Texts(600), per_device_train_batch_size=1, gradient_accumulation_steps=2)

    def before_forward(_: Any, __: Any, inputs: dict[str, torch.Tensor]) -> None:
        fault.begin(len(inputs["labels"]))
        fault.reach("forward")

    def after_forward(_: Any, __: Any, output: Any) -> None:
        output.loss.register_hook(lambda _: fault.reach("backward"))

    trainer.model.register_forward_pre_hook(before_forward, with_kwargs=True)
    trainer.model.register_forward_hook(after_forward)

    def state() -> dict[str, Any]:
        model = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return {**vars(trainer.args), "model": model, "random": torch.get_rng_state()}

    before, answer = state(), 1
    try:
        answer = set_max_batch(trainer, device="cpu", max_batch_size=8).batch_size
        report["batch_size"] = answer
    finally:
        after = state()
        expected = {**before, "per_device_train_batch_size": answer or 1}
        report["changed"] = [name for name in after if not same(expected[name], after[name])]


MEET = {
    "in_process": search_in_process,
    "loading": load_in_a_worker,
    "guard": guarded_steps,
    "trainer": set_in_a_trainer,
}

if __name__ == "__main__":
    main()
