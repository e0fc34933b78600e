from __future__ import annotations

import pickle
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchfinder.cli.request import parse_arguments
from batchfinder.errors import SampleError, TargetError, UsageError
from batchfinder.training.target import (
    call_with_arguments,
    load_function,
    load_target,
)


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test starts in its own folder, and leaves no module behind but PyTorch's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] != "torch":  # it cannot register its operators twice
            del sys.modules[name]


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text))


MODEL = """
    def build_model(width=4, depth=1):
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
"""


def test_function_that_returns_a_model() -> None:
    write("train.py", MODEL)
    setup = load_target("train.py:build_model")
    assert isinstance(setup.model, nn.Sequential)
    assert setup.sample is None


def test_function_that_returns_model_and_sample() -> None:
    write("train.py", "def build(): return nn.Linear(3, 1), torch.ones(2, 3)")
    assert torch.equal(load_target("train.py:build").sample, torch.ones(2, 3))


def test_function_that_returns_a_setup_passes_it_on() -> None:
    write(
        "train.py",
        """
        from batchfinder.training.setup import TrainingSetup
        SETUP = TrainingSetup(nn.Linear(3, 1), torch.ones(2, 3), optimizer="sgd")
        def build(): return SETUP
        """,
    )
    setup = load_target("train.py:build")
    assert setup is sys.modules["train"].SETUP
    assert setup.optimizer == "sgd"


def test_class_of_a_module_is_a_function_too() -> None:
    write("train.py", "class Net(nn.Linear):\n    def __init__(self): super().__init__(2, 1)")
    assert type(load_target("train.py:Net").model).__name__ == "Net"


def test_target_by_module_name_in_the_current_folder() -> None:
    write("project/__init__.py", "")
    write("project/models.py", MODEL)
    assert len(list(load_target("project.models:build_model", {"depth": 2}).model.children())) == 2


def test_arguments_go_to_the_function_and_to_build_sample() -> None:
    write(
        "train.py",
        MODEL + "    def build_sample(width, seq_len=1): return torch.zeros(2, seq_len, width)",
    )
    setup = load_target("train.py:build_model", {"width": 6, "depth": 2, "seq_len": 5})
    assert len(list(setup.model.children())) == 2
    assert setup.sample.shape == (2, 5, 6)


def test_build_sample_comes_after_the_setup_s_own_sample_or_make_batch() -> None:
    write(
        "train.py",
        """
        from batchfinder.training.setup import TrainingSetup
        def own(): return nn.Linear(3, 1), torch.ones(2, 3)
        def maker(): return TrainingSetup(nn.Linear(3, 1), make_batch=lambda n: torch.ones(n, 3))
        def neither(): return nn.Linear(3, 1)
        def build_sample(): return torch.zeros(7, 3)
        """,
    )
    assert load_target("train.py:own").sample.shape == (2, 3)
    assert load_target("train.py:maker").sample is None
    assert load_target("train.py:neither").sample.shape == (7, 3)
    assert load_target("train.py:neither", use_build_sample=False).sample is None


def test_build_sample_that_returns_none() -> None:
    write("train.py", MODEL + "    def build_sample(): pass")
    with pytest.raises(SampleError, match=r"^build_sample in train\.py returned None"):
        load_target("train.py:build_model")


def test_own_folder_is_importable_while_it_loads_and_while_the_function_runs() -> None:
    write("code/widths.py", "WIDTH = 5")
    write("code/late.py", "DEPTH = 3")
    write(
        "code/train.py",
        """
        from widths import WIDTH
        def build():
            from late import DEPTH
            return nn.Linear(WIDTH, DEPTH)
        """,
    )
    model = load_target("code/train.py:build").model
    assert str(model) == "Linear(in_features=5, out_features=3, bias=True)"
    assert sys.path[0] == str(Path("code").resolve())


def test_main_guard_is_not_run_and_no_bytecode_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write("train.py", MODEL + "    if __name__ == '__main__': raise SystemExit('ran')")
    load_target("train.py:build_model")
    assert [path.name for path in Path.cwd().iterdir()] == ["train.py"]


