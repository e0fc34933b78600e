"""The HTML page: its sections, its pictures by their structure, and what a browser says."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import resource
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from processes import REPOSITORY
from reporting.fake_search import RESULT, result

from batchfinder import estimate_max_batch
from batchfinder.cli.app import cli
from batchfinder.errors import UsageError
from batchfinder.reporting.page.page import check_report, page_of, read_results, write_page
from batchfinder.reporting.page.svg import ticks
from batchfinder.results.memory_model import MemoryModel, Phase, PhaseModel
from batchfinder.results.noise_scale import NoiseScale
from batchfinder.results.result import BatchSizeResult
from batchfinder.results.throughput import throughput_of
from batchfinder.units import format_bytes

TARGET = f"{Path(__file__).parents[1] / 'targets' / 'models.py'}:build_small"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Outline(HTMLParser):
    """Counts the elements and collects the texts of a page; fails where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.classes: dict[str, int] = {}
        self.links: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attrs:
            if name == "class" and value:
                self.classes[value] = self.classes.get(value, 0) + 1
            if name in ("href", "src"):
                self.links.append(value or "")
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def estimates() -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    sample = torch.randn(2, 64), torch.randn(2, 64)
    found = [
        estimate_max_batch(model, sample, gpu=gpu, max_batch_size=64) for gpu in ("t4", "h100")
    ]
    return {"schema_version": 1, "estimates": [one.to_dict() for one in found]}


def test_a_search_is_drawn_with_every_probe_and_the_budget() -> None:
    page = page_of([json.loads(RESULT.to_json())])

    outline = Outline(page)
    assert "<h2>Max batch size 1042</h2>" in page
    drawn = page[page.index('<svg role="img"') :]
    assert len(re.findall(r'<circle class="fits"', drawn)) == 4
    assert len(re.findall(r'<path class="oom"', drawn)) == 1
    assert len(re.findall(r'<circle class="confirmed"', drawn)) == 1
    assert outline.counts["tr"] == 1 + len(RESULT.probes) + 0
    assert outline.links == []  # nothing is fetched
    assert "peak memory, GiB" in page


def test_the_speed_of_warmed_up_steps_is_drawn_with_the_knee() -> None:
    timed = throughput_of([{n: [0.1 + n / 1000] for n in (261, 521, 1042)}] * 3)
    page = page_of([json.loads(result(throughput=timed).to_json())])

    drawn = page[page.index('aria-label="Examples per second') :]
    assert len(re.findall(r'<circle class="fits"', drawn)) == 3
    assert len(re.findall(r'<circle class="confirmed"', drawn)) == 1
    assert "Examples per second" not in page_of([json.loads(RESULT.to_json())])


def test_speeds_that_cannot_be_compared_are_drawn_without_a_knee() -> None:
    sizes, shares = (245, 521, 1042), (0.1, 0.4, 1, 0.2)
    noisy = throughput_of([{n: [n * shares[i * n % 4]] for n in sizes} for i in range(4)])
    page = page_of([json.loads(result(throughput=noisy).to_json())])

    assert "steps vary too much to name a smaller size that is as fast" in page
    assert "trains as fast" not in page
    drawn = page[page.index('aria-label="Examples per second') :]
    assert len(re.findall(r'<circle class="(fits|confirmed)"', drawn)) == 3


def test_the_axis_has_the_unit_of_the_budget() -> None:
    page = page_of([json.loads(result(budget_bytes=972 * 2**20, probes=()).to_json())])

    assert "budget 972.0 MiB" in page
    assert "peak memory, MiB" in page


def test_every_phase_has_a_line_with_a_name() -> None:
    phases = {phase: PhaseModel(fixed_bytes=1e9, per_sample_bytes=1e6) for phase in Phase}
    page = page_of([json.loads(result(memory_model=MemoryModel(phases)).to_json())])

    assert page.count("line of ") == len(Phase)
    assert "line of validation" in page


def test_an_estimate_is_drawn_by_gpu_and_over_its_step(estimates: dict[str, Any]) -> None:
    warned = [{**one, "warnings": ["few examples"]} for one in estimates["estimates"]]
    page = page_of([{**estimates, "estimates": warned}])
    assert page.count("<p>Note: few examples</p>") == 1
    states = format_bytes(warned[0]["explanation"]["model_state_bytes"])
    assert f'data-name="model states">{states}</td>' in page
    outline = Outline(page)
    assert outline.counts["h2"] == 1 + 2 + 1 + 1
    assert page.count("Memory over one training step, stacked") == 2
    assert "optimizer states" in page


def test_areas_have_no_points_along_their_edges(estimates: dict[str, object]) -> None:
    areas = re.findall(r'<polygon class="kind\d" points="([^"]+)"', page_of([estimates]))
    assert areas
    for area in areas:
        heights = [point.split(",")[1] for point in area.split()]
        for three in zip(heights, heights[1:], heights[2:], strict=False):
            assert len({*three}) > 1


def test_the_memory_of_a_moment_is_the_sum_of_its_kinds(estimates: dict[str, object]) -> None:
    for one in estimates["estimates"]:  # type: ignore[attr-defined]
        timeline = one["explanation"]["timeline"]
        assert timeline
        for moment in timeline:
            assert sum(moment["bytes_by_kind"].values()) == moment["allocated_bytes"]


