"""Tables in Markdown from the rows of studies.json. Needs the standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rendering import FAMILIES, Row, markdown_table

NAMES = {
    **FAMILIES,
    "gpt2": "GPT-2 small",
    "bert_base": "BERT base",
    "resnet50": "ResNet-50",
    "vit_base": "ViT-B/16",
}


def winners(rows: Mapping[str, Row]) -> str:
    """Show the strategy that searches found the largest, and the one that estimates named."""
    lines = [
        (
            NAMES[name],
            row["largest_measured"],
            row["largest_estimated"],
            f"{row['share_of_largest']:.0%}",
            _worst([s.get("peak_error") for s in row["sizes"].values()]),
        )
        for name, row in rows.items()
    ]
    header = ("model", "largest by searches", "by estimates", "of the largest", "peak, worst error")
    return markdown_table(header, lines)


def _worst(errors: list[float | None]) -> str:
    known = [abs(error) for error in errors if error is not None]
    return f"{max(known):.1%}" if known else "-"


def times(rows: Mapping[str, Row]) -> str:
    """Show what a comparison costs on one core."""
    lines = [
        (NAMES[name], row["strategies"], f"{row['cpu_seconds']} s") for name, row in rows.items()
    ]
    return markdown_table(("model", "strategies", "CPU time"), lines)


def knees(rows: Mapping[str, Row]) -> str:
    """Show the smallest size that a search called as fast, among the rates of a sweep."""
    lines = [
        (
            NAMES[name],
            row["batch_size"],
            row["knee"] if row["is_clear"] else f"{row['knee']}, unclear",
            row["knee_of_sweep"],
            f"{row['share_of_best']:.1%} ± {row['error']:.1%}",
            "yes" if row["is_as_fast"] else "**no**",
        )
        for name, row in rows.items()
    ]
    header = ("model", "largest", "as fast", "by a sweep", "of the sweep's best rate", "right")
    return markdown_table(header, lines)


def sweeps(rows: Mapping[str, Row]) -> str:
    """Show the probes of a sweep, and its answers against those of a search at each value."""
    lines = [
        (
            NAMES[name],
            f"{min(map(int, row['sizes']))} to {max(map(int, row['sizes']))}",
            row["probes"],
            row["probes_of_searches"],
            ", ".join(f"{swept} ({alone})" for swept, alone in row["sizes"].values()),
            f"{row['worst_share']:.1%}",
        )
        for name, row in rows.items()
    ]
    header = (
        "model", "values", "probes", "of 8 searches", "answers (of a search)", "least share",
    )  # fmt: skip
    return markdown_table(header, lines)


def died(row: Row, name: str) -> bool:
    """Return whether a training at an answer ran out of memory."""
    return row[name]["outcome"] == "oom" and bool(row["batch_sizes"][name])


def validations(rows: list[Row]) -> str:
    """Show whether training and validation run at the answers without and with the option."""
    lines = [
        (
            NAMES[row["family"]],
            f"{row['limit_gib']} GiB",
            row["eval_batch_size"],
            *(
                f"{row['batch_sizes'][name] or 'nothing fits'}"
                + (f", **dies in {row[name]['part']}**" if died(row, name) else "")
                for name in ("without", "with")
            ),
        )
        for row in rows
    ]
    header = ("model", "limit", "validation batch", "answer without the option", "with it")
    return markdown_table(header, lines)


def validation_batches(rows: list[Row]) -> str:
    """Show the largest validation batches by searches, and by bisection in a loop."""
    lines = [
        (
            NAMES[row["family"]],
            row["batch_size"],
            row["largest"],
            f"{row['batch_size'] / row['largest']:.1%}",
            row["trained_batch_size"],
            row["largest_after_training"],
        )
        for row in rows
    ]
    header = ("model", "`--mode eval`", "by bisection", "share", "trained with", "then")
    return markdown_table(header, lines)


def pages(rows: Sequence[Row]) -> str:
    """Show the largest pages of the coverage benchmark's estimates."""
    measured = [row for row in rows if "page_bytes" in row]
    lines = [
        (
            row["model_type"],
            row["task"],
            f"{row['page_bytes'] / 1000:.0f} kB",
            f"{row['page_seconds']:.2f} s",
        )
        for row in sorted(measured, key=lambda row: -row["page_bytes"])[:3]
    ]
    return markdown_table(("model", "task", "page", "CPU time"), lines)
