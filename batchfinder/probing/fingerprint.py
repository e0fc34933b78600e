"""Fingerprint the user's code, model and batch, on which the answer of a search depends."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.probing.code import digests
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.tree import named_leaves

_SCALARS = (bool, int, float, str, type(None))

# A memory address in the repr of a function or object. It differs in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(setup: TrainingSetup, files_read: Iterable[str] = ()) -> dict[str, Any]:
    """Return everything that a search's answer depends on, as plain data.

    Equal setups give equal data. It includes digests of the user's loaded modules and the versions
    of packages. It also includes digests of the model (modules and their settings, shapes and types
    of parameters and buffers), of the sample's shapes and types, and of the optimizer.
    ``files_read`` are files that were read while loading it, such as configuration files.
    """
    files = [attributes.get("__file__") for attributes in _modules().values()]
    return {
        "code": digests(filter(None, [*files, *files_read])),
        "packages": package_versions(),
        "model": _digest(_model(setup.model)),
        "sample": _digest(_leaves(setup.sample)),
        "optimizer": _optimizer(setup.optimizer),
        "functions": [_name(f) for f in (setup.loss_fn, setup.step, setup.make_batch)],
    }


def package_versions() -> dict[str, str]:
    """Return the version of each loaded package that has one."""
    tops = {name: attributes for name, attributes in _modules().items() if "." not in name}
    versions = {name: attributes.get("__version__") for name, attributes in tops.items()}
    return {name: text for name, text in versions.items() if isinstance(text, str)}


def _modules() -> dict[str, dict[str, Any]]:
    """Return the attributes of each loaded module, as far as they are there.

    With ``getattr`` a lazy module would load, or compute them with warnings or errors of its own.
    """
    modules = [*sys.modules.items()]
    return {name: vars(module) for name, module in modules if isinstance(module, ModuleType)}


def _model(model: nn.Module) -> Iterable[str]:
    with suppress(Exception):  # runs the user's code
        yield repr(model)
    with suppress(Exception):
        yield repr(getattr(model, "config", None))
    for name, module in model.named_modules():
        settings = {key: v for key, v in vars(module).items() if isinstance(v, _SCALARS)}
        yield f"{name} {type(module)} {sorted(settings.items())}"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name} {_shape(parameter)} {parameter.requires_grad}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name} {_shape(buffer)}"


def _leaves(sample: Any) -> Iterable[str]:
    for path, leaf in named_leaves(sample):
        if isinstance(leaf, Tensor) or hasattr(leaf, "dtype"):
            yield f"{path} {_shape(leaf)}"
        else:
            yield f"{path} {leaf if isinstance(leaf, _SCALARS) else type(leaf)}"


def _shape(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'layout', '')}"


def _optimizer(optimizer: Any) -> str:
    if isinstance(optimizer, Optimizer):
        groups = [
            {key: v for key, v in group.items() if isinstance(v, _SCALARS)}
            | {"parameters": len(group["params"])}
            for group in optimizer.param_groups
        ]
        return f"{type(optimizer).__qualname__} {groups}"
    return optimizer if isinstance(optimizer, str) else _name(optimizer)


def _name(function: Any) -> str:
    if isinstance(function, nn.Module):
        return _digest(_model(function))
    place, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    return f"{place}.{name}" if name else _ADDRESS.sub("", repr(function))


def _digest(texts: Iterable[str]) -> str:
    text = json.dumps([_ADDRESS.sub("", text) for text in texts])
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
