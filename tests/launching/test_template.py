"""A command with placeholders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.errors import UsageError
from batchfinder.launching.template import Template


def test_placeholders_are_replaced_anywhere(tmp_path: Path) -> None:
    template = Template(
        ["train.py", "model.batch_size={batch_size}", "--acc={accumulation}", "{scratch}/a"],
        {"BATCH": "{batch_size}"},
        global_batch_size=64,
    )
    arguments, variables = template.fill(16, tmp_path)
    scratch = str(tmp_path / "scratch")
    assert arguments == ["train.py", "model.batch_size=16", "--acc=4", f"{scratch}/a"]
    assert variables == {"BATCH": "16"}
    assert template.command(16) == "BATCH=16 train.py model.batch_size=16 --acc=4 scratch/a"


def test_other_braces_are_left_alone(tmp_path: Path) -> None:
    template = Template(["train.py", '{"lr": 1}', "{learning_rate}", "{batch_size}"])
    assert template.fill(2, tmp_path)[0][1:3] == ['{"lr": 1}', "{learning_rate}"]


def test_a_file_is_copied_and_named_by_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("bs: {batch_size}\nout: {scratch}\n")
    Path("lr.yaml").write_text("lr: 1\nbs: {batch_size}\n")
    template = Template(["train.py", "--config=config.yaml"], files=("config.yaml",))
    copy = Path(template.fill(8, tmp_path / "launch")[0][1].partition("=")[2])
    assert copy.read_text() == f"bs: 8\nout: {tmp_path}/launch/scratch\n"
    assert Path("config.yaml").read_text() == "bs: {batch_size}\nout: {scratch}\n"
    assert template.command(8) == (
        "sed -e 's/{batch_size}/8/g' -e 's/{scratch}/scratch/g' config.yaml > config-8.yaml"
        " && train.py --config=config-8.yaml"
    )
    other = Template(["a.py", "lr.yaml"], files=("lr.yaml",))
    assert other.command(8) == "sed -e 's/{batch_size}/8/g' lr.yaml > lr-8.yaml && a.py lr-8.yaml"


def test_the_copy_of_a_script_imports_what_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "code" / "train.py"
    script.write_text("import beside, elsewhere\nprint(beside.WORD, elsewhere.WORD, {batch_size})")
    (tmp_path / "elsewhere.py").write_text("WORD = 'too'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    template = Template([sys.executable, str(script)], files=(str(script),))
    arguments, variables = template.fill(8, tmp_path / "launch")
    said = subprocess.check_output(arguments, env={**os.environ, **variables}, text=True)
    assert said == "found too 8\n"


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (["train.py"], {}, "the command has no {batch_size}"),
        (["train.py"], {}, "see --file and --env"),
        (["train.py", "{batchsize}"], {}, "{batchsize} is not it"),
        (["train.py", "{batch-size}"], {}, "{batch-size} is not it"),
        (["{batch_size}", "{acumulation}"], {}, "Try {accumulation}"),
        (["{batch_size}", "{accumulation}"], {}, "Try --global-batch-size"),
        (["{batch_size}", "no.yaml"], {"files": ("no.yaml",)}, "cannot be read"),
        (["{batch_size}", "plain.yaml"], {"files": ("plain.yaml",)}, "has no placeholder"),
        (["{batch_size}"], {"files": ("good.yaml",)}, "does not name --file good.yaml"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str],
    more: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text("bs: 8")
    Path("good.yaml").write_text("bs: {batch_size}")
    with pytest.raises(UsageError) as error:
        Template(arguments, **more)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("command", "processes", "asked"),
    [
        ("accelerate launch --cpu --num_processes 2 train.py", 1, "2"),
        ("/opt/bin/accelerate launch --num_machines 1 --num_processes=4 train.py", 2, "4"),
        ("python -m accelerate.commands.launch --num-processes 2 train.py", 1, "2"),
        ("torchrun --standalone --nproc-per-node=3 train.py", 1, "3"),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py", 1, "3"),
        ("torchrun --nproc-per-node 2 train.py", 2, ""),
        ("torchrun --nproc-per-node gpu train.py", 1, ""),
        ("accelerate launch --num_machines 2 --num_processes 8 train.py", 4, ""),
        ("accelerate launch train.py --num_processes 4", 1, ""),
        ("python train.py --num_processes 4", 1, ""),
    ],
)
def test_a_launcher_that_starts_another_number_of_processes_is_named(
    command: str, processes: int, asked: str
) -> None:
    remark = Template([*command.split(), "{batch_size}"]).remark_on_ranks(processes)
    assert remark.startswith(f"the command asks for {asked} processes") if asked else not remark
