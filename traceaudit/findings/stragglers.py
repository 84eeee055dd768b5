"""Ranks that made others wait: one finding a cause, with the culprit's own excess or pause in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traceaudit.findings.finding import Confidence, Evidence, Finding
from traceaudit.findings.host import HOST
from traceaudit.findings.seen import LEAF_OF, Seen
from traceaudit.leaves import Bucket, Leaf
from traceaudit.report.formats import duration, kernel_title, listed, numbers, percent, times

Entry = Mapping[str, Any]
WAITS = (
    Leaf.LATE_RANK,
    Leaf.DATA_IMBALANCE,
    Leaf.HOST_CAUSED,
    Leaf.SLOW_LINK,
    Leaf.JITTER,
)
SHOWN_RANKS = 8
NAMED_SHARE = 0.9  # of a cause's waits, for which the ranks that caused the most of them are named
ALONE = (
    "Find out why this rank's host is slower than the others': threads that are not pinned to the GPU's NUMA node, "
    "other processes on its cores, a throttled CPU, work that only this rank does (logging, rank 0). "
)
EVEN = 1.02  # times the work of the next stage, up to which a stage is no heavier


@dataclass(frozen=True)
class Cause:
    """What to say of a cause of waits; `{who}` stands for the ranks."""

    id: str
    title: str
    why: str
    action: str
    verify: str
    leaf: Leaf
    confidence: Confidence


CAUSES: Mapping[str, Cause] = {
    "slow_gpu": Cause(
        "straggler.slow-gpu",
        "slow GPU: {who}",
        "The same kernels, grids and shapes take longer on it than on its peers, nearly all of them.",
        "Look at clocks, power and temperature of that GPU (nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE), "
        "run one of its kernels alone there and on a peer, and take the node out of the job if it stays slow.",
        "Its kernels take as long as its peers', and nobody waits for it.",
        Leaf.LATE_RANK,
        Confidence.MEASURED,
    ),
    "slow_kernels": Cause(
        "straggler.slow-kernels",
        "some kernels are slower: {who}",
        "A few kernels take longer than the same ones on its peers; the rest of the GPU is as fast as theirs.",
        "Compare the named kernels with a peer's: other inputs, a neighbour on the memory or the link, "
        "another algorithm chosen by autotuning.",
        "The named kernels take as long as on the peers.",
        Leaf.LATE_RANK,
        Confidence.SUSPECTED,
    ),
    "more_work": Cause(
        "straggler.data-imbalance",
        "unequal work: {who}",
        "It computes more than the others between two meetings, and its kernels are no slower than theirs.",
        "Balance the work by tokens (and by squared length where attention matters) instead of by samples: pack or "
        "sort sequences across ranks and micro-batches; check that experts and shards are of equal size.",
        "The kernel time of all ranks between two collectives agrees within a few percent.",
        Leaf.DATA_IMBALANCE,
        Confidence.MEASURED,
    ),
    "launch_order": Cause(
        "straggler.launch-order",
        "ranks launch communication in another order: {who}",
        "It computed first what the others computed after they had begun to communicate; it did no more than they.",
        "Let every rank launch its collectives at the same place between its kernels.",
        "All ranks arrive at the collective after the same kernels.",
        Leaf.LATE_RANK,
        Confidence.SUSPECTED,
    ),
    "slow_link": Cause(
        "straggler.slow-link",
        "slow link: {who}",
        "Transfers of one kind and size take longer in this group than in the groups like it.",
        "Test the link alone (nccl-tests between these GPUs), look for replays and errors (nvidia-smi nvlink -e, "
        "ibstat, switch counters), check the topology that NCCL chose (NCCL_DEBUG=INFO), and move the group.",
        "The bus bandwidth of the group equals that of its peer groups.",
        Leaf.SLOW_LINK,
        Confidence.MEASURED,
    ),
    "pipeline": Cause(
        "straggler.pipeline",
        "late for its own waits in the pipeline: {who}",
        "It was late because it had waited inside the pipeline, whose waits are not divided.",
        "Name the layout of the pipeline (--pp, or process groups in the traces) and trace all its stages.",
        "The waits divide into the schedule's own and those of a stage.",
        Leaf.LATE_RANK,
        Confidence.SUSPECTED,
    ),
    "jitter": Cause(
        "straggler.jitter",
        "jitter: {who}",
        "Ranks waited for one that did nothing more than they did.",
        "Look for what disturbs hosts in turn: other processes, power capping, unpinned threads; "
        "fewer synchronisations a step lose less to it.",
        "Waits at collectives of ranks with equal work shrink.",
        Leaf.JITTER,
        Confidence.SUSPECTED,
    ),
    "unknown": Cause(
        "straggler.unknown",
        "late for an unknown reason: {who}",
        "It was late, and the traces do not say why.",
        "Record that rank once with Python stacks (with_stack=True), from before the step begins.",
        "The cause has a name.",
        Leaf.LATE_RANK,
        Confidence.SUSPECTED,
    ),
}


def late_ranks(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield a finding a cause: the waits of others, and what the culprits themselves lost to the same."""
    room = dict(left)
    for cause, leaf, entries in _grouped(seen):
        claims = _waits(sum(int(entry["caused_ns"]) for entry in entries), _about(cause, leaf).leaf, room)
        own = [*_own(cause, leaf, entries, seen), *_heavy_stage(cause, entries, seen, room)]
        for own_leaf, ns in own:
            claims[own_leaf] = claims.get(own_leaf, 0) + ns
        for claimed, ns in claims.items():
            room[claimed] = max(room[claimed] - ns, 0)
        yield _finding(cause, leaf, entries, claims, seen)


