"""The notebooks run from a clean kernel, and what they show was kept."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    """Four of them, in the order of reading."""
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_a_clean_kernel(path: Path) -> None:
    """Every cell runs; the cells check their own claims."""
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(FOLDER)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_whole(path: Path) -> None:
    """Each cell was run in order and without error, and shows nothing of the machine it ran on."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert "error" not in kinds
    text = path.read_text()
    assert str(Path.home()) not in text
    assert "/tmp/" not in text  # noqa: S108  looked for, not used
