r"""Do trainings survive their first validation, and is a validation's batch the largest?

    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_first_validation.py [--only eval]

On a CUDA runtime that only counts memory (see ``scripts/counting_cuda``); about 40 minutes.

`survival`: 20 set-ups with random models, budgets and validation batches. `find_max_batch` answers
without and with ``eval_batch_size``, and a script in a fresh process trains and validates at both;
where nothing fits, at one example, which must fail.
`eval`: 6 models. The largest batch that ``mode="eval"`` finds, beside the largest with which such a
script validates: that is bisected, after two training steps of 2 examples, and of as many as a
quarter of the largest that train. Writes each row as it comes to
scripts/results/first_validation.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from parts.case import RESULTS, ROOT, run_for_json, save
from parts.paper_devices import FAMILIES

from batchfinder import find_max_batch
from batchfinder.training.loading import load_setup
from batchfinder.units import GIB

SETUPS, FIRST_SEED = 20, 1000
LIMITS_GIB = (4, 24)
EVAL_SHARES = (0.5, 1, 2, 3, 4)
EVAL_LIMIT_GIB = 4
# Bisection ends within this fraction of the answer.
PRECISE = 0.01
SMALL = 2


def main() -> None:
    """Run both parts; exit with 1 if an answer of one is wrong, or one below 95 % of the truth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["survival", "eval"])
    only = parser.parse_args().only
    torch.backends.cudnn.enabled = False
    warnings.simplefilter("ignore")
    path = RESULTS / "first_validation.json"
    rows: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    for name, part in (("survival", survival_rows), ("eval", eval_rows)):
        if only in (None, name):
            rows[name] = []
            for row in part():
                rows[name].append(row)
                save(path, rows)
                print(row, flush=True)
    deaths = [
        row
        for row in rows.get("survival", [])
        if (row["with"]["outcome"] == "survived") != bool(row["batch_sizes"]["with"])
    ]
    small = [row for row in rows.get("eval", []) if row["batch_size"] < 0.95 * row["largest"]]
    sys.exit(bool(deaths or small))


def survival_rows() -> Any:
    """Train and validate at the answers, without and with ``eval_batch_size``."""
    for seed in range(SETUPS):
        chance = random.Random(FIRST_SEED + seed)
        family, arguments = drawn_model(chance)
        limit = chance.randint(*LIMITS_GIB) * GIB
        plain = find(family, arguments, memory_limit=limit)
        eval_batch_size = max(1, round(plain.batch_size * chance.choice(EVAL_SHARES)))
        result = find(family, arguments, memory_limit=limit, eval_batch_size=eval_batch_size)
        # Where nothing fits, not even a training of one example survives its validation.
        sizes = {"without": plain.batch_size, "with": result.batch_size or 1}
        yield {
            "family": family,
            "arguments": arguments,
            "limit_gib": limit // GIB,
            "eval_batch_size": eval_batch_size,
            "batch_sizes": {"without": plain.batch_size, "with": result.batch_size},
            **{
                name: judged(family, arguments, size, eval_batch_size, result.budget_bytes)
                for name, size in sizes.items()
            },
        }


def drawn_model(chance: random.Random) -> tuple[str, dict[str, object]]:
    """Draw the size of a bundled model."""
    pick, between = chance.choice, chance.randint
    family = pick(["mlp", "resnet", "gpt", "vit", "unet"])
    arguments: dict[str, Callable[[], dict[str, object]]] = {
        "mlp": lambda: {"width": pick([64, 128, 256, 512]), "depth": between(2, 16)},
        "resnet": lambda: {
            "width": pick([16, 32, 64]), "blocks": between(1, 3), "image_size": pick([32, 64, 96]),
        },
        "vit": lambda: {
            "width": pick([128, 256, 384]), "depth": between(2, 8), "patch_size": 8,
            "image_size": pick([64, 96, 128]),
        },
        "gpt": lambda: {
            "width": pick([128, 256, 512]), "depth": between(2, 8),
            "vocabulary": pick([1000, 8000, 32000]), "max_tokens": pick([64, 128, 256, 512]),
        },
        "unet": lambda: {
            "width": pick([8, 16, 32]), "levels": between(2, 4), "image_size": pick([64, 128]),
        },
    }  # fmt: skip
    return family, arguments[family]()


def eval_rows() -> Any:
    """Compare the answers of ``mode="eval"`` with bisection by a script."""
    for family in FAMILIES:
        limit = EVAL_LIMIT_GIB * GIB
        arguments = FAMILIES[family]
        result = find(family, arguments, memory_limit=limit, mode="eval")
        trained = max(SMALL, find(family, arguments, memory_limit=limit).batch_size // 4)
        yield {
            "family": family,
            "batch_size": result.batch_size,
            "largest": bisected(family, SMALL, result),
            "trained_batch_size": trained,
            "largest_after_training": bisected(family, trained, result),
        }


def bisected(family: str, trained: int, result: Any) -> int:
    """The largest validation batch, after two training steps of ``trained`` examples."""
    low, high = 0, 4 * result.batch_size
    while high - low > max(1, PRECISE * low):
        middle = (low + high) // 2 if low else min(result.batch_size, (low + high) // 2)
        verdict = judged(family, FAMILIES[family], 0, middle, result.budget_bytes, trained)
        low, high = (middle, high) if verdict["outcome"] == "survived" else (low, middle)
    return low


def find(family: str, arguments: Mapping[str, object], **options: Any) -> Any:
    """Search in this process."""
    setup, _ = load_setup(target_of(family), arguments)
    return find_max_batch(setup, device="cuda", **options)


def judged(
    family: str,
    arguments: Mapping[str, object],
    batch_size: int,
    eval_batch_size: int,
    budget: int,
    trained: int = SMALL,
) -> dict[str, Any]:
    """What a fresh process says that may use no more memory than the search."""
    sizes = (str(batch_size), str(eval_batch_size), str(budget), str(trained))
    judge = "scripts/benchmarks/parts/validate_at.py"
    return run_for_json([judge, target_of(family), *sizes, json.dumps(arguments)], math.inf)


def target_of(family: str) -> str:
    """The bundled example of a family."""
    return str(ROOT / "scripts" / "examples" / f"train_{family}.py:build_model")


if __name__ == "__main__":
    main()
