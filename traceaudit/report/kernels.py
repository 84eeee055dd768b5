"""Kernels of a result as rows, and how they stand against their roofs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.report.formats import clean, duration, kernel_title, percent, plural
from traceaudit.report.rows import Fact, Result
from traceaudit.report.words import family_title

MOST_POINTS = 60
LEAST_PLAIN = 0.005  # of the time of matrix products, from which those without matrix units are named


@dataclass(frozen=True)
class KernelRow:
    """All runs of one kernel; rates are of the runs whose work is known, and None without any.

    ``roof_share`` is the time that the roof which binds would take over the time taken, ``headroom`` what is above
    that time as a share of the step time.
    """

    name: str
    short_name: str
    family: str
    kind: str
    count: int
    ns: int
    flop_per_s: float | None
    byte_per_s: float | None
    roof_share: float | None
    bound: str
    headroom: float | None


def kernels(result: Result) -> list[KernelRow]:
    """Return the kernels, those with the most time first."""
    return sorted(map(_kernel, result.get("kernels", [])), key=lambda row: -row.ns)


@dataclass(frozen=True)
class Point:
    """A kernel on the roofline: FLOPs a byte and FLOPs a second, over the runs whose work is known."""

    title: str
    family: str
    flop_per_byte: float
    flop_per_s: float
    ns: int
    headroom: float


@dataclass(frozen=True)
class Roofline:
    """Kernels with FLOPs and bytes, and the roofs over them; a peak for each element type that is known."""

    points: list[Point]
    byte_per_s: float | None
    peaks: dict[str, float]


def kernel_facts(result: Result) -> list[Fact]:
    """Return how the kernels as a whole stand against their roofs, and what their names and shapes tell."""
    about = result.get("roofline") or {}
    found = []
    if about.get("coverage") is not None:
        found.append(Fact("FLOPs or bytes known", f"for {percent(about['coverage'])} of the compute time"))
    if shares := _family_shares(about):
        found.append(Fact("Share of the roof", ", ".join(shares)))
    units = about.get("matrix_units") or {}
    whole = sum(value for value in units.values() if value)
    plain = (units.get("not_used_ns") or 0) / max(1, whole)
    if plain >= LEAST_PLAIN:
        found.append(Fact("Without matrix units", f"{percent(plain)} of the time of matrix products"))
    pieces = [
        f"{clean(entry['what'], 40)} ({plural(entry['count'], clean(entry['evidence'], 40) + ' kernel')}, "
        f"{duration(entry['ns'])})"
        for entry in about.get("unfused") or []
    ]
    return [*found, Fact("Ran in pieces", ", ".join(pieces))] if pieces else found


def kernel_line(result: Result) -> str:
    """Return the same in one line; empty where no work of kernels is known."""
    about = result.get("roofline") or {}
    if not about.get("coverage"):
        return ""
    shares = _family_shares(about)
    at = f"; share of the roof: {', '.join(shares[:3])}" if shares else ""
    return f"kernels: work known for {percent(about['coverage'])} of compute{at}"


def roofline(result: Result) -> Roofline | None:
    """Return the kernels that can be placed on the roofline, the longest first; None where there are none."""
    points = [
        Point(kernel_title(row.short_name, 32), row.family, flop / byte, flop, row.ns, row.headroom or 0.0)
        for row in kernels(result)
        if (flop := row.flop_per_s) and (byte := row.byte_per_s)
    ][:MOST_POINTS]
    peak = (result.get("model") or {}).get("peak") or {}
    mixed = {clean(name, 12): entry.get("tflops") for name, entry in (peak.get("mixed") or {}).items()}
    peaks = {clean(peak["dtype"], 12): peak["tflops"], **mixed} if peak.get("tflops") else {}
    bandwidth = (result.get("roofline") or {}).get("hbm_gbps") or peak.get("hbm_gbps")
    roofs = {name: 1e12 * value for name, value in peaks.items() if value}
    return Roofline(points, 1e9 * bandwidth if bandwidth else None, roofs) if points else None


def _kernel(entry: Mapping[str, Any]) -> KernelRow:
    known_ns = entry["ns"] * (entry.get("known_share") or 1.0)
    rates = [1e9 * entry[work] / known_ns if entry.get(work) and known_ns else None for work in ("flops", "bytes")]
    bound = clean(entry.get("bound") or "", 20)
    return KernelRow(
        name=clean(entry["name"], 1000),
        short_name=clean(entry.get("short_name") or entry["name"], 80),
        family=clean(family_title(str(entry.get("family") or ""))),
        kind=clean(entry.get("kind") or ""),
        count=entry["count"],
        ns=entry["ns"],
        flop_per_s=rates[0],
        byte_per_s=rates[1],
        roof_share=entry.get("roofline_share"),
        bound="" if bound == "unknown" else bound,
        headroom=entry.get("headroom"),
    )


def _family_shares(about: Mapping[str, Any]) -> list[str]:
    """Return the families whose roof is known, the longest first, with how much of it they reach."""
    known = [entry for entry in about.get("families") or [] if entry.get("roofline_share") and entry.get("ns")]
    return [
        f"{clean(family_title(str(entry['family'])), 40)} {percent(entry['roofline_share'])}"
        for entry in sorted(known, key=lambda entry: -entry["ns"])
    ]
