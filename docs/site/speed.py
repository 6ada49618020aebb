"""Draw docs/steps.svg and docs/speed.svg (of the README) from docs/benchmarks.md, local.svg and quorum.svg from JSON.

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

#: The names in the picture of the columns "over MPI" behind "2 ranks, shared" and "2 ranks, private", and their places.
ALLREDUCE = {"communication buffers": 2, "private arrays": 4}
STEPS = ("ringreduce", "MPI by hand", "DDP over Gloo")
MODELS = {"MLP": "MLP, 25 M parameters", "CNN": "CNN, 80 convolutions"}
_RUNS = "2 ranks on 2 cores, lowest and (paler) highest of several runs"
OURS, OTHERS = (COLOURS["blue"], COLOURS["amber"]), COLOURS["grey"]
#: Of the curves of accuracy, the rows of the table in each panel; the first row is in both.
LOCAL = {"fewer exchanges": slice(1, 4), "delayed gradients": slice(4, 7)}


def allreduces() -> dict[str, Any]:
    """Return how many times as fast as MPI's an allreduce is, lowest and highest, by kind of memory and size."""
    head, *rows = table(page_of("benchmarks.md"), "Allreduce in place, float32")
    assert head[1:5] == ["2 ranks, shared", "over MPI", "2 ranks, private", "over MPI"], head
    return {name: {row[0]: span(row[column]) for row in rows} for name, column in ALLREDUCE.items()}


def steps() -> dict[str, Any]:
    """Return the milliseconds of a training step, lowest and highest, by model and what reduces the gradients."""
    head, *models = table(page_of("benchmarks.md"), "Training, 2 ranks")
    return {row[0]: {name: span(row[head.index(name)]) for name in STEPS} for row in models}


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
    """Return the percentages of the curves after each epoch, by method: docs/site/accuracies.json."""
    found: dict[str, list[float]] = json.loads((DOCS / "site" / "accuracies.json").read_text(encoding="utf-8"))
    return found


def losses() -> dict[str, list[list[float]]]:
    """Return seconds and losses after outer steps, by method: docs/site/quorum.json."""
    found: dict[str, list[list[float]]] = json.loads((DOCS / "site" / "quorum.json").read_text(encoding="utf-8"))
    return found


def draw_allreduces(drawn: dict[str, Any]) -> str:
    """Return the picture of calls in the README."""
    figure, (axes,) = panels(1, f"An allreduce, {_RUNS}")
    sizes = list(next(iter(drawn.values())))
    for number, (name, spans) in enumerate(drawn.items()):
        places = [each + 0.38 * (number - 0.5) for each in range(len(sizes))]
        bars(axes, places, [spans[size] for size in sizes], OURS[number], name)
    axes.axhline(1, color="#000000", linewidth=0.8, linestyle="--", label="MPI_Allreduce of Open MPI")
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set(xlabel="size of the buffer of a rank", ylabel="times as fast as MPI_Allreduce", ylim=(0, 14.5))
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return to_svg(figure, json.dumps(drawn))


def draw_steps(drawn: dict[str, Any]) -> str:
    """Return the first picture of the README: a bar for each rival, and a group of bars for each model."""
    figure, (axes,) = panels(1, f"A training step, {_RUNS}")
    figure.set_size_inches(figure.get_figwidth(), 2.6)
    places = [5 * number + each for number in range(len(drawn)) for each in range(len(STEPS))]
    for place, (name, (low, high)) in zip(places, (each for by in drawn.values() for each in by.items()), strict=True):
        color = OURS[0] if name == "ringreduce" else OTHERS
        axes.barh(place, low, 0.8, color=color)
        axes.barh(place, high - low, 0.8, left=low, color=color, alpha=0.5)
        axes.text(high + 3, place, as_text(low, high), va="center", fontsize=8)
    axes.set_yticks(places, list(STEPS) * len(drawn), fontsize=8)
    for number, model in enumerate(drawn):
        axes.text(0, 5 * number - 0.6, MODELS[model], fontsize=8, va="bottom", fontweight="bold")
    axes.set(xlabel="milliseconds", xlim=(0, 255), ylim=(5 * len(drawn) - 2.4, -1.8))
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


def draw_losses(found: dict[str, list[list[float]]]) -> str:
    """Return the picture of losses over time."""
    figure, (axes,) = panels(1, "Loss on other digits; 8 replicas, one of which is stopped for 30 % of the time")
    for number, (name, curve) in enumerate(found.items()):
        seconds, loss = zip(*curve, strict=True)
        axes.plot(seconds, loss, label=name, **curve_style(number))
    axes.set(xlabel="seconds", ylabel="cross entropy", yscale="log", ylim=(0.22, 2.4))
    axes.set_yticks([0.25, 0.5, 1, 2], ["0.25", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    return to_svg(figure, json.dumps(found))


def bars(axes: Any, places: list[float], spans: list[list[float]], color: str, label: str) -> None:
    """Draw bars up to the lowest figure, paler ones from there to the highest, and write both on top."""
    low = [each[0] for each in spans]
    axes.bar(places, low, 0.36, color=color, label=label)
    axes.bar(places, [b - a for a, b in spans], 0.36, bottom=low, color=color, alpha=0.5)
    for place, (a, b) in zip(places, spans, strict=True):
        axes.text(place, b, as_text(a, b), ha="center", va="bottom", fontsize=7)


def as_text(low: float, high: float) -> str:
    """Write the lowest and the highest figure, or the one that both are."""
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def main() -> int:
    """Draw or check; return the exit code."""
    pictures = {
        "steps.svg": (steps(), draw_steps),
        "speed.svg": (allreduces(), draw_allreduces),
        "local.svg": (accuracies(), draw_accuracies),
        "quorum.svg": (losses(), draw_losses),
    }
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
