"""Loss and throughput while an example trains, as a picture (`pip install matplotlib`); used by the others."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path


class Curves:
    """What one rank, the one that draws, knows of a training that all take part in.

    Args:
        what: is counted for the throughput, as in "digits".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.throughputs: list[float] = []
        self._busy_s, self._counted = 0.0, 0

    def add(self, step: int, loss: float, counted: int, busy_s: float) -> None:
        """Note the loss after some steps, how much all ranks have been trained on so far, and for how long."""
        self.steps.append(step)
        self.losses.append(loss)
        self.throughputs.append((counted - self._counted) / (busy_s - self._busy_s))
        self._busy_s, self._counted = busy_s, counted

    def save(self, path: str, title: str) -> None:
        """Draw both over the steps."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(10, 4), layout="constrained")
        labelled = ("training loss", self.losses), (f"{self.what}/s, all ranks", self.throughputs)
        for axes, (label, values) in zip(figure.subplots(1, 2), labelled, strict=True):
            axes.plot(self.steps, values, marker="o", markersize=3)
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(visible=True, alpha=0.3)
            axes.set_ylim(0, 1.08 * max(values, default=1.0))
        figure.suptitle(title)
        figure.savefig(path, dpi=150)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--plot FILE`` to the options of an example."""

    def picture(path: str) -> str:
        if importlib.util.find_spec("matplotlib") is None:
            raise argparse.ArgumentTypeError("pictures need matplotlib: pip install matplotlib")
        if Path(path).suffix not in (".png", ".svg", ".pdf"):
            raise argparse.ArgumentTypeError(f"{path} does not end in .png, .svg or .pdf")
        if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{path} cannot be written: it is a folder, or there is none for it")
        return path

    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw loss and throughput: .png, .svg or .pdf")