def _grouped(seen: Seen) -> list[tuple[str, Leaf | None, list[Entry]]]:
    """Return the culprits by cause, and those whose host paused by what it did; the most expensive first."""
    groups: dict[tuple[str, Leaf | None], list[Entry]] = {}
    for entry in seen.result.get("stragglers", ()):
        cause = str(entry["cause"]) if entry["cause"] in (*CAUSES, "host_pause") else "unknown"
        leaf = LEAF_OF.get(str(entry["evidence"].get("leaf"))) if cause == "host_pause" else None
        groups.setdefault((cause, leaf), []).append(entry)
    ordered = sorted(groups.items(), key=lambda group: -sum(entry["caused_ns"] for entry in group[1]))
    return [(cause, leaf, entries) for (cause, leaf), entries in ordered]


def _about(cause: str, leaf: Leaf | None) -> Cause:
    """Return the words for a cause; those of a pause of the host are the words for its leaf."""
    if cause != "host_pause":
        return CAUSES[cause]
    words = HOST.get(leaf or Leaf.OTHER_HOST, HOST[Leaf.OTHER_HOST])
    alone = ALONE if leaf in (Leaf.LAUNCH_BOUND, Leaf.OTHER_HOST) else ""
    return Cause(
        f"straggler.{words.id.partition('.')[2]}",
        f"others wait for {{who}}: {words.subject}",
        words.why,
        alone + words.action,
        "Nobody waits for this rank. " + words.verify,
        Leaf.HOST_CAUSED,
        Confidence.ESTIMATED if leaf == Leaf.LAUNCH_BOUND else Confidence.MEASURED,
    )


def _waits(ns: int, first: Leaf, room: Mapping[Leaf, int]) -> dict[Leaf, int]:
    """Claim waits from the leaf of their cause, and the rest from the other waits for late ranks.

    Causes and leaves divide the same waits by different evidence (attribution rule 5), so that one cause can take of
    several leaves; both add up to the same total.
    """
    claims: dict[Leaf, int] = {}
    for leaf in (first, *(leaf for leaf in WAITS if leaf != first)):
        taken = min(ns, room[leaf])
        if taken:
            claims[leaf] = taken
        ns -= taken
    return claims


