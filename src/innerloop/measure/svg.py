"""Small charts as inline SVG text; colours come from the page's style sheet, so they follow light and dark."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 800
ROW = 30
LABEL, LETTER = 230, 6.5  # room left of a bar chart for its labels: at least, and a letter's width
LEFT, RIGHT, TOP, BOTTOM = 62, 190, 14, 44


@dataclass(frozen=True)
class Segment:
    """A coloured part of a bar: `style` is a class of the style sheet."""

    name: str
    value: float
    style: str


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart; the label is at its left, the note after its end."""

    label: str
    segments: Sequence[Segment]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A named curve through points; `dots` draws the points, without `joined` only them."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    joined: bool = True
    dots: bool = False
    tips: Sequence[str] = field(default_factory=list)


@dataclass(frozen=True)
class Axis:
    """One axis: title with unit, ends, and whether it is logarithmic. `marks` replaces the tick labels."""

    title: str
    low: float
    high: float
    log: bool = False
    marks: Sequence[tuple[float, str]] = ()

    def place(self, value: float, start: float, end: float) -> float:
        """Pixel of a value between two pixels, clamped to the axis."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return start + part * (end - start)

    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels."""
        if self.marks:
            return [(value, label) for value, label in self.marks if self.low <= value <= self.high]
        values = _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)
        return [(value, number(value)) for value in values]


def number(value: float) -> str:
    """Three significant digits, without exponent, thousands apart."""
    if value == 0:
        return "0"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def bar_chart(bars: Sequence[Bar], unit: str, title: str) -> str:
    """Horizontal stacked bars on one linear scale."""
    end, room = WIDTH - RIGHT, max([LABEL, *(8 + LETTER * len(bar.label) for bar in bars)])
    totals = [sum(segment.value for segment in bar.segments) for bar in bars]
    axis = Axis(unit, 0.0, max([*totals, 1e-9]))
    height = TOP + ROW * len(bars) + BOTTOM
    parts = []
    for value, label in axis.ticks():
        x = axis.place(value, room, end)
        parts.append(_rule(x, TOP, x, height - BOTTOM) + _text(x, height - BOTTOM + 16, label, "tick", "middle"))
    for index, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        y = TOP + ROW * index + 5
        parts.append(_text(room - 8, y + 14, bar.label, "label", "end"))
        start = 0.0
        for segment in bar.segments:
            left, right = axis.place(start, room, end), axis.place(start + segment.value, room, end)
            start += segment.value
            tip = f"{bar.label}: {segment.name} {number(segment.value)} {unit}"
            parts.append(_rect(left, y, right - left, ROW - 10, segment.style, tip))
        parts.append(_text(axis.place(total, room, end) + 6, y + 14, bar.note or number(total), "value"))
    parts.append(_text((room + end) / 2, height - 8, unit, "title", "middle"))
    return _svg(height, title, parts)


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, title: str, height: int = 340) -> str:
    """Curves over two axes, each named at its right end where there is room, in a legend below the page's title."""
    right, bottom = WIDTH - RIGHT, height - BOTTOM
    parts = []
    for value, label in x.ticks():
        px = x.place(value, LEFT, right)
        parts.append(_rule(px, TOP, px, bottom) + _text(px, bottom + 16, label, "tick", "middle"))
    for value, label in y.ticks():
        py = y.place(value, bottom, TOP)
        parts.append(_rule(LEFT, py, right, py) + _text(LEFT - 6, py + 4, label, "tick", "end"))
    parts.append(_text((LEFT + right) / 2, height - 8, x.title, "title", "middle"))
    parts.append(_text(0, 0, y.title, "title", "middle", f"translate(14 {(TOP + bottom) / 2}) rotate(-90)"))
    labels: list[tuple[float, float, str, str]] = []
    for line in lines:
        pixels = [(x.place(px, LEFT, right), y.place(py, bottom, TOP)) for px, py in line.points]
        if line.joined and len(pixels) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pixels)
            parts.append(f'<polyline class="{line.style} line" points="{path}"/>')
        if line.dots or not line.joined:
            tips = line.tips or [f"{line.name}: {number(a)}, {number(b)}" for a, b in line.points]
            parts += [_dot(a, b, line.style, tip) for (a, b), tip in zip(pixels, tips, strict=True)]
        if line.joined or line.name:
            labels.append((*pixels[-1], line.name, line.style))
    parts += _spread_labels(labels, bottom)
    return _svg(height, title, parts)


def _spread_labels(labels: Sequence[tuple[float, float, str, str]], bottom: float) -> list[str]:
    """Names beside curve ends, pushed apart so that none covers another."""
    parts, lowest = [], TOP - 6.0
    ordered = sorted(labels, key=lambda label: label[1])
    room = bottom - 13.0 * len(ordered)
    for index, (x, y, name, style) in enumerate(ordered):
        lowest = min(max(y + 4, lowest + 13), room + 13.0 * (index + 1) + 4)
        parts.append(_text(x + 8, lowest, name, f"{style} name"))
    return parts


def _even_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = len(powers) <= 4
    values = [10**power * factor for power in powers for factor in ((1, 2, 5) if few else (1,))]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title)}">'
    return head + "".join(parts) + "</svg>"


def _rect(x: float, y: float, width: float, height: float, style: str, tip: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}"'
    return f'<rect class="{style} fill" {box}><title>{html.escape(tip)}</title></rect>'


def _dot(x: float, y: float, style: str, tip: str) -> str:
    return f'<circle class="{style} fill" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{html.escape(tip)}</title></circle>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, style: str, anchor: str = "start", transform: str = "") -> str:
    turn = f' transform="{transform}"' if transform else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{html.escape(text)}</text>'