def test_module_has_its_own_name_so_that_its_objects_pickle() -> None:
    write("train.py", "class Net(nn.Linear): pass\ndef build(): return Net(2, 1)")
    model = load_target("train.py:build").model
    assert type(model).__module__ == "train"
    assert pickle.loads(pickle.dumps(type(model))) is type(model)


def test_file_named_like_another_module_does_not_take_its_place() -> None:
    write("types.py", "class Net(nn.Linear): pass\ndef build(): return Net(2, 1)")
    types_module = sys.modules["types"]
    model = load_target("types.py:build").model
    assert sys.modules["types"] is types_module
    assert pickle.loads(pickle.dumps(type(model))) is type(model)


def test_dataclasses_with_postponed_annotations_work() -> None:
    Path("train.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "@dataclass\nclass Config:\n    width: int = 3\n"
        "def build(): return nn.Linear(Config().width, 1)\n"
    )
    assert load_target("train.py:build").model.in_features == 3


def test_annotations_are_evaluated_unless_the_file_postpones_them() -> None:
    write(
        "train.py",
        "def build(width: int = 3): return nn.Linear(build.__annotations__['width'](3), 1)",
    )
    assert load_target("train.py:build").model.in_features == 3


def test_file_runs_once_for_target_and_sample_function() -> None:
    write("train.py", MODEL + "    def batch(): return torch.zeros(1)")
    load_target("train.py:build_model")
    assert load_function("train.py:batch") is sys.modules["train"].batch
    assert load_function(f"{Path('train.py').resolve()}:batch") is sys.modules["train"].batch
    with pytest.raises(UsageError, match=r"names no function; it has .*\. Try train.py:FUNCTION$"):
        load_function("train.py")  # a --sample or --loader: it makes no model


def test_command_line_is_that_of_a_script_without_arguments() -> None:
    write(
        "train.py",
        """
        import argparse, sys
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=3)
        ARGS = parser.parse_args()
        def build():
            return nn.Linear(ARGS.width, len(sys.argv))
        """,
    )
    argv = sys.argv
    model = load_target("train.py:build").model
    assert str(model) == "Linear(in_features=3, out_features=1, bias=True)"
    assert sys.argv is argv


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "returned None;"),
        ("nn.Linear", "returned the class Linear, not an instance of it;"),
        ("'model'", "returned an object of type str;"),
        ("(nn.Linear(1, 1), 1, 2)", r"returned a tuple \(Linear, int, int\);"),
        ("(1, nn.Linear(1, 1))", r"returned a tuple \(int, Linear\);"),
    ],
)
def test_other_returns_are_refused_in_one_line(returned: str, said: str) -> None:
    write("train.py", f"def build(): return {returned}")
    with pytest.raises(TargetError, match=f"^train.py:build {said}.*must return the model") as info:
        load_target("train.py:build")
    assert "\n" not in str(info.value)
    advice = "Try return model, (inputs, targets)"
    assert str(info.value).endswith(advice) == returned.startswith("(nn.")


@pytest.mark.parametrize("part", ["torch.optim.SGD(model.parameters())", "nn.MSELoss()"])
def test_an_optimizer_or_a_loss_beside_the_model_belongs_in_a_setup(part: str) -> None:
    write(
        "train.py", f"model = nn.Linear(1, 1)\ndef build(): return model, torch.ones(1, 1), {part}"
    )
    with pytest.raises(TargetError, match=r"Try return TrainingSetup\(model, sample, optimizer="):
        load_target("train.py:build")


def test_setup_without_a_module_is_refused() -> None:
    write(
        "train.py",
        """
        from batchfinder.training.setup import TrainingSetup
        def build(): return TrainingSetup(nn.Linear)
        """,
    )
    with pytest.raises(TargetError, match="a TrainingSetup whose model is the class Linear"):
        load_target("train.py:build")


