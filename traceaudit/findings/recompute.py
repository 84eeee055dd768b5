"""Work that was done twice to save memory, and whether the memory needs it."""

from collections.abc import Iterator, Mapping
from typing import Any

from traceaudit.findings.finding import Confidence, Evidence, Finding
from traceaudit.findings.seen import Seen
from traceaudit.leaves import Leaf
from traceaudit.report.formats import clean, listed, percent, quantity

ROOM = 0.15  # of the GPU's memory unused at the peak, from which less recompute is worth a try


def recomputed(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield what activation checkpointing costs."""
    found = seen.result.get("recompute") or {}
    setting = found.get("setting") or "some"
    title = {"full": "full recompute", "selective": "selective recompute"}.get(setting, "recompute")
    room, confidence = _memory(seen)
    again = found.get("forward_share")
    summary = "The backward runs parts of the forward again to save memory; MFU does not count it."
    summary += f" {percent(again)} of the forward's matrix and attention kernels run twice." if again else ""
    yield Finding(
        id=f"recompute.{setting}",
        title=f"{title} that memory may not need" if room else title,
        summary=f"{summary} {room}".strip(),
        action=(
            "Recompute less: only attention's scores (FlashAttention does it inside its kernel), or only every second "
            "block; or shard more (ZeRO, sequence parallel) instead. The setting belongs to one sequence length and "
            "one batch: look at it again whenever they change."
        ),
        verify="A tenth of the memory stays free, HFU comes down to MFU, and tokens a second rise.",
        confidence=confidence,
        claims={leaf: left[leaf] for leaf in (Leaf.KERNELS, Leaf.COMMUNICATION)},
        evidence=_evidence(found, seen),
    )


def _memory(seen: Seen) -> tuple[str, Confidence]:
    """Return what is known of the memory that recompute saves, and how sure it is that it is not needed."""
    inventory = seen.result.get("inventory") or {}
    for row in inventory.get("findings", ()):
        if row["id"] == "memory.recompute-not-needed":
            return f"By formula {row['title']}: {row['evidence']}.", Confidence.ESTIMATED
    memory = seen.result.get("memory") or {}
    whole, used = memory.get("gpu_bytes"), seen.facts("allocator").get("allocated_peak_bytes")
    if whole and used and 1 - used / whole >= ROOM:
        free = quantity(whole - used, "B")
        return f"At the peak {free} of {quantity(whole, 'B')} were not allocated.", Confidence.ESTIMATED
    return "", Confidence.MEASURED


def _evidence(found: Mapping[str, Any], seen: Seen) -> tuple[Evidence, ...]:
    modules = [clean(name, 60) for name in found.get("modules", ())]
    told = [
        f"{found.get('regions', 0):,} regions in the traced steps",
        f"modules {listed(modules[:4])}" if modules else "",
        f"recognised by rule {found['rule']}" if found.get("rule") else "",
    ]
    words = ", ".join(part for part in told if part)
    return (Evidence(words), *seen.of_ledger(Leaf.KERNELS, "of recomputed kernels"))


def suspected(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield a note on recompute that is only suspected: its time is in the compute rows, so it claims none."""
    del left
    found = (seen.result.get("recompute") or {}).get("suspected")
    if found is None or seen.training is False or found["share"] < 0.01:
        return
    yield Finding(
        id="recompute.suspected",
        title="there may be recompute that the traces cannot prove",
        summary=f"About {percent(found['share'])} of the time: {found['reason']}. It stands in the compute rows.",
        action="Look at the activation checkpointing and the memory budget of the compiler "
        "(torch._functorch.config.activation_memory_budget).",
        verify="Record with record_shapes=True in eager mode: sequence numbers then tell.",
        confidence=Confidence.SUSPECTED,
        evidence=(Evidence(f"{found['kernels']:,} kernels: {listed([str(hint) for hint in found['hints']])}"),),
    )


RULES = (recomputed, suspected)
