"""Any text gives an answer or one clear error, never a traceback."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import command_lines, json_texts, sizes_as_text, specs, targets, texts
from text_inputs import READERS, read

KINDS = {
    "size": sizes_as_text,
    "percentage": sizes_as_text,
    "arguments": texts,
    "input": specs,
    "target": targets,
    "gpu": texts,
    "result": json_texts,
    "calibration": json_texts,
    "template": texts,
    "report": json_texts,
    "find": command_lines,
    "estimate": command_lines,
    "study": command_lines,
}


def test_every_reader_is_tried() -> None:
    assert KINDS.keys() == READERS.keys()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_text_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    read(kind, data.draw(KINDS[kind] | texts))


# Found by these tests and by fuzzing; each once caused a traceback.
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("size", "9" * 5000),
        ("target", "a" * 300 + ":build"),
        ("target", "a" * 300 + ".py:build"),
        ("target", "a/" * 3000 + "b:build"),
        ("size", "9" * 400 + "TiB"),
        ("result", "[" * 100_000),
        ("result", '{"budget_bytes": 1, "device": "cuda:0 T4", "probes": [{"outcome": "fits",'
         ' "peak_reserved_bytes": 1, "batch_size": Infinity}]}'),
        ("calibration", '{"T4": Infinity}'),
        ("calibration", "[" * 100_000),
        ("calibration", '{"RTX 3090": 1' + "0" * 400 + "}"),
        ("find", "--probe-timeout nan"),
        ("find", "--global-batch-size 1000000000000000009"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_earlier_bugs(kind: str, text: str) -> None:
    read(kind, text)
