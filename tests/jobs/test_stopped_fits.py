"""The examples that train by a `fit` of Keras or Lightning, asked to stop in the midst of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import launching
import pytest
from documents import ROOT
from launching import RINGREDUCE, needs

STOPPED = os.EX_TEMPFAIL
STEPS = 15  # of both programs: three epochs of five
#: Whom to warn in which step and how, in a job each: within an epoch, in its last step, in its first.
MOMENTS = [
    ("1@7:SIGTERM",),
    ("0@3:SIGTERM", "1@7:launcher SIGUSR1"),
    ("1@4:SIGUSR1", "0@8:launcher SIGTERM"),
    ("0@9:SIGTERM", "1@12:SIGUSR1"),
    ("1@0:SIGTERM", "0@13:SIGUSR1"),
]
PROGRAMS = [("lightning", ""), ("keras", "jax"), ("keras", "tensorflow"), ("keras", "torch")]


def train(folder: Path, program: Path, backend: str, *warnings: str) -> int:
    """Train on two ranks until the job ends; return its status."""
    folder.mkdir(exist_ok=True)
    fit = launching.PROGRAMS / "stopped_fit.py"
    # A step and what is written then take long where other tests have the cores.
    line = (RINGREDUCE, "run", "--elastic", "--grace", 60, "-np", 2, sys.executable, fit, folder, program, *warnings)
    settings = {"KERAS_BACKEND": backend or None, "TF_CPP_MIN_LOG_LEVEL": "3"}
    path = os.pathsep.join([str(fit.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = launching.run(*line, PYTHONPATH=path, **settings)
    assert done.returncode in (0, STOPPED), done.stderr
    return done.returncode


@pytest.mark.parametrize(
    ("framework", "backend", "warnings"),
    [
        pytest.param(*program, warnings, marks=() if at == number == 0 else pytest.mark.thorough)
        for number, program in enumerate(PROGRAMS)
        for at, warnings in enumerate(MOMENTS)
    ],
)
def test_a_fit_that_is_stopped_goes_on_behind_its_last_batch(
    tmp_path: Path, framework: str, backend: str, warnings: tuple[str, ...]
) -> None:
    """No step is lost or repeated, and the weights have the bits of a training that nothing has stopped."""
    needs(*filter(None, (framework, backend)))
    program = ROOT / "examples" / f"{framework}_stops.py"
    assert train(tmp_path / "undisturbed", program, backend) == 0
    statuses = [train(tmp_path / "stopped", program, backend, *warnings) for _ in range(len(warnings) + 1)]
    assert statuses == [STOPPED] * len(warnings) + [0]
    for rank in range(2):
        assert len((tmp_path / "stopped" / f"steps-{rank}").read_text().split()) == STEPS
    assert (tmp_path / "stopped" / "weights").read_bytes() == (tmp_path / "undisturbed" / "weights").read_bytes()
