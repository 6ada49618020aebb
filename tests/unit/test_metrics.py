"""What calls add up to, in the forms that other tools read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np

import ringreduce as rr
from ringreduce.common.instruments import Tally
from ringreduce.observe.seen.metrics import Metrics


def found() -> Metrics:
    return Metrics({"allreduce": Tally(3, 84, 0.5), "barrier": Tally(1, 0, 0.25)}, 7, 2, 1.5, 0.5, 0.75, None, 0.0)


def test_scalars_hold_everything():
    """One number for each counter; what there is none of is NaN, and null in JSON."""
    scalars = found().scalars()
    assert scalars["allreduce/calls"] == 3
    assert scalars["allreduce/nbytes"] == 84
    assert scalars["barrier/seconds"] == 0.25
    assert (scalars["operations"], scalars["overlap"], scalars["waited_s"]) == (7, 1 / 3, 0.75)
    assert math.isnan(scalars["late_rank"])
    assert json.loads(found().to_json()) == {**scalars, "late_rank": None}


def test_tensorboard_gets_every_scalar():
    """By the method that its writers have."""
    written = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name, step] = value

    found().add_to(Writer(), 40)
    assert written["ringreduce/allreduce/seconds", 40] == 0.5
    assert len(written) == len(found().scalars())


def test_values_of_the_program_are_there_too():
    """As scalars under a name of their own, and as a family with the name as a label."""
    metrics = replace(found(), values={"loss": 0.25})
    assert metrics.scalars()["value/loss"] == 0.25
    assert 'ringreduce_value{name="loss",rank="5"} 0.25' in metrics.to_openmetrics(5).splitlines()


def test_openmetrics_text():
    """Families with their type before them, counters that end in _total, and an end."""
    lines = found().to_openmetrics(5).splitlines()
    assert lines[-1] == "# EOF"
    assert 'ringreduce_collective_bytes_total{collective="allreduce",rank="5"} 84' in lines
    assert 'ringreduce_overlapped_seconds_total{rank="5"} 0.5' in lines
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == 7
    for line in lines[:-1]:
        name = line.split()[2] if line.startswith("#") else line.partition("{")[0].removesuffix("_total")
        assert name in types


def test_a_world_counts():
    """The forms are those of a world, too."""
    rr.init()
    rr.allreduce(np.ones(3))
    assert rr.metrics().scalars()["allreduce/calls"] >= 1
    rr.shutdown()
