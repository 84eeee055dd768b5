"""Exposed communication that blocked nothing. Times in the tests are microseconds."""

import json
from pathlib import Path
from typing import Any

import pytest

from traceaudit.classify import activities
from traceaudit.idle.blocking import not_blocking
from traceaudit.idle.calls import host_activity
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise
from traceaudit.timeline import base_states

Event = dict[str, Any]
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def call(start: float, end: float, name: str, correlation: int = 0) -> Event:
    """Return a call of the runtime."""
    args = {"correlation": correlation}
    row = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 9, "tid": 1, "args": args}
    return {**row, "ts": start, "dur": end - start}


def kernel(start: float, end: float, name: str, correlation: int, stream: int = 7) -> Event:
    """Return a kernel."""
    args = {"stream": stream, "device": 0, "correlation": correlation}
    row = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": args}
    return {**row, "ts": start, "dur": end - start}


def island(launched_at: float, *more: Event) -> list[Event]:
    """Return an all-reduce that runs alone from 100 to 200, and the kernel after it with the end of its launch."""
    return [
        call(0, 2, "cudaLaunchKernel", 1),
        call(3, 5, "cudaLaunchKernel", 2),
        call(launched_at - 5, launched_at, "cudaLaunchKernel", 3),
        kernel(10, 100, "gemm", 1),
        kernel(100, 200, ALL_REDUCE, 2, stream=20),
        kernel(210, 300, "gemm", 3),
        *more,
    ]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (island(50), 0),
        (island(160), 60),
        (island(205), 100),
        (island(160, call(110, 140, "cudaStreamSynchronize")), 15),
        (island(160, call(90, 150, "cudaDeviceSynchronize")), 5),
        ([event for event in island(160) if event["args"]["correlation"] != 3 or event["cat"] == "kernel"], 0),
        (island(160)[:5], 0),
    ],
    ids=[
        "in time",
        "late",
        "later than it",
        "waited in between",
        "waited before",
        "no launch record",
        "no kernel after",
    ],
)
def test_time_before_the_next_launch_blocks_nothing(events: list[Event], expected: int, tmp_path: Path) -> None:
    """Without the communication that time would be a host gap, unless the host waited, or refilled its queue."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events), encoding="utf-8")
    trace = normalise(load(path))
    table = activities(trace)
    pieces = base_states(table, 0, 400_000)
    found = not_blocking(trace.events, table, pieces, host_activity(trace, table))
    assert found.tolist() == [0, expected * 1_000, 0][: len(table)]
