"""Load the module that holds the user's functions, as Python would run it as a script."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from batchfinder.errors import TargetError, UsageError, did_you_mean

# A target that makes more optimizer steps than these trains: two may create an optimizer's states.
STEPS_OF_A_TARGET = 2

# Starts a target that names a language model's configuration instead of a function.
PREFIX = "hf:"
NOTEBOOK = ".ipynb"
# With these, a file may have functions whose names are not in it.
_BRING_NAMES = (b"import *", b"globals()")


def load_module(place: str) -> ModuleType:
    """Load a file or a module without running its ``if __name__ == "__main__"`` block.

    The file's folder (for a module: the current one) becomes the first on ``sys.path`` and stays
    there, as for a script. The module gets the file's name, unless another module has that name. A
    file or module that is already loaded does not run again.
    """
    return _load_file(place) if _names_file(place) else _import_module(place)


def is_language_model(target: str) -> bool:
    """Return True if a target names a language model's configuration, as in ``hf:gpt2``."""
    return target.startswith(PREFIX)


def check_target(target: str) -> None:
    """Check a target as far as that needs neither PyTorch nor the user's code."""
    if not is_language_model(target):
        place, name = split_target(target)
        if _names_file(place):
            source = existing_file(place).read_bytes()
            # A script would train before it turned out that it lacks the function.
            if not any(text in source for text in (name.encode(), *_BRING_NAMES)):
                try:
                    functions = _functions_in_file(place)
                except SyntaxError:
                    return  # loading the file shows it
                raise no_function(place, name, functions, _or_run(place))


def split_target(target: str, *, is_model: bool = True) -> tuple[str, str]:
    """Return the place and the function that a target, or another option, names.

    Example:
        >>> split_target("train.py:build_model")
        ('train.py', 'build_model')
    """
    # Split at the last colon, because a Windows path has one after its drive letter.
    place, _, name = target.rpartition(":")
    if place and name.isidentifier():
        return place, name
    place = target.rstrip(":") if not place or not name else target
    if place.endswith(".py"):
        more = _or_run(place) if is_model else f". Try {place}:FUNCTION"
        raise UsageError(f"{target!r} names no function{it_has(_functions_in_file(place))}{more}")
    if target and (_is_file(Path(target)) or _is_file(Path(target, "config.json"))):
        raise UsageError(f"{target!r} is no target. Try {PREFIX}{target} for a language model.")
    raise UsageError(f"{target!r} is no target; write FILE.py:FUNCTION or package.module:FUNCTION")


def existing_file(place: str) -> Path:
    """Return the absolute path of a Python file."""
    path = Path(place)
    if path.suffix == NOTEBOOK:
        raise UsageError(
            f"{place} is a notebook. Try find_max_batch(model, sample) in a cell, or move the "
            "function to a .py file"
        )
    try:
        if path.is_file() and path.suffix == ".py":
            return path.resolve()
        if path.exists():
            raise UsageError(f"{place} is not a Python file; write FILE.py:FUNCTION")
        folder = path.parent
        names = [entry.stem for entry in folder.glob("*.py")] if folder.is_dir() else []
    except OSError as error:  # a name too long, a folder without access
        raise UsageError(f"no such file: {place} ({error.strerror})") from None
    # Compare the names without ".py", which makes short names look alike.
    else_ = ". Try its path from the current folder, or the whole path from /"
    hint = did_you_mean(path.stem, names, "{}.py".format, otherwise=else_)
    raise UsageError(f"no such file: {place}{hint}")


