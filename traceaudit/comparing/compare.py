"""The difference of two results as plain data: rows that add up, what is noise, and what moved where.

Times are of an average step of an average rank, so that the buckets of a run add up to its step. A row's MFU points are
its part of the change of MFU, achieved ÷ step: with achieved A and step T before and after, a loss that grew by d takes
d · (A₀ + A₁) / (2 · T₀ · T₁), and what is left of the change belongs to the achieved time. The parts of the buckets add
up to the change exactly, and a row that took as long as before has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from traceaudit import __version__
from traceaudit.comparing.comparable import Basis, basis
from traceaudit.comparing.measured import (
    ALL_COMMUNICATION,
    ALL_COMPUTE,
    BUCKETS,
    STEP,
    Key,
    Measured,
    measured,
)
from traceaudit.comparing.noise import UNKNOWN_FLOOR, Sample, limit, separated

Result = Mapping[str, Any]
Row = dict[str, Any]

SCHEMA_VERSION = 1
LEVELS = 7  # of rows: step, buckets, leaves, ranks, groups, families, kernels; each has its share of false alarms
MOST_ROWS = 40  # of a level, the largest changes; all buckets and leaves are kept
MOVED_SHARE = 0.2  # of what a bucket lost, that is worth saying where it went
LEAST_MOVED = 0.005  # of the step, the same
NOISE, BETTER, WORSE, OTHER = "within noise", "better", "worse", "changed"
ACHIEVED, COMPUTE, SPLIT_LEAVES = "achieved", "sub_roofline", ("achieved", "sub_roofline")


def compare(before: Result, after: Result) -> dict[str, Any]:
    """Return what changed from one result to another.

    Raises:
        InputError: they cannot be compared (`traceaudit.comparing.comparable`).
    """
    footing = basis(before, after)
    sampled = {rank["rank"] for rank in before.get("ranks", [])} != {rank["rank"] for rank in after.get("ranks", [])}
    sides = measured(before, sampled=sampled), measured(after, footing.scale, sampled=sampled)
    split = all(own.result["job"]["mfu"] is not None for own in sides)
    step = _row(STEP, STEP, "", (sides[0].sums[STEP], sides[1].sums[STEP]), 1, sides)
    buckets = _buckets(sides, split)
    limits = {row["bucket"]: row["noise_ns"] for row in buckets}
    rows = [*buckets, *_leaves(sides, split, limits), *_of_ranks(sides, split), *_of_names(sides)]
    points = _points(sides) if split else None
    for row in rows:
        row["mfu_points"] = points(row) if points is not None and row["level"] in ("bucket", "leaf") else None
    return {
        "schema_version": SCHEMA_VERSION,
        "traceaudit_version": __version__,
        "before": _side(before, sides[0]),
        "after": _side(after, sides[1]),
        "unit": footing.unit,
        "scale": footing.scale,
        "mfu_points": 100 * (after["job"]["mfu"] - before["job"]["mfu"]) if split else None,
        "step": step,
        "changed": step["verdict"] != NOISE or any(row["verdict"] != NOISE for row in buckets),
        "rows": rows,
        "moved": _moved(buckets, sides[0].step_ns),
        "differences": [asdict(difference) for difference in footing.differences],
        "notes": [*footing.notes, *_notes(sides, footing, split, sampled=sampled)],
    }


def _side(result: Result, own: Measured) -> dict[str, Any]:
    job = result["job"]
    return {
        "source": str(result.get("source", "")),
        "mfu": job["mfu"],
        "step_ns": own.step_ns,
        "steps": len(job["steps"]),
        "ranks_traced": job["ranks_traced"],
        "world_size": job.get("world_size"),
        "gpu": job.get("gpu"),
        "reliable": bool((result.get("quality") or {}).get("reliable", True)),
    }


def _row(
    level: str, name: str, bucket: str, samples: tuple[Sample, Sample], family: int, sides: Sequence[Measured]
) -> Row:
    """Return a row; without a spread it counts as changed above `UNKNOWN_FLOOR` of the step, and says so."""
    step = min(own.step_ns for own in sides)
    noise = limit(*samples, family * LEVELS, step) if all(sample.steps for sample in samples) else None
    row = _judged(level, name, bucket, (samples[0].mean, samples[1].mean), noise, step)
    return {**row, "separated": row["verdict"] == NOISE and separated(*samples, step)}


def _judged(level: str, name: str, bucket: str, means: tuple[float, float], noise: float | None, step: float) -> Row:
    change = means[1] - means[0]
    verdict = NOISE
    if abs(change) > (noise if noise is not None else UNKNOWN_FLOOR * step):
        verdict = OTHER if bucket == ACHIEVED else WORSE if change > 0 else BETTER
    return {
        "level": level,
        "name": name,
        "bucket": bucket,
        "before_ns": means[0],
        "after_ns": means[1],
        "change_ns": change,
        "noise_ns": noise,
        "verdict": verdict,
        "separated": False,  # within noise, yet every step of one run lies beyond every step of the other
    }


def _buckets(sides: Sequence[Measured], split: bool) -> list[Row]:
    """Return the rows of the buckets; compute that is not split in both stands in one row."""
    shown = [bucket for bucket in BUCKETS if split or bucket != ACHIEVED]
    rows = []
    for bucket in shown:
        samples = [own.sums[bucket] for own in sides]
        if bucket == COMPUTE and not split:
            samples = [_added(own.sums[ACHIEVED], own.sums[COMPUTE]) for own in sides]
        if any(sample.mean for sample in samples):
            rows.append(_row("bucket", bucket, bucket, (samples[0], samples[1]), len(shown), sides))
    return rows


def _added(one: Sample, other: Sample) -> Sample:
    steps = [sum(pair) for pair in zip(one.steps, other.steps, strict=True)]
    return Sample(one.mean + other.mean, steps, one.sampling + other.sampling)


def _leaves(sides: Sequence[Measured], split: bool, limits: Mapping[str, float | None]) -> list[Row]:
    """Return the rows of the leaves; one whose steps an older result does not tell is judged by its bucket's noise."""
    keys = _joined(*(own.leaves for own in sides))
    keys = [key for key in keys if split or key[0] not in SPLIT_LEAVES]
    rows = []
    for key in keys:
        samples = [_sample(own, key) for own in sides]
        if all(sample.steps for sample in samples):
            rows.append(_row("leaf", key[1], key[0], (samples[0], samples[1]), len(keys), sides))
        else:
            means = samples[0].mean, samples[1].mean
            step = min(own.step_ns for own in sides)
            rows.append(_judged("leaf", key[1], key[0], means, limits.get(key[0]), step))
    return rows


