"""What the allocator's peaks and the byte inventory say: notes that claim no time."""

from collections.abc import Iterator, Mapping

from traceaudit.findings.finding import Confidence, Evidence, Finding
from traceaudit.findings.seen import Seen
from traceaudit.inventory import fragmentation
from traceaudit.leaves import Leaf


def reserved_unused(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield memory that is reserved and not allocated at the peak."""
    del left
    facts = seen.facts("allocator")
    for row in fragmentation(facts.get("allocated_peak_bytes"), facts.get("reserved_peak_bytes")):
        yield Finding(
            id=row["id"],
            title=row["title"],
            summary=f"{row['evidence']}. Memory that is held and not used makes batches small.",
            action=row["action"],
            verify="torch.cuda.memory_reserved() comes close to memory_allocated() at the peak.",
            confidence=Confidence.MEASURED,
            evidence=(Evidence(row["evidence"]),),
        )


RULES = (reserved_unused,)
