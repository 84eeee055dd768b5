"""Everything a training log says of spikes, broken numbers, drift, restarts and its control, as plain data."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from traceaudit import __version__
from traceaudit.errors import InputError, TraceAuditError
from traceaudit.norms import broken, drift, restarts, spikes
from traceaudit.norms.control import TOLERANCE, compare
from traceaudit.norms.read import read
from traceaudit.norms.training_log import TrainingLog

SCHEMA_VERSION = 1
ALARM, WARNING, NOTE = "alarm", "warning", "note"
ASSUMED_BACK = 100  # steps before a spike to rewind to where no checkpoint is known, as PaLM did
GRADIENT_GROWTH = 2.0
SCALE = "scale"

Event = dict[str, Any]
Result = dict[str, Any]


def watch(
    log: TrainingLog,
    *,
    control: TrainingLog | None = None,
    tolerance: float = TOLERANCE,
    clip: float | None = None,
    checkpoint_every: int | None = None,
) -> Result:
    """Return what is wrong with a run, from its log.

    Args:
        log: as read.
        control: the log of the same run in another precision.
        tolerance: share that the loss may be above its control's.
        clip: the gradient norm at which the run clips.
        checkpoint_every: steps between checkpoints, where the log does not say when they were saved.

    Raises:
        InputError: the log has no row, or too little in common with its control.
    """
    table = log.table
    if not len(table):
        raise InputError(f"{log.source}: no row with a step and a loss or gradient norm.")
    resumed = restarts.resumes(table)
    found = [*_loss_events(table, clip), *_broken(log), *_drifts(log), *_resumed(resumed, table)]
    comparison = compare(log, control, tolerance) if control is not None else None
    if comparison is not None and comparison.diverged:
        step = comparison.since or int(table["step"].iloc[-1])
        found.append(
            _event(
                "control",
                ALARM,
                step,
                int(table["step"].iloc[-1]),
                value=comparison.difference,
                why=f"the loss is {comparison.difference:+.2%} from the control's",
            )
        )
    saved = _checkpoints(log, checkpoint_every)
    events = [_advised(event, table, saved, resumed) for event in sorted(found, key=lambda event: event["step"])]
    loss = table["loss"][np.isfinite(table["loss"])]
    return {
        "schema_version": SCHEMA_VERSION,
        "traceaudit_version": __version__,
        "kind": "norms",
        "source": log.source,
        "format": log.format,
        "log": {
            "rows": len(table),
            "first_step": int(table["step"].min()),
            "last_step": int(table["step"].max()),
            "logged": [name for name in table.columns[1:] if table[name].notna().any()],
            "loss_first": float(loss.iloc[0]) if len(loss) else None,
            "loss_last": float(loss.iloc[-1]) if len(loss) else None,
            "checkpoints": len(saved),
            "overflows_skipped": broken.overflows(table),
            "skipped_steps": int(np.nansum(np.where(np.isinf(table["skipped"]), 0, table["skipped"]))),
        },
        "events": events,
        "resumes": [asdict(resume) for resume in resumed],
        "control": asdict(comparison) if comparison is not None else None,
        "remarks": list(log.remarks),
        "checklist": _checklist(log, events, comparison is not None),
    }


def alarms(result: Result) -> list[Event]:
    """Return the events that ``--fail-on-spike`` trips on."""
    return [event for event in result["events"] if event["severity"] == ALARM]


def follow(
    path: Path, pause: Callable[[], bool], judge: Callable[[TrainingLog], Result]
) -> Iterator[tuple[Result, list[Event]]]:
    """Yield the result, and what is new in it, each time a growing file says something new.

    Args:
        path: the file or folder.
        pause: waits, and returns whether to go on.
        judge: `watch` with its options.
    """
    known: set[tuple[str, int, bool]] = set()
    size = -1
    while True:
        now = _size(path)
        if now != size:
            size = now
            try:
                result = judge(read(path))
            except TraceAuditError:  # a run that has not logged yet
                result = None
            if result is not None:
                fresh = [event for event in result["events"] if _key(event) not in known]
                known |= {_key(event) for event in fresh}
                yield result, fresh
        if not pause():
            return


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _key(event: Event) -> tuple[str, int, bool]:
    return event["kind"], event["step"], bool(event.get("recovered"))


def _event(kind: str, severity: str, step: int, end_step: int, **more: object) -> Event:
    return {"kind": kind, "severity": severity, "step": step, "end_step": end_step, **more}


def _loss_events(table: pd.DataFrame, clip: float | None) -> list[Event]:
    """Return spikes and divergences of the loss, and gradient norms that stand alone."""
    gradients = spikes.judged_gradients(table)
    loss = spikes.judged_loss(table, gradients)
    found, rising = spikes.spikes(table, loss, gradients), drift.loss_drift(table)
    step = table["step"].to_numpy()
    events = []
    slow = set()
    for spike in found:
        grown = next((rise for rise in rising if rise.start <= spike.start <= rise.end + drift.BLOCK * 4), None)
        start = spike.start
        if grown is not None and not spike.recovered:
            slow.add(grown)
            start = grown.start
        caught, why = spikes.clipping(table, gradients, spike.start, spike.precursor, clip)
        early = spike.precursor
        kind = spikes.kind(spike, loss)
        events.append(
            _event(
                kind,
                NOTE if kind == "hard_batch" else ALARM,
                int(step[start]),
                int(step[spike.end - 1]),
                peak_step=int(step[spike.peak]),
                value=float(loss.value[spike.peak]),
                usual=float(loss.level[spike.start]),
                scales=float(loss.score[spike.peak]),
                recovered=spike.recovered,
                open_ended=not spike.recovered and spike.end == len(table),
                row=start,
                end_row=spike.end,
                precursor=None if early is None else _precursor(table, gradients, early, spike.start),
                clipping={"caught": caught, "why": why},
                lr_factor=spike.lr_factor,
            )
        )
    for rise in rising:
        if rise not in slow and not any(
            event["row"] <= rise.end and rise.start <= event["end_row"] for event in events
        ):
            why = f"medians of {drift.BLOCK} rows rose to {rise.ratio:.2f} times the lowest level"
            events.append(
                _event(
                    "divergence",
                    ALARM,
                    int(step[rise.start]),
                    int(step[rise.end]),
                    recovered=False,
                    row=rise.start,
                    end_row=rise.end + 1,
                    value=rise.ratio,
                    why=why,
                    open_ended=rise.end >= len(table) - drift.BLOCK,
                )
            )
    for first, last in spikes.lone_gradients(table, gradients, found):
        peak = first + int(np.nanargmax(gradients.value[first : last + 1]))
        seen, usual = math.exp(gradients.value[peak]), math.exp(gradients.level[peak])
        why = f"the gradient norm reached {seen:.3g}, usually {usual:.3g}; no spike of the loss"
        events.append(_event("grad_norm", WARNING, int(step[first]), int(step[last]), value=seen, usual=usual, why=why))
    return events


def _precursor(table: pd.DataFrame, gradients: spikes.Judged, early: int, start: int) -> dict[str, Any]:
    step = table["step"].to_numpy()
    return {
        "step": int(step[early]),
        "steps_before": int(step[start] - step[early]),
        "grad_norm": float(table["grad_norm"].iloc[early]),
        "usual": math.exp(gradients.level[early]),
    }


def _broken(log: TrainingLog) -> list[Event]:
    """Return NaN and infinity, fallen scales, and many skipped steps in a row."""
    table = log.table
    step = table["step"].to_numpy()
    events = []
    for run in broken.not_finite(table):
        which = [name for name in ("loss", "grad_norm") if np.isinf(table[name].iloc[run.start : run.end + 1]).any()]
        events.append(
            _event(
                "not_finite",
                ALARM,
                int(step[run.start]),
                int(step[run.end]),
                row=run.start,
                end_row=run.end + 1,
                recovered=run.end + 1 < len(table) and step[run.end + 1] > step[run.end],
                open_ended=run.end + 1 == len(table),
                why=f"NaN or infinite: {', '.join(which)}",
            )
        )
    for column in ("loss_scale", *(name for name in log.watched if SCALE in name.lower())):
        for run in broken.collapses(table, column):
            before, after = table[column].iloc[max(run.start - 1, 0)], table[column].iloc[run.end]
            why = f"{column} fell from {before:g} to {after:g}: gradients overflow, or a tensor outgrows its format"
            events.append(
                _event(
                    "scale_collapse",
                    ALARM,
                    int(step[run.start]),
                    int(step[run.end]),
                    row=run.start,
                    end_row=run.end + 1,
                    why=why,
                    value=float(after),
                    usual=float(before),
                )
            )
    for run in broken.skipped_in_a_row(table):
        why = "optimizer steps were skipped one after the other"
        events.append(_event("skipped", WARNING, int(step[run.start]), int(step[run.end]), why=why))
    return events


def _drifts(log: TrainingLog) -> list[Event]:
    table = log.table
    step = table["step"].to_numpy()
    events = []
    names = [name for name in log.watched if SCALE not in name.lower() and not name.lower().startswith("param")]
    for column in ("grad_norm", *names):
        found = drift.metric_drift(table, column, GRADIENT_GROWTH if column == "grad_norm" else drift.GROWTH)
        if found is not None:
            why = f"{column} grew to {found.ratio:.2f} times what it was, and still grows"
            events.append(
                _event(
                    "drift",
                    WARNING,
                    int(step[found.start]),
                    int(step[found.end]),
                    metric=column,
                    why=why,
                    value=found.ratio,
                )
            )
    return events


def _resumed(resumed: list[restarts.Resume], table: pd.DataFrame) -> list[Event]:
    """Return the restarts; those whose replayed steps went worse than before are warnings."""
    events = []
    for found in resumed:
        why = f"resumed at step {found.step} after step {found.last_step}"
        worse = found.errors is not None and found.difference is not None and found.errors > restarts.BESIDE
        least = 0.002 * abs(float(np.nanmedian(table["loss"][np.isfinite(table["loss"])]))) if worse else 0.0
        worse = worse and found.difference is not None and found.difference > least
        if found.difference is None:
            why += f"; {found.replayed} steps ran twice"
        else:
            why += f"; {found.replayed} steps ran twice, their loss {found.difference:+.4f} from before"
            why += f" ({found.errors:.1f} standard errors)"
        if worse:
            why += ": what was restored is not all of the state (optimizer, loss scale, random numbers, data position)"
        events.append(_event("resume", WARNING if worse else NOTE, found.step, found.last_step, why=why))
    return events


def _checkpoints(log: TrainingLog, every: int | None) -> list[int]:
    if every is None:
        return list(log.checkpoints)
    return list(range(every, int(log.table["step"].max()) + 1, every))


def _advised(event: Event, table: pd.DataFrame, saved: list[int], resumed: list[restarts.Resume]) -> Event:
    """Add what to do: the step to rewind to, the data to skip, and the steps that are lost."""
    row, end_row = event.pop("row", None), event.pop("end_row", None)
    if event["severity"] != ALARM or row is None:
        return event
    early = event.get("precursor")
    first_bad = min(event["step"], early["step"] if early else event["step"])
    before = [step for step in saved if step < first_bad]
    rewind, source = (max(before), "last checkpoint before the first sign") if before else (None, "")
    if rewind is None:
        rewind = max(first_bad - ASSUMED_BACK, 0)
        source = f"no checkpoint is known; about {ASSUMED_BACK} steps before the first sign"
    again = next((resume for resume in resumed if resume.row >= end_row and resume.step <= event["end_step"]), None)
    if again is not None:
        event["open_ended"] = False
        event["rewound"] = True
        lost, of = again.last_step - again.step + 1, "rewound by the run itself"
    elif event.get("recovered"):
        lost, of = event["end_step"] - event["step"] + 1, "from the start to the recovery"
    else:
        lost, of = int(table["step"].iloc[-1]) - rewind, "to be run again after rewinding"
    return {
        **event,
        "rewind_to": rewind,
        "rewind_source": source,
        "skip_steps": [first_bad, event["end_step"]],
        **{f"skip_{unit}": _consumed(table, unit, first_bad, event["end_step"]) for unit in ("samples", "tokens")},
        "steps_lost": lost,
        "steps_lost_source": of,
    }


def _consumed(table: pd.DataFrame, unit: str, first: int, last: int) -> list[int] | None:
    """Return what had been consumed before and after these steps, where the log says it."""
    known = table[np.isfinite(table[unit])]
    before, until = known.loc[known["step"] < first, unit], known.loc[known["step"] <= last, unit]
    return [int(before.iloc[-1]), int(until.iloc[-1])] if len(before) and len(until) else None


def _checklist(log: TrainingLog, events: list[Event], controlled: bool) -> list[dict[str, Any]]:
    """Return what items 6 and 8 of the report's checklist can say from a log."""
    kinds = [event["kind"] for event in events if event["severity"] in (ALARM, WARNING)]
    control = "problem" if "control" in kinds else "ok" if controlled else "unknown"
    has_norms = log.table["grad_norm"].notna().any()
    bad = [kind for kind in kinds if kind != "control"]
    norms = "problem" if bad else "ok" if has_norms else "unknown"
    told = ", ".join(f"{bad.count(kind)} {kind}" for kind in dict.fromkeys(bad)) or "no spike, no drift"
    return [
        {
            "item": 6,
            "title": "One precision change at a time, with a BF16 control",
            "status": control,
            "evidence": "compared with a control" if controlled else "no control log given (--control)",
        },
        {
            "item": 8,
            "title": "Watch the norms",
            "status": norms,
            "evidence": f"{told}; gradient norm {'logged' if has_norms else 'not logged'}",
        },
    ]
