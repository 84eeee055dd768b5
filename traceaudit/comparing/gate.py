"""What fails a build: losses that grew by more than they may, and by more than noise."""

from collections.abc import Mapping
from typing import Any

from traceaudit.comparing.compare import WORSE
from traceaudit.comparing.measured import BUCKETS, STEP
from traceaudit.errors import InputError

MFU = "mfu"


def regressions(data: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """Return what got worse by more than its limit, in words; see `traceaudit.comparing.difference.Diff.regressions`.

    Raises:
        InputError: a limit is for something that is no bucket.
    """
    rows = {row["name"]: row for row in data["rows"] if row["level"] == "bucket"}
    found = []
    for name, most in limits.items():
        if name not in (MFU, *BUCKETS):
            raise InputError(f"{name!r} is no bucket; choose from {', '.join((MFU, *BUCKETS))}.")
        text = _whole(data, most) if name == MFU else _one(data, rows.get(name), most)
        if text is not None:
            found.append(text)
    return found


def _whole(data: Mapping[str, Any], most: float) -> str | None:
    """Return how MFU fell, or how the step grew where MFU is not known."""
    if not data["changed"]:
        return None
    points = data["mfu_points"]
    if points is not None:
        return f"MFU fell by {-points:.2f} points, more than {most:g}" if -points > most else None
    step = data["step"]
    share = 100 * step["change_ns"] / step["before_ns"]
    grew = step["verdict"] == WORSE and share > most
    return f"the {STEP} takes {share:.2f} % longer, more than {most:g} %" if grew else None


def _one(data: Mapping[str, Any], row: Mapping[str, Any] | None, most: float) -> str | None:
    if row is None or row["verdict"] != WORSE:
        return None
    if row["mfu_points"] is not None:
        cost, unit = -row["mfu_points"], "MFU points"
    else:
        cost, unit = 100 * row["change_ns"] / data["step"]["before_ns"], "% of the step"
    return f"{row['name']} costs {cost:.2f} {unit} more, above {most:g}" if cost > most else None
