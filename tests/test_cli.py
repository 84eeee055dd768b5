"""The command line: exit codes, outputs, and messages a user can act on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from traceaudit.cli import main
from traceaudit.cli.outputs import CSV_FILES
from traceaudit.cli.progress import progress

Directory = Callable[[str], Path]


def run(*arguments: str | Path) -> Result:
    """Run the command; an exception that is no exit fails the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_analyze_writes_report_and_json(simulated: Directory, tmp_path: Path) -> None:
    """The report goes to standard output, the files where they were asked for."""
    html, found = tmp_path / "report.html", tmp_path / "result.json"
    result = run("analyze", simulated("late_rank"), "-o", html, "--json", found)
    assert result.exit_code == 0
    assert "MFU" in result.stdout
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(found.read_text())["schema_version"] == 1


def test_json_to_standard_output_is_alone(simulated: Directory) -> None:
    """`--json -` prints JSON and nothing else."""
    result = run("analyze", simulated("compute_only"), "--json", "-")
    assert json.loads(result.stdout)["job"]["ranks_traced"] == 1


def test_analyze_writes_every_form(simulated: Directory, tmp_path: Path) -> None:
    """Tables, the text of a ticket and a picture stand where they were asked for, in folders that are made."""
    tables, ticket, picture = tmp_path / "new" / "tables", tmp_path / "ticket.md", tmp_path / "waterfall.png"
    asked = ("--csv", tables, "--markdown", ticket, "--png", picture)
    result = run("analyze", simulated("late_rank"), *asked)
    assert result.exit_code == 0
    assert {path.stem for path in tables.iterdir()} == set(CSV_FILES)
    assert ticket.read_text().startswith("## ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    for name in (tables, ticket, picture):
        assert f"wrote {name}" in result.stderr
    for option in range(0, len(asked), 2):
        refused = run("analyze", simulated("late_rank"), *asked[option : option + 2])
        assert (refused.exit_code, "--force" in refused.stderr) == (1, True)


def test_markdown_to_standard_output_is_alone(simulated: Directory) -> None:
    """`--markdown -` prints the ticket and nothing else; two things cannot share standard output."""
    result = run("analyze", simulated("compute_only"), "--markdown", "-")
    assert result.stdout.startswith("## ")
    assert result.stdout.endswith("\n")
    assert run("analyze", simulated("compute_only"), "--markdown", "-", "--json", "-").exit_code == 2


def test_report_draws_a_result_again(simulated: Directory, tmp_path: Path) -> None:
    """From result.json and from the page come the page, the ticket and the JSON that the analysis wrote."""
    page, data = tmp_path / "report.html", tmp_path / "result.json"
    printed = run("analyze", simulated("late_rank"), "-o", page, "--json", data).stdout
    for source in (page, data):
        again, json_again = tmp_path / f"{source.stem}.again.html", tmp_path / f"{source.stem}.again.json"
        result = run("report", source, "-o", again, "--json", json_again)
        assert (result.exit_code, result.stdout) == (0, printed)
        assert again.read_text() == page.read_text()
        assert json_again.read_bytes() == data.read_bytes()
    nothing = tmp_path / "nothing.html"
    nothing.write_text("<p>")
    refused = run("report", nothing)
    assert (refused.exit_code, "no report of traceaudit" in refused.stderr) == (1, True)


def test_existing_file_is_kept(simulated: Directory, tmp_path: Path) -> None:
    """No file is overwritten without --force."""
    kept = tmp_path / "report.html"
    kept.write_text("mine")
    result = run("analyze", simulated("compute_only"), "-o", kept)
    assert (result.exit_code, kept.read_text()) == (1, "mine")
    assert "--force" in result.stderr
    assert run("analyze", simulated("compute_only"), "-o", kept, "--force").exit_code == 0
    assert kept.read_text() != "mine"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--fail-under", "1"], 0),
        (["--fail-under", "99"], 3),
        (["--strict"], 0),
        (["--steps", "4"], 0),
        (["--steps", "4-5", "--quiet"], 0),
        (["--steps", "99"], 1),
        (["--steps", "x"], 2),
        (["--steps", "5-3"], 2),
        (["--ranks", "1"], 0),
        (["--ranks", "77"], 1),
        (["--gpu", "Abacus 3000"], 1),
        (["--dtype", "bf17"], 1),
        (["--params", "-1"], 1),
        (["--params", "1e15"], 1),
        (["--params", "nan"], 1),
        (["--attention-flops"], 0),
        (["--config", "absent.json"], 2),
        (["--step-marker", "no such annotation"], 1),
        (["--step-marker", "("], 2),
        (["--whole-trace"], 0),
        (["--peak-tflops", "1979"], 0),
        (["--peak-tflops", "0.001"], 1),
    ],
)
def test_exit_codes(options: list[str], code: int, simulated: Directory) -> None:
    """0 fine, 1 the input could not be analysed, 2 wrong usage, 3 below --fail-under."""
    result = run("analyze", simulated("late_rank"), *options)
    assert result.exit_code == code, result.output
    assert (code != 1) or result.stderr.startswith("traceaudit: ")


