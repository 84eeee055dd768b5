"""What lies beside the traces and tells about the run: its log, and the configuration of its model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from traceaudit.errors import InputError
from traceaudit.mfu.model_files import read as read_model
from traceaudit.norms.read import read as read_log
from traceaudit.norms.training_log import TrainingLog
from traceaudit.reading.archives import ARCHIVES
from traceaudit.reading.streams import is_remote

NAMED_LOGS = ("trainer_state.json", "*tfevents*", "run-*.wandb", "metrics.jsonl", "train*.jsonl", "train*.csv")
LOGS = ("*.log", *NAMED_LOGS)  # much else is called .log
MODELS = ("config.json", "*.toml", "*.log")
MOST_FILES, MOST_BYTES = 8, 64 << 20  # that are looked into


def training_log(paths: Sequence[str | Path]) -> tuple[TrainingLog | None, list[str]]:
    """Return the first training log in the folders of traces that tells how fast the run was, and warnings.

    What is a training log by its name and cannot be read is named; nobody asked to read it, so it costs no more.
    """
    warnings = []
    for file in _files(paths, LOGS):
        try:
            found = read_log(file)
        except Exception as error:  # whatever a format's library raises
            if any(file.match(pattern) for pattern in NAMED_LOGS):
                reason = str(error).removeprefix(f"{file}: ") or type(error).__name__
                warnings.append(f"{file.name} beside the traces cannot be read as a training log: {reason}")
            continue
        if len(found.speed):
            return found, warnings
    return None, warnings


def models(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files in the folders of traces that declare the sizes of the model."""
    found = []
    for file in _files(paths, MODELS):
        try:
            values = read_model(file)
        except (InputError, ValueError):
            continue
        if "params" in values and "layers" in values:
            found.append(file)
    return found


def _files(paths: Sequence[str | Path], patterns: Sequence[str]) -> Iterator[Path]:
    local = [Path(path) for path in paths if not is_remote(str(path)) and not str(path).lower().endswith(ARCHIVES)]
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in local)
    found = [file for folder in folders for pattern in patterns for file in sorted(folder.glob(pattern))]
    files = [file for file in dict.fromkeys(found) if file.is_file() and file.stat().st_size <= MOST_BYTES]
    yield from files[:MOST_FILES]
