"""Transfers that no compute hid, by dimension of the process group, and what kept them from being hidden."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.findings.finding import Confidence, Finding
from traceaudit.findings.seen import Seen
from traceaudit.leaves import Leaf
from traceaudit.report.formats import bandwidth, clean, percent, plural, quantity

SMALL_BYTES = 1 << 20  # a message below this is bound by latency, not by bandwidth
SLOW_GBPS = 10.0  # of large messages; any interconnect of GPUs that train together carries more
NOT_BLOCKING = 0.1  # of exposed time, from which it is said that the host was late as well
HIDDEN_LITTLE = 0.05  # of a dimension's communication under compute, below which nothing of it overlaps
GATHERED = 0.25  # of a dimension's transfers in all-gathers, from which its parameters are sharded
MANY = 8  # collectives a step and rank: buckets that could overlap
DATA = (Leaf.DP, Leaf.FSDP)  # whose communication can run beneath the compute of other layers


@dataclass(frozen=True)
class Dimension:
    """What to say of exposed communication of a dimension."""

    id: str
    title: str
    action: str


VERIFY = "The kernels of this group run beneath compute kernels in the viewer, and their exposed time falls."
DIMENSIONS: Mapping[Leaf, Dimension] = {
    Leaf.DP: Dimension(
        "exposed-comm.dp-overlap",
        "gradients are reduced where no compute hides it",
        "Reduce bucket by bucket beneath the backward: DDP does it by itself (no find_unused_parameters, "
        "static_graph=True); Megatron needs --overlap-grad-reduce. Set bucket_cap_mb so that a step has tens of "
        "buckets; with gradient accumulation reduce only in the last micro-batch (no_sync).",
    ),
    Leaf.FSDP: Dimension(
        "exposed-comm.fsdp-prefetch",
        "sharded parameters or gradients travel where no compute hides it",
        "Prefetch the next block's all-gather (FSDP1: backward_prefetch=BACKWARD_PRE, forward_prefetch=True, "
        "limit_all_gathers; FSDP2: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch), wrap each "
        "block so that a gather has a block's compute to hide beneath, keep parameters after the forward where memory "
        "allows (reshard_after_forward=False), or shard within a host only (HSDP). Megatron: --overlap-param-gather.",
    ),
    Leaf.TP: Dimension(
        "exposed-comm.tp",
        "tensor-parallel collectives are exposed",
        "Use sequence parallel with overlapped matmuls (async TP; Megatron --tp-comm-overlap), keep the group inside "
        "NVLink, or lower the tensor-parallel degree and shard the data-parallel dimension instead.",
    ),
    Leaf.CP: Dimension(
        "exposed-comm.cp",
        "context-parallel exchange is exposed",
        "Let the ring's next exchange run beneath the attention of the present block; keep the group inside NVLink; "
        "lower the degree, or exchange heads (all-to-all) where they suffice.",
    ),
    Leaf.EP: Dimension(
        "exposed-comm.ep",
        "tokens wait on their way to the experts",
        "Overlap dispatch and combine with the other half of the batch or with shared experts, use kernels made for it "
        "(DeepEP), limit the hosts a token may go to, and balance the experts.",
    ),
    Leaf.PP: Dimension(
        "exposed-comm.pp-transfer",
        "activations travel between pipeline stages while nothing computes",
        "Post receives early and send on a stream of their own (Megatron --overlap-p2p-communication), put "
        "neighbouring stages on one switch, and send less (sequence parallel, bf16).",
    ),
    Leaf.OTHER_COMM: Dimension(
        "exposed-comm.other",
        "communication is exposed",
        "Find out in the viewer what the next kernel needs of it; start it earlier on a stream of its own, and put "
        "independent compute beneath it.",
    ),
    Leaf.OFFLOAD_COPY: Dimension(
        "exposed-comm.offload",
        "activations are copied to and from host memory while nothing computes",
        "Prefetch one layer ahead into pinned memory on a stream of its own, offload fewer layers, or recompute the "
        "cheap ones instead.",
    ),
    Leaf.TRANSFER_OR_WAIT: Dimension(
        "exposed-comm.partners-not-traced",
        "communication with ranks that have no trace is exposed",
        "Trace all ranks of these groups: transfer and waiting for a late rank cannot be told apart without them. "
        "Then overlap what is transfer.",
    ),
}


@dataclass(frozen=True)
class _Traffic:
    """Communication of a dimension."""

    rows: tuple[Mapping[str, Any], ...]  # of the result
    count: int
    hidden: float | None  # share of its running time under compute


def exposed(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield small messages, then what else is exposed, by dimension."""
    for leaf, about in DIMENSIONS.items():
        traffic = _traffic(leaf, seen)
        small = _small(leaf, traffic, left, seen)
        if small:
            yield _messages(leaf, about, traffic, small, seen)
        yield _exposed(leaf, about, traffic, left[leaf] - small, seen)


