"""Which files are the traces of a run, and whether they belong together."""

import glob
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from traceaudit.account import RankAccount
from traceaudit.errors import InputError
from traceaudit.reading.archives import ARCHIVES
from traceaudit.reading.streams import Place, is_remote, members, opened, remote

SUFFIXES = (".json", ".json.gz", ".json.zst")
OWN_FILES = frozenset({"run.json", "truth.json", "result.json", "config.json"})
CONFIGURATION = "run.json"
CONFIGURATION_BYTES = 16 << 20
APART_NS = 60 * 10**9  # recordings of one job that begin further apart than this are two


@dataclass(frozen=True)
class Source:
    """A file that may be a trace.

    Attributes:
        place: where it lies.
        named: the user named it, rather than its directory or archive.
        size: bytes as stored; 0 where unknown.
    """

    place: Place
    named: bool
    size: int


def find(paths: Sequence[str | Path]) -> list[Source]:
    """Return the files behind directories, archives, files, glob patterns and URLs, each once.

    Raises:
        InputError: a path does not exist, or there is no file to read.
    """
    found: dict[Place, Source] = {}
    for given in paths:
        for source in _behind(str(given)):
            place = source.place
            same = place if place.remote else Place(str(Path(place.address).resolve()), place.member)
            found.setdefault(same, source)
    if not found:
        listed = ", ".join(str(path) for path in paths)
        raise InputError(
            f"{listed}: no trace files (*.json, *.json.gz, *.json.zst, or a .zip or .tar of them) found; "
            "pass the directory torch.profiler wrote to."
        )
    return list(found.values())


def _behind(given: str) -> Iterable[Source]:
    if is_remote(given):
        yield from _remote(given)
        return
    for path in _expanded(given):
        if path.is_dir():
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                yield from _files(file.absolute(), named=False)
        else:
            yield from _files(path.absolute(), named=True)


def _files(path: Path, *, named: bool) -> Iterable[Source]:
    if path.name.lower().endswith(ARCHIVES):
        yield from _packed(str(path))
    elif named or (path.name.endswith(SUFFIXES) and path.name not in OWN_FILES):
        yield Source(Place(str(path)), named, path.stat().st_size)


def _packed(address: str) -> Iterable[Source]:
    """Yield the traces in an archive, in their order there."""
    for name, size in members(address).items():
        if _is_trace(name):
            yield Source(Place(address, name), named=False, size=size)


