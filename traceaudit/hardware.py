"""Peak rates of GPUs: dense FLOP/s by element type and memory bandwidth, from a table that names its sources."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from traceaudit.events import Device

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")

# GPUs whose trace has an empty or a generic name: (compute capability, multiprocessors, smallest memory in bytes).
FINGERPRINTS: tuple[tuple[tuple[int, int], int, int, str], ...] = (
    ((9, 4), 304, 250 << 30, "AMD Instinct MI325X"),
    ((9, 4), 304, 180 << 30, "AMD Instinct MI300X"),
    ((9, 0), 110, 60 << 30, "AMD Instinct MI250X"),
    ((9, 0), 104, 60 << 30, "AMD Instinct MI250"),
    ((10, 0), 148, 170 << 30, "NVIDIA B200"),
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
        source: where the figures come from.
        uncertain: columns that the source leaves in doubt.
        note: what to know about them.
    """

    name: str
    pattern: str
    tflops: dict[str, float]
    hbm_gbps: float | None
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
    for capability, multiprocessors, memory, name in FINGERPRINTS:
        alike = device.capability == capability and device.multiprocessors == multiprocessors
        if alike and device.memory_bytes >= memory:
            return find(name)
    return None
