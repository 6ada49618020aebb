"""What an audit record says, for people: whether it is whole, its runs, and the commands that make one again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from enum import Enum
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
#: Parts of the facts of `begin`.
_OF_BEGIN = ("hosts", "script", "repository", "packages", "allocation")
#: Events by which a program names its configuration and its data.
_NAMED = ("configuration", "data")
#: A package and its version, which pip can take for nothing else: not for an option, an address or a file.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*", re.ASCII)
#: Settings that change no number of a training.
_OF_THIS_RUN = {"audit", "dump", "log_level", "otlp", "report", "status", "timeline", "tuning"}


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
        return False, [f"line {found.wrong} is wrong: it was changed, removed, inserted or moved after it was written"]
    lines = found.lines
    unsigned = [] if key is None else [line["line"] for line in lines if not is_signed(line, key)]
    place = next((line["line"] for line in lines if line["hash"] == known), None)
    worlds = dict.fromkeys(line["world"] for line in lines if line["event"] == "begin")
    ended = {line["world"] for line in lines if line["event"] == "end"}
    endless = [each for each in worlds if each not in ended]
    wrong = []
    if key is not None and not lines:
        wrong.append(f"no line is signed by the key {key.fingerprint}")
    if key is not None and unsigned:
        more = f" (and {len(unsigned) - 1} more)" if len(unsigned) > 1 else ""
        why = "who wrote it did not have that key, or the chain was made anew"
        wrong.append(f"line {unsigned[0]} is not signed by the key {key.fingerprint}{more}: {why}")
    if known is not None and place is None:
        wrong.append(f"no line has the hash {known}: lines were removed at the end, or the chain was made anew")
    if key is not None and lines and lines[-1]["world"] in endless:
        wrong.append("the last run has no end")
    said = [f"whole: {len(lines)} lines, of {plural(len(worlds), 'run')}", *map(_CUT.format, found.cut)]
    said += [
        f"run {_shown(each)} has no end: it goes on, it was killed, or lines were removed at the end"
        for each in endless
    ]
    if place is not None:
        said.append(f"line {place} has the hash {known}: all lines up to there are as they were when that was noted")
    elif known is None and lines:
        keep = f"Keep the last hash elsewhere, and look for it later: --has {lines[-1]['hash']}"
        lacks = "without the key (--key FILE)" if any("signature" in each for each in lines) else "as nothing is signed"
        lacks += ": whether lines were removed at the end, or all hashes were made anew"
        if key is not None:
            said.append(f"signed: each line, by the key {key.fingerprint}")
            lacks = "whether runs were removed at the end as a whole"
        said.append(f"not known{': ' if key is not None else ', '}{lacks}. {keep}")
    return not wrong, wrong + said


def show(found: Examination) -> None:
    """Print the runs of a record."""
    console = Console(highlight=False)
    for world in dict.fromkeys(line["world"] for line in found.lines):
        lines = [line for line in found.lines if line["world"] == world]
        console.print(Text(f"run {_shown(world)}, {_shown(lines[0]['time'][:19])}", style="bold"), soft_wrap=True)
        rows = [row for line in lines for row in _rows(line)]
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            bad = name.partition(" ")[2] in ("refused", "failed")
            console.print(Text(f"  {name:<{width}}  {text}", style="red" if bad else ""), soft_wrap=True)
    for number in found.cut:
        console.print(Text(_CUT.format(number), style="red"))


def _rows(line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is shown of a line: a name, and a text."""
    facts = line["facts"]
    if line["event"] != "begin":
        who = "" if line["ranks"] == [0] else f"{_ranks(line['ranks'])}: "
        text = ", ".join(f"{_shown(name)}={_shown(value)}" for name, value in facts.items())
        text = "well" if line["event"] == "end" and facts.get("error", "") is None else text
        yield f"{_shown(line['time'][11:19])} {_shown(line['event'])}", f"{who}{text}"
        return
    command = _part(facts, "command", list)
    hosts, script, repository, packages, allocation = _parts(facts, *_OF_BEGIN)
    placed = (f"{_shown(host)} ({_ranks(_part(hosts, host, list))})" for host in hosts)
    checkout = f"{_shown(repository.get('path'))}, commit {_shown(repository.get('commit'))}"
    checkout += ", clean" if repository.get("clean") else ", changed"
    yield "command", shlex.join(map(_shown, command))
    yield "ranks", f"{_shown(facts.get('size'))} on {', '.join(placed)}"
    if facts.get("restart"):
        yield "restart", _shown(facts["restart"])
    if allocation:
        yield "allocation", _pairs(allocation)
    if script:
        yield "script", f"{_shown(script.get('path'))}, sha256 {_shown(script.get('sha256'))}"
    yield "repository", f"unknown: {_shown(repository['unknown'])}" if "unknown" in repository else checkout
    if repository.get("difference"):
        yield "difference", f"sha256 {_shown(repository['difference'])}"
    if repository.get("untracked"):
        yield "untracked", _shown(repository["untracked"])
    yield "versions", _pairs(_part(facts, "versions", dict))
    yield "packages", f"{len(_part(packages, 'versions', dict))}, sha256 {_shown(packages.get('sha256'))}"
    yield "settings", " ".join(_variables(_part(facts, "settings", dict))) or "as they come"


