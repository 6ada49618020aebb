"""Pictures are legible for the colour-blind, on paper, on a dark screen and on a phone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from ringreduce.bench import plots
from ringreduce.bench.plots import curve_style
from ringreduce.common.html_pages import COLOURS, html_page, html_table
from ringreduce.doctor.trace_report import PARTS

#: Linear light that people see who lack one kind of cones (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN_BY = {
    "all": np.eye(3),
    "protanopia": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "deuteranopia": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "tritanopia": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def light(colour: str) -> np.ndarray:
    """Return linear red, green and blue, 0 to 1."""
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(linear: np.ndarray) -> np.ndarray:
    """Return the colour in CIELAB, where distances are those that people see."""
    ratios = TO_XYZ @ np.clip(linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), ratios * 7.787 + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as in WCAG: 1 to 21."""
    low, high = sorted(float(TO_XYZ[1] @ light(each)) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("eyes", SEEN_BY)
def test_parts_of_a_step_are_told_apart(eyes: str) -> None:
    """Neighbours in a bar are far apart in colour, and all others at least to be told from each other."""
    seen = [lab(SEEN_BY[eyes] @ light(colour)) for colour in PARTS.values()]
    assert min(np.linalg.norm(a - b) for a, b in itertools.pairwise(seen)) > 25
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 10


@pytest.mark.parametrize("eyes", SEEN_BY)
def test_curves_are_told_apart(eyes: str) -> None:
    """By colour, or where colours are close by dashes and by markers, which differ for all of the first ten."""
    styles = [curve_style(number) for number in range(10)]
    assert len({each["marker"] for each in styles}) == 10
    for one, other in itertools.combinations(styles, 2):
        apart = np.linalg.norm(np.subtract(*(lab(SEEN_BY[eyes] @ light(each["color"])) for each in (one, other))))
        assert apart > 10 or one["linestyle"] != other["linestyle"]


def test_a_curve_shows_below_another_one() -> None:
    """The next one is thinner or dashed, so that where both coincide two colours show."""
    styles = [curve_style(number) for number in range(10)]
    for below, above in itertools.pairwise(styles):
        assert below["color"] != above["color"]
        assert above["linewidth"] < below["linewidth"] or above["linestyle"] != "-"


@pytest.mark.parametrize("paper", ["#ffffff", "#1b1d21"])
def test_curves_show_on_paper_and_on_a_dark_screen(paper: str) -> None:
    """They differ in brightness from what is behind them."""
    assert min(contrast(curve_style(number)["color"], paper) for number in range(10)) > 2
    assert contrast(COLOURS["yellow"], "#000000") > 7, "numbers in bars"


def test_pages_follow_the_screen() -> None:
    """A page says that it fits a phone and that it can be dark; a wide table scrolls by itself."""
    page = html_page("title", html_table(["a"], [["1"]]))
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert '<div class="table"><table>' in page


def test_pictures_follow_the_screen(tmp_path: Path) -> None:
    """An SVG turns dark where the screen is, and what stands for text in it is text."""
    pytest.importorskip("matplotlib")
    drawn, (axes,) = plots.panels(1, "a title")
    axes.plot([1, 2], [1, 2], label="a curve", **curve_style(0))
    axes.set(xlabel="size (bytes)", ylabel="time (seconds)")
    plots.write(drawn, str(tmp_path / "picture.svg"))
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert 'fill: #ffffff"' in text, "the paper, which the rule for dark screens replaces"
    assert ">time (seconds)</text>" in text


@pytest.mark.parametrize(
    "name", ["ring", "steps", "speed", "local", "simulate-resnet50", "simulate-bert", "simulate-1b3"]
)
def test_pictures_of_the_documentation_follow_the_screen(name: str) -> None:
    """They are drawn by what draws pictures now."""
    docs = Path(__file__).parents[2] / "docs"
    assert "prefers-color-scheme: dark" in (docs / f"{name}.svg").read_text(encoding="utf-8")
