"""What an analysis found: headline figures, tables, pictures and files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from traceaudit.attribute import Attribution
from traceaudit.errors import InputError
from traceaudit.leaves import Bucket, Leaf
from traceaudit.output_files import write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from traceaudit.reading.parallel import Reading
    from traceaudit.reading.streams import Place
    from traceaudit.slices import Slicer


@dataclass(frozen=True, repr=False)
class Audit:
    """The lost time of a run.

    Attributes:
        result: the content of ``result.json``.
        attribution: the tables behind it.
        gaps: the largest idle gaps of each rank: where they are in time (the rank's own clock), leaf, the host call
            that took most of each and what stands around it, thread, Python frame, the kernel that ended it and what
            that waited for.
        reading: how the traces were read: how many came from the cache; nothing that changes a result.
        places: where the file of each rank lies.
        slicer: tells where in time the leaves of a rank are.
    """

    result: dict[str, Any]
    attribution: Attribution
    gaps: pd.DataFrame = field(default_factory=pd.DataFrame)
    reading: "Reading | None" = None
    places: "Mapping[int, Place]" = field(default_factory=dict)
    slicer: "Slicer | None" = None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None where the peak or the model FLOPs are unknown."""
        mfu: float | None = self.result["job"]["mfu"]
        return mfu

    @property
    def leaves(self) -> pd.DataFrame:
        """Nanoseconds by ``rank, step, bucket, leaf``; the leaves of a rank's step add up to its window."""
        ledger = self.attribution.ledger
        leaves = [Leaf(code) for code in ledger["leaf"]]
        return pd.DataFrame(
            {
                "rank": ledger["rank"],
                "step": ledger["step"],
                "bucket": [leaf.bucket.value for leaf in leaves],
                "leaf": [leaf.label for leaf in leaves],
                "ns": ledger["ns"],
            }
        )

    @property
    def buckets(self) -> pd.DataFrame:
        """Nanoseconds, one row a rank and step, one column a bucket, in the order of the waterfall."""
        table = self.leaves.pivot_table(
            index=["rank", "step"], columns="bucket", values="ns", aggfunc="sum", fill_value=0
        )
        return table.reindex(columns=[bucket.value for bucket in Bucket], fill_value=0).rename_axis(columns=None)

    @property
    def kernels(self) -> pd.DataFrame:
        """GPU activities by name: ``name, kind, family, count, ns, flops``, the longest in sum first."""
        return pd.DataFrame(self.result["kernels"])

    @property
    def collectives(self) -> pd.DataFrame:
        """Communications by group and kind: counts, bytes, and exposed, waiting and transfer time in ns."""
        return pd.DataFrame(self.result["collectives"])

    @property
    def stragglers(self) -> pd.DataFrame:
        """Who made others wait: ``rank, cause, caused_ns, own_ns, share, mfu_points, evidence``."""
        return pd.DataFrame(self.result["stragglers"])

    def events(self, rank: int) -> pd.DataFrame:
        """Return the events of a rank's file, read again: one row each; columns as in `traceaudit.events`.

        The tables of an `Audit` hold sums, not events: those of a large job do not fit into memory.

        Raises:
            InputError: the rank has no trace here, or its file is gone.
        """
        from traceaudit.reading.normalise import read_trace

        if rank not in self.places:
            known = ", ".join(map(str, sorted(self.places)[:16]))
            raise InputError(f"rank {rank} has no trace here; there are ranks {known or 'none'}.")
        return read_trace(self.places[rank]).events

    @property
    def findings(self) -> pd.DataFrame:
        """What to do first, the largest first: ``id, title, bucket, leaf, ns, share, mfu_points, confidence, ...``."""
        return pd.DataFrame(self.result["findings"])

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        from traceaudit.report.headline import headline

        return headline(self.result)

    def waterfall(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the waterfall from peak to MFU; returns the Axes."""
        from traceaudit.report.figures import waterfall

        return waterfall(self.result, ax)

    def heatmap(self, ax: "Axes | None" = None) -> "Axes":
        """Draw how long others waited for each rank in each step; returns the Axes."""
        from traceaudit.report.figures import heatmap

        return heatmap(self.result, ax)

    def pipeline(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the forward and backward work of one pipeline in one step, by stage over time; returns the Axes."""
        from traceaudit.report.figures import pipeline

        return pipeline(self.result, ax)

    def roofline(self, ax: "Axes | None" = None) -> "Axes":
        """Draw kernels by FLOPs a byte and FLOPs a second, below the roofs of bandwidth and peaks; returns the Axes."""
        from traceaudit.report.figures import roofline

        return roofline(self.result, ax)

    def slices(self, rank: int) -> pd.DataFrame:
        """Return where in time the leaves of a rank are: ``step, start_ns, end_ns, bucket, leaf, name``.

        Slices are in the order of time on the rank's own clock and do not overlap; their sums are those of `leaves`.
        ``name`` is the kernel, the copy, or what ended a gap. Unless `analyze` was asked to keep pieces, the rank's
        trace is read again. `traceaudit.slices` says what is convention in them.

        Raises:
            InputError: the rank was not analysed, or its trace cannot be read any more.
        """
        if self.slicer is None:
            raise InputError("this result has no traces behind it.")
        found = self.slicer.of(rank)
        leaves = [Leaf(code) for code in found["leaf"]]
        buckets = [leaf.bucket.value for leaf in leaves]
        named = found.assign(bucket=buckets, leaf=[leaf.label for leaf in leaves])
        return named[["step", "start_ns", "end_ns", "bucket", "leaf", "name"]]

    def timeline(self, rank: int, step: int, ax: "Axes | None" = None) -> "Axes":
        """Draw where in a step of a rank each bucket is; returns the Axes.

        Raises:
            InputError: the rank or step was not analysed, or its trace cannot be read any more.
        """
        from traceaudit.report.slices import timeline

        own = self.slices(rank)
        own = own[own["step"] == step]
        if not len(own):
            raise InputError(f"step {step} is not among the analysed steps of rank {rank}.")
        return timeline(own, rank, step, ax)

    def to_json(self, path: str | Path, *, force: bool = False) -> None:
        """Write ``result.json``.

        Raises:
            InputError: the file exists and `force` is not set.
        """
        from traceaudit.report.json_file import to_json

        write(Path(path), to_json(self.result), force=force)

    def to_html(self, path: str | Path, *, force: bool = False) -> None:
        """Write the report: one HTML file that fetches nothing.

        Raises:
            InputError: the file exists and `force` is not set.
        """
        from traceaudit.report.html import to_html

        write(Path(path), to_html(self.result).encode(), force=force)

    def to_markdown(self) -> str:
        """Return the text of a ticket: headline, factors, waterfall, findings with actions, caveats."""
        from traceaudit.report.markdown import to_markdown

        return to_markdown(self.result)

    def __repr__(self) -> str:
        """Return the headline."""
        return f"<Audit: {self.headline}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the headline and the waterfall."""
        from traceaudit.report.notebook import fragment

        return fragment(self.result)
