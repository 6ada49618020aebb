"""What the verdict on a job would be if its steps had taken longer: tests and benchmarks make short jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ringreduce.observe.pace import Slow
from ringreduce.observe.verdicts import Figures, HostUse, Verdict, judge

__all__ = ["judge_as_long"]


def judge_as_long(report: Mapping[str, Any]) -> list[Verdict]:
    """Return what is found in the report of a job (JSON), as if its steps had gone on like that for an hour."""
    figures = {each.name: report[each.name] for each in fields(Figures)}
    slow = figures["slow"]
    figures |= {
        "steps_s": 3600.0,
        "hosts": {int(rank): host for rank, host in figures["hosts"].items()},
        "slow": None if slow is None else Slow(**slow),
        "uses": [HostUse(**each) for each in figures["uses"]],
    }
    return judge(Figures(**figures))
