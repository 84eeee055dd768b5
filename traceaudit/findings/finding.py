"""What a rule finds, as plain data, and the thresholds that hold for all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from traceaudit.leaves import Leaf

LEAST_SHARE = 0.005  # of the analysed time, below which a loss is no finding
MOST = 25  # findings that are listed
MOST_EVIDENCE = 5  # rows of evidence of a finding


class Confidence(StrEnum):
    """How sure a finding is."""

    MEASURED = "measured"  # the time and its cause stand in the traces
    ESTIMATED = "estimated"  # the time is measured, and how much of it the action would win is computed
    SUSPECTED = "suspected"  # the evidence for the cause is indirect


@dataclass(frozen=True)
class Evidence:
    """One observation; times are those of the rank's own file, absolute, so that it can be found in a viewer."""

    text: str
    rank: int | None = None
    step: int | None = None
    track: str | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class Finding:
    """One thing to change.

    Attributes:
        id: bucket and subject, stable between versions.
        title: what is wrong, in one line.
        summary: why, in one or two sentences.
        action: what to do.
        verify: how to check that it helped.
        confidence: how sure it is.
        claims: nanoseconds of the job that it explains, by leaf; a note on the inputs claims none.
        evidence: the worst first.
    """

    id: str
    title: str
    summary: str
    action: str
    verify: str
    confidence: Confidence
    claims: Mapping[Leaf, int] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
