"""Run the tests that Lightning and Accelerate have for their batch size finders on ours.

    python scripts/benchmarks/frameworks_own_tests.py LIGHTNING ACCELERATE  # a minute

Both are checkouts of the repositories. Exits with 1 if a test fails that is not listed here, or if
one passes that is. Needs lightning, accelerate and pytest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]

LIGHTNING_TESTS = "tests/tests_pytorch/tuner/test_scale_batch_size.py"
ACCELERATE_TESTS = "tests/test_memory_utils.py"

BOUND = "a size above the data set's length is kept there; here the data set is the bound"
LOG = "it counts log lines of each trial; here sizes are tried in another order"
MARGIN = "margin reduces the size there even if nothing above it failed"
LOSS = "its training_step returns no loss, which is no out-of-memory error here"
EXCUSED = {
    **{
        f"test_scale_batch_size_method_with_model_or_datamodule[{sizes}]": MARGIN
        for sizes in ("2--1", "2-2", "2-None", "None-2", "16-16")
    },
    **{
        f"test_dataloader_reset_with_scale_batch_size[{size}-{mode}]": reason
        for size, reason in {8: LOG, 17: LOG, 64: BOUND}.items()
        for mode in ("power", "binsearch")
    },
    "test_scale_batch_size_max_trials_modes[3-binsearch-2-7]": MARGIN,
    "test_scale_batch_size_margin_and_max_val[0.1]": MARGIN,
    "test_scale_batch_size_margin_and_max_val[0.2]": MARGIN,
    "test_dataloader_batch_size_updated_on_failure[power-62]": LOSS,
    "test_dataloader_batch_size_updated_on_failure[binsearch-95]": LOSS,
    "test_error_on_dataloader_passed_to_fit": "loaders passed to fit are refused there",
    "test_batch_size_finder_with_distributed_strategies": "several ranks are refused there",
    "test_scale_batch_size_checkpoint_cleanup_on_error": (
        "an exception of the user's code on the CPU comes as UserCodeError, from another process"
    ),
}

CONFTEST = """\
import lightning.pytorch.callbacks
import lightning.pytorch.callbacks.batch_size_finder
import lightning.pytorch.tuner.tuning

import accelerate.utils.memory
import batchfinder.integrations.accelerate
import batchfinder.integrations.lightning

for module in (
    lightning.pytorch.callbacks,
    lightning.pytorch.callbacks.batch_size_finder,
    lightning.pytorch.tuner.tuning,
):
    module.BatchSizeFinder = batchfinder.integrations.lightning.BatchSizeFinder
accelerate.utils.memory.find_executable_batch_size = (
    batchfinder.integrations.accelerate.find_executable_batch_size
)
"""

# Lightning's own needs a machine as its maintainers test on.
RUN_IF = """\
import pytest


def RunIf(min_cuda_gpus=0, **_):
    return pytest.mark.skipif(min_cuda_gpus > 0, reason="needs a GPU")
"""


def main() -> None:
    """Run the tests; exit with 1 unless those fail that are listed, and no others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lightning", type=Path, help="a checkout of pytorch-lightning")
    parser.add_argument("accelerate", type=Path, help="a checkout of accelerate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(options.lightning / LIGHTNING_TESTS, folder)
        shutil.copy(options.accelerate / ACCELERATE_TESTS, folder)
        (folder / "conftest.py").write_text(CONFTEST)
        helpers = folder / "tests_pytorch" / "helpers"
        helpers.mkdir(parents=True)
        (helpers / "runif.py").write_text(RUN_IF)
        passed, failed = run(folder)
    for test in sorted(failed):
        print(f"{test}: {EXCUSED.get(test, 'FAILED')}")
    unexpected = failed - EXCUSED.keys()
    print(f"{len(passed)} passed, {len(failed)} failed, {len(unexpected)} of them unexpectedly")
    if unexpected or passed & EXCUSED.keys() or not passed:
        sys.exit(1)


def run(folder: Path) -> tuple[set[str], set[str]]:
    """Run the tests in a folder; return the names of those that passed and of those that failed."""
    report = folder / "report.xml"
    paths = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    passed, failed = set[str](), set[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            is_bad = case.find("failure") is not None or case.find("error") is not None
            (failed if is_bad else passed).add(case.attrib["name"])
    return passed, failed


if __name__ == "__main__":
    main()