def test_a_comparison_shows_what_uses_the_memory_of_each_strategy(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    strategies = ("--strategy", "bf16", "--strategy", "sgd")
    command = ["compare", TARGET, "--gpu", "t4", *strategies, "--json", "--report", str(page)]
    done = CliRunner().invoke(cli, command)

    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["comparisons"][0]["rows"]
    table = page.read_text().partition("What uses the memory at the peak")[2]
    for row in rows:
        cells = [format_bytes(size) for size in row["terms"].values() if size]
        assert row["strategy"] in table
        assert all(f">{cell}</td>" in table for cell in cells)


def test_texts_of_the_user_are_no_markup() -> None:
    page = page_of([json.loads(result(device="<script>alert(1)</script>").to_json())])

    Outline(page)
    assert "<script" not in page


def test_a_result_comes_back_from_its_json() -> None:
    timed = result(throughput=throughput_of([{521: [0.6, 0.7], 1042: [1.0, 1.1]}]))
    again = BatchSizeResult.from_dict(json.loads(timed.to_json()))

    assert again.probes == timed.probes
    assert again.throughput == timed.throughput
    assert again.to_dict() == timed.to_dict()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder of Linux")
@pytest.mark.parametrize(
    "command",
    [
        ("find", TARGET, "--device", "cpu"),
        ("estimate", TARGET, "--gpu", "t4"),
        ("compare", TARGET, "--gpu", "t4"),
        ("sweep", TARGET, "--gpu", "t4", "--over", "width=8,16"),
        ("run",),
    ],
)
def test_a_folder_that_takes_no_files_is_refused_before_the_work(command: tuple[str, ...]) -> None:
    training = ["--", sys.executable, "none.py", "{batch_size}"] if command == ("run",) else []
    done = CliRunner().invoke(cli, [*command, "--report", "/proc/a.html", *training])

    assert done.exit_code == 2
    assert done.output.startswith("Error: cannot write /proc/a.html: /proc takes no new files. Try")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("batch_size", ["4", "99999999"])
def test_the_answer_of_a_check_is_shown(tmp_path: Path, batch_size: str) -> None:
    target = f"{REPOSITORY}/tests/targets/models.py:build_small"
    options = ("--gpu", "t4", "--batch-size", batch_size)
    checked, line = (
        CliRunner().invoke(cli, ["check", target, *options, *more]).stdout
        for more in (["--json"], [])
    )
    file = tmp_path / "check.json"
    file.write_text(checked)
    page = page_of(read_results([str(file)]))
    assert all(part in page for part in line.strip().split(5 * " "))
    assert "<pre tabindex=0>batchfinder" in page


# JSON has these numbers, and floats do not.
TOO_LARGE = RESULT.to_json().replace('"batch_size": ', '"batch_size": 1' + 400 * "0")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"estimates": []}', '{"probes": 3}', "null", '{"trains": 1}', TOO_LARGE],
)
def test_a_file_without_a_result_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=r"is no result of batchfinder\. Try batchfinder find"):
        read_results([str(file)])
    file.write_text('{"schema_version": 99}')
    with pytest.raises(UsageError, match=r"is from a newer batchfinder\. Try it with that version"):
        read_results([str(file)])


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.html"):
        check_report(str(tmp_path / "a.png"))
    with pytest.raises(UsageError, match="there is no folder"):
        check_report(str(tmp_path / "none" / "a.html"))
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UsageError, match="it is no file to write to"):
        check_report(str(tmp_path / "folder.html"))
    check_report(str(tmp_path / "a.html"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.html"]
    with pytest.raises(UsageError, match="cannot read"):
        read_results([str(tmp_path / "missing.json")])


def test_a_disk_that_is_full_gets_no_half_page(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UsageError, match="cannot write"):
            write_page([json.loads(RESULT.to_json())], str(tmp_path / "a.html"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("most", "expected"), [(0.7, 4), (1, 6), (23, 5), (132.2, 3), (1e6, 6), (0, 1)]
)
def test_ticks_are_few_and_round(most: float, expected: int) -> None:
    found = ticks(most)

    assert all(value <= most for value in found)
    assert len(found) == expected


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_opens_the_page_without_an_error(
    tmp_path: Path, estimates: dict[str, object]
) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "page.png"
    write_page([json.loads(RESULT.to_json()), estimates], str(page))
    assert page.stat().st_size < 500_000

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-quic"]
    ended = subprocess.run(
        [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", f"--screenshot={picture}", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "CONSOLE" not in ended.stderr


def test_a_global_batch_brings_its_plan_and_lines_to_paste() -> None:
    plan = RESULT.accumulation_plan(4096)
    noise = NoiseScale(900.0, 300.0, math.inf, 8, 64, 10)
    more = {"accumulation_plan": dataclasses.asdict(plan), "noise_scale": noise.to_dict()}
    page = page_of([{**RESULT.to_dict(), **more}])
    assert "more than about 900 examples per optimizer step stop helping (300 or more)" in page
    assert f"<p>{plan}</p>" in page
    assert "Trainer(accumulate_grad_batches=4)" in page
