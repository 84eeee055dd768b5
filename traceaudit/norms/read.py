"""Find out what wrote a training log, and read it."""

import json
from pathlib import Path

from traceaudit.errors import InputError
from traceaudit.norms.event_files import read_event_files
from traceaudit.norms.text_logs import read_csv, read_text, read_trainer_state
from traceaudit.norms.training_log import NAMES, STEPS, TrainingLog, build
from traceaudit.norms.wandb_runs import MAGIC, read_file, read_run

SNIFFED = 65_536  # bytes


def read(path: str | Path) -> TrainingLog:
    """Return the training log behind a file or folder.

    Raises:
        InputError: it cannot be read, or holds neither a loss nor a gradient norm.
    """
    place = Path(path)
    try:
        return _folder(place) if place.is_dir() else _file(place)
    except OSError as error:
        raise InputError(f"{place}: {error.strerror or error}; expected a training log.") from error


def _folder(folder: Path) -> TrainingLog:
    """Return the log in a folder: a W&B run, event files (also one folder deeper), or a Trainer's checkpoints."""
    if any(folder.glob("run-*.wandb")) or (folder / "files" / "output.log").is_file():
        return read_run(folder)
    events = [file for pattern in ("*tfevents*", "*/*tfevents*") for file in folder.glob(pattern)]
    if events:
        return read_event_files(str(folder), events)
    states = [file for pattern in ("", "*/") for file in folder.glob(f"{pattern}trainer_state.json")]
    if states:
        return _file(max(states, key=lambda file: file.stat().st_mtime))
    raise InputError(f"{folder}: no run-*.wandb, *tfevents* or trainer_state.json in it.")


def _file(file: Path) -> TrainingLog:
    with file.open("rb") as opened:
        head = opened.read(SNIFFED)
    if head.startswith(MAGIC):
        return read_file(file)
    if "tfevents" in file.name:
        return read_event_files(str(file), [file])
    if not head.strip():
        raise InputError(f"{file}: the file is empty.")
    text = head.decode("utf-8-sig", "replace").lstrip()
    if text.startswith(("{", "[")):
        whole = _json(file)
        if isinstance(whole, dict) and "log_history" in whole:
            return read_trainer_state(file, whole)
        if isinstance(whole, list):
            return build(str(file), "JSON log", [row for row in whole if isinstance(row, dict)])
    return read_csv(file) if _has_head(text.splitlines()[0]) else read_text(file)


def _json(file: Path) -> object:
    """Return the one value of a JSON file; None for JSON Lines and for text."""
    try:
        return json.loads(file.read_text(encoding="utf-8-sig", errors="replace"))
    except ValueError:
        return None


def _has_head(line: str) -> bool:
    """Tell whether a line names columns: a loss or gradient norm, and more than one."""
    separator = max(",;\t", key=line.count)
    names = [name.strip().strip('"').replace(" ", "_") for name in line.split(separator)]
    known = [name for name in names if STEPS.match(name) or any(pattern.match(name) for _, pattern in NAMES)]
    return len(names) > 1 and len(known) > 1
