"""Run a program that trains by a `fit` of Keras or Lightning, and ask it to stop in the midst of that.

    ringreduce run -np 2 stopped_fit.py FOLDER PROGRAM RANK@STEP:HOW ...

HOW is as in `stopped_training.py`, and a rank that has warned the launcher waits until it has heard of it. Steps count
from the first job on: after each, a rank writes a line to a file of its own in FOLDER. In the end, rank 0 writes the
bits of the weights of the program's ``model``.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import stopped_training

import ringreduce as rr
from ringreduce import runtime

FOLDER, PROGRAM = Path(sys.argv[1]), sys.argv[2]
WARNINGS = sys.argv[3:]


def after_step(number: int) -> None:
    """Write down that a step is done, and warn who is to be warned in it."""
    path = FOLDER / f"steps-{rr.rank()}"
    done = len(path.read_text().split()) if path.exists() else 0
    with path.open("a") as file:
        file.write(f"{number}\n")
    due = [each for each in WARNINGS if each.startswith(f"{rr.rank()}@{done}:launcher")]
    first = due and not (FOLDER / f"warned-{rr.rank()}@{done}").exists()
    stopped_training.warn_once(FOLDER, rr.rank(), done)
    while first and not runtime._process.stop.made:
        time.sleep(0.01)  # the launcher passes it on, and does not say when


def watch_keras() -> None:
    import keras

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            after_step(batch)

    fit = keras.Model.fit

    def watched(*arguments: Any, callbacks: list[Any], **options: Any) -> Any:
        return fit(*arguments, callbacks=[Watch(), *callbacks], **options)

    keras.Model.fit = watched


def watch_lightning() -> None:
    import lightning

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            after_step(batch_idx)

    trainer = lightning.Trainer

    def watched(*arguments: Any, callbacks: list[Any], **options: Any) -> Any:
        return trainer(*arguments, callbacks=[Watch(), *callbacks], enable_progress_bar=False, **options)

    lightning.Trainer = watched  # type: ignore[misc,assignment]


def main() -> None:
    is_keras = "import keras" in Path(PROGRAM).read_text()
    (watch_keras if is_keras else watch_lightning)()
    os.chdir(FOLDER)
    model = runpy.run_path(PROGRAM, run_name="__main__")["model"]
    if rr.rank() == 0:
        weights = model.get_weights() if is_keras else [each.detach().numpy() for each in model.state_dict().values()]
        (FOLDER / "weights").write_bytes(b"".join(each.tobytes() for each in weights))


if __name__ == "__main__":
    main()
