"""The sections of the page: the JSON object of a command as text, pictures and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from textwrap import shorten
from typing import Any

from batchfinder.reporting.answer import details, headline
from batchfinder.reporting.columns import budget_of
from batchfinder.reporting.global_batch import noise_line, snippets
from batchfinder.reporting.page import charts
from batchfinder.reporting.page.studies import (
    memory_map,
    names_of,
    remarks_of,
    rows_of,
    size_chart,
    term_rows,
)
from batchfinder.reporting.sweeps import buckets_line
from batchfinder.reporting.table import PHASES
from batchfinder.reporting.wording import bytes_or_dash, label, place_in_step, size_or_none_fits
from batchfinder.results.accumulation import plan_from
from batchfinder.results.check import WIDE, Check
from batchfinder.results.noise_scale import NoiseScale
from batchfinder.results.result import BatchSizeResult
from batchfinder.results.throughput import AS_FAST
from batchfinder.units import format_bytes, format_seconds

Data = Mapping[str, Any]
Rows = Sequence[Sequence[str]]


def sections_of(data: Data) -> list[str]:
    """Return the sections for one JSON object of ``--json``.

    Raises:
        KeyError, TypeError, ValueError: it is no result of batchfinder.
    """
    if "estimates" in data:
        sections, versions = _estimates(data["estimates"]), data["estimates"][0]["versions"]
    elif "probes" in data:
        sections, versions = [_search(data)], data["versions"]
    elif "trains" in data:
        answer, *facts = str(Check.from_dict(data)).split(WIDE)
        lines = [f"<h2>{escape(answer)}</h2>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
        sections, versions = [_section(lines)], {}
    else:
        studies = data.get("comparisons") or data.get("sweeps") or [data]
        sections, versions = [_study(one) for one in studies], data.get("versions", {})
    return [*sections, *_reproduce(data.get("reproduce"), versions)]


def _study(data: Data) -> str:
    by = ", ".join(names_of(data))
    facts = [budget_of(data["budget_bytes"], is_measured=data["is_measured"])]
    if data.get("base"):
        facts.append(f"{data['rows'][0]['strategy']}: {data['base']}")
    facts += [f"{mark}: {data[mark]}" for mark in ("largest", "fastest") if data.get(mark)]
    buckets = data.get("buckets")  # an earlier version wrote none
    if data.get("max_tokens"):
        facts.append(f"max_tokens = {data['max_tokens']} is safe at all lengths")
    return _section(
        [
            f"<h2>{escape(data['device'])}</h2>",
            f'<p class="lead">{escape(" · ".join(facts))}</p>',
            f"<pre tabindex=0>{escape(buckets_line(buckets))}</pre>" if buckets else "",
            *(f"<p>Note: {escape(warning)}</p>" for warning in data.get("warnings", [])),
            _picture(f"Largest batch size by {by}", size_chart(data), {}),
            _picture(f"Memory by {by} and batch size", memory_map(data), {})
            if "over" in data
            else "",
            _table("Every row", rows_of(data)),
            *(f"<p>{escape(remark)}</p>" for remark in remarks_of(data)),
            _table("What uses the memory at the peak", terms) if (terms := term_rows(data)) else "",
        ]
    )


def _search(data: Data) -> str:
    result = BatchSizeResult.from_dict(data)
    first, *more = headline(result)
    phases = result.memory_model.phases if result.memory_model else ()
    plan = plan_from(data["accumulation_plan"]) if data.get("accumulation_plan") else None
    lines = [*(label(warning) + warning for warning in result.warnings), *details(result, plan)]
    if noise := data.get("noise_scale"):  # JSON has no infinity
        known: dict[str, Any] = {
            name: math.inf if value is None else value for name, value in noise.items()
        }
        lines.append(noise_line(NoiseScale(**known)))
    parts = [
        f"<h2>{escape(first)}</h2>",
        f'<p class="lead">{escape(result.device)} · {escape(" · ".join(more))}</p>',
        *(f"<p>{escape(line)}</p>" for line in lines),
        _pasted("Lines to paste for the global batch", snippets(plan.best))
        if plan and plan.best
        else "",
        _picture(
            "Memory against batch size",
            charts.memory_chart(result),
            {
                "fits": "fits",
                "confirmed": "confirmed",
                "oom": "ran out of memory",
                **{f"fit {phase.value}": f"line of {PHASES[phase]}" for phase in phases},
                "budget": "budget",
            },
        ),
    ]
    if result.throughput is not None:
        keys = {
            "fits": "warmed-up steps",
            "confirmed": f"smallest within {AS_FAST:.0%} of the best",
        }
        parts.append(
            _picture("Speed against batch size", charts.speed_chart(result.throughput), keys)
        )
    rows = [("batch size", "outcome", "peak memory", "step", "steps", "note")]
    for probe in result.probes:
        peak = probe.peak_bytes
        seconds = probe.step_seconds
        confirmed = ", confirmed" if probe.fits else " when confirming"
        rows.append(
            (
                f"{probe.batch_size:,}",
                charts.OUTCOMES[probe.outcome.value] + (confirmed if probe.confirmed else ""),
                "" if peak is None else format_bytes(peak),
                "" if seconds is None else format_seconds(seconds),
                str(probe.steps),
                shorten(probe.note, 120, placeholder=" …"),
            )
        )
    parts.append(_table("Every probe, in the order they ran", rows))
    return _section(parts)


def _estimates(estimates: Sequence[Data]) -> list[str]:
    rows = [("GPU", "memory", "max batch", "plausible", "peak", "model states", "per sample")]
    for one in estimates:
        low, high = one["interval"]
        model = one["memory_model"]
        rows.append(
            (
                charts.name_of(one),
                format_bytes(one["gpu"]["total_bytes"]),
                size_or_none_fits(one["batch_size"]),
                f"{low:,} to {high:,}",
                format_bytes(one["peak_bytes"]) if one["batch_size"] else "",
                bytes_or_dash(one["explanation"].get("model_state_bytes")),
                format_bytes(model["per_sample_bytes"]) if model else "",
            )
        )
    warnings = dict.fromkeys(text for one in estimates for text in one["warnings"])
    overview = [
        "<h2>Largest batch size by GPU</h2>",
        '<p class="lead">Estimated on simulated GPUs; the thin line is the plausible range.</p>',
        _picture("", charts.gpu_chart(estimates), {}),
        _table("Estimates", rows),
        *(f"<p>Note: {escape(text)}</p>" for text in warnings),
    ]
    modules = [
        "<h2>Which modules use most</h2>",
        _picture("Activation memory per example", charts.module_chart(estimates[0]), {}),
    ]
    return [_section(part) for part in (overview, *map(_one_gpu, estimates), modules)]


def _one_gpu(estimate: Data) -> list[str]:
    explanation = estimate["explanation"]
    kinds = charts.kinds_of(explanation)
    terms = [(name, size) for name, size in explanation["terms"].items() if size]
    total = sum(size for _, size in terms) or 1
    where = explanation["peak"]
    peak = place_in_step(where["stage"], where["module"], where["line"])
    return [
        f"<h2>{escape(charts.name_of(estimate))}, batch size {explanation['batch_size']:,}</h2>",
        f'<p class="lead">Peak in the {escape(peak)}</p>',
        _picture(
            "Memory over one training step",
            charts.timeline_chart(explanation, estimate["budget_bytes"]),
            {**{f"kind{index}": kind for index, kind in enumerate(kinds)}, "budget": "budget"},
        ),
        _table(
            "What uses the memory at the peak",
            [
                ("term", "memory", "share"),
                *((name, format_bytes(size), f"{size / total:.1%}") for name, size in terms),
            ],
        ),
    ]


def _reproduce(command: str | None, versions: Mapping[str, object]) -> list[str]:
    parts = [
        f"<pre tabindex=0>{escape(command)}</pre>" if command else "",
        _table("Versions", [("package", "version"), *((n, str(v)) for n, v in versions.items())])
        if versions
        else "",
    ]
    return [_section(["<h2>How to reproduce it</h2>", *parts])] if any(parts) else []


def _section(parts: Sequence[str]) -> str:
    return "<section>" + "\n".join(filter(None, parts)) + "</section>"


def _picture(title: str, svg: str, legend: Mapping[str, str]) -> str:
    """Return a figure: title, picture, and the meaning of the marks in it, by their classes."""
    keys = "".join(
        f'<li><svg viewBox="0 0 20 12" aria-hidden="true">{_swatch(style)}</svg>{escape(name)}</li>'
        for style, name in legend.items()
        if f'class="{style}"' in svg
    )
    head = f"<h3>{escape(title)}</h3>" if title else ""
    keys = f'<ul class="legend">{keys}</ul>' if keys else ""
    return f'{head}<figure>{keys}<div class="scroll" tabindex=0>{svg}</div></figure>'


def _swatch(style: str) -> str:
    if style.startswith("kind"):
        return f'<rect class="{style}" width="20" height="12"/>'
    if style in ("oom", "failed"):
        return f'<path class="{style}" d="M5 1l10 10m0 -10l-10 10"/>'
    if style in ("fits", "confirmed"):
        return f'<circle class="{style}" cx="10" cy="6" r="{5 if style == "confirmed" else 4}"/>'
    return f'<path class="{style}" d="M0 6H20"/>'


def _table(title: str, rows: Rows) -> str:
    """Return a table, and the same as Markdown to paste into an issue; "" without a value.

    Columns without a value are left out. On a phone each cell shows its column's name instead of
    the header.
    """
    columns = [column for column in zip(*rows, strict=True) if {*column[1:]} - {"", "-"}]
    if not columns:
        return ""
    rows = [*zip(*columns, strict=True)]
    header, *body = rows
    names = [escape(cell) for cell in header]
    head = "".join(f'<th scope=col data-name="{name}">{name}</th>' for name in names)
    lines = "".join(
        f'<tr><th scope=row data-name="{names[0]}">{escape(first)}</th>'
        + "".join(
            f'<td data-name="{name}">{escape(cell)}</td>'
            for name, cell in zip(names[1:], rest, strict=True)
        )
        + "</tr>"
        for first, *rest in body
    )
    return (
        f'<div class="scroll" tabindex=0><table><caption>{escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    ) + _pasted(f"{title}, as Markdown", _markdown(rows))


def _pasted(title: str, lines: Sequence[str]) -> str:
    """Return text to paste, behind its title until that is clicked."""
    text = escape("\n".join(lines))
    return f"<details><summary>{escape(title)}</summary><pre tabindex=0>{text}</pre></details>"


def _markdown(rows: Rows) -> list[str]:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return ["| " + " | ".join(row) + " |" for row in lines]
