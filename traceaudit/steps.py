"""The windows of the steps on one rank (attribution rule 1)."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.errors import InputError
from traceaudit.events import Kind, Trace
from traceaudit.intervals import Array, Intervals

PROFILER_STEP = re.compile(r"^ProfilerStep#(\d+)$")
OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
LAUNCH_CALL = re.compile(r"Launch(?:Cooperative)?Kernel|LaunchKernel|GraphLaunch|ModuleLaunch")
CUT_SHARE = 0.02  # launches of a step without a GPU record, at its end, above which the step counts as cut


@dataclass(frozen=True)
class Selection:
    """Which part of the traces to analyse.

    Attributes:
        steps: step numbers; None for all.
        marker: regular expression of the annotations that begin a step, instead of the profiler's own.
        whole_trace: one window from the first to the last GPU activity.
    """

    steps: frozenset[int] | None = None
    marker: str | None = None
    whole_trace: bool = False


@dataclass(frozen=True)
class Steps:
    """The windows of one rank.

    Attributes:
        step: step numbers, int64, ascending.
        windows: half-open windows, abutting where all steps are selected.
        marked_by: what told the steps apart: "ProfilerStep", "optimizer", "marker" or "whole trace".
        main_thread: (process, thread) that wrote the marks; None without marks.
        left_out: (step, reason) of steps that were recorded but not analysed.
        last_recorded: the last window is the last recorded step, ended by no following one.
    """

    step: Array
    windows: Intervals
    marked_by: str
    main_thread: tuple[int, int] | None
    left_out: tuple[tuple[int, str], ...] = ()
    last_recorded: bool = False


@dataclass(frozen=True)
class _Marks:
    step: Array
    start: Array
    end: Array
    thread: tuple[int, int] | None = field(default=None)


def step_windows(trace: Trace, activities: pd.DataFrame, selection: Selection) -> Steps:
    """Return the windows of a rank that has GPU activity.

    Raises:
        InputError: the marker or the selected steps are not in the trace.
    """
    launched = launch_times(trace, activities)
    steps = _all_windows(trace, activities, launched, selection)
    steps = _without_cut_step(trace, activities, steps)
    if selection.steps is None:
        return steps
    chosen = np.isin(steps.step, sorted(selection.steps))
    if not chosen.any():
        raise InputError(
            f"{trace.origin.file.name}: none of the selected steps was recorded; it holds {_listed(steps.step)}."
        )
    return Steps(
        steps.step[chosen],
        Intervals(steps.windows.start[chosen], steps.windows.end[chosen]),
        steps.marked_by,
        steps.main_thread,
        steps.left_out,
        steps.last_recorded and bool(chosen[-1]),
    )


def launch_times(trace: Trace, activities: pd.DataFrame) -> Array:
    """Return when each activity was launched.

    Without a launch record: the distant past for those that precede the first linked one of their stream (they were
    queued before the recording), else their own start.
    """
    starts = trace.events["start_ns"].to_numpy()
    launch = activities["launch"].to_numpy()
    own = activities["start_ns"].to_numpy()
    queued = queued_before(activities)
    return np.where(launch >= 0, starts[np.maximum(launch, 0)], np.where(queued, np.iinfo(np.int64).min, own))


def queued_before(activities: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tell which activities were queued before the recording: without a launch, before the first linked of a stream."""
    linked = activities["launch"].to_numpy() >= 0
    own = activities["start_ns"].to_numpy()
    first = pd.Series(np.where(linked, own, np.iinfo(np.int64).max)).groupby(activities["stream"].to_numpy())
    first_linked = first.transform("min").to_numpy()
    return np.asarray(~linked & (first_linked < np.iinfo(np.int64).max) & (own < first_linked))


def _all_windows(trace: Trace, activities: pd.DataFrame, launched: Array, selection: Selection) -> Steps:
    first, last = int(activities["start_ns"].min()), int(activities["end_ns"].max())
    if selection.whole_trace:
        return _whole(first, last)
    order = np.argsort(launched, kind="stable")
    when, reached = launched[order], np.maximum.accumulate(activities["end_ns"].to_numpy()[order])

    def behind(marks: Array) -> Array:
        """Return each mark, or the end of the last activity launched before it if that is later."""
        count = np.searchsorted(when, marks, side="left")
        return np.where(count > 0, np.maximum(marks, reached[np.maximum(count - 1, 0)]), marks)

    if selection.marker is not None:
        marks = _named(trace, re.compile(selection.marker))
        if not len(marks.step):
            raise InputError(f"{trace.origin.file.name}: no annotation matches --step-marker {selection.marker!r}.")
        return _between(marks, behind, "marker", keep_last=_spanning(marks))
    marks = _numbered(trace)
    if len(marks.step):
        return _between(marks, behind, "ProfilerStep", keep_last=True)
    marks = _optimizer_ends(trace, activities)
    if len(marks.step) > 1:
        return _between(marks, behind, "optimizer", keep_last=False)
    if len(marks.step) == 1:
        end = int(behind(marks.end)[0])
        if end > first:
            return Steps(np.array([0]), _windows([first], [end]), "optimizer (partial step)", marks.thread)
    return _whole(first, last)


