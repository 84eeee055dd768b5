"""Time and memory of the cross-rank step alone, by ranks: python cross_rank.py RANKS COLLECTIVES [--profile]."""

import argparse
import cProfile
import json
import pstats
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.synthetic_ranks import accounts
from traceaudit.mfu.model import Run
from traceaudit.pipeline import _attributed
from traceaudit.steps import Selection


def peak_mb() -> float:
    """Return the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Run one size and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("collectives", type=int)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    own = accounts(asked.ranks, asked.collectives)
    before = peak_mb()
    profile = cProfile.Profile()
    begun, cpu = time.perf_counter(), time.process_time()
    if asked.profile:
        profile.enable()
    audit = _attributed("synthetic", own, Run({}, {}), Selection(), [], [])
    profile.disable()
    found = {
        "ranks": asked.ranks,
        "collectives": asked.collectives,
        "seconds": round(time.perf_counter() - begun, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "accounts_mb": round(before),
        "peak_mb": round(peak_mb()),
        "straggler_share": round(audit.result["job"]["buckets"]["straggler"] / audit.result["job"]["window_ns"], 4),
    }
    print(json.dumps(found))
    if asked.profile:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(40)


if __name__ == "__main__":
    main()
