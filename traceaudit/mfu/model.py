"""Numerator and denominator of MFU: what the user declared, what the traces tell, and where each figure comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceaudit.account import RankAccount
from traceaudit.errors import InputError
from traceaudit.mfu.architecture import CONVENTIONS
from traceaudit.mfu.hardware import DTYPES, Gpu, find, identify, sparse_of
from traceaudit.mfu.model_files import read

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
        InputError: a file is of no known format (`traceaudit.mfu.model_files`).
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for file in files:
        found = read(file)
        known = {name: value for name, value in found.items() if value is not None}
        values |= known
        sources |= dict.fromkeys(known, file.name)
    given = {name: value for name, value in flags.items() if value is not None}
    return Run(values | given, sources | dict.fromkeys(given, "declared"))


# Spellings of element types in options and model files.
SPELLINGS = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "torch.float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "torch.float32": "fp32",
    "float": "fp32",
    "float8": "fp8",
}
LOW_PRECISION = ("bf16", "fp16", "fp8", "fp4")  # element types that one run mixes by design
MIXED_SHARE = 0.01  # of the counted FLOPs in another element type, above which the peak is a mixed one


@dataclass(frozen=True)
class Peak:
    """Dense peak rate of one GPU, with its source.

    Attributes:
        gpu: the model; None where only a rate was given.
        tflops: by element type.
        dtype: the run's own.
        source: where the rate comes from.
        hbm_gbps: memory bandwidth; None where unknown.
        multiprocessors: None where unknown.
        fixed: the rate was given, so that it holds for every element type.
        shares: of the counted FLOPs by element type, where the run mixes them; empty for a run of one.
        notes: what to know about the figures.
    """

    gpu: str | None
    tflops: dict[str, float]
    dtype: str
    source: str
    hbm_gbps: float | None = None
    multiprocessors: int | None = None
    fixed: bool = False
    shares: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def flop_per_ns(self, dtype: str) -> float | None:
        """Return the peak in FLOP/ns for an element type, "" for the run's own; None if the GPU has no such rate."""
        rate = self.tflops.get(self.dtype if self.fixed else dtype or self.dtype)
        return rate * 1e3 if rate else None

    def mixed_flop_per_ns(self) -> float | None:
        """Return the rate of FLOPs mixed as the counted ones are: each share at its own peak."""
        if not self.shares:
            return self.flop_per_ns("")
        rates = {dtype: self.tflops.get(dtype) for dtype in self.shares}
        return 1e3 / sum(share / (rates[dtype] or self.tflops[self.dtype]) for dtype, share in self.shares.items())


def peak(run: Run, accounts: Sequence[RankAccount], *, asked: bool = False) -> tuple[Peak | None, str]:
    """Return the peak of the run's GPUs, or nothing and the reason.

    Raises:
        InputError: ``--gpu`` or ``--dtype`` is unknown; or MFU was `asked` for and the GPU is not in the table.
    """
    counted = _counted_dtypes(accounts)
    dtype = str(run.values.get("dtype") or next(iter(counted), "") or "")
    dtype = SPELLINGS.get(dtype, dtype)
    if dtype and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown; expected one of {', '.join(DTYPES)}.")
    given, bandwidth = run.number("peak_tflops"), run.number("hbm_gbps")
    named = run.values.get("gpu")
    devices = {account.origin.device for account in accounts if account.origin.device is not None}
    seen = ", ".join(sorted({device.name for device in devices if device.name}))
    found = {gpu.name: gpu for gpu in map(identify, devices) if gpu is not None}
    gpu = find(str(named)) if named else next(iter(found.values())) if len(found) == 1 else None
    if named and gpu is None and run.sources.get("gpu") == "declared":
        raise InputError(f"GPU {str(named)!r} is not in the peak table; pass --peak-tflops X (dense).")
    if gpu is None and named:  # a file names a GPU that the table does not have; the traces may tell it
        gpu = next(iter(found.values())) if len(found) == 1 else None
    bandwidth = bandwidth or (gpu.hbm_gbps if gpu else None)
    if given is not None:
        shown = dtype or "bf16"
        return Peak(
            gpu.name if gpu else seen or None,
            {shown: given},
            shown,
            "--peak-tflops" if run.sources["peak_tflops"] == "declared" else run.sources["peak_tflops"],
            hbm_gbps=bandwidth,
            multiprocessors=_multiprocessors(accounts, gpu),
            fixed=True,
            notes=_doubts_of_given(given, shown, gpu),
        ), ""
    if gpu is None:
        reason = _unknown(named, seen, len(found))
        if asked:
            raise InputError(f"{reason}.")
        return None, reason
    rates = dict(gpu.tflops)
    if dtype == "fp32" and any(account.tf32 for account in accounts) and "tf32" in rates:
        rates["fp32"] = rates["tf32"]
    if not dtype:
        return None, "neither --dtype nor the shapes in the traces tell the element type of the matrix products"
    if dtype not in rates:
        return None, f"the peak table has no {dtype} rate for {gpu.name}; pass --peak-tflops"
    source = f"table: {gpu.source}"
    return Peak(
        gpu.name,
        rates,
        dtype,
        source,
        hbm_gbps=bandwidth,
        multiprocessors=_multiprocessors(accounts, gpu),
        shares=_mixture(counted, rates, dtype),
        notes=_doubts(gpu, dtype),
    ), ""