def _own(cause: str, leaf: Leaf | None, entries: Sequence[Entry], seen: Seen) -> Iterator[tuple[Leaf, int]]:
    """Yield what the culprits themselves lost, capped by what their own steps have of the leaf."""
    for entry in entries:
        rank = int(entry["rank"])
        if cause == "slow_gpu":
            yield Leaf.SLOW_GPU, seen.leaf_ns_of(rank, Leaf.SLOW_GPU)
        elif cause == "host_pause" and leaf is not None:
            yield leaf, min(int(entry["own_ns"]), seen.leaf_ns_of(rank, leaf))
        elif cause == "slow_link":
            dims = {link_leaf(link["group"], link["kind"], seen) for link in entry["evidence"].get("links", ())}
            for dim in dims - {None}:
                if dim is not None:
                    yield dim, min(int(entry["own_ns"]) // len(dims), seen.leaf_ns_of(rank, dim))


def _heavy_stage(
    cause: str, entries: Sequence[Entry], seen: Seen, room: Mapping[Leaf, int]
) -> Iterator[tuple[Leaf, int]]:
    """Yield the stage imbalance of a pipeline if it is a slow GPU that makes the stage heavy, and not its layers."""
    found = seen.result.get("pipeline") or {}
    if cause != "slow_gpu" or "heaviest_stage" not in found:
        return
    stage, work = found["heaviest_stage"], found["stage_work_ns"]
    stages = {row["rank"]: row.get("stage") for row in seen.result.get("ranks", ())}
    excess = sum(int(entry["own_ns"]) for entry in entries if stages.get(entry["rank"]) == stage)
    mean = excess / max(len(seen.result["job"]["steps"]), 1) / max(found.get("chains") or 1, 1)
    others = [ns for number, ns in enumerate(work) if number != stage]
    if excess and others and work[stage] - mean <= EVEN * max(others):
        yield Leaf.STAGE_IMBALANCE, room[Leaf.STAGE_IMBALANCE]


def link_leaf(group: str, kind: str, seen: Seen) -> Leaf | None:
    """Return the dimension of a group's communications of a kind; a group is told by its ranks."""
    for row in seen.result.get("collectives", ()):
        if str(row["group"]).endswith(str(group)[str(group).find("[") :]) and row["kind"] == kind:
            return LEAF_OF[row["dim"]]
    return None


def _finding(cause: str, leaf: Leaf | None, entries: Sequence[Entry], claims: dict[Leaf, int], seen: Seen) -> Finding:
    about = _about(cause, leaf)
    caused = sum(int(entry["caused_ns"]) for entry in entries)
    words = [about.why, f"Others waited {seen.share(caused)} for {'them' if len(entries) > 1 else 'it'}."]
    if cause == "host_pause" and seen.result.get("pipeline"):
        words.append("In a summary it poses as a pipeline bubble.")
    named = any(int(entry["own_ns"]) for entry in entries) or cause not in ("more_work", "host_pause", "slow_link")
    return Finding(
        id=about.id,
        title=about.title.format(who=_who(entries)),
        summary=" ".join(words),
        action=about.action,
        verify=about.verify,
        confidence=about.confidence if named else Confidence.ESTIMATED,
        claims=claims,
        evidence=tuple(_evidence(cause, leaf, entries, seen)),
    )


def _who(entries: Sequence[Entry]) -> str:
    """Return the ranks that caused nearly all of the waits, and how many more there are."""
    whole, sum_ns = sum(int(entry["caused_ns"]) for entry in entries), 0
    ranks: list[int] = []
    for entry in entries[:SHOWN_RANKS]:
        if sum_ns >= NAMED_SHARE * whole and ranks:
            break
        sum_ns += int(entry["caused_ns"])
        ranks.append(int(entry["rank"]))
    more = f" and {len(entries) - len(ranks)} more" if len(entries) > len(ranks) else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers(ranks)}{more}"


def _evidence(cause: str, leaf: Leaf | None, entries: Sequence[Entry], seen: Seen) -> Iterator[Evidence]:
    """Yield the worst instance of each culprit, then further gaps of a pausing host."""
    shown = set()
    for entry in entries[:3]:
        where = entry.get("where") or {}
        shown.add((entry["rank"], where.get("start_ns")))
        yield Evidence(
            _told(cause, entry, seen),
            rank=int(entry["rank"]),
            step=where.get("step"),
            track=where.get("track"),
            start_ns=where.get("start_ns"),
            end_ns=where.get("end_ns"),
            name=where.get("name"),
        )
    if cause == "host_pause" and leaf is not None and leaf.bucket == Bucket.HOST_GAP:
        gaps = seen.of_gaps([leaf], [int(entry["rank"]) for entry in entries])
        yield from (gap for gap in gaps if (gap.rank, gap.start_ns) not in shown)


def _told(cause: str, entry: Entry, seen: Seen) -> str:
    """Return in a line what the traces show of a culprit."""
    found, own = entry["evidence"], int(entry["own_ns"])
    words = [f"rank {entry['rank']}: others waited {seen.share(int(entry['caused_ns']))}"]
    steps = len(seen.result["job"]["steps"])
    if own:
        what = {"slow_gpu": "slower than its peers by", "more_work": "more kernel time than its peers:"}
        words.append(f"{what.get(cause, 'its own excess:')} {duration(own / max(steps, 1))} a step")
    if found.get("slower_share"):
        words.append(f"{percent(found['slower_share'])} of its compared kernel time is slower")
    words += [f"{kernel_title(kernel['name'])} {times(kernel['ratio'])}" for kernel in found.get("kernels", ())[:2]]
    words += [
        f"{link['kind'].replace('_', ' ')} in {link['group']} takes {times(link['ratio'])} its peers'"
        for link in found.get("links", ())[:2]
    ]
    return words[0] + (f"; {listed(words[1:])}" if len(words) > 1 else "")


RULES = (late_ranks,)
