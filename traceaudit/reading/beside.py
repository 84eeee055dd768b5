"""What lies beside the traces and tells about the run: its log, and the configuration of its model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from traceaudit.errors import InputError
from traceaudit.mfu.model_files import read as read_model
from traceaudit.norms.read import read as read_log
from traceaudit.norms.training_log import TrainingLog
from traceaudit.reading.streams import ARCHIVES, is_remote

LOGS = ("*.log", "trainer_state.json", "*tfevents*", "run-*.wandb", "metrics.jsonl", "train*.jsonl", "train*.csv")
MODELS = ("config.json", "*.toml", "*.log")
MOST_FILES, MOST_BYTES = 8, 64 << 20  # that are looked into


def logs(paths: Sequence[str | Path]) -> Iterator[TrainingLog]:
    """Yield the training logs in the folders of traces that tell how fast the run was."""
    for file in _files(paths, LOGS):
        try:
            found = read_log(file)
        except Exception:  # noqa: S112  a file that nobody asked to read must not cost the analysis
            continue
        if len(found.speed):
            yield found


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