def _whole(first: int, last: int) -> Steps:
    return Steps(np.array([0]), _windows([first], [last]), "whole trace", None)


def _windows(start: list[int], end: list[int]) -> Intervals:
    return Intervals(np.array(start, np.int64), np.array(end, np.int64))


def _between(marks: _Marks, behind: Callable[[Array], Array], marked_by: str, *, keep_last: bool) -> Steps:
    starts = behind(marks.start)
    ends = np.concatenate((starts[1:], behind(marks.end[-1:])))
    if not keep_last:
        starts, ends = starts[:-1], ends[:-1]
    keep = ends > starts
    return Steps(
        marks.step[: len(starts)][keep],
        Intervals(starts[keep], ends[keep]),
        marked_by,
        marks.thread,
        last_recorded=keep_last,
    )


def _named(trace: Trace, pattern: re.Pattern[str]) -> _Marks:
    """Return the host annotations whose name matches, numbered in order."""
    events = trace.events
    matching = np.array([pattern.search(str(name)) is not None for name in events["name"].cat.categories], np.bool_)
    rows = np.flatnonzero(
        events["kind"].isin((Kind.ANNOTATION, Kind.OPERATOR)).to_numpy() & matching[events["name"].cat.codes.to_numpy()]
    )
    if not len(rows):
        none = np.empty(0, np.int64)
        return _Marks(none, none, none)
    chosen = events.iloc[rows]
    thread = (int(chosen["process"].to_numpy()[0]), int(chosen["thread"].to_numpy()[0]))
    chosen = chosen[(chosen["process"] == thread[0]) & (chosen["thread"] == thread[1])]
    return _Marks(np.arange(len(chosen)), chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy(), thread)


def _numbered(trace: Trace) -> _Marks:
    """Return the profiler's own step annotations, one a number."""
    marks = _named(trace, PROFILER_STEP)
    if not len(marks.step):
        return marks
    names = trace.events["name"].cat.categories
    numbers = {name: int(match[1]) for name in names if (match := PROFILER_STEP.match(str(name)))}
    chosen = trace.events[
        trace.events["name"].isin(numbers) & trace.events["kind"].isin((Kind.ANNOTATION, Kind.OPERATOR))
    ]
    assert marks.thread is not None  # noqa: S101  there are marks
    chosen = chosen[(chosen["process"] == marks.thread[0]) & (chosen["thread"] == marks.thread[1])]
    step = chosen["name"].astype(object).map(numbers).to_numpy(dtype=np.int64)
    first = np.unique(step, return_index=True)[1]
    first = first[np.argsort(chosen["start_ns"].to_numpy()[first], kind="stable")]
    return _Marks(step[first], chosen["start_ns"].to_numpy()[first], chosen["end_ns"].to_numpy()[first], marks.thread)


def _optimizer_ends(trace: Trace, activities: pd.DataFrame) -> _Marks:
    """Return the ends of the optimizer steps; those with no launch between them are one."""
    marks = _named(trace, OPTIMIZER_STEP)
    if not len(marks.step):
        return marks
    launch = activities["launch"].to_numpy()
    calls = np.sort(trace.events["start_ns"].to_numpy()[launch[launch >= 0]])
    before = np.searchsorted(calls, marks.start[1:]) - np.searchsorted(calls, marks.end[:-1])
    last = np.concatenate((before > 0, [True]))
    ends = marks.end[last]
    return _Marks(np.arange(len(ends)), ends, ends, marks.thread)


def _spanning(marks: _Marks) -> bool:
    """Tell whether marks cover their steps, so that the last one's end is a step's end."""
    covered = int((marks.end[:-1] - marks.start[:-1]).sum())
    return len(marks.step) == 1 or covered * 2 > int(marks.start[-1] - marks.start[0])


def _without_cut_step(trace: Trace, activities: pd.DataFrame, steps: Steps) -> Steps:
    """Leave out a last step whose GPU records stop before its launches do, if there are others."""
    if len(steps.step) < 2 or not steps.last_recorded:
        return steps
    events = trace.events
    launching = np.array(
        [LAUNCH_CALL.search(str(name)) is not None for name in events["name"].cat.categories], np.bool_
    )
    calls = (events["kind"].to_numpy() == Kind.RUNTIME) & launching[events["name"].cat.codes.to_numpy()]
    starts = events["start_ns"].to_numpy()
    linked = activities["launch"].to_numpy()
    last_linked = int(starts[linked[linked >= 0]].max()) if (linked >= 0).any() else 0
    inside = calls & (starts >= steps.windows.start[-1]) & (starts < steps.windows.end[-1])
    lost = inside & (starts > last_linked)
    if int(lost.sum()) <= max(2, CUT_SHARE * int(inside.sum())):
        return steps
    reason = f"its GPU records stop early: {int(lost.sum())} launches after the last recorded one left none"
    return Steps(
        steps.step[:-1],
        Intervals(steps.windows.start[:-1], steps.windows.end[:-1]),
        steps.marked_by,
        steps.main_thread,
        (*steps.left_out, (int(steps.step[-1]), reason)),
    )


def _listed(steps: Array) -> str:
    return "steps " + ", ".join(str(step) for step in steps[:20]) + (", …" if len(steps) > 20 else "")
