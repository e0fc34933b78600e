"""The package as a whole: what imports what, how large a file is, what is public."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import batchfinder

ROOT = Path(batchfinder.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Rooms that may be read, tested and reused alone: they need the standard library only.
LEAVES = ("search", "results", "errors", "units")
MOST_LINES = 300

MOST_FILES = 16

# From the top down: a module imports from its own room and from rooms further down only. A module
# belongs to the longest name here that it starts with.
ROOMS = (
    "__main__",
    "",
    "cli",
    "reporting",
    "studies",
    "integrations",
    "launching",
    "finder",
    "estimator",
    "simulation",
    "simulation.recordings",
    "simulation.tracing",
    "simulation.kernels",
    "simulation.trace",
    "simulation.values",
    "simulation.gpus",
    "probing.choose_prober",
    "probing.ranks",
    "probing.workers",
    "probing",
    "probing.devices",
    "probing.devices.allocator",
    "probing.steadiness",
    "probing.ranks.job",
    "probing.options",
    "training.loading",
    "training.complete_setup",
    "training.frameworks",
    "training",
    "training.state",
    "search",
    "results",
    "units",
    "errors",
)


def module_name(path: Path) -> str:
    parts = [*path.relative_to(ROOT.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> int:
    """The index in ROOMS of a module such as ``batchfinder.probing.devices.oom``."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)] or [""]
    found = [ROOMS.index(name) for name in names if name in ROOMS]
    assert found, f"{module} stands in no room: add it to ROOMS, and to the design"
    return found[0]


@functools.cache
def imports_of(path: Path) -> list[str]:
    """The modules that a file imports, anywhere in it."""
    modules = {module_name(file) for file in FILES}
    imported = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # "from batchfinder.probing import oom" imports a module, not a name out of one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported += [name if name in modules else str(node.module) for name in names]
    return imported


def loaded_by(statement: str) -> set[str]:
    """Every module that is loaded once a statement has run in a fresh Python."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_imports_point_down_only() -> None:
    ours = f"{ROOT.name}."
    imports = [(module_name(path), name) for path in FILES for name in imports_of(path)]
    inside = [(own, name) for own, name in imports if name.startswith(ours)]
    assert [(own, name) for own, name in inside if room(name) < room(own)] == []


def test_a_room_names_files_that_it_has() -> None:
    for path in [path for path in FILES if path.name == "__init__.py"]:
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        order = re.search(r"^Read (.*?\.)(?:\s|$)", doc, re.MULTILINE | re.DOTALL)
        names = re.findall(r"``([\w/]+)(?:\.py)?``", order[1]) if order else []
        places = [path.parent / name for name in names]
        assert [place for place in places if not place.with_suffix(".py").is_file()] == [
            place for place in places if place.is_dir()
        ]


def test_every_file_is_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_a_leaf_needs_the_standard_library_and_other_leaves_alone() -> None:
    names = tuple(f"{ROOT.name}.{leaf}" for leaf in LEAVES)
    leaves = [path for path in FILES if module_name(path).startswith(names)]
    assert len(leaves) > len(LEAVES)
    foreign = [
        (module_name(path), name)
        for path in leaves
        for name in imports_of(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith(names)
    ]
    assert foreign == []


def test_no_folder_is_crowded() -> None:
    counts = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


WITHOUT_TORCH = (
    "launching",
    "finder",
    "cli.gpus",
    "cli.watch",
    "launching.launch",
    "launching.options",
    "probing.workers.child",
    "probing.workers.supervisor",
    *LEAVES,
    "search.search",
    "results.result",
)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("CONTEXT_BYTES", ("probing.devices.cuda", "launching.hook.memory")),
        ("SMALL_BYTES", ("probing.devices.allocator.blocks", "probing.recording")),
    ],
)
def test_a_constant_that_has_to_be_written_twice_is_the_same(
    name: str, modules: tuple[str, str]
) -> None:
    """The hook imports no batchfinder, which is why."""
    first, second = (importlib.import_module(f"batchfinder.{module}") for module in modules)
    assert getattr(first, name) == getattr(second, name)


@pytest.mark.parametrize("module", [f"batchfinder.{name}" for name in WITHOUT_TORCH])
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    assert not loaded_by(f"import {module}") & {"torch", "numpy", "rich"}


def test_the_package_alone_loads_nothing_else_of_ours() -> None:
    loaded = loaded_by("import batchfinder")
    assert [name for name in loaded if name.startswith("batchfinder.")] == []
    assert "find_max_batch" in dir(batchfinder)
    assert not hasattr(batchfinder, "find_max_batches")


def test_the_help_needs_neither_torch_nor_rich() -> None:
    statement = """
from batchfinder.cli.app import cli
try:
    cli(["find", "--help"])
except SystemExit:
    pass
"""
    assert not loaded_by(statement) & {"torch", "rich"}


def test_only_reporting_knows_rich() -> None:
    users = {
        path.relative_to(ROOT).parts[0]
        for path in FILES
        if any(name.split(".")[0] == "rich" for name in imports_of(path))
    }
    assert users == {"reporting"}


def test_all_public_names_are_there_sorted_and_documented() -> None:
    names = batchfinder.__all__
    assert names == sorted(names)
    assert all(getattr(batchfinder, name).__doc__ for name in names)
    assert {
        "BatchFinderError",
        "BatchSizeResult",
        "Outcome",
        "Probe",
        "TrainingSetup",
        "find_max_batch",
    } <= set(names)
