"""Rewrites of written traces that must not change what an analysis finds."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Trace = dict[str, Any]


def rewritten(source: Path, target: Path, change: Callable[[Trace], None]) -> Path:
    """Copy a run, applying a change to each rank's trace; returns the target."""
    target.mkdir()
    (target / "run.json").write_bytes((source / "run.json").read_bytes())
    for path in sorted(source.glob("rank*")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        change(trace)
        rank = trace["distributedInfo"]["rank"]
        (target / f"rank{rank}_trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode(), 1, mtime=0))
    return target


def shifted(host: str, offset_ns: int) -> Callable[[Trace], None]:
    """Return a change that moves the clock of one host."""

    def change(trace: Trace) -> None:
        if trace["host_name"] == host:
            trace["baseTimeNanoseconds"] += offset_ns

    return change


def shuffled(seed: int) -> Callable[[Trace], None]:
    """Return a change of the order of events, which a file does not promise."""
    order = random.Random(seed)  # noqa: S311  no secret

    def change(trace: Trace) -> None:
        order.shuffle(trace["traceEvents"])

    return change


def relabelled(number: Callable[[int], int]) -> Callable[[Trace], None]:
    """Return a change of the ranks' numbers, everywhere they stand."""

    def many(text: str) -> str:
        return str([number(rank) for rank in json.loads(text)])

    def change(trace: Trace) -> None:
        info = trace["distributedInfo"]
        info["rank"] = number(info["rank"])
        for group in info["pg_config"]:
            group["ranks"] = [number(rank) for rank in group["ranks"]]
        for event in trace["traceEvents"]:
            args = event.get("args") or {}
            for name in ("Rank", "Src Rank", "Dst Rank"):
                if name in args:
                    args[name] = number(args[name])
            if args.get("Process Group Ranks"):
                args["Process Group Ranks"] = many(args["Process Group Ranks"])

    return change
