"""Peak rates are found by the names and properties that traces give GPUs."""

import csv
from importlib.resources import files

import pytest

from traceaudit.events import Device
from traceaudit.mfu.hardware import DTYPES, find, gpus, identify

# Names as device properties in traces have them, and the row that each must find.
NAMES = {
    "NVIDIA GB300": "NVIDIA GB300",
    "NVIDIA GB200": "NVIDIA GB200",
    "NVIDIA B300 SXM6 AC": "NVIDIA B300 SXM",
    "NVIDIA B200": "NVIDIA B200",
    "NVIDIA B100": "NVIDIA B100",
    "NVIDIA H200 NVL": "NVIDIA H200 NVL",
    "NVIDIA H200": "NVIDIA H200 SXM",
    "NVIDIA H20": "NVIDIA H20",
    "NVIDIA H20-3e": "NVIDIA H20",
    "NVIDIA GH200 480GB": "NVIDIA GH200 (HBM3 96GB)",
    "NVIDIA H100 NVL": "NVIDIA H100 NVL",
    "NVIDIA H100 PCIe": "NVIDIA H100 PCIe",
    "NVIDIA H100 80GB HBM3": "NVIDIA H100 SXM",
    "NVIDIA H100": "NVIDIA H100 (HBM2e custom)",
    "NVIDIA H800 PCIe": "NVIDIA H800 PCIe",
    "NVIDIA H800": "NVIDIA H800 SXM",
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100 80GB SXM",
    "NVIDIA A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "NVIDIA A100-SXM4-40GB": "NVIDIA A100 40GB",
    "NVIDIA A100-PCIE-40GB": "NVIDIA A100 40GB",
    "NVIDIA A100-PG509-200": "NVIDIA A100 40GB",
    "NVIDIA A800-SXM4-80GB": "NVIDIA A800 80GB",
    "NVIDIA A30": "NVIDIA A30",
    "NVIDIA A40": "NVIDIA A40",
    "NVIDIA A10G": "NVIDIA A10G",
    "NVIDIA A10": "NVIDIA A10",
    "NVIDIA L40S": "NVIDIA L40S",
    "NVIDIA L40": "NVIDIA L40",
    "NVIDIA L20": "NVIDIA L20",
    "NVIDIA L4": "NVIDIA L4",
    "NVIDIA RTX 6000 Ada Generation": "NVIDIA RTX 6000 Ada",
    "NVIDIA RTX A6000": "NVIDIA RTX A6000",
    "NVIDIA GeForce RTX 5090": "NVIDIA GeForce RTX 5090",
    "NVIDIA GeForce RTX 4090": "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 3090": "NVIDIA GeForce RTX 3090",
    "Tesla V100-SXM2-32GB": "NVIDIA V100 SXM",
    "Tesla V100-DGXS-32GB": "NVIDIA V100 SXM",
    "Tesla V100S-PCIE-32GB": "NVIDIA V100S PCIe",
    "Tesla V100-PCIE-16GB": "NVIDIA V100 PCIe",
    "Tesla T4": "NVIDIA T4",
    "AMD Instinct MI355X": "AMD MI355X",
    "AMD Instinct MI350X": "AMD MI350X",
    "AMD Instinct MI325X": "AMD MI325X",
    "AMD Instinct MI300X": "AMD MI300X",
    "AMD Instinct MI300X VF": "AMD MI300X",
    "AMD Instinct MI300A": "AMD MI300A",
    "AMD Instinct MI250X": "AMD MI250X (one GCD)",
    "AMD Instinct MI250": "AMD MI250 (one GCD)",
    "AMD Instinct MI210": "AMD MI210",
    "HL-325L": "Intel Gaudi3",
    "HL-225": "Intel Gaudi2",
    "Intel(R) Data Center GPU Max 1550": "Intel Max 1550 (one tile, 512 EU)",
}


@pytest.mark.parametrize(("name", "row"), NAMES.items())
def test_a_name_in_a_trace_finds_its_row(name: str, row: str) -> None:
    """A name finds the row of its own model, not that of one whose name is a part of it."""
    found = find(name)
    assert found is not None
    assert found.name == row