def _is_trace(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith(SUFFIXES) and name not in OWN_FILES


def _remote(given: str) -> Iterable[Source]:
    """Yield the traces behind a URL.

    Raises:
        InputError: there is nothing there, or it cannot be listed.
    """
    store, path = remote(given)
    try:
        if glob.has_magic(path):
            listed = {str(name): dict(told) for name, told in store.glob(path, detail=True).items()}
        elif store.isdir(path):
            listed = {str(name): dict(told) for name, told in store.find(path, detail=True).items() if _is_trace(name)}
            listed |= {name: {} for name in store.find(path) if name.lower().endswith(ARCHIVES)}
        else:
            listed = {path: dict(store.info(path))}
    except FileNotFoundError as error:
        raise InputError(f"{given}: no such file or directory.") from error
    except Exception as error:  # whatever a store's library raises
        raise InputError(f"{given}: cannot be listed: {error}") from error
    for name, told in sorted(listed.items()):
        address = store.unstrip_protocol(name)
        if name.lower().endswith(ARCHIVES):
            yield from _packed(address)
        elif told.get("type") != "directory":
            yield Source(Place(address), named=name == path, size=int(told.get("size") or 0))


def _expanded(given: str) -> list[Path]:
    if Path(given).exists():
        return [Path(given)]
    matches = [Path(match) for match in sorted(glob.glob(given, recursive=True))]
    if not matches:
        raise InputError(f"{given}: no such file or directory.")
    return matches


@contextmanager
def configurations(paths: Sequence[str | Path]) -> Iterator[list[Path]]:
    """Give the ``run.json`` beside the traces as files of this machine, wherever the traces lie."""
    local = [Path(path) for path in paths if not is_remote(str(path))]
    places = {path if path.is_dir() else path.parent for path in local}
    found = sorted(place / CONFIGURATION for place in places if (place / CONFIGURATION).is_file())
    with TemporaryDirectory() as folder:
        for number, content in enumerate(filter(None, map(_configuration, map(str, paths)))):
            copy = Path(folder) / str(number) / CONFIGURATION
            copy.parent.mkdir()
            copy.write_bytes(content)
            found.append(copy)
        yield found


def _configuration(given: str) -> bytes | None:
    """Return the ``run.json`` of a remote directory or of an archive; nothing if there is none."""
    if given.lower().endswith(ARCHIVES):
        with suppress(OSError, InputError):
            name = next((name for name in members(given) if PurePosixPath(name).name == CONFIGURATION), None)
            if name is not None:
                with opened(Place(given, name)) as file:
                    return file.read(CONFIGURATION_BYTES)
        return None
    if not is_remote(given):
        return None
    store, path = remote(given)
    folder = path if store.isdir(path) else path.rpartition("/")[0]
    try:
        return bytes(store.cat_file(f"{folder.rstrip('/')}/{CONFIGURATION}"))
    except Exception:  # whatever a store's library raises where there is no such file
        return None


def one_job(accounts: Sequence[RankAccount]) -> tuple[list[RankAccount], list[str]]:
    """Return the accounts of one recording of one job, each with its rank, and warnings.

    Raises:
        InputError: the files come from several jobs or several recordings, which must not be added up.
    """
    sizes = {account.origin.world_size for account in accounts} - {None}
    if len(sizes) > 1:
        raise InputError(_mixed("jobs of different world sizes", _grouped(accounts, "world_size")))
    if len({account.origin.job for account in accounts}) > 1:
        raise InputError(_mixed("different jobs", _grouped(accounts, "job")))
    recordings = _recordings(accounts)
    if len(recordings) > 1 and not _one_by_steps(recordings):
        labelled = {_when(group): [account.origin.file.name for account in group] for group in recordings}
        raise InputError(_mixed("recordings of different times", labelled))
    accounts, warnings = _numbered(accounts)
    if len(recordings) > 1:
        warnings.append(_clocks_apart(recordings))
    twice = [rank for rank, group in _by_rank(accounts).items() if len(group) > 1]
    if twice:
        files = {f"rank {rank}": [a.origin.file.name for a in _by_rank(accounts)[rank]] for rank in twice[:3]}
        raise InputError(_mixed("several files for one rank at the same time", files))
    return sorted(accounts, key=lambda account: account.rank), warnings


def _by_rank(accounts: Sequence[RankAccount]) -> dict[int | None, list[RankAccount]]:
    groups: dict[int | None, list[RankAccount]] = defaultdict(list)
    for account in accounts:
        groups[account.origin.rank].append(account)
    return groups


def _grouped(accounts: Sequence[RankAccount], attribute: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for account in accounts:
        groups[f"{attribute} {getattr(account.origin, attribute)}"].append(account.origin.file.name)
    return groups


def _mixed(what: str, groups: dict[str, list[str]]) -> str:
    lines = [f"  {label}: {', '.join(files[:4])}{', …' if len(files) > 4 else ''}" for label, files in groups.items()]
    return "\n".join([f"the files hold {what}; analyse one at a time by naming its files:", *lines])


def _recordings(accounts: Sequence[RankAccount]) -> list[list[RankAccount]]:
    """Group accounts whose recordings overlap in time, or nearly do while no rank occurs twice."""
    timed = sorted((a for a in accounts if a.last_ns), key=lambda account: account.first_ns)
    groups: list[list[RankAccount]] = []
    for account in timed:
        group = groups[-1] if groups else []
        overlaps = bool(group) and account.first_ns < max(other.last_ns for other in group)
        near = bool(group) and account.first_ns - group[0].first_ns < APART_NS
        again = account.origin.rank in {other.origin.rank for other in group} - {None}
        unknown = account.origin.rank is None
        if group and (overlaps or (near and not again and not unknown)):
            group.append(account)
        else:
            groups.append([account])
    return groups


def _one_by_steps(recordings: Sequence[Sequence[RankAccount]]) -> bool:
    """Tell whether recordings are one, on hosts with clocks far apart: they are of other ranks, but the same steps."""
    steps = [_marked_steps(own) for group in recordings for own in group]
    return (
        _differ([{own.origin.rank for own in group} for group in recordings])
        and _differ([{own.origin.host for own in group} for group in recordings])
        and bool(set.intersection(*steps))
    )


def _differ(values: Sequence[set[Any]]) -> bool:
    """Tell whether all values are known, and none is in two sets."""
    together = set.union(*values)
    return None not in together and len(together) == sum(map(len, values))


def _marked_steps(own: RankAccount) -> set[int]:
    """Return the numbers that the profiler gave to the recorded steps; none where something else tells them apart."""
    if own.steps is None or own.steps.marked_by != "ProfilerStep":
        return set()
    return {*own.steps.step.tolist(), *(step for step, _ in own.steps.left_out)}


def _clocks_apart(recordings: Sequence[Sequence[RankAccount]]) -> str:
    begun = [min(own.first_ns for own in group) for group in recordings]
    return (
        f"the clocks of {len(recordings)} groups of hosts are up to {(max(begun) - min(begun)) / 1e9:,.0f} s apart; "
        "they hold the same steps of different ranks and are taken as one recording"
    )


def _when(group: Sequence[RankAccount]) -> str:
    begun = datetime.fromtimestamp(min(account.first_ns for account in group) / 1e9, tz=UTC)
    return f"{begun:%Y-%m-%d %H:%M:%S} UTC"


def _numbered(accounts: Sequence[RankAccount]) -> tuple[list[RankAccount], list[str]]:
    """Give ranks to accounts that have none, in the order of file names."""
    unknown = sorted((a for a in accounts if a.origin.rank is None), key=lambda account: str(account.origin.file))
    known = [account for account in accounts if account.origin.rank is not None]
    if not unknown:
        return known, []
    processes = [process for account in unknown for process in account.origin.processes]
    if len(set(processes)) < len(processes):
        files = {"one process": [account.origin.file.name for account in unknown]}
        raise InputError(_mixed("several recordings of one process", files))
    free = iter(rank for rank in range(len(accounts) + len(known)) if rank not in {a.origin.rank for a in known})
    numbered = [replace(a, origin=replace(a.origin, rank=next(free))) for a in unknown]
    if len(accounts) == 1:
        return numbered, []
    return known + numbered, [f"{len(unknown)} files do not tell their rank; numbered in the order of their names"]
