from __future__ import annotations

from warm import run_warm

from batchfinder.probing.workers.hung import StepTimes


def test_a_step_is_waited_for_by_the_slowest_so_far() -> None:
    times = StepTimes(600.0, factor=1, margin_seconds=30.0, least_seconds=0)
    assert times.patience_seconds(8, is_first_step=True) == 600
    times.note(8, step_seconds=2.0)
    times.note_start(5.0)
    assert times.patience_seconds(16, is_first_step=False) == 34
    assert times.patience_seconds(16, is_first_step=True) == 35


def test_what_compiles_may_compile_again() -> None:
    times = StepTimes(600.0, factor=1, margin_seconds=30.0, least_seconds=0)
    times.note(8, step_seconds=2.0)
    times.note_compiling()
    assert times.patience_seconds(8, is_first_step=False) == 602


def test_that_the_users_code_compiles_is_noticed() -> None:
    printed = run_warm(
        "import torch\n"
        "from batchfinder.training.parallel import has_compiled\n"
        "layer = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.AdamW(layer.parameters())\n"
        "layer(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "print(has_compiled())\n"
        "torch.compile(layer, backend='eager')(torch.ones(1, 2))\n"
        "print(has_compiled())\n",
    )
    assert printed.split() == ["False", "True"]