def test_unknown_mfu_fails_the_gate(simulated: Directory, tmp_path: Path) -> None:
    """A gate on MFU trips when MFU is not known."""
    nothing = tmp_path / "nothing.json"
    nothing.write_text("{}")
    assert run("analyze", simulated("launch_bound"), "--config", nothing, "--fail-under", "1").exit_code == 3


def test_too_many_declared_flops_are_named(simulated: Directory) -> None:
    """Declared FLOPs that do not fit say by how much, and which factors to check."""
    result = run("analyze", simulated("compute_only"), "--params", "1e13")
    assert result.exit_code == 1
    assert "times too much" in result.stderr
    assert "params" in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a profiler trace"),
        (b"not json", "not a profiler trace"),
        (b'{"traceEvents": []}', "no event"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}',
            "no GPU",
        ),
        (b"\x1f\x8b\x00broken", "not a profiler trace"),
    ],
)
def test_bad_file_is_an_error_of_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    """What is no trace ends with a reason and exit code 1."""
    (tmp_path / "rank0.json").write_bytes(content)
    result = run("analyze", tmp_path)
    assert result.exit_code == 1
    assert words in result.stderr


def test_missing_path_is_an_error() -> None:
    """A path that does not exist is named."""
    result = run("analyze", "no/such/dir")
    assert (result.exit_code, "no such file" in result.stderr) == (1, True)


def test_bad_file_loses_only_its_rank(simulated: Directory, tmp_path: Path) -> None:
    """One unreadable rank is a row in quality, not the end."""
    for path in simulated("exposed_allreduce").glob("rank[012]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "rank3_trace.json").write_text("garbage")
    found = json.loads(run("analyze", tmp_path, "--json", "-").stdout)
    assert found["job"]["ranks_traced"] == 3
    assert [entry["file"] for entry in found["quality"]["skipped_files"]] == ["rank3_trace.json"]
    assert any("3 of 4 ranks traced" in warning for warning in found["quality"]["warnings"])


def test_torn_file_keeps_its_events_and_is_not_trusted(simulated: Directory, tmp_path: Path) -> None:
    """A file cut short is analysed, named and not called reliable."""
    whole = (simulated("compute_only") / "rank0_trace.json.gz").read_bytes()
    (tmp_path / "rank0_trace.json.gz").write_bytes(whole[: len(whole) * 3 // 4])
    result = run("analyze", tmp_path, "--strict", "--json", "-")
    assert result.exit_code in (1, 4)


def test_simulate_lists_its_scenarios(tmp_path: Path) -> None:
    """Without a known scenario, the message lists them."""
    result = run("simulate", tmp_path / "new", "--scenario", "unknown")
    assert result.exit_code == 2
    assert "run_28_mfu" in result.stderr


def test_simulate_then_analyze(tmp_path: Path) -> None:
    """The two commands of the README work together."""
    assert run("simulate", tmp_path / "run", "--scenario", "late_rank").exit_code == 0
    assert run("analyze", tmp_path / "run").exit_code == 0
    assert run("simulate", tmp_path / "run", "--scenario", "late_rank").exit_code == 1


def test_reading_without_a_terminal_says_each_tenth_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is said of a short reading; of a long one a line for each tenth that is passed."""
    now = [100.0]
    monkeypatch.setattr("traceaudit.cli.progress.time.monotonic", lambda: now[0])
    with progress(quiet=False) as report:
        assert report is not None
        report(50_000_000, 100_000_000, "rank0.json")
        now[0] += 60
        for done in (51_000_000, 59_000_000, 79_000_000, 100_000_000):
            report(done, 100_000_000, "rank1.json")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"reading: {share} % of 100 MB, rank1.json" for share in (50, 70, 100)]
