"""The windows of the steps on a rank follow attribution rule 1. Times in the tests are microseconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceaudit.classify import activities
from traceaudit.errors import InputError
from traceaudit.events import Trace
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise
from traceaudit.steps import Selection, Steps, launch_times, step_windows

Event = dict[str, Any]
Windows = list[tuple[int, int, int]]  # step, start and end in microseconds


def host(start: int, end: int, name: str, cat: str = "user_annotation", tid: int = 1, **args: object) -> Event:
    """Return a host row."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": end - start, "args": args}


def profiler_step(number: int, start: int, end: int, **more: Any) -> Event:  # noqa: ANN401
    """Return the profiler's annotation of a step."""
    return host(start, end, f"ProfilerStep#{number}", **more)


def optimizer(start: int, end: int) -> Event:
    """Return the annotation of an optimizer step."""
    return host(start, end, "Optimizer.step#AdamW.step")


class Launches:
    """Makes kernels with launches, and those without."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, launch: int | None, start: int, end: int, stream: int = 7) -> list[Event]:
        """Return a kernel and its launch of one microsecond, or the kernel alone."""
        self.count += 1
        args = {"stream": stream, "device": 0, "correlation": self.count}
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": stream, "ts": start, "dur": end - start}
        rows: list[Event] = [{**kernel, "args": args}]
        if launch is not None:
            rows.append(host(launch, launch + 1, "cudaLaunchKernel", "cuda_runtime", correlation=self.count))
        return rows


@pytest.fixture
def kernel() -> Launches:
    """Return a maker of kernels."""
    return Launches()


Read = Callable[[list[Event]], Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads a trace of some events."""

    def loaded(events: list[Event]) -> Trace:
        path = tmp_path / "rank5_trace.json"
        path.write_text(json.dumps(events), encoding="utf-8")
        return normalise(load(path))

    return loaded


def steps_of(trace: Trace, **selection: Any) -> Steps:  # noqa: ANN401
    """Return the steps of a trace."""
    return step_windows(trace, activities(trace), Selection(**selection))


