"""What a result says of an average step of a rank, and of how that varies: the quantities that are compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from traceaudit.comparing.noise import Sample
from traceaudit.errors import InputError
from traceaudit.leaves import Bucket

Result = Mapping[str, Any]
Key = tuple[str, str]

BUCKETS = tuple(bucket.value for bucket in Bucket)
COMPUTE = ("achieved", "sub_roofline", "recompute")
COMMUNICATION = ("exposed_comm", "straggler", "pipeline_bubble")
STEP, ALL_COMPUTE, ALL_COMMUNICATION = "step", "compute", "communication"


@dataclass(frozen=True)
class Measured:
    """The quantities of a run, in nanoseconds of an average step of an average rank.

    Attributes:
        result: where they are from.
        rank_steps: how many steps of ranks the sums are over.
        sums: samples of the step, of buckets, and of compute and communication as a whole, by name.
        leaves: samples by (bucket, leaf); their steps are empty where an older result does not tell them.
        ranks: samples by rank and bucket.
        groups: exposed nanoseconds by group and kind.
        families, kernels: nanoseconds of GPU activities by (kind, name), whatever else ran beside them.
    """

    result: Result
    rank_steps: int
    sums: Mapping[str, Sample]
    leaves: Mapping[Key, Sample]
    ranks: Mapping[tuple[int, str], Sample]
    groups: Mapping[Key, float]
    families: Mapping[Key, float]
    kernels: Mapping[Key, float]

    @property
    def step_ns(self) -> float:
        """Return the mean time of a step of a rank."""
        return self.sums[STEP].mean


def measured(result: Result, scale: float = 1.0, *, sampled: bool = False) -> Measured:
    """Return what a result says, times a factor.

    Args:
        result: the content of a ``result.json``, of this version or an earlier one.
        scale: for runs whose steps do not hold the same work.
        sampled: the ranks are some of many, others than those of the other run: their spread is noise too.

    Raises:
        InputError: the result has no step.
    """
    job = result["job"]
    ranks = [rank for rank in result.get("ranks", []) if rank.get("window_ns")]
    rank_steps = _rank_steps(result, ranks)
    if not rank_steps or not job["window_ns"]:
        raise InputError(f"{result.get('source') or 'the result'}: it holds no step, so there is nothing to compare.")
    by_step = _steps(job, ranks)
    factor = scale / rank_steps

    def sample(total: float, values: "list[float]", spread: float = 0.0) -> Sample:
        return Sample(total * factor, [value * scale for value in values], spread * scale**2)

    windows = [step["window_ns"] / step["ranks"] for step in by_step]
    each = {bucket: [sum(_of(step, bucket)) / step["ranks"] for step in by_step] for bucket in BUCKETS}
    spread = {bucket: _spread(job, ranks, bucket) if sampled else 0.0 for bucket in BUCKETS}
    totals = {bucket: job["buckets"].get(bucket, 0) for bucket in BUCKETS}
    sums = {bucket: sample(totals[bucket], each[bucket], spread[bucket]) for bucket in BUCKETS}
    sums[STEP] = sample(job["window_ns"], windows)
    for name, parts in ((ALL_COMPUTE, COMPUTE), (ALL_COMMUNICATION, COMMUNICATION)):
        values = [sum(column) for column in zip(*(each[bucket] for bucket in parts), strict=True)]
        sums[name] = sample(sum(totals[bucket] for bucket in parts), values)
    return Measured(
        result=result,
        rank_steps=rank_steps,
        sums=sums,
        leaves=_leaves(job, by_step, sample),
        ranks=_ranks(ranks, scale),
        groups=_summed(result.get("collectives", []), ("group", "kind"), "exposed_ns", factor),
        families=_summed(result.get("kernels", []), ("kind", "family"), "ns", factor),
        kernels=_summed(result.get("kernels", []), ("kind", "name"), "ns", factor),
    )


def _rank_steps(result: Result, ranks: "list[dict[str, Any]]") -> int:
    """Return how many steps of ranks were analysed; a report may have lost its ranks or their steps."""
    job = result["job"]
    if job.get("by_step"):
        return sum(int(step["ranks"]) for step in job["by_step"])
    if ranks and all("steps" in rank for rank in ranks):
        return sum(len(rank["steps"]) for rank in ranks)
    return int(job["ranks_traced"]) * len(job["steps"])


def _steps(job: Mapping[str, Any], ranks: "list[dict[str, Any]]") -> "list[dict[str, Any]]":
    """Return window, ranks and buckets or leaves of each step; nothing where the result does not tell."""
    if job.get("by_step"):
        return list(job["by_step"])
    found: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        for step in rank.get("steps", []):
            own = found.setdefault(step["step"], {"ranks": 0, "window_ns": 0, "buckets": dict.fromkeys(BUCKETS, 0)})
            own["ranks"] += 1
            own["window_ns"] += step["window_ns"]
            for bucket, ns in step["buckets"].items():
                own["buckets"][bucket] = own["buckets"].get(bucket, 0) + ns
    return list(found.values())


def _of(step: Mapping[str, Any], bucket: str) -> "list[int]":
    """Return the parts of a bucket in a step."""
    if "buckets" in step:
        return [step["buckets"].get(bucket, 0)]
    return [ns for name, ns in step["leaves"].items() if name.startswith(f"{bucket}.")]


def _spread(job: Mapping[str, Any], ranks: "list[dict[str, Any]]", bucket: str) -> float:
    """Return the variance of the mean over ranks that were drawn from all of the job's."""
    means = [rank["buckets"].get(bucket, 0) / len(rank["steps"]) for rank in ranks if rank.get("steps")]
    if len(means) < 2:
        return 0.0
    drawn = 1 - min(len(means) / max(int(job.get("world_size") or 0), len(means)), 1.0)
    return float(np.var(means, ddof=1)) / len(means) * drawn


def _leaves(job: Mapping[str, Any], by_step: "list[dict[str, Any]]", sample: Any) -> "dict[Key, Sample]":  # noqa: ANN401
    found = {}
    for leaf in job.get("leaves", []):
        name = f"{leaf['bucket']}.{leaf['leaf']}"
        told = [step["leaves"].get(name, 0) / step["ranks"] for step in by_step if "leaves" in step]
        found[leaf["bucket"], leaf["leaf"]] = sample(leaf["ns"], told)
    return found


def _ranks(ranks: "list[dict[str, Any]]", scale: float) -> "dict[tuple[int, str], Sample]":
    found = {}
    for rank in ranks:
        steps = rank.get("steps", [])
        for bucket in BUCKETS if steps else ():
            values = [scale * step["buckets"].get(bucket, 0) for step in steps]
            found[rank["rank"], bucket] = Sample(sum(values) / len(values), values)
    return found


def _summed(rows: Any, keys: Key, value: str, factor: float) -> "dict[Key, float]":  # noqa: ANN401  JSON
    """Sum up rows of a result by two of their fields."""
    found: dict[Key, float] = {}
    for row in rows:
        key = (str(row.get(keys[0], "")), str(row.get(keys[1], "")))
        found[key] = found.get(key, 0.0) + row[value] * factor
    return found
