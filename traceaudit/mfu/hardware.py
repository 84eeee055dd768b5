"""Peak rates of GPUs: dense FLOP/s by element type and memory bandwidth, from a table that names its sources."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from traceaudit.events import Device

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")

# GPUs whose trace has an empty or a generic name: compute capability, warp size (0 any), multiprocessors, and least
# memory in bytes. Properties that fit GPUs with different peaks (MI350X and MI355X, V100 SXM and PCIe) identify none.
FINGERPRINTS: tuple[tuple[tuple[int, int], int, int, int, str], ...] = (
    ((9, 4), 0, 304, 250 << 30, "AMD Instinct MI325X"),
    ((9, 4), 0, 304, 180 << 30, "AMD Instinct MI300X"),
    ((9, 0), 64, 110, 60 << 30, "AMD Instinct MI250X"),
    ((9, 0), 64, 104, 60 << 30, "AMD Instinct MI250"),
    ((10, 0), 0, 148, 170 << 30, "NVIDIA B200"),
    ((9, 0), 32, 132, 140 * 10**9, "NVIDIA H200"),
    ((9, 0), 32, 132, 84 * 10**9, "NVIDIA H100 80GB HBM3"),
    ((9, 0), 32, 114, 84 * 10**9, "NVIDIA H100 PCIe"),
    ((8, 0), 32, 108, 84 * 10**9, "NVIDIA A100-SXM4-80GB"),
    ((8, 0), 32, 108, 42 * 10**9, "NVIDIA A100-SXM4-40GB"),
)
GENERIC = re.compile(r"^(?:|AMD Radeon Graphics)$")


@dataclass(frozen=True)
class Gpu:
    """One row of the peak table.

    Attributes:
        name: the model.
        pattern: regular expression of the names that traces give it, case-insensitive.
        tflops: dense peak by element type, 10**12 FLOP/s; absent where the GPU has no such rate.
        hbm_gbps: memory bandwidth, 10**9 B/s; None where unknown.
        multiprocessors: streaming multiprocessors or compute units; None where unknown.
        source: where the figures come from.
        uncertain: columns that the source leaves in doubt.
        note: what to know about them.
    """

    name: str
    pattern: str
    tflops: dict[str, float]
    hbm_gbps: float | None
    multiprocessors: int | None
    source: str
    uncertain: str
    note: str


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the peak table, the most specific patterns first."""
    text = files("traceaudit").joinpath("data/device_peaks.tsv").read_text(encoding="utf-8")
    return tuple(
        Gpu(
            name=row["name"],
            pattern=row["name_pattern"],
            tflops={dtype: float(row[dtype]) for dtype in DTYPES if row[dtype]},
            hbm_gbps=float(row["hbm_gbps"]) if row["hbm_gbps"] else None,
            multiprocessors=int(row["sm_count"]) if row["sm_count"] else None,
            source=row["source"],
            uncertain=row["uncertain_fields"],
            note=row["note"],
        )
        for row in csv.DictReader(text.splitlines(), delimiter="\t")
    )


def find(name: str) -> Gpu | None:
    """Return the table's row for a device name, if there is one.

    >>> [found.tflops["bf16"] if (found := find(name)) else None for name in ("NVIDIA H100 80GB HBM3", "Riva 128")]
    [989.4, None]
    """
    return next((gpu for gpu in gpus() if re.search(gpu.pattern, name, re.IGNORECASE)), None)


def identify(device: Device) -> Gpu | None:
    """Return the table's row for a GPU described in a trace, by name, else by what its properties leave possible."""
    if not GENERIC.match(device.name):
        return find(device.name)
    for capability, warp, multiprocessors, memory, name in FINGERPRINTS:
        alike = device.capability == capability and device.multiprocessors == multiprocessors
        if alike and device.warp_size in (warp, device.warp_size * (not warp)) and device.memory_bytes >= memory:
            return find(name)
    return None


def sparse_of(given: float, gpu: Gpu) -> str | None:
    """Return the element type whose 2:4-sparse headline figure a peak is, nothing if it is none.

    >>> gpu = find("NVIDIA H100 80GB HBM3")
    >>> (sparse_of(1979, gpu), sparse_of(989.4, gpu)) if gpu else None
    ('bf16', None)
    """
    dense = {dtype: rate for dtype, rate in gpu.tflops.items() if dtype not in ("fp32",)}
    if any(abs(given / rate - 1) < 0.02 for dtype, rate in dense.items() if dtype in ("bf16", "fp16", "tf32")):
        return None
    found = (
        dtype for dtype in ("bf16", "fp16", "fp8", "fp4") if dtype in dense and abs(given / dense[dtype] - 2) < 0.04
    )
    return next(found, None)


def table_rows() -> list[tuple[str, ...]]:
    """Return the peak table as text, its head first: a doubtful figure has a ``~``, a rate that is missing a ``-``."""
    columns = [*DTYPES, "hbm_gbps"]
    rows = [("GPU", *(f"{dtype} TFLOP/s" for dtype in DTYPES), "HBM GB/s", "SMs", "source", "note")]
    for gpu in gpus():
        doubtful = gpu.uncertain.split(",")
        figures = {**gpu.tflops, "hbm_gbps": gpu.hbm_gbps}
        shown = [
            ("~" if column in doubtful else "") + f"{figures[column]:g}" if figures.get(column) else "-"
            for column in columns
        ]
        sms = ("~" if "sm_count" in doubtful else "") + str(gpu.multiprocessors) if gpu.multiprocessors else "-"
        rows.append((gpu.name, *shown, sms, gpu.source, gpu.note))
    return rows
