"""Accounts that came from other processes share equal groups."""

import pickle
from pathlib import Path

from traceaudit.account import account
from traceaudit.ranks.members import coded
from traceaudit.ranks.shared import SharedGroups
from traceaudit.reading.normalise import read_trace
from traceaudit.simulate import simulate
from traceaudit.steps import Selection


def test_equal_groups_are_in_memory_once(tmp_path: Path) -> None:
    """The tuples of two accounts are the same objects, and say what they said before."""
    files = sorted(simulate(tmp_path / "run", "exposed_allreduce").glob("rank*"))[:2]
    before = [account(read_trace(file), Selection()) for file in files]
    arrived = [pickle.loads(pickle.dumps(own)) for own in before]  # noqa: S301  own data
    shared = SharedGroups()
    one, other = (shared.of(own) for own in arrived)
    assert one.origin.groups == before[0].origin.groups
    assert one.origin.groups
    known = {id(group.ranks) for group in one.origin.groups}
    assert {id(group.ranks) for group in other.origin.groups} <= known
    for own, old in zip((one, other), before, strict=True):
        codes, groups = coded(own.communications["group"])
        assert own.communications["group"].tolist() == old.communications["group"].tolist()
        assert {id(groups[code]) for code in codes} <= known