def _traffic(leaf: Leaf, seen: Seen) -> _Traffic:
    rows = [row for row in seen.result.get("collectives", ()) if row["exposed_ns"]]
    if leaf == Leaf.TRANSFER_OR_WAIT:
        rows = [row for row in rows if row.get("transfer_estimate_ns") is not None]
        return _Traffic(tuple(rows), sum(row["count"] for row in rows), None)
    rows = [row for row in rows if row["dim"] == leaf.label]
    carried = seen.witness.carried
    own = carried[carried["leaf"] == leaf]
    ran = int(own["ns"].sum()) if len(own) else 0
    alone = sum(int(row["exposed_ns"]) for row in rows)
    return _Traffic(
        tuple(rows),
        int(own["count"].sum()) if len(own) else 0,
        max(1 - alone / ran, 0.0) if ran else None,
    )


def _small(leaf: Leaf, traffic: _Traffic, left: Mapping[Leaf, int], seen: Seen) -> int:
    """Return the exposed transfer of data-parallel collectives whose messages are small."""
    if leaf not in DATA or seen.training is False:
        return 0
    small = [row for row in traffic.rows if 0 < row["bytes"] < SMALL_BYTES * row["count"]]
    return min(sum(int(row["transfer_ns"]) for row in small), left[leaf])


def _messages(leaf: Leaf, about: Dimension, traffic: _Traffic, ns: int, seen: Seen) -> Finding:
    small = [row for row in traffic.rows if 0 < row["bytes"] < SMALL_BYTES * row["count"]]
    count, size = sum(row["count"] for row in small), sum(row["bytes"] for row in small)
    return Finding(
        id=f"{about.id.partition('.')[0]}.small-messages",
        title="many small messages instead of few large ones",
        summary=f"{plural(count, 'collective')} of {quantity(size / count, 'B')} on average: at this size latency "
        "takes the time, not bandwidth.",
        action="Make buckets larger (DDP: bucket_cap_mb; FSDP: wrap larger units; otherwise "
        "torch.distributed._coalescing_manager or flat buffers).",
        verify="Fewer collectives a step with messages of tens of megabytes.",
        confidence=Confidence.ESTIMATED,
        claims={leaf: ns},
        evidence=seen.of_communications([leaf], {row["kind"] for row in small}),
    )


