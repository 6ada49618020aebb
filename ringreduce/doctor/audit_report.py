"""What an audit record says, for people: whether it is whole, its runs, and the commands that make one again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from ringreduce.audit.chain import Examination, is_signed
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, name_ranks
from ringreduce.common.keys import Secret
from ringreduce.common.quantities import plural
from ringreduce.common.settings import rows

T = TypeVar("T")

_CUT = "line {} was cut off: the process that wrote it was killed"
#: A package and its version, which pip can take for nothing else: not for an option, an address or a file.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*", re.ASCII)


def verdict(found: Examination, known: str | None, key: Secret | None = None) -> tuple[bool, list[str]]:
    """Return whether a record is whole, and lines that say so, or which line is wrong, and what cannot be known.

    Args:
        found: what it holds.
        known: the hash of a line that is to be there; None: none is known.
        key: has to have signed each line; and the last run has to have an end. None: signatures are not looked at.

    Raises:
        ConfigError: ``known`` is no hash.
    """
    if known is not None and not re.fullmatch("[0-9a-f]{64}", known):
        raise ConfigError(f"a hash has 64 characters, 0 to 9 and a to f, got {known!r}")
    if found.wrong is not None:
        why = "it, or the line before it, was changed, removed, inserted or moved after it was written"
        return False, [f"line {found.wrong} is wrong: {why}"]
    lines = found.lines
    worlds = dict.fromkeys(line["world"] for line in lines if line["event"] == "begin")
    endless = worlds.keys() - {line["world"] for line in lines if line["event"] == "end"}
    wrong = []
    if key is not None:
        unsigned = [line["line"] for line in lines if not is_signed(line, key)]
        if unsigned:
            wrong.append(f"line {unsigned[0]} is not signed by the key {key.fingerprint}")
        if not lines or lines[-1]["world"] in endless:
            wrong.append("the last run has no end")
    place = next((line["line"] for line in lines if line["hash"] == known), None)
    if known is not None and place is None:
        wrong.append(f"no line has the hash {known}")
    texts = [f"whole: {len(lines)} lines, of {plural(len(worlds), 'run')}", *map(_CUT.format, found.cut)]
    texts += [f"run {_shown(world)} has no end: it goes on, or it was cut off" for world in worlds if world in endless]
    if key is not None and not wrong:
        texts.append(f"signed: each line, by the key {key.fingerprint}")
    if place is not None:
        texts.append(f"line {place} has the hash {known}: all lines up to there are as they were when that was noted")
    elif lines:
        anew = "" if key is not None else ", or all hashes were made anew (--key FILE, if lines are signed)"
        keep = f"Keep the last hash elsewhere, and look for it later: --has {lines[-1]['hash']}"
        texts.append(f"not known: whether lines were removed at the end{anew}. {keep}")
    return not wrong, wrong + texts


def show(found: Examination) -> None:
    """Print the runs of a record."""
    console = Console(highlight=False)
    for world in dict.fromkeys(line["world"] for line in found.lines):
        lines = [line for line in found.lines if line["world"] == world]
        console.print(Text(f"run {_shown(world)}, {_shown(lines[0]['time'][:19])}", style="bold"), soft_wrap=True)
        table = [row for line in lines for row in _rows(line)]
        width = max(len(name) for name, _ in table)
        for name, text in table:
            bad = name.partition(" ")[2] in ("refused", "failed")
            console.print(Text(f"  {name:<{width}}  {text}", style="red" if bad else ""), soft_wrap=True)
    for number in found.cut:
        console.print(Text(_CUT.format(number), style="red"))


def _rows(line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is shown of a line: a name, and a text."""
    facts = line["facts"]
    if line["event"] != "begin":
        who = "" if line["ranks"] == [0] else f"{_ranks(line['ranks'])}: "
        is_good_end = line["event"] == "end" and facts.get("error", "") is None
        yield f"{_shown(line['time'][11:19])} {_shown(line['event'])}", who + ("well" if is_good_end else _pairs(facts))
        return
    hosts, packages = _parts(facts, "hosts", "packages")
    yield "command", shlex.join(map(_shown, _part(facts, "command", list)))
    places = ", ".join(f"{_shown(host)} ({_ranks(_part(hosts, host, list))})" for host in hosts)
    yield "ranks", f"{_shown(facts.get('size'))} on {places}"
    if facts.get("restart"):
        yield "restart", _shown(facts["restart"])
    for name in ("allocation", "script", "repository", "versions"):
        if part := _part(facts, name, dict):
            yield name, _pairs(part)
    yield "packages", f"{len(_part(packages, 'versions', dict))}, sha256 {_shown(packages.get('sha256'))}"
    yield "settings", " ".join(_variables(_part(facts, "settings", dict))) or "as they come"