def windows(steps: Steps) -> Windows:
    """Return step, start and end of each window in microseconds."""
    columns = (steps.step, steps.windows.start // 1_000, steps.windows.end // 1_000)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_step_begins_with_its_mark_and_ends_with_the_next(read: Read, kernel: Launches) -> None:
    """Where the GPU keeps pace, windows are the marks, the last one to its end; the marking thread is known."""
    trace = read(
        [
            profiler_step(3, 100, 200),
            profiler_step(4, 210, 300),
            profiler_step(5, 310, 400),
            *kernel(110, 120, 150),
            *kernel(220, 230, 290),
            *kernel(320, 330, 350),
        ]
    )
    steps = steps_of(trace)
    assert windows(steps) == [(3, 100, 210), (4, 210, 310), (5, 310, 400)]
    assert steps.marked_by == "ProfilerStep"
    assert steps.main_thread == (9, 1)
    assert steps.last_recorded
    assert steps.left_out == ()


def test_work_that_lags_behind_the_host_belongs_to_the_step_that_launched_it(read: Read, kernel: Launches) -> None:
    """A window begins when the last activity launched before its mark has ended, on whatever stream."""
    trace = read(
        [
            profiler_step(3, 100, 200),
            profiler_step(4, 200, 300),
            profiler_step(5, 300, 400),
            *kernel(110, 120, 260),  # launched in 3, ends in the mark of 4
            *kernel(120, 130, 280, stream=20),  # the last of them
            *kernel(210, 285, 310),  # launched in 4
            *kernel(310, 320, 450),  # launched in 5, the last
        ]
    )
    assert windows(steps_of(trace)) == [(3, 100, 280), (4, 280, 310), (5, 310, 450)]


def test_a_launch_at_the_mark_itself_belongs_to_the_step_it_begins(read: Read, kernel: Launches) -> None:
    """Intervals are half-open: what is launched at the instant of a mark is not launched before it."""
    trace = read(
        [profiler_step(1, 100, 200), profiler_step(2, 200, 300), *kernel(150, 160, 170), *kernel(200, 210, 290)]
    )
    assert windows(steps_of(trace)) == [(1, 100, 200), (2, 200, 300)]


@pytest.mark.parametrize(("last_activity_end", "end"), [(380, 400), (400, 400), (470, 470)])
def test_the_last_step_ends_with_its_mark_or_its_last_activity(
    read: Read, kernel: Launches, last_activity_end: int, end: int
) -> None:
    """Of the mark's end and the end of the last activity launched in it, the later ends the last step."""
    trace = read([profiler_step(1, 300, 400), *kernel(310, 320, last_activity_end), *kernel(401, 480, 490)])
    assert windows(steps_of(trace)) == [(1, 300, end)]


def test_activities_queued_before_the_recording_belong_to_no_step(read: Read, kernel: Launches) -> None:
    """What precedes the first linked activity of its stream without a launch was queued: the first step follows it."""
    trace = read(
        [
            *kernel(None, 90, 130),  # queued on stream 7
            *kernel(None, 95, 120, stream=20),  # stream 20 has no linked activity: runs in its own step
            profiler_step(1, 100, 200),
            *kernel(110, 140, 190),
            *kernel(None, 192, 198),  # no record, but behind a linked one
        ]
    )
    table = activities(trace)
    start = table["start_ns"].tolist()
    launched = dict(zip(start, launch_times(trace, table).tolist(), strict=True))
    assert launched[90_000] < 0
    assert (launched[95_000], launched[140_000], launched[192_000]) == (95_000, 110_000, 192_000)
    assert windows(steps_of(trace)) == [(1, 130, 200)]


def test_marks_of_other_threads_do_not_count(read: Read, kernel: Launches) -> None:
    """The thread of the first mark marks the steps; the same number twice is one step, from its first mark."""
    trace = read(
        [
            profiler_step(1, 100, 200),
            profiler_step(2, 150, 160, tid=2),
            profiler_step(9, 150, 160) | {"pid": 10},
            profiler_step(2, 200, 300),
            profiler_step(2, 250, 260),
            *kernel(110, 120, 290),
        ]
    )
    assert [step for step, _, _ in windows(steps_of(trace))] == [1, 2]


# Without the profiler's marks


def test_optimizer_steps_end_the_steps(read: Read, kernel: Launches) -> None:
    """Windows run from the end of an optimizer step, or the work launched before it, to that of the next."""
    trace = read(
        [
            *kernel(10, 20, 40),
            optimizer(100, 150),
            *kernel(140, 150, 180),  # the optimizer's, ends behind it
            *kernel(210, 220, 240),
            optimizer(300, 350),
            *kernel(360, 370, 390),
            optimizer(400, 450),
        ]
    )
    steps = steps_of(trace)
    assert windows(steps) == [(0, 180, 350), (1, 350, 450)]
    assert steps.marked_by == "optimizer"
    assert not steps.last_recorded


def test_optimizers_without_work_between_them_are_one(read: Read, kernel: Launches) -> None:
    """Two optimizers that follow each other, such as of two parameter groups, end one step."""
    trace = read(
        [
            *kernel(10, 20, 40),
            optimizer(100, 150),
            optimizer(160, 200),
            *kernel(250, 260, 290),
            optimizer(300, 350),
            optimizer(360, 400),
        ]
    )
    assert windows(steps_of(trace)) == [(0, 200, 400)]


def test_one_optimizer_step_marks_a_partial_step(read: Read, kernel: Launches) -> None:
    """With a single mark, the head before it is all there is, and the window says that it is partial."""
    trace = read([*kernel(10, 20, 40), optimizer(100, 150), *kernel(140, 150, 180), *kernel(200, 210, 230)])
    steps = steps_of(trace)
    assert windows(steps) == [(0, 20, 180)]
    assert steps.marked_by == "optimizer (partial step)"


def test_the_profilers_marks_beat_optimizer_steps(read: Read, kernel: Launches) -> None:
    """Optimizer steps mark nothing where the profiler's steps were recorded."""
    trace = read([profiler_step(7, 0, 500), optimizer(100, 150), *kernel(210, 220, 240), optimizer(300, 350)])
    assert windows(steps_of(trace)) == [(7, 0, 500)]


def test_without_marks_the_whole_trace_is_a_window(read: Read, kernel: Launches) -> None:
    """The only window runs from the start of the first GPU activity to the end of the last, and says so."""
    trace = read(
        [host(0, 900, "aten::mm", "cpu_op"), *kernel(10, 20, 40), *kernel(100, 300, 320), *kernel(90, 110, 400)]
    )
    steps = steps_of(trace)
    assert windows(steps) == [(0, 20, 400)]
    assert steps.marked_by == "whole trace"
    assert steps.main_thread is None


def test_the_whole_trace_can_be_asked_for(read: Read, kernel: Launches) -> None:
    """On request, marks are ignored."""
    trace = read([profiler_step(1, 0, 50), profiler_step(2, 50, 90), *kernel(10, 20, 40), *kernel(60, 70, 80)])
    assert windows(steps_of(trace, whole_trace=True)) == [(0, 20, 80)]


# Marks that the user names


def test_annotations_that_span_steps_mark_each_of_them(read: Read, kernel: Launches) -> None:
    """Marks that cover their steps include the last one, which ends with its mark or its work."""
    trace = read(
        [
            *(host(start, start + 95, f"train_step {start}") for start in (100, 200, 300)),
            *kernel(110, 120, 150),
            *kernel(210, 220, 260),
            *kernel(310, 320, 420),
        ]
    )
    steps = steps_of(trace, marker=r"^train_step")
    assert windows(steps) == [(0, 100, 200), (1, 200, 300), (2, 300, 420)]
    assert steps.marked_by == "marker"
    assert steps.last_recorded


def test_annotations_at_the_head_of_steps_mark_what_lies_between_them(read: Read, kernel: Launches) -> None:
    """Marks much shorter than their steps tell beginnings only: the last one has no end and is left out."""
    trace = read([*(host(start, start + 5, "fetch") for start in (100, 200, 300)), *kernel(110, 120, 150)])
    steps = steps_of(trace, marker="fetch")
    assert windows(steps) == [(0, 100, 200), (1, 200, 300)]
    assert not steps.last_recorded


def test_a_marker_beats_the_profilers_marks(read: Read, kernel: Launches) -> None:
    """The user's marker counts where both are there."""
    trace = read([profiler_step(3, 0, 100), host(10, 90, "mine"), *kernel(20, 30, 60)])
    assert windows(steps_of(trace, marker="mine")) == [(0, 10, 90)]


def test_a_marker_that_matches_nothing_is_an_error(read: Read, kernel: Launches) -> None:
    """The error names the file and the marker."""
    trace = read([profiler_step(3, 0, 100), *kernel(20, 30, 60)])
    with pytest.raises(InputError, match=r"rank5_trace\.json: no annotation matches --step-marker 'train'"):
        steps_of(trace, marker="train")


# Which steps


@pytest.mark.parametrize(
    ("chosen", "expected", "last_recorded"),
    [
        ({3}, [(3, 100, 200)], False),
        ({4}, [(4, 200, 300)], False),
        ({3, 5}, [(3, 100, 200), (5, 300, 400)], True),
        ({5, 99}, [(5, 300, 400)], True),
    ],
)
def test_selected_steps_keep_their_windows(
    read: Read, kernel: Launches, chosen: set[int], expected: Windows, last_recorded: bool
) -> None:
    """A selected step ends where the next one begins, selected or not."""
    marks = [profiler_step(number, 100 * (number - 2), 100 * (number - 2) + 90) for number in (3, 4, 5)]
    steps = steps_of(read([*marks, *kernel(110, 120, 150), *kernel(310, 320, 400)]), steps=frozenset(chosen))
    assert windows(steps) == expected
    assert steps.last_recorded == last_recorded


def test_selecting_steps_that_were_not_recorded_is_an_error(read: Read, kernel: Launches) -> None:
    """The error says which steps there are."""
    trace = read([profiler_step(3, 100, 200), profiler_step(4, 200, 300), *kernel(110, 120, 150)])
    with pytest.raises(InputError, match=r"rank5_trace\.json: none of the selected steps .*holds steps 3, 4"):
        steps_of(trace, steps=frozenset({7}))


@pytest.mark.parametrize(
    ("call", "lost", "left_out"),
    [
        ("cudaLaunchKernel", 2, False),
        ("cudaLaunchKernel", 3, True),
        ("cuLaunchKernelEx", 20, True),
        ("cudaGraphLaunch", 20, True),
        ("cudaEventRecord", 20, False),  # launches nothing
    ],
)
def test_a_last_step_whose_gpu_records_stop_early_is_left_out(
    read: Read, kernel: Launches, call: str, lost: int, left_out: bool
) -> None:
    """Launches at the end of the last step without GPU records mean that records are missing, not that it idled.

    Two at most may be lost without harm.
    """
    calls = [host(330 + i, 331 + i, call, "cuda_runtime", correlation=900 + i) for i in range(lost)]
    marks = [profiler_step(2, 200, 295), profiler_step(3, 300, 395)]
    trace = read([*marks, *kernel(210, 220, 250), *kernel(310, 320, 350), *calls])
    steps = steps_of(trace)
    assert windows(steps) == [(2, 200, 300), (3, 300, 395)][: 1 if left_out else 2]
    assert [step for step, _ in steps.left_out] == ([3] if left_out else [])
    assert all(f"{lost} launches" in reason for _, reason in steps.left_out)


def test_an_only_step_is_kept_even_if_it_is_cut(read: Read, kernel: Launches) -> None:
    """There is nothing else to analyse than the one step recorded."""
    calls = [host(130 + i, 131 + i, "cudaLaunchKernel", "cuda_runtime", correlation=900 + i) for i in range(20)]
    assert windows(steps_of(read([profiler_step(1, 100, 195), *kernel(110, 120, 150), *calls]))) == [(1, 100, 195)]
