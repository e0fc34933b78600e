"""Axes and marks of a chart as SVG text. Colors come from the page's style sheet, by class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from batchfinder.units import UNITS

WIDTH, HEIGHT = 720, 350  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 34, 46
# Wide enough for a label of 7 characters beside the next one.
_TICKS = 6

# The height of a bar with its name above it, and the width of its value beside it.
_BAR, _VALUE = 50, 130

Point = tuple[float, float]


@dataclass
class Chart:
    """A chart with two linear axes that start at 0.

    Attributes:
        title: the accessible name.
        x_most: the largest value on the horizontal axis.
        y_most: the largest value drawn; the vertical axis ends above it.
        x_label: the name of the horizontal axis.
        y_label: the name of the vertical axis.
        y_is_bytes: True to label the vertical axis in GiB, MiB ...
        has_x_ticks: False for an axis without numbers.

    Example:
        >>> chart = Chart("Memory", x_most=10, y_most=100, x_label="batch size", y_label="bytes")
        >>> chart.line([(0, 0), (10, 100)], "fit")
        >>> chart.svg().startswith('<svg role="img"')
        True
    """

    title: str
    x_most: float
    y_most: float
    x_label: str
    y_label: str
    y_is_bytes: bool = False
    has_x_ticks: bool = True
    _marks: list[str] = field(default_factory=list)

    @property
    def y_end(self) -> float:
        """The value at the top of the vertical axis."""
        return 1.15 * self.y_most or 1

    def at(self, x: float, y: float) -> Point:
        """Return the place of a point in the picture, in pixels from its top left."""
        across = (WIDTH - _LEFT - _RIGHT) * x / (self.x_most or 1)
        down = (HEIGHT - _TOP - _BOTTOM) * (1 - y / self.y_end)
        return round(_LEFT + across, 1), round(_TOP + down, 1)

    def line(self, points: Iterable[Point], style: str) -> None:
        """Draw a line through the points."""
        path = _text(self.at(*point) for point in points)
        self._marks.append(f'<polyline class="{style}" points="{path}"/>')

    def area(self, points: Iterable[Point], style: str) -> None:
        """Fill the polygon of the points. Those along a horizontal edge are left out."""
        pixels = [self.at(*point) for point in points]
        inner = [
            point
            for before, point, after in zip(pixels, pixels[1:], pixels[2:], strict=False)
            if not before[1] == point[1] == after[1]
        ]
        path = _text([pixels[0], *inner, pixels[-1]])
        self._marks.append(f'<polygon class="{style}" points="{path}"/>')

    def dot(self, point: Point, style: str, tip: str, *, shape: str = "circle") -> None:
        """Mark a point: a circle, a ring or a cross; ``tip`` is shown on hover."""
        x, y = self.at(*point)
        if shape == "cross":
            mark = f'<path class="{style}" d="M{x - 5} {y - 5}l10 10m0 -10l-10 10"'
        else:
            mark = f'<circle class="{style}" cx="{x}" cy="{y}" r="{8 if shape == "ring" else 4.5}"'
        self._marks.append(f"{mark}><title>{escape(tip)}</title></{mark[1:].split()[0]}>")

    def note(self, point: Point, text: str, *, anchor: str = "start") -> None:
        """Write text beside a point. It stays inside the picture."""
        x, y = self.at(*point)
        y = max(y, _TOP + 12)
        gap = {"start": 6, "end": -6, "middle": 0}[anchor]
        self._marks.append(
            f'<text class="note" x="{x + gap}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the picture."""
        return _svg(self.title, HEIGHT, [*self._axes(), *self._marks])

    def _axes(self) -> Iterable[str]:
        (left, bottom), (right, top) = self.at(0, 0), self.at(self.x_most, self.y_end)
        unit, name = byte_unit(self.y_most) if self.y_is_bytes else (1, "")
        for value in ticks(self.y_end / unit):
            y = self.at(0, value * unit)[1]
            yield f'<path class="grid" d="M{left} {y}H{right}"/>'
            yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value:,g}</text>'
        for value in ticks(self.x_most, whole=True) if self.has_x_ticks else ():
            x = self.at(value, 0)[0]
            yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{value:,g}</text>'
        yield f'<path class="axis" d="M{left} {bottom}H{right}"/>'
        y_label = f"{self.y_label}, {name}" if name else self.y_label
        # Level, above the axis: beside it, wide numbers would touch it on a phone.
        yield f'<text class="label" x="8" y="{top - 14}">{escape(y_label)}</text>'
        x_label = f'x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle"'
        yield f'<text class="label" {x_label}>{escape(self.x_label)}</text>'


