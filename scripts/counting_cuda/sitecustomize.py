"""Run at the start of every Python under the counting runtime: PyTorch goes without cuDNN.

cuDNN looks at the device itself, and there is none; PyTorch then takes its own kernels for
convolutions and recurrent layers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _WithoutCudnn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads PyTorch as it is loaded otherwise, and switches cuDNN off."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)  # many libraries only look for PyTorch before they import it
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._loader.exec_module(module)
        module.backends.cudnn.enabled = False
        module.backends.cuda.enable_cudnn_sdp(False)


sys.meta_path.insert(0, _WithoutCudnn())
