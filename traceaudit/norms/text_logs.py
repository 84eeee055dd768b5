"""Logs of lines: JSON Lines, and the console of torchtitan, Megatron-LM, the Trainer of transformers, and others."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from traceaudit.norms.training_log import STEPS, TrainingLog, build

COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
VALUE = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)(?![A-Za-z0-9])"
# The words of Megatron-LM's training_log: " iteration 10/ 100 | consumed samples: 40 | lm loss: 8.1E+00 | ..."
MEGATRON = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+")
MEGATRON_PAIR = re.compile(rf"([A-Za-z][\w ()/-]*?)\s*:\s*({VALUE})\s*$", re.IGNORECASE)
# torchtitan: "step:  1  loss:  8.1234  grad_norm:  1.2345  memory: ...", and names of one word in other logs
PAIR = re.compile(rf"""['"]?([A-Za-z_][\w./-]*)['"]?\s*[:=]\s*['"]?({VALUE})""", re.IGNORECASE)
STEP_WORD = re.compile(r"\b(step|iter|iteration)\s*[:=#]?\s+(\d+)", re.IGNORECASE)
LOSS_WORD = re.compile(rf"\b(loss|lr|grad_norm|norm)\s+({VALUE})", re.IGNORECASE)
OTHER_LOSS = re.compile(r"\bvalidat|\beval|\btest\b", re.IGNORECASE)
SAVED = re.compile(
    r"(?:success\w*|finished|done) sav\w+ (?:the |a )?(?:full )?checkpoint(?:.*?(?:iteration|step)\s+(\d+))?"
    r"|saving model checkpoint to .*checkpoint-(\d+)",
    re.IGNORECASE,
)
JSON_LINES, MEGATRON_LOG, TITAN_LOG, TRAINER_LOG = (
    "JSON Lines log",
    "Megatron-LM console log",
    "torchtitan console log",
    "transformers console log",
)


def read_text(file: Path) -> TrainingLog:
    """Return the log of a file of lines; lines that hold no step and no loss are passed over, a torn last one too."""
    rows: list[Mapping[str, object]] = []
    kinds: Counter[str] = Counter()
    checkpoints: list[int] = []
    remarks: list[str] = []
    last = 0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = COLOURS.sub("", line)
            saved = SAVED.search(text)
            if saved:
                checkpoints.append(int(saved[1] or saved[2] or last))
            kind, row = _line(text)
            if kind is None:
                continue
            if not line.endswith("\n") and kind != JSON_LINES:  # a number cut in two is still a number
                remarks.append("the last line is not ended and was left out")
                continue
            kinds[kind] += 1
            rows.append(row)
            step = next((value for name, value in row.items() if STEPS.match(name)), last)
            last = int(step) if isinstance(step, int | str) and str(step).isdigit() else last
    kind = kinds.most_common(1)[0][0] if kinds else "text file"
    remarks += [f"{count} lines of a {other} were read with them" for other, count in kinds.items() if other != kind]
    return build(str(file), kind, rows, checkpoints=checkpoints, remarks=remarks)


def read_csv(file: Path) -> TrainingLog:
    """Return the log of a table with a head line, separated by commas, semicolons or tabs."""
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        head = lines.readline()
        lines.seek(0)
        separator = max(",;\t", key=head.count)
        return build(str(file), "CSV log", list(csv.DictReader(lines, delimiter=separator, restval="")))


def read_trainer_state(file: Path, state: Mapping[str, object]) -> TrainingLog:
    """Return the log in a ``trainer_state.json`` of transformers; checkpoints stand at multiples of ``save_steps``."""
    entries = state.get("log_history")
    rows = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    every, last = state.get("save_steps"), state.get("global_step")
    saved = range(0)
    if isinstance(every, int) and isinstance(last, int) and every > 0:
        saved = range(every, last + 1, every)
    return build(str(file), "transformers trainer_state.json", rows, checkpoints=saved)


def _line(text: str) -> tuple[str | None, Mapping[str, object]]:
    """Return what a line is and its values; None where it is no row of a training log."""
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            parsed = json.loads(stripped)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return JSON_LINES, parsed
        if not stripped.endswith("}"):
            return None, {}
        values = dict(PAIR.findall(stripped))
        return (TRAINER_LOG, values) if "loss" in values else (None, {})
    if "oss" not in stripped or OTHER_LOSS.search(stripped):
        return None, {}
    megatron = MEGATRON.search(stripped)
    if megatron:
        pairs = (MEGATRON_PAIR.search(part) for part in stripped.split("|"))
        return MEGATRON_LOG, {"iteration": megatron[1], **{pair[1].strip(): pair[2] for pair in pairs if pair}}
    values = dict(_pairs(stripped))
    if not any(STEPS.match(name) for name in values) or not any("loss" in name for name in values):
        return None, {}
    return (TITAN_LOG if "tps" in values else "console log"), values


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    yield from LOSS_WORD.findall(text)
    yield from STEP_WORD.findall(text)
    yield from PAIR.findall(text)
