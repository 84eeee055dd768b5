"""The documentation says what the program does."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import traceaudit
from traceaudit.cli import main
from traceaudit.leaves import Bucket

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("bucket", Bucket)
def test_readme_defines_each_bucket(bucket: Bucket) -> None:
    """Each bucket has a row in the README's table."""
    assert re.search(rf"^\|.*`{bucket.value}`", README, re.MULTILINE)


def test_readme_names_only_real_commands() -> None:
    """Commands and options in the README's examples exist."""
    for line in re.findall(r"^traceaudit (.+)$", README, re.MULTILINE):
        name, *rest = line.split()
        command = main.commands[name]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= known


@pytest.mark.parametrize("name", sorted(main.commands))
def test_each_command_has_help(name: str) -> None:
    """Each command and each of its options says what it does."""
    command = main.commands[name]
    assert command.help
    assert [p.name for p in command.params if isinstance(p, click.Option) and not p.help] == []


@pytest.mark.parametrize("name", traceaudit.__all__)
def test_public_names_are_documented(name: str) -> None:
    """What `__all__` lists exists and has a docstring."""
    assert getattr(traceaudit, name).__doc__


def test_help_imports_nothing_heavy() -> None:
    """`traceaudit --help` starts without pandas, matplotlib and numpy."""
    code = (
        "import sys; sys.argv = ['traceaudit', '--help']\n"
        "from traceaudit.cli import main\n"
        "main(standalone_mode=False)\n"
        "print(sorted({'numpy', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert output.splitlines()[-1] == "[]"


def test_version_is_one() -> None:
    """The changelog has a section for what is not released."""
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+", traceaudit.__version__)
