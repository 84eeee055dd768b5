"""What reports say in words about waits and clocks: pure functions of single entries of the result."""

from collections.abc import Iterator, Mapping
from typing import Any

from traceaudit.report.formats import clean, duration, kernel_title, listed, percent, plural, times
from traceaudit.report.words import leaf_title

ALSO_SHARE = 0.25  # a second kind of host time is named when it caused this much of the waits
LEAST_DRIFT_PPM = 0.05
MOST_NAMES = 8


def pipeline_facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the shape of a pipeline, its theory and its measurement as pairs of name and text."""
    if "stages" not in found:
        return []
    chunks = found.get("virtual_stages", 1)
    shape = f"{plural(found['stages'], 'stage')}, {found['microbatches']} micro-batches"
    facts = [("Shape", shape + (f", {chunks} virtual stages a rank" if chunks > 1 else ""))]
    facts.append(("Stages known from", clean(found.get("layout_source", ""))))
    if found.get("theory") is not None:
        text = f"{found['theory_formula']} = {percent(found['theory'])} of the ideal time"
        facts.append(("Bubble in theory", f"{text}; with twice the micro-batches {percent(found['theory'] / 2)}"))
    if found.get("measured") is not None:
        facts.append(("Warm-up and drain measured", f"{percent(found['measured'])} of the ideal time"))
    if found.get("stage_work_ns"):
        ratio = times(found["heaviest_ratio"])
        facts.append(("Heaviest stage", f"{found['heaviest_stage']}, {ratio} the mean of the stages' work"))
    if found.get("replay_error") is not None:
        facts.append(("Replay misses the step by", percent(found["replay_error"])))
    return facts


def evidence(culprit: Mapping[str, Any], steps: int) -> str:
    """Return in a line what the trace shows of a culprit's cause over a number of its steps; empty if nothing."""
    found, own = culprit.get("evidence") or {}, culprit.get("own_ns") or 0
    within = f" in {plural(steps, 'step')}" if steps > 1 else ""
    match culprit["cause"]:
        case "slow_gpu":
            share = found.get("slower_share")
            parts = [
                f"{percent(share)} of its kernel time slower" if share else "",
                f"by {duration(own)}{within}" if own else "",
                _kernels(found),
            ]
        case "slow_kernels":
            parts = [f"{duration(own)} slower{within}" if own else "", _kernels(found)]
        case "launch_order":
            parts = ["it computed first what the others computed after their communication began"]
        case "more_work":
            parts = [f"{duration(own)} more kernel time than its peers{within}" if own else ""]
        case "host_pause":
            parts = [_host(found.get("leaf")), f"{duration(own)} more than its peers{within}" if own else ""]
            also = [_host(leaf) for leaf in _further_leaves(found)]
            return ", ".join(part for part in parts if part) + (f"; also {listed(also)}" if also else "")
        case "slow_link":
            return "; ".join(map(link, found.get("links", [])))
        case _:
            parts = []
    return ", ".join(part for part in parts if part)


def link(entry: Mapping[str, Any]) -> str:
    """Return how much slower a group's transfers are than those of its peers.

    >>> link({"group": "mesh_tp [2, 3]", "kind": "all_reduce", "ratio": 2.0})
    "mesh_tp [2, 3]: all reduce 2.00x its peers'"
    """
    return (
        f"{clean(entry['group'], 60)}: {clean(entry['kind'], 40).replace('_', ' ')} {times(entry['ratio'])} its peers'"
    )


def clock(about: Mapping[str, Any], ranks_traced: int) -> str:
    """Return how the clocks of the ranks were made comparable, and how well; empty for a single rank."""
    if not about or ranks_traced < 2:
        return ""
    parts = [clock_method(about), *_clock_figures(about)]
    return "; ".join(parts)


def clock_method(about: Mapping[str, Any]) -> str:
    """Return how the clocks were made comparable.

    >>> clock_method({"method": "collective_ends", "hosts": 2, "evidence": 84})
    'the clocks of 2 hosts are aligned on the ends of 84 collectives'
    """
    hosts = plural(about.get("hosts", 1), "host")
    match about.get("method"):
        case "one_host":
            return "one host: clocks are shared"
        case "collective_ends":
            return f"the clocks of {hosts} are aligned on the ends of {plural(about['evidence'], 'collective')}"
        case "none":
            return (
                f"the clocks of {hosts} could not be aligned: between hosts, waits are told from durations alone, "
                "and each rank's last step ends by itself"
            )
    return clean(str(about.get("method") or "unknown").replace("_", " "))


def not_aligned(about: Mapping[str, Any]) -> str:
    """Return which hosts no evidence ties to the others; empty if none."""
    hosts = [clean(name, 60) for name in about.get("not_aligned", [])]
    if not hosts or about.get("method") == "none":
        return ""
    more = [plural(len(hosts) - MOST_NAMES, "other")] if len(hosts) > MOST_NAMES else []
    return f"clocks not aligned with the first host's: {listed(hosts[:MOST_NAMES] + more)}"


def _clock_figures(about: Mapping[str, Any]) -> Iterator[str]:
    if about.get("evidence"):
        usual, worst = about["residual_ns"], about["residual_p95_ns"]
        apart = f"within {duration(usual)} (median; p95 {duration(worst)})" if worst else "together"
        broken = about.get("violations") or "none"
        early = "before its last participant arrived"
        yield f"collectives end {apart}, {broken} {early}"
    if about.get("clock_free_disagreement") is not None:
        yield f"waits by clocks and by durations alone differ by {duration(about['clock_free_disagreement'])} (median)"
    drift = about.get("max_drift_ppm") or 0.0
    if drift >= LEAST_DRIFT_PPM:
        yield f"clocks drift by up to {drift:.1f} ppm"


def _kernels(found: Mapping[str, Any]) -> str:
    kernels = found.get("kernels", [])
    return f"most in {kernel_title(kernels[0]['name'])} ({times(kernels[0]['ratio'])})" if kernels else ""


def _host(leaf: object) -> str:
    return clean(leaf_title("host_gap", str(leaf)), 40) if leaf else ""


def _further_leaves(found: Mapping[str, Any]) -> list[str]:
    by_leaf = found.get("caused_ns_by_leaf", {})
    least = ALSO_SHARE * sum(by_leaf.values())
    return [leaf for leaf, ns in by_leaf.items() if leaf != found.get("leaf") and ns > least]
