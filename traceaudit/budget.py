"""The failure budget of a run: how often it fails, how often to save, and what both cost of the calendar.

Formulas:

- Young 1974 (doi 10.1145/361147.361115): the best interval is sqrt(2 C M), for a pause C and a mean time between
  failures M.
- Daly 2006 (doi 10.1016/j.future.2004.11.016): a higher-order interval, and the exact expected wall time under
  exponential failures, M exp(R/M) (exp((T + C)/M) - 1) for T of useful work, with restart time R.
- Kokolis et al. 2024 (arXiv 2410.21680): the effective training time ratio, (1 - (R + T/2)/M) / (1 + C/T).

Losses are named by their definition: the same interval loses 7.2 to 7.8 % by one or another (C = 30 s, M = 3 h).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from traceaudit import __version__
from traceaudit.errors import InputError, MissingFigureError

SCHEMA_VERSION = 1
DAY, HOUR = 86_400.0, 3_600.0
BYTES_PER_PARAM = 14.0  # saved: BF16 weights 2, FP32 weights 4, two moments of Adam 8; no gradients
CURVE_POINTS = 81
DEFINITIONS = {
    "first_order": "first order, pause/interval + interval/(2 MTBF); no restart",
    "over_useful": "Daly exact, extra wall time over useful work",
    "of_wall": "Daly exact, share of the wall time",
    "ettr": "1 - ETTR (Meta), share of the wall time",
}


@dataclass(frozen=True)
class Reliability:
    """How often a cluster fails; times in seconds.

    Attributes:
        mtbf_s: mean time between failures of the whole job.
        gpus: of the job.
        gpus_per_node: of a host.
        source: where the figure comes from.
    """

    mtbf_s: float
    gpus: int | None = None
    gpus_per_node: int = 8
    source: str = "declared"

    @property
    def per_gpu_s(self) -> float | None:
        """Mean time between failures that one GPU causes."""
        return self.mtbf_s * self.gpus if self.gpus else None

    @property
    def per_node_s(self) -> float | None:
        """Mean time between failures of one host."""
        return self.mtbf_s * self.gpus / self.gpus_per_node if self.gpus else None


@dataclass(frozen=True)
class Saving:
    """What saving and restarting take, in seconds.

    Attributes:
        pause_s: training stands still for this long at each checkpoint.
        restart_s: from a failure until training goes on at the last checkpoint.
        write_s: from the pause's end until the checkpoint can be used; a failure before falls back one further. 0 for
            synchronous saving, whose pause includes the writing.
    """

    pause_s: float
    restart_s: float = 0.0
    write_s: float = 0.0


def observed(failures: float, days: float, gpus: int | None = None, gpus_per_node: int = 8) -> Reliability:
    """Return the reliability from failures counted over a period of the whole job.

    >>> seen = observed(419, 54, 16_384)  # Llama 3, arXiv 2407.21783
    >>> f"{seen.mtbf_s / 3600:.3f} h, {seen.per_gpu_s / 3600:,.0f} h"
    '3.093 h, 50,677 h'
    """
    _positive(failures=failures, days=days)
    return Reliability(days * DAY / failures, gpus, gpus_per_node, f"{failures:g} failures in {days:g} days")


def young_s(pause_s: float, mtbf_s: float) -> float:
    """Return Young's interval of useful work between checkpoints.

    >>> f"{young_s(30, 10_800):.2f}"
    '804.98'
    """
    return math.sqrt(2 * pause_s * mtbf_s)


def daly_s(pause_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order interval: equation 37, or the MTBF where pauses are half of it and more.

    >>> f"{daly_s(30, 10_800):.1f}"
    '785.1'
    """
    if pause_s >= 2 * mtbf_s:
        return mtbf_s
    half = pause_s / (2 * mtbf_s)
    return young_s(pause_s, mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - pause_s


def best_s(pause_s: float, mtbf_s: float) -> float:
    """Return the interval that minimises the exact wall time: the root of 1 - T/M = exp(-(T + C)/M), by bisection."""
    low, high = 0.0, mtbf_s
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - middle / mtbf_s > math.exp(-(middle + pause_s) / mtbf_s) else (low, middle)
    return (low + high) / 2


def wall_over_useful(interval_s: float, saving: Saving, mtbf_s: float) -> float:
    """Return the expected wall time of a second of useful work (Daly, equation 20); infinite where nothing gets done.

    A checkpoint that is still being written counts as not taken: each failure loses the writing time more.
    """
    attempt = (interval_s + saving.pause_s) / mtbf_s
    lost = (saving.restart_s + saving.write_s) / mtbf_s
    if attempt + lost > 700:  # beyond the range of exp
        return math.inf
    return mtbf_s * math.exp(lost) * math.expm1(attempt) / interval_s


def losses(interval_s: float, saving: Saving, mtbf_s: float) -> dict[str, float]:
    """Return the lost share at an interval under each of `DEFINITIONS`."""
    exact = wall_over_useful(interval_s, saving, mtbf_s)
    rework = (saving.restart_s + saving.write_s + interval_s / 2) / mtbf_s
    return {
        "first_order": saving.pause_s / interval_s + interval_s / (2 * mtbf_s),
        "over_useful": exact - 1,
        "of_wall": 1 - 1 / exact,
        "ettr": 1 - max(1 - rework, 0.0) / (1 + saving.pause_s / interval_s),
    }


def budget(
    reliability: Reliability,
    saving: Saving,
    *,
    interval_s: float | None = None,
    params: float | None = None,
    bytes_per_param: float = BYTES_PER_PARAM,
    storage_gb_per_s: float | None = None,
    copy_pause_s: float | None = None,
    mfu: float | None = None,
    paused_share: float = 0.0,
    sources: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the failure budget as plain data; times in seconds, losses as shares.

    Args:
        reliability: how often the job fails.
        saving: what saving and restarting take.
        interval_s: useful work between checkpoints as it is now.
        params: of the model, for the size of a checkpoint.
        bytes_per_param: of a checkpoint.
        storage_gb_per_s: that all writers reach together.
        copy_pause_s: pause that asynchronous saving would leave; a tenth of the pause where not known.
        mfu: of the steps.
        paused_share: share of those steps that is a checkpoint pause already; it is taken out of MFU, not lost twice.
        sources: where figures come from, by name.

    Raises:
        InputError: a figure is not positive.
    """
    mtbf = reliability.mtbf_s
    _positive(mtbf=mtbf, pause=saving.pause_s)
    if saving.restart_s < 0 or saving.write_s < 0 or not 0 <= paused_share < 1:
        raise InputError("restart and write time must not be negative, and the paused share must be below 1.")
    if interval_s is not None:
        _positive(interval=interval_s)
    optimum = daly_s(saving.pause_s, mtbf)
    size = params * bytes_per_param if params else None
    used = interval_s or optimum
    return {
        "schema_version": SCHEMA_VERSION,
        "traceaudit_version": __version__,
        "kind": "budget",
        "reliability": {
            "source": reliability.source,
            "gpus": reliability.gpus,
            "gpus_per_node": reliability.gpus_per_node,
            "mtbf_s": mtbf,
            "per_node_s": reliability.per_node_s,
            "per_gpu_s": reliability.per_gpu_s,
            "per_1000_node_days": 1_000 * DAY / reliability.per_node_s if reliability.per_node_s else None,
        },
        "saving": {"pause_s": saving.pause_s, "restart_s": saving.restart_s, "write_s": saving.write_s},
        "checkpoint": {
            "bytes": size,
            "bytes_per_param": bytes_per_param,
            "storage_gb_per_s": storage_gb_per_s,
            "write_s": size / (storage_gb_per_s * 1e9) if size and storage_gb_per_s else None,
        },
        "intervals": {
            "young_s": young_s(saving.pause_s, mtbf),
            "daly_s": optimum,
            "exact_s": best_s(saving.pause_s, mtbf),
        },
        "definitions": DEFINITIONS,
        "at_optimum": _at_optimum(saving, mtbf),
        "now": losses(interval_s, saving, mtbf) if interval_s else None,
        "interval_now_s": interval_s,
        "curve": _curve(saving, mtbf, optimum),
        "what_if": _what_if(used, saving, mtbf, copy_pause_s)[interval_s is None :],
        "calendar": _calendar(used, saving, mtbf, mfu, paused_share),
        "sources": dict(sources or {}),
        "checklist": [_checklist(used, optimum, saving, mtbf, is_set=interval_s is not None)],
    }


def _at_optimum(saving: Saving, mtbf: float) -> dict[str, dict[str, float]]:
    """Return the loss by each definition at the interval that is best by it: Young's, or Daly's for the exact ones."""
    young, daly = young_s(saving.pause_s, mtbf), daly_s(saving.pause_s, mtbf)
    intervals = {"first_order": young, "over_useful": daly, "of_wall": daly, "ettr": young}
    return {
        name: {"interval_s": interval, "lost": losses(interval, saving, mtbf)[name]}
        for name, interval in intervals.items()
    }


def _positive(**figures: float) -> None:
    for name, value in figures.items():
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} is {value:g}; a positive number is needed.")


def _curve(saving: Saving, mtbf: float, optimum: float) -> list[dict[str, float]]:
    """Return the loss from a sixteenth of the optimum to sixteen times it."""
    span = [optimum * 2 ** (8 * (point / (CURVE_POINTS - 1)) - 4) for point in range(CURVE_POINTS)]
    return [{"interval_s": interval, "of_wall": losses(interval, saving, mtbf)["of_wall"]} for interval in span]


def _what_if(used: float, saving: Saving, mtbf: float, copy_pause: float | None) -> list[dict[str, Any]]:
    """Return what changes would win of the wall time, each at its own best interval."""
    now = losses(used, saving, mtbf)["of_wall"]
    copy = copy_pause if copy_pause is not None else saving.pause_s / 10
    assumed = "" if copy_pause is not None else ", assumed to be a tenth"
    best = daly_s(saving.pause_s, mtbf)
    changes = [
        ("interval", f"save every {best:,.0f} s", saving),
        ("half_pause", "halve the pause", replace(saving, pause_s=saving.pause_s / 2)),
    ]
    if not saving.write_s:
        words = f"save asynchronously: pause {copy:.3g} s{assumed}, written behind it"
        changes.append(("asynchronous", words, replace(saving, pause_s=copy, write_s=saving.pause_s)))
    if saving.restart_s:
        changes.append(("half_restart", "halve the restart", replace(saving, restart_s=saving.restart_s / 2)))
    rows = []
    for name, title, changed in changes:
        interval = max(daly_s(changed.pause_s, mtbf), changed.write_s)  # one checkpoint is written at a time
        lost = losses(interval, changed, mtbf)["of_wall"]
        rows.append({"name": name, "title": title, "interval_s": interval, "of_wall": lost, "wins": now - lost})
    return rows


def _calendar(used: float, saving: Saving, mtbf: float, mfu: float | None, paused: float) -> dict[str, Any]:
    """Return where the wall time goes, and MFU of the calendar: the row below the waterfall's last."""
    exact = wall_over_useful(used, saving, mtbf)
    productive = 1 / exact
    pauses = saving.pause_s / used / exact
    steps = None if mfu is None else mfu / (1 - paused)
    return {
        "interval_s": used,
        "productive": productive,
        "checkpoint_pauses": pauses,
        "failures": 1 - productive - pauses,
        "mfu": mfu,
        "mfu_without_pauses": steps,
        "goodput": None if steps is None else steps * productive,
        "waterfall": []
        if steps is None
        else [
            {"row": "mfu", "title": "MFU of the steps, without checkpoint pauses", "share": steps},
            {"row": "checkpoint_pauses", "title": "checkpoint pauses", "share": -steps * pauses},
            {
                "row": "failures",
                "title": "failures: work done again, restarts",
                "share": -steps * (1 - productive - pauses),
            },
            {"row": "goodput", "title": "MFU of the calendar", "share": steps * productive},
        ],
    }


def _checklist(used: float, optimum: float, saving: Saving, mtbf: float, *, is_set: bool) -> dict[str, Any]:
    """Return item 7: a problem if another interval would win more than a point of the wall time."""
    here, best = (losses(interval, saving, mtbf)["of_wall"] for interval in (used, optimum))
    words = f"{here:.1%} of the wall time is lost at an interval of {used:,.0f} s, {best:.1%} at {optimum:,.0f} s"
    status = "unknown" if not is_set else "problem" if here - best > 0.01 else "ok"
    return {"item": 7, "title": "Budget the failures", "status": status, "evidence": words}


def pause_of(result: Mapping[str, Any]) -> tuple[float, float]:
    """Return the pause of one checkpoint in seconds, and its share of the steps, from a ``result.json``.

    A pause is the ``checkpoint`` leaf of one rank over the checkpoints it took: counted where the host's facts say so,
    one otherwise.

    Raises:
        InputError: no checkpoint was taken in the steps that were traced.
    """
    job = result["job"]
    paused = sum(leaf["ns"] for leaf in job["leaves"] if leaf["leaf"] == "checkpoint")
    if not paused:
        raise InputError("the result holds no checkpoint pause: trace a step that saves one, or pass --pause.")
    facts = result.get("host_facts", {}).get("checkpoint", {})
    taken = max(
        facts.get("bursts", 0) - facts.get("bursts_asynchronous", 0), facts.get("count", 0), job["ranks_traced"]
    )
    return paused / 1e9 / taken, paused / job["window_ns"]


def from_figures(given: Mapping[str, Any], result: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the budget from figures under the names of the command's options, and from a ``result.json``.

    Args:
        given: ``gpus, gpus_per_node, mtbf, gpu_mtbf, failures, days, pause, write, restart, interval, copy_pause,
            params, bytes_per_param, storage_gbps, mfu``: times in seconds, ``mfu`` in percent; what is absent or None
            is not known.
        result: where given, its world size, MFU and checkpoint pause stand in for what is not given.

    Raises:
        MissingFigureError: the figures do not tell how often the job fails, or what saving takes.
        InputError: a figure is not positive.
    """
    known = {name: value for name, value in given.items() if value is not None}
    sources: dict[str, str] = {}
    paused = 0.0
    pause, mfu = known.get("pause"), known["mfu"] / 100 if "mfu" in known else None
    if result is not None:
        measured, share = _pause_in(result)
        if mfu is None and result["job"]["mfu"] is not None:
            mfu, paused, sources["MFU"] = result["job"]["mfu"], share, "measured in the traces"
        if measured is not None:
            pause, sources["pause"] = (measured, "measured in the traces") if pause is None else (pause, "declared")
    size = known.get("bytes_per_param", BYTES_PER_PARAM)
    if pause is None and "params" in known and "storage_gbps" in known:
        pause = known["params"] * size / (known["storage_gbps"] * 1e9)
        sources["pause"] = "the whole checkpoint, written synchronously at the storage's rate"
    if pause is None:
        raise MissingFigureError("pause, or a result with a checkpoint in its steps, or params and storage-gbps")
    return budget(
        reliability(known, result),
        Saving(pause, known.get("restart", 0.0), known.get("write", 0.0)),
        interval_s=known.get("interval"),
        params=known.get("params"),
        bytes_per_param=size,
        storage_gb_per_s=known.get("storage_gbps"),
        copy_pause_s=known.get("copy_pause"),
        mfu=mfu,
        paused_share=paused,
        sources=sources,
    )


def reliability(given: Mapping[str, Any], result: Mapping[str, Any] | None = None) -> Reliability:
    """Return how often the job fails, from figures as `from_figures` takes them.

    Raises:
        MissingFigureError: they do not tell.
    """
    gpus = given.get("gpus") or (result["job"]["world_size"] if result else None)
    nodes = given.get("gpus_per_node") or 8
    if given.get("failures") is not None and given.get("days") is not None:
        return observed(given["failures"], given["days"], gpus, nodes)
    if given.get("mtbf"):
        return Reliability(given["mtbf"], gpus, nodes, "declared")
    if given.get("gpu_mtbf") and gpus:
        return Reliability(given["gpu_mtbf"] / gpus, gpus, nodes, "declared of one GPU")
    raise MissingFigureError("mtbf, or gpu-mtbf with gpus, or failures with days")


def _pause_in(result: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return the pause of one checkpoint and its share of the steps, or None and 0 where no step saved one."""
    try:
        return pause_of(result)
    except InputError:
        return None, 0.0
