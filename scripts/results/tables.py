"""Regenerate the tables of README.md and scripts/results/README.md from the JSON beside this file.

    python scripts/results/tables.py            # write them
    python scripts/results/tables.py --check    # exit with 1 if one of them is out of date

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_tables as peers
import rendering as show
import study_tables
from peer_tables import OURS
from rendering import Row, markdown_table, median_and_worst, share, survived

HERE = Path(__file__).resolve().parent
DOCUMENTS = (HERE.parents[1] / "README.md", HERE / "README.md")
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write every table, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    outdated = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        new = TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + "\n" + found[3], text)
        if new != text:
            outdated.append(document.relative_to(HERE.parents[1]))
            if not options.check:
                document.write_text(new, encoding="utf-8")
    if options.check and outdated:
        sys.exit(f"out of date: {', '.join(map(str, outdated))}. Try python {sys.argv[0]}")


def load(name: str) -> Any:
    """Read one of the JSON files."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def _trained(rows: list[Row]) -> str:
    """Say how many answers train, 1000 steps too, and how many of doubling and bisection."""

    def of(part: str) -> str:
        ends = [row[part].get("outcome") == "survived" for row in rows if part in row]
        return f"{sum(ends)} of {len(ends)}" if ends else ""

    longer, theirs = of("long"), of("bisection_survival")
    longer = longer and f"; where steps differ, 1000 steps: {longer}"
    return share(rows, "survives") + longer + (theirs and f"; of doubling and bisection {theirs}")


def headlines() -> str:
    """Show one line for each claim of README.md, with the file that has the figures."""
    counted, estimated = (
        load(name)["searches"] for name in ("search_counted", "search_counted_from_estimate")
    )
    cpu, others = load("search_cpu")["cases"], load("peers_counted")["cases"]
    tried, tuned = load("faults")["faults"], load("llm")["rows"]
    brackets, peaks = load("estimate_brackets_rtx3090"), load("estimate_peaks_a100")
    died = Counter(
        name in OURS
        for row in others.values()
        for name, found in row["finders"].items()
        if not found.get("survived", True)
    )
    beside = [found for row in others.values() for found in _ours(row)]
    ours = [found["of_maximum"] for found in beside]
    steps = [row["full_size_steps"] for row in counted]
    from_estimate = [row["full_size_steps"] for row in estimated]
    set_ups = load("setups").values() if (HERE / "setups.json").exists() else ()
    lines = [
        *(
            (
                f"{name}: set-ups of which the answer trains",
                _trained([row for row in set_ups if row["device"] == device]),
                "setups",
            )
            for device, name in {"cuda": "CUDA allocator, counted", "cpu": "CPU"}.items()
            if any(row["device"] == device for row in set_ups)
        ),
        (
            "CUDA allocator, counted: answers that train 50 steps",
            f"{sum(map(survived, [*counted, *estimated]))} of {len(counted) + len(estimated)}",
            "search_counted",
        ),
        (
            "CUDA allocator, counted: full-size steps per search, median (worst)",
            f"{median_and_worst(steps)}; from an estimate {median_and_worst(from_estimate)}",
            "search_counted_from_estimate",
        ),
        (
            "CUDA allocator, counted: 18 models and limits, all of the memory",
            f"{min(ours):.0%} to {max(ours):.0%} of the true maximum in "
            f"{median_and_worst([found['full_size_steps'] for found in beside])} full-size steps, "
            f"{died[True] or 'none'} died; 5 other finders: {died[False]} died",
            "peers_counted",
        ),
        ("CPU: answers that train 50 steps", share(cpu, "survives"), "search_cpu"),
        ("Faults survived (crashes, hangs, signals ...)", share(tried, "survived"), "faults"),
        (
            "Estimate in the published bracket (timm, RTX 3090)",
            found_in(brackets["line"], r"inside (\S+) \((\S+)\)", "{1} ({0})"),
            "estimate_brackets_rtx3090",
        ),
        (
            "Estimated peak against published peaks (timm, A100)",
            found_in(
                peaks["line"], r"median (\S+), p90 (\S+),", "median error {0}, 90th percentile {1}"
            ),
            "estimate_peaks_a100",
        ),
        (
            "Estimated memory against published fine-tuning of language models",
            show.language_model_errors(tuned),
            "llm",
        ),
    ]
    rows = [
        (claim, figure, f"[{name}.json](scripts/results/{name}.json)")
        for claim, figure, name in lines
    ]
    return markdown_table(("claim", "measured", "file"), rows)


def _ours(row: Row) -> list[Row]:
    return [row["finders"][name] for name in OURS if name in row["finders"] and "5%" not in name]


def found_in(line: str, pattern: str, form: str) -> str:
    """Take the figures out of a summary line."""
    match = re.search(pattern, line)
    if match is None:
        sys.exit(f"{line!r} has no {pattern!r}")
    return form.format(*match.groups())


TABLES: dict[str, Callable[[], str]] = {
    "headlines": headlines,
    "setups": lambda: (
        show.setups(load("setups")) if (HERE / "setups.json").exists() else "Not measured yet."
    ),
    "expandable": lambda: show.expandable(load("setups")),
    "scripts": lambda: show.scripts(load("scripts")),
    "search_cpu": lambda: show.searches(load("search_cpu")["cases"]),
    "search_cpu_mapped": lambda: show.searches(load("search_cpu_mapped")["cases"]),
    "search_simulated_gpu": lambda: show.search_costs(load("search_simulated_gpu")["searches"]),
    "search_counted": lambda: show.search_costs(load("search_counted")["searches"]),
    "search_from_estimate": lambda: show.search_costs(
        load("search_counted_from_estimate")["searches"]
    ),
    "peers": lambda: peers.peers(load("peers")["cases"], "time"),
    "peers_summary": lambda: peers.peers_summary(load("peers")["cases"], "time"),
    "peers_mapped": lambda: peers.peers(load("peers_mapped")["cases"], "time"),
    "peers_counted": lambda: peers.peers(load("peers_counted")["cases"], "steps"),
    "peers_counted_summary": lambda: peers.peers_summary(load("peers_counted")["cases"], "steps"),
    "models": lambda: show.models(load("models")["models"]),
    "models_mapped": lambda: show.models(load("models_mapped")["models"]),
    "faults": lambda: show.faults(load("faults")["faults"]),
    "fuzz": lambda: show.texts(load("fuzz")["readers"]),
    "coverage": lambda: show.coverage(load("coverage")["rows"]),
    "pages": lambda: study_tables.pages(load("coverage")["rows"]),
    "fine_tuning": lambda: show.fine_tuning(load("fine_tuning")),
    "confirmations": lambda: show.confirmations(load("confirmation_cpu")["rules"]),
    "llm": lambda: show.language_models(load("llm")["sources"]),
    "counted_peaks": lambda: show.counted_peaks(load("counted_peaks")["rows"]),
    "winners": lambda: study_tables.winners(load("studies")["winners"]),
    "sweeps": lambda: study_tables.sweeps(load("studies")["sweep"]),
    "knees": lambda: study_tables.knees(load("studies")["knee"]),
    "validations": lambda: study_tables.validations(load("first_validation")["survival"]),
    "validation_batches": lambda: study_tables.validation_batches(load("first_validation")["eval"]),
    "comparison_times": lambda: study_tables.times(load("studies")["time"]),
}


if __name__ == "__main__":
    main()
