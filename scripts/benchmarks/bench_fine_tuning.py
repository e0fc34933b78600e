"""Do searches hold for fine-tuning of language models: PEFT, bitsandbytes and TRL, on the CPU?

    python scripts/benchmarks/bench_fine_tuning.py [--only dora-4bit]

For each set-up: the answer of ``batchfinder find`` under a memory limit; 50 steps at the answer in
the set-up's own loop or trainer, in a fresh process under the same limit; and ``find_max_batch`` in
process, after which logits, parameters and modes have to be the same, bit for bit. Writes each row
as it comes to scripts/results/fine_tuning.json; rows that are there are not run again, unless named
by ``--only``. Needs transformers, peft, trl, bitsandbytes and datasets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import Any

from parts.case import RESULTS, SURVIVAL_STEPS, run_for_json, save, survived
from rendering import fine_tuning

FOLDER = "scripts/benchmarks/setups"
RESULT_FILE = RESULTS / "fine_tuning.json"
LIMIT_MIB, MOST_EXAMPLES = 700, 24
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"kind": "dora", "checkpointing": "modern"},
    "rslora": {"kind": "rslora", "optimizer": "adamw_8bit"},
    "lora-4bit": {"weights": "4bit", "prepared": True, "checkpointing": "modern"},
    "dora-4bit": {"kind": "dora", "weights": "4bit", "optimizer": "paged_adamw_8bit"},
    "rslora-4bit": {"kind": "rslora", "weights": "4bit", "prepared": True},
    "lora-8bit": {"weights": "8bit", "prepared": True, "checkpointing": "reentrant"},
    "dora-8bit": {"kind": "dora", "weights": "8bit", "optimizer": "adamw_8bit"},
    "rslora-8bit": {"kind": "rslora", "weights": "8bit", "checkpointing": "reentrant"},
}
TRAINERS: dict[str, dict[str, Any]] = {
    "trainer-4bit": {
        "trainer": "trainer",
        "weights": "4bit",
        "optim": "paged_adamw_8bit",
        "checkpointing": "reentrant",
    },
    "trainer-8bit-adam": {"trainer": "trainer", "optim": "adamw_8bit", "checkpointing": "modern"},
    "sft": {"trainer": "sft"},
    "sft-packing": {"trainer": "sft-packing"},
    "sft-padding-free": {"trainer": "sft-padding-free"},
    "sft-completion": {"trainer": "sft-completion"},
    "sft-4bit": {"trainer": "sft", "weights": "4bit", "checkpointing": "reentrant"},
    "dpo": {"trainer": "dpo"},
    "dpo-4bit": {"trainer": "dpo", "weights": "4bit"},
    "reward": {"trainer": "reward"},
}


def main() -> None:
    """Run the set-ups asked for; exit with 1 unless all survive and are restored."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[*ADAPTERS, *TRAINERS], action="append", default=[])
    options = parser.parse_args()
    # Arrow's own allocator reserves what the limit leaves, 64 MiB or more, and hardly uses it: a
    # training whose data set is read later than the search's ran out of memory in its first step.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    rows: dict[str, Any] = json.loads(RESULT_FILE.read_text()) if RESULT_FILE.exists() else {}
    for name, arguments in {**ADAPTERS, **TRAINERS}.items():
        if name in options.only or (not options.only and name not in rows):
            rows[name] = row_of("adapters.py" if name in ADAPTERS else "fine_tuning.py", arguments)
            print(name, rows[name], file=sys.stderr, flush=True)
            save(RESULT_FILE, rows)
    print(fine_tuning(rows))
    sys.exit(not all(row["survives"] and row["restored"] for row in rows.values()))


def row_of(file: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Search, train at the answer, and search in process."""
    command = ["-m", "batchfinder", "find", f"{FOLDER}/{file}:target", "--json", "--quiet"]
    command += ["--no-cache", "--device", "cpu", "--memory-limit", f"{LIMIT_MIB}MiB"]
    command += ["--max-batch-size", str(MOST_EXAMPLES)]
    for name, value in arguments.items():
        command += ["--arg", f"{name}={value}"]
    found = run_for_json(command, math.inf)
    answer = found.get("batch_size", 0)
    row = {
        "arguments": arguments,
        "batch_size": answer,
        "survives": False,
        "restored": False,
        "probes": len(found.get("probes", ())),
        "error": found.get("error", ""),
    }
    if answer:
        command = [f"{FOLDER}/train_setup.py", file, "--device", "cpu"]
        command += ["--arguments", json.dumps(arguments), "--steps", str(SURVIVAL_STEPS)]
        command += ["--batch-size", str(answer), "--budget", str(LIMIT_MIB << 20)]
        row["survival"] = run_for_json(command, math.inf)
        row["survives"] = survived(row["survival"])
    command = ["scripts/benchmarks/parts/restored.py", file, json.dumps(arguments)]
    return row | run_for_json(command, math.inf)


if __name__ == "__main__":
    main()
