"""Figures of the Python API: axes of matplotlib, the same for the same result."""

import numpy as np
import pytest

from tests.results import Result, every_case, result_of
from traceaudit.report import figures


@every_case
def test_figures_are_reproducible(result: Result) -> None:
    """The same result gives the same SVG, whose text is text."""
    for draw, text in (
        (figures.waterfall, "pipeline bubbles"),
        (figures.heatmap, "ms that others waited"),
        (figures.roofline, "FLOPs a byte"),
    ):
        first, second = (figures.svg(draw(result)) for _ in range(2))
        assert first == second
        assert text in first
        assert "<dc:date>" not in first
    assert figures.png(figures.waterfall(result), dpi=30).startswith(b"\x89PNG")


def test_figure_draws_on_axes_it_is_given() -> None:
    """A notebook can place a figure in its own."""
    from matplotlib.figure import Figure

    left, right, last = Figure().subplots(1, 3)
    assert figures.waterfall(result_of(), left) is left
    assert figures.heatmap(result_of(), right) is right
    assert figures.roofline({"job": result_of()["job"]}, last) is last


@pytest.mark.parametrize(("count", "labels"), [(8, [f"rank {rank}" for rank in range(8)]), (300, ["rank 1"])])
def test_heat_map_names_all_of_few_ranks_and_the_worst_of_many(count: int, labels: list[str]) -> None:
    """A rank whose label would touch that of a worse one has none; cells of few ranks have their numbers."""
    axes = figures.heatmap(result_of(count))
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert bool(axes.texts) == (count == 8)
    (image,) = axes.images
    assert np.asarray(image.get_array()).max() == pytest.approx(6 * 3 * count)  # ms: all that rank 1 caused
    assert image.get_cmap().name == "cividis"
