"""Let transformers drop attention masks that mask nothing, as it does with real tensors.

Attention without a mask uses less memory. Transformers does not read the values of fake tensors,
since it assumes that a graph is being traced. The simulation knows the values of most masks.

Source: ``is_tracing`` in ``src/transformers/utils/import_utils.py`` of transformers 5, and its
callers in ``masking_utils.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from batchfinder.simulation.values.known import value_of

_MODULE, _NAME = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def known_masks_looked_at() -> Iterator[None]:
    """Let transformers, if imported, read fake tensors with known values until the block ends."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _NAME, None)
    if original is None:  # not imported, or an older version that reads all tensors
        yield
        return
    setattr(module, _NAME, _is_unknown)
    try:
        yield
    finally:
        setattr(module, _NAME, original)


def _is_unknown(x: Any) -> bool:
    return isinstance(x, FakeTensor) and value_of(x) is None