def commands(found: Examination, world: str) -> Iterator[str]:
    """Yield the lines of a shell program that makes a run again, and in comments what it lacks.

    Args:
        found: what the record holds.
        world: how the token of the run begins; empty: the last one.

    Raises:
        ConfigError: there is no such run.
    """
    firsts = [line for line in found.lines if line["event"] == "begin" and line["world"].startswith(world)]
    if not firsts:
        raise ConfigError(f"the record has no run whose token begins with {world!r}")
    facts = firsts[-1]["facts"]
    script, repository, packages = _parts(facts, "script", "repository", "packages")
    yield f"# run {_shown(firsts[-1]['world'])} of {_shown(firsts[-1]['time'])}"
    root = f"{_part(repository, 'path', str)}/"
    # What git cannot take for an option is a commit.
    has_commit = re.fullmatch("[0-9a-f]{7,64}", str(repository.get("commit"))) is not None
    if has_commit:
        yield f"git clone -- {_word(repository.get('url') or repository.get('path'))} again && cd again"
        yield f"git checkout {repository['commit']}"
    if script:
        checked = f"{_shown(script.get('sha256'))}  {_shown(script.get('path')).removeprefix(root)}"
        yield f"echo {_word(checked)} | sha256sum --check"
    inside = f"{_part(facts, 'folder', str)}/".partition(root)[2]
    if has_commit and inside:
        yield f"cd -- {_word(inside)}"
    python = _shown(_part(facts, "versions", dict).get("Python"))
    numbers = re.match(r"[0-9]+\.[0-9]+", python, re.ASCII)
    yield f"python{numbers[0] if numbers else 3} -m venv venv && . venv/bin/activate  # it was Python {python}"
    elsewhere = _part(packages, "elsewhere", list)
    listed = {
        f"{name}=={version}": name not in elsewhere and _REQUIREMENT.fullmatch(f"{name}=={version}")
        for name, version in _part(packages, "versions", dict).items()
    }
    if any(listed.values()):
        yield f"pip install {' '.join(_word(package) for package in listed if listed[package])}"
    yield from _start(facts)
    for line in found.lines:
        if line["world"] == firsts[-1]["world"] and line["event"] in ("configuration", "data"):
            yield f"# {line['event']}: {_pairs(line['facts'])}"
    lacks = {name: repository[name] for name in ("unknown", "difference", "untracked") if repository.get(name)}
    if others := [package for package in listed if not listed[package]]:
        lacks["packages"] = others
    if lacks:
        yield f"# cannot be had: {_pairs(lacks)}"


def _start(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command that starts the program, with its settings; nothing if a record made by hand names none."""
    words = [_shown(word) for word in _part(facts, "command", list)]
    if not words or words[0].startswith("-"):  # It would be an option of `ringreduce run`.
        return
    if re.fullmatch("python[0-9.]*", words[0].rpartition("/")[2]):
        words[0] = "python"  # of the new environment
    hosts, settings = _parts(facts, "hosts", "settings")
    if facts.get("size") != 1:
        counts = ",".join(f"{_shown(name)}:{len(_part(hosts, name, list))}" for name in hosts)
        words = ["ringreduce", "run", "-np", _shown(facts.get("size")), *(["-H", counts] * (len(hosts) > 1)), *words]
    report = ["RINGREDUCE_REPORT=again.json"] * bool(settings.get("report"))  # to be compared with the first one
    yield " ".join([*_variables(settings), *report, *map(shlex.quote, words)])


def _variables(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that are not as they come, as variables of the environment."""
    standard = Config()
    changed = []
    for name, _, row in rows(Config):
        usual = getattr(standard, name)
        value = settings.get(name, usual)
        if not row.observes and value != usual:
            text = str(int(value)) if isinstance(value, bool) else "0" if value is None else _shown(value)
            changed.append(f"{row.variable}={_word(text)}")
    return changed


def _parts(facts: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    return [_part(facts, name, dict) for name in names]


def _part(facts: Any, name: str, kind: type[T]) -> T:
    """Return an entry, or an empty one: who can write a record can make lines that say anything."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, kind) else kind()


def _pairs(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{_shown(name)}={_shown(value)}" for name, value in facts.items())


def _ranks(ranks: list[Any]) -> str:
    return name_ranks(sorted(each for each in ranks if type(each) is int))


def _shown(value: Any) -> str:
    """Return a value of JSON in one line; what terminals would act on is escaped."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _word(value: Any) -> str:
    return shlex.quote(_shown(value))
