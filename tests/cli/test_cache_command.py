"""``batchfinder cache``, and searches that remember."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchfinder.cli.app import cli
from batchfinder.results.cache import AnswerCache

pytestmark = pytest.mark.usefixtures("warm_workers")

TARGET = f"{Path(__file__).parents[1]}/targets/models.py:build_small"


def run(*arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["batchfinder", *arguments])
        return CliRunner().invoke(cli, arguments)


def find() -> Result:
    return run("find", TARGET, "--device", "cpu", "--max-batch-size", "2", "--json")


def test_an_answer_is_listed_shown_confirmed_and_cleared() -> None:
    first = json.loads(find().stdout)
    (line,) = run("cache", "list").stdout.splitlines()
    typed = f"find {TARGET} --device cpu --max-batch-size 2 --json"
    assert line.endswith(f"batch size 2 on cpu  {typed}")
    key = line.split()[0]
    shown = json.loads(run("cache", "show", key).stdout)
    assert shown["key"].startswith(key)
    assert shown["result"]["batch_size"] == first["batch_size"] == 2
    again = json.loads(find().stdout)
    assert [probe["confirmed"] for probe in again["probes"]] == [True]
    assert run("cache", "clear").stdout.startswith("Removed 1 answer from ")
    assert run("cache", "list").stderr.startswith("No answers in ")


def test_an_answer_without_a_size_is_listed() -> None:
    AnswerCache().remember("abc", "find", {}, {})
    assert "batch size ? on ?  find" in run("cache", "list").stdout


def test_an_unknown_key_is_refused() -> None:
    done = run("cache", "show", "abc")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "0 answers have a key that starts with 'abc'. Try batchfinder cache list" in done.stderr


def test_a_search_beside_a_locked_file_answers_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batchfinder.results.cache.BUSY_SECONDS", 0.05)
    cache = AnswerCache()
    cache.remember("a", "find", {}, {})
    with closing(sqlite3.connect(cache.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        done = find()
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert answer["batch_size"] == 2
    assert any("locked" in text for text in answer["warnings"])
