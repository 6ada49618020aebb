"""Checks made of what programs said that know nothing of checks. Pure functions."""

from __future__ import annotations

import json
import re
from typing import Any

from gpu.report import Check, ranks

#: Percent that the example gets right after two epochs; on CPUs 94 to 96, with 4 ranks, 2 and 1.
ACCURACY = 90.0
#: What pytest says of a test that took tensors on a GPU, and passed.
_PASSED = re.compile(r"^PASSED \S+(?:\[cuda[-\]]|::test_streams_that_race\b|::test_devices_must_agree\b)", re.MULTILINE)
_ENDED = re.compile(r"^=+ (.*\bin [\d.]+s.*?) =+$", re.MULTILINE)


def judge_example(said: str, nranks: int) -> list[Check]:
    """Judge the example by its last lines; a rank on its own agrees with itself, too."""
    lines = [line.strip() for line in said.splitlines() if line.startswith(("weights:", "test accuracy:"))]
    detail = "; ".join(lines) or "it said nothing of that"
    found = re.search(r"^test accuracy: (\d+(?:\.\d+)?)%", "\n".join(lines), re.MULTILINE)
    name = f"the example's test accuracy, {ranks(nranks)}"
    same = f"weights: bitwise identical on {ranks(nranks)}" in lines
    return [
        Check(f"the example's weights are bitwise equal on {ranks(nranks)}", same, detail),
        Check.at_least(name, float(found[1]), ACCURACY, "%") if found else Check(name, False, detail),
    ]


def judge_tests(said: str, nranks: int) -> list[Check]:
    """Judge a run of pytest over ranks, which also ends well if all that needs a GPU was skipped."""
    together = said.count(f"world: {ranks(nranks)}, this is rank ") == 1
    passed = len(_PASSED.findall(said))
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED") and "needs a GPU" in line]
    how = "; ".join([f"{passed} passed on a GPU", *_ENDED.findall(said)[-1:], *skipped[:1]])
    return [
        Check(f"ranks, {nranks} of them in one world", together, "as the tests say"),
        Check("tests of tensors on a GPU", passed > 0 and not skipped, how),
    ]


def judge_training(found: str | None, nranks: int) -> list[Check]:
    """Judge and state what ``benchmarks/training.py`` left as JSON."""
    try:
        content: dict[str, Any] = json.loads(found or "{}")
    except ValueError:
        content = {}
    config, times = content.get("config", {}), content.get("median_ms", {})
    label = f"training step, {ranks(nranks)}"
    how = f"{config.get('model')} of {config.get('tensors')} tensors on {config.get('device')}"
    checks = [
        Check(f"ranks, {nranks} of them in one world", config.get("ranks") == nranks, str(config.get("ranks"))),
        Check(f"{label}: on a GPU", config.get("device") == "cuda", how),
        Check(f"{label}: weights agree", content.get("weights_agree") is True, "over ranks and contenders"),
        *(Check.stated(f"{label}: {name}", time, "ms", how) for name, time in times.items()),
    ]
    name = f"{label}: times as fast as DistributedDataParallel over Gloo"
    if {"ringreduce", "gloo"} <= times.keys():
        return [*checks, Check.stated(name, times["gloo"] / times["ringreduce"], "x")]
    return [*checks, Check(name, False, "not measured")]
