"""How MFU was got: every factor with its source, other conventions, and MFU by step."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.report.formats import clean, percent, quantity
from traceaudit.report.rows import Fact, Result


@dataclass(frozen=True)
class Convention:
    """What MFU would read if the model FLOPs were counted another way."""

    name: str
    formula: str
    flops: float
    mfu: float | None
    is_used: bool


@dataclass(frozen=True)
class StepRow:
    """MFU of one step over all its ranks, and the mean length of the step."""

    step: int
    mfu: float | None
    hfu: float | None
    step_ns: float


def conventions(result: Result) -> list[Convention]:
    """Return the conventions under which the declared FLOPs were counted."""
    return [
        Convention(
            clean(entry["name"], 40),
            clean(entry.get("formula") or "", 120),
            entry["flops_per_step"],
            entry.get("mfu"),
            bool(entry.get("used")),
        )
        for entry in (result.get("model") or {}).get("conventions") or []
    ]


def by_step(result: Result) -> list[StepRow]:
    """Return the steps, where there are several."""
    found = (result.get("model") or {}).get("by_step") or []
    counts: dict[int, int] = defaultdict(int)
    for entry in result.get("ranks", []):
        for step in entry.get("steps", []):
            counts[step["step"]] += 1
    rows = [
        StepRow(
            entry["step"],
            entry.get("mfu"),
            entry.get("hfu"),
            entry["window_ns"] / (counts[entry["step"]] or max(1, result["job"]["ranks_traced"])),
        )
        for entry in found
    ]
    return rows if len(rows) > 1 else []


def model(result: Result) -> list[Fact]:
    """Return how MFU was got: every factor and its source, or why there is none."""
    found, about = [], result.get("model", {})
    if about.get("reason"):
        found.append(Fact("compute is not split", clean(about["reason"])))
    if peak := about.get("peak"):
        value = f"{peak['tflops']:,g} TFLOP/s, {clean(peak['dtype'])}"
        found.append(Fact("peak", value, _joined(peak.get("gpu"), peak.get("source"))))
    numerator = about.get("numerator") or {}
    if numerator.get("flops_per_step"):
        value, formula = quantity(numerator["flops_per_step"], "FLOP"), numerator.get("formula")
        found.append(Fact("model FLOPs a step", _joined(value, formula, separator=" = "), _joined(numerator["source"])))
        attention = "included" if numerator.get("attention_flops") else "not included"
        found.append(Fact("attention FLOPs", attention))
    found.extend(
        Fact(clean(factor["name"]), _number(factor["value"]), _joined(factor.get("source")))
        for factor in numerator.get("factors", [])
    )
    if (agreement := about.get("reconciliation")) and agreement.get("difference") is not None:
        both = f"{quantity(agreement['declared'], 'FLOP')} and {quantity(agreement['counted'], 'FLOP')} a step"
        of = f"{agreement['ranks']:,} of {agreement['world_size']:,} ranks"
        found.append(Fact("declared and counted", f"{both}: {100 * agreement['difference']:+.1f} %", f"on {of}"))
    if about.get("mfu_median") is not None:
        found.append(Fact("MFU of the median step", percent(about["mfu_median"])))
    if result["job"].get("mixed_peak"):
        peaks = _mixed((about.get("peak") or {}).get("mixed") or {})
        found.append(Fact("MFU of mixed peak", "each kernel at the peak of its element type", peaks))
    return found


def _mixed(peaks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the peak of each element type of a mixed run, and the share that ran in it."""
    known = [(clean(name, 20), peak) for name, peak in peaks.items() if peak.get("tflops") and peak.get("share")]
    return ", ".join(f"{name} {peak['tflops']:,g} TFLOP/s ({percent(peak['share'])})" for name, peak in known)


def _joined(*parts: object, separator: str = "; ") -> str:
    return separator.join(clean(part) for part in parts if part)


def _number(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,g}"
    return clean(value)
