"""Memory does not grow with a file's size beyond what is kept of it; many ranks are matched as few are."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.synthetic_ranks import GPUS, LATE_NS, accounts
from traceaudit.mfu.model import Run
from traceaudit.pipeline import _attributed
from traceaudit.steps import Selection

ROOT = Path(__file__).parents[1]
PEAK = """
import resource, sys
from pathlib import Path
from traceaudit.reading.normalise import read_trace
from traceaudit.reading.streams import Place

read_trace(Place(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = read_trace(Place(sys.argv[2]))
print(len(trace.events), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def written(path: Path, frames: int) -> Path:
    """Write a trace of Python frames that are not kept, and one kernel."""
    kernel = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5.000, "dur": 9.000, "args": {}}'
    frame = (
        '{"ph": "X", "cat": "python_function", "name": "f", "pid": 1, "tid": 1, "ts": 1.000, "dur": 2.000, "args": {}}'
    )
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [\n' + kernel)
        for _ in range(frames // 1_000):
            file.write((",\n" + frame) * 1_000)
        file.write("\n]}")
    return path


def test_memory_does_not_follow_what_is_not_kept(tmp_path: Path) -> None:
    """A file of 100 MB in which one event matters takes a few blocks of memory."""
    small, large = written(tmp_path / "small.json.gz", 1_000), written(tmp_path / "large.json.gz", 900_000)
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    events, grown_mb = map(int, done.stdout.split())
    assert events == 1
    assert grown_mb < 60


def test_cross_rank_step_finds_what_was_planted() -> None:
    """On synthetic accounts of many ranks, the waits are those of the planted arrivals."""
    for ranks in (4 * GPUS, 32 * GPUS):
        own = accounts(ranks, 60)
        planted = _planted(own)
        result = _attributed("synthetic", own, Run({}, {}), Selection(), [], []).result
        assert len(result["ranks"]) == ranks
        found = result["job"]["buckets"]["straggler"]
        assert abs(found - planted) < 0.05 * planted


def _planted(own: list) -> float:  # type: ignore[type-arg]
    """Return how long ranks waited for the last of their group, from the arrivals."""
    start = np.array([account.communications["start_ns"].to_numpy() for account in own])
    wide = (own[0].communications["group_description"] == "mesh_dp").to_numpy()
    hosts = start.reshape(len(own) // GPUS, GPUS, -1)
    last = np.where(wide, hosts.max(axis=0, keepdims=True), hosts.max(axis=1, keepdims=True))
    waits = last - hosts
    assert waits.max() <= LATE_NS
    return float(waits.sum())