def commands(found: Examination, world: str) -> list[str]:
    """Return the lines of a shell program that makes a run again.

    Args:
        found: what the record holds.
        world: how the token of the run begins; empty: the last one.

    Raises:
        ConfigError: there is no such run.
    """
    firsts = [line for line in found.lines if line["event"] == "begin" and line["world"].startswith(world)]
    if not firsts:
        which = f"whose token begins with {world!r}" if world else "at all"
        raise ConfigError(f"the record has no run {which}")
    first = firsts[-1]
    facts = first["facts"]
    named = [line for line in found.lines if line["world"] == first["world"] and line["event"] in _NAMED]
    lacks = list(_lacks(facts))
    if not any("seed" in name.lower() for each in named if each["event"] == _NAMED[0] for name in each["facts"]):
        lacks.append("the seed: the program has not named it, as by rr.audit('configuration', seed=...)")
    if facts.get("restart") or first is not found.lines[0]:
        lacks.append("the state that the run began with, if it went on from the commits of an earlier one")
    return [
        f"# run {_shown(first['world'])} of {_shown(first['time'])}",
        *_preparation(facts),
        *filter(None, [_start(facts)]),  # a record that was made by hand may name no command
        *(f"# {each['event']}: {_pairs(each['facts'])}" for each in named),
        *(f"# cannot be had: {each}" for each in lacks),
    ]


def _preparation(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the commands before the program: the checkout, and the packages."""
    _, script, repository, packages, _ = _parts(facts, *_OF_BEGIN)
    root = f"{_part(repository, 'path', str)}/"
    has_commit = _has_commit(repository)
    if has_commit:
        yield f"git clone -- {_word(repository.get('url') or repository.get('path'))} again && cd again"
        yield f"git checkout {repository['commit']}"
    if script:
        line = f"{_shown(script.get('sha256'))}  {_shown(script.get('path')).removeprefix(root)}"
        yield f"echo {_word(line)} | sha256sum --check"
    inside = f"{_part(facts, 'folder', str)}/".partition(root)[2]
    if has_commit and inside:
        yield f"cd -- {_word(inside)}"
    python = _shown(_part(facts, "versions", dict).get("Python"))
    numbers = re.match(r"[0-9]+\.[0-9]+", python, re.ASCII)
    yield f"python{numbers[0] if numbers else 3} -m venv venv && . venv/bin/activate  # it was Python {python}"
    elsewhere = _part(packages, "elsewhere", list)
    versions = _part(packages, "versions", dict)
    listed = [f"{name}=={version}" for name, version in versions.items() if name not in elsewhere]
    if listed := list(map(_word, filter(_REQUIREMENT.fullmatch, listed))):
        yield f"pip install {' '.join(listed)}"


def _start(facts: Mapping[str, Any]) -> str:
    """Return the command that starts the program, with its settings; nothing if it names no program."""
    words = [_shown(each) for each in _part(facts, "command", list)]
    if not words or words[0].startswith("-"):  # or it would be an option of `ringreduce run`
        return ""
    if re.fullmatch("python[0-9.]*", words[0].rpartition("/")[2]):
        words[0] = "python"  # of the new environment
    hosts, settings = _parts(facts, "hosts", "settings")
    if facts.get("size") != 1:
        counts = ",".join(f"{_shown(name)}:{len(_part(hosts, name, list))}" for name in hosts)
        words = ["ringreduce", "run", "-np", _shown(facts.get("size")), *(["-H", counts] * (len(hosts) > 1)), *words]
    report = ["RINGREDUCE_REPORT=again.json"] * bool(settings.get("report"))  # to be compared with the first one
    return " ".join([*_variables(settings), *report, *map(shlex.quote, words)])


def _lacks(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a record does not hold of the program."""
    repository, packages = _parts(facts, "repository", "packages")
    if not _has_commit(repository):
        yield f"the program's version: {_shown(repository.get('unknown', 'the record does not say it'))}"
    if repository.get("difference"):
        digest = _shown(repository["difference"])
        yield f"changes that were not committed; git diff --binary HEAD | sha256sum said {digest}"
    if untracked := _part(repository, "untracked", list):
        yield f"files that git does not have: {', '.join(map(_shown, untracked))}"
    if elsewhere := _part(packages, "elsewhere", list):
        yield f"packages that came from a folder or a repository: {', '.join(map(_shown, elsewhere))}"
    others = [
        f"{_shown(name)} {_shown(version)}"
        for name, version in _part(packages, "versions", dict).items()
        if not _REQUIREMENT.fullmatch(f"{name}=={version}")
    ]
    if others:
        yield f"packages with names or versions that pip does not have: {', '.join(others)}"
    yield "the MPI library, drivers and the machine, unless packages bring them; secrets in the environment"


def _variables(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that are not as they come, as variables of the environment."""
    standard = Config()
    changed = []
    for name, _, row in rows(Config):
        usual = getattr(standard, name)
        usual = usual.value if isinstance(usual, Enum) else usual
        value = settings.get(name, usual)
        if name not in _OF_THIS_RUN and value != usual:
            text = str(int(value)) if isinstance(value, bool) else "0" if value is None else _shown(value)
            changed.append(f"{row.variable}={_word(text)}")
    return changed


def _has_commit(repository: Mapping[str, Any]) -> bool:
    """Return whether a commit is named, by what git cannot take for an option."""
    return re.fullmatch("[0-9a-f]{7,64}", str(repository.get("commit"))) is not None


def _parts(facts: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    return [_part(facts, name, dict) for name in names]


def _part(facts: Any, name: str, kind: type[T]) -> T:
    """Return an entry, or an empty one: who can write a record can make lines that say anything."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, kind) else kind()


def _pairs(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{_shown(name)} {_shown(value)}" for name, value in facts.items())


def _ranks(ranks: list[Any]) -> str:
    return name_ranks(sorted(each for each in ranks if type(each) is int))


def _shown(value: Any) -> str:
    """Return a value of JSON in one line; what terminals would act on is escaped."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _word(value: Any) -> str:
    return shlex.quote(_shown(value))