def bars(
    title: str,
    rows: Sequence[tuple[str, float, str]],
    style: Callable[[int], str] = lambda _: "bar",
    ranges: Sequence[tuple[float, float]] = (),
) -> str:
    """Draw horizontal bars.

    Args:
        title: the accessible name.
        rows: the name, the value and the value as text of each bar.
        style: the class of each bar, by its index.
        ranges: for each bar, the ends of a thin line over it.
    """
    most = max([value for _, value, _ in rows] + [high for _, high in ranges], default=0) or 1
    room = WIDTH - _VALUE
    marks = []
    for index, (name, value, text) in enumerate(rows):
        y = _BAR * index
        end = width = room * value / most
        marks.append(f'<text x="0" y="{y + 18}">{escape(name)}</text>')
        place = f'x="0" y="{y + 25}" width="{width:.1f}" height="16"'
        marks.append(f'<rect class="{style(index)}" {place}/>')
        if ranges:
            low, high = (room * limit / most for limit in ranges[index])
            end = max(end, high)
            marks.append(f'<path class="range" d="M{low:.1f} {y + 33}H{high:.1f}"/>')
        marks.append(f'<text class="note" x="{end + 8:.1f}" y="{y + 38}">{escape(text)}</text>')
    return _svg(title, _BAR * len(rows), marks)


def heat_map(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]]
) -> str:
    """Draw a grid of cells, the darker the fuller; None is a cell that runs out of memory.

    Args:
        title: the accessible name.
        columns: the name of each column.
        rows: the name of each row, and the share of memory in each of its cells, from 0 to 1.
    """
    names = min(max((len(name) for name, _ in rows), default=0) * 11 + 16, WIDTH // 2)
    width, height = (WIDTH - names) / max(len(columns), 1), 28
    marks = [
        f'<text x="{names + width * (index + 0.5):.1f}" y="16" text-anchor="middle">'
        f"{escape(name)}</text>"
        for index, name in enumerate(columns)
    ]
    for line, (name, cells) in enumerate(rows):
        y = 24 + height * line
        marks.append(f'<text x="{names - 8}" y="{y + 18}" text-anchor="end">{escape(name)}</text>')
        for index, share in enumerate(cells):
            x = names + width * index
            place = f'x="{x + 1:.1f}" y="{y + 1}" width="{width - 2:.1f}" height="{height - 2}"'
            style = (
                'class="cell oom-cell"' if share is None else f'class="cell" opacity="{share:.2f}"'
            )
            text = "OOM" if share is None else f"{share:.0%}"
            marks.append(f"<rect {place} {style}/>")
            middle = f'x="{x + width / 2:.1f}" y="{y + 18}" text-anchor="middle"'
            marks.append(f'<text class="note" {middle}>{text}</text>')
    return _svg(title, 24 + height * len(rows), marks)


def _text(pixels: Iterable[Point]) -> str:
    return " ".join(f"{x},{y}" for x, y in pixels)


def _svg(title: str, height: int, marks: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}"'
    return f'<svg role="img" {size} aria-label="{escape(title)}">{"".join(marks)}</svg>'


def byte_unit(most: float) -> tuple[int, str]:
    """Return the unit in which the largest of some sizes is at least 1, and its name."""
    return next(((unit, name) for name, unit in UNITS if most >= unit), (1, "B"))


def ticks(most: float, *, whole: bool = False) -> list[float]:
    """Return round numbers from 0 to ``most``.

    Example:
        >>> ticks(23), ticks(2, whole=True)
        ([0.0, 5.0, 10.0, 15.0, 20.0], [0.0, 1.0, 2.0])
    """
    if most <= 0:
        return [0.0]
    size = 10 ** math.floor(math.log10(most / _TICKS))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * _TICKS >= most)
    step = max(step, 1) if whole else step
    return [float(f"{step * i:.6g}") for i in range(math.floor(most / step * (1 + 1e-9)) + 1)]
