"""Compare two runs: traces, results or reports of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from traceaudit.audit import Audit
from traceaudit.comparing.compare import compare
from traceaudit.errors import InputError
from traceaudit.output_files import write

if TYPE_CHECKING:
    from collections.abc import Sequence

Run: TypeAlias = "Audit | Mapping[str, Any] | str | Path | Sequence[str | Path]"

HEAD_BYTES = 4096  # of a file, that tell a result from a trace
COLUMNS = ("level", "name", "bucket", "before_ms", "after_ms", "change_ms", "noise_ms", "verdict", "mfu_points")


@dataclass(frozen=True, repr=False)
class Diff:
    """What changed from one run to another.

    Attributes:
        data: plain data; `traceaudit.comparing.compare` describes them.
    """

    data: dict[str, Any]

    @property
    def rows(self) -> pd.DataFrame:
        """Buckets, leaves, ranks, groups of collectives, families of kernels and kernels: ms of a step of a rank.

        ``noise_ms`` is what the spread of the steps can explain, ``verdict`` one of better, worse, changed and within
        noise, ``mfu_points`` what a bucket or leaf added to MFU or took.
        """
        rows = [
            {
                **row,
                **{f"{name}_ms": _ms(row[f"{name}_ns"]) for name in ("before", "after", "change", "noise")},
            }
            for row in self.data["rows"]
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    @property
    def headline(self) -> str:
        """What changed, in a sentence or two."""
        from traceaudit.report.difference import headline

        return headline(self.data)

    def regressions(self, limits: Mapping[str, float]) -> list[str]:
        """Return what got worse by more than its limit and more than noise, in words; "mfu" stands for MFU.

        A limit is in MFU points; where MFU is not known in both runs, in % of the step before.
        """
        from traceaudit.comparing.gate import regressions

        return regressions(self.data, limits)

    def to_json(self, path: str | Path, *, force: bool = False) -> None:
        """Write the data.

        Raises:
            InputError: the file exists and `force` is not set.
        """
        from traceaudit.report.json_file import to_json

        write(Path(path), to_json(self.data), force=force)

    def to_html(self, path: str | Path, *, force: bool = False) -> None:
        """Write one HTML file that fetches nothing.

        Raises:
            InputError: the file exists and `force` is not set.
        """
        from traceaudit.report.difference import to_html

        write(Path(path), to_html(self.data).encode(), force=force)

    def to_markdown(self) -> str:
        """Return the text for a merge request or ``$GITHUB_STEP_SUMMARY``."""
        from traceaudit.report.difference import to_markdown

        return to_markdown(self.data)

    def _repr_html_(self) -> str:
        from traceaudit.report.difference import to_fragment

        return to_fragment(self.data)

    def __repr__(self) -> str:
        """Return the headline."""
        return f"<Diff: {self.headline}>"


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def diff(before: Run, after: Run, **options: Any) -> Diff:  # noqa: ANN401  those of analyze
    """Compare two runs.

    Args:
        before: an `Audit`, the content of a ``result.json``, the path of one or of a report, or traces.
        after: the same of the other run.
        options: of `traceaudit.analyze`, for those that are traces.

    Raises:
        TraceAuditError: one cannot be read, or they cannot be compared; the message says why.
    """
    results = result_of(before, **options), result_of(after, **options)
    try:
        return Diff(compare(*results))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"a result is incomplete or damaged ({reason}); analyze the traces again.") from error


def result_of(run: Run, **options: Any) -> Mapping[str, Any]:  # noqa: ANN401  those of analyze
    """Return the result of a run, read or analysed.

    Raises:
        TraceAuditError: it cannot be read or analysed.
    """
    if isinstance(run, Audit):
        return run.result
    if isinstance(run, Mapping):
        return _checked(run)
    if isinstance(run, str | Path) and _is_result(Path(run)):
        from traceaudit.report.json_file import read_result

        return _checked(read_result(Path(run)))
    from traceaudit.pipeline import analyze

    return analyze(run, **options).result


def _is_result(path: Path) -> bool:
    """Tell a result or a report from a trace, by its name or its head."""
    if not path.is_file():
        return False
    if path.suffix.lower() in (".html", ".htm"):
        return True
    try:
        with path.open("rb") as file:
            return b'"schema_version"' in file.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def _checked(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a result that has what is compared.

    Raises:
        InputError: it lacks something, or is of a later schema.
    """
    version = result.get("schema_version")
    if version != 1:
        raise InputError(f"a result of schema version {json.dumps(version)} cannot be compared; 1 is known.")
    job = result.get("job")
    wanted = ("window_ns", "buckets", "steps", "ranks_traced", "mfu")
    missing = [name for name in wanted if not isinstance(job, Mapping) or name not in job]
    if missing:
        raise InputError(f"the result has no job.{missing[0]}; expected the result.json of analyze.")
    return result