def _names_file(place: str) -> bool:
    return (
        place.endswith((".py", NOTEBOOK))
        or "/" in place
        or os.sep in place
        or _is_file(Path(place))
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # not a valid file name
        return False


def _load_file(place: str) -> ModuleType:
    path = existing_file(place)
    _put_first_on_path(str(path.parent))

    name = path.stem.replace(".", "_")
    if not _is_loaded_from(path, name) and (name in sys.modules or name in sys.stdlib_module_names):
        # Under its own name, the file would replace another module that some code imports.
        name = f"{name}_{zlib.crc32(os.fsencode(path)):08x}"
    if _is_loaded_from(path, name):
        return sys.modules[name]

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        with as_script(place, file=str(path)):
            # Compiled here, as Python compiles a script, so no __pycache__ is left beside it.
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            exec(code, module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportError) and _lacks_its_package(error, path):
            raise UsageError(
                f"{place} imports from its own package; {_named_in_package(path)}"
            ) from None
        raise
    return module


def _lacks_its_package(error: ImportError, path: Path) -> bool:
    """Return True if this file's own relative import failed, not one in a file that it imports."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return "no known parent package" in str(error) and frame.f_code.co_filename == str(path)


def _named_in_package(path: Path) -> str:
    """Return the advice to name a file as a module of its package."""
    folder, name = path.parent.parent, f"{path.parent.name}.{path.stem}"
    while (folder / "__init__.py").exists():
        folder, name = folder.parent, f"{folder.name}.{name}"
    place = "" if folder == Path.cwd() else f"in {folder}, "
    return f"{place}write {name}:FUNCTION"


def _is_loaded_from(path: Path, name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and Path(file).resolve() == path


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is neither a file nor a module; write FILE.py:FUNCTION")
    _put_first_on_path(str(Path.cwd()))
    try:
        with as_script(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):
            raise  # the user's module imports a missing module
    parent, dot, _ = missing.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else [str(Path.cwd())]
    siblings = [f"{parent}{dot}{module.name}" for module in pkgutil.iter_modules(folders or [])]
    raise UsageError(f"no such module: {missing}{did_you_mean(missing, siblings)}")


def no_function(place: str, name: str, functions: Sequence[str], advice: str = "") -> UsageError:
    """Return the error for a function that a place lacks: it names the closest, or all."""
    hint = did_you_mean(name, functions, otherwise=f"{it_has(functions)}{advice}")
    return UsageError(f"{place} has no function {name}{hint}")


def _or_run(place: str) -> str:
    """Return the end of a message about a script without a function for the target."""
    return f". Try one that returns the model, or, for the script as it is, {_run(place)}"


def _run(place: str) -> str:
    return f"batchfinder run -- python {place} --batch-size {{batch_size}}"


def _functions_in_file(place: str) -> list[str]:
    """Return the public functions and models of a file, without running it.

    Names with "model" come first.
    """
    path = existing_file(place)
    statements = ast.parse(path.read_bytes(), str(path)).body
    names = [
        node.name
        for node in statements
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.ClassDef) and _is_model(node))
    ]
    public = [name for name in names if not name.startswith("_")]
    return sorted(public, key=lambda name: "model" not in name)


def _is_model(node: ast.ClassDef) -> bool:
    """Return True for a class such as ``Net(nn.Module)`` or ``Net(LightningModule)``."""
    return any(ast.unparse(base).endswith("Module") for base in node.bases)


def _put_first_on_path(folder: str) -> None:
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


@contextmanager
def as_script(name: str, file: str | None = None) -> Iterator[None]:
    """Let the user's code see the command line of a script that is run without arguments.

    Raises:
        TargetError: the code called ``sys.exit``, or it trains.
    """
    ours = sys.argv
    sys.argv = [file or name]
    try:
        with _without_training(name, file):
            yield
    except SystemExit as exit_:
        raise TargetError(
            f"{name} called sys.exit({exit_.code!r}); keep the command line of the script under "
            'if __name__ == "__main__"'
        ) from None
    finally:
        sys.argv = ours


@contextmanager
def _without_training(name: str, file: str | None) -> Iterator[None]:
    """Raise a TargetError in the user's code once it trains, which may take hours."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    run = f", or, for the script as it is, {_run(Path(file).name)}" if file else ""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps > STEPS_OF_A_TARGET:
            raise TargetError(
                f"{name} trains, but a target only returns what is to be trained. Try to keep the "
                f'training under if __name__ == "__main__"{run}'
            )

    hook = register_optimizer_step_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def it_has(names: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the known names."""
    return f"; it has {', '.join(names)}" if names else ""
