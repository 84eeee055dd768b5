"""The layout of a job and the versions it ran with, as far as traces and declarations tell."""

from collections.abc import Mapping, Sequence
from typing import Any

from traceaudit.account import RankAccount
from traceaudit.leaves import Leaf
from traceaudit.mfu.model import Run
from traceaudit.ranks.collectives import dimension_of

DIMENSIONS = (Leaf.PP, Leaf.TP, Leaf.CP, Leaf.EP, Leaf.FSDP, Leaf.DP)
DECLARED = {"torch": "torch", "cuda": "CUDA", "hip": "HIP", "nccl": "NCCL"}  # in run.json, and how it is written


def degrees(accounts: Sequence[RankAccount], declared: Mapping[str, int]) -> dict[str, int]:
    """Return the degree of each dimension above one: the size of its process groups, else what is declared."""
    found: dict[Leaf, int] = {}
    for account in accounts:
        for group in account.origin.groups:
            leaf = dimension_of(group.description)
            if leaf is not None:
                found[leaf] = max(found.get(leaf, 1), len(group.ranks))
    sizes = {leaf.label: found.get(leaf) or declared.get(leaf.label, 1) for leaf in DIMENSIONS}
    return {name: size for name, size in sizes.items() if size > 1}


def versions(accounts: Sequence[RankAccount], run: Run) -> dict[str, str]:
    """Return the versions of the software: from the traces, else declared; several if ranks differ."""
    declared = run.values.get("versions")
    stated = declared if isinstance(declared, Mapping) else {}
    found: dict[str, Any] = {name: {str(stated[key])} for key, name in DECLARED.items() if stated.get(key)}
    seen: dict[str, set[str]] = {}
    for account in accounts:
        for name, version in account.origin.versions:
            seen.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(known)) for name, known in (found | seen).items()}
