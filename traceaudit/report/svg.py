"""Elements of SVG as safe text: attributes and text are escaped, numbers are short."""

from markupsafe import Markup, escape


def element(name: str, *inside: object, **attributes: object) -> Markup:
    """Return an element; `class_` is its class, other underscores become hyphens, None attributes are left out.

    >>> element("rect", x=1.25, width=10.0, fill="#fff", stroke_width=1)
    Markup('<rect x="1.25" width="10" fill="#fff" stroke-width="1"/>')
    >>> element("text", "a < b", element("title", "why"), class_="name")
    Markup('<text class="name">a &lt; b<title>why</title></text>')
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-") if key != "viewBox" else key}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = Markup("").join(escape(part) for part in inside)
    return Markup(f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>")  # noqa: S704  escaped


def stretches(runs: list[tuple[float, float]]) -> str:
    """Return the path of rectangles from 0 to 1 in height: (start, length) each.

    >>> stretches([(0, 2), (5, 1.5)])
    'M0 0h2v1h-2zM5 0h1.5v1h-1.5z'
    """
    return "".join(f"M{_short(start)} 0h{_short(size)}v1h-{_short(size)}z" for start, size in runs)


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
