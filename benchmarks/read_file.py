"""Read one trace file with one reader, and print seconds and peak memory: python read_file.py READER FILE.

Each reader runs in a process of its own, HTA in the environment that has it.
"""

import json
import resource
import sys
import time
from pathlib import Path


def traceaudit(path: str) -> int:
    """Read into the events table; returns its rows."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from traceaudit.reading.normalise import read_trace

    return len(read_trace(Path(path)).events)


def parse_alone(path: str) -> int:
    """Parse the JSON with orjson and look at nothing; returns its events."""
    import gzip

    import orjson

    content = Path(path).read_bytes()
    return len(orjson.loads(gzip.decompress(content) if path.endswith(".gz") else content)["traceEvents"])


def hta(path: str) -> int:
    """Read as Holistic Trace Analysis does by default; returns the rows of its table."""
    from hta.common.trace_parser import parse_trace_dataframe
    from hta.configs.parser_config import ParserConfig

    found = parse_trace_dataframe(path, ParserConfig.get_default_cfg())
    return len(found[1])


def tracelens(path: str) -> int:
    """Read as TraceLens does; returns its events."""
    from TraceLens import TreePerfAnalyzer

    return len(TreePerfAnalyzer.from_file(path).tree.events)


READERS = {reader.__name__: reader for reader in (traceaudit, parse_alone, hta, tracelens)}


def main() -> None:
    """Read, and print one line of JSON."""
    name, path = sys.argv[1:]
    begun = time.perf_counter()
    rows = READERS[name](path)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    print(json.dumps({"reader": name, "seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak, "rows": rows}))


if __name__ == "__main__":
    main()
