"""Time that the traces do not explain, and what to record so that the next ones do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from traceaudit.findings.finding import Confidence, Finding
from traceaudit.findings.seen import Seen
from traceaudit.leaves import Leaf
from traceaudit.report.formats import listed


@dataclass(frozen=True)
class Gap:
    """What to say of a leaf without explanation."""

    id: str
    title: str
    action: str
    verify: str


GAPS: Mapping[Leaf, Gap] = {
    Leaf.LAUNCH_MISSING: Gap(
        "unattributed.launch-missing",
        "launch records are missing",
        "Record CPU activity on all threads from before the step (ProfilerActivity.CPU, a warm-up in the schedule) and "
        "keep the rows of the CUDA runtime; do not thin out the file.",
        "Every kernel has a launch, and the idle time before it a cause.",
    ),
    Leaf.NOT_STARTED: Gap(
        "unattributed.not-started",
        "work was launched in time and did not start",
        "Record synchronisation events (enable_cuda_sync_events); look for another process on the GPU (time slicing, "
        "MPS), and record kernels inside CUDA graphs.",
        "The gaps have a dependency or are gone.",
    ),
    Leaf.TRACE_CUT: Gap(
        "unattributed.trace-cut",
        "the recordings of the ranks begin or end at different times",
        "Start the profilers of all ranks at the same step, after a barrier, and leave a step at both ends.",
        "No wait falls outside a partner's recording.",
    ),
    Leaf.OTHER: Gap(
        "unattributed.other",
        "waits that no replay and no rule explains",
        "Trace all stages and replicas of the pipeline, and record one step more.",
        "This row falls below 2 % of the time.",
    ),
}


def unexplained(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield unattributed time by what the trace lacks."""
    reasons = [str(reason) for reason in seen.facts("unattributed")]
    for leaf, about in GAPS.items():
        known = reasons if leaf in (Leaf.LAUNCH_MISSING, Leaf.NOT_STARTED) else []
        yield Finding(
            id=about.id,
            title=about.title,
            summary=f"This time could be anything: {listed(known[:3])}." if known else "This time could be anything.",
            action=about.action,
            verify=about.verify,
            confidence=Confidence.SUSPECTED,
            claims={leaf: left[leaf]},
            evidence=seen.of_gaps([leaf]) or seen.of_communications([leaf]) or seen.of_ledger(leaf, "not explained"),
        )


RULES = (unexplained,)
