r"""Train at one batch size under a memory limit, and tell whether it survived.

The independent judge of the benchmarks: a plain training loop that knows nothing of batchfinder.

    python scripts/benchmarks/parts/train_at.py train.py:build_model 128 \
        --steps 50 --memory-limit 2GiB

Exits with 0 if every step ran, 3 if memory ran out, 1 on any other error, and prints one JSON
object: outcome ("survived", "oom", "error"), steps, step_seconds (the median), peak_bytes, reason,
and on CUDA how often the allocator flushed its cache to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
EXIT_CODES = {"survived": 0, "oom": 3, "error": 1}
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    # What oneDNN says when the memory for its weights or its scratch space is unavailable.
    "could not create a primitive",
    "could not create a memory",
    "could not execute a primitive",
    # The same of cuDNN and cuBLAS, whose workspaces are memory too.
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "unable to find an engine",
)


def main() -> None:
    """Run the steps in this process, print how it went, and exit with its code."""
    options = parse_arguments()
    seconds: list[float] = []
    try:
        train(options, seconds)
        outcome, reason = "survived", ""
    except Exception as error:  # noqa: BLE001 (whatever the model raises, it is the verdict)
        first_line = (str(error).splitlines() or [""])[0]
        outcome = "oom" if is_out_of_memory(error) else "error"
        reason = f"{type(error).__name__}: {first_line}"
    report = {
        "batch_size": options.batch_size,
        "outcome": outcome,
        "steps": len(seconds),
        "step_seconds": statistics.median(seconds) if seconds else None,
        "peak_bytes": peak_bytes(options.device),
        "reason": reason,
    }
    if torch.device(options.device).type == "cuda":
        statistics_now = torch.cuda.memory_stats(options.device)
        report["cache_flushes"] = statistics_now.get("num_alloc_retries", 0)
    print(json.dumps(report))
    sys.exit(EXIT_CODES[outcome])


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="FILE.py:FUNCTION")
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--arguments", type=json.loads, default={}, help="of the function, in JSON")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    parser.add_argument("--memory-limit", type=parse_size, help="such as 2GiB, or bytes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def parse_size(text: str) -> int:
    """The bytes in a size such as 2GiB."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * UNITS.get(unit, 1))


def train(options: argparse.Namespace, seconds: list[float]) -> None:
    """Train as a plain PyTorch script does, and add the seconds of each step to the list.

    As in the loops of most tutorials, the names of one step live on until the next one reuses
    them: the output is still there during the backward pass.
    """
    device = torch.device(options.device)
    model, make_batch = load(options.target, options.arguments)
    model.to(device).train()
    optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-4)
    run_model: Any = torch.compile(model, dynamic=True) if options.compile else model
    dtype = PRECISIONS[options.precision]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    limit_memory(options.memory_limit, device)

    start = time.perf_counter()
    while len(seconds) < options.steps and time.perf_counter() - start < options.seconds:
        step_start = time.perf_counter()
        batch = tree_map(lambda leaf: leaf.to(device), make_batch(options.batch_size))
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            output, loss = forward(run_model, batch)  # noqa: RUF059 - lives on, see above
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - step_start)


def forward(model: nn.Module, batch: Any) -> tuple[Any, torch.Tensor]:
    """The model's output, and its loss: its own, or cross-entropy with the targets."""
    if isinstance(batch, dict):
        output = model(**batch)
        return output, output["loss"]
    inputs, targets = batch
    output = model(inputs)
    return output, nn.functional.cross_entropy(output, targets)


def load(
    target: str, arguments: Mapping[str, Any] | None = None
) -> tuple[nn.Module, Callable[[int], Any]]:
    """The model that FILE.py:FUNCTION builds, and a function that makes a batch of n.

    The function returns the model, with ``build_sample`` beside it, or the model and its sample.
    """
    path, _, name = target.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("target", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = call_with(getattr(module, name), arguments or {})
    if isinstance(built, tuple):
        model, sample = built
    else:
        model, sample = built, call_with(module.build_sample, arguments or {})
    sample_size = len(tree_leaves(sample)[0])

    def make_batch(batch_size: int) -> Any:
        examples = torch.tensor(
            list(itertools.islice(itertools.cycle(range(sample_size)), batch_size))
        )
        return tree_map(lambda leaf: leaf[examples], sample)

    return model, make_batch


def call_with(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What it returns, given those arguments that it takes."""
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in taken})


def limit_memory(limit: int | None, device: torch.device) -> None:
    """Let this process have no more: the operating system on the CPU, the allocator on CUDA."""
    if limit is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def peak_bytes(device: str) -> int | None:
    """The most memory this process ever held."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, by the error's type or its text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text.lower() in str(error).lower() for text in OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
