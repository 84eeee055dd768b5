"""What traces hold and lack, as one answer: `inspect`, the function behind ``traceaudit inspect``."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.inspection.holding import Holding, held
from traceaudit.inspection.job import of_job
from traceaudit.inspection.lacks import Lack, Level, of_files
from traceaudit.reading.archives import kept_open
from traceaudit.reading.parallel import Progress, Task, running
from traceaudit.reading.sources import Source, find
from traceaudit.steps import Selection


@dataclass(frozen=True)
class Inspection:
    """What traces hold and lack.

    Attributes:
        files: what each file holds.
        skipped: (file, reason) of files that are no traces.
        lacks: what is missing, the worst first.
        ranks_traced, world_size: of the job; 1 and None where files do not tell.
    """

    files: tuple[Holding, ...]
    skipped: tuple[tuple[str, str], ...]
    lacks: tuple[Lack, ...]
    ranks_traced: int
    world_size: int | None

    @property
    def usable(self) -> bool:
        """Whether `analyze` can attribute anything."""
        return not any(lack.level == Level.BLOCKS and lack.files >= len(self.files) for lack in self.lacks)

    @property
    def table(self) -> pd.DataFrame:
        """One row a file, columns the attributes of `Holding`."""
        return pd.DataFrame([asdict(own) for own in self.files], columns=[field.name for field in fields(Holding)])

    @property
    def result(self) -> dict[str, Any]:
        """The content of ``--json``."""
        return {
            "usable": self.usable,
            "ranks_traced": self.ranks_traced,
            "world_size": self.world_size,
            "lacks": [{**asdict(lack), "ranks": list(lack.ranks)} for lack in self.lacks],
            "files": [{**asdict(own), "steps": list(own.steps), "cut": list(own.cut)} for own in self.files],
            "skipped": [{"file": file, "reason": reason} for file, reason in self.skipped],
        }

    def __str__(self) -> str:
        """Return the text of ``traceaudit inspect``."""
        from traceaudit.report.inspection import lines

        return "\n".join(lines(self.result))


@kept_open()
def inspect(
    traces: str | Path | Sequence[str | Path], *, jobs: int | None = None, progress: Progress | None = None
) -> Inspection:
    """Say what traces hold and what they lack.

    Args:
        traces: directories, files, glob patterns or URLs, as for `traceaudit.analyze`.
        jobs: processes that read; as many as cores and free memory allow by default.
        progress: called with (bytes done, bytes in all, name of a file).

    Raises:
        InputError: there is no file to read.
    """
    paths = [traces] if isinstance(traces, str | Path) else list(traces)
    found, skipped = _read(find(paths), jobs, progress)
    holdings = tuple(holding for holding, _ in found)
    sizes = {own.world_size for own in holdings} - {None}
    ranks = {own.rank for own in holdings} - {None}
    lacks = [*of_job(holdings, [account for _, account in found], paths), *of_files(holdings)]
    lacks.sort(key=lambda lack: list(Level).index(lack.level))
    size = max((size for size in sizes if size is not None), default=None)
    return Inspection(holdings, tuple(skipped), tuple(lacks), len(ranks) or min(len(holdings), 1), size)


def _read(
    sources: Sequence[Source], jobs: int | None, progress: Progress | None
) -> tuple[list[tuple[Holding, RankAccount]], list[tuple[str, str]]]:
    """Return what each file holds, with an account of its rank and steps; and those that are no traces, with why."""
    places = [source.place for source in sources]
    done, whole = 0, sum(source.size for source in sources)
    found: list[tuple[Holding, RankAccount]] = []
    skipped: list[tuple[str, str]] = []
    tasks = [Task(source.place, source.size, Selection(), None) for source in sources]
    with running(tasks, jobs=jobs) as workers:
        outcomes = map(held, places) if workers is None else workers.map(held, places)
        for source, outcome in zip(sources, outcomes, strict=True):
            done += source.size
            if progress is not None:
                progress(done, whole, source.place.name)
            if isinstance(outcome, str):
                skipped.append((source.place.name, outcome))
            else:
                found.append(outcome)
    return found, skipped