def test_every_row_is_found_by_some_name() -> None:
    """No row hides behind the pattern of one before it."""
    assert set(NAMES.values()) == {gpu.name for gpu in gpus()}


@pytest.mark.parametrize(
    "name", ["", "Riva 128", "NVIDIA A1000", "NVIDIA L2", "NVIDIA A16", "NVIDIA GeForce RTX 4080 SUPER", "NVIDIA"]
)
def test_an_unknown_name_finds_nothing(name: str) -> None:
    """A GPU that is not in the table has no peak, not that of a similar name."""
    assert find(name) is None


def test_names_are_matched_in_any_case() -> None:
    """A name typed by hand finds the same row."""
    assert find("nvidia h100 80gb hbm3") == find("NVIDIA H100 80GB HBM3") is not None


def test_the_table_is_read_as_it_stands() -> None:
    """Every figure of the file is a rate in 10**12 FLOP/s or a bandwidth; an empty field is no rate; sources stand."""
    text = files("traceaudit").joinpath("data/device_peaks.tsv").read_text(encoding="utf-8")
    lines = list(csv.reader(text.splitlines(), delimiter="\t"))
    for gpu, line in zip(gpus(), lines[1:], strict=True):
        row = dict(zip(lines[0], line, strict=False))
        assert gpu.name == row["name"]
        assert gpu.tflops == {dtype: float(row[dtype]) for dtype in DTYPES if row[dtype]}
        assert gpu.hbm_gbps == float(row["hbm_gbps"])
        assert gpu.source == row["source"] != ""


def test_no_gpu_is_slower_with_fewer_bits() -> None:
    """Dense rates do not fall from fp32 to fp4, except where the table says that the field is in doubt."""
    for gpu in gpus():
        rates = [gpu.tflops[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8", "fp4") if dtype in gpu.tflops]
        assert rates == sorted(rates), gpu.name


# (capability, multiprocessors, memory in bytes, warp size) of traces whose device name is empty or generic.
FINGERPRINTS = [
    ("", (9, 4), 304, 206_141_652_992, "AMD MI300X"),
    ("", (9, 4), 304, 205_571_227_648, "AMD MI300X"),
    ("", (9, 4), 304, 256 << 30, "AMD MI325X"),
    ("AMD Radeon Graphics", (9, 0), 104, 68_702_699_520, "AMD MI250 (one GCD)"),
    ("AMD Radeon Graphics", (9, 0), 110, 68_702_699_520, "AMD MI250X (one GCD)"),
    ("", (10, 0), 148, 191_503_138_816, "NVIDIA B200"),
]


@pytest.mark.parametrize(("name", "capability", "multiprocessors", "memory", "row"), FINGERPRINTS)
def test_properties_identify_a_gpu_without_a_name(
    name: str, capability: tuple[int, int], multiprocessors: int, memory: int, row: str
) -> None:
    """Where the name is empty or generic, what the trace says of the device tells the model."""
    found = identify(Device(name, memory, multiprocessors, capability, 64))
    assert found is not None
    assert found.name == row


@pytest.mark.parametrize(
    "device",
    [
        Device("", 0, 0, (0, 0), 0),
        Device("", 206_141_652_992, 303, (9, 4), 64),
        Device("", 1 << 30, 304, (9, 4), 64),
        Device("Riva 128", 206_141_652_992, 304, (9, 4), 64),
    ],
)
def test_properties_that_fit_no_gpu_identify_none(device: Device) -> None:
    """Other properties, or a name that is given but unknown, have no peak."""
    assert identify(device) is None


def test_a_name_beats_the_properties() -> None:
    """A device is what its name says, even if its properties look like another's."""
    found = identify(Device("NVIDIA H100 80GB HBM3", 191_503_138_816, 148, (10, 0), 32))
    assert found is not None
    assert found.name == "NVIDIA H100 SXM"
