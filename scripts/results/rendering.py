"""Tables in Markdown from the rows of the JSON files. Needs the standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

FAMILIES = {
    "mlp": "MLP",
    "resnet": "ResNet with BatchNorm",
    "vit": "ViT",
    "gpt": "GPT",
    "lstm": "LSTM",
    "unet": "U-Net",
}
MODELS = {
    "gpt2": "GPT-2 small",
    "bert": "BERT base",
    "t5": "T5 small",
    "llama": "Llama, 125 M",
    "vit": "ViT-B/16",
    "whisper": "Whisper tiny",
    "resnet50": "ResNet-50",
    "convnext": "ConvNeXt-T",
    "efficientnet": "EfficientNet-B0",
    "swin": "Swin-T",
}
OUTCOMES = ("estimated", "refused", "too slow", "failed", "not built")

Row = Mapping[str, Any]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out a table with its numbers on the right."""
    lines = [header, ["---" if index == 0 else "---:" for index in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def median_and_worst(values: Sequence[float], digits: int = 1) -> str:
    """Show a median, and the worst value in parentheses."""
    return f"{median(values):.{digits}f} ({max(values):.{digits}f})"


def searches(rows: Sequence[Row]) -> str:
    """Show searches on the CPU, each with its two judgements, and the medians."""
    header = ("model", "limit", "batch size", "probes", "full-size steps", "time", "50 steps")
    lines: list[Sequence[object]] = [
        (
            FAMILIES[row["family"]],
            row["limit"].replace("GiB", " GiB"),
            row["batch_size"],
            len(row["probes"]),
            f"{row['full_size_steps']:.1f}",
            f"{row['seconds']:.0f} s",
            "survives" if row["survives"] else "**fails**",
            f"out of memory in step {row['above'].get('steps', 0) + 1}"
            if row["is_tight"]
            else "**survives**",
        )
        for row in rows
        if "error" not in row
    ]
    done = [row for row in rows if "error" not in row]
    lines.append(
        (
            *("median (worst)", "", ""),
            median_and_worst([len(row["probes"]) for row in done]),
            median_and_worst([row["full_size_steps"] for row in done]),
            f"{median(row['seconds'] for row in done):.0f} s",
            share(rows, "survives"),
            share(rows, "is_tight"),
        )
    )
    return markdown_table((*header, "1.2 times it"), lines)


def share(rows: Sequence[Row], fact: str) -> str:
    """Count the rows of which something is true."""
    return f"{sum(map(bool, (row.get(fact) for row in rows)))} of {len(rows)}"


def survived(row: Row) -> bool:
    """Whether every step of a judgement ran."""
    report = row["survival"]
    return bool(report.get("outcome") == "survived" and report["steps"] > 0)


ENDS = {"oom": "out of memory", "error": "another error", "survived": "survives"}


def _end_of(judgement: Row, *, expected: str) -> str:
    """Say how a judgement ended, in bold if not as expected; and if it flushed the cache.

    The number of orders of the data follows, if there were several: all survived, or the last died.
    """
    outcome, flushing = judgement.get("outcome"), judgement.get("flushing_steps", 0)
    end = ENDS.get(outcome or "", "-")
    is_other = outcome is not None and (outcome == "survived") != (expected == "survived")
    steps = "1 step" if flushing == 1 else f"{flushing} steps"
    orders = judgement.get("orders", 1)
    told = ""
    if outcome == "survived":
        told += f" in {orders} orders" if orders > 1 else ""
        told += f", flushing in {steps}" if flushing else ""
    elif orders > 1:
        told = f" in order {orders}"
    return (f"**{end}**" if is_other else end) + told


def setups(rows: Mapping[str, Row]) -> str:
    """Show searches on set-ups as people have them, next to doubling and bisection."""
    judged = ("30 steps", "1000 steps", "2 % more")
    header = ("set-up", "device", "answer", *judged, "full-size steps", "time")
    lines = []
    for name, row in rows.items():
        other = row.get("bisection", {})
        lines.append(
            (
                name,
                row["device"],
                row["batch_size"] or "error",
                _end_of(row.get("survival", {}), expected="survived"),
                _end_of(row.get("long", {}), expected="survived"),
                _end_of(row.get("above", {}), expected="oom"),
                row.get("full_size_steps", "-"),
                f"{row['seconds']:.0f} s",
                other.get("batch_size", "-"),
                _end_of(row.get("bisection_survival", {}), expected="survived"),
                other.get("full_size_steps", "-"),
                f"{other['wall_seconds']:.0f} s" if other else "-",
            )
        )
    return markdown_table((*header, "by bisection", "30 steps", "full-size steps", "time"), lines)


def expandable(rows: Mapping[str, Row]) -> str:
    """Show answers under expandable segments, next to what searches without them said."""
    header = ("set-up", "answer", "told of expandable segments", "answer with them", "30 steps")
    lines = [
        (
            name,
            row["without"],
            f"about {row['told']}" if row["told"] else "nothing",
            row["batch_size"],
            "survives" if row["survives"] else "**dies**",
        )
        for name, row in ((name, row.get("expandable")) for name, row in rows.items())
        if row
    ]
    return markdown_table(header, lines)


def search_costs(rows: Sequence[Row]) -> str:
    """Show what searches cost: a line for each family, and one for all."""
    header = ["model", "searches", "probes, median (worst)", "full-size steps, median (worst)"]
    if "survival" in rows[0]:
        header.append("survive 50 steps")
    if "by_hand" in rows[0]:
        header.append("by doubling and bisection")
    groups = {name: [row for row in rows if row["family"] == name] for name in FAMILIES}
    lines: list[Sequence[object]] = []
    for name, group in {**groups, "all": rows}.items():
        line: list[object] = [FAMILIES.get(name, name), len(group)]
        line.append(median_and_worst([row["probes"] for row in group]))
        line.append(median_and_worst([row["full_size_steps"] for row in group]))
        if "survival" in rows[0]:
            line.append(sum(map(survived, group)))
        if "by_hand" in rows[0]:
            line.append(median_and_worst([row["by_hand"]["full_size_steps"] for row in group]))
        lines.append(line)
    return markdown_table(header, lines)


def models(rows: Mapping[str, Row]) -> str:
    """Show searches for models of Transformers and timm, each with its judgements."""
    header = ("model", "limit", "batch size", "survives", "1.2 times it", "probes", "time")
    lines = [
        (
            MODELS[name],
            row["limit"],
            row["batch_size"],
            f"{row['survival'].get('steps', 0)} steps" if row["survives"] else "**no**",
            "out of memory" if row["is_tight"] else "**survives**",
            len(row["probes"]),
            f"{row['seconds']:.0f} s",
            row["estimate"],
        )
        for name, row in rows.items()
        if row.get("batch_size")
    ]
    return markdown_table((*header, "estimate"), lines)


def faults(rows: Sequence[Row]) -> str:
    """Count the faults of each group that were survived."""
    groups = {
        name: [row for row in rows if row["group"] == name]
        for name in dict.fromkeys(row["group"] for row in rows)
    }
    lines = [
        (name, len(group), sum(row["survived"] for row in group))
        for name, group in {**groups, "all": rows}.items()
    ]
    return markdown_table(("faults", "tried", "survived"), lines)


def scripts(rows: Mapping[str, Row]) -> str:
    """Show one line for each public script."""
    header = ("script", "device", "memory", "answer", "launches", "50 steps there", "5 % more")
    lines = [
        (
            name,
            row["device"],
            f"{row['gib']:g} GiB",
            row["batch_size"] or "none",
            row["launches"],
            "train" if row["survives"] else "**no**",
            _next_of(row),
        )
        for name, row in rows.items()
    ]
    return markdown_table(header, lines)


def _next_of(row: Row) -> str:
    if not row["next_fails"]:
        return "**no failure**"
    trainings = row.get("next", {}).get("trainings", 1)
    return "out of memory" + (f" in training {trainings}" if trainings > 1 else "")


def coverage(rows: Sequence[Row]) -> str:
    """Count how the estimates of each task ended."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    counts = {name: Counter(r["outcome"] for r in rows if r["task"] == name) for name in tasks}
    counts["all"] = Counter(row["outcome"] for row in rows)
    lines = [(name, *(count[outcome] for outcome in OUTCOMES)) for name, count in counts.items()]
    return markdown_table(("task", *OUTCOMES), lines)


def confirmations(rules: Sequence[Row]) -> str:
    """Show what each rule for a confirmation lets pass, and what of that dies."""
    header = [name.replace("_", " ") for name in rules[0]]
    return markdown_table(header, [tuple(rule.values()) for rule in rules])


def texts(readers: Mapping[str, Row]) -> str:
    """Count the texts that each reader was given."""
    lines = [
        (name, f"{row['texts']:,}", f"{row['seconds']:.0f} s", "none" if row["passed"] else "found")
        for name, row in readers.items()
    ]
    return markdown_table(("reader", "texts tried", "time", "traceback"), lines)


def fine_tuning(rows: Mapping[str, Row]) -> str:
    """Show one line for each set-up of fine-tuning."""
    header = ("set-up", "answer", "50 steps there", "model after a search")
    lines: list[Sequence[object]] = []
    for name, row in rows.items():
        survival = "train" if row["survives"] else "**no**"
        restored = "as before" if row["restored"] else "**changed**"
        lines.append((name, row["batch_size"] or row["error"], survival, restored))
    return markdown_table(header, lines)


def counted_peaks(rows: Sequence[Row]) -> str:
    """Count how far simulated peaks are from those of PyTorch's own allocator."""
    kinds = {
        "bundled examples": [row for row in rows if row["model"] in FAMILIES],
        "text models of Transformers": [
            row for row in rows if not ("method" in row or row["model"] in FAMILIES)
        ],
        "fine-tuned language models": [row for row in rows if "method" in row],
    }
    lines = []
    for name, group in kinds.items():
        off = [abs(row["difference"]) for row in group if row.get("difference") is not None]
        within = [sum(one <= limit for one in off) for limit in (1e-5, 5e-3, 1.1e-2)]
        if off:
            lines.append((name, len(off), *within, f"{max(off):.1%}"))
    header = ("models", "compared", "within 0.001 %", "within 0.5 %", "within 1.1 %", "worst")
    return markdown_table(header, lines)


def language_model_errors(rows: Sequence[Row]) -> str:
    """Show the median and 90th percentile of the errors of estimates, over all sources."""
    errors = sorted(
        abs(row["batchfinder_gib"] / row["measured_gib"] - 1)
        for row in rows
        if row["kind"] in ("allocated", "process") and row.get("batchfinder_gib")
    )
    ninetieth = errors[9 * len(errors) // 10]
    return (
        f"median error {median(errors):.1%}, 90th percentile {ninetieth:.1%}, {len(errors)} figures"
    )


def language_models(sources: Mapping[str, Row]) -> str:
    """Show the errors of estimates of fine-tuning, next to those of two others, by source."""
    names = ("batchfinder", "formula", "accelerate")
    header = ("source, GPU, figure", "rows", "not estimated", *names)
    lines: list[Sequence[object]] = []
    for source, figures in sorted(sources.items()):
        errors = (figures.get(name) for name in names)
        cells = (f"{100 * e[0]:.1f} % ({100 * e[1]:.1f} %)" if e else "-" for e in errors)
        lines.append((source, figures["n"], figures["reasons"], *cells))
    return markdown_table(header, lines)
