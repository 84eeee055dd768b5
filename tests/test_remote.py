"""Traces are found and read wherever they lie: compressed, in archives, in a store behind a URL."""

import gzip
import io
import logging
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest

from tests.conftest import Audited
from traceaudit.errors import InputError
from traceaudit.pipeline import analyze
from traceaudit.reading import streams
from traceaudit.reading.decode import load
from traceaudit.reading.sources import find
from traceaudit.reading.streams import Inflating, Place, is_remote, members
from traceaudit.report.json_file import to_json

Directory = Callable[[str], Path]
SCENARIO = "late_rank"


def zstd(content: bytes) -> bytes:
    """Compress as ``zstd`` does."""
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def whole(source: Inflating) -> bytes:
    """Read a stream to its end."""
    return b"".join(iter(source.part, b""))


CONTENT = np.random.default_rng(3).integers(0, 9, 400_000).astype(np.int8).tobytes()
COMPRESSED = {"plain": bytes, "gzip": lambda text: gzip.compress(text, 1), "zstd": zstd}
every_codec = pytest.mark.parametrize("codec", COMPRESSED)


@every_codec
def test_streams_give_what_was_compressed(codec: str) -> None:
    """Plain, gzip and zstd, in one part and in two."""
    compressed = COMPRESSED[codec](CONTENT)
    source = Inflating(io.BytesIO(compressed + compressed))
    assert whole(source) == CONTENT * 2
    assert not source.torn


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_stream_gives_what_precedes_the_cut(codec: str, share: float) -> None:
    """Nearly all of what was stored is given, and the stream says that it is torn."""
    compressed = COMPRESSED[codec](CONTENT)
    source = Inflating(io.BytesIO(compressed[: int(len(compressed) * share)]))
    found = whole(source)
    assert source.torn
    assert CONTENT.startswith(found)
    assert len(found) >= share * len(CONTENT) - 150_000


