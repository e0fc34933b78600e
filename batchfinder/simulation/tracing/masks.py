"""What transformers does with a mask that masks nothing: without one, attention takes less memory.

It looks at the mask's values, but not at those of fake tensors, which it takes for a graph that is
being traced. Here the values of most masks are known.

Source: ``is_tracing`` in ``src/transformers/utils/import_utils.py`` of transformers 5, and what
asks it in ``masking_utils.py``.
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
    """Let transformers, if it is there, read fake tensors of known values, until the block ends."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _NAME, None)
    if original is None:  # not imported, or an older one that reads all
        yield
        return
    setattr(module, _NAME, _is_unknown)
    try:
        yield
    finally:
        setattr(module, _NAME, original)


def _is_unknown(x: Any) -> bool:
    return isinstance(x, FakeTensor) and value_of(x) is None
