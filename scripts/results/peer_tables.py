"""Tables in Markdown of batchfinder beside other finders."""

from __future__ import annotations

from collections.abc import Mapping

from rendering import Row, markdown_table, median_and_worst

OURS = ("batchfinder", "batchfinder, 5% headroom", "batchfinder, from estimate")


def finders_of(cases: Mapping[str, Row]) -> list[str]:
    """Name the finders that ran, ours first."""
    ran = list(dict.fromkeys(finder for row in cases.values() for finder in row["finders"]))
    return [*(name for name in OURS if name in ran), *(name for name in ran if name not in OURS)]


def peers(cases: Mapping[str, Row], cost: str) -> str:
    """Show each finder's share of the true maximum, and its cost.

    Args:
        cases: by their names.
        cost: ``"time"``, or ``"steps"`` for full-size steps.
    """
    finders = finders_of(cases)
    lines = [
        [
            f"{name}: {row['maximum'][0]} to {row['maximum'][1]}",
            *(_answer(row["finders"].get(finder), cost) for finder in finders),
        ]
        for name, row in cases.items()
        if "maximum" in row
    ]
    return markdown_table(["case", *(finder.replace("_", " ") for finder in finders)], lines)


def _answer(found: Row | None, cost: str) -> str:
    if found is None:
        return "-"
    answer = f"{found['of_maximum']:.0%}" if found.get("of_maximum") else "-"
    answer = answer if found["batch_size"] else "error"
    answer += "" if found.get("survived", True) else ", **dies**"
    if cost == "time":
        return f"{answer}, {found['wall_seconds']:.0f} s"
    steps = found.get("full_size_steps")
    return f"{answer}, {steps:.0f} steps" if steps else answer


def peers_summary(cases: Mapping[str, Row], cost: str) -> str:
    """Show for each finder how its answers ended, what share they reach, and the cost."""
    key = "wall_seconds" if cost == "time" else "full_size_steps"
    judged = [row for row in cases.values() if "maximum" in row]
    lines = []
    for finder in finders_of(cases):
        found = [row["finders"][finder] for row in judged if finder in row["finders"]]
        answers = [one for one in found if one["batch_size"]]
        alive = [one for one in answers if one.get("survived", True)]
        shares = [one["of_maximum"] for one in alive if one.get("of_maximum")]
        costs = [one[key] for one in answers if one.get(key)]
        lines.append(
            (
                finder.replace("_", " "),
                f"{len(alive)} of {len(found)}",
                f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-",
                median_and_worst(costs, 0) + (" s" if cost == "time" else "") if costs else "-",
            )
        )
    name = "time, median (worst)" if cost == "time" else "full-size steps, median (worst)"
    return markdown_table(("finder", "answers that survive", "of the maximum", name), lines)
