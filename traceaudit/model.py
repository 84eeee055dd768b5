"""Numerator and denominator of MFU: what the user declared, what the traces tell, and where each figure comes from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceaudit.account import RankAccount
from traceaudit.errors import InputError
from traceaudit.hardware import DTYPES, find, identify

DEGREES = ("pp", "tp", "dp", "cp", "ep")


@dataclass(frozen=True)
class Run:
    """What was declared about a run: values by name as in ``run.json``, and the source of each."""

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """Return a declared number.

        Raises:
            InputError: it is no positive number.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{self.sources[name]}: {name} must be a positive number, not {value!r}.")
        return float(value)

    def degrees(self) -> dict[str, int]:
        """Return the declared degrees of parallelism."""
        parallel = self.values.get("parallel") or {}
        found = {name: parallel.get(name) for name in DEGREES} if isinstance(parallel, Mapping) else {}
        found |= {name: self.values[name] for name in DEGREES if self.values.get(name) is not None}
        return {name: int(value) for name, value in found.items() if isinstance(value, int | float)}


def declared(files: Sequence[Path], flags: Mapping[str, Any]) -> Run:
    """Return what files and flags declare; a flag beats a file, a later file an earlier one.

    Raises:
        InputError: a file is no JSON object.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(found, dict):
            raise InputError(f"{file}: expected a JSON object such as run.json.")
        known = {name: value for name, value in found.items() if value is not None}
        values |= known
        sources |= dict.fromkeys(known, file.name)
    given = {name: value for name, value in flags.items() if value is not None}
    return Run(values | given, sources | dict.fromkeys(given, "declared"))


@dataclass(frozen=True)
class Peak:
    """Dense peak rate of one GPU, with its source; `tflops` by element type."""

    gpu: str | None
    tflops: dict[str, float]
    dtype: str
    source: str

    def flop_per_ns(self, dtype: str) -> float | None:
        """Return the peak in FLOP/ns for an element type, "" for the run's own; None if the GPU has no such rate."""
        rate = self.tflops.get(dtype or self.dtype)
        return rate * 1e3 if rate else None


def peak(run: Run, accounts: Sequence[RankAccount]) -> tuple[Peak | None, str]:
    """Return the peak of the run's GPUs, or nothing and the reason.

    Raises:
        InputError: ``--gpu`` or ``--dtype`` is unknown.
    """
    dtype = str(run.values.get("dtype") or _counted_dtype(accounts) or "")
    dtype = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}.get(
        dtype, dtype
    )
    if dtype and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown; expected one of {', '.join(DTYPES)}.")
    given = run.number("peak_tflops")
    names = {account.origin.device.name for account in accounts if account.origin.device is not None}
    seen = ", ".join(sorted(names)) or None
    if given is not None:
        rates = dict.fromkeys(DTYPES, given)
        return Peak(str(run.values.get("gpu") or seen or "") or None, rates, dtype or "bf16", "--peak-tflops"), ""
    if run.values.get("gpu"):
        gpu = find(str(run.values["gpu"]))
        if gpu is None:
            raise InputError(f"GPU {run.values['gpu']!r} is not in the peak table; pass --peak-tflops (dense).")
        source = f"table, by the declared name: {gpu.source}"
    else:
        if len(names) > 1:
            return None, f"the ranks ran on different GPUs ({seen}); pass --gpu or --peak-tflops"
        device = next((account.origin.device for account in accounts if account.origin.device is not None), None)
        gpu = identify(device) if device is not None else None
        if gpu is None:
            what = f"GPU {device.name!r} is not in the peak table" if device else "the traces do not name the GPU"
            return None, f"{what}; pass --gpu NAME or --peak-tflops X (dense)"
        source = f"table: {gpu.source}"
    rates = dict(gpu.tflops)
    if any(account.tf32 for account in accounts) and "tf32" in rates:
        rates["fp32"] = rates["tf32"]
    if not dtype:
        return None, "neither --dtype nor the shapes in the traces tell the element type of the matrix products"
    if dtype not in rates:
        return None, f"the peak table has no {dtype} rate for {gpu.name}; pass --peak-tflops"
    return Peak(gpu.name, rates, dtype, source), ""


def _counted_dtype(accounts: Sequence[RankAccount]) -> str:
    """Return the element type of most of the counted FLOPs."""
    totals: dict[str, float] = {}
    for account in accounts:
        if account.steps is not None:
            for dtype, flops in zip(account.compute["dtype"], account.compute["flops"], strict=True):
                totals[dtype] = totals.get(dtype, 0.0) + flops
    totals.pop("", None)
    return max(totals, key=lambda dtype: totals[dtype]) if totals and max(totals.values()) > 0 else ""


@dataclass(frozen=True)
class Numerator:
    """Model FLOPs of one step of the whole job, as declared.

    Attributes:
        flops: per step, all ranks together.
        formula: in words.
        factors: name, value and source of each factor.
        attention: attention FLOPs are on top of 6·params·tokens.
    """

    flops: float
    formula: str
    factors: tuple[tuple[str, float, str], ...]
    attention: bool


def numerator(run: Run) -> Numerator | None:
    """Return the declared model FLOPs of a step, nothing if parameters or tokens are not declared.

    6 FLOPs a parameter and token (2 forward, 4 backward; Kaplan et al. 2020), and on request 12·layers·hidden·seq_len a
    token for attention (PaLM, appendix B), half of it where only the causal half is counted.

    Raises:
        InputError: attention FLOPs were asked for without layers, hidden and seq_len.
    """
    name = "active_params" if run.values.get("active_params") is not None else "params"
    params, tokens = run.number(name), run.number("tokens_per_step")
    if params is None or tokens is None:
        if run.values.get("attention_flops"):
            raise InputError("--attention-flops needs --params and --tokens-per-step as well.")
        return None
    names = [name, "tokens_per_step"]
    flops = 6 * params * tokens
    formula = f"6·{name}·tokens"
    attention = bool(run.values.get("attention_flops"))
    if attention:
        extra = ["layers", "hidden", "seq_len"]
        sizes = [run.number(factor) for factor in extra]
        if None in sizes:
            raise InputError("--attention-flops needs --layers, --hidden and --seq-len.")
        layers, hidden, length = (size or 0.0 for size in sizes)
        factor = 6 if run.values.get("causal") else 12
        flops += factor * layers * hidden * length * tokens
        formula += f" + {factor}·layers·hidden·seq_len·tokens" + (" (causal half)" if factor == 6 else "")
        names += extra
    factors = tuple((factor, float(run.values[factor]), run.sources[factor]) for factor in names)
    return Numerator(flops, formula, factors, attention)
