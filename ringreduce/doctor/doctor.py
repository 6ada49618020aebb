"""``doctor``: what this machine and this job offer, what is wrong there, and what to do about it.

Every rank collects `ringreduce.doctor.facts`; those of all ranks become `ringreduce.doctor.findings`; these are
printed.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from logging.handlers import BufferingHandler
from pathlib import Path

import ringreduce
from ringreduce.collectives.choice.tuning import Key
from ringreduce.common.config import VERSION
from ringreduce.common.errors import MismatchError, RingReduceError
from ringreduce.common.launch import launch
from ringreduce.common.quantities import plural
from ringreduce.doctor.bindings import Binding, ask
from ringreduce.doctor.facts import Facts, WorldFacts, collect, stranger
from ringreduce.doctor.findings import LEVELS, Finding, by_rank, examine

_HEARD_S = 0.2  # between two signs of life of rank 0


def look() -> tuple[Mapping[str, Sequence[Finding]], list[Facts]] | None:
    """Collect what the ranks see, and return the findings and the facts that they were made of. Collective.

    None: another rank speaks for all.
    """
    foreign = stranger(os.environ)
    world = WorldFacts(nodes=((launch().rank,),)) if foreign else _start_world()
    mine = collect(world, ringreduce.rank() if ringreduce.is_initialized() else launch().rank, foreign)
    ranks = ringreduce.allgather_object(mine) if ringreduce.is_initialized() else [mine]
    ranks[0] = replace(ranks[0], bindings=_ask_bindings(mine.packages))
    return None if mine.rank or launch().rank else (examine(ranks), ranks)


def _ask_bindings(packages: Mapping[str, str]) -> Mapping[str, Binding]:
    """Return what the bindings say of private parts, if this is rank 0. Collective.

    That takes seconds, or minutes on a slow disk, in which the other ranks hear from rank 0 again and again: they would
    give it up otherwise.
    """
    if not ringreduce.is_initialized():
        return {} if launch().rank else ask(packages)
    with ThreadPoolExecutor(1) as pool:
        asking = [pool.submit(ask, packages)] if ringreduce.rank() == 0 else []
        while not all(ringreduce.allgather_object(not wait(asking, timeout=_HEARD_S).not_done)):
            pass
        return asking[0].result() if asking else {}


def _start_world() -> WorldFacts:
    """Start the world, and keep what is said meanwhile; a failure becomes a complaint. Collective."""
    logger = logging.getLogger("ringreduce")
    heard = BufferingHandler(1 << 20)
    heard.setLevel(logging.WARNING)
    logger.addHandler(heard)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            ringreduce.init()
    except RingReduceError as error:
        return WorldFacts(nodes=((launch().rank,),), complaint=_complaint(error))
    finally:
        logger.removeHandler(heard)
    said = [record.getMessage() for record in heard.buffer]
    said += [str(each.message) for each in warned if issubclass(each.category, RuntimeWarning)]
    here = ringreduce.world()
    config = ringreduce.config()
    table = Path(config.tuning) / Key(here.topology, here.library).file_name if config.tuning else None
    return WorldFacts(
        nodes=here.hosts.nodes,
        shared=here.topology == here.hosts,
        config=config,
        tuning=str(table or ""),
        tuned=table is not None and os.path.exists(table),
        said=tuple(said),
    )


def _complaint(error: RingReduceError) -> str:
    """Write an error in one line."""
    if isinstance(error, MismatchError):
        return f"the ranks disagree: {by_rank(error.values, len(error.values))}"
    return " ".join(str(error).split())


def to_text(
    found: Mapping[str, Sequence[Finding]], paint: Callable[[str, str], str] = lambda text, colour: text
) -> str:
    """Write the report: a line for each finding, and one more for each remedy.

    Args:
        found: section -> findings.
        paint: returns a text in a colour.
    """
    lines = [f"ringreduce {VERSION}"]
    width = max(len(each.topic) for row in found.values() for each in row)
    for section, row in found.items():
        lines += ["", section] if row else []
        for each in row:
            level = paint(f"{each.level:<7}", LEVELS[each.level])
            lines.append(f"  {level}  {each.topic:<{width}}  {each.value}")
            lines += [f"  {'':7}  {'':{width}}  -> {each.remedy}"] if each.remedy else []
    levels = [each.level for row in found.values() for each in row]
    counts = [plural(levels.count(level), level) for level in ("problem", "warning") if level in levels]
    return "\n".join([*lines, "", (", ".join(counts) or "No problems") + ".", ""])


def to_json(found: Mapping[str, Sequence[Finding]], ranks: Sequence[Facts]) -> str:
    """Write the findings, and the facts that they were made of, as a JSON document."""
    findings = [{"section": section, **asdict(each)} for section, row in found.items() for each in row]
    document = {"version": VERSION, "findings": findings, "ranks": [asdict(facts) for facts in ranks]}
    return json.dumps(document, indent=2) + "\n"
