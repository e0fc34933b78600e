"""Let transformers drop attention masks that mask nothing, as it does with real tensors.

Attention without a mask uses less memory. Transformers does not read the values of fake tensors,
since it assumes that a graph is being traced. The simulation knows the values of most masks.

Source: ``is_tracing`` in ``src/transformers/utils/import_utils.py`` of transformers 5, and its
callers in ``masking_utils.py``.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from batchfinder.simulation.patching import replaced
from batchfinder.simulation.values.known import value_of

_MODULE, _NAME = "transformers.utils.import_utils", "is_fake_tensor"


def known_masks_read() -> AbstractContextManager[None]:
    """Let transformers, if imported, read fake tensors with known values until the block ends."""
    module = sys.modules.get(_MODULE)
    if not hasattr(module, _NAME):  # not imported, or an older version that reads all tensors
        return nullcontext()
    return replaced(module, _NAME, _is_unknown)


def _is_unknown(x: Any) -> bool:
    return isinstance(x, FakeTensor) and value_of(x) is None
