from __future__ import annotations

import pytest
from hypothesis import given
from strategies import texts

from batchfinder.reporting.wording import allocator_request_bytes, one_line
from batchfinder.units import GIB, MIB


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total", 5 * GIB // 4),
        ("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total", 20 * MIB),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("MPS backend out of memory (MPS allocated: 5 GB). Tried to allocate 256.00 MB", 256 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("std::bad_alloc", None),
        ("memory still grew after 10 steps", None),
        ("tried to allocate 0 bytes", None),
        ("", None),
    ],
)
def test_the_request_is_read_from_an_allocators_message(message: str, size: int | None) -> None:
    assert allocator_request_bytes(message) == size


@given(texts)
def test_any_text_becomes_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line.splitlines()) <= 1


@given(texts.filter(lambda text: text.isprintable() and "  " not in text))
def test_a_printable_line_is_unchanged(text: str) -> None:
    assert one_line(text) == " ".join(text.split())
