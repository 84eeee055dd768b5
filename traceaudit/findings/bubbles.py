"""Waiting that a pipeline's schedule and stages cost."""

from collections.abc import Iterator, Mapping

from traceaudit.findings.finding import Confidence, Evidence, Finding
from traceaudit.findings.seen import Seen
from traceaudit.leaves import Leaf
from traceaudit.report.formats import clean, duration, percent, times


def few_microbatches(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield warm-up and drain that twice the micro-batches would save.

    The bubble over the ideal time is (p - 1)/m, or (p - 1)/(v·m) interleaved: twice m halves it, and only that half is
    claimed.
    """
    found = seen.result.get("pipeline") or {}
    whole = left[Leaf.WARMUP_DRAIN]
    if not found.get("microbatches") or seen.training is False:
        return
    stages, microbatches, chunks = found["stages"], found["microbatches"], found.get("virtual_stages") or 1
    shape = f"{stages} stages with {microbatches} micro-batches"
    shape += f" and {chunks} chunks a stage" if chunks > 1 else ""
    theory = found.get("theory")
    ratio = f"{found['theory_formula']} = {percent(theory)} of the ideal time; " if theory is not None else ""
    yield Finding(
        id="pipeline-bubble.microbatches",
        title=f"few micro-batches for the pipeline: {microbatches} for {stages} stages",
        summary=f"Warm-up and drain take {seen.share(whole)} ({shape}: {ratio}"
        f"measured {percent(found.get('measured') or 0.0)}). Twice the micro-batches would save half of it.",
        action="More and smaller micro-batches in a step, as far as kernels stay large enough; interleave the "
        "stages (virtual stages) or split the backward (zero bubble); fewer stages with more sharding.",
        verify="Idle at the ends of the step falls as 1/micro-batches in the picture of the pipeline.",
        confidence=Confidence.ESTIMATED,
        claims={Leaf.WARMUP_DRAIN: whole // 2},
        evidence=seen.of_ledger(Leaf.WARMUP_DRAIN, "of warm-up and drain"),
    )


def heavy_stage(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield waiting because stages take unequally long."""
    found = seen.result.get("pipeline") or {}
    if "heaviest_stage" not in found:
        return
    stage = found["heaviest_stage"]
    work = [
        Evidence(f"stage {number}: {duration(ns)} of work a step") for number, ns in enumerate(found["stage_work_ns"])
    ]
    work.sort(key=lambda row: f"stage {stage}:" not in row.text)
    yield Finding(
        id="pipeline-bubble.heavy-stage",
        title=f"stage {stage} of the pipeline is heavier than the others",
        summary=f"Its work is {times(found['heaviest_ratio'])} the mean of the stages, and the others wait for it in "
        "every micro-batch.",
        action="Move layers from it to the others; count embedding, output layer and loss as layers; put the output "
        "layer on a stage with fewer blocks.",
        verify="The work of all stages agrees within a few percent.",
        confidence=Confidence.MEASURED,
        claims={Leaf.STAGE_IMBALANCE: left[Leaf.STAGE_IMBALANCE]},
        evidence=(*work[:2], *seen.of_ledger(Leaf.STAGE_IMBALANCE, "waited for unequal stages")),
    )


def undivided(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield waits in a pipeline whose causes could not be told apart."""
    reason = (seen.result.get("pipeline") or {}).get("undivided_reason")
    yield Finding(
        id="pipeline-bubble.undivided",
        title="waits in the pipeline that are not divided",
        summary="Schedule, unequal stages and late ranks cannot be told apart"
        + (f": {clean(reason)}." if reason else "."),
        action="Name the layout (--pp, or process groups with descriptions in the traces) and trace one rank of each "
        "stage at least.",
        verify="The report divides the waits.",
        confidence=Confidence.SUSPECTED,
        claims={Leaf.UNDIVIDED: left[Leaf.UNDIVIDED]},
        evidence=seen.of_communications([Leaf.UNDIVIDED]) or seen.of_ledger(Leaf.UNDIVIDED, "of undivided waits"),
    )


RULES = (few_microbatches, heavy_stage, undivided)
