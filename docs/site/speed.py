"""Draw docs/speed.svg, the picture in the README, and docs/local.svg, from the tables of the pages of benchmarks.

python docs/site/speed.py            needs matplotlib ('.[plot]'); measures nothing
python docs/site/speed.py --check    exit with 1 if a picture was drawn from other figures than are there now
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from ringreduce.bench.plots import curve_style, panels, to_svg  # noqa: E402
from ringreduce.common.html_pages import COLOURS  # noqa: E402

#: What the picture calls the columns "over MPI" behind "2 ranks, shared" and "2 ranks, private", and which these are.
ALLREDUCE = {"communication buffers": 2, "private arrays": 4}
STEPS = ("no communication", "ringreduce", "MPI by hand", "DDP over Gloo")
OURS, OTHERS = (COLOURS["blue"], COLOURS["amber"]), COLOURS["grey"]
#: Of the curves of accuracy, the rows of the table in each panel; the first row is in both.
LOCAL = {"fewer exchanges": slice(1, 4), "late averages": slice(4, 7)}


def figures() -> dict[str, Any]:
    """Return the figures of the picture, from the pages of benchmarks: pairs of the lowest and the highest."""
    calls, training = (page_of(name) for name in ("benchmarks.md", "benchmarks_training.md"))
    head, *rows = table(calls, "Allreduce in place, float32")
    assert head[1:5] == ["2 ranks, shared", "over MPI", "2 ranks, private", "over MPI"], head
    steps, *models = table(training, "Training, 2 ranks")
    return {
        "allreduce": {name: {row[0]: span(row[column]) for row in rows} for name, column in ALLREDUCE.items()},
        "step": {row[0]: {name: span(row[steps.index(name)]) for name in STEPS} for row in models},
    }


def page_of(name: str) -> str:
    """Return the text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def table(page: str, section: str) -> list[list[str]]:
    """Return the cells of the first table of a section, without the line below its head."""
    _, _, text = page.partition(f"\n## {section}\n")
    assert text, f"the page of benchmarks has no section {section!r}"
    lines = next(part for part in text.partition("\n## ")[0].split("\n\n") if part.startswith("|")).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def span(text: str) -> list[float]:
    """Read ``3.2 to 6.3``, or one figure, as a pair."""
    ends = [float(each) for each in text.split(" to ")]
    return [ends[0], ends[-1]]


def accuracies() -> dict[str, list[float]]:
    """Return the percentages of the curves after each epoch, from the page of benchmarks, by method."""
    page = page_of("benchmarks_training.md")
    text = page[page.index("The CNN of `benchmarks/mnist.py`, 62 steps in an epoch") :]
    lines = next(part for part in text.split("\n\n") if part.startswith("|")).splitlines()[2:]
    rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]
    return {name: [float(each) for each in cells] for name, *cells in rows}


def draw_speed(drawn: dict[str, Any]) -> str:
    """Return the picture of the README."""
    figure, (above, below) = panels(2, "Two ranks on two cores; the lowest of several runs, and paler the highest")
    sizes = list(next(iter(drawn["allreduce"].values())))
    for number, (name, spans) in enumerate(drawn["allreduce"].items()):
        places = [each + 0.38 * (number - 0.5) for each in range(len(sizes))]
        bars(above, places, [spans[size] for size in sizes], OURS[number], name, "{:g}")
    above.axhline(1, color="#000000", linewidth=0.8, linestyle="--", label="MPI_Allreduce")
    above.set_xticks(range(len(sizes)), sizes)
    above.set(xlabel="size of the buffer of a rank", ylabel="times as fast as MPI_Allreduce", ylim=(0, 14.5))
    above.set_title("allreduce", fontsize=10)
    above.legend(frameon=False, loc="upper left", fontsize=8)
    groups = list(drawn["step"])
    for number, spans in enumerate(drawn["step"].values()):
        for place, step in enumerate(STEPS, 5 * number):
            bars(below, [place], [spans[step]], OURS[0] if step == "ringreduce" else OTHERS, None, "{:.0f}")
        below.text(5 * number + 1.5, 0.97, groups[number], transform=below.get_xaxis_transform(), ha="center", va="top")
    below.axvline(4, color="#999999", linewidth=0.8)
    below.set_xticks(
        [5 * number + each for number in range(len(groups)) for each in range(len(STEPS))],
        [name.replace(" ", "\n") for name in STEPS] * len(groups),
        fontsize=8,
    )
    below.set(ylabel="time of a training step (milliseconds)", ylim=(0, 275))
    below.set_title("training, by model", fontsize=10)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return to_svg(figure, json.dumps(drawn))


def draw_accuracies(found: dict[str, list[float]]) -> str:
    """Return the picture of accuracy over epochs."""
    figure, drawn = panels(len(LOCAL), "Accuracy of a CNN on 1000 other digits after each epoch; one seed, 4 ranks")
    names = list(found)
    for axes, (title, rows) in zip(drawn, LOCAL.items(), strict=True):
        for number, name in enumerate([names[0], *names[rows]]):
            axes.plot(range(1, len(found[name]) + 1), found[name], label=name, **curve_style(number))
        axes.set(xlabel="epoch", ylabel="right answers (%)", ylim=(80, 100), title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="lower right", fontsize=8)
    return to_svg(figure, json.dumps(found))


def bars(axes: Any, places: list[float], spans: list[list[float]], color: str, label: str | None, form: str) -> None:
    """Draw bars up to the lowest figure, paler ones from there to the highest, and write both on top."""
    low = [each[0] for each in spans]
    width = 0.36 if len(places) > 1 else 0.8
    axes.bar(places, low, width, color=color, label=label)
    axes.bar(places, [b - a for a, b in spans], width, bottom=low, color=color, alpha=0.5)
    for place, (a, b) in zip(places, spans, strict=True):
        text = form.format(a) if a == b else f"{form.format(a)}-{form.format(b)}"
        axes.text(place, b, text, ha="center", va="bottom", fontsize=7)


def main() -> int:
    """Draw or check; return the exit code."""
    pictures = {"speed.svg": (figures(), draw_speed), "local.svg": (accuracies(), draw_accuracies)}
    if "--check" in sys.argv[1:]:
        texts = [
            (escape(json.dumps(drawn)), (DOCS / name).read_text(encoding="utf-8"))
            for name, (drawn, _) in pictures.items()
        ]
        return int(not all(figures in picture for figures, picture in texts))
    for name, (drawn, draw) in pictures.items():
        (DOCS / name).write_text(draw(drawn), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
