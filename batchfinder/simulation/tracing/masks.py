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

from batchfinder.simulation.values.known import value_of
from batchfinder.training.state.patching import replaced


def known_masks_read() -> AbstractContextManager[Any]:
    """Let transformers, if imported, read fake tensors with known values until the block ends."""
    module = sys.modules.get("transformers.utils.import_utils")
    # An older version lacks the function, and reads all tensors.
    if not hasattr(module, "is_fake_tensor"):
        return nullcontext()
    return replaced(module, is_fake_tensor=_is_unknown)


def _is_unknown(x: Any) -> bool:
    return isinstance(x, FakeTensor) and value_of(x) is None