def _unknown(named: object, seen: str, kinds: int) -> str:
    """Return why there is no peak, and what to pass."""
    if kinds > 1:
        what = f"the ranks ran on different GPUs ({seen})"
    elif named or seen:
        what = f"GPU {str(named or seen)!r} is not in the peak table"
    else:
        what = "the traces do not name the GPU"
    return f"{what}; pass --gpu NAME or --peak-tflops X (dense)"


def _multiprocessors(accounts: Sequence[RankAccount], gpu: Gpu | None) -> int | None:
    traced = {account.origin.device.multiprocessors for account in accounts if account.origin.device is not None}
    traced.discard(0)
    return traced.pop() if len(traced) == 1 else gpu.multiprocessors if gpu else None


def _doubts(gpu: Gpu, dtype: str) -> tuple[str, ...]:
    """Return what the table says of a figure that is used: one GCD or tile, or a doubtful source."""
    notes = []
    if "one " in gpu.name:
        notes.append(f"the peak is that of one device of the trace, half a package: {gpu.note or gpu.name}")
    doubtful = [column for column in (dtype, "hbm_gbps") if column in gpu.uncertain.split(",")]
    if doubtful:
        notes.append(f"the table marks {' and '.join(doubtful)} of {gpu.name} as uncertain")
    return tuple(notes)


def _doubts_of_given(given: float, dtype: str, gpu: Gpu | None) -> tuple[str, ...]:
    sparse = sparse_of(given, gpu) if gpu else None
    if not gpu or not sparse:
        return ()
    dense = gpu.tflops.get(dtype) or gpu.tflops[sparse]
    return (
        f"--peak-tflops {given:g} is the 2:4-sparse {sparse} figure of {gpu.name}: MFU reads half; "
        f"the dense {dtype} peak is {dense:g}",
    )


def _mixture(counted: Mapping[str, float], rates: Mapping[str, float], dtype: str) -> dict[str, float]:
    """Return the shares of the counted FLOPs by element type where more than one rate matters."""
    low = {name: flops for name, flops in counted.items() if name in LOW_PRECISION and name in rates}
    total = sum(low.values())
    shares = {name: flops / total for name, flops in low.items() if flops > MIXED_SHARE * total} if total else {}
    if len({rates[name] for name in shares} | {rates[dtype]}) < 2 or dtype not in LOW_PRECISION:
        return {}
    whole = sum(shares.values())
    return {name: share / whole for name, share in shares.items()}


def _counted_dtypes(accounts: Sequence[RankAccount]) -> dict[str, float]:
    """Return the counted FLOPs by element type, the most first."""
    totals: dict[str, float] = {}
    for account in accounts:
        if account.steps is not None:
            for dtype, flops in zip(account.compute["dtype"], account.compute["flops"], strict=True):
                totals[dtype] = totals.get(dtype, 0.0) + flops
    totals.pop("", None)
    return {dtype: flops for dtype, flops in sorted(totals.items(), key=lambda item: -item[1]) if flops > 0}