FROM_HERE = ". Try its path from the current folder, or the whole path from /"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("trian.py:build_model", "no such file: trian.py; did you mean train.py?"),
        ("nowhere/train.py:build_model", f"no such file: nowhere/train.py{FROM_HERE}"),
        ("missing.py:build_model", f"no such file: missing.py{FROM_HERE}"),
        ("./train:build_model", "no such file: ./train; did you mean train.py?"),
        ("notes.txt:build_model", "notes.txt is not a Python file; write FILE.py:FUNCTION"),
        (
            "train.ipynb:build_model",
            "train.ipynb is a notebook. Try find_max_batch(model, sample) in a cell, or move the "
            "function to a .py file",
        ),
        ("trian:build_model", "no such module: trian; did you mean train?"),
        ("project.model:build", "no such module: project.model; did you mean project.models?"),
        ("absent.models:build", "no such module: absent"),
        ("my-module:build", "'my-module' is neither a file nor a module; write FILE.py:FUNCTION"),
        ("train.py:buid_model", "train.py has no function buid_model; did you mean build_model?"),
        ("train.py:x", "train.py has no function x; it has helper, build_model"),
        (
            "train.py:WIDTH",
            "WIDTH in train.py is an object of type int, not a function. Try one that returns the "
            "model",
        ),
        (
            "train.py:NET",
            "NET in train.py is an object of type Linear, not a function. Try one that returns the "
            "model",
        ),
        (
            "train.py",
            "'train.py' names no function; it has build_model, helper. Try one that returns the "
            "model, or, for the script as it is, batchfinder run -- python train.py --batch-size "
            "{batch_size}",
        ),
        (
            "train.py:",
            "'train.py:' names no function; it has build_model, helper. Try one that returns the "
            "model, or, for the script as it is, batchfinder run -- python train.py --batch-size "
            "{batch_size}",
        ),
        (
            "conv.py",
            "'conv.py' names no function; it has Net, Lit. Try one that returns the model, or, for "
            "the script as it is, batchfinder run -- python conv.py --batch-size {batch_size}",
        ),
        (
            "empty.py",
            "'empty.py' names no function. Try one that returns the model, or, for the script as "
            "it is, batchfinder run -- python empty.py --batch-size {batch_size}",
        ),
        ("Q:\\net.py", f"no such file: Q:\\net.py{FROM_HERE}"),
        ("Q:\\net.py:build", f"no such file: Q:\\net.py{FROM_HERE}"),
        ("train", "'train' is no target; write FILE.py:FUNCTION or package.module:FUNCTION"),
        (":build", "':build' is no target; write FILE.py:FUNCTION or package.module:FUNCTION"),
        ("", "'' is no target; write FILE.py:FUNCTION or package.module:FUNCTION"),
    ],
)
def test_targets_that_are_not_there(target: str, said: str) -> None:
    write(
        "train.py",
        "WIDTH = 3\nNET = nn.Linear(1, 1)\ndef helper(): pass\n" + textwrap.dedent(MODEL),
    )
    write("project/__init__.py", "")
    write("project/models.py", "")
    write("empty.py", "")
    write(
        "conv.py",
        "class Data: pass\nclass Net(nn.Module): pass\nclass Lit(pl.LightningModule): pass",
    )
    Path("notes.txt").write_text("notes")
    with pytest.raises(UsageError) as info:
        load_target(target)
    assert str(info.value) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "build needs width, depth; give it by --arg width=VALUE --arg depth=VALUE"),
        ({"width": 1}, "build needs depth; give it by --arg depth=VALUE"),
        (
            {"widht": 1},
            "train.py:build takes no argument widht; did you mean width?",
        ),
        (
            {"x": 1},
            "train.py:build takes no argument x; it has width, depth, bias",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, object], said: str) -> None:
    write("train.py", "def build(width, depth, *, bias=True): raise AssertionError")
    with pytest.raises(UsageError) as info:
        load_target("train.py:build", arguments)
    assert str(info.value) == said


def test_function_with_keywords_takes_any_argument() -> None:
    write("train.py", "def build(**sizes): return nn.Linear(sizes['a'], sizes['b'])")
    assert load_target("train.py:build", {"a": 2, "b": 3}).model.out_features == 3


