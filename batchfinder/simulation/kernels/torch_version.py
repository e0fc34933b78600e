"""The installed version of PyTorch. Some kernels changed from release to release."""

from __future__ import annotations

import torch

major, minor = torch.__version__.split(".")[:2]
TORCH_VERSION = (int(major), int(minor))
