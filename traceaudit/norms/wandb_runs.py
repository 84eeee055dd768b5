"""The history of a W&B run kept offline, without its package.

``run-ID.wandb`` is a log of LevelDB behind a header of seven bytes, each record a message of
https://github.com/wandb/wandb/blob/main/wandb/proto/wandb_internal.proto.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from traceaudit.errors import InputError
from traceaudit.norms.text_logs import read_text
from traceaudit.norms.training_log import TrainingLog, build
from traceaudit.norms.wire import fields, leveldb_records

MAGIC = b":W&B"
HEADER = 7
HISTORY, ITEM, KEY, NESTED_KEY, VALUE_JSON = 2, 1, 1, 2, 16  # numbers of the fields


def read_run(folder: Path) -> TrainingLog:
    """Return the history of a run's folder; its console log where it has no history."""
    for file in sorted(folder.glob("run-*.wandb")):
        rows = list(history(file.read_bytes()))
        if rows:
            return build(str(folder), "W&B run", rows)
    for output in (folder / "files" / "output.log", folder / "output.log"):
        if output.is_file():
            return read_text(output)
    raise InputError(f"{folder}: neither a run-*.wandb with history nor files/output.log.")


def read_file(file: Path) -> TrainingLog:
    """Return the history of a ``.wandb`` file."""
    return build(str(file), "W&B run", list(history(file.read_bytes())))


def history(data: bytes) -> Iterator[dict[str, object]]:
    """Yield what each call of ``log`` wrote, by name."""
    for record in leveldb_records(data, HEADER if data.startswith(MAGIC) else 0):
        for number, value in fields(record):
            if number == HISTORY and isinstance(value, bytes):
                yield dict(_items(value))


def _items(message: bytes) -> Iterator[tuple[str, object]]:
    for number, value in fields(message):
        if number != ITEM or not isinstance(value, bytes):
            continue
        keys: list[str] = []
        text = ""
        for part, content in fields(value):
            if isinstance(content, bytes):
                if part in (KEY, NESTED_KEY):
                    keys.append(content.decode("utf-8", "replace"))
                elif part == VALUE_JSON:
                    text = content.decode("utf-8", "replace")
        try:
            yield "/".join(keys), json.loads(text)
        except ValueError:
            continue