@dataclass(frozen=True)
class Numerator:
    """Model FLOPs of one step of the whole job, as declared.

    Attributes:
        flops: per step, all ranks together.
        formula: in words.
        factors: name, value and source of each factor.
        attention: attention FLOPs are on top of 6·params·tokens.
        convention: key of `CONVENTIONS`.
        conventions: FLOPs of the step under each convention whose factors are known.
        recompute: "full", "selective", "none" as declared; None where not.
    """

    flops: float
    formula: str
    factors: tuple[tuple[str, float, str], ...]
    attention: bool
    convention: str = "6N"
    conventions: Mapping[str, float] = field(default_factory=dict)
    recompute: str | None = None


def numerator(run: Run, world_size: int = 1) -> Numerator | None:
    """Return the declared model FLOPs of a step, nothing if parameters or tokens are not declared.

    6 FLOPs a parameter and token (2 forward, 4 backward; Kaplan et al. 2020), and on request 12·layers·heads·head_dim·
    seq_len a token for attention (PaLM, appendix B; heads·head_dim is hidden where not declared), half of it where only
    the causal half is counted. Of experts the active parameters count.

    Raises:
        InputError: attention FLOPs were asked for without layers, hidden and seq_len.
    """
    name = "active_params" if run.values.get("active_params") is not None else "params"
    params, (tokens, token_factors) = run.number(name), _tokens(run, world_size)
    if params is None or tokens is None:
        if run.values.get("attention_flops"):
            raise InputError("--attention-flops needs --params and --tokens-per-step as well.")
        return None
    conventions, attention_factors = _conventions(run, params, tokens)
    attention = bool(run.values.get("attention_flops"))
    convention = ("megatron" if run.values.get("causal") else "palm") if attention else "6N"
    if convention not in conventions:
        raise InputError("--attention-flops needs --layers, --hidden and --seq-len.")
    formula = f"6·{name}·tokens"
    factors = [(name, params, run.sources[name]), *token_factors]
    if attention:
        width = "heads·head_dim" if "heads" in [factor for factor, _, _ in attention_factors] else "hidden"
        factor = 6 if convention == "megatron" else 12
        half = " (causal half)" if factor == 6 else " (whole attention)"
        formula += f" + {factor}·layers·{width}·seq_len·tokens{half}"
        factors += attention_factors
    stated = run.values.get("recompute")
    return Numerator(
        conventions[convention],
        formula,
        tuple(factors),
        attention,
        convention,
        conventions,
        str(stated) if stated is not None else None,
    )


def _tokens(run: Run, world_size: int) -> tuple[float | None, list[tuple[str, float, str]]]:
    """Return the tokens of a step and the factors they come from: declared, or each rank's batch times its replicas."""
    tokens = run.number("tokens_per_step")
    if tokens is not None:
        return tokens, [("tokens_per_step", tokens, run.sources["tokens_per_step"])]
    local = run.number("local_tokens")
    if local is None:
        return None, []
    degrees = run.degrees()
    split = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    replicas = degrees.get("dp") or max(world_size // split, 1)
    source = run.sources["local_tokens"]
    return local * replicas, [("tokens of a replica", local, source), ("replicas", float(replicas), "layout")]


def _conventions(run: Run, params: float, tokens: float) -> tuple[dict[str, float], list[tuple[str, float, str]]]:
    """Return the FLOPs of a step under each convention of `CONVENTIONS` that can be had, and attention's factors."""
    found = {"6N": 6 * params * tokens}
    sizes = {name: run.number(name) for name in ("layers", "heads", "head_dim", "hidden", "seq_len")}
    by_heads = sizes["heads"] is not None and sizes["head_dim"] is not None
    names = ["layers", "heads", "head_dim", "seq_len"] if by_heads else ["layers", "hidden", "seq_len"]
    if any(sizes[name] is None for name in names):
        return found, []
    product = 1.0
    for name in names:
        product *= sizes[name] or 0.0
    found["palm"] = found["6N"] + 12 * product * tokens
    found["megatron"] = found["6N"] + 6 * product * tokens
    embedding = run.values.get("embedding_params")
    if isinstance(embedding, int | float):
        found["torchtitan"] = 6 * (params - embedding) * tokens + 12 * product * tokens
    return found, [(name, sizes[name] or 0.0, run.sources[name]) for name in names]


def convention_formula(convention: str) -> str:
    """Return a convention in words."""
    return CONVENTIONS[convention]
