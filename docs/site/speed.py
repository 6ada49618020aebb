"""Draw docs/speed.svg, the picture in the README, from the tables of docs/benchmarks.md. Measures nothing.

python docs/site/speed.py            needs matplotlib ('.[plot]')
python docs/site/speed.py --check    exit with 1 if the picture was drawn from other figures than are there now
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1]
PICTURE = DOCS / "speed.svg"

#: What the picture calls the columns "over MPI" behind "2 ranks, shared" and "2 ranks, private", and which these are.
ALLREDUCE = {"communication buffers": 2, "private arrays": 4}
STEPS = ("no communication", "ringreduce", "MPI by hand", "DDP over Gloo")
OURS, OTHERS = ("#00796b", "#80cbc4"), "#b0bec5"


def figures() -> dict[str, Any]:
    """Return the figures of the picture, from the page of benchmarks: pairs of the lowest and the highest."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    head, *rows = table(page, "Allreduce in place, float32")
    assert head[1:5] == ["2 ranks, shared", "over MPI", "2 ranks, private", "over MPI"], head
    steps, *models = table(page, "Training, 2 ranks")
    return {
        "allreduce": {name: {row[0]: span(row[column]) for row in rows} for name, column in ALLREDUCE.items()},
        "step": {row[0]: {name: span(row[steps.index(name)]) for name in STEPS} for row in models},
    }


def table(page: str, section: str) -> list[list[str]]:
    """Return the cells of the first table of a section, without the line below its head."""
    _, _, text = page.partition(f"\n## {section}\n")
    assert text, f"docs/benchmarks.md has no section {section!r}"
    lines = next(part for part in text.partition("\n## ")[0].split("\n\n") if part.startswith("|")).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def span(text: str) -> list[float]:
    """Read ``3.2 to 6.3``, or one figure, as a pair."""
    ends = [float(each) for each in text.split(" to ")]
    return [ends[0], ends[-1]]


def draw(drawn: dict[str, Any]) -> None:
    """Write the picture; its description holds the figures."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "ringreduce", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    sizes = list(next(iter(drawn["allreduce"].values())))
    for number, (name, spans) in enumerate(drawn["allreduce"].items()):
        places = [each + 0.38 * (number - 0.5) for each in range(len(sizes))]
        bars(left, places, [spans[size] for size in sizes], OURS[number], name, "{:g}")
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xticks(range(len(sizes)), sizes)
    left.set_title("allreduce: times as fast as MPI_Allreduce")
    left.legend(frameon=False, loc="upper left")
    left.set_ylim(0, 14)
    for number, spans in enumerate(drawn["step"].values()):
        places = [5 * number + each for each in range(len(STEPS))]
        for place, step in zip(places, STEPS, strict=True):
            bars(right, [place], [spans[step]], OURS[0] if step == "ringreduce" else OTHERS, None, "{:.0f}")
    right.set_xticks(
        [5 * number + each for number in range(len(drawn["step"])) for each in range(len(STEPS))],
        [name.replace(" ", "\n") for name in STEPS] * len(drawn["step"]),
        fontsize=6.5,
    )
    right.set_title(" and ".join(drawn["step"]) + ": milliseconds of a training step")
    right.set_ylim(0, 255)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None, "Description": json.dumps(drawn)})


def bars(axes: Any, places: list[float], spans: list[list[float]], color: str, label: str | None, form: str) -> None:
    """Draw bars up to the lowest figure, paler ones from there to the highest, and write both on top."""
    low = [each[0] for each in spans]
    width = 0.36 if len(places) > 1 else 0.8
    axes.bar(places, low, width, color=color, label=label)
    axes.bar(places, [b - a for a, b in spans], width, bottom=low, color=color, alpha=0.45)
    for place, (a, b) in zip(places, spans, strict=True):
        text = form.format(a) if a == b else f"{form.format(a)}-{form.format(b)}"
        axes.text(place, b, text, ha="center", va="bottom", fontsize=6.5)


def main() -> int:
    """Draw or check; return the exit code."""
    drawn = figures()
    if "--check" in sys.argv[1:]:
        return int(escape(json.dumps(drawn)) not in PICTURE.read_text(encoding="utf-8"))
    draw(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
