"""Real traces: each set ends with a report whose leaves add up, or with an error that says what is missing."""

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import REAL_TRACES, Audited
from traceaudit.account import account
from traceaudit.audit import Audit
from traceaudit.classify import State, activities
from traceaudit.errors import TraceAuditError
from traceaudit.events import GPU_KINDS
from traceaudit.reading.normalise import read_trace
from traceaudit.steps import Selection

SETS = sorted(path.name for path in REAL_TRACES.iterdir() if path.is_dir()) if REAL_TRACES.is_dir() else ["absent"]
FILES = sorted(str(path.relative_to(REAL_TRACES)) for path in REAL_TRACES.glob("*/*.json*")) or ["absent"]

# Sets of several recordings, of other tools, or without GPU rows, and a word of the error that says so.
REFUSED = {
    "ao-vit-cudagraph": "recordings",
    "deepseek-r1-decode": "recordings",
    "deepview-3060": "one process",
    "dtu-cpu-2023": "recordings",
    "foreign-aiu-tp4": "no event",
    "foreign-bytedance-pp": "none of the 9 files",
    "foreign-composer": "no event",
    "foreign-rocprof": "no event",
    "h100-inference": "recordings",
    "hta-cpu-only": "rank 34",
    "hta-critical-path": "recordings",
    "hta-cupti": "no GPU activity",
    "hta-edge": "recordings",
    "hta-mtia-inference": "no GPU activity",
    "hta-triton": "recordings",
    "kineto-resnet50-2021": "recordings",
    "kineto-tests": "recordings",
    "mi300-inference": "recordings",
    "mi300-sglang-decode": "recordings",
    "mi300-vllm-piecewise": "recordings",
    "mi350x-mi308x": "recordings",
    "p100-jit": "recordings",
    "pippy-2022": "no GPU activity",
    "ptl-2020": "no event",
    "qlora-a100": "recordings",
    "switch-moe-a100": "recordings",
    "torchrec-dlrm-a2a-tworuns": "recordings",
    "tutorial-h100": "recordings",
    "zoology-a100": "no GPU activity",
}


@pytest.mark.parametrize("name", SETS)
def test_set_ends_with_a_report_or_a_reason(name: str, audited_real: Audited) -> None:
    """A set of one job is attributed; anything else is refused with the reason."""
    if name in REFUSED:
        with pytest.raises(TraceAuditError, match=REFUSED[name]):
            audited_real(name)
    else:
        adds_up(audited_real(name))


@pytest.mark.parametrize("name", FILES)
def test_file_ends_with_a_report_or_a_reason(name: str, audited_real: Audited) -> None:
    """Each file alone is attributed or refused."""
    try:
        audit = audited_real(name)
    except TraceAuditError as error:
        assert any(reason in str(error) for reason in ("no GPU activity", "no event", "not a profiler trace"))  # noqa: PT017
    else:
        adds_up(audit)


def adds_up(audit: Audit) -> None:
    """Check the law on the result: leaves to buckets to windows, rows of the waterfall to one."""
    job = audit.result["job"]
    assert sum(job["buckets"].values()) == job["window_ns"]
    for bucket, ns in job["buckets"].items():
        assert sum(leaf["ns"] for leaf in job["leaves"] if leaf["bucket"] == bucket) == ns
    for rank in audit.result["ranks"]:
        for step in rank["steps"]:
            assert sum(step["buckets"].values()) == step["window_ns"]
    if audit.result["quality"]["unattributed_share"] > 0.02:  # it says what the trace lacks
        lacking = ("launch_missing", "not_started")
        unknown = sum(leaf["ns"] for leaf in job["leaves"] if leaf["leaf"] in lacking)
        assert sum(audit.result["host_facts"]["unattributed"].values()) == unknown
    rows = [row["share"] for row in job["waterfall"]]
    assert sum(rows[:-1]) == pytest.approx(rows[-1])


@pytest.mark.parametrize(
    "name", ["torchtitan-fsdp4-h100/rank000000_trace.json.gz", "hta-ddp-v100/df_index_resolver.json.gz"]
)
def test_base_states_agree_with_a_sweep(name: str, real_traces: Path) -> None:
    """Compute, communication and idle time of a whole trace equal an independent sweep over its sorted edges."""
    trace = read_trace(real_traces / name)
    own = account(trace, Selection(whole_trace=True))
    assert own.steps is not None
    table = activities(trace)
    window = int(own.steps.windows.end[0] - own.steps.windows.start[0])
    edges = sorted({*table["start_ns"], *table["end_ns"]})
    counts = np.zeros((len(edges), 3), np.int64)
    for state, sign, column in ((s, sign, c) for s in range(3) for sign, c in ((1, "start_ns"), (-1, "end_ns"))):
        np.add.at(counts[:, state], np.searchsorted(edges, table.loc[table["state"] == state, column]), sign)
    running = np.cumsum(counts, axis=0)[:-1] > 0
    length = np.diff(edges)
    compute = int(length[running[:, State.COMPUTE]].sum())
    communication = int(length[~running[:, State.COMPUTE] & running[:, State.COMMUNICATION]].sum())
    assert own.compute["ns"].sum() == compute
    owned = own.exposed[~own.exposed["trailing"]]
    assert int((owned["end_ns"] - owned["start_ns"]).sum()) == communication
    assert edges[-1] - edges[0] == window
    assert trace.events["kind"].isin(GPU_KINDS).sum() >= len(table)
