"""Fuzz everything that reads text from outside, guided by the code it reaches (atheris).

    python scripts/faults/fuzz.py --seconds 120               # every reader, so long each
    python scripts/faults/fuzz.py --seconds 60 --reader size

A reader may refuse a text with one clear error; anything else is a bug, and the text is kept.
Each reader runs in a process of its own. Writes scripts/results/fuzz.json. Needs
``pip install atheris`` beside the package's requirements.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from parts.case import RESULTS, ROOT, save
from rendering import texts

sys.path.insert(0, str(ROOT / "tests"))

RESULT_FILE = RESULTS / "fuzz.json"
MOST_BYTES = 2048

SEEDS = {
    "size": ["24GiB", "1.5 MiB", "512"],
    "percentage": ["5", "7.5%"],
    "arguments": ["depth=12", "lr=1e-3", "shape=(1, 2)"],
    "input": ["float32[3,224,224] int64[]:1000", "bf16[8]"],
    "target": ["train.py:build_model", "package.module:build"],
    "gpu": ["rtx3090", "A100 80GB", "NVIDIA H200"],
    "result": [
        '{"budget_bytes": 1000, "device": "cuda:0 NVIDIA H200", "probes": [{"outcome": "fits", '
        '"batch_size": 4, "peak_reserved_bytes": 500}]}'
    ],
    "calibration": ['{"RTX 3090": 1048576}'],
    "template": ["python train.py --bs={batch_size} out={scratch} NAME=1", "x {batchsize}"],
    "report": [
        '{"schema_version": 1, "batch_size": 4, "status": "found", "budget_bytes": 1000, "device": '
        '"cpu", "probes": [{"batch_size": 4, "outcome": "fits", "steps": 1, "seconds": 1.0, '
        '"phase_peak_bytes": {"forward": 5}, "rank_peak_bytes": [], "peak_reserved_bytes": 500}]}',
        '{"rows": [{"seq_len": 512, "batch_size": 8, "probes": 3}], "max_tokens": 4096}',
    ],
    "find": ["--max-batch-size 8 --json", "--memory-limit 24GiB --headroom 5 -q"],
    "estimate": ["--memory 24GiB --overhead 1GiB", "--gpu h100 --input float32[3]"],
    "study": [
        "sweep --over seq_len=512,1024 --gpu t4",
        "compare --gpu t4 --strategies bf16 --global-batch-size 64",
        "check --batch-size 8 --gpu t4 --max-memory 2GiB",
    ],
}


def main() -> None:
    """Fuzz the readers asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reader", choices=SEEDS, action="append")
    parser.add_argument("--seconds", type=int, default=120, help="for each reader")
    parser.add_argument("--here", action="store_true", help="in this process; needs one --reader")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options, rest = parser.parse_known_args()
    if options.here:
        fuzz(options.reader[0], rest)
        return
    results: dict[str, Any] = {"readers": {}}
    if options.reader and options.output.exists():
        results = json.loads(options.output.read_text())
    results |= {
        "python": platform.python_version(),
        "atheris": importlib.metadata.version("atheris"),
    }
    for reader in options.reader or SEEDS:
        results["readers"][reader] = row = run(reader, options.seconds)
        print(f"{reader}: {row}", file=sys.stderr, flush=True)
        save(options.output, results)
    print(texts(results["readers"]))
    if not all(row["passed"] for row in results["readers"].values()):
        sys.exit(1)


def run(reader: str, seconds: int) -> dict[str, Any]:
    """Fuzz a reader in a fresh process, from its seeds on."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, text in enumerate(SEEDS[reader]):
            (corpus / str(number)).write_text(text)
        command = [sys.executable, __file__, "--here", "--reader", reader, str(corpus)]
        command += [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", "-timeout=60"]
        command += [f"-artifact_prefix={folder}/found-", "-print_final_stats=1"]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder)
        found = [
            path.read_bytes().decode("utf-8", "backslashreplace")
            for path in Path(folder).glob("found-*")
        ]
    executed = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    row = {
        "texts": int(executed[1]) if executed else 0,
        "seconds": round(time.monotonic() - started, 1),
        "found": found,
        "passed": done.returncode == 0 and executed is not None,
    }
    if not row["passed"]:
        row["last_words"] = done.stderr.splitlines()[-40:]
    return row


def fuzz(reader: str, arguments: list[str]) -> None:
    """Fuzz a reader in this process until a traceback or the end of the time."""
    import atheris

    with atheris.instrument_imports(include=["batchfinder"]):
        from text_inputs import read

    def try_it(data: bytes) -> None:
        read(reader, data.decode("utf-8", "surrogateescape"))

    atheris.Setup([sys.argv[0], *arguments], try_it)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
