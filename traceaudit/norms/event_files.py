"""Scalars of TensorBoard event files, without TensorBoard.

Fields of the messages: https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto, event.proto,
summary.proto and tensor.proto.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from traceaudit.norms.training_log import TrainingLog, build
from traceaudit.norms.wire import fields, signed, tf_records

FLOAT, DOUBLE = 1, 2  # DataType
Scalar = tuple[int, str, float]


def read_event_files(source: str, files: Sequence[Path]) -> TrainingLog:
    """Return the scalars of event files, the oldest first (their names hold the time)."""
    rows = [
        row for file in sorted(files, key=lambda file: file.name) for row in _rows(list(scalars(file.read_bytes())))
    ]
    return build(source, "TensorBoard event file", rows)


def scalars(data: bytes) -> Iterator[Scalar]:
    """Yield step, tag and value of each scalar, in the order of writing."""
    for record in tf_records(data):
        step, summary = 0, b""
        for number, value in fields(record):
            if number == 2 and isinstance(value, int):
                step = signed(value)
            elif number == 5 and isinstance(value, bytes):
                summary = value
        for number, value in fields(summary):
            if number == 1 and isinstance(value, bytes):
                yield from ((step, tag, scalar) for tag, scalar in _value(value))


def _value(message: bytes) -> Iterator[tuple[str, float]]:
    """Yield tag and value of a ``Summary.Value`` that is a scalar, as a float or as a tensor of one."""
    tag, found = "", None
    for number, value in fields(message):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value.decode("utf-8", "replace")
        elif number == 2 and len(value) == 4:
            found = float(struct.unpack("<f", value)[0])
        elif number == 8:
            found = _scalar(value)
    if found is not None:
        yield tag, found


def _scalar(tensor: bytes) -> float | None:
    """Return the one value of a ``TensorProto`` of floats or doubles."""
    dtype, held = 0, b""
    for number, value in fields(tensor):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            held = value
    if dtype == FLOAT and len(held) == 4:
        return float(struct.unpack("<f", held)[0])
    return float(struct.unpack("<d", held)[0]) if dtype == DOUBLE and len(held) == 8 else None


def _rows(found: Sequence[Scalar]) -> list[dict[str, object]]:
    """Return one row a step; where the steps of a tag go back, the run was resumed and rows follow the writing."""
    last: dict[str, int] = {}
    resumed = False
    for step, tag, _ in found:
        resumed |= step < last.get(tag, step)
        last[tag] = step
    if not resumed:
        by_step: dict[int, dict[str, object]] = {}
        for step, tag, value in found:
            by_step.setdefault(step, {"step": step})[tag] = value
        return [by_step[step] for step in sorted(by_step)]
    rows: list[dict[str, object]] = []
    for step, tag, value in found:
        if not rows or rows[-1]["step"] != step or tag in rows[-1]:
            rows.append({"step": step})
        rows[-1][tag] = value
    return rows
