"""One simulated rank of many: its memory, and that the other ranks cost no time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_fully_shard
from targets import states_of_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.cli.app import cli
from batchfinder.errors import StepError, UsageError
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.gpus import nccl_bytes
from batchfinder.simulation.trace.trace import EMPTY_CACHE, Kind, Trace
from batchfinder.simulation.tracing.data_parallel import STRATEGIES, Cluster, _Parts, largest_part
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.setup import OptimizerSpec, TrainingSetup
from batchfinder.units import MIB

WIDTH = 256
BLOCKS = 4


def model() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(BLOCKS))
    )


BLOCK_BYTES = WIDTH * WIDTH * 4
MODEL_BYTES = BLOCKS * BLOCK_BYTES


def trace(
    strategy: str, world_size: int, precision: str = "fp32", optimizer: OptimizerSpec = "adamw"
) -> Trace:
    setup = TrainingSetup(model(), torch.randn(2, WIDTH), optimizer=optimizer)
    return traced(setup, strategy, world_size, precision)


def traced(setup: TrainingSetup, strategy: str, world_size: int, precision: str = "fp32") -> Trace:
    options = ProbeOptions(precision=precision)
    return StepTraces(setup, options, (8, 0), Cluster(strategy, world_size)).at(4).example


def most_alive(trace: Trace, kind: Kind | None = None) -> int:
    """Return the peak bytes of all tensors, or of one kind."""
    alive = most = 0
    for event in trace.events:
        if event == EMPTY_CACHE:
            continue
        storage = trace.storages[event if event >= 0 else ~event]
        if storage.kind is not Kind.WORKSPACE and kind in (None, storage.kind):
            alive += storage.size_bytes if event >= 0 else -storage.size_bytes
            most = max(most, alive)
    return most


@pytest.mark.parametrize(
    ("strategy", "parameters", "states"),
    [
        ("ddp", 1, 1),
        ("zero1", 1, 4),
        pytest.param("zero2", 4, 4, marks=needs_fully_shard),
        pytest.param("fsdp", 4, 4, marks=needs_fully_shard),
    ],
)
def test_memory_of_each_of_four_ranks(strategy: str, parameters: int, states: int) -> None:
    one = trace(strategy, 4)
    assert most_alive(one, Kind.PARAMETER) == MODEL_BYTES // parameters
    # AdamW has two states and a counter per parameter.
    counters = most_alive(one, Kind.OPTIMIZER_STATE) - 2 * MODEL_BYTES // states
    assert 0 <= counters <= BLOCKS * 8


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_as_much_as_in_a_real_job(strategy: str, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    target = Path(states_of_ranks.__file__)
    job = subprocess.run(
        [*command, str(target), strategy], stdout=subprocess.PIPE, check=True, timeout=170
    )
    everybody = json.loads(job.stdout)
    one = traced(TrainingSetup(*states_of_ranks.build(), optimizer="adamw"), strategy, ranks)
    kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
    held = {kind.value: most_alive(one, kind) for kind in kinds}
    if strategy in ("ddp", "zero1"):
        held["gradients"] -= held["parameters"]  # the buckets, which DDP shows to nobody
    assert held == everybody[0]
    assert all(held[kind] >= other[kind] for other in everybody for kind in held)


def test_reducing_gradients_needs_a_copy_of_them() -> None:
    gradients = most_alive(trace("ddp", 4), Kind.GRADIENT)
    assert gradients == 2 * MODEL_BYTES


def test_sync_batch_norm_is_simulated_as_batch_norm() -> None:
    def most(convert: Callable[[nn.Module], nn.Module]) -> int:
        model = convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
        return most_alive(traced(TrainingSetup(model, torch.randn(2, 3, 9, 9)), "ddp", 4))

    assert most(nn.SyncBatchNorm.convert_sync_batchnorm) == most(lambda model: model) > 0


@needs_fully_shard
def test_fsdp_gathers_few_blocks_at_a_time_and_zero2_all() -> None:
    by_block, at_once = (most_alive(trace(strategy, 64)) for strategy in ("fsdp", "zero2"))
    assert at_once - by_block >= BLOCK_BYTES
    assert by_block < MODEL_BYTES + 2 * BLOCK_BYTES
    assert most_alive(trace("fsdp", 64, "bf16")) < 0.7 * by_block


@needs_fully_shard
def test_more_ranks_are_not_more_work() -> None:
    few, many = trace("fsdp", 8), trace("fsdp", 512)
    assert few.events == many.events


@needs_fully_shard
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_ranks_cost_no_operations(strategy: str) -> None:
    assert operations_of(strategy, 8) == operations_of(strategy, 512)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of operations."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of(strategy: str, world_size: int) -> int:
    """Count the operations needed to shard a model."""
    setup = TrainingSetup(model(), torch.randn(2, WIDTH), optimizer="adamw")
    cluster = Cluster(strategy, world_size)
    with cluster.joined() as mesh, Counter() as counter:  # type: ignore[no-untyped-call]
        cluster.spread(setup, mesh, "fp32")
    return int(counter.count)


@given(st.integers(1, 40), st.integers(1, 60))
def test_parts_match_torch_chunk(rows: int, parts: int) -> None:
    whole = torch.arange(rows * 2).reshape(rows, 2)
    ours = _Parts(whole, parts, 0)
    theirs = torch.chunk(whole, parts)
    assert all(torch.equal(ours[index], part) for index, part in enumerate(theirs))
    assert all(ours[index].numel() == 0 for index in range(len(theirs), parts))


def test_a_partial_optimizer_gets_the_largest_part() -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in (5, 1, 4, 3)]
    assert [len(p) for p in largest_part(parameters, 2)] == [4, 3]
    assert len(largest_part(parameters, 9)) == 1


@needs_fully_shard
def test_the_model_and_the_process_stay_as_they_were() -> None:
    ours = model()
    StepTraces(
        TrainingSetup(ours, torch.randn(2, WIDTH)), ProbeOptions(), (8, 0), Cluster("fsdp", 2)
    ).at(4)
    assert not dist.is_initialized()
    assert all(type(parameter) is nn.Parameter for parameter in ours.parameters())


def test_an_optimizer_made_before_sharding_is_refused() -> None:
    ours = model()
    setup = TrainingSetup(ours, torch.randn(2, WIDTH), optimizer=torch.optim.SGD(ours.parameters()))
    with pytest.raises(StepError, match="Try a factory such as lambda"):
        StepTraces(setup, ProbeOptions(), (8, 0), Cluster("fsdp", 2)).at(4)


@pytest.mark.parametrize(("strategy", "world_size"), [("zero3", 2), ("ddp", 0)])
def test_invalid_clusters(strategy: str, world_size: int) -> None:
    with pytest.raises(UsageError):
        Cluster(strategy, world_size)


def test_nccl_memory_is_added_to_each_gpu() -> None:
    assert [nccl_bytes(ranks) // MIB for ranks in (1, 2, 3, 64)] == [0, 544, 688, 688]


TRAIN = f"""
import torch
from torch import nn

