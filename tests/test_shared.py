"""Accounts that came from other processes share what is equal."""

import dataclasses
import pickle
from pathlib import Path

import pandas as pd

from traceaudit.account import account
from traceaudit.ranks.members import coded
from traceaudit.ranks.shared import Shared
from traceaudit.reading.normalise import read_trace
from traceaudit.simulate import simulate
from traceaudit.steps import Selection


def test_what_is_equal_is_in_memory_once(tmp_path: Path) -> None:
    """Groups, names of columns and empty tables of two accounts are the same objects, and say what they said before."""
    files = sorted(simulate(tmp_path / "run", "exposed_allreduce").glob("rank*"))[:2]
    before = [account(read_trace(file), Selection()) for file in files]
    arrived = [pickle.loads(pickle.dumps(own)) for own in before]  # noqa: S301  own data
    shared = Shared()
    one, other = (shared.of(own) for own in arrived)
    assert one.origin.groups == before[0].origin.groups
    assert one.origin.groups
    known = {id(group.ranks) for group in one.origin.groups}
    assert {id(group.ranks) for group in other.origin.groups} <= known
    for own, old in zip((one, other), before, strict=True):
        codes, groups = coded(own.communications["group"])
        assert own.communications["group"].tolist() == old.communications["group"].tolist()
        assert {id(groups[code]) for code in codes} <= known
    for field in dataclasses.fields(one):
        old, new, second = (getattr(own, field.name) for own in (before[0], one, other))
        if isinstance(new, pd.DataFrame):
            pd.testing.assert_frame_equal(new, old)
            assert new is second if len(old) == 0 else new.columns.is_(second.columns)
