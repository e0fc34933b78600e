"""The package as a whole: what imports what, how large a file is, what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import batchfinder

ROOT = Path(batchfinder.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LEAVES = (
    "accumulation",
    "bounds",
    "bracket",
    "chooser",
    "errors",
    "fragments",
    "memory_model",
    "prediction",
    "result",
    "search",
    "search_pace",
    "units",
    "warning",
)
MOST_LINES = 300

# From the top down: a file imports from its own room and from rooms further down only.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("find_command", "estimate_command", "gpus_command"),
    ("", "finder", "estimator", "cluster_estimator"),
    ("simulated_search", "head_start", "conclusion", "remarks"),
    ("integrations", "reporting"),
    ("probing", "simulation"),
    ("training",),
    LEAVES,
)


def module_name(path: Path) -> str:
    parts = [*path.relative_to(ROOT.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> int:
    """The index in ROOMS of a module such as ``batchfinder.probing.oom``."""
    name = module.split(".")[1] if "." in module else ""
    found = [index for index, names in enumerate(ROOMS) if name in names]
    assert found, f"{module} stands in no room: add it to ROOMS, and to the design"
    return found[0]


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


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down_only(path: Path) -> None:
    own = room(module_name(path))
    ours = [name for name in imports_of(path) if name.startswith(f"{ROOT.name}.")]
    assert [name for name in ours if room(name) < own] == []


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_every_file_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_needs_the_standard_library_and_other_leaves_alone(leaf: str) -> None:
    allowed = {f"{ROOT.name}.{other}" for other in LEAVES} | sys.stdlib_module_names
    foreign = [
        name
        for name in imports_of(ROOT / f"{leaf}.py")
        if name not in allowed and name.split(".")[0] not in allowed
    ]
    assert foreign == []


WITHOUT_TORCH = ("finder", "gpus_command", "probing.worker_process", "probing.fork_server", *LEAVES)


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
from batchfinder.cli import cli
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