def build_model():
    block = lambda: nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU())
    return nn.Sequential(*(block() for _ in range({BLOCKS}))), torch.randn(2, {WIDTH})
"""


@pytest.fixture
def train_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train_for_cluster.py"
    path.write_text(TRAIN)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["estimate", *map(str, arguments)])


@needs_fully_shard
def test_a_row_for_each_doubling_of_the_ranks(train_file: Path) -> None:
    options = ("--gpu", "t4", "--strategy", "fsdp", "--max-batch-size", "64")
    done = run(f"{train_file}:build_model", *options, "--world-size", "6")
    assert done.exit_code == 0, done.output
    head, *rows = (line.split() for line in done.stdout.splitlines())
    assert head[:3] == ["GPU", "ranks", "strategy"]
    assert [row[1] for row in rows] == ["1", "2", "4", "6"]
    assert [row[7] for row in rows] == ["64", "128", "256", "384"]


def test_the_json_has_the_facts_of_the_job(train_file: Path) -> None:
    options = ("--gpu", "t4", "--strategy", "zero1", "--world-size", "2", "--json")
    done = run(f"{train_file}:build_model", *options, "--max-batch-size", "64")
    alone, pair = json.loads(done.stdout)["estimates"]
    assert (pair["strategy"], pair["world_size"], pair["global_batch_size"]) == ("zero1", 2, 128)
    more = pair["gpu"]["overhead_bytes"] - alone["gpu"]["overhead_bytes"]
    assert more == 544 * MIB


def test_a_strategy_needs_a_world_size(train_file: Path) -> None:
    done = run(f"{train_file}:build_model", "--gpu", "t4", "--strategy", "fsdp")
    assert done.exit_code == 2
    assert "--strategy and --world-size need each other" in done.output
