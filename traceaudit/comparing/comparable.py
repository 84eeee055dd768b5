"""Whether two runs can be compared: what differs between them is named, work is brought to one measure, or refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.errors import InputError

Result = Mapping[str, Any]

SAME = 0.01  # what differs by less is the same work
NAMED, NORMALISED = "named", "normalised"


@dataclass(frozen=True)
class Difference:
    """Something in which two runs differ.

    Attributes:
        name: what.
        before, after: in the two runs.
        treatment: `NAMED`: the rows show its effect together with all else; `NORMALISED`: they do not contain it.
    """

    name: str
    before: str
    after: str
    treatment: str


@dataclass(frozen=True)
class Basis:
    """On what footing two runs are compared.

    Attributes:
        scale: what times of the second run are multiplied with, so that steps hold equal work a rank.
        unit: of which step the times are, in words.
        differences: what differs.
        notes: what was taken for granted.
    """

    scale: float
    unit: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def basis(before: Result, after: Result) -> Basis:
    """Return how two results can be compared.

    Steps with more or fewer tokens a rank are scaled to those of the first run. Other models, or other work whose
    tokens are not known, are refused.

    Raises:
        InputError: the rows of the two cannot be compared.
    """
    _same_model(before, after)
    differences = [
        Difference(name, _text(one), _text(other), NAMED)
        for name, one, other in _about(before, after)
        if one is not None and other is not None and one != other
    ]
    tokens = _tokens(before), _tokens(after)
    world = before["job"].get("world_size") or 1, after["job"].get("world_size") or 1
    notes: list[str] = []
    scale, unit = 1.0, "a step of a rank"
    if tokens[0] and tokens[1]:
        each = tokens[0] / world[0], tokens[1] / world[1]
        if abs(each[1] / each[0] - 1) > 1e-9:
            scale, unit = each[0] / each[1], f"a step of a rank with the {each[0]:,.0f} tokens of the first run"
            differences.append(Difference("tokens a rank and step", _text(each[0]), _text(each[1]), NORMALISED))
    elif (work := _work(before, after)) is not None and abs(work - 1) > SAME:
        raise InputError(
            f"a step of a rank holds {work:.3g} times the FLOPs of the first run, and the tokens of a step are not "
            f"known in both: times of a step cannot be compared; declare --tokens-per-step. {_levels(before, after)}"
        )
    else:
        notes.append("the tokens of a step are not known in both runs; they are taken to be the same")
    return Basis(scale, unit, tuple(differences), tuple(notes))


def _same_model(before: Result, after: Result) -> None:
    each = _flops_per_token(before), _flops_per_token(after)
    if each[0] and each[1] and abs(each[1] / each[0] - 1) > SAME:
        raise InputError(
            f"the runs train different models ({each[0] / 1e9:.4g} and {each[1] / 1e9:.4g} GFLOP a token): "
            f"their rows cannot be compared. {_levels(before, after)}"
        )


def _levels(before: Result, after: Result) -> str:
    """Return the one figure that can always be compared."""
    shares = before["job"]["mfu"], after["job"]["mfu"]
    if None in shares:
        return "MFU is not known in both."
    return f"MFU is {shares[0]:.1%} and {shares[1]:.1%}."


def _factor(result: Result, name: str) -> float | None:
    numerator = (result.get("model") or {}).get("numerator") or {}
    found = [factor["value"] for factor in numerator.get("factors", []) if factor["name"] == name]
    return float(found[0]) if found and isinstance(found[0], int | float) and found[0] > 0 else None


def _tokens(result: Result) -> float | None:
    return _factor(result, "tokens_per_step")


def _flops_per_token(result: Result) -> float | None:
    """Return the model FLOPs of a token by 6·N, whatever convention the run used."""
    params, tokens = _factor(result, "params"), _tokens(result)
    if params:
        return 6 * params
    flops = (result.get("model") or {}).get("declared_flops_per_step")
    return float(flops) / tokens if flops and tokens else None


def _work(before: Result, after: Result) -> float | None:
    """Return the FLOPs of a step of a traced rank over those of the first run; counted ones, where both are."""
    each = []
    for result in (before, after):
        counted = (result.get("model") or {}).get("counted_flops_per_step")
        each.append(counted / max(int(result["job"]["ranks_traced"]), 1) if counted else None)
    return each[1] / each[0] if each[0] and each[1] else None


def _about(before: Result, after: Result) -> "list[tuple[str, Any, Any]]":
    """Return what describes the two runs, side by side."""
    sides = [_described(result) for result in (before, after)]
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    return [(name, sides[0].get(name), sides[1].get(name)) for name in names]


def _described(result: Result) -> dict[str, Any]:
    job, model = result["job"], result.get("model") or {}
    pipeline, recompute = result.get("pipeline") or {}, result.get("recompute") or {}
    numerator, peak = model.get("numerator") or {}, model.get("peak") or {}
    dims = sorted({row["dim"] for row in result.get("collectives", []) if row.get("dim")})
    versions = {f"{name} version": text for name, text in (job.get("versions") or {}).items()}
    degrees = {f"degree of {name}": degree for name, degree in (job.get("layout") or {}).items()}
    return {
        "GPU": job.get("gpu"),
        "peak TFLOP/s": peak.get("tflops"),
        "element type": peak.get("dtype"),
        "ranks of the job": job.get("world_size"),
        "ranks traced": job.get("ranks_traced"),
        "pipeline stages": pipeline.get("stages"),
        "micro-batches": pipeline.get("microbatches"),
        "communication": ", ".join(dims) or None,
        "recompute": recompute.get("setting"),
        "FLOPs": numerator.get("source"),
        "FLOPs convention": numerator.get("convention"),
        "traceaudit": result.get("traceaudit_version"),
        **degrees,
        **versions,
    }


def _text(value: Any) -> str:  # noqa: ANN401  a number or a text
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
