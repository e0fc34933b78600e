from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.resources import files

import pytest

from batchfinder.errors import UsageError
from batchfinder.simulation.gpus import all_gpus, find_gpu, unnamed_gpu
from batchfinder.units import GIB

toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def test_every_gpu_of_the_file_has_all_fields() -> None:
    tables = toml.loads(files("batchfinder.simulation").joinpath("gpus.toml").read_text("utf-8"))
    fields = {"name": str, "total_gib": int | float, "multiprocessors": int}
    for row in tables["gpu"]:
        for field, kind in fields.items():
            assert isinstance(row.get(field), kind), f"{row}: {field} is missing, or no {kind}"
        aliases = row.get("aliases", [])
        is_list = isinstance(aliases, list) and all(isinstance(alias, str) for alias in aliases)
        assert is_list, f'{row}: aliases is a list, such as ["titanx"]'
        is_text = re.fullmatch(r"'\d+\.\d'", repr(row.get("compute_capability")))
        assert is_text, f'{row}: compute_capability is text, such as "9.0"'
        assert ("source" in row) != row.get("unsourced", False), f"{row}: source, or unsourced?"


def test_at_least_thirty_gpus_have_plausible_facts() -> None:
    gpus = all_gpus()

    assert len(gpus) >= 30
    assert len({gpu.name for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert 4 * GIB < gpu.total_bytes < 300 * GIB
        assert gpu.compute_capability >= (6, 0)
        assert 0 < gpu.overhead_bytes < 2 * GIB
        assert find_gpu(gpu.name) == gpu


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("rtx3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a100-80gb", "A100 80GB"),
        ("A100", "A100 40GB"),
        ("h100", "H100 SXM"),
        ("Tesla T4", "T4"),
    ],
)
def test_spelling_does_not_matter(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


def test_an_unknown_gpu_suggests_similar_names() -> None:
    with pytest.raises(UsageError, match=r"no GPU 'rtx3099' is known; did you mean RTX 3090"):
        find_gpu("rtx3099")


def test_an_overhead_holds_for_a_card_and_a_cuda_version() -> None:
    old, new, a100 = find_gpu("rtx3090", cuda=(11, 3)), find_gpu("rtx3090"), find_gpu("a100")
    assert old.overhead_bytes == new.overhead_bytes == a100.overhead_bytes == round(1.75 * GIB)
    assert "on an RTX 3090" in old.overhead_source
    assert "fits peak memory on an A100" in a100.overhead_source
    assert not new.overhead_source

    assert find_gpu("t4").overhead_bytes == round(0.14 * GIB)
    assert "measured on a T4" in find_gpu("t4").overhead_source
    assert find_gpu("t4", cuda=(12, 1)).overhead_bytes == round(1.75 * GIB)


def test_threads_that_no_line_names_are_2048_a_multiprocessor() -> None:
    threads = {name: find_gpu(name).threads for name in ("t4", "rtx4090", "h100")}
    assert threads == {"t4": 40 * 1024, "rtx4090": 128 * 1536, "h100": 132 * 2048}


def test_an_unnamed_gpu_has_the_given_memory() -> None:
    assert unnamed_gpu(24 * GIB).total_bytes == 24 * GIB


def test_what_is_assumed_of_an_unnamed_gpu_is_told() -> None:
    assert "the kernels of an RTX 3090, and its overhead" in unnamed_gpu(24 * GIB).assumption
    assert not find_gpu("rtx3090").assumption
