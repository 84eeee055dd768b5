"""What to do first: findings, the ten checks, the expert's walk-through, and what to record next.

The rules work on the result and a few small tables (`traceaudit.findings.seen.Witness`); each finding claims
nanoseconds of leaves, and no nanosecond is claimed twice.
"""

from typing import Any

from traceaudit.findings.checklist import checklist
from traceaudit.findings.conclude import conclude
from traceaudit.findings.finding import LEAST_SHARE
from traceaudit.findings.record_next import record_next
from traceaudit.findings.seen import Seen, Witness, witness
from traceaudit.findings.walk_through import walk_through

__all__ = ["Witness", "conclusions", "witness"]


def conclusions(result: dict[str, Any], tables: Witness) -> dict[str, Any]:
    """Return the keys that a result gets last: findings, checklist, walk-through and what to record next.

    Raises:
        PartitionError: findings claim the same nanosecond twice.
    """
    seen = Seen(result, tables)
    concluded = conclude(seen)
    checks = checklist(seen, concluded.rows)
    walk = walk_through(seen, concluded.rows)
    unknown = sum(row["status"] == "unknown" for row in (*checks, *walk))
    return {
        "findings": concluded.rows,
        "findings_left_out": {
            "small": concluded.small,
            "least_share": LEAST_SHARE,
            "beyond_limit": concluded.beyond,
        },
        "checklist": checks,
        "walk_through": walk,
        "record_next": record_next(seen, unknown),
    }
