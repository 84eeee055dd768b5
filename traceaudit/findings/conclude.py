"""From rules to the list of findings: each nanosecond is claimed once, the largest loss comes first."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from traceaudit.errors import PartitionError
from traceaudit.findings import bubbles, communication, host, inputs, kernels, memory, recompute, stragglers, untold
from traceaudit.findings.finding import LEAST_SHARE, MOST, MOST_EVIDENCE, Evidence, Finding
from traceaudit.findings.seen import LEAF_OF, Seen
from traceaudit.leaves import Leaf

Left: TypeAlias = Mapping[Leaf, int]
Rule: TypeAlias = Callable[[Seen, Left], Iterable[Finding]]

# In the order in which they claim time: whoever names a culprit or a cause before whoever names a whole leaf.
RULES: tuple[Rule, ...] = (
    *stragglers.RULES,
    *recompute.RULES,
    *host.RULES,
    *communication.RULES,
    *bubbles.RULES,
    *kernels.RULES,
    *untold.RULES,
    *memory.RULES,
    *inputs.RULES,
)


@dataclass(frozen=True)
class Concluded:
    """The findings, the largest first, and how many were left out.

    Attributes:
        rows: as in the result.
        small: losses below `LEAST_SHARE`.
        beyond: findings beyond the first `MOST`.
    """

    rows: list[dict[str, Any]]
    small: int
    beyond: int


def conclude(seen: Seen) -> Concluded:
    """Return what the rules find.

    Raises:
        PartitionError: findings claim more of a leaf than there is.
    """
    left = dict.fromkeys(Leaf, 0)
    for row in seen.result["job"]["leaves"]:
        left[LEAF_OF[row["leaf"]]] += int(row["ns"])
    whole = dict(left)
    kept: list[Finding] = []
    small = 0
    for rule in RULES:
        for found in rule(seen, dict(left)):
            capped = _capped(found, left)
            ns = sum(capped.claims.values())
            if found.claims and ns < max(LEAST_SHARE * seen.window_ns, 1):
                small += ns > 0
                continue
            for leaf, ns in capped.claims.items():
                left[leaf] -= ns
            kept.append(capped)
    check(kept, whole)
    kept.sort(key=lambda found: (-sum(found.claims.values()), found.id, found.title))
    return Concluded([as_row(found, seen) for found in kept[:MOST]], small, max(len(kept) - MOST, 0))


def _capped(found: Finding, left: Left) -> Finding:
    """Cap what a finding claims by what others left."""
    claims = {leaf: min(int(ns), left[leaf]) for leaf, ns in found.claims.items()}
    return replace(found, claims={leaf: ns for leaf, ns in claims.items() if ns > 0})


def check(found: Sequence[Finding], whole: Left) -> None:
    """Raise if findings claim more of a leaf than the job has.

    Raises:
        PartitionError: they do, or claim less than nothing.
    """
    claimed: dict[Leaf, int] = {}
    for one in found:
        for leaf, ns in one.claims.items():
            claimed[leaf] = claimed.get(leaf, 0) + ns
            if ns < 0 or claimed[leaf] > whole.get(leaf, 0):
                raise PartitionError(
                    f"finding {one.id}: {leaf.bucket.value}.{leaf.label} is claimed twice. "
                    "This is a fault of traceaudit; please report it with the trace."
                )


def as_row(found: Finding, seen: Seen) -> dict[str, Any]:
    """Return a finding as it stands in the result; what could be won follows attribution rule 6."""
    ns = sum(found.claims.values())
    share = ns / seen.window_ns if seen.window_ns else 0.0
    mfu = seen.result["job"]["mfu"]
    ceiling = mfu / (1 - share) if mfu is not None and ns and share < 1 else None
    leaf = max(found.claims, key=lambda leaf: found.claims[leaf]) if found.claims else None
    files = {row["rank"]: row.get("file") for row in seen.result.get("ranks", ())}
    return {
        "id": found.id,
        "title": found.title,
        "bucket": leaf.bucket.value if leaf is not None else None,
        "leaf": leaf.label if leaf is not None else None,
        "ns": ns,
        "share": share,
        "mfu_points": None if ceiling is None else 100 * (ceiling - mfu),
        "ceiling_mfu": ceiling,
        "confidence": found.confidence.value,
        "summary": found.summary,
        "claims": [
            {"bucket": leaf.bucket.value, "leaf": leaf.label, "ns": ns}
            for leaf, ns in sorted(found.claims.items(), key=lambda claim: (-claim[1], claim[0]))
        ],
        "evidence": [evidence_row(one, files) for one in found.evidence[:MOST_EVIDENCE]],
        "action": found.action,
        "verify": found.verify,
    }


def evidence_row(one: Evidence, files: Mapping[int, str | None]) -> dict[str, Any]:
    """Return evidence as it stands in the result."""
    return {
        "text": one.text,
        "rank": one.rank,
        "step": one.step,
        "file": files.get(one.rank) if one.rank is not None else None,
        "track": one.track,
        "start_ns": one.start_ns,
        "end_ns": one.end_ns,
        "name": one.name,
    }
