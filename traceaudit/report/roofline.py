"""The roofline of a page: kernels by FLOPs a byte and FLOPs a second, below the roofs of bandwidth and peaks."""

import math
from dataclasses import dataclass, replace

from markupsafe import Markup

from traceaudit.report.formats import clean, duration, percent, plural, quantity
from traceaudit.report.kernels import Roofline, roofline
from traceaudit.report.rows import Result
from traceaudit.report.svg import element
from traceaudit.report.words import family_colour

WIDTH, HEIGHT = 860.0, 350.0
LEFT, RIGHT, TOP, BOTTOM = 92.0, 168.0, 14.0, 46.0  # margins of the plane
MOST_NAMED = 5
LEAST_TIME = 0.002  # of the time of all points, from which a kernel is drawn
LETTER = 6.9  # pixels of a letter of a name, at most on average


@dataclass(frozen=True)
class Plane:
    """The drawing and its legend of families."""

    drawing: Markup
    legend: tuple[tuple[str, str], ...]
    caption: str


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis from `low` to `high` along pixels."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return round values on the axis: powers of ten, with 2 and 5 times of them where they are few."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = range(first, last + 1, max(1, (last - first) // 7))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        return [step * 10.0**power for power in powers for step in steps if self.low <= step * 10.0**power <= self.high]


def plane(result: Result) -> Plane | None:
    """Return the plane of the kernels whose FLOPs and bytes are known; None without any."""
    whole = roofline(result)
    if whole is None:
        return None
    least = LEAST_TIME * sum(point.ns for point in whole.points)
    found = replace(whole, points=[point for point in whole.points if point.ns >= least])
    hidden = len(whole.points) - len(found.points)
    x, y = _scales(found)
    parts = [*_grid(x, y), *_roofs(found, x, y), *_points(found, x, y), *_names(found, x, y)]
    families = dict.fromkeys(point.family for point in found.points)
    alt = "Kernels by FLOPs a byte and FLOPs a second under the roofs of bandwidth and peak; the table has the numbers."
    caption = "Named are the kernels with the most headroom, which stands beside the name."
    if hidden:
        caption += f" {plural(hidden, 'kernel')} with less than {percent(LEAST_TIME)} of the time left out."
    drawing = element(
        "svg", element("title", alt), *parts, class_="chart", role="img", viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}"
    )
    return Plane(drawing, tuple((family_colour(family), clean(family, 24)) for family in families), caption)


def _scales(found: Roofline) -> tuple[_Scale, _Scale]:
    peaks, slope = list(found.peaks.values()), found.byte_per_s
    places = [point.flop_per_byte for point in found.points] + [peak / slope for peak in peaks if slope]
    rates = [point.flop_per_s for point in found.points] + peaks
    return (
        _Scale(min(places) / 3, max(places) * 4, LEFT, WIDTH - RIGHT),
        _Scale(min(rates) / 5, max(rates) * 2.2, HEIGHT - BOTTOM, TOP),
    )


def _grid(x: _Scale, y: _Scale) -> list[Markup]:
    line = {"stroke": "currentColor", "stroke_opacity": 0.14}
    parts = []
    for value in x.ticks():
        parts.append(element("line", x1=x(value), x2=x(value), y1=y.end, y2=y.begin, **line))
        parts.append(element("text", f"{value:,g}", x=x(value), y=y.begin + 17, text_anchor="middle", font_size=12))
    for value in y.ticks():
        text = quantity(value, "FLOP/s").replace(".00", "")
        parts.append(element("line", x1=x.begin, x2=x.end, y1=y(value), y2=y(value), **line))
        parts.append(element("text", text, x=x.begin - 8, y=y(value) + 4, text_anchor="end", font_size=12))
    caption = "FLOPs a byte; the area is the kernel's time"
    middle = (x.begin + x.end) / 2
    parts.append(element("text", caption, x=middle, y=HEIGHT - 8, text_anchor="middle", font_size=12))
    return parts


def _roofs(found: Roofline, x: _Scale, y: _Scale) -> list[Markup]:
    """Return the bandwidth up to the highest peak, and each peak from where the bandwidth meets it."""
    line: dict[str, object] = {"stroke": "currentColor", "stroke_width": 1.6}
    slope, parts, last = found.byte_per_s, [], -math.inf
    for dtype, peak in sorted(found.peaks.items(), key=lambda item: -item[1]):
        start = max(peak / slope, x.low) if slope else x.low
        parts.append(element("line", x1=x(start), x2=x.end, y1=y(peak), y2=y(peak), **line))
        height = last = max(y(peak) + 4, last + 14)
        parts.append(element("text", f"{dtype} {peak / 1e12:,.5g} TFLOP/s", x=x.end + 8, y=height, font_size=12))
    if slope:
        ridge = min(max(found.peaks.values(), default=y.high) / slope, x.high)
        foot = max(x.low, y.low / slope)
        parts.append(element("line", x1=x(foot), y1=y(foot * slope), x2=x(ridge), y2=y(ridge * slope), **line))
        middle = math.sqrt(foot * ridge)
        text = f"{slope / 1e9:,.5g} GB/s"
        place = {"x": x(middle) - 8, "y": y(middle * slope) - 6}
        parts.append(element("text", text, text_anchor="end", font_size=12, **place))
    return parts


def _points(found: Roofline, x: _Scale, y: _Scale) -> list[Markup]:
    """Return the kernels, the longest first, so that it hides none."""
    longest = max(point.ns for point in found.points)
    return [
        element(
            "circle",
            element("title", f"{point.title}: {quantity(point.flop_per_s, 'FLOP/s')}, {duration(point.ns)}"),
            cx=x(point.flop_per_byte),
            cy=y(point.flop_per_s),
            r=3.5 + 11 * math.sqrt(point.ns / max(longest, 1)),
            fill=family_colour(point.family),
            fill_opacity=0.85,
            stroke="currentColor",
        )
        for point in sorted(found.points, key=lambda point: -point.ns)
    ]


def _names(found: Roofline, x: _Scale, y: _Scale) -> list[Markup]:
    """Name the kernels with the most headroom, each where its name covers least of what is drawn already."""
    circles = [
        _Box(x(point.flop_per_byte) - 8, x(point.flop_per_byte) + 8, y(point.flop_per_s) - 8, y(point.flop_per_s) + 8)
        for point in found.points
    ]
    parts: list[Markup] = []
    names: dict[str, _Box] = {}
    for point in sorted(found.points, key=lambda point: -point.headroom):
        if point.headroom <= 0 or point.title in names or len(names) == MOST_NAMED:
            continue
        text = f"{point.title} ({percent(point.headroom)})"
        boxes = _places(x(point.flop_per_byte), y(point.flop_per_s), LETTER * len(text))
        inside = [box for box in boxes if x.begin <= box.left and box.right <= x.end and y.end <= box.top]
        taken = [*circles, *names.values()]
        free = min(inside, key=lambda box: sum(map(box.shared, taken)), default=None)
        if free is None or any(free.shared(other) for other in names.values()):
            continue
        names[point.title] = free
        parts.append(element("text", text, x=free.left, y=free.bottom - 4, font_size=11.5, class_="halo"))
    return parts


@dataclass(frozen=True)
class _Box:
    """Where a name would stand."""

    left: float
    right: float
    top: float
    bottom: float

    def shared(self, other: "_Box") -> float:
        """Return the area that two boxes share."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0


def _places(across: float, height: float, length: float) -> list[_Box]:
    """Return where a name of a length could stand around a point: right, left, above and below of it."""
    return [
        _Box(left, left + length, middle - 8, middle + 8)
        for middle in (height, height - 22, height + 22)
        for left in (across + 18, across - 18 - length, across - length / 2)
        if middle != height or left != across - length / 2
    ]