def test_errors_of_the_user_s_code_pass_unchanged_and_leave_no_module() -> None:
    write("fails.py", "raise LookupError('at import')")
    with pytest.raises(LookupError, match="at import"):
        load_target("fails.py:build")
    assert "fails" not in sys.modules

    write("imports.py", "import not_installed_anywhere")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_target("imports.py:build")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_target("imports:build")

    write("broken.py", "def build(:\n    pass")
    with pytest.raises(SyntaxError):
        load_target("broken.py:build")
    with pytest.raises(SyntaxError):
        load_target("broken.py")

    write("calls.py", "def build(): return len(5)")
    with pytest.raises(TypeError, match="has no len"):
        load_target("calls.py:build")


def test_a_file_of_a_package_is_to_be_named_as_a_module() -> None:
    write("nets/deep/part.py", "from .layers import Layer")
    write("nets/deep/train.py", "from .layers import Layer\ndef build(): return Layer()")
    with pytest.raises(UsageError, match=r"its own package; in .*nets, write deep.train:FUNCTION$"):
        load_target("nets/deep/train.py:build")
    write("nets/__init__.py", "")
    with pytest.raises(UsageError, match=r"package; write nets.deep.train:FUNCTION$"):
        load_target("nets/deep/train.py:build")
    write("other.py", "import sys; sys.path.append('nets/deep')\nimport part")
    with pytest.raises(ImportError, match="attempted relative import"):
        load_target("other.py:build")


LOOP = """import torch
def train(steps=3):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(steps):
        model(torch.zeros(1, 4)).sum().backward()
        optimizer.step()
    return model, torch.zeros(1, 4)
"""


def test_a_target_that_trains_is_told_so_at_once() -> None:
    write("looping.py", f"{LOOP}train()")
    expected = (
        r"looping.py trains, .* under if __name__ == .*, or, .* python looping.py --batch-size"
    )
    with pytest.raises(TargetError, match=expected):
        load_target("looping.py:train")
    write("calling.py", LOOP)
    with pytest.raises(TargetError, match=r"train trains, but a target only returns what is to be"):
        load_target("calling.py:train")
    setup = load_target("calling.py:train", {"steps": 2})  # makes the optimizer's states
    assert isinstance(setup.model, torch.nn.Linear)


def test_exit_of_the_user_s_code_is_told() -> None:
    write("leaves.py", "import sys\nsys.exit('no data')")
    with pytest.raises(TargetError, match=r"leaves.py called sys.exit\('no data'\)"):
        load_target("leaves.py:build")
    write("later.py", "def build(): raise SystemExit(3)")
    with pytest.raises(TargetError, match=r"build called sys.exit\(3\)"):
        load_target("later.py:build")


def test_call_with_arguments_leaves_out_what_a_function_does_not_take() -> None:
    def build(width: int, *rest: int, depth: int = 1) -> tuple[int, int]:
        return width, depth

    assert call_with_arguments(build, {"width": 2, "depth": 3, "lr": 0.1, "rest": 1}) == (2, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-0.5", -0.5),
        ("1e-3", 1e-3),
        ("gpt2", "gpt2"),
        ("true", True),
        ("True", True),
        ("false", False),
        ("none", None),
        ("None", None),
        ("[3, 4]", [3, 4]),
        ("(1, 'a')", (1, "a")),
        ("'12'", "12"),
        ("", ""),
        ("a=b", "a=b"),
        ("007", "007"),
        ("3x224", "3x224"),
        ("__import__('os')", "__import__('os')"),
        (r"'\d'", r"\d"),
    ],
)
def test_values_of_arguments(text: str, value: object) -> None:
    assert parse_arguments([f"key={text}"]) == {"key": value}


def test_last_of_equal_arguments_counts() -> None:
    assert parse_arguments(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}


@pytest.mark.parametrize("pair", ["width", "=3", "", "my-width=3", "2=3"])
def test_pairs_that_are_none(pair: str) -> None:
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_arguments([pair])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ).filter(lambda value: value not in (float("inf"), float("-inf")))
)
def test_literals_come_back_as_they_were(value: object) -> None:
    if "inf" not in repr(value):
        assert parse_arguments([f"key={value!r}"]) == {"key": value}


@given(st.text())
def test_any_text_is_a_value(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(parse_arguments([f"key={text}"])) == {"key"}
