"""The failure budget as text and as a picture."""

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from traceaudit.budget import DAY, HOUR
from traceaudit.report.formats import percent, plural, quantity

# From so many seconds on, seconds of the unit, the unit, its decimal places
_UNITS = ((365 * DAY, 365 * DAY, "years", 2), (2 * DAY, DAY, "days", 1), (HOUR, HOUR, "h", 2), (120.0, 60.0, "min", 1))
_INK, _LINE, _MARK = "#1B2430", "#0072B2", "#D55E00"


def span(seconds: float) -> str:
    """Write a long duration in the unit that suits it.

    >>> span(30), span(804.98), span(11_135), span(50_677 * 3600)
    ('30.0 s', '13.4 min', '3.09 h', '5.79 years')
    """
    for least, size, unit, digits in _UNITS:
        if seconds >= least:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.1f} ms"


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report; every loss stands beside its definition."""
    yield from _reliability(result["reliability"])
    saving, size = result["saving"], result["checkpoint"]
    behind = f", written for {span(saving['write_s'])} behind the training" if saving["write_s"] else ""
    yield f"Saving: pause {span(saving['pause_s'])}{behind}; restart {span(saving['restart_s'])}"
    if size["bytes"]:
        rate = f", {span(size['write_s'])} at {size['storage_gb_per_s']:g} GB/s" if size["write_s"] else ""
        yield f"Checkpoint: {quantity(size['bytes'], 'B')} ({size['bytes_per_param']:g} B a parameter){rate}"
    for name, source in result["sources"].items():
        yield f"  {name}: {source}"
    yield ""
    intervals = result["intervals"]
    yield (
        f"Save every {span(intervals['daly_s'])} ({intervals['daly_s']:,.2f} s, Daly); "
        f"Young: {intervals['young_s']:,.2f} s; exact minimum: {intervals['exact_s']:,.2f} s"
    )
    yield from _losses(result)
    yield ""
    yield "What would win (share of the wall time)"
    for row in result["what_if"]:
        yield f"  {100 * row['wins']:+6.2f} points  {row['title']} (then {percent(row['of_wall'])} lost)"
    yield ""
    yield from _calendar(result["calendar"])


def _reliability(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"MTBF of the job: {span(found['mtbf_s'])} ({found['source']})"
    if found["gpus"]:
        nodes = plural(round(found["gpus"] / found["gpus_per_node"]), "node")
        yield (
            f"  per node of {found['gpus_per_node']} GPUs: {span(found['per_node_s'])} ({nodes}, "
            f"{found['per_1000_node_days']:.2f} failures in 1,000 node-days)"
        )
        yield f"  per GPU: {found['per_gpu_s'] / 3600:,.0f} h = {span(found['per_gpu_s'])} ({found['gpus']:,} GPUs)"


def _losses(result: Mapping[str, Any]) -> Iterator[str]:
    now = result["now"]
    head = f"  {'lost, by definition':<60}{'at its best':>20}"
    yield head + (f"{'now, ' + span(result['interval_now_s']):>18}" if now else "")
    for name, words in result["definitions"].items():
        best = result["at_optimum"][name]
        text = f"  {words:<60}{100 * best['lost']:>8.2f} % {'(' + format(best['interval_s'], ',.0f') + ' s)':>9}"
        yield text + (f"{100 * now[name]:>16.2f} %" if now else "")


def _calendar(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"Of the calendar, saving every {span(found['interval_s'])}"
    for title, share in (
        ("productive", found["productive"]),
        ("checkpoint pauses", found["checkpoint_pauses"]),
        ("failures: work done again, restarts", found["failures"]),
    ):
        yield f"  {title:<40}{100 * share:>8.2f} %"
    if found["goodput"] is not None:
        for row in found["waterfall"]:
            yield f"  {row['title']:<44}{100 * row['share']:>8.2f} % of peak"


def picture(result: Mapping[str, Any]) -> Axes:
    """Draw the loss over the interval, with the best one and today's marked."""
    axes = Figure(figsize=(8.6, 4.2), layout="constrained").subplots()
    curve = result["curve"]
    axes.plot([row["interval_s"] / 60 for row in curve], [100 * row["of_wall"] for row in curve], color=_LINE)
    best = result["at_optimum"]["of_wall"]
    marks = [("best", best["interval_s"], best["lost"], "#009E73", -18)]
    if result["now"]:
        marks.append(("now", result["interval_now_s"], result["now"]["of_wall"], _MARK, 12))
    for name, interval, lost, colour, height in marks:
        x, y = interval / 60, 100 * lost
        axes.plot([x], [y], "o", color=colour)
        text = f"{name}: {span(interval)}, {y:.2f} %"
        axes.annotate(text, (x, y), (0, height), textcoords="offset points", ha="center", color=_INK, fontsize=9)
    axes.set_xscale("log")
    axes.set_ylim(0, min(100.0, max(300 * best["lost"], 120 * marks[-1][2])))
    axes.set_xlabel("minutes of training between checkpoints", color=_INK)
    axes.set_ylabel("% of the wall time lost (Daly exact)", color=_INK)
    axes.grid(color="#E3E7EC")
    axes.spines[["top", "right"]].set_visible(False)
    return axes
