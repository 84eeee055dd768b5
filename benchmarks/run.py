"""Run the comparisons and print tables: python run.py WORK --generator GENERATOR [--hta PYTHON] [--tracelens PYTHON].

WORK is a folder for the generated traces; they are made by the program given as --generator (OUT --mb N --gz), once.
Each measurement is a process of its own, on the cores this one may use; run it under ``taskset -c 0,1`` for two.
"""

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def measured(python: str, script: str, *arguments: str) -> dict[str, Any] | None:
    """Return what one process printed last, None if it failed."""
    done = subprocess.run(
        [python, str(HERE / script), *arguments], check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        print(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return found


def in_turn(commands: dict[str, tuple[str, ...]], repeats: int) -> dict[str, dict[str, Any] | None]:
    """Return medians of processes that run one after the other, `repeats` times; None for one that failed."""
    found: dict[str, list[dict[str, Any] | None]] = {label: [] for label in commands}
    for _ in range(repeats):
        for label, command in commands.items():
            found[label].append(measured(*command))
    return {label: _medians([own for own in runs if own is not None]) for label, runs in found.items()}


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    figures = ("seconds", "cpu_seconds", "peak_mb")
    return {name: statistics.median(own[name] for own in runs) for name in figures} if runs else None


def row(label: str, own: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
    """Return a row of a table; ratios are to `base`."""
    if own is None:
        return f"| {label} | failed | | | | | |"
    figures = ("seconds", "cpu_seconds", "peak_mb")
    cells = [f"{own[name]:.{0 if name == 'peak_mb' else 1}f}" for name in figures]
    cells += [f"{own[name] / base[name]:.1f}x" for name in figures] if base is not None else []
    return f"| {label} | {' | '.join(cells)} |"


HEAD = "| | wall s | CPU s | peak MiB | wall | CPU | memory |\n|---|---|---|---|---|---|---|"


def machine() -> str:
    """Describe this machine."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    return f"{cores} cores of {model}, {platform.system()}, Python {platform.python_version()}; load average {load:.1f}"


def generated(work: Path, generator: str, mb: float, rank: int) -> Path:
    """Return a generated trace, made if it is not there."""
    path = work / f"{mb:g}" / f"rank{rank}.json"
    packed = path.with_suffix(".json.gz")
    if not packed.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, generator, str(path), "--mb", str(mb)], check=True)
        with path.open("rb") as plain, gzip.open(packed, "wb", 6) as target:
            head = plain.read(1 << 16)  # the generator writes rank 0
            target.write(head.replace(b'"rank": 0, "world_size"', b'"rank": %d, "world_size"' % rank))
            shutil.copyfileobj(plain, target, 1 << 20)
        path.unlink()
    return packed


def readers(path: Path, pythons: dict[str, str | None], repeats: int) -> None:
    """Print the readers on one file (a)."""
    print(f"\n## Reading {path.name}, {path.stat().st_size / 1e6:.0f} MB gzipped; medians of {repeats}\n\n{HEAD}")
    commands = {
        "traceaudit, into its tables": (sys.executable, "read_file.py", "traceaudit", str(path)),
        "orjson alone, nothing kept": (sys.executable, "read_file.py", "parse_alone", str(path)),
        **{name: (python, "read_file.py", name, str(path)) for name, python in pythons.items() if python},
    }
    found = in_turn(commands, repeats)
    for label, own in found.items():
        print(row(label, own, next(iter(found.values()))))


def whole(folder: Path, hta: str | None) -> None:
    """Print whole analyses of one job, without and with what was kept (b, d)."""
    print(f"\n## Analysing {len(list(folder.glob('rank*')))} ranks\n\n{HEAD}")
    kept = folder / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    cold = measured(sys.executable, "whole_job.py", "traceaudit", str(folder))
    print(row("traceaudit, no cache", cold, cold))
    filling = measured(sys.executable, "whole_job.py", "traceaudit", str(folder), str(kept))
    print(row("traceaudit, filling the cache", filling, cold))
    warm = measured(sys.executable, "whole_job.py", "traceaudit", str(folder), str(kept))
    print(row("traceaudit, cached", warm, cold))
    if hta:
        print(row("HTA: temporal, overlap, idle", measured(hta, "whole_job.py", "hta", str(folder)), cold))
    if cold and warm:
        print(f"\ncached is {cold['seconds'] / warm['seconds']:.1f} times as fast as uncached")


def growth(work: Path, generator: str, mb: float) -> None:
    """Print how reading, and analysing a rank, grow with events (c)."""
    paths = [generated(work, generator, mb * factor, 0) for factor in (1, 2, 4, 8)]
    for what, script in (("Reading", "read_file.py"), ("Analysing", "whole_job.py")):
        print(f"\n## {what}: growth with events\n\n{HEAD}")
        base = None
        for path in paths:
            given = str(path if what == "Reading" else path.parent)
            own = measured(sys.executable, script, "traceaudit", given)
            base = base or own
            print(row(f"{path.parent.name} MB", own, base))


def ranks_growth(counts: list[int], collectives: int) -> None:
    """Print how the cross-rank step grows with ranks (c)."""
    print("\n## Cross-rank step alone\n\n| ranks | collectives each | s | CPU s | peak MiB |\n|---|---|---|---|---|")
    for count in counts:
        own = measured(sys.executable, "cross_rank.py", str(count), str(collectives))
        if own is not None:
            print(f"| {count:,} | {collectives:,} | {own['seconds']} | {own['cpu_seconds']} | {own['peak_mb']:,} |")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--generator", required=True)
    parser.add_argument("--mb", type=float, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hta")
    parser.add_argument("--tracelens")
    parser.add_argument("--growth-mb", type=float, default=125)
    parser.add_argument("--cross-ranks", type=int, nargs="*", default=[8, 64, 512, 4096, 16384])
    parser.add_argument("--collectives", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=["readers", "whole", "growth", "ranks"])
    asked = parser.parse_args()
    print(f"# Benchmarks\n\n{machine()}")
    if "readers" in asked.only:
        path = generated(asked.work, asked.generator, asked.mb, 0)
        readers(path, {"hta": asked.hta, "tracelens": asked.tracelens}, asked.repeats)
    if "whole" in asked.only:
        for rank in range(asked.ranks):
            path = generated(asked.work, asked.generator, asked.mb, rank)
        whole(path.parent, asked.hta)
    if "growth" in asked.only:
        growth(asked.work, asked.generator, asked.growth_mb)
    if "ranks" in asked.only:
        ranks_growth(asked.cross_ranks, asked.collectives)


if __name__ == "__main__":
    main()