def test_a_damaged_gzip_gives_what_precedes_the_damage() -> None:
    """A flipped bit in the middle costs what follows."""
    compressed = bytearray(gzip.compress(CONTENT, 1))
    compressed[len(compressed) // 2 : len(compressed) // 2 + 4] = b"\xff\xff\xff\xff"
    source = Inflating(io.BytesIO(compressed))
    found = whole(source)
    assert source.torn
    assert len(found) > len(CONTENT) // 4


def test_inflating_a_bomb_takes_a_block_at_a_time() -> None:
    """A megabyte that inflates to a gigabyte is given in small parts."""
    inner = zlib_of_zeros()
    source = Inflating(io.BytesIO(inner))
    sizes = [len(source.part()) for _ in range(20)]
    assert max(sizes) <= 2 << 20


def zlib_of_zeros() -> bytes:
    """Return a gzip of 100 MB of zeros."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
    return buffer.getvalue()


class Counted(io.FileIO):
    """A file that counts what is read from it."""

    given = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as a file does."""
        part = super().read(size) or b""
        self.given += len(part)
        return part


@pytest.mark.parametrize("layout", ["zst", "zip", "zip of plain", "tar", "tgz"])
def test_compressed_and_archived_runs_give_the_same_bytes(
    layout: str, simulated: Directory, audited: Audited, tmp_path: Path
) -> None:
    """However the files of a run are packed, the result is the same."""
    source = simulated(SCENARIO)
    target = tmp_path / "packed"
    target.mkdir()
    files = sorted(source.iterdir())
    if layout == "zst":
        for path in files:
            if path.name.startswith("rank"):
                (target / path.with_suffix(".zst").name).write_bytes(zstd(gzip.decompress(path.read_bytes())))
            else:
                shutil.copy(path, target)
        found = target
    elif layout.startswith("zip"):
        found = target / "run.zip"
        with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                plain = layout != "zip" and path.suffix == ".gz"
                name = path.name.removesuffix(".gz") if plain else path.name
                content = path.read_bytes()
                archive.writestr(f"run/{name}", gzip.decompress(content) if plain else content)
    else:
        found = target / ("run.tar" if layout == "tar" else "run.tar.gz")
        with tarfile.open(found, "w:gz" if layout == "tgz" else "w") as packed:
            packed.add(source, "run")
    result = analyze(found).result
    expected = audited(SCENARIO).result
    assert [own["file"].split(".")[0] for own in result["ranks"]] == [
        own["file"].split(".")[0] for own in expected["ranks"]
    ]
    for own, other in zip(result["ranks"], expected["ranks"], strict=True):
        own["file"] = other["file"]
    for key, value in expected["job"].items():
        assert key == "source" or result["job"][key] == value
    assert result["ranks"] == expected["ranks"]


@pytest.mark.parametrize(("suffix", "mode"), [("tgz", "w:gz"), ("tar", "w")])
def test_an_archive_is_read_a_few_times_however_many_traces_it_has(
    suffix: str, mode: Literal["w:gz", "w"], simulated: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing, configuration and traces each take the archive once at most, and nothing stays open."""
    found = tmp_path / f"run.{suffix}"
    with tarfile.open(found, mode) as packed:
        packed.add(simulated("run_28_mfu"), "run")
    files: list[Counted] = []

    def opened(path: str, mode: str) -> Counted:
        files.append(Counted(path, mode))
        return files[-1]

    monkeypatch.setattr(streams, "open", opened, raising=False)
    assert len(analyze(found, jobs=1).result["ranks"]) == 8
    assert all(file.closed for file in files)
    assert sum(file.given for file in files) <= 3 * found.stat().st_size


def test_a_cut_member_is_read_as_far_as_it_goes(simulated: Directory, tmp_path: Path) -> None:
    """A tar that was not copied to its end gives the members it has, the last one torn."""
    whole_tar = tmp_path / "run.tar"
    with tarfile.open(whole_tar, "w") as packed:
        for path in sorted(simulated(SCENARIO).glob("rank*")):
            packed.add(path, path.name)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole_tar.read_bytes()[: int(whole_tar.stat().st_size * 0.6)])
    names = [source.place.member for source in find([cut])]
    assert names[:2] == ["rank0_trace.json.gz", "rank1_trace.json.gz"]
    assert not load(Place(str(cut), names[0])).torn
    assert load(Place(str(cut), names[-1])).torn


@pytest.mark.parametrize("name", ["run.zip", "run.tar"])
def test_what_is_no_archive_is_an_error(name: str, tmp_path: Path) -> None:
    """A file of that name that is none is named."""
    (tmp_path / name).write_bytes(b"no archive at all")
    with pytest.raises(InputError, match=name):
        members(str(tmp_path / name))


def test_links_keep_their_names(simulated: Directory, tmp_path: Path) -> None:
    """A link names its rank, whatever the file behind it is called; a file is read once."""
    source = sorted(simulated("compute_only").glob("rank*"))[0]
    blob = tmp_path / "blobs" / "0a1b2c"
    blob.parent.mkdir()
    shutil.copy(source, blob)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank3_trace.json.gz").symlink_to(blob)
    found = find([tmp_path / "run", tmp_path / "run" / "rank3_trace.json.gz"])
    assert [own.place.name for own in found] == ["rank3_trace.json.gz"]


def test_urls_are_told_from_paths() -> None:
    """Drive letters and colons in names are no URLs."""
    assert [is_remote(text) for text in ("s3://b/k", "gs://b", "memory://x", "zip::s3://b/k.zip")] == [True] * 4
    assert [is_remote(text) for text in ("/a/b", "C:\\a", "C:/a", "a:b.json", "run")] == [False] * 5


# A real S3 server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start an S3 server on loopback, a process of its own; give its address."""
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("w") as output:
        code = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"
        server = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
        address = ""
        deadline = time.monotonic() + 60
        while not address and time.monotonic() < deadline and server.poll() is None:
            told = log.read_text()
            address = told.partition("Running on ")[2].split()[0] if "Running on " in told else ""
            time.sleep(0.05)
        yield address
        server.kill()
        server.wait()


@pytest.fixture
def bucket(s3: str, simulated: Directory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put a run into a bucket; give its URL."""
    import boto3
    from fsspec import AbstractFileSystem

    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3,
        "FSSPEC_S3_ENDPOINT_URL": s3,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    AbstractFileSystem.clear_instance_cache()
    client = boto3.client("s3", endpoint_url=s3)
    client.create_bucket(Bucket="traces")
    source = simulated(SCENARIO)
    for path in source.iterdir():
        client.put_object(Bucket="traces", Key=f"jobs/{source.name}/{path.name}", Body=path.read_bytes())
    with zipped(source) as archive:
        client.put_object(Bucket="traces", Key="archives/run.zip", Body=archive.getvalue())
    client.close()
    yield f"s3://traces/jobs/{source.name}"
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


def zipped(source: Path) -> io.BytesIO:
    """Return an archive of a run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in source.iterdir():
            archive.write(path, path.name)
    return buffer


of_s3 = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning")


@of_s3
def test_an_s3_source_gives_the_same_bytes(bucket: str, audited: Audited, tmp_path: Path) -> None:
    """A run in a bucket, its run.json read from there too; cached on this machine the second time."""
    expected = to_json(audited(SCENARIO).result)
    assert to_json(analyze(bucket).result) == expected
    for hits in (0, 4):
        audit = analyze(bucket, cache=tmp_path)
        assert to_json(audit.result) == expected
        assert audit.reading is not None
        assert audit.reading.accounts_kept == hits


@of_s3
def test_processes_read_s3_themselves(bucket: str, audited: Audited) -> None:
    """Workers open the URLs: nothing passes through the process that asks."""
    assert to_json(analyze(bucket, jobs=2).result) == to_json(audited(SCENARIO).result)


@of_s3
def test_globs_and_archives_in_s3_are_read(bucket: str) -> None:
    """A pattern and an archive in a bucket name the same four files."""
    assert [own.place.name for own in find([f"{bucket}/rank*.json.gz"])] == [
        own.place.name for own in find(["s3://traces/archives/run.zip"])
    ]
    assert analyze("s3://traces/archives/run.zip").result["job"]["ranks_traced"] == 4


@of_s3
@pytest.mark.parametrize("url", ["s3://traces/absent", "s3://nowhere/run", "nosuchstore://x/y"])
def test_an_absent_url_is_an_error(url: str, bucket: str) -> None:
    """What is not there is named."""
    with pytest.raises(InputError, match=url):
        analyze(url)
