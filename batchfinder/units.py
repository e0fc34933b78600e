"""Convert bytes, seconds, percentages and counts to and from text. Sizes are 1024-based."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction
from typing import Any, SupportsIndex

from batchfinder.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

MOST_SECONDS = 1e9  # 32 years: Python's timers overflow at 9.2e9

UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))

# "24GB" on a graphics card's box means GiB in every driver and in PyTorch. Both spellings mean GiB
# here, so that a user who types 24GB for a 24 GiB card does not lose 7 %.
# Longer numbers would overflow later; no size needs them.
_SIZE = re.compile(
    r"\s*(\d{1,24}(?:\.\d{1,24})?)\s*(([KMGT])(?:I?B)?|B)?\s*", re.ASCII | re.IGNORECASE
)


def parse_bytes(text: str | float, least: int = 1) -> int:
    """Read a size in bytes from text such as ``"24GiB"``, ``"1.5 GiB"`` or ``"512MiB"``.

    Args:
        text: a number with a unit (B, KiB, MiB, GiB, TiB; "GB" and "G" mean GiB), or a
            number of bytes. In text, a number below 2**20 needs its unit.
        least: the smallest valid size.

    Raises:
        UsageError: the text is not a size, or the size is out of range.

    Example:
        >>> parse_bytes("24GiB")
        25769803776
    """
    if isinstance(text, int | float) and math.isfinite(text):
        size = int(text)
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UsageError(f"{text!r} is not a memory size. Try 24GiB or 512MiB.")
        # A float would lose the last bytes of numbers above 2**53.
        size = int(Fraction(match[1]) * KIB ** "_KMGT".index((match[3] or "_").upper()))
        if not match[2] and 0 < size < MIB:
            raise UsageError(f"{text!r} means {size} bytes. Try {text}GiB.")
    if size < least:
        raise UsageError(f"a memory size must be positive, not {text!r}. Try 24GiB.")
    if size >= 2**63:
        raise UsageError(f"{text!r} is more memory than any device has. Try 24GiB.")
    return size


def bytes_if_given(size: str | float | None) -> int | None:
    """Read a size that may be left out, such as a memory limit.

    Example:
        >>> bytes_if_given("1GiB"), bytes_if_given(None)
        (1073741824, None)
    """
    return None if size is None else parse_bytes(size)


def format_bytes(size: float) -> str:
    """Format a size with one decimal, in the largest unit that keeps it at 1 or more.

    It may be negative.

    Example:
        >>> format_bytes(25769803776), format_bytes(1536), format_bytes(100)
        ('24.0 GiB', '1.5 KiB', '100 B')
    """
    for unit, factor in UNITS:
        # 0.99995: write 1.0 of this unit instead of rounding to 1024.0 of the smaller one.
        if abs(size) >= factor * 0.99995:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration; ``seconds`` must not be negative.

    Example:
        >>> [format_seconds(s) for s in (0.0004, 0.041, 1.024, 83.2, 4000)]
        ['0.4 ms', '41 ms', '1.02 s', '1 min 23 s', '1 h 6 min']
    """
    if seconds < 0.001:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def parse_headroom(text: str) -> float:
    """Read the percentage of ``--headroom``, such as ``"7.5"`` or ``"7.5%"``, as a fraction.

    Raises:
        UsageError: the text is not such a percentage.

    Example:
        >>> parse_headroom("7.5%")
        0.075
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise UsageError(
            f"--headroom is a percentage from 0 to below 100, not {text!r}. Try --headroom 5."
        )
    if 0 < value < 1 and "%" not in text:  # most likely a fraction, as find_max_batch() takes
        raise UsageError(
            f"--headroom is a percentage. Try --headroom {100 * value:g}, or {text}% if meant."
        )
    return value / 100


def positive(name: str, value: Any) -> int:
    """Return a number of examples, steps or ranks as a plain integer. NumPy's integers are allowed.

    Raises:
        UsageError: the value is no whole number, or below 1.

    Example:
        >>> positive("multiple_of", 8)
        8
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if operator.index(value) < 1:
        raise UsageError(f"{name} must be at least 1, not {value}")
    return operator.index(value)


def check_seconds(name: str, seconds: float | None, usual: int = 600) -> None:
    """Refuse a time that no timer can wait for. None is no time; ``usual`` is one to try instead.

    Raises:
        UsageError: the time is not above 0, or too long.
    """
    if seconds is not None and not 0 < seconds <= MOST_SECONDS:
        raise UsageError(
            f"{name} must be above 0 seconds and at most {MOST_SECONDS:g}, not {seconds:g}. "
            f"Try {usual}."
        )


def format_rate(samples_per_second: float) -> str:
    """Return a rate with three digits.

    Example:
        >>> format_rate(3102.4), format_rate(31.024), format_rate(0.31)
        ('3,102', '31', '0.31')
    """
    if samples_per_second >= 10:
        return f"{samples_per_second:,.0f}"
    return f"{samples_per_second:.2g}"


def format_number(number: float) -> str:
    """Return a number with all its digits, and as a whole one if it is one.

    Example:
        >>> format_number(1048576.0), format_number(0.5)
        ('1048576', '0.5')
    """
    return str(int(number) if number == int(number) else number)


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> count(0, "step"), count(1, "step"), count(3, "step")
        ('0 steps', '1 step', '3 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