def _exposed(leaf: Leaf, about: Dimension, traffic: _Traffic, ns: int, seen: Seen) -> Finding:
    gathers = sum(row["transfer_ns"] for row in traffic.rows if row["kind"] == "all_gather")
    if leaf in DATA and seen.training is False:
        about = DIMENSIONS[Leaf.OTHER_COMM]
    elif leaf == Leaf.DP and gathers > GATHERED * sum(row["transfer_ns"] for row in traffic.rows):
        about = DIMENSIONS[Leaf.FSDP]
    identity, title, action = about.id, about.title, about.action
    words, confidence = _facts(leaf, traffic, seen), Confidence.MEASURED
    kinds = len({row["kind"] for row in traffic.rows})
    per_step = traffic.count / seen.step_count / max(kinds, 1)
    if leaf == Leaf.TRANSFER_OR_WAIT:
        confidence = Confidence.SUSPECTED
    elif leaf in DATA and seen.training is not False and traffic.hidden is not None and traffic.hidden < HIDDEN_LITTLE:
        words.append("None of it runs beneath compute.")
        if per_step >= MANY:
            identity = "exposed-comm.serialised"
            title = "communication never runs beside compute, although it comes in many pieces"
            words.append("What serialises it is not recorded: the hardware queue, or an event between the streams.")
            action = (
                "Check that communication has a stream of its own and that nothing synchronises after each piece; set "
                "CUDA_DEVICE_MAX_CONNECTIONS to 8 or leave it unset, unless tensor parallelism needs 1; leave the "
                "communication kernels SMs to start on. " + action
            )
            confidence = Confidence.SUSPECTED
        elif per_step < 2:
            words.append("There is one a step of each kind, so that there is no compute of other layers to hide it.")
            action = "Divide it by blocks or buckets first. " + action
    if _first_use(leaf, traffic, ns, seen):
        words.append(
            "One instance takes most of it: the first use of a communicator sets up its connections. It may be the "
            "warm-up: record later."
        )
        confidence = Confidence.SUSPECTED
    if seen.training is False:
        action = (
            "Put independent compute beneath it, fuse it with the kernel before or after, or use one-shot kernels for "
            "small messages; split the model over fewer GPUs where it fits."
        )
    return Finding(
        id=identity,
        title=title,
        summary=" ".join(words),
        action=action,
        verify=VERIFY if leaf != Leaf.TRANSFER_OR_WAIT else "The report divides it into transfer and waiting.",
        confidence=confidence,
        claims={leaf: ns},
        evidence=seen.of_communications([leaf]) or seen.of_ledger(leaf, "exposed"),
    )


def _first_use(leaf: Leaf, traffic: _Traffic, ns: int, seen: Seen) -> bool:
    """Tell whether the longest of many communications makes up most of their time, where no warm-up was left out."""
    table, ranks = seen.witness.exposed, seen.result["job"]["ranks_traced"]
    own = table[table["leaf"] == leaf]
    many = traffic.count >= MANY * ranks and len(seen.result["job"]["steps"]) == 1
    return many and len(own) > 0 and int(own["ns"].max()) * ranks >= ns / 2


def _facts(leaf: Leaf, traffic: _Traffic, seen: Seen) -> list[str]:
    """Return sentences on what ran: the largest groups, message sizes, bus bandwidth, and how much was hidden."""
    words = []
    for row in sorted(traffic.rows, key=lambda row: -row["transfer_ns"])[:2]:
        kind = row["kind"].replace("_", " ")
        size = f" of {quantity(row['bytes'] / row['count'], 'B')}" if row["bytes"] > 0 and row["count"] else ""
        rate = f", {bandwidth(row['busbw_gbps'])} bus bandwidth" if row.get("busbw_gbps") else ""
        words.append(f"{clean(row['group'], 60)}: {row['count']:,} {kind}{size}{rate}.")
        words += _slow_fabric(row)
    idle_else = sum(int(row.get("not_blocking_ns") or 0) for row in traffic.rows)
    alone = sum(int(row["exposed_ns"]) for row in traffic.rows)
    if idle_else > NOT_BLOCKING * alone:
        words.append(
            f"Exposed, not blocking: for {percent(idle_else / alone)} of the time that these groups take alone, waits "
            "included, the next kernel was not launched yet; without the communication it would be a host gap."
        )
    if leaf == Leaf.TRANSFER_OR_WAIT:
        least = sum(int(row["transfer_estimate_ns"] or 0) for row in traffic.rows)
        words.append(
            f"If each took as long as the shortest of its kind and size, transfer would be {seen.share(least)}."
        )
    elif traffic.hidden is not None and traffic.hidden >= HIDDEN_LITTLE:
        words.append(f"{percent(traffic.hidden)} of this communication runs beneath compute.")
    return words


def _slow_fabric(row: Mapping[str, Any]) -> list[str]:
    """Return a sentence if large messages travel slowly, by the bus bandwidth or by the shortest of each size."""
    least = row.get("transfer_estimate_ns")
    rate = row.get("busbw_gbps") or (row["bytes"] / least if least else None)
    if rate is None or rate >= SLOW_GBPS or row["bytes"] < SMALL_BYTES * row["count"] or row["kind"] == "send_recv":
        return []
    return [f"{bandwidth(rate)} is slow for messages of this size: test the fabric alone (nccl-tests or rccl-tests)."]


RULES = (exposed,)
