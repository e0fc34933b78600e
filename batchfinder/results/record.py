"""Records: their summary, and their plain data for JSON and back, by one rule. Imports no torch."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from batchfinder.results.version import SCHEMA_VERSION

R = TypeVar("R", bound="Record")


class Summarized:
    """A result whose ``repr`` is its summary. With all its parts it would fill screens.

    Example:
        >>> class Answer(Summarized):
        ...     def __str__(self) -> str:
        ...         return "batch size 8"
        >>> Answer()
        <Answer: batch size 8>
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


class Plain:
    """A dataclass that JSON can hold. An infinite number is None there."""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data, ready for JSON."""
        return {name: _plain(value) for name, value in vars(self).items()}


class Record(Plain):
    """A dataclass that JSON can hold, and give back.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Peaks(Record):
        ...     sizes: tuple[int, ...] = ()
        >>> Peaks((3, 4)).to_dict()
        {'sizes': [3, 4]}
    """

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """Rebuild a record from :meth:`to_dict`. Names that are no attributes are ignored.

        Attributes that the data does not name get their default.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: the data does not describe such a
                record.
        """
        types = get_type_hints(cls)
        known = {name: value for name, value in data.items() if name in types}
        return cls(**{name: _rebuilt(types[name], value) for name, value in known.items()})


class Study(Summarized, Plain):
    """Several answers on one device. Its summary has a line for each."""

    device: str
    is_measured: bool
    rows: tuple[Any, ...]

    def __str__(self) -> str:
        made = "measured" if self.is_measured else "estimated"
        return "\n  ".join([f"{made} on {self.device}", *map(str, self.rows)])

    def to_dict(self) -> dict[str, Any]:
        """Return the study as plain data, ready for JSON."""
        return {"schema_version": SCHEMA_VERSION, **super().to_dict()}


def answer(batch_size: int, note: str) -> str:
    """Return one of several answers as text; ``note`` says why it is 0, if that is known."""
    return f"batch size {batch_size}" if batch_size else note or "nothing fits"


def _plain(value: Any) -> Any:
    if isinstance(value, Plain):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _rebuilt(kind: Any, data: Any) -> Any:
    """Return a value of a type from its plain data."""
    parts = get_args(kind)
    if type(None) in parts:
        return None if data is None else _rebuilt(parts[0], data)
    if get_origin(kind) is tuple:
        return tuple(_rebuilt(parts[0], each) for each in data)
    if get_origin(kind) is Mapping:
        return {_rebuilt(parts[0], key): _rebuilt(parts[1], data[key]) for key in data}
    if issubclass(kind, Record):
        return kind.from_dict(data)
    return kind(data) if issubclass(kind, enum.Enum) else data
