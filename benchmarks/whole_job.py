"""Analyse a job with one tool, and print seconds and peak memory: python whole_job.py TOOL DIRECTORY [CACHE].

HTA does the three analyses that together come closest: temporal breakdown, overlap of communication, idle breakdown.
"""

import json
import resource
import sys
import time
from pathlib import Path


def traceaudit(directory: Path, cache: str | None) -> None:
    """Attribute the lost time."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from traceaudit.pipeline import analyze

    analyze(directory, cache=cache or False)


def hta(directory: Path, _: str | None) -> None:
    """Break down time, overlap and idle time."""
    from hta.trace_analysis import TraceAnalysis

    files = {rank: str(path) for rank, path in enumerate(sorted(directory.glob("rank*")))}
    analysis = TraceAnalysis(trace_files=files, trace_dir=str(directory))
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    analysis.get_idle_time_breakdown(ranks=list(files), visualize=False)


def main() -> None:
    """Analyse, and print one line of JSON; memory is that of the largest process, ours and its children's."""
    tool, directory, *cache = sys.argv[1:]
    begun = time.perf_counter()
    {"traceaudit": traceaudit, "hta": hta}[tool](Path(directory), cache[0] if cache else None)
    seconds = time.perf_counter() - begun
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    peak = max(own.ru_maxrss for own in usage) / 1024
    cpu = sum(own.ru_utime + own.ru_stime for own in usage)
    print(json.dumps({"tool": tool, "seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak}))


if __name__ == "__main__":
    main()
