"""What the loss-spike watch found, as text and as a picture."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from traceaudit.report.formats import clean, plural

TITLES = {
    "spike": "loss spike",
    "divergence": "divergence",
    "hard_batch": "unusual batch",
    "grad_norm": "gradient norm alone",
    "not_finite": "not finite",
    "scale_collapse": "scale collapse",
    "skipped": "skipped steps",
    "drift": "slow drift",
    "resume": "resumed",
    "control": "apart from the control",
}
SIGNS = {"alarm": "!!", "warning": " !", "note": "  "}
_INK, _LINE = "#1B2430", "#0072B2"
COLOURS = {"alarm": "#D55E00", "warning": "#E69F00", "note": "#8A94A0"}

Event = Mapping[str, Any]


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report."""
    log, events = result["log"], result["events"]
    alarms = sum(event["severity"] == "alarm" for event in events)
    yield (
        f"{plural(alarms, 'alarm')} in {plural(log['rows'], 'row')} of {clean(result['source'])} "
        f"({result['format']}), steps {log['first_step']:,} to {log['last_step']:,}"
    )
    yield f"  logged: {', '.join(clean(name, 40) for name in log['logged'][:8])}" + (
        ", ..." if log["logged"][8:] else ""
    )
    if log["skipped_steps"] or log["overflows_skipped"]:
        yield f"  skipped steps: {log['skipped_steps']}; overflows skipped by FP16 scaling: {log['overflows_skipped']}"
    for event in events:
        yield from event_lines(event)
    if result["control"] is not None:
        found = result["control"]
        yield f"Control: {found['difference']:+.3%} over {plural(found['rows'], 'row')}, t = {found['t']:.1f}"
        yield f"  test: {found['test']}"
    for remark in result["remarks"]:
        yield f"- {clean(remark)}"


def event_lines(event: Event) -> Iterator[str]:
    """Yield an event: what it is, then what to do."""
    span = f"step {event['step']:,}" + (f" to {event['end_step']:,}" if event["end_step"] != event["step"] else "")
    if event["kind"] == "resume":
        yield f"{SIGNS[event['severity']]} {event['why']}"
        return
    yield f"{SIGNS[event['severity']]} {TITLES[event['kind']]}, {span}: {_what(event)}"
    if event.get("precursor"):
        early = event["precursor"]
        when = f"{early['steps_before']} steps before" if early["steps_before"] else "in the same step"
        yield f"     gradient norm {early['grad_norm']:.3g} {when} (usually {early['usual']:.3g})"
    if event.get("lr_factor"):
        yield f"     follows a learning rate {event['lr_factor']:.2g} times as high"
    if event.get("clipping") and event["kind"] != "hard_batch":
        yield f"     would clipping have caught it? {event['clipping']['caught']}: {event['clipping']['why']}"
    if "rewind_to" in event:
        first, last = event["skip_steps"]
        consumed = [
            f"{unit} {event[f'skip_{unit}'][0]:,} to {event[f'skip_{unit}'][1]:,}"
            for unit in ("samples", "tokens")
            if event.get(f"skip_{unit}")
        ]
        yield f"     rewind to step {event['rewind_to']:,} ({event['rewind_source']})"
        yield f"     skip the data of steps {first:,} to {last:,}" + (f" ({', '.join(consumed)})" if consumed else "")
        yield f"     steps lost: {event['steps_lost']:,} ({event['steps_lost_source']})"


def _what(event: Event) -> str:
    if "why" in event:
        return clean(event["why"])
    state = "recovered" if event["recovered"] else "no recovery"
    state = "the run rewound" if event.get("rewound") else "not over at the end" if event["open_ended"] else state
    return (
        f"loss {event['value']:.4g} at step {event['peak_step']:,}, usually {event['usual']:.4g} "
        f"({event['scales']:.0f} times its scatter); {state}"
    )


def picture(result: Mapping[str, Any], table: pd.DataFrame) -> Axes:
    """Draw loss and gradient norm over steps, with the events; restarts go back and overlap."""
    figure = Figure(figsize=(8.6, 5.0), layout="constrained")
    upper = figure.add_subplot(5, 1, (1, 3))
    lower = figure.add_subplot(5, 1, (4, 5), sharex=upper)
    back = np.diff(table["step"].to_numpy(), prepend=-1) <= 0
    for axes, column in ((upper, "loss"), (lower, "grad_norm")):
        drawn = table[column].where(np.isfinite(table[column]) & ~back)
        axes.plot(table["step"], drawn, color=_LINE, linewidth=0.8)
        axes.set_ylabel(column.replace("_", " "), color=_INK)
        axes.grid(color="#E3E7EC")
        axes.spines[["top", "right"]].set_visible(False)
        for event in result["events"]:
            if event["severity"] != "note":
                right = max(event["end_step"], event["step"] + 1)
                axes.axvspan(event["step"], right, color=COLOURS[event["severity"]], alpha=0.25, linewidth=0)
    if (table["grad_norm"].dropna() > 0).any():
        lower.set_yscale("log")
    lower.set_xlabel("step; orange: alarms and warnings", color=_INK)
    return upper
