"""Small SVG charts as text, for the report: no scripts, no fonts, colours from the page's style (classes c0, c1, ...).

Keeps true: every label is escaped, and any input draws, also an empty one. Sizes are in SVG user units; a chart scales
with its container.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

LEFT, RIGHT, TOP, BOTTOM = 38, 14, 12, 26


def tag(name: str, text: str = "", /, **attributes: object) -> str:
    """One element; `class_` is class, underscores are hyphens, numbers are rounded to 0.1. `text` is inserted as is."""
    pairs = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{pairs}>{text}</{name}>"


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))


def nice_top(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `value` (1 for 0)."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.9999)


class Frame:
    """Axes of x0..x1 by 0..y1. `percent` labels y in percent."""

    def __init__(self, width: int, height: int, x0: float, x1: float, y1: float, *, percent: bool = False) -> None:
        self.width, self.height, self.percent = width, height, percent
        self.x0, self.x1, self.y1 = x0, max(x1, x0 + 1), y1

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - min(1.0, value / self.y1) * (self.height - TOP - BOTTOM)

    def axes(self, x_label: str) -> str:
        out = []
        for i in range(5 if self.percent else 3):
            value = self.y1 * i / (4 if self.percent else 2)
            y = self.y(value)
            out.append(tag("line", x1=LEFT, x2=self.width - RIGHT, y1=y, y2=y, class_="grid" if i else "axis"))
            label = f"{value:.0%}" if self.percent else f"{value:.3g}"
            out.append(tag("text", label, x=LEFT - 6, y=y + 3.5, class_="tick", text_anchor="end"))
        step = nice_top((self.x1 - self.x0) / 5)
        ticks = [self.x0 + step * i for i in range(int((self.x1 - self.x0) / step + 1e-9) + 1)]
        room = self.width - RIGHT - 6 * len(x_label) - 10  # the label stands at the end of the ticks' line
        for value in (value for value in (ticks if step >= 1 else [self.x0, self.x1]) if self.x(value) < room):
            out.append(tag("text", f"{value:.0f}", x=self.x(value), y=self.height - 9, class_="tick",
                           text_anchor="middle"))
        out.append(tag("text", escape(x_label), x=self.width - RIGHT, y=self.height - 9, class_="tick faint",
                       text_anchor="end"))
        return "".join(out)

    def line(self, points: Sequence[Point], class_: str) -> str:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return tag("polyline", points=path, class_=class_) if len(points) > 1 else ""

    def area(self, points: Sequence[Point], class_: str) -> str:
        if len(points) < 2:
            return ""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return tag("polygon", points=f"{self.x(points[0][0]):.1f},{self.y(0):.1f} {path} "
                                     f"{self.x(points[-1][0]):.1f},{self.y(0):.1f}", class_=class_)

    def svg(self, body: str, title: str) -> str:
        return tag("svg", tag("title", escape(title)) + body, viewBox=f"0 0 {self.width} {self.height}", role="img")


def smooth(points: Sequence[Point], steps: int) -> list[Point]:
    """Running mean over the last `steps` points."""
    return [(x, sum(y for _, y in points[max(0, i + 1 - steps):i + 1]) / min(steps, i + 1))
            for i, (x, _) in enumerate(points)]


def learning_chart(title: str, train: Sequence[Point], held_out: Sequence[Point],
                   intervals: Sequence[tuple[float, float]], colour: int, last: float) -> str:
    """Success 0..1 over versions: the training batches (thin), their running mean, held-out results as points, each
    with its interval as a bar."""
    frame = Frame(340, 190, 0, last, 1.0, percent=True)
    mean = smooth(train, max(1, min(10, len(train) // 4)))
    body = frame.axes("step") + frame.area(mean, f"area c{colour}") + frame.line(train, f"raw c{colour}")
    body += frame.line(mean, f"mean c{colour}") + frame.line(held_out, "held")
    for (x, y), (low, high) in zip(held_out, intervals, strict=True):
        dot = tag("title", f"held out, step {x:.0f}: {y:.0%} ({low:.0%} to {high:.0%})")
        body += tag("line", x1=frame.x(x), x2=frame.x(x), y1=frame.y(low), y2=frame.y(high), class_="interval")
        body += tag("circle", dot, cx=frame.x(x), cy=frame.y(y), r=4.5, class_=f"point c{colour}")
    return frame.svg(body, title)


def lines_chart(title: str, series: Mapping[str, Sequence[Point]], last: float, x_label: str = "step") -> str:
    """Several lines over versions (or what `x_label` says), from 0."""
    top = nice_top(max((y for points in series.values() for _, y in points), default=0.0))
    frame = Frame(440, 200, 0, last, top)
    body = frame.axes(x_label) + "".join(
        frame.line(points, f"mean c{(i + 3) % 6}") for i, points in enumerate(series.values()))
    return frame.svg(body, title)


def histogram(title: str, bars: Mapping[int, int], bound: int | None) -> str:
    """Counts by whole number, with the allowed maximum marked."""
    first, last = min([0, *bars]), max([*bars, bound or 0, 1])
    width, height, total = 420, 210, max(1, sum(bars.values()))
    room, floor = (width - 2 * RIGHT) / (last - first + 1), height - BOTTOM
    tall = (floor - 34) / max([*bars.values(), 1])
    out = [tag("line", x1=RIGHT, x2=width - RIGHT, y1=floor, y2=floor, class_="axis")]
    for value in range(first, last + 1):
        n, left = bars.get(value, 0), RIGHT + (value - first) * room
        size, over = n * tall, bound is not None and value > bound
        wide = min(room * 0.62, 84.0)
        middle = left + room / 2
        out.append(tag("rect", x=middle - wide / 2, y=floor - size, width=wide, height=size, rx=4,
                       class_="bar bad" if over else "bar c0"))
        out.append(tag("text", f"{value}", x=middle, y=height - 9, class_="tick", text_anchor="middle"))
        if n:
            out.append(tag("text", f"{n / total:.0%}", x=middle, y=floor - size - 6, class_="label",
                           text_anchor="middle"))
    if bound is not None:
        x = min(RIGHT + (bound - first + 1) * room, width - RIGHT)
        out.append(tag("line", x1=x, x2=x, y1=10, y2=floor, class_="bound"))
        out.append(tag("text", f"bound {bound}", x=x - 6, y=20, class_="tick", text_anchor="end"))
    return tag("svg", tag("title", escape(title)) + "".join(out), viewBox=f"0 0 {width} {height}", role="img")


def split_bar(parts: Sequence[tuple[str, float, str]], scale: float, unit: str = " s") -> str:
    """A horizontal bar in HTML: (name, value, class) parts against `scale`, the value of a full row."""
    cells = []
    for name, value, class_ in parts:
        share = value / scale if scale else 0.0
        if share > 0.0005:
            label = f"{value:.0f}{unit}" if value >= 100 else f"{value:.2g}{unit}"
            label = label if share > 0.09 else ""
            cells.append(f'<span class="{escape(class_)}" style="width:{share * 100:.2f}%" '
                         f'title="{escape(name)}: {value:.3g}{escape(unit)}">{escape(label)}</span>')
    return f'<div class="split">{"".join(cells)}</div>'


def ranges_chart(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """A row for each (label, low, high, ours): the range as a bar, ours as a point. A whole file, with its style."""
    left, width, height = 330, 760, 24 * len(rows) + TOP + BOTTOM
    top = nice_top(max([max(high, ours) for _, _, high, ours in rows], default=1.0))

    def x(value: float) -> float:
        return left + min(1.0, value / top) * (width - left - 60)

    out = [tag("style", "text{font:12px sans-serif;fill:#24292f}.t{fill:#57606a}.b{fill:#9ec5e8}.o{fill:#c2410c}"
                        ".g{stroke:#d0d7de}"), tag("rect", width=width, height=height, fill="#fff")]
    for i in range(5):
        value = top * i / 4
        out.append(tag("line", x1=x(value), x2=x(value), y1=TOP, y2=height - BOTTOM, class_="g"))
        out.append(tag("text", f"{value:.3g}", x=x(value), y=height - 8, class_="t", text_anchor="middle"))
    for i, (label, low, high, ours) in enumerate(rows):
        y = float(TOP + 24 * i + 12)
        out.append(tag("text", escape(label), x=left - 10, y=y + 4, text_anchor="end"))
        out.append(tag("rect", x=x(low) - 2, y=y - 6, width=x(high) - x(low) + 4, height=12, class_="b"))
        out.append(tag("circle", cx=x(ours), cy=y, r=4.5, class_="o"))
        out.append(tag("text", f"{ours:.3g}", x=width - 8, y=y + 4, class_="t", text_anchor="end"))
    return tag("svg", tag("title", escape(title)) + "".join(out), xmlns="http://www.w3.org/2000/svg",
               viewBox=f"0 0 {width} {height}", width=width, height=height)