def _sample(own: Measured, key: Key) -> Sample:
    """Return the sample of a leaf; one that a run does not have took no time in any of its steps."""
    found = own.leaves.get(key)
    if found is not None:
        return found
    told = any(sample.steps for sample in own.leaves.values())
    return Sample(0.0, [0.0] * len(own.sums[STEP].steps) if told else [])


def _joined(*tables: Mapping[Any, Any]) -> list[Any]:
    return list(dict.fromkeys(key for table in tables for key in table))


def _of_ranks(sides: Sequence[Measured], split: bool) -> list[Row]:
    """Return the buckets of single ranks that changed beyond noise, the largest changes first."""
    common = [key for key in sides[0].ranks if key in sides[1].ranks and (split or key[1] not in SPLIT_LEAVES)]
    rows = []
    for key in common:
        samples = sides[0].ranks[key], sides[1].ranks[key]
        rows.append(_row("rank", f"rank {key[0]}", key[1], samples, len(common), sides))
    return _largest([row for row in rows if row["verdict"] != NOISE])


def _of_names(sides: Sequence[Measured]) -> list[Row]:
    """Return groups of collectives, families of kernels and kernels.

    A result has their sums and not their steps: they are judged by the noise of all communication, or all compute.
    """
    step = min(own.step_ns for own in sides)
    rows: list[Row] = []
    for level, tables, whole, bucket in (
        ("group", [own.groups for own in sides], ALL_COMMUNICATION, "exposed_comm"),
        ("family", [own.families for own in sides], ALL_COMPUTE, ""),
        ("kernel", [own.kernels for own in sides], ALL_COMPUTE, ""),
    ):
        of_all = _row(level, whole, "", (sides[0].sums[whole], sides[1].sums[whole]), 1, sides)
        found = [
            _judged(level, _name(level, key), bucket, (tables[0].get(key, 0.0), tables[1].get(key, 0.0)), noise, step)
            for key in _joined(*tables)
            for noise in [of_all["noise_ns"]]
        ]
        rows += _largest(found)
    return rows


def _name(level: str, key: Key) -> str:
    """Return the name of a row: a group with its kind, a kernel alone."""
    return f"{key[1]}, {key[0]}" if level == "group" else key[1]


def _largest(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-abs(row["change_ns"]), row["name"]))[:MOST_ROWS]


def _points(sides: Sequence[Measured]) -> Any:  # noqa: ANN401  a function
    """Return what tells a row's part of the change of MFU; see the module."""
    achieved = [own.sums[ACHIEVED].mean for own in sides]
    steps = [own.step_ns for own in sides]
    of_loss = sum(achieved) / (2 * steps[0] * steps[1])
    of_achieved = (1 / steps[0] + 1 / steps[1]) / 2 - of_loss

    def points(row: Row) -> float:
        change = float(row["change_ns"])
        return 100 * change * of_achieved if row["bucket"] == ACHIEVED else -100 * change * of_loss

    return points


def _moved(buckets: Sequence[Row], step: float) -> list[dict[str, Any]]:
    """Return which losses that fell came back as others that rose, the largest first; each ns is told once."""
    losses = [row for row in buckets if row["bucket"] != ACHIEVED]
    fell = {row["name"]: -row["change_ns"] for row in losses if row["verdict"] == BETTER}
    rose = {row["name"]: row["change_ns"] for row in losses if row["verdict"] == WORSE}
    moved = []
    for source, lost in sorted(fell.items(), key=lambda item: -item[1]):
        left = lost
        for target in sorted(rose, key=lambda name: -rose[name]):
            ns = min(left, rose[target])
            if ns >= max(MOVED_SHARE * lost, LEAST_MOVED * step):
                moved.append({"from": source, "to": target, "ns": ns, "share": ns / lost})
                left, rose[target] = left - ns, rose[target] - ns
    return moved


def _notes(sides: Sequence[Measured], footing: Basis, split: bool, *, sampled: bool) -> list[str]:
    """Return what to know before trusting the rows."""
    notes = []
    single = [len(own.sums[STEP].steps) for own in sides]
    if sum(single) < 3 or min(single) < 1:
        notes.append(
            "the spread of the steps is not known (single steps): "
            f"only changes above {UNKNOWN_FLOOR:.0%} of the step count"
        )
    if not split:
        notes.append("MFU is not known in both: compute is not split, and rows are compared in time alone")
    if sampled:
        notes.append("other ranks were traced: the spread over ranks counts as noise")
    for name, own in zip(("first", "second"), sides, strict=True):
        if not (own.result.get("quality") or {}).get("reliable", True):
            notes.append(f"the attribution of the {name} run is not reliable")
    return notes
